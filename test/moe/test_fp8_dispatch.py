"""Layers in e4m3 over ranks: tokens are quantized before they are sent."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

import cudnn
from cudnn import moe
from cudnn.gemm.scales import token_block_ranges
from cudnn.moe import Exchange, exchange, experts
from cudnn.moe.compile_ahead import expert_kernels
from cudnn.moe.quantizing import quantized, quantized_rows, quantized_tokens
from cudnn.runtime import emulation
from support.expert_parallel import EXPERTS, TOP_K, Case, check_rank, over_gpus
from support.ranks import Rank, Threads, one_rank, run_processes

ARCHS = ("sm_90a", "sm_100a")


def same(actual: Any, expected: Any, rows: Any = slice(None)) -> None:
    """The bits of values and scales."""
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(*(t[rows].clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (a, b)))


@pytest.mark.parametrize("columns", [128, 256, 512, 7168])
def test_rows_and_their_scales_are_one_row(columns: int) -> None:
    x = torch.randn(5, columns).bfloat16()
    rows = quantized_rows(x)
    values, scales = rows.pair
    assert rows.columns == columns
    assert rows.words.stride(0) * 4 % 16 == 0
    assert 0 <= rows.words.stride(0) * 4 - columns - columns // 32 < 16
    assert (values.stride(0), scales.stride(0)) == (rows.words.stride(0) * 4, rows.words.stride(0))
    same(rows.pair, quantized(x))
    assert quantized_rows(x[:0]).words.shape == (0, rows.words.shape[1])


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=pytest.mark.full) for arch in ARCHS])
@pytest.mark.parametrize("columns", [128, 384])
def test_kernels_that_read_e4m3(arch: str, columns: int) -> None:
    """By rows the same bits as from 16 bits; by token columns those of the reference."""
    x = torch.randn(150, columns).bfloat16()
    x[3, :128] = 0.0
    x[5, 7] = torch.nan
    offsets, gather_idx, scatter_idx = moe.sort(torch.randint(-1, 4, (150, 2), dtype=torch.int32), 4)
    offsets[2:] = offsets[1]  # two experts without rows
    end = int(offsets[-1])
    rows = slice(0, end)
    by_rows, columns_of_rows = quantized_tokens(quantized_rows(x), gather_idx, offsets, 300, True)
    same(by_rows, quantized_tokens(x, gather_idx, offsets, 300, True)[0], rows)
    with cudnn.emulation(arch, races=True):
        packed = quantized_rows(x)
        same(packed.pair, quantized(x))
        same(quantized(packed, scatter_idx, 300), quantized(x, scatter_idx, 300), rows)
        again, of_columns = quantized_tokens(packed, gather_idx, offsets, 300, True)
        _, of_sorted = quantized_tokens(packed.permuted(scatter_idx, 300), None, offsets, 300, False)
    same(again, by_rows, rows)
    for _, blocks in token_block_ranges(offsets):
        for actual in (of_columns, of_sorted):
            assert torch.equal(
                actual.blocks[blocks].float().nan_to_num(9e9), columns_of_rows.blocks[blocks].float().nan_to_num(9e9)
            )
            torch.testing.assert_close(
                actual.scales[blocks], columns_of_rows.scales[blocks], rtol=0, atol=0, equal_nan=True
            )


@pytest.fixture
def sent_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each row of tokens or gradients that is sent to another rank or to this one, call by call."""
    widths: list[int] = []
    scatter, run = exchange.AllToAll.scatter, exchange.run

    def recorded_scatter(self: Any, values: torch.Tensor, sent: Any) -> torch.Tensor:
        widths.append(values.shape[1] * values.element_size())
        return scatter(self, values, sent)

    def recorded_run(source: str, configuration: Any, *arguments: Any) -> None:
        if source.endswith(":Dispatch"):
            widths.append(arguments[0].shape[1] * arguments[0].element_size())
        run(source, configuration, *arguments)

    monkeypatch.setattr(exchange.AllToAll, "scatter", recorded_scatter)
    monkeypatch.setattr(exchange, "run", recorded_run)
    return widths


ROUTING_BYTES = 2 * TOP_K * 4  # of indices and weights, which all_to_all_single sends as rows too
WIDE, NARROW = 2 * 128, 128 + 16  # bytes of a row of 128 elements; the scale is filled up to 16


@pytest.mark.parametrize("counts", [(37, 41), (37, 0), pytest.param((19, 0, 30, 41), marks=pytest.mark.full)], ids=str)
def test_by_all_to_all(counts: tuple[int, ...], sent_bytes: list[int], tmp_path: pathlib.Path) -> None:
    """With dropped slots, ranks without tokens, and ranks whose experts get none."""
    cases = [(Case(counts, routing), fp8) for routing in ("together", "first") for fp8 in (True, "blockwise")]
    cases.append((Case(counts, "together", bias=True), "blockwise"))
    expected = [case.run(fp8) for case, fp8 in cases]

    def rank(number: int) -> None:
        for (case, fp8), alone in zip(cases, expected, strict=True):
            sent_bytes.clear()
            check_rank(case, alone, fp8, number, dist.group.WORLD)
            forward, backward = (WIDE, WIDE) if fp8 is True else (NARROW, WIDE if case.bias else NARROW)
            one_round = [ROUTING_BYTES, forward, backward, ROUTING_BYTES, NARROW]  # training, inference
            assert sent_bytes == one_round * 2
        anywhere(number, counts)
        different_modes(number)

    run_processes(len(counts), tmp_path, rank)


def anywhere(rank: int, counts: tuple[int, ...]) -> None:
    """Experts of a token on several ranks, whose sums are rounded to 16 bits: the bits of tokens sent in 16 bits."""
    case = Case(counts, "anywhere")
    trained = {fp8: case.run(fp8, rank, dist.group.WORLD) for fp8 in (True, "blockwise")}
    assert torch.equal(trained["blockwise"]["y"], trained[True]["y"])  # sent in e4m3, and in 16 bits
    assert torch.equal(case.run(True, rank, dist.group.WORLD, grad=False)["y"], trained[True]["y"])
    alone = case.run("blockwise")
    for name in ("y", "x", "weights"):
        close = alone[name][case.parts(rank)[name]].float()
        torch.testing.assert_close(trained["blockwise"][name].float(), close, rtol=0.02, atol=0.02)


def different_modes(rank: int) -> None:
    """Ranks of which some need gradients would send rows of different widths."""
    group, case = dist.new_group(), Case((8,) * dist.get_world_size(), "together")
    with pytest.raises(ValueError, match=r"layer: got dispatch=.+ on rank \d, dispatch=.+ on rank"):
        case.run(True, rank, group, grad=rank > 0)


@pytest.fixture(params=[False, True], ids=["copies", "gathers"])
def gathers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the up GEMM on Hopper gathers rows."""
    monkeypatch.setattr(experts.Permutation, "gathers", lambda *_: request.param)
    experts._OPS.clear()
    yield request.param
    experts._OPS.clear()


@pytest.mark.full
@pytest.mark.parametrize(("arch", "counts"), [("sm_90a", (13, 9)), ("sm_100a", (13, 9)), ("sm_90a", (5, 0, 7, 3))])
def test_by_kernels_on_shared_memory(
    arch: str, counts: tuple[int, ...], gathers: bool, sent_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if arch == "sm_100a" and not gathers:
        pytest.skip("Blackwell's GEMMs always gather")
    cases = [(Case(counts, "together"), fp8) for fp8 in (True, "blockwise")]
    with cudnn.emulation(arch):
        expected = [case.run(fp8) for case, fp8 in cases]

    def rank(group: Rank) -> None:
        arguments: dict[str, Any] = {"max_tokens": 13, "device": "cpu", "symmetric": True}
        with cudnn.emulation(arch, races=len(counts) == 2):
            parallel = Exchange(group, EXPERTS, TOP_K, 128, **arguments)
            for (case, fp8), alone in zip(cases, expected, strict=True):
                check_rank(case, alone, fp8, group.number, parallel)

    Threads(len(counts), monkeypatch).run(rank)
    assert set(sent_bytes) == {WIDE, NARROW}
    assert sent_bytes.count(WIDE) < sent_bytes.count(NARROW)


@pytest.mark.parametrize("fp8", [True, "blockwise"])
def test_kernels_of_a_layer_over_ranks_are_compiled_ahead(fp8: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that multiply and quantize tokens which come in e4m3."""
    launched, emulated_kernel = set[Any](), emulation.emulated_kernel

    def recorded(*args: Any) -> Callable[..., None]:
        launched.add(args)
        return emulated_kernel(*args) if ":Route" in args[0] else lambda *_: None  # GEMMs check the offsets

    monkeypatch.setattr(emulation, "emulated_kernel", recorded)
    case = Case((40,), "together")
    with one_rank(), cudnn.emulation("sm_90a"):
        for grad in (False, True):
            case.run(fp8, 0, dist.group.WORLD, grad=grad)
    weights = [[case.tensors[name].to("meta")] for name in ("up", "down")]
    recipe = "forward" if fp8 is True else fp8
    layer = experts.Experts(*weights, None, None, "swiglu", [1.0, 1.702, 7.0, -7.0], "interleaved", recipe, True)
    known = set(expert_kernels(layer, False, TOP_K, 64, "sm_90a", 132, over_ranks=True))
    multiply = {key for key in launched if "quantize" in key[0] or ".gemm:" in key[0]}
    assert len(multiply) > 4
    assert multiply <= known


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_gpus(tmp_path: pathlib.Path) -> None:
    multiprocessing.spawn(over_gpus, (2, str(tmp_path / "store")), nprocs=2)
