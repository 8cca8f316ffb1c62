"""GEMMs of the tokens of several experts, whose weights are passed as device pointers, with fused epilogues."""

from __future__ import annotations

from typing import Any

from cudnn.fused import registry


def __getattr__(name: str) -> Any:
    """Packages, classes and wrappers of the family, loaded when first used."""
    return registry.of_family(__name__, name)
