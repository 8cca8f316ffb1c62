"""What the grouped fused GEMMs share: tokens of several experts, one after the other, each multiplied by its expert's
weights in one call.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cudnn import settings
from cudnn.api_base import ceil_div, check_rank
from cudnn.errors import refused
from cudnn.fused import addresses, registry
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
)
from cudnn.fused.wrapper import allocate
from cudnn.gemm.formats import BITS, FLOAT4, FLOAT8, SCALES, SUM_SCALES, SUM_VECTOR, name_of
from cudnn.gemm.reference import evaluate, woven
from cudnn.gemm.scales import dequantize, scale_shape
from cudnn.lazy import torch
from cudnn_kernels import epilogue
from cudnn_kernels.problem import Operand
from cudnn_kernels.schedule import Dense, VarlenM

FLOATS = ("float32", *NARROW)
RESULT_TYPES = (*FLOATS, *FLOAT8)
MOST_EXPERTS = 1024
ALIGNED = 256  # rows: experts of block-scaled operands begin at multiples
PROB = TensorSpec("prob", TokenColumn("m"), FLOATS, optional=True, draw="uniform", about="None: 1")
DPROB = TensorSpec("dprob", TokenColumn("m"), ("float32",), optional=True, fill=0.0, written=True, about="is added to")
BIAS = TensorSpec("bias", Columns("n", "experts"), FLOATS, optional=True)

A_INDEX = TensorSpec(
    "a_index",
    Contiguous("m", alignment=4),
    ("int32",),
    optional=True,
    about="token i is row a_index[i] of a, one that a has not is zeros; for 16-bit types, and float32 sfa",
)

COUNTER = TensorSpec(
    "scheduler_counter", FirstOf(1, alignment=4), ("int32",), optional=True, about="a hint of other kernels"
)


def operands() -> tuple[TensorSpec, ...]:
    """Tokens, weights, their scale factors, where experts end, and a factor for each expert."""
    types = (*NARROW, *FLOAT8, FLOAT4, "uint8")
    places, factors_of_b = Contiguous("experts", alignment=8), BlockScales("n", "k", "experts", shared="sfb_rows")
    return (
        TensorSpec("a", OneMatrix("m", "k", "mk"), types, about="K-major; four-bit elements with sfa only"),
        TensorSpec("b", Weights("n", "k", "nk", "experts"), types, optional=True, same="a"),
        TensorSpec("sfa", BlockScales("m", "k"), (*SCALES, SUM_SCALES), optional=True),
        TensorSpec("sfb", factors_of_b, (*SCALES, SUM_SCALES), optional=True, same="sfa"),
        TensorSpec(
            "padded_offsets",
            Contiguous("experts", alignment=4),
            ("int32",),
            draw="ends",
            about="the row where each expert ends",
        ),
        TensorSpec("alpha", Each("experts", alignment=2), FLOATS, draw="uniform"),
        TensorSpec("b_ptrs", places, ("int64",), optional=True, sampled=False),
        TensorSpec("sfb_ptrs", places, ("int64",), optional=True, sampled=False),
    )


def behind_addresses(tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The same without weights in one tensor: those behind addresses may not be left out."""
    kept = (spec for spec in tensors if spec.name not in ("b", "sfb"))
    return tuple(replace(spec, optional=False) if spec.name == "b_ptrs" else spec for spec in kept)


def indexed(tensors: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The same, where A may have other rows than one for each token, and the numbers of those."""
    layouts = {"a": OneMatrix("rows of a", "k", "mk"), "sfa": BlockScales("rows of a", "k")}
    return (*(replace(spec, layout=layouts.get(spec.name, spec.layout)) for spec in tensors), A_INDEX)


def numbered(x: Any, index: Any, dim: int = 0) -> Any:
    """The rows of a tensor, or what else it has along a dimension, with these numbers; zeros for one that is none's.

    Without numbers, the tensor.
    """
    if index is None:
        return x
    count, index = x.shape[dim], index.long()
    there = (index >= 0) & (index < count)
    found = x.index_select(dim, torch.where(there, index, 0)) if count else x.new_zeros(())
    shape = [1] * x.ndim
    shape[dim] = len(index)
    return torch.where(there.view(shape), found, 0)


def output(name: str, columns: str, optional: bool = False, about: str = "") -> TensorSpec:
    """A row of a result for each token."""
    layout = OneMatrix("m", columns, "mn")
    return TensorSpec(name, layout, RESULT_TYPES, optional, written=True, about=about)


def quantized(d: str, columns: str, roles: int = 1, sums: bool = False) -> tuple[TensorSpec, ...]:
    """The result ``d``, and what there is beside it: by columns, scale factors, the constant that they are chosen by,
    largest magnitudes, of each of the roles that columns have. With ``sums``, factors of rows may be float32.
    """
    of_rows = (*SCALES, SUM_SCALES) if sums else SCALES
    constant = "what the largest element of a block becomes, as a share of its type's limit"
    return (
        output(d, columns),
        TensorSpec(
            "d_col",
            OneMatrix("m", columns, "mn"),
            RESULT_TYPES,
            optional=True,
            same=d,
            written=True,
            about="quantised by 32 tokens of a column; with sfd_col",
        ),
        TensorSpec("sfd_row", BlockScales("m", columns), of_rows, optional=True, same="sfa", written=True),
        TensorSpec(
            "sfd_col", BlockScales(columns, "m", vector=32), SCALES, optional=True, same="sfd_row", written=True
        ),
        TensorSpec("norm_const", ONE, ("float32",), optional=True, draw=0.01, about=constant),
        largest("amax", -math.inf, roles),
    )


def largest(name: str, fill: float, roles: int = 1) -> TensorSpec:
    """The largest magnitudes of each expert, of each of the roles that columns have."""
    layout = Contiguous("experts", *(roles,) * (roles > 1), alignment=4)
    about = f"the caller fills it with {fill:g}; raised from what it was"
    return TensorSpec(name, layout, ("float32",), True, fill=fill, written=True, padding=1, about=about)


@functools.cache
def unseen(device: Any) -> Any:
    """Memory for two times the largest magnitudes of experts that nobody asks for, never freed: any stream may still
    write there.
    """
    return torch.zeros(2, MOST_EXPERTS, 1, dtype=torch.float32, device=device)


def in_atoms(where: str, name: str, scales: Any, shape: Sequence[int], vector: int) -> Any:
    """A flat, contiguous buffer of scale factors of an operand (mn, k, l), in the order of its memory.

    Raises:
        ValueError: it has another number of elements, or gaps.
    """
    _, _, rows, _, groups, batch = scale_shape(shape[0], shape[1], shape[2], vector)
    count = 512 * rows * groups * batch
    if scales.numel() != count or not scales.is_contiguous():
        got = f"{scales.numel()} elements with the strides {tuple(scales.stride())}"
        raise refused(ValueError, where, f"{name} tensor", got, f"{count}, contiguous")
    return scales.view(batch, rows, groups, 32, 4, 4)


def is_raw(a: Any, sfa: Any, vector: int, otherwise: bool) -> bool:
    """Whether bytes (m, k, 1) stand for one element of four bits each, not two: the number of scale factors tells.
    Where it fits both, ``otherwise``.

    Such elements lie where the strides say, two to a byte: in the first half of the memory.
    """
    if a.ndim != 3 or sfa.ndim != 6:
        return False
    groups = sfa.shape[2] if tuple(sfa.shape[3:]) == (32, 4, 4) else sfa.shape[4]
    packed, raw = (ceil_div(ceil_div(k, vector), 4) for k in (2 * a.shape[1], a.shape[1]))
    return groups == raw and (raw != packed or otherwise)


def pairs_of(x: Any) -> Any:
    """The pairs of elements that bytes (rows, k, l) stand for, one each; of a type that is not taken for such again."""
    rows, k, batch = x.shape
    pairs = x.as_strided((rows, k // 2, batch), (k // 2, 1, rows * k // 2), x.storage_offset())
    return pairs.view(torch.float4_e2m1fn_x2)


class ExpertsGemm(FusedGemm):
    """A GEMM of the tokens of each expert with the expert's weights, and an epilogue.

    The rows of A belong to experts, one after the other; ``padded_offsets`` says where each ends, on the device. Rows
    beyond the last one's end are not touched. Experts may have any number of rows, also none; where operands have
    scale factors in atoms, or results have some, multiples of 256.
    """

    counted_by = ("a_index",)
    largest_cluster = 4
    default_cluster = (2, 1)
    tile_n = (256,)
    majors = ("n",)
    buffers = ("d_tensor",)
    example = (("m", "n", "k", "experts"), (320, 128, 64, 3))
    usual_shapes = ((8192, 4096, 4096, 8),)
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
    addressed: ClassVar[Sequence[str]] = ("b_ptrs", "sfb_ptrs")  # with num_experts
    tokens: ClassVar[str] = "m"
    vectors = (16, 32, SUM_VECTOR)
    roles: ClassVar[int] = 1  # of the result's columns, in turn
    group_rows: ClassVar[int] = 1  # those of each expert are multiples of it, without scale factors too
    roundings: ClassVar[int] = 1  # of a result, by its definition: one before a result is stored counts
    inner: ClassVar[int] = 1  # the dimension of matrices that is contiguous in examples
    single_bytes: ClassVar[bool] = False  # bytes are one element each, not two, where scale factors go with both

    m_aligned: int = ALIGNED
    discrete_col_sfd: bool = False
    b_major: str = "k"
    b_dtype: Any = None
    b_shape: tuple[int, int] | None = None
    num_experts: int | None = None
    sf_fp8_dtype_override: str | None = None
    use_dynamic_sched: bool = False
    use_single_group_runtime_offsets: bool = False
    semantics: str | None = None

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        if self.num_experts is not None:
            for name in self.addressed:
                if self.scaled or not name.startswith("sf"):
                    self.descs[name] = addresses.described(name, self.num_experts, self._device)
        self.acc_dtype = self.acc_dtype or torch.float32
        self.semantics = self.semantics or settings.SEMANTICS.get()
        in_atoms = self.scaled and self.kind("sfa") != SUM_SCALES
        aligned = ALIGNED if in_atoms or self.quantizes() else self.group_rows
        grouped = VarlenM(offsets="padded_offsets", row_alignment=aligned)
        self.schedule = Dense() if self.use_single_group_runtime_offsets else grouped

    # What a subclass says.

    @classmethod
    def result_columns(cls, n: int) -> int:
        """How many columns the result has."""
        return n // cls.pairs

    def scaled_product(self, power: int = 1) -> tuple[Any, ...]:
        """The beginning of every epilogue: each expert's factor."""
        return (epilogue.MultiplyGroup("alpha", self.kind("alpha"), power),)

    def multiplied_by(self, name: str, value: str = "x") -> tuple[Any, ...]:
        """Multiplied by a value for each token, where there are some."""
        return (epilogue.MultiplyColumn(name, self.kind(name), value),) if self.given(name) else ()

    def biased(self, factor: str = "") -> tuple[Any, ...]:
        """The bias added, where there is one; times a value for each token, where there are some."""
        if not self.given("bias"):
            return ()
        factors = self.multiplied_by(factor)
        return (epilogue.AddRow("bias", self.kind("bias"), *factors, concat_glu=self.halves),)

    def summed_columns(self) -> tuple[Any, ...]:
        """The gradient of a bias, where it is asked for: each column's sum over the tokens of an expert."""
        return (epilogue.SumColumn("dbias", self.kind("dbias"), concat_glu=self.halves),) if self.given("dbias") else ()

    @property
    def halves(self) -> bool:
        """Whether gates and others are halves of the columns, instead of blocks of 32 that take turns."""
        return False

    def result_epilogue(self, name: str, halves: bool = False) -> tuple[Any, ...]:
        """The end of every epilogue: largest magnitudes, quantisers, stores."""
        operations: list[Any] = [epilogue.Amax("amax", by_expert=True, roles=self.roles)] if self.given("amax") else []
        if self.quantizes():
            kind = self.kind(name)
            operations += [
                epilogue.QuantizeColumns("sfd_col", kind, self.kind("sfd_col"), by_expert=bool(self.discrete_col_sfd)),
                self.store("d_col", "columns"),
                epilogue.QuantizeRows("sfd_row", kind, self.kind("sfd_row"), self.sf_vec_size),
            ]
        elif self.kind("sfd_row") == SUM_SCALES:
            constant = "norm_const" if self.given("norm_const") else ""
            operations.append(epilogue.QuantizeRows("sfd_row", self.kind(name), SUM_SCALES, SUM_VECTOR, constant))
        return (*operations, self.store(name, halves=halves))

    def quantizes(self) -> bool:
        return all(map(self.given, ("sfd_row", "sfd_col", "norm_const")))

    def unused(self) -> tuple[str, ...]:
        if self.quantizes() or self.kind("sfd_row") == SUM_SCALES:
            return ()
        return "d_col", "sfd_row", "sfd_col", "norm_const"

    @classmethod
    def in_blocks(cls, given: Mapping[str, Any]) -> bool:
        """Whether results of 8 bits have scale factors: where operands have 8 bits, unless theirs are those of sums."""
        of_sums = given["sfa"] is not None and name_of(given["sfa"].dtype) == SUM_SCALES
        return name_of(given["a"].dtype) in FLOAT8 and not of_sums

    @classmethod
    def check_buffer(cls, name: str, given: Mapping[str, Any], dtype: Any) -> None:
        """Raises unless a caller's tensor is what the wrapper would return: of this type, with as many dimensions."""
        tensor, a = given[name], given["a"]
        if not isinstance(cls.spec(name).layout, OneMatrix) or (tensor.dtype, tensor.ndim) == (dtype, a.ndim):
            return
        got, allowed = f"{tensor.dtype} with {tensor.ndim} dimensions", f"{dtype} with {a.ndim}, as a"
        cure = f"pass {name}_dtype={tensor.dtype}" if tensor.dtype != dtype else ""
        raise refused(ValueError, f"{cls.folder()}_wrapper", f"{name}_tensor", got, allowed, cure)

    @classmethod
    def given_or(cls, dtype: Any, other: Any = None) -> Any:
        """A type that the caller may leave out."""
        return dtype or other or torch.bfloat16

    @classmethod
    def quantized_results(cls, given: Mapping[str, Any], name: str, dtype: Any, narrow: bool) -> dict[str, Any]:
        """What wrappers allocate for a result: with factors if it is ``narrow``, else with largest magnitudes if it has
        16 bits.
        """
        found: dict[str, Any] = {name: (dtype, "n")}
        if narrow:
            factors = torch.float8_e8m0fnu if given["sfa"] is None else given["sfa"].dtype
            found |= {"d_col": (dtype, "n"), "sfd_row": (factors, ""), "sfd_col": (factors, "")}
        if name_of(dtype) in NARROW:
            found["amax"] = (torch.float32, "")
        return found

    @classmethod
    def follows_older(cls, given: Mapping[str, Any]) -> bool:
        """Whether a wrapper's arguments, or the environment, ask for the older semantics."""
        return (given.get("semantics") or settings.SEMANTICS.get()) == "1.23"

    # Sizes.

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        """Sizes by name: those of a (m, k, 1) and b (n, k, experts), ``columns`` of the result, ``vector`` to a factor.

        Raises:
            ValueError: other dimensions, one of size 0 beside m, or more than 1024 experts.
        """
        for name, dims in (("a", "(m, k, 1)"), ("b", "(n, k, experts)")):
            if len(shapes[name]) != 3 or (name == "a" and shapes[name][2] != 1):
                got = f"the shape {tuple(shapes[name])}"
                raise refused(ValueError, cls._title(), f"{name} tensor", got, f"three dimensions, {dims}")
        (m, k, _), (n, _, experts) = shapes["a"], shapes["b"]
        if min(n, k, experts) < 1 or experts > MOST_EXPERTS:
            got, allowed = f"n={n}, k={k}, experts={experts}", f"at least 1, at most {MOST_EXPERTS} experts"
            raise refused(ValueError, cls._title(), "sizes", got, allowed)
        columns, vector = cls.result_columns(n), options.get("sf_vec_size", 16)
        rows, (m, *_) = m, shapes.get("a_index", (m,))
        named = {"m": m, "rows of a": rows, "n": n, "k": k, "l": 1, "experts": experts}
        return {**named, "columns": columns, "vector": vector, "sfb_rows": options.get("sfb_rows", SUM_VECTOR)}

    @classmethod
    def leading(cls, given: Mapping[str, Any]) -> str:
        return "a" if given.get("a_index") is None else "a_index"

    @classmethod
    def example_sizes(cls, sizes: Sizes) -> dict[str, int]:
        m, n, k, experts = (sizes[name] for name in ("m", "n", "k", "experts"))
        return cls.sizes_of({"a": (m, k, 1), "b": (n, k, experts)}, cls.defaults())

    def sizes(self, descs: Mapping[str, Any]) -> dict[str, int]:
        if not self.given("b_ptrs"):
            return super().sizes(descs)
        shapes = {"a": descs["a"].shape, "b": (*self.b_shape, self.num_experts)}  # pyright: ignore
        return self.sizes_of(shapes | self.counts(descs), vars(self))

    @property
    def constants(self) -> dict[str, Any]:
        return {"n": self.b_shape[0]} if self.b_shape and self.given("b_ptrs") else {}

    # Values on the device.

    @property
    def validates(self) -> bool:
        return settings.VALIDATE_DEVICE_VALUES.get()

    def check_values(self, tensors: Sequence[Any]) -> None:
        """Raises for a call whose experts end where they cannot, or for an address that is none. Waits for the GPU.

        Raises:
            ValueError: such a value.
            RuntimeError: a CUDA graph is captured.
        """
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            name, cure = settings.VALIDATE_DEVICE_VALUES.name, "unset it before objects are compiled"
            raise refused(RuntimeError, self._title(), name, "1 in a CUDA graph's capture", "0, then", cure)
        given = dict(zip(self.names, tensors, strict=True))
        if self.schedule.searches:  # else nobody reads where experts end
            ends = next(given[spec.name] for spec in self.tensors if spec.draw == "ends")
            self.check_ends(ends, self.sizes_now(tensors), *self.steps_of_ends())
        for name in ("b_ptrs", "sfb_ptrs", "wgrad_ptrs"):
            wrong = [x for x in ([] if given.get(name) is None else given[name].tolist()) if not x or x % ALIGNMENT]
            if wrong:
                raise self.error(name, f"{wrong[0]:#x}", f"addresses, multiples of {ALIGNMENT} bytes")

    def check_ends(self, offsets: Any, sizes: Sizes, step: int = 1, last: int = 1) -> None:
        """Raises for experts that end before they begin, beyond all tokens, or not at multiples of ``step``, the last
        one of ``last``. Waits for a GPU.
        """
        ends, tokens = offsets.flatten().tolist(), sizes[self.tokens]
        decrease = any(end < before for before, end in zip([0, *ends], [*ends, tokens], strict=True))
        if decrease or ends[-1] % last or any(end % step for end in ends if end < ends[-1]):
            multiples = f", multiples of {step}" if step > 1 else ""
            got = f"{ends[:8]}{'...' if len(ends) > 8 else ''}"
            raise self.error("offsets", got, f"numbers that do not decrease, from 0 to {tokens}{multiples}")

    def steps_of_ends(self) -> tuple[int, int]:
        """Rows, or tokens, whose multiples the ends of experts are, and that of the last one."""
        return (max(self.schedule.row_alignment, 1),) * 2

    # Weights behind addresses.

    def kind(self, name: str) -> str:
        return name_of(self.b_dtype) if name == "b" and self.given("b_ptrs") else super().kind(name)

    def major(self, name: str) -> str:
        return self.b_major if name == "b" and self.given("b_ptrs") else super().major(name)

    def operand(self, name: str) -> Operand:
        if name == "a" or not self.given("b_ptrs"):
            index = f"{name}_index"
            return replace(super().operand(name), index=index if self.given(index) else "")
        return replace(super().operand(name), pointers=True)

    def weights(self, tensors: Mapping[str, Any]) -> list[Any]:
        """The values of each expert's weights, (n, k), on the CPU or in one tensor."""
        vector = self.sf_vec_size
        if tensors.get("b_ptrs") is None:
            every = dequantize(tensors["b"], tensors.get("sfb"), vector)
            return list(every.unbind(2))
        n, k = self.b_shape or (0, 0)
        found = addresses.matrices(tensors["b_ptrs"], n, k, self.b_dtype, self.b_major == "n")
        factors: list[Any] = [None] * len(found)
        if self.scaled:
            factors = addresses.scales(tensors["sfb_ptrs"], n, k, vector, tensors["sfa"].dtype)
        return [dequantize(x, scales, vector)[..., 0] for x, scales in zip(found, factors, strict=True)]

    @classmethod
    def arranged(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A wrapper's arguments with what the constructor wants to know of weights behind addresses.

        Raises:
            ValueError: weights in both ways or in none, or addresses that are none.
        """
        where, b, given = f"{cls.folder()}_wrapper", arguments.get("b_tensor"), arguments.get("b_ptrs")
        if (b is None) == (given is None):
            got = "both" if b is not None else "neither"
            raise refused(ValueError, where, "b_tensor and b_ptrs", got, "one of them")
        if b is not None:
            if arguments.get("n") is not None:
                raise refused(ValueError, where, "n", arguments["n"], "None, where b is a tensor")
            return arguments
        a, n, b_dtype = arguments["a_tensor"], arguments.get("n"), arguments.get("b_dtype")
        if n is None or b_dtype is None:
            raise refused(ValueError, where, "n and b_dtype", f"{n} and {b_dtype}", "both, for weights behind b_ptrs")
        check_rank(where, "a", a, (2, 3), "(m, k, 1)")
        experts = arguments["padded_offsets"].numel()
        addresses.check(where, "b_ptrs", given, experts, a.device)
        if arguments.get("sfa_tensor") is not None:
            addresses.check(where, "sfb_ptrs", arguments["sfb_ptrs"], experts, a.device)
        return {**arguments, "num_experts": experts, "b_shape": (n, cls.shape_of(a)[1])}

    @classmethod
    def viewed(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Weights ``(experts, k, n)``, flat scale factors in the order of their memory, and bytes that count as one
        element each as pairs.
        """
        a, b, sfa, sfb = (tensors.get(name) for name in ("a", "b", "sfa", "sfb"))
        if options.get("b_major") == "n" and getattr(b, "ndim", 0) == 3 and Weights.is_experts_first(b):
            tensors = {**tensors, "b": b.permute(2, 1, 0)}
        flat = [getattr(x, "ndim", 6) not in (3, 6) for x in (sfa, sfb)]
        single = cls.single_bytes and tensors.get("b") is not None
        raw = sfa is not None and a.dtype == torch.uint8 and is_raw(a, sfa, options["sf_vec_size"], single)
        if not raw and True not in flat:
            return tensors
        found = dict(tensors)
        for name in ("a", "b") if raw else ():
            if tensors.get(name) is not None:
                found[name] = pairs_of(tensors[name])
        layout = Weights("n", "k", "nk")
        shapes = {"a": cls.shape_of(found["a"]), "b": (*(options.get("b_shape") or ()), options.get("num_experts"))}
        if found.get("b") is not None:
            b = found["b"]
            shapes["b"] = cls.shape_of(b if layout.fits(b) else layout.fitted(b))
        shapes["a"] = (*shapes["a"], 1)[:3]
        for name, is_flat in zip("ab", flat, strict=True):
            if is_flat:
                found[f"sf{name}"] = in_atoms(
                    cls._title(), f"sf{name}", found[f"sf{name}"], shapes[name], options["sf_vec_size"]
                )
        return found

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
        if self.given("scheduler_counter") and not (self.scaled and self.use_dynamic_sched and self.given("b")):
            allowed = "None, but for use_dynamic_sched=True, operands with scale factors and weights in a tensor"
            raise self.error("scheduler_counter tensor", "a tensor", allowed)

    def check_clamp(self, scale: float | None) -> None:
        """Raises unless a clamped ReLU can have this limit, or none."""
        if scale is not None and self.checked_number("tanh_clamp_scale", scale) <= 0:
            raise self.error("tanh_clamp_scale", scale, "None or a positive number")

    def check_weights(self) -> None:
        """Raises unless weights are a tensor or behind addresses."""
        if self.given("b") == (self.num_experts is not None):
            got = "both" if self.given("b") else "neither"
            raise self.error("sample_b and num_experts", got, "one of them: a tensor, or weights behind addresses")
        if self.given("b"):
            for name in ("b_dtype", "b_shape"):
                if getattr(self, name) is not None:
                    raise self.error(name, getattr(self, name), "None, where b is a tensor")
            return
        if self.b_shape is None or self.b_dtype is None:
            raise self.error("b_shape and b_dtype", f"{self.b_shape} and {self.b_dtype}", "both, with num_experts")
        if self.kind("b") != self.kind("a"):
            raise self.error("b_dtype", self.b_dtype, f"{self.kind('a')}, the type of a")
        if self.kind("b") == FLOAT4 and self.b_major == "n":
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
        if not self.scaled and not self.given("sfd_row"):
            controls = {"norm_const_tensor": self.given("norm_const"), "discrete_col_sfd": self.discrete_col_sfd}
            unused = [name for name, given in {**controls, "sf_vec_size": self.sf_vec_size != 16}.items() if given]
            if unused:
                raise self.error(f"{unused[0]} of scale factors", "given", "none, for operands without", "leave it out")
        for name in self.counted_by:
            if self.given(name) and not self.numbers_rows:
                allowed = f"None, but for {' and '.join(NARROW)}, or {SUM_SCALES} sfa"
                raise self.error(f"{name} tensor", f"a tensor, for {self.kind('a')}", allowed, "pass rows in order")
        if self.given("b_ptrs"):
            extent, step = sizes[self.b_major], ALIGNMENT * 8 // BITS[self.kind("b")]
            if extent % step:
                raise self.error(f"{self.b_major} of b", extent, f"multiples of {step}, 16 bytes")
        rows, pairs = self.mma_tiler_mn[0], 2 if self.mma_tiler_mn[0] == 256 else 1
        if self.cluster_shape_mn[0] // pairs * rows not in (128, 256):
            raise self.error("cluster_shape_mn", self.cluster_shape_mn, "128 or 256 rows of a cluster")

    @property
    def numbers_rows(self) -> bool:
        """Whether tokens may have numbers: of 16 bits, or with factors of sums."""
        return self.kind("a") in NARROW or self.kind("sfa") == SUM_SCALES

    def check_groups(self, sizes: Sizes) -> None:
        """Raises for tensors in which experts cannot end everywhere."""
        if self.major("a") != "k":
            raise self.error("a tensor major", self.major("a"), "k: experts end at any row")
        for name in (spec.name for spec in self.tensors if spec.written and isinstance(spec.layout, OneMatrix)):
            if self.given(name) and self.major(name) != "n":
                raise self.error(f"{name} tensor major", self.major(name), "n: experts end at any row")

    def _check_quantized(self) -> None:
        """Scale factors by rows and by columns come together, with what they need."""
        names = ("sfd_row", "sfd_col", "norm_const")
        missing = [name for name in names if not self.given(name)]
        if len(missing) == len(names):
            return
        d, _ = self.result
        if self.kind("sfd_row") == SUM_SCALES:
            self._check_sum_quantized(d)
            return
        if missing == ["norm_const"]:
            raise self.error("norm_const_tensor is required when FP8 inputs are used", "None", "a tensor (1,)")
        if missing == ["sfd_row", "sfd_col"] and self.kind(d) not in FLOAT8:
            self._logger.warning("norm_const is not used: the result has the type %s", self.kind(d))
            return
        if missing:
            raise self.error(f"{' and '.join(missing)}", "None", f"tensors, required with {', '.join(names)}")
        if not self.given("d_col"):
            raise self.error("d_col tensor", "None", "a tensor, with sfd_col")
        if (self.kind("sfd_row"), self.sf_vec_size) != (SCALES[0], 32):
            got = f"{self.kind('sfd_row')} for {self.sf_vec_size} elements"
            raise self.error("sfd_row tensor", got, f"{SCALES[0]} for 32")

    def _check_sum_quantized(self, d: str) -> None:
        """float32 factors of 128 columns of a row stand alone."""
        if self.kind(d) not in FLOAT8:
            raise self.error(f"{d} tensor dtype", self.kind(d), f"{' or '.join(FLOAT8)}, for sfd_row of {SUM_SCALES}")
        if self.sf_vec_size != SUM_VECTOR:
            raise self.error("sf_vec_size", self.sf_vec_size, f"{SUM_VECTOR}, for sfd_row of {SUM_SCALES}")
        for name in ("sfd_col", "d_col"):
            if self.given(name):
                raise self.error(f"{name} tensor", "a tensor", f"None, for sfd_row of {SUM_SCALES}")

    def _check_architecture(self, arch: str) -> None:
        super()._check_architecture(arch)
        if self.kind("sfd_row") != SUM_SCALES:
            return
        of_sums, sums = self.kind("sfa") == SUM_SCALES, f"a block takes {2 * SUM_VECTOR} columns, too many registers"
        if arch == "sm_100a" and of_sums:
            allowed = f"{SUM_SCALES} for the operands or for d: {sums}"
            raise self.unsupported("sfa and sfd_row tensors, on sm_100a", f"{SUM_SCALES} for both", allowed)
        if arch == "sm_90a" and self.kind("a") in FLOAT8 and not of_sums:
            allowed = f"16 bits, or scale factors of {SUM_SCALES}: {sums}"
            raise self.unsupported("a tensor dtype, for sfd_row of float32, on sm_90a", self.kind("a"), allowed)

    # What runs.

    def reference(self, tensors: Mapping[str, Any]) -> None:
        a = numbered(dequantize(tensors["a"], tensors.get("sfa"), self.sf_vec_size), tensors.get("a_index"))
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
        product = woven(product) if self.weaves() else product
        layouts = {spec.name: spec.layout for spec in self.tensors}
        used = {n: x if x is None or n not in layouts else _first(x, layouts[n], ends[-1]) for n, x in tensors.items()}
        evaluate(self.operations(), product, used, groups)

    # The wrapper, and what it usually makes.

    @classmethod
    def cache_key(cls, given: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Types, majors and the number of experts; n and k where those are static."""
        a, b = given["a"], given.get("b")
        semantics = options.get("semantics") or settings.SEMANTICS.get()
        kinds = tuple((name, None if t is None else (t.dtype, t.device)) for name, t in given.items())
        if b is None:
            return (semantics, kinds)
        static = () if settings.GROUPED_GEMM_DYNAMIC_MNKL.get() else (a.shape[1], b.shape[0])
        rows = cls.rows_of_block(b, given.get("sfb"))
        return (semantics, kinds, b.shape[-1], cls.majors_of(given), rows, *static)

    @classmethod
    def majors_of(cls, given: Mapping[str, Any]) -> tuple[str, ...]:
        """The dimensions of stride 1 of the operands."""
        layouts = {name: cls.spec(name).layout for name in ("a", "b")}
        return tuple(x.major(given[n].shape, given[n].stride()) for n, x in layouts.items() if isinstance(x, Matrix))

    @classmethod
    def presented(cls, name: str, tensor: Any, given: Mapping[str, Any]) -> Any:
        """As A is: for tokens (m, k), rows without the last dimension, and factors in the order of their memory."""
        if given["a"].ndim == 3:
            return tensor
        layout = cls.spec(name).layout
        if isinstance(layout, BlockScales):
            return tensor.permute(5, 2, 4, 0, 1, 3)
        return tensor.squeeze(-1) if isinstance(layout, OneMatrix) else tensor

    @classmethod
    def blank(cls, shape: Sequence[int], kind: str, device: Any) -> dict[str, Any]:
        """Inputs of a problem (m, n, k, experts) by name, not initialised; optional ones where operands of these types,
        by their short name, need them. Weights are among them also where they are always behind addresses.
        """
        element = OPERAND_TYPES[kind]
        sizes = cls.example_sizes(dict(zip(cls.example[0], shape, strict=True))) | {"vector": element.vector}
        types = {"a": element.element, "b": element.element, "sfa": element.scale, "sfb": element.scale}
        found = {}
        hidden = [spec for spec in operands() if spec.name in ("b", "sfb")] if cls.takes_addresses() else []
        for spec in (*hidden, *cls.tensors):
            wanted = types.get(spec.name, spec.name in ("prob", "beta") or not spec.optional)
            if wanted and spec.sampled and not spec.written:
                layout, dtype = spec.layout, getattr(torch, types.get(spec.name, spec.types[0]))
                major = layout.majors[cls.inner] if isinstance(layout, Matrix) else ""
                found[spec.name] = layout.allocate(sizes, major, dtype, device)
        return found

    @classmethod
    def usual(cls, dtype: str, shape: tuple[int, ...], arch: str) -> Iterable[FusedAPI]:
        """K-major operands and the wrapper's own choice of everything else."""
        given, kind = cls.blank(shape, dtype, "meta"), OPERAND_TYPES[dtype]
        options = {"sf_vec_size": kind.vector} if kind.scale else {}
        options |= cls.hidden_weights(given)
        results = cls.allocated(given, options)
        if "sfd_row" in results:
            given["norm_const"] = torch.empty(1, dtype=torch.float32, device="meta")
        made_by: Any = cls
        yield made_by(**cls.samples({**given, **results}), **options, arch=arch)

    @classmethod
    def allocated(cls, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """The results that the wrapper would allocate for these inputs, where it is told nothing of them."""
        parameters = inspect.signature(registry.wrapper(cls.folder())).parameters.values()
        missing = dict.fromkeys(spec.name for spec in cls.tensors)
        results = cls.results({**missing, **{p.name: p.default for p in parameters}, **given})
        return allocate(cls, given, {**cls.defaults(), **options}, results)

    @classmethod
    def takes_addresses(cls) -> bool:
        """Whether weights are always behind addresses."""
        return all(spec.name != "b" for spec in cls.tensors)

    @classmethod
    def hidden_weights(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the constructor wants to know of an example's weights where they are behind addresses."""
        if not cls.takes_addresses():
            return {}
        n, k, experts = cls.shape_of(given["b"])
        return {"num_experts": experts, "b_shape": (n, k), "b_dtype": given["b"].dtype}

    @classmethod
    def shapes_of(cls, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        if given.get("b") is not None:
            return super().shapes_of(given, options)
        weights = (*options["b_shape"], options["num_experts"])
        return {"a": cls.shape_of(given["a"]), "b": weights} | cls.counts(given)


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
    """What belongs to the first tokens."""
    if isinstance(layout, (OneMatrix, Column)) or (isinstance(layout, BlockScales) and tensor.ndim == 3):
        return tensor[:rows]
    if isinstance(layout, BlockScales) and layout.rows == "m":
        return tensor[:, :, : ceil_div(rows, 128)]
    if isinstance(layout, BlockScales) and layout.columns == "m":
        return tensor[..., : ceil_div(rows, 128), :]
    return tensor
