"""``fp8="blockwise"``: both passes with e4m3 operands, against a float64 model of the recipe, expert by expert."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

import cudnn
from cudnn import moe
from cudnn.gemm.scales import dequantize_token_blocks, token_block_ranges
from cudnn.moe import experts as operands
from cudnn.moe import quantizing, reference
from cudnn.moe.quantizing import quantized_both_ways, quantized_tokens, quantized_weights
from cudnn.nn import MoE
from cudnn.ops import moe_experts, moe_mlp
from support.ranks import one_rank

BF16, F64 = torch.bfloat16, torch.float64
ARCHS = ("sm_90a", "sm_100a")
WHERE = ("reference", *(pytest.param(arch, marks=pytest.mark.full) for arch in ARCHS))
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
COSINE = 0.9965  # with the gradients in bfloat16: three GEMMs, whose operands are off by 2.5 % of their norm each


def within(where: str) -> Any:
    return cudnn.emulation(where, races=True) if where in ARCHS else contextlib.nullcontext()


def rounded(x: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """What e4m3 with a scale for ``rows`` x 128 makes of a matrix, float64; the last rows may be fewer."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % rows))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3), keepdim=True).float() * (1 / 448)  # in float32, as the rule says: it decides ties
    quotients = (blocks.float() * scale.where(scale > 0, 1.0).reciprocal()).clamp(-448, 448)
    return (quotients.to(torch.float8_e4m3fn).double() * scale).flatten(2, 3).flatten(0, 1)[: len(x)]


def by_tokens(x: torch.Tensor) -> torch.Tensor:
    """The same with a scale for 128 rows of a column."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 128))
    return rounded(padded.T.contiguous()).T[: len(x)]


def sixteen(x: torch.Tensor) -> torch.Tensor:
    return x.to(BF16).double()


Rounding = Callable[[torch.Tensor], torch.Tensor]


def exact(x: torch.Tensor) -> torch.Tensor:
    return x


def gates(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    g, u = h.unflatten(1, (-1, 2, 32)).unbind(2)
    return g.flatten(1), u.flatten(1)


class Case:
    """Tokens for four experts, one of which has none; some slots are dropped."""

    def __init__(self, tokens: int = 150, hidden: int = 256, inner: int = 128, device: str = "cpu") -> None:
        experts, top_k = 4, 2
        indices = torch.rand(tokens, 3).argsort(1)[:, :top_k] + 0
        self.indices = indices.where(torch.rand(indices.shape) > 0.2, -1).to(device)
        tensors = {
            "x": torch.randn(tokens, hidden),
            "weights": torch.rand(tokens, top_k),
            "up": torch.randn(experts, 2 * inner, hidden) / hidden**0.5,
            "down": torch.randn(experts, hidden, inner) / inner**0.5,
            "up_bias": torch.randn(experts, 2 * inner),
            "down_bias": torch.randn(experts, hidden),
        }
        self.tensors = {n: (t if n == "weights" else t.to(BF16)).to(device) for n, t in tensors.items()}
        self.dy = torch.randn(tokens, hidden).to(BF16).to(device)

    def run(self, fp8: Any, lists: bool = False, omits: str = "", **options: Any) -> dict[str, torch.Tensor]:
        """The result and the gradients, without the tensor that it ``omits``."""
        t: dict[str, Any] = {n: x.clone().requires_grad_() for n, x in self.tensors.items() if n != omits}
        for name in ("up", "down") if lists else ():
            t[name] = [w.clone().requires_grad_() for w in self.tensors[name]]
        x, weights, up, down, *biases = t.values()
        y = moe_mlp(x, (self.indices, weights), up, down, *biases, fp8=fp8, **options)
        y.backward(self.dy)
        grads = {n: torch.stack([w.grad for w in v]) if isinstance(v, list) else v.grad for n, v in t.items()}
        return {"y": y.detach(), **grads}

    def model(
        self, between: Rounding, saved: Rounding, x_comes: Rounding = exact, dy_comes: Rounding = exact
    ) -> dict[str, torch.Tensor]:
        """The recipe in float64. ``between``: how a GEMM's result is rounded before it is quantized. ``saved``: how the
        pre-activation is. ``x_comes``, ``dy_comes``: how these are before they are quantized by token columns.
        """
        t = {n: x.double().cpu() for n, x in self.tensors.items()}
        x, weights, dy, indices = t["x"], t["weights"], self.dy.double().cpu(), self.indices.cpu()
        result = {"y": torch.zeros_like(x), **{n: torch.zeros_like(v) for n, v in t.items()}}
        for e, (up, down) in enumerate(zip(t["up"], t["down"], strict=True)):
            token, slot = (indices == e).nonzero(as_tuple=True)
            prob, up8, down8 = weights[token, slot, None], rounded(up, 128), rounded(down, 128)
            h = rounded(x[token]) @ up8.T + t["up_bias"][e]
            g, u = gates(h)
            out = sixteen(rounded(between(u * g * g.sigmoid())) @ down8.T + t["down_bias"][e])
            result["y"].index_add_(0, token, out * prob)
            g, u = gates(saved(h))
            s, dact = g.sigmoid(), rounded(dy[token]) @ down8
            result["weights"][token, slot] = (dact * u * g * s).sum(1) + dy[token] @ t["down_bias"][e]
            dact = dact * prob
            blocks = [(dact * u * s * (1 + g * (1 - s))).unflatten(1, (-1, 32)), (dact * g * s).unflatten(1, (-1, 32))]
            dh, act = torch.stack(blocks, 2).flatten(1), between(u * g * s * prob)
            result["up_bias"][e], result["down_bias"][e] = dh.sum(0), (dy[token] * prob).sum(0)
            dh = between(dh)
            result["x"].index_add_(0, token, sixteen(rounded(dh) @ up8))
            result["up"][e] = by_tokens(dh).T @ by_tokens(x_comes(x[token]))
            result["down"][e] = by_tokens(dy_comes(dy[token])).T @ by_tokens(act)
        return result


def check(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float) -> None:
    for name, right in expected.items():
        error = float((actual[name].double().cpu() - right).norm() / right.norm())
        assert error < limit, f"{name}: {error}"


@pytest.mark.parametrize("where", [*WHERE, GPU])
@pytest.mark.parametrize("fp8", ["blockwise", "blockwise_save16"])
def test_the_recipe(where: str, fp8: str) -> None:
    """Blackwell's epilogues do not quantize: results of GEMMs are rounded to 16 bits first, and saved in 16 bits."""
    c = Case(device="cuda" if where == "gpu" else "cpu")
    with within(where):
        actual = c.run(fp8)
        saves16 = fp8 == "blockwise_save16" or where == "sm_100a"
        model = c.model(sixteen if where == "sm_100a" else exact, sixteen if saves16 else rounded)
        check(actual, model, 0.006 if saves16 else 0.012)
        lists = c.run(fp8, lists=True)
        assert all(torch.equal(lists[name], each) for name, each in actual.items())
    for name, right in c.run(False).items():
        cosine = torch.nn.functional.cosine_similarity(right.double().flatten(), actual[name].double().flatten(), dim=0)
        assert float(cosine) > COSINE, name
        assert float(cosine) < 1 - 1e-4 or "bias" in name, f"{name}: not of e4m3"


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("omits", ["", "down_bias"])
def test_the_recipe_over_ranks(where: str, omits: str) -> None:
    """x comes in e4m3, dy too without ``down_bias``: token columns are rounded twice, all else as on one rank."""
    c = Case()
    if omits:
        c.tensors[omits].zero_()
    blackwell = where == "sm_100a"
    with one_rank(), within(where):
        actual, alone = (c.run("blockwise", omits=omits, **options) for options in ({"group": dist.group.WORLD}, {}))
    forms = (sixteen, sixteen) if blackwell else (exact, rounded)
    model, limit = c.model(*forms, rounded, rounded if omits else exact), 0.006 if blackwell else 0.012
    check(actual, {n: x for n, x in model.items() if n != omits}, limit)
    twice = {"up", "down"} if omits else {"up"}
    assert {name for name, each in actual.items() if not torch.equal(each, alone[name])} == twice
    exact_grads = c.run(False, omits=omits)
    for name in ("up", "down"):
        once, again = (
            float(
                torch.nn.functional.cosine_similarity(*(t[name].double().flatten() for t in (exact_grads, each)), dim=0)
            )
            for each in (alone, actual)
        )
        assert once - 0.0005 < again  # as docs/fp8_training.md says
        assert again > COSINE


def test_main_gradients_are_added_to() -> None:
    c = Case()
    once = c.run("blockwise")
    buffers = [torch.ones_like(c.tensors[name], dtype=torch.float32) for name in ("up", "down")]
    for lists in (False, True):
        for buffer in buffers:
            buffer.fill_(1.0)
        t = {n: x.clone().requires_grad_() for n, x in c.tensors.items()}
        x, weights, up, down, *biases = t.values()
        arguments = (x, (c.indices, weights), *((list(w) if lists else w) for w in (up, down)), *biases)
        grads: Any = [list(b) if lists else b for b in buffers]
        moe_mlp(*arguments, fp8="blockwise", main_grads=tuple(grads)).backward(c.dy)
        for name, buffer in zip(("up", "down"), buffers, strict=True):
            assert torch.allclose(buffer - 1.0, once[name].float(), atol=1e-2, rtol=1e-2)


def test_dispatched_rows_are_those_of_tokens() -> None:
    """Rows sorted by expert, with probabilities and padding, get the gradients of the same tokens."""
    c = Case()
    indices = torch.arange(150) % 3
    order = indices.argsort(stable=True)
    t = [{n: x.clone().requires_grad_() for n, x in c.tensors.items()} for _ in range(2)]
    (x, weights, *experts), (x2, weights2, *experts2) = (each.values() for each in t)
    y = moe_mlp(x, (indices[:, None], weights[:, :1]), *experts, fp8="blockwise")
    y.backward(c.dy)
    counts = [*torch.bincount(indices, minlength=4).tolist()]
    rows = torch.cat([x2[order], x2.new_full((5, 256), float("nan"))])
    probs = torch.cat([weights2[order, 0], weights2.new_zeros(5)])
    y2 = moe_experts(rows, counts, *experts2[:2], probs, *experts2[2:], fp8="blockwise")
    y2.backward(torch.cat([c.dy[order], c.dy[:5]]))
    for name in ("x", "weights", "up", "down", "up_bias"):
        actual, expected = t[1][name].grad, t[0][name].grad
        assert float((actual - expected).norm() / expected.norm()) < 0.02, name


@pytest.mark.parametrize("where", WHERE)
def test_tokens_by_rows_and_by_token_columns(where: str) -> None:
    """The bits of the reference, for experts that end anywhere, without tokens, and with zeros."""
    x, indices = torch.randn(150, 256).to(BF16), torch.randint(-1, 3, (150, 2), dtype=torch.int32)
    x[:, :128] *= torch.rand(150, 1).to(BF16)
    x[3], indices[indices == 2] = 0.0, 4
    offsets, gather_idx, _ = moe.sort(indices, 5)
    used = [i for _, blocks in token_block_ranges(offsets) for i in range(blocks.start, blocks.stop)]

    def run(x: torch.Tensor, index: torch.Tensor | None, by_rows: bool) -> list[torch.Tensor]:
        rows, columns = quantized_tokens(x, index, offsets, 300, by_rows)
        of_rows = [] if rows is None else [rows[0].view(torch.uint8), rows[1]]
        return [*(t[: offsets[-1]] for t in of_rows), columns.blocks.view(torch.uint8)[used], columns.scales[used]]

    cases = [(x, gather_idx, True), (x, gather_idx, False), (x[gather_idx.long()], None, True)]
    expected = [run(*case) for case in cases]
    with within(where):
        for case, right in zip(cases, expected, strict=True):
            assert all(map(torch.equal, run(*case), right))
    columns = quantized_tokens(x, gather_idx, offsets, 300, False)[1]
    tokens = dequantize_token_blocks(*columns, offsets)[offsets[0] : offsets[1]]
    right = by_tokens(x[gather_idx.long()].double()[offsets[0] : offsets[1]])
    assert torch.allclose(tokens.double(), right, rtol=1e-6)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("lists", [False, True])
def test_weights_are_transposed_exactly(where: str, lists: bool) -> None:
    weight = torch.randn(3, 256, 384).to(BF16)
    weights = list(weight) if lists else [weight]
    values, scales = reference.quantize(weight.flatten(0, 1), 128)
    with within(where):
        copies = quantized_both_ways(weights)
    assert torch.equal(copies.values.float(), values.float().view(3, 256, 384))
    assert torch.equal(copies.scales, scales.view(3, 2, 3))
    assert torch.equal(copies.transposed.float(), copies.values.float().mT)
    assert torch.equal(copies.transposed_scales, copies.scales.mT)


OPTIMIZERS = {
    "one by one": functools.partial(torch.optim.SGD, foreach=False),
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
}


class InData(torch.optim.Optimizer):
    """An optimizer that no version counts, as Megatron's copies of float32 weights are not."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * p.grad)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS.values(), InData], ids=[*OPTIMIZERS, "data"])
def test_weights_are_quantized_once_per_step(optimizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for four micro-batches, forward and backward; again after a step of any optimizer, also of a fused one."""
    layer = MoE(128, 128, 4, 2, fp8="blockwise")
    steps, runs = optimizer(layer.parameters(), lr=0.5), [0]
    quantize = quantizing._quantize
    monkeypatch.setattr(quantizing, "_quantize", lambda *a: (runs.__setitem__(0, runs[0] + 1), quantize(*a)))
    x = torch.randn(40, 128).to(BF16)
    for step in range(3):
        for _ in range(4):
            y = layer(x)
            y.backward(x)
        assert runs == [2 * (step + 1)]
        fresh = MoE(128, 128, 4, 2, fp8="blockwise")
        fresh.load_state_dict(layer.state_dict())
        assert torch.equal(y, fresh(x))
        runs[0] -= 2
        steps.step()


def test_what_else_changes_weights() -> None:
    """Versions are read; ``weights_changed`` tells of other changes. Passes without gradients share the copies."""
    layer = MoE(128, 128, 4, 2, fp8="blockwise")
    x = torch.randn(40, 128).to(BF16)
    kept = quantized_both_ways([layer.up])
    with torch.no_grad():
        assert quantized_weights([layer.up], False)[0] is kept.values
        before = layer(x)
        layer.up.mul_(2.0)
        assert not torch.equal(layer(x), before)
        assert quantized_weights([layer.up], False)[0] is kept.values
    expected = kept.scales.clone()
    layer.up.data.mul_(2.0)
    layer.weights_changed()
    assert torch.equal(quantized_both_ways([layer.up]).transposed_scales.mT, 2 * expected)
    assert quantized_both_ways([layer.up]).transposed is kept.transposed
    only_values = quantized_weights([layer.down], False)
    assert quantized_both_ways([layer.down]).values is only_values[0]
    weights = list(torch.randn(3, 128, 128).to(BF16))
    of_list = quantized_both_ways(weights)
    expected = of_list.scales.clone()
    expected[2] *= 2
    weights[2].data.mul_(2.0)
    moe.weights_changed(weights[2])
    assert torch.equal(quantized_both_ways(weights).scales, expected)


def test_recomputed_compiled_and_in_autocast() -> None:
    layer = MoE(128, 128, 4, 2, fp8="blockwise", shared_experts=1)
    x = torch.randn(40, 128).to(BF16)

    def results(run: Callable[..., Any]) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(x)
        grads = [leaf.grad, *(p.grad for p in layer.parameters())]
        layer.zero_grad()
        return [y.detach(), *grads]  # pyright: ignore[reportReturnType]

    expected = results(layer)
    recomputed = results(lambda leaf: checkpoint(layer, leaf, use_reentrant=False))
    assert all(map(torch.equal, recomputed, expected))
    compiled = results(torch.compile(layer, backend="aot_eager", fullgraph=True))
    torch.compiler.reset()  # other tests count graphs
    for a, b in zip(compiled, expected, strict=True):
        assert float((a - b).norm()) <= 0.01 * float(b.norm())


def test_names_of_recipes() -> None:
    assert MoE(128, 128, 4, 2, fp8=True).fp8 == "forward"
    for wrong in ("block", 1.5):
        with pytest.raises((ValueError, TypeError), match="fp8"):
            MoE(128, 128, 4, 2, fp8=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="fp8: got 'swiglu', 'interleaved', hidden=64"):
        MoE(64, 128, 4, 2, fp8="blockwise")
    assert operands.recipe_of("moe_mlp", "blockwise") == "blockwise"


@pytest.mark.parametrize("where", [*WHERE, GPU])
def test_changes_that_nothing_announces_are_found(where: str) -> None:
    """A later pass raises an error, though no version counts the change and no optimizer made it."""
    layer = MoE(128, 128, 4, 2, fp8="blockwise", device="cuda" if where == "gpu" else "cpu")

    def passes(count: int) -> None:
        for _ in range(count):
            copies = quantized_both_ways([layer.up])
            if where == "gpu":
                torch.cuda.synchronize()
        assert copies.values.shape == layer.up.shape

    with within(where):
        passes(3)
        layer.up.data.mul_(1.01)
        with pytest.raises(RuntimeError, match=r"weights, fp8='blockwise': got other .* layer\.weights_changed"):
            passes(3)
        layer.weights_changed()
        passes(3)
        layer.up.data.mul_(1.01)
        layer.weights_changed()
        passes(3)


def test_changes_are_found_without_gradients_and_reported_once() -> None:
    """Weights that are exchanged for an evaluation through ``data`` and back, as averages are, without a call."""
    layer = MoE(128, 128, 4, 2, fp8="blockwise")
    x = torch.randn(40, 128).to(BF16)

    def pass_() -> None:
        layer(x).backward(x)

    pass_()
    before = layer.up.detach().clone()
    layer.up.data.mul_(1.5)
    with torch.no_grad():
        layer(x)
    layer.up.data.copy_(before)
    with pytest.raises(RuntimeError, match=r"weights_changed"):
        pass_()
    layer.up.data.mul_(1.5)
    layer.weights_changed()
    with torch.inference_mode():
        layer(x)
    for _ in range(3):
        pass_()


@pytest.mark.parametrize("where", WHERE)
def test_changes_of_zeros_and_of_lists_are_found(where: str) -> None:
    """Weights that were zeros; and, within as many passes as a list has rows, one row of one of its matrices."""

    def passes(weights: list[torch.Tensor], count: int) -> None:
        for _ in range(count):
            quantized_both_ways(weights)

    with within(where):
        weight = torch.zeros(2, 128, 128, dtype=BF16)
        passes([weight], 2)
        weight.data.fill_(1e-30)
        with pytest.raises(RuntimeError, match=r"weights_changed"):
            passes([weight], 2)
    if where == "reference":
        weights = list(torch.randn(4, 128, 128).to(BF16))
        passes(weights, 1)
        weights[2].data[65] *= 1.5
        with pytest.raises(RuntimeError, match=r"weights_changed"):
            passes(weights, 4 * 128 + 1)


def test_a_change_is_reported_though_weights_were_quantized_again() -> None:
    """As when the host is so far ahead that no pass has seen a comparison's result before the optimizer's step."""
    weight = torch.randn(2, 128, 128).to(BF16)
    for _ in range(2):
        quantized_both_ways([weight])
    weight.data.mul_(1.5)
    check = quantizing._cache[weight].check
    raises, check.raise_if_changed = check.raise_if_changed, lambda: None
    quantized_both_ways([weight])
    quantizing.weights_changed(weight)
    for _ in range(3):
        quantized_both_ways([weight])
    check.raise_if_changed = raises
    with pytest.raises(RuntimeError, match=r"weights_changed"):
        quantized_both_ways([weight])
    for _ in range(2):
        quantized_both_ways([weight])


@pytest.mark.gpu
def test_a_change_is_reported_to_a_host_that_is_ahead() -> None:
    weight = torch.randn(2, 128, 128, device="cuda").to(BF16)

    def train(factor: float) -> None:
        """A change that is not counted, then optimizer's steps and micro-batches."""
        weight.data.mul_(factor)
        quantized_both_ways([weight])
        for _ in range(3):
            quantizing.weights_changed(weight)
            quantized_both_ways([weight])
            quantized_both_ways([weight])

    quantized_both_ways([weight])
    train(1.0)  # compiles and loads all kernels, for which the host would wait
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about 1 s
    awake = torch.cuda.Event()
    awake.record()
    train(1.5)
    assert not awake.query(), "the GPU was as fast as the host: this run tests nothing"
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"weights_changed"):
        quantized_both_ways([weight])
    for _ in range(3):
        quantized_both_ways([weight])
        torch.cuda.synchronize()


@pytest.mark.full
def test_addresses_of_more_than_32_bits() -> None:
    """The kernels' tensors may have more than 2^31 elements: here the rows are far apart."""
    step, k = 2**24, 384
    x = torch.randn(256, k).to(BF16)
    far = torch.empty(k * step, dtype=torch.uint8).view(torch.float8_e4m3fn).as_strided((k, 256), (step, 1))
    values, scales = reference.quantize(x, 128)
    copies = torch.empty_like(values), torch.empty_like(scales)
    transposed_scales = torch.empty(3, 2, dtype=torch.float32)
    with cudnn.emulation("sm_90a"):
        kernel = quantizing.kernel(quantizing._QUANTIZE, quantizing.QuantizeConfiguration, BF16, k, True, 0, 256)
        kernel(x, *copies, far, transposed_scales)
        assert torch.equal(far.float(), values.float().T)
        changed = torch.zeros(1, dtype=torch.int32)
        kernel = quantizing.kernel(quantizing._CHECK, quantizing.CheckQuantizedConfiguration, BF16, 256)
        kernel(x.T.contiguous(), far, transposed_scales, changed, 3)
        assert not changed
        blocks = torch.empty(3 * 2**31, dtype=torch.uint8).view(torch.float8_e4m3fn)
        blocks = blocks.as_strided((3, k, 128), (2**31, 128, 1))
        offsets = torch.tensor([256], dtype=torch.int32)
        of_blocks = torch.empty(3, k, dtype=torch.float32)
        options = (quantizing.QuantizeTokensConfiguration, BF16, k, 1, False, False)
        quantizing.kernel(quantizing._QUANTIZE_TOKENS, *options)(x, offsets, blocks, of_blocks)
    right = quantizing.quantize_token_blocks(x, offsets)
    assert torch.equal(blocks[:2].float(), right[0][:2].float())


@pytest.mark.gpu
def test_the_same_bits_in_a_cuda_graph_and_in_every_run() -> None:
    """A replay quantizes weights that have changed since the capture."""
    layer = MoE(256, 128, 8, 2, fp8="blockwise", device="cuda")
    x = torch.randn(1000, 256, device="cuda").to(BF16).requires_grad_()
    parameters = [x, *layer.parameters()]

    def passes() -> list[torch.Tensor]:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, parameters, torch.ones_like(y))]

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # its autograd nodes must not be of the default stream
        expected = [t.clone() for t in passes()]
        for _ in range(10):
            assert all(map(torch.equal, passes(), expected))
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = passes()
    graph.replay()
    assert all(map(torch.equal, captured, expected))
    with torch.no_grad():
        layer.up.data.mul_(-1.5)
    layer.weights_changed()
    expected = [t.clone() for t in passes()]
    graph.replay()
    assert all(map(torch.equal, captured, expected))


@pytest.mark.gpu
def test_memory_of_a_step_is_below_that_in_bfloat16() -> None:
    """From the forward pass to the gradients, without the copies of the weights, which stay: two bytes for each."""

    def peak(fp8: bool | str) -> int:
        layer = MoE(2048, 768, 32, 4, fp8=fp8, device="cuda", into_main_grad=True)
        for weight in (layer.up, layer.down):
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # pyright: ignore
        x = torch.randn(32768, 2048, device="cuda").to(BF16).requires_grad_()
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            layer(x).backward(x.detach())
            result = torch.cuda.max_memory_allocated() - before
        return result

    assert peak("blockwise") < peak(False)
