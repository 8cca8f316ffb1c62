"""Modules that load at first use, so that ``import cudnn`` stays quick and works without them."""

from __future__ import annotations

import importlib
from typing import Any


class _LazyModule:
    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, attribute: str) -> Any:
        module = importlib.import_module(self.__dict__["_name"])
        self.__dict__.update(module.__dict__)  # later look-ups are plain attribute reads
        return getattr(module, attribute)


torch: Any = _LazyModule("torch")
tvm_ffi: Any = _LazyModule("tvm_ffi")
