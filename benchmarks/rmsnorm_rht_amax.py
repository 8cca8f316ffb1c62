"""RMSNorm + Hadamard transform + amax on a GPU: checked, then timed beside a device copy and torch.compile.

    python benchmarks/rmsnorm_rht_amax.py            # the API as a user gets it, and the host time of a call
    python benchmarks/rmsnorm_rht_amax.py --tune     # many configurations of the kernel as well

Bandwidth counts x once read and o once written; the copy moves as many bytes, in the same run. Times are medians of
triton's do_bench.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from triton.testing import do_bench

from cudnn import launch
from cudnn.rmsnorm_rht_amax import RmsNormRhtAmax, reference
from cudnn.rmsnorm_rht_amax.api import _KERNEL
from cudnn_kernels.norm.heuristics import SHARED_MEMORY, RmsNormRhtAmaxConfiguration

SHAPES = ((32768, 4096), (16384, 8192))
MORE_SHAPES = ((65536, 2048), (16384, 7168), (8192, 16384), (4096, 32768))
ROWS = 8
EPS = 1e-5


def median(function: Callable[..., Any], *arguments: Any) -> float:
    """Milliseconds of a call."""
    return do_bench(lambda: function(*arguments), warmup=25, rep=150, return_mode="median")


def tensors(m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """x, w, and results filled with NaN."""
    x = torch.randn(m, n, device="cuda", dtype=dtype)
    w = (torch.rand(n, device="cuda") + 0.5).to(dtype)
    return x, w, torch.full_like(x, float("nan")), torch.full((m // ROWS,), float("nan"), device="cuda")


def worst(x: torch.Tensor, w: torch.Tensor, o: torch.Tensor, amax: torch.Tensor) -> tuple[float, float]:
    """Largest error of o in units of its type's spacing at the true value, and of amax, relative."""
    worst_o = worst_amax = 0.0
    for start in range(0, x.shape[0], 4096):
        part = slice(start, start + 4096)
        y = x[part].double()
        y = y * torch.rsqrt(y.square().mean(dim=1, keepdim=True) + EPS) * w.double()
        y = reference.hadamard(y.unflatten(1, (-1, 16))).flatten(1) / 4
        spacing = torch.finfo(o.dtype).eps * 2.0 ** y.abs().clamp(min=2**-10).log2().floor()
        worst_o = max(worst_o, float(((o[part].double() - y).abs() / spacing).max()))
        true_amax = y.abs().unflatten(0, (-1, ROWS)).amax(dim=(1, 2))
        found = amax[start // ROWS : start // ROWS + len(true_amax)]
        worst_amax = max(worst_amax, float(((found - true_amax).abs() / true_amax).max()))
    return worst_o, worst_amax


def configurations(n: int) -> list[tuple[RmsNormRhtAmaxConfiguration, float]]:
    """Configurations to try, each with the number of CTAs for each SM (inf: as many as there are groups of rows)."""
    found: list[tuple[RmsNormRhtAmaxConfiguration, float]] = []

    def add(threads: int, teams: int, stages: int, ctas: float = 1, **more: bool) -> None:
        c = RmsNormRhtAmaxConfiguration("bfloat16", n, threads, teams, stages, **more)
        if threads * teams <= 1024 and c.shared_memory * (1 if ctas == float("inf") else ctas) <= SHARED_MEMORY:
            found.append((c, ctas))

    for threads, in_all in itertools.product((32, 64, 128, 256, 512, 1024), (512, 1024)):
        if n // threads * 32 >= 1024 and n // threads <= 128 and threads <= in_all:
            teams = in_all // threads
            most = SHARED_MEMORY // (teams * (2 * n + 64))
            for stages in sorted({min(3, most), min(4, most), min(8, most)}):
                if stages >= 2:
                    add(threads, teams, stages)
            base = found[-1][0] if found else None
            if base and base.threads == threads:
                add(threads, teams, base.stages, conflict_free=False)
                add(threads, teams, base.stages, evict_first=True)
            if teams > 1:
                add(threads, teams // 2, max(2, most), ctas=2)
            add(threads, 1, 3, ctas=float("inf"))
    return list(dict.fromkeys(found))


def tune(shapes: tuple[tuple[int, int], ...]) -> None:
    """Times every configuration; the copy is timed anew every few, since clocks drift."""
    sms = launch.processor_count(0)
    for m, n in shapes:
        x, w, o, amax = tensors(m, n)
        stream = torch.cuda.current_stream().cuda_stream
        rows: list[tuple[float, str]] = []
        for number, (c, ctas) in enumerate(configurations(n)):
            if number % 8 == 0:
                copy = median(o.copy_, x)
            grid = 2**30 if ctas == float("inf") else int(sms * ctas)
            try:
                run = launch.kernel(_KERNEL, c, launch.device_architecture(0))
                o.fill_(float("nan"))
                amax.fill_(float("nan"))
                run(x, w, o, amax, EPS, grid, stream)
                error_o, error_amax = worst(x, w, o, amax)
                milliseconds = median(run, x, w, o, amax, EPS, grid, stream)
            except Exception as error:
                print(f"   {c} ctas {ctas}: {type(error).__name__}: {error}"[:400])
                continue
            right = error_o < 0.51 and error_amax < 1e-5
            label = f"threads {c.threads:4d} teams {c.teams:2d} stages {c.stages} ctas/SM {ctas}"
            label += "" if c.conflict_free else " conflicts"
            label += " evict_first" if c.evict_first else ""
            label += "" if right else f"  WRONG o {error_o:.2f} ulp, amax {error_amax:.1e}"
            rows.append((copy / milliseconds, f"{label:64s} {milliseconds * 1e3:8.1f} us"))
        print(f"\n{m} x {n} bf16: copy {copy * 1e3:.1f} us, {4 * m * n / copy / 1e9:.2f} TB/s; ratio to copy:")
        for ratio, label in sorted(rows, reverse=True):
            print(f"   {ratio:.3f}  {label}")


def peers() -> dict[str, Callable[..., Any]]:
    """The same computation for torch.compile, the Hadamard transform as additions and as a product."""
    h = reference.hadamard(torch.eye(16, device="cuda")) / 4

    def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(dim=1, keepdim=True) + EPS) * w.float()).unflatten(1, (-1, 16))

    def finish(y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return y.flatten(1).to(x.dtype), y.flatten(1).abs().unflatten(0, (-1, ROWS)).amax(dim=(1, 2))

    def additions(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return finish(reference.hadamard(normed(x, w)) / 4, x)

    def product(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return finish(normed(x, w) @ h, x)

    return {"torch.compile, additions": torch.compile(additions), "torch.compile, product": torch.compile(product)}


def compare(shapes: tuple[tuple[int, int], ...], with_peers: bool) -> None:
    """The API beside a copy of the same bytes, timed before and after it, and torch.compile."""
    for m, n in shapes:
        x, w, o, amax = tensors(m, n)
        api = RmsNormRhtAmax(x, w, o, amax, EPS, rows_per_cta=ROWS)
        api(x_tensor=x, w_tensor=w, o_tensor=o, amax_tensor=amax)
        error_o, error_amax = worst(x, w, o, amax)
        ours = [0.0, 0.0]
        copy = [median(o.copy_, x)]
        for i in range(2):
            ours[i] = median(api.execute, x, w, o, amax)
            copy.append(median(o.copy_, x))
        us, copies = statistics.mean(ours) * 1e3, statistics.mean(copy) * 1e3
        print(f"\n{m} x {n} bf16, {api._kernel}")
        print(f"   errors: o {error_o:.3f} ulp, amax {error_amax:.1e}")
        print(f"   copy           {copies:8.1f} us  {4e-6 * m * n / copies:.2f} TB/s")
        print(f"   RmsNormRhtAmax {us:8.1f} us  {4e-6 * m * n / us:.2f} TB/s  {copies / us:.3f} of the copy")
        for name, peer in peers().items() if with_peers else ():
            torch._dynamo.reset()
            peer(x, w)
            microseconds = median(peer, x, w) * 1e3
            print(f"   {name:26s} {microseconds:8.1f} us, {microseconds / us:.2f} times ours")


def host_time() -> None:
    """Microseconds that a warm call takes the host: the least of 40 batches of 200 calls."""
    x, w, o, amax = tensors(64, 4096)
    api = RmsNormRhtAmax(x, w, o, amax, EPS, rows_per_cta=ROWS)
    api.compile()
    run, stream = api._compiled_kernel, torch.cuda.current_stream().cuda_stream
    keywords = {"x_tensor": x, "w_tensor": w, "o_tensor": o, "amax_tensor": amax}
    calls: dict[str, Callable[[], Any]] = {
        "execute": lambda: api.execute(x, w, o, amax),
        "execute, by keyword": lambda: api.execute(**keywords),
        "bare kernel": lambda: run(x, w, o, amax, EPS, 132, stream),
        "torch.add(out=)": lambda: torch.add(x, x, out=o),
    }
    for name, call in calls.items():
        best = float("inf")
        for _ in range(40):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            best = min(best, (time.perf_counter() - start) / 200)
        print(f"host time, {name:20s} {best * 1e6:6.2f} us")


RELOAD = """
import time, torch, cudnn
from cudnn.rmsnorm_rht_amax import RmsNormRhtAmax
x = torch.empty(64, 4096, device="cuda", dtype=torch.bfloat16); amax = torch.empty(8, device="cuda")
api = RmsNormRhtAmax(x, x[0], x, amax, rows_per_cta=8)
api.check_support()
start = time.perf_counter()
api.compile()
loaded = time.perf_counter()
api.execute(x, x[0], x, amax)
torch.cuda.synchronize()
ended = time.perf_counter()
print(f"new process: compile() {(loaded - start) * 1e3:.1f} ms, first execute {(ended - loaded) * 1e3:.1f} ms")
"""


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="time many configurations of the kernel")
    parser.add_argument("--more-shapes", action="store_true", help="other row lengths as well, without torch.compile")
    parser.add_argument("--no-peers", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    compare(SHAPES, with_peers=not options.no_peers)
    if options.more_shapes:
        compare(MORE_SHAPES, with_peers=False)
    host_time()
    for _ in range(2):
        subprocess.run([sys.executable, "-c", RELOAD], check=True, env=os.environ)
    if options.tune:
        tune(SHAPES)


if __name__ == "__main__":
    main()
