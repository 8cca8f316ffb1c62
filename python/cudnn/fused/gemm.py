"""The base of all fused GEMMs: operands plain or block-scaled, an epilogue, tiles."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cudnn.api_base import TensorDesc, is_power_of_2
from cudnn.errors import make_error
from cudnn.fused.host import ALIGNMENT, FusedAPI
from cudnn.fused.layouts import Contiguous, Matrix, Sizes
from cudnn.gemm.formats import BITS, BLOCK_SCALED, BLOCKWISE_DTYPE, BLOCKWISE_SIZE, FLOAT4, FLOAT8, SCALES, name_of
from cudnn.gemm.reference import evaluate, interleave_glu, product
from cudnn.lazy import torch
from cudnn.runtime.call import KernelPlan, kernel_plan
from cudnn_kernels import epilogue
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.gemm.problem import BlockScale, GemmProblem, Operand

NARROW = ("float16", "bfloat16")
ONE = Contiguous(1, alignment=4)
_DEQUANTISED = {
    "sm_90a": "block-scaled operands are dequantized to bfloat16 on sm_90a, whose tensor cores know no block scales",
    "sm_100a": "block-scaled operands are dequantized to bfloat16 on sm_100a for ragged operands (a matrix per expert)",
}


@dataclass(frozen=True)
class OperandType:
    """Operands by a short name: the element type, the scale factor type, the elements per scale factor, and a 16-bit
    type for results.
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
"""The short names that demo programs, benchmarks and ahead-of-time compilation use."""


def scale_type(arguments: Mapping[str, Any]) -> Any:
    """The dtype of a result's scale factors: that of sfa, if any, else the one for ``sf_vec_size``."""
    if arguments["sfa"] is not None:
        return arguments["sfa"].dtype
    return torch.float32 if arguments["sf_vec_size"] == BLOCKWISE_SIZE else torch.float8_e8m0fnu


class FusedGemm(FusedAPI):
    """A GEMM with an epilogue, on tensors like the samples.

    A subclass declares its ``tensors``, the names of the last ``result`` and of its scale factors (``""`` for none),
    the epilogue and its rules.
    """

    pairs: ClassVar[int] = 1  # columns of the accumulator for each column of the result
    result: ClassVar[tuple[str, str]]
    tile_m: ClassVar[Sequence[int]] = (128, 256)
    tile_n: ClassVar[Sequence[int]] = (64, 128, 192, 256)
    largest_cluster: ClassVar[int] = 16  # in each dimension
    default_cluster: ClassVar[tuple[int, int]] = (1, 1)  # for a tile of 256 rows
    schedule: Any  # of the kernels: dense, or grouped
    sized_by = autocast_inputs = ("a", "b")
    columns_in: tuple[int, str] = (1, "")  # n is a multiple of it; its description in errors
    packs = True
    vectors: ClassVar[Sequence[int]] = (16, 32)  # elements that may share a scale factor
    aot_dtypes = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
    hints = ("acc_dtype", "mma_tiler_mn", "cluster_shape_mn", "vector_f32", "ab12_stages")

    acc_dtype: Any
    mma_tiler_mn: tuple[int, int]
    cluster_shape_mn: tuple[int, int]
    sf_vec_size: int
    vector_f32: bool = False
    accurate: bool = False
    power_of_two_scales: bool = False

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        if self.cluster_shape_mn is None:
            self.cluster_shape_mn = self.default_cluster if self.mma_tiler_mn[0] == 256 else (1, 1)
        self.sfb_rows = self.rows_of_block(self.descs.get("b"), self.descs.get("sfb"))

    @staticmethod
    def rows_of_block(b: Any, sfb: Any) -> int:
        """Rows of B per float32 scale factor: 1 if sfb has a row for each row of B, else 128."""
        return 1 if b is not None and sfb is not None and tuple(sfb.shape[:1]) == tuple(b.shape[:1]) else BLOCKWISE_SIZE

    @classmethod
    def flops(cls, sizes: Sizes) -> int:
        """FLOPs of the GEMM. All rows of a grouped A count, because the experts' offsets are on the device."""
        return 2 * sizes["m"] * sizes["n"] * sizes["k"] * sizes.get("l", 1)

    # Declared by subclasses.

    @abstractmethod
    def operations(self) -> tuple[Any, ...]:
        """The epilogue operations."""

    @abstractmethod
    def check_own_rules(self, sizes: Sizes) -> None:
        """Raises for samples that this operation does not support."""

    def result_epilogue(self, name: str) -> tuple[Any, ...]:
        """The last operations of an epilogue: amax, quantization, store of the result."""
        operations: list[Any] = [epilogue.Amax("amax")] if self.has("amax") else []
        if self.quantizes():
            _, scales = self.result
            quantizer = epilogue.QuantizeRows(scales, self.dtype_name(name), self.dtype_name(scales), self.sf_vec_size)
            operations.append(replace(quantizer, power_of_two=bool(self.power_of_two_scales)))
        return (*operations, self.store(name))

    def store(self, name: str, value: str = "x", concat_glu: bool = False) -> Any:
        """The store of a value into a tensor. ``concat_glu``: the tensor has concatenated halves, the value interleaved
        blocks.
        """
        return epilogue.StoreTile(name, self.dtype_name(name), self.major(name), value, concat_glu=concat_glu)

    def load(self, name: str) -> Any:
        """A tensor as the value ``c``."""
        return epilogue.LoadTile(name, self.dtype_name(name), self.major(name))

    # Samples.

    def dtype_name(self, name: str) -> str:
        """The name of a sample's dtype, that of packed FP4 for bytes; ``""`` without a sample."""
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
        return self.has("sfa")

    def quantizes(self) -> bool:
        """Whether the result is written with scale factors."""
        result, scales = self.result
        return self.has(scales) and self.dtype_name(result) in FLOAT8

    # Support.

    def check_options(self) -> None:
        self.check_vector(self.sf_vec_size)
        if self.dtype_name("sfa") == BLOCKWISE_DTYPE and self.sf_vec_size != BLOCKWISE_SIZE:
            raise self.error(
                "sf_vec_size", self.sf_vec_size, f"{BLOCKWISE_SIZE}, for scale factors of {BLOCKWISE_DTYPE}"
            )

    @classmethod
    def check_vector(cls, size: int) -> None:
        """Raises unless ``size`` elements may share a scale factor."""
        if size not in cls.vectors:
            *rest, last = map(str, cls.vectors)
            raise make_error(ValueError, cls._title(), "sf_vec_size", size, f"{', '.join(rest)} or {last}")

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
            raise self.error("n", sizes["n"], f"multiples of {words}")

    def check_accumulator(self) -> None:
        """Raises unless ``acc_dtype``, which is not float32, is supported."""
        raise self.error("acc_dtype", self.acc_dtype, "torch.float32")

    def check_alignment(self, descs: Mapping[str, TensorDesc | None]) -> None:
        for name, layout in [(spec.name, spec.layout) for spec in self.tensors if isinstance(spec.layout, Matrix)]:
            desc = descs.get(name)
            if desc is None:
                continue
            major, dtype = layout.major(desc.shape, desc.stride), name_of(desc.dtype)
            extent = desc.shape[layout.majors.index(major)]
            step = ALIGNMENT * 8 // BITS[dtype]
            if extent % step:
                allowed = f"multiples of {step}, 16 bytes"
                raise self.error(f"{name} tensor, its contiguous dimension", extent, allowed, "pad it")
            if dtype == FLOAT4 and major == layout.majors[0]:
                raise self.error(f"{name} tensor, packed", f"{major}-major", f"{layout.majors[1]}-major")

    def _check_block_scales(self) -> None:
        """Checks that the scale factors fit the operands' dtype."""
        if self.has("sfa") != (self.has("sfb") or self.has("sfb_ptrs")):
            raise self.error("sfa and sfb tensors", "one of them", "both or none")
        dtype, scales, vector = self.dtype_name("a"), self.dtype_name("sfa"), self.sf_vec_size
        if not self.scaled:
            if dtype == FLOAT4:
                raise self.error("sfa and sfb tensors", "None", f"scale factors, for {dtype}")
            return
        if dtype not in BLOCK_SCALED:
            raise self.error("a tensor dtype, with scale factors", dtype, ", ".join([FLOAT4, *FLOAT8]))
        if scales == BLOCKWISE_DTYPE or vector == BLOCKWISE_SIZE:
            if dtype not in FLOAT8 or (scales, vector) != (BLOCKWISE_DTYPE, BLOCKWISE_SIZE):
                got, allowed = (
                    f"{scales} for {vector} elements of {dtype}",
                    f"{BLOCKWISE_DTYPE} for {BLOCKWISE_SIZE} of 8 bits",
                )
                raise self.error("scale factors", got, allowed)
            return
        if (scales, vector) == (SCALES[1], 32):
            raise self.error("sf_vec_size", vector, f"16, for scale factors of {scales}")
        if dtype in FLOAT8 and (scales, vector) != (SCALES[0], 32):
            raise self.error("scale factors", f"{scales} for {vector} elements", f"{SCALES[0]} for 32, of {dtype}")

    def _check_quantized(self) -> None:
        """A result of 8 bits has scale factors, others have none."""
        result, scales = self.result
        if not scales:
            return
        if self.power_of_two_scales and (
            self.dtype_name(result) not in FLOAT8 or self.dtype_name(scales) != BLOCKWISE_DTYPE
        ):
            allowed = f"False, for a result without scale factors of {BLOCKWISE_DTYPE}"
            raise self.error("power_of_two_scales", self.power_of_two_scales, allowed)
        if self.dtype_name(result) not in FLOAT8:
            for name in (scales, "norm_const"):
                if self.has(name):
                    self._logger.warning("%s is not used: the result has the type %s", name, self.dtype_name(result))
            return
        if not (self.has(scales) and self.has("norm_const")):
            raise self.error(
                f"{scales} and norm_const tensors", "None", f"tensors, required for {self.dtype_name(result)} {result}"
            )
        form = (self.dtype_name(scales), self.sf_vec_size)
        if form not in ((SCALES[0], 32), (BLOCKWISE_DTYPE, BLOCKWISE_SIZE)):
            allowed = f"{SCALES[0]} for 32, {BLOCKWISE_DTYPE} for {BLOCKWISE_SIZE}"
            raise self.error(f"{scales} tensor", "{} for {} elements".format(*form), allowed)
        if form[1] == BLOCKWISE_SIZE:
            self.check_blockwise_scales(scales)

    def check_blockwise_scales(self, scales: str) -> None:
        """Raises if the epilogue cannot quantize with float32 scales of 128 columns."""
        if epilogue.traits_of(self.operations()).width != 1:
            allowed = f"{SCALES[0]} for 32: this API's results have no scale factors of {BLOCKWISE_SIZE} columns"
            raise self.unsupported(f"{scales} tensor", f"{BLOCKWISE_DTYPE} for {BLOCKWISE_SIZE} elements", allowed)

    def _check_tiles(self) -> None:
        """Checks the MMA tile and the cluster shape. On Hopper both are hints only."""
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

    # The kernel.

    def operand(self, name: str) -> Operand:
        """Operand A or B of the kernel's problem."""
        scale = BlockScale(self.dtype_name("sfa"), self.sf_vec_size) if self.scaled else None
        if name == "b" and scale is not None and scale.scales_accumulator:
            scale = replace(scale, rows=self.sfb_rows)
        return Operand(self.dtype_name(name), "k" if self.major(name) == "k" else "mn", scale)

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        """The kernel's plan. Operands that tensor cores or TMA cannot read are converted into the workspace by a
        pre-pass.
        """
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
            self.interleaves_glu(),
            sizes.get("experts", 1),
            sizes["m"],
        )
        chosen = ARCHITECTURES[arch].configure(problem)
        dequantized = any(step.source.scale for _, step in chosen.prepared)
        return kernel_plan(arch, chosen, chosen.cluster, _DEQUANTISED[arch] if dequantized else "")

    def interleaves_glu(self) -> bool:
        """Whether the kernel interleaves blocks of 32 columns from the two halves of B's rows (concatenated GLU
        weights).
        """
        return False

    def reference(self, tensors: Mapping[str, Any]) -> None:
        accumulator = product(tensors, self.sf_vec_size)
        evaluate(self.operations(), interleave_glu(accumulator) if self.interleaves_glu() else accumulator, tensors)

    @classmethod
    def shape_of(cls, tensor: Any) -> tuple[int, ...]:
        if name_of(tensor.dtype) == FLOAT4:
            return TensorDesc.of(tensor, interpret_uint8_as_fp4x2=True).shape
        return tensor.shape
