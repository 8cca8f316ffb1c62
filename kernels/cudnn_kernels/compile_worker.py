"""Processes that compile kernels for another one: ``python -m cudnn_kernels.compile_worker DESCRIPTOR...``.

The first one imports the compiler and forks one for each socket. They read pickled kernels and write pickled results
until the socket ends. None imports ``cudnn``, PyTorch or the caller's main module, or uses a GPU: programs need no
``if __name__ == "__main__"``.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any


def main(descriptors: Sequence[int]) -> None:
    """Forks a process for each socket, and waits for them."""
    # apache-tvm-ffi imports PyTorch if it can, which takes longer than a kernel. Here nothing needs it.
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    gc.disable()  # nothing becomes garbage, and collections take a sixth of the time
    from cudnn_kernels import compiler  # before the fork: once for all workers

    compiler.preload()
    gc.freeze()  # a collection writes to all objects that it visits, which would copy the shared pages
    gc.enable()
    connections = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for connection in connections:
        if not os.fork():
            for other in connections:
                if other is not connection:
                    other.close()
            _serve(connection)
            os._exit(0)
    for connection in connections:
        connection.close()
    for _ in connections:
        os.wait()


def _serve(connection: socket.socket) -> None:
    """Compiles each received kernel until the input ends."""
    stream = connection.makefile("rwb")
    while True:
        try:
            key = pickle.load(stream)
        except (EOFError, OSError):
            return
        try:
            pickle.dump(_result(key), stream)
            stream.flush()
        except OSError:  # the caller has ended
            return


def _result(key: Any) -> tuple[bytes, float, str]:
    from cudnn_kernels import compiler

    start = time.perf_counter()
    try:
        return compiler.export(compiler.compile_kernel(*key, exports=True)), time.perf_counter() - start, ""
    except Exception as error:
        return b"", 0.0, f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
