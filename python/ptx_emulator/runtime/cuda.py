"""`emulate(cuda=True)`: PyTorch and the CUDA bindings answer as if the emulated chip were there.

Inside the block every tensor lies on the CPU and says that it is on "cuda:0". A mode of PyTorch changes the device of
calls and the answers of `is_cuda` and `device`. The functions of `torch.cuda` and of `cuda.bindings` that programs ask
for devices, streams and events are replaced while a block is active, in all threads.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from ptx_emulator.errors import EmulatorError

MEMORY = 141 << 30
SHARED_PER_BLOCK, L2_BYTES = 232448, 50 << 20
_ALREADY = threading.Lock()


@contextlib.contextmanager
def emulated_cuda(arch: str, capability: tuple[int, int], multiprocessors: int) -> Iterator[None]:
    """Within the block, `device="cuda"` is the emulated chip.

    Raises:
        EmulatorError: PyTorch is not imported, or another block with `cuda=True` is active.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise EmulatorError("emulate(cuda=True): import torch before the block")
    for name in ("cuda.bindings.driver", "cuda.bindings.runtime", "cutlass.cute.testing"):
        with contextlib.suppress(ImportError):  # a program may do without
            importlib.import_module(name)
    if not _ALREADY.acquire(blocking=False):
        raise EmulatorError("emulate(cuda=True): another thread is in such a block, and torch.cuda is the process's")
    try:
        with contextlib.ExitStack() as stack:
            for target, names in _answers(torch, arch, capability, multiprocessors):
                for name, value in names.items():
                    if hasattr(target, name):
                        stack.enter_context(_replaced(target, name, value))
            mode, node = _mode(torch), torch.autograd.function.BackwardCFunction
            backward = node.apply

            def apply(this: Any, *arguments: Any) -> Any:
                with mode:  # which the autograd engine leaves
                    return backward(this, *arguments)

            stack.enter_context(_replaced(node, "apply", apply))
            stack.enter_context(mode)
            yield
    finally:
        _ALREADY.release()


@contextlib.contextmanager
def _replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    own = name in vars(target)
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if own:
            setattr(target, name, before)
        else:
            delattr(target, name)


class Stream:
    """The only stream: launches run one after another."""

    cuda_stream = stream_id = device_index = 0
    device_type = 2
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0


class Event:
    """Its time is the host's: how long the emulation took."""

    cuda_event = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return max(1e3 * (end.time - self.time), 1e-3)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


def _answers(
    torch: Any, arch: str, capability: tuple[int, int], multiprocessors: int
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Modules, and what their attributes are while the block is active."""
    stream = Stream()
    properties = SimpleNamespace(
        name=f"ptx_emulator {arch}",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=multiprocessors,
        total_memory=MEMORY,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=SHARED_PER_BLOCK,
        shared_memory_per_multiprocessor=233472,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        L2_cache_size=L2_BYTES,
        is_integrated=False,
        gcnArchName="",
    )

    def answer(value: Any) -> Any:
        return lambda *_, **__: value

    quiet = ("synchronize", "set_device", "empty_cache", "init", "_lazy_init", "reset_peak_memory_stats", "ipc_collect")
    zero = ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    yield (
        torch.cuda,
        {
            "is_available": answer(True),
            "is_initialized": answer(True),
            "device_count": answer(1),
            "get_device_capability": answer(capability),
            "get_device_properties": answer(properties),
            "get_device_name": answer(properties.name),
            "get_arch_list": answer([arch.rstrip("af")]),
            "current_stream": answer(stream),
            "default_stream": answer(stream),
            "stream": lambda *_: contextlib.nullcontext(),
            "device": lambda *_: contextlib.nullcontext(),
            "Stream": Stream,
            "Event": Event,
            "mem_get_info": answer((MEMORY, MEMORY)),
            "is_current_stream_capturing": answer(False),
            "is_bf16_supported": answer(True),
            "manual_seed": lambda seed: torch.default_generator.manual_seed(seed) and None,
            "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed) and None,
            # torch._dynamo, imported later, wants a function of its own for each name.
            **{name: answer(None) for name in quiet},
            **{name: answer(0) for name in zero},
        },
    )
    attributes = {
        "MULTIPROCESSOR_COUNT": multiprocessors,
        "COMPUTE_CAPABILITY_MAJOR": capability[0],
        "COMPUTE_CAPABILITY_MINOR": capability[1],
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": SHARED_PER_BLOCK,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
        "L2_CACHE_SIZE": L2_BYTES,
        "WARP_SIZE": 32,
        "MAX_THREADS_PER_BLOCK": 1024,
        "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
        "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    }

    def attribute(prefix: str, success: Any) -> Any:
        def ask(which: Any, *_: Any) -> Any:
            words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", which.name.removeprefix(prefix)).upper()
            name = words.replace("MULTI_PROCESSOR", "MULTIPROCESSOR")
            if name not in attributes:
                raise EmulatorError(f"emulate(cuda=True): attribute {which.name} of the device is not known")
            return success, attributes[name]

        return ask

    driver, runtime = sys.modules.get("cuda.bindings.driver"), sys.modules.get("cuda.bindings.runtime")
    if driver is not None:
        done = driver.CUresult.CUDA_SUCCESS
        version = 1000 * 13
        yield (
            driver,
            {
                "cuInit": answer((done,)),
                "cuDriverGetVersion": answer((done, version)),
                "cuDeviceGetCount": answer((done, 1)),
                "cuDeviceGet": answer((done, driver.CUdevice(0))),
                "cuDeviceGetName": answer((done, properties.name.encode())),
                "cuDeviceGetAttribute": attribute("CU_DEVICE_ATTRIBUTE_", done),
                "cuCtxGetCurrent": answer((done, driver.CUcontext(1))),
                "cuCtxGetDevice": answer((done, driver.CUdevice(0))),
                "cuDevicePrimaryCtxRetain": answer((done, driver.CUcontext(1))),
                "cuCtxSynchronize": answer((done,)),
                "cuStreamCreate": answer((done, driver.CUstream(0))),
                "cuStreamSynchronize": answer((done,)),
                "cuStreamDestroy": answer((done,)),
            },
        )
    if runtime is not None:
        fine = runtime.cudaError_t.cudaSuccess
        yield (
            runtime,
            {
                "cudaGetDevice": answer((fine, 0)),
                "cudaSetDevice": answer((fine,)),
                "cudaGetDeviceCount": answer((fine, 1)),
                "cudaRuntimeGetVersion": answer((fine, 13000)),
                "cudaDriverGetVersion": answer((fine, 13000)),
                "cudaDeviceGetAttribute": attribute("cudaDevAttr", fine),
                "cudaDeviceSynchronize": answer((fine,)),
                "cudaStreamCreate": answer((fine, runtime.cudaStream_t(0))),
                "cudaStreamSynchronize": answer((fine,)),
                "cudaGetLastError": answer((fine,)),
            },
        )
    testing = sys.modules.get("cutlass.testing")
    if testing is not None:
        yield testing, {"benchmark": _benchmark}
        yield sys.modules["cutlass.cute.testing"], {"benchmark": _benchmark}


def _benchmark(function: Any, *_: Any, workspace_generator: Any = None, **options: Any) -> float:
    """`cute.testing.benchmark`: one call, whose duration means nothing. Microseconds."""
    arguments = workspace_generator() if workspace_generator is not None else options.get("kernel_arguments")
    start = time.perf_counter()
    if arguments is None:
        function()
    else:
        function(*arguments.args, **arguments.kwargs)
    return 1e6 * (time.perf_counter() - start)


def _mode(torch: Any) -> Any:
    """A mode of PyTorch in which the CPU is called "cuda:0"."""
    here, chip = torch.device("cpu"), torch.device("cuda", 0)
    tensor = torch.Tensor
    answers = {tensor.is_cuda.__get__: True, tensor.device.__get__: chip, tensor.is_cpu.__get__: False}
    numbers = {tensor.get_device: 0, tensor.is_pinned: False}
    same = {tensor.cuda, tensor.pin_memory}

    def place(value: Any) -> Any:
        """The CPU for what names the chip."""
        if isinstance(value, torch.device):
            return here if value.type == "cuda" else value
        if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
            return here
        return value

    class Chip(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if function in answers:
                return answers[function]
            if function in numbers:
                return numbers[function]
            if function in same:
                return args[0]
            if function is tensor.record_stream:
                return None
            if function is tensor.cpu:
                return args[0].clone()
            if function is tensor.to:
                devices = [x for x in (*args[1:2], kwargs.get("device")) if isinstance(x, (str, torch.device))]
                if any(str(device) == "cpu" for device in devices):  # away from the chip: always a copy
                    kwargs["copy"] = True
                args = (args[0], *map(place, args[1:]))
            if "device" in kwargs:
                kwargs["device"] = place(kwargs["device"])
            return function(*args, **kwargs)

    return Chip()
