"""The published programs run unmodified on a GPU."""

from __future__ import annotations

import pytest
import torch

import cudnn
from support.dense_attention import attend, band
from support.seed_programs import PROGRAMS, check_program, reference_cells, reference_prelude
from support.seed_reference import REFERENCE, REFUSED_BY_CUDNN

pytestmark = pytest.mark.gpu
CELLS = reference_cells()


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str) -> None:
    """The programs compare their own results with PyTorch's."""
    check_program(program, "cuda")


def test_bfloat16_stats_stay_in_their_buffer() -> None:
    """``low_level_api`` asks for statistics in bfloat16: two bytes an element, and no more, may be written."""
    names = check_program("low_level_api", "cuda")
    graph, pack = names["deserialized_graph"], dict(names["variant_pack"])
    batch, heads, length, _ = pack[4].shape
    memory = torch.full((3, batch, heads, length, 1), -7.0, dtype=torch.bfloat16, device="cuda")
    pack[4] = memory[1]
    graph.execute(pack, names["workspace"])
    assert bool((memory[0] == -7).all())
    assert bool((memory[2] == -7).all())
    q, k = names["q_gpu"].float(), names["k_gpu"].float()
    wanted = attend(q, k, k, band(length, length, right=0, device="cuda"), scale=names["attn_scale"]).lse.unsqueeze(-1)
    torch.testing.assert_close(memory[1].float(), wanted, atol=2e-2, rtol=2**-7)


@pytest.mark.parametrize("title", REFERENCE)
def test_reference_cell(title: str) -> None:
    """A code block of the API reference gives the right numbers, or cuDNN refuses its pattern."""
    names = reference_prelude("cuda")
    if title in REFUSED_BY_CUDNN:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="no engine configuration for this graph"):
            REFERENCE[title](CELLS[title], names, "cuda")
    else:
        REFERENCE[title](CELLS[title], names, "cuda")
