"""RMSNorm, a Hadamard transform of 16 columns and largest magnitudes for tests: the definition in float64."""

from __future__ import annotations

import torch

from support.oracle import signs_of


def definition(x: torch.Tensor, w: torch.Tensor, eps: float, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The result before it is rounded, and the amax of each group of rows."""
    y = x.double() / (x.double().square().mean(dim=1, keepdim=True) + eps).sqrt() * w.double()
    y = (y.reshape(-1, 16) @ (signs_of(16).to(y) / 4)).reshape(x.shape)
    return y, y.abs().reshape(-1, rows * x.shape[1]).amax(dim=1)


def assert_right(x: torch.Tensor, w: torch.Tensor, o: torch.Tensor, amax: torch.Tensor, eps: float = 1e-5) -> None:
    """Half a unit in the last place for the one rounding, and a little for what float32 lost before."""
    y, largest = definition(x, w, eps, len(x) // len(amax))
    spacing = torch.finfo(x.dtype).eps * y.abs().clamp(min=torch.finfo(x.dtype).tiny)
    assert bool(((o.double() - y).abs() <= 0.505 * spacing + 2e-6).all())
    torch.testing.assert_close(amax.double(), largest, rtol=3e-6, atol=0)
