"""FLOPs of operators by ``torch.utils.flop_counter``, compared with plain PyTorch."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import cudnn
import cudnn.native_sparse_attention.decode
import cudnn.native_sparse_attention.operator
from cudnn import ops
from cudnn.experimental.ops import moe_grouped_matmul
from cudnn.fused import operator, registry
from cudnn.ops import causal_conv1d, gated_mlp, moe_mlp, scaled_dot_product_attention
from support import grouped, oracle

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
    try:
        assert counted(lambda: compiled(q)) == 2 * 2 * 16 * 16 * 16
    finally:
        torch.compiler.reset()  # code compiled within the mode is not for calls without it


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


# Every operator, called once.

M, N, K, L = 128, 128, 64, 2


def dense(*names: str) -> dict[str, torch.Tensor]:
    """bfloat16 operands (m, k, l) and (n, k, l) of a dense fused GEMM, and others by name."""
    shapes = {"a": (M, K), "b": (N, K), "c": (M, N), "ab12": (M, N), "prob": (M, 1), "cos": (M, N // 2)}
    shapes["sin"] = shapes["cos"]
    found = {name: torch.randn(L, *shapes[name]).permute(1, 2, 0) for name in ("a", "b", *names)}
    return {
        name: x[..., 0] if name in ("cos", "sin") else x if name == "prob" else x.to(BF16) for name, x in found.items()
    }


def dense_fp4() -> dict[str, Any]:
    a, b = (oracle.scaled(rows, K, L, oracle.FP4, oracle.E8M0, 32) for rows in (M, N))
    return {"a": a.tensor, "b": b.tensor, "sfa": a.scales, "sfb": b.scales}


def of_experts(name: str, kind: str = "bf16") -> dict[str, Any]:
    more = {"c": BF16, "beta": torch.float32} if "ds" in name or "dglu" in name else {}
    p = grouped.problem(name, kind, (0, 256, 512), n=N, k=K, inputs={"prob": torch.float32} | more)
    signature = operator.signature_of(registry.find(name), registry.wrapper(name))[0].parameters
    kept.append(p)
    given = p.inputs | p.options
    return {key: given.get(key) for key, q in signature.items() if key in given or q.default is q.empty}


kept: list[Any] = []  # what addresses lead to
DENSE = {
    "gemm_amax": (),
    "gemm_srelu": ("prob",),
    "gemm_dsrelu": ("c", "prob"),
    "gemm_swiglu": (),
    "gemm_geglu": (),
    "gemm_dswiglu": ("ab12",),
    "gemm_rope": ("cos", "sin"),
}
EXPERTS = [n for n in registry.packages() if "grouped_gemm" in n and not n.endswith("wgrad")]


def fused_calls() -> Iterator[tuple[str, Callable[[], Any], int]]:
    for name, more in DENSE.items():
        given = dense(*more) | ({"sfa": None, "sfb": None} if "srelu" in name else {})
        n = 2 * N if name == "gemm_dswiglu" else N
        if name == "gemm_dswiglu":
            given["ab12"] = torch.randn(L, M, n).permute(1, 2, 0).to(BF16)
        yield name, functools.partial(getattr(ops, name), **given), 2 * M * N * K * L
    yield "gemm_amax", functools.partial(ops.gemm_amax, **dense_fp4(), sf_vec_size=32), 2 * M * N * K * L
    for name in EXPERTS:
        for kind in ("bf16",) if name == "grouped_gemm" else ("bf16", "nvfp4"):
            yield name, functools.partial(getattr(ops, name), **of_experts(name, kind)), 2 * 512 * N * K
    a, b, ends = torch.randn(M, 256).to(BF16), torch.randn(256, N).to(BF16), torch.tensor([0, 64, 256]).int()
    yield "grouped_gemm_wgrad", functools.partial(ops.grouped_gemm_wgrad, a, b, None, None, ends), 2 * M * N * 256
    x, weight = torch.randn(64, 2048).to(BF16), torch.ones(2048).to(BF16)
    yield "rmsnorm_rht_amax", functools.partial(ops.rmsnorm_rht_amax, x, weight), 0


def attention_calls() -> Iterator[tuple[str, Callable[[], Any], int]]:
    operators = torch.ops.cudnn
    b, h, s, t, d = 2, 2, 16, 24, 64
    product = 2 * b * h * s * t * d
    q, o, do = (torch.randn(b, h, s, d) for _ in range(3))
    k, v = (torch.randn(b, h, t, d) for _ in range(2))
    stats, bias = torch.zeros(b, h, s, 1), torch.zeros(b, h, s, t)
    options = (0.1, False, 0, -1, -1, None, None, None, None)
    yield "sdpa", lambda: operators.sdpa(q, k, v, *options), 2 * product
    yield "sdpa_bwd", lambda: operators.sdpa_bwd(do, q, k, v, o, stats, *options), 5 * product
    yield "sdpa_bias_bwd", lambda: operators.sdpa_bias_bwd(do, q, k, v, o, stats, bias, 0.1), 5 * product
    heads = [x.half() for x in (q, k, v, o, do)]
    fused = functools.partial(operators.fused_sdpa, *heads[:3], 0.1, False, -1)
    yield "fused_sdpa", fused, 2 * product
    back = (heads[4], *heads[:4], stats[..., 0], 0.1, False, -1)
    yield "fused_sdpa_bwd", lambda: operators.fused_sdpa_bwd(*back), 5 * product
    q, o, do, k, v = (x.transpose(1, 2).contiguous() for x in (heads[0], *heads[3:], *heads[1:3]))
    flash = (None, None, None, s, t, 0.1, False, -1, -1, 0.0, False)
    yield "flash_attn", lambda: operators.flash_attn(q, k, v, *flash), 2 * product
    rows = stats[..., 0]
    yield "flash_attn_bwd", lambda: operators.flash_attn_bwd(do, None, q, k, v, o, rows, *flash), 5 * product
    lengths = torch.tensor([t, 3], dtype=torch.int32)
    cached = (lengths, None, None, 0.1, False, -1, -1, 0.0, 0)
    appended = torch.zeros_like(k), torch.zeros_like(v), k[:, :1], v[:, :1], lengths - 3, None
    yield "flash_attn_append", lambda: operators.flash_attn_append(*appended), 0
    yield "flash_attn_kvcache", lambda: operators.flash_attn_kvcache(q, k, v, *cached), 2 * product
    wide = [torch.randn(b, s, h, 256).half().transpose(1, 2) for _ in range(5)]
    large = 2 * b * h * s * s * 256
    yield "sdpa_fwd_d256", lambda: operators.sdpa_fwd_d256(*wide[:3], *options), 2 * large
    yield "sdpa_bwd_d256", lambda: operators.sdpa_bwd_d256(wide[4], *wide[:4], stats, *options), 5 * large


def moe_calls() -> Iterator[tuple[str, Callable[[], Any], int]]:
    operators = torch.ops.cudnn
    x, up, down = torch.randn(24, 64), torch.randn(4, 64, 64), torch.randn(4, 64, 32)
    logits, weights = torch.randn(24, 4), torch.rand(24, 2)
    indices = torch.stack([torch.randperm(4)[:2] for _ in range(24)]).int()
    chosen = logits.gather(1, indices.long())
    product = 2 * 48 * (64 * 64 + 64 * 32)
    yield "moe_mlp_fwd_primitive", lambda: moe_mlp(x, (indices, weights), up, down), product
    leaves = [y.clone().requires_grad_() for y in (x, up, down)]
    loss = moe_mlp(leaves[0], (indices, weights), *leaves[1:]).sum()
    yield "moe_mlp_bwd_primitive", loss.backward, 2 * product
    dense = [y.clone().requires_grad_() for y in (x, up[0], down[0])]
    yield "gated_mlp_fwd_primitive", lambda: gated_mlp(*dense), product // 2
    yield "gated_mlp_bwd_primitive", gated_mlp(*dense).sum().backward, product
    sorted_rows = (torch.randn(48, 64), [20, 0, 18, 10])
    yield "moe_experts_fwd_primitive", lambda: ops.moe_experts(*sorted_rows, up, down), product
    loss_of_rows = ops.moe_experts(sorted_rows[0].requires_grad_(), sorted_rows[1], *leaves[1:]).sum()
    yield "moe_experts_bwd_primitive", loss_of_rows.backward, 2 * product
    route = (None, 2, "softmax", False, True, 1, 1, 1.0)
    yield "moe_route", lambda: operators.moe_route(logits, *route), 0
    router = torch.randn(8, 64)
    yield "moe_router_linear", lambda: operators.moe_router_linear(torch.randn(24, 64), router), 2 * 24 * 64 * 8
    yield "moe_route_bwd", lambda: operators.moe_route_bwd(weights, chosen, indices, 4, "softmax", False, True, 1.0), 0
    yield "moe_sort", lambda: operators.moe_sort(indices, 4), 0
    rows, places = torch.randn(48, 64), torch.arange(48).view(24, 2).int()
    yield "moe_combine", lambda: operators.moe_combine(rows, places, weights), 0
    yield "moe_combine_bwd", lambda: operators.moe_combine_bwd(x, rows, places, weights), 0
    token, first = torch.randn(1, 12, 16), torch.tensor([0, 5, 9]).view(3, 1, 1)
    weight = torch.randn(3, 8, 16).mT
    yield "moe_grouped_matmul", lambda: operators.moe_grouped_matmul(token, weight, first), 2 * 12 * 16 * 8
    gradient = torch.randn(1, 12, 8)
    yield "moe_grouped_matmul_bwd", lambda: operators.moe_grouped_matmul_bwd(gradient, token, first), 2 * 12 * 16 * 8


def nsa_calls() -> Iterator[tuple[str, Callable[[], Any], int]]:
    operators = torch.ops.cudnn
    t, small, d, scale, block, stride, count, window_size = 64, 8, 64, 0.25, 16, 8, 1, 24
    (q, o, do), (k, v), (ck, cv) = (
        [torch.randn(r, h, d) for _ in range(n)] for r, h, n in ((t, 4, 3), (t, 2, 2), (small, 2, 2))
    )
    lse, gates = torch.zeros(t, 4), torch.rand(t, 4, 3)
    ends, few = (torch.tensor([0, rows], dtype=torch.int32) for rows in (t, small))
    lists = torch.zeros(t, 2, 4, dtype=torch.int32)
    row, some = 2 * t * 4 * d, 4 * block
    choice, window = (count, block, stride, t), (window_size, t)
    yield "nsa_compression", lambda: operators.nsa_compression(q, ck, cv, ends, few, scale), 2 * row * small
    back = (do, q, ck, cv, o, lse, ends, few, scale)
    yield "nsa_compression_bwd", lambda: operators.nsa_compression_bwd(*back), 5 * row * small
    half = [x.half() for x in (q, ck, cv)]
    top_k = (*half, ends, few, scale, *choice)
    yield "nsa_compression_top_k", lambda: operators.nsa_compression_top_k(*top_k), 3 * row * small
    yield "nsa_top_k", lambda: operators.nsa_top_k(*half[:2], lse, ends, few, scale, count, block, stride), row * small
    yield "nsa_selection", lambda: operators.nsa_selection(q, k, v, lists, ends, scale, block), 2 * row * some
    picked = (do, q, k, v, o, lse, lists, ends, scale, block)
    yield "nsa_selection_bwd", lambda: operators.nsa_selection_bwd(*picked), 5 * row * some
    yield "nsa_window", lambda: operators.nsa_window(q, k, v, ends, scale, *window), 2 * row * window_size
    last = (do, q, k, v, *operators.nsa_window(q, k, v, ends, scale, *window), ends, scale, *window)
    yield "nsa_window_bwd", lambda: operators.nsa_window_bwd(*last), 5 * row * window_size
    both = (q, k, v, o, gates, lists, ends, ends, scale, block, *window)
    yield "nsa_gated_selection", lambda: operators.nsa_gated_selection(*both), 2 * row * (some + window_size)
    yield "nsa_gates", lambda: operators.nsa_gates(o, o, o, gates), 0
    yield "nsa_gates_bwd", lambda: operators.nsa_gates_bwd(do, o, o, o, gates), 0
    sizes = {"block_size": block, "selected_blocks": 5, "window_size": window_size, "compress_stride": stride}
    five = 5 * block
    leaves = [x.clone().requires_grad_() for x in (q, k, v, ck, cv)]
    attend = functools.partial(ops.nsa_attention, *leaves, gates, ends, few, **sizes)
    yield "nsa_branches", attend, row * (3 * small + 2 * (five + window_size))
    yield "nsa_branches_bwd", attend().sum().backward, 5 * row * (small + five + window_size)


def other_calls() -> Iterator[tuple[str, Callable[[], Any], int]]:
    operators = torch.ops.cudnn
    x, weight = torch.randn(2, 32, 40), torch.randn(32, 4)
    product = 2 * 2 * 32 * 40 * 4
    yield "causal_conv1d_fwd_primitive", lambda: causal_conv1d(x, weight), product
    leaves = [y.clone().requires_grad_() for y in (x, weight)]
    yield "causal_conv1d_bwd_primitive", lambda: causal_conv1d(*leaves).sum().backward(), 2 * product
    caches = [torch.randn(2, 1, rows, 16) for rows in (96, 96, 10, 10)]
    ends = [torch.tensor(n, dtype=torch.int32) for n in ((70, 96), (6, 10))]
    q, gates = torch.randn(2, 4, 16), torch.rand(2, 4, 3)
    step = (q, *caches, gates, *ends, 0.25, 16, 8, 1, 32)
    yield (
        "nsa_decode_step",
        lambda: operators.nsa_decode_step(*step),
        2 * 2 * 4 * (10 + 5 * 16 + 32) * 32,
    )  # 4 blocks in every list, and 1


CALLS = (fused_calls, attention_calls, moe_calls, nsa_calls, other_calls)


def test_no_operator_is_left_out() -> None:
    names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("cudnn::")}
    assert names <= {name for calls in CALLS for name, *_ in calls()}


@pytest.mark.parametrize("calls", CALLS)
def test_each_operator_counts_its_products(calls: Callable[[], Iterator[tuple[str, Callable[[], Any], int]]]) -> None:
    torch.manual_seed(0)
    for name, call, expected in calls():
        with FlopCounterMode(display=False) as counter:
            call()
        found = counter.get_flop_counts()["Global"]
        packet = getattr(torch.ops.cudnn, name)
        assert packet in found, name
        assert found[packet] == expected, name
