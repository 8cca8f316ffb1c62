"""What a graph says of its execution plans, and how it chooses among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cudnn.backend.device import DeviceProperties
from cudnn.backend.engine import Knob, OperationGraph
from cudnn.backend.plan import ExecutionPlan, PlanList
from cudnn.enums import behavior_note, knob_type, numerical_note
from cudnn.errors import make_error
from cudnn.pygraph.program import CudnnProgram
from cudnn.reference.executor import ReferenceProgram


class PlanMethods:
    """The methods of ``pygraph`` that list, describe and exclude execution plans."""

    name: str
    _device_property: DeviceProperties | None
    _operation_graph: OperationGraph | None
    _program: CudnnProgram | ReferenceProgram | None

    def _built(self, step: str) -> CudnnProgram | ReferenceProgram:
        if self._program is None:
            raise make_error(
                RuntimeError,
                f"graph {self.name!r}",
                step,
                "a graph without an operation graph",
                "a graph that was built",
                "call build(), or build_operation_graph(), first",
            )
        return self._program

    def _plans(self, step: str, index: int = 0) -> PlanList | None:
        """The plans of cuDNN, None for the reference executor, which has one plan."""
        program = self._built(step)
        if isinstance(program, ReferenceProgram):
            if index:
                raise RuntimeError(f"plan index: got {index}; allowed: 0, the reference executor's only plan.")
            return None
        if program.plans is None:
            raise make_error(
                RuntimeError,
                f"graph {self.name!r}",
                step,
                "a restored graph, which has one plan",
                "a graph built here",
                "build it from its description",
            )
        return program.plans

    def get_execution_plan_count(self) -> int:
        """How many engine configurations there are; 0 before ``create_execution_plans``."""
        if self._program is None:
            return 0
        if isinstance(self._program, ReferenceProgram):
            return int(self._program.plan is not None)
        return 1 if self._program.plans is None else len(self._program.plans)

    def _planned(self) -> CudnnProgram | ReferenceProgram:
        program = self._built("plan")
        if program.plan is None:
            raise make_error(
                RuntimeError, f"graph {self.name!r}", "plan", "none built", "one built plan", "call build_plans() first"
            )
        return program

    def _plan(self) -> ExecutionPlan | None:
        """The plan that ``execute`` runs, None for the reference executor."""
        program = self._planned()
        return None if isinstance(program, ReferenceProgram) else program.plan

    def get_workspace_size(self) -> int:
        """Bytes of device memory that ``execute`` needs in addition to the tensors."""
        plan = self._plan()
        return 0 if plan is None else self._cudnn().workspace_size(plan)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        """Bytes of device memory that the plan at an index needs."""
        plans = self._plans("get_workspace_size_plan_at_index", index)
        return 0 if plans is None else self._cudnn().workspace_size(plans.plan_at(index))

    def _cudnn(self) -> CudnnProgram:
        assert isinstance(self._program, CudnnProgram)
        return self._program

    def get_plan_name_at_index(self, index: int) -> str:
        """Name of a configuration: ``eng<engine>_k<knob>=<value>...``."""
        plans = self._plans("get_plan_name_at_index", index)
        return "reference" if plans is None else plans.config_at(index).tag

    def get_plan_name(self) -> str:
        """Name of the plan that ``execute`` runs."""
        plan = self._plan()
        return "reference" if plan is None else plan.config.tag

    def get_behavior_notes(self) -> list[behavior_note]:
        """Behavior notes of the plan that ``execute`` runs."""
        plan = self._plan()
        return [] if plan is None else [*plan.config.behavior_notes]

    def get_behavior_notes_for_plan_at_index(self, index: int) -> list[behavior_note]:
        """Behavior notes of a configuration."""
        plans = self._plans("get_behavior_notes_for_plan_at_index", index)
        return [] if plans is None else plans.config_at(index).behavior_notes

    def get_numerical_notes_for_plan_at_index(self, index: int) -> list[numerical_note]:
        """Numerical notes of a configuration."""
        plans = self._plans("get_numerical_notes_for_plan_at_index", index)
        return [] if plans is None else plans.config_at(index).numerical_notes

    def get_engine_count(self) -> int:
        """How many engines cuDNN knows for this graph, supported or not."""
        self._built("get_engine_count")
        return 1 if self._operation_graph is None else self._operation_graph.engine_count

    def get_knobs_for_engine(self, engine_id: int) -> list[Knob]:
        """The tuning parameters of an engine. RuntimeError where the engine does not support the graph."""
        self._built("get_knobs_for_engine")
        return [] if self._operation_graph is None else self._operation_graph.knobs(engine_id, self._device_property)

    def create_execution_plan(self, engine_id: int, knobs: Mapping[knob_type, int]) -> None:
        """Appends the configuration of an engine with given knobs. RuntimeError where the engine refuses them."""
        plans = self._plans("create_execution_plan")
        if plans is not None and self._operation_graph is not None:
            plans.append(self._operation_graph.engine_config(engine_id, knobs, self._device_property))
        elif isinstance(self._program, ReferenceProgram):
            self._program.make_plan(engine_id, knobs)

    def _restrict(self, step: str, argument: Any) -> None:
        plans = self._plans(step)
        if plans is not None:
            getattr(plans, step)(argument)

    def deselect_engines(self, engine_names: Sequence[str]) -> None:
        """Excludes configurations whose name contains one of the texts, such as ``"eng3"``."""
        self._restrict("deselect_engines", engine_names)

    def deselect_workspace_greater_than(self, workspace: int) -> None:
        """Excludes configurations that need more bytes of workspace."""
        self._restrict("deselect_workspace_greater_than", workspace)

    def deselect_numeric_notes(self, notes: Sequence[numerical_note]) -> None:
        """Excludes configurations that have any of the notes."""
        self._restrict("deselect_numeric_notes", notes)

    def deselect_behavior_notes(self, notes: Sequence[behavior_note]) -> None:
        """Excludes configurations that have any of the notes."""
        self._restrict("deselect_behavior_notes", notes)

    def select_numeric_notes(self, notes: Sequence[numerical_note]) -> None:
        """Excludes configurations that lack any of the notes."""
        self._restrict("select_numeric_notes", notes)

    def select_behavior_notes(self, notes: Sequence[behavior_note]) -> None:
        """Excludes configurations that lack any of the notes."""
        self._restrict("select_behavior_notes", notes)
