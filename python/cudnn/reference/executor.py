"""Runs the nodes of a graph one after the other with PyTorch."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cudnn.arrays.check import check_array, span_bytes
from cudnn.backend.handle import resolve
from cudnn.datatypes import _is_torch_tensor, element_bits
from cudnn.enums import data_type
from cudnn.errors import make_error
from cudnn.full_precision import full_precision
from cudnn.lazy import torch
from cudnn.reference.memory import elements, memory, pack_bits, read, rounded, torch_type, unpack_bits, write
from cudnn.strided import as_input, check_output

if TYPE_CHECKING:
    from cudnn.pygraph.node import Node
    from cudnn.pygraph.tensor import Tensor

_log = logging.getLogger("cudnn")
_said = False


class ReferenceProgram:
    """A graph ready to run with PyTorch, on the device of the tensors that a call brings.

    Precision follows the graph: arithmetic in each node's compute type, every tensor, virtual ones too, rounded to its
    data type. It has one plan, named ``reference``, and needs no workspace.
    """

    def __init__(self, nodes: Sequence[Node], keys_by_uid: Callable[[Mapping[Any, Any]], dict[int, Any]]) -> None:
        self._keys_by_uid = keys_by_uid
        self.plan: str | None = None  # its name, once create_execution_plans() has been called
        self._nodes = list(nodes)
        self._any_address = any(node.any_address for node in self._nodes)
        produced = {id(tensor) for node in nodes for tensor in node.outputs.values()}
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._pools = {node.inputs[port].uid for node in nodes for port in node.pool_ports}
        self._rows: dict[int, Tensor] = {}  # of ragged outputs: the tensor with the rows of each entry
        for node in nodes:
            for tensor in (*node.inputs.values(), *(t.ragged_offset for t in node.tensors() if t.ragged_offset)):
                if id(tensor) not in produced and tensor.value is None:
                    assert tensor.uid is not None
                    self._inputs[tensor.uid] = tensor
            for port, tensor in node.outputs.items():
                if not tensor.is_virtual:
                    assert tensor.uid is not None
                    self._outputs[tensor.uid] = tensor
                    rows = node.rows(port)
                    if rows is not None:
                        self._rows[tensor.uid] = rows

    def make_plan(self, engine_id: int = 0, knobs: Mapping[Any, int] | None = None) -> None:
        """Makes the one plan. RuntimeError for another engine than number 0, and for knobs, which it does not have."""
        if engine_id or knobs:
            got = f"engine {engine_id} with knobs {dict(knobs or {})}"
            raise make_error(RuntimeError, "reference executor", "plan", got, "engine 0, its only one, without knobs")
        self.plan = "reference"

    @property
    def uids(self) -> list[int]:
        """The tensors that a call brings, in ascending order."""
        return sorted({*self._inputs, *self._outputs})

    def execute(self, variant_pack: Mapping[Any, Any], workspace: Any = None, handle: Any = None) -> None:
        """Reads inputs from, and writes outputs to, the memory given by tensor or uid. Needs no workspace or handle."""
        global _said
        if handle is not None:
            resolve(handle)  # refuses one that was destroyed, as on a GPU
        buffers = {uid: variant_pack[key] for uid, key in self._keys_by_uid(variant_pack).items()}
        if not _said:
            _said = True
            _log.warning("this graph runs on the reference executor (PyTorch), which is correct but not fast")
        device = self._check(buffers)
        with torch.no_grad(), full_precision():
            values = {
                uid: self._load(tensor, buffers, device)
                for uid, tensor in self._inputs.items()
                if buffers.get(uid) is not None
            }
            results: dict[int, Any] = {}
            for node in self._nodes:
                results.update(self._run(node, values, device))
            for uid, tensor in self._outputs.items():
                rows = self._rows.get(uid)
                self._store(tensor, results[uid], buffers, device, None if rows is None else values[rows.get_uid()])

    def _check(self, buffers: dict[int, Any]) -> Any:
        """Refuses data that do not fit, and puts copies in the place of inputs that show other values than memory has.

        Returns the device.
        """
        for direction, tensors in (("input", self._inputs), ("output", self._outputs)):
            for uid, tensor in tensors.items():
                if buffers.get(uid) is None:
                    raise make_error(
                        ValueError,
                        "execute",
                        f"{direction} tensor {tensor.name!r} (uid {uid})",
                        "no data",
                        "a tensor for every input and output",
                        f"add it to the dict under uid {uid}",
                    )
                data = buffers[uid]
                if not _is_torch_tensor(data) and not hasattr(data, "__dlpack__"):
                    got = "an address" if isinstance(data, int) else type(data).__name__
                    raise make_error(
                        TypeError,
                        "execute",
                        f"{direction} tensor {tensor.name!r} (uid {uid})",
                        got,
                        "a torch.Tensor or an object with __dlpack__; addresses on a GPU only",
                        "pass one of these",
                    )
                label = f"tensor {tensor.name!r} (uid {uid})"
                if direction == "input":
                    buffers[uid] = as_input("execute", label, data)
                else:
                    check_output("execute", label, data)
        big = [
            (uid, buffers[uid])
            for uid, tensor in {**self._inputs, **self._outputs}.items()
            if _is_torch_tensor(buffers[uid]) and not tensor.is_pass_by_value
        ]
        devices = {str(data.device) for _, data in big}
        if len(devices) > 1:
            listing = ", ".join(f"uid {uid} on {data.device}" for uid, data in big)
            raise make_error(ValueError, "execute", "tensors", listing, "one device for all", "move them to one device")
        for uid, tensor in {**self._inputs, **self._outputs}.items():
            check_array(tensor, buffers[uid], f"tensor {tensor.name!r} (uid {uid})", uid in self._pools)
        self._check_places(buffers)
        return big[0][1].device if big else torch.device("cpu")

    def _check_places(self, buffers: Mapping[int, Any]) -> None:
        """Refuses what cuDNN does: memory off the tensor's alignment, and outputs over parts of other tensors."""
        raw: dict[int, Any] = {}
        for uid, tensor in {**self._inputs, **self._outputs}.items():
            if tensor.is_pass_by_value or tensor.ragged_offset is not None:
                continue
            where = f"tensor {tensor.name!r} (uid {uid})"
            nbytes = 0 if tensor.data_type is data_type.BOOLEAN else span_bytes(tensor)
            raw[uid] = memory(buffers[uid], nbytes, where)
            if math.prod(tensor.dim) > 1 and raw[uid].data_ptr() % tensor.alignment and not self._any_address:
                raise make_error(
                    ValueError,
                    "execute",
                    where,
                    f"address {raw[uid].data_ptr():#x}",
                    f"a multiple of {tensor.alignment} bytes, the tensor's alignment",
                    "pass a copy, or call set_alignment() before the graph is built",
                )
        for uid in self._outputs.keys() & raw.keys():
            for other in raw.keys() - {uid}:
                if self._collide(uid, other, raw):
                    overlapped = self._inputs.get(other) or self._outputs[other]
                    raise make_error(
                        ValueError,
                        "execute",
                        f"output tensor {self._outputs[uid].name!r} (uid {uid})",
                        f"memory that tensor {overlapped.name!r} (uid {other}) uses",
                        "separate memory, or that of one whole input, to work in place",
                        "allocate another tensor",
                    )

    def _collide(self, uid: int, other: int, raw: Mapping[int, Any]) -> bool:
        """Whether an output shares bytes with another tensor, unless it takes the place of an input."""
        region, other_region = raw[uid], raw[other]
        start, other_start = region.data_ptr(), other_region.data_ptr()
        if (
            region.device != other_region.device
            or start + region.numel() <= other_start
            or other_start + other_region.numel() <= start
        ):
            return False
        output = self._outputs[uid]
        tensor = self._inputs.get(other) or self._outputs[other]
        in_place = other in self._inputs and start == other_start and output.data_type is tensor.data_type
        if in_place and _axes(output) == _axes(tensor):
            return False
        base = min(start, other_start)
        taken = torch.zeros(
            max(start + region.numel(), other_start + other_region.numel()) - base, dtype=torch.bool, device="cpu"
        )
        elements(taken, start - base, output).fill_(True)
        return bool(elements(taken, other_start - base, tensor).any())

    def _load(self, tensor: Tensor, buffers: Mapping[int, Any], device: Any) -> Any:
        where = f"tensor {tensor.name!r} (uid {tensor.uid})"
        data = buffers[tensor.get_uid()]
        if tensor.ragged_offset is not None:
            dense = torch.zeros(tensor.dim, dtype=torch_type(tensor.data_type, where), device=device)
            for entry, (raw, entry_tensor) in self._entries(tensor, buffers, device, where).items():
                dense[entry : entry + 1, :, : entry_tensor.dim[2]] = read(raw, entry_tensor, where)
            return dense
        if tensor.data_type is data_type.BOOLEAN and _is_torch_tensor(data) and _is_bit_packed(tensor, data):
            return unpack_bits(data.view(torch.uint8))
        raw = memory(data, span_bytes(tensor), where)
        return read(raw, tensor, where).to(device)

    def _run(self, node: Node, values: dict[int, Any], device: Any) -> dict[int, Any]:
        results = run_node(node, lambda tensor: values[tensor.uid], device)  # pyright: ignore[reportArgumentType]
        stored = {tensor.uid: results[port] for port, tensor in node.outputs.items() if tensor.uid is not None}
        values.update(stored)
        return stored

    def _entries(
        self, tensor: Tensor, buffers: Mapping[int, Any], device: Any, where: str, rows: Any = None
    ) -> dict[int, tuple[Any, Tensor]]:
        """The batch entries of a ragged tensor that have rows: the bytes of each, and how they are laid out.

        ``rows`` are their numbers; where they are not known, an entry ends where the next one starts.
        """
        offset = tensor.ragged_offset
        assert offset is not None
        scale = tensor.ragged_offset_multiplier
        starts = [int(start) * scale for start in self._load(offset, buffers, device).flatten()]
        most = [tensor.dim[2]] * (len(starts) - 1) if rows is None else [int(count) for count in rows.flatten()]
        entries: dict[int, tuple[Any, Tensor]] = {}
        for entry, (start, end) in enumerate(itertools.pairwise(starts)):
            entry_tensor = type(tensor).like(tensor, tensor.name)
            entry_tensor.dim[0], entry_tensor.dim[2] = (
                1,
                min(tensor.dim[2], most[entry], (end - start) // max(1, tensor.stride[2])),
            )
            if entry_tensor.dim[2] > 0:
                first = start * element_bits(tensor.data_type) // 8
                raw = memory(buffers[tensor.get_uid()], first + span_bytes(entry_tensor), where)
                entries[entry] = raw[first:], entry_tensor
        return entries

    def _store(self, tensor: Tensor, value: Any, buffers: Mapping[int, Any], device: Any, rows: Any) -> None:
        where = f"tensor {tensor.name!r} (uid {tensor.uid})"
        data = buffers[tensor.get_uid()]
        if tensor.ragged_offset is not None:
            for entry, (raw, entry_tensor) in self._entries(tensor, buffers, device, where, rows).items():
                write(raw, entry_tensor, value[entry : entry + 1, :, : entry_tensor.dim[2]], where)
            return
        if tensor.data_type is data_type.BOOLEAN and _is_torch_tensor(data) and _is_bit_packed(tensor, data):
            data.view(torch.uint8).copy_(pack_bits(value))
            return
        write(memory(data, span_bytes(tensor), where), tensor, value, where)


def run_node(node: Node, value_of: Callable[[Tensor], Any], device: Any) -> dict[str, Any]:
    """The outputs of a prepared node by port, each rounded to its tensor's type; ``value_of`` has the inputs."""
    compute = torch_type(node.compute_data_type, node.where) if node.compute_data_type else torch.float32
    arguments: dict[str, Any] = {}
    for port, tensor in node.inputs.items():
        if tensor.value is not None:
            dtype = torch_type(tensor.data_type, node.where)
            value = torch.full(tensor.dim, tensor.value, dtype=dtype, device=device)
        else:
            value = value_of(tensor)
        arguments[port] = value if port in node.exact_ports else value.to(compute)
    results = node.evaluate(arguments)
    return {port: rounded(results[port], tensor.data_type, node.where) for port, tensor in node.outputs.items()}


def _axes(tensor: Tensor) -> list[tuple[int, int]]:
    """Extents and strides, without the extents of 1."""
    return [pair for pair in zip(tensor.dim, tensor.stride, strict=True) if pair[0] > 1]


def _is_bit_packed(tensor: Tensor, data: Any) -> bool:
    """cuDNN's fusion engines store BOOLEAN masks as bits; the buffer then has an eighth of the channels."""
    return len(tensor.dim) > 1 and list(data.shape) == [tensor.dim[0], tensor.dim[1] // 8, *tensor.dim[2:]]
