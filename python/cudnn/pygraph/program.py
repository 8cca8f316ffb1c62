"""A lowered graph with its plans: what ``execute`` runs on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cudnn.backend.handle import Handle, default_handle, resolve
from cudnn.backend.memory import copy_to_device, copy_upper_halves
from cudnn.backend.plan import ExecutionPlan, PlanList
from cudnn.datatypes import (
    _is_torch_tensor,  # pyright: ignore[reportPrivateUsage]
)
from cudnn.enums import data_type
from cudnn.errors import refusal
from cudnn.pygraph.dlpack import data_pointer
from cudnn.pygraph.fast_call import specialised
from cudnn.pygraph.lowering import Bindings, host_scalar
from cudnn.pygraph.tensor import Tensor

VariantPack = Mapping[Any, Any]
Override = tuple[Sequence[int], Sequence[Sequence[int]], Sequence[Sequence[int]]]


def keys_by_uid(variant_pack: VariantPack) -> dict[int, Any]:
    """The keys of a dict of data, by uid, without those of None, or for None: so callers pass absent tensors."""
    found: dict[int, Any] = {}
    for key, data in variant_pack.items():
        if key is None or data is None:
            continue
        if isinstance(key, Tensor):
            if key.uid is None:
                raise ValueError(
                    refusal("execute", f"key tensor {key.name!r}", "a tensor without uid", "tensors of a built graph",
                            "use the tensors of the graph that is executed, or their uids")
                )  # fmt: skip
            found[key.uid] = key
        elif isinstance(key, int):
            found[int(key)] = key
        else:
            raise TypeError(
                refusal("execute", "key", type(key).__name__, "a cudnn.tensor or a uid (int)",
                        "names are keys of cudnn.Graph only")
            )  # fmt: skip
    return found


class CudnnProgram:
    """Plans of cuDNN, and where each call finds their tensors.

    ``execute`` takes data of any kind; ``fast_call`` writes out what is left of it for PyTorch tensors.
    """

    def __init__(
        self,
        plans: PlanList | None,
        bindings: Bindings,
        labels: Mapping[int, str],
        by_value: frozenset[int],
        device: int,
    ) -> None:
        self.plans = plans  # None for a graph restored with its one plan
        self.plan: ExecutionPlan | None = None
        self.bindings = bindings
        self.labels = labels
        self.by_value = by_value
        self.device = device
        self._constants = [host_scalar(data_type[kind], value) for kind, value in bindings.constants.values()]
        self._constant_pointers = [ctypes.addressof(constant) for constant in self._constants]
        self._copies = [
            (item.offset, (ctypes.c_int32 * len(item.initial))(*item.initial))
            for item in bindings.scratch
            if item.initial is not None
        ]
        self._direct = [index for index, uid in enumerate(bindings.user) if uid not in bindings.hidden]
        self._aliases = [(bindings.user.index(source), offset) for source, offset in bindings.aliases.values()]
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
        keys = keys_by_uid(variant_pack)
        for uid in self.bindings.user:
            if uid not in keys:
                raise ValueError(
                    refusal("execute", self._label(uid), "no data", "a tensor or pointer for every input and output",
                            f"add it to the dict under its tensor or uid {uid}")
                )  # fmt: skip
        ordered = [keys[uid] for uid in self.bindings.user]
        values = [variant_pack[key] for key in ordered]
        ready = plan or self.plan
        assert ready is not None
        self.check(values, workspace, used, ready)
        pointers = [self._address(uid, value) for uid, value in zip(self.bindings.user, values, strict=True)]
        key = (*pointers, 0 if workspace is None else self._address(None, workspace), used.ptr)
        if self._copies:
            self._copy(key[-2], used)
        if override is not None:
            filled = self.filled(key)
            ready.execute_overridden(used, filled[:-2], filled[-2], *override)
            return self._narrow(key, used)
        status = ready.launch(used.argument, ready.argument, ready.packs.get(key) or ready.pack(key, self.filled(key)))
        if status:
            raise ready.failure(status)
        self._narrow(key, used)

    def specialised(
        self, variant_pack: VariantPack, workspace: Any, own: Handle | None, otherwise: Callable[..., None]
    ) -> Callable[..., None] | None:
        """The hot path for data like these, None where every call has more to do than to hand addresses over."""
        keys = keys_by_uid(variant_pack)
        ordered = [keys[uid] for uid in self.bindings.user]
        assert self.plan is not None
        if self._copies or self.bindings.narrowed or not all(_is_torch_tensor(variant_pack[key]) for key in ordered):
            return None
        if self.workspace_size(self.plan) and not _is_torch_tensor(workspace):
            return None
        return specialised(self, self.plan, ordered, own, otherwise)

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

    def _copy(self, space: int, handle: Handle) -> None:
        # At every call, even to the same address: the caller may have used the memory for something else since.
        for offset, words in self._copies:
            copy_to_device(space + offset, words, handle)

    def _narrow(self, key: tuple[int, ...], handle: Handle) -> None:
        for uid, (offset, count) in self.bindings.narrowed.items():
            copy_upper_halves(key[self.bindings.user.index(uid)], key[-2] + offset, count, handle)

    def _label(self, uid: int) -> str:
        return f"tensor {self.labels.get(uid, '')!r} (uid {uid})"

    def check(self, values: Sequence[Any], workspace: Any, handle: Handle, plan: ExecutionPlan) -> None:
        """Refuses what would make the kernel fault: a dead handle, a small workspace, a tensor of another device."""
        resolve(handle)
        if handle.is_reference:
            raise ValueError(
                refusal("execute", "handle", "a handle of the reference executor", "a handle of a GPU",
                        "create the handle on the machine that executes")
            )  # fmt: skip
        for uid, value in zip(self.bindings.user, values, strict=True):
            if not _is_torch_tensor(value):
                continue
            if uid in self.by_value:
                if value.get_device() >= 0:  # cuDNN would read the address of a device on the host
                    raise ValueError(
                        refusal("execute", self._label(uid), f"a tensor on {value.device}", "the CPU, for a "
                                "scalar that is passed by value", "pass tensor.cpu()")
                    )  # fmt: skip
            elif value.get_device() != handle.device:
                raise ValueError(
                    refusal("execute", self._label(uid), f"a tensor on {value.device}",
                            f"cuda:{handle.device}, the device of the handle", "move it there, or build the graph with "
                            "backend='reference' to run it with PyTorch where its tensors are")
                )  # fmt: skip
        needed = self.workspace_size(plan)
        if not needed or isinstance(workspace, int):
            return
        have = 0 if workspace is None else getattr(workspace, "nbytes", needed)
        if have < needed:
            raise ValueError(
                refusal("execute", "workspace", f"{have} bytes", f"{needed} bytes or more",
                        "allocate get_workspace_size() bytes on the device")
            )  # fmt: skip
        if _is_torch_tensor(workspace) and workspace.get_device() != handle.device:
            raise ValueError(
                refusal("execute", "workspace", f"a tensor on {workspace.device}", f"cuda:{handle.device}",
                        "allocate it on the device of the handle")
            )  # fmt: skip

    def _address(self, uid: int | None, value: Any) -> int:
        if _is_torch_tensor(value):
            return value.data_ptr()
        if isinstance(value, int):
            return int(value)
        if hasattr(value, "__dlpack__"):
            return data_pointer(value)
        raise TypeError(
            refusal("execute", "workspace" if uid is None else self._label(uid), type(value).__name__,
                    "a torch.Tensor, an object with __dlpack__, or an address (int)", "pass one of these")
        )  # fmt: skip
