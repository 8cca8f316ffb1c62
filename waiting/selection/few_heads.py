"""few_heads.py: selection forward with few heads of q to one of k: by blocks, by rows, dense FlashAttention-4."""
import os, sys, time, torch
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import turns_with_peers as bars; from turns_with_peers import D, nsa, nsa_peers, turns, med, ratio
from cudnn.native_sparse_attention.selection import by_blocks
from cudnn.ops import _nsa_attention as ops
def group(T, group, rounds=5, warm=False):
    hk = 64 // group
    torch.manual_seed(3)
    q = torch.randn(T, 64, 128, device=D).bfloat16(); k, v = (torch.randn(T, hk, 128, device=D).bfloat16() for _ in range(2))
    lists = nsa.lists(T, hk, False)[0]; ends = torch.tensor([0, T], dtype=torch.int32, device=D)
    def select(most):
        def call():
            by_blocks.MOST_HEADS, by_blocks.ROWS = most, 0
            return ops.nsa_selection(q, k, v, lists, ends, 128 ** -0.5, 64)
        return call
    calls = {"blocks": select(64), "rows": select(0)}
    with torch.no_grad():
        a, b = (calls[x]() for x in calls)
        torch.cuda.synchronize()
        if warm: return
        err = [float((x - y).norm() / y.norm()) for x, y in ((a[0].float(), b[0].float()), (a[1], b[1]))]
        same = all(torch.equal(x, y) for x, y in zip(a, calls["blocks"]()))
        del a, b
        calls["dense"] = lambda: nsa_peers.dense(q[None], k[None], v[None])
        m = turns(calls, rounds, 2 if T > 20000 else 4)
        print(f"{T} group {group}: " + ", ".join(f"{n} {med(x):.2f}" for n, x in m.items()), f"errors {err[0]:.1e} {err[1]:.1e} repeat {same}; of rows {ratio(m, 'blocks', 'rows')} of dense {ratio(m, 'blocks', 'dense')}; GB {torch.cuda.max_memory_allocated() / 1e9:.1f}", flush=True)
        if group in (1, 4):
            from torch.profiler import ProfilerActivity, profile
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                for _ in range(2): calls["blocks"]()
                torch.cuda.synchronize()
            rows = sorted(p.key_averages(), key=lambda x: -x.self_device_time_total)
            print("  ms a call:", "; ".join(f"{x.key[:44]} {x.count / 2:g}x {x.self_device_time_total / 2000:.2f}" for x in rows[:8]), flush=True)
if __name__ == "__main__":
    if sys.argv[1] == "warm":
        for g in (1, 2, 4, 8): group(1024, g, warm=True)
        print("groups warm")
    else:
        for spec in sys.argv[1:]:
            try: group(*map(int, spec.split(",")))
            except BaseException as e: print(spec, repr(e)[:400], flush=True)
            torch.cuda.empty_cache()
