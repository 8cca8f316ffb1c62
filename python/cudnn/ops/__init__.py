"""Operators for ``torch.compile``: the first use of one registers it as ``torch.ops.cudnn.<name>``."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["rmsnorm_rht_amax"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    operator = getattr(importlib.import_module(f"{__name__}._{name}"), name)
    globals()[name] = operator
    return operator
