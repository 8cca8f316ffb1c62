"""Routing: the choice, the weights and their gradient, the sort; in PyTorch, emulated, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from cudnn.moe import Routing, load_balance_loss, route, sort, z_loss
from support.selection import ALONE, WHERE, in_turn, within


def device(where: str) -> str:
    return "cuda" if where == "gpu" else "cpu"


def selection(logits: torch.Tensor, bias: torch.Tensor | None, options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What experts are chosen by, in float64; -inf in groups that are not chosen; and for which tokens float32 has no
    choice of other groups.
    """
    z = logits.double()
    if bias is not None:
        if options.get("score") == "sigmoid":
            z = z.sigmoid()
        elif options.get("pre_softmax", True):
            z = z.softmax(-1)
        z = z + bias.double()
    n, kept = options.get("n_group", 1), options.get("topk_group", 1)
    groups = z.unflatten(1, (n, z.shape[1] // n))
    best = groups.amax(2) if bias is None else groups.topk(min(2, groups.shape[2]))[0].sum(2)
    is_kept = torch.zeros_like(best).scatter_(1, best.topk(kept)[1], 1).bool()
    ranked = torch.nn.functional.pad(best.sort(1, descending=True)[0], (0, 1), value=-torch.inf)
    return groups.masked_fill(~is_kept[..., None], -torch.inf).flatten(1), ranked[:, kept - 1] > ranked[:, kept] + 1e-6


def weigh(logits: torch.Tensor, indices: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The weights of experts, in float64."""
    z, chosen = logits.double(), indices.long()
    if options.get("score") == "sigmoid":
        weights = z.sigmoid().gather(1, chosen)
    elif options.get("pre_softmax", True):
        weights = z.softmax(-1).gather(1, chosen)
    else:
        weights = z.gather(1, chosen).softmax(-1)
    if options.get("renormalize"):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * options.get("scaling_factor", 1.0)


def assert_sorted(offsets: Any, token_of_row: Any, row_of_choice: Any, indices: torch.Tensor, experts: int) -> None:
    """By a loop: rows by expert, in the order of tokens."""
    lists: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for token, chosen in enumerate(indices.tolist()):
        for k, expert in enumerate(chosen):
            if 0 <= expert < experts:
                lists[expert].append((token, k))
    rows = [place for each in lists for place in each]
    tokens = [token for token, _ in rows] + [0] * (indices.numel() - len(rows))
    place = {choice: row for row, choice in enumerate(rows)}
    count = indices.shape[1]
    assert offsets.tolist() == [sum(map(len, lists[: e + 1])) for e in range(experts)]
    assert token_of_row.tolist() == tokens
    assert row_of_choice.tolist() == [[place.get((t, k), -1) for k in range(count)] for t in range(len(indices))]
    assert {x.dtype for x in (offsets, token_of_row, row_of_choice)} == {torch.int32}


def assert_routed(actual: Routing, logits: torch.Tensor, top_k: int, bias: Any = None, **options: Any) -> None:
    actual = Routing(*(x.detach().cpu() for x in actual))
    logits, bias = logits.detach().cpu(), None if bias is None else bias.cpu()
    z, clear = selection(logits, bias, options)
    assert actual.indices.shape == (len(logits), top_k)
    assert actual.indices.dtype == torch.int32
    own = z.gather(1, actual.indices.long())
    torch.testing.assert_close(own[clear], z.topk(top_k)[0][clear], rtol=0, atol=1e-6)
    assert int((~clear).sum()) <= 1
    assert all(len(set(chosen)) == top_k for chosen in actual.indices.tolist())
    expected = weigh(logits, actual.indices, options)
    torch.testing.assert_close(actual.weights, expected.float(), rtol=1e-5, atol=1e-7)
    assert_sorted(*actual[2:], actual.indices, logits.shape[1])


V3 = {"score": "sigmoid", "renormalize": True, "n_group": 4, "topk_group": 2, "scaling_factor": 2.5}
BIASED = {"bias": True}
CASES: list[tuple[int, int, int, torch.dtype, dict[str, Any]]] = [
    (37, 64, 8, torch.float32, {**V3, **BIASED}),
    (70, 40, 4, torch.bfloat16, {}),
    (5, 256, 8, torch.float16, {"renormalize": True, **BIASED}),
    (9, 128, 6, torch.float32, {"pre_softmax": False, "scaling_factor": 0.5}),
    (3, 1024, 16, torch.float32, {"score": "sigmoid"}),
    (2, 1, 1, torch.float32, {}),
    (20, 96, 3, torch.float32, {"n_group": 8, "topk_group": 3}),
    (11, 33, 5, torch.float32, {"pre_softmax": False, **BIASED}),
    (600, 8, 2, torch.bfloat16, {"score": "sigmoid", "renormalize": True}),
]


@pytest.mark.parametrize(("where", "tokens", "experts", "top_k", "dtype", "options"), in_turn(CASES, 1, WHERE))
def test_route(where: str, tokens: int, experts: int, top_k: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    logits = torch.randn(tokens, experts, device=device(where)).to(dtype)
    bias = torch.randn(experts, device=device(where)) * 0.1 if options.get("bias") else None
    options = {**options, "bias": bias}
    with within(where):
        actual = route(logits, top_k, **options)
    assert_routed(actual, logits, top_k, **options)


@settings(max_examples=15)
@given(st.data())
def test_route_of_any_kind(data: Any) -> None:
    n_group = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(2, 12))
    topk_group = data.draw(st.integers(1, n_group))
    top_k = data.draw(st.integers(1, min(16, topk_group * size)))
    tokens = data.draw(st.integers(0, 30))
    options = {
        "score": data.draw(st.sampled_from(["softmax", "sigmoid"])),
        "pre_softmax": data.draw(st.booleans()),
        "renormalize": data.draw(st.booleans()),
        "n_group": n_group,
        "topk_group": topk_group,
        "scaling_factor": data.draw(st.sampled_from([1.0, 2.5])),
        "bias": torch.randn(n_group * size) if data.draw(st.booleans()) else None,
    }
    logits = torch.randn(tokens, n_group * size)
    assert_routed(route(logits, top_k, **options), logits, top_k, **options)


@pytest.mark.parametrize("where", in_turn([()], 0, WHERE))
def test_equal_values_and_values_that_are_no_numbers(where: str) -> None:
    """Equal ones: the lower expert first. A NaN is above all numbers; so is one with a sign. -0 equals 0."""
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [
            [1.0, 2.0, 2.0, 2.0, 0.0, 1.0],
            [-0.0, 0.0, -0.0, 0.0, -1.0, 0.0],
            [inf, nan, -inf, 5.0, nan, inf],
            [-inf, -inf, -inf, -inf, -inf, -inf],
            [0.0, -nan, 1.0, 2.0, 3.0, 4.0],
        ],
        device=device(where),
    )
    logits[4, 1] = torch.tensor(-4194304, dtype=torch.int32).view(torch.float32)  # a NaN with a sign
    with within(where):
        actual = route(logits, 3)
    assert actual.indices.tolist() == [[1, 2, 3], [0, 1, 2], [1, 4, 0], [0, 1, 2], [1, 5, 4]]
    assert actual.weights[2:].isnan().all()
    assert actual.weights[:2].isfinite().all()


INDICES = [
    [[-1, 2], [1, 1], [0, 2], [4, -7], [2, 0], [-1, -1]],  # dropped ones, and a token that chooses an expert twice
    [[0, 3], [3, 1], [2, 0], [3, 0]],
    [[1, 1], [1, 1], [0, 1], [1, 1]],
    [[-1, -1]],
    [[k % 5 - 1 for k in range(18)], [3] * 18],  # more than a router chooses: shared experts are further choices
]


@pytest.mark.parametrize(("where", "chosen"), in_turn([(x,) for x in INDICES], 1, WHERE))
def test_sort(where: str, chosen: list[list[int]]) -> None:
    indices = torch.tensor(chosen, dtype=torch.int32, device=device(where))
    with within(where):
        assert_sorted(*sort(indices, 4), indices, 4)


@settings(max_examples=10)
@given(st.integers(0, 40), st.integers(1, 32), st.integers(1, 9), st.integers(0, 100))
def test_sort_of_any_size(tokens: int, top_k: int, experts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator, dtype=torch.int32)
    assert_sorted(*sort(indices, experts), indices, experts)


GRADIENTS: list[dict[str, Any]] = [
    {},
    {"renormalize": True, "scaling_factor": 3.0},
    {"pre_softmax": False},
    {"score": "sigmoid"},
    {"score": "sigmoid", "renormalize": True, "scaling_factor": 2.5},
]


@pytest.mark.parametrize(("where", "options"), in_turn(GRADIENTS, 1, WHERE))
def test_gradient_of_logits(where: str, options: dict[str, Any]) -> None:
    logits = torch.randn(13, 40, device=device(where), requires_grad=True)
    d_weights = torch.randn(13, 6, device=device(where))
    with within(where):
        actual = route(logits, 6, **options)
        (gradient,) = torch.autograd.grad(actual.weights, logits, d_weights)
    exact = logits.detach().cpu().double().requires_grad_()
    weigh(exact, actual.indices.cpu(), options).backward(d_weights.cpu().double())
    torch.testing.assert_close(gradient.cpu().double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", GRADIENTS)
def test_what_is_kept_for_the_gradient(options: dict[str, Any]) -> None:
    """Logits of all experts only for a softmax of all of them; else those of the chosen ones."""
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        route(torch.randn(13, 40, requires_grad=True), 6, **options)
    assert kept == [13 * (6 if options else 40), 13 * 6]


@pytest.mark.parametrize("where", ALONE)
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(where: str, tokens: int) -> None:
    logits = torch.randn(tokens, 8, device=device(where), requires_grad=True)
    actual = route(logits, 2)
    actual.weights.sum().backward()
    assert_routed(actual, logits, 2)
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape


@pytest.mark.parametrize("where", ALONE)
def test_compiles_without_breaks(where: str) -> None:
    def step(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        actual = route(logits, 3, score="sigmoid", renormalize=True)
        return (*actual, *sort(actual.indices, 16))

    logits = torch.randn(10, 16, device=device(where), requires_grad=True)
    actual = torch.compile(step, backend="aot_eager", fullgraph=True)(logits)
    for one, other in zip(actual, step(logits), strict=True):
        assert torch.equal(one, other)
    options = (None, 3, "sigmoid", True, True, 1, 1, 1.0)
    torch.library.opcheck(cudnn.moe.routing.moe_route, (logits, *options))
    torch.library.opcheck(cudnn.moe.routing.moe_sort, (actual[0], 16))


def test_losses() -> None:
    even = torch.zeros(8, 4)
    even[torch.arange(8), torch.arange(8) % 4] = 1.0
    torch.testing.assert_close(load_balance_loss(even, route(even, 1)), torch.tensor(1.0))
    uneven = torch.zeros(8, 4)
    uneven[:, 2] = 2.0
    share = torch.tensor([0.0, 0.0, 2.0, 0.0]).softmax(0)[2]
    torch.testing.assert_close(load_balance_loss(uneven, route(uneven, 1)), 4 * share)
    s = uneven[0].sigmoid()
    actual = load_balance_loss(uneven, route(uneven, 1, score="sigmoid"), score="sigmoid")
    torch.testing.assert_close(actual, 4 * s[2] / s.sum())
    low = torch.full((2, 4), -200.0, requires_grad=True)  # whose scores are 0 in float32
    actual = load_balance_loss(low, route(low, 1, score="sigmoid"), score="sigmoid")
    torch.testing.assert_close(actual, torch.tensor(1.0))
    assert torch.autograd.grad(actual, low)[0].isfinite().all()
    torch.testing.assert_close(z_loss(torch.zeros(3, 4)), torch.tensor(4.0).log() ** 2)
    none = torch.zeros(0, 4, requires_grad=True)
    (load_balance_loss(none, route(none, 1)) + z_loss(none)).backward()
    assert load_balance_loss(none, route(none, 1)) == z_loss(none) == 0.0


LOGITS = torch.zeros(4, 8)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logits": torch.zeros(8)}, r"route: shape of logits: got \(8,\); allowed: \(T, E\), E from 1 to 1024"),
    ({"logits": torch.zeros(2, 1025)}, r"shape of logits: got \(2, 1025\)"),
    ({"logits": LOGITS.int()}, "type of logits: got torch.int32; .* on the CPU, not emulated, torch.float64 too"),
    ({"logits": torch.zeros(8, 4).T}, r"strides of logits: got \(1, 4\); .* To fix it, pass logits.contiguous"),
    ({"top_k": 0}, "top_k: got 0; allowed: 1 to 8 of 8 experts"),
    ({"top_k": 9}, "top_k: got 9"),
    ({"logits": torch.zeros(2, 64), "top_k": 17}, "top_k: got 17; allowed: 1 to 16"),
    ({"score": "relu"}, "score: got 'relu'; allowed: 'softmax' or 'sigmoid'"),
    ({"bias": torch.zeros(7)}, r"bias: got torch.float32 of the shape \(7,\), .* allowed: .* \(8,\)"),
    ({"bias": torch.zeros(8).bfloat16()}, "bias: got torch.bfloat16"),
    ({"n_group": 3}, "n_group: got 3; allowed: 1 to 32, divisors of the 8 experts"),
    ({"n_group": 4, "topk_group": 5}, "topk_group: got 5; allowed: 1 to 4"),
    ({"n_group": 4, "topk_group": 1, "top_k": 3}, "topk_group: got 1; .* with at least 3 experts in these groups of 2"),
    ({"n_group": 8, "topk_group": 4, "bias": torch.zeros(8)}, "n_group: got 8; allowed: groups of two experts or more"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_route_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        route(**{"logits": LOGITS, "top_k": 2, **changes})


@pytest.mark.parametrize(
    ("indices", "experts", "words"),
    [
        (torch.zeros(4, dtype=torch.int32), 4, r"sort: shape of indices: got \(4,\)"),
        (torch.zeros(4, 33, dtype=torch.int32), 4, r"allowed: \(T, K\), K from 1 to 32"),
        (torch.zeros(4, 2, dtype=torch.int64), 4, r"type of indices: got torch.int64; .* pass indices.int\(\)"),
        (torch.zeros(2, 4, dtype=torch.int32).T, 4, r"strides of indices: .* pass indices.contiguous\(\)"),
        (torch.zeros(4, 2, dtype=torch.int32), 0, "experts: got 0; allowed: 1 to 1024"),
        (torch.zeros(4, 2, dtype=torch.int32), 1025, "experts: got 1025"),
    ],
)
def test_what_sort_refuses(indices: torch.Tensor, experts: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sort(indices, experts)


def test_deprecated_names_of_indices() -> None:
    routing = route(torch.randn(5, 4), 2)
    with pytest.warns(DeprecationWarning, match="use gather_idx"):
        assert routing.token_of_row is routing.gather_idx
    with pytest.warns(DeprecationWarning, match="use scatter_idx"):
        assert routing.row_of_choice is routing.scatter_idx
