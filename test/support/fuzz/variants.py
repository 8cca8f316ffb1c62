"""Unaligned products built in the ways that programs build them: which way gives wrong results?"""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import cudnn
from cudnn.enums import heur_mode
from support.fuzz import engines, harness, unaligned
from support.fuzz.case import Spec, packed
from support.fuzz.chain import Instruction, Program
from support.fuzz.harness import run
from support.fuzz.unaligned import UnalignedMatmulCase

_A, _B, _FALLBACK = heur_mode.A, heur_mode.B, heur_mode.FALLBACK
_MODES = {"B": [_B], "fallback": [_FALLBACK]}
VARIANTS = ["A", "B", "B any", "fallback", "dynamic", "cache", "narrow", "interleaved", "offset16", "again"]
_EXAMPLES = [
    ((2, 3969, 4, 1089), "bfloat16", ["bfloat16", "float32"]),
    ((3, 2401, 3600, 3249), "int8", ["int32", "float32"]),
    ((4, 324, 64, 1521), "int8", ["int32", "float32"]),
    ((2, 784, 196, 9), "float16", ["float16", "float32"]),
]
_caches: dict[Any, Any] = {}


def examples() -> list[UnalignedMatmulCase]:
    """Those that were reported, in every layout and with every epilogue."""
    found = []
    for (b, m, n, k), dtype, outputs in _EXAMPLES:
        for layout in range(8):
            for output in outputs:
                for ops in [(), ("bias",), ("gelu",)]:
                    if (output == "int32" and ops) or (dtype == "int8" and layout & 4):
                        continue
                    fill = "bytes" if dtype == "int8" else "normal"
                    a, bb, c = ([0, 2, 1] if layout & bit else [0, 1, 2] for bit in (1, 2, 4))
                    inputs = {
                        "A": Spec((b, m, k), packed((b, m, k), a), dtype, fill, k**-0.5),
                        "B": Spec((b, k, n), packed((b, k, n), bb), dtype, fill),
                    }
                    steps = []
                    for op in ops:
                        arguments = [f"x{len(steps)}"]
                        if op == "bias":
                            inputs["t0"] = Spec((1, 1, n), packed((1, 1, n), c), output)
                            arguments.append("t0")
                        steps.append(Instruction(op, tuple(arguments)))
                    found.append(
                        UnalignedMatmulCase(
                            len(found), dtype, "float32", "float32", inputs, dtype, output, Program(), Program(), {},
                            Program(tuple(steps)), None, False, packed((b, m, n), c),
                        )
                    )  # fmt: skip
    return found


EXAMPLES = examples()


def case_of(seed: int) -> UnalignedMatmulCase:
    if seed < len(EXAMPLES):
        return EXAMPLES[seed]
    if seed % 2 == 0:
        return UnalignedMatmulCase.draw(seed)
    before, most = unaligned._extent, unaligned._MOST
    unaligned._extent, unaligned._MOST = (lambda rng: rng.randint(1, 64) ** 2), 2 * 4096**2
    try:
        return UnalignedMatmulCase.draw(seed)
    finally:
        unaligned._extent, unaligned._MOST = before, most


def _interleaved(case: UnalignedMatmulCase) -> UnalignedMatmulCase:
    """Entries of the batch side by side in each row of memory, as heads are."""
    inputs = dict(case.inputs)
    for name in "AB":
        spec = inputs[name]
        order = [1, 0, 2] if spec.strides[2] == 1 else [2, 0, 1]
        inputs[name] = dataclasses.replace(spec, strides=packed(spec.dims, order))
    return dataclasses.replace(case, inputs=inputs)


def candidates(case: UnalignedMatmulCase, device: str, all_engines: bool) -> list[tuple[Any, str]]:
    names = VARIANTS if case.inputs["A"].dims[0] > 1 else [name for name in VARIANTS if name != "interleaved"]
    return [(("variant", VARIANTS.index(name), name), "") for name in names]


def attempt(case: UnalignedMatmulCase, way: Any, tag: str, device: str) -> engines.Record:
    name = way[2]
    options: dict[str, Any] = {"backend": engines._BACKEND[device]}
    if name == "narrow":
        case = dataclasses.replace(case, intermediate=case.output if case.output != "int32" else "float32")
    if name == "interleaved":
        case = _interleaved(case)
    if name == "dynamic":
        options["is_dynamic_shape_enabled"] = True
    if name == "cache" and device == "cuda":
        spec = [(s.dtype, s.strides.index(min(s.strides[1:])), s.dims[0] > 1) for s in case.inputs.values()]
        key = repr((spec, case.output, case.after, case.c_strides[2] == 1))
        options["kernel_cache"] = _caches.setdefault(key, cudnn.create_kernel_cache())
    chosen: dict[str, Any] = {"notes": [], "count": 0}

    def build(graph: cudnn.pygraph) -> None:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans(_MODES.get(name.split()[0], [_A, _FALLBACK]))
        chosen["count"] = graph.get_execution_plan_count()
        if name == "B any":
            graph.build_plan_at_index(random.Random(case.seed).randrange(chosen["count"]))
        else:
            graph.build_plans()
        if device == "cuda":
            chosen["numeric"] = [note.name for note in graph._planned().plan.config.numerical_notes]
            chosen["notes"] = [note.name for note in graph.get_behavior_notes()]

    guard = harness._GUARD
    harness._GUARD = 272 if name == "offset16" else guard
    try:
        found = run(case, device, options.pop("backend"), build, **options)
    finally:
        harness._GUARD = guard
    status = {"passed": "right", "refused": "refused"}.get(found.status, "wrong")
    return {"status": status, "message": found.message[:400], "plan": found.plan,
            "seconds": round(found.seconds, 3), **chosen}  # fmt: skip


class _Source:
    """What engines.py asks for a case by its seed."""

    draw = staticmethod(case_of)


engines.candidates, engines.attempt, engines.UnalignedMatmulCase = candidates, attempt, _Source  # type: ignore

if __name__ == "__main__":
    sys.exit(engines.main())
