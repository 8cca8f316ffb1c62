"""Grouped GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudnn.fused.gemm import NARROW
from cudnn.fused.grouped import BIAS, PROB, ExpertsGemm, indexed, operands, output
from cudnn.fused.host import derived
from cudnn.fused.layouts import Sizes
from cudnn.fused.wrapper import supports, wrapper

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = ["GroupedGemm", "GroupedGemmSm100", "grouped_gemm_wrapper", "grouped_gemm_wrapper_sm100"]

HALVES = 128  # k of two halves of whole k tiles


class GroupedGemm(ExpertsGemm):
    """A grouped GEMM over experts, with an optional bias and row weights.

        c = alpha[e] * a b[e]^T                      accumulated in float32; rounded where it is stored
        d = c * prob[m]                              of c before rounding
        c = d = alpha[e] * a b[e]^T + prob[m] * bias[n, e]          with a bias: prob weights nothing else

    Operands have no scale factors. Expert e has the rows from ``padded_offsets[e - 1]`` to before
    ``padded_offsets[e]``, which may be any.

    With ``a_index``, token i is row ``a_index[i]`` of ``a``: tokens in any order, and each for several experts, are
    multiplied as they lie. A number that a has not stands for a row of zeros.

    Args:
        sample_a ... sample_prob: tensors like those that ``execute`` will get.
        generate_c: c is stored, into ``sample_c``.
        b_halves: ``b_ptrs`` has two addresses for each expert, of the matrices (n, k / 2) that are the halves of k:
            first those of all experts' first halves. Elements have 16 bits; k is a multiple of 128.
        others: as those of :class:`cudnn.GroupedGemmQuant`.
    """

    title = "Grouped GEMM"
    tensors = (
        *indexed(spec for spec in operands() if not spec.name.startswith("sf")),
        output("c", "n", optional=True, about="with generate_c"),
        output("d", "n"),
        PROB,
        BIAS,
    )
    returns = ("d", "c")
    buffers = ("c_tensor", "d_tensor")
    aot_dtypes = ("bf16", "fp16", "fp8")
    result = ("d", "")
    sf_vec_size = 16
    generate_c: bool

    def __init__(
        self,
        sample_a: Tensor,
        sample_c: Tensor | None,
        sample_d: Tensor,
        sample_padded_offsets: Tensor,
        sample_alpha: Tensor,
        sample_b: Tensor | None = None,
        sample_bias: Tensor | None = None,
        sample_prob: Tensor | None = None,
        num_experts: int | None = None,
        b_shape: tuple[int, int] | None = None,
        b_dtype: dtype | None = None,
        acc_dtype: dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        vector_f32: bool = False,
        m_aligned: int = 256,
        generate_c: bool = False,
        b_major: str = "k",
        use_dynamic_sched: bool = False,
        *,
        sample_a_index: Tensor | None = None,
        b_halves: bool = False,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        c_tensor: Tensor | None,
        d_tensor: Tensor,
        padded_offsets: Tensor,
        alpha_tensor: Tensor,
        b_tensor: Tensor | None = None,
        b_ptrs: Tensor | None = None,
        bias_tensor: Tensor | None = None,
        prob_tensor: Tensor | None = None,
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
        *,
        a_index: Tensor | None = None,
    ) -> None:
        """Writes ``d_tensor``, and ``c_tensor``, if passed. See :attr:`FusedAPI.run`."""

    def operations(self) -> tuple[Any, ...]:
        stored = (self.store("c"),) if self.has("c") else ()
        weighted = () if self.has("bias") else self.multiplied_by("prob")
        return (*self.scaled_product(), *self.biased("prob"), *stored, *weighted, self.store("d"))

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        types = {"d": (cls.dtype_or_default(arguments["d_dtype"]), "n")}
        if arguments["generate_c"]:
            types["c"] = (cls.dtype_or_default(arguments["c_dtype"]), "n")
        return types

    def check_own_rules(self, sizes: Sizes) -> None:
        if self.has("c") != bool(self.generate_c):
            got = "a tensor" if self.has("c") else "None"
            raise self.error("c tensor", got, "a tensor with generate_c=True, else None")
        if self.b_halves and self.has("b"):
            raise self.error("b_halves", True, "False, where b is a tensor")
        if self.b_halves and self.dtype_name("b") not in NARROW:
            raise self.unsupported("b_dtype, with b_halves", self.dtype_name("b"), " or ".join(NARROW))
        if self.b_halves and sizes["k"] % HALVES:
            raise self.error("k, with b_halves", sizes["k"], f"multiples of {HALVES}")


class GroupedGemmSm100(GroupedGemm):
    """:class:`GroupedGemm` by the name that existing programs use. The wrapper makes objects of it."""


@supports("bf16_canonical_layouts")
@wrapper(GroupedGemmSm100)
def grouped_gemm_wrapper(
    a_tensor: Tensor,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    b_tensor: Tensor | None = None,
    bias_tensor: Tensor | None = None,
    b_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
    prob_tensor: Tensor | None = None,
    acc_dtype: dtype | None = None,
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    c_tensor: Tensor | None = None,
    d_tensor: Tensor | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    generate_c: bool = False,
    use_dynamic_sched: bool = False,
    current_stream: Any = None,
    *,
    a_index: Tensor | None = None,
    b_halves: bool = False,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes: ``d_tensor, c_tensor``.

    c is None without ``generate_c``. ``c_tensor``, ``d_tensor``: written and returned, where they are given. Other
    arguments and errors as those of :class:`GroupedGemm`.
    """
    ...


grouped_gemm_wrapper_sm100 = grouped_gemm_wrapper
