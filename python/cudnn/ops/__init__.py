"""Operators for ``torch.compile``: the first use of one registers it as ``torch.ops.cudnn.<name>``."""
# pyright: reportUnsupportedDunderAll=false

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["causal_conv1d", "gemm_amax", "gemm_dsrelu", "gemm_srelu", "gemm_swiglu", "rmsnorm_rht_amax"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    operator = getattr(importlib.import_module(f"{__name__}._{name}"), name)
    globals()[name] = operator
    return operator
