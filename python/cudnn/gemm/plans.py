"""How a fused GEMM runs on an architecture: which kernel, in which configuration, called with which arguments.

The kernels choose their configuration and list their arguments as named slots, which the host binds by name. Operands
that the tensor cores or the copy engine cannot read are prepared in a workspace, in the same call.
"""

from __future__ import annotations

from collections.abc import Mapping

from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.problem import GemmProblem
from cudnn_kernels.signature import workspace_size

NOTICES = {
    "sm_90a": "block-scaled operands are dequantised to bfloat16 on sm_90a, whose tensor cores know no block scales",
    "sm_100a": "block-scaled operands are dequantised to bfloat16 on sm_100a if each expert's are a matrix of its own",
}


class GemmPlan:
    """The kernel for a problem on an architecture, not loaded yet."""

    def __init__(self, arch: str, problem: GemmProblem) -> None:
        architecture = ARCHITECTURES[arch]
        self.configuration = architecture.configure(problem)
        self.source = architecture.source(self.configuration)
        self.slots = self.configuration.slots()
        dequantised = any(step.source.scale for _, step in self.configuration.prepared)
        self.notice = NOTICES[arch] if dequantised else ""

    @property
    def cluster_size(self) -> int:
        """CTAs that start together."""
        m, n = self.configuration.cluster
        return m * n

    def workspace_size(self, sizes: Mapping[str, int]) -> int:
        """Bytes of the workspace for a call's sizes, by name as the slots have them."""
        return workspace_size(self.slots, sizes)
