"""Loads the stub driver where there is none, before anything can load libcudnn; skips what a machine cannot run."""

from __future__ import annotations

import hypothesis
import pytest

from support import driver

# A first call may load a library or compile a kernel: no time limit on single examples.
hypothesis.settings.register_profile("project", deadline=None)
hypothesis.settings.load_profile("project")

_NO_DRIVER = driver.load_stub_driver()

from cudnn.backend import handle, library  # noqa: E402
from cudnn.backend.device import DeviceProperties  # noqa: E402
from cudnn.errors import CudnnLibraryError  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not handle.gpu_available():
        skip = pytest.mark.skip(reason="no NVIDIA GPU: the CUDA driver is missing or sees no device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


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
    return DeviceProperties(driver.device_json(request.param, libcudnn.version))


@pytest.fixture(scope="session")
def h200(libcudnn: library.Library) -> DeviceProperties:
    """An H200, described to cuDNN."""
    return DeviceProperties(driver.device_json("h200", libcudnn.version))


@pytest.fixture(scope="session")
def b200(libcudnn: library.Library) -> DeviceProperties:
    """A B200, described to cuDNN."""
    return DeviceProperties(driver.device_json("b200", libcudnn.version))
