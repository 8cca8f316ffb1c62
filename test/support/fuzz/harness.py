"""Runs one case: memory full of NaN with guards round it, the graph, and what the formula says of the results."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import torch

import cudnn
from cudnn.datatypes import _cudnn_to_torch_data_type
from support.fuzz.approx import compare
from support.fuzz.case import Case, Spec
from support.graphs import MODES

_GUARD = 256  # bytes before and after, and the alignment of the data between them
_POISON = 255  # NaN in every floating-point type


@dataclass
class Outcome:
    """Outcome of a case: ``passed``, ``refused`` (no engine, or not supported), or ``failed``."""

    case: Case
    status: str
    message: str = ""
    plan: str = ""

    @property
    def reason(self) -> str:
        """The message without its numbers and names, the same for all cases that fail alike."""
        match = re.search(r"CUDNN_STATUS_[A-Z_]+[:;] .*?(?=;|$)", self.message)
        line = f"no engine: {match[0]}" if match else (self.message.splitlines() or [""])[0]
        return re.sub(r"'[^']*'|-?\d[\d.e+-]*", "#", line)[:160]


class Memory:
    """Elements of one type between guards, ``lead`` elements after an address that 256 bytes divide."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device, lead: int = 0) -> None:
        size = count * dtype.itemsize
        self._start = _GUARD + lead * dtype.itemsize
        self._all = torch.full((self._start + size + _GUARD,), _POISON, dtype=torch.uint8, device=device)
        self._written = torch.zeros(count, dtype=torch.bool, device=device)
        self.bytes = self._all[self._start : self._start + size]
        self.elements = self.bytes.view(dtype)

    def touched_outside(self, case: Case, spec: Spec, name: str) -> bool:
        """Whether a byte changed that belongs to no element of the output."""
        for _, view in case.views(spec, self._written, name):
            view.fill_(True)
        written = torch.zeros_like(self._all, dtype=torch.bool)
        inner = self._written.repeat_interleave(self.elements.element_size())
        written[self._start : self._start + len(inner)] = inner
        return bool(((self._all != _POISON) & ~written).any())

    def guards_hold(self) -> bool:
        return bool((self._all[: self._start] == _POISON).all() and (self._all[-_GUARD:] == _POISON).all())


def new_graph(case: Case, **options: Any) -> tuple[cudnn.pygraph, dict[str, cudnn.tensor], dict[str, cudnn.tensor]]:
    """The case's graph, its inputs and its outputs. ``options`` select where it runs."""
    dtypes = {f"{name}_data_type": getattr(torch, getattr(case, name)) for name in ("io", "intermediate", "compute")}
    graph = cudnn.pygraph(**dtypes, **options)
    tensors = {
        name: graph.tensor(spec.dims, spec.strides, spec.torch_dtype, is_pass_by_value=spec.by_value, name=name)
        for name, spec in case.inputs.items()
    }
    return graph, tensors, case.build(graph, tensors)


def plannable(case: Case, device: Any) -> str:
    """Asks cuDNN for plans for a described device; returns why it refuses, or the empty string. Needs no GPU."""
    graph, _, _ = new_graph(case, device_property=device)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans(MODES)
        graph.check_support()
    except cudnn.cudnnGraphNotSupportedError as error:
        return str(error)
    return ""


def run(case: Case, device: str, backend: str) -> Outcome:
    """Runs a case on ``device`` (``cuda`` or ``cpu``) by ``backend`` (``cudnn`` or ``reference``) and checks it."""
    outcome = Outcome(case, "failed")
    try:
        outcome.message, outcome.plan = _check(case, torch.device(device), backend)
        outcome.status = "failed" if outcome.message else "passed"
    except cudnn.cudnnGraphNotSupportedError as error:
        outcome.status, outcome.message = "refused", str(error)
    except Exception as error:
        outcome.message = f"{type(error).__name__}: {error}"
    return outcome


def _check(case: Case, device: torch.device, backend: str) -> tuple[str, str]:
    """What is wrong, or the empty string, and the name of the plan."""
    graph, tensors, outputs = new_graph(case, backend=backend)
    graph.build(MODES)
    generator = torch.Generator(device).manual_seed(case.seed)
    inputs: dict[str, Memory] = {}
    for name, spec in case.inputs.items():
        where = torch.device("cpu") if spec.by_value else device
        inputs[name] = Memory(spec.elements, spec.torch_dtype, where, case.lead(name))
        inputs[name].elements.copy_(spec.values(spec.elements, generator))
    data = {
        name: memory.elements
        if case.inputs[name].span
        else memory.elements.as_strided(case.inputs[name].dims, case.inputs[name].strides)
        for name, memory in inputs.items()
    }
    for name, value in case.derived(data).items():
        for position, view in case.views(case.inputs[name], inputs[name].elements, name):
            view.copy_(value[position])
    before = {name: memory.bytes.clone() for name, memory in inputs.items()}
    specs, results = {}, {}
    for name, tensor in outputs.items():
        dtype = _cudnn_to_torch_data_type(tensor.get_data_type())
        specs[name] = Spec(
            tuple(tensor.get_dim()), tuple(tensor.get_stride()), str(dtype).removeprefix("torch."), span=case.span(name)
        )
        results[name] = Memory(specs[name].elements, dtype, device, case.lead(name))
    workspace = Memory(graph.get_workspace_size(), torch.uint8, device)
    pack = {tensors[name]: memory.elements for name, memory in inputs.items()}
    pack |= {outputs[name]: memory.elements for name, memory in results.items()}
    graph.execute(pack, workspace.elements)
    if device.type == "cuda":
        torch.cuda.synchronize()
    plan = graph.get_plan_name()
    if not workspace.guards_hold():
        return "wrote outside the workspace", plan
    for name, memory in inputs.items():
        if not torch.equal(memory.bytes, before[name]) or not memory.guards_hold():
            return f"changed input {name}", plan
    for name, memory in results.items():
        if memory.touched_outside(case, specs[name], name):
            return f"wrote outside the elements of {name}", plan
    dense = {
        name: memory.elements.as_strided(specs[name].dims, specs[name].strides)
        for name, memory in results.items()
        if not specs[name].span
    }
    data = {name: x.to(device) for name, x in data.items()}
    expected = case.expected(data, dense)
    for name, memory in results.items():
        for position, view in case.views(specs[name], memory.elements, name):
            wanted = expected[name]
            entry = dataclasses.replace(
                wanted,
                value=wanted.value.expand(specs[name].dims)[position],
                error=None if wanted.error is None else wanted.error.expand(specs[name].dims)[position],
            )
            wrong = compare(view, entry)
            if wrong:
                return f"{name}: {wrong}", plan
    return case.objection(data, dense), plan
