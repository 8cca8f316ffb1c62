"""Gate and up weights as training stacks keep them: in one tensor, in lists, or apart. All are read in place, and their
results and gradients have the bits of the same weights in one concatenated tensor.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cudnn.moe import experts as operands
from cudnn.ops import moe_experts, moe_mlp
from support.selection import ALONE, in_turn, within

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
EXPERTS, HIDDEN, INNER, TOKENS = 3, 64, 64, 50
Weights = Any


def pair(up: torch.Tensor) -> Weights:
    """w1 and w3 as torchtitan has them."""
    return tuple(half.clone() for half in up.chunk(2, 1))


def lists(up: torch.Tensor) -> Weights:
    """A gate and an up projection of each expert."""
    return tuple([w.clone() for w in half] for half in pair(up))


LAYOUTS: dict[str, tuple[str, Callable[[torch.Tensor], Weights]]] = {
    "pair": ("separate", pair),
    "pair of lists": ("separate", lists),
    "list": ("concatenated", lambda up: [w.clone() for w in up]),  # Megatron's SequentialMLP
    "w13": ("concatenated", lambda up: up.unflatten(1, (2, -1)).clone()),
}


def flat(weights: Weights) -> list[torch.Tensor]:
    if isinstance(weights, torch.Tensor):
        return [weights]
    return [w for each in weights for w in flat(each)]


def in_one_tensor(layout: str, weights: Weights) -> torch.Tensor:
    """(E, 2 I, H) of weights or their gradients."""
    if layout == "w13":
        return weights[0].flatten(1, 2)
    if layout == "list":
        return torch.stack(weights)
    count = len(weights) // 2
    halves = (weights[:count], weights[count:])
    return torch.cat([x[0] if x[0].ndim == 3 else torch.stack(x) for x in halves], 1)


def tensors(dtype: torch.dtype = BF16, device: str = "cpu", inner: int = INNER, hidden: int = HIDDEN) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {"x": (TOKENS, hidden), "up": (EXPERTS, 2 * inner, hidden), "down": (EXPERTS, hidden, inner)}
    named = {name: torch.randn(shape, dtype=F64) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    named |= {"up_bias": torch.randn(EXPERTS, 2 * inner, dtype=F64), "dy": torch.randn(TOKENS, hidden, dtype=F64)}
    return {name: t.to(device, dtype) for name, t in named.items()}


def dispatched(t: dict[str, Any], up: Weights, down: Weights, **options: Any) -> torch.Tensor:
    return moe_experts(t["x"], [20, 0, 25], up, down, up_bias=t["up_bias"], **options)


def routed(t: dict[str, Any], up: Weights, down: Weights, **options: Any) -> torch.Tensor:
    indices = torch.arange(2 * TOKENS, device=t["x"].device).view(TOKENS, 2) % EXPERTS
    weights = torch.linspace(0.1, 1, 2 * TOKENS, device=t["x"].device).view(TOKENS, 2)
    weights = weights.double() if t["x"].dtype is F64 else weights
    return moe_mlp(t["x"], (indices, weights), up, down, t["up_bias"], **options)


def run(
    t: dict[str, Any], call: Callable[..., torch.Tensor], up: Weights, main: bool = False, **options: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """y, dx, ddown and dup_bias; and the gradients of up."""
    t = {name: x.detach().clone().requires_grad_(name != "dy") for name, x in t.items()}
    for w in flat(up):
        w.requires_grad_()
    buffers = [torch.ones_like(w, dtype=F32) for w in (*flat(up), t["down"])]
    if main:
        iterator = iter(buffers)
        options["main_grads"] = (like(up, iterator), next(iterator))
    y = call(t, up, t["down"], **options)
    y.backward(t["dy"])
    grads = buffers if main else [*(w.grad for w in flat(up)), t["down"].grad]
    assert all((w.grad is None) == main for w in (*flat(up), t["down"]))
    return [y.detach(), t["x"].grad, grads[-1], t["up_bias"].grad], grads[:-1]


def like(weights: Weights, values: Any) -> Weights:
    """Values in the structure of weights."""
    return next(values) if isinstance(weights, torch.Tensor) else [like(w, values) for w in weights]


CASES = [(layout, call, main) for call, main in ((dispatched, False), (routed, True)) for layout in LAYOUTS]


@pytest.mark.parametrize(("where", "layout", "call", "main"), [*in_turn(CASES, 3), *in_turn(CASES, places=ALONE)])
def test_the_bits_of_one_tensor(where: str, layout: str, call: Any, main: bool) -> None:
    t = tensors(device="cuda" if where == "gpu" else "cpu")
    glu_layout, convert = LAYOUTS[layout]
    with within(where):
        right, (dw,) = run(t, call, t["up"].clone(), main, glu_layout="concatenated")
        left, dw_parts = run(t, call, convert(t["up"]), main, glu_layout=glu_layout)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    assert torch.equal(in_one_tensor(layout, dw_parts), dw)
    assert dw.abs().sum() > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_double_precision(layout: str) -> None:
    """Against the formula."""
    t = tensors(F64)
    glu_layout, convert = LAYOUTS[layout]
    (y, *_), dw = run(t, dispatched, convert(t["up"]), glu_layout=glu_layout)
    up, down, expected = t["up"].clone().requires_grad_(), t["down"], torch.zeros_like(t["x"])
    for expert, rows in ((0, slice(0, 20)), (2, slice(20, 45))):
        gate, other = (t["x"][rows] @ up[expert].T + t["up_bias"][expert]).chunk(2, 1)
        expected = expected.index_put(
            (torch.arange(TOKENS)[rows],), (torch.nn.functional.silu(gate) * other) @ down[expert].T
        )
    expected.backward(t["dy"])
    torch.testing.assert_close(y, expected.detach())
    torch.testing.assert_close(in_one_tensor(layout, dw), up.grad)


def test_other_addresses_in_later_calls() -> None:
    """As FSDP2 gathers weights into memory that moves."""
    t = tensors()
    with within("sm_90a"):
        right, _ = run(t, dispatched, t["up"].clone(), glu_layout="concatenated")
        kept = [pair(t["up"]) for _ in range(2)]
        results = [run(t, dispatched, weights, glu_layout="separate")[0] for weights in (kept[0], kept[1], kept[1][:])]
        swapped, _ = run(t, dispatched, (kept[0][1], kept[1][0]), glu_layout="separate")
    assert all(torch.equal(left[0], right[0]) for left in results)
    assert not torch.equal(swapped[0], right[0])


def test_nothing_copies_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GEMMs get the addresses of the caller's tensors."""
    seen: list[list[int]] = []
    inner = operands.GroupedGemmOps.run

    def spy(ops: Any, key: Any, name: str, given: dict[str, Any], *options: Any, **kwargs: Any) -> None:
        if given.get("b_ptrs") is not None:
            seen.append(given["b_ptrs"].tolist())
        inner(ops, key, name, given, *options, **kwargs)

    monkeypatch.setattr(operands.GroupedGemmOps, "run", spy)
    t = tensors()
    w1, w3 = pair(t["up"])
    run(t, dispatched, (w1, w3), glu_layout="separate")
    assert seen == [[w[e].data_ptr() for w in (w1, w3) for e in range(EXPERTS)]] * 2


def test_compiled_checkpointed_and_in_autocast() -> None:
    t = tensors()
    right, dw = run(t, dispatched, pair(t["up"]), glu_layout="separate")
    compiled = torch.compile(dispatched, fullgraph=True, backend="aot_eager")
    for call in (compiled, lambda *args, **kwargs: checkpoint(dispatched, *args, use_reentrant=False, **kwargs)):
        left, dw_left = run(t, call, pair(t["up"]), glu_layout="separate")
        assert all(torch.equal(a, b) for a, b in zip([*left, *dw_left], [*right, *dw], strict=True))
    wide = {name: x.float() for name, x in t.items()}
    with torch.autocast("cpu", BF16):
        (y, *_), grads = run({**wide, "dy": t["dy"]}, dispatched, pair(wide["up"]), glu_layout="separate")
    assert torch.equal(y, right[0])
    assert {g.dtype for g in grads} == {F32}


@pytest.mark.parametrize("main", [False, True])
def test_expert_parallelism(main: bool, tmp_path: pathlib.Path) -> None:
    """The rank's experts of a group have the layouts too."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        t = tensors()
        for layout, (glu_layout, convert) in LAYOUTS.items():
            right, dw = run(t, routed, convert(t["up"]), main, glu_layout=glu_layout)
            left, dw_left = run(t, routed, convert(t["up"]), main, glu_layout=glu_layout, group=dist.group.WORLD)
            for a, b in zip([*left, *dw_left], [*right, *dw], strict=True):
                torch.testing.assert_close(a, b, rtol=0.02, atol=0.02, msg=layout)
    finally:
        dist.destroy_process_group()


def test_some_gradients() -> None:
    """Of w3 alone, as with frozen gates."""
    t = tensors()
    w1, w3 = pair(t["up"])
    w3.requires_grad_()
    dispatched(t, (w1, w3), t["down"], glu_layout="separate").backward(t["dy"])
    _, (_, right) = run(t, dispatched, pair(t["up"]), glu_layout="separate")
    assert w1.grad is None
    assert torch.equal(w3.grad, right)


@pytest.mark.parametrize("call", [dispatched, routed])
def test_flops(call: Any) -> None:
    """Those of one tensor."""
    t, counts = tensors(F64), []
    for glu_layout, up in (("concatenated", t["up"].clone()), ("separate", pair(t["up"]))):
        with FlopCounterMode(display=False) as counter:
            run(t, call, up, glu_layout=glu_layout)
        counts.append(counter.get_total_flops())
    rows = TOKENS * (1 if call is dispatched else 2)
    assert counts == [3 * 2 * rows * 3 * INNER * HIDDEN] * 2


REFUSED: list[tuple[Any, str, str]] = [
    (torch.zeros(3, 128, 64), "separate", "up: got Tensor; allowed: a pair: the gates, the up projections"),
    ((torch.zeros(3, 64, 64),), "separate", "up: got 1 of them; allowed: a pair"),
    ((torch.zeros(3, 64, 64), torch.zeros(3, 32, 64)), "separate", r"shape of up: got .*\(3, 32, 64\), \(3, 64, 64\)"),
    (([torch.zeros(64, 64)] * 3, [torch.zeros(64, 64)] * 2), "separate", "up: got 3 and 2 tensors; allowed: as many"),
    ((torch.zeros(3, 64, 64), [torch.zeros(64, 64)] * 3), "separate", "up: got 1 and 3 tensors; allowed: as many"),
    ((torch.zeros(3, 32, 64),) * 2, "separate", "shapes: got"),
    ((torch.zeros(3, 64, 64),) * 2, "interleaved", "shape of up: got .*pass glu_layout='separate'"),
    (torch.zeros(3, 2, 64, 64), "interleaved", r"up: got \(3, 2, 64, 64\) with .*pass glu_layout='concatenated'"),
    (
        torch.zeros(3, 128, 64),
        "apart",
        "glu_layout: got 'apart'; allowed: 'interleaved' or 'concatenated' or 'separate'",
    ),
]


@pytest.mark.parametrize(("up", "glu_layout", "words"), REFUSED)
@pytest.mark.parametrize("call", [dispatched, routed])
def test_refused(call: Any, up: Any, glu_layout: str, words: str) -> None:
    t = tensors(F32)
    with pytest.raises(ValueError, match=f": {words}"):
        call(t, up, t["down"], glu_layout=glu_layout)


def test_refused_options() -> None:
    t = tensors(inner=32)
    with pytest.raises(ValueError, match=r"intermediate size, I of down .*: got 32; allowed: a multiple of 64"):
        dispatched(t, pair(t["up"]), t["down"], glu_layout="separate")
    t = tensors(inner=128, hidden=128)
    with pytest.raises(ValueError, match="fp8: got 'swiglu', 'separate'"):
        dispatched(t, pair(t["up"]), t["down"], glu_layout="separate", fp8=True)
    t = tensors()
    buffers = ([torch.zeros(EXPERTS, INNER, HIDDEN)] * 2, torch.zeros(EXPERTS, HIDDEN, INNER))
    with pytest.raises(ValueError, match=r"main_grads of up: got .*; allowed: .*, for each half"):
        dispatched(
            t, pair(t["up"]), t["down"], glu_layout="separate", main_grads=((buffers[1], buffers[1][:2]), buffers[1])
        )
    dispatched(t, pair(t["up"]), t["down"], glu_layout="separate", main_grads=buffers)
