"""The hot path: ``graph.execute`` for PyTorch tensors, written out for one graph.

A finalized variant pack refuses new pointers, so a plan keeps packs by their pointers. For addresses seen before, a
call reads the addresses, finds the pack and makes one call into cuDNN, which takes 3.6 us of host time on the machine
with an H200. All else must be small beside that: one Python frame, the addresses read by method calls in line (a loop
or ``map`` costs 0.3 us more for four tensors), no descriptor, no allocation, no synchronisation.
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
def make({names}, own, default_handle, device, find, launch, argument, pack, check, otherwise, failure):
    def execute(
        tensor_to_buffer, workspace=None, handle=None, override_uids=None, override_shapes=None, override_strides=None
    ):
        """Runs the graph: ``pygraph.execute``, written out for the tensors of this graph."""
        try:
            if handle is None:
                handle = {default}
            key = ({pointers} {workspace}, handle.ptr)
        except (KeyError, TypeError, AttributeError):  # other keys, or data that are no PyTorch tensors
            return otherwise(tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides)
        if override_uids is not None:
            return otherwise(tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides)
        found = find(key)
        if found is None:
            here = handle.device
            if not ({in_place}):
                check(tensor_to_buffer, workspace, handle)
            found = pack(key)
        status = launch(handle.argument, argument, found)
        if status:
            raise failure(status)
    return execute
'''


@functools.cache
def _compile(on_device: tuple[bool, ...], needed: int, has_handle: bool) -> Callable[..., Callable[..., None]]:
    names = [f"k{index}" for index in range(len(on_device))]
    right = {True: "== here", False: "< 0"}  # a scalar passed by value lies on the CPU
    places = [f"tensor_to_buffer[{name}].get_device() {right[on]}" for name, on in zip(names, on_device, strict=True)]
    if needed:
        places += ["workspace.get_device() == here", f"workspace.nbytes >= {needed}"]
    source = _TEMPLATE.format(
        names=", ".join(names),
        default="own" if has_handle else "default_handle(device)",
        pointers=" ".join(f"tensor_to_buffer[{name}].data_ptr()," for name in names),
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
    own: Handle | None,
    otherwise: Callable[..., None],
) -> Callable[..., None]:
    """``execute`` for PyTorch tensors under ``keys``, which are in the order of ``program.bindings.user``.

    Args:
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
