"""The matrix of the transform."""

from __future__ import annotations

from typing import Any

from cudnn.api_base import is_power_of_2
from cudnn.errors import make_error
from cudnn.lazy import torch

HADAMARD_SIZE = 16


def hadamard_matrix(n: int, dtype: Any = None, device: Any = None) -> Any:
    """Sylvester's matrix (n, n) of 1 and -1: H[i, j] is -1 where i and j have an odd number of bits in common.

    Raises:
        ValueError: n is no power of 2.
    """
    if not is_power_of_2(n):
        raise make_error(ValueError, "hadamard_matrix", "n", n, "powers of 2")
    signs = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while signs.shape[0] < n:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs.to(dtype=dtype or torch.float32, device=device)


def is_other(matrix: Any) -> bool:
    """Whether a matrix has other values than the one that is built in."""
    if matrix.device.type == "meta" or tuple(matrix.shape) != (HADAMARD_SIZE, HADAMARD_SIZE):
        return False
    return not torch.equal(matrix.float(), hadamard_matrix(HADAMARD_SIZE, device=matrix.device))
