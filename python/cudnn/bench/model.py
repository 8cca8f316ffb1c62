"""A model, not a measurement: how busy a GEMM kernel's configuration can keep the tensor cores, and what limits it.

It adds up cycles of one SM for one tile at published peak rates, and counts tiles. What the epilogue takes comes from
the kernel's machine code: compiled and disassembled here where ``nvdisasm`` is installed, else from the table in
``sass.json``. No latency, no clock that falls under load and no contention is in it, so the time errs on the short
side, as far as the rates are right. ``docs/model.md`` has the formulas.

Sources of the rates, by number, as ``MACHINES`` quotes them:

1. NVIDIA H200 datasheet: 989 TFLOP/s bf16 and 1979 fp8 (dense), 4.8 TB/s. H100 whitepaper: 132 SMs of 128 FP32 lanes.
   989.4e12 = 2 * 132 * 2048 * 1.83 GHz.
2. NVIDIA HGX B200 datasheet: 4.5 PFLOP/s bf16, 9 fp8, 18 fp4 with sparsity, so half of it dense, 7.7 TB/s each.
   148 SMs: chipsandcheese.com, "Nvidia's B200". 2.25e15 = 2 * 148 * 4096 * 1.856 GHz.
3. FlashAttention-4 (Zadouri et al., 2026; together.ai/blog/flashattention-4): an SM's special function units and the
   bandwidth of its shared memory are those of H100 on B200 too: 16 results and 128 bytes in a cycle. That tcgen05.mma
   with both operands in shared memory is bound by those 128 bytes for narrow tiles was measured by
   newsletter.semianalysis.com, "Dissecting Nvidia Blackwell", 2026.
4. NVIDIA A100 whitepaper: the L2 cache reads 5120 bytes in a cycle. An assumption for Hopper, for which NVIDIA states
   none, and, once for each of its two dies, for Blackwell.
5. PTX ISA, tcgen05.ld: a warp reads its own 32 lanes of tensor memory. One 32-bit column in a cycle is an assumption.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from cudnn import registry
from cudnn.bench import BENCHMARKS, Row, find
from cudnn.bench.report import Report
from cudnn.bench.sass import Epilogue, Facts, disassemble, disassembler, facts
from cudnn.errors import refused
from cudnn.fused.gemm import OPERAND_TYPES
from cudnn.gemm.formats import SUM_SCALES
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.configuration import GemmConfiguration
from cudnn_kernels.epilogue import Scale, StoreTile, widths_of
from cudnn_kernels.formats import bits
from cudnn_kernels.problem import BlockScale, GemmProblem, Operand
from cudnn_kernels.schedule import Dense
from cudnn_kernels.sm90.heuristics import needs_promotion

LABEL = "model, not measured"
ALONE = "our GEMM alone"
TABLE = Path(__file__).with_name("sass.json")
LANES, SCHEDULERS = 32, 4  # threads of a warp, schedulers of an SM
ROWS = 128  # of a CTA's tile, on both architectures


@dataclass(frozen=True)
class Machine:
    """Peak rates of a GPU. ``macs``: multiply-adds of 16 bits for one SM in a cycle; half as many bits, twice as many.

    ``l2`` and ``shared`` in bytes, of the whole chip and of one SM in a cycle; ``special``: results of one SM in a
    cycle; ``memory`` in bytes per second. ``megahertz``: the clock at which the datasheet's peak holds.
    """

    name: str
    arch: str
    multiprocessors: int
    macs: int
    megahertz: float
    memory: float
    l2: int
    shared: int = 128
    special: int = 16


MACHINES = {
    "sm_90a": Machine("H200", "sm_90a", 132, 2048, 1830.0, 4.8e12, 5120),  # sources 1, 3, 4
    "sm_100a": Machine("B200", "sm_100a", 148, 4096, 1856.0, 7.7e12, 2 * 5120),  # sources 2, 3, 4
}


def bits_with_factors(operand: Operand) -> float:
    """Of an element of an operand with its share of a factor."""
    return operand.bits + (bits(operand.scale.dtype) / operand.scale.vector if operand.scale else 0)


TYPES = {name: kind for name, kind in OPERAND_TYPES.items() if kind.scale != SUM_SCALES}
"""Operands by their short names; the model has no rates for products with factors of sums."""


def operand(dtype: str) -> Operand:
    """A or B, K-major, by the short name of its type."""
    kind = TYPES[dtype]
    return Operand(kind.element, "k", BlockScale(kind.scale, kind.vector) if kind.scale else None)


WISHES = (
    (None, None),
    ((256, 256), (2, 1)),
    ((256, 128), (2, 1)),
    ((128, 256), (1, 1)),
    ((128, 128), (1, 1)),
)
"""Tiles and clusters that are shown for Blackwell, where the caller may choose; first what is chosen otherwise."""


def declared(name: str) -> Any:
    """The class of a dense fused GEMM.

    Raises:
        ValueError: no such one.
    """
    if name not in registry.gemms():
        raise refused(ValueError, "epilogues", "name", repr(name), ", ".join(registry.gemms()))
    return registry.find(name)


def epilogues(name: str, dtype: str) -> dict[str, tuple[Any, ...]]:
    """What a benchmark's candidates of ours do to the accumulator, by the names that it gives them.

    Raises:
        ValueError: no fused GEMM, or operands that the model has no rates for.
    """
    from cudnn.bench import declared as benchmarks

    if dtype not in TYPES:
        raise refused(ValueError, "epilogues", "dtype", repr(dtype), ", ".join(TYPES))
    alone = (*((Scale(),) if dtype == "fp8" else ()), StoreTile("z", TYPES[dtype].out))
    return {ALONE: alone, **benchmarks.epilogues(declared(name), dtype)}


def configurations(arch: str, dtype: str, epilogue: tuple[Any, ...], n: int, k: int) -> list[GemmConfiguration]:
    """Hopper's one, with operands as its tensor cores get them, or Blackwell's for ``WISHES``."""
    wishes = WISHES[:1] if arch == "sm_90a" else WISHES
    problem, configure = (operand(dtype), operand(dtype), epilogue, Dense(), n, k), ARCHITECTURES[arch].configure
    found = (configure(GemmProblem(*problem, tile, cluster)) for tile, cluster in wishes)
    return list(dict.fromkeys(replace(c, prepared=()) for c in found))


# What a kernel's machine code says.


class UnknownKernelError(LookupError):
    """Nothing here tells the machine code of a configuration."""


@dataclass(frozen=True)
class Kernel:
    """A compiled configuration: ``buffers`` for operands, ``accumulators`` in ``columns`` of tensor memory."""

    facts: Facts
    buffers: int
    accumulators: int = 0
    columns: int = 0


def key(arch: str, c: GemmConfiguration) -> str:
    """A configuration's name in the table."""
    operations = ", ".join(" ".join([type(o).__name__, *_words(o)]) for o in c.epilogue)
    size = f"{'x'.join(map(str, c.tile))}, cluster {'x'.join(map(str, c.cluster))}"
    scale = c.a.scale
    shown = {
        "a": c.a.dtype,
        "b": c.b.dtype,
        "a_major": "" if c.a.major == "k" else "m",
        "b_major": "" if c.b.major == "k" else "n",
        "scale": scale.dtype if scale else "",
        "vector": scale.vector if scale else 0,
    }
    choices = [f for f in fields(c) if f.name not in ("a", "b", "epilogue", "schedule", "tile", "cluster")]
    shown |= {f.name: getattr(c, f.name) for f in choices if getattr(c, f.name) != f.default}
    rest = ", ".join(f"{name} {value}" for name, value in shown.items() if value)
    return f"{arch}: {size}, {rest}: {type(c.schedule).__name__}: {operations}"


def _words(declaration: Any) -> Iterator[str]:
    """What a declaration says that does not go without saying."""
    for f in fields(declaration):
        value = getattr(declaration, f.name)
        if is_dataclass(value):
            yield from _words(value)
        elif value != f.default:
            yield f"{f.name} {value}"


def examine(arch: str, configuration: GemmConfiguration) -> Kernel:
    """Compiles a configuration, which needs no GPU, and reads its machine code."""
    module = importlib.import_module(f"cudnn_kernels.{arch.removesuffix('a').replace('_', '')}.gemm")
    compiler = importlib.import_module("cudnn_kernels.compiler")
    fakes = importlib.import_module("cudnn_kernels.fakes")
    kernel = module.Gemm(configuration)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-cubin --dump-dir {folder}"
        compiled = compiler.compile_for(arch, kernel, *fakes.arguments(configuration), options=options)
        found = facts(disassemble(compiled.artifacts.CUBIN))
    if arch == "sm_90a":
        return Kernel(found, kernel.stages())
    columns = kernel.acc_stages * configuration.tile[1] + kernel.scale_factor_columns()
    return Kernel(found, kernel.stages(), kernel.acc_stages, columns)


@cache
def table() -> Mapping[str, Kernel]:
    """The kernels of the table that is part of this package, by ``key``."""
    return {name: _kernel(entry) for name, entry in json.loads(TABLE.read_text()).items()}


def _kernel(entry: dict[str, Any]) -> Kernel:
    found = dict(entry.pop("facts"))
    return Kernel(Facts(epilogue=Epilogue(**found.pop("epilogue")), **found), **entry)


@cache
def kernel(arch: str, configuration: GemmConfiguration) -> Kernel:
    """From the machine code where there is a disassembler, else from the table.

    Raises:
        UnknownKernelError: neither.
    """
    if disassembler() is not None:
        return examine(arch, configuration)
    name = key(arch, configuration)
    if name not in table():
        allowed, cure = "one in the table of machine code", "pip install nvidia-cuda-nvdisasm"
        raise refused(UnknownKernelError, "cudnn bench --model", "configuration", name, allowed, cure)
    return table()[name]


# The model itself.


@dataclass(frozen=True)
class Cycles:
    """Of one SM, for one tile of a CTA. ``load`` counts the copy engine's traffic with the L2 cache."""

    multiply: float
    load: float
    issue: float
    special: float
    shared: float
    tensor: float

    @property
    def epilogue(self) -> float:
        """The unit that takes longest; others work at the same time."""
        return max(self.issue, self.special, self.shared, self.tensor)


@dataclass(frozen=True)
class Prediction:
    """``rounds`` of tiles on all SMs, ``filled`` to a share of their products; ``busy``: share of the peak."""

    cycles: Cycles
    bytes: float
    rounds: int
    filled: float
    microseconds: float
    busy: float
    bound: str


def operand_bytes(c: GemmConfiguration) -> float:
    """What the L2 cache gives one CTA for one k tile; CTAs of a cluster that need the same bytes share the reading."""
    k = c.tile[2]
    each = bits_with_factors(c.a) / 8
    return k * each * (ROWS / c.cluster[1] + c.tile[1] / c.cluster[0])


def result_bytes(epilogue: tuple[Any, ...], elements: float) -> float:
    """What an epilogue loads and stores for so many elements of the product."""
    widths, _ = widths_of(epilogue)
    return sum(elements * float(width) * o.staged_bits / 8 for o, width in zip(epilogue, widths, strict=True))


def tile_cycles(machine: Machine, c: GemmConfiguration, kernel: Kernel, k: int) -> tuple[Cycles, float]:
    """For one tile of a CTA, and the bytes that the copy engine moves for it."""
    hopper = machine.arch == "sm_90a"
    columns, depth = c.tile[1:]
    k_tiles = -(-k // depth)
    width = c.a.bits
    pair = 1 if hopper else c.tile[0] // ROWS
    arithmetic = ROWS * columns * depth * width / 16 / machine.macs
    reads_of_b = 2 if hopper else 1 / pair  # wgmma: for every 64 rows; a pair's CTAs hold and read half each
    fed = (ROWS + columns * reads_of_b) * depth * width / 8 / machine.shared
    fed += kernel.facts.copies * 32 * 16 / machine.shared
    multiply = max(arithmetic, fed)
    if hopper and needs_promotion(c):  # one warpgroup adds while the other one's products run
        multiply = max(multiply, multiply / 2 + kernel.facts.loop)
    moved = k_tiles * operand_bytes(c) + result_bytes(c.epilogue, ROWS * columns)
    warps = (1 if c.pingpong or not hopper else 2) * SCHEDULERS
    e = kernel.facts.epilogue
    return (
        Cycles(
            multiply=k_tiles * multiply,
            load=moved * machine.multiprocessors / machine.l2,
            issue=e.instructions * warps / SCHEDULERS,
            special=e.special * LANES * warps / machine.special,
            shared=e.shared * LANES * warps / machine.shared,
            tensor=float(e.tensor),
        ),
        moved,
    )


def predict(
    machine: Machine, c: GemmConfiguration, kernel: Kernel, m: int, n: int, k: int, prepared: float = 0.0
) -> Prediction:
    """The time of D (m, n) from k products each. ``prepared``: bytes that pass through memory beforehand.

    Raises:
        ValueError: no tile fits on the machine, or a size is not positive.
    """
    clusters = machine.multiprocessors // (c.cluster[0] * c.cluster[1])
    if min(m, n, k) < 1 or not clusters:
        got = f"{m}x{n}x{k}, a cluster of {c.cluster}"
        raise refused(ValueError, "predict", "problem", got, "sizes from 1, a cluster that fits")
    cycles, moved = tile_cycles(machine, c, kernel, k)
    tiles = -(-m // (ROWS * c.cluster[0])) * -(-n // (c.tile[1] * c.cluster[1]))
    rounds = -(-tiles // clusters)
    # Blackwell with two accumulators: the next tile's products run during the epilogue. Ping-pong: two warpgroups take
    # turns, each with products and epilogue of its own tile. Else the epilogue follows the products.
    overlapped = c.pingpong or kernel.accumulators > 1
    serial = (cycles.multiply + cycles.epilogue) / (2 if c.pingpong else 1)
    paces = {"tensor cores": cycles.multiply, "L2, an assumed rate": cycles.load}
    if kernel.accumulators > 1:
        paces["epilogue"] = cycles.epilogue
    else:
        paces["products, then epilogue"] = serial
    bound = max(paces, key=lambda name: paces[name])
    exposed = cycles.epilogue if overlapped else 0.0  # after the last tile
    seconds = (rounds * paces[bound] + exposed) / (machine.megahertz * 1e6)
    bytes_once = once(c, m, n, k)
    if bytes_once / machine.memory > seconds:
        seconds, bound = bytes_once / machine.memory, "memory"
    seconds += prepared / machine.memory
    peak = machine.multiprocessors * machine.macs * 16 / c.a.bits * machine.megahertz * 1e6
    products = float(m) * n * k
    depth = -(-k // c.tile[2]) * c.tile[2]
    filled = products / (rounds * machine.multiprocessors * ROWS * c.tile[1] * depth)
    return Prediction(cycles, moved, rounds, filled, seconds * 1e6, products / peak / seconds, bound)


def once(c: GemmConfiguration, m: int, n: int, k: int) -> float:
    """Bytes of all tensors: what passes through memory at least."""
    each = bits_with_factors(c.a)
    return (m + n) * k * each / 8 + result_bytes(c.epilogue, float(m) * n)


def preparation_bytes(arch: str, dtype: str, m: int, n: int, k: int) -> float:
    """What passes through memory to dequantise block-scaled operands to bfloat16, on Hopper."""
    x = operand(dtype)
    return (m + n) * k * (bits_with_factors(x) + 16) / 8 if arch == "sm_90a" and x.scale else 0.0


def candidates(
    name: str, dtype: str, n: int, k: int, without_optional: bool
) -> Iterator[tuple[str, str, GemmConfiguration]]:
    """Name, architecture and configuration of all that ``cudnn bench --model`` shows."""
    for candidate, epilogue in epilogues(name, dtype).items():
        if ", no " in candidate and not without_optional:
            continue
        for arch in MACHINES:
            for configuration in configurations(arch, dtype, epilogue, n, k):
                yield candidate, arch, configuration


@dataclass(frozen=True)
class Comparison:
    """A row that was measured, and the model at the clock that was read meanwhile."""

    row: Row
    megahertz: float
    prediction: Prediction


def compare(report: Report) -> list[Comparison]:
    """The model for what a run of ``cudnn bench`` measured of our kernels.

    Raises:
        ValueError: a GPU or a benchmark that is not in the model.
    """
    machine = next((found for found in MACHINES.values() if found.name in report.device), None)
    name = next((name for name in BENCHMARKS if find(name).title == report.title), "")
    if machine is None or report.dtype not in TYPES:
        names = ", ".join(found.name for found in MACHINES.values())
        raise refused(ValueError, "compare", "run", f"{report.device}, {report.dtype}", f"{names}; {', '.join(TYPES)}")
    known = epilogues(name, report.dtype)
    found = []
    for row in report.rows:
        if row.name not in known or not row.flops or row.refused:
            continue
        m, n, k = map(int, row.problem.split()[0].split("x"))
        at = dataclasses.replace(machine, megahertz=row.reading.megahertz) if row.reading else machine
        c = configurations(machine.arch, report.dtype, known[row.name], n, k)[0]
        extra = 0.0 if row.name == ALONE else preparation_bytes(machine.arch, report.dtype, m, n, k)
        found.append(Comparison(row, at.megahertz, predict(at, c, kernel(machine.arch, c), m, n, k, extra)))
    return found
