"""Registers, stack and shared memory of the GEMM configurations that Hopper's heuristics choose, as a table.

``PYTHONPATH=test python -m support.resources`` compiles all of them and says where the table is wrong; with ``--write``
it writes the table.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cudnn_kernels.configuration import GemmConfiguration, GemmProblem
from cudnn_kernels.epilogue import (
    Amax,
    LoadTile,
    MultiplyColumn,
    QuantizeRows,
    Scale,
    SquaredRelu,
    SquaredReluBackward,
    StoreTile,
    SumRow,
    Swiglu,
)
from cudnn_kernels.schedule import Dense
from cudnn_kernels.sm90.heuristics import configure

TABLE = Path(__file__).parents[1] / "kernels" / "resources.json"
E4M3 = "float8_e4m3fn"


def results(dtype: str, name: str) -> tuple[Any, ...]:
    """The end of an API's epilogue: factors and fp8, or the largest magnitude and wider types."""
    if dtype == E4M3:
        return QuantizeRows("sf", dtype, "float8_e8m0fnu", 32), StoreTile(name, dtype)
    return Amax(), StoreTile(name, dtype)


def epilogues() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Those of the fused APIs, by name."""
    yield "store bfloat16", (StoreTile("c", "bfloat16"),)
    yield "store bfloat16 m", (StoreTile("c", "bfloat16", "m"),)
    for dtype in ("float32", "bfloat16", E4M3, "float4_e2m1fn_x2"):
        yield f"amax {dtype}", (Amax(), StoreTile("c", dtype))
    for dtype in ("float32", "bfloat16", E4M3):
        end = results(dtype, "d")
        yield f"swiglu {dtype}", (Scale(), Swiglu(), *end)
        yield f"swiglu bfloat16 {dtype}", (Scale(), StoreTile("ab12", "bfloat16"), Swiglu(), *end)
        yield f"srelu bfloat16 {dtype}", (Scale(), StoreTile("c", "bfloat16"), SquaredRelu(), MultiplyColumn(), *end)
        yield f"dsrelu bfloat16 {dtype}", (
            Scale(), LoadTile("c", "bfloat16"), SquaredReluBackward(), SumRow("dprob", "prob_gradient"),
            MultiplyColumn(), *end,
        )  # fmt: skip
    yield "swiglu float32 bfloat16", (Scale(), StoreTile("ab12", "float32"), Swiglu(), *results("bfloat16", "c"))


def configurations() -> dict[str, GemmConfiguration]:
    """By name: type of the operands, epilogue, columns."""
    found = {}
    for (name, epilogue), a, n in itertools.product(epilogues(), ("bfloat16", E4M3, "float32"), (128, 1024, 8192)):
        found[f"{a}: {name}, {n} columns"] = configure(GemmProblem(a, a, epilogue, Dense(), n, 4096))
    return found


def resources(configuration: GemmConfiguration) -> dict[str, Any]:
    """What a kernel takes: registers and stack of a thread, shared memory and its buffers for operands."""
    from cudnn_kernels.sm90 import gemm
    from support.compiled import compile_kernel

    kernel = gemm.Gemm(configuration)
    compiled = compile_kernel("sm_90a", kernel, *gemm.arguments(configuration))
    c = configuration
    return {
        "tile": "x".join(map(str, c.tile)) + (" ping-pong" if c.pingpong else ""),
        "registers": compiled.registers,
        "stack": compiled.stack,
        "buffers": kernel.stages(),
        "shared": kernel.stages() * kernel.stage_bytes() + kernel.epilogue.bytes(),
    }


def table() -> dict[str, dict[str, Any]]:
    """The table as it is checked in."""
    return json.loads(TABLE.read_text())


def main() -> int:
    """Compiles every configuration; 1 if one differs from the table."""
    found = {}
    for name, configuration in configurations().items():
        found[name] = resources(configuration)
        print(name, found[name], flush=True)
    if "--write" in sys.argv:
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items())
        TABLE.write_text("{\n" + lines + "\n}\n")
        return 0
    known = table()
    different = [name for name in {**found, **known} if found.get(name) != known.get(name)]
    print("\n".join(f"differs: {name}: {found.get(name)}, table {known.get(name)}" for name in different))
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
