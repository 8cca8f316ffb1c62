"""A lowered graph with its plans: what ``execute`` runs on a GPU."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn.arrays.check import check_array
from cudnn.arrays.dlpack import data_pointer
from cudnn.backend import library
from cudnn.backend.attributes import Attribute
from cudnn.backend.cuda_graph import Chain, upper_halves, words_to_device
from cudnn.backend.handle import Handle, default_handle, resolve
from cudnn.backend.memory import copy_to_device, copy_upper_halves
from cudnn.backend.plan import ExecutionPlan, PlanList
from cudnn.datatypes import (
    _is_torch_tensor,  # pyright: ignore[reportPrivateUsage]
    element_bytes,
)
from cudnn.enums import data_type
from cudnn.errors import cudnnGraphNotSupportedError, make_error, refusal
from cudnn.lazy import torch
from cudnn.pygraph.fast_call import specialised
from cudnn.pygraph.lowering import Bindings, host_scalar, refusals
from cudnn.pygraph.tensor import Tensor
from cudnn.strided import as_input, check_output, check_resolved, is_lazy

if TYPE_CHECKING:
    from cudnn.pygraph.graph import pygraph

_log = logging.getLogger("cudnn")
OVERRIDES_SINCE = Attribute.OPERATIONGRAPH_IS_OVERRIDE_SHAPE_ENABLED.since  # before, cuDNN 9.19 computes garbage

VariantPack = Mapping[Any, Any]
Shape = tuple[list[int], list[int]]  # extents, strides
Override = tuple[Sequence[int], Sequence[Sequence[int]], Sequence[Sequence[int]]]


def keys_by_uid(variant_pack: VariantPack) -> dict[int, Any]:
    """The keys of a dict of data, by uid, without those of None, or for None: so callers pass absent tensors.

    A tensor without a uid is in no built graph: its entry is one of those that nothing uses.
    """
    keys: dict[int, Any] = {}
    for key, data in variant_pack.items():
        if key is None or data is None:
            continue
        if isinstance(key, Tensor):
            if key.uid is not None:
                keys[key.uid] = key
        elif isinstance(key, int):
            keys[int(key)] = key
        else:
            raise make_error(
                TypeError,
                "execute",
                "key",
                type(key).__name__,
                "a cudnn.tensor or a uid (int)",
                "names are keys of cudnn.Graph only",
            )
    return keys


def changed_shapes(built: Mapping[int, Shape], override: Override) -> dict[int, Shape]:
    """The overrides, by uid, that differ from the shape that the graph was built with.

    Raises:
        ValueError: an unknown uid, another rank, or lists of different lengths.
    """
    uids, shapes, strides = override
    if not len(uids) == len(shapes) == len(strides):
        raise make_error(
            ValueError,
            "execute",
            "override_uids, override_shapes, override_strides",
            f"{len(uids)}, {len(shapes)} and {len(strides)} entries",
            "one shape and one list of strides for each uid",
            "give all three the same length",
        )
    changed: dict[int, Shape] = {}
    for uid, dims, steps in zip(uids, shapes, strides, strict=True):
        if uid not in built:
            raise make_error(
                ValueError, "execute", "override_uids", str(uid), "uids of tensors of this graph", "correct the uid"
            )
        overridden = [*map(int, dims)], [*map(int, steps)]
        if [len(values) for values in overridden] != [len(built[uid][0])] * 2:
            raise make_error(
                ValueError,
                "execute",
                f"override of uid {uid}",
                f"dim={overridden[0]}, stride={overridden[1]}",
                f"the rank of dim={built[uid][0]}",
                "pass one number per dimension",
            )
        if overridden != built[uid]:
            changed[uid] = overridden
    return changed


def not_overridable(uids: Iterable[int]) -> ValueError:
    """What is raised for overrides of a graph that was not built for them."""
    hint = "build the graph with is_override_shape_enabled=True"
    return make_error(ValueError, "execute", "override_uids", str([*uids]), "None for this graph", hint)


def address_of(data: Any, label: Callable[[], str] = lambda: "data") -> int:
    """Where data lie: the address of a PyTorch or DLPack tensor's first element, or an address as it is."""
    if _is_torch_tensor(data):
        return data.data_ptr()
    if isinstance(data, int):
        return int(data)
    if hasattr(data, "__dlpack__"):
        return data_pointer(data)
    raise make_error(
        TypeError,
        "execute",
        label(),
        type(data).__name__,
        "a torch.Tensor, an object with __dlpack__, or an address (int)",
        "pass one of these",
    )


class Before(NamedTuple):
    """A graph of one node, from a tensor to a place in the workspace, that runs before the plan on the same stream.

    The tensor has the uid 0 in it, the result 1.
    """

    node: str  # as messages call it
    graph: pygraph
    source: int  # uid of what it reads
    source_offset: int  # bytes from the start of that
    result: int  # bytes from the start of the workspace, like the next
    workspace: int


class CudnnProgram:
    """Plans of cuDNN, and where each call finds their tensors.

    ``execute`` takes data of any kind; ``fast_call`` writes out what is left of it for PyTorch tensors.
    """

    def __init__(
        self,
        plans: PlanList | None,
        bindings: Bindings,
        tensors: Iterable[Tensor],
        device: int,
        override_shape: bool = False,
        outputs: Collection[int] = (),
        pools: Collection[int | None] = (),
        before: Sequence[Before] = (),
        for_any_address: Callable[[int], pygraph] | None = None,
    ) -> None:
        """
        Args:
            outputs: The uids of tensors that calls write.
            pools: The uids of tensors whose memory may go on beyond their shape.
            plans: None for a graph restored with its one plan.
            tensors: All of the graph, with uids.
            override_shape: Whether the operation graph lets calls override shapes.
            before: What each call runs first.
            for_any_address: Builds the graph that calls run whose data are misaligned, with this number of bytes of
                workspace; None where such calls are the caller's fault.
        """
        self.plans = plans
        self.plan: ExecutionPlan | None = None
        self.bindings = bindings
        self._tensors = {tensor.get_uid(): tensor for tensor in tensors}
        self._shapes = {uid: (tensor.dim, tensor.stride) for uid, tensor in self._tensors.items()}
        self.by_value = frozenset(uid for uid, tensor in self._tensors.items() if tensor.is_pass_by_value)
        self.device = device
        self.override_shape = override_shape
        self._outputs = frozenset(outputs)
        self._pools = frozenset(pools)
        self.before = before
        self._for_any_address = for_any_address
        self._at_any_address: pygraph | None = None
        # What calls look at: places in ``bindings.user``, and the bits that are 0 in an aligned address. A single
        # element may lie anywhere.
        self.off_bits = [
            (index, self._tensors[uid].alignment - 1)
            for index, uid in enumerate(bindings.user)
            if for_any_address is not None and uid not in self.by_value and prod(self._tensors[uid].dim) > 1
        ]
        self._constants = [host_scalar(data_type[dtype], value) for dtype, value in bindings.constants.values()]
        self._constant_pointers = [ctypes.addressof(constant) for constant in self._constants]
        self._copies = [
            (item.offset, (ctypes.c_int32 * len(item.initial))(*item.initial))
            for item in bindings.scratch
            if item.initial is not None
        ]
        self._chains: dict[int, Chain] = {}
        self._direct = [index for index, uid in enumerate(bindings.user) if uid not in bindings.hidden]
        self._aliases = [(bindings.user.index(source), offset) for source, offset, _ in bindings.aliases.values()]
        self.uids = [
            *(bindings.user[index] for index in self._direct),
            *bindings.constants,
            *(item.uid for item in bindings.scratch),
            *bindings.aliases,
        ]
        self.plain = self.uids == bindings.user and not bindings.workspace_size

    def bound(self, plan: ExecutionPlan) -> ExecutionPlan:
        """The plan, bound to the graph's tensors."""
        if plan.uids != tuple(self.uids):
            plan.bind(self.uids)
        return plan

    def use(self, plan: ExecutionPlan) -> None:
        """Makes a plan the one that calls run."""
        self.plan = self.bound(plan)

    def workspace_size(self, plan: ExecutionPlan) -> int:
        """Bytes that a call needs: the graph's own part, then the plan's."""
        return self.bindings.workspace_size + plan.workspace_size

    def execute(
        self,
        variant_pack: VariantPack,
        workspace: Any,
        handle: Handle | int | None,
        plan: ExecutionPlan | None = None,
        override: Override | None = None,
    ) -> None:
        """Queues a plan (the candidate by default) on the handle's stream, for data of any kind."""
        used = default_handle(self.device) if handle is None else resolve(handle)
        ready = plan or self.plan
        assert ready is not None
        overridden = {} if override is None else dict(zip(override[0], zip(*override[1:], strict=False), strict=False))
        pointers, space, _copies = self._addresses(variant_pack, workspace, used, ready, overridden)
        self.launch(pointers, space, used, ready, override and self._overriding(*override))

    def _addresses(
        self,
        variant_pack: VariantPack,
        workspace: Any,
        handle: Handle,
        plan: ExecutionPlan,
        overridden: Mapping[int, tuple[Sequence[int], Sequence[int]]] = MappingProxyType({}),
        copies: bool = True,
    ) -> tuple[list[int], int, Sequence[Any]]:
        """Where the data of ``bindings.user`` and the workspace lie, checked; and the data, to be kept until then.

        Inputs that show other values than their memory has are copied or, without ``copies``, refused.
        """
        keys = keys_by_uid(variant_pack)
        for uid in self.bindings.user:
            if uid not in keys:
                raise make_error(
                    ValueError,
                    "execute",
                    self._label(uid),
                    "no data",
                    "a tensor or pointer for every input and output",
                    f"add it to the dict under its tensor or uid {uid}",
                )
        ordered = [keys[uid] for uid in self.bindings.user]
        values = [variant_pack[key] for key in ordered]
        for position, uid in enumerate(self.bindings.user):
            if uid in self._outputs:
                check_output("execute", self._label(uid), values[position])
            elif copies:
                values[position] = self._readable(uid, values[position], handle)
            else:
                check_resolved("execute", self._label(uid), values[position])
        self.check(values, workspace, handle, plan, overridden)
        pointers = [
            address_of(value, lambda uid=uid: self._label(uid))
            for uid, value in zip(self.bindings.user, values, strict=True)
        ]
        return pointers, 0 if workspace is None else address_of(workspace, lambda: "workspace"), values

    def _readable(self, uid: int, value: Any, handle: Handle) -> Any:
        """An input as cuDNN reads it. A copy is made, and its memory is used again, in the order of the stream."""
        if is_lazy(value) and value.is_cuda:
            with torch.cuda.stream(torch.cuda.ExternalStream(handle.stream, device=value.device)):
                return as_input("execute", self._label(uid), value)
        return as_input("execute", self._label(uid), value)

    def launch(
        self,
        pointers: Sequence[int],
        space: int,
        handle: Handle,
        plan: ExecutionPlan,
        override: Override | None = None,
    ) -> None:
        """Queues a plan for addresses in the order of ``bindings.user``, with what goes before and after it.

        Args:
            space: Address of the workspace.
            override: For the tensors of the operation graph.
        """
        key = (*pointers, space, handle.ptr)
        if self.off_bits and key not in plan.packs and self.is_off(pointers):
            if override is not None:
                raise ValueError(self._off(pointers, "aligned addresses, where shapes are overridden"))
            return self._launch_at_any_address(pointers, space, handle, plan)
        # At every call, even to the same address: the caller may have used the memory for something else since.
        for offset, words in self._copies:
            copy_to_device(space + offset, words, handle)
        for item in self.before:
            source = pointers[self.bindings.user.index(item.source)] + item.source_offset
            item.graph.execute({0: source, 1: space + item.result}, space + item.workspace, handle)
        if override is None:
            pack = plan.packs.get(key) or plan.pack(key, self.filled(key))
            status = plan.launch(handle.argument, plan.argument, pack.argument)
            if status:
                raise plan.failure(status)
        else:
            filled = self.filled(key)
            with refusals():
                plan.execute_overridden(handle, filled[:-2], filled[-2], *override)
        for target, source, count in self._narrowed(key):
            copy_upper_halves(target, source, count, handle)

    def is_off(self, pointers: Sequence[int]) -> bool:
        """Whether data lie where the alignment of their tensor does not allow it."""
        return any(pointers[index] & bits for index, bits in self.off_bits)

    def _off(self, pointers: Sequence[int], allowed: str) -> str:
        """A message about the first data that lie off their alignment."""
        index, bits = next((index, bits) for index, bits in self.off_bits if pointers[index] & bits)
        address = pointers[index]
        return refusal(
            "execute",
            self._label(self.bindings.user[index]),
            f"data at {address:#x}, off its alignment of {bits + 1} bytes",
            allowed,
            f"pass a copy, or call set_alignment({address & -address}) before the graph is built",
        )

    def _launch_at_any_address(self, pointers: Sequence[int], space: int, handle: Handle, plan: ExecutionPlan) -> None:
        """Queues a plan that loads and stores single elements, where this graph's would misread data off alignment."""
        graph = self._at_any_address
        if graph is None:
            for index, _ in self.off_bits:
                if pointers[index] % element_bytes(self._tensors[self.bindings.user[index]].data_type):
                    raise ValueError(self._off(pointers, "addresses of whole elements"))
            assert self._for_any_address is not None
            description = self._off(pointers, "aligned addresses, for the plan that there is")
            _log.warning("a slower plan is built, for data at any address: %s", description)
            graph = self._for_any_address(plan.workspace_size)
            if graph.get_workspace_size() > self.workspace_size(plan):  # for operands of 8 bits that are widened first
                raise cudnnGraphNotSupportedError(self._off(pointers, "aligned addresses, for this graph"))
            self._at_any_address = graph
        graph.execute(dict(zip(self.bindings.user, pointers, strict=True)), space, handle)

    def to_cuda_graph(
        self, variant_pack: VariantPack, workspace: Any, handle: Handle | int | None, graph: int, update: bool
    ) -> None:
        """Adds what a call does to an empty ``cudaGraph_t``, or gives the nodes added before new addresses."""
        used = default_handle(self.device) if handle is None else resolve(handle)
        plan = self.plan
        assert plan is not None
        if plan.is_rebuilt and self.plans is not None:  # our own, which fills none: programs expect one that does
            plan = self.bound(self.plans.native(plan.workspace_size))
        if self.before:
            raise make_error(
                cudnnGraphNotSupportedError,
                "populate_cuda_graph",
                "graph",
                f"one that runs {self.before[0].node} in a separate plan",
                "graphs of one plan",
                "capture execute() in a stream instead",
            )
        pointers, space, _ = self._addresses(variant_pack, workspace, used, plan, copies=False)
        if self.is_off(pointers):
            raise ValueError(self._off(pointers, "aligned addresses, in a CUDA graph that is not captured"))
        key = (*pointers, space, used.ptr)
        filled = self.filled(key)

        def fill(inner: int) -> None:
            put = plan.update_cuda_graph if update else plan.populate_cuda_graph
            put(used, filled[:-2], filled[-2], inner)

        before = [words_to_device(space + offset, words) for offset, words in self._copies]
        after = [upper_halves(*copy) for copy in self._narrowed(key)]
        if not update:
            self._chains[graph] = Chain(used, graph, before, fill, after)
        elif graph in self._chains:
            self._chains[graph].update(used, before, fill, after)
        else:
            raise make_error(
                ValueError,
                "update_cuda_graph",
                "graph",
                hex(graph),
                "a graph that this one has populated",
                "call populate_cuda_graph() first",
            )

    def _overriding(
        self, uids: Sequence[int], shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]
    ) -> Override | None:
        """Overrides as cuDNN must see them: of every uid over the same memory, and only where something changes."""
        changed = changed_shapes(self._shapes, (uids, shapes, strides))
        if self.override_shape and library.version() < OVERRIDES_SINCE:
            changed = {uid: override for uid, override in changed.items() if not self._shortens(uid, *override)}
        if not changed:
            return None
        self._refuse_overrides(changed)
        effective = {uid: override for uid, override in changed.items() if uid not in self.bindings.hidden}
        for uid, alias in self.bindings.aliases.items():
            if alias.source in changed and alias.axes is not None:
                dims, steps = changed[alias.source]
                effective[uid] = [dims[axis] for axis in alias.axes], [steps[axis] for axis in alias.axes]
        return [*effective], [dims for dims, _ in effective.values()], [steps for _, steps in effective.values()]

    def _shortens(self, uid: int, dims: list[int], strides: list[int]) -> bool:
        """Whether an override only bounds the rows of a ragged tensor, which end where its lengths say anyway."""
        tensor = self._tensors[uid]
        if tensor.ragged_offset is None or dims[2] > tensor.dim[2] or strides[1:] != tensor.stride[1:]:
            return False
        unchanged = [dims[axis] == tensor.dim[axis] for axis in (0, 1, 3)]
        if all(unchanged):
            _log.info("%s: the override of its sequence has no effect, and is left out", self._label(uid))
        return all(unchanged)

    def _refuse_overrides(self, changed: Iterable[int]) -> None:
        if not self.override_shape:
            raise not_overridable(changed)
        library.require(OVERRIDES_SINCE, "overriding shapes at execution")
        for uid in changed:
            parts = [alias for alias in self.bindings.aliases.values() if alias.source == uid and alias.axes is None]
            if parts or uid in self.bindings.narrowed or self.bindings.scratch:
                form = "that the graph also reads in another form (a slice, a reshape)"
                reason = form if parts else "in a graph with separate memory for one shape"
                raise make_error(
                    cudnnGraphNotSupportedError,
                    "execute",
                    f"override of {self._label(uid)}",
                    f"a tensor {reason}",
                    "graphs whose tensors in memory are all the caller's",
                    "build a graph of that shape",
                )

    def specialised(
        self, variant_pack: VariantPack, workspace: Any, own_handle: Handle | None, otherwise: Callable[..., None]
    ) -> Callable[..., None] | None:
        """The hot path for data like these, None where every call has more to do than to hand addresses over."""
        keys = keys_by_uid(variant_pack)
        ordered = [keys[uid] for uid in self.bindings.user]
        assert self.plan is not None
        if (
            self._copies
            or self.before
            or self.bindings.narrowed
            or not all(_is_torch_tensor(variant_pack[key]) and not is_lazy(variant_pack[key]) for key in ordered)
        ):
            return None
        if self.workspace_size(self.plan) and not _is_torch_tensor(workspace):
            return None
        return specialised(self, self.plan, ordered, [variant_pack[key] for key in ordered], own_handle, otherwise)

    def filled(self, key: tuple[int, ...]) -> tuple[int, ...]:
        """Addresses in the order of ``uids``, workspace and handle, from those of the caller's tensors."""
        if self.plain:
            return key
        space = key[-2]
        return (
            *(key[index] for index in self._direct),
            *self._constant_pointers,
            *(space + item.offset for item in self.bindings.scratch),
            *(key[index] + offset for index, offset in self._aliases),
            space + self.bindings.workspace_size,
            key[-1],
        )

    def _narrowed(self, key: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """Target, source and number of elements of the copies that follow the plan."""
        return [
            (key[self.bindings.user.index(uid)], key[-2] + offset, count)
            for uid, (offset, count) in self.bindings.narrowed.items()
        ]

    def _label(self, uid: int) -> str:
        return f"tensor {self._tensors[uid].name!r} (uid {uid})"

    def check(
        self,
        values: Sequence[Any],
        workspace: Any,
        handle: Handle,
        plan: ExecutionPlan,
        overridden: Mapping[int, tuple[Sequence[int], Sequence[int]]] = MappingProxyType({}),
    ) -> None:
        """Refuses what would make the kernel fault or read the wrong elements.

        That is a dead handle, a small workspace, a tensor of another device, type or layout; of addresses nothing is
        known. ``overridden`` has shapes and strides by uid.
        """
        resolve(handle)
        if handle.is_reference:
            raise make_error(
                ValueError,
                "execute",
                "handle",
                "a handle of the reference executor",
                "a handle of a GPU",
                "create the handle on the machine that executes",
            )
        for uid, value in zip(self.bindings.user, values, strict=True):
            if not _is_torch_tensor(value):
                continue
            if uid in self.by_value:
                if value.get_device() >= 0:  # cuDNN would read the address of a device on the host
                    raise make_error(
                        ValueError,
                        "execute",
                        self._label(uid),
                        f"a tensor on {value.device}",
                        "the CPU, for a scalar that is passed by value",
                        "pass tensor.cpu()",
                    )
            elif value.get_device() != handle.device:
                raise make_error(
                    ValueError,
                    "execute",
                    self._label(uid),
                    f"a tensor on {value.device}",
                    f"cuda:{handle.device}, the device of the handle",
                    "move it there, or build the graph with "
                    "backend='reference' to run it with PyTorch where its tensors are",
                )
        for uid, value in zip(self.bindings.user, values, strict=True):
            if _is_torch_tensor(value) or hasattr(value, "__dlpack__"):
                tensor = self._tensors[uid]
                if uid in overridden:
                    tensor = Tensor.like(tensor)
                    tensor.dim, tensor.stride = map(list, overridden[uid])
                check_array(tensor, value, self._label(uid), uid in self._pools or uid in overridden)
        needed = self.workspace_size(plan)
        if not needed or isinstance(workspace, int):
            return
        check_output("execute", "workspace", workspace)
        have = 0 if workspace is None else getattr(workspace, "nbytes", needed)
        if have < needed:
            raise make_error(
                ValueError,
                "execute",
                "workspace",
                f"{have} bytes",
                f"{needed} bytes or more",
                "allocate get_workspace_size() bytes on the device",
            )
        if _is_torch_tensor(workspace) and workspace.get_device() != handle.device:
            raise make_error(
                ValueError,
                "execute",
                "workspace",
                f"a tensor on {workspace.device}",
                f"cuda:{handle.device}",
                "allocate it on the device of the handle",
            )
