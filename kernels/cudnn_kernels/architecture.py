"""The architectures that the kernels are written for, and their properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cudnn_kernels.problem import GemmProblem
from cudnn_kernels.sm90.heuristics import configure as configure_hopper
from cudnn_kernels.sm100.heuristics import configure as configure_blackwell


@dataclass(frozen=True)
class Architecture:
    """``package`` is the package of its kernels; ``num_sms`` is that of the largest GPU of the architecture."""

    name: str
    package: str
    num_sms: int
    configure: Callable[[GemmProblem], Any]

    def source(self, configuration: Any) -> str:
        """The kernel for a configuration, as ``module:class``."""
        return f"cudnn_kernels.{self.package}.{configuration.kernel}"


ARCHITECTURES: Mapping[str, Architecture] = {
    "sm_90a": Architecture("sm_90a", "sm90", 132, configure_hopper),
    "sm_100a": Architecture("sm_100a", "sm100", 148, configure_blackwell),
}
"""By name: what the compiler calls the target."""
