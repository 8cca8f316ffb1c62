"""What Hopper's GEMM kernels take of the machine, against a table; ``support.resources`` compiles all of it."""

from __future__ import annotations

import pytest

from support import resources

CONFIGURATIONS = resources.configurations()
SAMPLE = list(CONFIGURATIONS)[::11]


def test_the_table_is_complete_and_nothing_in_it_uses_local_memory() -> None:
    table = resources.table()
    assert list(table) == list(CONFIGURATIONS)
    for name, entry in table.items():
        assert entry["stack"] == 0, name
        assert entry["registers"] == 168, name  # 64 K among 384 threads, before warpgroups shift them
        assert entry["buffers"] >= 3, name
        assert entry["shared"] <= 227 * 1024 - 2048, name


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_still_takes_what_the_table_says(name: str) -> None:
    assert resources.resources(CONFIGURATIONS[name]) == resources.table()[name]
