"""Fusions that users build, on the GPU."""

from __future__ import annotations

import pytest
import torch

import cudnn
from gpu.common import gpu_graph
from support.patterns import PATTERNS, assert_computes


@pytest.mark.parametrize("name", [name for name in PATTERNS if name != "logic"])  # its masks are bits here
def test_pattern(name: str) -> None:
    pattern = PATTERNS[name]
    try:
        assert_computes(pattern, gpu_graph(pattern.io, pattern.intermediate, pattern.compute), "cuda")
    except cudnn.cudnnGraphNotSupportedError as error:
        if torch.cuda.get_device_capability()[0] == {"h200": 9, "b200": 10}[pattern.devices[0]]:
            raise
        pytest.skip(str(error)[:200])
