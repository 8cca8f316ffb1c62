from __future__ import annotations

import json
import time

import pytest

from cudnn.backend import library
from cudnn.backend.device import DeviceProperties, create_device_properties, create_kernel_cache
from cudnn.backend.plan import PlanList
from cudnn.enums import heur_mode
from cudnn.errors import CudnnError
from support import descriptors

pytestmark = pytest.mark.usefixtures("libcudnn")


@pytest.mark.deviceless_919
def test_device_properties_round_trip(device_properties: DeviceProperties) -> None:
    text = device_properties.serialize()
    assert json.loads(text)["deviceVer"] in (900, 1000)
    assert create_device_properties(text).serialize() == text


def test_compute_capability(h200: DeviceProperties, b200: DeviceProperties) -> None:
    assert (h200.sm_version, b200.sm_version) == (90, 100)


def test_incomplete_device_properties_name_what_is_missing() -> None:
    with pytest.raises(CudnnError, match=r"DEVICEPROP failed: .*BAD_PARAM"):
        create_device_properties('{"deviceVer": 900}')


def _build(cache: object, h200: DeviceProperties, m: int) -> float:
    """Its processor time."""
    start = time.process_time()
    graph = descriptors.matmul(m=m, dynamic_shape=True)
    cache.attach(graph.descriptor)  # type: ignore[attr-defined]
    plans = PlanList(graph, device_properties=h200, kernel_cache=cache)  # type: ignore[arg-type]
    plans.add([heur_mode.A])
    plans.build()
    return time.process_time() - start


@pytest.mark.deviceless_919
def test_kernel_cache_spares_compilation(libcudnn: library.Library, h200: DeviceProperties) -> None:
    cache = create_kernel_cache()
    compiled = _build(cache, h200, 128)
    assert min(_build(cache, h200, m) for m in (256, 512, 640)) < compiled / 5

    restored = create_kernel_cache()
    restored.deserialize(cache.serialize())
    again = min(_build(restored, h200, m) for m in (384, 768, 896))
    if libcudnn.version >= 92800:  # cuDNN 9.19 compiles again with a restored cache, at least without a GPU
        assert again < compiled / 5


def test_a_kernel_cache_without_kernels() -> None:
    """What reads it refuses, and it can be filled afterwards."""
    cache = create_kernel_cache()
    for read in (cache.serialize, cache.size, cache.revision):
        with pytest.raises(RuntimeError, match=r"got a cache that no graph was built with; .* build a graph"):
            read()
    assert cache._descriptor is None


def test_a_used_kernel_cache_is_not_filled_again(h200: DeviceProperties) -> None:
    cache = create_kernel_cache()
    _build(cache, h200, 128)
    text = cache.serialize()
    restored = create_kernel_cache()
    restored.deserialize(text)
    for used in (cache, restored):
        with pytest.raises(RuntimeError, match="got a cache in use; allowed: a fresh one"):
            used.deserialize(text)


def test_kernel_cache_counts(libcudnn: library.Library, h200: DeviceProperties) -> None:
    if libcudnn.version < 92700:
        pytest.skip("cuDNN 9.27 brought the counters")
    cache = create_kernel_cache()
    _build(cache, h200, 128)
    assert cache.size() == 1
    assert cache.revision() >= 1
