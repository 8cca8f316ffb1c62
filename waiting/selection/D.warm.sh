python3 $G/bench3.py build New &
python3 $G/bench3.py build NewGated &
python3 $G/bench3.py build Landed,LandedGated &
wait
python3 - <<'P'
import torch
from cudnn.bench import nsa, nsa_peers
t = nsa.tensors((1024, 64, 4, 128), False)
with torch.no_grad():
    nsa_peers.fla(64, 16, 512)["selection"](t.q.detach(), t.k.detach(), t.v.detach(), t.lists)
    print(nsa_peers.ours(64, 16, 512)["selection"](t.q.detach(), t.k.detach(), t.v.detach(), t.lists).shape)
torch.cuda.synchronize()
P
