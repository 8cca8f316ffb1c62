"""RMSNorm + Hadamard transform + amax on bfloat16."""

from __future__ import annotations

from typing import Any

from cudnn.cli.programs import Comparison, Problem, Program, compare
from cudnn.lazy import torch
from cudnn.rmsnorm_rht_amax import pick_rows_per_cta, reference, rmsnorm_rht_amax_wrapper

_EPS = 1e-5


def _make(shape: tuple[int, ...], device: str) -> Problem:
    m, n = shape
    rows = pick_rows_per_cta(m)
    x = torch.randn(m, n, device=device).bfloat16()
    w = (torch.rand(n, device=device) + 0.5).bfloat16()

    def compared(results: Any) -> list[Comparison]:
        o, amax = reference.rmsnorm_rht_amax(x.float(), w.float(), _EPS, rows)
        half_a_unit = 0.51 * torch.finfo(torch.bfloat16).eps  # o is rounded once
        return [
            compare("o", results["o_tensor"], o, half_a_unit, absolute=1e-5),
            compare("amax", results["amax_tensor"], amax, 1e-5),
        ]

    return Problem(lambda: rmsnorm_rht_amax_wrapper(x, w, _EPS, rows_per_cta=rows), compared)


PROGRAM = Program("RMSNorm + RHT + amax", ("rows", "columns"), (16, 512), _make)
