"""A pytest plugin: `pytest_plugins = ["ptx_emulator.testing"]` adds the fixture `emulate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

import ptx_emulator


@pytest.fixture(params=["sm_90a", "sm_100a"])
def emulated_arch(request: pytest.FixtureRequest) -> str:
    """Parametrized over the architectures."""
    return str(request.param)


@pytest.fixture
def emulate(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`emulate(arch, **options)` as `ptx_emulator.emulate`, with races on; the reports go to the test's output."""
    reports: list[ptx_emulator.Report] = []

    class Recorded:
        def __init__(self, context: AbstractContextManager[ptx_emulator.Report]) -> None:
            self.context = context

        def __enter__(self) -> ptx_emulator.Report:
            reports.append(self.context.__enter__())
            return reports[-1]

        def __exit__(self, *error: Any) -> bool | None:
            return self.context.__exit__(*error)

    def start(arch: str, **options: Any) -> Recorded:
        return Recorded(ptx_emulator.emulate(arch, **{"races": True, **options}))

    yield start
    for report in reports:
        request.node.add_report_section("call", "emulator", str(report))
