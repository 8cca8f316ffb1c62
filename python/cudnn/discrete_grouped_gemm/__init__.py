"""GEMMs of the tokens of several experts whose weights each lie at an address of their own, with what follows."""

from __future__ import annotations

import importlib
from typing import Any

from cudnn import registry


def __getattr__(name: str) -> Any:
    """Classes and wrappers of the family, loaded when first used."""
    package = registry.public_names().get(name, "")
    if not package.startswith(f"{__name__}."):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(package), name)
