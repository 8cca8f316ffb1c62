# No `from __future__ import annotations`: PyTorch reads the types.

from collections.abc import Sequence

import torch

from cudnn.api_base import check_tensor
from cudnn.errors import checked_number, make_error
from cudnn.full_precision import full_precision
from cudnn.gemm.formats import name_of
from cudnn.native_sparse_attention import reference
from cudnn.native_sparse_attention.top_k.api import check_choice
from cudnn.runtime.registration import autocast_type, custom_op, in_type
from cudnn.runtime.run import has_kernel, run
from cudnn_kernels.attention.sparse import ALWAYS, SparseDecodeConfiguration

_WHERE = "nsa_decode"
_SOURCE = "cudnn_kernels.attention.sparse_decode:Decode"
_HEADS = ((64, 64), (128, 128), (192, 128))
_MOST = 16  # heads of query for each of key
_VECTOR = 8  # elements in 16 bytes


def nsa_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    compressed_key: torch.Tensor,
    compressed_value: torch.Tensor,
    gates: torch.Tensor,
    lengths: torch.Tensor,
    compressed_lengths: torch.Tensor,
    *,
    block_size: int = 64,
    compress_stride: int = 32,
    selected_blocks: int = 16,
    window_size: int = 512,
    scale: float | None = None,
) -> torch.Tensor:
    """:func:`cudnn.ops.nsa_attention` of the newest row of each sequence, from caches of keys and values: one kernel.

    The row of sequence b is at the place ``lengths[b] - 1``, so its own key and value are in the caches already. It
    sees all ``compressed_lengths[b]`` compressed keys, chooses blocks by their probabilities, and attends to these and
    to the newest ``window_size`` rows, as the last row of ``nsa_attention`` does. There is no gradient. Lengths are
    read on the device, so a call can be captured in a CUDA graph and replayed as sequences grow.

    Args:
        query: ``[B, H_q, D]``, float16 or bfloat16; at most 16 heads for each of key. On the CPU also float32 and
            float64.
        key, value: caches, ``[B, H_kv, S, D]`` and ``[B, H_kv, S, D_v]``, with any strides but a last one of 1; those
            before are multiples of 16 bytes. D and D_v are 64, 128, or 192 and 128.
        compressed_key, compressed_value: the same with S_c rows.
        gates: ``[B, H_q, 3]``, of compression, selection and window.
        lengths, compressed_lengths: ``[B]``, int32: rows of the caches that there are, at most S and S_c; a length of 0
            gives 0.
        block_size, compress_stride, selected_blocks, window_size, scale: as those of ``nsa_attention``; block_size a
            multiple of 16.

    Returns:
        ``[B, H_q, D_v]``, in the type of query.

    Raises:
        TypeError: an argument that is no tensor, or no number.
        ValueError: shapes, types or sizes; on the CPU also lengths that the caches do not have.
        NotImplementedError: what the kernel does not have.
        RuntimeError: no kernel for the device.
    """
    for name, x in (
        ("query", query),
        ("key", key),
        ("value", value),
        ("compressed_key", compressed_key),
        ("compressed_value", compressed_value),
        ("gates", gates),
        ("lengths", lengths),
        ("compressed_lengths", compressed_lengths),
    ):
        check_tensor(_WHERE, name, x)
    if dtype := autocast_type(query):
        arguments = [query, key, value, compressed_key, compressed_value]
        query, key, value, compressed_key, compressed_value = in_type(arguments, dtype)
    d = query.shape[-1]
    check_choice(_WHERE, block_size, compress_stride, selected_blocks, window_size)
    if scale is not None and checked_number(_WHERE, "scale", scale) <= 0:
        raise make_error(ValueError, _WHERE, "scale", scale, "numbers above 0; None for D ** -0.5")
    caches = (key, value, compressed_key, compressed_value)
    _check(query, *caches, gates, lengths, compressed_lengths)
    sizes = (block_size, compress_stride, selected_blocks - ALWAYS, window_size)
    factor = d**-0.5 if scale is None else float(scale)
    return nsa_decode_step(query, *caches, gates, lengths, compressed_lengths, factor, *sizes)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ck: torch.Tensor,
    cv: torch.Tensor,
    gates: torch.Tensor,
    lengths: torch.Tensor,
    small: torch.Tensor,
) -> None:
    """Raises for tensors that do not fit together."""
    if q.ndim != 3 or k.ndim != 4 or ck.ndim != 4 or v.ndim != 4:
        got = [tuple(x.shape) for x in (q, k, v, ck)]
        raise make_error(ValueError, _WHERE, "shapes", got, "query [B, H, D], caches [B, H, S, D]")
    (b, hq, d), hk, dv = q.shape, k.shape[1], v.shape[3]
    if hk == 0 or hq % hk:
        raise make_error(ValueError, _WHERE, "heads of query", hq, f"multiples of the {hk} heads of key")
    wanted = {
        "key": (k, (b, hk, k.shape[2], d)),
        "value": (v, (b, hk, k.shape[2], dv)),
        "compressed_key": (ck, (b, hk, ck.shape[2], d)),
        "compressed_value": (cv, (b, hk, ck.shape[2], dv)),
        "gates": (gates, (b, hq, 3)),
        "lengths": (lengths, (b,)),
        "compressed_lengths": (small, (b,)),
    }
    for name, (x, shape) in wanted.items():
        if tuple(x.shape) != shape:
            raise make_error(ValueError, _WHERE, f"shape of {name}", tuple(x.shape), str(shape))
        dtype = torch.int32 if name.endswith("lengths") else None if name == "gates" else q.dtype
        if dtype not in (None, x.dtype):
            raise make_error(ValueError, _WHERE, f"type of {name}", x.dtype, str(dtype))


def _flops_of_step(
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    ck: Sequence[int],
    block_size: int,
    count: int,
    window: int,
) -> int:
    """Each row with the room for compressed keys, with the blocks of its list, and with its window."""
    keys = ck[2] + min((ALWAYS + count) * block_size, k[2]) + min(window, k[2])
    return 2 * q[0] * q[1] * keys * (q[2] + v[3])


@custom_op("nsa_decode_step", autocast=("q", "k", "v", "ck", "cv"), flops=_flops_of_step)
def nsa_decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ck: torch.Tensor,
    cv: torch.Tensor,
    gates: torch.Tensor,
    lengths: torch.Tensor,
    compressed_lengths: torch.Tensor,
    scale: float,
    block_size: int,
    compress_stride: int,
    count: int,
    window: int,
) -> torch.Tensor:
    """O, ``[B, H_q, D_v]``."""
    o = q.new_empty((*q.shape[:2], v.shape[3]))
    if not o.numel():
        return o
    if not q.is_cuda:
        for name, x, cache in (("lengths", lengths, k), ("compressed_lengths", compressed_lengths, ck)):
            if ((x < 0) | (x > cache.shape[2])).any():
                allowed = f"numbers from 0 to {cache.shape[2]}, the rows of the cache"
                raise make_error(ValueError, _WHERE, name, x.tolist(), allowed)
    if not (q.element_size() == 2 and has_kernel(q, _WHERE)):
        if q.is_cuda:
            raise make_error(ValueError, _WHERE, "type of query", q.dtype, "torch.float16 or torch.bfloat16")
        arguments = (q, k, v, ck, cv, gates, lengths.tolist(), compressed_lengths.tolist(), o)
        with full_precision():
            reference.decode(*arguments, scale, (block_size, compress_stride, count, window))
        return o
    heads, group = (q.shape[2], v.shape[3]), q.shape[1] // k.shape[1]
    if heads not in _HEADS or group > _MOST or block_size % 16:
        got = f"heads of {heads}, {group} for each of key, and blocks of {block_size}"
        allowed = f"heads of one of {_HEADS}, at most {_MOST} for each of key, blocks of a multiple of 16"
        raise make_error(NotImplementedError, _WHERE, "sizes", got, allowed)
    for name, x in (("query", q), ("key", k), ("value", v), ("compressed_key", ck), ("compressed_value", cv)):
        strides = [step for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
        if x.stride(-1) != 1 or any(step % _VECTOR for step in strides) or x.data_ptr() % 16:
            allowed = "1 last, multiples of 16 bytes before, and an address that is one"
            got = f"{x.stride()} at {x.data_ptr():#x}"
            raise make_error(ValueError, _WHERE, f"strides of {name}", got, allowed, f"pass {name}.contiguous()")
    gates = gates if gates.dtype in (torch.float16, torch.bfloat16) else gates.float()
    configuration = SparseDecodeConfiguration(
        name_of(q.dtype),
        name_of(gates.dtype),
        q.shape[1],
        k.shape[1],
        *heads,
        block_size,
        compress_stride,
        count,
        window,
    )
    scratch = torch.empty((*k.shape[:2], ck.shape[2]), dtype=torch.float32, device=q.device)
    caches = (x.transpose(1, 2) for x in (k, v, ck, cv))
    run(_SOURCE, configuration, q, *caches, gates, lengths, compressed_lengths, scratch, o, scale)
    return o


nsa_decode_step.register_fake(lambda q, k, v, *_: q.new_empty((*q.shape[:2], v.shape[3])))
