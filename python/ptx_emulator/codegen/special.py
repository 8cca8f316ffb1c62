"""Special registers of PTX: what each holds in every lane of a machine. Clocks stand still, but the global timer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ptx_emulator.numerics import u64

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


def coordinate(value: Any, shape: Sequence[int], axis: int) -> Any:
    """x, y or z of a number."""
    return value // (1, shape[0], shape[0] * shape[1])[axis] % (*shape[:2], 1 << 32)[axis]


def block_coordinate(machine: Machine, axis: int) -> Any:
    cluster = coordinate(machine.cluster, machine.clusters_of_grid, axis)
    return cluster * machine.report.cluster[axis] + coordinate(machine.rank, machine.report.cluster, axis)


def _along(value: Callable[[Machine, int], Any], axis: int) -> Callable[[Machine], Any]:
    return lambda machine: value(machine, axis)


def _lane_mask(which: Callable[[Any], Any]) -> Callable[[Machine], Any]:
    return lambda machine: which(u64(1) << (machine.thread % 32).astype(u64)) & u64(0xFFFFFFFF)


_AXES: dict[str, Callable[[Machine, int], Any]] = {
    "tid": lambda machine, axis: coordinate(machine.thread, machine.report.block, axis),
    "ntid": lambda machine, axis: machine.report.block[axis],
    "ctaid": block_coordinate,
    "nctaid": lambda machine, axis: machine.report.grid[axis],
    "cluster_ctaid": lambda machine, axis: coordinate(machine.rank, machine.report.cluster, axis),
    "cluster_nctaid": lambda machine, axis: machine.report.cluster[axis],
    "clusterid": lambda machine, axis: coordinate(machine.cluster, machine.clusters_of_grid, axis),
    "nclusterid": lambda machine, axis: machine.clusters_of_grid[axis],
}
WIDE = ("clock64", "globaltimer")
SPECIAL_REGISTERS: dict[str, Callable[[Machine], Any]] = {
    **{f"{name}.{letter}": _along(value, axis) for name, value in _AXES.items() for axis, letter in enumerate("xyz")},
    **dict.fromkeys(
        ("clock", "clock_hi", "globaltimer_lo", "gridid", "dynamic_smem_size", "total_smem_size"), lambda machine: 0
    ),
    **dict.fromkeys(WIDE, lambda machine: 0),
    "cluster_ctarank": lambda machine: machine.rank,
    "cluster_nctarank": lambda machine: machine.cluster_size,
    "laneid": lambda machine: machine.thread % 32,
    "warpid": lambda machine: machine.thread // 32,
    "nwarpid": lambda machine: machine.rounded_block // 32,
    "smid": lambda machine: machine.block_of,
    "nsmid": lambda machine: machine.report.grid[0] * machine.report.grid[1] * machine.report.grid[2],
    "lanemask_lt": _lane_mask(lambda own: own - u64(1)),
    "lanemask_eq": _lane_mask(lambda own: own),
    "lanemask_le": _lane_mask(lambda own: own | own - u64(1)),
    "lanemask_gt": _lane_mask(lambda own: ~(own | own - u64(1))),
    "lanemask_ge": _lane_mask(lambda own: ~(own - u64(1))),
}
