"""The base of the grouped fused GEMMs (varlen_m): consecutive rows of A belong to experts, each with a matrix B."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cudnn import settings
from cudnn.api_base import ceil_div, check_rank
from cudnn.errors import make_error
from cudnn.fused import pointer_arrays, registry
from cudnn.fused.gemm import NARROW, ONE, OPERAND_TYPES, FusedGemm
from cudnn.fused.host import ALIGNMENT, FusedAPI
from cudnn.fused.layouts import (
    BlockScales,
    Column,
    Columns,
    Contiguous,
    Each,
    FirstOf,
    Layout,
    Matrix,
    OneMatrix,
    Sizes,
    TensorSpec,
    TokenColumn,
    Weights,
    fp4_pairs,
    in_atoms,
    is_unpacked_fp4,
)
from cudnn.fused.wrapper import allocate
from cudnn.gemm.formats import BITS, BLOCKWISE_DTYPE, BLOCKWISE_SIZE, FLOAT4, FLOAT8, SCALES, name_of
from cudnn.gemm.reference import evaluate, interleave_glu
from cudnn.gemm.scales import dequantize, token_block_count
from cudnn.lazy import torch
from cudnn_kernels import epilogue
from cudnn_kernels.gemm.problem import Operand
from cudnn_kernels.schedule import Dense, VarlenM

FLOATS = ("float32", *NARROW)
RESULT_TYPES = (*FLOATS, *FLOAT8)
MOST_EXPERTS = 1024
ALIGNED = 256  # rows: experts of block-scaled operands begin at multiples
PROB = TensorSpec("prob", TokenColumn("m"), FLOATS, optional=True, init="uniform", about="None: 1")
DPROB = TensorSpec("dprob", TokenColumn("m"), ("float32",), optional=True, fill=0.0, written=True, about="is added to")
BIAS = TensorSpec("bias", Columns("n", "experts"), FLOATS, optional=True)

A_INDEX = TensorSpec(
    "a_index",
    Contiguous("m", alignment=4),
    ("int32",),
    optional=True,
    about="token i is row a_index[i] of a, out-of-range indices read zeros; for 16-bit types, and float32 sfa",
)

COUNTER = TensorSpec(
    "scheduler_counter", FirstOf(1, alignment=4), ("int32",), optional=True, about="a hint of other kernels"
)


def operands() -> tuple[TensorSpec, ...]:
    """A, B, their scale factors, the experts' end offsets, alpha, and pointer arrays of weights."""
    types = (*NARROW, *FLOAT8, FLOAT4, "uint8")
    pointers, sfb_layout = Contiguous("matrices", alignment=8), BlockScales("n", "k", "experts", shared="sfb_rows")
    return (
        TensorSpec("a", OneMatrix("m", "k", "mk"), types, about="K-major; four-bit elements with sfa only"),
        TensorSpec("b", Weights("n", "k", "nk", "experts"), types, optional=True, same_dtype="a"),
        TensorSpec("sfa", BlockScales("m", "k"), (*SCALES, BLOCKWISE_DTYPE), optional=True),
        TensorSpec("sfb", sfb_layout, (*SCALES, BLOCKWISE_DTYPE), optional=True, same_dtype="sfa"),
        TensorSpec(
            "padded_offsets",
            Contiguous("experts", alignment=4),
            ("int32",),
            init="ends",
            about="the row where each expert ends",
        ),
        TensorSpec("alpha", Each("experts", alignment=2), FLOATS, init="uniform"),
        TensorSpec("b_ptrs", pointers, ("int64",), optional=True, sampled=False),
        TensorSpec("sfb_ptrs", pointers, ("int64",), optional=True, sampled=False),
    )


def with_pointers(tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The same with pointer arrays as the only way to pass weights."""
    kept = (spec for spec in tensors if spec.name not in ("b", "sfb"))
    return tuple(replace(spec, optional=False) if spec.name == "b_ptrs" else spec for spec in kept)


def indexed(tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The same with ``a_index``: A may have other rows than one for each token."""
    layouts = {"a": OneMatrix("rows of a", "k", "mk"), "sfa": BlockScales("rows of a", "k")}
    return (*(replace(spec, layout=layouts.get(spec.name, spec.layout)) for spec in tensors), A_INDEX)


def gather(x: Any, index: Any, dim: int = 0) -> Any:
    """Gathers rows, or slices along ``dim``, by index; out-of-range indices read as zero. The tensor if ``index`` is
    None.
    """
    if index is None:
        return x
    count, index = x.shape[dim], index.long()
    in_range = (index >= 0) & (index < count)
    rows = x.index_select(dim, torch.where(in_range, index, 0)) if count else x.new_zeros(())
    shape = [1] * x.ndim
    shape[dim] = len(index)
    return torch.where(in_range.view(shape), rows, 0)


def output(name: str, columns: str, optional: bool = False, about: str = "") -> TensorSpec:
    """A row of a result for each token."""
    layout = OneMatrix("m", columns, "mn")
    return TensorSpec(name, layout, RESULT_TYPES, optional, written=True, about=about)


def quantized(d: str, columns: str, roles: int = 1, sums: bool = False) -> tuple[TensorSpec, ...]:
    """The result ``d``, and its other outputs: the column-wise quantized one, scale factors, the normalization
    constant, and the amax of each column role (up, gate). With ``sums``, row-wise scale factors may be float32.
    """
    of_rows = (*SCALES, BLOCKWISE_DTYPE) if sums else SCALES
    constant = "what the largest element of a block becomes, as a share of its type's limit"
    return (
        output(d, columns),
        TensorSpec(
            "d_col",
            OneMatrix("m", columns, "mn"),
            RESULT_TYPES,
            optional=True,
            same_dtype=d,
            written=True,
            about="quantized by 32 tokens of a column; with sfd_col",
        ),
        TensorSpec("sfd_row", BlockScales("m", columns), of_rows, optional=True, same_dtype="sfa", written=True),
        TensorSpec(
            "sfd_col", BlockScales(columns, "m", vector=32), SCALES, optional=True, same_dtype="sfd_row", written=True
        ),
        TensorSpec("norm_const", ONE, ("float32",), optional=True, init=0.01, about=constant),
        largest("amax", -math.inf, roles),
    )


def largest(name: str, fill: float, roles: int = 1) -> TensorSpec:
    """The amax of each expert, and of each column role (up, gate)."""
    layout = Contiguous("experts", *(roles,) * (roles > 1), alignment=4)
    about = f"the caller fills it with {fill:g}; raised from what it was"
    return TensorSpec(name, layout, ("float32",), True, fill=fill, written=True, padding=1, about=about)


@functools.cache
def amax_scratch(device: Any) -> Any:
    """A sink for two amax outputs that the caller does not pass. It is never freed, because any stream may still write
    it.
    """
    return torch.zeros(2, MOST_EXPERTS, 1, dtype=torch.float32, device=device)


class ExpertsGemm(FusedGemm):
    """A GEMM of the tokens of each expert with the expert's weights, and an epilogue.

    The rows of A belong to experts, one after the other; ``padded_offsets`` holds their end offsets, on the device.
    Rows beyond the last end are not touched. Experts may have any number of rows, also none; where operands have scale
    factors in atoms, or results have some, multiples of 256.
    """

    counted_by = ("a_index",)
    largest_cluster = 4
    default_cluster = (2, 1)
    tile_n = (256,)
    majors = ("n",)
    buffers = ("d_tensor",)
    example = (("m", "n", "k", "experts"), (320, 128, 64, 3))
    aot_shapes = ((8192, 4096, 4096, 8),)
    shapes = ((32768, 28672, 4096, 8), (32768, 2816, 2048, 64), (65536, 1536, 2048, 128))
    steps = (1, 64, 128, 1)
    hints = (
        "acc_dtype",
        "mma_tiler_mn",
        "cluster_shape_mn",
        "vector_f32",
        "m_aligned",
        "use_dynamic_sched",
        "cd_major",
        "b_ptrs",
        "sfb_ptrs",
        "scheduler_counter_tensor",
        "sf_fp8_dtype_override",
    )
    result: ClassVar[tuple[str, str]] = ("d", "sfd_row")
    pointer_arguments: ClassVar[Sequence[str]] = ("b_ptrs", "sfb_ptrs")  # with num_experts
    tokens: ClassVar[str] = "m"
    vectors = (16, 32, BLOCKWISE_SIZE)
    roles: ClassVar[int] = 1  # of the result's columns, alternating
    group_rows: ClassVar[int] = 1  # those of each expert are multiples of it, without scale factors too
    roundings: ClassVar[int] = 1  # how often a result is rounded by its definition, the store included
    inner: ClassVar[int] = 1  # the dimension of matrices that is contiguous in examples
    unpacked_fp4: ClassVar[bool] = False  # bytes are one element each, not two, where scale factors go with both

    m_aligned: int = ALIGNED
    discrete_col_sfd: bool = False
    b_major: str = "k"
    b_dtype: Any = None
    b_shape: tuple[int, int] | None = None
    num_experts: int | None = None
    b_halves: bool = False
    sf_fp8_dtype_override: str | None = None
    use_dynamic_sched: bool = False
    use_single_group_runtime_offsets: bool = False
    semantics: str | None = None

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        if self.num_experts is not None:
            for name in self.pointer_arguments:
                if self.scaled or not name.startswith("sf"):
                    count = self.num_experts * (self.halves_of(arguments) if name == "b_ptrs" else 1)
                    self.descs[name] = pointer_arrays.described(name, count, self._device)
        self.acc_dtype = self.acc_dtype or torch.float32
        self.semantics = self.semantics or settings.SEMANTICS.get()
        in_atoms = self.scaled and self.dtype_name("sfa") != BLOCKWISE_DTYPE
        aligned = ALIGNED if in_atoms or self.quantizes() else self.group_rows
        grouped = VarlenM(offsets="padded_offsets", row_alignment=aligned)
        self.schedule = Dense() if self.use_single_group_runtime_offsets else grouped

    # Declared by subclasses.

    @classmethod
    def result_columns(cls, n: int) -> int:
        """How many columns the result has."""
        return n // cls.pairs

    def scaled_product(self, power: int = 1) -> tuple[Any, ...]:
        """The first operation of an epilogue: alpha of the expert."""
        return (epilogue.MultiplyGroup("alpha", self.dtype_name("alpha"), power),)

    def multiplied_by(self, name: str, value: str = "x") -> tuple[Any, ...]:
        """Multiplies by a value for each token, if passed."""
        return (epilogue.MultiplyColumn(name, self.dtype_name(name), value),) if self.has(name) else ()

    def biased(self, factor: str = "") -> tuple[Any, ...]:
        """Adds the bias, if passed; times a value for each token, if passed."""
        if not self.has("bias"):
            return ()
        factors = self.multiplied_by(factor)
        return (epilogue.AddRow("bias", self.dtype_name("bias"), *factors, concat_glu=self.concat_glu),)

    def summed_columns(self) -> tuple[Any, ...]:
        """The gradient of a bias, if requested: the column sums over the tokens of an expert."""
        return (
            (epilogue.SumColumn("dbias", self.dtype_name("dbias"), concat_glu=self.concat_glu),)
            if self.has("dbias")
            else ()
        )

    @property
    def concat_glu(self) -> bool:
        """Whether gate and up are concatenated halves of the columns, instead of interleaved blocks of 32."""
        return False

    def result_epilogue(self, name: str, concat_glu: bool = False) -> tuple[Any, ...]:
        """The last operations of an epilogue: amax, quantization, stores."""
        operations: list[Any] = [epilogue.Amax("amax", by_expert=True, roles=self.roles)] if self.has("amax") else []
        if self.quantizes():
            dtype = self.dtype_name(name)
            operations += [
                epilogue.QuantizeColumns(
                    "sfd_col", dtype, self.dtype_name("sfd_col"), by_expert=bool(self.discrete_col_sfd)
                ),
                self.store("d_col", "columns"),
                epilogue.QuantizeRows("sfd_row", dtype, self.dtype_name("sfd_row"), self.sf_vec_size),
            ]
        elif self.dtype_name("sfd_row") == BLOCKWISE_DTYPE:
            constant = "norm_const" if self.has("norm_const") else ""
            quantizer = epilogue.QuantizeRows(
                "sfd_row", self.dtype_name(name), BLOCKWISE_DTYPE, BLOCKWISE_SIZE, constant
            )
            operations.append(replace(quantizer, power_of_two=bool(self.power_of_two_scales)))
        return (*operations, self.store(name, concat_glu=concat_glu))

    def quantizes(self) -> bool:
        return all(map(self.has, ("sfd_row", "sfd_col", "norm_const")))

    def unused(self) -> tuple[str, ...]:
        if self.quantizes() or self.dtype_name("sfd_row") == BLOCKWISE_DTYPE:
            return ()
        return "d_col", "sfd_row", "sfd_col", "norm_const"

    @classmethod
    def has_block_scales(cls, arguments: Mapping[str, Any]) -> bool:
        """Whether results of 8 bits have block scales: if the operands have 8 bits and no float32 blockwise scales."""
        blockwise = arguments["sfa"] is not None and name_of(arguments["sfa"].dtype) == BLOCKWISE_DTYPE
        return name_of(arguments["a"].dtype) in FLOAT8 and not blockwise

    @classmethod
    def check_buffer(cls, name: str, tensors: Mapping[str, Any], dtype: Any) -> None:
        """Raises unless a caller's result tensor has ``dtype`` and the number of dimensions of a."""
        tensor, a = tensors[name], tensors["a"]
        if not isinstance(cls.spec(name).layout, OneMatrix) or (tensor.dtype, tensor.ndim) == (dtype, a.ndim):
            return
        got, allowed = f"{tensor.dtype} with {tensor.ndim} dimensions", f"{dtype} with {a.ndim}, as a"
        hint = f"pass {name}_dtype={tensor.dtype}" if tensor.dtype != dtype else ""
        raise make_error(ValueError, f"{cls.folder()}_wrapper", f"{name}_tensor", got, allowed, hint)

    @classmethod
    def dtype_or_default(cls, dtype: Any, other: Any = None) -> Any:
        """``dtype``, else ``other``, else bfloat16."""
        return dtype or other or torch.bfloat16

    @classmethod
    def quantized_results(cls, arguments: Mapping[str, Any], name: str, dtype: Any, fp8: bool) -> dict[str, Any]:
        """Types and majors of what wrappers allocate for a result: scale factors if ``fp8``, amax if it has 16 bits."""
        types: dict[str, Any] = {name: (dtype, "n")}
        if fp8:
            scale_dtype = torch.float8_e8m0fnu if arguments["sfa"] is None else arguments["sfa"].dtype
            types |= {"d_col": (dtype, "n"), "sfd_row": (scale_dtype, ""), "sfd_col": (scale_dtype, "")}
        if name_of(dtype) in NARROW:
            types["amax"] = (torch.float32, "")
        return types

    @classmethod
    def older_semantics(cls, arguments: Mapping[str, Any]) -> bool:
        """Whether a wrapper's arguments, or the environment, ask for the older semantics."""
        return (arguments.get("semantics") or settings.SEMANTICS.get()) == "1.23"

    # Sizes.

    @classmethod
    def halves_of(cls, options: Mapping[str, Any]) -> int:
        """How many matrices an expert has in ``b_ptrs``: 2, if it has those of the halves of rows or of k, else 1."""
        return 1 + bool(options.get("b_halves"))

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        """Sizes by name: those of a (m, k, 1) and b (n, k, experts), ``columns`` of the result, ``vector`` per scale
        factor.

        Raises:
            ValueError: other dimensions, another size than m is 0, or more than 1024 experts.
        """
        for name, dims in (("a", "(m, k, 1)"), ("b", "(n, k, experts)")):
            if len(shapes[name]) != 3 or (name == "a" and shapes[name][2] != 1):
                got = f"the shape {tuple(shapes[name])}"
                raise make_error(ValueError, cls._title(), f"{name} tensor", got, f"three dimensions, {dims}")
        (m, k, _), (n, _, experts) = shapes["a"], shapes["b"]
        if min(n, k, experts) < 1 or experts > MOST_EXPERTS:
            got, allowed = f"n={n}, k={k}, experts={experts}", f"at least 1, at most {MOST_EXPERTS} experts"
            raise make_error(ValueError, cls._title(), "sizes", got, allowed)
        columns, vector = cls.result_columns(n), options.get("sf_vec_size", 16)
        rows, (m, *_) = m, shapes.get("a_index", (m,))
        named = {"m": m, "rows of a": rows, "n": n, "k": k, "l": 1, "experts": experts}
        named |= {"matrices": experts * cls.halves_of(options), "blocks": token_block_count(m, experts)}
        return {**named, "columns": columns, "vector": vector, "sfb_rows": options.get("sfb_rows", BLOCKWISE_SIZE)}

    @classmethod
    def leading(cls, tensors: Mapping[str, Any]) -> str:
        return "a" if tensors.get("a_index") is None else "a_index"

    @classmethod
    def example_sizes(cls, sizes: Sizes) -> dict[str, int]:
        m, n, k, experts = (sizes[name] for name in ("m", "n", "k", "experts"))
        return cls.sizes_of({"a": (m, k, 1), "b": (n, k, experts)}, cls.defaults())

    def sizes(self, descs: Mapping[str, Any]) -> dict[str, int]:
        if not self.has("b_ptrs"):
            return super().sizes(descs)
        shapes = {"a": descs["a"].shape, "b": (*self.b_shape, self.num_experts)}  # pyright: ignore
        return self.sizes_of(shapes | self.counts(descs), vars(self))

    @property
    def constants(self) -> dict[str, Any]:
        return {"n": self.b_shape[0]} if self.b_shape and self.has("b_ptrs") else {}

    # Values on the device.

    @property
    def validates(self) -> bool:
        return settings.VALIDATE_DEVICE_VALUES.get()

    def check_values(self, tensors: Sequence[Any]) -> None:
        """Raises for invalid end offsets or pointers of a call. Synchronizes with the GPU.

        Raises:
            ValueError: such a value.
            RuntimeError: a CUDA graph is captured.
        """
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            name, hint = settings.VALIDATE_DEVICE_VALUES.name, "unset it before objects are compiled"
            raise make_error(RuntimeError, self._title(), name, "1 in a CUDA graph's capture", "0, then", hint)
        by_name = dict(zip(self.names, tensors, strict=True))
        if self.schedule.searches:  # else the kernel does not read the offsets
            ends = next(by_name[spec.name] for spec in self.tensors if spec.init == "ends")
            self.check_ends(ends, self.sizes_now(tensors), *self.steps_of_ends())
        for name in ("b_ptrs", "sfb_ptrs", "wgrad_ptrs"):
            wrong = [x for x in ([] if by_name.get(name) is None else by_name[name].tolist()) if not x or x % ALIGNMENT]
            if wrong:
                raise self.error(name, f"{wrong[0]:#x}", f"addresses, multiples of {ALIGNMENT} bytes")

    def check_ends(self, offsets: Any, sizes: Sizes, step: int = 1, last: int = 1) -> None:
        """Raises for end offsets that decrease, exceed the tokens, or are no multiples of ``step`` (the last one: of
        ``last``). Synchronizes with the GPU.
        """
        ends, tokens = offsets.flatten().tolist(), sizes[self.tokens]
        decrease = any(end < before for before, end in zip([0, *ends], [*ends, tokens], strict=True))
        if decrease or ends[-1] % last or any(end % step for end in ends if end < ends[-1]):
            multiples = f", multiples of {step}" if step > 1 else ""
            got = f"{ends[:8]}{'...' if len(ends) > 8 else ''}"
            raise self.error("offsets", got, f"numbers that do not decrease, from 0 to {tokens}{multiples}")

    def steps_of_ends(self) -> tuple[int, int]:
        """The multiple that end offsets have to be, and that of the last one."""
        return (max(self.schedule.row_alignment, 1),) * 2

    # Pointer arrays of weights.

    def dtype_name(self, name: str) -> str:
        return name_of(self.b_dtype) if name == "b" and self.has("b_ptrs") else super().dtype_name(name)

    def major(self, name: str) -> str:
        return self.b_major if name == "b" and self.has("b_ptrs") else super().major(name)

    def operand(self, name: str) -> Operand:
        if name == "a" or not self.has("b_ptrs"):
            index = f"{name}_index"
            return replace(super().operand(name), index=index if self.has(index) else "")
        return replace(super().operand(name), pointers=True, halves=self.halves_of(vars(self)) == 2)

    def weights(self, tensors: Mapping[str, Any]) -> list[Any]:
        """The dequantized weights (n, k) of each expert. Pointer arrays: on the CPU only."""
        vector = self.sf_vec_size
        if tensors.get("b_ptrs") is None:
            every = dequantize(tensors["b"], tensors.get("sfb"), vector)
            return list(every.unbind(2))
        n, k = self.b_shape or (0, 0)
        layout, dim = (self.b_dtype, self.b_major == "n"), 0 if self.interleaves_glu() else 1
        if self.halves_of(vars(self)) == 2:
            matrices = pointer_arrays.joined(tensors["b_ptrs"], (n, k), dim, *layout)
        else:
            matrices = pointer_arrays.matrices(tensors["b_ptrs"], n, k, *layout)
        scales: list[Any] = [None] * len(matrices)
        if self.scaled:
            scales = pointer_arrays.scales(tensors["sfb_ptrs"], n, k, vector, tensors["sfa"].dtype)
        return [dequantize(x, sfb, vector)[..., 0] for x, sfb in zip(matrices, scales, strict=True)]

    @classmethod
    def normalize_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A wrapper's arguments with the constructor's options for pointer arrays of weights.

        Raises:
            ValueError: both or neither of ``b_tensor`` and ``b_ptrs``, or invalid pointers.
        """
        where, b, pointers = f"{cls.folder()}_wrapper", arguments.get("b_tensor"), arguments.get("b_ptrs")
        if (b is None) == (pointers is None):
            got = "both" if b is not None else "neither"
            raise make_error(ValueError, where, "b_tensor and b_ptrs", got, "one of them")
        if b is not None:
            if arguments.get("n") is not None:
                raise make_error(ValueError, where, "n", arguments["n"], "None, where b is a tensor")
            return arguments
        a, n, b_dtype = arguments["a_tensor"], arguments.get("n"), arguments.get("b_dtype")
        if n is None or b_dtype is None:
            raise make_error(ValueError, where, "n and b_dtype", f"{n} and {b_dtype}", "both, with b_ptrs")
        check_rank(where, "a", a, (2, 3), "(m, k, 1)")
        experts = arguments["padded_offsets"].numel()
        pointer_arrays.check(where, "b_ptrs", pointers, experts * cls.halves_of(arguments), a.device)
        if arguments.get("sfa_tensor") is not None:
            pointer_arrays.check(where, "sfb_ptrs", arguments["sfb_ptrs"], experts, a.device)
        return {**arguments, "num_experts": experts, "b_shape": (n, cls.shape_of(a)[1])}

    @classmethod
    def reinterpret(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Views weights ``(experts, k, n)`` as (n, k, experts), flat scale factors in atoms, and bytes that count one
        FP4 element each as pairs.
        """
        a, b, sfa, sfb = tensors["a"], tensors.get("b"), tensors.get("sfa"), tensors.get("sfb")
        if (
            options.get("b_major") == "n"
            and b is not None
            and getattr(b, "ndim", 0) == 3
            and Weights.is_experts_first(b)
        ):
            tensors = {**tensors, "b": b.permute(2, 1, 0)}
        flat = [getattr(x, "ndim", 6) not in (3, 6) for x in (sfa, sfb)]
        single = cls.unpacked_fp4 and tensors.get("b") is not None
        raw = sfa is not None and a.dtype == torch.uint8 and is_unpacked_fp4(a, sfa, options["sf_vec_size"], single)
        if not raw and True not in flat:
            return tensors
        views = dict(tensors)
        for name in ("a", "b") if raw else ():
            if tensors.get(name) is not None:
                views[name] = fp4_pairs(tensors[name])
        layout = Weights("n", "k", "nk")
        shapes = {"a": cls.shape_of(views["a"]), "b": (*(options.get("b_shape") or ()), options.get("num_experts"))}
        if views.get("b") is not None:
            b = views["b"]
            shapes["b"] = cls.shape_of(b if layout.is_canonical(b) else layout.canonicalize(b))
        shapes["a"] = (*shapes["a"], 1)[:3]
        for name, is_flat in zip("ab", flat, strict=True):
            if is_flat:
                views[f"sf{name}"] = in_atoms(
                    cls._title(), f"sf{name}", views[f"sf{name}"], shapes[name], options["sf_vec_size"]
                )
        return views

    # Support.

    def check_options(self) -> None:
        super().check_options()
        for name, allowed in (
            ("m_aligned", (ALIGNED,)),
            ("b_major", ("k", "n")),
            ("sf_fp8_dtype_override", (None,)),
            ("semantics", ("1.23", "1.32")),
        ):
            if getattr(self, name) not in allowed:
                raise self.error(name, repr(getattr(self, name)), " or ".join(map(repr, allowed)))
        self.check_weights()
        if self.has("scheduler_counter") and not (self.scaled and self.use_dynamic_sched and self.has("b")):
            allowed = "None, but for use_dynamic_sched=True, operands with scale factors and weights in a tensor"
            raise self.error("scheduler_counter tensor", "a tensor", allowed)

    def check_clamp(self, scale: float | None) -> None:
        """Raises unless a clamped ReLU can have this limit, or none."""
        if scale is not None and self.checked_number("tanh_clamp_scale", scale) <= 0:
            raise self.error("tanh_clamp_scale", scale, "None or a positive number")

    def check_weights(self) -> None:
        """Raises unless weights are either a tensor or a pointer array."""
        if self.has("b") == (self.num_experts is not None):
            got = "both" if self.has("b") else "neither"
            raise self.error("sample_b and num_experts", got, "one of them: a tensor, or pointers to weights")
        if self.has("b"):
            for name in ("b_dtype", "b_shape"):
                if getattr(self, name) is not None:
                    raise self.error(name, getattr(self, name), "None, where b is a tensor")
            return
        if self.b_shape is None or self.b_dtype is None:
            raise self.error("b_shape and b_dtype", f"{self.b_shape} and {self.b_dtype}", "both, with num_experts")
        if self.dtype_name("b") != self.dtype_name("a"):
            raise self.error("b_dtype", self.b_dtype, f"{self.dtype_name('a')}, the type of a")
        if self.dtype_name("b") == FLOAT4 and self.b_major == "n":
            raise self.error("b_major", "'n'", "'k', for packed elements")

    def check_sizes(self, sizes: Sizes) -> None:
        super().check_sizes(sizes)
        if self.use_single_group_runtime_offsets and (sizes["experts"] != 1 or not self.scaled):
            got = f"{sizes['experts']} experts, {'with' if self.scaled else 'without'} scale factors"
            raise self.error("use_single_group_runtime_offsets", got, "one expert, with scale factors")
        if self.b_shape is not None and self.b_shape[1] != sizes["k"]:
            raise self.error("b_shape", self.b_shape, f"(n, {sizes['k']}), as a")

    def check_rules(self, sizes: Sizes) -> None:
        super().check_rules(sizes)
        self.check_groups(sizes)
        if not self.scaled and not self.has("sfd_row"):
            controls = {"norm_const_tensor": self.has("norm_const"), "discrete_col_sfd": self.discrete_col_sfd}
            unused = [name for name, is_set in {**controls, "sf_vec_size": self.sf_vec_size != 16}.items() if is_set]
            if unused:
                raise self.error(f"{unused[0]} of scale factors", "given", "none, for operands without", "leave it out")
        for name in self.counted_by:
            if self.has(name) and not self.can_gather:
                allowed = f"None, but for {' and '.join(NARROW)}, or {BLOCKWISE_DTYPE} sfa"
                raise self.error(
                    f"{name} tensor", f"a tensor, for {self.dtype_name('a')}", allowed, "pass rows in order"
                )
        scales = ("sfd_row", "sfd_blocks", "sfactivation_blocks")
        if self.power_of_two_scales and all(self.dtype_name(name) != BLOCKWISE_DTYPE for name in scales):
            allowed = f"False, for results without scale factors of {BLOCKWISE_DTYPE}"
            raise self.error("power_of_two_scales", self.power_of_two_scales, allowed)
        if self.has("b_ptrs"):
            extent, step = sizes[self.b_major], ALIGNMENT * 8 // BITS[self.dtype_name("b")]
            if extent % step:
                raise self.error(f"{self.b_major} of b", extent, f"multiples of {step}, 16 bytes")
        rows, pairs = self.mma_tiler_mn[0], 2 if self.mma_tiler_mn[0] == 256 else 1
        if self.cluster_shape_mn[0] // pairs * rows not in (128, 256):
            raise self.error("cluster_shape_mn", self.cluster_shape_mn, "128 or 256 rows of a cluster")

    @property
    def can_gather(self) -> bool:
        """Whether rows of A can be gathered: 16-bit operands, or float32 blockwise scales."""
        return self.dtype_name("a") in NARROW or self.dtype_name("sfa") == BLOCKWISE_DTYPE

    def check_groups(self, sizes: Sizes) -> None:
        """Raises for tensors whose layout does not allow experts to end at any row."""
        if self.major("a") != "k":
            raise self.error("a tensor major", self.major("a"), "k: experts end at any row")
        for name in (spec.name for spec in self.tensors if spec.written and isinstance(spec.layout, OneMatrix)):
            if self.has(name) and self.major(name) != "n":
                raise self.error(f"{name} tensor major", self.major(name), "n: experts end at any row")

    def _check_quantized(self) -> None:
        """Row-wise and column-wise scale factors are passed together, with norm_const."""
        names = ("sfd_row", "sfd_col", "norm_const")
        missing = [name for name in names if not self.has(name)]
        if len(missing) == len(names):
            return
        d, _ = self.result
        if self.dtype_name("sfd_row") == BLOCKWISE_DTYPE:
            self._check_sum_quantized(d)
            return
        if missing == ["norm_const"]:
            raise self.error("norm_const_tensor is required when FP8 inputs are used", "None", "a tensor (1,)")
        if missing == ["sfd_row", "sfd_col"] and self.dtype_name(d) not in FLOAT8:
            self._logger.warning("norm_const is not used: the result has the type %s", self.dtype_name(d))
            return
        if missing:
            raise self.error(f"{' and '.join(missing)}", "None", f"tensors, required with {', '.join(names)}")
        if not self.has("d_col"):
            raise self.error("d_col tensor", "None", "a tensor, with sfd_col")
        if (self.dtype_name("sfd_row"), self.sf_vec_size) != (SCALES[0], 32):
            got = f"{self.dtype_name('sfd_row')} for {self.sf_vec_size} elements"
            raise self.error("sfd_row tensor", got, f"{SCALES[0]} for 32")

    def _check_sum_quantized(self, d: str) -> None:
        """Checks float32 row-wise scale factors of 128 columns, which exclude column-wise ones."""
        if self.dtype_name(d) not in FLOAT8:
            raise self.error(
                f"{d} tensor dtype", self.dtype_name(d), f"{' or '.join(FLOAT8)}, for sfd_row of {BLOCKWISE_DTYPE}"
            )
        if self.sf_vec_size != BLOCKWISE_SIZE:
            raise self.error("sf_vec_size", self.sf_vec_size, f"{BLOCKWISE_SIZE}, for sfd_row of {BLOCKWISE_DTYPE}")
        for name in ("sfd_col", "d_col"):
            if self.has(name):
                raise self.error(f"{name} tensor", "a tensor", f"None, for sfd_row of {BLOCKWISE_DTYPE}")

    def _check_architecture(self, arch: str) -> None:
        super()._check_architecture(arch)
        if self.dtype_name("sfd_row") != BLOCKWISE_DTYPE:
            return
        blockwise, reason = (
            self.dtype_name("sfa") == BLOCKWISE_DTYPE,
            f"a block takes {2 * BLOCKWISE_SIZE} columns, too many registers",
        )
        if arch == "sm_100a" and blockwise and self.pairs == 2:
            allowed = f"{BLOCKWISE_DTYPE} for the operands or for d: {reason}"
            raise self.unsupported("sfa and sfd_row tensors, on sm_100a", f"{BLOCKWISE_DTYPE} for both", allowed)
        if arch == "sm_90a" and self.dtype_name("a") in FLOAT8 and not blockwise:
            allowed = f"16 bits, or scale factors of {BLOCKWISE_DTYPE}: {reason}"
            raise self.unsupported("a tensor dtype, for sfd_row of float32, on sm_90a", self.dtype_name("a"), allowed)

    # The kernel.

    def reference(self, tensors: Mapping[str, Any]) -> None:
        a = gather(dequantize(tensors["a"], tensors.get("sfa"), self.sf_vec_size), tensors.get("a_index"))
        weights = self.weights(tensors)
        single = self.use_single_group_runtime_offsets
        ends = [a.shape[0]] if single else tensors["padded_offsets"].tolist()
        starts = [0, *ends[:-1]]
        product = a.new_empty(ends[-1], weights[0].shape[0], 1)
        rows = [end - start for start, end in zip(starts, ends, strict=True)]
        counts = torch.tensor(rows, dtype=torch.int64, device=a.device)
        for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
            product[start:end, :, 0] = a[start:end, :, 0] @ weights[expert].T
        if not ends[-1]:
            if tensors.get("dbias") is not None:
                tensors["dbias"].zero_()  # a sum of nothing
            return
        groups = torch.repeat_interleave(torch.arange(len(ends), dtype=torch.int64, device=a.device), counts)
        product = interleave_glu(product) if self.interleaves_glu() else product
        layouts = {spec.name: spec.layout for spec in self.tensors}
        used = {n: x if x is None or n not in layouts else _first(x, layouts[n], ends[-1]) for n, x in tensors.items()}
        evaluate(self.operations(), product, used, groups)

    # The wrapper's cache key, and AOT presets.

    @classmethod
    def cache_key(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Dtypes, majors and the number of experts; n and k if those are static."""
        a, b = tensors["a"], tensors.get("b")
        semantics = options.get("semantics") or settings.SEMANTICS.get()
        types = tuple((name, None if t is None else (t.dtype, t.device)) for name, t in tensors.items())
        if b is None:
            return (semantics, types)
        static = () if settings.GROUPED_GEMM_DYNAMIC_MNKL.get() else (a.shape[1], b.shape[0])
        rows = cls.rows_of_block(b, tensors.get("sfb"))
        return (semantics, types, b.shape[-1], cls.majors_of(tensors), rows, *static)

    @classmethod
    def majors_of(cls, tensors: Mapping[str, Any]) -> tuple[str, ...]:
        """The dimensions of stride 1 of the operands."""
        layouts = {name: cls.spec(name).layout for name in ("a", "b")}
        return tuple(
            x.major(tensors[n].shape, tensors[n].stride()) for n, x in layouts.items() if isinstance(x, Matrix)
        )

    @classmethod
    def restore_layout(cls, name: str, tensor: Any, inputs: Mapping[str, Any]) -> Any:
        """As A is: for an A of (m, k), results (m, n), and scale factors in the order of their memory."""
        if inputs["a"].ndim == 3:
            return tensor
        layout = cls.spec(name).layout
        if isinstance(layout, BlockScales):
            return tensor.permute(5, 2, 4, 0, 1, 3) if tensor.ndim == layout.rank else tensor
        return tensor.squeeze(-1) if isinstance(layout, OneMatrix) else tensor

    @classmethod
    def empty_tensors(cls, shape: Sequence[int], operand_type: str, device: Any) -> dict[str, Any]:
        """Inputs of a problem (m, n, k, experts) by name, not initialized; optional ones where operands of these types,
        by their short name, need them. Weights are included even if the API takes only pointer arrays.
        """
        element = OPERAND_TYPES[operand_type]
        sizes = cls.example_sizes(dict(zip(cls.example[0], shape, strict=True))) | {"vector": element.vector}
        types = {"a": element.element, "b": element.element, "sfa": element.scale, "sfb": element.scale}
        tensors = {}
        pointed = [spec for spec in operands() if spec.name in ("b", "sfb")] if cls.needs_pointers() else []
        for spec in (*pointed, *cls.tensors):
            needed = types.get(spec.name, spec.name in ("prob", "beta") or not spec.optional)
            if needed and spec.sampled and not spec.written:
                layout, dtype = spec.layout, getattr(torch, types.get(spec.name, spec.types[0]))
                major = layout.majors[cls.inner] if isinstance(layout, Matrix) else ""
                tensors[spec.name] = layout.allocate(sizes, major, dtype, device)
        return tensors

    @classmethod
    def aot_preset(cls, dtype: str, shape: tuple[int, ...], arch: str) -> Iterable[FusedAPI]:
        """Objects of K-major operands and the wrapper's defaults."""
        tensors, operand_type = cls.empty_tensors(shape, dtype, "meta"), OPERAND_TYPES[dtype]
        options = {"sf_vec_size": operand_type.vector} if operand_type.scale else {}
        options |= cls.pointer_options(tensors)
        results = cls.allocated(tensors, options)
        if "sfd_row" in results:
            tensors["norm_const"] = torch.empty(1, dtype=torch.float32, device="meta")
        constructor: Any = cls
        yield constructor(**cls.samples({**tensors, **results}), **options, arch=arch)

    @classmethod
    def allocated(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """The results that the wrapper allocates for these inputs by default."""
        parameters = inspect.signature(registry.wrapper(cls.folder())).parameters.values()
        missing = dict.fromkeys(spec.name for spec in cls.tensors)
        results = cls.results({**missing, **{p.name: p.default for p in parameters}, **tensors})
        return allocate(cls, tensors, {**cls.defaults(), **options}, results)

    @classmethod
    def needs_pointers(cls) -> bool:
        """Whether weights are always passed as a pointer array."""
        return all(spec.name != "b" for spec in cls.tensors)

    @classmethod
    def pointer_options(cls, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's options for an example's weights if they are passed as a pointer array."""
        if not cls.needs_pointers():
            return {}
        n, k, experts = cls.shape_of(tensors["b"])
        return {"num_experts": experts, "b_shape": (n, k), "b_dtype": tensors["b"].dtype}

    @classmethod
    def shapes_of(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        if tensors.get("b") is not None:
            return super().shapes_of(tensors, options)
        weights = (*options["b_shape"], options["num_experts"])
        return {"a": cls.shape_of(tensors["a"]), "b": weights} | cls.counts(tensors)


def bias_gradient(columns: str) -> TensorSpec:
    """The sums of a result's columns over the tokens of each expert."""
    return TensorSpec(
        "dbias",
        Contiguous("experts", columns, alignment=4),
        ("bfloat16",),
        optional=True,
        fill=0.0,
        written=True,
        padding=1,
        about="sums of columns",
    )


def _first(tensor: Any, layout: Layout, rows: int) -> Any:
    """The slice of a tensor for the first ``rows`` tokens."""
    if isinstance(layout, (OneMatrix, Column)) or (isinstance(layout, BlockScales) and tensor.ndim == 3):
        return tensor[:rows]
    if isinstance(layout, BlockScales) and layout.rows == "m":
        return tensor[:, :, : ceil_div(rows, 128)]
    if isinstance(layout, BlockScales) and layout.columns == "m":
        return tensor[..., : ceil_div(rows, 128), :]
    return tensor
