"""``cudnn.ops.moe_experts``: rows that a dispatcher has sorted, against experts one by one in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import cudnn
from cudnn import moe
from cudnn.moe import dispatched, routing
from cudnn.ops import moe_experts, moe_mlp
from support.selection import ALONE, in_turn, within

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPSILON = {BF16: 2.0**-8, F16: 2.0**-11, F64: 2.0**-40}
COUNTS = [10, 0, 33, 7]


@dataclass
class Case:
    """A call's tensors by name, its options, and the gradient of its result. Padding rows are NaN."""

    tensors: dict[str, torch.Tensor]
    counts: list[int]
    options: dict[str, Any]
    dy: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        x = self.tensors["x"]
        self.dy = torch.randn(x.shape).to(x)
        self.dy[sum(self.counts) :] = torch.nan

    def leaves(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        return {name: t.detach().clone().to(dtype or t.dtype).requires_grad_() for name, t in self.tensors.items()}


def case(
    counts: Sequence[int] = COUNTS,
    padding: int = 10,
    *,
    dtype: torch.dtype = BF16,
    hidden: int = 64,
    inner: int = 32,
    probs: bool = True,
    bias: bool = False,
    device: str = "cpu",
    **options: Any,
) -> Case:
    experts, rows = len(counts), sum(counts) + padding
    wide = inner if options.get("activation") == "srelu" else 2 * inner
    tensors = {
        "x": torch.randn(rows, hidden).to(dtype),
        "up": (torch.randn(experts, wide, hidden) / hidden**0.5).to(dtype),
        "down": (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype),
    }
    tensors["x"][sum(counts) :] = torch.nan
    if probs:
        tensors["probs"] = torch.rand(rows, dtype=F64 if dtype is F64 else F32)
    if bias:
        tensors |= {
            "up_bias": torch.randn(experts, wide).to(dtype),
            "down_bias": torch.randn(experts, hidden).to(dtype),
        }
    return Case({name: t.to(device) for name, t in tensors.items()}, list(counts), options)


def activated(h: torch.Tensor, activation: str = "swiglu", glu_layout: str = "interleaved") -> torch.Tensor:
    if activation == "srelu":
        return h.relu() ** 2
    concatenated = glu_layout == "concatenated"
    gate, up = h.unflatten(1, (2, -1, 32) if concatenated else (-1, 2, 32)).unbind(1 if concatenated else 2)
    return (up * torch.nn.functional.silu(gate)).flatten(1)


def formula(c: Case, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """Expert by expert; zeros for padding rows."""
    ends = torch.tensor([0, *c.counts]).cumsum(0).tolist()
    y = torch.zeros_like(t["x"])
    for e, rows in enumerate(map(slice, ends, ends[1:])):
        weight = t["probs"][rows, None] if "probs" in t else 1.0
        h = t["x"][rows] @ t["up"][e].T + (t["up_bias"][e] if "up_bias" in t else 0.0)
        out = (activated(h, **c.options) * weight) @ t["down"][e].T
        out = out + (t["down_bias"][e] * weight if "down_bias" in t else 0.0)
        y = y.index_add(0, torch.arange(rows.start, rows.stop, device=y.device), out)
    return y


def ours(c: Case, t: dict[str, Any], counts: Any = None, **options: Any) -> torch.Tensor:
    counts = torch.tensor(c.counts, device=t["x"].device) if counts is None else counts
    return moe_experts(counts=counts, **t, **c.options, **options)


def results(c: Case, y: torch.Tensor, t: dict[str, Any]) -> dict[str, torch.Tensor]:
    y.backward(c.dy.to(y.dtype))
    grads = {name: torch.stack([w.grad for w in x]) if isinstance(x, list) else x.grad for name, x in t.items()}
    return {"y": y.detach(), **grads}


def expected(c: Case) -> dict[str, torch.Tensor]:
    t = {name: x.nan_to_num().detach().requires_grad_() for name, x in c.leaves(F64).items()}
    y = formula(c, t)
    y.backward(c.dy.nan_to_num().double())
    return {"y": y.detach(), **{name: x.grad for name, x in t.items()}}  # pyright: ignore[reportReturnType]


def check(c: Case, actual: dict[str, torch.Tensor]) -> None:
    slack = 32 * EPSILON[c.tensors["x"].dtype]
    for name, right in expected(c).items():
        limit = slack * (right.norm() / max(1, right.numel()) ** 0.5 + 1e-6) + slack / 8 * right.abs()
        wrong = ((actual[name].double() - right).abs() > limit).sum() + actual[name].isnan().sum()
        assert not wrong, f"{name}: {wrong} of {right.numel()} values"
    for name in {"y", "x", "probs"} & actual.keys():
        assert not actual[name][sum(c.counts) :].any(), name


CASES: list[dict[str, Any]] = [
    {"bias": True, "glu_layout": "concatenated"},
    {"probs": False},
    {"activation": "srelu", "bias": True, "dtype": F16},
    {"probs": False, "bias": True},
    {"activation": "srelu", "probs": False},
    {"padding": 0},
]


@pytest.mark.parametrize(("where", "options"), [*in_turn(CASES, 1), *in_turn(CASES, places=ALONE)])
def test_results_and_gradients(where: str, options: dict[str, Any]) -> None:
    c = case(**options, device="cuda" if where == "gpu" else "cpu")
    with within(where):
        t = c.leaves()
        check(c, results(c, ours(c, t), t))


def test_forward_gemms_in_e4m3() -> None:
    """Rows and activations are quantized; biases are multiplied by probabilities."""
    c = case(hidden=128, inner=128, bias=True)
    c.tensors["x"] = c.tensors["x"].nan_to_num()
    t = c.leaves()
    actual = results(c, ours(c, t, fp8=True), t)
    for name, right in expected(c).items():
        error = float((actual[name].double() - right).norm() / right.norm())
        assert error < 0.06, name
        assert error > 0.01 or name != "y", "not of e4m3"


def test_in_double_precision() -> None:
    c = case(dtype=F64, bias=True)
    t = c.leaves()
    check(c, results(c, ours(c, t), t))


def counts_of(kind: str, c: Case) -> Any:
    return {"list": c.counts, "int32": torch.tensor(c.counts).int(), "tensor": torch.tensor(c.counts)}[kind]


@pytest.mark.parametrize("kind", ["list", "int32"])
def test_counts_on_the_host(kind: str) -> None:
    c = case()
    t, u = c.leaves(), c.leaves()
    left, right = results(c, ours(c, t, counts_of(kind, c)), t), results(c, ours(c, u), u)
    for name, tensor in right.items():
        assert torch.equal(left[name], tensor), name


@pytest.mark.parametrize("where", ["reference", "sm_90a", *ALONE[1:]])
@pytest.mark.parametrize("experts", [1, 33, 100])
def test_offsets(where: str, experts: int) -> None:
    """An inclusive scan over more experts than a warp has lanes; zeros behind."""
    device = "cuda" if where == "gpu" else "cpu"
    counts = torch.randint(0, 3, (experts,), device=device)
    out = torch.full((int(counts.sum()) + 70, 264), torch.nan, dtype=BF16, device=device)
    with within(where):
        offsets = dispatched._row_offsets(counts, out)
        assert torch.equal(offsets, counts.cumsum(0).int())
        assert out[: offsets[-1]].isnan().all()
        assert not out[offsets[-1] :].any()
        out.fill_(1.0)
        dispatched._clear_padding(offsets, out)
    assert out.float().sum() == int(offsets[-1]) * 264


def test_no_rows() -> None:
    c = case([0, 0], 0)
    t = c.leaves()
    check(c, results(c, ours(c, t), t))


def test_all_rows_are_padding() -> None:
    c = case([0, 0], 5, bias=True)
    t = c.leaves()
    check(c, results(c, ours(c, t), t))


def test_lists_of_experts_and_main_grads() -> None:
    c = case()
    t = c.leaves()
    right = results(c, ours(c, t), t)
    u: dict[str, Any] = c.leaves()
    buffers = {}
    for name in ("up", "down"):
        u[name] = [w.detach().clone().requires_grad_() for w in u[name]]
        buffers[name] = [torch.ones_like(w, dtype=F32) for w in u[name]]
    y = ours(c, u, main_grads=(buffers["up"], buffers["down"]))
    y.backward(c.dy)
    for name in ("up", "down"):
        assert all(w.grad is None for w in u[name])
        torch.testing.assert_close(torch.stack(buffers[name]) - 1, right[name].float(), rtol=2e-2, atol=2e-2)
    assert torch.equal(u["x"].grad, right["x"])


def test_recomputed_by_a_checkpoint() -> None:
    c = case()
    t, u = c.leaves(), c.leaves()
    right = results(c, ours(c, t), t)
    left = results(c, checkpoint(ours, c, u, use_reentrant=False), u)  # pyright: ignore[reportArgumentType]
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_gate_and_up_in_one_tensor() -> None:
    """(E, 2, I, H): a view of the concatenated layout; the gradient has its shape."""
    c = case(glu_layout="concatenated")
    t, u = c.leaves(), c.leaves()
    u["up"] = u["up"].detach().unflatten(1, (2, -1)).requires_grad_()
    left, right = results(c, ours(c, u), u), results(c, ours(c, t), t)
    assert torch.equal(left["up"].flatten(1, 2), right["up"])
    assert torch.equal(left["y"], right["y"])


def test_as_moe_mlp() -> None:
    """With the same routing, and the weighted sum outside."""
    x, logits = torch.randn(40, 64, dtype=F64), torch.randn(40, 4, dtype=F64)
    up, down = torch.randn(4, 64, 64, dtype=F64), torch.randn(4, 64, 32, dtype=F64)
    routing = moe.route(logits, 2)
    counts = routing.offsets.diff(prepend=routing.offsets.new_zeros(1))
    probs = torch.empty(80, dtype=F64).scatter_(0, routing.scatter_idx.flatten().long(), routing.weights.flatten())
    rows = moe_experts(x[routing.gather_idx.long()], counts, up, down, probs)
    torch.testing.assert_close(moe.combine(rows, routing.scatter_idx), moe_mlp(x, routing, up, down))


def test_compiled_as_one_graph_for_any_number_of_rows() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    layer = torch.compile(moe_experts, fullgraph=True, backend=counter)
    for rows in (50, 61, 77):
        c = case([10, 0, 33, 7], rows - 50)
        t, u = c.leaves(), c.leaves()
        for name in ("x", "probs"):
            torch._dynamo.mark_dynamic(t[name], 0)
        y = layer(t["x"], torch.tensor(c.counts), t["up"], t["down"], t["probs"])
        left, right = results(c, y, t), results(c, ours(c, u), u)
        for name, tensor in right.items():
            assert torch.equal(left[name], tensor), name
    assert counter.frame_count == 1


def test_the_operator() -> None:
    """Its schema, fake implementation and autograd registration."""
    c = case(dtype=F64, padding=0)  # the pre-activation of padding rows is not initialized
    t = c.leaves()
    lists = ([t["up"]], [t["down"]])
    options = ("swiglu", [1.0, 1.702, 7.0, -7.0], "interleaved", "", True, True)
    x = t["x"].detach().requires_grad_()
    arguments = (x, torch.tensor(c.counts), t["probs"][:, None], *lists, None, None, [], [], *options)
    torch.library.opcheck(torch.ops.cudnn.moe_experts_fwd_primitive, arguments)


def test_autocast() -> None:
    c = case(dtype=F64)
    t = {name: x.float() for name, x in c.tensors.items()}
    with torch.autocast("cpu", BF16):
        assert moe_experts(counts=c.counts, **t).dtype is BF16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": [10, 0, 33, 18]}, r"counts: got \[10, 0, 33, 18\], 61 in all; allowed: 0 or more, at most 60"),
        ({"counts": [10, 0, -1, 18]}, "counts: got"),
        ({"counts": torch.tensor([2**62] * 4)}, r"counts: got \[.*, 18446744073709551616 in all"),
        ({"up": torch.zeros(4, 2, 32, 64).bfloat16()}, r"up: got \(4, 2, 32, 64\) with .*; allowed: \[E, 2 I, H\]"),
        ({"counts": [10, 0, 33]}, r"counts: got torch.int32 \(3,\); allowed: torch.int32 or torch.int64 \(4,\)"),
        ({"counts": torch.rand(4)}, "counts: got torch.float32"),
        ({"probs": torch.rand(3)}, r"probs: got torch.float32 \(3,\); allowed: floating point \(60,\)"),
        ({"probs": torch.ones(60).int()}, "probs: got torch.int32"),
        ({"x": torch.zeros(2, 60, 64).bfloat16()}, r"x: got \(2, 60, 64\)"),
        ({"up": torch.zeros(4, 64, 32).bfloat16()}, "shapes: got"),
        ({"activation": "relu"}, "activation: got 'relu'"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    c = case()
    arguments: dict[str, Any] = {"counts": c.counts, **c.tensors} | changes
    with pytest.raises(ValueError, match=message):
        moe_experts(**arguments)


def test_refused_types() -> None:
    c = case()
    for counts in (3, [1.0, 2.0, 3.0, 4.0], "four"):
        with pytest.raises(TypeError, match="counts"):
            moe_experts(counts=counts, **c.tensors)  # pyright: ignore[reportArgumentType]


def test_counts_on_the_device_that_do_not_fit() -> None:
    """The reference and the emulator, which see their values, refuse them; a GPU traps."""
    c = case()
    for where in ("reference", "sm_90a"):
        with within(where), pytest.raises(ValueError, match="61 in all"):
            dispatched._row_offsets(torch.tensor([10, 0, 33, 18]), c.tensors["x"])


def test_nothing_sorts_or_combines(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise AssertionError

    for module, name in ((routing, "moe_sort"), (cudnn.moe.layer, "combine_rows"), (cudnn.moe.experts, "permute")):
        monkeypatch.setattr(module, name, refused)
    c = case()
    t = c.leaves()
    results(c, ours(c, t), t)
