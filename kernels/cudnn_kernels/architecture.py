"""What is known of each architecture that the kernels are written for: the only table of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cudnn_kernels.problem import GemmProblem
from cudnn_kernels.sm90.heuristics import configure as configure_hopper
from cudnn_kernels.sm100.heuristics import configure as configure_blackwell


@dataclass(frozen=True)
class Architecture:
    """``room`` is the package of its kernels; ``multiprocessors`` are those of the largest GPU of its kind."""

    name: str
    room: str
    multiprocessors: int
    configure: Callable[[GemmProblem], Any]

    def source(self, configuration: Any) -> str:
        """The kernel for a configuration, as ``module:class``."""
        return f"cudnn_kernels.{self.room}.{configuration.kernel}"


ARCHITECTURES: Mapping[str, Architecture] = {
    "sm_90a": Architecture("sm_90a", "sm90", 132, configure_hopper),
    "sm_100a": Architecture("sm_100a", "sm100", 148, configure_blackwell),
}
"""By name: what the compiler calls the target."""
