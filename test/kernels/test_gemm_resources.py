"""What the GEMM kernels take of the machine, against a table; ``support.resources`` compiles all of it."""

from __future__ import annotations

import pytest

from support import resources
from support.resources import BLACKWELL, HOPPER

CONFIGURATIONS = resources.configurations()
SAMPLE = [(arch, name) for arch, names in CONFIGURATIONS.items() for name in list(names)[::37]]


def test_the_table_is_complete_and_nothing_in_it_uses_local_memory() -> None:
    table = resources.table()
    assert {arch: list(names) for arch, names in table.items()} == {
        arch: list(names) for arch, names in CONFIGURATIONS.items()
    }
    for name, entry in [*table[HOPPER].items(), *table[BLACKWELL].items()]:
        assert entry["stack"] == 0, name
        assert entry["shared"] <= 227 * 1024 - 2048, name
        assert entry["buffers"] >= 2, name
    for name, entry in table[HOPPER].items():
        assert entry["registers"] == 168, name  # 64 K among 384 threads, before warpgroups shift them
    for name, entry in table[BLACKWELL].items():
        assert entry["registers"] <= 255, name  # of one thread: 192 of them could have more
        assert entry["columns"] <= 512, name
        scaled = CONFIGURATIONS[BLACKWELL][name].scale != ""
        assert entry["accumulators"] == (1 if scaled and CONFIGURATIONS[BLACKWELL][name].tile[1] == 256 else 2), name


@pytest.mark.parametrize(("arch", "name"), SAMPLE)
def test_a_sample_still_takes_what_the_table_says(arch: str, name: str) -> None:
    assert resources.resources(arch, CONFIGURATIONS[arch][name]) == resources.table()[arch][name]
