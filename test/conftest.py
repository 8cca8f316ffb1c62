"""Loads the stub driver without a GPU, before anything loads libcudnn; skips tests that this machine cannot run."""

from __future__ import annotations

import collections
import gc
import os
from collections.abc import Iterator
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core: threads of PyTorch would wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from support import driver

_NO_DRIVER = driver.load_stub_driver()

from cudnn.backend import handle, library  # noqa: E402
from cudnn.backend.device import DeviceProperties  # noqa: E402
from cudnn.errors import CudnnLibraryError  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="kernels in every configuration; over an hour of one core")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: only with --full")
    full = config.getoption("full")
    # The same examples each time, but with --full. A first call may load a library or compile a kernel: no time limits.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("project", deadline=None, derandomize=not full, suppress_health_check=slow)
    hypothesis.settings.load_profile("project")
    if full:
        os.environ["CUDNN_TESTS_FULL"] = "1"  # for support/selection.py, here and in xdist's workers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file stay in a process, which has compiled their kernels, until another one has nothing left."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay: the garbage collector, which took a third of this time, never looks at them."""
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(10_000)  # instead of 700: compilers make many objects
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("full"):
        skipped = {item for item in items if item.get_closest_marker("full")} | other_devices(items)
        config.hook.pytest_deselected(items=[item for item in items if item in skipped])
        items[:] = [item for item in items if item not in skipped]
    if not handle.gpu_available():
        skip = pytest.mark.skip(reason="no NVIDIA GPU: the CUDA driver is missing or sees no device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def other_devices(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of tests with many cases for each device: those of the other device, alternating h200 and b200."""
    found = collections.defaultdict[str, list[tuple[str, str, pytest.Item]]](list)
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and "device_properties" in call.params:
            device, _, case = call.id.partition("-")
            found[item.nodeid.partition("[")[0]].append((case, device, item))
    skipped = set()
    for group in found.values():
        cases = sorted({case for case, _, _ in group})
        if len(cases) > 2:
            turn = {case: driver.DEVICES[index % 2] for index, case in enumerate(cases)}
            skipped |= {item for case, device, item in group if device != turn[case]}
    return skipped


def described(device: str, version: int) -> DeviceProperties:
    """A device described to cuDNN, on a machine without a GPU.

    With a real device present, cuDNN loads what it builds for the described one into the driver, which refuses or
    crashes.
    """
    if handle.gpu_available():
        pytest.skip("a GPU is here: plans for described devices are built on machines without one")
    return DeviceProperties(driver.device_json(device, version))


_FOUND: list[library.Library] = []
_candidates = library._candidates


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a GPU, only tests that request libcudnn find it: the others must pass on machines without it."""
    if library._library is not None:
        _FOUND[:] = [library._library]
    asks = handle.gpu_available() or "libcudnn" in getattr(item, "fixturenames", ())
    library._library = _FOUND[0] if asks and _FOUND else None
    library._candidates = _candidates if asks else lambda: iter(())


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test generates the same random numbers each time."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither use nor fill the user's compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDNN_KERNEL_CACHE", str(tmp_path_factory.mktemp("kernels")))
        patch.setenv("CUDNN_COMPILE_JOBS", "0")  # xdist has a process for each core
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_source_lines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels for the emulator compile in a fourth less time without; with ``--full``, messages of faults have them."""
    from ptx_emulator.runtime.hook import HOOK

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HOOK, "source_lines", bool(request.config.getoption("full")))
        yield


@pytest.fixture
def source_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that read the lines of source in messages of faults."""
    from ptx_emulator.runtime.hook import HOOK

    monkeypatch.setattr(HOOK, "source_lines", True)


@pytest.fixture(scope="session")
def libcudnn() -> library.Library:
    """libcudnn, ready to build plans with or without a GPU."""
    try:
        loaded = library.load()
    except CudnnLibraryError as error:
        pytest.skip(str(error))
    if _NO_DRIVER:
        pytest.skip(_NO_DRIVER)
    return loaded


@pytest.fixture(scope="session", params=driver.DEVICES)
def device_properties(request: pytest.FixtureRequest, libcudnn: library.Library) -> DeviceProperties:
    """An H200, then a B200, described to cuDNN."""
    return described(request.param, libcudnn.version)


@pytest.fixture(scope="session")
def h200(libcudnn: library.Library) -> DeviceProperties:
    """An H200, described to cuDNN."""
    return described("h200", libcudnn.version)


@pytest.fixture(scope="session")
def b200(libcudnn: library.Library) -> DeviceProperties:
    """A B200, described to cuDNN."""
    return described("b200", libcudnn.version)
