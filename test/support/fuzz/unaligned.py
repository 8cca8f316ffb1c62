"""Matrix products whose rows are no multiples of 16 bytes: extents of 1 to 4,096 without regard to alignment."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import gcd

import cudnn
from support.fuzz.case import Spec, packed, pick
from support.fuzz.chain import Drawing, Instruction, Program, most_types
from support.fuzz.matmul import FP8, MatmulCase

_LARGEST = 4096
_MOST = _LARGEST**2  # elements of a tensor: one matrix of the largest extents, or a batch of smaller ones
# Type of A, of B, of the MMA operands after casts, and of the output.
_TYPES: dict[tuple[str, str, str, str], float] = {
    ("float16", "float16", "float16", "float16"): 6,
    ("bfloat16", "bfloat16", "bfloat16", "bfloat16"): 6,
    ("float16", "float16", "float16", "float32"): 1,
    ("bfloat16", "bfloat16", "bfloat16", "float32"): 1,
    ("float32", "float32", "float32", "float32"): 1,
    ("float16", "bfloat16", "float16", "float16"): 0.7,
    ("int8", "float16", "float16", "float16"): 0.7,
    ("bfloat16", "int8", "bfloat16", "bfloat16"): 0.7,
    ("float32", "float16", "float16", "float16"): 0.7,
    ("float8_e4m3fn", "float16", "float16", "float16"): 0.3,
    ("bfloat16", "float8_e4m3fn", "bfloat16", "bfloat16"): 0.3,
    ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn", "float16"): 2,
    ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"): 1,
    ("float8_e5m2", "float8_e4m3fn", "float8_e5m2", "bfloat16"): 1,
    ("int8", "int8", "int8", "int32"): 3,
    ("int8", "int8", "int8", "float32"): 2,
}
_EPILOGUES = {(): 5, ("bias",): 2, ("gelu",): 2, ("bias", "gelu"): 1, ("relu",): 1, ("add",): 1, ("mul", "add"): 0.5}


def _extent(rng: random.Random) -> int:
    """From 1 to ``_LARGEST``, half of them small; some multiples of 8 or 2, so that some rows are aligned."""
    extent = rng.randint(1, _LARGEST) if rng.random() < 0.5 else int(_LARGEST ** rng.random())
    unit = pick(rng, {1: 10, 2: 1, 4: 1, 8: 2, 16: 2})
    return max(1, extent // unit * unit)


@dataclass(frozen=True)
class UnalignedMatmulCase(MatmulCase):
    """``C = after(before_a(A) before_b(B))`` with A, B and C row-major or column-major.

    Attributes:
        c_strides: Of the output.
        leads: By tensor, where its data lie: elements after an address that 256 bytes divide.
        says_so: Whether the graph is told.
    """

    family = "unaligned"
    full = 2000
    most_refused = 0.01

    c_strides: tuple[int, ...]
    leads: dict[str, int]
    says_so: bool

    @classmethod
    def draw(cls, seed: int) -> UnalignedMatmulCase:
        rng = random.Random(seed)
        while True:
            case = cls._draw(rng, seed)
            if any(map(_has_unaligned_rows, (case.inputs["A"], case.inputs["B"], case.product))):
                return case

    @classmethod
    def _draw(cls, rng: random.Random, seed: int) -> UnalignedMatmulCase:
        types = pick(rng, _TYPES)
        operand, output = types[2:]
        m, n, k = (_extent(rng) for _ in range(3))
        batch = pick(rng, {1: 3, 2: 2, 3: 1, 4: 1})
        if batch * max(m * n, m * k, n * k) > _MOST:
            batch = 1
        shared = pick(rng, {"": 6, "A": 0.3, "B": 2})
        sliced = pick(rng, {"": 20, "A": 1, "B": 1, "AB": 1})
        inputs: dict[str, Spec] = {}
        slices: dict[str, tuple[int, int, int]] = {}
        for name, dims, transposed in (("A", (m, k), 0.3), ("B", (k, n), 0.5)):
            padded = [1 if shared == name else batch, *dims]
            if name in sliced:
                axis, start = rng.choice([1, 2]), rng.randint(0, 9)
                slices[name] = (axis, start, start + padded[axis])
                padded[axis] += start + rng.randint(0, 9)
            order = [0, 2, 1] if rng.random() < transposed else [0, 1, 2]
            dtype = types["AB".index(name)]
            fill = "normal" if dtype != "int8" else "bytes" if types[:2] == ("int8", "int8") else "integers"
            inputs[name] = Spec(tuple(padded), packed(padded, order), dtype, fill, k**-0.5 if name == "A" else 1.0)
        eight_bits = operand == "int8" or operand in FP8
        before = [
            cls._before(rng, inputs, name, dtype, operand, 0.0 if eight_bits or name in slices else 0.06)
            for name, dtype in zip("AB", types[:2], strict=True)
        ]
        dims = (batch, m, n)
        column = "int8" not in types and rng.random() < 0.15  # cuDNN 9.19 writes int8 products row-major only
        order = [0, 2, 1] if column else [0, 1, 2]
        after, specs = cls._after(rng, dims, order, types, plain=not any(program.instructions for program in before))
        inputs |= specs
        leads: dict[str, int] = {}
        if rng.random() < 0.1:
            places = [name for name, spec in inputs.items() if not spec.by_value] + ["C"]
            leads = {name: rng.choice([0, 1, 2, 4, 8]) for name in places}
        return cls(
            seed,
            types[0],
            "float32",
            "float32",
            inputs,
            operand,
            output,
            *before,
            slices,
            after,
            None,
            False,
            packed(dims, order),
            leads,
            rng.random() < 0.5,
        )

    @property
    def product(self) -> Spec:
        """What the graph writes."""
        return Spec(tuple(self._dims()), self.c_strides, self.output)

    @staticmethod
    def _after(
        rng: random.Random, dims: tuple[int, ...], order: list[int], types: tuple[str, str, str, str], plain: bool
    ) -> tuple[Program, dict[str, Spec]]:
        """One of the usual epilogues; after a plain product now and then a short random program."""
        output = types[3]
        if output == "int32":
            return Program(), {}
        if plain and order == [0, 1, 2] and "int8" not in types and rng.random() < 0.15:
            shapes = {dims: 2, (1, 1, dims[2]): 2, (1, dims[1], 1): 1, (1, *dims[1:]): 1}
            drawing = Drawing(rng, dims, order, shapes, most_types(output, rng), (-9.0, 9.0))
            return drawing.program(rng.randint(1, 3)), drawing.specs
        steps: list[Instruction] = []
        specs: dict[str, Spec] = {}
        for op in pick(rng, _EPILOGUES):
            arguments = [f"x{len(steps)}"]
            if op in ("bias", "add", "mul"):
                name, shape = f"t{len(specs)}", (1, 1, dims[2]) if op == "bias" else dims
                specs[name] = Spec(shape, packed(shape, order), pick(rng, most_types(output, rng)))
                arguments.append(name)
            steps.append(Instruction(op, tuple(arguments)))
        return Program(tuple(steps)), specs

    def lead(self, name: str) -> int:
        return self.leads.get(name, 0)

    def build(self, graph: cudnn.pygraph, tensors: dict[str, cudnn.tensor]) -> dict[str, cudnn.tensor]:
        outputs = super().build(graph, tensors)
        for name, lead in self.leads.items() if self.says_so else ():
            tensor, spec = (outputs["C"], self.product) if name == "C" else (tensors[name], self.inputs[name])
            tensor.set_alignment(gcd(16, lead * spec.torch_dtype.itemsize))
        matmul_index = [node.tag for node in graph.nodes].index("MATMUL")
        for node in graph.nodes[matmul_index:]:  # cuDNN wants one memory order after the matmul
            for tensor in node.outputs.values():
                tensor.set_stride(self.c_strides)
        return outputs


def _has_unaligned_rows(spec: Spec) -> bool:
    return spec.dims[1] * spec.dims[2] > 1 and max(spec.strides[1:]) * spec.torch_dtype.itemsize % 16 != 0
