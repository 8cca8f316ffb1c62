"""What all fused GEMMs share: operands plain or block-scaled, an epilogue, tiles."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cudnn.api_base import TensorDesc, is_power_of_2
from cudnn.errors import refused
from cudnn.fused.host import ALIGNMENT, FusedAPI
from cudnn.fused.layouts import Contiguous, Matrix, Sizes
from cudnn.gemm.formats import BITS, BLOCK_SCALED, FLOAT4, FLOAT8, SCALES, SUM_SCALES, SUM_VECTOR, name_of
from cudnn.gemm.reference import evaluate, product, woven
from cudnn.lazy import torch
from cudnn.runtime.call import Plan, kernel_plan
from cudnn_kernels import epilogue
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.problem import BlockScale, GemmProblem, Operand

NARROW = ("float16", "bfloat16")
ONE = Contiguous(1, alignment=4)
_DEQUANTISED = {
    "sm_90a": "block-scaled operands are dequantised to bfloat16 on sm_90a, whose tensor cores know no block scales",
    "sm_100a": "block-scaled operands are dequantised to bfloat16 on sm_100a if each expert's are a matrix of its own",
}


@dataclass(frozen=True)
class OperandType:
    """Operands by a short name: elements, the type of their factors and how many elements share one; a type of 16 bits
    for results.
    """

    element: str
    out: str = "bfloat16"
    scale: str = ""
    vector: int = 16


OPERAND_TYPES: Mapping[str, OperandType] = {
    "bf16": OperandType("bfloat16"),
    "fp16": OperandType("float16", "float16"),
    "fp8": OperandType("float8_e4m3fn"),
    "fp8_128": OperandType("float8_e4m3fn", scale="float32", vector=128),
    "mxfp8": OperandType("float8_e4m3fn", scale="float8_e8m0fnu", vector=32),
    "nvfp4": OperandType(FLOAT4, scale="float8_e4m3fn", vector=16),
}
"""What programs, benchmarks and compilation ahead of time call them."""


def scale_type(given: Mapping[str, Any]) -> Any:
    """The type of a result's scale factors: of those of A where there are some, else by how many elements share one."""
    if given["sfa"] is not None:
        return given["sfa"].dtype
    return torch.float32 if given["sf_vec_size"] == SUM_VECTOR else torch.float8_e8m0fnu


class FusedGemm(FusedAPI):
    """A GEMM with an epilogue, on tensors like the samples.

    A subclass declares its ``tensors``, says which of them is the last ``result`` and which holds its scale factors,
    ``""`` for none, and gives the epilogue and the rules of its own.
    """

    pairs: ClassVar[int] = 1  # columns of the product for each column of the result
    result: ClassVar[tuple[str, str]]
    tile_m: ClassVar[Sequence[int]] = (128, 256)
    tile_n: ClassVar[Sequence[int]] = (64, 128, 192, 256)
    largest_cluster: ClassVar[int] = 16  # in each dimension
    default_cluster: ClassVar[tuple[int, int]] = (1, 1)  # for a tile of 256 rows
    schedule: Any  # of the kernels: dense, or grouped
    sized_by = multiplied = ("a", "b")
    columns_in: tuple[int, str] = (1, "")  # how many columns of the product belong together, as an error says it
    packs = True
    vectors: ClassVar[Sequence[int]] = (16, 32)  # elements that may share a scale factor
    usual_types = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
    hints = ("acc_dtype", "mma_tiler_mn", "cluster_shape_mn", "vector_f32", "ab12_stages")

    acc_dtype: Any
    mma_tiler_mn: tuple[int, int]
    cluster_shape_mn: tuple[int, int]
    sf_vec_size: int
    vector_f32: bool = False
    accurate: bool = False
    power_of_two_scales: bool = False

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        if self.cluster_shape_mn is None:
            self.cluster_shape_mn = self.default_cluster if self.mma_tiler_mn[0] == 256 else (1, 1)
        self.sfb_rows = self.rows_of_block(self.descs.get("b"), self.descs.get("sfb"))

    @staticmethod
    def rows_of_block(b: Any, sfb: Any) -> int:
        """Rows of B that share a float32 factor: 1 where there are as many factors as rows, else 128."""
        return 1 if b is not None and sfb is not None and tuple(sfb.shape[:1]) == tuple(b.shape[:1]) else SUM_VECTOR

    @classmethod
    def flops(cls, sizes: Sizes) -> int:
        """Of the product: rows of experts are counted as the tensor has them, since the ends are on the device."""
        return 2 * sizes["m"] * sizes["n"] * sizes["k"] * sizes.get("l", 1)

    # What a subclass says.

    @abstractmethod
    def operations(self) -> tuple[Any, ...]:
        """What becomes of the product, in the kernels' vocabulary."""

    @abstractmethod
    def check_own_rules(self, sizes: Sizes) -> None:
        """Raises for what this operation in particular does not take."""

    def result_epilogue(self, name: str) -> tuple[Any, ...]:
        """The end of every epilogue: the amax, the quantiser, the store of the result."""
        operations: list[Any] = [epilogue.Amax("amax")] if self.given("amax") else []
        if self.quantizes():
            _, scales = self.result
            quantizer = epilogue.QuantizeRows(scales, self.kind(name), self.kind(scales), self.sf_vec_size)
            operations.append(replace(quantizer, power_of_two=bool(self.power_of_two_scales)))
        return (*operations, self.store(name))

    def store(self, name: str, value: str = "x", halves: bool = False) -> Any:
        """The store of a value into a tensor, whose columns may be halves that take turns in the value."""
        return epilogue.StoreTile(name, self.kind(name), self.major(name), value, concat_glu=halves)

    def load(self, name: str) -> Any:
        """A tensor as the value ``c``."""
        return epilogue.LoadTile(name, self.kind(name), self.major(name))

    # What was given.

    def kind(self, name: str) -> str:
        """The name of a sample's type, that of packed elements for bytes; ``""`` where there is none."""
        desc = self.descs.get(name)
        return "" if desc is None else name_of(desc.dtype)

    def major(self, name: str) -> str:
        """The dimension of stride 1 of a sample."""
        desc, layout = self.descs[name], self.spec(name).layout
        assert desc is not None and isinstance(layout, Matrix)  # noqa: PT018
        return layout.major(desc.shape, desc.stride)

    @property
    def scaled(self) -> bool:
        """Whether the operands have scale factors."""
        return self.given("sfa")

    def quantizes(self) -> bool:
        """Whether the result is written with scale factors."""
        result, scales = self.result
        return self.given(scales) and self.kind(result) in FLOAT8

    # Support.

    def check_options(self) -> None:
        self.check_vector(self.sf_vec_size)
        if self.kind("sfa") == SUM_SCALES and self.sf_vec_size != SUM_VECTOR:
            raise self.error("sf_vec_size", self.sf_vec_size, f"{SUM_VECTOR}, for scale factors of {SUM_SCALES}")

    @classmethod
    def check_vector(cls, size: int) -> None:
        """Raises unless so many elements may share a scale factor."""
        if size not in cls.vectors:
            *rest, last = map(str, cls.vectors)
            raise refused(ValueError, cls._title(), "sf_vec_size", size, f"{', '.join(rest)} or {last}")

    def check_rules(self, sizes: Sizes) -> None:
        if self.acc_dtype != torch.float32:
            self.check_accumulator()
        self.check_alignment(self.descs)
        self._check_block_scales()
        self._check_quantized()
        self._check_tiles()
        self.check_own_rules(sizes)

    def check_sizes(self, sizes: Sizes) -> None:
        step, words = self.columns_in
        if sizes["n"] % step:
            raise self.error("columns of the product", sizes["n"], f"multiples of {words}")

    def check_accumulator(self) -> None:
        """Raises unless products can be accumulated in ``acc_dtype``, which is not float32."""
        raise self.error("acc_dtype", self.acc_dtype, "torch.float32")

    def check_alignment(self, descs: Mapping[str, TensorDesc | None]) -> None:
        for name, layout in [(spec.name, spec.layout) for spec in self.tensors if isinstance(spec.layout, Matrix)]:
            desc = descs.get(name)
            if desc is None:
                continue
            major, kind = layout.major(desc.shape, desc.stride), name_of(desc.dtype)
            extent = desc.shape[layout.majors.index(major)]
            step = ALIGNMENT * 8 // BITS[kind]
            if extent % step:
                allowed = f"multiples of {step}, 16 bytes"
                raise self.error(f"{name} tensor, its contiguous dimension", extent, allowed, "pad it")
            if kind == FLOAT4 and major == layout.majors[0]:
                raise self.error(f"{name} tensor, packed", f"{major}-major", f"{layout.majors[1]}-major")

    def _check_block_scales(self) -> None:
        """Which scale factors go with which elements."""
        if self.given("sfa") != (self.given("sfb") or self.given("sfb_ptrs")):
            raise self.error("sfa and sfb tensors", "one of them", "both or none")
        kind, scales, vector = self.kind("a"), self.kind("sfa"), self.sf_vec_size
        if not self.scaled:
            if kind == FLOAT4:
                raise self.error("sfa and sfb tensors", "None", f"scale factors, for {kind}")
            return
        if kind not in BLOCK_SCALED:
            raise self.error("a tensor dtype, with scale factors", kind, ", ".join([FLOAT4, *FLOAT8]))
        if scales == SUM_SCALES or vector == SUM_VECTOR:
            if kind not in FLOAT8 or (scales, vector) != (SUM_SCALES, SUM_VECTOR):
                got, allowed = f"{scales} for {vector} elements of {kind}", f"{SUM_SCALES} for {SUM_VECTOR} of 8 bits"
                raise self.error("scale factors", got, allowed)
            return
        if (scales, vector) == (SCALES[1], 32):
            raise self.error("sf_vec_size", vector, f"16, for scale factors of {scales}")
        if kind in FLOAT8 and (scales, vector) != (SCALES[0], 32):
            raise self.error("scale factors", f"{scales} for {vector} elements", f"{SCALES[0]} for 32, of {kind}")

    def _check_quantized(self) -> None:
        """A result of 8 bits has scale factors; another one has none."""
        result, scales = self.result
        if not scales:
            return
        if self.power_of_two_scales and (self.kind(result) not in FLOAT8 or self.kind(scales) != SUM_SCALES):
            allowed = f"False, for a result without scale factors of {SUM_SCALES}"
            raise self.error("power_of_two_scales", self.power_of_two_scales, allowed)
        if self.kind(result) not in FLOAT8:
            for name in (scales, "norm_const"):
                if self.given(name):
                    self._logger.warning("%s is not used: the result has the type %s", name, self.kind(result))
            return
        if not (self.given(scales) and self.given("norm_const")):
            raise self.error(
                f"{scales} and norm_const tensors", "None", f"tensors, required for {self.kind(result)} {result}"
            )
        form = (self.kind(scales), self.sf_vec_size)
        if form not in ((SCALES[0], 32), (SUM_SCALES, SUM_VECTOR)):
            allowed = f"{SCALES[0]} for 32, {SUM_SCALES} for {SUM_VECTOR}"
            raise self.error(f"{scales} tensor", "{} for {} elements".format(*form), allowed)
        if form[1] == SUM_VECTOR:
            self.check_sum_factors(scales)

    def check_sum_factors(self, scales: str) -> None:
        """Raises where float32 factors of 128 columns of the result are not there."""
        if epilogue.traits_of(self.operations()).width != 1:
            allowed = f"{SCALES[0]} for 32: those of {SUM_VECTOR} columns are not there for this API's results"
            raise self.unsupported(f"{scales} tensor", f"{SUM_SCALES} for {SUM_VECTOR} elements", allowed)

    def _check_tiles(self) -> None:
        """The instruction's tile and the cluster. On Hopper both are hints that nothing depends on."""
        m, n = self.mma_tiler_mn
        if m not in self.tile_m:
            raise self.error("mma_tiler_mn", self.mma_tiler_mn, f"{' or '.join(map(str, self.tile_m))} rows")
        if n not in self.tile_n:
            raise self.error("mma_tiler_mn", self.mma_tiler_mn, f"{', '.join(map(str, self.tile_n))} columns")
        if any(not is_power_of_2(size) or size > self.largest_cluster for size in self.cluster_shape_mn):
            raise self.error("cluster_shape_mn", self.cluster_shape_mn, f"powers of 2 up to {self.largest_cluster}")
        rows, columns = self.cluster_shape_mn
        if rows * columns > 16:
            raise self.error("cluster_shape_mn", self.cluster_shape_mn, "at most 16 CTAs")
        if m == 256 and rows % 2:
            raise self.error("cluster_shape_mn", self.cluster_shape_mn, "an even number of rows, for a tile of 256")

    # What runs.

    def operand(self, name: str) -> Operand:
        """A or B, as the kernels know it."""
        scale = BlockScale(self.kind("sfa"), self.sf_vec_size) if self.scaled else None
        if name == "b" and scale is not None and scale.scales_accumulator:
            scale = replace(scale, rows=self.sfb_rows)
        return Operand(self.kind(name), "k" if self.major(name) == "k" else "mn", scale)

    def plan(self, arch: str, sizes: Sizes) -> Plan:
        """Operands that tensor cores or the copy engine cannot read are prepared in a workspace, in the same call."""
        problem = GemmProblem(
            self.operand("a"),
            self.operand("b"),
            tuple(self.operations()),
            self.schedule,
            sizes["n"],
            sizes["k"],
            self.mma_tiler_mn,
            self.cluster_shape_mn,
            bool(self.accurate),
            self.weaves(),
            sizes.get("experts", 1),
        )
        chosen = ARCHITECTURES[arch].configure(problem)
        dequantised = any(step.source.scale for _, step in chosen.prepared)
        return kernel_plan(arch, chosen, chosen.cluster, _DEQUANTISED[arch] if dequantised else "")

    def weaves(self) -> bool:
        """Whether blocks of 32 columns of the product come in turn from the two halves of B's rows."""
        return False

    def reference(self, tensors: Mapping[str, Any]) -> None:
        accumulator = product(tensors, self.sf_vec_size)
        evaluate(self.operations(), woven(accumulator) if self.weaves() else accumulator, tensors)

    @classmethod
    def shape_of(cls, tensor: Any) -> tuple[int, ...]:
        if name_of(tensor.dtype) == FLOAT4:
            return TensorDesc.of(tensor, interpret_uint8_as_fp4x2=True).shape
        return tensor.shape
