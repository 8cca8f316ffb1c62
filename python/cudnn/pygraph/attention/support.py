"""What cuDNN's attention supports, checked before cuDNN is asked. The order of the checks is part of the contract.

A check that depends on the device is left out where no device is known, one that depends on cuDNN's version where no
cuDNN is found: then the reference executor may run the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from cudnn.arrays.layout import row_major
from cudnn.backend import library
from cudnn.backend.library import format_version
from cudnn.enums import data_type, tensor_reordering
from cudnn.errors import cudnnGraphNotSupportedError, refusal
from cudnn.pygraph.attention import faults
from cudnn.pygraph.node import NOT_SET, Context

if TYPE_CHECKING:
    from cudnn.pygraph.attention.backward import AttentionBackward
    from cudnn.pygraph.attention.fp8 import AttentionFp8Backward, AttentionFp8Forward
    from cudnn.pygraph.attention.methods import AttentionForward
    from cudnn.pygraph.attention.mxfp8 import AttentionMxfp8Backward, AttentionMxfp8Forward
    from cudnn.pygraph.attention.scores import Attention
    from cudnn.pygraph.tensor import Tensor

NEWEST = sys.maxsize
GRADIENTS = ("Q", "K", "V", "O", "Stats", "dO", "dQ", "dK", "dV")
UNSUPPORTED = cudnnGraphNotSupportedError
NEWER = "install a newer nvidia-cudnn package"
FP8 = data_type.FP8_E4M3, data_type.FP8_E5M2


def loaded_version() -> int:
    """cuDNN's version; without cuDNN, a version that no check refuses."""
    return library.version() if library.is_available() else NEWEST


class Rule(NamedTuple):
    """A reason to refuse."""

    broken: bool
    error: type[Exception]
    what: str
    got: str
    allowed: str
    hint: str = ""


def _apply(node: Attention, *groups: Iterable[Rule]) -> None:
    """Raises for the first broken rule. A rule may rest on those before it: each is made when they have passed."""
    for rule in chain.from_iterable(groups):
        if rule.broken:
            raise rule.error(refusal(node.where, *rule[2:]))


def check_forward(node: AttentionForward, context: Context, version: int) -> None:
    """Refuses what the forward pass in fp16 and bf16 does not support."""
    sm = context.sm_version
    _apply(
        node, _layout(node, ("Q", "K", "V", "O")), _masks(node), _types(context), _sink(node, version),
        _versions(node, version), _modifiers(node), _eighths(node), _alibi(node), _window(node), _right_bound(node),
        _one_row(node), _paged(node), _device(sm), _ragged_device(node, version, sm), _statistics(node, version),
    )  # fmt: skip
    faults.refuse_forward(node, version)


def check_backward(node: AttentionBackward, context: Context, version: int) -> None:
    """Refuses what the backward pass in fp16 and bf16 does not support."""
    sm = context.sm_version
    _apply(
        node, _layout(node, GRADIENTS), _several(node), _versions(node, version), _backward_heads(node, version, sm),
        _modifiers(node), _alibi(node), _masks(node), _empty_window(node), _window(node), _right_bound(node),
        _deterministic(node, version, sm), _bias_gradient(node, sm), _types(context), _device(sm), _sink(node, version),
    )  # fmt: skip
    faults.refuse_backward(node, version)


def _eighths(node: Attention) -> Iterator[Rule]:
    d_qk, d_v = node.inputs["Q"].dim[3], node.inputs["V"].dim[3]
    yield Rule(d_qk % 8 != 0 or d_v % 8 != 0, UNSUPPORTED, "head size", f"d_qk={d_qk}, d_v={d_v}", "multiples of 8",
               "pad the heads with zeros")  # fmt: skip


def _several(node: Attention) -> Iterator[Rule]:
    one = node.score_dim[2:] == [1, 1]
    yield Rule(one, UNSUPPORTED, "sequence lengths", "s_q=1, s_kv=1", "more than one row or column")


def _statistics(node: Attention, version: int) -> Iterator[Rule]:
    """Older engines, seen on an H200 with cuDNN 9.19, write Stats alone."""
    combined_with = [
        argument for port, argument in (("Max", "score_max"), ("Sum_exp", "score_sum_exp")) if port in node.outputs
    ]
    yield Rule(
        version < 92100 and "Stats" in node.outputs and bool(combined_with), UNSUPPORTED, " and ".join(combined_with),
        f"with generate_stats=True and cuDNN {format_version(version)}", "one or the other before cuDNN 9.21",
        "leave generate_stats out: Stats is the largest score plus the logarithm of the sum"
    )  # fmt: skip


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
        not node.use_padding_mask and bool(lengths) and node.score_mod is None, ValueError, "seq_len_q, seq_len_kv",
        "given without use_padding_mask", "use_padding_mask=True", "pass it, or leave the lengths out"
    )  # fmt: skip
    yield Rule(
        node.is_ragged and not node.use_padding_mask and node.score_mod is None, UNSUPPORTED, "ragged tensors",
        "no padding mask", "use_padding_mask=True with both lengths", "pass them: they end each entry"
    )  # fmt: skip
    yield Rule(
        bottom_right and not node.use_padding_mask and s_q > s_kv, UNSUPPORTED, "bottom-right causal mask",
        f"s_q={s_q} > s_kv={s_kv}", "s_q up to s_kv, or padding", "use the top-left alignment"
    )  # fmt: skip
    combined = [
        name
        for name, used in (("bias", bias is not None), ("ALiBi", node.use_alibi_mask), ("dropout", node.has_dropout))
        if used
    ]
    yield Rule(
        bottom_right and bool(combined), UNSUPPORTED, "bottom-right causal mask", f"with {', '.join(combined)}",
        "neither bias, ALiBi nor dropout with it", "add the mask to a bias, and use the top-left alignment"
    )  # fmt: skip


def _types(context: Context) -> Iterator[Rule]:
    yield Rule(
        context.intermediate_data_type is NOT_SET, ValueError, "intermediate_data_type", "NOT_SET",
        "a data type of the graph", "create the graph with intermediate_data_type=cudnn.data_type.FLOAT"
    )  # fmt: skip


def _sink(node: Attention, version: int) -> Iterator[Rule]:
    yield Rule(
        "dSink" in node.outputs and "Sink" not in node.inputs, ValueError, "dSink_token", "given without sink_token",
        "both, or none", "pass the sink_token of the forward pass"
    )  # fmt: skip
    yield Rule(
        "Sink" in node.inputs and version < 91300, ValueError, "sink_token", f"cuDNN {format_version(version)}",
        "cuDNN 9.13 or newer", NEWER
    )  # fmt: skip


def _versions(node: Attention, version: int) -> Iterator[Rule]:
    yield Rule(
        version in (91000, 91001), UNSUPPORTED, "cuDNN", "9.10.0 or 9.10.1, whose attention is broken",
        "9.10.2 or newer", NEWER
    )  # fmt: skip
    yield Rule(
        version == 91400 and node.score_dim[3] > 1024 and node.left_bound is not None and node.right_bound is None,
        UNSUPPORTED, "sliding window without causal mask", "cuDNN 9.14.0 and s_kv > 1024, where it is broken",
        "another version of cuDNN", NEWER
    )  # fmt: skip


def _modifiers(node: Attention) -> Iterator[Rule]:
    combined = [
        name
        for name, used in (
            ("ALiBi", node.use_alibi_mask), ("a right bound", node.right_bound is not None),
            ("a padding mask", node.use_padding_mask), ("a left bound", node.left_bound is not None),
        )
        if used
    ]  # fmt: skip
    yield Rule(
        node.score_mod is not None and bool(combined), UNSUPPORTED, "score_mod", f"with {', '.join(combined)}",
        "alone", "apply the mask in score_mod"
    )  # fmt: skip


def _alibi(node: Attention) -> Iterator[Rule]:
    yield Rule(
        node.use_alibi_mask and node.right_bound != 0, UNSUPPORTED, "use_alibi_mask", f"right bound {node.right_bound}",
        "with a causal mask, a right bound of 0", "pass diagonal_band_right_bound=0"
    )  # fmt: skip


def _empty_window(node: Attention) -> Iterator[Rule]:
    left = node.left_bound
    yield Rule(left is not None and left <= 0, RuntimeError, "diagonal_band_left_bound", str(left),
               "1 or more; in the forward pass also 0 from cuDNN 9.10", "use 1 or more")  # fmt: skip


def _window(node: Attention) -> Iterator[Rule]:
    s_q, s_kv = node.score_dim[2:]
    left = node.left_bound
    yield Rule(
        left is not None and not node.use_padding_mask and s_q > s_kv, UNSUPPORTED,
        "diagonal_band_left_bound", f"{left} with s_q={s_q} > s_kv={s_kv}", "s_q up to s_kv, or padding"
    )  # fmt: skip


def _right_bound(node: Attention) -> Iterator[Rule]:
    right = node.right_bound
    yield Rule(
        right is not None and right < 0, RuntimeError, "diagonal_band_right_bound", str(right), "0 or more",
        "use 0 for a causal mask"
    )  # fmt: skip


def _one_row(node: Attention) -> Iterator[Rule]:
    yield Rule(
        node.score_dim[2] == 1 and "Sink" in node.inputs, UNSUPPORTED, "sink_token", "s_q=1", "more than one row of Q",
        "leave it out"
    )  # fmt: skip


def _paged(node: Attention) -> Iterator[Rule]:
    longest = node.paged_max_seq_len_kv
    if not node.is_paged:
        yield Rule(
            longest is not None, UNSUPPORTED, "paged_attention_max_seq_len_kv", f"{longest} without page tables",
            "only with paged K or V", "leave it out"
        )  # fmt: skip
        return
    yield Rule(not {"Seq_len_q", "Seq_len_kv"} <= node.inputs.keys(), UNSUPPORTED, "paged attention",
               "no sequence lengths", "use_padding_mask=True with both lengths", "pass them")  # fmt: skip
    for what, tensor in (("bias", node.inputs.get("Bias")), ("rng_dump", node.outputs.get("RNG_DUMP"))):
        yield Rule(
            longest is not None and tensor is not None and tensor.dim[-1] != longest, UNSUPPORTED,
            "paged_attention_max_seq_len_kv", f"{longest} with {what} of dim={tensor.dim if tensor else []}",
            f"the last extent of {what}", "make them equal"
        )  # fmt: skip


def _device(sm: int | None) -> Iterator[Rule]:
    yield Rule(sm is not None and sm < 80, UNSUPPORTED, "device", f"compute capability {sm}", "80 (Ampere) or newer")


def _ragged_device(node: Attention, version: int, sm: int | None) -> Iterator[Rule]:
    yield Rule(
        sm is not None and sm < 90 and version < 91801 and node.is_ragged, UNSUPPORTED, "ragged tensors",
        f"compute capability {sm} with cuDNN {format_version(version)}", "90 (Hopper), or cuDNN 9.18.1 or newer",
        "use a padding mask"
    )  # fmt: skip


def _backward_heads(node: Attention, version: int, sm: int | None) -> Iterator[Rule]:
    if sm is None:
        return
    d_qk, d_v = node.inputs["Q"].dim[3], node.inputs["V"].dim[3]
    if sm // 10 == 9:
        limit, fits = "up to 256", max(d_qk, d_v) <= 256
    elif sm // 10 == 10 and d_qk == 192 and version >= 91100:
        limit, fits = "d_v=128 with d_qk=192", d_v == 128
    elif sm // 10 == 10 and version >= 92300:
        limit, fits = "up to 128, both 256, or 192 and 128", max(d_qk, d_v) <= 128 or d_qk == d_v == 256
    else:
        limit, fits = "up to 128", max(d_qk, d_v) <= 128
    yield Rule(
        not fits or d_qk % 8 != 0 or d_v % 8 != 0, UNSUPPORTED, f"head size on compute capability {sm}",
        f"d_qk={d_qk}, d_v={d_v}", f"multiples of 8, {limit}", "pad the heads with zeros"
    )  # fmt: skip


def _deterministic(node: AttentionBackward, version: int, sm: int | None) -> Iterator[Rule]:
    total = node.max_total_seq_len_q is not None or node.max_total_seq_len_kv is not None
    yield Rule(
        total and not node.is_ragged, UNSUPPORTED, "max_total_seq_len_q, max_total_seq_len_kv", "given",
        "only with ragged tensors", "leave them out"
    )  # fmt: skip
    if sm is None:
        return
    asked = node.use_deterministic_algorithm
    combined = "dBias" in node.outputs or node.has_dropout or node.use_alibi_mask
    yield Rule(
        asked and sm // 10 == 10 and (version < 91800 or combined), UNSUPPORTED, "use_deterministic_algorithm",
        f"compute capability {sm} with cuDNN {format_version(version)}" + (" and dBias, dropout or ALiBi" * combined),
        "cuDNN 9.18 or newer, and none of these", "leave it out"
    )  # fmt: skip
    ragged_stats = node.inputs["Stats"].ragged_offset is not None
    yield Rule(
        node.is_ragged and sm // 10 in (8, 12) and (version < 91801 or asked or ragged_stats), UNSUPPORTED,
        "ragged tensors", f"compute capability {sm} with cuDNN {format_version(version)}",
        "cuDNN 9.18.1 or newer, Stats not ragged, no deterministic algorithm", "use a padding mask"
    )  # fmt: skip


def _bias_gradient(node: AttentionBackward, sm: int | None) -> Iterator[Rule]:
    yield Rule(
        "dBias" in node.outputs and _family(sm) == 10 and node.is_ragged, UNSUPPORTED, "dBias",
        f"ragged tensors on compute capability {sm}", "tensors that are not ragged", "use a padding mask"
    )  # fmt: skip


def check_fp8_forward(node: AttentionFp8Forward, context: Context, version: int) -> None:
    """Refuses what the forward pass in fp8 does not support."""
    sm = context.sm_version
    ragged = _family(sm) == 12 and node.is_ragged
    fp8 = [
        Rule("Bias" in node.inputs, UNSUPPORTED, "bias", "given", "none with fp8 tensors", "use fp16 or bf16"),
        Rule(ragged, UNSUPPORTED, "ragged tensors", f"compute capability {sm}", "9.0 or 10.0 with fp8 tensors"),
    ]
    _apply(
        node, _layout(node, ("Q", "K", "V", "O")), _masks(node), _types(context), _sink(node, version),
        _fp8(version, sm), fp8, _fp8_heads(node, version, sm, 256), _fp8_bottom_right(node, version, sm),
        _fp8_outputs(node, version, sm, ("O",)), _statistics(node, version), _fp8_sink(node, sm),
    )  # fmt: skip
    if _is_hopper(sm):
        faults.refuse_fp8_forward(node, version)


def check_fp8_backward(node: AttentionFp8Backward, context: Context, version: int) -> None:
    """Refuses what the backward pass in fp8 does not support."""
    sm = context.sm_version
    d = node.inputs["Q"].dim[3], node.inputs["V"].dim[3]
    hopper = _is_hopper(sm)
    blackwell = _family(sm) == 10
    old = version < 91900 or node.has_dropout
    hoppers = [
        Rule(hopper and node.is_ragged, UNSUPPORTED, "ragged tensors", f"compute capability {sm}", "10.0 or newer in "
             "the backward pass in fp8", "use a padding mask"),
        Rule(hopper and d != (128, 128), UNSUPPORTED, f"head size on compute capability {sm}", f"d_qk={d[0]}, "
             f"d_v={d[1]}", "128 in the backward pass in fp8", "pad the heads with zeros"),
    ]  # fmt: skip
    deterministic = Rule(
        node.use_deterministic_algorithm and blackwell and old, UNSUPPORTED, "use_deterministic_algorithm",
        f"compute capability {sm} with cuDNN {format_version(version)}", "cuDNN 9.19 or newer, and no dropout",
        "leave it out"
    )  # fmt: skip
    _apply(
        node, _layout(node, GRADIENTS), _masks(node), _types(context), _sink(node, version),
        _fp8(version, sm), hoppers, _fp8_heads(node, version, sm, 128), _fp8_bottom_right(node, version, sm),
        _fp8_outputs(node, version, sm, ("dQ", "dK", "dV")), _fp8_sink(node, sm), [deterministic],
    )  # fmt: skip
    if hopper:
        faults.refuse_fp8_backward(node, version)


def _fp8_sink(node: Attention, sm: int | None) -> Iterator[Rule]:
    """On an H200 cuDNN's kernel of the forward pass does not compile (9.19, 9.28), that of the other fails (9.19)."""
    yield Rule(
        "Sink" in node.inputs and _is_hopper(sm), UNSUPPORTED, "sink_token", f"fp8 tensors on compute capability {sm}",
        "fp16 or bf16 tensors", "convert them, or leave it out"
    )  # fmt: skip


def check_mxfp8_forward(node: AttentionMxfp8Forward, context: Context, version: int) -> None:
    """Refuses what the forward pass on MXFP8 tensors does not support."""
    sm = context.sm_version
    with_version = f"cuDNN {format_version(version)}"
    _apply(node, [
        Rule(version < 92100, UNSUPPORTED, "MXFP8 tensors", with_version, "cuDNN 9.21 or newer",
             NEWER),
        Rule(sm is not None and sm // 10 != 10, UNSUPPORTED, "MXFP8 tensors", f"compute capability {sm}",
             "10.0 or 10.3 (Blackwell)", "use sdpa_fp8()"),
    ])  # fmt: skip
    _apply(node, _layout(node, ("Q", "K", "V", "O")), _masks(node), _types(context))
    _check_block_scales(node, node.BLOCKS)


def check_mxfp8_backward(node: AttentionMxfp8Backward, context: Context, version: int) -> None:
    """Refuses what the backward pass on MXFP8 tensors does not support: GPUs."""
    _apply(node, [
        Rule(context.sm_version is not None, UNSUPPORTED, "the backward pass on MXFP8 tensors",
             f"compute capability {context.sm_version}", "the reference executor", "use sdpa_fp8_backward()"),
    ])  # fmt: skip
    _apply(node, _layout(node, (*GRADIENTS, "dO_f16")), _masks(node), _types(context), _sink(node, version))
    check_types(node, *node.fp8_ports)
    _check_block_scales(node, node.BLOCKS)


def scale_of(port: str) -> str:
    """The input that has an input's block scales: Descale_q for Q, Descale_dO for dO."""
    return f"Descale_{port if port.startswith('d') else port.replace(port[0], port[0].lower(), 1)}"


def _check_block_scales(node: Attention, blocks: Mapping[str, int]) -> None:
    """Refuses scales that are not one for every 32 elements, as tiles of 128 x 4."""
    for port, axis in blocks.items():
        name = scale_of(port)
        scale, dims = node.inputs[name], [*node.inputs[port].dim]
        dims[axis] = -(-dims[axis] // 32)
        what = f"{'d' + name[1:]} (tensor {scale.name!r})"
        _apply(node, [
            Rule(scale.data_type is not data_type.FP8_E8M0, ValueError, what, scale.data_type.name, "FP8_E8M0",
                 "convert the scales"),
            Rule(scale.reordering_type is not tensor_reordering.F8_128x4, ValueError, what,
                 f"reordering {scale.reordering_type.name}", "F8_128x4", "store them so, and set reordering_type"),
            Rule(scale.dim[:2] != dims[:2] or any(have < need for have, need in zip(scale.dim, dims, strict=True)),
                 ValueError, what, f"dim={scale.dim}", f"dim={dims}, or more in the last two as padding",
                 "pass a scale for every 32 elements"),
        ])  # fmt: skip


def _fp8(version: int, sm: int | None) -> Iterator[Rule]:
    with_version = f"cuDNN {format_version(version)}"
    yield Rule(
        version == 91000, UNSUPPORTED, "fp8 tensors", f"{with_version}, where they are broken", "another version", NEWER
    )
    yield Rule(
        sm is not None and sm < 90, UNSUPPORTED, "fp8 tensors", f"compute capability {sm}", "90 (Hopper) or newer"
    )


def _fp8_bottom_right(node: Attention, version: int, sm: int | None) -> Iterator[Rule]:
    used = node.bottom_right and node.right_bound is not None
    s_q, s_kv = node.score_dim[2:]
    yield Rule(used and _is_hopper(sm), UNSUPPORTED, "bottom-right causal mask",
               f"fp8 tensors with cuDNN {format_version(version)} on compute capability {sm}",
               "cuDNN 9.7 and compute capability 100", "use the top-left alignment")  # fmt: skip
    backward = "dO" in node.inputs
    yield Rule(backward and used and s_q > s_kv, UNSUPPORTED, "bottom-right causal mask", f"s_q={s_q} > s_kv={s_kv}",
               "s_q up to s_kv in the backward pass in fp8", "use the top-left alignment")  # fmt: skip
    yield Rule(backward and used and (s_q % 64 != 0 or s_kv % 64 != 0), UNSUPPORTED, "bottom-right causal mask",
               f"s_q={s_q}, s_kv={s_kv}", "multiples of 64 in the backward pass in fp8")  # fmt: skip


def _fp8_outputs(node: Attention, version: int, sm: int | None, ports: Iterable[str]) -> Iterator[Rule]:
    for port in ports:
        dtype = node.outputs[port].data_type
        yield Rule(dtype in (data_type.HALF, data_type.BFLOAT16) and (version < 91300 or _is_hopper(sm)), UNSUPPORTED,
                   f"data type of {port}", f"{dtype.name} with cuDNN {format_version(version)} on compute capability "
                   f"{sm}", "FP8_E4M3 or FP8_E5M2 before cuDNN 9.13 and compute capability 100",
                   "write fp8")  # fmt: skip


def _family(sm: int | None) -> int | None:
    """The major number of a compute capability; None where no device is known."""
    return None if sm is None else sm // 10


def _is_hopper(sm: int | None) -> bool:
    return sm is not None and sm < 100


def _fp8_heads(node: Attention, version: int, sm: int | None, hopper_limit: int) -> Iterator[Rule]:
    d_qk, d_v = node.inputs["Q"].dim[3], node.inputs["V"].dim[3]
    sixteenths = d_qk % 16 == 0 and d_v % 16 == 0
    if _is_hopper(sm):
        fits, limit = max(d_qk, d_v) <= hopper_limit, f"up to {hopper_limit}"
    else:
        fits = (d_qk <= 128 or (d_qk == 192 and version >= 91900)) and d_v <= 128
        limit = "up to 128, or 192 and 128 from cuDNN 9.19"
    yield Rule(sm is not None and not (fits and sixteenths), UNSUPPORTED, f"head size on compute capability {sm}",
               f"d_qk={d_qk}, d_v={d_v}", f"multiples of 16, {limit}, with fp8 tensors",
               "pad the heads with zeros")  # fmt: skip


def check_types(node: Attention, *fp8_ports: str) -> None:
    """Refuses inputs that are not in fp8 where they must be, or type combinations that cuDNN computes wrongly.

    Its engines (9.19 on an H200) read and write every tensor as if it had Q's type, and statistics as FLOAT.
    """
    for port in fp8_ports:
        dtype = node.inputs[port].data_type
        _apply(node, [Rule(dtype not in FP8, UNSUPPORTED, f"data type of {port}", dtype.name, "FP8_E4M3 or FP8_E5M2",
                           "convert it, or use sdpa()")])  # fmt: skip
    if fp8_ports:
        return
    q = node.inputs["Q"].data_type
    tensors = {**node.inputs, **node.outputs}
    rules = [
        Rule(q not in (data_type.HALF, data_type.BFLOAT16), UNSUPPORTED, "data type of Q", q.name, "HALF or BFLOAT16",
             "convert it, or build the graph with backend='reference'")
    ]  # fmt: skip
    for port in ("K", "V", "O", "dO", "dQ", "dK", "dV", "dBias"):
        dtype = tensors[port].data_type if port in tensors else q
        rules.append(
            Rule(dtype is not q, UNSUPPORTED, f"data type of {port}", f"{dtype.name} with {q.name} of Q", "the same",
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


def unified_unsupported_reason(node: AttentionForward, version: int) -> str:
    """Why cuDNN's one attention operation cannot be used; empty where it can. Minima as measured and documented."""
    inputs, outputs = node.inputs, node.outputs
    since = {
        "the operation itself": (True, 91301),
        "a block mask": ("Block_mask" in inputs, 91400),
        "a padding mask": (bool({"Seq_len_q", "Seq_len_kv"} & inputs.keys()), 91500),
        "paged attention": (node.is_paged, 91500),
        "bias": ("Bias" in inputs, 92100),
        "ALiBi": (node.use_alibi_mask, 92100),
        "a causal or sliding-window mask": (node.has_bounds or node.bottom_right, 92100),
        "a sink": ("Sink" in inputs, 92100),
        "a score modifier": (node.score_mod is not None, 92100),
        "an output of the largest score or the sum": (bool({"Max", "Sum_exp"} & outputs.keys()), 92100),
        "dropout": (node.dropout_probability > 0, 92200),
    }
    for feature, (used, minimum) in since.items():
        if used and version < minimum:
            return f"{feature} needs cuDNN {format_version(minimum)}, this is {format_version(version)}"
    if node.dropout_probability and "Stats" in outputs:
        return "dropout with statistics is not among its features"
    if "Dropout_mask" in inputs:
        return "a dropout mask of the user is not among its features"
    if node.compute_data_type is not data_type.FLOAT:
        return f"it computes in FLOAT only, not in {node.compute_data_type.name}"
    return ""


def refuse_composite(node: AttentionForward) -> None:
    """Refuses what only cuDNN's one attention operation has."""
    _apply(node, [
        Rule("Block_mask" in node.inputs, UNSUPPORTED, "block_mask", "the COMPOSITE implementation",
             "the UNIFIED one, cuDNN 9.14 or newer", "leave implementation out")
    ])  # fmt: skip
