"""The machine code of GEMM configurations as a table, which ``cudnn bench --model`` reads where nothing disassembles.

``PYTHONPATH=test python -m support.sass`` compiles and disassembles all of them and says where the table is wrong; with
``--write`` it writes the table.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from cudnn.bench import model
from cudnn_kernels.configuration import GemmConfiguration
from cudnn_kernels.epilogue import (
    Amax,
    Gated,
    LoadTile,
    MultiplyColumn,
    QuantizeRows,
    Scale,
    SquaredReluBackward,
    StoreTile,
    SumRow,
)
from cudnn_kernels.problem import BlockScale, GemmProblem, Operand
from cudnn_kernels.schedule import Dense
from cudnn_kernels.sm90.heuristics import configure as hopper
from cudnn_kernels.sm100.heuristics import configure as blackwell

NAMES = ("gemm_amax", "gemm_dsrelu", "gemm_srelu", "gemm_swiglu")
WIDTHS = (128, 1024, 8192)  # on both sides of what Hopper's heuristics tell apart
E4M3, E5M2, E8M0, FP4 = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"
END = (QuantizeRows("sfc", E4M3, E8M0, 32), StoreTile("c", E4M3))
QUANTISED = (Scale(), StoreTile("ab12", "bfloat16"), Gated(), *END)
PLAIN = (Amax(), StoreTile("c", "bfloat16", "m"))
WIDE = (
    Scale(),
    LoadTile("c", "float32"),
    SquaredReluBackward(),
    SumRow("dprob", "prob_gradient"),
    MultiplyColumn(),
    Amax(),
    StoreTile("d", "float32"),
)
TILES = (((256, 256), (2, 1)), ((128, 128), (1, 1)))


def operands(dtype: str, majors: str, scale: str = "", vector: int = 0) -> list[Operand]:
    """A and B; ``majors`` are those of both, or "mn" for neither K-major."""
    factors = BlockScale(scale, vector) if scale else None
    return [Operand(dtype, "k" if majors == "k" else "mn", factors)] * 2


def configurations() -> dict[str, tuple[str, GemmConfiguration]]:
    """Architecture and configuration by their name in the table: the model's, and types that it does not show."""
    found = [
        (arch, configuration)
        for name in NAMES
        for dtype in model.TYPES
        for n in WIDTHS
        for _, arch, configuration in model.candidates(name, dtype, n, 4096, without_optional=True)
    ]
    for epilogue in (QUANTISED, PLAIN):
        for a, majors in (("float32", "k"), ("bfloat16", "mn"), (E5M2, "k")):
            problem = GemmProblem(*operands(a, majors), epilogue, Dense(), 1024, 4096)
            found.append(("sm_90a", hopper(problem)))
        for a, scale, vector in (("float32", "", 0), (E5M2, "", 0), (E4M3, E8M0, 32), (FP4, E8M0, 32), (FP4, E8M0, 16)):
            majors = "k" if a == FP4 else "mn"
            for tiling in TILES:
                problem = GemmProblem(*operands(a, majors, scale, vector), epilogue, Dense(), 1024, 4096, *tiling)
                found.append(("sm_100a", blackwell(problem)))
    for a, scale, vector in (("bfloat16", "", 0), (FP4, E4M3, 16)):  # the most that an epilogue holds in registers
        for tiling in (*TILES, ((128, 256), (1, 1))):
            problem = GemmProblem(*operands(a, "k", scale, vector), WIDE, Dense(), 1024, 4096, *tiling)
            found.append(("sm_100a", blackwell(problem)))
    return {model.key(arch, configuration): (arch, configuration) for arch, configuration in found}


def main() -> int:
    """Compiles every configuration; 1 if one differs from the table."""
    found = {}
    for name, (arch, configuration) in configurations().items():
        found[name] = model.examine(arch, configuration)
        print(name, found[name], flush=True)
    if "--write" in sys.argv:
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(asdict(kernel))}" for name, kernel in found.items())
        model.TABLE.write_text("{\n" + lines + "\n}\n")
        return 0
    known = model.table()
    different = [name for name in {**found, **known} if found.get(name) != known.get(name)]
    print("\n".join(f"differs: {name}: {found.get(name)}, table {known.get(name)}" for name in different))
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
