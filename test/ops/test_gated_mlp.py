"""``cudnn.ops.gated_mlp`` and ``cudnn.nn.GatedMLP``: against the formula in float64, and under PyTorch's transforms."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cudnn
from cudnn.fused import plain_gemm
from cudnn.gated_mlp import layer
from cudnn.nn import GatedMLP
from cudnn.ops import gated_mlp
from support.selection import ARCHES, in_turn

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOLERANCE = {BF16: 2.0**-7, F16: 2.0**-10, F64: 2.0**-40}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
NAMES = ("x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias")


def definition(t: dict[str, torch.Tensor], activation: str) -> torch.Tensor:
    """The formula of the operator's documentation."""
    gate, up = (F.linear(t["x"], t[name], t.get(f"{name}_bias")) for name in ("gate", "up"))
    if activation == "geglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
        act = gate * torch.sigmoid(1.702 * gate) * up
    else:
        act = F.silu(gate) * up
    return F.linear(act, t["down"], t.get("down_bias"))


def tensors(
    lead: tuple[int, ...], hidden: int, inner: int, bias: bool, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Leaves by name, of values that the type has."""
    shapes = {"x": (*lead, hidden), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)} if bias else {}
    scale = {"gate": hidden**-0.5, "up": hidden**-0.5, "down": inner**-0.5}
    return {
        name: (torch.randn(*shape, dtype=F32, device=device) * scale.get(name, 1.0)).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def blocks(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up, 32 of each in turn."""
    return torch.stack([gate.unflatten(0, (-1, 32)), up.unflatten(0, (-1, 32))], 1).flatten(0, 2)


def called(t: dict[str, torch.Tensor], form: str, **options: Any) -> torch.Tensor:
    """The operator on weights in one of the forms that it takes."""
    layout = "concatenated"
    bias = [t["gate_bias"], t["up_bias"]] if "up_bias" in t else None
    gate_up: Any = (t["gate"], t["up"])
    if form == "interleaved":
        layout, gate_up = form, blocks(*gate_up)
        bias = None if bias is None else blocks(*bias)
    elif form == "concatenated":
        gate_up, bias = torch.cat(gate_up), None if bias is None else torch.cat(bias)
    elif form == "adjacent":
        gate_up = torch.cat(gate_up).chunk(2)
    return gated_mlp(t["x"], gate_up, t["down"], bias, t.get("down_bias"), glu_layout=layout, **options)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (actual.double() - expected.double()).norm()
    assert float(error.detach()) <= tolerance * max(float(expected.detach().double().norm()), 1e-3)


FORMS = ("concatenated", "interleaved", "adjacent", "apart")


@given(
    lead=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    hidden=st.sampled_from((8, 24, 64)),
    inner=st.sampled_from((32, 96)),
    bias=st.booleans(),
    dtype=st.sampled_from((BF16, F16, F64)),
    form=st.sampled_from(FORMS),
    activation=st.sampled_from(layer.ACTIVATIONS),
    frozen=st.sets(st.sampled_from(NAMES), max_size=3),
)
@settings(max_examples=20, deadline=None)
def test_any_shape_and_form(
    lead: tuple[int, ...],
    hidden: int,
    inner: int,
    bias: bool,
    dtype: torch.dtype,
    form: str,
    activation: str,
    frozen: set[str],
) -> None:
    torch.manual_seed(0)
    t = tensors(lead, hidden, inner, bias, dtype)
    for name in frozen & t.keys():
        t[name].requires_grad_(False)
    wide = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in t.items()}
    y, expected = called(t, form, activation=activation), definition(wide, activation)
    assert y.shape == t["x"].shape
    assert y.is_contiguous()
    close(y, expected, TOLERANCE[dtype])
    leaves = [name for name, x in t.items() if x.requires_grad]
    if not leaves:
        assert y.grad_fn is None
        return
    dy = torch.randn_like(y)
    actual = torch.autograd.grad(y, [t[name] for name in leaves], dy)
    gradients = torch.autograd.grad(expected, [wide[name] for name in leaves], dy.double())
    for one, other in zip(actual, gradients, strict=True):
        assert one.dtype is dtype
        close(one, other, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("where", "form", "activation", "bias"),
    in_turn([("apart", "swiglu", False), ("interleaved", "geglu", True)], places=(*ARCHES, GPU)),
)
def test_kernels(where: str, form: str, activation: str, bias: bool) -> None:
    """The kernels of both passes, which write the preactivation's gradient into its memory, and accumulate."""
    torch.manual_seed(0)
    device = where if where == "cuda" else "cpu"
    emulated = contextlib.nullcontext() if where == "cuda" else cudnn.emulation(where, races=True)
    t = tensors((2, 10), 64, 64, bias, BF16, device)
    wide = {name: x.detach().double().requires_grad_() for name, x in t.items()}
    shape = (64, 64) if form == "apart" else (128, 64)
    sums = [torch.full(shape, 0.5, dtype=F32, device=device) for _ in range(2 if form == "apart" else 1)]
    ddown = torch.full((64, 64), 0.25, dtype=F32, device=device)
    dy = torch.randn(2, 10, 64, dtype=F32, device=device).to(BF16)
    with emulated:
        y = called(t, form, activation=activation, main_grads=(sums if form == "apart" else sums[0], ddown))
        y.backward(dy)
    expected = definition(wide, activation)
    expected.backward(dy.double())
    close(y, expected, 0.01)
    assert t["down"].grad is None
    gate_up = [wide["gate"].grad, wide["up"].grad]
    gradients = [blocks(*gate_up)] if form == "interleaved" else gate_up  # pyright: ignore[reportArgumentType]
    for one, other in zip([*sums, ddown], [*gradients, wide["down"].grad], strict=True):
        assert other is not None
        close(one - (0.25 if one is ddown else 0.5), other, 0.02)
    for name in [name for name in t if name.endswith("bias") or name == "x"]:
        actual, gradient = t[name].grad, wide[name].grad
        assert actual is not None
        assert gradient is not None
        close(actual, gradient, 0.02)


@pytest.mark.gpu
def test_sizes_of_a_model_on_the_gpu() -> None:
    """All forms at sizes with many tiles, ragged rows, forward and backward, against PyTorch in float32."""
    t = tensors((3, 341), 1024, 2816, False, BF16, "cuda")
    wide = {name: x.detach().float().requires_grad_() for name, x in t.items()}
    expected, dy = definition(wide, "swiglu"), torch.randn(3, 341, 1024, device="cuda").to(BF16)
    gradients = torch.autograd.grad(expected, list(wide.values()), dy.float())
    for form in FORMS:
        y = called(t, form)
        close(y, expected, 0.01)
        for one, other in zip(torch.autograd.grad(y, list(t.values()), dy), gradients, strict=True):
            close(one, other, 0.01)


@pytest.mark.gpu
def test_cuda_graph() -> None:
    mlp = GatedMLP(256, 512, device="cuda")
    x = torch.randn(64, 256, device="cuda").to(BF16).requires_grad_()

    def step() -> list[torch.Tensor]:
        y = mlp(x)
        return [y, *torch.autograd.grad(y, [x, *mlp.parameters()], y)]

    expected = [z.detach().clone() for z in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("majors", ["kk", "mm", "km"])
def test_gemm_of_cpu_tensors(majors: str, adds: bool) -> None:
    a, b = (
        torch.randn(n, 16) if major == "k" else torch.randn(16, n).T for n, major in zip((24, 40), majors, strict=True)
    )
    out = torch.ones(24, 40)
    plain_gemm.run(a, b, out, adds)
    torch.testing.assert_close(out, a @ b.T + adds)


def test_saves_two_tensors_and_recomputes() -> None:
    """x and the preactivation, beside the weights; the activation is not saved."""
    t = tensors((6,), 64, 96, False, BF16)
    gate_up = torch.cat([t["gate"], t["up"]]).detach().requires_grad_()
    y = gated_mlp(t["x"], gate_up, t["down"])
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = gated_mlp(t["x"], gate_up, t["down"])
    assert sorted(tuple(x.shape) for x in saved) == sorted([(6, 64), (6, 192), (64, 96), (192, 64)])
    with torch.no_grad():
        assert gated_mlp(t["x"], gate_up, t["down"]).grad_fn is None
    assert y.grad_fn is not None


def test_a_graph_that_is_kept_gives_the_same_again() -> None:
    """The preactivation is overwritten only where nothing reads it again."""
    t = tensors((6,), 64, 96, False, BF16)
    y = called(t, "adjacent")
    leaves = list(t.values())
    first = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)
    third = torch.autograd.grad(y, leaves, torch.ones_like(y))
    for one, *others in zip(first, second, third, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_a_second_try_after_an_error_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd keeps the graph of a pass that failed, but the preactivation is lost."""
    t = tensors((6,), 64, 96, False, BF16)
    y = called(t, "adjacent")
    with monkeypatch.context() as context:
        context.setattr(layer, "_dx", None)
        with pytest.raises(TypeError):
            torch.autograd.grad(y, list(t.values()), torch.ones_like(y))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, list(t.values()), torch.ones_like(y))


def test_adjacent_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up = torch.randn(128, 64).chunk(2)
    assert layer.as_one([gate, up]).data_ptr() == gate.data_ptr()
    assert not layer.are_adjacent(up, gate)
    assert not layer.are_adjacent(gate, up.clone())
    torch.testing.assert_close(layer.as_one([up, gate]), torch.cat([up, gate]))


def test_compiled() -> None:
    """Without a graph break, also with another number of tokens."""
    form = "apart"
    t = tensors((6,), 64, 96, True, BF16)
    compiled = torch.compile(lambda t: called(t, form), backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (6, 9):
        t["x"] = torch.randn(rows, 64).to(BF16).requires_grad_()
        pairs = [(f(t), f) for f in (compiled, lambda t: called(t, form))]
        assert torch.equal(pairs[0][0], pairs[1][0])
        gradients = [torch.autograd.grad(y, list(t.values()), torch.ones_like(y)) for y, _ in pairs]
        assert all(map(torch.equal, *gradients))


def test_compiled_accumulates() -> None:
    mlp = GatedMLP(64, 96, into_main_grad=True, dtype=F32)
    weights: list[Any] = [mlp.gate_up, mlp.down]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    x = torch.randn(5, 64)
    expected = torch.autograd.grad(definition(named(mlp, x), "swiglu").sum(), [mlp.gate_up, mlp.down])
    for run in (mlp, torch.compile(mlp, backend="aot_eager", fullgraph=True)):
        run(x).sum().backward()
    assert mlp.gate_up.grad is None
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.main_grad, 2 * gradient)
    del weights[1].main_grad
    with pytest.raises(ValueError, match="GatedMLP: main_grad of gate_up and down: got None; allowed: float32"):
        mlp(x)
    with torch.no_grad():
        mlp(x)


def named(mlp: GatedMLP, x: torch.Tensor) -> dict[str, torch.Tensor]:
    gate, up = mlp.gate_up.chunk(2)
    return {"x": x, "gate": gate, "up": up, "down": mlp.down}


def test_checkpointing_autocast_and_deepcopy() -> None:
    mlp = GatedMLP(64, 96, dtype=F32)
    x = torch.randn(5, 64).requires_grad_()
    leaves = [x, *mlp.parameters()]

    def gradients(run: Callable[[torch.Tensor], Any], inputs: Any = leaves) -> Any:
        y = run(x)
        return [y, *torch.autograd.grad(y, inputs, torch.ones_like(y))]

    plain = gradients(mlp)
    again = gradients(lambda x: checkpoint(mlp, x, use_reentrant=False))
    assert all(map(torch.equal, plain, again))
    twin = copy.deepcopy(mlp)
    assert twin.gate_up is not mlp.gate_up
    assert all(map(torch.equal, plain, gradients(twin, [x, *twin.parameters()])))
    with torch.autocast("cpu", dtype=BF16):
        cast = gradients(mlp)
    assert cast[0].dtype is BF16
    assert all(g.dtype is F32 for g in cast[1:])
    close(cast[0], plain[0], 0.02)


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts(layout: str, bias: bool) -> None:
    """Those of the module, and those with the weights apart, load into either layout."""
    mlp, twin = (GatedMLP(64, 96, bias=bias, glu_layout=layout) for _ in range(2))
    twin.load_state_dict(mlp.state_dict())
    x = torch.randn(5, 64).to(BF16)
    assert torch.equal(twin(x), mlp(x))
    apart = mlp.split_state_dict()
    assert apart.keys() == {
        f"{n}.{k}" for n in ("gate_proj", "up_proj", "down_proj") for k in ("weight", "bias")[: 1 + bias]
    }
    other = GatedMLP(64, 96, bias=bias)
    assert (
        str(torch.nn.Sequential(other).load_state_dict({f"0.{k}": v for k, v in apart.items()}))
        == "<All keys matched successfully>"
    )
    close(other(x), mlp(x), 1e-2)
    loaded = GatedMLP(64, 96, glu_layout=layout)
    loaded.load_gate_up(apart["gate_proj.weight"], apart["up_proj.weight"])
    assert torch.equal(loaded.gate_up, mlp.gate_up)


def test_state_dicts_that_do_not_fit() -> None:
    """Of sizes that are right in the sum alone, of another hidden size, and with the weights twice."""
    mlp = GatedMLP(64, 96)
    before = mlp.gate_up.detach().clone()
    apart = {name: x.clone() for name, x in mlp.split_state_dict().items()}
    for name, rows in (("gate_proj.weight", torch.zeros(64, 64)), ("up_proj.weight", torch.zeros(96, 72))):
        changed = apart | {name: rows}
        if name == "gate_proj.weight":
            changed["up_proj.weight"] = torch.zeros(128, 64)
        with pytest.raises(ValueError, match=rf"{name}: got .*; allowed: \(96, 64\)"):
            mlp.load_state_dict(changed)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .*gate_proj.weight"):
        mlp.load_state_dict(apart | {"gate_up": torch.zeros(192, 64), "down": torch.zeros(64, 96)})
    mlp.load_state_dict(apart)
    assert torch.equal(mlp.gate_up, before)


def test_no_tokens() -> None:
    t = tensors((0, 3), 64, 96, True, BF16)
    y = called(t, "concatenated")
    gradients = torch.autograd.grad(y, list(t.values()), torch.ones_like(y))
    assert y.shape == (0, 3, 64)
    assert [g.shape for g in gradients] == [x.shape for x in t.values()]
    assert all(not g.any() for g in gradients)


def test_flops_are_those_of_pytorch() -> None:
    t = tensors((6,), 64, 96, False, F32)
    counts = []
    for run in (lambda: called(t, "apart"), lambda: definition(t, "swiglu")):
        with FlopCounterMode(display=False) as counter:
            run().sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 18 * 6 * 64 * 96


def test_vmap_and_fake_tensors() -> None:
    t = {name: x.detach() for name, x in tensors((4, 6), 64, 96, False, F64).items()}
    weights = torch.cat([t["gate"], t["up"]]), t["down"]
    mapped = torch.vmap(lambda x: gated_mlp(x, *weights))(t["x"])
    torch.testing.assert_close(mapped, gated_mlp(t["x"], *weights))
    meta = gated_mlp(*(x.to("meta") for x in (t["x"], *weights)))
    assert (meta.shape, meta.device.type) == (t["x"].shape, "meta")


def test_nothing_is_differentiated_twice() -> None:
    t = tensors((3,), 64, 32, False, F64)
    y = called(t, "concatenated")
    (dx,) = torch.autograd.grad(y.sum(), t["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="nothing here is differentiated twice"):
        dx.sum().backward()


def good() -> dict[str, Any]:
    return {
        "x": torch.zeros(4, 64, dtype=BF16),
        "gate_up": torch.zeros(192, 64, dtype=BF16),
        "down": torch.zeros(64, 96, dtype=BF16),
    }


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"activation": "gelu"}, ValueError, r"activation: got 'gelu'; allowed: 'swiglu' or 'geglu'"),
        ({"glu_layout": "rows"}, ValueError, r"glu_layout: got 'rows'"),
        ({"x": torch.zeros(4, 32, dtype=BF16)}, ValueError, r"shapes: got \{'x': \(4, 32\)"),
        ({"x": torch.zeros(4, 64)}, ValueError, r"types: got torch.bfloat16, torch.float32"),
        ({"x": [1]}, TypeError, r"x tensor: got list"),
        (
            {"gate_up": [torch.zeros(96, 64, dtype=BF16)] * 3},
            ValueError,
            r"gate_up: got 3 tensors; allowed: a tensor, or a pair",
        ),
        (
            {"gate_up": torch.zeros(64, 192, dtype=BF16).T},
            ValueError,
            r"strides of gate_up: got \(1, 192\); allowed: contiguous",
        ),
        (
            {"down": torch.zeros(64, 72, dtype=BF16), "gate_up": torch.zeros(144, 64, dtype=BF16)},
            ValueError,
            "got 72; allowed: a multiple of 32",
        ),
        ({"down_bias": torch.zeros(3, dtype=BF16)}, ValueError, r"'down_bias': \(3,\)"),
        (
            {"main_grads": (torch.zeros(192, 64, dtype=BF16), torch.zeros(64, 96))},
            ValueError,
            r"main_grads of gate_up: got torch.bfloat16",
        ),
        ({"main_grads": torch.zeros(2)}, ValueError, "main_grads: got Tensor; allowed: those of gate_up and of down"),
        (
            {"gate_up": [torch.zeros(96, 64, dtype=BF16)] * 2, "glu_layout": "interleaved"},
            ValueError,
            r"glu_layout: got 'interleaved'; allowed: 'concatenated', for a pair of weights",
        ),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^gated_mlp: .*{words}"):
        gated_mlp(**{**good(), **change})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hidden": 60}, "hidden: got 60; allowed: a multiple of 8. To fix it, take 64"),
        ({"intermediate": 90}, "intermediate: got 90; allowed: a multiple of 32. To fix it, take 96"),
        ({"activation": "relu"}, "activation: got 'relu'"),
        ({"glu_layout": "x"}, "glu_layout: got 'x'"),
        ({"dtype": torch.int8}, "dtype: got torch.int8"),
    ],
)
def test_refusals_of_the_module(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"GatedMLP: {words}"):
        GatedMLP(**{"hidden": 64, "intermediate": 96, **arguments})
