"""Epilogues of both GEMMs in the emulator, with race detection, against their reference and literal formulas."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("ptx_emulator")

from cudnn.gemm import reference
from cudnn_kernels import epilogue as declared
from cudnn_kernels import fakes
from cudnn_kernels.epilogue import (
    REGLU,
    SWIGLU,
    AddRow,
    Amax,
    Gate,
    Gated,
    GatedBackward,
    Hadamard,
    LoadTile,
    MultiplyBlocks,
    MultiplyColumn,
    MultiplyGroup,
    QuantizeColumns,
    QuantizeRows,
    Rotate,
    Scale,
    SquaredRelu,
    SquaredReluBackward,
    StoreTile,
    SumColumn,
    SumRow,
)
from cudnn_kernels.gemm.problem import GemmProblem, Operand
from cudnn_kernels.schedule import VarlenM
from cudnn_kernels.sm90.gemm import Gemm
from cudnn_kernels.sm90.heuristics import gemm as heuristics
from support import kernel_inputs
from support.compiled import compile_kernel
from support.kernel_inputs import E4M3, E5M2, E8M0
from support.kernel_inputs import PACKED as FP4
from support.sass import disassemble
from support.selection import brief, in_turn

FLOAT32_LARGEST = torch.finfo(torch.float32).max


ON_HOPPER = pytest.mark.parametrize("arch", brief(kernel_inputs.ARCHES, 0))  # and on the other with --full
ON_BLACKWELL = pytest.mark.parametrize("arch", brief(kernel_inputs.ARCHES, 1))


def assert_same(epilogue: Sequence[Any], inputs: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Bit for bit, except for sums, whose order is another one."""
    for o in epilogue:
        for name in names(o):
            got, wanted = inputs[name], expected[name]
            if isinstance(o, (SumRow, SumColumn)):
                relative = 1e-5 if got.dtype == torch.float32 else 1e-2
                torch.testing.assert_close(got, wanted, rtol=relative, atol=1e-4, equal_nan=True)
            elif isinstance(got, torch.Tensor):
                different = kernel_inputs.bits(got) != kernel_inputs.bits(wanted)
                assert not different.any(), (o, int(different.sum()), different.nonzero()[:5].tolist())


def names(o: Any) -> list[str]:
    """A declaration's arguments."""
    return [slot.name for slot in o.slots(declared.SizeNames("n", "l"))]


def check(
    arch: str, epilogue: Sequence[Any], m: int, n: int, batch: int = 1, change: Any = None, **options: Any
) -> dict[str, Any]:
    """Runs an epilogue on exact products; what the kernel left in the arguments."""
    c = kernel_inputs.for_arch(kernel_inputs.configuration(epilogue, **options), arch)
    inputs, expected, _ = kernel_inputs.run(arch, c, m, n, 72, batch, change=change)
    gates = [i for i, o in enumerate(epilogue) if isinstance(o, (Gated, GatedBackward))]
    if not gates:
        assert_same(epilogue, inputs, expected)
        return inputs
    # Its values are within a few ulps; what follows starts from those that the kernel stored next.
    place = gates[0] + 1
    assert_same(epilogue[:place], inputs, expected)
    (stored,) = names(epilogue[place])
    near = {"rtol": 1e-6, "atol": 1e-9} if isinstance(epilogue[gates[0]], Gated) else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(inputs[stored], expected[stored], **near)
    rest = kernel_inputs.arguments(epilogue, m, n, batch)
    after = [o for o in epilogue[place:] if getattr(o, "value", "x") in ("x", "columns")]
    for o in epilogue[place:]:
        if isinstance(o, (AddRow, MultiplyColumn, LoadTile)):
            rest[o.tensor] = inputs[o.tensor]
        if o not in after:
            for name in names(o):
                torch.testing.assert_close(inputs[name], expected[name], rtol=1e-5, atol=1e-4)
    reference.evaluate(after, inputs[stored], rest)
    assert_same(after, inputs, rest)
    return inputs


def test_every_declaration_has_a_reference_and_an_operation() -> None:
    from cudnn_kernels.epilogue.registry import EPI_OPS

    classes = {x for x in vars(declared).values() if isinstance(x, type) and issubclass(x, declared.EpiOp)}
    classes -= {declared.EpiOp, declared._Tile}
    assert classes == set(reference.REFERENCES) == set(EPI_OPS)


STORED = ["float32", "bfloat16", "float16", E4M3, E5M2, FP4]


MAJORS = [*((dtype, "n") for dtype in STORED), *((dtype, "m") for dtype in STORED)]


@pytest.mark.parametrize(("arch", "dtype", "major"), in_turn(MAJORS[3:] + MAJORS[:3], 2))
def test_stores(arch: str, dtype: str, major: str) -> None:
    """All values, and more than the type holds."""
    if dtype == FP4 and major == "m":
        with pytest.raises(ValueError, match="d: float4_e2m1fn_x2 is packed along n, so major must be n"):
            check(arch, (StoreTile("d", FP4, "m"),), 32, 32)
        return

    def grow(a: torch.Tensor, b: torch.Tensor, arguments: dict[str, Any]) -> None:
        a[::3] *= 512
        if dtype == E5M2:
            a[::6] *= 128

    inputs = check(arch, (StoreTile("d", dtype, major),), 208, 160, 2, grow)
    if dtype in (E4M3, E5M2):
        assert inputs["d"].float().abs().max() == torch.finfo(getattr(torch, dtype)).max


CLAMPED = Gate("swish", 1.702, 1.0, -0.5, 1.0)

EPI_OPS: list[tuple[tuple[Any, ...], int, int, dict[str, Any]]] = [
    ((MultiplyGroup("scale", "float16", 2), AddRow("bias", "float32"), Amax(), StoreTile("d", "bfloat16")), 1, 136, {}),
    ((SumColumn("dbias"), StoreTile("d", "bfloat16")), 200, 136, {"epi_tile_n": 32}),
    (
        (
            Hadamard("m", factor=0.25),
            Amax("amax", True, "rotated"),
            StoreTile("d", "bfloat16"),
            StoreTile("y", "float32", value="rotated"),
        ),
        150,
        96,
        {},
    ),
    ((AddRow("bias", "bfloat16", MultiplyColumn("prob", "bfloat16")), StoreTile("d", "float32", "m")), 132, 37, {}),
    ((Scale(), StoreTile("c", "float16"), SquaredRelu(), StoreTile("d", E4M3)), 70, 144, {"epi_stages": 2}),
    (
        (
            LoadTile("c", "bfloat16"),
            SquaredReluBackward(),
            SumRow("dprob", "prob_gradient"),
            MultiplyColumn(),
            StoreTile("d", "bfloat16"),
        ),
        257,
        200,
        {"epi_stages": 2, "epi_tile_n": 32},
    ),
    (
        (
            LoadTile("c", "float32", "m"),
            SquaredReluBackward(),
            SumRow("dprob", "prob_gradient"),
            Amax(),
            StoreTile("d", "float32", "m"),
        ),
        68,
        300,
        {"pingpong": True, "tile": (64, 128, 64)},
    ),
    ((Gated(), StoreTile("y", "float32"), StoreTile("c", "bfloat16")), 65, 192, {}),
    (
        (
            LoadTile("ab", E4M3, times=2),
            GatedBackward(REGLU),
            StoreTile("y", "float32"),
            QuantizeColumns("t", E4M3, E8M0),
            StoreTile("dt", E4M3, value="columns"),
            QuantizeRows("s", E4M3, E8M0, 32),
            StoreTile("d", E4M3),
        ),
        136,
        96,
        {"epi_tile_n": 32},
    ),
    (
        (
            Scale(),
            StoreTile("ab", "bfloat16", "m"),
            Gated(gate_first=True),
            StoreTile("y", "float32", "m"),
            Amax(),
            MultiplyColumn(),
            StoreTile("c", "bfloat16", "m"),
        ),
        136,
        320,
        {"pingpong": True},
    ),
    ((AddRow("bias", "float16"), Amax(by_expert=True), StoreTile("d", "float16")), 129, 264, {"pingpong": True}),
    (
        (Scale(), SquaredRelu(), MultiplyColumn(), Amax(), StoreTile("d", "bfloat16", "m")),
        136,
        200,
        {"epi_tile_n": 128},
    ),
    ((LoadTile("c", "float16", "m"), SquaredReluBackward(), StoreTile("d", E5M2, "m")), 272, 33, {}),
    ((LoadTile("c", E4M3), SquaredReluBackward(), StoreTile("d", FP4)), 133, 160, {"cluster": (2, 1)}),
    (
        (
            Scale(),
            LoadTile("ab", "bfloat16", times=2),
            Scale("beta"),
            Scale("alpha", "c"),
            GatedBackward(CLAMPED, gate_first=True),
            StoreTile("y", "float32"),
            StoreTile("again", "float32", value="activation"),
            SumRow("dprob", "prob_gradient"),
            MultiplyColumn(),
            Amax(by_expert=True, roles=2),
            StoreTile("d", "bfloat16"),
        ),
        70,
        96,
        {"pingpong": True, "tile": (64, 128, 64), "epi_tile_n": 32},
    ),
    (
        (
            Gated(),
            StoreTile("y", "float32"),
            AddRow("bias", "bfloat16"),
            Amax(),
            QuantizeRows("sfc", E4M3, E8M0, 32),
            StoreTile("c", E4M3),
        ),
        200,
        320,
        {"epi_tile_n": 128, "tile": (128, 256, 64)},
    ),
    ((Gated(), StoreTile("y", "float32"), QuantizeRows("sfc", FP4, E4M3, 16), StoreTile("c", FP4)), 3, 192, {}),
    ((QuantizeRows("s", E4M3, "float32", 128, power_of_two=True), StoreTile("d", E4M3)), 140, 336, {"epi_tile_n": 128}),
    ((QuantizeRows("s", E4M3, E8M0, 32), StoreTile("d", E4M3, "m")), 144, 336, {"epi_tile_n": 128}),
    (
        (
            Gated(),
            StoreTile("y", "float32"),
            AddRow("bias", "bfloat16"),
            Amax(),
            QuantizeRows("s", E4M3, "float32", 128),
            StoreTile("d", E4M3),
        ),
        140,
        704,
        {"epi_tile_n": 64, "tile": (128, 256, 64)},
    ),
    (
        (
            AddRow("bias", "bfloat16"),
            QuantizeRows("sc", E4M3, "float32", 128, "", value="c", source="x"),
            StoreTile("c", E4M3, value="c"),
            Gated(),
            StoreTile("y", "float32"),
            QuantizeRows("s", E4M3, "float32", 128),
            StoreTile("d", E4M3),
        ),
        140,
        640,
        {"epi_tile_n": 64, "tile": (128, 256, 64)},
    ),
    (
        (LoadTile("c", E4M3, times=2), MultiplyBlocks("sc", 128, "c"), GatedBackward(), StoreTile("d", "float32")),
        140,
        320,
        {"epi_tile_n": 64},
    ),
    ((QuantizeRows("s", E5M2, E8M0, 32), StoreTile("d", E5M2)), 1, 48, {}),
    ((QuantizeRows("s", FP4, E8M0, 16), StoreTile("d", FP4)), 130, 160, {"pingpong": True}),
    ((QuantizeRows("s", "bfloat16", E8M0, 16), StoreTile("d", "bfloat16")), 70, 72, {"epi_tile_n": 32}),
    (
        (QuantizeColumns("s", E4M3, E8M0), StoreTile("d", E4M3, value="columns"), StoreTile("x", "bfloat16")),
        177,
        144,
        {},
    ),
    (
        (
            AddRow("bias", "float32"),
            QuantizeColumns("s", E5M2, E4M3),
            StoreTile("d", "float32", value="columns"),
            QuantizeRows("r", FP4, E4M3, 16),
            StoreTile("e", FP4),
        ),
        33,
        224,
        {"pingpong": True, "tile": (64, 128, 64), "epi_tile_n": 32},
    ),
    (
        (Gated(), StoreTile("y", "float32"), SumColumn("dbias", "bfloat16"), SumColumn("x", "float16")),
        130,
        192,
        {"pingpong": True, "epi_tile_n": 128},
    ),
    ((Hadamard("n"), StoreTile("y", "float32", value="rotated"), Amax(value="rotated")), 133, 80, {"epi_tile_n": 32}),
    (
        (
            QuantizeColumns("s", E4M3, E8M0),
            StoreTile("d", E4M3, value="columns"),
            QuantizeRows("r", E4M3, E8M0, 32),
            StoreTile("e", E4M3),
        ),
        300,
        160,
        {"pingpong": True, "epi_tile_n": 128},
    ),
    (
        (
            LoadTile("ab", "float16", "m", times=2),
            GatedBackward(),
            StoreTile("y", "float32", "m"),
            Amax(roles=2),
            StoreTile("d", "float16", "m"),
        ),
        136,
        160,
        {"epi_tile_n": 32, "epi_stages": 2},
    ),
]

ROTATIONS: list[tuple[tuple[Any, ...], int, int, dict[str, Any]]] = [
    ((Scale(), Rotate(128, 128), StoreTile("d", "bfloat16")), 133, 256, {"epi_stages": 2}),
    (
        (Rotate(128, 96, "bfloat16", inverse=True, begin=128, end=384, positions="places"), StoreTile("d", "float32")),
        40,
        512,
        {"epi_tile_n": 128},
    ),
    (
        (Rotate(192, 64, "bfloat16", inverse=True, begin=192, end=576, positions="places"), StoreTile("d", "float32")),
        40,
        768,
        {},
    ),
    ((Rotate(80, 32, begin=80), StoreTile("d", "bfloat16")), 133, 400, {"tile": (128, 160, 64), "epi_tile_n": 80}),
    (
        (Rotate(80, 80, "bfloat16"), Amax(), QuantizeRows("s", E4M3, E8M0, 32), StoreTile("d", E4M3)),
        40,
        320,
        {"tile": (128, 160, 64), "epi_tile_n": 160},
    ),
    ((Rotate(96, 96, "float16"), StoreTile("d", "float16", "m")), 136, 288, {"tile": (128, 96, 64), "epi_tile_n": 96}),
    ((Rotate(192, 80), StoreTile("d", "float32")), 40, 384, {"tile": (128, 192, 64), "epi_tile_n": 96}),
    ((Rotate(128, 96, interleaved=True), StoreTile("d", "bfloat16")), 70, 384, {}),
    ((Rotate(112, 48, "bfloat16", interleaved=True, positions="places"), StoreTile("d", "bfloat16")), 70, 336, {}),
    ((Rotate(64, 16, "bfloat16", interleaved=True), StoreTile("d", "bfloat16")), 30, 64, {"tile": (128, 64, 64)}),
    ((Rotate(128, 128, "bfloat16", positions="places"), StoreTile("d", "bfloat16", "m")), 136, 256, {"pingpong": True}),
    (
        (
            Rotate(256, 256),
            LoadTile("c", "bfloat16"),
            SquaredReluBackward(),
            SumRow("sums", "prob_gradient"),
            StoreTile("d", "float16"),
        ),
        40,
        256,
        {"tile": (128, 256, 64)},
    ),
    (
        (
            Rotate(128, 128, "float16", begin=128),
            AddRow("bias", "float32"),
            Amax(),
            QuantizeColumns("t", E4M3, E8M0),
            StoreTile("e", E4M3, value="columns"),
            QuantizeRows("s", E4M3, E8M0, 32),
            StoreTile("d", E4M3),
        ),
        97,
        640,
        {},
    ),
    ((Rotate(256, 128, "float16", end=512), StoreTile("d", FP4)), 40, 1024, {"tile": (128, 128, 64)}),
    ((Rotate(64, 64, end=128), StoreTile("d", "float16")), 33, 192, {"epi_tile_n": 32, "tile": (128, 192, 64)}),
    ((Rotate(64, 16, "bfloat16"), StoreTile("d", "bfloat16")), 140, 320, {"epi_tile_n": 128}),
    ((Rotate(96, 32), StoreTile("d", "bfloat16")), 129, 288, {"tile": (128, 192, 64)}),
    ((Rotate(128, 128, "bfloat16", interleaved=True, positions="places"), StoreTile("d", "bfloat16")), 65, 384, {}),
    (
        (Rotate(192, 64, interleaved=True, inverse=True, begin=192), StoreTile("d", "float32")),
        70,
        768,
        {"epi_tile_n": 32},
    ),
    ((Rotate(256, 256, interleaved=True, end=512), StoreTile("d", "bfloat16")), 40, 768, {"tile": (128, 192, 64)}),
    ((Rotate(80, 16, "float16", interleaved=True), StoreTile("d", "bfloat16")), 140, 320, {}),
    (
        (
            LoadTile("c", "float16"),
            SquaredReluBackward(of_saved=True),
            SumRow("dprob", "prob_gradient"),
            MultiplyColumn(value="activation"),
            QuantizeColumns("s", E4M3, E8M0, source="activation"),
            StoreTile("e", E4M3, value="columns"),
            StoreTile("d", "bfloat16"),
        ),
        160,
        144,
        {},
    ),
]


@pytest.mark.parametrize(("arch", "epilogue", "m", "n", "options"), in_turn(ROTATIONS, 2))
def test_rotations(arch: str, epilogue: tuple[Any, ...], m: int, n: int, options: dict[str, Any]) -> None:
    check(arch, epilogue, m, n, **options)


@pytest.mark.parametrize("arch", kernel_inputs.ARCHES)
def test_what_cannot_be_rotated(arch: str) -> None:
    for rotate, options, message in (
        (Rotate(256, 256), {"tile": (128, 128, 64)}, "tile: got 128 columns; allowed: multiples of 256"),
        (Rotate(96, 96), {"tile": (128, 192, 64)}, "epi_tile_n: got 64 columns; allowed: multiples of 96"),
        (Rotate(128, 96), {}, "epi_tile_n: got 64 columns; allowed: multiples of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel_inputs.compiled(arch, kernel_inputs.configuration((rotate, StoreTile("d", "bfloat16")), **options))
    with pytest.raises(ValueError, match="epi_tile_n: got 64 columns; allowed: multiples of 128"):
        kernel_inputs.compiled(
            arch, kernel_inputs.configuration((Rotate(128, 128), Gated(), StoreTile("d", "bfloat16")))
        )


@pytest.mark.parametrize(("arch", "along"), in_turn("nm", 1))
def test_hadamard_matrix(arch: str, along: str) -> None:
    """Against Sylvester's matrix, of which the reference knows nothing: H = [[1, 1], [1, -1]], four times."""
    block = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    h = functools.reduce(torch.kron, [block] * 4)
    epilogue = (Hadamard(along, "rotated", factor=0.25), StoreTile("y", "float32", value="rotated"))
    made: dict[str, torch.Tensor] = {}
    c = kernel_inputs.configuration(epilogue)
    inputs, _, _ = kernel_inputs.run(arch, c, 144, 96, 64, change=lambda a, b, _: made.update(a=a, b=b))
    x = kernel_inputs.product(c, made)[:, :, 0].bfloat16().float()
    blocks = x.unflatten(0, (-1, 16)) if along == "m" else x.unflatten(1, (-1, 16))
    expected = torch.einsum("ij,bjn->bin" if along == "m" else "ij,mbj->mbi", h, blocks) / 4
    torch.testing.assert_close(inputs["y"][:, :, 0], expected.reshape(x.shape), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("arch", "epilogue", "m", "n", "options"), in_turn(EPI_OPS, 9))
def test_operations(arch: str, epilogue: tuple[Any, ...], m: int, n: int, options: dict[str, Any]) -> None:
    check(arch, epilogue, m, n, batch=2, **options)


def random_epilogue(seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Some of all operations, and a configuration with room for them."""
    draw = random.Random(seed)
    epilogue: list[Any] = []

    def maybe(*operations: Any) -> None:
        if draw.random() < 0.5:
            epilogue.extend(operations)

    def tile(name: str, value: str = "x") -> StoreTile:
        dtype = draw.choice(["bfloat16", "float16", E4M3, E5M2, FP4])
        return StoreTile(name, dtype, "n" if dtype == FP4 else draw.choice("nm"), value)

    maybe(Scale())
    maybe(AddRow("bias", draw.choice(["float32", "bfloat16", "float16"])))
    maybe(tile("c"))
    kind, types, rows = draw.randrange(4), ["bfloat16", "float32", E4M3], draw.choice([64, 128])
    if kind == 3:
        rows = 64
        epilogue += [
            LoadTile("g", draw.choice(types), draw.choice("nm"), times=2),
            GatedBackward(draw.choice([SWIGLU, CLAMPED, REGLU]), draw.random() < 0.5),
            StoreTile("y", "float32"),
        ]
        maybe(SumRow("sums", "prob_gradient"))
        maybe(StoreTile("again", "float32", draw.choice("nm"), "activation"))
    elif kind == 2:
        epilogue += [LoadTile("g", draw.choice(types), draw.choice("nm")), SquaredReluBackward()]
        maybe(SumRow("sums", "prob_gradient"))
    else:
        maybe(SquaredRelu())
    maybe(MultiplyColumn())
    maybe(Amax("amax", draw.random() < 0.5))
    maybe(QuantizeColumns("columns_scale", E4M3, draw.choice([E4M3, E8M0])), tile("columns", "columns"))
    maybe(QuantizeRows("rows_scale", draw.choice([E4M3, E5M2, FP4]), draw.choice([E4M3, E8M0]), draw.choice([16, 32])))
    epilogue.append(tile("d"))
    pingpong = rows == 64 or draw.random() < 0.5  # warpgroups that share a tile need 64 rows each
    options = {
        "pingpong": pingpong,
        "tile": (rows, 128, 64),
        "epi_tile_n": draw.choice([32, 64]),
        "cluster": draw.choice([(1, 1), (2, 1)]),
        "epi_stages": draw.choice([1, 2]),
    }
    return tuple(epilogue), options


SEEDS = [8, 17, *(seed for seed in range(20) if seed not in (8, 17))]  # the first one compiles fast


@pytest.mark.parametrize(("arch", "seed"), in_turn(SEEDS, 1))
def test_random_epilogues(arch: str, seed: int) -> None:
    epilogue, options = random_epilogue(seed)
    if not kernel_inputs.fits_smem(
        arch, kernel_inputs.for_arch(kernel_inputs.configuration(epilogue, **options), arch)
    ):
        options |= {"epi_tile_n": 32, "epi_stages": 1}
    torch.manual_seed(seed)
    check(arch, epilogue, 16 * (1 + seed * 5 % 13), 32 * (1 + seed * 7 % 9), 1 + seed % 2, **options)


def bias_run(arch: str, epilogue: Sequence[Any], bias: torch.Tensor) -> dict[str, Any]:
    """What an epilogue makes of a row of any float32 values: those of a row vector added to 0."""

    def change(a: torch.Tensor, b: torch.Tensor, arguments: dict[str, Any]) -> None:
        a.zero_()
        arguments["bias"].copy_(bias[:, None])
        if "norm_const" in arguments:
            arguments["norm_const"].fill_(1.0)

    c = kernel_inputs.configuration((AddRow("bias", "float32"), *epilogue))
    return kernel_inputs.run(arch, c, 2, len(bias), 8, change=change)[0]


def neighbours(values: Sequence[float]) -> torch.Tensor:
    """float32 values, those next to them, and all negated."""
    x = torch.tensor(values, dtype=torch.float32)
    x = torch.cat([x, torch.nextafter(x, torch.tensor(torch.inf)), torch.nextafter(x, torch.tensor(-torch.inf))])
    return torch.cat([x, -x])


@ON_HOPPER
def test_fp4_rounding(arch: str) -> None:
    """To nearest, even at midpoints; saturates; what a negative value leaves of 0 is -0; NaN becomes the largest."""
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    points = [*grid, *((a + b) / 2 for a, b in itertools.pairwise(grid)), 0.3, 1.9, 5.5, 7, 1e38, 1e-40, math.inf]
    x = torch.cat([neighbours(points), torch.randn(256) * 3])
    x = torch.nn.functional.pad(x, (0, -len(x) % 32))
    stored = bias_run(arch, (StoreTile("d", FP4),), x)["d"]
    codes = torch.stack([stored[0, :, 0] & 15, stored[0, :, 0] >> 4], 1).flatten()
    for value, code in zip((x + 0.0).tolist(), codes.tolist(), strict=True):
        distances = [abs(min(abs(value), 6) - g) for g in grid]
        nearest = [i for i, d in enumerate(distances) if d == min(distances)]
        wanted = next(i for i in nearest if len(nearest) == 1 or i % 2 == 0)
        assert code == wanted + 8 * (math.copysign(1, value) < 0), value
    stored = bias_run(arch, (StoreTile("d", FP4),), torch.full((32,), torch.nan))["d"]
    assert set((stored & 0x77).flatten().tolist()) == {0x77}


@ON_HOPPER
def test_a_clamped_squared_relu_of_nan(arch: str) -> None:
    """0, where the squared ReLU without a clamp keeps NaN."""
    x = torch.tensor([math.nan, -math.inf, math.inf, -1.0, 0.5]).repeat(8)
    clamped = (2 * torch.tanh(x.clamp(min=0) / 2)).square().nan_to_num(0.0)
    for clamp, wanted in ((2.0, clamped), (None, x.relu().square())):
        actual = bias_run(arch, (SquaredRelu(clamp), StoreTile("d", "float32")), x)["d"][0, :, 0]
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=0, equal_nan=True)
        values = {"x": x.clone()}
        reference.squared_relu(SquaredRelu(clamp), values, {})
        torch.testing.assert_close(values["x"], wanted, rtol=1e-5, atol=0, equal_nan=True)


@ON_BLACKWELL
def test_e8m0_factors(arch: str) -> None:
    """Up to a power of two, from 2^-127 to 2^127; NaN for NaN. No type's limit: factor and magnitude are the same."""
    powers = [2.0**e for e in (-149, -140, -127, -126, -125, -64, -1, 0, 1, 5, 100, 126, 127)]
    largest = neighbours(powers)
    largest = [*largest[largest >= 0].tolist(), 3.0, 0.0, FLOAT32_LARGEST, math.inf, math.nan]
    values = torch.zeros(len(largest), 16)
    values[:, 3], values[:, 5] = torch.tensor(largest), torch.tensor(largest) * -0.75
    made = bias_run(arch, (QuantizeRows("s", "float32", E8M0, 16), StoreTile("d", "float32")), values.flatten())
    factors, stored = made["s"], made["d"]
    codes = factors.view(torch.uint8)[0, 0, 0, :, :, 0].t().flatten()
    for index, value in enumerate(largest):
        if value != value:
            wanted = 255
        else:
            fits = (e for e in range(-127, 128) if e == 127 or value <= 2.0**e)
            wanted = next(fits) + 127
            multiplier = min(2.0 ** (127 - wanted), FLOAT32_LARGEST)
            expected = values[index] * torch.tensor(multiplier, dtype=torch.float32)
            assert torch.equal(stored[0, index * 16 : index * 16 + 16, 0], expected)
        assert codes[index] == wanted, value


@ON_HOPPER
def test_e4m3_factors(arch: str) -> None:
    """Every value of the type, and between; division by 6 first; a factor of 0 makes values 0. NaN for infinity."""
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    largest = torch.cat([exact * 6, torch.rand(20) * 100, torch.tensor([1e-3, 1e-30, 5000.0, torch.inf, torch.nan])])
    values = torch.rand(len(largest), 16) - 0.5
    values = torch.cat([values * largest[:, None], torch.zeros((-len(largest)) % 2, 16)])
    values[: len(largest), 7] = largest
    made = bias_run(arch, (QuantizeRows("s", FP4, E4M3, 16), StoreTile("d", "float32")), values.flatten())
    factors, stored = made["s"], made["d"]
    factors = factors[0, 0, 0, :, :, 0].t().flatten()[: len(largest)].float()
    wanted = (values.abs().amax(1) * (torch.tensor(1.0) / 6)).clamp(max=448.0)[: len(largest)]
    wanted = torch.where(largest == torch.inf, torch.nan, wanted.to(torch.float8_e4m3fn).float())
    assert torch.equal(factors.nan_to_num(-1), wanted.nan_to_num(-1))
    stored = stored[0, :, 0].reshape(-1, 16)[: len(largest)]
    expected = torch.where(wanted[:, None] == 0, 0.0, values[: len(largest)] * (1 / wanted)[:, None])
    assert torch.equal(stored.nan_to_num(-1), expected.nan_to_num(-1))
    assert all(case.any() for case in (wanted == 0, wanted == 448, wanted.isnan()))


@ON_BLACKWELL
def test_factors_have_the_128_by_4_layout(arch: str) -> None:
    """Byte ((l rm + r // 128) rk + j // 4) 512 + r % 32 16 + r // 32 % 4 4 + j % 4 for row r and group j."""
    epilogue = (
        QuantizeColumns("c", "float32", E8M0),
        QuantizeRows("r", "float32", E8M0, 32),
        StoreTile("d", "bfloat16"),
    )
    m, n, batch = 160, 288, 2
    operands: dict[str, torch.Tensor] = {}

    def change(a: torch.Tensor, b: torch.Tensor, arguments: dict[str, Any]) -> None:
        a.copy_(torch.randn(a.shape).sign() * 2.0 ** torch.randint(-20, 20, (m, 1, batch)))
        b.copy_(torch.randn(b.shape).sign() * 2.0 ** torch.randint(-20, 20, (n, 1, batch)))
        operands.update(a=a, b=b)

    c = kernel_inputs.configuration(epilogue, "float32", tile=(128, 128, 32))
    made = kernel_inputs.run(arch, c, m, n, 4, batch, change=change)[0]
    columns, rows, norm = made["c"], made["r"], made["norm_const"]
    x = kernel_inputs.product(c, operands)
    for factors, y in ((rows, x), (columns, x.transpose(0, 1))):
        height, width, _ = y.shape
        rm, rk = -(-height // 128), -(-width // 128)
        memory = factors.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).flatten()
        assert len(memory) == batch * rm * rk * 512
        for _ in range(300):
            r, j, l = random.randrange(height), random.randrange(width // 32), random.randrange(batch)  # noqa: E741
            byte = ((l * rm + r // 128) * rk + j // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + j % 4
            largest = float(y[r, j * 32 : j * 32 + 32, l].abs().max() * norm)
            assert int(memory[byte]) == math.ceil(math.log2(largest)) + 127


@pytest.mark.parametrize(("arch", "pingpong"), in_turn([False, True], 1))
def test_infinity_and_nan(arch: str, pingpong: bool) -> None:
    """The largest magnitude is infinity or NaN exactly where a value is, also in tiles that it does not fill."""
    epilogue = (Amax(by_expert=True), QuantizeRows("s", E4M3, E8M0, 32), StoreTile("d", E4M3))

    def change(a: torch.Tensor, b: torch.Tensor, arguments: dict[str, Any]) -> None:
        a.fill_(1.0)
        b.fill_(0.5)
        a[5, 3, 0], b[7, 2, 1], a[6, 0, 2], b[40, 1, 3] = torch.inf, -torch.inf, torch.nan, torch.nan

    c = kernel_inputs.for_arch(kernel_inputs.configuration(epilogue, pingpong=pingpong), arch)
    inputs, expected, _ = kernel_inputs.run(arch, c, 70, 48, 8, 5, change=change)
    assert inputs["amax"].tolist()[:2] == [torch.inf, torch.inf]
    assert inputs["amax"][2:4].isnan().all()
    assert inputs["amax"][4] == 4.0
    assert_same(epilogue, inputs, expected)


@ON_BLACKWELL
def test_amax_keeps_what_was_larger(arch: str) -> None:
    def change(a: torch.Tensor, b: torch.Tensor, arguments: dict[str, Any]) -> None:
        arguments["amax"].copy_(torch.tensor([1e6, 0.0]))

    inputs = check(arch, (Amax(by_expert=True), StoreTile("d", "bfloat16")), 32, 32, 2, change)
    assert inputs["amax"][0] == 1e6
    assert 0 < inputs["amax"][1] < 1e6


@ON_HOPPER
def test_a_bias_is_added_to_rows_that_there_are(arch: str) -> None:
    """There accumulators of -1 and a bias of 1 give 0; in other rows of the tile the bias would be the largest."""

    def change(a: torch.Tensor, b: torch.Tensor, arguments: dict[str, Any]) -> None:
        a.fill_(0.125)
        b.fill_(-0.125)
        arguments["bias"].fill_(1.0)

    c = kernel_inputs.configuration((AddRow("bias", "float32"), Amax(), StoreTile("d", "bfloat16")), epi_tile_n=32)
    inputs, _, _ = kernel_inputs.run(arch, c, 40, 32, 64, change=change)
    assert inputs["amax"].tolist() == [0.0]


@ON_HOPPER
def test_what_cannot_be_configured(arch: str) -> None:
    columns = QuantizeColumns("s", E4M3, E8M0)
    with pytest.raises(ValueError, match="rows of a group: got multiples of 16; allowed: multiples of 32, by the e"):
        kernel_inputs.configuration((columns, StoreTile("d", E4M3)), schedule=VarlenM(row_alignment=16))
    with pytest.raises(ValueError, match="c: float4_e2m1fn_x2 can be stored, not loaded"):
        kernel_inputs.compiled(arch, kernel_inputs.configuration((LoadTile("c", FP4), StoreTile("d", "bfloat16"))))
    with pytest.raises(ValueError, match="epi_tile_n: got 32 columns; allowed: multiples of 64"):
        check(arch, (Gated(), QuantizeRows("s", E4M3, E8M0, 32), StoreTile("d", E4M3)), 32, 64, epi_tile_n=32)


def test_a_part_is_computed_while_the_one_before_is_stored() -> None:
    """On Hopper, where both warpgroups share a tile: what ptxas can, it computes before that store begins."""
    epilogue = (MultiplyGroup(), StoreTile("c", "bfloat16"), Gated(), StoreTile("d", "bfloat16"))
    rows, weights = Operand("bfloat16", index="a_index"), Operand("bfloat16")
    c = heuristics.configure(GemmProblem(rows, weights, epilogue, VarlenM(), 1536, 2048, groups=128))
    assert not c.pingpong
    code = disassemble(compile_kernel("sm_90a", Gemm(c), *fakes.arguments(c)).cubin)
    actual = re.findall(r"UTMASTG|MUFU|DEPBAR.LE SB0", code[code.rindex("GMMA") :])
    stores = "".join({"UTMASTG": "s", "MUFU": "m"}.get(each, "w") for each in actual)
    parts = re.findall(r"s+(m*)w", stores)  # what follows a part's stores until they are waited for
    each = 2 * 64 * 32 // 128  # exponentials and reciprocals of a thread, of 64 rows and 32 gates
    assert len(parts) == c.tile[1] // c.epi_tile_n
    assert min(map(len, parts[:-1])) > 0.8 * each


@ON_HOPPER
def test_shared_memory_without_conflicts(arch: str) -> None:
    """Of 16-bit and packed tiles, and of 8-bit ones in both orders."""
    stores = (
        StoreTile("d", "bfloat16"),
        StoreTile("d", "bfloat16", "m"),
        StoreTile("d", E4M3),
        StoreTile("d", E4M3, "m"),
        StoreTile("d", FP4),
        StoreTile("d", "float32", "m"),
    )
    _, _, report = kernel_inputs.run(
        arch,
        kernel_inputs.configuration([replace(x, tensor=f"d{i}") for i, x in enumerate(stores)], epi_tile_n=32),
        128,
        128,
        64,
    )
    assert report.launches[0].bank_conflicts == 0
    assert not report.launches[0].warnings
