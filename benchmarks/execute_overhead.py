"""Host time of a warm ``graph.execute``, compared with cuDNN's other Python frontend in the same run.

    python benchmarks/execute_overhead.py --peer FOLDER [--tensors 20] [--csv FILE]

FOLDER holds the unpacked wheel of nvidia-cudnn-frontend 1.23.0, made for this Python: both packages are imported as
``cudnn``, so each runs in a separate process, and their batches alternate. The graph is matmul + bias in fp16 at a
small size, with the same tensors at every call and with new tensors at every call. The result is the minimum over the
batches of the mean time of a call.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BATCHES, CALLS = 40, 200
SIZE = 64  # M, N and K
MODES = ("repeat", "new")
BARS = {"repeat": 0.55, "new": 0.9}


class Row(NamedTuple):
    """Microseconds per call."""

    tensors: str
    ours: float
    peer: float | None
    bar: float

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.ours / self.peer


def build_graph(cudnn: Any, torch: Any, handle: Any, tensors: int) -> tuple[Any, list[Any]]:
    """C = A @ B + bias, and one addition per tensor over four. Gives the graph and its tensors, the output last."""
    graph = cudnn.pygraph(
        handle=handle,
        io_data_type=cudnn.data_type.HALF,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    matrix = torch.empty(1, SIZE, SIZE, dtype=torch.float16, device="cuda")
    row = torch.empty(1, 1, SIZE, dtype=torch.float16, device="cuda")
    inputs = [graph.tensor_like(matrix), graph.tensor_like(matrix), graph.tensor_like(row)]
    output = graph.bias(name="bias", input=graph.matmul(name="matmul", A=inputs[0], B=inputs[1]), bias=inputs[2])
    for i in range(tensors - 4):
        inputs.append(graph.tensor_like(row))
        output = graph.bias(name=f"bias{i}", input=output, bias=inputs[-1])
    output.set_output(True)
    graph.build([cudnn.heur_mode.A])
    return graph, [*inputs, output]


def work(tensors: int) -> None:
    """The process of one package: answers each mode read from standard input with the seconds that a batch took."""
    import torch

    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph, keys = build_graph(cudnn, torch, handle, tensors)
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")

    # Views 16 bytes apart: every call gets addresses that no call had before, out of little memory.
    count = (BATCHES + 2) * CALLS
    packs: list[dict[Any, Any]] = [{} for _ in range(count)]
    for key in keys:
        shape, stride = tuple(key.get_dim()), tuple(key.get_stride())
        memory = torch.zeros(SIZE * SIZE + 8 * count, dtype=torch.float16, device="cuda")
        for i in range(count):
            packs[i][key] = torch.as_strided(memory, shape, stride, 8 * i)
    fresh = iter(packs)
    same = [packs[-1]] * CALLS

    for _ in range(3):
        graph.execute(same[0], workspace, handle=handle)
    print(cudnn.__version__, cudnn.backend_version(), flush=True)
    for line in sys.stdin:
        batch = same if line.strip() == "repeat" else [next(fresh) for _ in range(CALLS)]
        execute = graph.execute
        torch.cuda.synchronize()
        start = time.perf_counter()
        for pack in batch:
            execute(pack, workspace, handle=handle)
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize()
        print(elapsed / CALLS, flush=True)


class Worker:
    """A process that imports one of the two packages."""

    def __init__(self, name: str, paths: list[Path], tensors: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        command = [sys.executable, __file__, "--work", "--tensors", str(tensors)]
        self._name = name
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.version, self.backend = self._line().split()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise SystemExit(f"execute_overhead: the process of {self._name} ended with {code}; see above.")
        return line

    def batch(self, mode: str) -> float:
        """Microseconds per call of one batch."""
        assert self._process.stdin is not None
        self._process.stdin.write(mode + "\n")
        return float(self._line()) * 1e6

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(workers: list[Worker]) -> list[Row]:
    """Alternates the batches of the workers, ours first."""
    rows: list[Row] = []
    for mode in MODES:
        best = [float("inf")] * len(workers)
        for _ in range(BATCHES):
            best = [min(least, worker.batch(mode)) for least, worker in zip(best, workers, strict=True)]
        rows.append(Row(mode, best[0], best[1] if len(best) > 1 else None, BARS[mode]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of a warm graph.execute, against nvidia-cudnn-frontend.")
    parser.add_argument("--peer", type=Path, help="folder with the unpacked wheel of nvidia-cudnn-frontend 1.23.0")
    parser.add_argument("--tensors", type=int, default=4, help="tensors in the graph, 4 or more (default: 4)")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tensors < 4:
        parser.error(f"--tensors: got {arguments.tensors}; allowed: 4 or more.")
    if arguments.work:
        work(arguments.tensors)
        return

    import torch

    if not torch.cuda.is_available():
        parser.error("no CUDA device: this benchmark times launches on a GPU. Run it on a machine with one.")
    if arguments.peer and not (arguments.peer / "cudnn").is_dir():
        parser.error(f"--peer: {arguments.peer} holds no folder `cudnn`; unpack the wheel there.")
    workers = [Worker("cudnn-fused", [ROOT / "python", ROOT / "kernels"], arguments.tensors)]
    if arguments.peer:
        workers.append(Worker("nvidia-cudnn-frontend", [arguments.peer.resolve()], arguments.tensors))
    rows = measure(workers)
    for worker in workers:
        worker.close()

    peer = f"{workers[1].version} (cuDNN {workers[1].backend})" if arguments.peer else "not run"
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {arguments.tensors} tensors; ours "
        f"{workers[0].version} (cuDNN {workers[0].backend}), peer {peer}"
    )
    print(f"{'pointers':10}{'ours, us':>10}{'peer, us':>10}{'ratio':>8}{'bar':>7}")
    for row in rows:
        peer_columns = "" if row.peer is None else f"{row.peer:10.2f}{row.ratio:8.2f}"
        print(f"{row.tensors:10}{row.ours:10.2f}{peer_columns:18}{row.bar:7.2f}")
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["pointers", "tensors", "ours_us", "peer_us", "ratio", "bar"])
            writer.writerows([row.tensors, arguments.tensors, row.ours, row.peer, row.ratio, row.bar] for row in rows)


if __name__ == "__main__":
    main()
