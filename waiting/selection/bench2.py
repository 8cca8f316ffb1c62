import os, sys, time, statistics
G = os.path.dirname(os.path.abspath(__file__)); sys.path[:0] = [G]
OBJ = os.path.join(os.environ.get("CUDNN_KERNEL_CACHE", "/tmp"), "nsaf2")
NAMES = sys.argv[2].split(",") if len(sys.argv) > 2 else []
def build(n):
    from cudnn_kernels import compiler, fakes
    import more
    c = more.configuration(n); path = os.path.join(OBJ, n + ".o")
    if os.path.exists(path): return
    f = compiler.compile_for("sm_90a", getattr(more, n)(c), *fakes.arguments(c))
    b = compiler.export(f)
    open(path + ".tmp", "wb").write(b); os.rename(path + ".tmp", path)
    print("built", n, flush=True)
if sys.argv[1] == "build":
    os.makedirs(OBJ, exist_ok=True)
    for n in NAMES:
        try: build(n)
        except BaseException as e: print("FAILED", n, repr(e)[:500], flush=True)
    sys.exit()
import torch
from cudnn_kernels import compiler
import cudnn, more
from cudnn.bench import nsa, nsa_peers
from cudnn.native_sparse_attention.selection.inverse import choosing_rows
from cudnn_kernels.signature import workspace_size
kernels = {}
for n in NAMES:
    if n == "operator": continue
    try: kernels[n] = compiler.load(open(os.path.join(OBJ, n + ".o"), "rb").read())
    except BaseException as e: print("missing", n, repr(e)[:200], flush=True)
SM = torch.cuda.get_device_properties(0).multi_processor_count
D = "cuda"
def setup(T, alike=False, backward=False):
    torch.manual_seed(1)
    t = nsa.tensors((T, 64, 4, 128), alike)
    x = lambda: torch.empty_like(t.q[0])
    g = {"q": t.q[0].detach(), "k": t.k[0].detach(), "v": t.v[0].detach(), "o": x(), "l": torch.empty(T, 64, device=D), "m": torch.empty(T, 64, device=D),
         "block_indices": t.lists[0], "block_counts": (t.lists[0] >= 0).sum(-1, dtype=torch.int32), "cum_seqlen_q": torch.tensor([0, T], dtype=torch.int32, device=D),
         "scale_softmax": 128 ** -0.5, "multiprocessors": SM, "workspace": torch.full((1 << 20,), 77, dtype=torch.uint8, device=D), "stream": torch.cuda.current_stream().cuda_stream,
         "compressed": torch.randn(T, 64, 128, device=D).bfloat16(), "near": torch.randn(T, 64, 128, device=D).bfloat16(), "gates": torch.rand(T, 64, 3, device=D).bfloat16()}
    if backward:
        g |= {"do": t.gradient[0], "lse": torch.empty(T, 64, device=D), "dq": x(), "dk": torch.empty_like(g["k"]), "dv": torch.empty_like(g["v"])}
        g["choosing"], g["choosing_ends"] = choosing_rows(g["block_indices"], g["block_counts"], g["cum_seqlen_q"], 64, True)
        c = more.configuration("BackwardTickets")
        g["workspace"] = torch.full((workspace_size(c.slots(), {"s": T, "choices": g["choosing"].shape[0]}),), 77, dtype=torch.uint8, device=D)
    return t, g
def call(n, g): kernels[n](*(g[s.name] for s in more.configuration(n).slots()))
def once(r):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); r(); b.record(); return a, b
def ms(pairs): return sorted(a.elapsed_time(b) for a, b in pairs)
if sys.argv[1] == "ncu":
    t, g = setup(65536)
    for n in NAMES: call(n, g)
    torch.cuda.synchronize(); sys.exit()
P = nsa_peers.fla(64, 16, 512)["selection"]; O = nsa_peers.ours(64, 16, 512)["selection"]
def perform(mode, names, T, alike, rounds):
    t, g = setup(T, alike, mode == "backward")
    def peer():
        with torch.no_grad(): return P(t.q.detach(), t.k.detach(), t.v.detach(), t.lists)
    def operator():
        with torch.no_grad(): return O(t.q.detach(), t.k.detach(), t.v.detach(), t.lists)
    fla = peer()[0]
    runs, base = {}, {}
    if mode == "backward":
        operator_o = operator(); g["o"].copy_(operator_o[0])
        from cudnn.ops import _nsa_attention as ops
        o, lse = ops.nsa_selection(t.q[0].detach(), t.k[0].detach(), t.v[0].detach(), t.lists[0], g["cum_seqlen_q"], 128 ** -0.5, 64)
        g["o"].copy_(o); g["lse"].copy_(lse)
    for n in [x for x in names if x in kernels]:
        outs = ("dq", "dk", "dv") if mode == "backward" else ("o",) if "Gated" in n else ("o", "l", "m")
        kind = "gated" if "Gated" in n else "plain"
        try:
            for x in outs: g[x].fill_(float("nan"))
            call(n, g); torch.cuda.synchronize()
        except BaseException as e:
            print("DEAD", n, repr(e)[:300], flush=True); continue
        found = [g[x].clone() for x in outs]
        base.setdefault(kind, found)
        err = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, base[kind])]
        same = []
        for _ in range(3): call(n, g); same.append(all(torch.equal(g[x], y) for x, y in zip(outs, found)))
        print(T, alike, n, "equal" if all(torch.equal(a, b) for a, b in zip(found, base[kind])) else "", ["%.1e" % e for e in err], "repeats", all(same),
              "" if mode == "backward" or kind == "gated" else "fla %.1e" % float((found[0].float() - fla.float()).norm() / fla.float().norm()), flush=True)
        runs[n] = lambda n=n: call(n, g)
    if "operator" in names: runs["operator"] = operator
    def report(what, n, x, f):
        m, p = statistics.median(x), statistics.median(f)
        print(f"T {T} {'alike' if alike else ''} {what:6s} {n:24s} {m:8.3f} ms [{x[0]:.3f} .. {x[-1]:.3f}]  fla {p:.3f}  ratio {p / m:.3f}", flush=True)
    if mode == "pairs":
        for again in range(2):
            for n, r in runs.items():
                for _ in range(2): peer(); r()
                torch.cuda.synchronize()
                a, b = [], []
                for _ in range(rounds): b.append(once(peer)); a.append(once(r))
                torch.cuda.synchronize()
                report("pairs", n, ms(a), ms(b))
    else:
        times = {n: [] for n in runs}; f = []
        for i in range(rounds + 1):
            for n, r in runs.items(): times[n].append(once(r))
            if mode == "turns": f.append(once(peer))
            torch.cuda.synchronize()
        f = ms(f[1:]) if f else [0.0]
        for n, x in times.items(): report(mode, n, ms(x[1:]), f)
for spec in sys.argv[3:]:
    mode, names, T, alike, rounds = spec.split(":")
    try: perform(mode, names.split(","), int(T), alike == "alike", int(rounds))
    except BaseException as e:
        import traceback; traceback.print_exc()
    torch.cuda.empty_cache()
