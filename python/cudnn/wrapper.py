"""``cudnn.Graph``: builds a graph in a ``with`` block from arrays, then calls it like a function."""

from __future__ import annotations

import dataclasses
import difflib
import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from cudnn.autotune import TuningReport, autotune
from cudnn.backend.handle import Handle, default_handle, destroy_handle, set_stream
from cudnn.datatypes import _cudnn_to_torch_data_type, _is_torch_tensor
from cudnn.enums import data_type, heur_mode
from cudnn.errors import find_signature_error, make_error
from cudnn.lazy import torch
from cudnn.pygraph.graph import pygraph
from cudnn.pygraph.node import NOT_SET
from cudnn.pygraph.schema import conforming
from cudnn.pygraph.serialization import refusing
from cudnn.pygraph.tensor import Tensor
from cudnn.strided import readable

if TYPE_CHECKING:
    from cudnn.pygraph.explain.model import Explanation
    from cudnn.pygraph.methods import Methods

    class Array(Protocol):
        """A PyTorch tensor, or another array with DLPack."""

        def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    Operations = Methods[Tensor | Array]
else:  # operations are looked up in the pygraph of the block
    Operations = object

_TENSOR_METHODS = frozenset({"tensor", "tensor_like", "tensor_scalar"})
_LIFE_CYCLE = frozenset(
    {
        "build",
        "build_operation_graph",
        "build_plan_at_index",
        "build_plans",
        "check_support",
        "create_execution_plan",
        "create_execution_plans",
        "deselect_behavior_notes",
        "deselect_engines",
        "deselect_numeric_notes",
        "deselect_workspace_greater_than",
        "execute",
        "execute_plan_at_index",
        "get_behavior_notes",
        "get_behavior_notes_for_plan_at_index",
        "get_engine_count",
        "get_execution_plan_count",
        "get_knobs_for_engine",
        "get_numerical_notes_for_plan_at_index",
        "get_plan_name_at_index",
        "key",
        "populate_cuda_graph",
        "select_behavior_notes",
        "select_numeric_notes",
        "update_cuda_graph",
        "validate",
    }
)
_INTEGERS = frozenset({data_type.INT8, data_type.INT32, data_type.INT64, data_type.UINT8, data_type.BOOLEAN})


class _OnClassOrInstance:
    """A method that makes a new instance when it is called on the class."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return partial(self._function, owner() if instance is None else instance)


class _Results(list[Any]):
    """The results of an operation with several outputs; None for those that were not requested."""

    def __init__(self, node: str, method: str, results: list[Any]) -> None:
        super().__init__(results)
        self._node, self._method = node, method

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name):
            raise AttributeError(f"'list' object has no attribute {name!r}")
        ports = ", ".join("_" if x is None else x.name.rpartition("::")[2].lower() or "_" for x in self)
        hint = f"write {ports} = graph.{self._method}(...)"
        raise make_error(AttributeError, self._node, name, "a list of results", "one tensor", hint)


class Graph(Operations):
    """A graph built in a ``with`` block and called like a function.

    Inside the block every operation of ``cudnn.pygraph`` is a method. It takes graph tensors, or arrays (PyTorch
    or anything with ``__dlpack__``), which describe the inputs: shape, strides, type. At the end of the block the graph
    is validated and its plan built. Then call it with data, in order or by name; outputs are allocated and returned.

    Names: operation ``name=`` (default ``"<method>.<i>"``); its inputs are ``"<node>::<argument>"``
    (``"<node>::<position>"`` for a positional one), its outputs ``"<node>::<PORT>"``: ``"SDPA::q"`` and ``"SDPA::O"``.

    Args:
        handle: For building and, by default, for calls. None or "auto": one per thread and device, on PyTorch's current
            stream.
        inputs: The order of positional arguments: names, uids, tensors, or the arrays used in the block. Default: the
            order of first use. Scalars on the CPU keep the value from the block, and may be passed too.
        outputs: The order of results, likewise. Default: the order of creation.
        heuristics: Modes queried in this order; default A, then FALLBACK. With CUDNN_FIND the first call with tensors
            (not addresses, and outside of a stream capture) measures every plan on them and keeps the fastest, as
            ``cudnn.autotune`` does.
        workspace_alloc: Allocates the workspace once, at the end of the block. A graph called from several threads at
            once needs False and a ``workspace=`` per call.
        **pygraph_kwargs: As for ``cudnn.pygraph``. Here intermediate and compute types default to FLOAT, the io
            type to that of the first tensor of floating-point numbers.
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
                raise make_error(
                    ValueError, "Graph", what, type(value).__name__, "a list or a tuple", f"pass [{value!r}]"
                )
        if isinstance(handle, str):
            _check_auto(handle)
            handle = None
        self._handle = handle
        self._heuristics = [heur_mode.A, heur_mode.FALLBACK] if heuristics is None else list(heuristics)
        self._untuned = heur_mode.CUDNN_FIND in self._heuristics
        self._workspace_alloc = workspace_alloc
        self._kwargs = {key: value for key, value in pygraph_kwargs.items() if value is not None}
        for key in ("intermediate_data_type", "compute_data_type"):
            if self._kwargs.get(key, NOT_SET) is NOT_SET:
                self._kwargs[key] = data_type.FLOAT
        self._io_order: tuple[Sequence[Any] | None, Sequence[Any] | None] = (inputs, outputs)
        self._graph: pygraph | None = None
        self._described: pygraph | None = None  # also after a build that failed
        self._open = False
        self._counters: dict[str, int] = {}
        self._node_names: set[str] = set()
        self._arrays: dict[
            int, tuple[Callable[[], Any], Tensor]
        ] = {}  # by id(), valid while the weak reference is alive
        self._names: dict[str, Tensor] = {}  # canonical names, in order of first use
        self._tensors: dict[Tensor, None] = {}  # every tensor that the user has seen
        self._inputs: list[Tensor] = []
        self._all_inputs: list[Tensor] = []  # with those that have a value from the block
        self._outputs: list[Tensor] = []
        self._values: dict[Tensor, Any] = {}  # scalars on the CPU, from the block
        self._device = "cpu"
        self._workspace: Any = None
        self._workspace_size = 0

    # Building.
    def __enter__(self) -> Graph:
        if self._graph is not None:
            raise make_error(
                RuntimeError, "Graph", "with block", "a second one", "one per Graph", "make a new cudnn.Graph"
            )
        self._graph = self._described = pygraph(handle=self._handle, **self._kwargs)
        self._open = True
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        graph = self._built()
        self._open, self._graph = False, None
        if error_type is not None:
            return
        self._default_outputs(graph)
        self._default_type(graph)
        self._order(graph, *self._io_order)
        graph.build(self._heuristics)
        self._prepare(graph)
        self._graph = graph

    def _built(self) -> pygraph:
        if self._graph is None:
            raise make_error(
                RuntimeError,
                "Graph",
                "use",
                "a graph that was not built",
                "a graph after its with block",
                "write 'with cudnn.Graph(...) as graph:' and add operations inside",
            )
        return self._graph

    @staticmethod
    def _default_outputs(graph: pygraph) -> None:
        """Without any set_output(True), marks the first output of every node whose outputs no node consumes."""
        outputs = [tensor for node in graph.nodes for tensor in node.outputs.values()]
        if any(not tensor.is_virtual for tensor in outputs):
            return
        consumed = {tensor for node in graph.nodes for tensor in node.inputs.values()}
        for node in graph.nodes:
            if consumed.isdisjoint(node.outputs.values()):
                next(iter(node.outputs.values())).set_output(True)

    def _default_type(self, graph: pygraph) -> None:
        if graph.context.io_data_type is not NOT_SET:
            return
        types = [t.data_type for t in self._tensors if not t.is_virtual and t.data_type is not NOT_SET]
        types.sort(
            key=_INTEGERS.__contains__
        )  # stable sort: integer types, such as those of indices or masks, come last
        if types:
            graph.context = dataclasses.replace(graph.context, io_data_type=types[0])

    def _prepare(self, graph: pygraph) -> None:
        """Allocates the workspace."""
        reference = graph._runs_on_reference()  # pyright: ignore[reportPrivateUsage]
        self._device = "cpu" if reference else f"cuda:{graph._device()}"  # pyright: ignore[reportPrivateUsage]
        self._workspace_size = graph.get_workspace_size()
        size = self._workspace_size if self._workspace_alloc else 0
        self._workspace = torch.empty(size, dtype=torch.uint8, device=self._device)

    def set_io_tuples(self, inputs: Sequence[Any] | None = None, outputs: Sequence[Any] | None = None) -> None:
        """Sets the order of positional inputs and of results. Inside the block it takes effect at the block's end."""
        if self._open:
            self._io_order = (inputs, outputs)
        else:
            self._order(self._built(), inputs, outputs)

    def _order(self, graph: pygraph, inputs: Sequence[Any] | None, outputs: Sequence[Any] | None) -> None:
        produced = {tensor for node in graph.nodes for tensor in node.outputs.values()}
        read = {t for node in graph.nodes for t in node.tensors() if t not in produced and t.value is None}
        self._tensors.update({t: None for node in graph.nodes for t in node.tensors() if t in read})
        self._all_inputs = [tensor for tensor in self._tensors if tensor in read]
        needed = [tensor for tensor in self._all_inputs if tensor not in self._values]
        written = [tensor for node in graph.nodes for tensor in node.outputs.values() if not tensor.is_virtual]
        self._inputs = needed if inputs is None else self._declared("inputs", inputs, self._all_inputs, needed)
        self._outputs = written if outputs is None else self._declared("outputs", outputs, written, written)

    def _declared(
        self, what: str, keys: Sequence[Any], allowed: Sequence[Tensor], needed: Sequence[Tensor]
    ) -> list[Tensor]:
        order: list[Tensor] = []
        for key in keys:
            tensor = self._find(key)
            if tensor is None or tensor not in allowed:
                why = " (a virtual tensor)" if tensor is not None and tensor.is_virtual else ""
                raise make_error(
                    ValueError,
                    "Graph",
                    what,
                    f"{_format_key(key)}{why}",
                    f"one of {self._listing(allowed)}",
                    "use these names",
                )
            if tensor in order:
                raise make_error(ValueError, "Graph", what, f"{_format_key(key)} twice", "each tensor once", "drop one")
            order.append(tensor)
        missing = [tensor for tensor in needed if tensor not in order]
        if missing:
            names = self._listing(missing)
            raise make_error(
                ValueError, "Graph", what, f"a list without {names}", f"all {what} of the graph", f"add {names} to it"
            )
        return order

    def _listing(self, tensors: Iterable[Tensor]) -> str:
        return ", ".join(repr(self._name(tensor)) for tensor in tensors)

    def _name(self, tensor: Tensor) -> str:
        return next((name for name, other in self._names.items() if other is tensor), tensor.name)

    def _find(self, key: Any) -> Tensor | None:
        """The tensor of a key: a graph tensor, a canonical or assigned name, a uid, or an array of the block."""
        if isinstance(key, Tensor):
            return key if key in self._tensors else None
        if isinstance(key, str):
            # If two tensors have the same name, the later one is meant.
            assigned = (tensor for tensor in reversed(self._tensors) if tensor.name == key)
            return self._names.get(key) or next(assigned, None)
        if isinstance(key, int):
            return next((tensor for tensor in self._tensors if tensor.uid == key), None)
        return self._tensor_of_array(key)

    def _tensor_of_array(self, array: Any) -> Tensor | None:
        reference, tensor = self._arrays.get(id(array), (None, None))
        return tensor if reference is not None and reference() is array else None

    def _operation(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _LIFE_CYCLE:
            raise make_error(
                RuntimeError,
                "Graph",
                name,
                "a call",
                "operations, tensors and queries: a cudnn.Graph runs the build steps automatically",
                "use cudnn.pygraph for the single steps",
            )
        if not callable(getattr(pygraph, name, None)):
            similar = difflib.get_close_matches(name, [other for other in dir(self) if not other.startswith("_")], 1)
            hint = f"write {similar[0]}" if similar else "look at dir(cudnn.Graph())"
            raise make_error(AttributeError, "Graph", "attribute", repr(name), "an operation of cudnn.pygraph", hint)
        method = getattr(self._built(), name)
        if not self._open:
            raise make_error(
                RuntimeError,
                "Graph",
                name,
                "a call after the with block",
                "operations inside it",
                "make a new cudnn.Graph",
            )
        return partial(self._make_tensor if name in _TENSOR_METHODS else self._add_node, method)

    if not TYPE_CHECKING:  # otherwise a type checker accepts any attribute name
        __getattr__ = _operation

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(pygraph) if not name.startswith("_"))} - _LIFE_CYCLE)

    def _make_tensor(self, method: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensor = method(*args, **kwargs)
        self._tensors[tensor] = None
        return tensor

    def _add_node(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        index = self._counters.get(method.__name__, 0)
        self._counters[method.__name__] = index + 1
        node = kwargs.pop("name", None) or f"{method.__name__}.{index}"
        if node in self._node_names:
            raise make_error(
                ValueError, "Graph", f"name of {method.__name__}", repr(node), "a name once", "choose another name"
            )
        self._node_names.add(node)
        positional = [self._argument(f"{node}::{position}", value) for position, value in enumerate(args)]
        keyword = {key: self._argument(f"{node}::{key}", value) for key, value in kwargs.items()}
        try:
            result = method(*positional, **keyword, name=node)
        except TypeError as error:
            signature_error = find_signature_error(
                f"{node} ({method.__name__})", method, positional, {**keyword, "name": node}
            )
            raise signature_error or error from None
        for index, tensor in enumerate(result if isinstance(result, (list, tuple)) else [result]):
            if isinstance(tensor, Tensor):
                self._register(tensor.name or f"{node}::{index}", tensor)
        return _Results(node, method.__name__, result) if isinstance(result, list) else result

    def _argument(self, name: str, value: Any) -> Any:
        """Arrays become graph tensors; graph tensors are registered under the argument's name."""
        if isinstance(value, (tuple, list)):
            items = [self._argument(f"{name}::{index}", item) for index, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if not isinstance(value, Tensor) and hasattr(value, "__dlpack__"):
            value = self._tensor_of_array(value) or self._from_array(name, value)
        if isinstance(value, Tensor):
            self._register(name, value)
        return value

    def _from_array(self, name: str, array: Any) -> Tensor:
        described = array.detach() if _is_torch_tensor(array) and array.requires_grad else array
        tensor = self._built().tensor_like(described, name)
        # Weak, so that a graph does not keep the memory of the arrays that described it.
        try:
            reference: Callable[[], Any] = weakref.ref(array)
        except TypeError:
            reference = partial(_identity, array)
        self._arrays[id(array)] = (reference, tensor)
        if tensor.is_pass_by_value:
            self._values[tensor] = described
        return tensor

    def _register(self, name: str, tensor: Tensor) -> None:
        self._names.setdefault(name, tensor)
        self._tensors[tensor] = None

    # Calling.
    def __call__(self, *args: Any, handle: Handle | int | str | None = None, workspace: Any = None) -> Any:
        """Runs the graph.

        ``graph(x, w)`` takes data in the order of the inputs and returns the output, or a list of them.
        ``graph({"mm::A": x, ...})`` takes data by name, tensor or uid; outputs that the dict lacks are allocated and
        added under their canonical names; returns the same dict. Data have the types and layouts of those of the
        block, or are other views of such memory.
        """
        graph = self._built()
        if self._open:
            raise make_error(
                RuntimeError, "Graph", "call", "inside the with block", "after it", "move the call out of the block"
            )
        if isinstance(handle, str):
            _check_auto(handle)
            handle = default_handle(graph._device())  # pyright: ignore[reportPrivateUsage]
        pack, allocated = self._bind(args)
        if self._untuned and self._tunable(graph, [workspace, *pack.values()]):
            self._untuned = False
            pass_none = (
                workspace is None and not self._workspace_alloc
            )  # then the tuned plan must not need a workspace either
            self._autotune(args, self._workspace if pass_none else workspace, handle=handle)
        if workspace is None:
            if self._workspace_size and not self._workspace_alloc:
                raise make_error(
                    RuntimeError,
                    "Graph",
                    "workspace",
                    "none",
                    f"{self._workspace_size} bytes on the device, since the graph was made with workspace_alloc=False",
                    "pass workspace=",
                )
            workspace = self._workspace
        graph.execute(pack, workspace, handle)
        outputs = list(allocated.values())
        if len(args) == 1 and isinstance(args[0], dict):
            args[0].update({self._name(tensor): value for tensor, value in allocated.items()})
            return args[0]  # pyright: ignore[reportUnknownVariableType]
        return outputs[0] if len(outputs) == 1 else outputs

    def _autotune(self, tensors: Any, workspace: Any = None, *, handle: Any = None, **options: Any) -> TuningReport:
        """``cudnn.autotune`` of this graph."""
        graph = self._built()
        pack, _ = self._bind((tensors,) if isinstance(tensors, dict) else tuple(tensors))
        report = autotune(graph, pack, workspace, handle=handle, **options)
        self._prepare(graph)
        return report

    @staticmethod
    def _tunable(graph: pygraph, data: Sequence[Any]) -> bool:
        """Whether a call can tune: not during a stream capture, and not with bare addresses, whose size is unknown."""
        if graph._runs_on_reference():  # pyright: ignore[reportPrivateUsage]
            return False
        return not torch.cuda.is_current_stream_capturing() and not any(isinstance(item, int) for item in data)

    def _bind(self, args: Sequence[Any]) -> tuple[dict[Tensor, Any], dict[Tensor, Any]]:
        """The data of a call by tensor, and the outputs among them that were allocated here."""
        if len(args) == 1 and isinstance(args[0], dict):
            return self._by_name(args[0])  # pyright: ignore[reportUnknownArgumentType]
        order = self._inputs if len(args) == len(self._inputs) else self._all_inputs
        if len(args) != len(order):
            names = self._listing(self._inputs)
            raise make_error(
                ValueError, "Graph", "arguments", str(len(args)), f"{len(self._inputs)}: {names}", "pass them in order"
            )
        pack = {**self._values, **dict(zip(order, args, strict=True))}
        allocated = self._allocate(pack, self._outputs)
        return {**pack, **allocated}, allocated

    def _by_name(self, data: dict[Any, Any]) -> tuple[dict[Tensor, Any], dict[Tensor, Any]]:
        data_of: dict[Tensor, Any] = {}
        for key, value in data.items():
            tensor = self._find(key)
            if tensor is None or (tensor not in self._all_inputs and tensor not in self._outputs):
                why = " (a virtual tensor; set_output(True) makes it an output)" if tensor in self._tensors else ""
                listing = self._listing([*self._all_inputs, *self._outputs])
                raise make_error(
                    ValueError,
                    "Graph",
                    "key",
                    f"{_format_key(key)}{why}",
                    f"{listing}, or their assigned names, uids or tensors",
                    "correct the key",
                )
            if tensor in data_of:
                got = f"{_format_key(key)}, another key for {self._name(tensor)!r}"
                raise make_error(ValueError, "Graph", "key", got, "one key for each tensor", "drop one")
            if value is not None:
                data_of[tensor] = value
        pack = {**self._values, **data_of}
        missing = [tensor for tensor in self._all_inputs if tensor not in pack]
        if missing:
            names = self._listing(missing)
            raise make_error(
                RuntimeError, "Graph", "inputs", f"no data for {names}", "data for every input", "add it to the dict"
            )
        allocated = self._allocate(pack, [tensor for tensor in self._outputs if tensor not in pack])
        return {**pack, **allocated}, allocated

    def _allocate(self, pack: Mapping[Tensor, Any], outputs: Sequence[Tensor]) -> dict[Tensor, Any]:
        devices = (_device_of(value) for tensor, value in pack.items() if not tensor.is_pass_by_value)
        device = next(filter(None, devices), self._device)
        allocated: dict[Tensor, Any] = {}
        for tensor in outputs:
            dtype = _cudnn_to_torch_data_type(tensor.data_type)
            if dtype is None or tensor.data_type is data_type.FP4_E2M1:
                raise make_error(
                    NotImplementedError,
                    "Graph",
                    f"output {self._name(tensor)!r}",
                    tensor.data_type.name,
                    "a type of which PyTorch can allocate single elements",
                    "call with a dict that holds memory for this output",
                )
            allocated[tensor] = torch.empty_strided(tensor.dim, tensor.stride, dtype=dtype, device=device)
        return allocated

    # Asking.
    def get_plan_name(self) -> str:
        """Name of the plan that a call runs."""
        return self._built().get_plan_name()

    def get_workspace_size(self) -> int:
        """Bytes of device memory that a call needs in addition to the tensors."""
        return self._built().get_workspace_size()

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """Bytes of device memory that the plan at an index needs."""
        return self._built().get_workspace_size_plan_at_index(index)

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """A copy of the tensor with this uid; raises RuntimeError if no tensor has it."""
        return self._built().query_tensor_attributes_of_uid(uid)

    def explain(self, minimize: bool = True, *, narrow: bool | None = None) -> Explanation:
        """As ``pygraph.explain``, also after a ``with`` block whose build failed."""
        return (self._described or self._built()).explain(minimize, narrow=narrow)

    def __repr__(self) -> str:
        return "<cudnn.Graph, not built>" if self._graph is None else repr(self._graph)

    # Keeping.
    def serialize(self) -> bytes:
        """The graph with its plan, names and order of arguments, for ``deserialize`` in another process."""
        document = json.loads(self._built().serialize())
        if not self._open:
            document["wrapper"] = {
                "names": {name: tensor.uid for name, tensor in self._names.items()},
                "inputs": [tensor.uid for tensor in self._inputs],
                "outputs": [tensor.uid for tensor in self._outputs],
                "values": [(tensor.uid, _number(array)) for tensor, array in self._values.items()],
            }
        return json.dumps(document).encode()

    @_OnClassOrInstance
    def deserialize(self, *arguments: Any) -> Graph:
        """Restores what ``serialize()`` of a ``Graph`` or a ``pygraph`` returned: ``graph = Graph.deserialize(data)``.

        A description without a plan is built here.
        """
        if self._graph is not None:
            raise make_error(
                RuntimeError,
                "Graph",
                "deserialize",
                "a graph with operations",
                "a new one",
                "call Graph.deserialize(data)",
            )
        graph = pygraph(handle=self._handle, **self._kwargs)
        graph.deserialize(*arguments)
        data = arguments[-1]
        document = json.loads(data if isinstance(data, str) else bytes(data))
        stored = document.get("wrapper", {"names": {}, "values": []})
        tensors = {tensor.uid: tensor for node in graph.nodes for tensor in node.tensors()}
        with refusing("names and values of a cudnn.Graph"):
            for name, uid in stored["names"].items():
                self._register(name, tensors[uid])
            for uid, number in stored["values"]:
                dtype = _cudnn_to_torch_data_type(tensors[uid].data_type)
                self._values[tensors[uid]] = torch.tensor(number, dtype=dtype, device="cpu")
            order = [conforming(stored.get(what), list[int] | None, what) for what in ("inputs", "outputs")]
        for node in graph.nodes:
            for port, tensor in node.inputs.items():
                self._register(tensor.name or f"{node.name}::{port}", tensor)
            for port, tensor in node.outputs.items():
                self._register(f"{node.name}::{port}", tensor)
        if graph.get_execution_plan_count() == 0:
            graph.build(self._heuristics)
        else:
            self._untuned = False
        self._order(graph, *order)
        self._prepare(graph)
        self._graph = self._described = graph
        return self


def _identity(value: Any) -> Any:
    return value


def _check_auto(handle: str) -> None:
    if handle != "auto":
        raise make_error(
            ValueError, "Graph", "handle", repr(handle), "a handle, None or 'auto'", "call create_handle()"
        )


def _device_of(array: Any) -> Any:
    """The PyTorch device of an array; None for an address."""
    if _is_torch_tensor(array):
        return array.device
    if not hasattr(array, "__dlpack_device__"):
        return None
    device_type, index = array.__dlpack_device__()
    return "cpu" if device_type == 1 else f"cuda:{index}"


def _number(array: Any) -> int | float:
    return (array if _is_torch_tensor(array) else torch.from_dlpack(readable(array))).item()


def _format_key(key: Any) -> str:
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
    """Destroys the handles that ``get_default_handle`` returned; its next call creates a new one."""
    while _default:
        destroy_handle(_default.pop())
