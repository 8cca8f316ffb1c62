"""cudnn-fused: NVIDIA's cuDNN graphs from Python, on a GPU or, with PyTorch as the reference, on any machine."""

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
    reduction_mode,
    reshape_mode,
    scalar_type,
    tensor_reordering,
)
from cudnn.errors import CudnnError, CudnnLibraryError, cudnnGraphNotSupportedError
from cudnn.graph import graph, graph_cache, jit
from cudnn.pygraph.graph import pygraph
from cudnn.pygraph.tensor import Tensor as tensor
from cudnn.wrapper import Graph

__version__ = "0.1.0"

__all__ = [
    "CudnnError",
    "CudnnLibraryError",
    "Graph",
    "Handle",
    "__version__",
    "attention_implementation",
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
    "pygraph",
    "reduction_mode",
    "reshape_mode",
    "scalar_type",
    "set_stream",
    "tensor",
    "tensor_reordering",
]
