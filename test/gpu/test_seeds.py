"""The published programs run unmodified on a GPU."""

from __future__ import annotations

import pytest

import cudnn
from support.seed_programs import PROGRAMS, check_program, reference_cells, reference_prelude
from support.seed_reference import REFERENCE, REFUSED_BY_CUDNN

CELLS = reference_cells()


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str) -> None:
    """The programs compare their own results with PyTorch's."""
    check_program(program, "cuda")


@pytest.mark.parametrize("title", REFERENCE)
def test_reference_cell(title: str) -> None:
    """A code block of the API reference gives the right numbers, or cuDNN refuses its pattern."""
    names = reference_prelude("cuda")
    if title in REFUSED_BY_CUDNN:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="no engine configuration for this graph"):
            REFERENCE[title](CELLS[title], names, "cuda")
    else:
        REFERENCE[title](CELLS[title], names, "cuda")
