"""``pytest test/kernels --full`` also runs what is marked ``full``: the whole matrix, and many random problems."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="kernels in every configuration; takes about half an hour")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: only with --full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("full", default=False):
        wanted = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted
