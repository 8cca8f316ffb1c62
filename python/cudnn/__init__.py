"""cudnn-fused: NVIDIA's cuDNN graphs from Python, on a GPU or, with PyTorch as the reference, on any machine."""

import importlib
from collections.abc import Mapping
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
from cudnn.wrapper import Graph

if TYPE_CHECKING:
    from cudnn import discrete_grouped_gemm as discrete_grouped_gemm
    from cudnn import experimental as experimental
    from cudnn import gemm as gemm
    from cudnn import grouped_gemm as grouped_gemm
    from cudnn import integrations as integrations
    from cudnn import moe as moe
    from cudnn import nn as nn
    from cudnn import ops as ops
    from cudnn import sdpa as sdpa
    from cudnn.backend.causal_conv1d import causal_conv1d_backward as causal_conv1d_backward
    from cudnn.backend.causal_conv1d import causal_conv1d_forward as causal_conv1d_forward
    from cudnn.fused.names import *  # noqa: F403  # pyright: ignore[reportMissingModuleSource]  (a stub)
    from cudnn.runtime.emulation import emulation as emulation

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

# Loaded at first use, as the fused APIs are: `import cudnn` loads neither PyTorch nor the CuTe DSL.
_LAZY = {
    "causal_conv1d_backward": "cudnn.backend.causal_conv1d",
    "causal_conv1d_forward": "cudnn.backend.causal_conv1d",
    "emulation": "cudnn.runtime.launch",
}
_LAZY_MODULES = (
    "discrete_grouped_gemm",
    "experimental",
    "gemm",
    "grouped_gemm",
    "integrations",
    "moe",
    "nn",
    "ops",
    "sdpa",
)


def _fused_names() -> Mapping[str, str]:
    """Names of the fused APIs, found in their folders, and their packages."""
    return importlib.import_module("cudnn.fused.registry").public_names()


if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> Any:
        known = name in _LAZY or name in _LAZY_MODULES
        package = None if known else _fused_names().get(name)
        if not known and package is None:
            raise AttributeError(f"module 'cudnn' has no attribute {name!r}")
        try:
            module = importlib.import_module(package or _LAZY.get(name, f"cudnn.{name}"))
        except ImportError as error:
            raise ImportError(f"cudnn.{name} cannot be loaded: {error}. To fix it, reinstall cudnn-fused.") from error
        value = module if name in _LAZY_MODULES else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES, *_fused_names()})
