"""The base of the dense fused GEMMs: one GEMM or a batch, their tensors and the cache keys of their objects."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from cudnn import settings
from cudnn.errors import make_error
from cudnn.fused import registry
from cudnn.fused.gemm import ONE, OPERAND_TYPES, FusedGemm, OperandType
from cudnn.fused.host import FusedAPI
from cudnn.fused.layouts import BlockScales, Matrix, TensorSpec
from cudnn.fused.wrapper import allocate
from cudnn.gemm.formats import BLOCK_SCALED, BLOCKWISE_DTYPE, BLOCKWISE_SIZE, FLOAT4, FLOAT8, PLAIN, SCALES
from cudnn.lazy import torch
from cudnn_kernels.schedule import Dense


def operands(scales: tuple[str, ...] = SCALES) -> tuple[TensorSpec, ...]:
    """A, B and their scale factors of the types ``scales``."""
    types = tuple(dict.fromkeys([*PLAIN, *BLOCK_SCALED]))
    return (
        TensorSpec("a", Matrix("m", "k", "mk"), types, about="four-bit elements with sfa only"),
        TensorSpec("b", Matrix("n", "k", "nk"), types, same_dtype="a"),
        TensorSpec("sfa", BlockScales("m", "k"), (*scales, BLOCKWISE_DTYPE), optional=True),
        TensorSpec(
            "sfb", BlockScales("n", "k", shared="sfb_rows"), (*scales, BLOCKWISE_DTYPE), optional=True, same_dtype="sfa"
        ),
    )


def amax(dimensions: int, optional: bool = True) -> TensorSpec:
    """The largest magnitude: atomic max into the tensor. Wrappers allocate it with ``dimensions`` dimensions."""
    return TensorSpec(
        "amax",
        ONE,
        ("float32",),
        optional,
        fill=float("-inf"),
        written=True,
        padding=dimensions - 1,
        about="the caller fills it with -inf",
    )


def quantizer(name: str, columns: str) -> tuple[TensorSpec, ...]:
    """The scale factors of a result with ``columns`` columns, and its normalization constant."""
    constant = "what the largest element of a block becomes, as a share of its type's limit"
    return (
        TensorSpec(
            name,
            BlockScales("m", columns),
            (*SCALES, BLOCKWISE_DTYPE),
            optional=True,
            same_dtype="sfa",
            written=True,
            about="with 8 bits",
        ),
        TensorSpec("norm_const", ONE, ("float32",), optional=True, init=0.01, about=constant),
    )


class DenseGemm(FusedGemm):
    """A GEMM of one matrix or of a batch of them."""

    schedule: ClassVar[Any] = Dense()
    example = (("m", "n", "k"), (128, 128, 64))
    aot_dtypes = ("bf16", "fp16", "fp8", "fp8_128", "mxfp8", "nvfp4")
    aot_shapes = ((4096, 128, 4096), (4096, 4096, 4096), (8192, 28672, 4096))
    vectors = (16, 32, BLOCKWISE_SIZE)

    alpha: float = 1.0

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        """Sizes by name: those of a (m, k, l) and b (n, k, l), ``columns`` of a result, ``vector`` to a scale factor.

        Raises:
            ValueError: they have not three dimensions each, or one of size 0.
        """
        for name, dims in (("a", "(m, k, l)"), ("b", "(n, k, l)")):
            if len(shapes[name]) != 3:
                got, allowed = f"the shape {tuple(shapes[name])}", f"three dimensions, {dims}"
                hint = f"pass {name}.unsqueeze(-1), a batch of one" if len(shapes[name]) == 2 else ""
                raise make_error(ValueError, cls._title(), f"{name} tensor", got, allowed, hint)
        (m, k, batch), n = shapes["a"], shapes["b"][0]
        if min(n, k, batch) < 1:
            raise make_error(ValueError, cls._title(), "sizes", f"n={n}, k={k}, l={batch}", "at least 1")
        scaled = {"vector": options["sf_vec_size"], "sfb_rows": options.get("sfb_rows", BLOCKWISE_SIZE)}
        return {"m": m, "n": n, "k": k, "l": batch, "columns": n // cls.pairs, **scaled}

    # The wrapper's cache key, and AOT presets.

    @classmethod
    def aot_preset(cls, dtype: str, shape: tuple[int, ...], arch: str) -> Iterable[FusedAPI]:
        """K-major operands, as wrappers get them from row-major matrices, and the class's default tile; results in the
        16-bit type, without what is optional, and as the wrapper chooses.
        """
        operand_type = OPERAND_TYPES[dtype]
        tensors = {
            name: x
            for name, x in empty_tensors(cls, (*shape, 1), operand_type, "meta").items()
            if name not in cls.returns
        }
        parameters = inspect.signature(registry.wrapper(cls.folder())).parameters.values()
        types = [p for p in parameters if p.name.endswith("_dtype") and p.name not in cls.hints]
        absent = {p.name: None for p in types if cls.spec(p.name.removesuffix("_dtype")).optional}
        out_types = {p.name: getattr(torch, operand_type.out) for p in types}
        missing = dict.fromkeys(spec.name for spec in cls.tensors)
        majors = {p.name: "n" for p in parameters if p.name.endswith("_major")}
        options = {"sf_vec_size": operand_type.vector} if operand_type.scale else {}
        chosen = [out_types, {**out_types, **absent}, {p.name: p.default for p in types}]
        for choice in [each for i, each in enumerate(chosen) if each not in chosen[:i]]:
            results = cls.results({**missing, **tensors, **majors, **choice, "sf_vec_size": operand_type.vector})
            allocated = allocate(cls, tensors, {**cls.defaults(), **options}, results)
            constructor: Any = cls
            api = constructor(**cls.samples({**tensors, **allocated}), **options, arch=arch)
            try:
                api.check_support()
            except (ValueError, NotImplementedError):
                if choice is out_types:
                    raise
                continue  # the wrapper's own choice is not one for all operands
            yield api

    @classmethod
    def cache_key(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Types, strides and sizes, as far as those are static."""
        types = tuple((name, None if t is None else (t.dtype, t.device)) for name, t in tensors.items())
        if not (settings.GEMM_DYNAMIC_M.get() or settings.GEMM_DYNAMIC_MNKL.get()):
            return types + tuple(None if t is None else (t.shape, t.stride()) for t in tensors.values())
        layouts = [(cls.spec(name).layout, tensor) for name, tensor in tensors.items()]
        matrices = [(layout, tensor) for layout, tensor in layouts if isinstance(layout, Matrix)]
        majors = tuple(layout.major(tensor.shape, tensor.stride()) for layout, tensor in matrices)
        fixed = () if settings.GEMM_DYNAMIC_MNKL.get() else (tensors["a"].shape[1:], tensors["b"].shape)
        return (*types, *majors, *fixed, cls.rows_of_block(tensors.get("b"), tensors.get("sfb")))


def empty_tensors(
    api: type[DenseGemm],
    shape: Sequence[int],
    operand_type: OperandType,
    device: Any,
    *,
    out: str = "",
    side: str = "",
    majors: str = "kkn",
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """Tensors for a problem (m, n, k, l), by name, not initialized but for what kernels add to.

    The last result has the type ``out``, other matrices the type ``side``, both 16 bits where not given. Optional
    results are there where these types need them, but for those in ``without``; optional inputs only if they must be.
    """
    m, n, k, batch = shape
    sizes = api.sizes_of(
        {"a": (m, k, batch), "b": (n, k, batch)}, {**api.defaults(), "sf_vec_size": operand_type.vector}
    )
    result, scales = api.result
    out, side = out or operand_type.out, side or operand_type.out
    types = {
        "a": operand_type.element,
        "b": operand_type.element,
        "sfa": operand_type.scale,
        "sfb": operand_type.scale,
        result: out,
    }
    types[scales] = BLOCKWISE_DTYPE if operand_type.vector == BLOCKWISE_SIZE else SCALES[0]
    absent = {
        *without,
        *(() if operand_type.scale else ("sfa", "sfb")),
        *(() if out in FLOAT8 else (scales, "norm_const")),
    }
    if not (operand_type.element in (FLOAT4, "uint8") and out == operand_type.out):
        absent |= {spec.name for spec in api.tensors if spec.name == "amax" and spec.optional}
    absent |= {spec.name for spec in further_inputs(api) if spec.optional}
    tensors: dict[str, Any] = {}
    for spec in api.tensors:
        if spec.name in absent:
            continue
        name = types.get(spec.name, side if isinstance(spec.layout, Matrix) else spec.types[0])
        major = {"a": majors[0], "b": majors[1]}.get(spec.name, majors[2])
        element = FLOAT4 if name == "uint8" else name
        tensor = spec.layout.allocate(sizes, major, getattr(torch, element), device)
        tensors[spec.name] = tensor.view(torch.uint8) if name == "uint8" else tensor
        if spec.fill is not None:
            tensor.fill_(spec.fill)
    return tensors


def further_inputs(api: type[DenseGemm]) -> list[TensorSpec]:
    """Inputs other than the operands and the normalization constant."""
    excluded = ("a", "b", "sfa", "sfb", "norm_const", *api.returns)
    return [spec for spec in api.tensors if spec.name not in excluded]
