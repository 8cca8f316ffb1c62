"""cuDNN's enumerations with cuDNN's values; each member has the version that added it (``.since``).

The public enumerations (``cudnn.enums``) are matched with these by name, never by value.
"""

from __future__ import annotations

from cudnn.backend.attributes import Attribute as Attribute
from cudnn.backend.attributes import AttributeType as AttributeType
from cudnn.backend.attributes import Versioned


class DescriptorType(Versioned):
    """Kind of a descriptor (``CUDNN_BACKEND_<name>_DESCRIPTOR``)."""

    POINTWISE = 0
    CONVOLUTION = 1
    ENGINE = 2
    ENGINECFG = 3
    ENGINEHEUR = 4
    EXECUTION_PLAN = 5
    INTERMEDIATE_INFO = 6
    KNOB_CHOICE = 7
    KNOB_INFO = 8
    LAYOUT_INFO = 9
    OPERATION_CONVOLUTION_FORWARD = 10
    OPERATION_CONVOLUTION_BACKWARD_FILTER = 11
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12
    OPERATION_POINTWISE = 13
    OPERATION_GEN_STATS = 14
    OPERATIONGRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17
    MATMUL = 18
    OPERATION_MATMUL = 19
    OPERATION_BN_FINALIZE_STATISTICS = 20
    REDUCTION = 21
    OPERATION_REDUCTION = 22
    OPERATION_BN_BWD_WEIGHTS = 23
    RESAMPLE = 24
    OPERATION_RESAMPLE_FWD = 25
    OPERATION_RESAMPLE_BWD = 26
    OPERATION_CONCAT = 27
    OPERATION_SIGNAL = 28
    OPERATION_NORM_FORWARD = 29
    OPERATION_NORM_BACKWARD = 30
    OPERATION_RESHAPE = 31
    RNG = 32
    OPERATION_RNG = 33
    KERNEL_CACHE = 34, 90400
    OPERATION_PAGED_CACHE_LOAD = 35, 90400
    OPERATION_BLOCK_SCALE_QUANTIZE = 36, 90700
    OPERATION_BLOCK_SCALE_DEQUANTIZE = 37, 90700
    DEVICEPROP = 38, 90800
    OPERATION_EXPAND_BAND_MATRIX = 39, 91000
    OPERATION_CONTRACT_BAND_MATRIX = 40, 91000
    OPERATION_SDPA_FWD = 41, 91300
    OPERATION_MOE_GROUPED_MATMUL = 42, 91500
    OPERATION_SDPA_BWD = 43, 91700
    OPERATION_DIAGONAL_BAND_MASK = 44, 92000
    OPERATION_SOFTMAX = 45, 92000
    OPERATION_TRANSPOSE = 46, 92200
    OPERATION_SLICE = 47, 92200
    OPERATION_MOE_GROUPED_MATMUL_BWD = 48, 92200
    OPERATION_ROPE_FWD = 49, 92400
    OPERATION_ROPE_BWD = 50, 92500


class DataType(Versioned):
    """Element types (``CUDNN_DATA_``)."""

    FLOAT = 0
    DOUBLE = 1
    HALF = 2
    INT8 = 3
    INT32 = 4
    INT8x4 = 5
    UINT8 = 6
    UINT8x4 = 7
    INT8x32 = 8
    BFLOAT16 = 9
    INT64 = 10
    BOOLEAN = 11
    FP8_E4M3 = 12
    FP8_E5M2 = 13
    FAST_FLOAT_FOR_FP8 = 14
    FP8_E8M0 = 15, 90700
    FP4_E2M1 = 16, 90700
    INT4 = 17, 91100
    UINT4 = 18, 91100
    UINT32 = 19, 91100
    COMPLEX_FP32 = 20, 91400
    COMPLEX_FP64 = 21, 91400
    BYTE_BOOLEAN = 22, 92500
    FP8_E5M3 = 23, 92600


class PointwiseMode(Versioned):
    """Pointwise operators (``CUDNN_POINTWISE_``)."""

    ADD = 0
    ADD_SQUARE = 5
    DIV = 6
    MAX = 3
    MIN = 2
    MOD = 7
    MUL = 1
    POW = 8
    SUB = 9
    ABS = 10
    CEIL = 11
    COS = 12
    EXP = 13
    FLOOR = 14
    LOG = 15
    NEG = 16
    RSQRT = 17
    SIN = 18
    SQRT = 4
    TAN = 19
    ERF = 20
    IDENTITY = 21
    RECIPROCAL = 22
    ATAN2 = 23, 90100
    FLOOR_MOD = 24, 92700
    RELU_FWD = 100
    TANH_FWD = 101
    SIGMOID_FWD = 102
    ELU_FWD = 103
    GELU_FWD = 104
    SOFTPLUS_FWD = 105
    SWISH_FWD = 106
    GELU_APPROX_TANH_FWD = 107
    RELU_BWD = 200
    TANH_BWD = 201
    SIGMOID_BWD = 202
    ELU_BWD = 203
    GELU_BWD = 204
    SOFTPLUS_BWD = 205
    SWISH_BWD = 206
    GELU_APPROX_TANH_BWD = 207
    CMP_EQ = 300
    CMP_NEQ = 301
    CMP_GT = 302
    CMP_GE = 303
    CMP_LT = 304
    CMP_LE = 305
    LOGICAL_AND = 400
    LOGICAL_OR = 401
    LOGICAL_NOT = 402
    GEN_INDEX = 501
    BINARY_SELECT = 601


class ReduceTensorOp(Versioned):
    """Reduction operators (``CUDNN_REDUCE_TENSOR_``)."""

    ADD = 0
    MUL = 1
    MIN = 2
    MAX = 3
    AMAX = 4
    AVG = 5
    NORM1 = 6
    NORM2 = 7
    MUL_NO_ZEROS = 8


class ConvolutionMode(Versioned):
    """Whether the filter is mirrored (``CUDNN_``)."""

    CONVOLUTION = 0
    CROSS_CORRELATION = 1


class ResampleMode(Versioned):
    """Pooling and interpolation (``CUDNN_RESAMPLE_``)."""

    NEAREST = 0
    BILINEAR = 1
    AVGPOOL_INCLUDE_PADDING = 2
    MAXPOOL = 3
    AVGPOOL_EXCLUDE_PADDING = 4


class PaddingMode(Versioned):
    """Padding modes (``CUDNN_``)."""

    ZERO_PAD = 0
    NEG_INF_PAD = 1
    EDGE_VAL_PAD = 2


class NanPropagation(Versioned):
    """What max and ReLU do with NaN (``CUDNN_``)."""

    NOT_PROPAGATE_NAN = 0
    PROPAGATE_NAN = 1


class HeurMode(Versioned):
    """Sources of engine configurations (``CUDNN_HEUR_MODE_``)."""

    INSTANT = 0
    B = 1
    FALLBACK = 2
    A = 3


class TensorReordering(Versioned):
    """Special layouts (``CUDNN_TENSOR_REORDERING_``)."""

    NONE = 0
    INT8x32 = 1
    F16x16 = 2
    F8_128x4 = 3, 90700


class NormMode(Versioned):
    """Normalizations (``CUDNN_``)."""

    LAYER_NORM = 0
    INSTANCE_NORM = 1
    BATCH_NORM = 2
    GROUP_NORM = 3
    RMS_NORM = 4
    ADA_LAYER_NORM = 5, 90700


class NormFwdPhase(Versioned):
    """Phase of a forward normalization (``CUDNN_NORM_FWD_``)."""

    INFERENCE = 0
    TRAINING = 1


class GenStatsMode(Versioned):
    """Statistics of ``genstats`` (``CUDNN_GENSTATS_``)."""

    SUM_SQSUM = 0


class RngDistribution(Versioned):
    """Random distributions (``CUDNN_RNG_DISTRIBUTION_``)."""

    BERNOULLI = 0
    UNIFORM = 1
    NORMAL = 2


class ReshapeMode(Versioned):
    """Meaning of a reshape (``CUDNN_RESHAPE_``)."""

    VIEW_ONLY = 0, 92200
    LOGICAL = 1, 92200


class MoeGroupedMatmulMode(Versioned):
    """Row selection of a grouped matrix product (``CUDNN_MOE_GROUPED_MATMUL_MODE_``)."""

    NONE = 0, 91500
    GATHER = 1, 91500
    SCATTER = 2, 91500


class NumericalNote(Versioned):
    """Numerical properties of an engine (``CUDNN_NUMERICAL_NOTE_``)."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4x4 = 6
    WINOGRAD_TILE_6x6 = 7
    WINOGRAD_TILE_13x13 = 8
    STRICT_NAN_PROP = 9, 90100


class BehaviorNote(Versioned):
    """Behavior of an engine (``CUDNN_BEHAVIOR_NOTE_``)."""

    RUNTIME_COMPILATION = 0
    REQUIRES_FILTER_INT8x32_REORDER = 1
    REQUIRES_BIAS_INT8x32_REORDER = 2
    SUPPORTS_CUDA_GRAPH_NATIVE_API = 3, 90500
    CUBLASLT_DEPENDENCY = 4, 91500


class KnobType(Versioned):
    """Tuning parameters of engines (``CUDNN_KNOB_TYPE_``)."""

    SPLIT_K = 0
    SWIZZLE = 1
    TILE_SIZE = 2
    USE_TEX = 3
    EDGE = 4
    KBLOCK = 5
    LDGA = 6
    LDGB = 7
    CHUNK_K = 8
    SPLIT_H = 9
    WINO_TILE = 10
    MULTIPLY = 11
    SPLIT_K_BUF = 12
    TILEK = 13
    STAGES = 14
    REDUCTION_MODE = 15
    CTA_SPLIT_K_MODE = 16
    SPLIT_K_SLC = 17
    IDX_MODE = 18, 90700
    SLICED = 19
    SPLIT_RS = 20
    SINGLEBUFFER = 21
    LDGC = 22
    SPECFILT = 23
    KERNEL_CFG = 24
    WORKSPACE = 25
    TILE_CGA = 26
    TILE_CGA_M = 27
    TILE_CGA_N = 28
    BLOCK_SIZE = 29
    OCCUPANCY = 30
    ARRAY_SIZE_PER_THREAD = 31
    NUM_C_PER_BLOCK = 32
    SPLIT_COLS = 33
    TILE_ROWS = 34
    TILE_COLS = 35
    LOAD_SIZE = 36
    CTA_COUNT = 37, 90700
    STREAM_K = 38, 90700
    SPLIT_P_SLC = 39, 90700
    TILE_M = 40, 90700
    TILE_N = 41, 90700
    WARP_SPEC_CFG = 42, 90700
    SWAP_AB = 43, 91800
    INPUT_TMA_ENABLE = 44, 92200
    OUTPUT_TMA_ENABLE = 45, 92200


class Status(Versioned):
    """Result of a call (``CUDNN_STATUS_``).

    The thousands tell the class: 1 initialization, 2 bad parameter, 3 not supported, 4 internal, 5 execution.
    """

    SUCCESS = 0
    NOT_INITIALIZED = 1001
    SUBLIBRARY_VERSION_MISMATCH = 1002
    SERIALIZATION_VERSION_MISMATCH = 1003
    DEPRECATED = 1004
    LICENSE_ERROR = 1005
    RUNTIME_IN_PROGRESS = 1006
    RUNTIME_FP_OVERFLOW = 1007
    SUBLIBRARY_LOADING_FAILED = 1008, 90200
    BAD_PARAM = 2000
    INVALID_VALUE = 2001
    BAD_PARAM_NULL_POINTER = 2002
    BAD_PARAM_MISALIGNED_POINTER = 2003
    BAD_PARAM_NOT_FINALIZED = 2004
    BAD_PARAM_OUT_OF_BOUND = 2005
    BAD_PARAM_SIZE_INSUFFICIENT = 2006
    BAD_PARAM_STREAM_MISMATCH = 2007
    BAD_PARAM_SHAPE_MISMATCH = 2008
    BAD_PARAM_DUPLICATED_ENTRIES = 2009
    BAD_PARAM_ATTRIBUTE_TYPE = 2010
    BAD_PARAM_CUDA_GRAPH_MISMATCH = 2011, 90500
    BAD_PARAM_DESCRIPTOR_TYPE = 2012, 90600
    NOT_SUPPORTED = 3000
    NOT_SUPPORTED_GRAPH_PATTERN = 3001
    NOT_SUPPORTED_SHAPE = 3002
    NOT_SUPPORTED_DATA_TYPE = 3003
    NOT_SUPPORTED_LAYOUT = 3004
    NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER = 3005
    NOT_SUPPORTED_INCOMPATIBLE_CUDART = 3006
    NOT_SUPPORTED_ARCH_MISMATCH = 3007
    NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING = 3008
    NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE = 3009
    NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT = 3010
    NOT_SUPPORTED_PADDING = 3011
    NOT_SUPPORTED_BAD_LAUNCH_PARAM = 3012
    NOT_SUPPORTED_CUDA_GRAPH_NATIVE_API = 3013, 90500
    NOT_SUPPORTED_INVALID_DYNAMIC_SHAPE = 3014, 91800
    INTERNAL_ERROR = 4000
    INTERNAL_ERROR_COMPILATION_FAILED = 4001
    INTERNAL_ERROR_UNEXPECTED_VALUE = 4002
    INTERNAL_ERROR_HOST_ALLOCATION_FAILED = 4003
    INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED = 4004
    INTERNAL_ERROR_BAD_LAUNCH_PARAM = 4005
    INTERNAL_ERROR_TEXTURE_CREATION_FAILED = 4006
    EXECUTION_FAILED = 5000
    EXECUTION_FAILED_CUDA_DRIVER = 5001
    EXECUTION_FAILED_CUBLAS = 5002
    EXECUTION_FAILED_CUDART = 5003
    EXECUTION_FAILED_CURAND = 5004
