"""Attention kernels in the emulator, with races detected, against a float64 formula that shares no code."""

from __future__ import annotations

import math
import pkgutil
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch

from cudnn_kernels import compiler, fakes
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.attention import (
    DESCALES,
    BackwardConfiguration,
    DecodeConfiguration,
    ForwardConfiguration,
    GradientsConfiguration,
    backward,
    flash_bwd_preprocess,
    forward,
)
from cudnn_kernels.signature import Workspace, workspace_size
from cudnn_kernels.sm90 import attention_backward
from cudnn_kernels.sm90.attention_forward import AttentionForward
from cudnn_kernels.sm90.heuristics import attention as heuristics
from support.compiled import compile_kernel
from support.dense_attention import attend, band
from support.sass import disassemble
from support.selection import brief

ptx_emulator = pytest.importorskip("ptx_emulator")
machine = pytest.importorskip("ptx_emulator.machine")

FORWARD = ForwardConfiguration("bfloat16", 256, 256, (128, 80))
BLACKWELL = ForwardConfiguration("bfloat16", 256, 256, (128, 128))  # one tile of rows
DRAWING = ForwardConfiguration("bfloat16", 128, 128, (128, 128), dynamic_scheduler=True)
HOLDING = replace(DRAWING, dynamic_scheduler=False, loop_bounds_in_registers=True)
DECODE = DecodeConfiguration(
    "bfloat16", 256, 256, (64, 64), right=True, left=True, sink=True, cached=True, page_size=16
)
TWO_TILES = ForwardConfiguration("bfloat16", 64, 64, (256, 128))
PAIRED = BackwardConfiguration("bfloat16", 256, 256, (64, 80), pair=True)
BACKWARD = BackwardConfiguration("bfloat16", 128, 128, (80, 128))
THIN = BackwardConfiguration("bfloat16", 96, 96, (64, 128), v_in_registers=True)
WIDE = BackwardConfiguration("bfloat16", 192, 128, (64, 112), pair=True)
WIDER = replace(WIDE, head_dim_v=192, tile=(64, 96))
QUEUE = BackwardConfiguration("bfloat16", 64, 64, (128, 128), dynamic_scheduler=True)
SORTED = replace(BACKWARD, longest_first=True)
LONG_QUEUE = replace(QUEUE, head_dim=128, head_dim_v=128, tile=(64, 128))

SPLIT = {"split": 3, "parts": 3}


@dataclass(frozen=True)
class Problem:
    """``lengths`` are (queries, keys) of each sequence; None: the window has no end on that side.

    The tensors of the sequences ``nan`` are NaN, which must not reach the others. With ``grows``, scores grow so much
    from the last key to the first, that is in the order in which kernels take them.
    """

    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (1, 1)
    packed: bool = False
    right: int | None = None
    left: int | None = None
    dtype: torch.dtype = torch.bfloat16
    nan: tuple[int, ...] = ()
    softcap: float = 0.0
    sink: bool = False
    top_left: bool = False
    grows: float = 0.0

    @property
    def result(self) -> torch.dtype:
        """O's type."""
        return torch.bfloat16 if self.dtype.itemsize == 1 else self.dtype

    @property
    def ends(self) -> dict[str, bool]:
        """Options of a configuration."""
        right, left = (end is not None for end in (self.right, self.left))
        return {"varlen": self.packed, "right": right, "left": left, "top_left": self.top_left}

    def configured(self, configuration: Any) -> Any:
        """A configuration for this problem."""
        dtype = str(self.dtype).removeprefix("torch.")
        if isinstance(configuration, ForwardConfiguration):
            configuration = replace(configuration, sink=self.sink)
            if self.dtype is not self.result:
                configuration = replace(configuration, out_dtype="bfloat16")
        return replace(configuration, dtype=dtype, softcap=self.softcap > 0, **self.ends)


def meant(tensors: dict[str, torch.Tensor], name: str, problem: Problem) -> torch.Tensor:
    """What the elements of Q, K or V stand for, in float64."""
    x = tensors[name].double().clone()
    if problem.dtype is problem.result:
        return x
    descale = tensors[f"descale_{name}"].double()
    return x * descale.repeat_interleave(len(x) // len(descale))[:, None, None]


def reference(tensors: dict[str, torch.Tensor], scale: float, problem: Problem) -> dict[str, torch.Tensor]:
    """Results of one sequence in float64, from (h, s, d) and, with ``do``, the gradients."""
    q, k, v = (meant(tensors, name, problem).requires_grad_() for name in "qkv")
    cap, sink = problem.softcap, tensors["sink"] if problem.sink else None
    seen = band(q.shape[1], k.shape[1], problem.left, problem.right, bottom_right=not problem.top_left)
    modify = (lambda x: cap * (x / cap).tanh()) if cap else None
    o, lse, *_ = attend(q, k, v, seen, scale=scale, modify=modify, sink=sink)
    o.backward(tensors["do"].double())
    actual = {"o": o, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: value.detach() for name, value in actual.items() if value is not None}


def drawn(problem: Problem, head: int, head_v: int) -> dict[str, Any]:
    """Random tensors, results of NaN, and the other arguments of both passes."""
    hq, hk = problem.heads
    several = (1, sum(q for q, _ in problem.lengths), sum(k for _, k in problem.lengths))
    batch, sq, sk = several if problem.packed else (len(problem.lengths), *problem.lengths[0])

    def made(rows: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.randn(batch, rows, heads, width).to(dtype)
        return x[0] if problem.packed else x.transpose(1, 2)

    kind = problem.dtype
    actual: dict[str, Any] = {
        "q": made(sq, hq, head, kind),
        "do": made(sq, hq, head_v, problem.result),
        "k": made(sk, hk, head, kind),
        "v": made(sk, hk, head_v, kind),
    }
    if problem.grows:
        factors = torch.linspace(problem.grows, 0, sk, dtype=kind)
        actual["q"].abs_()
        actual["k"].abs_().mul_(factors[:, None, None] if problem.packed else factors[:, None])
    actual |= {name: torch.rand(hk, len(problem.lengths)).T + 0.5 for name in DESCALES if kind is not problem.result}
    for name, like in (("o", "do"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        actual[name] = torch.full_like(actual[like], math.nan)
    actual["sink"] = torch.linspace(-1, 9, hq)
    actual["lse"] = torch.full((sq, hq) if problem.packed else (batch, hq, sq), math.nan)
    for i, name in enumerate(("cum_seqlen_q", "cum_seqlen_k")):
        ends = torch.tensor([0, *(lengths[i] for lengths in problem.lengths)]).cumsum(0)
        actual[name] = ends.to(torch.int32)
    for index in problem.nan:
        for name in ("q", "do", "k", "v"):
            sequence(actual, problem, index)[name].fill_(math.nan)
    numbers = {"scale_softmax": 1.3 / math.sqrt(head), "scale_output": 1.0, "softcap": problem.softcap}
    numbers |= SPLIT
    ends = {"right": problem.right or 0, "left": problem.left or 0}
    inputs = {**actual, **numbers, **ends, "num_sms": 3, "stream": 0}
    return inputs | {"workspace": torch.full((4096,), 255, dtype=torch.uint8)}


def sequence(inputs: dict[str, Any], problem: Problem, index: int) -> dict[str, torch.Tensor]:
    """The tensors of one sequence, (h, s, d), and LSE, (h, s)."""
    actual = {"sink": inputs["sink"]} | {name: inputs[name][index] for name in DESCALES if name in inputs}
    for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv"):
        if problem.packed:
            ends = inputs["cum_seqlen_k" if name in ("k", "v", "dk", "dv") else "cum_seqlen_q"]
            actual[name] = inputs[name][ends[index] : ends[index + 1]].transpose(0, 1)
        else:
            actual[name] = inputs[name][index]
    actual["lse"] = inputs["lse"][index] if not problem.packed else inputs["lse"].view(inputs["lse"].shape[::-1])
    if problem.packed:  # one head's values after the other's, whatever the shape says
        actual["lse"] = actual["lse"][:, inputs["cum_seqlen_q"][index] : inputs["cum_seqlen_q"][index + 1]]
    return actual


def kernel(arch: str, configuration: Any) -> Any:
    """The kernel of an architecture for a configuration."""
    return pkgutil.resolve_name(ARCHITECTURES[arch].source(configuration))(configuration)


def run(arch: str, configuration: Any, inputs: dict[str, Any]) -> None:
    """Compiles a kernel and runs it in the emulator."""
    with ptx_emulator.emulate(arch, races=True):
        compiled = compiler.compile_for(arch, kernel(arch, configuration), *fakes.arguments(configuration))
        compiled(*(inputs[slot.name] for slot in configuration.slots()))


def backward_arguments(configuration: BackwardConfiguration, problem: Problem) -> dict[str, Any]:
    """:func:`drawn`, with the results of the forward pass and a workspace full of NaN."""
    inputs = drawn(problem, configuration.head_dim, configuration.head_dim_v)
    for index in range(len(problem.lengths)):
        actual = sequence(inputs, problem, index)
        expected = reference(actual, inputs["scale_softmax"], problem)
        actual["o"].copy_(expected["o"])
        actual["lse"].copy_(expected["lse"])
    heads, ends = inputs["q"].shape[1], len(problem.lengths)
    rows = inputs["q"].shape[0 if problem.packed else 2]
    slots = problem.configured(configuration).slots()
    keys = inputs["k"].shape[0 if problem.packed else 2]
    size = workspace_size(slots, {"sq": rows, "sk": keys, "hq": heads, "b": ends, **SPLIT})
    return inputs | {"workspace": torch.full((size,), 255, dtype=torch.uint8)}


def assert_right(inputs: dict[str, Any], problem: Problem, names: tuple[str, ...]) -> None:
    """Compares results: their error is at most that of rounding P, dS and the result once each.

    P in 8 bits is off by 0.2 eps of its norm, and scores by what Hopper drops of sums of such products.
    """
    small = problem.dtype is not problem.result
    for index in range(len(problem.lengths)):
        actual = sequence(inputs, problem, index)
        if actual["q"].numel() == 0 or index in problem.nan:
            continue
        expected = reference(actual, inputs["scale_softmax"], problem)
        for name in names:
            error = (actual[name].double() - expected[name]).norm()
            assert error <= (0.4 if small else 2) * torch.finfo(problem.dtype).eps * expected[name].norm() + 1e-6, name
        if "o" in names:
            torch.testing.assert_close(actual["lse"].double(), expected["lse"], rtol=1e-6, atol=1e-2 if small else 2e-6)


LENGTHS = ((50, 100), (9, 7), (0, 10), (150, 170), (3, 1), (30, 20))
ONE_END: dict[str, Any] = {"varlen": False, "right": True, "left": False, "deterministic": False}
PACKED = Problem(LENGTHS, packed=True, right=0, nan=(1, 4), sink=True)
SHORT = Problem(((9, 7), (0, 10), (70, 150), (3, 1)), heads=(2, 1), packed=True, right=0, left=60, nan=(0, 3))
UNSEEN = replace(SHORT, lengths=(*SHORT.lengths, (100, 5)))  # whole blocks of rows that see no key
WINDOW = Problem(((200, 290),) * 2, heads=(2, 1), right=5, left=100, dtype=torch.float16, nan=(1,))
CAUSAL = Problem(((200, 290),), right=0)
SECTIONS = Problem(((100, 150),), heads=(5, 5), right=0, softcap=1.5, sink=True)
CAPPED = Problem(((70, 300),) * 2, heads=(2, 1), softcap=1.5, sink=True)
GROWING = Problem(((70, 500),), grows=40.0)
GROUPED = Problem(((200, 330),) * 2, heads=(4, 2), dtype=torch.float16)
SMALL_TYPES = [replace(x, heads=(2, 1), dtype=torch.float8_e4m3fn) for x in (PACKED, GROUPED)]
SMALL_TYPES += [replace(WINDOW, dtype=torch.float8_e5m2, softcap=1.5)]
TABLE = [
    (heads, problem)
    for heads in ((96, 96), (192, 192))
    for problem in (GROUPED, replace(PACKED, heads=(2, 1), left=60), WINDOW, SECTIONS)
]


@pytest.mark.parametrize(
    ("arch", "configuration", "problem"),
    brief(
        [
            ("sm_90a", FORWARD, replace(PACKED, softcap=1.5)),
            *(
                ("sm_90a", heuristics.configure_forward("", heads, WINDOW.ends), WINDOW)
                for heads in ((256, 256), (64, 64))
            ),
            ("sm_90a", DRAWING, replace(SECTIONS, lengths=((100, 150), (0, 10), (9, 7)), packed=True)),
            ("sm_100a", TWO_TILES, PACKED),
            ("sm_90a", replace(DRAWING, dynamic_scheduler=False), SMALL_TYPES[0]),
            ("sm_90a", replace(FORWARD, head_dim=192, head_dim_v=128, tile=(128, 128)), CAPPED),
            ("sm_90a", HOLDING, SECTIONS),
            ("sm_90a", heuristics.configure_forward("", (64, 64), GROWING.ends), GROWING),
            ("sm_90a", HOLDING, replace(GROWING, right=-175, grows=3.0)),  # the first row sees none of the first block
            ("sm_90a", DRAWING, replace(GROWING, packed=True, left=400, grows=1000.0)),  # powers are infinite
            ("sm_90a", FORWARD, replace(GROWING, lengths=((70, 300),), softcap=60.0, sink=True)),
            ("sm_100a", BLACKWELL, PACKED),
            ("sm_100a", BLACKWELL, WINDOW),
            ("sm_100a", replace(TWO_TILES, head_dim=128, head_dim_v=128), WINDOW),
            ("sm_100a", replace(TWO_TILES, head_dim=192, head_dim_v=128), CAPPED),
            ("sm_100a", BLACKWELL, Problem(((130, 1030),), (4, 2))),
            *(
                (arch, ARCHITECTURES[arch].attention.configure_forward("", heads, problem.ends), problem)
                for heads, problem in TABLE
                for arch in ("sm_90a", "sm_100a")
            ),
            ("sm_90a", replace(FORWARD, tile=(128, 64)), replace(WINDOW, right=None)),
            ("sm_100a", TWO_TILES, replace(WINDOW, right=None)),
            (
                "sm_90a",
                heuristics.configure_forward("", (64, 64), PACKED.ends),
                replace(PACKED, top_left=True),
            ),
            ("sm_100a", TWO_TILES, replace(PACKED, top_left=True)),
            *(
                (
                    "sm_90a",
                    heuristics.configure_forward("", heads, problem.ends, out_dtype="bfloat16"),
                    problem,
                )
                for heads in heuristics.FORWARD_TILES
                for problem in SMALL_TYPES
            ),
        ],
        2,
        3,
        4,
        8,
    ),
)
def test_forward(
    arch: str, configuration: ForwardConfiguration, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "L2_BYTES", 240_000)  # three of five heads of SECTIONS
    inputs = drawn(problem, configuration.head_dim, configuration.head_dim_v)
    run(arch, problem.configured(configuration), inputs)
    assert_right(inputs, problem, ("o",))


class Counting(AttentionForward):
    """Writes how many blocks of keys each CTA takes where LSE would be."""

    @cute.jit
    def body(self, params: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            self.for_each_tile(params, lambda info, n_blocks_done, q_phase: self.count(params, info, n_blocks_done))

    def count(self, params: Any, info: Any, n_blocks_done: Any) -> None:
        cta, _, _ = cute.arch.block_idx()
        begin, _, _, end = self.n_block_range(info)
        params.lse[cta, 0, 0] = cutlass.Float32(n_blocks_done + end - begin)


def test_ctas_take_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads that do not make up whole sections, and rows of which the last ones see most."""
    monkeypatch.setattr(forward, "L2_BYTES", 3 * 256 * 1024)  # three of eight heads
    c = ForwardConfiguration("bfloat16", 64, 64, (128, 32), right=True)
    inputs = drawn(Problem(((1024, 1024),), heads=(8, 8), right=0), 64, 64) | {"num_sms": 17}
    with ptx_emulator.emulate("sm_90a"):
        compiler.compile_for("sm_90a", Counting(c), *fakes.arguments(c))(*(inputs[slot.name] for slot in c.slots()))
    counts = inputs["lse"][0, 0, :17]
    assert counts.sum() == 8 * sum(range(4, 33, 4))
    assert counts.max() <= 1.1 * counts.mean()


class Sorting(AttentionForward):
    """Puts tiles in order, and computes nothing."""

    @cute.jit
    def body(self, params: Any) -> None:
        pass


def test_tiles_with_most_keys_are_drawn_first() -> None:
    """The dynamic scheduler issues short tiles last, so that all CTAs end at about the same time."""
    lengths = tuple((37 * i % 300 * (i % 5 > 0), 53 * i % 400 // 4) for i in range(45))
    c = ForwardConfiguration("bfloat16", 64, 64, (128, 32), varlen=True, dynamic_scheduler=True)
    inputs = drawn(Problem(lengths, packed=True), 64, 64)
    with ptx_emulator.emulate("sm_90a", races=True):
        compiler.compile_for("sm_90a", Sorting(c), *fakes.arguments(c))(*(inputs[slot.name] for slot in c.slots()))
    expected: list[tuple[int, int]] = []
    for i in sorted(range(45), key=lambda i: lengths[i][1]):
        expected += [(i, len(expected))] * math.ceil(lengths[i][0] / 128)
    size = workspace_size(c.slots(), {"sq": sum(q for q, _ in lengths), "b": 45})
    assert size >= 8 * (1 + len(expected))
    order = inputs["workspace"][:size].view(torch.int32).view(-1, 2)[: 1 + len(expected)]
    assert order.tolist() == [[0, len(expected)], *map(list, expected)]


class SortingBlocks(attention_backward.Backward):
    """Sorts blocks alone."""

    def launch(self, arguments: Any) -> None:
        scheduler, _ = backward.make_scheduler_params(self.c, arguments, self.c.cluster_tile_n)
        scheduler.block_order = flash_bwd_preprocess.make_workspace(self.c, arguments).block_order
        backward.SortBlocks(self.c).launch(scheduler, arguments["stream"])


@pytest.mark.parametrize("ends", [{}, {"right": 0}, {"right": 3, "left": 70}, {"right": 0, "top_left": True}])
def test_blocks_with_most_rows_come_first(ends: dict[str, Any]) -> None:
    """Blocks of a sequence stay in ascending order: a semaphore lets them add to dQ in it."""
    lengths = tuple((37 * i % 300 * (i % 5 > 0), 53 * i % 400 * (i % 7 > 0)) for i in range(45))
    problem = Problem(lengths, packed=True, **ends)
    c = problem.configured(BackwardConfiguration("bfloat16", 64, 64, (64, 32), longest_first=True))
    inputs = drawn(problem, 64, 64)
    sizes = {"sq": len(inputs["q"]), "sk": len(inputs["k"]), "hq": 1, "b": 45}
    inputs["workspace"] = torch.full((workspace_size(c.slots(), sizes),), 255, dtype=torch.uint8)
    with ptx_emulator.emulate("sm_90a", races=True):
        compiler.compile_for("sm_90a", SortingBlocks(c), *fakes.arguments(c))(*(inputs[x.name] for x in c.slots()))

    def rows(sequence: int, block: int) -> int:
        queries, keys = lengths[sequence]
        first = block * 32 - (0 if problem.top_left else keys - queries) - (problem.right or 0)
        visible = queries - (max(first, 0) if problem.right is not None else 0)
        return visible if problem.left is None else min(visible, 32 + problem.left + (problem.right or 0))

    blocks = [(i, j) for i, (_, keys) in enumerate(lengths) for j in range(-(-keys // 32))]
    starts = [sum(keys for _, keys in lengths[:i]) // 32 + i for i in range(45)] + [len(inputs["k"]) // 32 + 45]
    missing = [(i, j) for i in range(45) for j in range(-(-lengths[i][1] // 32), starts[i + 1] - starts[i])]
    workspace = next(x for x in c.slots() if isinstance(x, Workspace))
    first, count = workspace.offsets(sizes)[0]["block_order"], 2 * starts[-1]
    order = inputs["workspace"][first:][: 4 * count].view(torch.int32).view(-1, 2).tolist()
    assert order == [*map(list, sorted(blocks, key=lambda x: -rows(*x))), *map(list, missing)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("arch", "configuration", "kernels"),
    [
        ("sm_90a", ForwardConfiguration("bfloat16", 64, 64, (192, 128)), 1),
        ("sm_100a", TWO_TILES, 1),
        ("sm_90a", replace(BACKWARD, head_dim=64, head_dim_v=64, tile=(128, 128)), 3),
        ("sm_90a", replace(PAIRED, head_dim=128, head_dim_v=128, tile=(64, 32)), 3),
        ("sm_100a", GradientsConfiguration("bfloat16", 64, 64), 3),
    ],
)
def test_grids_have_one_dimension(arch: str, configuration: Any, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than 65,535, to which the other dimensions are limited."""
    grids: set[tuple[int, ...]] = set()

    def started(program: Any, launch: Any, *_: Any) -> SimpleNamespace:
        grids.add((launch.kernel, *launch.grid))
        return SimpleNamespace(run=lambda: None, started=[])

    monkeypatch.setattr(machine, "Machine", started)
    inputs = drawn(Problem(((1, 1),) * 70_000), configuration.head_dim, configuration.head_dim_v)
    size = workspace_size(configuration.slots(), {"sq": 1, "hq": 1, "b": 70_000})
    inputs |= {"num_sms": 1 << 20, "workspace": torch.empty(size, dtype=torch.uint8)}
    run(arch, configuration, inputs)
    assert len(grids) == kernels
    assert all(x >= 70_000 and rest == [1, 1] for _, x, *rest in grids)


@pytest.mark.parametrize(
    ("arch", "configuration", "problem"),
    brief(
        [
            ("sm_90a", PAIRED, replace(PACKED, heads=(2, 1), left=60)),
            ("sm_90a", replace(BACKWARD, deterministic=True), UNSEEN),
            (
                "sm_90a",
                replace(BACKWARD, head_dim=64, head_dim_v=64, tile=(128, 128)),
                Problem(((200, 290),) * 2, heads=(2, 2), right=5, dtype=torch.float16, nan=(1,)),
            ),
            ("sm_100a", GradientsConfiguration("bfloat16", 64, 64), SHORT),
            ("sm_100a", GradientsConfiguration("bfloat16", 256, 256), replace(PACKED, heads=(2, 1), left=60)),
            ("sm_100a", GradientsConfiguration("bfloat16", 256, 256), Problem(((130, 200),))),
            ("sm_100a", GradientsConfiguration("bfloat16", 128, 128), replace(WINDOW, heads=(4, 2), softcap=1.5)),
            ("sm_100a", GradientsConfiguration("bfloat16", 192, 128), Problem(((130, 170),), right=0)),
            ("sm_90a", replace(PAIRED, split=True), replace(SHORT, softcap=1.5)),
            ("sm_90a", replace(BACKWARD, deterministic=True), WINDOW),
            ("sm_90a", replace(BACKWARD, tile=(64, 128)), replace(PACKED, left=60, softcap=1.5)),
            ("sm_90a", replace(THIN, split=True), WINDOW),
            ("sm_90a", replace(THIN, deterministic=True), SHORT),
            ("sm_90a", WIDE, SHORT),
            ("sm_90a", replace(WIDE, deterministic=True, split=True), Problem(((200, 290),), heads=(2, 1), right=0)),
            ("sm_90a", WIDER, WINDOW),
            ("sm_90a", replace(WIDER, deterministic=True), SHORT),
            ("sm_100a", GradientsConfiguration("bfloat16", 96, 96), WINDOW),
            ("sm_100a", GradientsConfiguration("bfloat16", 192, 192), SHORT),
            ("sm_90a", replace(PAIRED, deterministic=True), Problem(((130, 400),), heads=(2, 1), right=0)),
            ("sm_90a", replace(PAIRED, deterministic=True), Problem(((70, 340), (100, 200)), packed=True, left=100)),
            (
                "sm_90a",
                replace(BACKWARD, head_dim=64, head_dim_v=64, tile=(128, 128)),
                Problem(((40, 30),), heads=(9, 9), right=0),
            ),
            (
                "sm_90a",
                replace(BACKWARD, tile=(64, 128), deterministic=True, split=True),
                Problem(((150, 290), (70, 400)), packed=True, left=100),
            ),
            ("sm_90a", BACKWARD, replace(WINDOW, right=None)),
            ("sm_100a", GradientsConfiguration("bfloat16", 64, 64), replace(WINDOW, right=None)),
            ("sm_90a", replace(PAIRED, deterministic=True), replace(SHORT, left=None, top_left=True)),
            ("sm_90a", QUEUE, SHORT),
            ("sm_90a", QUEUE, Problem(((200, 290),) * 2, heads=(4, 2), right=5, dtype=torch.float16, nan=(1,))),
            ("sm_90a", replace(QUEUE, tile=(64, 128), split=True), replace(WINDOW, softcap=1.5)),
            ("sm_90a", replace(BACKWARD, tile=(64, 128), split=True), replace(WINDOW, top_left=True)),
            ("sm_90a", replace(LONG_QUEUE, deterministic=True), UNSEEN),
            ("sm_90a", replace(LONG_QUEUE, split=True), replace(WINDOW, heads=(4, 2))),
            ("sm_90a", replace(LONG_QUEUE, deterministic=True, split=True), Problem(((150, 290),), (4, 1), right=0)),
            ("sm_100a", GradientsConfiguration("bfloat16", 64, 64), replace(WINDOW, top_left=True)),
            ("sm_90a", WIDE, replace(CAUSAL, heads=(3, 3))),  # last keys first, but in the last section
            ("sm_90a", QUEUE, replace(CAUSAL, heads=(9, 9))),
            ("sm_90a", replace(WIDE, deterministic=True), UNSEEN),
            ("sm_90a", replace(LONG_QUEUE, longest_first=True), replace(PACKED, heads=(2, 1), left=60)),
            ("sm_90a", replace(WIDE, longest_first=True), replace(PACKED, heads=(2, 1))),
        ],
        1,
        3,
        8,
    ),
)
def test_backward(arch: str, configuration: BackwardConfiguration, problem: Problem) -> None:
    inputs = backward_arguments(configuration, problem)
    run(arch, problem.configured(configuration), inputs)
    assert_right(inputs, problem, ("dq", "dk", "dv"))


@pytest.mark.parametrize(
    ("configuration", "problem"),
    brief(
        [
            (replace(QUEUE, tile=(64, 128)), Problem(((200, 300),), heads=(3, 3), right=0)),
            (
                replace(PAIRED, head_dim=128, head_dim_v=128, tile=(64, 32)),
                Problem(((130, 170),), heads=(6, 3), right=0),
            ),
            (replace(BACKWARD, tile=(64, 128)), Problem(((200, 400), (70, 150)), (3, 3), True, right=0, left=100)),
            (replace(SORTED, tile=(64, 128)), Problem(((70, 150), (9, 0), (200, 400)), (3, 3), True, right=0)),
            (replace(SORTED, head_dim=64, head_dim_v=64, tile=(64, 128)), Problem(((150, 300),), (3, 3), True)),
            (replace(BACKWARD, head_dim=64, head_dim_v=64, tile=(64, 128)), Problem(((150, 300),), heads=(3, 3))),
        ],
        0,
    ),
)
def test_turns_come_after_those_of_earlier_ctas(
    configuration: BackwardConfiguration, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each CTA, or pair, starts when those before are done, with two of the three heads in the first section."""
    cluster = 1 + configuration.pair
    rows = sum(queries for queries, _ in problem.lengths) // len(problem.lengths)
    bytes_each = 4 * configuration.head_dim + 2 * (configuration.head_dim + configuration.head_dim_v)
    monkeypatch.setattr(attention_backward, "L2_BYTES", 2 * rows * bytes_each)
    monkeypatch.setattr(machine, "WAVE", cluster)
    configuration = replace(configuration, deterministic=True)
    inputs = backward_arguments(configuration, problem)
    run("sm_90a", problem.configured(configuration), inputs)
    assert_right(inputs, problem, ("dq", "dk", "dv"))


@pytest.mark.parametrize(
    ("configuration", "waits"),
    [
        (replace(FORWARD, right=True), 10),
        pytest.param(replace(FORWARD, right=True, softcap=True, sink=True), 10, marks=pytest.mark.full),
        pytest.param(replace(DRAWING, varlen=True, right=True), 10, marks=pytest.mark.full),
        pytest.param(replace(HOLDING, right=True), 10, marks=pytest.mark.full),
        pytest.param(DECODE, 10, marks=pytest.mark.full),
        *(
            pytest.param(
                problem.configured(heuristics.configure_forward("", heads, problem.ends)),
                10,
                marks=pytest.mark.full,
            )
            for heads, problem in TABLE
        ),
        *(
            pytest.param(
                heuristics.configure_forward("float8_e4m3fn", heads, PACKED.ends, out_dtype="float16", sink=True),
                10,
                marks=pytest.mark.full,
            )
            for heads in heuristics.FORWARD_TILES
        ),
        *(
            pytest.param(
                ForwardConfiguration(
                    kind, *heads, tile if kind == result else (128, 128), right=True, compressed=True, out_dtype=result
                ),
                10,
                marks=pytest.mark.full,
            )
            for heads, tile in heuristics.COMPRESSION_TILES.items()
            for kind in ("float8_e4m3fn", "float16")
            for result in ("float8_e4m3fn", "bfloat16")
        ),
        (replace(PAIRED, right=True), 6),
        *(
            pytest.param(replace(queue, right=True, **x), 5, marks=pytest.mark.full)
            for queue in (QUEUE, LONG_QUEUE)
            for x in ({}, {"split": True}, {"varlen": True, "left": True, "deterministic": True})
        ),
        pytest.param(replace(BACKWARD, right=True), 5, marks=pytest.mark.full),
        *(
            pytest.param(heuristics.configure_backward("bfloat16", heads, **ends), 6, marks=pytest.mark.full)
            for heads in heuristics.BACKWARD_TILES
            for ends in (
                ONE_END,
                {**ONE_END, "split": True},
                {"varlen": True, "right": True, "left": True, "deterministic": True},
            )
        ),
    ],
)
def test_machine_code_of_hopper(configuration: Any, waits: int) -> None:
    """No spills, and no product that waits for the one before, which ptxas does where it cannot follow registers."""
    compiled = compile_kernel("sm_90a", kernel("sm_90a", configuration), *fakes.arguments(configuration))
    assert compiled.stack == 0
    assert disassemble(compiled.cubin).count("WARPGROUP.DEPBAR") <= waits


@pytest.mark.parametrize(
    "configuration",
    brief(
        [
            replace(
                TWO_TILES, head_dim=192, head_dim_v=128, varlen=True, right=True, left=True, softcap=True, sink=True
            ),
            replace(BLACKWELL, right=True, left=True, softcap=True),
            replace(
                BLACKWELL, head_dim=192, head_dim_v=192, varlen=True, right=True, left=True, softcap=True, sink=True
            ),
            replace(TWO_TILES, head_dim=96, head_dim_v=96, varlen=True, right=True, left=True, softcap=True, sink=True),
            GradientsConfiguration("bfloat16", 128, 128, varlen=True, right=True, left=True, softcap=True),
            GradientsConfiguration("bfloat16", 256, 256, varlen=True, right=True, left=True),
            GradientsConfiguration("bfloat16", 96, 96, varlen=True, right=True, left=True),
            GradientsConfiguration("bfloat16", 192, 192, varlen=True, right=True, left=True),
        ],
        0,
    ),
)
def test_blackwell_does_not_spill(configuration: Any) -> None:
    compiled = compile_kernel("sm_100a", kernel("sm_100a", configuration), *fakes.arguments(configuration))
    assert compiled.stack == 0
