"""Registers, stack, shared and tensor memory of the GEMM configurations that the heuristics choose, and their bounds.

``PYTHONPATH=test python -m support.resources`` compiles all of them and prints exceeded bounds.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from cudnn_kernels.epilogue import (
    Amax,
    Gate,
    Gated,
    GatedBackward,
    LoadTile,
    MultiplyColumn,
    QuantizeRows,
    Rotate,
    Scale,
    SquaredRelu,
    SquaredReluBackward,
    StoreTile,
    SumRow,
    traits_of,
)
from cudnn_kernels.gemm.configuration import GemmConfiguration
from cudnn_kernels.gemm.problem import BlockScale, GemmProblem, Operand
from cudnn_kernels.pipeline.shared_memory import SHARED_MEMORY
from cudnn_kernels.schedule import Dense
from cudnn_kernels.sm90.heuristics import gemm as sm90
from cudnn_kernels.sm100.heuristics import gemm as sm100

E4M3 = "float8_e4m3fn"


def results(dtype: str, name: str, roles: int = 1) -> tuple[Any, ...]:
    """The last operations of an API's epilogue: scale factors and fp8, or amax and wider types."""
    if dtype == E4M3:
        return QuantizeRows("sf", dtype, "float8_e8m0fnu", 32), StoreTile(name, dtype)
    return Amax(roles=roles), StoreTile(name, dtype)


def gated_backward(gate: Gate, saved: str) -> tuple[Any, ...]:
    """The backward pass of a gated activation, and of a factor for each row."""
    return (
        Scale(),
        LoadTile("ab12", saved, times=2),
        Scale("beta", "c"),
        GatedBackward(gate),
        SumRow("dprob", "prob_gradient"),
        MultiplyColumn(),
    )


def epilogues() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Those of the fused APIs, by name."""
    yield "store bfloat16", (StoreTile("c", "bfloat16"),)
    yield "store bfloat16 m", (StoreTile("c", "bfloat16", "m"),)
    for dtype in ("float32", "bfloat16", E4M3, "float4_e2m1fn_x2"):
        yield f"amax {dtype}", (Amax(), StoreTile("c", dtype))
    for dtype in ("float32", "bfloat16", E4M3):
        end = results(dtype, "d")
        yield f"swiglu {dtype}", (Scale(), Gated(), *end)
        yield f"swiglu bfloat16 {dtype}", (Scale(), StoreTile("ab12", "bfloat16"), Gated(), *end)
        yield f"srelu bfloat16 {dtype}", (Scale(), StoreTile("c", "bfloat16"), SquaredRelu(), MultiplyColumn(), *end)
        yield (
            f"dsrelu bfloat16 {dtype}",
            (
                Scale(),
                LoadTile("c", "bfloat16"),
                SquaredReluBackward(),
                SumRow("dprob", "prob_gradient"),
                MultiplyColumn(),
                *end,
            ),
        )
        yield f"dswiglu bfloat16 {dtype}", (*gated_backward(Gate(), "bfloat16"), *results(dtype, "d", 2))
    again = (MultiplyColumn("prob", value="activation"), StoreTile("c", "bfloat16", value="activation"))
    clamped = Gate("swish", "slope", "largest", "least", "offset")
    yield "dgeglu and geglu bfloat16", (*gated_backward(clamped, "bfloat16"), *again, *results("bfloat16", "d", 2))
    yield "dgeglu float32", (*gated_backward(clamped, "float32"), *results("float32", "d", 2))
    yield "rope bfloat16", (Scale(), Rotate(128, 128), StoreTile("c", "bfloat16"))
    yield f"rope {E4M3}", (Scale(), Rotate(128, 128, positions="p"), *results(E4M3, "c"))
    yield "rope interleaved", (Scale(), Rotate(128, 128, interleaved=True), StoreTile("c", "bfloat16"))
    yield "rope 64", (Scale(), Rotate(128, 64, "bfloat16", end=96 * 128), StoreTile("c", "bfloat16"))
    yield "rope of Q and K", (Scale(), Rotate(128, 128, positions="p", end=96 * 128), StoreTile("c", "bfloat16"))
    by_128 = (Gated(), QuantizeRows("sf", E4M3, "float32", 128), StoreTile("c", E4M3))
    yield f"swiglu {E4M3} of 128", (Scale(), *by_128)
    yield f"swiglu bfloat16 {E4M3} of 128", (Scale(), StoreTile("ab12", "bfloat16"), *by_128)
    for name, operations in (
        ("srelu", (StoreTile("c", "bfloat16"), SquaredRelu())),
        ("dsrelu", (LoadTile("c", "bfloat16"), SquaredReluBackward(), SumRow("dprob", "prob_gradient"))),
    ):
        end = (Amax(), QuantizeRows("sf", E4M3, "float32", 128), StoreTile("d", E4M3))
        yield f"{name} bfloat16 {E4M3} of 128", (Scale(), *operations, MultiplyColumn(), *end)
    yield "swiglu float32 bfloat16", (Scale(), StoreTile("ab12", "float32"), Gated(), *results("bfloat16", "c"))


HOPPER, BLACKWELL = "sm_90a", "sm_100a"
FP4 = "float4_e2m1fn_x2"
SUMS = (Operand(E4M3, scale=BlockScale("float32", 128)), Operand(E4M3, scale=BlockScale("float32", 128, 128)))
OPERANDS = {  # of Blackwell
    "bfloat16": (Operand("bfloat16"),) * 2,
    "float32": (Operand("float32"),) * 2,
    "fp8": (Operand(E4M3),) * 2,
    "fp8_128": SUMS,
    "MXFP8": (Operand(E4M3, scale=BlockScale("float8_e8m0fnu", 32)),) * 2,
    "MXFP4": (Operand(FP4, scale=BlockScale("float8_e8m0fnu", 32)),) * 2,
    "NVFP4": (Operand(FP4, scale=BlockScale(E4M3, 16)),) * 2,
}
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2))
USUAL_OPERANDS, USUAL_TILES = ("bfloat16", "fp8_128", "MXFP8", "NVFP4"), ((128, 128), (256, 256))
SHAPED = "swiglu bfloat16 bfloat16"  # in all tiles and clusters


def problems() -> Iterator[tuple[str, str, GemmProblem]]:
    """Architecture, name and problem: type of the operands, epilogue, and columns or tile and cluster.

    On Blackwell: every epilogue with the usual operands and tiles, and one with all operands, tiles and clusters.
    """
    kinds = {**{a: (Operand(a),) * 2 for a in ("bfloat16", E4M3, "float32")}, "fp8_128": SUMS}
    for (name, epilogue), a, n in itertools.product(epilogues(), kinds, (128, 1024, 8192)):
        if traits_of(epilogue).two_pass_multiple and a == E4M3:
            continue  # refused
        yield HOPPER, f"{a}: {name}, {n} columns", GemmProblem(*kinds[a], epilogue, Dense(), n, 4096)
    rows = (SUMS[0], SUMS[0])
    yield (
        HOPPER,
        "fp8_128, rows of B: store bfloat16",
        GemmProblem(*rows, (StoreTile("c", "bfloat16"),), Dense(), 1024, 4096),
    )
    for name, epilogue in epilogues():
        for operand, tile in itertools.product(OPERANDS, itertools.product((128, 256), (64, 128, 192, 256))):
            if OPERANDS[operand][0].scale and (tile[1] % 128 or traits_of(epilogue).two_pass_multiple):
                continue  # the latter are refused
            first = (tile[0] // 128, 1)
            for cluster in CLUSTERS:
                if cluster[0] % first[0]:
                    continue
                usual = cluster == first and tile in USUAL_TILES and operand in USUAL_OPERANDS
                if usual or (name == SHAPED and (operand in ("bfloat16", "NVFP4") or cluster == first)):
                    problem = GemmProblem(*OPERANDS[operand], epilogue, Dense(), 4096, 4096, tile, cluster)
                    shape = f"{tile[0]} x {tile[1]}, cluster {cluster[0]} x {cluster[1]}"
                    yield BLACKWELL, f"{operand}: {name}, {shape}", problem


def configurations() -> dict[str, dict[str, GemmConfiguration]]:
    """By architecture, by name."""
    by_arch: dict[str, dict[str, GemmConfiguration]] = {HOPPER: {}, BLACKWELL: {}}
    choose = {HOPPER: sm90.configure, BLACKWELL: sm100.configure}
    for arch, name, problem in problems():
        by_arch[arch][name] = choose[arch](problem)
    return by_arch


def resources(arch: str, configuration: GemmConfiguration) -> dict[str, Any]:
    """What a kernel takes: registers and stack of a thread, shared memory and its buffers for operands, and columns of
    tensor memory for accumulators and scale factors.
    """
    from cudnn_kernels import fakes
    from support.compiled import compile_kernel

    module = importlib.import_module({HOPPER: "cudnn_kernels.sm90.gemm", BLACKWELL: "cudnn_kernels.sm100.gemm"}[arch])
    kernel = module.Gemm(configuration)
    compiled = compile_kernel(arch, kernel, *fakes.arguments(configuration))
    c = configuration
    values = {
        "tile": "x".join(map(str, c.tile)) + (" ping-pong" if c.pingpong else ""),
        "registers": compiled.registers,
        "stack": compiled.stack,
        "buffers": kernel.stages(),
        "shared": kernel.stages() * kernel.stage_bytes() + kernel.epilogue.bytes() + kernel.overhead,
    }
    if arch == BLACKWELL:
        values["accumulators"] = kernel.acc_stages
        values["columns"] = kernel.acc_stages * c.tile[1] + kernel.scale_factor_columns()
    return values


def wrong(arch: str, configuration: GemmConfiguration, entry: dict[str, Any]) -> list[str]:
    """Which bounds a kernel's resources break."""
    bounds = {
        "local memory": entry["stack"]
        <= (144 if traits_of(configuration.epilogue).two_pass_multiple and arch == BLACKWELL else 0),
        "shared memory": entry["shared"] <= SHARED_MEMORY,
        "buffers": entry["buffers"] >= 2,
        # Hopper: 64 K among 384 threads, before warpgroups shift them; Blackwell: the maximum per thread
        "registers": entry["registers"] == 168 if arch == HOPPER else entry["registers"] <= 255,
    }
    if arch == BLACKWELL:
        one = configuration.tensor_core_scale is not None and configuration.tile[1] == 256
        count = 3 if configuration.scales_accumulator else 1 if one else 2
        bounds |= {"columns": entry["columns"] <= 512, "accumulators": entry["accumulators"] == count}
    return [name for name, kept in bounds.items() if not kept]


def main() -> int:
    """Compiles every configuration; 1 if one breaks a bound."""
    jobs = [(arch, name, c) for arch, entries in configurations().items() for name, c in entries.items()]
    failed = 0
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(resources, [job[0] for job in jobs], [job[2] for job in jobs])
        for (arch, name, c), entry in zip(jobs, results, strict=True):
            broken = wrong(arch, c, entry)
            failed += bool(broken)
            print(arch, name, entry, *broken, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
