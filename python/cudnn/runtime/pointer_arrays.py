"""Pointer arrays on a device: the addresses of tensors, for ptr-array kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.multiprocessing.reductions import StorageWeakRef

from cudnn.lazy import torch
from cudnn.runtime import launch
from cudnn.runtime.launch_capture import outside
from cudnn.runtime.run import DEFAULT_STREAM, persistent

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _PointerArray:
    """Addresses of tensors, the memory of the first of them, and where it begins there."""

    addresses: Tensor
    memory: StorageWeakRef
    offset: int


_TABLES: dict[Any, _PointerArray] = {}
MOVES = 4  # tables kept of a storage that gets other memory, as one that is resized to 0 and back


Spread = Callable[[Sequence[int]], Sequence[int | range]]
"""Addresses in the memory of tensors, from the tensors' addresses. A range stands for all its addresses."""


def pointers(tensors: Sequence[Tensor], spread: Spread = tuple) -> Tensor:
    """The addresses of tensors, or those that ``spread`` makes of them, on their device: as long as the first one's
    memory is there, since a CUDA graph that reads them cannot make them. Where a storage gets other memory, they are
    kept for its last four places.

    PyTorch's allocator is told of other streams than the default one that read them, so that their memory is not used
    again too early.
    """
    return outside(functools.partial(_pointers, spread), *tensors)[0]


def _pointers(spread: Spread, *tensors: Tensor) -> tuple[Tensor]:
    first = tensors[0]
    key = (first.device, *spread([tensor.data_ptr() for tensor in tensors]))
    table = _TABLES.get(key)
    if table is None:
        values = [value for each in key[1:] for value in (each if isinstance(each, range) else (each,))]
        array = persistent(lambda: torch.tensor(values, dtype=torch.int64, device=key[0]))
        table = _PointerArray(array, StorageWeakRef(first.untyped_storage()), int(first.storage_offset()))
        every, memory_key = list(_TABLES.items()), (table.memory.cdata, table.offset, len(key))
        moved = [other for other, old in every if (old.memory.cdata, old.offset, len(other)) == memory_key]
        for other in [*(other for other, old in every if old.memory.expired()), *moved[: 1 - MOVES]]:
            _TABLES.pop(other, None)  # another thread may have been faster
        _TABLES[key] = table
    elif table.memory.expired():  # other tensors lie there now
        table.memory = StorageWeakRef(first.untyped_storage())
    if first.is_cuda and launch.raw_stream(None, first.get_device()) != DEFAULT_STREAM:
        table.addresses.record_stream(torch.cuda.current_stream(first.device))
    return (table.addresses,)
