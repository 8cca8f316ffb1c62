"""The hot path: ``graph.execute`` for PyTorch tensors, written out for one graph.

A finalized variant pack refuses new pointers, so a plan keeps packs by their pointers. For addresses seen before, a
call reads the addresses, finds the pack, asks PyTorch once whether the types are those seen before and no tensor is a
negative view, and makes one call into cuDNN, which takes 3.6 us of host time on the machine with an H200. All else must
be small compared with that: one Python frame, addresses read by inline method calls (a loop or ``map`` costs 0.3 us
more for 4 tensors), no descriptor, no allocation, no synchronization. For new addresses, one call into PyTorch compares
types, layouts and devices of all tensors with those last accepted: reading shape and strides as tuples takes five
times as long.

Most of that call can be saved too: a plan that fills CUDA graphs is asked for one of its kernels with these addresses
when they have come often enough, and later calls on the same stream launch that. Four cases are left to cuDNN: streams
that are being captured; the default stream while another device is the current one, whose default stream the driver
would take; scalars passed by value, whose values a CUDA graph would keep; and a GPU that is far behind the host, since
one launch of a CUDA graph takes it about 1 us longer than the kernel alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cudnn import settings
from cudnn.backend.cuda_graph import ask_whether_it_keeps_up, unchecked
from cudnn.backend.handle import Handle, default_handle
from cudnn.backend.plan import Pack
from cudnn.runtime.codegen import define
from cudnn.runtime.tensor_guards import current_device, dynamic_shape_guard, guard

if TYPE_CHECKING:
    from cudnn.backend.plan import ExecutionPlan
    from cudnn.pygraph.program import CudnnProgram

_TEMPLATE = '''
def make(
    {names}, {types}, dynamic_shape_guard, accepted, own_handle, default_handle, device, find, launch, argument, pack,
    check, otherwise, failure, calls_before_graph, keep_graph, lose_graph, ask_whether_it_keeps_up, is_capturing,
    launch_graph, current_device
):
    def execute(
        tensor_to_buffer, workspace=None, handle=None, override_uids=None, override_shapes=None, override_strides=None
    ):
        """Runs the graph: ``pygraph.execute``, written out for the tensors of this graph."""
        nonlocal accepted
        try:
            if handle is None:
                handle = {default}
            {arrays}
            key = ({pointers} {workspace}, handle.ptr)
        except (KeyError, TypeError, AttributeError, RuntimeError):  # other keys, or data without memory of PyTorch
            return otherwise(tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides)
        if override_uids is not None:
            return otherwise(tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides)
        found = find(key)
        if found is None:
            if {off}:
                return otherwise(tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides)
            home, alike = accepted
            if handle.device != home or not alike({tensors}){small_workspace}:
                if {negative}:
                    return otherwise(
                        tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides
                    )
                accepted = check(tensor_to_buffer, workspace, handle)
            found = pack(key)
        elif not dynamic_shape_guard({tensors}) and ({other_type} or {negative}):
            return otherwise(tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides)
        {replay}
        status = launch(handle.argument, argument, found.argument)
        if status:
            raise failure(status)
    return execute
'''
_REPLAY = """
        elif found.queue is not handle.queue:
            found.calls += 1
            found.used = True
            if found.calls == calls_before_graph:
                keep_graph(found, handle)
        else:
            found.used = True
            if not handle.until_asked:
                ask_whether_it_keeps_up(handle)
            handle.until_asked -= 1
            if (
                handle.keeps_up and (handle.stream or current_device is None or current_device() == handle.device)
                and not is_capturing(handle.queue, handle.capture_result) and not handle.capturing.value
            ):
                status = launch_graph(found.graph, handle.queue)
                if not status:
                    return
                lose_graph(found, status)
"""


@functools.cache
def _compile(
    types: tuple[int, ...], needed: int, has_handle: bool, off_bits: tuple[tuple[int, int], ...], replays: bool
) -> Callable[..., Callable[..., None]]:
    """``types``: for each tensor, the number of its type among those that occur."""
    indices = range(len(types))
    same_type = [
        "".join(f"t{i}.dtype is " for i in indices if types[i] == dtype_index) + f"d{dtype_index}"
        for dtype_index in sorted(set(types))
    ]
    keys_by_mask = {bits: [f"key[{i}]" for i, its in off_bits if its == bits] for _, bits in off_bits}
    source = _TEMPLATE.format(
        off=" or ".join(f"({' | '.join(addresses)}) & {bits}" for bits, addresses in keys_by_mask.items()) or "False",
        names=", ".join(f"k{i}" for i in indices),
        types=", ".join(f"d{dtype_index}" for dtype_index in sorted(set(types))),
        default="own_handle" if has_handle else "default_handle(device)",
        arrays="; ".join(f"t{i} = tensor_to_buffer[k{i}]" for i in indices),
        tensors=", ".join(f"t{i}" for i in indices),
        negative=" or ".join(f"t{i}.is_neg()" for i in indices),
        pointers=" ".join(f"t{i}.data_ptr()," for i in indices),
        other_type=f"not ({' and '.join(same_type)})",
        workspace="workspace.data_ptr()" if needed else "0",
        replay=_REPLAY.strip() if replays else "",
        small_workspace=f" or workspace.get_device() != home or workspace.nbytes < {needed}" if needed else "",
    )
    return define("make", source, {})


def specialised(
    program: CudnnProgram,
    plan: ExecutionPlan,
    keys: Sequence[Any],
    arrays: Sequence[Any],
    own_handle: Handle | None,
    otherwise: Callable[..., None],
) -> Callable[..., None]:
    """``execute`` for PyTorch tensors under ``keys``, which are in the order of ``program.bindings.user``.

    Args:
        arrays: Those of a call that was checked. At addresses seen before, arrays of other types take the other path,
            every time. At new ones, types, layouts and devices are compared with those of the last call that was
            checked, and checked where they differ.
        own_handle: The graph's handle.
        otherwise: Called with the same arguments where the data are of another kind.
    """
    dtypes = list(dict.fromkeys(array.dtype for array in arrays))

    def check(data: Any, workspace: Any, handle: Handle) -> tuple[int, Callable[..., bool]]:
        call_arrays = [data[name] for name in keys]
        program.check(call_arrays, workspace, handle, plan)
        return handle.device, guard(call_arrays)

    def pack(key: tuple[int, ...]) -> Any:
        return plan.pack(key, program.filled(key))

    pairs = zip(program.bindings.user, arrays, strict=True)
    home = next((array.get_device() for uid, array in pairs if uid not in program.by_value), program.device)
    types = tuple(dtypes.index(array.dtype) for array in arrays)
    by_value = program.by_value.intersection(program.bindings.user)
    replays = plan.fills_cuda_graphs and not by_value and settings.PLAN_CUDA_GRAPHS.get()
    return _compile(types, program.workspace_size(plan), own_handle is not None, tuple(program.off_bits), replays)(
        *keys,
        *dtypes,
        dynamic_shape_guard=dynamic_shape_guard(arrays),
        accepted=(home, guard(arrays)),
        own_handle=own_handle,
        default_handle=default_handle,
        device=program.device,
        find=plan.packs.get,
        launch=plan.launch,
        argument=plan.argument,
        pack=plan.pack if program.plain else pack,
        check=check,
        otherwise=otherwise,
        failure=plan.failure,
        calls_before_graph=Pack.CALLS_BEFORE_GRAPH,
        keep_graph=plan.keep_graph,
        lose_graph=plan.lose_graph,
        ask_whether_it_keeps_up=ask_whether_it_keeps_up,
        is_capturing=replays and unchecked("cuStreamIsCapturing"),
        launch_graph=replays and unchecked("cuGraphLaunch"),
        current_device=current_device(),
    )
