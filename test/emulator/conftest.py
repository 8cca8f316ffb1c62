"""The DSL is what these tests are about: without it there is nothing to run."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("cutlass")


@pytest.fixture(scope="session", autouse=True)
def without_the_imports() -> None:
    """Each launch looks for tensors among all objects that the collector knows: a million, imported, are none."""
    gc.collect()
    gc.freeze()
