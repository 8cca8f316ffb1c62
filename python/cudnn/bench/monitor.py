"""Samples clock, power and temperature of the GPU with nvidia-smi."""

from __future__ import annotations

import statistics
import subprocess
import threading
from typing import Any

from cudnn.bench import Reading
from cudnn.lazy import torch

MILLISECONDS = 100  # between two samples


def command() -> list[str]:
    """The nvidia-smi command that prints clock, power and temperature of PyTorch's current GPU in a loop."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
    return ["nvidia-smi", f"--id=GPU-{uuid}", query, "--format=csv,noheader,nounits", f"--loop-ms={MILLISECONDS}"]


def parse(line: str) -> Reading | None:
    """Parses a line of nvidia-smi; None if the GPU does not report a value."""
    try:
        return Reading(*(float(field) for field in line.split(",")))
    except (ValueError, TypeError):
        return None


class Monitor:
    """A context manager that samples the GPU. Without nvidia-smi it has no samples."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._samples: list[Reading] = []
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Monitor:
        try:
            self._process = subprocess.Popen(
                self._arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except FileNotFoundError:
            return self
        self._thread = threading.Thread(target=self._collect, args=(self._process.stdout,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process is not None and self._thread is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    def _collect(self, lines: Any) -> None:
        for line in lines:
            reading = parse(line)
            if reading is not None:
                self._samples.append(reading)

    def read(self) -> Reading | None:
        """Median clock and power and the highest temperature since the last call."""
        samples, self._samples = self._samples, []
        if not samples:
            return None
        clocks, powers, temperatures = zip(*samples, strict=True)
        return Reading(statistics.median(clocks), statistics.median(powers), max(temperatures))
