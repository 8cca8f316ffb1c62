"""Times objects in $OBJ with FlashAttention-4 and cuDNN in turns: bench.py SECONDS PLAN..., PLAN = case=var,var:d,fa4,cudnn"""
import glob, json, os, statistics, sys, time
import torch
from cases import CASES
from cudnn_kernels import compiler
OBJ, O = os.environ["OBJ"], os.environ["O"]
def log(*a): print(*a, flush=True)
def data(case):
    b, s, hq, hk, d, dv, mask = CASES[case]
    torch.manual_seed(1)
    t = lambda h, w: torch.randn(b, s, h, w, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return t(hq, d), t(hk, d), t(hk, dv), t(hq, dv)
def flops(case):
    b, s, hq, hk, d, dv, mask = CASES[case]
    seen = s * s / (2 if mask != "full" else 1)
    if mask.startswith("w"):
        hidden = max(s - int(mask[1:]) - 1, 0); seen -= hidden ** 2 / 2
    return 2.0 * b * hq * seen * (3 * d + 2 * dv)
def forward(case, q, k, v):
    """O and LSE, by our forward kernel."""
    from cudnn.sdpa import SdpaForward
    mask = CASES[case][6]
    o = torch.empty_like(v if q.shape[1] == v.shape[1] else q, dtype=q.dtype)
    o = torch.empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3], device="cuda", dtype=q.dtype).transpose(1, 2)
    lse = torch.empty(q.shape[:3], device="cuda")
    opts = {"is_causal": mask != "full"}
    if mask.startswith("w"): opts["window_size"] = (int(mask[1:]), -1)
    a = SdpaForward(q, k, v, o, lse, **opts); a.compile(); a.execute(q, k, v, o, lse)
    return o, lse
def ours(case, var, q, k, v, o, do, lse):
    file = f"{OBJ}/{var.replace('@', '_' + case).replace(':', '_')}" if "@" in var else f"{OBJ}/{var.split(':')[0]}_{case}{'_d' if var.endswith(':d') else ''}"
    info = json.load(open(file + ".json"))
    f = compiler.load(open(file + ".o", "rb").read())
    given = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v),
             "scale_softmax": q.shape[-1] ** -0.5, "right": 0, "left": info["left"], "softcap": 0.0, "multiprocessors": 132,
             "workspace": torch.empty(max(info["workspace"], 400 << 20 if case == "x" else 0), dtype=torch.uint8, device="cuda"), "stream": torch.cuda.current_stream().cuda_stream, **info["split"]}
    args = [given[x] for x in info["slots"]]
    def run(): f(*args)
    run.results = [given[x] for x in ("dq", "dk", "dv")]
    run.keep = (f, given)
    return run
def fa4(case, q, k, v, do):
    from flash_attn.cute import flash_attn_func
    mask = CASES[case][6]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    kw = {"causal": mask == "causal"}
    if mask.startswith("w"): kw["window_size"] = (int(mask[1:]), 0)
    out = flash_attn_func(*(x.transpose(1, 2) for x in leaves), **kw)
    out = out[0] if isinstance(out, tuple) else out
    g = do.transpose(1, 2)
    def run():
        run.results = torch.autograd.grad(out, leaves, g, retain_graph=True)
    return run
def cudnn_(case, q, k, v, do):
    causal = CASES[case][6] == "causal"
    r = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=q.shape[-1] ** -0.5)
    o, lse, cq, ck, mq, mk, seed, off = r[:8]
    def run():
        run.results = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(do, q, k, v, o, lse, seed, off, None, cq, ck, mq, mk, 0.0, causal, scale=q.shape[-1] ** -0.5)
    return run
def exact(case, q, k, v, do):
    """dq, dk, dv of the last head of the last batch in float64 (in parts of rows)."""
    b, s, hq, hk, d, dv, mask = CASES[case]
    q, k, v, do = (x[-1, -1].double() for x in (q, k, v, do))
    dq, dk, dv_ = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    keys, scale = torch.arange(s, device="cuda"), d ** -0.5
    for i in range(0, s, 1024):
        rows = keys[i:i + 1024]
        x = q[rows] @ k.T * scale
        hid = torch.zeros_like(x, dtype=torch.bool)
        if mask != "full": hid |= keys[None] > rows[:, None]
        if mask.startswith("w"): hid |= keys[None] < rows[:, None] - int(mask[1:])
        p = x.masked_fill(hid, -torch.inf).softmax(-1)
        dp = do[rows] @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        dq[rows] = scale * ds @ k; dk += scale * ds.T @ q[rows]; dv_ += p.T @ do[rows]
    return dq, dk, dv_
def build(plan):
    case, _, names = plan.partition("=")
    q, k, v, do = data(case)
    o, lse = forward(case, q, k, v)
    runs = {}
    for n in names.split(","):
        try:
            r = fa4(case, q, k, v, do) if n == "fa4" else cudnn_(case, q, k, v, do) if n == "cudnn" else ours(case, n, q, k, v, o, do, lse)
            r(); torch.cuda.synchronize(); runs[n] = r
        except Exception as e: log("FAILED", case, n, repr(e)[:300])
    if os.environ.get("CHECK", "1") == "1":
        want = exact(case, q, k, v, do)
        errs = {}
        for n, r in runs.items():
            got = [x[-1, -1] for x in r.results]
            errs[n] = [round(float((x.double() - w).norm() / w.norm()) * 1e3, 2) for x, w in zip(got, want)]
        log(case, "errors of dq dk dv, 1e-3:", errs)
    return runs
def time_case(case, runs, rounds, calls):
    found = {n: [] for n in runs}
    for r in runs.values(): r()
    for i in range(rounds):
        order = list(runs) if i % 2 == 0 else list(reversed(runs))
        for n in order:
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            runs[n](); a.record()
            for _ in range(calls): runs[n]()
            b.record(); found[n].append((a, b))
    torch.cuda.synchronize()
    f = flops(case); text = []
    for n, ev in found.items():
        t = sorted(a.elapsed_time(b) / calls for a, b in ev)
        m = statistics.median(t)
        text.append(f"{n} {f / m / 1e9:.0f} ({f / t[-1] / 1e9:.0f}-{f / t[0] / 1e9:.0f})")
    log(case, "|", " | ".join(text))
if __name__ == "__main__":
    plans = sys.argv[1:]
    built = {p.partition("=")[0]: build(p) for p in plans}
    log("ready"); open(f"{O}/ready", "w").close()
    while not os.path.exists(f"{O}/go"): time.sleep(0.1)
    t0 = time.time()
    for rep in range(int(os.environ.get("REPS", 2))):
        for case, runs in built.items(): time_case(case, runs, 8, 2)
        log("pass", rep, round(time.time() - t0, 1), "s")
    open(f"{O}/done", "w").close()
