"""Arguments of other Python types than those that the layer of experts takes: refused in words, and forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from cudnn import moe
from cudnn.moe.routing import moe_route
from cudnn.nn import MoE
from cudnn.ops import moe_mlp

LOGITS = torch.arange(32.0).view(4, 8)
ROWS, PLACES = torch.zeros(4, 8), torch.zeros(4, 1, dtype=torch.int32)
X, UP, DOWN = (torch.zeros(shape).bfloat16() for shape in ((4, 64), (2, 64, 64), (2, 64, 32)))
CHOICES, WEIGHTS = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
SIZES: dict[str, Any] = {"hidden": 64, "intermediate": 32, "experts": 4, "top_k": 2}


def layer(**changed: Any) -> Callable[[], Any]:
    return lambda: MoE(**{**SIZES, **changed})


def routed(**changed: Any) -> Callable[[], Any]:
    return lambda: moe.route(**{"logits": LOGITS, "top_k": 2, **changed})


def experts(**changed: Any) -> Callable[[], Any]:
    inputs: dict[str, Any] = {"x": X, "routing": (CHOICES, WEIGHTS), "up": UP, "down": DOWN, **changed}
    return lambda: moe_mlp(**inputs)


def others(*inputs: Any) -> Callable[[], Any]:
    function, *arguments = inputs
    return lambda: function(*arguments)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (routed(top_k="2"), "route: top_k: got str; allowed: an int"),
    (routed(top_k=2.0), "route: top_k: got float"),
    (routed(top_k=True), "route: top_k: got bool"),
    (routed(n_group=None), "route: n_group: got NoneType"),
    (routed(renormalize="no"), "route: renormalize: got 'no'; allowed: True or False"),
    (routed(logits=[1.0]), r"route: logits tensor: got list; allowed: a torch\.Tensor"),
    (routed(bias=[0.0] * 8), "route: bias tensor: got list"),
    (others(moe.sort, [[1]], 4), "sort: indices tensor: got list"),
    (others(moe.sort, PLACES, 4.0), "sort: experts: got float; allowed: an int"),
    (others(moe.combine, None, PLACES), "combine: rows tensor: got NoneType"),
    (others(moe.combine, ROWS, PLACES, [1.0]), "combine: weights tensor: got list"),
    (others(moe.z_loss, 3), "z_loss: logits tensor: got int"),
    (others(moe.load_balance_loss, LOGITS, (CHOICES, WEIGHTS)), "load_balance_loss: routing: got tuple; allowed: what"),
    (experts(up=[[1.0]]), "moe_mlp: up tensor: got list"),
    (experts(down_bias=[1.0]), "moe_mlp: down_bias tensor: got list"),
    (experts(routing=(CHOICES, [1.0])), "moe_mlp: weights tensor: got list"),
    (experts(routing=(None, WEIGHTS)), "moe_mlp: indices tensor: got NoneType"),
    (layer(hidden=64.0), "MoE: hidden: got float; allowed: an int"),
    (layer(top_k="2"), "MoE: top_k: got str"),
    (layer(shared_experts=1.5), "MoE: shared_experts: got float"),
    (layer(bias="yes"), "MoE: bias: got 'yes'; allowed: True or False"),
]


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_other_python_types(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=f"^{words}"):
        call()


def test_values() -> None:
    routing = moe.route(LOGITS, 2)
    for call, words in (
        (others(moe.load_balance_loss, LOGITS, routing, "max"), "load_balance_loss: score: got 'max'; allowed: 'soft"),
        (others(moe.load_balance_loss, LOGITS[:3], routing), r"load_balance_loss: shape of logits: got \(3, 8\); "),
        (layer(dtype="half"), "MoE: dtype: got half; allowed: torch"),
        (layer(dtype=torch.int8), r"MoE: dtype: got torch\.int8; allowed: torch\.bfloat16, "),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            call()


@pytest.mark.parametrize(
    ("dtype", "activation", "hidden", "inner", "words"),
    [
        (torch.float32, "swiglu", 64, 37, "intermediate size, I of down .*: got 37; allowed: a multiple of 32 for 's"),
        (torch.float64, "geglu", 64, 48, "intermediate size, .*: got 48; allowed: a multiple of 32 for 'geglu'"),
        (
            torch.bfloat16,
            "swiglu",
            64,
            37,
            "intermediate size, .*: got 37; allowed: a multiple of 32 .* To fix",
        ),
        (
            torch.float16,
            "srelu",
            64,
            37,
            "intermediate size, .*: got 37; allowed: a multiple of 8 for 'srelu'",
        ),
        (
            torch.bfloat16,
            "swiglu",
            60,
            64,
            "hidden size, H of x .*: got 60; allowed: a multiple of 8 .* To fix",
        ),
        (torch.bfloat16, "srelu", 64, 0, "intermediate size, .*: got 0"),
        (torch.float32, "srelu", 63, 37, ""),
        (torch.float32, "swiglu", 63, 32, ""),
    ],
)
def test_sizes_of_experts(dtype: torch.dtype, activation: str, hidden: int, inner: int, words: str) -> None:
    """Said of the caller's tensors. Odd sizes stay allowed where the reference computes without blocks of gates."""
    wide = inner if activation == "srelu" else 2 * inner
    x, up, down = (torch.zeros(*shape, dtype=dtype) for shape in ((4, hidden), (2, wide, hidden), (2, hidden, inner)))
    weights = WEIGHTS.double() if dtype is torch.float64 else WEIGHTS
    call = experts(x=x, routing=(CHOICES, weights), up=up, down=down, activation=activation)
    if not words:
        assert call().shape == x.shape
        return
    with pytest.raises(ValueError, match=f"^moe_mlp: {words}"):
        call()


def test_sizes_of_a_layer() -> None:
    for changed, words in (
        ({"intermediate": 37}, "intermediate: got 37; allowed: a multiple of 32. To fix it, take 64"),
        ({"hidden": 60}, "hidden: got 60; allowed: a multiple of 8. To fix it, take 64"),
        ({"experts": 0}, "experts: got 0; allowed: 1 or more"),
        ({"top_k": 5}, "top_k: got 5; allowed: 1 to 4 of 4 experts"),
    ):
        with pytest.raises(ValueError, match=f"^MoE: {words}"):
            layer(**changed)()


def test_a_refused_number_does_not_stand_for_one_that_equals_it() -> None:
    """What is kept of calls tells 3.0 from 3."""
    with pytest.raises(TypeError):
        moe_route(LOGITS, None, cast(Any, 3.0), "softmax", True, False, 1, 1, 1.0)
    assert moe.route(LOGITS, 3).indices.shape == (4, 3)


def test_numbers_of_numpy() -> None:
    made = MoE(**{name: np.int64(size) for name, size in SIZES.items()}, scaling_factor=np.float32(2))
    assert made(X).shape == X.shape
    assert moe.route(LOGITS, np.int64(2)).indices.shape == (4, 2)


def test_no_type_is_the_default_one_of_pytorch() -> None:
    assert MoE(**SIZES, dtype=None).up.dtype is torch.get_default_dtype()
