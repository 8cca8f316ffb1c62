"""Grouped GEMM + GLU + Hadamard transform."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cudnn.fused.gated_experts import GATES, SITU, GatedExperts
from cudnn.fused.grouped import BIAS, FLOATS, PROB, ExpertsGemm, amax_scratch, largest, operands, output
from cudnn.fused.layouts import Contiguous, Sizes, TensorSpec
from cudnn.fused.positional import older_order
from cudnn.fused.wrapper import call, supports
from cudnn.grouped_gemm.grouped_gemm_glu_hadamard.hadamard_utils import HADAMARD_SIZE, is_other
from cudnn.lazy import torch
from cudnn_kernels import epilogue

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = [
    "GroupedGemmGluHadamard",
    "GroupedGemmGluHadamardSm100",
    "grouped_gemm_glu_hadamard_wrapper",
    "grouped_gemm_glu_hadamard_wrapper_sm100",
]

ACTIVATIONS = {
    "swiglu": epilogue.Gated(epilogue.SWIGLU, gate_first=True),
    "geglu": epilogue.Gated(epilogue.GEGLU, gate_first=True),
    "situglu": epilogue.Gated(GATES["situglu"], gate_first=True),
    "srelu": epilogue.SquaredRelu(),
}


class GroupedGemmGluHadamard(GatedExperts):
    """A grouped GEMM over experts, a gated activation, and amax before and after a Hadamard transform.

        c             = alpha[e] * acc + bias[n, e]              acc = (a * sfa) (b[e] * sfb[e])^T, in float32
        d             = y * prob[m]                              y of c, as that of GroupedGemmGlu
        amax          = max(amax, max |d|) of each expert        before d is rounded
        post_rht_amax = max(post_rht_amax, max |H v| / 4)        v: 16 tokens of a column of bfloat16(d)

    With ``semantics="1.23"``: u = H bfloat16(d) of 16 columns of a row, ``d`` is u, ``amax`` has max |u|, and there is
    no ``post_rht_amax``. H is :func:`hadamard_utils.hadamard_matrix`. Experts have multiples of 16 rows; with scale
    factors, of 256.

    Args:
        sample_a ... sample_bias: tensors like those that ``execute`` will get. ``prob`` may not be left out. The
            largest magnitudes are always computed: ``execute`` may get tensors for them or not.
        sample_hadamard: H, which is built in: its values are looked at when the object is made, and in no call.
        act_func: ``"swiglu"``, ``"geglu"`` with the usual numbers, ``"situglu"``, or ``"srelu"``: y = relu(c)^2.
        situ_beta1, situ_beta2: of situglu, positive.
        use_tmem_post_rht_amax: a hint of other kernels.
        others: as those of :class:`cudnn.GroupedGemmQuant`.
    """

    title = "Grouped GEMM + GLU + Hadamard"
    tensors = (
        *operands(),
        output("c", "n"),
        output("d", "columns"),
        largest("amax", 0.0),
        largest("post_rht_amax", 0.0),
        PROB,
        BIAS,
        TensorSpec("hadamard", Contiguous(HADAMARD_SIZE, HADAMARD_SIZE), FLOATS, optional=True, about="H"),
    )
    returns = ("c", "d", "amax", "post_rht_amax")
    result = ("d", "")
    scalars = SITU
    activations = tuple(ACTIVATIONS)
    group_rows, tile_m = HADAMARD_SIZE, (256,)
    unpacked_fp4 = True
    hints = (*ExpertsGemm.hints, "use_tmem_post_rht_amax")

    use_tmem_post_rht_amax: bool
    _amax_scratch: Any = None  # sink of amax outputs that a call does not pass

    @older_order(
        "self sample_a sample_b sample_c sample_d sample_sfa sample_sfb sample_padded_offsets sample_alpha sample_prob "
        "sample_amax sample_bias sample_hadamard acc_dtype mma_tiler_mn cluster_shape_mn sf_vec_size vector_f32 "
        "m_aligned act_func use_dynamic_sched"
    )
    def __init__(
        self,
        sample_a: Tensor,
        sample_c: Tensor,
        sample_d: Tensor,
        sample_sfa: Tensor | None,
        sample_padded_offsets: Tensor,
        sample_alpha: Tensor,
        sample_prob: Tensor,
        sample_b: Tensor | None = None,
        sample_sfb: Tensor | None = None,
        num_experts: int | None = None,
        b_shape: tuple[int, int] | None = None,
        b_dtype: dtype | None = None,
        b_major: str = "k",
        sample_amax: Tensor | None = None,
        sample_post_rht_amax: Tensor | None = None,
        sample_bias: Tensor | None = None,
        sample_hadamard: Tensor | None = None,
        acc_dtype: dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        m_aligned: int = 256,
        act_func: str = "swiglu",
        situ_beta1: float = 4.0,
        situ_beta2: float = 25.0,
        use_dynamic_sched: bool = False,
        use_tmem_post_rht_amax: bool = False,
        *,
        semantics: str | None = None,
        arch: str | None = None,
    ) -> None:
        arguments = {**locals()}
        for name in self.magnitudes(arguments):
            if arguments[f"sample_{name}"] is None:
                arguments[f"sample_{name}"] = sample_a.new_empty(sample_padded_offsets.numel(), 1, dtype=torch.float32)
        super().__init__(arguments)
        step = HADAMARD_SIZE if act_func == "srelu" else 64
        self.columns_in = step, str(step)
        self._other_matrix = sample_hadamard is not None and is_other(sample_hadamard)

    @classmethod
    def magnitudes(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """The largest magnitudes that there are."""
        return ("amax",) if cls.older_semantics(arguments) else ("amax", "post_rht_amax")

    def compile(self) -> None:
        super().compile()
        if self._amax_scratch is None:
            self._amax_scratch = amax_scratch(self._device)

    @older_order(
        "self a_tensor b_tensor c_tensor d_tensor sfa_tensor sfb_tensor padded_offsets alpha_tensor prob_tensor "
        "hadamard_tensor amax_tensor bias_tensor current_stream"
    )
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        c_tensor: Tensor,
        d_tensor: Tensor,
        sfa_tensor: Tensor | None,
        padded_offsets: Tensor,
        alpha_tensor: Tensor,
        prob_tensor: Tensor,
        b_tensor: Tensor | None = None,
        sfb_tensor: Tensor | None = None,
        b_ptrs: Tensor | None = None,
        sfb_ptrs: Tensor | None = None,
        hadamard_tensor: Tensor | None = None,
        amax_tensor: Tensor | None = None,
        post_rht_amax_tensor: Tensor | None = None,
        bias_tensor: Tensor | None = None,
        situ_beta1: float | None = None,
        situ_beta2: float | None = None,
        current_stream: Any = None,
        *,
        workspace_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``c_tensor``, ``d_tensor`` and largest magnitudes. See :attr:`FusedAPI.run`."""
        if amax_tensor is None and self._amax_scratch is not None:
            amax_tensor = self._amax_scratch[0, : padded_offsets.shape[0]]
        if post_rht_amax_tensor is None and self._amax_scratch is not None and self.has("post_rht_amax"):
            post_rht_amax_tensor = self._amax_scratch[1, : padded_offsets.shape[0]]
        self.run(
            (
                a_tensor,
                c_tensor,
                d_tensor,
                sfa_tensor,
                padded_offsets,
                alpha_tensor,
                prob_tensor,
                b_tensor,
                sfb_tensor,
                b_ptrs,
                sfb_ptrs,
                hadamard_tensor,
                amax_tensor,
                post_rht_amax_tensor,
                bias_tensor,
            ),
            (situ_beta1, situ_beta2),
            current_stream,
            workspace_tensor,
        )

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        sizes = super().sizes_of(shapes, options)
        return {**sizes, "columns": sizes["n"]} if options["act_func"] == "srelu" else sizes

    def operations(self) -> tuple[Any, ...]:
        amax = epilogue.Amax("amax", by_expert=True)
        if self.semantics == "1.23":
            rotated = (epilogue.Hadamard("n", "x"), amax)
        else:
            after = epilogue.Amax("post_rht_amax", by_expert=True, value="rotated")
            rotated = (amax, epilogue.Hadamard("m", factor=0.25), after)
        product = (*self.scaled_product(), *self.biased(), self.store("c"))
        return (*product, ACTIVATIONS[self.act_func], *self.multiplied_by("prob"), *rotated, self.store("d"))

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        types = {name: (cls.dtype_or_default(arguments[f"{name}_dtype"]), "n") for name in ("c", "d")}
        return {**types, **dict.fromkeys(cls.magnitudes(arguments), (torch.float32, ""))}

    def check_own_rules(self, sizes: Sizes) -> None:
        if not self.has("prob"):
            raise self.error("prob_tensor is required", "None", "a tensor (m, 1, 1)")
        if self.semantics == "1.23" and self.has("post_rht_amax"):
            raise self.error("post_rht_amax tensor", "a tensor", "None, with the semantics 1.23")
        if self._other_matrix and (self.use_tmem_post_rht_amax or self.semantics == "1.23"):
            raise self.unsupported("hadamard tensor", "another matrix", "that of hadamard_utils.hadamard_matrix(16)")


class GroupedGemmGluHadamardSm100(GroupedGemmGluHadamard):
    """:class:`GroupedGemmGluHadamard` by the name that existing programs use. The wrapper makes objects of it."""


@supports("canonical_layouts")
@older_order(
    "a_tensor b_tensor sfa_tensor sfb_tensor padded_offsets alpha_tensor prob_tensor bias_tensor acc_dtype c_dtype "
    "d_dtype cd_major mma_tiler_mn cluster_shape_mn sf_vec_size vector_f32 m_aligned act_func use_dynamic_sched "
    "current_stream"
)
def grouped_gemm_glu_hadamard_wrapper(
    a_tensor: Tensor,
    sfa_tensor: Tensor | None,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    prob_tensor: Tensor,
    b_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    b_ptrs: Tensor | None = None,
    sfb_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
    bias_tensor: Tensor | None = None,
    acc_dtype: dtype | None = None,
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    m_aligned: int = 256,
    act_func: str = "swiglu",
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    use_dynamic_sched: bool = False,
    use_tmem_post_rht_amax: bool = False,
    current_stream: Any = None,
    *,
    semantics: str | None = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``c_tensor, d_tensor, amax_tensor, post_rht_amax_tensor``; in the older version the first three. Experts
    without tokens have 0 in amax, in the older version -inf. Other arguments and errors as those of
    :class:`GroupedGemmGluHadamard`.
    """
    older = GroupedGemmGluHadamard.older_semantics(locals())
    if older:
        amax_tensor = torch.full((alpha_tensor.numel(), 1), -math.inf, dtype=torch.float32, device=a_tensor.device)
    results = call(GroupedGemmGluHadamardSm100, locals())
    if older:
        results.pop("post_rht_amax_tensor")
    return results


grouped_gemm_glu_hadamard_wrapper_sm100 = grouped_gemm_glu_hadamard_wrapper
