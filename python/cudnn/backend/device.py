"""Device descriptions that graphs are built for, and kernel caches that they are built with."""

from __future__ import annotations

import functools
import json
import threading
from typing import Any

from cudnn.backend.attributes import Attribute
from cudnn.backend.descriptor import Descriptor
from cudnn.backend.enums import DescriptorType
from cudnn.errors import make_error


class DeviceProperties:
    """Describes the device to build for, so that plans can be built on a machine without it."""

    def __init__(self, source: int | str | bytes) -> None:
        """From the ordinal of a device of this machine, or from the JSON text that ``serialize`` gave."""
        is_ordinal = isinstance(source, int)
        attribute = Attribute.DEVICEPROP_DEVICE_ID if is_ordinal else Attribute.DEVICEPROP_JSON_REPRESENTATION
        self.descriptor = Descriptor.make(DescriptorType.DEVICEPROP, {attribute: source})

    @functools.cached_property
    def sm_version(self) -> int:
        """Compute capability, 90 for 9.0."""
        return json.loads(self.serialize())["deviceVer"] // 10

    def serialize(self) -> str:
        """The description as JSON text."""
        return self.descriptor.get(Attribute.DEVICEPROP_JSON_REPRESENTATION).decode()


def create_device_properties(source: int | str) -> DeviceProperties:
    """The properties of device number ``source``, or those in a JSON text written by ``serialize()``."""
    return DeviceProperties(source)


class KernelCache:
    """Kernels compiled for one graph topology, shared by graphs that differ in shapes only."""

    def __init__(self) -> None:
        self._descriptor: Descriptor | None = None
        self._finalized = False
        self._lock = threading.Lock()

    @property
    def descriptor(self) -> Descriptor:
        """The backend descriptor, created at first use."""
        if self._descriptor is None:
            self._descriptor = Descriptor(DescriptorType.KERNEL_CACHE)
        return self._descriptor

    def attach(self, operation_graph: Descriptor) -> None:
        """Binds the cache to the topology of the first graph built with it; later calls change nothing."""
        with self._lock:
            if not self._finalized:
                self.descriptor.set(Attribute.KERNEL_CACHE_OPERATION_GRAPH, operation_graph)
                self.descriptor.finalize()
                self._finalized = True

    def _get(self, attribute: Attribute) -> Any:
        if not self._finalized:
            got, hint = "a cache that no graph was built with", "build a graph that has it as kernel_cache, on cuDNN"
            raise make_error(RuntimeError, "KernelCache", "contents", got, "a cache with kernels", hint)
        return self.descriptor.get(attribute)

    def serialize(self) -> str:
        """The cache as JSON text, for ``deserialize`` in another process.

        Raises:
            RuntimeError: no graph was built with it, or on the reference executor alone, which compiles nothing.
        """
        return self._get(Attribute.KERNEL_CACHE_JSON_REPRESENTATION).decode()

    def deserialize(self, text: str) -> None:
        """Fills a fresh cache.

        Raises:
            RuntimeError: the cache has been filled or used in a build before.
        """
        with self._lock:
            if self._descriptor is not None:
                raise RuntimeError(
                    "KernelCache.deserialize: got a cache in use; allowed: a fresh one. "
                    "To fix it, call create_kernel_cache()."
                )
            self.descriptor.set(Attribute.KERNEL_CACHE_JSON_REPRESENTATION, text)

    def revision(self) -> int:
        """A number that grows with each kernel added. Needs cuDNN 9.27."""
        return self._get(Attribute.KERNEL_CACHE_REVISION)

    def size(self) -> int:
        """How many kernels the cache holds. Needs cuDNN 9.27."""
        return self._get(Attribute.KERNEL_CACHE_ENTRY_COUNT)


def create_kernel_cache() -> KernelCache:
    """An empty kernel cache, to be passed to graphs as ``kernel_cache=``."""
    return KernelCache()
