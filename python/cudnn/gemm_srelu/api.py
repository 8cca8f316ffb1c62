"""GEMM + squared ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cudnn.fused.dense import DenseGemm, amax, operands, quantizer
from cudnn.fused.gemm import NARROW, scale_type
from cudnn.fused.host import derived
from cudnn.fused.layouts import Column, Matrix, Sizes, TensorSpec
from cudnn.fused.wrapper import wrapper
from cudnn.gemm.formats import FLOAT4, FLOAT8, name_of
from cudnn.lazy import torch
from cudnn_kernels import epilogue

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = ["GemmSrelu", "GemmSreluSm100", "gemm_srelu_wrapper", "gemm_srelu_wrapper_sm100"]

RESULT_TYPES = (*NARROW, "float32", *FLOAT8)


class SquaredReluGemm(DenseGemm):
    """What the squared ReLU and its backward pass share: most tensors, the rules for c, d and the tile."""

    shared: ClassVar = (
        *operands(),
        TensorSpec("d", Matrix("m", "n", "mn"), RESULT_TYPES, written=True, about="the major of c"),
        TensorSpec("prob", Column("m"), ("float32",), init="uniform"),
        *quantizer("sfd", "n"),
        amax(dimensions=1),
    )
    scalars = ("alpha",)
    result = ("d", "sfd")
    largest_cluster = 4
    default_cluster = (2, 1)

    @classmethod
    def d_results(cls, arguments: Mapping[str, Any], major: str) -> dict[str, tuple[Any, str]]:
        """What the wrappers allocate for d: sfd with 8 bits, amax with four-bit operands."""
        types = {"d": (arguments["d_dtype"], major)}
        if name_of(arguments["d_dtype"]) in FLOAT8:
            types["sfd"] = (scale_type(arguments), "")
        elif name_of(arguments["a"].dtype) == FLOAT4:
            types["amax"] = (torch.float32, "")
        return types

    def check_own_rules(self, sizes: Sizes) -> None:
        if self.major("c") != self.major("d"):
            raise self._refuse("d tensor major", self.major("d"), f"{self.major('c')}, that of c")
        a, d = self.dtype_name("a"), self.dtype_name("d")
        if a == FLOAT4 and d in FLOAT8:
            raise self.error("d tensor dtype", d, f"float16, bfloat16, float32, for operands of {a}")


class GemmSrelu(SquaredReluGemm):
    """A GEMM, its result stored, and the squared ReLU of it times a probability for each row.

        z    = alpha * (a * sfa) (b * sfb)^T         accumulated in float32
        c    = z                                     rounded
        d    = relu(z)^2 * prob[m]                   of z unrounded; rounded, or quantized where it has 8 bits
        amax = max(amax, max |d|)                    before d is rounded

    float32 operands are multiplied in TF32. A compiled object serves tensors of all sizes, of the samples' types and
    majors.

    Args:
        sample_a ... sample_norm_const: tensors like those that ``execute`` will get; sample_sfa and sample_sfb may be
            None.
        alpha: where ``execute`` is given none.
        acc_dtype: float32.
        mma_tiler_mn, cluster_shape_mn: checked. sm_100a follows them, columns rounded up to multiples of 128 for
            operands with scale factors, at most 128 if c and d are float32; on sm_90a the library chooses tiles by
            itself.
        sf_vec_size: elements along k, or along n for sfd, that share a scale factor: 16, 32 or 128.
        vector_f32: a hint of other architectures.
        arch, accurate: as for :class:`cudnn.GemmSwiglu`.
    """

    title = "GEMM + squared ReLU"
    tensors = (*SquaredReluGemm.shared, TensorSpec("c", Matrix("m", "n", "mn"), RESULT_TYPES, written=True))
    returns = ("c", "d", "amax", "sfd")

    def __init__(
        self,
        sample_a: Tensor,
        sample_b: Tensor,
        sample_c: Tensor,
        sample_d: Tensor,
        sample_sfa: Tensor | None,
        sample_sfb: Tensor | None,
        sample_prob: Tensor,
        sample_sfd: Tensor | None = None,
        sample_amax: Tensor | None = None,
        sample_norm_const: Tensor | None = None,
        alpha: float = 1.0,
        acc_dtype: dtype = torch.float32,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        arch: str | None = None,
        accurate: bool = False,
        power_of_two_scales: bool = False,
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        b_tensor: Tensor,
        c_tensor: Tensor,
        d_tensor: Tensor,
        sfa_tensor: Tensor | None,
        sfb_tensor: Tensor | None,
        prob_tensor: Tensor,
        sfd_tensor: Tensor | None = None,
        amax_tensor: Tensor | None = None,
        norm_const_tensor: Tensor | None = None,
        alpha: float | None = None,
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``c_tensor``, ``d_tensor`` and what else the samples had. See :attr:`FusedAPI.run`."""

    def operations(self) -> tuple[Any, ...]:
        activation = (epilogue.SquaredRelu(), epilogue.MultiplyColumn("prob"))
        return (epilogue.Scale("alpha"), self.store("c"), *activation, *self.result_epilogue("d"))

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        return {"c": (arguments["c_dtype"], arguments["c_major"]), **cls.d_results(arguments, arguments["c_major"])}


class GemmSreluSm100(GemmSrelu):
    """:class:`GemmSrelu` by the name that existing programs use. The wrapper makes objects of it."""


@wrapper(GemmSreluSm100)
def gemm_srelu_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor,
    sfa_tensor: Tensor | None,
    sfb_tensor: Tensor | None,
    prob_tensor: Tensor,
    alpha: float = 1.0,
    c_major: str = "n",
    c_dtype: dtype = torch.bfloat16,
    d_dtype: dtype = torch.bfloat16,
    acc_dtype: dtype = torch.float32,
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    norm_const_tensor: Tensor | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    stream: Any = None,
    accurate: bool = False,
    power_of_two_scales: bool = False,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``c_tensor, d_tensor, amax_tensor, sfd_tensor``: amax comes with four-bit operands, sfd with a d of 8 bits,
    which needs ``norm_const_tensor``; else they are None. Other arguments and errors as those of :class:`GemmSrelu`.

    Nothing is recorded for autograd: the results have no ``grad_fn``. ``cudnn.ops.gemm_srelu`` is the operator for
    ``torch.compile``.
    """
    ...


gemm_srelu_wrapper_sm100 = gemm_srelu_wrapper
