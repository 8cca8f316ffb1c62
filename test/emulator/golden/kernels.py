"""Whole kernels on fixed inputs, in the emulator or on a Hopper GPU, whose results are stored next to this file.

PYTHONPATH=python:kernels:test python -m emulator.golden.kernels FILE    # on a GPU: writes FILE
"""

from __future__ import annotations

import datetime
import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import calibration
from calibration.case import Tolerance, integers, raw

FILE = Path(__file__).with_name("kernels_sm_90a.xz")
EPS = 1e-5


@dataclass(frozen=True)
class Kernel:
    """`run` takes a device, "cpu" within an emulation, and returns one result."""

    id: str
    tolerance: Tolerance
    run: Callable[[str], torch.Tensor]

    def fingerprint(self, arch: str) -> str:
        return hashlib.sha256(self.id.encode()).hexdigest()[:16]

    def output(self, device: str) -> list[Any]:
        """The result's bits, as `calibration.save` and `calibration.compare` want them."""
        bits = {2: torch.int16, 4: torch.int32}
        result = self.run(device).cpu()
        words = result.view(bits[result.element_size()]).numpy().reshape(-1)
        return [words.view({2: np.uint16, 4: np.uint32}[words.itemsize])]


def normal(name: str, *shape: int) -> torch.Tensor:
    """float32, about normal: the sum of four uniform numbers."""
    parts = [raw(f"{name} {i}", int(np.prod(shape))).astype(np.float64) / 2**32 - 0.5 for i in range(4)]
    return torch.from_numpy((np.sum(parts, axis=0) * 1.7).astype(np.float32)).reshape(shape)


@lru_cache(maxsize=1)
def norm(device: str, m: int, n: int, rows: int, threads: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """`o` and `amax` of RMSNorm + Hadamard + amax."""
    from cudnn.rmsnorm_rht_amax import RmsNormRhtAmax

    x = normal("x", m, n).to(dtype).to(device)
    w = (normal("w", n).abs() + 0.5).to(dtype).to(device)
    o, amax = torch.full_like(x, float("nan")), torch.full((m // rows,), float("nan"), device=device)
    kernel = RmsNormRhtAmax(x, w, o, amax, EPS, threads, rows)
    kernel(x_tensor=x, w_tensor=w, o_tensor=o, amax_tensor=amax)
    return {"o": o, "amax": amax}


def norms() -> list[Kernel]:
    """The reciprocal square root is approximate: two units of float32, which may move what is rounded afterwards."""
    made = []
    for name, shape in _NORMS.items():
        for result, tolerance in (("o", Tolerance(_KIND[shape[-1]], 1)), ("amax", Tolerance("f32", 2))):
            run = partial(lambda device, shape, result: norm(device, *shape)[result], shape=shape, result=result)
            made.append(Kernel(f"norm {name} {result}", tolerance, run))
    return made


def product(majors: str, dtype: torch.dtype, exact: bool) -> Callable[[str], torch.Tensor]:
    """C = A B^T: small integers, or random numbers."""
    m, n, k = 128, 256, 192

    def operand(name: str, rows: int, major: str) -> torch.Tensor:
        shape = (rows, k) if major == "k" else (k, rows)
        small = torch.from_numpy(integers(name, rows * k, -3, 3)).reshape(shape)
        x = (small if exact else normal(name, *shape)).to(dtype)
        return x if major == "k" else x.t()

    def run(device: str) -> torch.Tensor:
        from cudnn import gemm_amax_wrapper

        a, b = (operand(name, rows, major) for name, rows, major in zip("ab", (m, n), majors, strict=True))
        a, b = (x.to(device).unsqueeze(2) for x in (a, b))
        return gemm_amax_wrapper(a, b, None, None, c_dtype=dtype)["c_tensor"]

    return run


bf16, f16 = torch.bfloat16, torch.float16
_NORMS = {
    "bf16 16x512": (16, 512, 8, 64, bf16),
    "f16 16x768": (16, 768, 4, 96, f16),
    "bf16 6x7168": (6, 7168, 2, 128, bf16),
}
_GEMMS = {"bf16 kk": ("kk", bf16), "f16 mm": ("mm", f16), "f16 mk": ("mk", f16)}
_KIND = {bf16: "bf16", f16: "f16"}

KERNELS = [
    *norms(),
    *(Kernel(f"gemm {name}", Tolerance(), product(*p, True)) for name, p in _GEMMS.items()),
    Kernel("gemm bf16 random", Tolerance(), product("kk", bf16, False)),
]


def main() -> None:
    device = calibration.Device()
    outputs = {}
    for kernel in KERNELS:
        outputs[kernel.id] = kernel.output("cuda")
        print(kernel.id, outputs[kernel.id][0][:4])
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    about = {"name": device.name, "driver": device.driver_version, "arch": device.arch, "date": date}
    calibration.save(Path(sys.argv[1]), calibration.Golden(about, calibration.collect("sm_90a", KERNELS, outputs)))


if __name__ == "__main__":
    main()
