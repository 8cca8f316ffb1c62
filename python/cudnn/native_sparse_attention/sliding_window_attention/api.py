"""Sliding-window attention."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cudnn.api_base import APIBase, TupleDict, check_tensor
from cudnn.backend.handle import get_stream, resolve, set_stream
from cudnn.errors import checked_number, cudnnGraphNotSupportedError, make_error
from cudnn.fused.host import with_resolved_inputs
from cudnn.fused.object_cache import written
from cudnn.lazy import torch
from cudnn.runtime import launch

if TYPE_CHECKING:
    from torch import Tensor

_RAGGED = ("q", "k", "v", "o", "stats")  # tensors that may have offsets
_LENGTHS = ("seq_len_q", "seq_len_kv")
_OFFSETS = tuple(f"{name}_ragged_offset" for name in _RAGGED)


class SlidingWindowAttention(APIBase):
    """Attention of each row to a window of keys, forward: a graph of one attention node, which cuDNN runs.

        row i sees the keys  i - left_bound < j <= i + right_bound  of its sequence; row 0 and key 0 are level
        s = attn_scale * q k^T            o = softmax(s) v            stats = ln sum exp(s)

    A row that sees no key gets o = 0. It runs on every GPU that cuDNN supports attention on; on CPU tensors the
    reference executor runs it. An o of another type than q's is converted afterwards: cuDNN's engines accept one, but
    write it as if it had that of q.

    | tensor            | one length           | packed                | type                                          |
    |-------------------|----------------------|-----------------------|-----------------------------------------------|
    | q                 | (b, hq, sq, d)       | (tq, hq, d)           | float16, bfloat16; on the CPU also wider ones |
    | k, v              | (b, hk, sk, d or dv) | (tk, hk, d or dv)     | that of q                                     |
    | o                 | (b, hq, sq, dv)      | (tq, hq, dv)          | any floating-point type                       |
    | stats             | (b, hq, sq, 1)       | (tq, hq, 1)           | float32; None: not computed                   |
    | seq_len           | None                 | (b,)                  | int32: rows and keys of each sequence         |
    | ..._ragged_offset | None                 | (b + 1,), or all None | int64: the first element of each sequence     |

    Without ragged offsets, sequences follow each other: their first elements are found from the lengths, in every call.
    With one, all of them are required, that of stats if stats are returned.

    Args:
        sample_q ... sample_stats_ragged_offset: tensors like those that ``execute`` will get.
        left_bound: above 0. The row's own key is the first one that counts: 1 leaves no other key on the left.
        right_bound: keys beyond the row's own.
        max_seq_len_q, max_seq_len_kv: of sequences of several lengths, at least the longest.
        attn_scale: None: 1 / sqrt(d).
        intermediate_data_type, compute_data_type: types of the graph; ``cudnn.data_type`` or ``torch.dtype``.
        cudnn_handle: from ``cudnn.create_handle()``; None: one per thread and device, on PyTorch's current stream.
    """

    objects: ClassVar[dict[Any, Any]] = {}
    uncompiled = ValueError
    parameters: ClassVar[Mapping[str, str]] = {name: f"{name}_tensor" for name in (*_RAGGED, *_LENGTHS, *_OFFSETS)}

    def __init__(
        self,
        sample_q: Tensor,
        sample_k: Tensor,
        sample_v: Tensor,
        sample_o: Tensor,
        sample_stats: Tensor | None = None,
        left_bound: int = 0,
        right_bound: int = 0,
        sample_seq_len_q: Tensor | None = None,
        sample_seq_len_kv: Tensor | None = None,
        sample_q_ragged_offset: Tensor | None = None,
        sample_k_ragged_offset: Tensor | None = None,
        sample_v_ragged_offset: Tensor | None = None,
        sample_o_ragged_offset: Tensor | None = None,
        sample_stats_ragged_offset: Tensor | None = None,
        max_seq_len_q: int | None = None,
        max_seq_len_kv: int | None = None,
        attn_scale: float | None = None,
        intermediate_data_type: Any = torch.float32,
        compute_data_type: Any = torch.float32,
        cudnn_handle: Any = None,
    ) -> None:
        super().__init__()
        arguments = dict(locals())
        names = (*_RAGGED, *_LENGTHS, *_OFFSETS)
        self.descs = {name: self._describe(arguments[f"sample_{name}"], name) for name in names}
        self.packed = getattr(sample_q, "ndim", 0) == 3
        self.left_bound, self.right_bound = (
            self._count(name, arguments[name]) for name in ("left_bound", "right_bound")
        )
        self.longest = {x: self._count(f"max_seq_len_{x}", arguments[f"max_seq_len_{x}"]) for x in ("q", "kv")}
        self.attn_scale = None if attn_scale is None else checked_number(self._title(), "attn_scale", attn_scale)
        self.types = {"intermediate_data_type": intermediate_data_type, "compute_data_type": compute_data_type}
        self.handle = cudnn_handle
        self._built: Any = None
        self._refusal: Exception | None = None

    @classmethod
    def resolved(cls, tensors: Mapping[str, Any], stream: Any) -> Mapping[str, Any]:
        """Tensors by name, inputs that are negative views as copies: for the wrapper, which may allocate."""
        return with_resolved_inputs(cls._title(), tensors, ("o", "stats"), stream)

    def _count(self, name: str, value: Any) -> Any:
        """An argument of 0 and more, or None."""
        if value is not None and checked_number(self._title(), name, value, integer=True) < 0:
            raise make_error(ValueError, self._title(), name, value, "0 and more")
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Not there: call ``compile`` and ``execute``, as existing programs do.

        Raises:
            NotImplementedError: always.
        """
        raise make_error(NotImplementedError, self._title(), "a call", "the object", "compile(), then execute(...)")

    def check_support(self) -> bool:
        """False where cuDNN has no kernel for the graph, rather than an exception; ``compile`` raises the reason.

        Raises:
            ValueError: a tensor, or its shape.
        """
        self._check()
        if self._built is None:
            try:
                self._built = self._build()
            except (cudnnGraphNotSupportedError, RuntimeError) as error:
                self._refusal = error
                self._logger.info("not supported: %s", error)
        self._is_supported = self._built is not None
        return self._is_supported

    def compile(self) -> None:
        """Builds the graph, where ``check_support`` did not.

        Raises:
            cudnnGraphNotSupportedError, RuntimeError: cuDNN has no kernel for it.
        """
        if not self._is_supported and not self.check_support() and self._refusal is not None:
            raise self._refusal
        self._compiled_kernel = self._built

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_tensor: Tensor,
        k_tensor: Tensor,
        v_tensor: Tensor,
        o_tensor: Tensor,
        stats_tensor: Tensor | None = None,
        seq_len_q_tensor: Tensor | None = None,
        seq_len_kv_tensor: Tensor | None = None,
        q_ragged_offset_tensor: Tensor | None = None,
        k_ragged_offset_tensor: Tensor | None = None,
        v_ragged_offset_tensor: Tensor | None = None,
        o_ragged_offset_tensor: Tensor | None = None,
        stats_ragged_offset_tensor: Tensor | None = None,
        current_stream: Any = None,
        cudnn_handle: Any = None,
        skip_compile: bool = False,
    ) -> None:
        """Writes ``o_tensor`` and ``stats_tensor``. The workspace is allocated here.

        It runs on ``current_stream``, else on the stream of the handle, else on PyTorch's current stream, which in any
        case comes after it. The host does not wait.

        Raises:
            ValueError: not compiled yet, or a tensor is not like its sample.
            NotImplementedError: ``skip_compile``.
        """
        arguments = dict(locals())
        if skip_compile:
            raise make_error(NotImplementedError, self._title(), "skip_compile", True, "False", "call compile() first")
        if self._compiled_kernel is None:
            raise self._not_compiled()
        tensors = {name: arguments[f"{name}_tensor"] for name in self.descs}
        for name, tensor in tensors.items():
            self._check_like_sample(name, tensor)
        graph, ports = self._compiled_kernel
        handle = cudnn_handle if cudnn_handle is not None else self.handle
        with _ordered(q_tensor.device, current_stream, handle):
            if o_tensor.dtype != q_tensor.dtype:
                strided = o_tensor.shape, o_tensor.stride()
                empty = torch.empty_strided(*strided, dtype=q_tensor.dtype, device=q_tensor.device)
                tensors["o"] = empty.copy_(o_tensor)  # what no sequence has stays
            data = {ports[name]: tensor for name, tensor in self._arguments(tensors).items()}
            workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=q_tensor.device)
            graph.execute(data, workspace, handle=handle)
            if tensors["o"] is not o_tensor:
                o_tensor.copy_(tensors["o"])

    def _check(self) -> None:
        """Raises for samples that do not fit together."""
        rank = 3 if self.packed else 4
        form = "(t, h, d)" if self.packed else "(b, h, s, d)"
        for name in ("q", "k", "v", "o"):
            desc = self.descs[name]
            if desc is None or desc.ndim != rank:
                got = "None" if desc is None else f"the shape {desc.shape}"
                raise make_error(ValueError, self._title(), f"{name} tensor", got, "(b, h, s, d), or (t, h, d), as q")
        described = {name for name, desc in self.descs.items() if desc is not None}
        several = {*described & {*_LENGTHS, *_OFFSETS}, *(f"max_seq_len_{x}" for x, n in self.longest.items() if n)}
        if not self.packed and several:
            hint = "pass them with q of the shape (t, h, d)"
            raise make_error(ValueError, self._title(), ", ".join(sorted(several)), f"values for {form}", "None", hint)
        needed = {*_LENGTHS, "max_seq_len_q", "max_seq_len_kv"}
        if self.packed and not needed <= several:
            missing = ", ".join(sorted(needed - several))
            raise make_error(ValueError, self._title(), missing, "None", f"values, for q of the shape {form}")
        offsets = {f"{name}_ragged_offset" for name in _RAGGED if name in described}
        if described & {*_OFFSETS} not in (set(), offsets):
            got = ", ".join(sorted(described & {*_OFFSETS}))
            raise make_error(ValueError, self._title(), "ragged offsets", got, f"none, or {', '.join(sorted(offsets))}")
        self._check_shapes()

    def _check_shapes(self) -> None:
        q, k, v = (self._of(name) for name in "qkv")
        rows = slice(0, 1) if self.packed else slice(2, 3)
        heads = 1
        if k.shape[heads] == 0 or q.shape[heads] % k.shape[heads]:
            allowed = f"multiples of the {k.shape[heads]} heads of k"
            raise make_error(ValueError, self._title(), "heads of q", q.shape[heads], allowed)
        d, dv = q.shape[-1], v.shape[-1]
        self._check_shape(k, (*(q.shape[:1] if not self.packed else k.shape[:1]), k.shape[1], *k.shape[2:-1], d))
        self._check_shape(v, (*k.shape[:-1], dv))
        self._check_shape(self.descs["o"], (*q.shape[:-1], dv))
        stats = self.descs["stats"]
        self._check_shape(stats, (*q.shape[:-1], 1))
        self._check_dtype(stats, torch.float32)
        for name in ("k", "v"):
            self._check_dtype(self._of(name), q.dtype)
        if not self._of("o").dtype.is_floating_point:
            raise self._refuse("o tensor dtype", self._of("o").dtype, "floating-point types")
        if self.packed:
            count = self._of("seq_len_q").shape[0]
            for name in (*_LENGTHS, *_OFFSETS):
                desc = self.descs[name]
                if desc is not None and math.prod(desc.shape) != count + (name in _OFFSETS):
                    allowed = f"{count + (name in _OFFSETS)} integers"
                    raise make_error(ValueError, self._title(), name, f"the shape {desc.shape}", allowed)
        if 0 in (*q.shape[rows], *k.shape[rows]):
            raise make_error(ValueError, self._title(), "rows of q and k", 0, "1 and more")

    def _of(self, name: str) -> Any:
        desc = self.descs[name]
        assert desc is not None
        return desc

    def _build(self) -> Any:
        """The graph, and its tensors by name."""
        from cudnn.attention.graphs import describe_forward
        from cudnn.pygraph.operator_graphs import backend, build

        inputs, outputs = {}, {}
        for name in _RAGGED:
            if self.descs[name] is not None:
                (outputs if name in ("o", "stats") else inputs)[name] = self._stand_in(name)
        if self.packed:
            count = self._of("seq_len_q").shape[0]
            lengths, starts = ((count, 1, 1, 1), torch.int32), ((count + 1, 1, 1, 1), torch.int64)
            inputs |= {name: torch.empty(lengths[0], dtype=lengths[1], device="meta") for name in _LENGTHS}
            for name in (*inputs.keys() & {*_RAGGED}, *outputs):
                inputs[f"offset_{name}"] = torch.empty(starts[0], dtype=starts[1], device="meta")
        options = {
            "attn_scale": self.attn_scale or self._of("q").shape[-1] ** -0.5,
            "diagonal_band_left_bound": self.left_bound,
            "diagonal_band_right_bound": self.right_bound,
            "generate_stats": self.descs["stats"] is not None,
        }
        device = self._of("q").device
        with torch.cuda.device(device if device.type == "cuda" else -1):
            graph_options = {**backend(device), **self.types, "handle": self.handle}
            return build(describe_forward, inputs, outputs, options, graph_options)

    def _stand_in(self, name: str) -> Any:
        """A matrix as the graph has it: (b, h, s, d), for varlen sequences the rows of the longest."""
        desc = self._of(name)
        shape, stride = desc.shape, desc.stride
        if self.packed:
            longest = self.longest["kv" if name in ("k", "v") else "q"] or 0
            (_, heads, width), (row, head, one) = shape, stride
            shape = (self._of("seq_len_q").shape[0], heads, longest, width)
            stride = (longest * row, head, row, one)
        dtype = self._of("q").dtype if name == "o" else desc.dtype
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def _arguments(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """What the graph takes, by name."""
        ragged = {name: tensors[name] for name in _RAGGED if tensors[name] is not None}
        if not self.packed:
            return ragged
        lengths = {name: tensors[name].flatten().int() for name in _LENGTHS}
        starts = {name: torch.nn.functional.pad(x.long().cumsum(0), (1, 0)) for name, x in lengths.items()}
        for name in tuple(ragged):
            offset = tensors[f"{name}_ragged_offset"]
            if offset is None:
                first_rows = starts["seq_len_kv" if name in ("k", "v") else "seq_len_q"]
                offset = first_rows * tensors[name].stride(0)
            ragged[f"offset_{name}"] = offset.flatten().long().view(-1, 1, 1, 1)
        return {**ragged, **{name: x.view(-1, 1, 1, 1) for name, x in lengths.items()}}

    def _check_like_sample(self, name: str, tensor: Any) -> None:
        desc = self.descs[name]
        if (tensor is None) != (desc is None):
            got, allowed = ("None", "a tensor") if tensor is None else ("a tensor", "None")
            raise make_error(ValueError, self._title(), f"{name} tensor", got, f"{allowed}, as the sample")
        if desc is None:
            return
        check_tensor(self._title(), name, tensor)
        actual = self._describe(tensor, name)
        rows = desc.shape[:1] if not self.packed else tensor.shape[:1]
        self._check_shape(actual, (*rows, *desc.shape[1:]))
        if name in _RAGGED:
            self._check_stride(actual, desc.stride)
            self._check_dtype(actual, desc.dtype)


@contextlib.contextmanager
def _ordered(device: Any, stream: Any, handle: Any) -> Any:
    """Work within runs on a stream, or a handle's, between what PyTorch's current stream has and what it gets later."""
    if device.type != "cuda":
        yield
        return
    number = device.index if device.index is not None else torch.cuda.current_device()
    with torch.cuda.device(number):
        current = torch.cuda.current_stream()
        address = current.cuda_stream
        if stream is not None:
            address = launch.raw_stream(stream, number)
        elif handle is not None:
            address = get_stream(handle)
        if handle is not None and get_stream(handle) != address:
            set_stream(resolve(handle), address)
        if address == current.cuda_stream:
            yield
            return
        other = torch.cuda.ExternalStream(address)
        other.wait_stream(current)
        with torch.cuda.stream(other):
            yield
        current.wait_stream(other)


def sliding_window_attention_wrapper(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    seq_len_q_tensor: Tensor | None = None,
    seq_len_kv_tensor: Tensor | None = None,
    q_ragged_offset_tensor: Tensor | None = None,
    k_ragged_offset_tensor: Tensor | None = None,
    v_ragged_offset_tensor: Tensor | None = None,
    o_ragged_offset_tensor: Tensor | None = None,
    stats_ragged_offset_tensor: Tensor | None = None,
    left_bound: int = 0,
    right_bound: int = 0,
    is_infer: bool = False,
    attn_scale: float | None = None,
    o_dtype: Any = None,
    intermediate_data_type: Any = torch.float32,
    compute_data_type: Any = torch.float32,
    cudnn_handle: Any = None,
    stream: Any = None,
) -> TupleDict:
    """Allocates the results, builds the graph if needed, and executes: ``o_tensor, stats_tensor``.

    ``stats_tensor`` is None with ``is_infer``. The host reads the lengths of sequences, to find the longest. Arguments
    and errors as those of :class:`SlidingWindowAttention`. o has ``o_dtype``, or q's type, and q's order of strides.
    """
    SlidingWindowAttention.check_required(q=q_tensor, v=v_tensor)
    packed = q_tensor.ndim == 3
    o = torch.empty((*q_tensor.shape[:-1], v_tensor.shape[-1]), dtype=o_dtype or q_tensor.dtype, device=q_tensor.device)
    if not packed and q_tensor.stride(1) < q_tensor.stride(2):
        o = torch.empty_like(o.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    stats = None
    if not is_infer:
        stats = torch.empty((*q_tensor.shape[:-1], 1), dtype=torch.float32, device=q_tensor.device)
    lengths = (seq_len_q_tensor, seq_len_kv_tensor)
    longest = (int(x.max()) if packed and x is not None and x.numel() else None for x in lengths)
    max_seq_len_q, max_seq_len_kv = longest
    if is_infer:
        stats_ragged_offset_tensor = None
    return written(SlidingWindowAttention, locals(), o=o, stats=stats)


_cache_of_SlidingWindowAttentionObjects = SlidingWindowAttention.objects  # noqa: N816
