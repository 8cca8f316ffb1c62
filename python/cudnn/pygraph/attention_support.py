"""What cuDNN's attention supports, checked before cuDNN is asked. The order of the checks is part of the contract.

A check that depends on the device is left out where no device is known, one that depends on cuDNN's version where no
cuDNN is found: then the reference executor may run the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from cudnn.backend import library
from cudnn.backend.library import format_version
from cudnn.enums import data_type
from cudnn.errors import cudnnGraphNotSupportedError, refusal
from cudnn.pygraph.layout import row_major
from cudnn.pygraph.node import NOT_SET, Context

if TYPE_CHECKING:
    from cudnn.pygraph.attention import AttentionForward
    from cudnn.pygraph.attention_backward import AttentionBackward
    from cudnn.pygraph.attention_scores import Attention
    from cudnn.pygraph.tensor import Tensor

NEWEST = sys.maxsize
UNSUPPORTED = cudnnGraphNotSupportedError


def loaded_version() -> int:
    """cuDNN's version; where there is none, one that no check refuses."""
    return library.version() if library.is_available() else NEWEST


class Rule(NamedTuple):
    """A reason to refuse."""

    broken: bool
    error: type[Exception]
    what: str
    got: str
    allowed: str
    cure: str = ""


def _apply(node: Attention, rules: Iterable[Rule]) -> None:
    for rule in rules:
        if rule.broken:
            raise rule.error(refusal(node.where, *rule[2:]))


def check_forward(node: AttentionForward, context: Context, version: int) -> None:
    """Refuses what the forward pass in fp16 and bf16 does not support."""
    sm = context.sm_version
    _apply(node, _layout(node, ("Q", "K", "V", "O")))
    _apply(node, _masks(node))
    _apply(node, _types(context))
    _apply(node, _versions(node, version))
    q, v = node.inputs["Q"].dim, node.inputs["V"].dim
    head_sizes = f"d_qk={q[3]}, d_v={v[3]}"
    _apply(node, [
        Rule(q[3] % 8 != 0 or v[3] % 8 != 0, UNSUPPORTED, "head size", head_sizes, "multiples of 8",
             "pad the heads with zeros"),
        *_window(node),
        *_device(sm),
    ])  # fmt: skip


def check_backward(node: AttentionBackward, context: Context, version: int) -> None:
    """Refuses what the backward pass in fp16 and bf16 does not support."""
    sm = context.sm_version
    _apply(node, _layout(node, ("Q", "K", "V", "O", "Stats", "dO", "dQ", "dK", "dV")))
    s_q, s_kv = node.score_dim[2:]
    _apply(
        node, [Rule(s_q == s_kv == 1, UNSUPPORTED, "sequence lengths", "s_q=1, s_kv=1", "more than one row or column")]
    )
    _apply(node, _versions(node, version))
    _apply(node, _backward_heads(node, version, sm))
    _apply(node, _masks(node))
    left = node.left_bound
    _apply(node, [
        Rule(left is not None and left <= 0, RuntimeError, "diagonal_band_left_bound", str(left), "1 or more"),
        *_window(node),
        *_types(context),
        *_device(sm),
    ])  # fmt: skip


def _layout(node: Attention, ports: Iterable[str]) -> Iterator[Rule]:
    tensors = {**node.inputs, **node.outputs}
    for port in ports:
        tensor = tensors[port]
        yield Rule(len(tensor.dim) != 4, ValueError, f"{port} (tensor {tensor.name!r})", f"dim={tensor.dim}", "rank 4")
        yield Rule(
            tensor.stride[-1] != 1, UNSUPPORTED, f"{port} (tensor {tensor.name!r})", f"stride={tensor.stride}",
            "a last stride of 1", "copy it with .contiguous()"
        )  # fmt: skip
    heads = [node.inputs[port].dim[1] for port in "QKV"]
    yield Rule(
        heads[0] % heads[1] != 0 or heads[0] % heads[2] != 0, UNSUPPORTED, "heads",
        f"{heads[0]} of Q, {heads[1]} of K, {heads[2]} of V", "a number in Q that is a multiple of those in K and V"
    )  # fmt: skip


def _masks(node: Attention) -> Iterator[Rule]:
    bias = node.inputs.get("Bias")
    lengths = [port for port in ("Seq_len_q", "Seq_len_kv") if port in node.inputs]
    s_q, s_kv = node.score_dim[2:]
    bottom_right = node.bottom_right and node.right_bound is not None
    yield Rule(
        bias is not None and bias.data_type is data_type.BOOLEAN, UNSUPPORTED, "bias", "BOOLEAN",
        "a floating-point type", "use 0 and a large negative number"
    )  # fmt: skip
    yield Rule(
        node.use_padding_mask and len(lengths) < 2, ValueError, "use_padding_mask",
        f"True with {lengths or 'no lengths'}", "both seq_len_q and seq_len_kv", "pass them"
    )  # fmt: skip
    yield Rule(
        not node.use_padding_mask and bool(lengths), ValueError, "seq_len_q, seq_len_kv",
        "given without use_padding_mask", "use_padding_mask=True", "pass it, or leave the lengths out"
    )  # fmt: skip
    yield Rule(
        bottom_right and not node.use_padding_mask and s_q > s_kv, UNSUPPORTED, "bottom-right causal mask",
        f"s_q={s_q} > s_kv={s_kv}", "s_q up to s_kv, or padding", "use the top-left alignment"
    )  # fmt: skip
    yield Rule(
        bottom_right and bias is not None, UNSUPPORTED, "bottom-right causal mask", "with bias", "one of the two",
        "add the mask to the bias"
    )  # fmt: skip


def _types(context: Context) -> Iterator[Rule]:
    yield Rule(
        context.intermediate_data_type is NOT_SET, ValueError, "intermediate_data_type", "NOT_SET",
        "a data type of the graph", "create the graph with intermediate_data_type=cudnn.data_type.FLOAT"
    )  # fmt: skip


def _versions(node: Attention, version: int) -> Iterator[Rule]:
    yield Rule(
        version in (91000, 91001), UNSUPPORTED, "cuDNN", "9.10.0 or 9.10.1, whose attention is broken",
        "9.10.2 or newer", "install a newer nvidia-cudnn package"
    )  # fmt: skip
    yield Rule(
        version == 91400 and node.score_dim[3] > 1024 and node.left_bound is not None and node.right_bound is None,
        UNSUPPORTED, "sliding window without causal mask", "cuDNN 9.14.0 and s_kv > 1024, where it is broken",
        "another version of cuDNN", "install a newer nvidia-cudnn package"
    )  # fmt: skip


def _window(node: Attention) -> Iterator[Rule]:
    s_q, s_kv = node.score_dim[2:]
    yield Rule(
        node.left_bound is not None and not node.use_padding_mask and s_q > s_kv, UNSUPPORTED,
        "diagonal_band_left_bound", f"{node.left_bound} with s_q={s_q} > s_kv={s_kv}", "s_q up to s_kv, or padding"
    )  # fmt: skip
    right = node.right_bound
    yield Rule(
        right is not None and right < 0, RuntimeError, "diagonal_band_right_bound", str(right), "0 or more",
        "use 0 for a causal mask"
    )  # fmt: skip


def _device(sm: int | None) -> Iterator[Rule]:
    yield Rule(sm is not None and sm < 80, UNSUPPORTED, "device", f"compute capability {sm}", "80 (Ampere) or newer")


def _backward_heads(node: Attention, version: int, sm: int | None) -> Iterator[Rule]:
    if sm is None:
        return
    d_qk, d_v = node.inputs["Q"].dim[3], node.inputs["V"].dim[3]
    if sm // 10 == 9:
        limit, fits = "up to 256", max(d_qk, d_v) <= 256
    elif sm // 10 == 10 and d_qk == 192:
        limit, fits = "d_v=128 beside d_qk=192", d_v == 128
    elif sm // 10 == 10 and version >= 92300:
        limit, fits = "up to 128, both 256, or 192 and 128", max(d_qk, d_v) <= 128 or d_qk == d_v == 256
    else:
        limit, fits = "up to 128", max(d_qk, d_v) <= 128
    yield Rule(
        not fits or d_qk % 8 != 0 or d_v % 8 != 0, UNSUPPORTED, f"head size on compute capability {sm}",
        f"d_qk={d_qk}, d_v={d_v}", f"multiples of 8, {limit}", "pad the heads with zeros"
    )  # fmt: skip


def check_types(node: Attention) -> None:
    """Refuses type combinations that cuDNN accepts and computes wrongly.

    Its engines (9.19 on an H200) read and write every tensor as if it had Q's type, and statistics as FLOAT.
    """
    q = node.inputs["Q"].data_type
    tensors = {**node.inputs, **node.outputs}
    rules = [
        Rule(q not in (data_type.HALF, data_type.BFLOAT16), UNSUPPORTED, "data type of Q", q.name, "HALF or BFLOAT16",
             "convert it, or build the graph with backend='reference'")
    ]  # fmt: skip
    for port in ("K", "V", "O", "dO", "dQ", "dK", "dV", "dBias"):
        kind = tensors[port].data_type if port in tensors else q
        rules.append(
            Rule(kind is not q, UNSUPPORTED, f"data type of {port}", f"{kind.name} beside {q.name} of Q", "the same",
                 "convert it")
        )  # fmt: skip
    stats = node.inputs.get("Stats")
    rules.append(
        Rule(stats is not None and stats.data_type is not data_type.FLOAT, UNSUPPORTED, "data type of Stats",
             stats.data_type.name if stats else "", "FLOAT", "let the forward pass write FLOAT statistics")
    )  # fmt: skip
    _apply(node, rules)


def check_narrow_stats(node: AttentionForward, stats: Tensor) -> None:
    """Refuses statistics in a type or layout that FLOAT ones cannot be copied to."""
    packed = row_major(stats.dim)
    _apply(node, [
        Rule(stats.data_type is not data_type.BFLOAT16, UNSUPPORTED, "data type of Stats", stats.data_type.name,
             "FLOAT or BFLOAT16", "call set_data_type(cudnn.data_type.FLOAT) on it"),
        Rule(stats.stride != packed, UNSUPPORTED, "strides of Stats in BFLOAT16", str(stats.stride), str(packed),
             "call set_data_type(cudnn.data_type.FLOAT) on it"),
    ])  # fmt: skip


def unified_obstacle(node: AttentionForward, version: int) -> str:
    """Why cuDNN's one attention operation cannot be used; empty where it can. Minima as measured and documented."""
    since = {
        "the operation itself": (True, 91301),
        "a padding mask": (node.use_padding_mask, 91500),
        "bias": ("Bias" in node.inputs, 92100),
        "a causal or sliding-window mask": (node.has_bounds, 92100),
    }
    for feature, (used, minimum) in since.items():
        if used and version < minimum:
            return f"{feature} needs cuDNN {format_version(minimum)}, this is {format_version(version)}"
    if node.compute_data_type is not data_type.FLOAT:
        return f"it computes in FLOAT only, not in {node.compute_data_type.name}"
    return ""


def refuse_unified(node: AttentionForward, obstacle: str) -> None:
    """Refuses an implementation that was asked for but cannot be used."""
    _apply(node, [Rule(bool(obstacle), UNSUPPORTED, "implementation", f"UNIFIED, but {obstacle}", "AUTO or COMPOSITE",
                       "leave it out")])  # fmt: skip
