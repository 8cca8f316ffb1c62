"""Copies of expert weights that an integration makes in each pass, and logs once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cudnn import settings
from cudnn_kernels.formats import GLU_BLOCK


def interleaved(where: str, gate: Tensor, up: Tensor) -> Tensor:
    """Gates and up projections (E, I, ...) as fp8 GEMMs take them, (E, 2 I, ...): of every 64 rows 32 gates first.

    ``where``: the integration, for the log.
    """
    log_once(where, "gate and up weights are interleaved in each pass, for fp8")
    return torch.stack([w.unflatten(1, (-1, GLU_BLOCK)) for w in (gate, up)], 2).flatten(1, 3)


def log_once(where: str, message: str) -> None:
    """Logs a warning at the first call in this process."""
    if not torch.compiler.is_compiling():
        _log(where, message)


@functools.cache
def _log(where: str, message: str) -> None:
    settings.configure_logging().warning(f"{where}: {message}")
