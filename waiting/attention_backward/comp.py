"""comp.py NAME CASE...: compiles cases of a variant to objects. CASE is a key of CASES with :d for deterministic."""
import dataclasses, json, os, sys, time
from cases import CASES
from cudnn.sdpa.bwd import api as table, parts
from cudnn.sdpa.reference import Window
from cudnn_kernels import compiler, fakes
from cudnn_kernels.signature import workspace_size
from cudnn_kernels.sm90 import attention_backward as ab
import pkgutil
from cudnn_kernels.architecture import ARCHITECTURES
name, out = sys.argv[1], os.environ["OBJ"]
if "VT" in os.environ: ab.TOGETHER = int(os.environ["VT"])
for arg in sys.argv[2:]:
    t0 = time.time()
    case, _, det = arg.partition(":")
    b, s, hq, hk, d, dv, mask = CASES[case]
    ends = {"packed": False, "right": mask != "full", "left": mask.startswith("w"), "deterministic": det == "d"}
    left = int(mask[1:]) if ends["left"] else 0
    sizes = {"b": b, "sq": s, "sk": s, "hq": hq, "hk": hk, "d": d, "dv": dv}
    c = table.configuration("sm_90a", "bfloat16", (d, dv), ends)
    split = parts.of_window(c, sizes, Window(0 if ends["right"] else None, left if ends["left"] else None, False), 132)
    if split["split"]: c = table.configuration("sm_90a", "bfloat16", (d, dv), ends | {"split": True})
    if name.startswith("queue") and not c.pair: c = dataclasses.replace(c, queue=True)
    kern = pkgutil.resolve_name(ARCHITECTURES["sm_90a"].source(c))(c)
    compiled = compiler.compile_for("sm_90a", kern, *fakes.arguments(c))
    open(f"{out}/{name}_{arg.replace(':', '_')}.o", "wb").write(compiler.export(compiled))
    info = {"slots": [x.name for x in c.slots()], "workspace": int(workspace_size(c.slots(), sizes | split)), "split": split, "left": left}
    json.dump(info, open(f"{out}/{name}_{arg.replace(':', '_')}.json", "w"))
    print(name, arg, split, round(time.time() - t0, 1), flush=True)
