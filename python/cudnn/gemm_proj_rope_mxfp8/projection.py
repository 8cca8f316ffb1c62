"""GEMM + RoPE + MXFP8, as Transformer Engine calls it for MLA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from cudnn.api_base import TupleDict
from cudnn.errors import make_error
from cudnn.full_precision import full_precision
from cudnn.fused.host import FusedAPI, derived
from cudnn.fused.layouts import Contiguous, Sizes, TensorSpec
from cudnn.fused.object_cache import cache_object
from cudnn.gemm import reference
from cudnn.lazy import torch
from cudnn.runtime.call import KernelPlan, kernel_plan
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.gemm.projection import (
    BLOCK,
    E4M3,
    EPILOGUE,
    HEAD,
    ROTARY,
    ROTATION,
    ProjectionConfiguration,
    problem,
)

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 128
"""Rows of x come in multiples."""


def angles() -> tuple[TensorSpec, ...]:
    """The cosines and sines."""
    return tuple(TensorSpec(name, Contiguous("m", ROTARY), ("bfloat16",)) for name in ("cos", "sin"))


RESULTS = tuple(
    TensorSpec(name, Contiguous(rows, "heads", columns, alignment=alignment), (dtype,), written=True)
    for side, groups, each in (("row", "m", HEAD // BLOCK), ("col", "groups", HEAD))
    for name, rows, columns, dtype, alignment in (
        (f"out_fp8_{side}", "m", HEAD, E4M3, 16),
        (f"out_scales_{side}", groups, each, "uint8", 1),
    )
)


class Projection(FusedAPI):
    """What both forms share."""

    counted = False
    returns = tuple(spec.name for spec in RESULTS)
    example = (("m", "n", "k"), (TOKENS, 2 * HEAD, 128))
    aot_shapes = ((4096, 16 * HEAD, 1536),)
    operand_dtype: ClassVar[str]
    step: ClassVar[int]  # of k
    forms: ClassVar[Sequence[bool]]  # of ``w_out_in``

    w_out_in: bool

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        """Sizes by name: ``m`` tokens, ``n`` columns of ``heads``, ``k``, ``groups`` of rows, ``blocks`` along k."""
        for name in cls.sized_by:
            if len(shapes[name]) != 2:
                got = f"the shape {tuple(shapes[name])}"
                raise make_error(ValueError, cls._title(), name, got, "two dimensions")
        (m, k), w = (shapes[name] for name in cls.sized_by)
        n = w[0] if options["w_out_in"] else w[1]
        for name, size, step in (("tokens", m, TOKENS), ("columns", n, cls.columns()), ("k", k, cls.step)):
            if size % step or (not size and name != "tokens"):
                raise make_error(ValueError, cls._title(), name, size, f"multiples of {step}")
        rows = (n, k) if options["w_out_in"] else (k, n)
        return {
            "m": m,
            "n": n,
            "k": k,
            "l": 1,
            "heads": n // HEAD,
            "groups": m // BLOCK,
            "blocks": k // BLOCK,
            "w_rows": rows[0],
            "w_columns": rows[1],
        }

    @classmethod
    def columns(cls) -> int:
        """The multiple that the columns of the GEMM have to be."""
        return HEAD

    def check_rules(self, sizes: Sizes) -> None:
        """Sizes are all that there is to refuse."""

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        gemm = ARCHITECTURES[arch].configure(problem(self.operand_dtype, self.w_out_in, sizes["n"], sizes["k"]))
        return kernel_plan(arch, ProjectionConfiguration.of(gemm), gemm.cluster)

    def reference(self, tensors: Mapping[str, Any]) -> None:
        q = self.product(tensors)
        m, n = q.shape
        views = {name: tensors[name].view(m, -1, 1) for name in ("out_fp8_row", "out_scales_row", "out_fp8_col")}
        views["out_scales_col"] = tensors["out_scales_col"].view(-1, n, 1).transpose(0, 1)
        reference.evaluate(EPILOGUE, q.unsqueeze(2), {**tensors, **views})

    def product(self, tensors: Mapping[str, Any]) -> Any:
        """The queries (m, n), before they are rotated, in float32."""
        raise NotImplementedError

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        return {spec.name: (getattr(torch, spec.types[0]), "") for spec in RESULTS}

    @classmethod
    def aot_preset(cls, dtype: str, shape: tuple[int, ...], arch: str) -> Iterable[FusedAPI]:
        m, n, k = shape
        for w_out_in in cls.forms:
            w = (n, k) if w_out_in else (k, n)
            sizes = cls.sizes_of(dict(zip(cls.sized_by, ((m, k), w), strict=True)), {"w_out_in": w_out_in})
            made_by: Any = cls
            options = {"w_out_in": w_out_in} if len(cls.forms) > 1 else {}
            tensors = {
                spec.name: spec.layout.allocate(sizes, "", getattr(torch, spec.types[0]), "meta")
                for spec in cls.tensors
            }
            yield made_by(**cls.samples(tensors), **options, arch=arch)


class GemmProjRopeMxfp8Bf16InSm100(Projection):
    """MLA's query projection in bfloat16: a GEMM, rotary embeddings, and quantization to MXFP8 by rows and by columns.

        q = x w^T                              accumulated in float32, rounded to bfloat16; heads of 192 columns
        q[128 + i] = r[2 i] * cos[i] - r[2 i + 1] * sin[i]                 of every head, r = q[128:192], 0 <= i < 32;
        q[160 + i] = r[2 i + 1] * cos[32 + i] + r[2 i] * sin[32 + i]       in float32, not rounded again

    ``out_fp8_row`` are the codes of q with a scale factor for 32 neighboring columns of a head, in ``out_scales_row``;
    ``out_fp8_col`` those with a factor for 32 neighboring tokens of a column, in ``out_scales_col``. A factor is
    max |q| / 448, rounded up to a power of two, as float8_e8m0fnu's bits; codes are rounded to nearest, even at ties.

    All tensors are contiguous. m is a multiple of 128, n of 192, k of 8. With ``w_out_in``, w is (n, k), else (k, n).

    Raises:
        ValueError: in ``check_support``, for shapes, strides and types.
    """

    title = "GEMM + RoPE + MXFP8"
    tensors = (
        TensorSpec("x", Contiguous("m", "k"), ("bfloat16",)),
        TensorSpec("w", Contiguous("w_rows", "w_columns"), ("bfloat16",), about="(n, k), or (k, n)"),
        *angles(),
        *RESULTS,
    )
    sized_by = ("x", "w")
    aot_dtypes = ("bf16",)
    operand_dtype, step, forms = "bfloat16", 8, (True, False)

    def __init__(
        self,
        sample_x: Tensor,
        sample_w: Tensor,
        sample_cos: Tensor,
        sample_sin: Tensor,
        sample_out_fp8_row: Tensor,
        sample_out_scales_row: Tensor,
        sample_out_fp8_col: Tensor,
        sample_out_scales_col: Tensor,
        w_out_in: bool = False,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor,
        w: Tensor,
        cos: Tensor,
        sin: Tensor,
        out_fp8_row: Tensor,
        out_scales_row: Tensor,
        out_fp8_col: Tensor,
        out_scales_col: Tensor,
        current_stream: Any = None,
    ) -> None:
        """Writes the results. See :attr:`FusedAPI.run`."""

    def product(self, tensors: Mapping[str, Any]) -> Any:
        return tensors["x"].float() @ _transposed(tensors["w"], not self.w_out_in).float().t()


class GemmProjRopeMxfp8Mxfp8InSm100(Projection):
    """:class:`GemmProjRopeMxfp8Bf16InSm100` for x (m, k) and w (n, k) of float8_e4m3fn with scale factors.

    The scale factors are float8_e8m0fnu's bits for 32 neighboring elements along k, (m, k / 32) and (n, k / 32), row
    by row. k is a multiple of 32, and the heads are even in number. On sm_90a, whose tensor cores know no block scales,
    the operands are dequantized to bfloat16 in a workspace of the call.
    """

    title = "GEMM + RoPE + MXFP8"
    tensors = (
        TensorSpec("x_code", Contiguous("m", "k"), (E4M3,)),
        TensorSpec("x_scale", Contiguous("m", "blocks", alignment=1), ("uint8",)),
        TensorSpec("w_code", Contiguous("n", "k"), (E4M3,)),
        TensorSpec("w_scale", Contiguous("n", "blocks", alignment=1), ("uint8",)),
        *angles(),
        *RESULTS,
    )
    sized_by = ("x_code", "w_code")
    aot_dtypes = ("mxfp8",)
    operand_dtype, step, forms = E4M3, BLOCK, (True,)
    w_out_in = True

    def __init__(
        self,
        sample_x_code: Tensor,
        sample_x_scale: Tensor,
        sample_w_code: Tensor,
        sample_w_scale: Tensor,
        sample_cos: Tensor,
        sample_sin: Tensor,
        sample_out_fp8_row: Tensor,
        sample_out_scales_row: Tensor,
        sample_out_fp8_col: Tensor,
        sample_out_scales_col: Tensor,
        arch: str | None = None,
    ) -> None:
        super().__init__({**locals(), "w_out_in": True})

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x_code: Tensor,
        x_scale: Tensor,
        w_code: Tensor,
        w_scale: Tensor,
        cos: Tensor,
        sin: Tensor,
        out_fp8_row: Tensor,
        out_scales_row: Tensor,
        out_fp8_col: Tensor,
        out_scales_col: Tensor,
        current_stream: Any = None,
    ) -> None:
        """Writes the results. See :attr:`FusedAPI.run`."""

    @classmethod
    def columns(cls) -> int:
        return 2 * HEAD

    def product(self, tensors: Mapping[str, Any]) -> Any:
        x, w = (
            tensors[f"{name}_code"].float() * _values(tensors[f"{name}_scale"]).repeat_interleave(BLOCK, 1)
            for name in "xw"
        )
        return x @ w.t()


def gemm_proj_rope_mxfp8_wrapper_sm100(
    x: Tensor,
    w: Tensor,
    cos: Tensor,
    sin: Tensor,
    x_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    w_out_in: bool = True,
    stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``out_fp8_row, out_scales_row, out_fp8_col, out_scales_col``. x and w are of bfloat16, as
    :class:`GemmProjRopeMxfp8Bf16InSm100` has them, or of float8_e4m3fn with ``x_scale`` and ``w_scale``, as
    :class:`GemmProjRopeMxfp8Mxfp8InSm100`; then w and w_scale are copied where they are (k, n). ``stream`` may be an
    int, a ``CUstream`` or a ``torch.cuda.Stream``; None: PyTorch's current stream. Nothing is recorded for autograd.

    Raises:
        AssertionError: types that do not go together, scale factors that are missing or too many.
        ValueError: shapes and strides.
    """
    where, scaled = "gemm_proj_rope_mxfp8", x.dtype == torch.float8_e4m3fn
    if x.dtype != w.dtype:
        raise make_error(AssertionError, where, "w dtype", w.dtype, f"{x.dtype}, that of x")
    if x.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        raise make_error(AssertionError, where, "x dtype", x.dtype, "torch.bfloat16, torch.float8_e4m3fn")
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        if (scale is not None) != scaled:
            got, allowed = ("None", "a tensor") if scaled else ("a tensor", "None")
            raise make_error(AssertionError, where, name, got, f"{allowed}, for {x.dtype}")
    api: Any = GemmProjRopeMxfp8Mxfp8InSm100 if scaled else GemmProjRopeMxfp8Bf16InSm100
    if scaled and not w_out_in:
        w, w_scale = _transposed(w, True).contiguous(), _transposed(w_scale, True).contiguous()
    key = (x.shape, w.shape, w_out_in, x.device)
    sizes = api.sizes_of(dict(zip(api.sized_by, (x.shape, w.shape), strict=True)), {"w_out_in": scaled or w_out_in})
    out = {
        name: api.spec(name).layout.allocate(sizes, "", dtype, x.device) for name, (dtype, _) in api.results({}).items()
    }
    inputs = (x, x_scale, w, w_scale, cos, sin) if scaled else (x, w, cos, sin)
    objects = _mxfp8in_obj_cache if scaled else _bf16in_obj_cache
    operation = objects.get(key)
    if operation is None:
        operation = api(*inputs, *out.values(), **({} if scaled else {"w_out_in": w_out_in}))
        operation.check_support()
        operation.compile()
        cache_object(objects, key, operation)
    operation.execute(*inputs, *out.values(), current_stream=stream)
    return TupleDict(out)


_bf16in_obj_cache = GemmProjRopeMxfp8Bf16InSm100.objects
_mxfp8in_obj_cache = GemmProjRopeMxfp8Mxfp8InSm100.objects


@full_precision()
def gemm_proj_rope_mxfp8_reference(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, w_out_in: bool = False) -> Any:
    """The rotated queries (m, n / 192, 192) in float32, neither rounded to bfloat16 nor quantized."""
    values = {"x": (x.float() @ _transposed(w, not w_out_in).float().t()).unsqueeze(2)}
    for operation in ROTATION:
        reference.REFERENCES[type(operation)](operation, values, {"cos": cos, "sin": sin})
    return values["x"].view(x.shape[0], -1, HEAD)


def _transposed(w: Any, transposed: bool) -> Any:
    """A matrix, or its transpose."""
    if transposed and w.ndim != 2:
        raise make_error(ValueError, "gemm_proj_rope_mxfp8", "w", f"the shape {tuple(w.shape)}", "two dimensions")
    return w.t() if transposed else w


def _values(codes: Any) -> Any:
    """The scale factors that are bits of float8_e8m0fnu, in float32."""
    return codes.view(torch.float8_e8m0fnu).float()
