"""What attention kernels are compiled for, on any architecture. Plain data, no CuTe DSL."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardConfiguration:
    """O = softmax(scale Q K^T + mask) V for heads of ``head`` elements, and of ``head_v`` in V and O.

    ``tile`` is (query rows, keys) of a CTA. ``packed``: sequences follow each other and offsets say where they begin.
    ``right`` and ``left``: the window ends on that side; a causal mask is a right end. CTAs of a ``cluster`` have
    neighbouring query rows of a head and share the loads of K and V. With ``pingpong`` two warpgroups take turns in
    issuing products, so that one's softmax runs under the other's.
    """

    dtype: str
    head: int
    head_v: int
    tile: tuple[int, int]
    packed: bool = False
    right: bool = False
    left: bool = False
    cluster: int = 1
    stages: int = 2
    pingpong: bool = False
    lazy: bool = False


@dataclass(frozen=True)
class BackwardConfiguration:
    """dQ, dK and dV for heads of ``head`` elements; ``keys`` of a CTA. Others as :class:`ForwardConfiguration`."""

    dtype: str
    head: int
    keys: int
    packed: bool = False
    right: bool = False
    left: bool = False
