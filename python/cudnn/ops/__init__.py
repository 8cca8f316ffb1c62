"""Operators for ``torch.compile``: the first use of one registers it as ``torch.ops.cudnn.<name>``.

Every fused API has one of its name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cudnn.fused import registry

if TYPE_CHECKING:
    from cudnn.attention.flash_interface import flash_attn_func as flash_attn_func
    from cudnn.attention.flash_interface import flash_attn_varlen_func as flash_attn_varlen_func
    from cudnn.attention.flash_interface import flash_attn_with_kvcache as flash_attn_with_kvcache
    from cudnn.attention.operator import scaled_dot_product_attention as scaled_dot_product_attention
    from cudnn.causal_conv1d.operator import causal_conv1d as causal_conv1d
    from cudnn.fused.operators import *  # pyright: ignore[reportMissingModuleSource]  (a stub)
    from cudnn.gated_mlp.operator import gated_mlp as gated_mlp
    from cudnn.moe.operator import moe_mlp as moe_mlp
    from cudnn.native_sparse_attention.decode import nsa_decode as nsa_decode
    from cudnn.native_sparse_attention.operator import nsa_attention as nsa_attention

_OWN = {
    "causal_conv1d": "cudnn.causal_conv1d.operator",
    "gated_mlp": "cudnn.gated_mlp.operator",
    "flash_attn_func": "cudnn.attention.flash_interface",
    "flash_attn_varlen_func": "cudnn.attention.flash_interface",
    "flash_attn_with_kvcache": "cudnn.attention.flash_interface",
    "moe_mlp": "cudnn.moe.operator",
    "nsa_attention": "cudnn.native_sparse_attention.operator",
    "nsa_decode": "cudnn.native_sparse_attention.decode",
    "scaled_dot_product_attention": "cudnn.attention.operator",
}
"""Operators that are no fused API's, and their modules."""


if not TYPE_CHECKING:  # a type checker would take any name for an operator

    def __getattr__(name: str) -> Any:
        if name in _OWN:
            operator = getattr(importlib.import_module(_OWN[name]), name)
        elif name in registry.packages():
            from cudnn.fused.operator import register

            operator = register(name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = operator
        return operator


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWN, *registry.packages()})
