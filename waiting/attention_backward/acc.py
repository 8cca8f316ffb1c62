"""Errors of gradients against float64, beside those of the same computation in the type, at 256."""
import sys, torch
from cudnn.sdpa import SdpaForward, SdpaBackward
compile_only = len(sys.argv) > 1
for dtype in (torch.bfloat16, torch.float16):
    for causal in (False, True):
        for s, det in ((513, False), (1024, False), (1024, True)):
            torch.manual_seed(3)
            q, k, v, do = (torch.randn(2, s, 4, 256, device="cuda").to(dtype).transpose(1, 2) for _ in range(4))
            o, lse = torch.empty_like(q), torch.empty(2, 4, s, device="cuda")
            g = [torch.empty_like(x) for x in (q, k, v)]
            f = SdpaForward(q, k, v, o, lse, is_causal=causal); f.compile()
            b = SdpaBackward(q, k, v, o, do, lse, *g, is_causal=causal, deterministic=det); b.compile()
            if compile_only: continue
            f.execute(q, k, v, o, lse); b.execute(q, k, v, o, do, lse, *g)
            hid = torch.ones(s, s, device="cuda", dtype=torch.bool).triu(1) if causal else torch.zeros(s, s, device="cuda", dtype=torch.bool)
            def naive(kind):
                x = [t.to(kind).detach().requires_grad_() for t in (q, k, v)]
                w = ((x[0] @ x[1].transpose(-1, -2)) * 256 ** -0.5).masked_fill(hid, -torch.inf).softmax(-1)
                return torch.autograd.grad(w @ x[2], x, do.to(kind))
            want, rough = naive(torch.float64), naive(dtype)
            text = []
            for n, a, r, w in zip(("dq", "dk", "dv"), g, rough, want):
                ea, er = (a.double() - w), (r.double() - w)
                text.append(f"{n} norm {float(ea.norm() / er.norm()):.2f} max {float(ea.abs().max() / er.abs().max()):.2f}")
            print(dtype, "causal" if causal else "full", s, "det" if det else "", "error over that of the type:", *text, flush=True)
