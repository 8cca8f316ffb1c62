"""Unaligned products built in the ways that programs build them: which way gives wrong results?"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from math import gcd
from typing import Any

import torch

import cudnn
from cudnn.enums import heur_mode
from support.fuzz import engines
from support.fuzz.case import Spec, packed
from support.fuzz.chain import Instruction, Program
from support.fuzz.harness import run
from support.fuzz.unaligned import UnalignedMatmulCase

_MODES = [heur_mode.A, heur_mode.FALLBACK]
VARIANTS = ["A", "lead16", "lead", "slice16", "slice", "before", "interleaved", "cast", "cast flat", "padded"]
_MIXED = ("interleaved", "cast", "cast flat", "padded")


def _is_mixed(case: UnalignedMatmulCase) -> bool:
    types = [case.inputs[name].dtype for name in "AB"]
    return "int8" in types and types[0] != types[1]


def _interleaved(case: UnalignedMatmulCase) -> UnalignedMatmulCase:
    inputs = dict(case.inputs)
    for name in "AB":
        spec = inputs[name]
        inputs[name] = dataclasses.replace(
            spec, strides=packed(spec.dims, [1, 0, 2] if spec.strides[2] == 1 else [2, 0, 1])
        )
    return dataclasses.replace(case, inputs=inputs)


def _led(case: UnalignedMatmulCase) -> UnalignedMatmulCase:
    rng = random.Random(case.seed)
    names = [name for name, spec in case.inputs.items() if not spec.by_value] + ["C"]
    return dataclasses.replace(case, leads={name: rng.choice([0, 1, 2, 3, 4, 5, 8]) for name in names})


def _sliced(case: UnalignedMatmulCase) -> UnalignedMatmulCase:
    rng = random.Random(case.seed)
    inputs, slices = dict(case.inputs), {}
    for name in rng.choice(["A", "B", "AB"]):
        spec = inputs[name]
        axis, start, tail = rng.choice([1, 2]), rng.randint(0, 9), rng.randint(0, 9)
        dims = [*spec.dims]
        slices[name] = (axis, start, start + dims[axis])
        dims[axis] += start + tail
        order = [0, 1, 2] if spec.strides[2] == 1 else [0, 2, 1]
        inputs[name] = dataclasses.replace(spec, dims=tuple(dims), strides=packed(dims, order))
    return dataclasses.replace(case, inputs=inputs, slices=slices)


def _preceded(case: UnalignedMatmulCase) -> UnalignedMatmulCase:
    rng = random.Random(case.seed)
    inputs, before = dict(case.inputs), {}
    for name in rng.choice(["A", "B", "AB"]):
        spec = inputs[name]
        op = rng.choice(["relu", "abs", "mul", "add"])
        arguments = ("x0",)
        if op in ("mul", "add"):
            axis = rng.choice([1, 2])
            dims = tuple(extent if i == axis else 1 for i, extent in enumerate(spec.dims))
            inputs[f"{name}_operand"] = Spec(dims, packed(dims, range(3)), spec.dtype, "positive")
            arguments = ("x0", f"{name}_operand")
        before[f"before_{name.lower()}"] = Program((Instruction(op, arguments, case.operand),))
    return dataclasses.replace(case, inputs=inputs, **before)


def candidates(case: UnalignedMatmulCase, device: str, all_engines: bool) -> list[tuple[Any, str]]:
    names = [name for name in VARIANTS if _is_mixed(case) or name not in _MIXED]
    if case.operand in ("int8", "float8_e4m3fn", "float8_e5m2") or _is_mixed(case):
        names = [name for name in names if name != "before"]
    return [(("variant", VARIANTS.index(name), name), "") for name in names]


def _cast(case: UnalignedMatmulCase, flat: bool, device: str) -> engines.Record:
    """The int8 operand widened by a graph of its own."""
    start = time.perf_counter()
    name = "A" if case.inputs["A"].dtype == "int8" else "B"
    spec = case.inputs[name]
    dims, strides = spec.dims, spec.strides
    if flat:
        dims, strides = (1, 1, spec.elements), (spec.elements, spec.elements, 1)
    target = getattr(torch, case.operand)
    graph = cudnn.pygraph(io_data_type=torch.int8, intermediate_data_type=torch.float32,
                          compute_data_type=torch.float32, backend=engines._BACKEND[device])  # fmt: skip
    x = graph.tensor(dims, strides, torch.int8)
    y = graph.identity(x).set_output(True).set_data_type(target).set_stride(strides)
    message, plan = "", ""
    try:
        graph.build(_MODES)
        plan = graph.get_plan_name()
        data = torch.randint(-128, 128, (spec.elements,), dtype=torch.int8, device=device)
        out = torch.full((spec.elements + 64,), float("nan"), dtype=target, device=device)
        graph.execute({x: data, y: out}, torch.empty(max(1, graph.get_workspace_size()), device=device))
        if not torch.equal(out[: spec.elements], data.to(target)) or not out[spec.elements :].isnan().all():
            message = "the widened operand is wrong"
    except cudnn.cudnnGraphNotSupportedError as error:
        return {"status": "refused", "message": str(error)[:300], "plan": plan, "notes": [], "seconds": 0}
    except RuntimeError as error:
        message = str(error)[:300]
    return {"status": "wrong" if message else "right", "message": message, "plan": plan, "notes": [],
            "seconds": round(time.perf_counter() - start, 3)}  # fmt: skip


def attempt(case: UnalignedMatmulCase, way: Any, tag: str, device: str) -> engines.Record:
    name = way[2]
    if name.startswith("cast"):
        return _cast(case, name == "cast flat", device)
    changes = {"interleaved": _interleaved, "lead16": _led, "lead": _led, "slice16": _sliced, "slice": _sliced,
               "before": _preceded, "padded": UnalignedMatmulCase.padded}  # fmt: skip
    case = changes.get(name, lambda case: case)(case)
    chosen: dict[str, Any] = {"notes": [], "leads": case.leads, "slices": case.slices}

    def build(graph: cudnn.pygraph) -> None:
        graph.validate()
        for node in graph.nodes:
            if name == "slice" and node.tag == "SLICE":
                node.outputs["Y"].set_alignment(gcd(16, node._offset()))
            for tensor in node.tensors():
                lead = case.leads.get(tensor.get_name() if tensor.get_name() in case.inputs else "C", 0)
                if name == "lead" and not tensor.get_is_virtual():
                    size = cudnn.datatypes._cudnn_to_torch_data_type(tensor.get_data_type()).itemsize
                    tensor.set_alignment(gcd(16, lead * size))
        graph.build_operation_graph()
        graph.create_execution_plans(_MODES)
        graph.build_plans()

    found = run(case, device, engines._BACKEND[device], build)
    status = {"passed": "right", "refused": "refused"}.get(found.status, "wrong")
    return {"status": status, "message": found.message[:400], "plan": found.plan,
            "seconds": round(found.seconds, 3), **chosen}  # fmt: skip


engines.candidates, engines.attempt = candidates, attempt

if __name__ == "__main__":
    sys.exit(engines.main())
