"""A process that compiles kernels for another one: ``python -m cudnn.runtime.compile_worker``.

It reads pickled kernels from standard input and writes pickled results to standard output until its input ends. It
imports neither PyTorch nor the caller's main module, and uses no GPU: programs need no ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from typing import Any

from cudnn.runtime import kernels


def main() -> None:
    """Compiles what comes until the input ends."""
    # apache-tvm-ffi imports PyTorch if it can, which takes longer than a kernel. Here nothing needs it.
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the compiler prints
    while True:
        try:
            key = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_result(key), results)
        results.flush()


def _result(key: Any) -> tuple[bytes, float, str]:
    start = time.perf_counter()
    try:
        return kernels.build(*key), time.perf_counter() - start, ""
    except Exception as error:
        return b"", 0.0, f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
