"""The operations of ``cudnn.Graph`` for type checkers. Written by `python docs/generate.py`."""

import builtins
from collections.abc import Sequence
from typing import Any, Protocol, overload

from cudnn import enums
from cudnn.pygraph.attention.fp8 import ScoreModifier
from cudnn.pygraph.attention.mxfp8 import Dropout
from cudnn.pygraph.tensor import Results, Tensor

class Array(Protocol):
    """A PyTorch tensor, or another array with DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

class GraphMethods:
    def abs(self, input: Tensor | Array, compute_data_type: object = enums.data_type.NOT_SET, name: str = "") -> Tensor:
        """Absolute value."""
    @overload
    def adalayernorm(
        self,
        norm_forward_phase: enums.norm_forward_phase,
        input: Tensor | Array,
        scale: Tensor | Array,
        bias: Tensor | Array | None = None,
        epsilon: Tensor | Array | float = 1e-05,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Results:
        """Layer normalisation with a scale and bias for each batch entry (dimension 0); returns as ``layernorm``."""
    @overload
    def adalayernorm(
        self,
        input: Tensor | Array,
        scale: Tensor | Array,
        bias: Tensor | Array | None = None,
        epsilon: Tensor | Array | float = 1e-05,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Results: ...
    def adalayernorm_backward(
        self,
        grad: Tensor | Array,
        input: Tensor | Array,
        scale: Tensor | Array,
        mean: Tensor | Array,
        inv_variance: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """``[DX, DSCALE, DBIAS]`` of ``adalayernorm``; the last two have the shape of ``scale``."""
    def add(
        self,
        a: Tensor | Array,
        b: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``a + b``."""
    def add_square(
        self,
        a: Tensor | Array,
        b: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``a + b * b``."""
    def batchnorm(
        self,
        input: Tensor | Array,
        scale: Tensor | Array,
        bias: Tensor | Array,
        in_running_mean: Tensor | Array | None = None,
        in_running_var: Tensor | Array | None = None,
        epsilon: Tensor | Array | float = 1e-05,
        momentum: Tensor | Array | float | None = None,
        peer_stats: Sequence[Tensor | Array] = (),
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Results:
        """Batch normalisation in training (Ioffe and Szegedy, 2015).

        Everything but X and Y is ``[1, C, 1, ..]``. ``next = (1 - momentum) * running + momentum * batch``, where the
        variance is that of the sample (n - 1). ``peer_stats``: buffers ``[2, 4 C, 1, ..]`` through which several GPUs
        share the statistics; the reference executor leaves them alone and takes those of its own batch.

        Returns:
            ``[Y, MEAN, INV_VARIANCE, NEXT_RUNNING_MEAN, NEXT_RUNNING_VAR]``; without running statistics the last two
            are None.
        """
    def batchnorm_backward(
        self,
        grad: Tensor | Array,
        input: Tensor | Array,
        scale: Tensor | Array,
        mean: Tensor | Array,
        inv_variance: Tensor | Array,
        peer_stats: Sequence[Tensor | Array] = (),
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """``[DX, DSCALE, DBIAS]`` of ``batchnorm``; the last two are ``[1, C, 1, ..]``."""
    def batchnorm_inference(
        self,
        input: Tensor | Array,
        mean: Tensor | Array,
        inv_variance: Tensor | Array,
        scale: Tensor | Array,
        bias: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``(input - mean) * inv_variance * scale + bias``, all but the input ``[1, C, 1, ..]``.

        cuDNN runs it as part of a larger graph only, for instance before ``relu_backward`` and ``batchnorm_backward``.
        """
    def bias(
        self,
        input: Tensor | Array,
        bias: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input + bias``."""
    def binary_select(
        self,
        input0: Tensor | Array,
        input1: Tensor | Array,
        mask: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input0`` where ``mask`` is true, else ``input1``."""
    def block_scale_dequantize(
        self,
        input: Tensor | Array,
        descale: Tensor | Array,
        block_size: Sequence[int],
        is_negative_scale: bool = False,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input`` times the scale of each element's block: the operand of a matmul in a microscaling format.

        Args:
            descale: One scale a block, in any stride order. In the layout F8_128x4 it may be padded.
            block_size: Extents of a block along the last dimensions: ``[1, 32]`` for rows of 32, ``[32, 1]`` for
                columns. A single number stands for the dimension along which the shape of ``descale`` says so.
            is_negative_scale: The scales stand for their negatives (cuDNN 9.14).

        Returns:
            Y, shaped and laid out as ``input``. cuDNN (9.7 and newer) wants it virtual, read by a matmul.
        """
    def block_scale_quantize(
        self,
        input: Tensor | Array,
        block_size: int,
        axis: int | None = None,
        transpose: bool = False,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """``input`` quantised to a narrow type, with one scale for each ``block_size`` elements along ``axis``.

        ``scale = round_up(amax(block) / largest(Y))`` and ``Y = round(input / scale)``, which saturates: the formula of
        cuDNN's documentation. Set the types on the results: Y FP8_E4M3, FP8_E5M2 or FP4_E2M1, the scale FP8_E8M0
        (MXFP8, blocks of 32) or FP8_E4M3 (NVFP4, blocks of 16); set the scale's layout with
        ``set_reordering_type(cudnn.tensor_reordering.F8_128x4)`` where a matmul reads it. Needs cuDNN 9.7.

        Args:
            axis: The dimension that is divided into blocks; the last one by default.
            transpose: Y is stored with ``axis`` fastest and the other dimensions in their order after it.

        Returns:
            ``[Y, scale]``: Y has the shape of ``input``; the scale has it with the extent along ``axis`` divided by
            ``block_size``, in the layout F8_128x4 padded to 128 rows and 4 blocks.
        """
    def ceil(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Smallest integer not below the input."""
    def cmp_eq(
        self,
        input: Tensor | Array,
        comparison: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """1 where ``input == comparison``, else 0."""
    def cmp_ge(
        self,
        input: Tensor | Array,
        comparison: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """1 where ``input >= comparison``, else 0."""
    def cmp_gt(
        self,
        input: Tensor | Array,
        comparison: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """1 where ``input > comparison``, else 0."""
    def cmp_le(
        self,
        input: Tensor | Array,
        comparison: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """1 where ``input <= comparison``, else 0."""
    def cmp_lt(
        self,
        input: Tensor | Array,
        comparison: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """1 where ``input < comparison``, else 0."""
    def cmp_neq(
        self,
        input: Tensor | Array,
        comparison: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """1 where ``input != comparison``, else 0."""
    def concatenate(
        self,
        inputs: Sequence[Tensor | Array],
        axis: int,
        in_place_index: int | None = None,
        name: str = "",
    ) -> Tensor:
        """``inputs`` joined along dimension ``axis``; their other extents and their types are equal.

        ``in_place_index`` says which input already lies in its place in the memory of the result. Returns Y, with
        strides in the order of the first input's.
        """
    def conv_dgrad(
        self,
        loss: Tensor | Array,
        filter: Tensor | Array | None = None,
        padding: Sequence[int] = (),
        stride: Sequence[int] = (),
        dilation: Sequence[int] = (),
        convolution_mode: enums.convolution_mode = enums.convolution_mode.CROSS_CORRELATION,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        *,
        pre_padding: Sequence[int] = (),
        post_padding: Sequence[int] = (),
        weight: Tensor | Array | None = None,
    ) -> Tensor:
        """Gradient of ``conv_fprop`` with respect to its image. Takes the same ``padding``, or ``pre_padding`` and
        ``post_padding``, ``stride`` and ``dilation``.

        ``loss`` is the gradient of Y, ``[N, K, *extents]``; ``filter`` (or ``weight``) is the filter. Returns DX
        ``[N, C, *spatial]``: set its shape, save for stride 1 without groups, where only one fits and is inferred.
        """
    def conv_fprop(
        self,
        image: Tensor | Array,
        weight: Tensor | Array,
        padding: Sequence[int] = (),
        stride: Sequence[int] = (),
        dilation: Sequence[int] = (),
        convolution_mode: enums.convolution_mode = enums.convolution_mode.CROSS_CORRELATION,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        *,
        pre_padding: Sequence[int] = (),
        post_padding: Sequence[int] = (),
    ) -> Tensor:
        """Convolution of ``image`` ``[N, C, *spatial]`` with ``weight`` ``[K, C / groups, *window]``. Needs
        ``padding``, or ``pre_padding`` and ``post_padding``; ``stride`` and ``dilation`` are 1 unless given.

        Returns Y ``[N, K, *extents]`` with
        ``extents = 1 + (spatial + pre_padding + post_padding - dilation * (window - 1) - 1) // stride``.
        """
    def conv_wgrad(
        self,
        image: Tensor | Array,
        loss: Tensor | Array,
        padding: Sequence[int] = (),
        stride: Sequence[int] = (),
        dilation: Sequence[int] = (),
        convolution_mode: enums.convolution_mode = enums.convolution_mode.CROSS_CORRELATION,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        *,
        pre_padding: Sequence[int] = (),
        post_padding: Sequence[int] = (),
    ) -> Tensor:
        """Gradient of ``conv_fprop`` with respect to its weight. Takes the same ``padding``, or ``pre_padding`` and
        ``post_padding``, ``stride`` and ``dilation``.

        ``loss`` is the gradient of Y, ``[N, K, *extents]``. Returns DW ``[K, C / groups, *window]``: set its shape,
        save for stride 1 without groups, where it is inferred.
        """
    def cos(self, input: Tensor | Array, compute_data_type: object = enums.data_type.NOT_SET, name: str = "") -> Tensor:
        """Cosine of radians."""
    def div(
        self,
        a: Tensor | Array,
        b: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``a / b``."""
    def elu(self, input: Tensor | Array, compute_data_type: object = enums.data_type.NOT_SET, name: str = "") -> Tensor:
        """``input`` where positive, else ``exp(input) - 1``."""
    def elu_backward(
        self,
        loss: Tensor | Array,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``loss`` times the derivative of ``elu`` at ``input``."""
    def erf(self, input: Tensor | Array, compute_data_type: object = enums.data_type.NOT_SET, name: str = "") -> Tensor:
        """Error function."""
    def exp(self, input: Tensor | Array, compute_data_type: object = enums.data_type.NOT_SET, name: str = "") -> Tensor:
        """``e ** input``."""
    def floor(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Largest integer not above the input."""
    def gelu(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input * Phi(input)`` with the normal distribution function (Hendrycks and Gimpel, 2016)."""
    def gelu_approx_tanh(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """GELU with the tanh approximation of Hendrycks and Gimpel, 2016."""
    def gelu_approx_tanh_backward(
        self,
        loss: Tensor | Array,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``loss`` times the derivative of ``gelu_approx_tanh`` at ``input``."""
    def gelu_backward(
        self,
        loss: Tensor | Array,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``loss`` times the derivative of ``gelu`` at ``input``."""
    def gen_index(
        self,
        input: Tensor | Array,
        axis: int,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """The index along ``axis`` of each element of a tensor of the input's shape."""
    def genstats(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """Sums per channel of ``input`` ``[N, C, ...]`` and of its squares, the start of batch normalisation.

        Returns ``[SUM, SQ_SUM]``, each ``[1, C, 1, ...]``.
        """
    def get_plan_name(self) -> str:
        """Name of the plan that ``execute`` runs."""
    def get_workspace_size(self) -> int:
        """Bytes of device memory that ``execute`` needs beside the tensors."""
    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """Bytes of device memory that the plan at an index needs."""
    def identity(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """The input, converted to the type of the output."""
    @overload
    def instancenorm(
        self,
        norm_forward_phase: enums.norm_forward_phase,
        input: Tensor | Array,
        scale: Tensor | Array,
        bias: Tensor | Array,
        epsilon: Tensor | Array | float = 1e-05,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Results:
        """Instance normalisation (Ulyanov et al., 2016): ``[Y, MEAN, INV_VARIANCE]``, the last two in training only.

        Statistics per sample and channel, ``[N, C, 1, ..]``; scale and bias ``[1, C, 1, ..]``.
        """
    @overload
    def instancenorm(
        self,
        input: Tensor | Array,
        scale: Tensor | Array,
        bias: Tensor | Array,
        epsilon: Tensor | Array | float = 1e-05,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Results: ...
    def instancenorm_backward(
        self,
        grad: Tensor | Array,
        input: Tensor | Array,
        scale: Tensor | Array,
        mean: Tensor | Array | None = None,
        inv_variance: Tensor | Array | None = None,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """``[DX, DSCALE, DBIAS]`` of ``instancenorm``."""
    @overload
    def layernorm(
        self,
        norm_forward_phase: enums.norm_forward_phase,
        input: Tensor | Array,
        scale: Tensor | Array,
        bias: Tensor | Array,
        epsilon: Tensor | Array | float = 1e-05,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        *,
        zero_centered_gamma: bool = False,
    ) -> Results:
        """Layer normalisation (Ba, Kiros and Hinton, 2016): ``[Y, MEAN, INV_VARIANCE]``, the last two in training only.

        The statistics go over the dimensions along which ``scale`` varies: ``[1, D, 1, 1]`` beside X of
        ``[N, D, 1, 1]``, or a vector ``[D]`` for the last dimension. With ``zero_centered_gamma`` the scale is
        ``1 + scale``; cuDNN 9.28 fuses that addition only where the other extents of X from dimension 1 on are 1.
        """
    @overload
    def layernorm(
        self,
        input: Tensor | Array,
        scale: Tensor | Array,
        bias: Tensor | Array,
        epsilon: Tensor | Array | float = 1e-05,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        *,
        zero_centered_gamma: bool = False,
    ) -> Results: ...
    def layernorm_backward(
        self,
        grad: Tensor | Array,
        input: Tensor | Array,
        scale: Tensor | Array,
        mean: Tensor | Array,
        inv_variance: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """``[DX, DSCALE, DBIAS]`` of ``layernorm``, from the gradient of Y and the statistics of the training phase."""
    def leaky_relu(
        self,
        input: Tensor | Array,
        negative_slope: float,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input`` where positive, else ``negative_slope * input``."""
    def leaky_relu_backward(
        self,
        loss: Tensor | Array,
        input: Tensor | Array,
        negative_slope: float,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``loss`` times the derivative of ``leaky_relu`` at ``input``."""
    def log(self, input: Tensor | Array, compute_data_type: object = enums.data_type.NOT_SET, name: str = "") -> Tensor:
        """Natural logarithm."""
    def logical_and(
        self,
        a: Tensor | Array,
        b: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``a and b``."""
    def logical_not(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``not input``."""
    def logical_or(
        self,
        a: Tensor | Array,
        b: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``a or b``."""
    def matmul(
        self,
        A: Tensor | Array,
        B: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        padding: float = 0.0,
        name: str = "",
    ) -> Tensor:
        """Matrix product ``C = A B``.

        A is ``[.., M, K]`` and B ``[.., K, N]`` of the same rank, 2 or more; batch dimensions are equal or 1. C is
        ``[.., M, N]``, row-major unless its strides are set. ``padding`` is read beyond the extents of a tensor.
        """
    def max(
        self,
        input0: Tensor | Array,
        input1: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """The larger of the two."""
    def min(
        self,
        input0: Tensor | Array,
        input1: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """The smaller of the two."""
    def mod(
        self,
        input0: Tensor | Array,
        input1: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Remainder of ``input0 / input1`` with the sign of ``input0`` (C's fmod)."""
    def moe_grouped_matmul(
        self,
        token: Tensor | Array,
        weight: Tensor | Array,
        first_token_offset: Tensor | Array,
        token_index: Tensor | Array | None = None,
        token_ks: Tensor | Array | None = None,
        mode: enums.moe_grouped_matmul_mode = enums.moe_grouped_matmul_mode.NONE,
        compute_data_type: object = enums.data_type.FLOAT,
        top_k: int = 0,
        name: str = "",
    ) -> Tensor:
        """Multiplies each token by the weights of its expert, for all experts in one operation. Needs cuDNN 9.15.

        Args:
            token: ``[1, rows, K]``, sorted by expert; for GATHER ``[1, tokens, K]`` in any order.
            weight: ``[E, K, N]``; cuDNN takes strides ``[K * N, 1, K]``.
            first_token_offset: INT32 ``[E, 1, 1]``: the row at which each expert's segment begins, rising. The last
                segment ends with the rows.
            token_index: INT32 ``[1, rows, 1]``. GATHER: the token that row r takes. SCATTER: the token it came from.
            token_ks: INT32 ``[1, rows, 1]``, SCATTER only: which of its token's ``top_k`` experts row r belongs to.
            mode: NONE: output row r is the product of row r. GATHER: of token ``token_index[r]``. SCATTER: the product
                of row r goes to output row ``token_index[r] * top_k + token_ks[r]``.
            top_k: Experts for each token. SCATTER needs it; the other modes take it from the rows.

        Returns:
            OUTPUT ``[1, rows, N]``, row-major unless its strides are set.
        """
    def moe_grouped_matmul_bwd(
        self,
        doutput: Tensor | Array,
        token: Tensor | Array,
        first_token_offset: Tensor | Array,
        compute_data_type: object = enums.data_type.FLOAT,
        name: str = "",
    ) -> Tensor:
        """Gradient of ``moe_grouped_matmul`` (mode NONE) with respect to its weight. Needs cuDNN 9.22, cuBLASLt 13.5.

        Args:
            doutput: ``[1, rows, N]``, the gradient of the output.
            token: ``[1, rows, K]``.
            first_token_offset: INT32 ``[E, 1, 1]``, as in the forward product.

        Returns:
            DWEIGHT ``[E, K, N]`` with strides ``[K * N, 1, K]`` unless they are set.
        """
    def mul(
        self,
        a: Tensor | Array,
        b: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``a * b``."""
    def neg(self, input: Tensor | Array, compute_data_type: object = enums.data_type.NOT_SET, name: str = "") -> Tensor:
        """``-input``."""
    def pow(
        self,
        input0: Tensor | Array,
        input1: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input0 ** input1``."""
    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """A copy of the tensor with this uid. RuntimeError where there is none."""
    def reciprocal(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``1 / input``."""
    def reduction(
        self,
        input: Tensor | Array,
        mode: enums.reduction_mode,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        group_offset: Tensor | Array | None = None,
    ) -> Tensor:
        """Reduces ``input`` over every dimension in which the shape set on the result with ``set_dim()`` has extent 1.

        ``mode`` is a ``cudnn.reduction_mode``: ADD, MUL, MIN, MAX, AMAX (largest absolute value), AVG, NORM1 (sum of
        absolute values), NORM2 (root of the sum of squares) or MUL_NO_ZEROS (product of what is not 0). cuDNN has the
        first five; AVG, NORM1 and MUL_NO_ZEROS become element-wise operations and one of these, and NORM2 is for the
        reference executor. Returns Y, which has the shape of ``input`` until it is set and channels-last strides.

        ``group_offset``, INT32 ``[groups, 1, 1]``, divides the rows of an input ``[1, rows, N]`` at rising offsets into
        groups, which are reduced each to a row of ``[groups, 1, N]``. The last group ends with the rows, or at one more
        offset. cuDNN describes it from 9.24; 9.28 has no engine for it alone.
        """
    def relu(
        self,
        input: Tensor | Array,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input`` above ``lower_clip`` (0), a line of slope ``negative_slope`` (0) below; at most ``upper_clip``."""
    def relu_backward(
        self,
        loss: Tensor | Array,
        input: Tensor | Array,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``loss`` times the derivative of ``relu`` at ``input``."""
    def resample(
        self,
        input: Tensor | Array,
        resampling_mode: enums.resample_mode,
        padding_mode: enums.padding_mode = enums.padding_mode.ZERO_PAD,
        pre_padding: Sequence[int] = (),
        post_padding: Sequence[int] = (),
        stride: Sequence[int] = (),
        window: Sequence[int] = (),
        generate_index: bool = False,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Any:
        """Pooling of ``input`` ``[N, C, *spatial]``: the largest element, or the average, of each window. Needs
        ``window`` and ``stride``; ``pre_padding`` and ``post_padding`` are 0 unless given.

        All four are lists of whole numbers, one for each of the one to three spatial dimensions. A padding is smaller
        than its window. cuDNN requires FLOAT for ``compute_data_type``.

        Args:
            resampling_mode: MAXPOOL, AVGPOOL_INCLUDE_PADDING (divides by the size of the window) or
                AVGPOOL_EXCLUDE_PADDING (by how much of the window lies in the image). BILINEAR and NEAREST are refused.
            padding_mode: What stands in the padding. cuDNN requires NEG_INF_PAD for MAXPOOL and ZERO_PAD for averages
                where anything is padded; the reference executor takes EDGE_VAL_PAD too.
            generate_index: Also returns the place of the largest element in its window, for ``resample_backward``: a
                number in row-major order, INT8, or INT32 where a window has more than 128 elements. cuDNN has it for
                channels-last tensors.

        Returns:
            Y ``[N, C, *extents]``, ``extents = 1 + (spatial + pre_padding + post_padding - window) // stride``, in the
            stride order of ``input``; ``[Y, INDEX]`` with ``generate_index``.
        """
    def resample_backward(
        self,
        loss: Tensor | Array,
        resampling_mode: enums.resample_mode,
        padding_mode: enums.padding_mode = enums.padding_mode.ZERO_PAD,
        pre_padding: Sequence[int] = (),
        post_padding: Sequence[int] = (),
        stride: Sequence[int] = (),
        window: Sequence[int] = (),
        index: Tensor | Array | None = None,
        input: Tensor | Array | None = None,
        output: Tensor | Array | None = None,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Gradient of ``resample`` with respect to its input, from that of Y and the same ``window``, ``stride``,
        ``pre_padding`` and ``post_padding``.

        MAXPOOL needs the ``index`` of the forward pass, or its ``input`` and ``output``: cuDNN the first for
        channels-last tensors, the other two for row-major ones. Returns DX: set its shape unless ``input`` is given.
        """
    def reshape(
        self,
        input: Tensor | Array,
        name: str = "",
        reshape_mode: enums.reshape_mode = enums.reshape_mode.VIEW_ONLY,
    ) -> Tensor:
        """``input`` under another shape: call ``set_dim()``, and best ``set_stride()``, on the result.

        ``reshape_mode`` VIEW_ONLY reads the memory of ``input`` with the strides of the result (channels-last where
        they are not set); LOGICAL keeps the row-major order of the elements. Where ``input`` lies in memory and the
        result is virtual, it is the same memory. cuDNN has the operation on other results inside attention only,
        LOGICAL from 9.22. Returns Y.
        """
    @overload
    def rmsnorm(
        self,
        norm_forward_phase: enums.norm_forward_phase,
        input: Tensor | Array,
        scale: Tensor | Array,
        bias: Tensor | Array | None = None,
        epsilon: Tensor | Array | float = 1e-05,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Results:
        """Root-mean-square normalisation (Zhang and Sennrich, 2019): ``[Y, INV_VARIANCE]``, the last in training only.

        INV_VARIANCE is ``1 / sqrt(mean(X * X) + epsilon)`` over the dimensions along which ``scale`` varies.
        """
    @overload
    def rmsnorm(
        self,
        input: Tensor | Array,
        scale: Tensor | Array,
        bias: Tensor | Array | None = None,
        epsilon: Tensor | Array | float = 1e-05,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Results: ...
    def rmsnorm_backward(
        self,
        grad: Tensor | Array,
        input: Tensor | Array,
        scale: Tensor | Array,
        inv_variance: Tensor | Array,
        has_dbias: bool,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Results:
        """``[DX, DSCALE, DBIAS]`` of ``rmsnorm``; DBIAS is None unless ``has_dbias``."""
    def rope(
        self,
        input: Tensor | Array,
        freqs: Tensor | Array,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Rotary position embedding of queries or keys (Su et al., 2021), halves of a head rotated against each other.

        cuDNN has it from 9.24, as a part of attention graphs.

        Args:
            input: ``[batch, heads, positions, head]``.
            freqs: Angles in radians, ``[positions, 1, 1, rope_dim]`` or another shape with one extent above 1 before
                the last; the second half of each row repeats the first.
            output_scale: Multiplies the whole result.
            rope_dim: How many elements at the end of each head are rotated; 0: all.

        Returns:
            Y, shaped and laid out as ``input``.
        """
    def rope_backward(
        self,
        dY: Tensor | Array,
        freqs: Tensor | Array,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Gradient of ``rope`` with respect to its input, from that of its result and the same options.

        cuDNN has it from 9.25. Returns DX, shaped and laid out as ``dY``.
        """
    def rsqrt(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``1 / sqrt(input)``."""
    def scale(
        self,
        input: Tensor | Array,
        scale: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input * scale``."""
    def scaled_dot_product_flash_attention(
        self,
        q: Tensor | Array,
        k: Tensor | Array,
        v: Tensor | Array,
        is_inference: bool | None = None,
        attn_scale: float | Tensor | Array | None = None,
        bias: Tensor | Array | None = None,
        block_mask: Tensor | Array | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | Array | None = None,
        seq_len_kv: Tensor | Array | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: enums.diagonal_alignment = enums.diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Dropout = None,
        rng_dump: Tensor | Array | None = None,
        paged_attention_k_table: Tensor | Array | None = None,
        paged_attention_v_table: Tensor | Array | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        score_mod: ScoreModifier | None = None,
        generate_stats: bool | None = None,
        implementation: enums.attention_implementation = enums.attention_implementation.AUTO,
        score_max: Tensor | Array | None = None,
        score_sum_exp: Tensor | Array | None = None,
        sink_token: Tensor | Array | None = None,
        unfuse_fma: bool = False,
        *,
        attn_bias: Tensor | Array | None = None,
        dropout_seed: Any = None,
        dropout_offset: Any = None,
    ) -> Results:
        """Scaled dot-product attention ``O = softmax(attn_scale * Q K^T + bias, masked) V``.

        Args:
            q, k, v: ``[b, h_q, s_q, d_qk]``, ``[b, h_k, s_kv, d_qk]``, ``[b, h_v, s_kv, d_v]``; HALF or
                BFLOAT16 on a GPU.
            is_inference, generate_stats: Give one; ``is_inference=x`` is ``generate_stats=not x``. Neither: inference.
            attn_scale: A number, or a tensor of one element on the device or passed by value. None: no scaling.
            bias: Added to the scores; broadcasts to ``[b, h_q, s_q, s_kv]``. ``attn_bias`` is another name for it.
            use_padding_mask: Rows from ``seq_len_q`` and columns from ``seq_len_kv`` on take no part.
            seq_len_q, seq_len_kv: INT32 ``[b, 1, 1, 1]``; for the padding mask.
            use_causal_mask: Column up to row. The same as ``diagonal_band_right_bound=0``.
            use_causal_mask_bottom_right: Column up to row + s_kv - s_q (with a padding mask, its lengths).
            diagonal_alignment: Whether the band below starts top left or ends bottom right.
            diagonal_band_left_bound: Column greater than the diagonal less this. ``sliding_window_length`` is the same.
            diagonal_band_right_bound: Column up to the diagonal plus this.
            implementation: One operation of cuDNN (UNIFIED), a pattern of several (COMPOSITE), the kernels of
                :mod:`cudnn.sdpa` (FUSED: this node alone in its graph), or the fastest that fits (AUTO).
            block_mask: UINT8 ``[b, h_q, ceil(s_q / 128), ceil(ceil(s_kv / 128) / 8)]``: bit i of byte j keeps the tile
                of 128 columns number 8 j + i. UNIFIED only.
            use_alibi_mask: Adds ``slope * (column - row)`` with a slope for each head (Press et al., 2022); with
                ``diagonal_band_right_bound=0``.
            dropout: ``(probability, seed, offset)``, seed and offset INT64 tensors of one element, on the device or
                passed by value; or ``(mask, scale)``, where mask broadcasts to the scores; or a probability beside
                ``dropout_seed`` and ``dropout_offset``, each a tensor or a number.
            rng_dump: A tensor ``[b, h_q, s_q, s_kv]`` that gets the random mask: 1 kept, 0 dropped.
            paged_attention_k_table, paged_attention_v_table: INT32 ``[b, 1, pages of an entry, 1]``. ``k`` and ``v``
                are then containers ``[pages, h, tokens of a page, d]``; needs a padding mask.
            paged_attention_max_seq_len_kv: s_kv of paged K and V.
            score_mod: A function ``(graph, scores) -> scores`` that adds operations to ``graph``; applied to the scaled
                scores. It runs when the graph is validated and when it is built.
            score_max, score_sum_exp: Tensors ``[b, h_q, s_q, 1]`` that get each row's largest score, and the sum of
                ``exp(score - largest)``.
            sink_token: FLOAT ``[1, h_q, 1, 1]``: one more score in each row of the softmax, whose weight is dropped.
            unfuse_fma: Asks cuDNN (9.22) not to fuse multiplication and addition in the softmax.

        Returns:
            ``[O, Stats]``: O ``[b, h_q, s_q, d_v]``, by default in Q's stride order; Stats ``[b, h_q, s_q, 1]`` for the
            backward pass, by default FLOAT, or None. In BFLOAT16 they are rounded towards zero, and the backward pass
            refuses them.

        Raises:
            RuntimeError, ValueError, TypeError: arguments that contradict each other or are of the wrong kind.
            cudnnGraphNotSupportedError: from ``validate()`` or the build, a combination that cuDNN does not support.

        The formula and the name of the statistics are those of Dao et al., FlashAttention (2022).
        """
    def scaled_dot_product_flash_attention_backward(
        self,
        q: Tensor | Array,
        k: Tensor | Array,
        v: Tensor | Array,
        o: Tensor | Array,
        dO: Tensor | Array,
        stats: Tensor | Array,
        attn_scale: float | Tensor | Array | None = None,
        bias: Tensor | Array | None = None,
        dBias: Tensor | Array | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | Array | None = None,
        seq_len_kv: Tensor | Array | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: enums.diagonal_alignment = enums.diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Dropout = None,
        rng_dump: Tensor | Array | None = None,
        use_deterministic_algorithm: bool = False,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        score_mod: ScoreModifier | None = None,
        score_mod_bprop: ScoreModifier | None = None,
        sink_token: Tensor | Array | None = None,
        dSink_token: Tensor | Array | None = None,
        implementation: enums.attention_implementation = enums.attention_implementation.AUTO,
    ) -> list[Tensor]:
        """Gradients of scaled dot-product attention.

        Args:
            q, k, v: As for ``sdpa``.
            o, stats: What ``sdpa`` returned with ``generate_stats=True``.
            dO: Gradient of O.
            dBias: A tensor made by ``graph.tensor()`` for the gradient of ``bias``, in a shape that broadcasts to
                ``[b, h_q, s_q, s_kv]``; broadcast dimensions are summed over.
            attn_scale ... diagonal_band_right_bound, dropout, score_mod, sink_token: As given to ``sdpa``; the second
                form of dropout is ``(mask, scale, inverse of scale)``.
            rng_dump: As for ``sdpa``.
            max_total_seq_len_q: At most so many rows of Q in all entries of ragged tensors together: less scratch
                memory.
            max_total_seq_len_kv: Has no effect: there is no scratch memory for K and V.
            use_deterministic_algorithm: Adds in a fixed order: the same bits every time, more slowly.
            score_mod_bprop: A function ``(graph, gradient) -> gradient``: that of ``score_mod``.
            dSink_token: A tensor ``[1, h_q, 1, 1]`` for the gradient of ``sink_token``.
            implementation: cuDNN's pattern of operations (COMPOSITE), the kernels of :mod:`cudnn.sdpa` (FUSED: this
                node alone in its graph), or the faster of both (AUTO).

        Returns:
            ``[dQ, dK, dV]``, by default with the shapes and stride orders of q, k and v.

        Raises:
            RuntimeError, ValueError, TypeError, cudnnGraphNotSupportedError: as ``sdpa``.

        The formulas are those of Dao et al., FlashAttention (2022), appendix B.2.
        """
    def sdpa(
        self,
        q: Tensor | Array,
        k: Tensor | Array,
        v: Tensor | Array,
        is_inference: bool | None = None,
        attn_scale: float | Tensor | Array | None = None,
        bias: Tensor | Array | None = None,
        block_mask: Tensor | Array | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | Array | None = None,
        seq_len_kv: Tensor | Array | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: enums.diagonal_alignment = enums.diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Dropout = None,
        rng_dump: Tensor | Array | None = None,
        paged_attention_k_table: Tensor | Array | None = None,
        paged_attention_v_table: Tensor | Array | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        score_mod: ScoreModifier | None = None,
        generate_stats: bool | None = None,
        implementation: enums.attention_implementation = enums.attention_implementation.AUTO,
        score_max: Tensor | Array | None = None,
        score_sum_exp: Tensor | Array | None = None,
        sink_token: Tensor | Array | None = None,
        unfuse_fma: bool = False,
        *,
        attn_bias: Tensor | Array | None = None,
        dropout_seed: Any = None,
        dropout_offset: Any = None,
    ) -> Results:
        """Scaled dot-product attention ``O = softmax(attn_scale * Q K^T + bias, masked) V``.

        Args:
            q, k, v: ``[b, h_q, s_q, d_qk]``, ``[b, h_k, s_kv, d_qk]``, ``[b, h_v, s_kv, d_v]``; HALF or
                BFLOAT16 on a GPU.
            is_inference, generate_stats: Give one; ``is_inference=x`` is ``generate_stats=not x``. Neither: inference.
            attn_scale: A number, or a tensor of one element on the device or passed by value. None: no scaling.
            bias: Added to the scores; broadcasts to ``[b, h_q, s_q, s_kv]``. ``attn_bias`` is another name for it.
            use_padding_mask: Rows from ``seq_len_q`` and columns from ``seq_len_kv`` on take no part.
            seq_len_q, seq_len_kv: INT32 ``[b, 1, 1, 1]``; for the padding mask.
            use_causal_mask: Column up to row. The same as ``diagonal_band_right_bound=0``.
            use_causal_mask_bottom_right: Column up to row + s_kv - s_q (with a padding mask, its lengths).
            diagonal_alignment: Whether the band below starts top left or ends bottom right.
            diagonal_band_left_bound: Column greater than the diagonal less this. ``sliding_window_length`` is the same.
            diagonal_band_right_bound: Column up to the diagonal plus this.
            implementation: One operation of cuDNN (UNIFIED), a pattern of several (COMPOSITE), the kernels of
                :mod:`cudnn.sdpa` (FUSED: this node alone in its graph), or the fastest that fits (AUTO).
            block_mask: UINT8 ``[b, h_q, ceil(s_q / 128), ceil(ceil(s_kv / 128) / 8)]``: bit i of byte j keeps the tile
                of 128 columns number 8 j + i. UNIFIED only.
            use_alibi_mask: Adds ``slope * (column - row)`` with a slope for each head (Press et al., 2022); with
                ``diagonal_band_right_bound=0``.
            dropout: ``(probability, seed, offset)``, seed and offset INT64 tensors of one element, on the device or
                passed by value; or ``(mask, scale)``, where mask broadcasts to the scores; or a probability beside
                ``dropout_seed`` and ``dropout_offset``, each a tensor or a number.
            rng_dump: A tensor ``[b, h_q, s_q, s_kv]`` that gets the random mask: 1 kept, 0 dropped.
            paged_attention_k_table, paged_attention_v_table: INT32 ``[b, 1, pages of an entry, 1]``. ``k`` and ``v``
                are then containers ``[pages, h, tokens of a page, d]``; needs a padding mask.
            paged_attention_max_seq_len_kv: s_kv of paged K and V.
            score_mod: A function ``(graph, scores) -> scores`` that adds operations to ``graph``; applied to the scaled
                scores. It runs when the graph is validated and when it is built.
            score_max, score_sum_exp: Tensors ``[b, h_q, s_q, 1]`` that get each row's largest score, and the sum of
                ``exp(score - largest)``.
            sink_token: FLOAT ``[1, h_q, 1, 1]``: one more score in each row of the softmax, whose weight is dropped.
            unfuse_fma: Asks cuDNN (9.22) not to fuse multiplication and addition in the softmax.

        Returns:
            ``[O, Stats]``: O ``[b, h_q, s_q, d_v]``, by default in Q's stride order; Stats ``[b, h_q, s_q, 1]`` for the
            backward pass, by default FLOAT, or None. In BFLOAT16 they are rounded towards zero, and the backward pass
            refuses them.

        Raises:
            RuntimeError, ValueError, TypeError: arguments that contradict each other or are of the wrong kind.
            cudnnGraphNotSupportedError: from ``validate()`` or the build, a combination that cuDNN does not support.

        The formula and the name of the statistics are those of Dao et al., FlashAttention (2022).
        """
    def sdpa_backward(
        self,
        q: Tensor | Array,
        k: Tensor | Array,
        v: Tensor | Array,
        o: Tensor | Array,
        dO: Tensor | Array,
        stats: Tensor | Array,
        attn_scale: float | Tensor | Array | None = None,
        bias: Tensor | Array | None = None,
        dBias: Tensor | Array | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | Array | None = None,
        seq_len_kv: Tensor | Array | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: enums.diagonal_alignment = enums.diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Dropout = None,
        rng_dump: Tensor | Array | None = None,
        use_deterministic_algorithm: bool = False,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        score_mod: ScoreModifier | None = None,
        score_mod_bprop: ScoreModifier | None = None,
        sink_token: Tensor | Array | None = None,
        dSink_token: Tensor | Array | None = None,
        implementation: enums.attention_implementation = enums.attention_implementation.AUTO,
    ) -> list[Tensor]:
        """Gradients of scaled dot-product attention.

        Args:
            q, k, v: As for ``sdpa``.
            o, stats: What ``sdpa`` returned with ``generate_stats=True``.
            dO: Gradient of O.
            dBias: A tensor made by ``graph.tensor()`` for the gradient of ``bias``, in a shape that broadcasts to
                ``[b, h_q, s_q, s_kv]``; broadcast dimensions are summed over.
            attn_scale ... diagonal_band_right_bound, dropout, score_mod, sink_token: As given to ``sdpa``; the second
                form of dropout is ``(mask, scale, inverse of scale)``.
            rng_dump: As for ``sdpa``.
            max_total_seq_len_q: At most so many rows of Q in all entries of ragged tensors together: less scratch
                memory.
            max_total_seq_len_kv: Has no effect: there is no scratch memory for K and V.
            use_deterministic_algorithm: Adds in a fixed order: the same bits every time, more slowly.
            score_mod_bprop: A function ``(graph, gradient) -> gradient``: that of ``score_mod``.
            dSink_token: A tensor ``[1, h_q, 1, 1]`` for the gradient of ``sink_token``.
            implementation: cuDNN's pattern of operations (COMPOSITE), the kernels of :mod:`cudnn.sdpa` (FUSED: this
                node alone in its graph), or the faster of both (AUTO).

        Returns:
            ``[dQ, dK, dV]``, by default with the shapes and stride orders of q, k and v.

        Raises:
            RuntimeError, ValueError, TypeError, cudnnGraphNotSupportedError: as ``sdpa``.

        The formulas are those of Dao et al., FlashAttention (2022), appendix B.2.
        """
    def sdpa_fp8(
        self,
        q: Tensor | Array,
        k: Tensor | Array,
        v: Tensor | Array,
        descale_q: Tensor | Array,
        descale_k: Tensor | Array,
        descale_v: Tensor | Array,
        descale_s: Tensor | Array,
        scale_s: Tensor | Array,
        scale_o: Tensor | Array,
        is_inference: bool | None = None,
        attn_scale: float | Tensor | Array | None = None,
        bias: Tensor | Array | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | Array | None = None,
        seq_len_kv: Tensor | Array | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window: int | None = None,
        diagonal_alignment: enums.diagonal_alignment = enums.diagonal_alignment.TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        dropout: Dropout = None,
        rng_dump: Tensor | Array | None = None,
        paged_attention_k_table: Tensor | Array | None = None,
        paged_attention_v_table: Tensor | Array | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        fn: ScoreModifier | None = None,
        generate_stats: bool | None = None,
        score_max: Tensor | Array | None = None,
        score_sum_exp: Tensor | Array | None = None,
        sink_token: Tensor | Array | None = None,
    ) -> Results:
        """Scaled dot-product attention on fp8 tensors.

        Args:
            q, k, v: As for ``sdpa``, FP8_E4M3 or FP8_E5M2, compute capability 9.0 or newer.
            descale_q, descale_k, descale_v, descale_s: FLOAT ``[1, 1, 1, 1]``: what the stored values of q, k, v and of
                the softmax's weights are multiplied with.
            scale_s, scale_o: FLOAT ``[1, 1, 1, 1]``: what the weights, and O, are multiplied with before they are
                rounded.
            sliding_window, left_bound, right_bound, fn: ``sliding_window_length``, ``diagonal_band_left_bound``,
                ``diagonal_band_right_bound`` and ``score_mod`` of ``sdpa``; all others are called the same there.

        Returns:
            ``[O, Stats, Amax_S, Amax_O]``: O ``[b, h_q, s_q, d_v]``; Stats as from ``sdpa``, or None; the largest
            absolute weight, and the largest absolute value of O before ``scale_o``, FLOAT ``[1, 1, 1, 1]``.

        Raises:
            RuntimeError, ValueError, TypeError, cudnnGraphNotSupportedError: as ``sdpa``.
        """
    def sdpa_fp8_backward(
        self,
        q: Tensor | Array,
        k: Tensor | Array,
        v: Tensor | Array,
        o: Tensor | Array,
        dO: Tensor | Array,
        stats: Tensor | Array,
        descale_q: Tensor | Array,
        descale_k: Tensor | Array,
        descale_v: Tensor | Array,
        descale_o: Tensor | Array,
        descale_dO: Tensor | Array,
        descale_s: Tensor | Array,
        descale_dP: Tensor | Array,
        scale_s: Tensor | Array,
        scale_dQ: Tensor | Array,
        scale_dK: Tensor | Array,
        scale_dV: Tensor | Array,
        scale_dP: Tensor | Array,
        attn_scale: float | Tensor | Array | None = None,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | Array | None = None,
        seq_len_kv: Tensor | Array | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        diagonal_alignment: enums.diagonal_alignment = enums.diagonal_alignment.TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        use_deterministic_algorithm: bool = False,
        dropout: Dropout = None,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        sink_token: Tensor | Array | None = None,
        dSink_token: Tensor | Array | None = None,
    ) -> list[Tensor]:
        """Gradients of scaled dot-product attention on fp8 tensors.

        Args:
            q, k, v, o, stats: Inputs and results of ``sdpa_fp8`` with ``generate_stats=True``.
            dO: Gradient of O, fp8.
            descale_q ... descale_dP: FLOAT ``[1, 1, 1, 1]``: what the stored values of the tensor of that name are
                multiplied with; s are the weights, dP the gradients of the scores.
            scale_s ... scale_dP: FLOAT ``[1, 1, 1, 1]``: what the tensor is multiplied with before it is rounded.
            left_bound, right_bound: As for ``sdpa_fp8``; all others as for ``sdpa_backward``.

        Returns:
            ``[dQ, dK, dV, Amax_dQ, Amax_dK, Amax_dV, Amax_dP]``: the gradients, by default with the shapes and stride
            orders of q, k and v, and the largest absolute values before scaling, FLOAT ``[1, 1, 1, 1]``.

        Raises:
            RuntimeError, ValueError, TypeError, cudnnGraphNotSupportedError: as ``sdpa``.
        """
    def sdpa_mxfp8(
        self,
        q: Tensor | Array,
        k: Tensor | Array,
        v: Tensor | Array,
        descale_q: Tensor | Array,
        descale_k: Tensor | Array,
        descale_v: Tensor | Array,
        attn_scale: float | Tensor | Array | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        diagonal_alignment: enums.diagonal_alignment = enums.diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        generate_stats: bool | None = None,
        sink_token: Tensor | Array | None = None,
        unfuse_fma: bool = False,
    ) -> Results:
        """Scaled dot-product attention on MXFP8 tensors: compute capability 10, cuDNN 9.21.

        Args:
            q, k, v: As for ``sdpa``, FP8_E4M3 or FP8_E5M2.
            descale_q, descale_k: FP8_E8M0 ``[b, h, s, d / 32]``, the last two extents rounded up to 128 and 4,
                reordering F8_128x4: what every 32 elements along the head size are multiplied with.
            descale_v: The same ``[b, h_v, s_kv / 32, d_v]`` for 32 elements along the sequence.
            generate_stats: Whether Stats are wanted; to be given.
            attn_scale ... diagonal_band_right_bound, sink_token, unfuse_fma: As for ``sdpa``.

        Returns:
            ``[O, Stats, Amax_O]``: O ``[b, h_q, s_q, d_v]``; Stats as from ``sdpa``, or None; the largest absolute
            value of O, FLOAT ``[1, 1, 1, 1]``.

        Raises:
            RuntimeError, ValueError, TypeError, cudnnGraphNotSupportedError: as ``sdpa``.
        """
    def sdpa_mxfp8_backward(
        self,
        q: Tensor | Array,
        q_T: Tensor | Array,
        k: Tensor | Array,
        k_T: Tensor | Array,
        v: Tensor | Array,
        o_f16: Tensor | Array,
        dO_f16: Tensor | Array,
        dO: Tensor | Array,
        dO_T: Tensor | Array,
        stats: Tensor | Array,
        descale_q: Tensor | Array,
        descale_q_T: Tensor | Array,
        descale_k: Tensor | Array,
        descale_k_T: Tensor | Array,
        descale_v: Tensor | Array,
        descale_dO: Tensor | Array,
        descale_dO_T: Tensor | Array,
        attn_scale: float | Tensor | Array | None = None,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | Array | None = None,
        seq_len_kv: Tensor | Array | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        diagonal_alignment: enums.diagonal_alignment = enums.diagonal_alignment.TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        use_deterministic_algorithm: bool = False,
        dropout: Dropout = None,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
        sink_token: Tensor | Array | None = None,
        dSink_token: Tensor | Array | None = None,
    ) -> list[Tensor]:
        """Gradients of scaled dot-product attention on MXFP8 tensors: on the reference executor only.

        Args:
            q, k, v, dO: Inputs of ``sdpa_mxfp8``, and the gradient of O, FP8_E4M3 or FP8_E5M2, with a scale for 32
                elements along the head size: V too, unlike in the forward pass.
            q_T, k_T, dO_T: The same values and logical shapes, with a scale for 32 elements along the sequence.
            o_f16, dO_f16: O and its gradient, HALF or BFLOAT16.
            stats: What ``sdpa_mxfp8`` returned with ``generate_stats=True``.
            descale_q, descale_k, descale_v, descale_dO: FP8_E8M0 ``[b, h, s, d / 32]``, as for ``sdpa_mxfp8``.
            descale_q_T, descale_k_T, descale_dO_T: The same ``[b, h, s / 32, d]``.
            left_bound, right_bound: As for ``sdpa_fp8``; all others as for ``sdpa_backward``.

        Returns:
            ``[dQ, dK, dV, Amax_dQ, Amax_dK, Amax_dV]``: the gradients, by default with the shapes and stride orders of
            q, k and v, and their largest absolute values, FLOAT ``[1, 1, 1, 1]``.

        Raises:
            RuntimeError, ValueError, TypeError: as ``sdpa``.
            cudnnGraphNotSupportedError: from ``validate()``, on a GPU.
        """
    def sigmoid(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``1 / (1 + exp(-input))``."""
    def sigmoid_backward(
        self,
        loss: Tensor | Array,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``loss`` times the derivative of ``sigmoid`` at ``input``."""
    def silu(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input * sigmoid(input)``."""
    def sin(self, input: Tensor | Array, compute_data_type: object = enums.data_type.NOT_SET, name: str = "") -> Tensor:
        """Sine of radians."""
    def slice(
        self,
        input: Tensor | Array,
        slices: Sequence[builtins.slice] = (),
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """The part of ``input`` that ``slices`` select: Python ``slice`` objects, one per dimension, positive steps.

        The result has the strides of ``input`` times the steps, and its type. It is virtual and never passed to
        ``execute``: it shares the memory of ``input``. The slice of another operation's result needs cuDNN 9.22.
        """
    def softplus(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``log(1 + exp(input))``."""
    def softplus_backward(
        self,
        loss: Tensor | Array,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``loss`` times the derivative of ``softplus`` at ``input``."""
    def sqrt(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Square root."""
    def sub(
        self,
        a: Tensor | Array,
        b: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``a - b``."""
    def swish(
        self,
        input: Tensor | Array,
        swish_beta: float | None = None,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input * sigmoid(swish_beta * input)``; beta is 1 by default (SiLU)."""
    def swish_backward(
        self,
        loss: Tensor | Array,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        swish_beta: float | None = None,
        name: str = "",
    ) -> Tensor:
        """``loss`` times the derivative of ``swish`` at ``input``."""
    def tan(self, input: Tensor | Array, compute_data_type: object = enums.data_type.NOT_SET, name: str = "") -> Tensor:
        """Tangent of radians."""
    def tanh(
        self,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Hyperbolic tangent."""
    def tanh_backward(
        self,
        loss: Tensor | Array,
        input: Tensor | Array,
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``loss`` times the derivative of ``tanh`` at ``input``."""
    def tensor(
        self,
        dim: Sequence[int],
        stride: Sequence[int],
        data_type: object = enums.data_type.NOT_SET,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: enums.tensor_reordering = enums.tensor_reordering.NONE,
        name: str = "",
        uid: int = -1,
        ragged_offset_multiplier: int = 1,
    ) -> Tensor:
        """A tensor described by shape and strides in elements. A ``uid`` of -1 leaves the choice to the library."""
    def tensor_like(self, source: Any, name: str = "") -> Tensor:
        """A tensor described by another: a graph tensor, a ``torch.Tensor`` or any object with ``__dlpack__``.

        A CPU array of one element is passed by value. One of more elements makes the reference executor run the graph.
        """
    def tensor_scalar(
        self,
        value: int | float,
        scalar_type: enums.scalar_type = enums.scalar_type.RUNTIME_PARAM,
    ) -> Tensor:
        """A constant: FLOAT for a float, INT32 (INT64 where it does not fit) for an int."""
    def transpose(
        self,
        input: Tensor | Array,
        permutation: Sequence[int],
        compute_data_type: object = enums.data_type.NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input`` with its dimensions reordered: dimension i of the result is dimension ``permutation[i]`` of it.

        Shape and strides of Y are those of ``input``, permuted; its type is the same. Where ``input`` lies in memory
        and Y is virtual, Y is the same memory; the transpose of another operation's result needs cuDNN 9.22.
        """
