"""Grouped GEMM of weight gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudnn.errors import make_error
from cudnn.fused.gradients import ExpertGradients, WGradInputOrder
from cudnn.fused.host import derived
from cudnn.fused.positional import older_order
from cudnn.fused.wrapper import call, supports

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = [
    "GroupedGemmWgrad",
    "GroupedGemmWgradSm100",
    "get_grouped_gemm_wgrad_workspace_size",
    "get_grouped_gemm_wgrad_workspace_size_sm100",
    "grouped_gemm_wgrad_wrapper",
    "grouped_gemm_wgrad_wrapper_sm100",
]


class GroupedGemmWgrad(ExpertGradients):
    """The weight gradients of all experts: a GEMM over the tokens of each.

        wgrad[e] = global_scale_a[e] * global_scale_b[e] * a[:, tokens of e] b[tokens of e, :]

    accumulated in float32, rounded when stored; 0 for an expert without tokens. Expert e has the tokens from
    ``offsets[e - 1]`` to before ``offsets[e]``, multiples of 16 bytes for an operand whose tokens are contiguous.
    Tokens beyond the last one's end are not read.

    With ``a_index``, token i of the GEMM is token ``a_index[i]`` of ``a``: tokens of any order, each for several
    experts. A number that a has not stands for zeros. ``b_index`` is the same of ``b``.

    Args:
        sample_a ... sample_global_scale_b: tensors like those that ``execute`` will get.
        num_experts, wgrad_shape, wgrad_dtype, sample_wgrad_expert: for pointer arrays of gradients, ``wgrad_ptrs``,
            each contiguous, as the sample of one is.
        accumulate_on_output: the gradients are added to.
        input_order: ``"tensor2d"``, or ``"tensor_ragged"``, which is the same unless tokens are contiguous.
        others: as those of :class:`cudnn.GroupedGemmQuant`.
    """

    title = "Grouped GEMM of weight gradients"

    @older_order(
        "self sample_a sample_b sample_sfa sample_sfb sample_offsets sample_wgrad sample_wgrad_expert num_experts "
        "wgrad_shape wgrad_dtype sample_global_scale_a sample_global_scale_b acc_dtype mma_tiler_mn cluster_shape_mn "
        "sf_vec_size accumulate_on_output"
    )
    def __init__(
        self,
        sample_a: Tensor,
        sample_b: Tensor,
        sample_sfa: Tensor | None,
        sample_sfb: Tensor | None,
        sample_offsets: Tensor,
        sample_wgrad: Tensor | None = None,
        sample_wgrad_expert: Tensor | None = None,
        num_experts: int | None = None,
        wgrad_shape: tuple[int, int] | None = None,
        wgrad_dtype: dtype | None = None,
        sample_global_scale_a: Tensor | None = None,
        sample_global_scale_b: Tensor | None = None,
        acc_dtype: dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        sf_fp8_dtype_override: str | None = None,
        accumulate_on_output: bool = False,
        input_order: Any = WGradInputOrder.Tensor2D,
        *,
        sample_a_index: Tensor | None = None,
        sample_b_index: Tensor | None = None,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        b_tensor: Tensor,
        sfa_tensor: Tensor | None,
        sfb_tensor: Tensor | None,
        offsets_tensor: Tensor,
        wgrad_tensor: Tensor | None = None,
        wgrad_ptrs: Tensor | None = None,
        global_scale_a: Tensor | None = None,
        global_scale_b: Tensor | None = None,
        current_stream: Any = None,
        *,
        descriptor_workspace: Tensor | None = None,
        workspace_tensor: Tensor | None = None,
        a_index: Tensor | None = None,
        b_index: Tensor | None = None,
    ) -> None:
        """Writes the gradients. An object for pointer arrays takes ``wgrad_ptrs`` or, packed, one
        ``wgrad_tensor`` (experts, hidden, inter) of ``wgrad_dtype``. See :attr:`FusedAPI.run`.
        """


class GroupedGemmWgradSm100(GroupedGemmWgrad):
    """:class:`GroupedGemmWgrad` by the name that existing programs use. The wrapper makes objects of it."""


@supports("canonical_layouts", "bf16_canonical_layouts")
@older_order(
    "a_tensor b_tensor sfa_tensor sfb_tensor offsets_tensor output_mode wgrad_tensor wgrad_ptrs global_scale_a "
    "global_scale_b acc_dtype wgrad_dtype mma_tiler_mn cluster_shape_mn sf_vec_size accumulate_on_output current_stream"
)
def grouped_gemm_wgrad_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor,
    sfa_tensor: Tensor | None,
    sfb_tensor: Tensor | None,
    offsets_tensor: Tensor,
    output_mode: str = "dense",
    wgrad_tensor: Tensor | None = None,
    wgrad_ptrs: Tensor | None = None,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    acc_dtype: dtype | None = None,
    wgrad_dtype: dtype | None = None,
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: str | None = None,
    accumulate_on_output: bool = False,
    input_order: Any = WGradInputOrder.Tensor2D,
    current_stream: Any = None,
    *,
    descriptor_workspace: Tensor | None = None,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> TupleDict:
    """Allocates the gradients, compiles if needed, and executes: ``wgrad_tensor``.

    ``wgrad_tensor``: written, or added to, and returned, if passed. With ``output_mode="discrete"``, instead of
    ``"dense"``, the gradients are those at the addresses ``wgrad_ptrs`` or, without these, in ``wgrad_tensor``. Other
    arguments and errors as those of :class:`GroupedGemmWgrad`.
    """
    if output_mode not in ("dense", "discrete"):
        raise make_error(ValueError, "grouped_gemm_wgrad_wrapper", "output_mode", repr(output_mode), "dense, discrete")
    if wgrad_ptrs is None:
        output_mode = "dense"  # of a tensor, it is the same
    return call(GroupedGemmWgradSm100, locals())


def get_grouped_gemm_wgrad_workspace_size(
    num_experts: int, *, output_mode: str = "dense", input_order: Any = WGradInputOrder.Tensor2D
) -> int:
    """Bytes of a ``descriptor_workspace``, which our kernels do not use.

    Raises:
        ValueError: no number of experts, mode or order.
    """
    where = "get_grouped_gemm_wgrad_workspace_size"
    orders = [order.value for order in WGradInputOrder]
    for name, got, wrong, allowed in (
        ("num_experts", repr(num_experts), not isinstance(num_experts, int) or num_experts < 0, "0 or more"),
        ("output_mode", repr(output_mode), output_mode not in ("dense", "discrete"), "dense, discrete"),
        ("input_order", input_order, getattr(input_order, "value", input_order) not in orders, ", ".join(orders)),
    ):
        if wrong:
            raise make_error(ValueError, where, name, got, allowed)
    return ExpertGradients.descriptor_bytes(num_experts, output_mode == "discrete")


get_grouped_gemm_wgrad_workspace_size_sm100 = get_grouped_gemm_wgrad_workspace_size
grouped_gemm_wgrad_wrapper_sm100 = grouped_gemm_wgrad_wrapper
