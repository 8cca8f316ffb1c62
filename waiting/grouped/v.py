"""Variants of configurations, in turns. Usage: v.py compile | sums | dense | tokens | ncu"""
import sys, os, time, statistics, ctypes, threading
from dataclasses import replace
sys.path.insert(0, os.path.join(os.environ.get("TREE", os.getcwd()), "benchmarks"))
import torch
import grouped_gemm_bars as g
import cudnn
from cudnn.bench import grouped as peers, order, declared
from cudnn.bench.operands import operands
from cudnn.fused.dense import blank
from cudnn.fused.gemm import OPERAND_TYPES
from cudnn.launch import cache, warm
from cudnn_kernels.sm90 import heuristics
mode = sys.argv[1]
old = heuristics.configure_gemm
CHANGE = {}
def patched(problem):
    c = old(problem)
    change = dict(CHANGE)
    if "strip" in change:
        c = replace(c, schedule=replace(c.schedule, strip=change.pop("strip")))
    return replace(c, **change)
heuristics.configure_gemm = patched
def with_change(change, make):
    CHANGE.clear(); CHANGE.update(change)
    try: return make()
    finally: CHANGE.clear()

def ready(made):
    made.compile()
    return made

SUMS = {  # shape: variants
    (32768, 2816, 2048, 64): {"base": {}, "s2r3": dict(staged=2, ring=3), "s2r4": dict(staged=2), "p32s2": dict(part=32, staged=2), "p32s4": dict(part=32, staged=4), "s2r4 A": dict(staged=2, cluster=(1, 2))},
    (65536, 1536, 2048, 128): {"base": {}, "s2r3": dict(staged=2, ring=3), "s2r4": dict(staged=2), "p32s2": dict(part=32, staged=2), "p32s4": dict(part=32, staged=4), "s2r4 B": dict(staged=2, cluster=(2, 1))},
    (32768, 28672, 4096, 8): {"base": {}, "s2r3": dict(staged=2, ring=3), "s2r4": dict(staged=2)},
    (32768, 4096, 7168, 64): {"base": {}, "s2r3": dict(staged=2, ring=3), "s2r4": dict(staged=2)},
    (32768, 7168, 2048, 8): {"base": {}, "s2r3": dict(staged=2, ring=3), "s2r4": dict(staged=2)},
}
DENSE = [  # api, type, shape, ring before
    ("GemmSwiglu", "bf16", (8192, 8192, 8192), 2), ("GemmSwiglu", "bf16", (4096, 28672, 4096), 2),
    ("GemmDsrelu", "bf16", (8192, 8192, 8192), 3), ("GemmSrelu", "bf16", (8192, 8192, 8192), 3), ("GemmSwiglu", "fp8", (8192, 8192, 8192), 4),
    ("GemmDswiglu", "bf16", (4096, 4096, 4096), 4), ("GemmDsrelu", "bf16", (4096, 4096, 4096), 3)]
TOKENS = {"ours": {}, "128x256 s16": dict(tile=(128, 256, 64), cluster=(2, 1), strip=16), "k128": dict(tile=(256, 128, 128))}
ALL = dict(strip=11)

def one_sums(shape):
    m, n, k, e = shape
    return g.Ours(cudnn.GroupedGemmQuant, shape, "fp8_128", checked=False)
def one_tokens(shape):
    return g.Ours(cudnn.GroupedGemm, shape, transposed=True, checked=False)
TSHAPE, TALL = (32768, 4096, 28672, 8), (33792, 4096, 28672, 4)
def dense_object(api, kind, shape, device, arch=None):
    k = OPERAND_TYPES[kind]
    tensors = blank(api, (*shape, 1), k, device)
    for spec in api.tensors:  # inputs beside operands that may be needed
        pass
    return api(**api.samples(tensors), **({"arch": arch} if arch else {})), tensors

def compile_all():
    wanted = {}
    def add(label, make):
        for key in make(): wanted.setdefault(key, warm.Kernel(label, *key))
    def of(one):
        given, results = one.tensors("meta")
        return one.object({**given, **results}, arch=g.ARCH).kernels()
    for shape, variants in SUMS.items():
        for name, change in variants.items(): add(name, lambda: with_change(change, lambda: of(one_sums(shape))))
        add("product", lambda: of(g.Ours(cudnn.GroupedGemm, shape)))
    for name, change in TOKENS.items(): add(name, lambda: with_change(change, lambda: of(one_tokens(TSHAPE))))
    add("all", lambda: with_change(ALL, lambda: of(one_tokens(TALL))))
    for api, kind, shape, ring in DENSE:
        for change in ({}, {"ring": ring}):
            add(api, lambda: with_change(change, lambda: dense_object(getattr(cudnn, api), kind, shape, "meta", g.ARCH)[0].kernels()))
    start = time.time()
    for kernel, s in warm.warm(list(wanted.values()), cache.user(), int(os.environ.get("JOBS", "3"))):
        print(kernel.label, f"{s:.1f}", flush=True)
    print(len(wanted), "kernels", f"{time.time() - start:.1f}")

class Nvml:
    def __init__(self):
        self.l = ctypes.CDLL("libnvidia-ml.so.1"); self.l.nvmlInit_v2()
        self.h = ctypes.c_void_p(); self.l.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.h))
    def joules(self):
        v = ctypes.c_ulonglong(); self.l.nvmlDeviceGetTotalEnergyConsumption(self.h, ctypes.byref(v)); return v.value * 1e-3
    def clock(self):
        v = ctypes.c_uint(); self.l.nvmlDeviceGetClockInfo(self.h, 1, ctypes.byref(v)); return v.value

def burst(call, n):
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a.record()
    for _ in range(n): call()
    b.record(); b.synchronize()
    return a.elapsed_time(b) * 1e-3 / n

def turns(calls, rounds, length, flops, base, nvml=None, limit=1e9):
    est = {k: min(burst(c, 2) for _ in range(2)) for k, c in calls.items()}
    times, joules, clocks = ({k: [] for k in calls} for _ in range(3))
    names, begun = list(calls), time.time()
    for t in range(rounds):
        if time.time() - begun > limit and t > 3: break
        for i in order(len(names), t):
            k = names[i]; n = max(1, round(length / est[k]))
            if nvml is None:
                burst(calls[k], max(1, n // 5)); times[k].append(burst(calls[k], n)); continue
            burst(calls[k], max(1, n // 4))
            e0 = nvml.joules()
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            for _ in range(n): calls[k]()
            b.record(); cl = []
            while not b.query():
                cl.append(nvml.clock()); time.sleep(0.01)
            s = a.elapsed_time(b) * 1e-3; e1 = nvml.joules()
            times[k].append(s / n); joules[k].append((e1 - e0) / n); clocks[k].append(statistics.median(cl) if cl else 0)
    for k in names:
        f = flops[k] if isinstance(flops, dict) else flops
        bf = flops[base] if isinstance(flops, dict) else flops
        r = sorted(y / x * f / bf for x, y in zip(times[k], times[base]))
        s = statistics.median(times[k])
        more = ""
        if nvml:
            e = statistics.median(joules[k]); more = f"  {e / f * 1e12:.3f} pJ/op {e / s:.0f} W {statistics.median(clocks[k]):.0f} MHz"
        print(f"  {k:12s} {s * 1e6:9.1f} us {f / s * 1e-12:6.0f} TF  {statistics.median(r):.3f} of {base} [{r[0]:.3f} {r[-1]:.3f}]{more}", flush=True)

def sums():
    for shape, variants in SUMS.items():
        m, n, k, e = shape
        print("sums", shape, flush=True)
        calls, first = {}, None
        one = one_sums(shape)
        given, results = one.tensors("cuda")
        out = next(iter(results.values()))
        for name, change in variants.items():
            try:
                made = with_change(change, lambda: ready(one.object({**given, **results})))
                named = {p: {**given, **results}.get(x) for x, p in made.parameters.items()}
                out.zero_(); made.execute(**named); torch.cuda.synchronize()
                if first is None: first = out.clone()
                elif not torch.equal(out.view(torch.int16), first.view(torch.int16)): print("  ", name, "DIFFERS", (out.float() - first.float()).abs().max().item())
                calls[name] = lambda made=made, named=named: made.execute(**named)
            except Exception as error: print("  ", name, repr(error)[:300], flush=True)
        del first
        p = g.Ours(cudnn.GroupedGemm, shape, checked=False)
        pg, pr = p.tensors("cuda"); pm = p.object({**pg, **pr}); pm.compile()
        pn = {q: {**pg, **pr}.get(x) for x, q in pm.parameters.items()}
        calls["product"] = lambda: pm.execute(**pn)
        turns(calls, 10, 0.03, 2.0 * m * n * k, "product", limit=3.2)
        del calls, given, results, pg, pr, pn, out, pm; torch.cuda.empty_cache()

def dense():
    for api, kind, shape, ring in DENSE:
        try:
            print("dense", api, kind, shape, flush=True)
            a = getattr(cudnn, api); o = operands(kind, *shape)
            extra = declared.extras(a, o, shape[0], shape[1])
            calls = {name: with_change(change, lambda: declared.prepare(a, o, extra, True)) for name, change in (("old ring", {"ring": ring}), ("new ring", {}))}
            with torch.no_grad():
                got = [{x: y.clone() for x, y in c().items() if y is not None} for c in calls.values()]
            for x in got[0]:
                same = torch.equal(got[0][x].nan_to_num().float(), got[1][x].nan_to_num().float())
                if not same: print("  ", x, "differs")
            if kind == "bf16":
                mm = lambda: torch.matmul(o.a.plain, o.peer_b)
                try: mm(); calls["cuBLAS"] = mm
                except Exception as error: print("cublas", error)
            turns(calls, 12, 0.03, 2.0 * shape[0] * shape[1] * shape[2], "old ring", limit=2.2)
            del calls, got, o; torch.cuda.empty_cache()
        except Exception as error: print("  ", repr(error)[:400], flush=True)

def tokens():
    nvml = Nvml()
    calls, flops, keep = {}, {}, []
    for shape, variants in ((TSHAPE, TOKENS), (TALL, {"all SMs": ALL})):
        one = one_tokens(shape); given, results = one.tensors("cuda"); keep.append((given, results))
        f = 2.0 * shape[0] * shape[1] * shape[2]
        out = next(iter(results.values())); first = None
        pc = peers.product(cudnn.GroupedGemm, given, one.offsets(given))
        calls["peer" if shape == TSHAPE else "peer all"] = pc; flops["peer" if shape == TSHAPE else "peer all"] = f
        for name, change in variants.items():
            try:
                made = with_change(change, lambda: ready(one.object({**given, **results})))
                named = {p: {**given, **results}.get(x) for x, p in made.parameters.items()}
                out.zero_(); made.execute(**named); torch.cuda.synchronize()
                want = pc()["product"].float().flatten(); err = (out.float().flatten() - want).abs().max().item() / want.abs().max().item()
                print("  ", name, "error", f"{err:.2e}", flush=True)
                calls[name] = lambda made=made, named=named: made.execute(**named); flops[name] = f
            except Exception as error: print("  ", name, repr(error)[:300], flush=True)
    turns(calls, 10, 0.25, flops, "peer", nvml, limit=float(os.environ.get("LIMIT", "18")))

def ncu():
    one = one_tokens(TSHAPE); given, results = one.tensors("cuda")
    made = one.object({**given, **results}); made.compile()
    named = {p: {**given, **results}.get(x) for x, p in made.parameters.items()}
    pc = peers.product(cudnn.GroupedGemm, given, one.offsets(given))
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    made.execute(**named); pc(); torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()

for each in mode.split(","):
    t0 = time.time()
    try: {"compile": compile_all, "sums": sums, "dense": dense, "tokens": tokens, "ncu": ncu}[each]()
    except Exception as error: print(each, "FAILED", repr(error)[:500], flush=True)
    print(each, f"took {time.time() - t0:.1f} s", flush=True)
    torch.cuda.empty_cache() if each != "compile" else None
