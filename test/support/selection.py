"""Which cases of a test run without ``--full``: each kind of behaviour once, not every combination; and where."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import pytest

import cudnn

ARCHES = ("sm_90a", "sm_100a")
ALONE = ("reference", pytest.param("gpu", marks=pytest.mark.gpu))
WHERE = ("reference", *ARCHES, ALONE[-1])
"""Where a problem is executed: PyTorch on CPU tensors, the kernels in the emulator, the kernels on the GPU."""
FULL = "CUDNN_TESTS_FULL" in os.environ  # as conftest.py says: with ``--full``


def within(where: str, races: bool = True) -> Any:
    """The emulator, which detects races, for an architecture; nothing for another place."""
    return cudnn.emulation(where, races=races) if where in ARCHES else contextlib.nullcontext()


def selected(cases: list[Any]) -> list[Any]:
    """Those that will run: to make a test of one takes time, even if it is deselected. All, where none will run."""
    return [case for case in cases if FULL or not any(mark.name == "full" for mark in _marks(case))] or cases


def brief(cases: Sequence[Any], *kept: int) -> list[Any]:
    """All cases; others than those with these numbers only with ``--full``."""
    return selected(
        [
            pytest.param(*_values(case), marks=[*_marks(case), *([] if index in kept else [pytest.mark.full])])
            for index, case in enumerate(cases)
        ]
    )


def in_turn(cases: Sequence[Any], most: int | None = None, places: Sequence[Any] = ARCHES) -> list[Any]:
    """Every case in every place, which comes first; without ``--full`` the first ``most`` cases, each on one emulated
    architecture alternately. Places without an architecture take all cases.
    """
    count = len(cases) if most is None else most
    return selected(
        [
            pytest.param(*_values(place), *_values(case), marks=[*_marks(place), *_rest(place, index, count)])
            for index, case in enumerate(cases)
            for place in places
        ]
    )


def _rest(place: Any, index: int, count: int) -> list[Any]:
    (where,) = _values(place)
    skipped = where in ARCHES and (index >= count or (index + ARCHES.index(where)) % len(ARCHES))
    return [pytest.mark.full] if skipped else []


def _values(case: Any) -> tuple[Any, ...]:
    if isinstance(case, tuple):
        return getattr(case, "values", case)  # of a pytest.param
    return (case,)


def _marks(case: Any) -> Sequence[Any]:
    return getattr(case, "marks", ())
