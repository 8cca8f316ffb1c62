"""FLOPs of operators by ``torch.utils.flop_counter``, compared with plain PyTorch."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import cudnn
from cudnn import ops
from cudnn.experimental.ops import moe_grouped_matmul
from cudnn.fused import registry
from cudnn.ops import causal_conv1d, moe_mlp, scaled_dot_product_attention

BF16 = torch.bfloat16


def counted(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_every_operator_has_a_formula() -> None:
    for package in (cudnn.ops, cudnn.experimental.ops, importlib.import_module("cudnn.moe")):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for name in registry.packages():
        getattr(ops, name)
    names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("cudnn::")}
    assert len(names) > 40
    assert {name for name in names if getattr(torch.ops.cudnn, name) not in flop_registry} == set()


@pytest.mark.parametrize("name", registry.packages())
def test_every_fused_api_declares_its_flops(name: str) -> None:
    actual = registry.find(name).flops({"m": 8, "n": 16, "k": 32, "l": 3})
    assert actual == (0 if name == "rmsnorm_rht_amax" else 2 * 8 * 16 * 32 * 3)


def attention(mine: bool, **options: Any) -> int:
    function = scaled_dot_product_attention if mine else F.scaled_dot_product_attention
    q, k, v = (torch.randn(2, heads, rows, 64, requires_grad=True) for heads, rows in ((8, 48), (8, 80), (8, 80)))
    return counted(lambda: function(q, k, v, **options).sum().backward())


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_attention(options: dict[str, Any]) -> None:
    """Seven products: two forward, five backward. PyTorch on the CPU counts none of its fused attention."""
    product = 2 * 2 * 8 * 48 * 80 * 64
    assert attention(True, **options) == 7 * product


def test_attention_with_a_mask_counts_the_same() -> None:
    assert attention(True, attn_mask=torch.ones(48, 80, dtype=torch.bool)) == attention(True)


def test_an_mlp_counts_what_pytorch_counts() -> None:
    """gemm_swiglu and its backward pass, compared with the GEMMs alone."""
    a, b = torch.randn(64, 128, 1, dtype=BF16), torch.randn(96 * 2, 128, 1, dtype=BF16)
    plain = counted(lambda: a[..., 0] @ b[..., 0].mT)
    assert counted(lambda: ops.gemm_swiglu(a, b)) == plain == 2 * 64 * 192 * 128


def test_compiled_code_counts_the_same() -> None:
    q = torch.randn(1, 2, 16, 8)
    compiled = torch.compile(lambda q: scaled_dot_product_attention(q, q, q), backend="aot_eager")
    assert counted(lambda: compiled(q)) == 2 * 2 * 16 * 16 * 16


def test_convolution() -> None:
    x, weight, bias = torch.randn(2, 32, 40), torch.randn(32, 4), torch.randn(32)
    assert counted(lambda: causal_conv1d(x, weight, bias)) == 2 * 2 * 32 * 40 * 4


def experts(mine: bool, tokens: int = 24, width: int = 64, hidden: int = 32, top_k: int = 2) -> int:
    torch.manual_seed(0)
    x = torch.randn(tokens, width, requires_grad=True)
    up, down = torch.randn(4, 2 * hidden, width, requires_grad=True), torch.randn(4, width, hidden, requires_grad=True)
    weights = torch.rand(tokens, top_k, requires_grad=True)
    indices = torch.stack([torch.randperm(4)[:top_k] for _ in range(tokens)]).int()

    def plain() -> torch.Tensor:
        y = torch.zeros_like(x)
        for expert in range(4):
            token, choice = (indices == expert).nonzero(as_tuple=True)
            gate, linear = (x[token] @ up[expert].mT).chunk(2, -1)
            y = y.index_add(0, token, (F.silu(gate) * linear) @ down[expert].mT * weights[token, choice, None])
        return y

    return counted(lambda: (moe_mlp(x, (indices, weights), up, down) if mine else plain()).sum().backward())


def test_a_mixture_of_experts_counts_what_pytorch_counts() -> None:
    assert experts(True) == experts(False) == 3 * 2 * 48 * (64 * 64 + 64 * 32)


def test_the_counter_is_loaded_by_programs_that_count() -> None:
    """Not by the operators; their formulas reach a counter that is imported before or after them."""
    program = """
import sys, torch
{first}
from cudnn.ops import scaled_dot_product_attention as attend
assert ("torch.utils.flop_counter" in sys.modules) == bool({first!r})
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(1, 1, 16, 8)
with FlopCounterMode(display=False) as counter:
    attend(q, q, q)
assert counter.get_total_flops() == 2 * 16 * 16 * 16
"""
    for first in ("", "import torch.utils.flop_counter"):
        subprocess.run([sys.executable, "-c", program.format(first=first)], check=True)


def test_sparse_attention() -> None:
    """Compression and its scores again to choose blocks, selection, window; the gradients of the three."""
    t, small, heads, d, block, best, window = 256, 8, 2, 16, 32, 5, 48
    q, k, v = (torch.randn(t, h, d, requires_grad=True) for h in (heads, 1, 1))
    ck, cv = (torch.randn(small, 1, d, requires_grad=True) for _ in range(2))
    gates = torch.rand(t, heads, 3)
    ends = [torch.tensor([0, rows], dtype=torch.int32) for rows in (t, small)]
    sizes = {"block_size": block, "selected_blocks": best, "window_size": window}
    keys = small + best * block + window
    actual = counted(lambda: ops.nsa_attention(q, k, v, ck, cv, gates, *ends, **sizes).sum().backward())
    assert actual == 2 * t * heads * (small * d + keys * 2 * d + keys * 5 * d)


def test_products_of_experts() -> None:
    """And both of their gradients."""
    token, first = torch.randn(1, 12, 16, requires_grad=True), torch.tensor([0, 5, 9]).view(3, 1, 1)
    weight = torch.randn(3, 8, 16).mT.requires_grad_()
    assert counted(lambda: moe_grouped_matmul(token, weight, first).sum().backward()) == 3 * 2 * 12 * 16 * 8


def test_branches_of_sparse_attention_alone() -> None:
    q, ends = torch.randn(64, 2, 16), torch.tensor([0, 64], dtype=torch.int32)
    product = 2 * 64 * 2 * 16
    assert counted(lambda: torch.ops.cudnn.nsa_compression(q, q, q, ends, ends, 1.0)) == 2 * product * 64
    assert counted(lambda: torch.ops.cudnn.nsa_window(q, q, q, ends, 1.0, 24, 64)) == 2 * product * 24
