"""The GEMMs of both architectures in the emulator, with race detection: exact products over types, majors, clusters,
tiles, sizes and schedules.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ptx_emulator = pytest.importorskip("ptx_emulator")

from cudnn_kernels.epilogue import StoreTile  # noqa: E402
from cudnn_kernels.formats import bits  # noqa: E402
from cudnn_kernels.schedule import GroupedK, GroupedRows  # noqa: E402
from support import gemm  # noqa: E402
from support.gemm import ARCHES, BLACKWELL, E4M3, E5M2, E8M0, HOPPER, PACKED  # noqa: E402
from support.selection import brief  # noqa: E402

Types = tuple[str, str, str, int]  # of A, B and their factors, and how many elements share one

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
TYPES = {HOPPER: PLAIN, BLACKWELL: PLAIN + SCALED}


def majors(arch: str, types: Types) -> list[str]:
    """What the tensor cores take."""
    only_k = types[0] == PACKED or (arch == HOPPER and bits(types[0]) != 16)
    return ["kk"] if only_k else ["kk", "kn", "mk", "mn"]


def configured(arch: str, types: Types, major: str = "kk", out: str = "n", **options: Any) -> Any:
    a, b, scale, vector = types
    c = gemm.configuration((StoreTile("d", "float32", out),), a, b, majors=major, scale=scale,
                           vector=vector, part=min(64, options.get("tile", (0, 64))[1]), **options)  # fmt: skip
    return gemm.fitted(c, arch)


def check(arch: str, types: Types, m: int, n: int, k: int, batch: int = 1, **options: Any) -> Any:
    c = configured(arch, types, **options)
    given, expected, report = gemm.run(arch, c, m, n, k, batch)
    assert torch.equal(given["d"], expected["d"])
    return report.launches[0]


BRIEF = (PLAIN[0], PLAIN[2], PLAIN[4], SCALED[1], SCALED[-1])
TYPED = [  # without --full, all majors of one type
    pytest.param(
        arch,
        types,
        major,
        marks=[] if types in BRIEF and (major in ("kk", "mn") or types == PLAIN[0]) else pytest.mark.full,
    )
    for arch in ARCHES
    for types in TYPES[arch]
    for major in majors(arch, types)
]


@pytest.mark.parametrize(("arch", "types", "major"), TYPED)
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
            if bits(types[0]) == 8 and tile[0] * tile[1] > 128 * 192:
                continue  # two sets of accumulators need too many registers
        elif cluster[0] % (tile[0] // 128) or (types[2] and tile[1] % 128):
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
        1,
        3,
        6,
        9,
        11,
        15,
    ),
)
def test_clusters(arch: str, tile: tuple[int, int], cluster: tuple[int, int]) -> None:
    """More tiles than CTAs, and clusters that reach beyond the product."""
    size = cluster[0] * cluster[1]
    launch = check(arch, PLAIN[0], 648, 264, 136, 2, major="mn" if cluster == (1, 2) else "kk",
                   **options(arch, tile, cluster))  # fmt: skip
    assert launch.grid == (*cluster, max(1, 4 // size))


@pytest.mark.parametrize("arch", ARCHES)
def test_more_than_eight_ctas_are_allowed_to_form_a_cluster(arch: str) -> None:
    """What the driver refuses unless the kernel has the attribute for it, CU_FUNC_ATTRIBUTE_NON_PORTABLE_...: 14."""
    module = gemm.host_module(arch, configured(arch, PLAIN[0], tile=(128, 64), cluster=(4, 4)))
    constants = "".join(rf"%\w+ = llvm.mlir.constant\({value} : i32\) : i32\n\s+" for value in (14, 1))
    assert re.search(rf"{constants}.* @_cudaKernelSetAttributeForDevice\(", module)


@pytest.mark.parametrize(
    ("arch", "types", "tile"),
    brief(
        [
            *((HOPPER, PLAIN[0], tile) for tile in ((64, 256), (128, 192), (128, 256), (256, 128))),
            *((BLACKWELL, PLAIN[0], tile) for tile in ((128, 192), (256, 64), (256, 256))),
            *((BLACKWELL, types, tile) for types in SCALED[::6] for tile in ((128, 256), (256, 256))),
        ],
        0,
        3,
        4,
        10,
    ),
)
def test_tiles(arch: str, types: Types, tile: tuple[int, int]) -> None:
    pair = arch == BLACKWELL and tile[0] == 256
    check(arch, types, 264, 264, 5376 // bits(types[0]), **options(arch, tile, (2, 1) if pair else (1, 1)))


DYNAMIC: list[tuple[Types, tuple[int, int], tuple[int, int]]] = [
    (PLAIN[0], (128, 64), (1, 1)),
    (PLAIN[0], (128, 64), (2, 2)),
    (PLAIN[3], (256, 64), (2, 1)),
    (PLAIN[0], (256, 64), (4, 2)),
    (SCALED[0], (128, 128), (1, 1)),
    (SCALED[-1], (256, 128), (2, 2)),
]


@pytest.mark.parametrize(("types", "tile", "cluster"), brief(DYNAMIC, 1, 3, 5))
def test_tiles_by_cluster_launch_control(types: Types, tile: tuple[int, int], cluster: tuple[int, int]) -> None:
    """Every tile that is not a resident cluster's first one is handed over, and whoever is done takes it."""
    m, n = 128 * cluster[0] * 3 - 40, tile[1] * cluster[1] * 2 - 8
    launch = check(BLACKWELL, types, m, n, 288, 2, tile=tile, cluster=cluster, dynamic=True)
    resident = max(1, 4 // (cluster[0] * cluster[1]))
    assert launch.grid == (*cluster, 12)
    assert launch.operations["clusters handed out"] == 12 - resident


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("m", "n", "k", "batch"), [(1, 1, 8, 1), (1, 129, 8, 3), (127, 3, 72, 1), (131, 67, 520, 2)])
def test_odd_sizes(arch: str, m: int, n: int, k: int, batch: int) -> None:
    """M and N are free where K is contiguous; the output is column after column, or row after row."""
    for out in "nm":
        rows, columns = (m, -(-n // 4) * 4) if out == "n" else (-(-m // 4) * 4, n)
        check(arch, PLAIN[0], rows, columns, k, batch, out=out)


GROUPED: list[tuple[str, Types, dict[str, Any]]] = [
    (HOPPER, PLAIN[0], {}),
    (HOPPER, PLAIN[0], {"pingpong": True, "cluster": (2, 1)}),
    (BLACKWELL, PLAIN[0], {}),
    (BLACKWELL, PLAIN[0], {"tile": (256, 64), "cluster": (2, 1), "dynamic": True}),
]
PADDED = [256, 256, 1024, 1280]
ENDS = {
    "padded": PADDED,
    "any": [0, 3, 3, 300, 428, 429, 1280],
    "one": [1],
    "none": [0, 0, 0],
    "many": list(range(0, 1200, 17)),
}


def check_rows(arch: str, types: Types, ends: list[int], **choice: Any) -> Any:
    """Rows of no expert stay as they were."""
    c = configured(arch, types, **{"tile": (128, 128), **choice}, schedule=GroupedRows())
    m, n, k = 1336, 136, 96
    made = gemm.operands(c, m, n, k, 1, len(ends))
    a, b = gemm.values(c, made)
    d, kernel = gemm.matrix(m, n, 1, "float32"), gemm.compiled(arch, c)
    with ptx_emulator.emulate(arch, races=True, multiprocessors=4) as report:
        gemm.call(kernel, c, {**made, "offsets": torch.tensor(ends, dtype=torch.int32), "d": d}, 4)
    start = 0
    for expert, end in enumerate(ends):
        assert torch.equal(d[start:end, :, 0], (a[start:end, :, 0] @ b[:, :, expert].T).float()), expert
        start = end
    assert d[start:].isnan().all()
    return report.launches[0]


@pytest.mark.parametrize(
    ("arch", "types", "choice", "ends"),
    brief([(*choice, ends) for choice in GROUPED for ends in ENDS], 1, 3, 9, 14, 16, 17),
)
def test_rows_of_experts(arch: str, types: Types, choice: dict[str, Any], ends: str) -> None:
    """Experts with no rows, experts that end in the middle of a tile, more experts than a warp has lanes."""
    launch = check_rows(arch, types, ENDS[ends], **choice)
    assert launch.grid[2] > 4 or not choice.get("dynamic")


@pytest.mark.parametrize("types", brief([(SCALED[0],), (SCALED[-1],)], 1))
def test_rows_of_experts_with_block_scales(types: Types) -> None:
    """Their factors are in atoms of 128 rows, so experts end where atoms do."""
    check_rows(BLACKWELL, types, PADDED)


@pytest.mark.parametrize(("arch", "types", "choice"), GROUPED)
@pytest.mark.parametrize("ends", brief([[64, 64, 200, 256], [0, 1, 70, 70, 203, 300]], 1))
def test_k_of_experts(arch: str, types: Types, choice: dict[str, Any], ends: list[int]) -> None:
    """A product for each expert; zeros for those that have none. k beyond the last one is not read."""
    c = configured(arch, types, "mn", **{"tile": (128, 128), **choice}, schedule=GroupedK())
    m, n, k = 200, 136, 304
    made = gemm.operands(c, m, n, k, 1)
    a, b = gemm.values(c, made)
    made["a"][:, ends[-1] :], made["b"][:, ends[-1] :] = torch.nan, torch.nan
    d, kernel = gemm.matrix(m, n, len(ends), "float32"), gemm.compiled(arch, c)
    with ptx_emulator.emulate(arch, races=True, multiprocessors=4):
        gemm.call(kernel, c, {**made, "offsets": torch.tensor(ends, dtype=torch.int32), "d": d}, 4)
    start = 0
    for expert, end in enumerate(ends):
        assert torch.equal(d[:, :, expert], (a[:, start:end, 0] @ b[:, start:end, 0].T).float()), expert
        start = end


def problem(draw: random.Random, arch: str, types: Types, tile: Any, cluster: Any) -> dict[str, Any]:
    """The rest of a problem: majors, sizes that the copy engine can take, schedule."""
    major, out = draw.choice(majors(arch, types)), draw.choice("nm")
    step = 128 // bits(types[0])  # elements in 16 bytes

    def size(most: int, whole: int) -> int:
        return -(-draw.randint(1, most) // whole) * whole

    height, width = tile[0] * cluster[0], tile[1] * cluster[1]
    if arch == BLACKWELL:
        height = 128 * cluster[0]
    dynamic = arch == BLACKWELL and draw.random() < 0.5
    return {
        "m": size(height * 3 // 2, max(step if major[0] != "k" else 1, 4 if out == "m" else 1)),
        "n": size(width * 3 // 2, max(step if major[1] != "k" else 1, 4 if out == "n" else 1)),
        "k": size(2600 // bits(types[0]) * 2, step),
        "batch": draw.randint(1, 2),
        "major": major,
        "out": out,
        **options(arch, tile, cluster),
        **({"dynamic": True} if dynamic else {}),
    }


MATRIX = [(arch, types, *shape) for arch in ARCHES for types in TYPES[arch] for shape in shapes(arch, types)]


@pytest.mark.full
@pytest.mark.parametrize(("arch", "types", "tile", "cluster"), MATRIX)
def test_the_whole_matrix(arch: str, types: Types, tile: Any, cluster: Any) -> None:
    """All types with all tiles and clusters; majors, sizes and schedules drawn for each."""
    check(arch, types, **problem(random.Random(str((arch, types, tile, cluster))), arch, types, tile, cluster))


def random_problem(arch: str, data: Any) -> None:
    types = data.draw(st.sampled_from(TYPES[arch]))
    tile, cluster = data.draw(st.sampled_from(list(shapes(arch, types))))
    check(arch, types, **problem(data.draw(st.randoms(use_true_random=False)), arch, types, tile, cluster))


BRIEFLY: dict[str, Any] = {"derandomize": True, "suppress_health_check": list(HealthCheck), "database": None}


@pytest.mark.parametrize("arch", ARCHES)
@settings(max_examples=2, **BRIEFLY)
@given(data=st.data())
def test_random_problems(arch: str, data: Any) -> None:
    random_problem(arch, data)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", range(8))  # for as many processes
@pytest.mark.parametrize("arch", ARCHES)
@settings(max_examples=8, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_many_random_problems(arch: str, share: int, data: Any) -> None:
    random_problem(arch, data)
