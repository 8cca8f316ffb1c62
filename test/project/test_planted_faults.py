"""The faults that ``support/planted_faults.py`` plants on demand are lines of the source as it is."""

from __future__ import annotations

import ast

import pytest

from support.planted_faults import FAULTS, ROOT, Fault


def test_there_are_thirty() -> None:
    assert len({fault.name for fault in FAULTS}) == 30


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_planted(fault: Fault) -> None:
    mutated = fault.mutated((ROOT / fault.path).read_text())
    ast.parse(mutated)
    path, _, name = fault.tests[0].partition("::")
    assert f"def {name}" in (ROOT / path).read_text()
