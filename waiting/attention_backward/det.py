"""1,000 repeats of deterministic objects, bit by bit, at several shapes: no two runs differ."""
import os, sys
import torch, bench
from cases import CASES
for obj in sys.argv[1:]:
    var, case = obj.split("_")
    d, dv, mask = CASES[case][4:]
    for b, s, hq, hk in ((1, 1000, 8, 2), (2, 2048, 40, 20), (1, 4096, 12, 12)):
        CASES["x"] = (b, s, hq, hk, d, dv, mask)
        q, k, v, do = bench.data("x"); o, lse = bench.forward("x", q, k, v)
        for x in ("o", "json"):
            try: os.symlink(f"{bench.OBJ}/{var}_{case}_d.{x}", f"{bench.OBJ}/{var}_x_d.{x}")
            except FileExistsError: os.remove(f"{bench.OBJ}/{var}_x_d.{x}"); os.symlink(f"{bench.OBJ}/{var}_{case}_d.{x}", f"{bench.OBJ}/{var}_x_d.{x}")
        run = bench.ours("x", var + ":d", q, k, v, o, do, lse)
        run(); first = [x.clone() for x in run.results]
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(1000):
            run(); bad += sum((x != y).sum() for x, y in zip(run.results, first))
        want = bench.exact("x", q, k, v, do) if hq == hk else None
        err = [round(float((x[-1, -1].double() - w).norm() / w.norm()) * 1e3, 2) for x, w in zip(first, want)] if want else ""
        print(obj, (b, s, hq, hk), "different elements in 1000:", int(bad), err, flush=True)
