"""Runs kernels of other projects in the emulator, for the table of `docs/emulator-compatibility.md`.

    pip install --no-deps --target PEERS quack-kernels==0.6.5 flash-attn-4==4.0.0b36 triton einops torch-c-dlpack-ext
    git clone https://github.com/NVIDIA/cutlass CUTLASS
    PYTHONPATH=PEERS python docs/outside_kernels.py CUTLASS [WORDS...]

runs every case, or those whose names contain one of the words, each in a process of its own, and writes their rows to
`docs/emulator-compatibility.csv`; `python docs/generate.py` makes the table. It takes some minutes and is not part of
CI. Programs run unmodified, with small problems, as for `device="cuda"`, with race detection, and are compared with
PyTorch.
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import json
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "emulator-compatibility.csv"
COLUMNS = ("project", "version", "kernel", "chip", "result", "seconds", "launches", "errors", "warnings", "date")
BOTH = ("sm_90a", "sm_100a")
PACKAGES = {"QuACK": "quack-kernels", "FlashAttention-4": "flash-attn-4", "Triton": "triton"}
SECONDS = 300
# Kernels leave these waits to ptxas.
WARN = ["PE105"]


def _tensor(*shape: int, dtype: str = "bfloat16", **options: Any) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", dtype=getattr(torch, dtype), **options)


def _error(result: Any, expected: Any, allowed: float) -> str:
    """ "right", or the largest error by the largest value."""
    error = ((result.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    return "right" if error <= allowed else f"error {error:.1e}"


def quack_rmsnorm() -> str:
    import quack
    import torch

    x, w = _tensor(64, 1024), _tensor(1024, dtype="float32")
    return _error(quack.rmsnorm(x, w), torch.nn.functional.rms_norm(x.float(), (1024,), w, 1e-6), 1e-2)


def quack_softmax() -> str:
    import quack

    x = _tensor(64, 1024)
    return _error(quack.softmax(x), x.float().softmax(-1), 1e-2)


def quack_cross_entropy() -> str:
    import quack
    import torch

    x, target = _tensor(64, 1024), torch.randint(0, 1024, (64,), device="cuda")
    expected = torch.nn.functional.cross_entropy(x.float(), target, reduction="none")
    return _error(quack.cross_entropy(x, target, reduction="none"), expected, 1e-2)


def quack_gemm() -> str:
    from quack.gemm_interface import gemm

    a, b = _tensor(256, 256), _tensor(256, 256)
    return _error(gemm(a, b, tuned=False), a.float() @ b.float(), 1e-2)


def quack_gemm_act() -> str:
    import torch
    from quack.gemm_interface import gemm_act

    a, b = _tensor(256, 256), _tensor(256, 256)
    _, activated = gemm_act(a, b, activation="relu", tuned=False)
    return _error(activated, torch.relu(a.float() @ b.float()), 1e-2)


def _attention(backward: bool, size: int) -> str:
    import torch
    from flash_attn.cute.interface import flash_attn_func

    q, k, v = (_tensor(1, 128, 2, size, requires_grad=backward) for _ in range(3))
    out = flash_attn_func(q, k, v, causal=True)
    out = out[0] if isinstance(out, tuple) else out
    reference = [x.detach().float().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*reference, is_causal=True)
    if not backward:
        return _error(out, expected.transpose(1, 2), 2e-2)
    grad = _tensor(*out.shape)
    out.backward(grad)
    expected.backward(grad.float().transpose(1, 2))
    pairs = [(x.grad, r.grad.transpose(1, 2)) for x, r in zip((q, k, v), reference, strict=True)]
    wrong = [text for text in (_error(x, r, 3e-2) for x, r in pairs) if text != "right"]
    return wrong[0] if wrong else "right"


def triton_problem(name: str, device: str) -> tuple[Any, int, list[Any], Any]:
    """The function, the grid, its arguments without constants, of which the last is the result, and that expected."""
    import torch

    function = runpy.run_path(str(Path(__file__).with_name("outside_triton.py")))[name]
    x, y = (torch.randn(64, 64, device=device, dtype=torch.float16) for _ in range(2))
    out = torch.zeros(64, 64, device=device, dtype=torch.float32)
    if name == "softmax":
        return function, 64, [x, out], x.float().softmax(-1)
    return function, 1, [x, y, out], x.float() @ y.float()


def run_triton(name: str, chip: str) -> tuple[str, Any]:
    """Triton compiles for the chip, as its launcher does for aligned tensors; the emulator runs its PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import ptx_emulator

    function, grid, arguments, expected = triton_problem(name, "cpu")
    pointers = dict.fromkeys("xy"[: len(arguments) - 1], "*fp16") | {"out": "*fp32"}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(pointers))}
    source = ASTSource(function, {**pointers, "n": "constexpr"}, constexprs={"n": 64}, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90 if chip == "sm_90a" else 100, 32))
    launch = ptx_emulator.run_triton(compiled, grid, arguments, races=True, on_error="report", warn=WARN)
    return _error(arguments[-1], expected, 1e-2), launch


CASES: dict[str, tuple[str, str, tuple[str, ...], Callable[[], str] | tuple[str, str]]] = {}
"""By name: project, kernel, chips, and a function that says whether the result is right, or an example's arguments."""


def _add(project: str, kernel: str, chips: tuple[str, ...], run: Callable[[], str] | tuple[str, str]) -> None:
    CASES[f"{project} {kernel}"] = project, kernel, chips, run


_add("QuACK", "rmsnorm", BOTH, quack_rmsnorm)
_add("QuACK", "softmax", BOTH, quack_softmax)
_add("QuACK", "cross_entropy", BOTH, quack_cross_entropy)
_add("QuACK", "gemm", BOTH, quack_gemm)
_add("QuACK", "gemm_act", BOTH, quack_gemm_act)
_add("FlashAttention-4", "forward, D 64", BOTH, lambda: _attention(False, 64))
_add("FlashAttention-4", "forward, D 128", BOTH, lambda: _attention(False, 128))
_add("FlashAttention-4", "forward and backward, D 64", BOTH, lambda: _attention(True, 64))
_add("Triton", "softmax", BOTH, ("triton", "softmax"))
_add("Triton", "dot", BOTH, ("triton", "dot"))
for _chip, _path, _arguments in (
    ("sm_90a", "ampere/kernel/elementwise/elementwise_add", "--M 128 --N 256"),
    ("sm_90a", "ampere/kernel/dense_gemm/sgemm", "--mnk 128,128,64"),
    ("sm_90a", "ampere/kernel/dense_gemm/tensorop_gemm", "--mnkl 128,128,64,1 --iterations 1"),
    ("sm_90a", "hopper/kernel/dense_gemm/dense_gemm", "--mnkl 256,256,128,1"),
    ("sm_90a", "hopper/kernel/dense_gemm/dense_gemm_persistent", "--mnkl 256,256,128,1"),
    ("sm_90a", "hopper/kernel/attention/fmha", "--q_shape 1,128,2,64 --k_shape 1,128,2,64"),
    ("sm_100a", "blackwell/kernel/dense_gemm/dense_gemm", "--mnkl 256,256,128,1"),
    ("sm_100a", "blackwell/kernel/dense_gemm/dense_gemm_persistent", "--mnkl 256,256,128,1"),
    ("sm_100a", "blackwell/kernel/attention/fmha/fmha", "--q_shape 1,256,2,64 --k_shape 1,256,2,64"),
    ("sm_100a", "blackwell/tutorial/tutorial_gemm/fp16_gemm_0", "--mnk 256,256,64"),
    ("sm_100a", "blackwell/kernel/rmsnorm/rmsnorm", ""),
):
    _add("CUTLASS", _path, (_chip,), (_path, _arguments))


def example(cutlass: Path, path: str, arguments: str) -> str:
    """A script of CUTLASS, which compares its result itself and raises if it is wrong."""
    root = cutlass / "examples" / "python" / "CuTeDSL"
    script = root / "cute" / f"{path}.py"
    sys.argv = [str(script), *arguments.split()]
    sys.path[:0] = [str(script.parent), str(root)]
    runpy.run_path(str(script), run_name="__main__")
    return "right"


def run_case(name: str, chip: str, cutlass: Path) -> dict[str, Any]:
    """In this process: the result, and what the emulator found."""
    import torch

    import ptx_emulator

    torch.manual_seed(0)
    _, _, _, run = CASES[name]
    start, report = time.perf_counter(), ptx_emulator.Report()
    try:
        if isinstance(run, tuple) and run[0] == "triton":
            result, launch = run_triton(run[1], chip)
            report.launches = [launch]
        else:
            with ptx_emulator.emulate(chip, races=True, cuda=True, on_error="report", warn=WARN, report=report):
                result = example(cutlass, *run) if isinstance(run, tuple) else run()
    except Exception as error:
        result = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:150]
        print(f"{name}, {chip}: {error}", file=sys.stderr)
    codes = {
        severity: sorted({f.code for f in report.findings if f.severity == severity})
        for severity in ("error", "warning")
    }
    for finding in report.errors:
        print(finding, file=sys.stderr)
    return {
        "result": result,
        "seconds": f"{time.perf_counter() - start:.1f}",
        "launches": len(report.launches),
        "errors": " ".join(codes["error"]),
        "warnings": " ".join(codes["warning"]),
    }


def version(project: str, cutlass: Path) -> str:
    if project == "CUTLASS":
        command = ["git", "-C", str(cutlass), "log", "-1", "--format=%h"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or (cutlass / "COMMIT").read_text().strip()
    return importlib.metadata.version(PACKAGES[project])


def rows() -> list[dict[str, str]]:
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


def table() -> str:
    """The rows of the file in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(row[column].replace('|', ' ') for column in COLUMNS)} |" for row in rows()]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--case"]:
        _, name, chip, cutlass, file = arguments
        Path(file).write_text(json.dumps(run_case(name, chip, Path(cutlass))))
        return 0
    cutlass, words = Path(arguments[0]).resolve(), arguments[1:]
    found = {(row["project"], row["kernel"], row["chip"]): row for row in rows()} if FILE.exists() else {}
    for name, (project, kernel, chips, _) in CASES.items():
        if words and not any(word in name for word in words):
            continue
        for chip in chips:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "row.json"
                command = [sys.executable, __file__, "--case", name, chip, str(cutlass), str(file)]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
                    row = json.loads(file.read_text()) if file.exists() else {"result": f"exit code {done.returncode}"}
                    print(done.stderr[-4000:] if row["result"] != "right" or row["errors"] else "", end="")
                except subprocess.TimeoutExpired:
                    row = {"result": f"over {SECONDS} s"}
            day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
            about = {"project": project, "version": version(project, cutlass), "kernel": kernel, "chip": chip}
            found[project, kernel, chip] = dict.fromkeys(COLUMNS, "") | about | row | {"date": day}
            print({**about, **row}, flush=True)
    with FILE.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found.values())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
