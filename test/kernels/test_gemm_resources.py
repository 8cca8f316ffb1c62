"""What the GEMM kernels take of the machine stays within bounds; ``support.resources`` compiles all of them."""

from __future__ import annotations

import pytest

from cudnn_kernels.epilogue import StoreTile
from cudnn_kernels.gemm.problem import BlockScale, GemmProblem, Operand
from cudnn_kernels.schedule import VarlenK
from support import resources

CONFIGURATIONS = resources.configurations()
SAMPLE = [(arch, name) for arch, names in CONFIGURATIONS.items() for name in list(names)[200:201]]


@pytest.mark.parametrize(("arch", "name"), SAMPLE)
def test_a_sample_keeps_the_bounds(arch: str, name: str) -> None:
    configuration = CONFIGURATIONS[arch][name]
    assert resources.wrong(arch, configuration, resources.resources(arch, configuration)) == []


@pytest.mark.parametrize(
    ("m", "tile", "stack"), [(2048, (256, 128, 128), 16), pytest.param(768, (128, 256, 128), 8, marks=pytest.mark.full)]
)
def test_weight_gradients_of_token_blocks(m: int, tile: tuple[int, int, int], stack: int) -> None:
    """Tall tiles where clusters of them fit m. They spill two addresses of scale factors and a register of the loop."""
    operand, store = Operand(resources.E4M3, scale=BlockScale("float32", 128)), StoreTile("wgrad", "float32", adds=True)
    problem = GemmProblem(operand, operand, (store,), VarlenK(k_block=128), 4096, 128, groups=128, m=m)
    c = resources.sm90.configure(problem)
    assert c.tile == tile
    assert resources.resources(resources.HOPPER, c)["stack"] <= stack
