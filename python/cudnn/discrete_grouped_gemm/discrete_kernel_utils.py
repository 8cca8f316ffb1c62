"""What existing programs look up here."""

from __future__ import annotations

from typing import Any

from cudnn.errors import make_error
from cudnn.fused import pointer_arrays


def _require_pointer_tensor(t: Any, name: str, expected_len: int | None = None) -> None:
    """Raises unless it is an array of ``count`` device pointers on a CUDA device.

    Raises:
        TypeError: no tensor.
        ValueError: another type, shape, stride or device.
    """
    where = "discrete_grouped_gemm"
    pointer_arrays.check(where, name, t, expected_len, getattr(t, "device", None))
    if not t.is_cuda:
        raise make_error(
            ValueError, where, f"{name} must be a CUDA tensor", f"one on {t.device}", "one on a CUDA device"
        )
