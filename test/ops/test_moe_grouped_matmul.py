"""``cudnn.experimental.ops.moe_grouped_matmul``: results, gradients, cache, compilation, refusals."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import cudnn
from cudnn.experimental.ops import moe_grouped_matmul
from cudnn.experimental.ops.moe_grouped_matmul import _graph_cache
from cudnn.pygraph import operator_graphs
from support.dense_attention import with_gradients
from support.graphs import planned_by

pytestmark = pytest.mark.filterwarnings("error")
F64 = torch.float64
M, K, N = 12, 8, 16
OFFSETS = {"even": [0, 4, 8], "uneven": [0, 1, 1], "first empty": [0, 0, 7], "last empty": [0, 5, 12]}
MODES_OF_ROWS = ["none", "gather", "scatter"]


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    _graph_cache.clear()


def operands(dtype: torch.dtype = F64, experts: int = 3, rows: int = M) -> list[torch.Tensor]:
    """Tokens, weights with K contiguous, and the gradient of the result."""
    token, weight, d_out = torch.randn(1, M, K), torch.randn(experts, N, K), torch.randn(1, rows, N)
    return [token.to(dtype), weight.to(dtype).mT, d_out.to(dtype)]


def offsets(first: list[int]) -> torch.Tensor:
    return torch.tensor(first, dtype=torch.int32).view(-1, 1, 1)


def indices(mode: str) -> dict[str, Any]:
    """The index tensors of a mode: 24 rows gathered from 12 tokens, 12 rows scattered as 2 each of 6 tokens."""
    if mode == "gather":
        return {"mode": mode, "token_index": torch.randint(M, (1, 24, 1), dtype=torch.int32)}
    if mode == "scatter":
        place = torch.randperm(M).int().view(1, M, 1)
        return {"mode": mode, "token_index": place // 2, "token_ks": place % 2, "top_k": 2}
    return {}


def formula(token: torch.Tensor, weight: torch.Tensor, first: list[int], inputs: dict[str, Any]) -> torch.Tensor:
    """Row by row."""
    places = range(token.shape[1]) if inputs.get("mode") != "gather" else inputs["token_index"].flatten().tolist()
    rows = [
        token[0, place] @ weight[max(expert for expert, start in enumerate(first) if start <= row)]
        for row, place in enumerate(places)
    ]
    if inputs.get("mode") == "scatter":
        order = (inputs["token_index"] * 2 + inputs["token_ks"]).flatten().tolist()
        rows = [rows[order.index(row)] for row in range(len(rows))]
    return torch.stack(rows)[None]


@pytest.mark.parametrize("mode", MODES_OF_ROWS)
@pytest.mark.parametrize("name", OFFSETS)
def test_results_and_gradients(name: str, mode: str) -> None:
    inputs = indices(mode)
    tensors = operands(rows=24 if mode == "gather" else M)
    function = functools.partial(moe_grouped_matmul, first_token_offset=offsets(OFFSETS[name]), **inputs)
    actual = with_gradients(function, tensors)
    expected = with_gradients(lambda *x: formula(*x, OFFSETS[name], inputs), tensors)
    assert actual[0].is_contiguous()
    assert actual[2].stride(1) == 1
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3), (torch.float32, 1e-6)])
def test_types(dtype: torch.dtype, eps: float) -> None:
    token, weight, _ = operands(dtype)
    actual = moe_grouped_matmul(token, weight, offsets(OFFSETS["even"]))
    assert actual.dtype is dtype
    expected = formula(token.double(), weight.double(), OFFSETS["even"], {})
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=1e-5)


def test_gradients_pass_the_numerical_test() -> None:
    token, weight, _ = (x.requires_grad_() for x in operands())
    for mode in MODES_OF_ROWS:
        function = functools.partial(moe_grouped_matmul, first_token_offset=offsets([0, 1, 7]), **indices(mode))
        assert torch.autograd.gradcheck(function, [token, weight], fast_mode=True)


def test_one_gradient_alone() -> None:
    """That of the weight, which needs a newer cuDNN, is not computed unasked."""
    token, weight, d_out = operands()
    token.requires_grad_()
    moe_grouped_matmul(token, weight, offsets(OFFSETS["even"])).backward(d_out)
    (expected,) = torch.autograd.grad(formula(token, weight, OFFSETS["even"], {}), token, d_out)
    torch.testing.assert_close(token.grad, expected)
    assert len(_graph_cache) == 2


def test_any_strides_of_tokens_and_offsets() -> None:
    token, weight, _ = operands()
    flat = torch.tensor([0, *OFFSETS["uneven"]], dtype=torch.int32)[1:]  # at an address that graphs do not take
    assert flat.data_ptr() % 16
    for strided in (token.mT.contiguous().mT, token[:, :1].expand(-1, M, -1)):
        actual = moe_grouped_matmul(strided, weight, flat)
        torch.testing.assert_close(actual, formula(strided, weight, OFFSETS["uneven"], {}))


def test_the_name_is_the_function() -> None:
    """Also after an import of the module, which has the same name."""
    assert cudnn.experimental.ops.moe_grouped_matmul is moe_grouped_matmul
    assert callable(moe_grouped_matmul)


def test_no_tokens() -> None:
    token, weight, _ = operands()
    weight.requires_grad_()
    out = moe_grouped_matmul(token[:, :0], weight, offsets([0, 0, 0]))
    assert out.shape == (1, 0, N)
    out.sum().backward()
    assert not weight.grad.any()


def test_one_graph_for_each_configuration() -> None:
    token, weight, _ = operands()
    for first, rows, count in (([0, 4, 8], M, 1), ([0, 1, 2], M, 1), ([0, 1, 2], 8, 2)):
        moe_grouped_matmul(token[:, :rows], weight, offsets(first))
        assert len(_graph_cache) == count


@pytest.mark.parametrize("mode", MODES_OF_ROWS)
def test_operators_are_registered_right(mode: str) -> None:
    inputs = indices(mode)
    token, weight, d_out = operands()
    arguments = (offsets([0, 1, 7]), inputs.get("token_index"), inputs.get("token_ks"), mode, inputs.get("top_k", 1))
    leaves = token.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.library.opcheck(torch.ops.cudnn.moe_grouped_matmul, (*leaves, *arguments))
    torch.library.opcheck(torch.ops.cudnn.moe_grouped_matmul_bwd, (d_out, token, arguments[0]))


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "mode": (ValueError, "mode: got 'combine'; allowed: 'none' or 'gather' or 'scatter'", {"mode": "combine"}),
    "no index": (ValueError, "token_index: got None; allowed: token_index with mode 'gather'", {"mode": "gather"}),
    "no ks": (
        ValueError,
        "token_ks: got None; allowed: token_index, token_ks with mode 'scatter'",
        {"mode": "scatter", "token_index": torch.zeros(1, M, 1).int()},
    ),
    "an index too many": (
        ValueError,
        "token_index: got a tensor; allowed: neither index with mode 'none'",
        {"token_index": torch.zeros(1, M, 1).int()},
    ),
    "shapes": (ValueError, r"shapes of token and weight: got \(1, 12, 4\)", {"token": torch.zeros(1, M, 4)}),
    "rank": (ValueError, r"shapes of token and weight: got \(12, 8\)", {"token": torch.zeros(M, K)}),
    "types": (ValueError, "types of token and weight: got torch.float16", {"token": torch.zeros(1, M, K).half()}),
    "order": (
        ValueError,
        r"strides of weight: got \(128, 16, 1\); .* pass weight.mT.contiguous\(\).mT",
        {"weight": torch.zeros(3, K, N)},
    ),
    "offsets": (ValueError, "offsets and indices: got torch.float32", {"first_token_offset": torch.zeros(3)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    error, words, inputs = REFUSED[name]
    token, weight, _ = operands(torch.float32)
    usual = {"token": token, "weight": weight, "first_token_offset": offsets(OFFSETS["even"])}
    with pytest.raises(error, match=words):
        moe_grouped_matmul(**usual | inputs)


def test_what_cudnn_does_not_support_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise cudnn.cudnnGraphNotSupportedError("no engine for this")

    monkeypatch.setattr(operator_graphs, "run", refuse)
    with pytest.raises(RuntimeError, match="no engine for this"):
        moe_grouped_matmul(*operands()[:2], offsets(OFFSETS["even"]))


@pytest.mark.deviceless_919
@pytest.mark.parametrize("mode", ["none", "gather"])
def test_cudnn_has_plans(mode: str, device_properties: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph as on a GPU."""
    built = planned_by(operator_graphs, device_properties, monkeypatch)
    token, weight, _ = operands(torch.bfloat16)
    if mode == "gather" and cudnn.backend_version() <= 91900:
        with pytest.raises(RuntimeError, match=r"mode: got GATHER with cuDNN 9\.19\.0"):
            moe_grouped_matmul(token, weight, offsets(OFFSETS["even"]), **indices(mode))
        return
    moe_grouped_matmul(token, weight, offsets(OFFSETS["even"]), **indices(mode))
    assert [graph.get_execution_plan_count() > 0 for graph in built] == [True]
