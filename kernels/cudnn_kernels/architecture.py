"""The architectures that the kernels are written for, and their properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from cudnn_kernels.attention import BackwardConfiguration, DecodeConfiguration, ForwardConfiguration, HeadDims
from cudnn_kernels.attention.sparse import (
    CompressionTopKConfiguration,
    SelectionBackwardConfiguration,
    SelectionConfiguration,
    TopKConfiguration,
)
from cudnn_kernels.gemm.problem import GemmProblem
from cudnn_kernels.sm90.heuristics import attention as hopper_attention
from cudnn_kernels.sm90.heuristics.gemm import configure as configure_hopper
from cudnn_kernels.sm100.heuristics import attention as blackwell_attention
from cudnn_kernels.sm100.heuristics.gemm import configure as configure_blackwell

Selection = TypeVar("Selection", bound=SelectionConfiguration)


class AttentionHeuristics(Protocol):
    """What an architecture's ``heuristics.attention`` chooses: a configuration for each problem of a kernel family."""

    @staticmethod
    def configure_forward(
        dtype: str, heads: HeadDims, mask: Mapping[str, bool], **options: Any
    ) -> ForwardConfiguration: ...

    @staticmethod
    def configure_decode(
        dtype: str, heads: HeadDims, rows: int, mask: Mapping[str, bool], **options: Any
    ) -> DecodeConfiguration: ...

    @staticmethod
    def num_splits(heads: HeadDims, rows: int, kv_heads: int, keys: int, num_sms: int) -> int: ...

    @staticmethod
    def configure_backward(dtype: str, heads: HeadDims, **options: Any) -> BackwardConfiguration: ...

    @staticmethod
    def configure_compression(
        dtype: str, heads: HeadDims, out_dtype: str, varlen: bool, **options: Any
    ) -> ForwardConfiguration: ...

    @staticmethod
    def configure_compression_backward(dtype: str, heads: HeadDims, varlen: bool) -> BackwardConfiguration: ...

    @staticmethod
    def configure_compression_top_k(keys: int, **problem: Any) -> CompressionTopKConfiguration: ...

    @staticmethod
    def configure_selection(c: Selection, rows: int) -> Selection: ...

    @staticmethod
    def configure_selection_backward(c: SelectionBackwardConfiguration) -> SelectionBackwardConfiguration: ...

    @staticmethod
    def configure_top_k(c: TopKConfiguration) -> TopKConfiguration: ...


@dataclass(frozen=True)
class Architecture:
    """``package`` is the package of its kernels; ``num_sms`` is that of the largest GPU of the architecture."""

    name: str
    package: str
    num_sms: int
    configure: Callable[[GemmProblem], Any]
    attention: AttentionHeuristics

    def source(self, configuration: Any) -> str:
        """The kernel for a configuration, as ``module:class``."""
        return f"cudnn_kernels.{self.package}.{configuration.kernel}"


ARCHITECTURES: Mapping[str, Architecture] = {
    "sm_90a": Architecture("sm_90a", "sm90", 132, configure_hopper, hopper_attention),
    "sm_100a": Architecture("sm_100a", "sm100", 148, configure_blackwell, blackwell_attention),
}
"""By name: what the compiler calls the target."""
