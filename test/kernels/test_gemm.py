"""The GEMMs of both architectures in the emulator, with race detection: exact products over types, majors, clusters,
tiles, sizes and schedules.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ptx_emulator = pytest.importorskip("ptx_emulator")

from cudnn.gemm import reference  # noqa: E402
from cudnn_kernels.epilogue import (  # noqa: E402
    Amax,
    Gated,
    GatedBackward,
    LoadTile,
    SquaredReluBackward,
    StoreTile,
    SumColumn,
)
from cudnn_kernels.formats import bits  # noqa: E402
from cudnn_kernels.gemm.problem import BlockScale, GemmProblem, Operand  # noqa: E402
from cudnn_kernels.pipeline.shared_memory import SHARED_MEMORY  # noqa: E402
from cudnn_kernels.schedule import Dense, VarlenK, VarlenM  # noqa: E402
from cudnn_kernels.schedule.tile_maps import tile_map, trim_clusters  # noqa: E402
from cudnn_kernels.sm90.heuristics import gemm as heuristics  # noqa: E402
from support import kernel_inputs, oracle  # noqa: E402
from support.kernel_inputs import ARCHES, BLACKWELL, E4M3, E5M2, E8M0, HOPPER, PACKED  # noqa: E402
from support.selection import FULL, brief, in_turn  # noqa: E402

Types = tuple[str, str, str, int]  # of A, B and their scale factors, and the number of elements of one

PLAIN: list[Types] = [
    *((t, t, "", 0) for t in ("bfloat16", "float16", "float32")),
    *((a, b, "", 0) for a in (E4M3, E5M2) for b in (E4M3, E5M2)),
]
SCALED: list[Types] = [
    *((a, b, E8M0, 32) for a in (E4M3, E5M2) for b in (E4M3, E5M2)),
    (PACKED, PACKED, E8M0, 32),
    (PACKED, PACKED, E8M0, 16),
    (PACKED, PACKED, E4M3, 16),
]
SUMS: list[Types] = [(a, b, "float32", 128) for a, b in ((E4M3, E4M3), (E5M2, E4M3))]
"""Scale factors of rows of A and of blocks of B, applied to accumulators of 128 elements of k."""
WIDENED: Types = ("bfloat16", "bfloat16", "float32", 128)  # of two k tiles, on Hopper
TYPES = {HOPPER: PLAIN + SUMS, BLACKWELL: PLAIN + SCALED + SUMS}


def majors(arch: str, types: Types) -> list[str]:
    """What the tensor cores take."""
    only_k = types[0] == PACKED or (arch == HOPPER and bits(types[0]) != 16)
    return ["kk"] if only_k else ["kk", "kn", "mk", "mn"]


def configured(arch: str, types: Types, major: str = "kk", out: str = "n", **options: Any) -> Any:
    a, b, scale, vector = types
    c = kernel_inputs.configuration(
        (StoreTile("d", "float32", out),),
        a,
        b,
        majors=major,
        scale=scale,
        vector=vector,
        epi_tile_n=min(64, options.get("tile", (0, 64))[1]),
        **options,
    )
    return kernel_inputs.for_arch(c, arch)


def check(arch: str, types: Types, m: int, n: int, k: int, batch: int = 1, **options: Any) -> Any:
    c = configured(arch, types, **options)
    arguments, expected, report = kernel_inputs.run(arch, c, m, n, k, batch)
    assert torch.equal(arguments["d"], expected["d"])
    return report.launches[0]


TYPED = [(arch, types, major) for arch in ARCHES for types in TYPES[arch] for major in majors(arch, types)]
TYPED += [(HOPPER, WIDENED, "kk")]
BRIEF = [
    *((HOPPER, types, "kk") for types in (PLAIN[2], SUMS[0], WIDENED)),
    *((BLACKWELL, types, "mn") for types in (PLAIN[2], SCALED[1], SUMS[0])),
    (BLACKWELL, SCALED[-1], "kk"),
]


@pytest.mark.parametrize(("arch", "types", "major"), brief(TYPED, *map(TYPED.index, BRIEF)))
def test_types_and_majors(arch: str, types: Types, major: str) -> None:
    """Two batches, partial tiles in every dimension."""
    check(arch, types, 144, 160, 288 if types[2] else 208, 2, major=major)


CLUSTERS = {
    HOPPER: [(1, 1), (2, 1), (1, 2), (2, 2)],
    BLACKWELL: [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2), (4, 4)],
}
TILES = {  # those of ping-pong have 64 rows
    HOPPER: [(128, 64), (128, 128), (128, 192), (128, 256), (256, 128), (64, 128), (64, 256)],
    BLACKWELL: [(rows, columns) for rows in (128, 256) for columns in (64, 128, 192, 256)],
}


def shapes(arch: str, types: Types) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Tiles and clusters: 256 rows on Blackwell are those of a pair."""
    for tile, cluster in itertools.product(TILES[arch], CLUSTERS[arch]):
        if arch == HOPPER:
            if types in SUMS and tile[0] == 64:
                continue  # scale factors are those of a multicast tile
        elif cluster[0] % (tile[0] // 128) or (types in SCALED and tile[1] % 128) or (types in SUMS and tile[1] > 128):
            continue
        yield tile, cluster


def options(arch: str, tile: tuple[int, int], cluster: tuple[int, int]) -> dict[str, Any]:
    return {"tile": tile, "cluster": cluster, "pingpong": arch == HOPPER and tile[0] == 64}


@pytest.mark.parametrize(
    ("arch", "tile", "cluster"),
    brief(
        [
            *((HOPPER, (64 if cluster[1] == 1 else 128, 64), cluster) for cluster in CLUSTERS[HOPPER]),
            *((BLACKWELL, (128, 64), cluster) for cluster in CLUSTERS[BLACKWELL]),
            *((BLACKWELL, (256, 64), cluster) for cluster in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (16, 1), (8, 2))),
            (HOPPER, (128, 64), (4, 4)),
        ],
        3,
        6,
        12,
    ),
)
def test_clusters(arch: str, tile: tuple[int, int], cluster: tuple[int, int]) -> None:
    """More tiles than CTAs, and clusters that extend beyond the output."""
    size = cluster[0] * cluster[1]
    launch = check(
        arch, PLAIN[0], 648, 264, 136, major="mn" if cluster == (1, 2) else "kk", **options(arch, tile, cluster)
    )
    assert launch.grid == (*cluster, max(1, 4 // size))


@pytest.mark.parametrize("arch", brief(ARCHES, 1))
def test_more_than_eight_ctas_are_allowed_to_form_a_cluster(arch: str) -> None:
    """What the driver refuses unless the kernel has the attribute for it, CU_FUNC_ATTRIBUTE_NON_PORTABLE_...: 14."""
    module = kernel_inputs.host_module(arch, configured(arch, PLAIN[0], tile=(128, 64), cluster=(4, 4)))
    constants = "".join(rf"%\w+ = llvm.mlir.constant\({value} : i32\) : i32\n\s+" for value in (14, 1))
    assert re.search(rf"{constants}.* @_cudaKernelSetAttributeForDevice\(", module)


@pytest.mark.parametrize(
    ("arch", "types", "tile"),
    brief(
        [
            *((HOPPER, PLAIN[0], tile) for tile in ((64, 256), (128, 192), (128, 256), (256, 128))),
            *((BLACKWELL, PLAIN[0], tile) for tile in ((128, 192), (256, 64), (256, 256))),
            *((BLACKWELL, types, tile) for types in SCALED[::6] for tile in ((128, 256), (256, 256))),
            *((HOPPER, SUMS[0], tile) for tile in ((128, 256), (128, 192), (128, 64), (256, 128))),
            *((BLACKWELL, SUMS[0], tile) for tile in ((128, 64), (256, 128))),
        ],
        3,
        4,
    ),
)
def test_tiles(arch: str, types: Types, tile: tuple[int, int]) -> None:
    pair = arch == BLACKWELL and tile[0] == 256
    check(arch, types, 264, 264, 5376 // bits(types[0]), **options(arch, tile, (2, 1) if pair else (1, 1)))


HALVES: list[tuple[str, Types, dict[str, Any]]] = [
    (HOPPER, PLAIN[0], {"tile": (128, 128), "cluster": (2, 1), "pingpong": True}),
    (BLACKWELL, PLAIN[0], {"tile": (256, 256), "cluster": (2, 1)}),
    (HOPPER, PLAIN[0], {"tile": (128, 256), "cluster": (2, 2)}),
    (HOPPER, PLAIN[3], {"tile": (128, 128), "cluster": (2, 1)}),
    (HOPPER, PLAIN[2], {"tile": (128, 128), "cluster": (4, 1)}),
    (BLACKWELL, PLAIN[0], {"tile": (128, 64), "cluster": (4, 1)}),
    (BLACKWELL, PLAIN[3], {"tile": (256, 64), "cluster": (2, 2)}),
    (BLACKWELL, PLAIN[2], {"tile": (256, 128), "cluster": (4, 1)}),
    (BLACKWELL, PLAIN[0], {"tile": (256, 256), "cluster": (4, 2)}),
]


@pytest.mark.parametrize(("arch", "types", "choice"), brief(HALVES, 0))
def test_halves_of_b(arch: str, types: Types, choice: dict[str, Any]) -> None:
    """Blocks of 32 columns alternate between the halves of B's rows, which CTAs of a cluster may load by multicast."""
    c = replace(configured(arch, types, **choice), concat_glu=True)
    arguments, expected, _ = kernel_inputs.run(arch, c, 264, 448, 136 if types == PLAIN[0] else 208, 2)
    assert torch.equal(arguments["d"], reference.interleave_glu(expected["d"]))
    with pytest.raises(ValueError, match="tile: got 192 columns; allowed: 64, 128, 256, of halves of B"):
        replace(c, tile=(128, 192, 64))


@pytest.mark.parametrize("tile", [(128, 256, 64), (256, 128, 64)])
def test_sums_of_several_k_tiles_have_one_portion(tile: tuple[int, int, int]) -> None:
    """Two portions of a tile would add to the same sums."""
    from cudnn_kernels.sm90.gemm import Gemm

    c = replace(configured(HOPPER, WIDENED), tile=tile)
    with pytest.raises(ValueError, match=r"allowed: k tiles of 128, or at most 128 rows and 192 columns"):
        Gemm(c)


@pytest.mark.parametrize(("m", "n", "k", "batch"), [(1, 1, 8, 1), (1, 129, 8, 3), (127, 3, 72, 1), (131, 67, 520, 2)])
@pytest.mark.parametrize(("arch", "out"), brief([*itertools.product(ARCHES, "nm")], 0, 3))
def test_odd_sizes(arch: str, out: str, m: int, n: int, k: int, batch: int) -> None:
    """M and N are free where K is contiguous; the output is column after column, or row after row."""
    rows, columns = (m, -(-n // 4) * 4) if out == "n" else (-(-m // 4) * 4, n)
    check(arch, PLAIN[0], rows, columns, k, batch, out=out)


GROUPED: list[tuple[str, Types, dict[str, Any]]] = [
    (HOPPER, PLAIN[0], {}),
    (HOPPER, PLAIN[0], {"pingpong": True, "cluster": (2, 1)}),
    (BLACKWELL, PLAIN[0], {}),
    (BLACKWELL, PLAIN[0], {"tile": (256, 64), "cluster": (2, 1)}),
]
PADDED = [256, 256, 1024, 1280]
ENDS = {
    "padded": PADDED,  # to the rows of whole tiles: nothing needs to be clipped
    "any": [0, 3, 3, 300, 428, 429, 600],
    "one": [1],
    "none": [0, 0, 0],
    "many": list(range(0, 630, 15)),
}


def check_rows(arch: str, types: Types, ends: list[int], pointers: bool = False, k: int = 96, **choice: Any) -> Any:
    """Rows of no expert stay as they were."""
    c = configured(arch, types, **{"tile": (128, 128), "schedule": VarlenM(), **choice})
    m, n = ends[-1] + 56, 136 if len(ends) < 9 else 72  # of many experts one tile of columns
    made = kernel_inputs.operands(c, m, n, k, 1, len(ends))
    if c.a.index:
        made[c.a.index][ends[-1] :] = 1 << 30  # not looked at
    expected = kernel_inputs.product(c, made, ends)
    if pointers:
        c = replace(c, b=replace(c.b, pointers=True))
        made |= kernel_inputs.pointer_arguments({name: made[name] for name in ("b", "sfb") if name in made}) | {"n": n}
    d, kernel = kernel_inputs.matrix(m, n, 1, "float32"), kernel_inputs.compiled(arch, c)
    with ptx_emulator.emulate(arch, races=True, multiprocessors=4) as report:
        kernel_inputs.call(kernel, c, {**made, "offsets": torch.tensor(ends, dtype=torch.int32), "d": d}, 4)
    torch.testing.assert_close(d, expected, rtol=0, atol=0, equal_nan=True)
    return report.launches[-1]


@pytest.mark.parametrize(
    ("arch", "types", "choice", "ends"),
    brief([(*choice, ends) for choice in GROUPED for ends in ENDS], 6, 8, 9, 16, 17),
)
def test_rows_of_experts(arch: str, types: Types, choice: dict[str, Any], ends: str) -> None:
    """Experts with no rows, experts that end in the middle of a tile, more experts than a warp has lanes."""
    schedule = VarlenM(row_alignment=256 if ends == "padded" else 1)
    check_rows(arch, types, ENDS[ends], schedule=schedule, **choice)


@pytest.mark.parametrize(
    ("choice", "ends"),
    brief(
        [
            (choice, ends)
            for choice in ({}, {"cluster": (1, 2)}, {"cluster": (2, 1)}, {"cluster": (1, 2), "pingpong": True})
            for ends in ENDS
        ],
        6,
        13,
        16,
        19,
    ),
)
def test_drawn_tiles(choice: dict[str, Any], ends: str) -> None:
    """Dynamic scheduler: a cluster claims tiles, the same for all its CTAs."""
    check_rows(HOPPER, PLAIN[0], ENDS[ends], dynamic_scheduler=True, **choice)


def test_drawn_tiles_of_a_later_call() -> None:
    """The counter is reset, in memory with any content."""
    c = configured(HOPPER, PLAIN[0], tile=(128, 128), schedule=VarlenM(), dynamic_scheduler=True)
    made, kernel, ends = (
        kernel_inputs.operands(c, 600, 136, 96, 1, 3),
        kernel_inputs.compiled(HOPPER, c),
        [300, 428, 600],
    )
    arguments = {
        **made,
        "offsets": torch.tensor(ends, dtype=torch.int32),
        "d": kernel_inputs.matrix(600, 136, 1, "float32"),
    }
    expected = kernel_inputs.product(c, made, ends)
    with ptx_emulator.emulate(HOPPER, races=True, multiprocessors=4):
        for _ in range(2):
            arguments["d"].fill_(torch.nan)
            kernel_inputs.call(kernel, c, arguments, 4)
            assert torch.equal(arguments["d"], expected)


def test_only_tiles_of_experts_are_drawn() -> None:
    with pytest.raises(ValueError, match="dynamic_scheduler: got Dense"):
        configured(HOPPER, PLAIN[0], dynamic_scheduler=True)


@given(st.integers(1, 5000), st.integers(1, 148))
def test_as_few_clusters_as_take_no_more_turns(tiles: int, clusters: int) -> None:
    actual, turns = trim_clusters(tiles, clusters), -(-tiles // clusters)
    assert -(-tiles // actual) == turns
    assert actual == 1 or -(-tiles // (actual - 1)) > turns


def test_a_grid_of_as_many_clusters() -> None:
    """Five tiles on four CTAs take two waves, and on three."""
    c = configured(HOPPER, PLAIN[0], tile=(128, 128))
    _, _, report = kernel_inputs.run(HOPPER, c, 128, 5 * 128, 64, multiprocessors=4)
    assert report.launches[0].grid[2] == 3


@pytest.mark.parametrize(("n", "cluster"), [(1024, (1, 2)), (384, (1, 1))])
def test_experts_backward_has_no_cluster_of_rows(n: int, cluster: tuple[int, int]) -> None:
    """Each warpgroup has a tile, though three tensors are staged; a cluster's CTAs share A where columns suffice."""
    back = (
        LoadTile("c", "bfloat16", times=2),
        GatedBackward(gate_first=True),
        StoreTile("activation", "bfloat16", value="activation"),
        StoreTile("d", "bfloat16"),
    )
    operands = Operand("bfloat16"), Operand("bfloat16", "mn")
    c = heuristics.configure_gemm(GemmProblem(*operands, back, VarlenM(), n, 4096))
    assert (c.pingpong, c.epi_tile_n, c.cluster) == (True, 32, cluster)
    assert not heuristics.configure_gemm(GemmProblem(*operands, back, Dense(), n, 4096)).pingpong


@pytest.mark.parametrize(
    ("n", "k", "index", "splits", "expected"),
    [
        (4096, 1024, "", False, ((128, 128, 64), (1, 2), 2)),
        (4096, 4000, "", False, ((128, 128, 64), (1, 2), 8)),
        (4096, 256, "", False, ((128, 192, 64), (1, 2), 8)),
        (4096, 8192, "", False, ((256, 128, 64), (1, 2), 8)),
        (1152, 1024, "", False, ((128, 128, 64), (2, 1), 8)),
        (512, 4096, "a", False, ((128, 256, 64), (1, 2), 2)),
        (640, 4096, "a", False, ((128, 256, 64), (1, 1), 8)),
        (4096, 8 * 2048, "a", True, ((128, 256, 64), (2, 1), 8)),
        (4096, 8 * 2048, "b", True, ((256, 128, 64), (1, 2), 8)),
        (640, 8 * 2048, "b", True, ((256, 128, 64), (1, 1), 8)),
        (4096, 8 * 2048, "ab", True, ((256, 128, 64), (1, 1), 8)),
        (4096, 8 * 2048, "", True, ((256, 128, 64), (1, 2), 8)),
        (4096, 8 * 512, "", True, ((128, 192, 64), (2, 1), 8)),
    ],
)
def test_what_experts_products_get(n: int, k: int, index: str, splits: bool, expected: tuple[Any, ...]) -> None:
    a = Operand("bfloat16", "mn" if splits else "k", index="a_index" if "a" in index else "")
    b = Operand("bfloat16", "mn", index="b_index" if "b" in index else "")
    schedule = VarlenK() if splits else VarlenM()
    problem = GemmProblem(a, b, (StoreTile("d", "bfloat16"),), schedule, n, k, groups=8)
    c = heuristics.configure_gemm(problem)
    assert (c.tile, c.cluster, c.schedule.swizzle_size) == expected
    assert c.dynamic_scheduler == (bool(index) and not splits)


@pytest.mark.parametrize("types", [PLAIN[0], SUMS[0]])
def test_a_warpgroup_without_rows_multiplies_nothing(types: Types) -> None:
    """Of three tiles' halves, 64 rows each, one belongs to no row of its expert; two tiles of columns, 128 of k."""
    launch = check_rows(HOPPER, types, [1, 129])
    assert launch.operations["wgmma multiply-adds"] == 3 * 64 * (2 * 128) * 128


@pytest.mark.parametrize("draws", [False, True])
def test_the_other_warpgroup_waits_for_k_tiles_that_are_passed_over(draws: bool) -> None:
    """More k tiles than there are buffers: else it would take one that has not come for the one before."""
    check_rows(
        HOPPER, PLAIN[0], [0, 3, 70, 200], k=1160, tile=(64, 64), cluster=(2, 1), pingpong=True, dynamic_scheduler=draws
    )


@pytest.mark.parametrize("k", [256, 384])
def test_rows_with_factors_are_drawn_unless_k_is_short(k: int) -> None:
    factor = BlockScale("float32", 128)
    operands = Operand(E4M3, scale=factor), Operand(E4M3, scale=replace(factor, rows=128))
    problem = GemmProblem(*operands, (StoreTile("d", "bfloat16"),), VarlenM(), 2048, k, groups=8)
    assert heuristics.configure_gemm(problem).dynamic_scheduler == (k > 256)


SIDEWAYS = {"cluster": (2, 1), "schedule": VarlenM(split_tail_n=True)}


@pytest.mark.parametrize(
    ("types", "tile", "pointers", "ends"),
    brief(
        [
            (types, tile, pointers, ends)
            for types, tile in ((PLAIN[0], (64, 64)), (PLAIN[0], (128, 128)), (SUMS[0], (128, 64)))
            for pointers, ends in itertools.product([False, True], ENDS)
        ],
        1,
    ),
)
def test_last_rows_sideways(types: Types, tile: tuple[int, int], pointers: bool, ends: str) -> None:
    """Two or three columns of tiles, or one: of an odd number, the last one has a cluster that stands upright."""
    check_rows(HOPPER, types, ENDS[ends], pointers, tile=tile, pingpong=tile[0] == 64, **SIDEWAYS)


@given(st.integers(0, 4000), st.integers(1, 40), st.sampled_from([64, 128]))
def test_sideways_clusters_have_a_tile_for_each_cta(rows: int, columns: int, height: int) -> None:
    """But for one, where the tiles are odd in number."""
    tiles = tile_map(VarlenM(split_tail_n=True), 2 * height, 64)
    assert tiles.tiles_of_rows(rows, columns) == -(-(-(-rows // height) * columns) // 2)


@pytest.mark.parametrize(
    ("schedule", "index", "sideways"),
    [
        (VarlenM(), "", True),
        (VarlenM(row_alignment=128), "", True),
        (VarlenM(row_alignment=256), "", False),  # of which no expert's rows of tiles are odd in number
        (VarlenM(), "a_index", False),
        (Dense(), "", False),
    ],
)
def test_which_last_rows_are_taken_sideways(schedule: Any, index: str, sideways: bool) -> None:
    operands = Operand("bfloat16", index=index), Operand("bfloat16")
    c = heuristics.configure(GemmProblem(*operands, (Gated(), StoreTile("d", "bfloat16")), schedule, 2816, 2048))
    assert c.schedule.split_tail_n == sideways


@pytest.mark.parametrize(
    "choice", [{"cluster": (1, 2)}, {"cluster": (2, 1), "index": "a"}, {"cluster": (2, 1), "arch": BLACKWELL}]
)
def test_what_is_not_taken_sideways(choice: dict[str, Any]) -> None:
    arguments = {"arch": HOPPER, "tile": (128, 64), "schedule": VarlenM(split_tail_n=True), **choice}
    with pytest.raises(ValueError, match="split_tail_n"):
        kernel_inputs.compiled(arguments["arch"], configured(types=PLAIN[0], **arguments))


@pytest.mark.parametrize("arch", brief([(HOPPER,), (BLACKWELL,)], 0))
def test_an_expert_loads_its_own_rows(arch: str) -> None:
    """What the epilogue loads ends where the expert does: the next one's infinities are in none of its maxima."""
    epilogue = (LoadTile("c", "bfloat16"), SquaredReluBackward(), Amax(by_expert=True), StoreTile("d", "float32"))
    c = kernel_inputs.for_arch(kernel_inputs.configuration(epilogue, schedule=VarlenM(), epi_tile_n=64), arch)
    m, n, k, ends = 200, 72, 64, [70, 75, 200]
    made, arguments = kernel_inputs.operands(c, m, n, k, 1, len(ends)), kernel_inputs.arguments(epilogue, m, n, 1)
    arguments |= {"amax": torch.zeros(len(ends)), "offsets": torch.tensor(ends, dtype=torch.int32)}
    arguments["c"][70:75] = torch.inf
    kernel = kernel_inputs.compiled(arch, c)
    with ptx_emulator.emulate(arch, races=True, multiprocessors=2):
        kernel_inputs.call(kernel, c, {**made, **arguments}, 2)
    largest = [arguments["d"][start:end].abs().amax() for start, end in itertools.pairwise([0, *ends])]
    assert arguments["amax"][[0, 2]].tolist() == [largest[0], largest[2]]
    assert arguments["amax"][[0, 2]].isfinite().all()


@pytest.mark.parametrize(("types", "pointers"), brief([*itertools.product([SCALED[0], SCALED[-1]], [False, True])], 3))
def test_rows_of_experts_with_block_scales(types: Types, pointers: bool) -> None:
    """Their scale factors are in atoms of 128 rows, so experts end where atoms do."""
    check_rows(BLACKWELL, types, [256, 256, 384, 640], pointers, schedule=VarlenM(row_alignment=128))
    with pytest.raises(ValueError, match="rows of a group: got multiples of 64; allowed: multiples of 128, by scale"):
        check_rows(BLACKWELL, types, PADDED, schedule=VarlenM(row_alignment=64))


@pytest.mark.parametrize(("grouped", "major"), brief([*itertools.product(GROUPED, ["kk", "kn"])]))
def test_weights_behind_pointers(grouped: Any, major: str) -> None:
    """Each expert's B lies anywhere, in any order."""
    arch, types, choice = grouped
    check_rows(arch, types, ENDS["any"], pointers=True, major=major, **choice)


HALVES_BEHIND_POINTERS = [
    (arch, tile, cluster, half_of)
    for arch, tile, cluster in (
        (HOPPER, (128, 64), (2, 1)),
        (HOPPER, (128, 128), (1, 1)),
        (HOPPER, (128, 256), (1, 2)),
        (BLACKWELL, (256, 256), (2, 1)),
        (BLACKWELL, (128, 128), (1, 1)),
        (BLACKWELL, (256, 128), (4, 2)),
    )
    for half_of in ("n", "k")
]


@pytest.mark.parametrize(
    ("arch", "tile", "cluster", "half_of"), brief(HALVES_BEHIND_POINTERS, 0, 1, 4, 5, 6, 7, 10, 11)
)
def test_halves_of_b_behind_pointers(arch: str, tile: tuple[int, int], cluster: tuple[int, int], half_of: str) -> None:
    """Gate and up weights at separate addresses: halves of B's rows, which alternate, or of k, one after the other."""
    (m, n, k), ends = (200, 320, 256), [3, 3, 150, 190]
    options = {"tile": tile, "cluster": cluster, "schedule": VarlenM(split_tail_n=cluster == (2, 1) and arch == HOPPER)}
    c = configured(arch, PLAIN[0], "kk" if half_of == "n" else "kn", **options)
    arguments = kernel_inputs.operands(c, m, n, k, 1, len(ends))
    expected = kernel_inputs.product(c, arguments, ends)
    stored = (2, 0, 1) if half_of == "n" else (2, 1, 0)  # experts, and the contiguous dimension last
    halves = torch.cat(arguments["b"].permute(stored).chunk(2, 1)).permute([stored.index(dim) for dim in range(3)])
    arguments |= kernel_inputs.pointer_arguments({"b": halves}) | {"n": n}
    c = replace(c, b=replace(c.b, pointers=True, halves=True), concat_glu=half_of == "n")
    d, kernel = kernel_inputs.matrix(m, n, 1, "float32"), kernel_inputs.compiled(arch, c)
    with ptx_emulator.emulate(arch, races=True, multiprocessors=8):
        kernel_inputs.call(kernel, c, {**arguments, "offsets": torch.tensor(ends, dtype=torch.int32), "d": d}, 8)
    expected = reference.interleave_glu(expected) if half_of == "n" else expected
    torch.testing.assert_close(d[: ends[-1]], expected[: ends[-1]], rtol=0, atol=0)


def test_which_halves_are_refused() -> None:
    """A TMA box reaches both halves of a tensor, but not matrices at two addresses."""
    c = configured(HOPPER, PLAIN[0], tile=(128, 128), schedule=VarlenM())
    pointers = replace(c.b, pointers=True)
    with pytest.raises(ValueError, match=r"halves: got .* allowed: True, for pointers to concatenated halves of B"):
        replace(c, b=pointers, concat_glu=True)
    with pytest.raises(ValueError, match=r"halves: got .* allowed: pointers without scale factors"):
        replace(c, b=replace(c.b, halves=True))
    with pytest.raises(ValueError, match=r"halves: got .* allowed: B alone"):
        replace(c, a=replace(c.a, halves=True))


def test_other_pointers_in_a_later_call() -> None:
    """Nothing of the addresses is kept: the same kernel, and the same list of addresses, with others in it."""
    c = configured(HOPPER, PLAIN[0], tile=(128, 128), schedule=VarlenM())
    c = replace(c, b=replace(c.b, pointers=True))
    made, kernel = kernel_inputs.operands(c, 256, 64, 64, 1, 2), kernel_inputs.compiled(HOPPER, c)
    ends, d = [128, 256], kernel_inputs.matrix(256, 64, 1, "float32")
    arguments = {
        **made,
        **kernel_inputs.pointer_arguments({"b": made["b"]}),
        "n": 64,
        "offsets": torch.tensor(ends).int(),
        "d": d,
    }
    with ptx_emulator.emulate(HOPPER, races=True, multiprocessors=4):
        for b in (made["b"], made["b"].flip(2)):
            kernel_inputs.call(kernel, c, arguments, 4)
            assert torch.equal(d, kernel_inputs.product(c, {**made, "b": b}, ends))
            arguments["b_ptrs"].copy_(arguments["b_ptrs"].flip(0))


@pytest.mark.parametrize(("arch", "types", "choice"), brief([GROUPED[1], GROUPED[3]], 0))
def test_column_sums_of_experts(arch: str, types: Types, choice: dict[str, Any]) -> None:
    """Over the rows of each, in the same order every time; 0 for an expert that has none."""
    c = configured(arch, types, **{"tile": (128, 128), **choice}, schedule=VarlenM())
    c, ends, m = replace(c, epilogue=(SumColumn("s"), *c.epilogue)), [0, 3, 3, 140, 141, 270], 300
    made, kernel = kernel_inputs.operands(c, m, 136, 96, 1, len(ends)), kernel_inputs.compiled(arch, c)
    expected = torch.stack(
        [part.sum((0, 2)) for part in kernel_inputs.product(c, made, ends).tensor_split([*ends])[:-1]]
    )
    arguments = {
        **made,
        "offsets": torch.tensor(ends, dtype=torch.int32),
        "d": kernel_inputs.matrix(m, 136, 1, "float32"),
    }
    results = []
    for scheduler in ("lowest-pc", "random"):
        sums = torch.full((len(ends), 136), torch.nan)
        with ptx_emulator.emulate(arch, races=True, multiprocessors=4, scheduler=scheduler):
            kernel_inputs.call(kernel, c, {**arguments, "s": sums}, 4)
        results.append(sums)
    torch.testing.assert_close(results[0], expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(*results)


def check_k(
    arch: str, types: Types, ends: list[int], m: int = 200, n: int = 136, store: StoreTile | None = None, **choice: Any
) -> None:
    """Experts' segments of k; elements after the last one, in the last scale-factor atom too, are NaN."""
    c = configured(arch, types, **{"tile": (128, 128), **choice}, schedule=VarlenK())
    store = store or c.epilogue[0]
    c = replace(c, epilogue=(store,))
    step = 128 // c.a.bits
    made = kernel_inputs.operands(c, m, n, (ends[-1] // step + 2) * step, 1)
    expected = kernel_inputs.product(c, made, ends).to(getattr(torch, store.dtype))
    for name, x in (("a", c.a), ("b", c.b)):
        if x.scale is not None:
            made[f"sf{name}"] = oracle.atoms_by_part(made[f"sf{name}"], ends, x.scale.vector, 0xFF)
        if x.index:
            made[x.index][ends[-1] :] = 1 << 30
        else:
            made[name][:, ends[-1] // x.packed :] = 0xFF if x.packed > 1 else torch.nan
    arguments = {"d": kernel_inputs.matrix(m, n, len(ends), store.dtype, store.major == "m")}
    if store.adds:
        arguments["d"].copy_(torch.randint(-99, 99, arguments["d"].shape) / 4)
        expected = (arguments["d"].float() + expected.float()).to(expected.dtype)
    if store.pointers:
        arguments |= kernel_inputs.pointer_arguments(arguments)
    kernel, offsets = kernel_inputs.compiled(arch, c), torch.tensor(ends, dtype=torch.int32)
    with ptx_emulator.emulate(arch, races=True, multiprocessors=4):
        kernel_inputs.call(
            kernel, c, {**made, "offsets": offsets, **arguments, "d": arguments.get("d_ptrs", arguments["d"])}, 4
        )
    assert torch.equal(torch.stack(arguments["d copies"], 2) if store.pointers else arguments["d"], expected)


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHES)
def test_rows_of_experts_with_factors_of_sums(arch: str) -> None:
    """Scale factors of rows cover all experts, those of B's blocks are per expert."""
    check_rows(arch, SUMS[0], ENDS["any"])


def test_factors_of_sums_and_results_in_two_buffers() -> None:
    """The library's tile, with four k tiles: they and the results leave less than a kilobyte."""
    x, weights = (
        kernel_inputs.configuration((), E4M3, scale="float32", vector=128).source_operand(name) for name in "ab"
    )
    c = heuristics.configure(GemmProblem(x, weights, (StoreTile("d", "bfloat16"),), VarlenM(), 256, 512))
    assert (c.tile, c.epi_stages) == ((128, 256, 128), 2)
    ends = [130, 130, 300]
    made = kernel_inputs.operands(c, 320, 264, 592, 1, len(ends))
    expected, d = kernel_inputs.product(c, made, ends).bfloat16(), kernel_inputs.matrix(320, 264, 1, "bfloat16")
    kernel = kernel_inputs.compiled(HOPPER, c)
    with ptx_emulator.emulate(HOPPER, races=True, multiprocessors=2) as report:
        kernel_inputs.call(kernel, c, {**made, "offsets": torch.tensor(ends, dtype=torch.int32), "d": d}, 2)
    torch.testing.assert_close(d, expected, rtol=0, atol=0, equal_nan=True)
    assert SHARED_MEMORY - 1024 < report.launches[-1].shared_bytes <= SHARED_MEMORY


@pytest.mark.parametrize(
    ("arch", "blocks"),
    [
        (HOPPER, (1, 1)),
        pytest.param(BLACKWELL, (1, 1), marks=pytest.mark.full),
        pytest.param(HOPPER, (128, 1), marks=pytest.mark.full),
    ],
)
def test_factors_of_rows_of_b(arch: str, blocks: tuple[int, int]) -> None:
    """As weight gradients have them; and operands that have changed places."""
    check(arch, SUMS[0], 150, 212, 272, 2, tile=(128, 128), blocks=blocks)


@pytest.mark.parametrize("arch", [HOPPER, pytest.param(BLACKWELL, marks=pytest.mark.full)])
def test_factors_may_lie_in_any_order(arch: str) -> None:
    """Row after row, as existing code for training holds them, or column after column."""
    c = configured(arch, SUMS[0], tile=(128, 128))
    made = kernel_inputs.operands(c, 136, 264, 400, 2)
    expected, d = kernel_inputs.product(c, made), kernel_inputs.matrix(136, 264, 2, "float32")
    made["sfa"], made["sfb"] = made["sfa"].contiguous(), made["sfb"].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    kernel = kernel_inputs.compiled(arch, c)
    with ptx_emulator.emulate(arch, races=True, multiprocessors=4):
        kernel_inputs.call(kernel, c, {**made, "d": d}, 4)
    assert torch.equal(d, expected)


@pytest.mark.parametrize(("arch", "types", "choice"), brief(GROUPED, 1, 3))
@pytest.mark.parametrize("ends", brief([[64, 64, 200, 256], [0, 1, 70, 70, 203, 300]], 1))
def test_k_of_experts(arch: str, types: Types, choice: dict[str, Any], ends: list[int]) -> None:
    """A product for each expert; zeros for those that have none. k beyond the last one is not read."""
    check_k(arch, types, ends, major="mn", **choice)


@pytest.mark.parametrize(("grouped", "major"), brief([*itertools.product(GROUPED, ["kk", "kn", "mk"])], 4))
def test_k_of_experts_that_is_contiguous(grouped: Any, major: str) -> None:
    """Experts end at any multiple of 16 bytes."""
    arch, types, choice = grouped
    check_k(arch, types, [8, 64, 64, 200, 256, 344], major=major, **choice)


SHARED_A = (HOPPER, PLAIN[0], {"pingpong": True, "cluster": (1, 2)})


@pytest.mark.parametrize(("grouped", "ends"), brief([*itertools.product([SHARED_A, *GROUPED], ENDS)], 1))
def test_rows_of_a_by_number(grouped: Any, ends: str) -> None:
    """Rows in any order, several times or not at all; k that ends within a tile, and numbers of no row."""
    arch, types, choice = grouped
    schedule = VarlenM(row_alignment=256 if ends == "padded" else 1)
    check_rows(arch, types, ENDS[ends], index="a", schedule=schedule, **choice)


@pytest.mark.parametrize(
    ("grouped", "index", "ends"),
    brief([*itertools.product(GROUPED, ["a", "b", "ab"], [[64, 64, 200, 256], [0, 1, 70, 70, 203, 300]])], 19),
)
def test_k_of_operands_by_number(grouped: Any, index: str, ends: list[int]) -> None:
    """Weight gradients of tokens that lie anywhere; their operands' rows end within a tile."""
    arch, types, choice = grouped
    wide = {"tile": (256, 128)} if "b" in index and "tile" in choice else {}  # for two CTAs, 128 bytes each
    check_k(arch, types, ends, major="mn", index=index, **{**choice, **wide})


@pytest.mark.parametrize(("index", "cluster", "tile"), [("a", (2, 1), (128, 64)), ("b", (1, 2), (256, 64))])
def test_ctas_that_copy_lines_share_the_other_operand(index: str, cluster: Any, tile: Any) -> None:
    """TMA multicasts it to both."""
    check_k(HOPPER, PLAIN[0], [0, 1, 70, 70, 203, 300], major="mn", index=index, cluster=cluster, tile=tile)


STORES = [
    StoreTile("d", dtype, major, adds=adds, pointers=pointers)
    for dtype, major in (("float32", "n"), ("bfloat16", "n"), ("float16", "m"))
    for adds, pointers in ((True, False), (False, True), (True, True))
]


@pytest.mark.parametrize(("arch", "store"), in_turn([(store,) for store in STORES[2:] + STORES[:2]], 1))
def test_gradients_of_experts_added_or_behind_pointers(arch: str, store: StoreTile) -> None:
    """To what is there: the sum of two rounded numbers is rounded. An expert that has no tokens stays as it was."""
    types, choice = next((types, choice) for kind, types, choice in GROUPED[1::2] if kind == arch)
    check_k(arch, types, [0, 1, 70, 70, 203, 300], store=store, major="mn", **choice)


@pytest.mark.parametrize("arch", ARCHES)
def test_what_stores_do_not_add_or_scatter(arch: str) -> None:
    c = configured(arch, PLAIN[0], schedule=VarlenM())
    with pytest.raises(ValueError, match=f"d: got {E4M3}; allowed: 16 and 32 bits, to add to"):
        kernel_inputs.compiled(arch, replace(c, epilogue=(StoreTile("d", E4M3, adds=True),)))
    with pytest.raises(
        ValueError, match="d: got pointers; allowed: a tensor, if groups may end in the middle of a tile"
    ):
        kernel_inputs.compiled(arch, replace(c, epilogue=(StoreTile("d", "float32", pointers=True),)))


@pytest.mark.parametrize("arch", brief(ARCHES, 0))
def test_contiguous_k_that_ends_within_16_bytes_is_an_illegal_instruction(arch: str) -> None:
    with pytest.raises(ptx_emulator.EmulatorError, match="its bytes are not a multiple of 16"):
        check_k(arch, PLAIN[0], [64, 130, 256], major="kn", **GROUPED[ARCHES.index(arch) * 2 + 1][2])


SCALED_PARTS = {32: [128, 128, 384, 544], 16: [64, 64, 320, 640, 672]}


@pytest.mark.parametrize(("types", "tile"), brief([*itertools.product(SCALED, [(128, 128), (256, 128)])], 12))
def test_k_of_experts_with_block_scales(types: Types, tile: tuple[int, int]) -> None:
    """Each has separate scale factors, in atoms of four blocks; the last one may end in the middle of an atom."""
    check_k(BLACKWELL, types, SCALED_PARTS[types[3]], m=200, n=264, tile=tile, cluster=(tile[0] // 128, 2))


def problem(draw: random.Random, arch: str, types: Types, tile: Any, cluster: Any) -> dict[str, Any]:
    """The rest of a problem: majors, sizes that TMA supports, schedule."""
    major, out = draw.choice(majors(arch, types)), draw.choice("nm")
    step = 128 // bits(types[0])  # elements in 16 bytes

    def size(most: int, whole: int) -> int:
        return -(-draw.randint(1, most) // whole) * whole

    height, width = tile[0] * cluster[0], tile[1] * cluster[1]
    if arch == BLACKWELL:
        height = 128 * cluster[0]
    return {
        "m": size(height * 3 // 2, max(step if major[0] != "k" else 1, 4 if out == "m" else 1)),
        "n": size(width * 3 // 2, max(step if major[1] != "k" else 1, 4 if out == "n" else 1)),
        "k": size(2600 // bits(types[0]) * 2, step),
        "batch": draw.randint(1, 2),
        "major": major,
        "out": out,
        **options(arch, tile, cluster),
    }


MATRIX = [(arch, types, *shape) for arch in ARCHES for types in TYPES[arch] for shape in shapes(arch, types)]


@pytest.mark.full
@pytest.mark.parametrize(("arch", "types", "tile", "cluster"), MATRIX if FULL else MATRIX[:1])
def test_the_whole_matrix(arch: str, types: Types, tile: Any, cluster: Any) -> None:
    """All types with all tiles and clusters; random majors, sizes and schedules for each."""
    check(arch, types, **problem(random.Random(str((arch, types, tile, cluster))), arch, types, tile, cluster))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", range(8))  # for this number of processes
@pytest.mark.parametrize("arch", ARCHES)
@settings(max_examples=8, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_random_problems(arch: str, share: int, data: Any) -> None:
    types = data.draw(st.sampled_from(TYPES[arch]))
    tile, cluster = data.draw(st.sampled_from(list(shapes(arch, types))))
    check(arch, types, **problem(data.draw(st.randoms(use_true_random=False)), arch, types, tile, cluster))


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHES)
@settings(max_examples=6, suppress_health_check=list(HealthCheck), database=None)
@given(counts=st.lists(st.integers(0, 260) | st.just(0), min_size=1, max_size=40))
def test_random_experts(arch: str, counts: list[int]) -> None:
    check_rows(arch, PLAIN[0], [min(end, 1336) for end in itertools.accumulate(counts)])
