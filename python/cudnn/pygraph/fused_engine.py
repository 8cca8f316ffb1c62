"""Engine that runs the kernels of ``cudnn.sdpa`` for graphs of one node, ``sdpa`` or ``sdpa_backward``, next to
the engines of cuDNN.

Its configuration and its plan look like those of cuDNN, so that lists of plans, calls and explanations see no
difference. A plan keeps, for the addresses of a call, tensors over their memory.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from cudnn.backend.engine import EngineConfig
from cudnn.backend.handle import resolve
from cudnn.backend.plan import ExecutionPlan, Pack
from cudnn.datatypes import _cudnn_to_torch_data_type  # pyright: ignore[reportPrivateUsage]
from cudnn.enums import attention_implementation, behavior_note, data_type, numerical_note
from cudnn.errors import CudnnError, cudnnGraphNotSupportedError, make_error
from cudnn.lazy import torch
from cudnn.pygraph.fast_call import current_device
from cudnn.runtime.architecture import ARCHITECTURES

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Bindings
    from cudnn.pygraph.node import Node
    from cudnn.pygraph.tensor import Tensor

_log = logging.getLogger("cudnn")
AUTO, FUSED = attention_implementation.AUTO, attention_implementation.FUSED
_FORWARD = {"q": "Q", "k": "K", "v": "V", "o": "O", "lse": "Stats"}
_PORTS = {"SDPA": _FORWARD, "SDPA_BWD": _FORWARD | {"do": "dO", "dq": "dQ", "dk": "dK", "dv": "dV"}}
"""The ports of a node, by its tag and by what the class of ``cudnn.sdpa`` calls its tensors."""
_EXTRA_ATTRIBUTES = "use_padding_mask", "use_alibi_mask", "score_mod", "score_mod_bprop", "has_dropout"
_ALIGNMENT = 16  # bytes


def _operation(node: Any) -> Any:
    """The class that computes a node."""
    from cudnn.sdpa import SdpaBackward, SdpaForward

    return SdpaForward if node.tag == "SDPA" else SdpaBackward


def _bounds(node: Any) -> tuple[bool, int, int, int]:
    """A node's bounds, in the form in which operators give theirs."""
    left, right = (-1 if bound is None else bound for bound in (node.left_bound, node.right_bound))
    return False, int(node.bottom_right), left, right


def unsupported_reason(node: Any) -> str:
    """Why these kernels cannot compute an attention node; empty if they can."""
    from cudnn.sdpa import heuristics

    operation, ports = _operation(node), _PORTS[node.tag].values()
    extra = {*node.inputs, *node.outputs} - {*ports} | {name for name in _EXTRA_ATTRIBUTES if getattr(node, name, None)}
    if extra or node.is_ragged:
        took = f"the kernels take {', '.join(ports)} and bounds"
        return f"{', '.join(sorted(extra)) or 'ragged offsets'}: {took}"
    tensors: dict[str, Tensor] = {**node.inputs, **node.outputs}
    stats = tensors.pop("Stats", None)
    virtual = next((port for port, tensor in tensors.items() if tensor.is_virtual), None)
    if virtual is not None:
        return f"{virtual} is virtual: the kernels compute graphs of one node, between tensors in memory"
    types = {tensor.data_type for tensor in tensors.values()}
    if len(types) > 1 or not types <= {data_type.HALF, data_type.BFLOAT16}:
        names = ", ".join(sorted(dtype.name for dtype in types))
        return f"the types {names}: the kernels take HALF or BFLOAT16, one of them for all but Stats"
    if node.compute_data_type is not data_type.FLOAT:
        return f"the kernels compute in FLOAT only, not in {node.compute_data_type.name}"
    q, k, v = (tensors[port] for port in "QKV")
    if k.dim[:3] != v.dim[:3] or k.dim[0] != q.dim[0]:
        return f"K of {k.dim} and V of {v.dim}: the kernels take the same number of heads in both, and the batch of Q"
    rows = q.dim[2]
    layout, sizes = operation.spec("q").layout, {"packed": 0}
    for port, tensor in tensors.items():
        if not layout.accepts(tensor.dim, tensor.stride, sizes, 16, port in node.outputs):
            return f"{port} with the strides {tensor.stride}: the kernels take 1 last, else multiples of 16 bytes"
    if stats is not None and not stats.is_virtual:
        steps = [q.dim[1] * rows, rows, 1]
        misplaced = [
            n > 1 and step != expected for n, step, expected in zip(stats.dim, stats.stride, steps, strict=False)
        ]
        if any(misplaced) or stats.data_type is not data_type.FLOAT:
            dtype = stats.data_type.name
            return f"Stats of {dtype} with the strides {stats.stride}: the kernels take FLOAT, contiguous"
    return heuristics.unsupported_reason((q.dim[3], v.dim[3]), _bounds(node), node.attn_scale, [operation])


def refuse(node: Any, reason: str = "") -> None:
    """Raises if a node asks for these kernels and they cannot compute it: for ``reason``, or for their own."""
    reason = (reason or unsupported_reason(node)) if node.implementation is FUSED else ""
    if reason:
        raise make_error(
            cudnnGraphNotSupportedError,
            node.where,
            "implementation",
            f"FUSED, but {reason}",
            "AUTO, or one of cuDNN's",
            "leave it out",
        )


def chosen(
    nodes: Sequence[Node], bindings: Bindings, capability: tuple[int, int] | None, offered: bool
) -> FusedConfig | None:
    """The engine's configuration, for a graph that asks for it or, if ``offered``, where it was measured to be faster.

    Raises:
        cudnnGraphNotSupportedError: the graph asks for it, and the kernels cannot compute it.
    """
    node: Any = nodes[0]
    asked = next((item for item in nodes if getattr(item, "implementation", None) is FUSED), None)
    alone = len(nodes) == 1 and node.tag in _PORTS
    by_default = offered and alone and node.implementation is AUTO
    if asked is None and not (by_default and _has_pytorch()):
        return None
    arch = ARCHITECTURES.get(capability or (0, 0), "")
    if asked is not None:
        wrong = "" if alone else f"a graph of {len(nodes)} nodes: the kernels compute graphs of one"
        wrong = wrong or ("" if arch else f"there are no kernels for compute capability {capability}")
        refuse(asked, wrong)
        reason = "asked for"
    else:
        reason = _measured_faster(node, arch)
        if not reason:
            return None
        if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
            _log.info("%s: cuDNN runs it: the FUSED implementation, which is faster, needs the CuTe DSL", node.where)
            return None
    _log.info("%s: FUSED implementation: %s", node.where, reason)
    try:
        return FusedConfig(node, bindings, arch)
    except (ValueError, NotImplementedError) as error:  # of the class, whose rules are more than those above
        if asked is not None:
            raise cudnnGraphNotSupportedError(f"{node.where}: FUSED implementation: {error}") from error
        _log.warning("%s: cuDNN runs it: %s", node.where, error)
        return None


def _has_pytorch() -> bool:
    """Whether the program uses a PyTorch that knows GPUs: plans of these kernels need it, those of cuDNN do not."""
    loaded = sys.modules.get("torch")
    return loaded is not None and loaded.backends.cuda.is_built()


def _measured_faster(node: Any, arch: str) -> str:
    """Why these kernels compute a node that does not ask for them; empty where they do not."""
    if not arch or unsupported_reason(node):
        return ""
    from cudnn.sdpa import heuristics

    q, k, v = (node.inputs[port].dim for port in "QKV")
    if not heuristics.is_timed(q[2], k[2], _bounds(node)):
        return ""
    faster = heuristics.is_faster(arch, prod(q[:3]), k[2], (q[3], v[3]))
    return f"measured faster than cuDNN's on {arch}, at such sizes" if faster else ""


class FusedConfig(EngineConfig):
    """The one configuration of the engine: the kernels choose their tiles themselves."""

    def __init__(self, node: Any, bindings: Bindings, arch: str | None) -> None:
        """
        Args:
            bindings: Which tensors a call has, and the bytes that operations of cuDNN have in the workspace, which
                these kernels use too.
            arch: None for tensors on the CPU, which the reference computes, or the emulator.
        """
        from cudnn.sdpa import heuristics

        self.arch, self.asked = arch, node.implementation is FUSED
        self.user = bindings.user
        ports, operation = {**node.inputs, **node.outputs}, _operation(node)
        self.tensors = {name: ports.get(port) for name, port in _PORTS[node.tag].items()}
        q, k, v = (node.inputs[port].dim for port in "QKV")
        if self.tensors["lse"] is not None and self.tensors["lse"].is_virtual:
            self.tensors["lse"] = None
        self.rows = tuple(q[:3])  # the shape of the log-sum-exp
        self.dtype = _cudnn_to_torch_data_type(node.inputs["Q"].data_type)
        samples = {
            name: torch.empty_strided(tensor.dim, tensor.stride, dtype=self.dtype, device="meta" if arch else "cpu")
            for name, tensor in self.tensors.items()
            if tensor is not None and name != "lse"
        }
        samples["lse"] = torch.empty(self.rows, dtype=torch.float32, device="meta" if arch else "cpu")
        scale = 1.0 if node.attn_scale is None else node.attn_scale
        _, alignment, left, right = _bounds(node)
        top_left = not heuristics.is_level(q[2], k[2], alignment)
        options = heuristics.options(q[2], k[2], scale, left, right, top_left)
        if node.tag == "SDPA_BWD":
            options["deterministic"] = node.use_deterministic_algorithm
        self.operation = operation(**operation.samples(samples), **options, arch=arch)
        self.lse_bytes = 0 if self.tensors["lse"] is not None else 4 * prod(self.rows)
        way = "fwd" if node.tag == "SDPA" else "bwd"
        self.tag = f"fused_sdpa_{way}_d{q[3]}" + (f"_dv{v[3]}" if v[3] != q[3] else "")
        self.numerical_notes = [numerical_note.TENSOR_CORE]
        self.behavior_notes = [behavior_note.RUNTIME_COMPILATION]
        self.shared_memory_used = 0
        scratch_bytes = self.lse_bytes + self.operation.workspace_size()
        self.workspace_size = max(0, scratch_bytes + 2 * _ALIGNMENT - bindings.workspace_size) if scratch_bytes else 0

    def build(self) -> FusedPlan:
        """Compiles the kernel, or loads what an earlier process compiled.

        Raises:
            CudnnError: the CuTe DSL is not installed, or refuses.
        """
        try:
            self.operation.compile()
        except (ImportError, RuntimeError, ValueError, NotImplementedError) as error:
            _log.warning("the plan %s cannot be built: %s", self.tag, error)
            raise CudnnError(f"{self.tag}: {error}", 3000, "NOT_SUPPORTED") from error
        return FusedPlan(self)


class _Memory:
    """Bytes of a GPU, as PyTorch takes them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def memory(address: int, size: int, device: int) -> Any:
    """A tensor of ``size`` bytes over memory of a GPU, or, with a device below 0, of the CPU.

    Raises:
        ValueError: PyTorch takes the memory for another device's, and copied it.
    """
    if device < 0:
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    buffer = torch.as_tensor(_Memory(address, size), device=f"cuda:{device}", dtype=torch.uint8)
    if buffer.data_ptr() != address:
        raise make_error(
            ValueError,
            "execute",
            "data",
            f"memory of another device at {address:#x}",
            f"memory of device {device}, the handle's",
            "copy it there, or build the graph with implementation=UNIFIED",
        )
    return buffer


class FusedPlan(ExecutionPlan):
    """The compiled kernel, and its tensors over the memory of calls."""

    is_rebuilt = True
    config: FusedConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: FusedConfig) -> None:
        self.config = config
        self.argument: Any = None
        self.packs: dict[tuple[int, ...], Pack] = {}
        self.uids: tuple[int, ...] = ()
        self._by_handle = {}
        self.workspace_size = config.workspace_size
        self.launch: Callable[..., int] = _launch

    def bind(self, uids: Sequence[int]) -> None:
        self.uids = tuple(uids)
        self.packs.clear()

    def pack(self, key: tuple[int, ...], pointers: tuple[int, ...] | None = None) -> Pack:
        """What a call with these addresses runs. The plan keeps those of the last ``MAX_PACKS`` sets of addresses."""
        while len(self.packs) >= self.MAX_PACKS:
            self.packs.pop(next(iter(list(self.packs))), None)
        pack = self.packs[key] = Pack(self._call(key))
        return pack

    def _call(self, key: tuple[int, ...]) -> Callable[[], None]:
        config, operation, number = self.config, self.config.operation, key[-1]
        device = resolve(number).device if config.arch else -1
        addresses = dict(zip(config.user, key, strict=False))
        space = -(-key[-2] // _ALIGNMENT) * _ALIGNMENT
        tensors: dict[str, Any] = {}
        for name, tensor in config.tensors.items():
            if tensor is None:
                tensors[name] = memory(space, config.lse_bytes, device).view(torch.float32).view(config.rows)
                space += -(-config.lse_bytes // _ALIGNMENT) * _ALIGNMENT
                continue
            address, dims, strides = addresses[tensor.get_uid()], tensor.dim, tensor.stride
            if name != "lse" and address % _ALIGNMENT:
                raise make_error(
                    ValueError,
                    "execute",
                    f"tensor {tensor.name!r} (uid {tensor.uid})",
                    f"data at {address:#x}",
                    f"multiples of {_ALIGNMENT} bytes",
                    "pass a copy",
                )
            dtype = torch.float32 if name == "lse" else config.dtype
            count = 1 + sum((n - 1) * step for n, step in zip(dims, strides, strict=True))
            buffer = memory(address, count * dtype.itemsize, device).view(dtype)
            tensors[name] = buffer.view(config.rows) if name == "lse" else buffer.as_strided(dims, strides)
        size = operation.workspace_size()
        workspace = memory(space, size, device) if size else None
        operands = tuple(tensors.get(name) for name in operation.names)
        scalars = (None,) * len(operation.scalars)

        def run() -> None:
            # The handle by its number: a later one may have that of one that was destroyed, and another stream.
            operation.run(operands, scalars, resolve(number).stream, workspace)

        current = current_device() if config.arch else None
        if current is None:
            return run

        def run_there() -> None:
            if current() == device:
                return run()
            with torch.cuda.device(device):
                run()

        return run_there

    def execute_overridden(self, *_: Any, **__: Any) -> None:
        raise self._unsupported("override_uids", "the shapes of the graph", "build a graph of that shape")

    def populate_cuda_graph(self, *_: Any, **__: Any) -> None:
        raise self._unsupported("populate_cuda_graph", "calls that are captured in a stream", "capture execute()")

    update_cuda_graph = populate_cuda_graph

    def to_json(self) -> bytes:
        raise CudnnError(f"the plan {self.config.tag} is compiled again where it is needed", 3000, "NOT_SUPPORTED")

    def _unsupported(self, what: str, allowed: str, hint: str) -> cudnnGraphNotSupportedError:
        alternative = "leave implementation=FUSED out" if self.config.asked else 'call deselect_engines(["fused"])'
        hint = f"{hint}, or {alternative} for a plan of cuDNN"
        where, got = f"plan {self.config.tag}", "a plan of our kernels"
        return make_error(cudnnGraphNotSupportedError, where, what, got, allowed, hint)

    def close(self) -> None:
        self.packs.clear()


def _launch(handle: Any, plan: Any, call: Callable[[], None]) -> int:
    """As ``cudnnBackendExecute``, which gives a status; what goes wrong here is raised."""
    call()
    return 0
