"""Registers, stack, shared and tensor memory of the GEMM configurations that the heuristics choose, as a table.

``PYTHONPATH=test python -m support.resources`` compiles all of them and says where the table is wrong; with ``--write``
it writes the table.
"""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
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
from cudnn_kernels.sm90 import heuristics as sm90
from cudnn_kernels.sm100 import heuristics as sm100

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


HOPPER, BLACKWELL = "sm_90a", "sm_100a"
FP4 = "float4_e2m1fn_x2"
OPERANDS: dict[str, dict[str, Any]] = {  # of Blackwell
    "bfloat16": {"a": "bfloat16", "b": "bfloat16"},
    "float32": {"a": "float32", "b": "float32"},
    "fp8": {"a": E4M3, "b": E4M3},
    "MXFP8": {"a": E4M3, "b": E4M3, "scale": "float8_e8m0fnu", "vector": 32},
    "MXFP4": {"a": FP4, "b": FP4, "scale": "float8_e8m0fnu", "vector": 32},
    "NVFP4": {"a": FP4, "b": FP4, "scale": E4M3, "vector": 16},
}
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2))
USUAL_OPERANDS, USUAL_TILES = ("bfloat16", "MXFP8", "NVFP4"), ((128, 128), (256, 256))
SHAPED = "swiglu bfloat16 bfloat16"  # in all tiles and clusters


def problems() -> Iterator[tuple[str, str, GemmProblem]]:
    """Architecture, name and problem: type of the operands, epilogue, and columns or tile and cluster.

    On Blackwell: every epilogue with the usual operands and tiles, and one with all operands, tiles and clusters.
    """
    for (name, epilogue), a, n in itertools.product(epilogues(), ("bfloat16", E4M3, "float32"), (128, 1024, 8192)):
        yield HOPPER, f"{a}: {name}, {n} columns", GemmProblem(a, a, epilogue, Dense(), n, 4096)
    for name, epilogue in epilogues():
        for kind, tile in itertools.product(OPERANDS, itertools.product((128, 256), (64, 128, 192, 256))):
            if OPERANDS[kind].get("scale") and tile[1] % 128:
                continue
            first = (tile[0] // 128, 1)
            for cluster in CLUSTERS:
                if cluster[0] % first[0]:
                    continue
                usual = cluster == first and tile in USUAL_TILES and kind in USUAL_OPERANDS
                if usual or (name == SHAPED and (kind in ("bfloat16", "NVFP4") or cluster == first)):
                    problem = GemmProblem(**OPERANDS[kind], epilogue=epilogue, schedule=Dense(), n=4096, k=4096,
                                          tile=tile, cluster=cluster)  # fmt: skip
                    shape = f"{tile[0]} x {tile[1]}, cluster {cluster[0]} x {cluster[1]}"
                    yield BLACKWELL, f"{kind}: {name}, {shape}", problem


def configurations() -> dict[str, dict[str, GemmConfiguration]]:
    """By architecture, by name."""
    found: dict[str, dict[str, GemmConfiguration]] = {HOPPER: {}, BLACKWELL: {}}
    choose = {HOPPER: sm90.configure, BLACKWELL: sm100.configure}
    for arch, name, problem in problems():
        found[arch][name] = choose[arch](problem)
    return found


def resources(arch: str, configuration: GemmConfiguration) -> dict[str, Any]:
    """What a kernel takes: registers and stack of a thread, shared memory and its buffers for operands, and columns of
    tensor memory for accumulators and factors.
    """
    from support.compiled import compile_kernel

    module = importlib.import_module({HOPPER: "cudnn_kernels.sm90.gemm", BLACKWELL: "cudnn_kernels.sm100.gemm"}[arch])
    kernel = module.Gemm(configuration)
    compiled = compile_kernel(arch, kernel, *module.arguments(configuration))
    c = configuration
    found = {
        "tile": "x".join(map(str, c.tile)) + (" ping-pong" if c.pingpong else ""),
        "registers": compiled.registers,
        "stack": compiled.stack,
        "buffers": kernel.stages(),
        "shared": kernel.stages() * kernel.stage_bytes() + kernel.epilogue.bytes(),
    }
    if arch == BLACKWELL:
        found["accumulators"] = kernel.accumulators
        found["columns"] = kernel.accumulators * c.tile[1] + kernel.factor_columns()
    return found


def table() -> dict[str, dict[str, dict[str, Any]]]:
    """The table as it is checked in: by architecture, by name."""
    return json.loads(TABLE.read_text())


def written(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The table as text, a line for each entry."""
    parts = []
    for arch, entries in found.items():
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        parts.append(f"  {json.dumps(arch)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    """Compiles every configuration; 1 if one differs from the table."""
    jobs = [(arch, name, c) for arch, entries in configurations().items() for name, c in entries.items()]
    found: dict[str, dict[str, dict[str, Any]]] = {HOPPER: {}, BLACKWELL: {}}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(resources, [job[0] for job in jobs], [job[2] for job in jobs])
        for (arch, name, _), entry in zip(jobs, results, strict=True):
            found[arch][name] = entry
            print(arch, name, entry, flush=True)
    if "--write" in sys.argv:
        TABLE.write_text(written(found))
        return 0
    known = table()
    different = [
        (arch, name)
        for arch, entries in found.items()
        for name in {**entries, **known[arch]}
        if entries.get(name) != known[arch].get(name)
    ]
    for arch, name in different:
        print(f"differs: {arch} {name}: {found[arch].get(name)}, table {known[arch].get(name)}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
