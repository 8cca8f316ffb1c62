"""Matrix products whose rows are no multiples of 16 bytes: extents of 1 to 4,096 without regard to alignment."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch

import cudnn
from support.fuzz.case import Spec, packed, pick
from support.fuzz.chain import Drawing, Instruction, Program, most_types
from support.fuzz.matmul import MatmulCase

_LARGEST = 4096
_MOST = _LARGEST**2  # elements of a tensor: one matrix of the largest extents, or a batch of smaller ones
# Type of A, of B, of the product's operands once they are cast, and of the output.
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
    ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn", "float16"): 2,
    ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"): 1,
    ("float8_e5m2", "float8_e4m3fn", "float8_e5m2", "bfloat16"): 1,
    ("int8", "int8", "int8", "int32"): 3,
    ("int8", "int8", "int8", "float32"): 2,
}
_EPILOGUES = {(): 5, ("bias",): 2, ("gelu",): 2, ("bias", "gelu"): 1, ("relu",): 1, ("add",): 1, ("mul", "add"): 0.5}


def _extent(rng: random.Random) -> int:
    """From 1 to ``_LARGEST``, half of them small; some multiples of 8 or 2, so that some rows are aligned."""
    drawn = rng.randint(1, _LARGEST) if rng.random() < 0.5 else int(_LARGEST ** rng.random())
    unit = pick(rng, {1: 10, 2: 1, 4: 1, 8: 2, 16: 2})
    return max(1, drawn // unit * unit)


@dataclass(frozen=True)
class UnalignedMatmulCase(MatmulCase):
    """``C = after(A B)`` with A, B and C row-major or column-major, packed.

    Attributes:
        c_strides: Of the output.
        leads: By tensor, where its data lie: elements after an address that 256 bytes divide.
    """

    family = "unaligned"
    full = 2000
    most_refused = 0.01

    c_strides: tuple[int, ...]
    leads: dict[str, int]

    @classmethod
    def draw(cls, seed: int) -> UnalignedMatmulCase:
        rng = random.Random(seed)
        while True:
            case = cls._draw(rng, seed)
            if any(facts["row"] for name, facts in case.alignment().items() if name in "ABC"):
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
        inputs: dict[str, Spec] = {}
        for name, dims, transposed in (("A", (m, k), 0.3), ("B", (k, n), 0.5)):
            whole = (1 if shared == name else batch, *dims)
            order = [0, 2, 1] if rng.random() < transposed else [0, 1, 2]
            dtype = types["AB".index(name)]
            fill = "normal" if dtype != "int8" else "bytes" if types[:2] == ("int8", "int8") else "integers"
            inputs[name] = Spec(whole, packed(whole, order), dtype, fill, k**-0.5 if name == "A" else 1.0)
        before = [
            Program() if dtype == operand or dtype.startswith("float8") else
            Program((Instruction("identity", ("x0",), operand),))
            for dtype in types[:2]
        ]  # fmt: skip
        dims = (batch, m, n)
        column = "int8" not in types and rng.random() < 0.15  # cuDNN 9.19 writes int8 products row-major only
        order = [0, 2, 1] if column else [0, 1, 2]
        after, specs = cls._after(rng, dims, order, types)
        return cls(
            seed, types[0], "float32", "float32", inputs | specs, operand, output, *before, {}, after, None, False,
            packed(dims, order), {},
        )  # fmt: skip

    @staticmethod
    def _after(
        rng: random.Random, dims: tuple[int, ...], order: list[int], types: tuple[str, str, str, str]
    ) -> tuple[Program, dict[str, Spec]]:
        """One of the usual epilogues, or a short random program."""
        output = types[3]
        if output == "int32":
            return Program(), {}
        if order == [0, 1, 2] and "int8" not in types and rng.random() < 0.15:
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
        products = [node.tag for node in graph.nodes].index("MATMUL")
        for node in graph.nodes[products:]:  # cuDNN wants one order of memory behind the product
            for tensor in node.outputs.values():
                tensor.set_stride(self.c_strides)
        return outputs

    def padded(self) -> UnalignedMatmulCase:
        """The same product with every row on 16 bytes: a gap follows each row."""
        inputs = {name: dataclasses.replace(spec, strides=_padded(spec)) for name, spec in self.inputs.items()}
        return dataclasses.replace(self, inputs=inputs, c_strides=_padded(self._c()))

    def _c(self) -> Spec:
        batch = max(self.inputs["A"].dims[0], self.inputs["B"].dims[0])
        return Spec((batch, self.inputs["A"].dims[1], self.inputs["B"].dims[2]), self.c_strides, self.output)

    def alignment(self) -> dict[str, dict[str, Any]]:
        """By tensor: shape, type, layout, bytes of a row and of a batch entry modulo 16, and what divides all steps."""
        found: dict[str, dict[str, Any]] = {}
        for name, spec in (self.inputs | {"C": self._c()}).items():
            if spec.by_value:
                continue
            size = spec.torch_dtype.itemsize
            steps = [s * size for d, s in zip(spec.dims, spec.strides, strict=True) if d > 1 and s > 1]
            found[name] = {
                "dims": spec.dims, "type": spec.dtype, "order": "row" if spec.strides[2] == 1 else "column",
                "row": max(spec.strides[1:]) * size % 16 if prod(spec.dims[1:]) > 1 else 0,
                "batch": spec.strides[0] * size % 16 if spec.dims[0] > 1 else 0,
                "natural": gcd(16, *steps),
            }  # fmt: skip
        return found


def _padded(spec: Spec) -> tuple[int, ...]:
    if spec.by_value:
        return spec.strides
    order = [0, 1, 2] if spec.strides[2] == 1 else [0, 2, 1]
    row = 16 // spec.torch_dtype.itemsize
    return packed(spec.dims, order, -spec.dims[order[-1]] % row)


def natural_alignment(tensor: cudnn.tensor, dtype: torch.dtype) -> int:
    """The bytes that divide the address of every row, for data on 16 bytes."""
    pairs = zip(tensor.get_dim(), tensor.get_stride(), strict=True)
    return max(gcd(16, *(s * dtype.itemsize for d, s in pairs if d > 1 and s > 1)), dtype.itemsize)
