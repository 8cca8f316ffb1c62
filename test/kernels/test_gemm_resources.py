"""What the GEMM kernels take of the machine stays within bounds; ``support.resources`` compiles all of them."""

from __future__ import annotations

import pytest

from support import resources

CONFIGURATIONS = resources.configurations()
SAMPLE = [(arch, name) for arch, names in CONFIGURATIONS.items() for name in list(names)[200:201]]


@pytest.mark.parametrize(("arch", "name"), SAMPLE)
def test_a_sample_keeps_the_bounds(arch: str, name: str) -> None:
    configuration = CONFIGURATIONS[arch][name]
    assert resources.wrong(arch, configuration, resources.resources(arch, configuration)) == []
