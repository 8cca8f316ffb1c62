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
from cudnn.lazy import torch

if TYPE_CHECKING:
    from cudnn.backend.plan import ExecutionPlan
    from cudnn.pygraph.program import CudnnProgram

_TEMPLATE = '''
def make({names}, own, device, find, launch, argument, miss, otherwise, failure, default_handle):
    def execute(
        tensor_to_buffer, workspace=None, handle=None, override_uids=None, override_shapes=None, override_strides=None
    ):
        """Runs the graph: ``pygraph.execute``, written out for the tensors of this graph."""
        try:
            if handle is None:
                handle = own or default_handle(device)
            key = ({pointers} {workspace}, handle.ptr)
        except (KeyError, TypeError, AttributeError):  # other keys, or data that are no PyTorch tensors
            return otherwise(tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides)
        if override_uids is not None:
            return otherwise(tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides)
        status = launch(handle.argument, argument, find(key) or miss(key, tensor_to_buffer, workspace, handle))
        if status:
            raise failure(status)
    return execute
'''


@functools.cache
def _compile(count: int, needs_workspace: bool) -> Callable[..., Callable[..., None]]:
    names = [f"k{index}" for index in range(count)]
    source = _TEMPLATE.format(
        names=", ".join(names),
        pointers=" ".join(f"tensor_to_buffer[{name}].data_ptr()," for name in names),
        workspace="workspace.data_ptr()" if needs_workspace else "0",
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
    needed = program.workspace_size(plan)
    scalars = not program.by_value.isdisjoint(program.bindings.user)  # which must lie elsewhere: on the host
    get_device = torch.Tensor.get_device

    def miss(key: tuple[int, ...], data: Any, workspace: Any, handle: Handle) -> Any:
        values = [data[name] for name in keys]
        where: set[int] = {get_device(value) for value in values}
        if needed:
            where.add(get_device(workspace))
        if scalars or len(where) > 1 or handle.device not in where or (needed and workspace.nbytes < needed):
            program.check(values, workspace, handle, plan)
        return plan.pack(key, program.filled(key))

    return _compile(len(keys), bool(needed))(
        *keys,
        own=own,
        device=program.device,
        find=plan.packs.get,
        launch=plan.launch,
        argument=plan.argument,
        miss=miss,
        otherwise=otherwise,
        failure=plan.failure,
        default_handle=default_handle,
    )
