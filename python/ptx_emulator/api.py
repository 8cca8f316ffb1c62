"""`emulate` for CuTe DSL kernels, `run_ptx` for PTX text."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ptx_emulator.codegen import load
from ptx_emulator.errors import EmulatorError, Fault
from ptx_emulator.machine import Options, execute
from ptx_emulator.report import Launch, Report

Dim = int | tuple[int, ...]


def _dim3(value: Dim, name: str) -> tuple[int, int, int]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(numbers) <= 3 or any(n < 1 for n in numbers):
        raise ValueError(f"{name} must be one to three positive integers; got {value!r}")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _block(value: Dim | None) -> tuple[int, int, int] | None:
    if value is None:
        return None
    numbers = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(numbers) <= 3 or any(n < 0 for n in numbers):
        raise ValueError(f"timeline must be the one to three coordinates of a block; got {value!r}")
    x, y, z = (*numbers, 0, 0)[:3]
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


def _options(depth: int, load_waits: bool | None, around: Options | None, given: dict[str, Any]) -> Options:
    """`around`: of the block whose options hold for those not given. `depth`: frames up to the caller's, to warn."""
    chosen = {name: value for name, value in given.items() if value is not None}
    if load_waits is not None:
        text = 'load_waits is deprecated: load_waits=False is warn=["PE105"]'
        warnings.warn(text, DeprecationWarning, stacklevel=depth + 2)
    if load_waits is False:
        chosen["warn"] = [*chosen.get("warn", ()), "PE105"]
    return replace(around or Options(), **chosen)


def run_ptx(
    text: str,
    kernel: str,
    grid: Dim,
    block: Dim,
    args: Sequence[Any] = (),
    *,
    cluster: Dim = 1,
    shared_bytes: int = 0,
    races: bool | None = None,
    scheduler: str | None = None,
    seed: int | None = None,
    multiprocessors: int | None = None,
    ignore: Collection[str] | None = None,
    warn: Collection[str] | None = None,
    on_error: str | None = None,
    memory: Sequence[Any] = (),
    timeline: Dim | None = None,
    load_waits: bool | None = None,
) -> Launch:
    """Runs a kernel of a PTX module on NumPy arrays or CPU tensors.

    Inside an `emulate` block, and so in a test with the mark `emulate`, options that are not given are those of the
    block, and the launch is added to the block's report.

    Args:
        text: The module.
        kernel: The name of the entry.
        grid, block, cluster: One to three sizes; `cluster` in blocks.
        args: One value per parameter: an array or tensor (its address is passed), an int, a float, a NumPy scalar, or
            the parameter's bytes.
        shared_bytes: The size of the dynamic shared memory.
        races: Look for data races, uninitialised reads and bank conflicts (False).
        scheduler: "lowest-pc" (the default), "random" (a random warp at a time) or "lazy" (asynchronous work completes
            as late as possible).
        seed: For the schedulers "random" and "lazy" (0).
        multiprocessors: Number of resident blocks of a kernel with cluster launch control (8). `try_cancel` assigns
            the others to resident blocks, or they start when those end.
        ignore: Codes of findings to leave out, such as `["PE103"]`: the launch goes on as if there were none. Those of
            `docs/emulator-findings.md` after which a launch cannot go on are refused.
        warn: Codes of findings that are warnings and no errors. `["PE105"]` lets a kernel leave the wait for
            `tcgen05.ld` to ptxas, as some of NVIDIA's kernels do.
        on_error: "collect" (the default): the launch goes on where it can, and its end raises the first error, with all
            others in its message and in its `findings`. "raise": the first error is raised at once. "report": nothing
            is raised, the errors are in the result.
        memory: More arrays that the kernel may access.
        timeline: Coordinates of a thread block, as 0 or (1, 0): the result's `timeline` has what its warps did.
        load_waits: Deprecated: `False` is `warn=["PE105"]`.

    Returns:
        What the kernel did, with its findings.

    Raises:
        Fault: the kernel violated a rule of PTX; the subclass names the rule.
        UnsupportedPTX: the emulator does not know an instruction or one of its forms.
        EmulatorError: the module's `.target` is another chip than that of the block around.
        ValueError, TypeError: the arguments do not fit the kernel's parameters, an option has no such value, or
            `ignore` or `warn` has another string than the code of a finding behind which a launch goes on.
    """
    from ptx_emulator.runtime.hook import HOOK

    sizes = [p.size for p in load(text, kernel).kernel.parameters.values()]
    if len(args) != len(sizes):
        raise ValueError(f"{kernel} takes {len(sizes)} arguments, got {len(args)}")
    values = [_argument(value, size, i) for i, (value, size) in enumerate(zip(args, sizes, strict=True))]
    buffers = [_buffer(x) for x in [*args, *memory]]
    ranges = {(a, a + n) for a, n in (b for b in buffers if b is not None)}
    session = HOOK.session
    options = _options(
        1,
        load_waits,
        session.options if session is not None else None,
        {
            "races": races,
            "scheduler": scheduler,
            "seed": seed,
            "multiprocessors": multiprocessors,
            "ignore": ignore,
            "warn": warn,
            "on_error": on_error,
            "timeline": _block(timeline),
        },
    )
    if session is not None:
        HOOK.check_target(text, kernel)
        ranges |= session.ranges
    report = Report() if session is None else session.report
    dimensions = _dim3(grid, "grid"), _dim3(block, "block"), _dim3(cluster, "cluster")
    launch = execute(text, kernel, *dimensions, shared_bytes, values, ranges=ranges, options=options, report=report)
    Report([launch]).raise_errors()
    return launch


def run_triton(compiled: Any, grid: Dim, args: Sequence[Any] = (), **options: Any) -> Launch:
    """Runs a compiled Triton kernel on NumPy arrays or CPU tensors.

    Triton compiles without a GPU: `triton.compile(ASTSource(...), target=GPUTarget("cuda", 90, 32))`.

    Args:
        compiled: What `triton.compile` returns.
        grid: One to three numbers of programs.
        args: The kernel's arguments without constants, as for `run_ptx`.
        options: `races`, `scheduler`, `seed`, `ignore`, `warn`, `on_error` and `memory` of `run_ptx`.

    Returns:
        What the kernel did, with its findings.

    Raises:
        Fault, UnsupportedPTX, ValueError, TypeError: as `run_ptx`.
    """
    text, metadata = compiled.asm["ptx"], compiled.metadata
    x, y, z = _dim3(grid, "grid")
    ctas = getattr(metadata, "num_ctas", 1)
    scratch = []  # which Triton's launcher allocates: a part for each program, on behalf of the compiler
    for name in ("global_scratch_size", "profile_scratch_size"):
        size = getattr(metadata, name, 0) or 0
        scratch.append(np.zeros(size * x * y * z * ctas, np.uint8) if size else 0)
    count = len(load(text, metadata.name).kernel.parameters)
    given = [*args, *scratch[: max(count - len(args), 0)]]
    return run_ptx(
        text,
        metadata.name,
        (x * ctas, y, z),
        32 * metadata.num_warps,
        given,
        cluster=ctas,
        shared_bytes=metadata.shared,
        **options,
    )


def run(ptx: str, entry: str, grid: Dim, block: Dim, args: Sequence[Any] = (), **options: Any) -> Launch:
    """Deprecated: `run_ptx`."""
    warnings.warn("ptx_emulator.run is deprecated: use run_ptx", DeprecationWarning, stacklevel=2)
    return run_ptx(ptx, entry, grid, block, args, **options)


@contextlib.contextmanager
def emulate(
    arch: str = "sm_90a",
    *,
    races: bool = False,
    scheduler: str = "lowest-pc",
    seed: int = 0,
    multiprocessors: int = 8,
    ignore: Collection[str] = (),
    warn: Collection[str] = (),
    on_error: str = "collect",
    memory: Sequence[Any] = (),
    timeline: Dim | None = None,
    cuda: bool = False,
    report: Report | None = None,
    load_waits: bool | None = None,
) -> Iterator[Report]:
    """Emulates the CuTe DSL kernels that are compiled, and called on CPU tensors, inside this block.

    Plain `cute.compile` and `--enable-tvm-ffi` both work. A kernel compiled inside one block may be called inside a
    later one. The block belongs to the thread that entered it (to its context, in the sense of `contextvars`); other
    threads can be in separate blocks, of any architecture, at the same time.

    Args:
        arch: What the DSL compiles for: "sm_90a" or "sm_100a".
        races, scheduler, seed, ignore, warn: As for `run_ptx`.
        multiprocessors: Number of SMs that the kernel's host code sees. With cluster launch control it is also the
            number of resident blocks.
        on_error: "collect": the program goes on behind an error where the launch does, and the end of the block raises
            the first one, with all others in its message and in its `findings`. An error that ends a launch is raised
            by the call. "raise": the call raises the first error at once. "report": nothing is raised; the errors are
            in the report.
        memory: Arrays that kernels may access besides the storages of all live CPU tensors.
        timeline: Coordinates of a thread block: each launch's `timeline` has what the warps of this block did.
        cuda: Programs for `device="cuda"` run: PyTorch's tensors are on the CPU and say that they are on "cuda:0";
            `torch.cuda` and `cuda.bindings` answer for the emulated chip, in all threads. Import torch before.
        report: The report of an earlier block, to go on with.
        load_waits: Deprecated: `False` is `warn=["PE105"]`.

    Yields:
        A `Report`, to which every launch is added.

    Raises:
        Fault: a kernel violated a rule of PTX. If the block itself raises something else, this is its `__cause__`.
        ValueError: no such architecture or option, or a code that cannot be ignored.
        EmulatorError: the thread is inside such a block already.
    """
    from ptx_emulator.runtime.cuda import emulated_cuda
    from ptx_emulator.runtime.hook import CAPABILITY, HOOK, Session

    if arch not in CAPABILITY:
        raise ValueError(f"arch must be one of {', '.join(CAPABILITY)}; got {arch!r}")
    options = _options(
        2,
        load_waits,
        None,
        {
            "races": races,
            "scheduler": scheduler,
            "seed": seed,
            "multiprocessors": multiprocessors,
            "ignore": ignore,
            "warn": warn,
            "on_error": on_error,
            "timeline": _block(timeline),
        },
    )
    if HOOK.session is not None:
        raise EmulatorError("emulate blocks do not nest")
    buffers = [_buffer(x) for x in memory]
    ranges = {(b[0], b[0] + b[1]) for b in buffers if b is not None}
    session = Session(arch, options, ranges, Report(arch=arch) if report is None else report)
    HOOK.enter(session)
    try:
        with emulated_cuda(arch, CAPABILITY[arch], multiprocessors) if cuda else contextlib.nullcontext():
            yield session.report
        HOOK.raise_pending()
    except Fault:
        raise
    except Exception as error:  # an assertion about a wrong result, say: the errors of the kernels tell why
        try:
            session.report.raise_errors()
        except Fault as fault:
            raise fault from error
        raise
    else:
        session.report.raise_errors()
    finally:
        HOOK.leave()
