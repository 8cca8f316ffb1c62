"""``cudnn.Graph``: builds a graph in a ``with`` block from arrays, then calls it like a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cudnn.backend.handle import Handle, default_handle, destroy_handle, set_stream
from cudnn.datatypes import _cudnn_to_torch_data_type, _is_torch_tensor
from cudnn.enums import data_type, heur_mode
from cudnn.errors import refusal
from cudnn.lazy import torch
from cudnn.pygraph.graph import pygraph
from cudnn.pygraph.node import NOT_SET
from cudnn.pygraph.tensor import Tensor

_TENSOR_METHODS = frozenset({"tensor", "tensor_like", "tensor_scalar"})
_QUERIES = frozenset(
    {"get_workspace_size", "get_workspace_size_plan_at_index", "serialize", "query_tensor_attributes_of_uid", "get_plan_name"}
)
_LIFE_CYCLE = frozenset(
    {
        "build", "build_operation_graph", "build_plan_at_index", "build_plans", "check_support", "create_execution_plan",
        "create_execution_plans", "deselect_behavior_notes", "deselect_engines", "deselect_numeric_notes",
        "deselect_workspace_greater_than", "execute", "execute_plan_at_index", "get_behavior_notes",
        "get_behavior_notes_for_plan_at_index", "get_engine_count", "get_execution_plan_count", "get_knobs_for_engine",
        "get_numerical_notes_for_plan_at_index", "get_plan_name_at_index", "key", "populate_cuda_graph",
        "select_behavior_notes", "select_numeric_notes", "update_cuda_graph", "validate",
    }
)  # fmt: skip


class _OnClassOrInstance:
    """A method that makes a new instance when it is called on the class."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return partial(self._function, owner() if instance is None else instance)


class Graph:
    """A graph built in a ``with`` block and called like a function.

    Inside the block every operation of :class:`cudnn.pygraph` is a method. It takes graph tensors, or arrays (PyTorch or
    anything with ``__dlpack__``), which describe the inputs: shape, strides, type. At the end of the block the graph is
    validated and its plan built. Then call it with data, in order or by name; outputs are allocated and returned.

    Names: operation ``name=`` (default ``"<method>.<i>"``); its inputs are ``"<node>::<argument>"`` (``"<node>::<position>"``
    for a positional one), its outputs ``"<node>::<PORT>"``, such as ``"SDPA::q"`` and ``"SDPA::O"``.

    Args:
        handle: For building and, by default, for calls. None or "auto": one per thread and device, on PyTorch's current stream.
        inputs, outputs: The order of positional arguments and results: names, uids, tensors, or the arrays used in the
            block. Default: inputs in order of first use (scalars on the CPU keep the value from the block), outputs in
            order of creation.
        heuristics: Modes asked in turn; default A, then FALLBACK.
        workspace_alloc: Allocates the workspace once, at the end of the block. A graph called from several threads at once
            needs False and a ``workspace=`` per call.
        **pygraph_kwargs: As for :class:`cudnn.pygraph`. Here intermediate and compute types default to FLOAT, and without
            an ``io_data_type`` an output takes the type of the first input of its operation.
    """

    def __init__(
        self,
        *,
        handle: Handle | int | str | None = None,
        inputs: Sequence[Any] | None = None,
        outputs: Sequence[Any] | None = None,
        heuristics: Sequence[heur_mode] | None = None,
        workspace_alloc: bool = True,
        **pygraph_kwargs: Any,
    ) -> None:
        for what, value in (("inputs", inputs), ("outputs", outputs), ("heuristics", heuristics)):
            if value is not None and not isinstance(value, (list, tuple)):
                raise ValueError(refusal("Graph", what, type(value).__name__, "a list or a tuple", f"pass [{value!r}]"))
        if isinstance(handle, str) and handle != "auto":
            raise ValueError(refusal("Graph", "handle", repr(handle), "a handle, None or 'auto'", "call create_handle()"))
        self._handle = None if isinstance(handle, str) else handle
        self._heuristics = [heur_mode.A, heur_mode.FALLBACK] if heuristics is None else list(heuristics)
        self._workspace_alloc = workspace_alloc
        self._kwargs = {"intermediate_data_type": data_type.FLOAT, "compute_data_type": data_type.FLOAT, **pygraph_kwargs}
        for key in ("intermediate_data_type", "compute_data_type"):
            if self._kwargs[key] is None or self._kwargs[key] is NOT_SET:
                self._kwargs[key] = data_type.FLOAT
        if self._kwargs.get("name", "") is None:
            del self._kwargs["name"]
        self._wanted: tuple[Sequence[Any] | None, Sequence[Any] | None] = (inputs, outputs)
        self._graph: pygraph | None = None
        self._open = False
        self._workspace: Any = None
        self._counters: dict[str, int] = {}
        self._node_names: set[str] = set()
        self._arrays: dict[int, tuple[Any, Tensor]] = {}  # by id(); the array is kept so that its id stays its own
        self._names: dict[str, Tensor] = {}  # canonical names
        self._tensors: dict[int, Tensor] = {}  # every tensor that the user has seen, by id()
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._defaults: dict[Tensor, Any] = {}

    # Building.
    def __enter__(self) -> Graph:
        if self._graph is not None:
            raise RuntimeError(
                refusal("Graph", "with block", "a second one", "one per Graph", "make a new cudnn.Graph for another graph")
            )
        self._graph = pygraph(handle=self._handle, **self._kwargs)
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._open = False
        if kind is not None:
            self._graph = None
            return
        graph = self._built()
        self._default_outputs(graph)
        self._default_types(graph)
        graph.build(self._heuristics)
        self._prepare(graph)

    def _built(self) -> pygraph:
        if self._graph is None:
            raise RuntimeError(
                refusal("Graph", "use", "a graph that was not built", "a graph after its with block",
                        "write 'with cudnn.Graph(...) as graph:' and add operations inside")
            )  # fmt: skip
        return self._graph

    @staticmethod
    def _default_outputs(graph: pygraph) -> None:
        """Without any set_output(True), the first output of every node that nobody consumes."""
        outputs = [tensor for node in graph.nodes for tensor in node.outputs.values()]
        if any(not tensor.is_virtual for tensor in outputs):
            return
        consumed = {id(tensor) for node in graph.nodes for tensor in node.inputs.values()}
        for node in graph.nodes:
            if not any(id(tensor) in consumed for tensor in node.outputs.values()):
                next(iter(node.outputs.values())).set_output(True)

    def _default_types(self, graph: pygraph) -> None:
        if graph.context.io_data_type is not NOT_SET:
            return
        for node in graph.nodes:
            given = next((t.data_type for t in node.inputs.values() if t.data_type is not NOT_SET), NOT_SET)
            for tensor in node.outputs.values():
                if tensor.data_type is NOT_SET:
                    tensor.data_type = graph.context.intermediate_data_type if tensor.is_virtual else given

    def _prepare(self, graph: pygraph) -> None:
        """Fixes the order of inputs and outputs, and allocates the workspace."""
        self.set_io_tuples(*self._wanted)
        size = graph.get_workspace_size()
        if size and self._workspace_alloc:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._device(graph)}")

    @staticmethod
    def _device(graph: pygraph) -> int:
        return graph._device()  # pyright: ignore[reportPrivateUsage]

    def set_io_tuples(self, inputs: Sequence[Any] | None = None, outputs: Sequence[Any] | None = None) -> None:
        """Sets the order of positional inputs and of results. Inside the block it takes effect at the end of the block."""
        if self._open:
            self._wanted = (inputs, outputs)
            return
        graph = self._built()
        made = [tensor for node in graph.nodes if not node.aliases_input for tensor in node.outputs.values()]
        produced = {id(tensor) for node in graph.nodes for tensor in node.outputs.values()}
        used: list[Tensor] = []
        for node in graph.nodes:
            for tensor in node.tensors():
                if id(tensor) not in produced and tensor.value is None and all(tensor is not other for other in used):
                    used.append(tensor)
        written = [tensor for tensor in made if not tensor.is_virtual]
        self._defaults = {tensor: array for array, tensor in self._arrays.values() if tensor.is_pass_by_value}
        self._inputs = [tensor for tensor in used if tensor not in self._defaults]
        self._outputs = written
        if inputs is not None:
            self._inputs = self._declared("inputs", inputs, used)
            self._cover("inputs", self._inputs, [tensor for tensor in used if tensor not in self._defaults])
        if outputs is not None:
            self._outputs = self._declared("outputs", outputs, written)
            self._cover("outputs", self._outputs, written)

    def _declared(self, what: str, keys: Sequence[Any], allowed: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for key in keys:
            tensor = self._find(key)
            if tensor is None or all(tensor is not other for other in allowed):
                listing = ", ".join(repr(name) for name, other in self._names.items() if any(other is t for t in allowed))
                why = " (a virtual tensor)" if tensor is not None and tensor.is_virtual else ""
                raise ValueError(refusal("Graph", what, f"{_shown(key)}{why}", f"one of {listing}", "use these names"))
            if any(tensor is other for other in found):
                raise ValueError(refusal("Graph", what, f"{_shown(key)} twice", "each tensor once", "drop one"))
            found.append(tensor)
        return found

    def _cover(self, what: str, declared: Sequence[Tensor], needed: Sequence[Tensor]) -> None:
        missing = [tensor for tensor in needed if all(tensor is not other for other in declared)]
        if missing:
            names = ", ".join(repr(self._name(tensor)) for tensor in missing)
            raise ValueError(
                refusal("Graph", what, f"a list without {names}", f"all {what} of the graph", f"add {names} to {what}=[...]")
            )

    def _name(self, tensor: Tensor) -> str:
        return next((name for name, other in self._names.items() if other is tensor), tensor.name)

    def _find(self, key: Any) -> Tensor | None:
        """The tensor that a key names: a graph tensor, a canonical or an assigned name, a uid, or an array of the block."""
        if isinstance(key, Tensor):
            return key
        if isinstance(key, str):
            named = [tensor for tensor in self._tensors.values() if tensor.name == key]
            return self._names.get(key) or (named[-1] if named else None)
        if isinstance(key, int):
            return next((tensor for tensor in self._tensors.values() if tensor.uid == key), None)
        return self._arrays[id(key)][1] if id(key) in self._arrays else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _LIFE_CYCLE:
            raise RuntimeError(
                refusal("Graph", name, "a call", "operations, tensors and queries: a cudnn.Graph goes through its life "
                        "cycle by itself", "use cudnn.pygraph for the single steps")
            )  # fmt: skip
        graph = self._built()
        method = getattr(graph, name)
        if name in _QUERIES:
            return method
        if name in _TENSOR_METHODS:
            return partial(self._make_tensor, method)
        if not callable(method):
            return method
        if not self._open:
            raise RuntimeError(
                refusal("Graph", name, "a call after the with block", "operations inside it", "make a new cudnn.Graph")
            )
        return partial(self._add_node, name, method)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(pygraph) if not name.startswith("_"))} - _LIFE_CYCLE)

    def _make_tensor(self, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensor = method(*args, **kwargs)
        self._tensors[id(tensor)] = tensor
        return tensor

    def _add_node(self, method_name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        index = self._counters.get(method_name, 0)
        self._counters[method_name] = index + 1
        node = kwargs.get("name") or f"{method_name}.{index}"
        if node in self._node_names:
            raise ValueError(refusal("Graph", f"name of {method_name}", repr(node), "a name once", "choose another name"))
        self._node_names.add(node)
        positional = [self._argument(f"{node}::{position}", value) for position, value in enumerate(args)]
        keyword = {key: self._argument(f"{node}::{key}", value) for key, value in kwargs.items() if key != "name"}
        result = method(*positional, **keyword, name=node)
        for index, tensor in enumerate(result if isinstance(result, (list, tuple)) else [result]):
            if isinstance(tensor, Tensor):
                self._register(tensor.name or f"{node}::{index}", tensor)
        return result

    def _argument(self, name: str, value: Any) -> Any:
        """Arrays become graph tensors; graph tensors are registered under the argument's name."""
        if isinstance(value, (tuple, list)):
            items = [self._argument(f"{name}::{index}", item) for index, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if not isinstance(value, Tensor) and hasattr(value, "__dlpack__"):
            if id(value) not in self._arrays:
                array = value.detach() if _is_torch_tensor(value) and value.requires_grad else value
                self._arrays[id(value)] = (value, self._built().tensor_like(array, name))
            value = self._arrays[id(value)][1]
        if isinstance(value, Tensor):
            self._register(name, value)
        return value

    def _register(self, name: str, tensor: Tensor) -> None:
        self._names.setdefault(name, tensor)
        self._tensors[id(tensor)] = tensor

    # Calling.
    def __call__(self, *args: Any, handle: Any = None, workspace: Any = None) -> Any:
        """Runs the graph.

        ``graph(x, w)`` takes data in the order of the inputs and returns the output, or a list of them.
        ``graph({"mm::A": x, ...})`` takes data by name, tensor or uid; outputs that the dict lacks are allocated and added
        under their canonical names; returns the same dict. Shapes are not compared with those of the block.
        """
        graph = self._built()
        if self._open:
            raise RuntimeError(refusal("Graph", "call", "inside the with block", "after it", "move the call out of the block"))
        if workspace is None:
            workspace = self._workspace
            if workspace is None and not self._workspace_alloc and graph.get_workspace_size():
                raise RuntimeError(
                    refusal("Graph", "workspace", "none", f"{graph.get_workspace_size()} bytes on the device, since the graph "
                            "was made with workspace_alloc=False", "pass workspace=")
                )  # fmt: skip
        used = None if isinstance(handle, str) else handle
        if len(args) == 1 and isinstance(args[0], dict):
            return self._call_with_dict(graph, args[0], workspace, used)
        if len(args) != len(self._inputs):
            names = ", ".join(self._name(tensor) for tensor in self._inputs)
            raise ValueError(
                refusal("Graph", "arguments", str(len(args)), f"{len(self._inputs)}: {names}", "pass them in this order")
            )
        pack = {**self._defaults, **dict(zip(self._inputs, args, strict=True))}
        results = self._allocate(pack, self._outputs)
        pack.update(results)
        graph.execute(pack, workspace, used)
        outputs = list(results.values())
        return outputs[0] if len(outputs) == 1 else outputs

    def _call_with_dict(self, graph: pygraph, data: dict[Any, Any], workspace: Any, handle: Any) -> dict[Any, Any]:
        pack: dict[Tensor, Any] = dict(self._defaults)
        for key, value in data.items():
            tensor = self._find(key)
            if tensor is None:
                raise ValueError(
                    refusal("Graph", "key", _shown(key), f"one of {', '.join(map(repr, self._names))}, an assigned name, a "
                            "uid or a tensor of the graph", "correct the key")
                )  # fmt: skip
            pack[tensor] = value
        missing = [tensor for tensor in self._inputs if tensor not in pack]
        if missing:
            names = ", ".join(repr(self._name(tensor)) for tensor in missing)
            raise RuntimeError(refusal("Graph", "inputs", f"no data for {names}", "data for every input", "add it to the dict"))
        made = self._allocate(pack, [tensor for tensor in self._outputs if tensor not in pack])
        pack.update(made)
        graph.execute(pack, workspace, handle)
        data.update({self._name(tensor): value for tensor, value in made.items()})
        return data

    def _allocate(self, pack: Mapping[Tensor, Any], outputs: Sequence[Tensor]) -> dict[Tensor, Any]:
        devices = (value.device for tensor, value in pack.items() if _is_torch_tensor(value) and not tensor.is_pass_by_value)
        device = next(devices, None) or f"cuda:{self._device(self._built())}"
        return {
            tensor: torch.empty_strided(
                tensor.dim, tensor.stride, dtype=_cudnn_to_torch_data_type(tensor.data_type), device=device
            )
            for tensor in outputs
        }

    def __repr__(self) -> str:
        return "<cudnn.Graph, not built>" if self._graph is None else repr(self._graph)

    @_OnClassOrInstance
    def deserialize(self, *arguments: Any) -> Graph:
        """Restores what ``serialize()`` returned; ``Graph.deserialize(data)`` makes a new graph of it. Returns the graph."""
        graph = self._graph = pygraph(handle=self._handle)
        graph.deserialize(*arguments)
        for node in graph.nodes:
            for port, tensor in node.inputs.items():
                self._register(tensor.name or f"{node.name}::{port}", tensor)
            for port, tensor in node.outputs.items():
                self._register(f"{node.name}::{port}", tensor)
        self._prepare(graph)
        return self


def _shown(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else f"a {type(key).__name__}"


_default: list[Handle] = []


def get_default_handle(stream: Any = None) -> Handle:
    """This thread's handle for the current device, on a stream (PyTorch's current one by default)."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    handle = default_handle(device)
    if stream is not None:
        set_stream(handle, getattr(stream, "cuda_stream", stream))
    if all(handle is not other for other in _default):
        _default.append(handle)
    return handle


def destroy_default_handle() -> None:
    """Destroys the handles that ``get_default_handle`` gave out; the next call makes a new one."""
    while _default:
        destroy_handle(_default.pop())
