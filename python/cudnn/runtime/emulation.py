"""Fused APIs on CPU tensors: the reference in PyTorch or, where asked for, the real kernel in the emulator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from cudnn import settings
from cudnn.errors import make_error
from cudnn.runtime import recording
from cudnn.runtime.architecture import ARCHITECTURES
from cudnn.runtime.kernels import emulated, emulated_kernel
from cudnn.runtime.launch_capture import captures, record


@contextlib.contextmanager
def emulation(arch: str, **options: Any) -> Iterator[Any]:
    """Within the block, fused APIs on CPU tensors run the real kernel for ``arch`` in the emulator.

    The block belongs to the thread that entered it; other threads go on as they were, and may emulate at the same time.

    Args:
        arch: ``"sm_90a"`` (Hopper) or ``"sm_100a"`` (Blackwell).
        options: Those of ``ptx_emulator.emulate``: ``races=True`` looks for data races; ``scheduler`` and ``seed`` say
            in which order threads run; ``ignore=["PE103"]`` leaves out findings with this code.

    Yields:
        The emulator's ``Report``.

    Raises:
        ValueError: there is no kernel for ``arch``, or ``ignore`` has a code that does not exist or that ends a launch.
        ptx_emulator.Fault: the kernel did something that PTX forbids.
    """
    if arch not in ARCHITECTURES.values():
        raise make_error(ValueError, "cudnn.emulation", "arch", repr(arch), ", ".join(ARCHITECTURES.values()))
    import ptx_emulator

    with ptx_emulator.emulate(arch, **options) as report:
        emulated.set(arch)
        try:
            yield report
        finally:
            emulated.set("")


def emulated_architecture() -> str:
    """The architecture emulated for CPU tensors: of the innermost ``emulation``, else ``CUDNN_EMULATE``, else none.

    Within :func:`cudnn.runtime.recording.recording`, the architecture that is recorded for.
    """
    if recorder := recording.current():
        return recorder.arch
    return emulated.get() or settings.EMULATE.get()


def emulate(source: str, configuration: Any, arch: str, *arguments: Any) -> None:
    """Runs a kernel in the emulator on its arguments, which are on the CPU, on the null stream; or records it."""
    if recorder := recording.current():
        recorder.launch(source, configuration, arch)
        return
    with contextlib.nullcontext() if emulated.get() else emulation(arch):
        function = emulated_kernel(source, configuration, arch)
        function(*arguments)
        if captures:
            record(function, configuration.slots(), arguments)


def compile_for_emulation(source: str, configuration: Any, arch: str) -> Callable[..., None]:
    """Compiles a kernel for the emulator; the result runs it as :func:`emulate` does."""
    with contextlib.nullcontext() if emulated.get() else emulation(arch):
        emulated_kernel(source, configuration, arch)
    return functools.partial(emulate, source, configuration, arch)


@functools.cache
def log_reference_runs(name: str) -> None:
    """Logs, once for each API, that the reference runs and no kernel."""
    settings.configure_logging().warning("%s: on CPU tensors the reference in PyTorch runs, not the kernel", name)
