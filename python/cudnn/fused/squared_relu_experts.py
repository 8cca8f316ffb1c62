"""What the backward pass of a squared ReLU computes, for the tokens of several experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cudnn.api_base import ceil_div
from cudnn.fused.grouped import DPROB, PROB, RESULT_TYPES, ExpertsGemm, bias_gradient, indexed, operands, quantized
from cudnn.fused.layouts import BlockScales, Contiguous, OneMatrix, Sizes, TensorSpec
from cudnn.gemm.formats import FLOAT8, SCALES, name_of
from cudnn.lazy import torch
from cudnn_kernels import epilogue

UNUSED = "neither read nor written"


class SquaredReluExpertsBackward(ExpertsGemm):
    """A grouped GEMM and the backward pass of a squared ReLU of the saved ``c``."""

    tensors = indexed(
        (
            *operands(),
            TensorSpec("c", OneMatrix("m", "n", "mn"), RESULT_TYPES, about="of the forward pass"),
            *(replace(x, may_alias="c") if x.name == "d_row" else x for x in quantized("d_row", "n")),
            TensorSpec(
                "d_srelu", OneMatrix("m", "n", "mn"), RESULT_TYPES, optional=True, same_dtype="d_row", written=True
            ),
            TensorSpec(
                "sfd_col_d_srelu",
                BlockScales("n", "m", vector=32),
                SCALES,
                optional=True,
                same_dtype="sfd_row",
                written=True,
            ),
            PROB,
            DPROB,
            bias_gradient("n"),
            TensorSpec("dprob_workspace", Contiguous("m", "tiles of n"), ("float32",), optional=True, about=UNUSED),
            TensorSpec("dbias_workspace", Contiguous("blocks of m", "n"), ("bfloat16",), optional=True, about=UNUSED),
        )
    )
    returns = ("d_row", "d_col", "d_srelu", "dprob", "dbias", "amax", "sfd_row", "sfd_col", "sfd_col_d_srelu")
    result = ("d_row", "sfd_row")
    buffers = ("dprob_tensor",)
    unpacked_fp4 = True

    deterministic: bool
    tanh_clamp_scale: float | None

    def operations(self) -> tuple[Any, ...]:
        backward = epilogue.SquaredReluBackward("c", self.semantics != "1.23", self.tanh_clamp_scale)
        sums = (epilogue.SumRow("dprob", "prob_gradient", bool(self.deterministic)),) if self.has("dprob") else ()
        weighted = (*self.multiplied_by("prob"), *self.summed_columns())
        rest = (*self.recomputed(), *weighted, *self.result_epilogue("d_row"))
        return (*self.scaled_product(), self.load("c"), backward, *sums, *rest)

    def recomputed(self) -> tuple[Any, ...]:
        """What the forward pass made of c, stored."""
        if not self.has("d_srelu"):
            return ()
        weighted = epilogue.MultiplyColumn("prob", self.dtype_name("prob"), "activation")
        if not self.has("sfd_col_d_srelu"):
            return (weighted, self.store("d_srelu", "activation"))
        dtypes = (self.dtype_name("d_srelu"), self.dtype_name("sfd_col_d_srelu"))
        columns = epilogue.QuantizeColumns(
            "sfd_col_d_srelu", *dtypes, "activation columns", by_expert=bool(self.discrete_col_sfd), source="activation"
        )
        return (weighted, columns, self.store("d_srelu", "activation columns"))

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        d_dtype = cls.dtype_or_default(arguments["d_dtype"])
        fp8 = cls.has_block_scales(arguments) and name_of(d_dtype) in FLOAT8
        types = {**cls.quantized_results(arguments, "d_row", d_dtype, fp8), "dprob": (torch.float32, "")}
        if not cls.older_semantics(arguments):
            types["d_srelu"] = (d_dtype, "n")
            types |= {"sfd_col_d_srelu": types["sfd_col"]} if fp8 else {}
        return types | ({"dbias": (torch.bfloat16, "")} if arguments["generate_dbias"] else {})

    def check_options(self) -> None:
        super().check_options()
        self.check_clamp(self.tanh_clamp_scale)
        for name in ("dprob_workspace", "dbias_workspace"):
            if self.has(name) and not self.deterministic:
                raise self.error(f"{name} tensor", "a tensor", "None without deterministic=True")

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        sizes = super().sizes_of(shapes, options)
        tile, cluster = options["mma_tiler_mn"], options["cluster_shape_mn"]
        _, tiles = cls.dprob_workspace_shape(sizes["m"], sizes["n"], tile, cluster)
        return {**sizes, "tiles of n": tiles, "blocks of m": ceil_div(sizes["m"], 128)}

    @staticmethod
    def dprob_workspace_shape(
        m: int, n: int, mma_tiler_mn: Sequence[int] = (256, 256), cluster_shape_mn: Sequence[int] | None = None
    ) -> tuple[int, int]:
        """The shape of ``dprob_workspace``."""
        columns = 1 if cluster_shape_mn is None else cluster_shape_mn[1]
        return m, ceil_div(n, max(mma_tiler_mn[1] * columns, 1)) * columns  # other tiles are refused later

    @staticmethod
    def dbias_workspace_shape(m: int, n: int, *tiles: Any) -> tuple[int, int, int]:
        """The shape of ``dbias_workspace``; the tiles do not count."""
        return ceil_div(m, 128), n, 1

    @staticmethod
    def reduce_dprob_workspace(*tensors: Any, **options: Any) -> None:
        """Does nothing: ``execute`` has added to dprob."""

    reduce_dbias_workspace = reduce_dprob_workspace

    def check_own_rules(self, sizes: Sizes) -> None:
        if not self.has("prob"):
            raise self.error("prob_tensor is required", "None", "a tensor (m, 1, 1)")
        if self.has("d_srelu") and self.semantics == "1.23":
            raise self.error("d_srelu tensor", "a tensor", "None, with the semantics 1.23")
        quantized = self.has("d_srelu") and self.quantizes()
        if self.has("sfd_col_d_srelu") != quantized:
            got = "a tensor" if self.has("sfd_col_d_srelu") else "None"
            raise self.error("sfd_col_d_srelu tensor", got, "a tensor with d_srelu and sfd_col, else None")
