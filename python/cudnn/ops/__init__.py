"""Operators for ``torch.compile``: the first use of one registers it as ``torch.ops.cudnn.<name>``.

Every fused API has one of its name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cudnn import registry

if TYPE_CHECKING:
    from cudnn.fused.operators import *  # pyright: ignore[reportMissingModuleSource]  (a stub)
    from cudnn.ops._causal_conv1d import causal_conv1d as causal_conv1d
    from cudnn.ops._moe_mlp import moe_mlp as moe_mlp
    from cudnn.ops._nsa_attention import nsa_attention as nsa_attention
    from cudnn.ops._nsa_decode import nsa_decode as nsa_decode
    from cudnn.ops._scaled_dot_product_attention import scaled_dot_product_attention as scaled_dot_product_attention

_OWN = ("causal_conv1d", "moe_mlp", "nsa_attention", "nsa_decode", "scaled_dot_product_attention")


if not TYPE_CHECKING:  # a type checker would take any name for an operator

    def __getattr__(name: str) -> Any:
        if name in _OWN:
            operator = getattr(importlib.import_module(f"{__name__}._{name}"), name)
        elif name in registry.packages():
            from cudnn.fused.operator import register

            operator = register(name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = operator
        return operator


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWN, *registry.packages()})
