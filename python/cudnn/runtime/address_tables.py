"""Tables of addresses on a device: what kernels read of tensors that lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.multiprocessing.reductions import StorageWeakRef

from cudnn.lazy import torch
from cudnn.runtime import launch
from cudnn.runtime.run import DEFAULT_STREAM, lasting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Table:
    """Addresses of tensors, the memory of the first of them, and where it begins there."""

    addresses: Tensor
    memory: StorageWeakRef
    place: int


_TABLES: dict[Any, _Table] = {}
MOVES = 4  # tables kept of a storage that gets other memory, as one that is resized to 0 and back


def pointers(tensors: Sequence[Tensor]) -> Tensor:
    """The addresses of tensors, on their device: as long as the first one's memory is there, since a CUDA graph that
    reads them cannot make them. Where a storage gets other memory, they are kept for its last four places.

    PyTorch's allocator is told of other streams than the default one that read them, so that their memory is not used
    again too early.
    """
    first = tensors[0]
    key = (first.device, *(tensor.data_ptr() for tensor in tensors))
    found = _TABLES.get(key)
    if found is None:
        made = lasting(lambda: torch.tensor(key[1:], dtype=torch.int64, device=key[0]))
        found = _Table(made, StorageWeakRef(first.untyped_storage()), int(first.storage_offset()))
        every, like = list(_TABLES.items()), (found.memory.cdata, found.place, len(key))
        moved = [other for other, old in every if (old.memory.cdata, old.place, len(other)) == like]
        for other in [*(other for other, old in every if old.memory.expired()), *moved[: 1 - MOVES]]:
            _TABLES.pop(other, None)  # another thread may have been faster
        _TABLES[key] = found
    elif found.memory.expired():  # other tensors lie there now
        found.memory = StorageWeakRef(first.untyped_storage())
    if first.is_cuda and launch.raw_stream(None, first.get_device()) != DEFAULT_STREAM:
        found.addresses.record_stream(torch.cuda.current_stream(first.device))
    return found.addresses
