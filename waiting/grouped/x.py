"""Configurations of small experts, in turns. x.py compile | go"""
import sys, os, time, statistics
src = open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "w.py")).read()
mode = sys.argv[1]
head = src.split("TSHAPE, PSHAPE")[0]
exec(head.replace("mode = sys.argv[1]", ""))
exec("class Nvml" + src.split("class Nvml")[1].split("def dense():")[0])
S64, S128 = (32768, 2816, 2048, 64), (65536, 1536, 2048, 128)
def zipf(shape): return tuple(peers.ends("zipf", shape[3], shape[0]))
P = dict(tile=(128, 128, 64), part=64, pingpong=True, cluster=(1, 2), strip=2)
def glu(shape, ends=()): return g.Ours(cudnn.GroupedGemmGlu, shape, ends=ends, checked=False)
def quant(shape): return g.Ours(cudnn.GroupedGemmQuant, shape, made=g.QUANTISED, checked=False)
def sums(shape): return g.Ours(cudnn.GroupedGemmQuant, shape, "fp8_128", checked=False)
GLU = {"ours": {}, "192 A": dict(cluster=(1, 2)), "128 A": P, "192 alone": dict(cluster=(1, 1))}
JOBS_ = []
for s in (S64, S128):
    JOBS_ += [("SwiGLU equal", s, lambda s=s: glu(s), GLU, 0.04), ("SwiGLU Zipf", s, lambda s=s: glu(s, zipf(s)), GLU, 0.04),
              ("factors per 128", s, lambda s=s: sums(s), {"ours": {}, "one buffer": dict(staged=1), "product": None}, 0.15),
              ("quantised", s, lambda s=s: quant(s), {"ours": {}, "A": dict(cluster=(1, 2)), "alone": dict(cluster=(1, 1)), "product": None}, 0.04)]
def compile_all():
    wanted = {}
    for title, shape, make, variants, _ in JOBS_:
        for name, change in variants.items():
            one = make() if change is not None else g.Ours(cudnn.GroupedGemm, shape)
            given, results = one.tensors("meta")
            for key in with_change(change or {}, lambda: one.object({**given, **results}, arch=g.ARCH).kernels()): wanted.setdefault(key, warm.Kernel(name, *key))
    t = time.time()
    for k, s in warm.warm(list(wanted.values()), cache.user(), int(os.environ.get("JOBS", "3"))): print(k.label, f"{s:.1f}", flush=True)
    print(len(wanted), "kernels", f"{time.time() - t:.1f}")
def go():
    for title, shape, make, variants, length in JOBS_:
        print(title, shape, flush=True); calls, first = {}, None
        one = make(); given, results = one.tensors("cuda"); out = results.get("d")
        for name, change in variants.items():
            try:
                if change is None:
                    other = g.Ours(cudnn.GroupedGemm, shape, checked=False); og, orr = other.tensors("cuda"); made = ready(other.object({**og, **orr})); named = {p: {**og, **orr}.get(x) for x, p in made.parameters.items()}
                else:
                    made = with_change(change, lambda: ready(one.object({**given, **results}))); named = {p: {**given, **results}.get(x) for x, p in made.parameters.items()}
                made.execute(**named); torch.cuda.synchronize()
                if change is not None:
                    now = out.clone().view(torch.uint8)
                    if first is None: first = now
                    elif not torch.equal(first, now): print("   differs:", name, (first != now).float().mean().item())
                calls[name] = lambda made=made, named=named: made.execute(**named)
            except Exception as error: print("  ", name, repr(error)[:300], flush=True)
        del first
        turns(calls, 12, length, 2.0 * shape[0] * shape[1] * shape[2], "product" if "product" in calls else "ours", limit=3)
        del calls, given, results, out; torch.cuda.empty_cache()
{"compile": compile_all, "go": go}[mode]()
