"""`emulate` for CuTe DSL kernels, `run` for PTX text."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from ptx_emulator.codegen import load
from ptx_emulator.errors import EmulatorError
from ptx_emulator.machine import Options, execute
from ptx_emulator.report import Launch, Report

Dim = int | tuple[int, ...]


def _dim3(value: Dim, name: str) -> tuple[int, int, int]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(numbers) <= 3 or any(n < 1 for n in numbers):
        raise ValueError(f"{name} must be one to three positive integers; got {value!r}")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _buffer(value: Any) -> tuple[int, int] | None:
    """(address, bytes) of an array that a kernel may reach, or None for a number."""
    if isinstance(value, np.ndarray):
        return value.ctypes.data, value.nbytes
    if hasattr(value, "untyped_storage"):
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    if isinstance(value, ctypes.Array):
        return ctypes.addressof(value), ctypes.sizeof(value)
    return None


def _argument(value: Any, size: int, index: int) -> bytes:
    buffer = _buffer(value)
    if isinstance(value, bytes):
        raw = value
    elif buffer is not None:
        address = value.data_ptr() if hasattr(value, "data_ptr") else buffer[0]
        raw = struct.pack("<Q", address)
    elif isinstance(value, np.generic):
        raw = value.tobytes()
    elif isinstance(value, float):
        raw = struct.pack("<f" if size == 4 else "<d", value)
    elif isinstance(value, int):
        raw = (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    else:
        raise TypeError(f"argument {index}: expected an array, a number or bytes, got {type(value).__name__}")
    if len(raw) != size:
        raise ValueError(f"argument {index}: the kernel declares {size} bytes, got {len(raw)}")
    return raw


def run(
    ptx: str,
    entry: str,
    grid: Dim,
    block: Dim,
    args: Sequence[Any] = (),
    *,
    cluster: Dim = 1,
    shared_bytes: int = 0,
    races: bool = False,
    scheduler: str = "lowest-pc",
    seed: int = 0,
    multiprocessors: int = 8,
    load_waits: bool = True,
    ignore: Collection[str] = (),
    memory: Sequence[Any] = (),
) -> Launch:
    """Runs the kernel `entry` of a PTX module on NumPy arrays or CPU tensors.

    Args:
        ptx: The text of the module.
        entry: The name of the kernel.
        grid, block, cluster: One to three sizes; `cluster` in blocks.
        args: One value per parameter: an array or tensor (its address is passed), an int, a float, a NumPy scalar, or
            the parameter's bytes.
        shared_bytes: The size of the dynamic shared memory.
        races: Look for data races, uninitialised reads and bank conflicts.
        scheduler: "lowest-pc", "random" (a random warp at a time) or "lazy" (asynchronous work completes as late as
            possible).
        seed: For the schedulers "random" and "lazy".
        multiprocessors: Number of resident blocks of a kernel with cluster launch control. `try_cancel` assigns the
            others to resident blocks, or they start when those end.
        load_waits: False: with `races`, a register of `tcgen05.ld` may be used without `tcgen05.wait::ld`; its first
            use counts as the wait.
        ignore: Codes of findings to leave out, such as `["PE103"]`: the launch goes on as if there were none. Those of
            `docs/emulator-findings.md` after which a launch cannot go on are refused.
        memory: More arrays that the kernel may access.

    Raises:
        Fault: the kernel violated a rule of PTX; the subclass names the rule.
        UnsupportedPTX: the emulator does not know an instruction or one of its forms.
        ValueError, TypeError: the arguments do not fit the kernel's parameters, or `ignore` has another string than
            the code of a finding that can be ignored.
    """
    sizes = [p.size for p in load(ptx, entry).kernel.parameters.values()]
    if len(args) != len(sizes):
        raise ValueError(f"{entry} takes {len(sizes)} arguments, got {len(args)}")
    values = [_argument(value, size, i) for i, (value, size) in enumerate(zip(args, sizes, strict=True))]
    buffers = [_buffer(x) for x in [*args, *memory]]
    ranges = {(a, a + n) for a, n in (b for b in buffers if b is not None)}
    options = Options(races, scheduler, seed, multiprocessors, load_waits, ignore)
    dimensions = _dim3(grid, "grid"), _dim3(block, "block"), _dim3(cluster, "cluster")
    return execute(ptx, entry, *dimensions, shared_bytes, values, ranges=ranges, options=options, report=Report())


@contextlib.contextmanager
def emulate(
    arch: str = "sm_90a",
    *,
    races: bool = False,
    scheduler: str = "lowest-pc",
    seed: int = 0,
    multiprocessors: int = 8,
    load_waits: bool = True,
    ignore: Collection[str] = (),
    memory: Sequence[Any] = (),
) -> Iterator[Report]:
    """Emulates the CuTe DSL kernels that are compiled, and called on CPU tensors, inside this block.

    Plain `cute.compile` and `--enable-tvm-ffi` both work. A kernel compiled inside one block may be called inside a
    later one. The block belongs to the thread that entered it (to its context, in the sense of `contextvars`); other
    threads can be in separate blocks, of any architecture, at the same time.

    Args:
        arch: What the DSL compiles for: "sm_90a" or "sm_100a".
        races, scheduler, seed: As for `run`.
        multiprocessors: Number of SMs that the kernel's host code sees. With cluster launch control it is also the
            number of resident blocks.
        load_waits: False lets a kernel leave the wait for `tcgen05.ld` to the compiler that comes after PTX, as some of
            NVIDIA's kernels do.
        ignore: As for `run`.
        memory: Arrays that kernels may access besides the storages of all live CPU tensors.

    Yields:
        A `Report`, to which every launch is added.

    Raises:
        Fault: a kernel violated a rule of PTX. The call that launched the kernel raises it; for a call of the bare
            TVM-FFI function, the end of the block raises it.
        ValueError: no such architecture or scheduler, or a code that cannot be ignored.
        EmulatorError: the thread is inside such a block already.
    """
    from ptx_emulator.runtime.hook import CAPABILITY, HOOK, Session

    if arch not in CAPABILITY:
        raise ValueError(f"arch must be one of {', '.join(CAPABILITY)}; got {arch!r}")
    options = Options(races, scheduler, seed, multiprocessors, load_waits, ignore)
    if HOOK.session is not None:
        raise EmulatorError("emulate blocks do not nest")
    buffers = [_buffer(x) for x in memory]
    ranges = {(b[0], b[0] + b[1]) for b in buffers if b is not None}
    session = Session(arch, options, ranges)
    HOOK.enter(session)
    try:
        yield session.report
        HOOK.raise_pending()
    finally:
        HOOK.leave()
