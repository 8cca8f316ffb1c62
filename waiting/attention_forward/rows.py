"""Rows: what is timed. python3 rows.py warm I N compiles; python3 rows.py run SECONDS times."""
import dataclasses, functools, inspect, itertools, math, os, statistics, sys, time, traceback
import torch
import cudnn
from cudnn.sdpa.fwd import api
from cudnn.sdpa import SdpaForward

ORIGINAL = api.configuration
OVER = {}
def configuration(*a, **k):
    return dataclasses.replace(ORIGINAL(*a, **k), **OVER)
api.configuration = configuration

T0 = time.time()
SEQS = [200, 8192, 1000, 3000, 4096, 512, 2048, 700, 5000, 1500, 300, 6000, 2500, 900]
A = {"ahead": True}
H = {"holds": True}
Q = {"q_in_registers": True}
def t(m, n, **k): return {"tile": (m, n), **k}
N = lambda **k: {"holds": False, **k}
# name, (b, s, hq, hk, d, dv), mask, packed lengths, kind, variants
P = sum(SEQS)
ROWS = [
 ("128 causal", (4,4096,16,16,128,128), "causal", None, "bf16", {"base": {}, "ahead": A, "ahead nohold": N(**A)}),
 ("128 full", (4,4096,16,16,128,128), "full", None, "bf16", {"base": {}, "ahead": A}),
 ("64 packed causal", (1,P,32,32,64,64), "causal", SEQS, "bf16", {"base": {}, "192x96 q": t(192,96,**Q), "192x112 q": t(192,112,**Q), "queue": {"queue": True}, "queue 96 q": t(192,96,queue=True,**Q)}),
 ("96 causal", (4,4096,16,16,96,96), "causal", None, "bf16", {"base": {}, "ahead": A, "128x128": t(128,128), "128x144 ahead": t(128,144,**A), "192x96 ahead": t(192,96,**A)}),
 ("96 full", (4,4096,16,16,96,96), "full", None, "bf16", {"base": {}, "ahead": A, "128x128": t(128,128), "128x160": t(128,160), "128x144 ahead": t(128,144,**A)}),
 ("64 causal", (4,4096,32,32,64,64), "causal", None, "bf16", {"base": {}, "ahead": A, "192x96 q ahead": t(192,96,**Q,**A), "192x96 q": t(192,96,**Q)}),
 ("64 full", (4,4096,32,32,64,64), "full", None, "bf16", {"base": {}, "ahead": A, "192x96 q ahead": t(192,96,**Q,**A)}),
 ("192/128 causal", (2,8192,16,16,192,128), "causal", None, "bf16", {"base": {}}),
 ("256 causal", (4,4096,8,8,256,256), "causal", None, "bf16", {"base": {}, "holds": H}),
 ("64 window", (1,16384,32,32,64,64), "window", None, "bf16", {"base": {}, "ahead": A, "q ahead": {**Q, **A}}),
 ("128 window", (1,16384,16,16,128,128), "window", None, "bf16", {"base": {}, "ahead": A}),
 ("96 window", (1,16384,16,16,96,96), "window", None, "bf16", {"base": {}, "ahead": A, "128x128 ahead": t(128,128,**A)}),
 ("192/192 causal", (4,4096,8,8,192,192), "causal", None, "bf16", {"base": {}, "128x96": t(128,96)}),
 ("192/192 full", (4,4096,8,8,192,192), "full", None, "bf16", {"base": {}}),
 ("128 packed causal fp8", (1,P,16,16,128,128), "causal", SEQS, "fp8", {"base": {}}),
 ("64 window fp8", (1,16384,32,32,64,64), "window", None, "fp8", {"base": {}}),
 ("256 window fp8", (1,16384,8,8,256,256), "window", None, "fp8", {"base": {}}),
 ("256 packed causal", (1,P,8,8,256,256), "causal", SEQS, "bf16", {"base": {}, "queue": {"queue": True}}),
 ("192/128 packed causal", (1,P,16,16,192,128), "causal", SEQS, "bf16", {"base": {}, "queue": {"queue": True}}),
 ("96 packed causal", (1,P,16,16,96,96), "causal", SEQS, "bf16", {"base": {}, "queue": {"queue": True}}),
 ("128 causal fp16", (4,4096,16,16,128,128), "causal", None, "fp16", {"base": {}, "holds": H}),
]
WINDOW = 1024
KIND = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}

def flops(row):
    _, (b, s, hq, hk, d, dv), mask, lens, *_ = row
    total = 0
    for n in lens or [s] * b:
        seen = n * n / (1 + (mask != "full"))
        if mask == "window":
            seen = n * n / 2 - max(n - WINDOW - 1, 0) ** 2 / 2
        total += 2 * seen * hq * (d + dv)
    return total

def tensors(row, device):
    _, (b, s, hq, hk, d, dv), mask, lens, kind, _ = row
    g = torch.Generator(device=device); g.manual_seed(1)
    def made(h, w):
        x = torch.randn(b, s, h, w, generator=g, device=device, dtype=torch.bfloat16).to(KIND[kind]) if device == "cuda" else torch.empty(b, s, h, w, dtype=KIND[kind])
        return x[0] if lens else x.transpose(1, 2)
    q, k, v = made(hq, d), made(hk, d), made(hk, dv)
    okind = torch.bfloat16 if kind == "fp8" else KIND[kind]
    ends = None
    if lens:
        ends = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)
        o = torch.full((s, hq, dv), math.nan, dtype=okind, device=device)
        lse = torch.full((s, hq), math.nan, device=device)
    else:
        o = torch.full((b, s, hq, dv), math.nan, dtype=okind, device=device).transpose(1, 2)
        lse = torch.full((b, hq, s), math.nan, device=device)
    return q, k, v, o, lse, ends

def ours(row, over, device):
    _, (b, s, hq, hk, d, dv), mask, lens, kind, _ = row
    q, k, v, o, lse, ends = tensors(row, device)
    opts = {"is_causal": mask != "full", "window_size": (WINDOW if mask == "window" else -1, -1)}
    extra, call = {}, {}
    if kind == "fp8":
        one = torch.ones((), device=device).expand(len(lens) if lens else b, hk)
        extra = {f"sample_descale_{x}": one for x in "qkv"}; call = {f"descale_{x}_tensor": one for x in "qkv"}
    OVER.clear(); OVER.update(over)
    a = SdpaForward(q, k, v, o, lse, *([ends] * 2 if lens else []), **opts, **extra, **({"arch": "sm_90a"} if device == "cpu" else {}))
    a.compile()
    OVER.clear()
    return functools.partial(a.execute, q, k, v, o, lse, *([ends] * 2 if lens else []), **call), (q, k, v, o, lse)

def flash(row):
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    _, (b, s, hq, hk, d, dv), mask, lens, kind, _ = row
    q, k, v, o, lse, ends = tensors(row, "cuda")
    w = {"causal": mask == "causal", "window_size": (WINDOW, 0) if mask == "window" else (None, None)}
    if lens:
        w |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        names = inspect.signature(flash_attn_varlen_func).parameters
        w |= {x: max(lens) for x in ("max_seqlen_q", "max_seqlen_k") if x in names}
        f = functools.partial(flash_attn_varlen_func, q, k, v, **w)
    else:
        f = functools.partial(flash_attn_func, *(x.transpose(1, 2) for x in (q, k, v)), **w)
    def run():
        with torch.no_grad():
            r = f()
        return r[0] if isinstance(r, tuple) else r
    return run

def exact(row, q, k, v):
    """o and lse of head 0 and the last, of the first and last sequence, some rows: list of (where, o, lse)."""
    _, (b, s, hq, hk, d, dv), mask, lens, kind, _ = row
    found = []
    seqs = [0, (len(lens) if lens else b) - 1] + ([1] if lens else [])
    starts = [0, *itertools.accumulate(lens)] if lens else None
    for i in sorted(set(seqs)):
        for h in {0, hq - 1}:
            if lens:
                x, y, z = (u[starts[i]:starts[i + 1], hh].double() for u, hh in ((q, h), (k, h * hk // hq), (v, h * hk // hq)))
            else:
                x, y, z = (u[i, hh].double() for u, hh in ((q, h), (k, h * hk // hq), (v, h * hk // hq)))
            n = x.shape[0]
            rows = torch.arange(0, n, max(1, n // 700), device="cuda")
            rows = torch.unique(torch.cat([rows, torch.tensor([n - 1], device="cuda")]))
            sc = x[rows] @ y.T * d ** -0.5
            keys = torch.arange(n, device="cuda")
            if mask != "full": sc.masked_fill_(keys[None] > rows[:, None], -math.inf)
            if mask == "window": sc.masked_fill_(keys[None] < rows[:, None] - WINDOW, -math.inf)
            found.append(((i, h, rows), sc.softmax(-1) @ z, sc.logsumexp(-1)))
    return found

def error(row, expected, o, lse):
    _, (b, s, hq, *_), mask, lens, kind, _ = row
    starts = [0, *itertools.accumulate(lens)] if lens else None
    worst, worst_l = 0.0, 0.0
    for (i, h, rows), eo, el in expected:
        fo = o[starts[i] + rows, h] if lens else o[i, h, rows]
        fl = lse.view(hq, -1)[h, starts[i] + rows] if lens else lse[i, h, rows]
        worst = max(worst, ((fo.double() - eo).norm() / eo.norm()).item())
        worst_l = max(worst_l, (fl.double() - el).abs().max().item())
    if not bool(torch.isfinite(o.float()).all() & torch.isfinite(lse).all()): worst = math.nan
    return worst, worst_l

def warm(i, n):
    todo = [(row, name) for row in ROWS for name in [*row[5], *["FA4"] * (row[4] == "bf16" and not row[0].startswith(("256 packed", "192/128 packed")))]]
    for row, name in todo[i::n]:
        try:
            if name == "FA4": flash(row)(); torch.cuda.synchronize(); torch.cuda.empty_cache()
            else: ours(row, row[5][name], "cpu")
        except Exception as e: print("WARM", row[0], name, repr(e)[:300], flush=True)

def bench(limit, rounds=7, burst=12e-3):
    for row in ROWS:
        if time.time() - T0 > limit: print("out of time before", row[0]); break
        try:
            runs, notes = {}, {}
            expected = None
            for name, over in row[5].items():
                try:
                    t1 = time.time()
                    run, (q, k, v, o, lse) = ours(row, over, "cuda")
                    if expected is None: expected = exact(row, q, k, v)
                    run(); torch.cuda.synchronize()
                    e = error(row, expected, o, lse)
                    bad = not (e[0] < (0.06 if row[4] == "fp8" else 6e-3) and e[1] < (2e-2 if row[4] == "fp8" else 2e-4))
                    first = o.clone()
                    for _ in range(10): run()
                    torch.cuda.synchronize()
                    same = torch.equal(o.view(torch.int16), first.view(torch.int16))
                    notes[name] = f"err {e[0]:.1e} lse {e[1]:.1e}{'' if same else ' NOT REPEATED'}{' WRONG' if bad else ''} {time.time()-t1:.1f}s"
                    if not bad: runs[name] = run
                except Exception as ex: notes[name] = "FAILED " + repr(ex)[:200]
            if row[4] == "bf16" and not row[0].startswith(("256 packed", "192/128 packed")):
                try:
                    t1 = time.time(); f = flash(row); f(); torch.cuda.synchronize(); runs["FA4"] = f; notes["FA4"] = f"{time.time()-t1:.1f}s"
                except Exception as ex: notes["FA4"] = "FAILED " + repr(ex)[:200]
            names = list(runs); times = {x: [] for x in names}
            counts = {}
            ev = lambda: torch.cuda.Event(enable_timing=True)
            for x in names:
                a, b2 = ev(), ev(); a.record(); runs[x](); runs[x](); b2.record(); torch.cuda.synchronize()
                counts[x] = max(2, math.ceil(burst * 1e3 / (a.elapsed_time(b2) / 2)))
            for r in range(rounds):
                for x in (names if r % 2 == 0 else names[::-1]):
                    runs[x]()
                    a, b2 = ev(), ev(); a.record()
                    for _ in range(counts[x]): runs[x]()
                    b2.record(); torch.cuda.synchronize()
                    times[x].append(a.elapsed_time(b2) / counts[x])
            med = {x: statistics.median(v) for x, v in times.items()}
            tf = flops(row) / 1e9
            print(f"== {row[0]} {row[1]} {row[2]}", flush=True)
            for x in row[5] | {"FA4": 0}:
                if x in med:
                    spread = (max(times[x]) - min(times[x])) / med[x]
                    r1 = f" /base {med['base']/med[x]:.3f}" if "base" in med else ""
                    r2 = f" /FA4 {med['FA4']/med[x]:.3f}" if "FA4" in med else ""
                    print(f"   {x:16s} {med[x]:.4f} ms {tf/med[x]:7.1f} TF{r1}{r2} spread {spread:.3f}  {notes.get(x,'')}", flush=True)
                else: print(f"   {x:16s} {notes.get(x,'')}", flush=True)
        except Exception: traceback.print_exc()
        torch.cuda.empty_cache()
    print("done", time.time() - T0)

if __name__ == "__main__":
    if sys.argv[1] == "warm": warm(int(sys.argv[2]), int(sys.argv[3]))
    else: bench(float(sys.argv[2]))
