"""bars.py MODE...: warm | dense | inside | parts. One process, turns to and fro, medians."""
import os, statistics, sys, time
import torch
from cudnn.bench import nsa, nsa_peers
from cudnn.ops import nsa_attention
NEW = "window" in __import__("inspect").signature(__import__("cudnn.ops._nsa_gates", fromlist=["x"]).gated_selection).parameters
D, B, N, W = "cuda", 64, 16, 512
def event():
    e = torch.cuda.Event(enable_timing=True); e.record(); return e
def turns(calls, rounds, each):
    """Milliseconds a call, medians over rounds of bursts of `each` calls, nothing waits within a round."""
    times = {n: [] for n in calls}
    for n, c in calls.items():
        for _ in range(2): c()
    torch.cuda.synchronize()
    for r in range(rounds):
        names = list(calls); names = names[r % len(names):] + names[:r % len(names)]
        names = names[::-1] if r % 2 else names
        spans = []
        for n in names:
            k = each[n] if isinstance(each, dict) else each
            a = event()
            for _ in range(k): calls[n]()
            spans.append((n, a, event(), k))
        torch.cuda.synchronize()
        for n, a, b, k in spans: times[n].append(a.elapsed_time(b) / k)
    return times
def med(x): return statistics.median(x)
def ratio(times, ours, peer):
    r = [p / o for o, p in zip(times[ours], times[peer])]
    return f"{med(r):.3f} [{min(r):.3f}..{max(r):.3f}]"
def graphed(call):
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3): call()
    torch.cuda.current_stream().wait_stream(s); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): call()
    return g.replay
def whole_calls(T, alike):
    torch.manual_seed(1)
    t = nsa.tensors((T, 64, 4, 128), alike)
    ours = nsa_peers.ours(B, N, W)["whole"]
    flat = [x.detach() for x in (t.q, t.k, t.v)]
    def fwd():
        with torch.no_grad(): return ours(*flat, t.gates)
    def dense():
        with torch.no_grad(): return nsa_peers.dense(*flat)
    def both(f, *more):
        def run(): return torch.autograd.grad(f(t.q, t.k, t.v, *more), [t.q, t.k, t.v], t.gradient)
        return run
    return t, {"fwd": (fwd, dense), "both": (both(ours, t.gates), both(nsa_peers.dense))}
def compare(name, found):
    """With what another process found."""
    found = [x.detach().float() for x in (found if isinstance(found, tuple) else (found,))]
    path = f"/tmp/nsa_{name}.pt"
    if not os.path.exists(path): torch.save([x.cpu() for x in found], path); return
    errors = []
    for x, y in zip(found, torch.load(path)):
        y = y.to(D); errors.append(float((x - y).norm() / y.norm()))
    print(name, "off from the first process by", ["%.1e" % e for e in errors], "finite", all(bool(x.isfinite().all()) for x in found), flush=True)
def dense(T=8192, kinds=(False, True), rounds=9, each=10, passes=("fwd", "both")):
    for alike in kinds:
        t, calls = whole_calls(T, alike)
        for p, (a, b) in calls.items():
            if p not in passes: continue
            if T <= 16384: compare(f"{T}_{alike}_{p}", a())
            for how in ("graph", "plain"):
                try:
                    x, y = (graphed(a), graphed(b)) if how == "graph" else (a, b)
                except Exception as e:
                    print("no graph", p, repr(e)[:200], flush=True); continue
                m = turns({"ours": x, "dense": y}, rounds, each)
                print(f"{T} {'alike' if alike else 'random'} {p} {how}: ours {med(m['ours']):.3f} dense {med(m['dense']):.3f} ratio {ratio(m, 'ours', 'dense')}", flush=True)
def gaps(T=8192):
    """What the GPU does in a forward pass without a graph: kernels, and the time before each."""
    t, calls = whole_calls(T, False)
    from torch.profiler import ProfilerActivity, profile
    for n in ("fwd",):
        for _ in range(3): calls[n][0]()
        torch.cuda.synchronize()
        a = time.perf_counter()
        for _ in range(8): calls[n][0]()
        b = time.perf_counter(); torch.cuda.synchronize(); print(f"host {n} {(b - a) / 8e-6:.0f} us a call", flush=True)
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(6): calls[n][0]()
            torch.cuda.synchronize()
        ev = sorted((e.start_ns(), e.duration_ns(), e.name()) for e in p.profiler.kineto_results.events() if "CUDA" in str(e.device_type()) and e.duration_ns() > 0)
        each = len(ev) // 6; ev = ev[-2 * each:]
        print(n, f"{each} kernels a call, span {(ev[-1][0] + ev[-1][1] - ev[-each][0] ) / 1e3:.0f} us;", "; ".join(f"+{(ev[i][0] - ev[i - 1][0] - ev[i - 1][1]) / 1e3:.1f} {ev[i][2][:34]} {ev[i][1] / 1e3:.1f}" for i in range(each, 2 * each)), flush=True)
def alone(T=8192, rounds=5, each=6):
    """Ours alone: forward, both passes, selection."""
    from cudnn.ops import _nsa_attention as ops
    line = []
    for alike in (False, True):
        t, calls = whole_calls(T, alike)
        for p in ("fwd", "both") if not alike else ("fwd",):
            compare(f"{T}_{alike}_{p}", calls[p][0]())
            m = turns({"graph": graphed(calls[p][0]), "plain": calls[p][0]}, rounds, each)
            line.append(f"{'alike ' * alike}{p} graph {med(m['graph']):.3f} plain {med(m['plain']):.3f}")
        for n, k in ((T, 10), (65536, 3)):
            t = nsa.tensors((n, 64, 4, 128), alike); q, k_, v = (x.detach()[0] for x in (t.q, t.k, t.v)); ends = torch.tensor([0, n], dtype=torch.int32, device=D)
            m = turns({"s": lambda: ops.nsa_selection(q, k_, v, t.lists[0], ends, 128 ** -0.5, 64)}, 4, k)
            line.append(f"selection {'alike ' * alike}{n} {med(m['s']):.3f}"); del t, q, k_, v
    print("; ".join(line), flush=True)
def parts(T=65536, rounds=4, only=None):
    ours, fla = nsa_peers.ours(B, N, W), nsa_peers.fla(B, N, W)
    order = ["selection", "compression", "compression, backward", "top-k", "selection, backward", "whole", "whole, backward"]
    every = {part.label: part for part in nsa.PARTS}
    for part in (every[x] for x in (only or [*order, *(x for x in every if x not in order)])):
        torch.manual_seed(2)
        given = nsa.tensors((T, 64, 4, 128), part.alike)
        try:
            calls = {"ours": nsa.call(part, ours, given), "fla": nsa.call(part, fla, given)}
            s = time.time()
            for c in calls.values(): c()
            torch.cuda.synchronize()
            tuned = time.time() - s; each = {}
            for n, c in calls.items():
                a = event(); c(); b = event(); torch.cuda.synchronize(); each[n] = max(1, min(8, int(60 / max(a.elapsed_time(b), 0.1))))
            m = turns(calls, rounds, each)
            line = f"{T} {part.label}: ours {med(m['ours']):.3f} fla {med(m['fla']):.2f} bursts {ratio(m, 'ours', 'fla')}"
            if part.name == "selection" and not part.alike and not part.backward:
                line += "; one by one " + ratio(turns(calls, 8, 1), "ours", "fla")
            print(line, f"(tuned {tuned:.0f} s)", flush=True)
        except Exception as e:
            print(part.label, "FAILED", repr(e)[:300], flush=True)
        del given; calls = None; torch.cuda.empty_cache()
def warm():
    for T in (1024, 8192):
        t, calls = whole_calls(T, False)
        for a, b in calls.values(): a(); b()
    torch.cuda.synchronize(); print("warm whole", flush=True)
    for T in (2048, 65536):
        given = nsa.tensors((T, 64, 4, 128), False); ours = nsa_peers.ours(B, N, W)
        for part in nsa.PARTS:
            if not part.alike: nsa.call(part, ours, given)()
    torch.cuda.synchronize(); print("warm parts", flush=True)
if __name__ == "__main__":
    for mode in sys.argv[1:]:
        s = time.time()
        try: eval(mode) if "(" in mode else globals()[mode]()
        except BaseException as e:
            import traceback; traceback.print_exc()
        print(f"-- {mode} {time.time() - s:.0f} s", flush=True)
