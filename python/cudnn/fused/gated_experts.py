"""Grouped GEMMs with gated activations, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cudnn.errors import checked_number, make_error
from cudnn.fused.gated import LAYOUTS
from cudnn.fused.gemm import NARROW
from cudnn.fused.grouped import (
    BIAS,
    DPROB,
    FLOATS,
    PROB,
    RESULT_TYPES,
    ExpertsGemm,
    operands,
    output,
    quantized,
)
from cudnn.fused.layouts import Contiguous, Each, OneMatrix, Sizes, TensorSpec
from cudnn.gemm.formats import BLOCKWISE_DTYPE, BLOCKWISE_SIZE, FLOAT8, SCALES, name_of
from cudnn.lazy import torch
from cudnn_kernels import epilogue

GATES = {
    "swiglu": epilogue.SWIGLU,
    "geglu": epilogue.Gate("swish", "geglu_alpha", "glu_clamp_max", "glu_clamp_min", "linear_offset"),
    "situglu": epilogue.Gate("situ", beta1="situ_beta1", beta2="situ_beta2"),
}
"""What becomes of a pair of columns; the numbers of geglu and situglu are those of a call."""
SITU = ("situ_beta1", "situ_beta2")


def token_blocks(name: str, columns: str, about: str) -> tuple[TensorSpec, ...]:
    """A result quantized by 128 tokens of a column, as weight gradients read it, and its scale factors."""
    return (
        TensorSpec(
            f"{name}_blocks",
            Contiguous("blocks", columns, BLOCKWISE_SIZE),
            FLOAT8,
            optional=True,
            written=True,
            about=f"{about}, by 128 tokens of an expert: block start // 128 + expert + j has its tokens from 128 j on",
        ),
        TensorSpec(
            f"sf{name}_blocks",
            Contiguous("blocks", columns, alignment=4),
            (BLOCKWISE_DTYPE,),
            optional=True,
            written=True,
        ),
    )


class Activated(ExpertsGemm):
    """What gated activations and their backward passes share: the numbers of geglu."""

    scalars = ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min")
    limits = ("glu_clamp_max", "glu_clamp_min")
    older_offset: ClassVar[float] = 1.0  # of geglu, in the older version
    activations: ClassVar[Sequence[str]] = ("swiglu", "geglu")

    act_func: str
    glu_layout: str = LAYOUTS[0]
    linear_offset: float | None
    geglu_alpha: float = 1.702
    glu_clamp_max: float = 7.0
    glu_clamp_min: float = -7.0
    situ_beta1: float = 4.0
    situ_beta2: float = 25.0

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        offset = arguments.get("linear_offset")
        if offset is None:
            offset = self.older_offset if self.older_semantics(arguments) else 1.0
        super().__init__({**arguments, "linear_offset": offset})

    @property
    def concat_glu(self) -> bool:
        return self.glu_layout == LAYOUTS[1]

    def check_options(self) -> None:
        super().check_options()
        if self.glu_layout not in LAYOUTS:
            raise self.error("glu_layout", repr(self.glu_layout), " or ".join(map(repr, LAYOUTS)))
        if self.concat_glu and (self.scaled or self.quantizes()):
            allowed = f"None, for glu_layout={self.glu_layout!r}"
            hint = "interleave the weights once, by cudnn.interleave_glu_weights, before quantizing them"
            raise self.unsupported("scale factors", "tensors", allowed, hint)

    def check_activation(self, allowed: Sequence[str]) -> None:
        """Raises for another activation, or for numbers that it cannot have. situglu needs block-scaled operands."""
        if not self.scaled:
            allowed = [name for name in allowed if not name.endswith("situglu")]
        if self.act_func not in allowed:
            choice = " or ".join(map(repr, allowed)) + ", without scale factors" * (not self.scaled)
            raise self.error("act_func", repr(self.act_func), choice)
        check_situ(self._title(), vars(self))

    @classmethod
    def normalize_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        check_situ(f"{cls.folder()}_wrapper", arguments)
        return super().normalize_arguments(arguments)


def check_situ(where: str, arguments: Mapping[str, Any]) -> None:
    """Raises for numbers that situglu cannot have, where it is asked for."""
    for name in SITU if str(arguments.get("act_func")).endswith("situglu") else ():
        if checked_number(where, name, arguments.get(name, 1.0)) <= 0:
            raise make_error(ValueError, where, name, arguments[name], "finite positive numbers")


class GatedExperts(Activated):
    """A grouped GEMM and a gated activation of its columns: of every 64, the first 32 are gates, the others up."""

    tensors = (
        *operands(),
        output("c", "n", optional=True),
        *quantized("d", "columns", sums=True),
        PROB,
        BIAS,
    )
    returns = ("c", "d", "d_col", "amax", "sfd_row", "sfd_col")
    pairs = 2
    tile_n = (128, 256)
    columns_in = 64, "64, pairs of 32"

    act_func = "swiglu"

    def operations(self) -> tuple[Any, ...]:
        stored = (self.store("c", concat_glu=self.concat_glu),) if self.has("c") else ()
        if self.has("sfc"):
            quantizer = epilogue.QuantizeRows(
                "sfc", self.dtype_name("c"), BLOCKWISE_DTYPE, BLOCKWISE_SIZE, "", value="c", source="x"
            )
            stored = (quantizer, self.store("c", "c"))
        activation = (epilogue.Gated(GATES[self.act_func], gate_first=True), *self.multiplied_by("prob"))
        return (*self.scaled_product(), *self.biased(), *stored, *activation, *self.result_epilogue("d"))

    def interleaves_glu(self) -> bool:
        return self.concat_glu

    def _check_architecture(self, arch: str) -> None:
        super()._check_architecture(arch)
        if self.has("sfc") and arch != "sm_90a":
            raise self.unsupported(f"sfc tensor, on {arch}", "a tensor", "None: leave c in 16 bits")

    @classmethod
    def halves_of(cls, options: Mapping[str, Any]) -> int:
        return 1 + (options.get("glu_layout") == LAYOUTS[1])

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        c_dtype, d_dtype = cls.dtype_or_default(arguments["c_dtype"]), cls.dtype_or_default(arguments["d_dtype"])
        scaled = arguments["sfa"] is not None
        c = {"c": (c_dtype, "n")} if scaled or arguments.get("generate_c", True) else {}
        if (arguments["norm_const"] is not None, arguments["sf_vec_size"]) == (True, BLOCKWISE_SIZE) and name_of(
            d_dtype
        ) in FLOAT8:
            return {**c, "d": (d_dtype, "n"), "sfd_row": (torch.float32, "")}
        if not scaled:
            return {**c, "d": (d_dtype, "n")}
        types = cls.quantized_results(arguments, "d", d_dtype, cls.has_block_scales(arguments))
        return {**c, "d_col": (d_dtype, "n"), **types}

    def check_options(self) -> None:
        super().check_options()
        self.check_activation(self.activations)

    def check_own_rules(self, sizes: Sizes) -> None:
        if self.has("sfc") and (self.dtype_name("c") not in FLOAT8 or self.dtype_name("sfa") != BLOCKWISE_DTYPE):
            got = f"a tensor, for c of {self.dtype_name('c') or None} and sfa of {self.dtype_name('sfa') or None}"
            raise self.error("sfc tensor", got, f"None, but for {' or '.join(FLOAT8)} and {BLOCKWISE_DTYPE}")
        if self.concat_glu and self.major("b") != "k":
            hint = "interleave the weights once, by cudnn.interleave_glu_weights"
            allowed = f"k, for glu_layout={self.glu_layout!r}"
            raise self.unsupported("b tensor major", self.major("b"), allowed, hint)
        if self.concat_glu and self.has("b_ptrs") and self.dtype_name("b") not in NARROW:
            allowed = f"{' or '.join(NARROW)}, for b_ptrs and glu_layout={self.glu_layout!r}"
            raise self.unsupported("b_dtype", self.dtype_name("b"), allowed)


class GatedExpertsBackward(Activated):
    """A grouped GEMM and the backward pass of a gated activation: the gradients of gates and others, 32 columns each in
    turn, as the saved ``c`` has them.
    """

    tensors = (
        *operands(),
        TensorSpec("c", OneMatrix("m", "columns", "mn"), RESULT_TYPES, about="of the forward pass; columns = 2 n"),
        TensorSpec("beta", Each("experts", alignment=2), FLOATS, optional=True, init="uniform", about="scales of c"),
        *(
            replace(spec, may_alias="c") if spec.name == "d_row" else spec
            for spec in quantized("d_row", "columns", roles=2, sums=True)
        ),
        PROB,
        DPROB,
    )
    result = ("d_row", "sfd_row")
    buffers = ("dprob_tensor",)
    roles = 2
    columns_in = 32, "32"

    act_func = "dswiglu"
    epilogue_op: str | None = None
    round_dgrad_to_input_dtype: bool = False
    _deterministic: bool = False

    @classmethod
    def result_columns(cls, n: int) -> int:
        return 2 * n

    def operations(self) -> tuple[Any, ...]:
        geglu, newer = self.act_func == "dgeglu", self.semantics != "1.23"
        product = self.scaled_product(power=2) if newer or not geglu else ()
        rounded = (epilogue.Round(self.dtype_name("a")),) if self.round_dgrad_to_input_dtype else ()
        saved = [epilogue.LoadTile("c", self.dtype_name("c"), "n", times=2, concat_glu=self.concat_glu)]
        saved += [epilogue.MultiplyBlocks("sfc", BLOCKWISE_SIZE, "c")] if self.has("sfc") else []
        betas = self.has("beta") and (not geglu or (newer and not self.scaled))
        factors = (epilogue.MultiplyGroup("beta", self.dtype_name("beta"), value="c"),) if betas else ()
        backward = epilogue.GatedBackward(GATES[self.act_func[1:]], gate_first=True)
        sums = (epilogue.SumRow("dprob", "prob_gradient", bool(self._deterministic)),) if self.has("dprob") else ()
        rest = (*sums, *self.recomputed(), *self.multiplied_by("prob"))
        return (
            *product,
            *rounded,
            *saved,
            *factors,
            backward,
            *rest,
            *self.stored_blocks("activation", "activation"),
            *self.stored_blocks("d", "x"),
            *self.summed_columns(),
            *self.result_epilogue("d_row", self.concat_glu),
        )

    def stored_blocks(self, name: str, value: str) -> tuple[Any, ...]:
        """The store of a value quantized by 128 tokens of a column, if it is requested."""
        if not self.has(f"{name}_blocks"):
            return ()
        names, dtype = (f"{name}_blocks", f"sf{name}_blocks"), self.dtype_name(f"{name}_blocks")
        return (epilogue.StoreTokenBlocks(*names, dtype, value, bool(self.power_of_two_scales)),)

    def recomputed(self) -> tuple[Any, ...]:
        """What the forward pass made of c, weighted and stored."""
        if not (self.has("activation") or self.has("activation_blocks")):
            return ()
        stored = (self.store("activation", "activation"),) if self.has("activation") else ()
        return (*self.multiplied_by("prob", "activation"), *stored)

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        eight = arguments["sfa"] is not None and cls.has_block_scales(arguments)  # allow no other result
        d_dtype = cls.dtype_or_default(arguments["d_dtype"], torch.float8_e4m3fn if eight else None)
        dbias = {"dbias": (torch.bfloat16, "")} if arguments.get("generate_dbias") else {}
        if arguments["sf_vec_size"] == BLOCKWISE_SIZE and name_of(d_dtype) in FLOAT8:
            return {"d_row": (d_dtype, "n"), "sfd_row": (torch.float32, ""), **dbias}
        if arguments["sfa"] is None:
            return {"d_row": (d_dtype, "n"), **dbias}
        fp8 = eight and name_of(d_dtype) in FLOAT8
        return {"d_col": (d_dtype, "n"), **cls.quantized_results(arguments, "d_row", d_dtype, fp8), **dbias}

    def check_options(self) -> None:
        super().check_options()
        self.check_activation([f"d{name}" for name in self.activations])
        operators = (None, "none", "identity", "relu", "srelu")
        if self.epilogue_op not in operators:
            raise self.error("epilogue_op", repr(self.epilogue_op), " or ".join(map(repr, operators)))
        if self.round_dgrad_to_input_dtype and (self.scaled or self.dtype_name("a") not in NARROW):
            got = f"True, for operands of {self.dtype_name('a')}{' with scale factors' * self.scaled}"
            raise self.error("round_dgrad_to_input_dtype", got, f"{' or '.join(NARROW)}, without scale factors")

    def check_own_rules(self, sizes: Sizes) -> None:
        if (
            self.dtype_name("sfa") in SCALES
            and self.dtype_name("a") in FLOAT8
            and self.dtype_name("d_row") not in FLOAT8
        ):
            raise self.error(
                "d_row tensor dtype", self.dtype_name("d_row"), f"{' or '.join(FLOAT8)}, for {self.dtype_name('a')}"
            )
        blocks = [name for name in ("d", "activation") if self.has(f"{name}_blocks") or self.has(f"sf{name}_blocks")]
        for name in blocks:
            if not (self.has(f"{name}_blocks") and self.has(f"sf{name}_blocks")):
                raise self.error(f"{name}_blocks and sf{name}_blocks tensors", "one of them", "both or none")
            if self.concat_glu or not self.schedule.searches:
                got = f"tensors, for glu_layout={self.glu_layout!r}, {type(self.schedule).__name__} rows"
                raise self.unsupported(f"{name}_blocks tensor", got, "rows of experts, glu_layout='interleaved'")
        if self.has("sfc") and (self.dtype_name("c") not in FLOAT8 or self.sf_vec_size != BLOCKWISE_SIZE):
            got = f"a tensor, for c of {self.dtype_name('c')} and sf_vec_size={self.sf_vec_size}"
            raise self.error("sfc tensor", got, f"None, but for {' or '.join(FLOAT8)} and {BLOCKWISE_SIZE}")
        if self.has("sfc") and self.concat_glu:
            raise self.unsupported("sfc tensor", f"a tensor, for glu_layout={self.glu_layout!r}", "None, then")

    def quantizes(self) -> bool:
        return super().quantizes() and self.dtype_name("d_row") in FLOAT8

    def _check_quantized(self) -> None:
        names = ("sfd_row", "sfd_col", "norm_const")
        if self.dtype_name("d_row") in FLOAT8:
            if self.dtype_name("sfa") in SCALES and self.dtype_name("a") in FLOAT8 and not self.quantizes():
                required = f"{', '.join(names)} are required for FP8 input/FP8 output"
                raise self.error(required, "None", "tensors")
            super()._check_quantized()
            if self.dtype_name("sfd_row") == BLOCKWISE_DTYPE:
                return
        for name in names:
            if self.has(name) and not self.quantizes():
                self._logger.warning("%s is not used: the result has the type %s", name, self.dtype_name("d_row"))
