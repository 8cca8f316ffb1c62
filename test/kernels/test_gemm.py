"""The Hopper GEMM in the emulator, with race detection: exact products over types, majors, clusters, tiles, sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

ptx_emulator = pytest.importorskip("ptx_emulator")

from cudnn_kernels.epilogue import Amax, LoadTile, SquaredReluBackward, StoreTile, SumRow  # noqa: E402
from cudnn_kernels.schedule import GroupedRows  # noqa: E402
from emulator.mutation import mutants  # noqa: E402
from support import gemm  # noqa: E402

STORE = (StoreTile("d", "float32"),)
K_TILE = {"bfloat16": 64, "float16": 64, "float32": 32, "float8_e4m3fn": 128, "float8_e5m2": 128}


def check(a: str, m: int, n: int, k: int, batch: int = 1, b: str = "", tile: Any = (128, 128), **options: Any) -> Any:
    c = gemm.configuration(STORE, a, b, tile=(*tile, K_TILE[a]), promote=int("float8" in a), **options)
    given, expected, report = gemm.run(c, m, n, k, batch)
    assert torch.equal(given[0], expected[0])
    return report


@pytest.mark.parametrize(
    ("a", "b", "majors"),
    [
        *(("bfloat16", "bfloat16", majors) for majors in ("kk", "kn", "mk", "mn")),
        ("float16", "float16", "kk"),
        ("float16", "float16", "mn"),
        ("float8_e4m3fn", "float8_e4m3fn", "kk"),
        ("float8_e4m3fn", "float8_e5m2", "kk"),
        ("float8_e5m2", "float8_e4m3fn", "kk"),
        ("float8_e5m2", "float8_e5m2", "kk"),
        ("float32", "float32", "kk"),
    ],
)
def test_types_and_majors(a: str, b: str, majors: str) -> None:
    """Two batches, partial tiles in every dimension."""
    check(a, 144, 160, 208, 2, b, a_major=majors[0], b_major=majors[1])


@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_clusters(cluster: tuple[int, int], pingpong: bool) -> None:
    """More tiles than CTAs, and clusters that reach beyond the product."""
    majors: dict[str, Any] = {"a_major": "m", "b_major": "n"} if cluster == (1, 2) else {}
    report = check("bfloat16", 648, 136, 136, 1, tile=(64 if pingpong else 128, 64), cluster=cluster,
                   pingpong=pingpong, **majors)  # fmt: skip
    tiles = -(-648 // (64 if pingpong else 128)) * -(-136 // 64)
    assert report.launches[0].grid[2] * cluster[0] * cluster[1] == 4 < tiles


@pytest.mark.parametrize("tile", [(64, 256), (128, 192), (128, 256), (256, 128)])
def test_tiles(tile: tuple[int, int]) -> None:
    check("bfloat16", 264, 264, 64, tile=tile, pingpong=tile[0] == 64)


@pytest.mark.parametrize(("m", "n", "k", "batch"), [(1, 1, 8, 1), (1, 129, 8, 3), (127, 3, 72, 1), (131, 67, 520, 2)])
def test_odd_sizes(m: int, n: int, k: int, batch: int) -> None:
    """M and N are free where K is contiguous; the output is column after column, or row after row."""
    for major in "nm":
        c = gemm.configuration((StoreTile("d", "float32", major),))
        rows, columns = (m, -(-n // 4) * 4) if major == "n" else (-(-m // 4) * 4, n)
        given, expected, _ = gemm.run(c, rows, columns, k, batch)
        assert torch.equal(given[0], expected[0])


@pytest.mark.parametrize("pingpong", [False, True])
def test_rows_of_experts(pingpong: bool) -> None:
    """Experts with no rows, and rows of no expert, which stay as they were."""
    c = gemm.configuration(STORE, schedule=GroupedRows(), pingpong=pingpong)
    m, n, k, ends = 768, 136, 72, [128, 128, 512, 640]
    a, b = gemm.operand(m, k, 1, c.a, "k"), gemm.operand(n, k, len(ends), c.b, "k")
    d = gemm.matrix(m, n, 1, "float32")
    kernel = gemm.compiled(c)
    with ptx_emulator.emulate(gemm.ARCH, races=True):
        kernel(a, b, torch.tensor(ends, dtype=torch.int32), d, 4, 0)
    start = 0
    for expert, end in enumerate(ends):
        assert torch.equal(d[start:end, :, 0], a[start:end, :, 0].float() @ b[:, :, expert].float().T)
        start = end
    assert d[start:].isnan().all()


def launcher(c: Any, m: int, n: int, k: int) -> Any:
    torch.manual_seed(0)
    a, b = gemm.operand(m, k, 1, c.a, c.a_major), gemm.operand(n, k, 1, c.b, c.b_major)
    given = gemm.arguments(c.epilogue, m, n, 1)
    expected = [x.clone() for x in given]
    gemm.reference.evaluate(c.epilogue, gemm.product(a, b), expected)
    kernel = gemm.compiled(c)
    fresh = [x.clone() for x in given]

    def run(scheduler: str, seed: int) -> bool:
        for x, y in zip(given, fresh, strict=True):
            x.copy_(y)
        with ptx_emulator.emulate(gemm.ARCH, races=True, scheduler=scheduler, seed=seed):
            kernel(a, b, *given, 2, 0)
        return all(torch.allclose(x.float(), y.float(), rtol=1e-5, atol=1e-4)
                   for x, y in zip(given, expected, strict=True))  # fmt: skip

    return run


EPILOGUE = (LoadTile("c", "bfloat16"), SquaredReluBackward(), SumRow("s", "prob_gradient"), Amax(),
            StoreTile("d", "bfloat16"))  # fmt: skip
PLANTED = {  # with sizes m, n, k: enough tiles to fill each buffer again after a tile's last release
    "cooperative": (gemm.configuration(EPILOGUE, tile=(128, 64, 128), cluster=(2, 1), part=32), (768, 64, 384)),
    "ping-pong": (gemm.configuration(EPILOGUE, tile=(64, 64, 64), pingpong=True, part=32), (512, 64, 192)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_no_false_alarm_over_twenty_seeds(name: str) -> None:
    run = launcher(PLANTED[name][0], 512, 64, 192)
    for seed in range(20):
        assert run("random" if seed % 2 else "lazy", seed)


@pytest.mark.parametrize("name", PLANTED)
def test_each_synchronisation_is_missed(name: str) -> None:
    """Barriers, fences, arrivals, commits and waits, dropped one at a time."""
    configuration, sizes = PLANTED[name]
    attempts = [("lowest-pc", 0), *((scheduler, seed) for seed in range(3) for scheduler in ("random", "lazy"))]
    results = mutants(launcher(configuration, *sizes), attempts)
    assert len(results) > 30
    assert not [mutant for mutant in results if mutant.outcome == "survived"]
