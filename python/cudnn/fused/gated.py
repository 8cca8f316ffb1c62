"""The base of the gated (GLU) GEMMs: pairs of up and gate columns, the tensors, and cuDNN's rules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from cudnn.fused.dense import DenseGemm, amax, operands, quantizer
from cudnn.fused.gemm import NARROW, scale_type
from cudnn.fused.layouts import Matrix, Sizes, TensorSpec
from cudnn.gemm.formats import BLOCKWISE_DTYPE, BLOCKWISE_SIZE, FLOAT4, FLOAT8, name_of
from cudnn.lazy import torch
from cudnn.runtime import launch
from cudnn_kernels import epilogue

LAYOUTS = ("interleaved", "concatenated")
ORDERS = ("up_gate", "gate_up")


class GluLayout(DenseGemm):
    """Where up and gate lie among 2 n columns, or rows of weights.

    ``glu_layout``: ``"interleaved"`` (alternating blocks of 32) or ``"concatenated"``. ``glu_order``: which of the two
    comes first.
    """

    glu_layout: str = LAYOUTS[0]
    glu_order: str = ORDERS[0]

    @property
    def concat_glu(self) -> bool:
        """Whether up and gate are concatenated halves."""
        return self.glu_layout == "concatenated"

    @property
    def gate_first(self) -> bool:
        """Whether gate comes before up."""
        return self.glu_order == "gate_up"

    def check_options(self) -> None:
        super().check_options()
        for name, allowed in (("glu_layout", LAYOUTS), ("glu_order", ORDERS)):
            if getattr(self, name) not in allowed:
                raise self.error(name, repr(getattr(self, name)), " or ".join(map(repr, allowed)))


class GatedGemm(GluLayout):
    """A GEMM and a gated activation of its columns: of every 64, the first 32 are up, the others gate, by default."""

    tensors = (
        *operands(),
        TensorSpec(
            "ab12",
            Matrix("m", "n", "mn"),
            ("float32", *NARROW, *FLOAT8),
            optional=True,
            written=True,
            about="8 bits: scaled only",
        ),
        TensorSpec(
            "c",
            Matrix("m", "columns", "mn"),
            ("float32", *NARROW, *FLOAT8),
            written=True,
            about="columns = n / 2; the major of ab12; scaled: float32 too; 8 bits with sfc",
        ),
        amax(dimensions=3),
        *quantizer("sfc", "columns"),
    )
    returns = ("ab12", "c", "sfc", "amax")
    scalars = ("alpha",)
    pairs = 2
    result = ("c", "sfc")
    tile_n = range(32, 257, 32)
    columns_in = 64, "64, pairs of 32"
    default_cluster = (2, 2)

    @abstractmethod
    def gate(self) -> epilogue.Gate:
        """The activation of a pair of up and gate."""

    def operations(self) -> tuple[Any, ...]:
        stored = (self.store("ab12", concat_glu=self.concat_glu),) if self.has("ab12") else ()
        gated = epilogue.Gated(self.gate(), self.gate_first)
        return (epilogue.Scale("alpha"), *stored, gated, *self.result_epilogue("c"))

    def interleaves_glu(self) -> bool:
        return self.concat_glu

    @staticmethod
    def narrow(dtype: Any) -> Any:
        """The default type of a result: the operands' if 16 bits wide, else bfloat16."""
        return dtype if name_of(dtype) in NARROW else torch.bfloat16

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        c_dtype, major = arguments["c_dtype"] or cls.narrow(arguments["a"].dtype), arguments["c_major"]
        types = {"c": (c_dtype, major)}
        if arguments["ab12_dtype"] is not None:
            types["ab12"] = (arguments["ab12_dtype"], major)
        if name_of(c_dtype) in FLOAT8:
            types["sfc"] = (scale_type(arguments), "")
        if name_of(arguments["a"].dtype) == FLOAT4 and c_dtype == torch.bfloat16:
            types["amax"] = (torch.float32, "")
        return types

    # Checks.

    @property
    def _plain(self) -> bool:
        return not any(self.has(name) for name in ("sfa", "sfb", "amax", "sfc", "norm_const"))

    def check_accumulator(self) -> None:
        wide = [name for name in ("a", "ab12") if self.dtype_name(name) == "float32"]
        if self.acc_dtype != torch.float16 or not self._plain:
            super().check_accumulator()
        if wide or self.dtype_name("a") == "bfloat16":
            raise self.error("acc_dtype", self.acc_dtype, "torch.float32, for operands or ab12 with more range")

    def check_own_rules(self, sizes: Sizes) -> None:
        a, ab12, c = self.dtype_name("a"), self.dtype_name("ab12"), self.dtype_name("c")
        if self.has("ab12") and self.major("ab12") != self.major("c"):
            raise self._refuse("c tensor major", self.major("c"), f"{self.major('ab12')}, that of ab12")
        if self.concat_glu:
            self._check_halves()
        if self._plain:
            self._check_plain(ab12, c)
        else:
            self._check_scaled(a, ab12, c, sizes)

    def check_sizes(self, sizes: Sizes) -> None:
        super().check_sizes(sizes)
        n, scale_atoms = sizes["n"], self.scaled and self.dtype_name("sfa") != BLOCKWISE_DTYPE
        if (
            n % 256
            and self.concat_glu
            and scale_atoms
            and (self._target() or launch.emulated_architecture()) == "sm_100a"
        ):
            allowed = "multiples of 256, whole atoms of both halves, for glu_layout='concatenated'"
            raise self.unsupported("n, on sm_100a", n, allowed, "pad both halves")

    def _check_halves(self) -> None:
        """TMA copies at least 16 contiguous bytes, so rows of B have to be contiguous along k."""
        if self.major("b") != "k":
            hint = "interleave the weights once, by cudnn.interleave_glu_weights"
            raise self.unsupported("b tensor major", self.major("b"), "k, for glu_layout='concatenated'", hint)

    def check_blockwise_scales(self, scales: str) -> None:
        """All are supported: the epilogue processes a block of pairs one subtile at a time."""

    def _check_architecture(self, arch: str) -> None:
        super()._check_architecture(arch)
        if not self.has("sfc") or self.dtype_name("sfc") != BLOCKWISE_DTYPE:
            return
        blockwise = self.dtype_name("sfa") == BLOCKWISE_DTYPE
        reason = f"a block of c takes {2 * BLOCKWISE_SIZE} of a row, too many registers"
        if arch == "sm_100a" and blockwise:
            allowed = f"{BLOCKWISE_DTYPE} for the operands or for c: {reason}"
            raise self.unsupported("sfa and sfc tensors, on sm_100a", f"{BLOCKWISE_DTYPE} for both", allowed)
        if arch == "sm_90a" and blockwise and self.accurate:
            allowed = f"False: fp32 promotion of {BLOCKWISE_SIZE} 16-bit elements is limited to 192 columns"
            raise self.unsupported("accurate, for sfa and sfc of float32, on sm_90a", True, allowed)
        if arch == "sm_90a" and self.dtype_name("a") in FLOAT8 and not (blockwise or self.accurate):
            allowed = f"16 or 32 bits, or scale factors of {BLOCKWISE_DTYPE}, or accurate=True: {reason}"
            raise self.unsupported("a tensor dtype, for sfc of float32, on sm_90a", self.dtype_name("a"), allowed)

    def _check_plain(self, ab12: str, c: str) -> None:
        if ab12 in FLOAT8:
            raise self.unsupported("ab12 tensor dtype", ab12, "float32, float16, bfloat16")
        if c not in NARROW:
            raise self.error("c tensor dtype", c, "float16, bfloat16, without scale factors, amax or norm_const")
        if self.mma_tiler_mn[0] == 128 and self.cluster_shape_mn != (1, 1):
            raise self.error("cluster_shape_mn", self.cluster_shape_mn, "(1, 1), for a tile of 128 rows")

    def _check_scaled(self, a: str, ab12: str, c: str, sizes: Sizes) -> None:
        if (ab12, c) == ("float32", "float32"):
            raise self.unsupported("c tensor dtype", c, "float16, bfloat16, with ab12 of float32")
        blockwise = self.dtype_name("sfa") == BLOCKWISE_DTYPE
        if a in FLOAT8 and ab12 in (("float32", *FLOAT8) if not blockwise else FLOAT8):
            raise self.error("ab12 tensor dtype", ab12, f"float16, bfloat16, for operands of {a}")
        if self.scaled and c in FLOAT8 and not blockwise:
            raise self.error("c tensor dtype", c, "float32, float16, bfloat16, for operands with scale factors")
        if not self.scaled or blockwise:
            return
        rows, columns = self.mma_tiler_mn
        if a == FLOAT4:
            if self.major("c") != "n":
                raise self.error("c tensor major", self.major("c"), f"n, for operands of {a}")
            if columns % 64:
                raise self.error("mma_tiler_mn", self.mma_tiler_mn, f"multiples of 64 columns, for operands of {a}")
            if c == "bfloat16" and not self.has("amax"):
                raise self.error("amax tensor", "None", f"a tensor, for operands of {a} and c of {c}")
        for size, tile in (("m", rows), ("n", columns)):
            if sizes[size] % tile:
                raise self.error(size, sizes[size], f"multiples of {tile}, the tile, with scale factors")
