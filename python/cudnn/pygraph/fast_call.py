"""The hot path: ``graph.execute`` for PyTorch tensors, written out for one graph.

A finalized variant pack refuses new pointers, so a plan keeps packs by their pointers. For addresses seen before, a
call reads the addresses and types, finds the pack and makes one call into cuDNN, which takes 3.6 us of host time on the
machine with an H200. All else must be small beside that: one Python frame, the addresses read by method calls in line
(a loop or ``map`` costs 0.3 us more for four tensors), no descriptor, no allocation, no synchronisation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cudnn.backend.handle import Handle, default_handle

if TYPE_CHECKING:
    from cudnn.backend.plan import ExecutionPlan
    from cudnn.pygraph.program import CudnnProgram

_TEMPLATE = '''
def make({names}, {layouts}, own, default_handle, device, find, launch, argument, pack, check, otherwise, failure):
    def execute(
        tensor_to_buffer, workspace=None, handle=None, override_uids=None, override_shapes=None, override_strides=None
    ):
        """Runs the graph: ``pygraph.execute``, written out for the tensors of this graph."""
        try:
            if handle is None:
                handle = {default}
            {arrays}
            key = ({pointers} {workspace}, handle.ptr)
        except (KeyError, TypeError, AttributeError):  # other keys, or data that are no PyTorch tensors
            return otherwise(tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides)
        if override_uids is not None or {other_type}:
            return otherwise(tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides)
        found = find(key)
        if found is None:
            here = handle.device
            if not ({in_place} and {same_layout}):
                check(tensor_to_buffer, workspace, handle)
            found = pack(key)
        status = launch(handle.argument, argument, found)
        if status:
            raise failure(status)
    return execute
'''


@functools.cache
def _compile(on_device: tuple[bool, ...], needed: int, has_handle: bool) -> Callable[..., Callable[..., None]]:
    numbers = range(len(on_device))
    right = {True: "== here", False: "< 0"}  # a scalar passed by value lies on the CPU
    places = [f"t{i}.get_device() {right[on]}" for i, on in enumerate(on_device)]
    if needed:
        places += ["workspace.get_device() == here", f"workspace.nbytes >= {needed}"]
    source = _TEMPLATE.format(
        names=", ".join(f"k{i}" for i in numbers),
        layouts=", ".join(f"d{i}, s{i}, r{i}" for i in numbers),
        default="own" if has_handle else "default_handle(device)",
        arrays="; ".join(f"t{i} = tensor_to_buffer[k{i}]" for i in numbers),
        pointers=" ".join(f"t{i}.data_ptr()," for i in numbers),
        other_type=" or ".join(f"t{i}.dtype is not d{i}" for i in numbers),
        same_layout=" and ".join(f"t{i}.shape == s{i} and t{i}.stride() == r{i}" for i in numbers),
        workspace="workspace.data_ptr()" if needed else "0",
        in_place=" and ".join(places),
    )
    scope: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), scope)
    return scope["make"]


def specialised(
    program: CudnnProgram,
    plan: ExecutionPlan,
    keys: Sequence[Any],
    arrays: Sequence[Any],
    own: Handle | None,
    otherwise: Callable[..., None],
) -> Callable[..., None]:
    """``execute`` for PyTorch tensors under ``keys``, which are in the order of ``program.bindings.user``.

    Args:
        arrays: Those of a call that was checked. Arrays of other types take the other path, every time; other layouts
            are checked where their addresses are new.
        own: The graph's handle.
        otherwise: Called with the same arguments where the data are of another kind.
    """
    on_device = tuple(uid not in program.by_value for uid in program.bindings.user)

    def check(data: Any, workspace: Any, handle: Handle) -> None:
        program.check([data[name] for name in keys], workspace, handle, plan)

    def pack(key: tuple[int, ...]) -> Any:
        return plan.pack(key, program.filled(key))

    return _compile(on_device, program.workspace_size(plan), own is not None)(
        *keys,
        *(part for array in arrays for part in (array.dtype, array.shape, array.stride())),
        own=own,
        default_handle=default_handle,
        device=program.device,
        find=plan.packs.get,
        launch=plan.launch,
        argument=plan.argument,
        pack=plan.pack if program.plain else pack,
        check=check,
        otherwise=otherwise,
        failure=plan.failure,
    )
