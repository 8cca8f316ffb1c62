"""The public enumerations of the Graph API.

Members are matched with cuDNN's own numbers (``cudnn.backend.enums``) by name, never by value.
"""

from __future__ import annotations

import enum


class Enumeration(enum.IntEnum):
    """Members are integers that print as ``data_type.HALF`` and show as ``<data_type.HALF: 3>``."""

    __str__ = enum.Enum.__str__

    def __format__(self, format_spec: str) -> str:  # that of int would print the number
        return format(str(self), format_spec)


class data_type(Enumeration):  # noqa: N801
    """Element type of a tensor or of a computation."""

    NOT_SET = 0
    FLOAT = 1
    DOUBLE = 2
    HALF = 3
    INT8 = 4
    INT32 = 5
    INT8x4 = 6
    UINT8 = 7
    UINT8x4 = 8
    INT8x32 = 9
    BFLOAT16 = 10
    INT64 = 11
    BOOLEAN = 12
    FP8_E4M3 = 13
    FP8_E5M2 = 14
    FAST_FLOAT_FOR_FP8 = 15
    FP8_E8M0 = 16
    FP4_E2M1 = 17
    INT4 = 18
    FP8_E5M3 = 19


class heur_mode(Enumeration):  # noqa: N801
    """How engine configurations are found.

    ``A`` and ``B`` are cuDNN's heuristics, ``FALLBACK`` its list of last resort. ``OPENSOURCE`` stands for A, then
    FALLBACK; ``CUDNN_FIND`` for A, B and FALLBACK together.
    """

    A = 0
    B = 1
    FALLBACK = 2
    OPENSOURCE = 3
    CUDNN_FIND = 4


class norm_forward_phase(Enumeration):  # noqa: N801
    """Whether a normalization also writes the statistics that its backward pass needs."""

    NOT_SET = 0
    INFERENCE = 1
    TRAINING = 2


class reduction_mode(Enumeration):  # noqa: N801
    """Operator of a reduction."""

    NOT_SET = 0
    ADD = 1
    MUL = 2
    MIN = 3
    MAX = 4
    AMAX = 5
    AVG = 6
    NORM1 = 7
    NORM2 = 8
    MUL_NO_ZEROS = 9


class build_plan_policy(Enumeration):  # noqa: N801
    """Build the first plan that works, or every plan."""

    HEURISTICS_CHOICE = 0
    ALL = 1


class numerical_note(Enumeration):  # noqa: N801
    """Numerical properties of an engine configuration."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4x4 = 6
    WINOGRAD_TILE_6x6 = 7
    WINOGRAD_TILE_13x13 = 8
    STRICT_NAN_PROP = 9


class behavior_note(Enumeration):  # noqa: N801
    """Behavior of an engine configuration that its user may care about."""

    RUNTIME_COMPILATION = 0
    REQUIRES_FILTER_INT8x32_REORDER = 1
    REQUIRES_BIAS_INT8x32_REORDER = 2
    SUPPORTS_CUDA_GRAPH_NATIVE_API = 3
    CUBLASLT_DEPENDENCY = 4


class tensor_reordering(Enumeration):  # noqa: N801
    """Special memory layouts. ``F8_128x4`` is the layout of block scale factors."""

    NONE = 0
    INT8x32 = 1
    F16x16 = 2
    F8_128x4 = 3


class diagonal_alignment(Enumeration):  # noqa: N801
    """Where the diagonal of a causal mask starts when the two sequence lengths differ."""

    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class attention_implementation(Enumeration):  # noqa: N801
    """One operation of cuDNN (``UNIFIED``), a pattern of smaller ones (``COMPOSITE``), the kernels of ``cudnn.sdpa``
    (``FUSED``), or what fits (``AUTO``).
    """

    AUTO = 0
    COMPOSITE = 1
    UNIFIED = 2
    FUSED = 3


class reshape_mode(Enumeration):  # noqa: N801
    """``VIEW_ONLY`` reinterprets the memory; ``LOGICAL`` keeps the row-major order of the elements."""

    VIEW_ONLY = 1
    LOGICAL = 2


class scalar_type(Enumeration):  # noqa: N801
    """Whether a scalar may change from call to call or is compiled into the plan."""

    RUNTIME_PARAM = 0
    COMPILE_TIME_CONST = 1


class moe_grouped_matmul_mode(Enumeration):  # noqa: N801
    """How a grouped matrix product finds the rows of an expert."""

    NONE = 0
    GATHER = 1
    SCATTER = 2


class convolution_mode(Enumeration):  # noqa: N801
    """``CONVOLUTION`` mirrors the filter, ``CROSS_CORRELATION`` does not."""

    CONVOLUTION = 0
    CROSS_CORRELATION = 1


class resample_mode(Enumeration):  # noqa: N801
    """Pooling, whose averages count padding or not, and interpolation."""

    NOT_SET = 0
    AVGPOOL_INCLUDE_PADDING = 1
    AVGPOOL_EXCLUDE_PADDING = 2
    BILINEAR = 3
    NEAREST = 4
    MAXPOOL = 5


class padding_mode(Enumeration):  # noqa: N801
    """Padding of an image: zeros, negative infinity, or its nearest element."""

    ZERO_PAD = 0
    NEG_INF_PAD = 1
    EDGE_VAL_PAD = 2


knob_type = Enumeration(
    "knob_type",
    "NOT_SET SWIZZLE TILE_SIZE EDGE MULTIPLY SPLIT_K_BUF TILEK STAGES REDUCTION_MODE SPLIT_K_SLC IDX_MODE SPECFILT "
    "KERNEL_CFG WORKSPACE TILE_CGA_M TILE_CGA_N BLOCK_SIZE OCCUPANCY ARRAY_SIZE_PER_THREAD SPLIT_COLS TILE_ROWS "
    "TILE_COLS LOAD_SIZE CTA_COUNT STREAM_K SPLIT_P_SLC TILE_M TILE_N WARP_SPEC_CFG",
    start=0,
    module=__name__,
)
knob_type.__doc__ = "Tuning parameters of an engine."
