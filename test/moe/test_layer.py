"""``cudnn.ops.moe_mlp`` and ``cudnn.nn.MoE``: against experts one by one in float64, and under PyTorch's transforms."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import cudnn
from cudnn import moe
from cudnn.moe import experts as operands
from cudnn.moe import layer as expert_layer
from cudnn.moe import quantizing
from cudnn.moe.quantizing import quantized_weights
from cudnn.nn import MoE
from cudnn.ops import moe_mlp
from cudnn.runtime import pointer_arrays
from support.selection import ALONE, WHERE, in_turn, within

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPSILON = {BF16: 2.0**-8, F16: 2.0**-11, F64: 2.0**-40}
WEIGHTS = ("up", "down")
ARCHS = ("sm_90a", "sm_100a")
GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@dataclass
class Case:
    """A layer's arguments by name; ``out``: the gradient of its result."""

    tensors: dict[str, torch.Tensor]
    indices: torch.Tensor
    activation: str
    out: torch.Tensor
    glu_layout: str = "interleaved"

    def leaves(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        actual = {name: t.detach().clone() for name, t in self.tensors.items()}
        return {name: (t.to(dtype) if dtype else t).requires_grad_() for name, t in actual.items()}


def case(
    tokens: int = 40,
    hidden: int = 64,
    inner: int = 32,
    experts: int = 4,
    top_k: int = 2,
    *,
    activation: str = "swiglu",
    dtype: torch.dtype = BF16,
    bias: bool = False,
    skew: float = 0.0,
    dropped: bool = False,
    glu_layout: str = "interleaved",
) -> Case:
    """Random arguments; ``skew`` leads tokens to the first experts, ``dropped`` removes some choices."""
    wide = inner if activation == "srelu" else 2 * inner
    logits = torch.randn(tokens, experts)
    logits[:, : max(top_k, experts // 4)] += skew
    weights, indices = logits.to(F64 if dtype is F64 else F32).softmax(1).topk(top_k)
    if dropped:
        indices = indices.where(torch.rand(indices.shape) > 0.3, -1)
    tensors = {
        "x": torch.randn(tokens, hidden).to(dtype),
        "weights": weights,
        "up": (torch.randn(experts, wide, hidden) / hidden**0.5).to(dtype),
        "down": (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype),
    }
    if bias:
        tensors |= {
            "up_bias": torch.randn(experts, wide).to(dtype),
            "down_bias": torch.randn(experts, hidden).to(dtype),
        }
    return Case(tensors, indices, activation, torch.randn(tokens, hidden).to(dtype), glu_layout)


def activated(h: torch.Tensor, activation: str, glu_layout: str) -> torch.Tensor:
    if activation == "srelu":
        return h.relu() ** 2
    g, u = h.unflatten(1, (-1, 2, 32)).unbind(2)
    if glu_layout == "concatenated":
        g, u = h.unflatten(1, (2, -1, 32)).unbind(1)
    if activation == "geglu":
        g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
        return ((u + 1) * g * torch.sigmoid(1.702 * g)).flatten(1)
    return (u * torch.nn.functional.silu(g)).flatten(1)


def formula(c: Case, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """Expert by expert."""
    y = torch.zeros_like(t["x"])
    for expert in range(len(t["up"])):
        token, choice = (c.indices == expert).nonzero(as_tuple=True)
        h = t["x"][token] @ t["up"][expert].T + (t["up_bias"][expert] if "up_bias" in t else 0.0)
        out = activated(h, c.activation, c.glu_layout) @ t["down"][expert].T
        out = out + (t["down_bias"][expert] if "up_bias" in t else 0.0)
        y = y.index_add(0, token, out * t["weights"][token, choice, None])
    return y


def ours(c: Case, t: dict[str, Any], **options: Any) -> torch.Tensor:
    biases = (t.get("up_bias"), t.get("down_bias"))
    arguments = (t["x"], (c.indices, t["weights"]), t["up"], t["down"])
    return moe_mlp(*arguments, *biases, activation=c.activation, glu_layout=c.glu_layout, **options)


def results(c: Case, run: Callable[..., torch.Tensor], t: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The result and the gradients."""
    y = run(c, t)
    y.backward(c.out.to(y.dtype))
    actual = {name: torch.stack([w.grad for w in x]) if isinstance(x, list) else x.grad for name, x in t.items()}
    return {"y": y.detach(), **actual}


def check(c: Case, actual: dict[str, torch.Tensor]) -> None:
    expected = results(c, formula, c.leaves(F64))
    assert actual.keys() == expected.keys()
    slack = 4 * EPSILON[c.tensors["x"].dtype]
    for name, right in expected.items():
        limit = slack * (right.norm() / max(1, right.numel()) ** 0.5 + 1e-6) * 8 + slack * right.abs()
        wrong = ((actual[name].double() - right).abs() > limit).sum()
        assert not wrong, f"{name}: {wrong} of {right.numel()} values"


def listed(t: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Each expert's weights in separate tensors."""
    return {n: [w.clone().requires_grad_() for w in x.detach()] if n in WEIGHTS else x for n, x in t.items()}


@pytest.mark.parametrize("dtype", [BF16, F16, F64])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "srelu"])
@settings(max_examples=3)
@given(st.data())
def test_any_configuration(activation: str, dtype: torch.dtype, data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**16)))
    experts, lists = draw(st.integers(1, 6)), draw(st.booleans())
    whole = draw(st.booleans()) or lists or activation == "srelu"
    c = case(
        draw(st.integers(0, 60)),
        8 * draw(st.integers(1, 9)),
        32 * draw(st.integers(1, 3)),
        experts,
        draw(st.integers(1, experts)),
        activation=activation,
        glu_layout="interleaved" if whole else "concatenated",
        dtype=dtype,
        bias=draw(st.booleans()),
        skew=draw(st.sampled_from([0.0, 30.0])),
        dropped=draw(st.booleans()),
    )
    t = c.leaves()
    check(c, results(c, ours, listed(t) if lists else t))


KERNELS: list[dict[str, Any]] = [
    {"bias": True},
    {"bias": True, "glu_layout": "concatenated", "inner": 96},
    {"activation": "geglu", "dropped": True},
    {"activation": "srelu"},
]


@pytest.mark.full
@pytest.mark.parametrize("options", KERNELS)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_kernels(arch: str, options: dict[str, Any]) -> None:
    c = case(70, **options)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is full of NaN
    try:
        with cudnn.emulation(arch, races=True):
            check(c, results(c, ours, c.leaves()))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_kernels_of_one_expert_in_a_list() -> None:
    """Boxes lie wholly outside of its weights, whose view begins at a list of one address, of 8 bytes."""
    c = case(6, 88, 32, 1, 1)
    t = c.leaves()
    with cudnn.emulation("sm_90a", races=True), torch.no_grad():
        y = ours(c, listed(t))
    expected = formula(c, {name: x.detach().double() for name, x in t.items()})
    torch.testing.assert_close(y.double(), expected, rtol=0.05, atol=0.02)


FP8 = 0.05  # of the norm: the error of e4m3 GEMMs


@pytest.mark.parametrize("many", [1, operands.GATHER_ROWS])
@pytest.mark.parametrize("where", ["reference", *(pytest.param(a, marks=pytest.mark.full) for a in ARCHS), GPU])
def test_forward_gemms_in_e4m3(where: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts end anywhere, and some choices are dropped; gradients are those of the pre-activation that was found.
    Tokens are quantized after the permutation, or, with ``many`` rows per expert, before, and the GEMM gathers them.
    """
    monkeypatch.setattr(operands, "GATHER_ROWS", many)
    device = "cuda" if where == "gpu" else "cpu"
    c = case(70, 128, 128, bias=True, dropped=True)
    c = Case({n: t.to(device) for n, t in c.tensors.items()}, c.indices.to(device), c.activation, c.out.to(device))
    expected = results(c, formula, c.leaves(F64))
    with contextlib.nullcontext() if where in ("reference", "gpu") else cudnn.emulation(where, races=True):
        actual = results(c, functools.partial(ours, fp8=True), c.leaves())
        lists = results(c, functools.partial(ours, fp8=True), listed(c.leaves()))
    for name, right in expected.items():
        error = float((actual[name].double() - right).norm() / right.norm())
        assert error < FP8, name
        assert error > 0.01 or name not in ("x", "y"), "not of e4m3"
        assert torch.equal(lists[name], actual[name]), name


def test_every_pass_records_its_stream_for_the_e4m3_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training pass writes the copies that an earlier pass cached, in the default stream's memory."""
    used: list[Any] = []
    monkeypatch.setattr(quantizing._Cached, "record_stream", lambda self: used.append(self.tensors[0].data_ptr()))
    weights = torch.randn(2, 128, 128).bfloat16()
    kept, _ = quantized_weights([weights], False)
    before = len(used)
    written, _ = quantized_weights([weights], True)
    assert written is kept
    assert used[before:] == [kept.data_ptr()]


def test_e4m3_copies_are_rewritten_after_all_streams_have_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training pass waits once for evaluation on each other stream, not for its stream."""
    waits: list[tuple[int, int]] = []

    def stream(name: int) -> Any:
        wait = lambda other: waits.append((name, other.name))  # noqa: E731
        return SimpleNamespace(name=name, wait_stream=wait, wait_event=lambda event: None)

    def current(name: int) -> None:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream(name))
        monkeypatch.setattr(quantizing.launch, "raw_stream", lambda arguments, index: name)

    memory: Any = SimpleNamespace(is_cuda=True, get_device=lambda: 0, device="cuda:0", record_stream=lambda x: None)
    cached = quantizing._Cached((), (memory, memory), done=SimpleNamespace(record=lambda x: None))
    current(1)
    cached.record((0,))
    for name in (2, 3, 2):
        current(name)
        cached.read(False)
    cached.written()
    assert waits == [(2, 1), (2, 3)]
    current(4)
    cached.written()
    assert waits[2:] == [(4, 2)]


@pytest.mark.parametrize("lists", [False, True])
def test_into_main_gradients(lists: bool) -> None:
    """Added in float32 to what was there; autograd gets none."""
    c = case()
    expected = results(c, ours, c.leaves())
    t = listed(c.leaves()) if lists else c.leaves()
    main_grads = {name: torch.ones_like(expected[name], dtype=F32) for name in WEIGHTS}
    buffers = {name: list(s.unbind(0)) if lists else s for name, s in main_grads.items()}
    y = ours(c, t, main_grads=(buffers["up"], buffers["down"]))
    y.backward(c.out)
    for name in WEIGHTS:
        assert all(w.grad is None for w in (t[name] if lists else [t[name]]))
        torch.testing.assert_close(main_grads[name] - 1, expected[name].float(), rtol=2e-2, atol=2e-2)
    assert torch.equal(t["x"].grad, expected["x"])


def test_gradients_if_all_slots_are_dropped() -> None:
    c = case(bias=True)
    c.indices.fill_(-1)
    garbage = [torch.full((4, 64), torch.nan, dtype=BF16) for _ in range(99)]
    del garbage  # new memory is full of NaN
    check(c, results(c, ours, c.leaves()))


def test_some_gradients() -> None:
    """What is not asked for is not computed, and does not change the rest."""
    c = case(bias=True)
    expected = results(c, ours, c.leaves())
    for name in c.tensors:
        t = {n: x.detach().clone().requires_grad_(n == name) for n, x in c.tensors.items()}
        ours(c, t).backward(c.out)
        assert [n for n, x in t.items() if x.grad is not None] == [name]
        assert torch.equal(t[name].grad, expected[name]), name


def test_tensors_saved_for_backward() -> None:
    """No (T K, H) tensor; nothing without gradients."""
    c = case(64, hidden=512)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ours(c, c.leaves())
        sizes = sorted(t.numel() for t in kept)
        kept.clear()
        with torch.no_grad():
            ours(c, c.leaves())
    weights = [c.tensors[name].numel() for name in WEIGHTS]
    x, hidden, small = 64 * 512, 128 * 64, [128] * 4 + [4]
    assert sizes == sorted([x, hidden, *small, *weights])
    assert not kept


def test_dx_rows_are_freed_before_the_wgrad_of_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The permuted copy of the tokens for that GEMM, of the same size, reuses their memory."""
    rows: list[Any] = []
    alive: list[int] = []
    wgrad, combine_rows = expert_layer._wgrad, expert_layer.combine_rows

    def combine(dx_rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(weakref.ref(dx_rows))
        return combine_rows(dx_rows, *rest)

    def run_wgrad(*arguments: Any, **options: Any) -> Any:
        alive.append(sum(row() is not None for row in rows))
        return wgrad(*arguments, **options)

    monkeypatch.setattr(expert_layer, "combine_rows", combine)
    monkeypatch.setattr(expert_layer, "_wgrad", run_wgrad)
    c = case()
    ours(c, c.leaves()).backward(c.out)
    assert len(rows) == 2
    assert alive == [0, 0]


@pytest.mark.gpu
def test_both_passes_in_a_cuda_graph() -> None:
    """Captured together after calls on another stream, as PyTorch asks for; replayed on other tokens."""
    layer = MoE(256, 128, 8, 2, bias=True, shared_experts=1, shared_gate=True, device="cuda")
    x = torch.randn(300, 256, device="cuda").bfloat16().requires_grad_()
    gradient = torch.randn_like(x)

    def step() -> list[torch.Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y, [x, *layer.parameters()], gradient)]

    other, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        step()
    torch.cuda.current_stream().wait_stream(other)
    with torch.cuda.graph(graph):
        actual = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    copies = [t.clone() for t in actual]
    assert all(torch.equal(a, b) for a, b in zip(copies, step(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
def test_the_same_bits_in_every_run(activation: str) -> None:
    c = case(1000, 256, 512, 8, 4, activation=activation)
    c = Case({n: t.cuda() for n, t in c.tensors.items()}, c.indices.cuda(), activation, c.out.cuda())
    first = results(c, ours, c.leaves())
    for _ in range(100):
        again = results(c, ours, c.leaves())
        assert all(torch.equal(again[name], x) for name, x in first.items())


@pytest.mark.gpu
def test_a_concurrent_combine_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(8192, 512, 64, 8, 4)
    c = Case({n: t.cuda() for n, t in c.tensors.items()}, c.indices.cuda(), c.activation, c.out.cuda())
    monkeypatch.setattr(expert_layer, "OVERLAP_ELEMENTS", 2**60)
    expected = results(c, ours, c.leaves())
    monkeypatch.setattr(expert_layer, "OVERLAP_ELEMENTS", 0)
    for _ in range(20):
        again = results(c, ours, c.leaves())
        assert all(torch.equal(again[name], x) for name, x in expected.items())


@pytest.mark.parametrize("main", [False, True])
def test_compiled_without_graph_breaks(main: bool) -> None:
    c = case(bias=True)
    expected = results(c, ours, c.leaves())
    sums = tuple(torch.zeros(c.tensors[name].shape) for name in WEIGHTS) if main else None

    def step(t: dict[str, torch.Tensor]) -> torch.Tensor:
        return 2.0 * ours(c, t, main_grads=sums)

    t = c.leaves()
    (torch.compile(step, backend="aot_eager", fullgraph=True)(t) / 2.0).backward(c.out)
    for name, x in t.items():
        if main and name in WEIGHTS:
            assert x.grad is None
            torch.testing.assert_close(sums[WEIGHTS.index(name)], expected[name].float(), rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(x.grad, expected[name]), name


def test_compiled_once_for_any_number_of_tokens() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    layer = MoE(64, 32, 4, 2, shared_experts=1)
    step = torch.compile(layer, backend=counter, fullgraph=True)
    for tokens in (33, 64, 7, 100):
        x = torch.randn(tokens, 64).bfloat16()
        torch.testing.assert_close(step(x), layer(x))
    assert counter.frame_count == 2  # for the first number, and for any


def test_tokens_at_odd_addresses_are_copied() -> None:
    c = case()
    expected = results(c, ours, c.leaves())
    x, c.out = (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (c.tensors["x"], c.out))
    again = results(c, ours, {**c.leaves(), "x": x.requires_grad_()})
    assert all(torch.equal(again[name], x) for name, x in expected.items())


def test_vmap_is_a_loop_and_torch_func_has_gradients() -> None:
    layer, x = MoE(64, 32, 4, 2), torch.randn(3, 9, 64).bfloat16().requires_grad_()
    y = torch.vmap(layer)(x)
    assert torch.equal(y, torch.stack([layer(each) for each in x]))
    (gradient,) = torch.autograd.grad(y.float().sum(), x)
    for each, expected in zip(x.detach(), gradient, strict=True):
        torch.testing.assert_close(
            torch.func.grad(lambda x: layer(x).float().sum())(each), expected, rtol=2e-2, atol=2e-2
        )


def test_shapes_on_the_device_meta() -> None:
    layer, x = MoE(64, 32, 4, 2, shared_experts=1, device="meta"), torch.empty(2, 9, 64, dtype=BF16, device="meta")
    assert layer(x).shape == x.shape


def test_checkpointed_and_in_autocast() -> None:
    c = case()
    expected = results(c, ours, c.leaves())
    again = results(c, lambda c, t: checkpoint(ours, c, t, use_reentrant=False), c.leaves())
    assert all(torch.equal(again[name], x) for name, x in expected.items())
    t = c.leaves(F32)
    with torch.autocast("cpu", dtype=BF16):
        y = ours(c, t)
    y.backward(c.out)
    assert y.dtype is BF16
    assert t["up"].grad.dtype is F32
    assert torch.equal(t["up"].grad.bfloat16(), expected["up"])


APART = torch.zeros(4 * 64 * 64 + 1).bfloat16()[1:].view(4, 64, 64)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"activation": "relu"}, "activation: got 'relu'; allowed: 'swiglu' or 'geglu' or 'srelu'"),
    ({"x": torch.zeros(40, 64)}, "types: got"),
    ({"x": torch.zeros(39, 64).bfloat16()}, "shapes of a routing: got"),
    ({"x": torch.zeros(40, 32).bfloat16()}, "shapes: got"),
    ({"x": None}, r"x: got NoneType; allowed: a tensor \[\.\.\., H\]"),
    ({"weights": torch.zeros(40, 2).bfloat16()}, r"got torch.int64 and torch.bfloat16; .* pass weights\.float\(\)"),
    ({"up": torch.zeros(4, 64, 64).bfloat16().mT}, "strides of up: got"),
    ({"up": [torch.zeros(64, 64).bfloat16()] * 3}, "shapes: got"),
    ({"up": APART}, "address of up: got 0x.*; allowed: multiples of 16 bytes"),
    ({"down": [torch.zeros(64, 32).bfloat16()] * 3 + [APART.view(8, 64, 32)[0]]}, "address of down"),
    ({"up_bias": torch.zeros(64, 4).bfloat16().T}, r"strides of up_bias: .*pass up_bias\.contiguous\(\)"),
    ({"activation": "srelu", "glu_layout": "concatenated"}, "got the activation 'srelu'; .*leave glu_layout out"),
    ({"glu_layout": "halves"}, "glu_layout: got 'halves'; allowed: 'interleaved' or 'concatenated'"),
    ({"down": torch.zeros(4, 64, 64).bfloat16()}, "N = 2 I"),
    ({"up_bias": torch.zeros(4, 32).bfloat16()}, "shape of up_bias"),
    ({"main_grads": (torch.zeros(4, 64, 64).half(), torch.zeros(4, 64, 32))}, "main_grads of up: got torch.float16"),
    ({"main_grads": (torch.zeros(3), torch.zeros(4, 64, 32))}, r"main_grads of up: got torch.float32 \(3,\)"),
    (
        {"main_grads": ([torch.zeros(64, 64)] * 3 + [torch.zeros(32, 64)], torch.zeros(4, 64, 32))},
        r"main_grads of up: got .*\(32, 64\).*; allowed: contiguous float32 \(4, 64, 64\), or 4 of \(64, 64\)",
    ),
    ({"main_grads": (torch.zeros(4, 2, 64, 64), torch.zeros(4, 64, 32))}, r"main_grads of up: got .*\(4, 2, 64, 64\)"),
    ({"down": torch.zeros(4, 64, 32, dtype=BF16, device="meta")}, "devices: got"),
    ({"routing": torch.zeros(2)}, "routing: got Tensor; allowed: what cudnn.moe.route returned, or indices"),
    ({"routing": (torch.zeros(40, 2).bool(), torch.zeros(40, 2))}, "got torch.bool and torch.float32; allowed: int"),
    ({"up": []}, r"up: got \[\]; allowed: a tensor, or a list"),
    ({"main_grads": ()}, "main_grads: got 0 of them; allowed: those of up and of down"),
    ({"fp8": True}, "fp8: got 'swiglu', 'interleaved', H 64, I 32; allowed: gates, interleaved, multiples of 128"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED)
def test_refusals(changed: dict[str, Any], words: str) -> None:
    c = case()
    arguments = {**c.tensors, "activation": c.activation, **changed}
    x, weights, up, down = (arguments.pop(name) for name in ("x", "weights", "up", "down"))
    with pytest.raises(ValueError, match=f"^moe_mlp: .*{words}"):
        moe_mlp(x, arguments.pop("routing", (c.indices, weights)), up, down, **arguments)


def test_a_routing_of_other_experts() -> None:
    routing = moe.route(torch.randn(40, 8), 2)
    c = case()
    with pytest.raises(
        ValueError, match="moe_mlp: routing: got one of 8 experts; allowed: one of 4, the experts of up"
    ):
        moe_mlp(c.tensors["x"], routing, c.tensors["up"], c.tensors["down"])


# The module.


def test_the_module() -> None:
    """Router to result, with shared experts behind a gate, against the formula; and in a training step."""
    layer = MoE(64, 32, 4, 2, bias=True, shared_experts=1, shared_gate=True, renormalize=True)
    x = torch.randn(3, 7, 64).bfloat16().requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    flat = x.detach().reshape(-1, 64)
    logits, routing = layer.route(x)
    scores = logits.float().softmax(1)
    top = scores.topk(2).values / scores.topk(2).values.sum(1, keepdim=True)
    gate = torch.sigmoid((flat @ layer.shared_gate.weight.T).float())
    torch.testing.assert_close(routing.weights, top)
    tensors = {name: p.detach().double() for name, p in layer.named_parameters() if "." not in name}
    c = Case({}, torch.cat([routing.indices, torch.full((21, 1), 4)], 1), "swiglu", x)
    expected = formula(c, {**tensors, "x": flat.double(), "weights": torch.cat([top, gate], 1).detach().double()})
    torch.testing.assert_close(y.reshape(-1, 64).double(), expected, rtol=0.05, atol=0.02)
    (y.float().square().mean() + moe.load_balance_loss(logits, routing) * 0.01).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())
    assert torch.equal(layer(x, routing), y)


@pytest.mark.parametrize("gate", [False, True])
def test_the_routers_part_of_gradients(gate: bool) -> None:
    """One product adds it to the experts' part, where the module itself routes."""
    layer = MoE(64, 32, 4, 2, shared_experts=int(gate), shared_gate=gate)
    x = torch.randn(50, 64).bfloat16().requires_grad_()
    leaves, weight = [x, *layer.parameters()], torch.randn(50, 64).bfloat16()
    y = layer(x)
    actual = torch.autograd.grad(y, leaves, weight, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(actual, torch.autograd.grad(y, leaves, weight), strict=True))
    expected = torch.autograd.grad(layer(x, layer.route(x)[1]), leaves, weight)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))
    layer.router.weight.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(layer(x), [x], weight)[0], actual[0])
    (of_router,) = torch.autograd.grad(layer.requires_grad_()(x.detach()), [layer.router.weight], weight)
    assert torch.equal(of_router, actual[3])
    shapes: list[Any] = []
    seen: list[Any] = [
        lambda: layer.router.register_forward_hook(lambda module, arguments, logits: shapes.append(logits.shape)),
        lambda: layer.router.register_forward_pre_hook(lambda module, arguments: shapes.append(arguments[0].shape)),
        lambda: register_module_forward_hook(lambda module, arguments, y: shapes.append(module is layer.router)),
    ]
    for hook, called in zip(seen, [(50, 4), (50, 64), True], strict=True):
        with hook():
            assert torch.equal(layer(x), y)
        assert called in shapes
    forward, calls = layer.router.forward, list[Any]()
    layer.router.forward = lambda tokens: calls.append(tokens.shape) or forward(tokens)  # as accelerate does
    assert torch.equal(layer(x), y)
    assert calls == [(50, 64)]
    del layer.router.forward
    layer.router.bias = torch.nn.Parameter(torch.tensor([0.0, 0.0, 9.0, 0.0]).bfloat16())
    assert torch.equal(layer(x), layer(x, layer.route(x)[1]))


RULES: list[dict[str, Any]] = [
    {"score": "sigmoid", "renormalize": True, "shared_experts": 2, "shared_gate": True},
    {"renormalize": True, "scaling_factor": 3.0},
    {"pre_softmax": False, "correction_bias": True, "activation": "srelu"},
    {},
]


@pytest.mark.parametrize(("where", "rule"), in_turn([(rule,) for rule in RULES], 1, WHERE))
def test_gradients_through_the_router(where: str, rule: dict[str, Any]) -> None:
    """Against the operators of the same layer, with a large contribution of the router to dx."""
    device = "cuda" if where == "gpu" else "cpu"
    layer = MoE(64, 32, 4, 2, **rule).to(device)  # sampled on the CPU: the same for each case
    with torch.no_grad():
        layer.router.weight.mul_(16)
    x = torch.randn(50, 64).bfloat16().to(device).requires_grad_()
    leaves, weight = [x, *layer.parameters()], torch.randn(50, 64).bfloat16().to(device)
    with within(where):
        actual = torch.autograd.grad(layer(x), leaves, weight)
    _, routing = layer.route(x)
    expected = torch.autograd.grad(layer(x, routing), leaves, weight)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2 * float(other.abs().max()))
    constant = routing._replace(weights=routing.weights.detach())
    (by_experts,) = torch.autograd.grad(layer(x, constant), [x], weight)
    assert (actual[0] - by_experts).norm() > 0.15 * by_experts.norm()


@pytest.mark.parametrize("where", ALONE)
def test_a_router_whose_weight_lies_otherwise(where: str) -> None:
    """Transposed, or at an odd address as a part of a flat parameter may be."""
    device = "cuda" if where == "gpu" else "cpu"
    layer = MoE(64, 32, 4, 2, renormalize=True, device=device)
    x, weight = torch.randn(50, 64, device=device).bfloat16().requires_grad_(), layer.router.weight.detach()

    def gradients(router: torch.Tensor) -> list[torch.Tensor]:
        layer.router.weight = torch.nn.Parameter(router)
        return list(torch.autograd.grad(layer(x).sum(), [x, layer.router.weight]))

    expected = gradients(weight)
    flat = torch.cat([weight.new_zeros(1), weight.flatten()])
    for other in (weight.T.contiguous().T, flat[1:].view(weight.shape)):
        for one, right in zip(gradients(other), expected, strict=True):
            torch.testing.assert_close(one, right, rtol=2e-2, atol=1e-2 * float(right.abs().max()))


def test_as_many_choices_as_a_router_makes_beside_shared_experts() -> None:
    layer = MoE(16, 32, 17, 16, shared_experts=2)
    x = torch.randn(9, 16).bfloat16()
    _, routing = layer.route(x)
    indices = layer._with_shared(routing.indices)
    weights = torch.cat([routing.weights, torch.ones(9, 2)], 1)
    c = Case({"x": x, "weights": weights, "up": layer.up, "down": layer.down}, indices, "swiglu", x)
    y = layer(x)
    expected = formula(c, {name: t.detach().double() for name, t in c.tensors.items()})
    torch.testing.assert_close(y.double(), expected, rtol=0.05, atol=0.05)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(y.sum(), list(layer.parameters())))


def test_a_router_in_float32() -> None:
    """Its logits are float32, the experts bfloat16."""
    layer, x = MoE(64, 32, 4, 2), torch.randn(50, 64).bfloat16()
    layer.router.float().weight.data.mul_(1 + torch.rand(4, 64) / 512)
    logits, routing = layer.route(x)
    assert torch.equal(logits, torch.nn.functional.linear(x.float(), layer.router.weight))
    y = layer(x)
    assert torch.equal(y, layer(x, routing))
    y.sum().backward()
    assert layer.router.weight.grad is not None
    assert layer.router.weight.grad.any()
    with pytest.raises(ValueError, match=r"x: got torch.float64 .*; allowed: torch.float32 or torch.bfloat16 or"):
        layer(x.double())


def test_gradients_are_not_differentiated_twice() -> None:
    """Nor do they pass for constants, where those of the results are, or where the tensors are named."""
    x, layer = torch.randn(5, 64).bfloat16().requires_grad_(), MoE(64, 32, 4, 2)
    for call in (layer, lambda x: moe_mlp(x, layer.route(x)[1], layer.up, layer.down)):
        for loss in (lambda y: y.sum(), lambda y: y.square().sum()):
            (gradient,) = torch.autograd.grad(loss(call(x)), x, create_graph=True)
            with pytest.raises(RuntimeError, match="differentiated twice"):
                torch.autograd.grad(gradient.square().sum(), [x, layer.up], retain_graph=True, allow_unused=True)
            with pytest.raises(RuntimeError, match="differentiated twice"):
                (gradient.square().sum() + x.sum()).backward()


def test_tangents_are_refused() -> None:
    """Also where nothing is kept for a backward pass: forward-mode AD takes no notice of ``torch.no_grad``."""
    x = torch.randn(5, 64).bfloat16()
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        MoE(64, 32, 4, 2)(forward_ad.make_dual(x, x))


def test_the_correction_stays_float32() -> None:
    layer = MoE(64, 32, 4, 2, correction_bias=True)
    assert layer.correction is not None
    before = layer.correction.uniform_().clone()
    assert layer.half()(torch.randn(5, 64).half()).dtype is torch.float16
    assert torch.equal(layer.correction, before)
    layer.to("meta", torch.bfloat16).to_empty(device="cpu")
    assert layer.correction.dtype is torch.float32
    layer.correction.fill_(torch.nan)  # as memory may be that is only allocated
    layer.reset_parameters()
    assert torch.equal(layer.correction, torch.zeros(4))


def test_a_subclass_routes_its_own_way() -> None:
    class Mine(MoE):
        def route(self, x: torch.Tensor) -> Any:
            routed.append(x.shape)
            return super().route(x)

    routed, layer = list[Any](), Mine(64, 32, 4, 2)
    layer(torch.randn(2, 25, 64).bfloat16())
    assert routed == [(50, 64)]


def test_the_module_takes_halves_and_main_gradients() -> None:
    layer = MoE(64, 32, 4, 2, into_main_grad=True, correction_bias=True)
    gate, up = torch.randn(4, 32, 64).bfloat16(), torch.randn(4, 32, 64).bfloat16()
    layer.load_gate_up(torch.cat([gate, up], 1))
    assert torch.equal(layer.up[:, :32], gate)
    assert torch.equal(layer.up[:, 32:], up)
    x = torch.randn(9, 64).bfloat16()
    with pytest.raises(ValueError, match=r"^MoE: main_grad of up and down: got None"):
        layer(x)
    with torch.no_grad():
        assert layer(x).shape == x.shape
    for weight in (layer.up, layer.down):
        weight.main_grad = torch.zeros(weight.shape)
    layer(x).sum().backward()
    halves = MoE(64, 32, 4, 2, correction_bias=True, glu_layout="concatenated")
    halves.load_state_dict(layer.state_dict())
    halves.load_gate_up(torch.cat([gate, up], 1))
    assert torch.equal(halves.up[:, 32:], up)
    assert torch.equal(halves(x), layer(x))
    assert layer.up.grad is None
    assert bool(layer.up.main_grad.any())
    assert layer.up.main_grad._version > 0  # autograd knows that it changed
    assert layer.router.weight.grad is not None
    assert "correction" in layer.state_dict()
    for wrong, allowed in ((x.float(), "torch.bfloat16"), (x[:, :56], "torch.bfloat16"), (x[0, 0], "a tensor")):
        for call in (layer, layer.route):
            with pytest.raises(ValueError, match=rf"^MoE: x: got .*; allowed: {allowed} \[\.\.\., "):
                call(wrong)
    for wrong, name in (
        ({"intermediate": 30}, "intermediate"),
        ({"activation": "relu"}, "activation"),
        ({"fp8": True}, "fp8"),
        ({"glu_layout": "halves"}, "glu_layout"),
        ({"shared_experts": -1}, "shared_experts"),
        ({"shared_gate": True}, "shared_experts"),
        ({"experts": 1024, "shared_experts": 1}, "experts"),
        ({"shared_experts": 31}, "experts"),
    ):
        with pytest.raises(ValueError, match=f"^MoE: {name if ': got' in name else f'{name}: got'}"):
            MoE(**{"hidden": 64, "intermediate": 32, "experts": 4, "top_k": 2, **wrong})
    with pytest.raises(
        ValueError, match=r"^MoE: intermediate: got 30; allowed: a multiple of 32. To fix it, take 32 and"
    ):
        MoE(64, 30, 4, 2)
    for rule, words in (
        ({"top_k": 5}, "top_k: got 5; allowed: 1 to 4 of 4 experts"),
        ({"score": "max"}, "score: got"),
        ({"n_group": 3}, "n_group: got 3"),
    ):
        with pytest.raises(ValueError, match=f"^MoE: {words}"):
            MoE(64, 32, **{"experts": 4, "top_k": 2, **rule})
    with pytest.raises(ValueError, match=r"MoE\.load_gate_up: gate_up: got"):
        layer.load_gate_up(gate)
    with pytest.raises(TypeError, match=r"MoE\.load_gate_up: gate_up.*: got list; allowed: a torch\.Tensor"):
        layer.load_gate_up([gate])  # pyright: ignore[reportArgumentType]


def test_what_later_calls_find_is_not_of_this_threads_memory() -> None:
    """PyTorch may have that come from a pool of CUDA graphs, which counts what is alive there."""
    made: list[torch.Tensor] = []

    def memory(tensors: Any) -> set[int]:
        return {x.untyped_storage().data_ptr() for x in tree_leaves(tensors) if isinstance(x, torch.Tensor)}

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            actual, arguments = function(*args, **(kwargs or {})), memory([args, kwargs])
            made.extend(x for x in tree_leaves(actual) if not memory(x) <= arguments)
            return actual

    weights = torch.randn(2, 128, 128).bfloat16()
    with Seen():
        kept = [
            *quantized_weights([weights], False),
            pointer_arrays.pointers([weights]),
            operands.ones(77, weights.device),
        ]
        passing = quantized_weights([weights.clone()], True)
    assert quantized_weights([weights], False)[0] is kept[0]
    assert not memory(made) & memory(kept)
    assert memory(passing) <= memory(made)


@pytest.mark.gpu
def test_copies_in_e4m3_under_cuda_graphs_of_the_compiler() -> None:
    """``reduce-overhead``: what its first calls keep is not in its pool. Weights that change need a call without it."""
    layer = MoE(256, 128, 8, 2, fp8=True, device="cuda")
    x = torch.randn(300, 256, device="cuda").bfloat16()
    compiled = torch.compile(layer, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(x).clone()
            other = torch.randn(64, 2**20, device="cuda")  # takes freed memory
            assert torch.equal(y, layer(x))
        del other


def test_addresses_that_another_stream_reads_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator is told of each stream but the default one, which made them."""
    recorded: list[Any] = []
    kept = SimpleNamespace(record_stream=recorded.append)
    memory = SimpleNamespace(expired=lambda: False)
    first = SimpleNamespace(is_cuda=True, get_device=lambda: 0, device="cuda:0", data_ptr=lambda: 5)
    monkeypatch.setattr(pointer_arrays, "_TABLES", {("cuda:0", 5): SimpleNamespace(addresses=kept, memory=memory)})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(pointer_arrays.launch, "raw_stream", lambda stream, index: current)
    for current in (0, 8, 0):  # noqa: B007  read by the functions above
        assert pointer_arrays.pointers([first]) is kept
    assert recorded == [8]


def test_indices_that_32_bits_cannot_hold_are_dropped() -> None:
    x, up, down = torch.randn(8, 64), torch.randn(4, 128, 64) / 8, torch.randn(4, 64, 64) / 8
    indices, weights = torch.randint(4, (8, 2)), torch.rand(8, 2)
    arguments = [tensor.bfloat16() for tensor in (up, down)]
    results = []
    for lost in (-1, 4, 2**32 + 1, -(2**32) + 1):
        indices[3, 0] = lost
        results.append(cudnn.ops.moe_mlp(x.bfloat16(), (indices, weights), *arguments))
    assert all(torch.equal(results[0], other) for other in results[1:])
