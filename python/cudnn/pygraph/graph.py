"""The graph builder: tensors, nodes, and the life cycle from description to execution."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_uint64
from typing import TYPE_CHECKING, Any

from cudnn import settings
from cudnn.arrays.layout import element_wise_layout
from cudnn.backend import library
from cudnn.backend.device import DeviceProperties, KernelCache
from cudnn.backend.engine import OperationGraph
from cudnn.backend.handle import Handle, default_handle, device_capability, gpu_available, resolve
from cudnn.backend.plan import ExecutionPlan, PlanList
from cudnn.datatypes import (
    _is_torch_tensor,  # pyright: ignore[reportPrivateUsage]
    element_bytes,
    library_type,
)
from cudnn.enums import build_plan_policy, heur_mode
from cudnn.errors import cudnnGraphNotSupportedError, make_error
from cudnn.pygraph import known_faults, serialization
from cudnn.pygraph.lowering import Apart, Bindings, Lowering, Uids
from cudnn.pygraph.methods import Methods
from cudnn.pygraph.node import NOT_SET, Context
from cudnn.pygraph.plan_methods import PlanMethods
from cudnn.pygraph.program import Before, CudnnProgram, address_of, changed_shapes, keys_by_uid, not_overridable
from cudnn.pygraph.tensor import Tensor
from cudnn.reference.executor import ReferenceProgram
from cudnn.strided import check_resolved

if TYPE_CHECKING:
    from cudnn.pygraph.explain.model import Explanation

_log = logging.getLogger("cudnn")
_DEFAULT_MODES = (heur_mode.A, heur_mode.FALLBACK)


class pygraph(PlanMethods, Methods[Tensor]):  # noqa: N801
    """A graph of operations on tensors.

    Describe it (``tensor``, ``tensor_like`` and one method per operation), mark outputs with ``set_output(True)``, call
    ``build()``, then ``execute()`` as often as you like. cuDNN runs it on a GPU; the reference executor (PyTorch) runs
    it for CPU tensors, on a machine without a GPU, with a handle created there, or where ``backend="reference"`` asks.

    Args:
        name: For messages and logs.
        io_data_type, intermediate_data_type, compute_data_type: Defaults for tensors in memory, for virtual tensors and
            for arithmetic: ``cudnn.data_type`` or ``torch.dtype``.
        handle: From ``create_handle()``. None: one per thread and device, on PyTorch's current stream.
        sm_count: Multiprocessors that the plan should use.
        sm_version: Compute capability to check for, such as 90. None: that of the device.
        kernel_cache: From ``create_kernel_cache()``; enables dynamic shapes.
        device_property: From ``create_device_properties()``: builds plans for that device, with or without a GPU here.
        is_dynamic_shape_enabled: Lets plans of one topology share compiled kernels.
        is_override_shape_enabled: Lets ``execute`` override shapes and strides.
        backend: "cudnn", "reference", or None for the rule above.
    """

    def __init__(
        self,
        name: str = "test_graph",
        io_data_type: object = NOT_SET,
        intermediate_data_type: object = NOT_SET,
        compute_data_type: object = NOT_SET,
        handle: Handle | int | None = None,
        sm_count: int | None = None,
        sm_version: int | None = None,
        kernel_cache: KernelCache | None = None,
        device_property: DeviceProperties | None = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
        backend: str | None = None,
    ) -> None:
        if backend not in (None, "cudnn", "reference"):
            raise make_error(
                ValueError, "pygraph", "backend", repr(backend), "'cudnn', 'reference' or None", "choose one"
            )
        if sm_version is None and device_property is not None:
            sm_version = device_property.sm_version
        super().__init__(
            Context(
                library_type(io_data_type),
                library_type(intermediate_data_type),
                library_type(compute_data_type),
                sm_version,
            )
        )
        self.name = name
        self._handle = None if handle is None else resolve(handle)
        self._sm_count = sm_count
        self._kernel_cache = kernel_cache
        self._device_property = device_property
        self._dynamic_shape = is_dynamic_shape_enabled or kernel_cache is not None
        self._override_shape = is_override_shape_enabled
        self._backend = backend
        self._arrays_on: set[str] = set()  # where the arrays lie that described tensors: "cpu", "gpu"
        self._operation_graph: OperationGraph | None = None
        self._program: CudnnProgram | ReferenceProgram | None = None
        self._prepared: Callable[..., None] | None = None
        settings.configure_logging()

    def tensor_like(self, source: Any, name: str = "") -> Tensor:
        """A tensor described by another: a graph tensor, a ``torch.Tensor`` or any object with ``__dlpack__``.

        A CPU array of one element is passed by value. One of more elements makes the reference executor run the graph.
        """
        tensor = super().tensor_like(source, name)
        if not isinstance(source, Tensor) and not tensor.is_pass_by_value:
            on_cpu = source.device.type == "cpu" if _is_torch_tensor(source) else source.__dlpack_device__()[0] == 1
            self._arrays_on.add("cpu" if on_cpu else "gpu")
        return tensor

    # From description to plans.
    def validate(self) -> None:
        """Infers shapes, strides and types; refuses what is wrong or unsupported, before any GPU work. Repeatable."""
        self._prepare()
        Uids(self.nodes)  # refuses a number given twice
        context = self._checked_for()
        for node in self.nodes:
            node.check(context)
        if not self._runs_on_reference() and library.is_available():
            known_faults.refuse(self.nodes, library.version())
        if not any(not tensor.is_virtual for node in self.nodes for tensor in node.outputs.values()):
            raise make_error(
                ValueError,
                f"graph {self.name!r}",
                "outputs",
                "none",
                "one or more tensors marked as output",
                "call set_output(True) on the tensors that you want to read",
            )
        if settings.configure_logging().isEnabledFor(logging.INFO):
            _log.info(json.dumps(self._description()))

    def _checked_for(self) -> Context:
        """The context with the compute capability of the device that runs the graph; the reference has no limits."""
        if self.context.sm_version is not None or self._runs_on_reference():
            return self.context
        found = device_capability(self._device())
        return dataclasses.replace(self.context, sm_version=None if found is None else 10 * found[0] + found[1])

    def _prepare(self) -> None:
        if not self.nodes:
            raise make_error(
                ValueError,
                f"graph {self.name!r}",
                "nodes",
                "none",
                "one operation or more",
                "call graph.matmul() or another",
            )
        if len(self._arrays_on) > 1:
            raise make_error(
                ValueError,
                f"graph {self.name!r}",
                "tensor_like",
                "arrays on the CPU and arrays on a GPU",
                "arrays of one device; only scalars stay on the CPU",
                "move them all to the GPU, or to the CPU",
            )
        produced: set[Tensor] = set()
        for node in self.nodes:
            produced.update(node.outputs.values())
        for node in self.nodes:
            for port, tensor in node.inputs.items():
                if tensor.is_virtual and not tensor.is_pass_by_value and tensor not in produced:
                    raise node.make_error(
                        ValueError,
                        port,
                        "a virtual tensor that no operation of this graph makes",
                        "results of this graph's operations, and tensors in memory",
                        "call set_output(True) on it in the graph that makes it",
                    )
        for node in self.nodes:
            node.prepare(self.context)
            for tensor in node.outputs.values():
                tensor.check_written(node.where)
        for node in self.nodes:
            for tensor in node.tensors():
                if tensor.data_type is NOT_SET:
                    raise make_error(
                        ValueError,
                        node.where,
                        f"tensor {tensor.name!r}",
                        "no data type",
                        "a cudnn.data_type",
                        "call set_data_type() on it, or give the graph io_data_type, intermediate_data_type",
                    )
            if node.computes and node.compute_data_type is NOT_SET:
                raise make_error(
                    ValueError,
                    node.where,
                    "compute_data_type",
                    "none",
                    "a cudnn.data_type",
                    "give it to the operation or to the graph",
                )

    def _runs_on_reference(self) -> bool:
        if self._backend is not None:
            return self._backend == "reference"
        if self._device_property is not None:
            return False
        if "cpu" in self._arrays_on:
            return True
        return self._handle.is_reference if self._handle is not None else not gpu_available()

    def _device(self) -> int:
        if self._handle is not None:
            return self._handle.device
        loaded = sys.modules.get("torch")
        return loaded.cuda.current_device() if loaded is not None and loaded.cuda.is_available() else 0

    def build_operation_graph(self) -> None:
        """Assigns uids and hands the operations to cuDNN (or to the reference executor)."""
        self._prepare()
        self._hand_over()

    def _hand_over(self) -> None:
        self._forget_program()
        if self._runs_on_reference():
            uids = Uids(self.nodes)
            for node in self.nodes:
                for tensor in node.tensors():
                    uids.assign(tensor)
            self._program = ReferenceProgram(self.nodes, keys_by_uid)
            return
        known_faults.refuse(self.nodes, library.version())
        lowering = Lowering(self.context, self.nodes, library.version())
        apart = lowering.run(self.nodes, known_faults.computed_apart(self.nodes, library.version()))
        before = [self._built_apart(item, lowering.bindings) for item in apart]
        handle = self._handle
        if handle is None and self._device_property is None:
            handle = default_handle(self._device())
        graph = self._operation_graph = lowering.operation_graph(handle, self._dynamic_shape, self._override_shape)
        if self._kernel_cache is not None:
            self._kernel_cache.attach(graph.descriptor)
        plans = PlanList(
            graph,
            device_properties=self._device_property,
            sm_count=self._sm_count,
            kernel_cache=self._kernel_cache,
            where=self._where(),
        )
        for engines in known_faults.faulty_engines(self.nodes, library.version()):
            _log.info("graph %r: %s left out: they compute it wrongly", self.name, engines)
            plans.deny(engines.denial_reason)
        self._offer_our_kernels(plans, lowering.bindings)
        self._program = CudnnProgram(
            plans,
            lowering.bindings,
            self._all_tensors(),
            self._device(),
            self._override_shape,
            self._outputs(),
            self._pools(),
            before,
            self._any_address(),
        )

    def _offer_our_kernels(self, plans: PlanList, bindings: Bindings) -> None:
        """Puts our kernels before cuDNN's engines where they are faster, or in their place where the graph asks."""
        if not any(hasattr(node, "implementation") for node in self.nodes):
            return
        from cudnn.pygraph import fused_engine

        number = self.context.sm_version
        capability = divmod(number, 10) if number else device_capability(self._device())
        restrictions = self._backend, self._device_property, self._sm_count, self._dynamic_shape, self._override_shape
        config = fused_engine.chosen(self.nodes, bindings, capability, offered=not any(restrictions))
        if config is not None:
            plans.offer(config, config.build, alone=config.asked)

    def _any_address(self) -> Callable[[int], pygraph] | None:
        """What builds this graph for data at any address; None where data at others than promised are refused."""
        if not any(node.any_address for node in self.nodes):
            return None
        return functools.partial(pygraph._for_any_address, weakref.ref(self))

    @staticmethod
    def _for_any_address(ref: weakref.ref[pygraph], workspace: int) -> pygraph:
        """The graph (alive, as it is called) built again for any address, with a plan of ``workspace`` bytes."""
        of = ref()
        assert of is not None
        graph = pygraph(handle=of._handle, sm_count=of._sm_count, device_property=of._device_property, backend="cudnn")
        graph.deserialize(repr(of))
        for tensor in graph._all_tensors():
            tensor.alignment = element_bytes(tensor.data_type)
        graph.build()
        graph.create_execution_plans(_DEFAULT_MODES)
        graph.deselect_workspace_greater_than(workspace)
        graph.build_plans()
        return graph

    def _built_apart(self, item: Apart, bindings: Bindings) -> Before:
        """A graph of the one node, with its workspace in this graph's."""
        (x,), (y,) = item.node.inputs.values(), item.node.outputs.values()
        graph = pygraph(
            f"{self.name}: {item.node.where}",
            compute_data_type=item.node.compute_data_type,
            handle=self._handle,
            device_property=self._device_property,
            backend="cudnn",
        )
        dim, *strides = element_wise_layout(x.dim, x.stride, y.stride)
        source = graph.tensor(dim, strides[0], x.data_type).set_uid(0).set_alignment(x.alignment)
        result = graph.identity(source).set_uid(1).set_output(True).set_data_type(y.data_type)
        result.set_stride(strides[1])
        graph.build(_DEFAULT_MODES)
        before = Before(item.node.where, graph, item.source, item.source_offset, item.offset, bindings.workspace_size)
        bindings.reserve(graph.get_workspace_size())
        _log.info(
            "graph %r: %s runs in a separate plan before the others, which costs time and workspace: cuDNN "
            "computes it wrongly inside their plan",
            self.name,
            item.node.where,
        )
        return before

    def _all_tensors(self) -> list[Tensor]:
        return [tensor for node in self.nodes for tensor in node.tensors()]

    def _pools(self) -> set[int | None]:
        return {node.inputs[port].uid for node in self.nodes for port in node.pool_ports}

    def _outputs(self) -> set[int]:
        return {tensor.get_uid() for node in self.nodes for tensor in node.outputs.values()}

    def _forget_program(self) -> None:
        self._program = self._operation_graph = None
        self._prepare_calls(None)

    def create_execution_plans(self, modes: Sequence[heur_mode]) -> None:
        """Asks cuDNN's heuristics for engine configurations, best first; a second call appends.

        Raises:
            cudnnGraphNotSupportedError: no configuration supports the graph.
        """
        self._check_modes("create_execution_plans", modes)
        plans = self._plans("create_execution_plans")
        if plans is not None:
            try:
                plans.add(modes)
            except cudnnGraphNotSupportedError:
                fallen_back = [node.fall_back() for node in self.nodes]
                if any(fallen_back):
                    self.build_operation_graph()
                    self.create_execution_plans(modes)
                elif not len(plans):  # else there is our kernels' one
                    raise
        elif isinstance(self._program, ReferenceProgram):
            self._program.make_plan()

    def check_support(self) -> None:
        """Raises ``cudnnGraphNotSupportedError`` where no configuration may be used. Builds nothing."""
        plans = self._plans("check_support")
        if plans is not None:
            plans.check_support()

    def build_plans(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Builds the first configuration that works, or all of them.

        Raises:
            cudnnGraphNotSupportedError: none works; the message has each reason.
        """
        plans = self._plans("build_plans")
        if plans is not None:
            plans.build(policy)
            self._adopt(plans.candidate)

    def build_plan_at_index(self, index: int) -> None:
        """Builds one configuration and makes it the one that ``execute`` runs."""
        plans = self._plans("build_plan_at_index", index)
        if plans is not None:
            plans.build_at(index)
            self._adopt(plans.candidate)

    def _adopt(self, plan: ExecutionPlan) -> None:
        program = self._program
        assert isinstance(program, CudnnProgram)
        program.use(plan)
        self._prepare_calls(None)
        if _log.isEnabledFor(logging.INFO):
            _log.info("graph %r: plan %s, workspace %d bytes", self.name, plan.config.tag, program.workspace_size(plan))

    def build(self, modes: Sequence[heur_mode] | None = None) -> None:
        """All steps from ``validate`` to ``build_plans``. Without heuristic modes only the first two."""
        if modes is not None:
            self._check_modes("build", modes)
        self.validate()
        self._hand_over()
        if modes is None:
            return
        self.create_execution_plans(modes)
        self.check_support()
        self.build_plans()

    def _check_modes(self, step: str, modes: Any) -> None:
        if not hasattr(modes, "__iter__") or {*map(type, modes)} - {heur_mode}:
            raise make_error(
                TypeError,
                f"graph {self.name!r}",
                f"modes of {step}",
                repr(modes),
                "a list of cudnn.heur_mode",
                "pass [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK], say",
            )

    # Execution.
    def execute(
        self,
        tensor_to_buffer: Mapping[Any, Any],
        workspace: Any = None,
        handle: Handle | int | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Runs the graph on the handle's stream. Allocates nothing and does not wait, so a CUDA graph can capture it.

        Only inputs that are negative views, whose memory has other values than they show, are copied first.

        Args:
            tensor_to_buffer: Data by graph tensor or uid: PyTorch or DLPack tensors, or, on a GPU, addresses. Entries
                that the graph does not use are ignored. Arrays have the graph's types, and its elements where its
                strides look for them; on a GPU, layouts are compared where addresses are new.
            workspace: ``get_workspace_size()`` bytes of device memory.
            handle: None: the graph's own, or the default one on PyTorch's current stream.
            override_uids, override_shapes, override_strides: Other shapes and strides for these tensors, in this call.

        Raises:
            ValueError: an array is missing, or has another type or layout than the graph's tensor.
            TypeError: a key or value of another kind; an address for the reference executor.
        """
        run = self._prepared or self._execute_any
        run(tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides)

    def _prepare_calls(self, prepared: Callable[..., None] | None) -> None:
        """Sets what ``execute`` runs: a function written out for data like those of the last call, None for any data.

        Such a function is also the instance's own ``execute``, which saves the frame of the method at every call: 40 ns
        of 4 us. A property that hands the function out takes as long as that frame, and a slot would leave the
        class without a method. The ``execute`` of a subclass, or one that a program put into this class, comes first.
        """
        self._prepared = prepared
        self.__dict__.pop("execute", None)
        if prepared is not None and type(self).execute is _execute:
            self.__dict__["execute"] = prepared

    def _execute_any(
        self,
        tensor_to_buffer: Mapping[Any, Any],
        workspace: Any = None,
        handle: Handle | int | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """``execute`` for data of any kind; prepares later calls for data like these."""
        program = self._planned()
        used = self._handle if handle is None else handle
        if isinstance(program, ReferenceProgram):
            shapes = {tensor.get_uid(): (tensor.dim, tensor.stride) for tensor in self._all_tensors()}
            changed = changed_shapes(shapes, (override_uids or [], override_shapes or [], override_strides or []))
            if changed:
                program = self._reference_of_other_shapes(changed)
            return program.execute(tensor_to_buffer, workspace, used)
        if override_uids is not None:
            override = (override_uids, override_shapes or [], override_strides or [])
            return program.execute(tensor_to_buffer, workspace, used, None, override)
        program.execute(tensor_to_buffer, workspace, used)
        # Weakly: of a cycle the garbage collector would destroy the plan, maybe in the middle of a stream capture.
        otherwise = functools.partial(_execute_again, weakref.ref(self))
        fast = program.specialised(tensor_to_buffer, workspace, self._handle, otherwise)
        if fast is not None:
            self._prepare_calls(fast)

    def _reference_of_other_shapes(self, changed: Mapping[int, tuple[list[int], list[int]]]) -> ReferenceProgram:
        """The reference executor for a call that overrides tensors in memory; virtual ones follow from them."""
        if not self._override_shape:
            raise not_overridable(changed)
        nodes = copy.deepcopy(self.nodes)
        for tensor in (tensor for node in nodes for tensor in node.tensors()):
            if tensor.get_uid() in changed:
                tensor.dim, tensor.stride = map(list, changed[tensor.get_uid()])
            elif tensor.is_virtual and tensor.value is None:
                tensor.dim, tensor.stride = [], []
        for node in nodes:
            node.prepare(self.context)
        return ReferenceProgram(nodes, keys_by_uid)

    def execute_plan_at_index(
        self,
        tensor_to_buffer: Mapping[Any, Any],
        workspace: Any,
        index: int,
        handle: Handle | int | None = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """As ``execute``, with the built plan at an index."""
        plans = self._plans("execute_plan_at_index", index)
        if plans is None:
            return self._execute_any(
                tensor_to_buffer, workspace, handle, override_uids, override_shapes, override_strides
            )
        program = self._cudnn()
        plan = program.bound(plans.plan_at(index))
        override = (override_uids, override_shapes or [], override_strides or []) if override_uids else None
        program.execute(tensor_to_buffer, workspace, self._handle if handle is None else handle, plan, override)

    def populate_cuda_graph(
        self, handle: Handle | int | None, tensor_to_buffer: Mapping[Any, Any], workspace: Any, cuda_graph: int
    ) -> None:
        """Adds what ``execute`` would queue to an empty CUDA graph, without a stream.

        Args:
            handle, tensor_to_buffer, workspace: As for ``execute``; their memory outlives the CUDA graph.
            cuda_graph: Address of the ``cudaGraph_t``.

        Raises:
            cudnnGraphNotSupportedError: the plan lacks the note SUPPORTS_CUDA_GRAPH_NATIVE_API, or the reference
                executor runs the graph.
            ValueError: the CUDA graph has nodes.
        """
        self._gpu_program("populate_cuda_graph").to_cuda_graph(
            tensor_to_buffer, workspace, self._handle if handle is None else handle, int(cuda_graph), update=False
        )

    def update_cuda_graph(
        self, handle: Handle | int | None, tensor_to_buffer: Mapping[Any, Any], workspace: Any, cuda_graph: int
    ) -> None:
        """Passes other buffers to the nodes that ``populate_cuda_graph`` added to this CUDA graph.

        An executable instantiated before takes it over with ``cudaGraphExecUpdate``.
        """
        self._gpu_program("update_cuda_graph").to_cuda_graph(
            tensor_to_buffer, workspace, self._handle if handle is None else handle, int(cuda_graph), update=True
        )

    def _gpu_program(self, step: str) -> CudnnProgram:
        program = self._planned()
        if isinstance(program, ReferenceProgram):
            raise make_error(
                cudnnGraphNotSupportedError,
                f"graph {self.name!r}",
                step,
                "a graph of the reference executor",
                "one that cuDNN runs",
                "build and call it on a machine with a GPU",
            )
        return program

    # Calls with bare addresses, under the names that programs for cuDNN's other Python frontend know.
    def _get_variant_pack_uids_sorted(self) -> list[int]:
        """The uids whose addresses a call needs, in ascending order."""
        program = self._planned()
        return [*(program.uids if isinstance(program, ReferenceProgram) else program.bindings.user)]

    def _prepare_variant_pack_template(self) -> None:
        """Does nothing: plans keep their variant packs themselves."""
        self._planned()

    def _execute(
        self, pointers: Mapping[int, int], workspace: int, handle: Handle | int | None = None, *override: Any
    ) -> None:
        self._execute_any(pointers, workspace, handle, *override)

    def _execute_plan_at_index(
        self,
        pointers: Mapping[int, int],
        workspace: int,
        index: int,
        handle: Handle | int | None = None,
        *override: Any,
    ) -> None:
        self.execute_plan_at_index(pointers, workspace, index, handle, *override)

    def _execute_with_ptrs(self, pointers: Sequence[int], workspace: int, handle: Handle | int | None = None) -> None:
        """Addresses in the order of ``_get_variant_pack_uids_sorted()``. Nothing is checked but their number."""
        uids = self._get_variant_pack_uids_sorted()
        if len(pointers) != len(uids):
            raise make_error(
                ValueError,
                "_execute_with_ptrs",
                "pointers",
                len(pointers),
                f"{len(uids)}, for the uids {uids}",
                "call _get_variant_pack_uids_sorted()",
            )
        program = self._planned()
        used = self._handle if handle is None else handle
        if isinstance(program, ReferenceProgram):
            return program.execute(dict(zip(uids, pointers, strict=True)), workspace, used)
        ready = default_handle(program.device) if used is None else resolve(used)
        assert program.plan is not None
        program.launch(pointers, workspace, ready, program.plan)

    def _execute_with_raw_ptrs(
        self, address: int, count: int, workspace: int, handle: Handle | int | None = None
    ) -> None:
        """As ``_execute_with_ptrs``, with the address of an array of ``count`` pointers."""
        self._execute_with_ptrs([*(c_uint64 * count).from_address(address)], workspace, handle)

    @staticmethod
    def _get_data_ptr(data: Any) -> int:
        """The address of a PyTorch or DLPack tensor's first element, or an address as it is."""
        check_resolved("_get_data_ptr", "data", data)
        return address_of(data)

    # Descriptions.
    def _where(self) -> str:
        """How messages about the whole graph call it: its name, and the first of its nodes."""
        named = [node.where for node in self.nodes[:6]] + ["..."] * (len(self.nodes) > 6)
        return f"graph {self.name!r} of {', '.join(named)}"

    def explain(self, minimize: bool = True, *, narrow: bool | None = None) -> Explanation:
        """Nodes, tensors, plans and refusals, to print, to plot, or to show in a notebook: ``cudnn.pygraph.explain``.

        Changes nothing in the graph. ``minimize`` looks for the smallest sets of nodes where cuDNN refuses the graph,
        with heuristics, and perhaps builds, of parts of it. ``narrow`` is its deprecated name.
        """
        from cudnn.pygraph.explain.collect import explain

        if narrow is not None:
            warnings.warn("explain(narrow=...) is deprecated: use minimize", DeprecationWarning, stacklevel=2)
        return explain(self, minimize if narrow is None else narrow)

    def _description(self) -> dict[str, Any]:
        return serialization.describe(self.name, self.context, self.nodes, "cpu" in self._arrays_on)

    def __repr__(self) -> str:
        return json.dumps(self._description(), indent=4)

    def key(self) -> int:
        """A hash of the description: equal for equal graphs, also across processes."""
        description = self._description()
        if self._dynamic_shape:
            for tensor in description["tensors"]:
                del tensor["dim"], tensor["stride"]
        digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """A copy of the tensor with this uid. RuntimeError if no tensor has it."""
        for node in self.nodes:
            for tensor in node.tensors():
                if tensor.uid == uid:
                    return Tensor.like(tensor, tensor.name).set_uid(uid)
        raise make_error(
            RuntimeError,
            f"graph {self.name!r}",
            "uid",
            str(uid),
            "the uid of a tensor of this graph",
            "look at repr(graph), which lists all tensors",
        )

    def serialize(self) -> bytes:
        """The graph and its plan, if built, with the compiled kernels, for ``deserialize`` in another process."""
        program = self._program
        cudnn = program if isinstance(program, CudnnProgram) else None
        planned = program is not None and program.plan is not None
        if cudnn is not None and planned and cudnn.plan is not None and cudnn.plan.is_rebuilt:
            cudnn = None
        return serialization.dump(self._description(), cudnn, planned, self._override_shape)

    def deserialize(self, *arguments: Any) -> None:
        """Restores a graph: ``deserialize(data)`` or ``deserialize(handle, data)`` on a fresh ``pygraph()``.

        Data with a plan can be executed at once, on a GPU of the kind it was built for; on a machine without a GPU the
        reference executor runs it. What the reference executor ran there gets a plan of cuDNN here, unless the graph
        was described by CPU arrays. Data without a plan, and JSON text (``repr(graph)``), restore the description only.
        """
        *handles, data = arguments
        if handles and handles[0] is not None:
            self._handle = resolve(handles[0])
        restored = serialization.load(data)
        self._forget_program()
        self.name, self.nodes = restored.name, restored.nodes
        self.context, self._override_shape = restored.context, restored.override_shape
        self._arrays_on = {"cpu"} if restored.on_cpu else set()
        if restored.plan is None:
            return
        if self._runs_on_reference():
            self._program = ReferenceProgram(self.nodes, keys_by_uid)
            self._program.make_plan()
            return
        if not restored.plan:
            _log.info("graph %r was serialized without a plan of cuDNN: one is built here", self.name)
            return self.build(_DEFAULT_MODES)
        handle = default_handle(self._device()) if self._handle is None else self._handle
        before = [Before(node, _restored(text, handle), *places) for node, text, *places in restored.before]
        program = self._program = CudnnProgram(
            None,
            restored.bindings,
            self._all_tensors(),
            handle.device,
            restored.override_shape,
            self._outputs(),
            self._pools(),
            before,
            self._any_address(),
        )
        program.use(ExecutionPlan.from_json(handle, restored.plan, restored.origin))


def _restored(text: str, handle: Handle) -> pygraph:
    graph = pygraph()
    graph.deserialize(handle, text.encode())
    return graph


def _execute_again(graph: weakref.ref[pygraph], *arguments: Any) -> None:
    """``_execute_any`` of a graph that is alive, since it is being called."""
    called = graph()
    assert called is not None
    called._execute_any(*arguments)  # pyright: ignore[reportPrivateUsage]


_execute = pygraph.execute
