"""cudnn-fused: NVIDIA's cuDNN graphs from Python, on a GPU or, with PyTorch as the reference, on any machine."""

import importlib
from typing import TYPE_CHECKING, Any

from cudnn.autotune import TunedPlan, TuningReport, autotune
from cudnn.backend.device import create_device_properties, create_kernel_cache
from cudnn.backend.engine import Knob as knob
from cudnn.backend.handle import Handle, create_handle, destroy_handle, get_stream, set_stream
from cudnn.backend.library import last_error as get_last_error_string
from cudnn.backend.library import version as backend_version
from cudnn.backend.library import version_string as backend_version_string
from cudnn.enums import (
    attention_implementation,
    behavior_note,
    build_plan_policy,
    convolution_mode,
    data_type,
    diagonal_alignment,
    heur_mode,
    knob_type,
    moe_grouped_matmul_mode,
    norm_forward_phase,
    numerical_note,
    padding_mode,
    reduction_mode,
    resample_mode,
    reshape_mode,
    scalar_type,
    tensor_reordering,
)
from cudnn.errors import CudnnError, CudnnLibraryError, cudnnGraphNotSupportedError
from cudnn.graph import graph, graph_cache, jit
from cudnn.pygraph.graph import pygraph
from cudnn.pygraph.tensor import Tensor as tensor
from cudnn.registry import FUSED_APIS
from cudnn.wrapper import Graph

if TYPE_CHECKING:
    from cudnn.backend.causal_conv1d import causal_conv1d_backward as causal_conv1d_backward
    from cudnn.backend.causal_conv1d import causal_conv1d_forward as causal_conv1d_forward
    from cudnn.gemm_amax import GemmAmax as GemmAmax
    from cudnn.gemm_amax import GemmAmaxSm100 as GemmAmaxSm100
    from cudnn.gemm_amax import gemm_amax_wrapper as gemm_amax_wrapper
    from cudnn.gemm_amax import gemm_amax_wrapper_sm100 as gemm_amax_wrapper_sm100
    from cudnn.gemm_dsrelu import GemmDsrelu as GemmDsrelu
    from cudnn.gemm_dsrelu import GemmDsreluSm100 as GemmDsreluSm100
    from cudnn.gemm_dsrelu import gemm_dsrelu_wrapper as gemm_dsrelu_wrapper
    from cudnn.gemm_dsrelu import gemm_dsrelu_wrapper_sm100 as gemm_dsrelu_wrapper_sm100
    from cudnn.gemm_srelu import GemmSrelu as GemmSrelu
    from cudnn.gemm_srelu import GemmSreluSm100 as GemmSreluSm100
    from cudnn.gemm_srelu import gemm_srelu_wrapper as gemm_srelu_wrapper
    from cudnn.gemm_srelu import gemm_srelu_wrapper_sm100 as gemm_srelu_wrapper_sm100
    from cudnn.gemm_swiglu import GemmSwiglu as GemmSwiglu
    from cudnn.gemm_swiglu import GemmSwigluSm100 as GemmSwigluSm100
    from cudnn.gemm_swiglu import gemm_swiglu_wrapper as gemm_swiglu_wrapper
    from cudnn.gemm_swiglu import gemm_swiglu_wrapper_sm100 as gemm_swiglu_wrapper_sm100
    from cudnn.gemm_swiglu import interleave_gate_up as interleave_gate_up
    from cudnn.launch import emulation as emulation
    from cudnn.rmsnorm_rht_amax import RmsNormRhtAmax as RmsNormRhtAmax
    from cudnn.rmsnorm_rht_amax import RmsNormRhtAmaxSm100 as RmsNormRhtAmaxSm100
    from cudnn.rmsnorm_rht_amax import rmsnorm_rht_amax_wrapper as rmsnorm_rht_amax_wrapper
    from cudnn.rmsnorm_rht_amax import rmsnorm_rht_amax_wrapper_sm100 as rmsnorm_rht_amax_wrapper_sm100

__version__ = "0.1.0"

__all__ = [
    "CudnnError",
    "CudnnLibraryError",
    "Graph",
    "Handle",
    "TunedPlan",
    "TuningReport",
    "__version__",
    "attention_implementation",
    "autotune",
    "backend_version",
    "backend_version_string",
    "behavior_note",
    "build_plan_policy",
    "convolution_mode",
    "create_device_properties",
    "create_handle",
    "create_kernel_cache",
    "cudnnGraphNotSupportedError",
    "data_type",
    "destroy_handle",
    "diagonal_alignment",
    "get_last_error_string",
    "get_stream",
    "graph",
    "graph_cache",
    "heur_mode",
    "jit",
    "knob",
    "knob_type",
    "moe_grouped_matmul_mode",
    "norm_forward_phase",
    "numerical_note",
    "padding_mode",
    "pygraph",
    "reduction_mode",
    "resample_mode",
    "reshape_mode",
    "scalar_type",
    "set_stream",
    "tensor",
    "tensor_reordering",
]

# The fused APIs, each with the module that its first use loads: `import cudnn` loads neither PyTorch nor the CuTe DSL.
_LAZY = {
    "causal_conv1d_backward": "cudnn.backend.causal_conv1d",
    "causal_conv1d_forward": "cudnn.backend.causal_conv1d",
    "emulation": "cudnn.launch",
    "interleave_gate_up": "cudnn.gemm_swiglu",
    **{
        name: f"cudnn.{module}"
        for module, operation in FUSED_APIS.items()
        for name in (operation, f"{operation}Sm100", f"{module}_wrapper", f"{module}_wrapper_sm100")
    },
}
_LAZY_MODULES = ("experimental", "gemm", "ops")


def __getattr__(name: str) -> Any:
    if name not in _LAZY and name not in _LAZY_MODULES:
        raise AttributeError(f"module 'cudnn' has no attribute {name!r}")
    try:
        module = importlib.import_module(_LAZY.get(name, f"cudnn.{name}"))
    except ImportError as error:
        raise ImportError(f"cudnn.{name} cannot be loaded: {error}. To mend it, reinstall cudnn-fused.") from error
    value = module if name in _LAZY_MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})
