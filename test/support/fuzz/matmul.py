"""Matmuls: types, batches, layouts, prologues and epilogues."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

import cudnn
from support.fuzz.approx import UNIT, Approx, contraction, reduce
from support.fuzz.case import Case, Spec, extent, packed, pick
from support.fuzz.chain import Drawing, Instruction, Program, most_types

# cuDNN 9.19 has no engine for the last three.
_REDUCTIONS = {"ADD": 4, "MAX": 2, "MIN": 2, "AMAX": 2, "AVG": 0.1, "NORM1": 0.1, "NORM2": 0.1}
# Type of A, of B, of the MMA operands after casts, and of the output.
_TYPES: dict[tuple[str, str, str, str], float] = {
    ("float16", "float16", "float16", "float16"): 8,
    ("bfloat16", "bfloat16", "bfloat16", "bfloat16"): 8,
    ("float32", "float32", "float32", "float32"): 4,
    ("float16", "float16", "float16", "float32"): 2,
    ("bfloat16", "bfloat16", "bfloat16", "float32"): 2,
    ("float16", "bfloat16", "float16", "float16"): 1,
    ("bfloat16", "float16", "bfloat16", "float32"): 1,
    ("int8", "float16", "float16", "float16"): 1,
    ("bfloat16", "int8", "bfloat16", "bfloat16"): 1,
    ("float32", "float16", "float16", "float16"): 1,
    ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn", "float16"): 2,
    ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"): 1,
    ("float8_e5m2", "float8_e4m3fn", "float8_e5m2", "bfloat16"): 1,
    ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fn", "float32"): 1,
    ("int8", "int8", "int8", "int32"): 2,
    ("int8", "int8", "int8", "float32"): 1,
}
FP8 = ("float8_e4m3fn", "float8_e5m2")
_PARTIAL = ("float16", "bfloat16")  # cuBLASLt may round the parts of a split sum to the output's type


@dataclass(frozen=True)
class MatmulCase(Case):
    """``C = after(before_a(A) before_b(B))``, reduced as ``reduction`` asks.

    Attributes:
        operand: Type to which the MMA operands are cast, where an input has another type.
        output: Type of what the graph writes.
        before_a, before_b: Programs on A and B; casts are among them.
        slices: By ``A`` or ``B``: the slice of the input that is read, as (axis, start, stop).
        after: Program on the result of the matmul.
        reduction: Mode and the axes that it removes.
        whole: Whether what is reduced is an output too.
    """

    family = "matmul"
    full = 2100
    most_refused = 0.1

    operand: str
    output: str
    before_a: Program
    before_b: Program
    slices: dict[str, tuple[int, int, int]]
    after: Program
    reduction: tuple[str, tuple[int, ...]] | None
    product_is_output: bool

    @classmethod
    def draw(cls, seed: int) -> MatmulCase:
        rng = random.Random(seed)
        types = pick(rng, _TYPES)
        operand, output = types[2:]
        eight_bits = operand in FP8 or "int8" in types[:2]
        rank = pick(rng, {3: 0.98, 4: 0.02})  # cuDNN 9.19 multiplies tensors of three dimensions only
        largest = pick(rng, {64: 2, 256: 4, 768: 1})
        m, n, k = (extent(rng, largest) for _ in range(3))
        if eight_bits:  # sixteen bytes a row
            m, n, k = (max(16, extent // 16 * 16) for extent in (m, n, k))
        batch = [pick(rng, {1: 3, 2: 1, 3: 1, 8: 1, 5: 0.5}) for _ in range(rank - 2)]
        shared = pick(rng, {"": 6, "A": 0.2, "B": 2})
        slices: dict[str, tuple[int, int, int]] = {}
        sliced = () if eight_bits else pick(rng, {(): 30, ("A",): 1, ("B",): 1, ("A", "B"): 1})
        inputs: dict[str, Spec] = {}
        for name, dims in (("A", [m, k]), ("B", [k, n])):
            ones = [1] * len(batch) if shared == name else batch
            padded = [*ones, *dims]
            if name in sliced:
                axis = rng.choice([rank - 2, rank - 1])
                cut = 8 * rng.randint(1, 4)
                padded[axis] += 2 * cut
                slices[name] = (axis, cut, cut + [*ones, *dims][axis])
            order = [*range(rank)]
            # fp8 and int8 products want K fastest in both.
            if (name == "B") if eight_bits else rng.random() < 0.4:
                order[-2:] = [rank - 1, rank - 2]
            if len(batch) == 1 and not eight_bits and rng.random() < 0.05:
                order = [order[1], 0, order[2]]  # entries of the batch interleaved, as heads often are
            gap = 0 if rng.random() < 0.85 else 8 * rng.randint(1, 3)
            dtype = types[0 if name == "A" else 1]
            fill = "integers" if "int8" in dtype else "normal"
            scale = k**-0.5 if name == "A" else 1.0
            inputs[name] = Spec(tuple(padded), packed(padded, order, gap), dtype, fill, scale)
        integers = operand == "int8"
        value_range = (-100.0, 100.0) if integers else (-16.0 * k**0.5, 16.0 * k**0.5) if eight_bits else (-7.0, 7.0)
        before_a, before_b = (
            cls._before(rng, inputs, name, dtype, operand, 0.0 if eight_bits or name in slices else 0.06)
            for name, dtype in zip("AB", types[:2], strict=True)
        )
        dims = [*batch, m, n]
        vector = [*[1] * (rank - 1), n]
        column = [*[1] * len(batch), m, 1]
        shapes = {
            tuple(dims): 3,
            tuple(vector): 4,
            tuple(column): 2,
            (1,) * rank: 1,
            (*[1] * len(batch), m, n): 1,
            (*batch, 1, 1): 0.5,
            (*batch, 1, n): 0.5,
            (*batch, m, 1): 0.5,
        }
        length = 0 if integers and output == "int32" else pick(rng, {0: 2, 1: 3, 2: 3, 3: 2, 4: 1, 5: 1, 6: 1})
        order = [*range(rank)]
        drawing = Drawing(rng, dims, order, shapes, most_types(output, rng), value_range)
        after = drawing.program(length)
        inputs |= drawing.specs
        reduction = None
        if not eight_bits and rng.random() < 0.08:
            axes = pick(rng, {(rank - 1,): 2, (rank - 2,): 2, (rank - 2, rank - 1): 1, tuple(range(rank)): 1})
            reduction = (pick(rng, _REDUCTIONS), axes)
        return cls(
            seed,
            types[0],
            "float32",
            "float32",
            inputs,
            operand,
            output,
            before_a,
            before_b,
            slices,
            after,
            reduction,
            rng.random() < 0.3,
        )

    @staticmethod
    def _before(
        rng: random.Random, inputs: dict[str, Spec], name: str, dtype: str, operand: str, chance: float
    ) -> Program:
        """A cast where A or B need one, or one operation with its result rounded to the operands' type."""
        if dtype != operand and not (dtype in FP8 and operand in FP8):
            return Program((Instruction("identity", ("x0",), operand),))
        if rng.random() >= chance or operand == "float32":
            return Program()
        if rng.random() < 0.4:
            return Program((Instruction(rng.choice(["relu", "abs", "neg", "gelu", "tanh"]), ("x0",), operand),))
        rank = len(inputs[name].dims)
        axis = rng.choice([rank - 2, rank - 1])
        dims = [extent if i == axis else 1 for i, extent in enumerate(inputs[name].dims)]
        inputs[f"{name}_operand"] = Spec(tuple(dims), packed(dims, range(rank)), dtype, "positive")
        return Program((Instruction(rng.choice(["mul", "add"]), ("x0", f"{name}_operand"), operand),))

    def _slice(self, name: str) -> list[slice]:
        cuts = [slice(None)] * len(self.inputs[name].dims)
        if name in self.slices:
            axis, start, stop = self.slices[name]
            cuts[axis] = slice(start, stop)
        return cuts

    def build(self, graph: cudnn.pygraph, tensors: dict[str, cudnn.tensor]) -> dict[str, cudnn.tensor]:
        operands = []
        for name, before in (("A", self.before_a), ("B", self.before_b)):
            operand_ = tensors[name]
            if name in self.slices:
                cut = [
                    slice(0, d) if s == slice(None) else s
                    for d, s in zip(operand_.get_dim(), self._slice(name), strict=True)
                ]
                operand_ = graph.slice(operand_, cut).set_data_type(operand_.get_data_type())
            operands.append(before.build(graph, operand_, tensors)[-1])
        integers = self.operand == "int8"
        product = graph.matmul(*operands, compute_data_type=torch.int32 if integers else torch.float32)
        if integers:
            product.set_data_type(torch.int32)
        results = self.after.build(graph, product, tensors)
        output = getattr(torch, self.output)
        outputs = {f"tap{i}": results[i] for i in self.after.taps}
        last = results[-1]
        if self.reduction is None or self.product_is_output:
            outputs["C"] = last
        if self.reduction is not None:
            mode, axes = self.reduction
            reduced = graph.reduction(last, getattr(cudnn.reduction_mode, mode))
            dims = [1 if axis in axes else extent for axis, extent in enumerate(self._dims())]
            outputs["R"] = reduced.set_dim(dims).set_stride(packed(dims, range(len(dims))))
            reduced.set_data_type(cudnn.data_type.FLOAT)
        for name, tensor in outputs.items():
            tensor.set_output(True)
            if name != "R":
                tensor.set_data_type(output)
        return outputs

    def _dims(self) -> list[int]:
        a, b = ([len(range(d)[s]) for d, s in zip(self.inputs[n].dims, self._slice(n), strict=True)] for n in "AB")
        return [*(max(pair) for pair in zip(a[:-2], b[:-2], strict=True)), a[-2], b[-1]]

    def expected(self, data: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> dict[str, Approx]:
        a, b = (
            before.formula(Approx(data[name][tuple(self._slice(name))].double()), data, torch.float32)[-1]
            for name, before in (("A", self.before_a), ("B", self.before_b))
        )
        product = contraction(torch.matmul, a, b, getattr(torch, self.operand))
        output = getattr(torch, self.output)
        if self.output in _PARTIAL:  # random terms: a part of the sum is as large as the root of the sum of squares
            parts = torch.matmul(a.value.square(), b.value.square()).sqrt()
            product = Approx(product.value, product.bound + 4 * UNIT[output] * parts)
        values = self.after.formula(product, data, output)
        # The reduction reads what is stored, or what has not been rounded yet.
        outputs = {f"tap{i}": values[i].stored(output) for i in self.after.taps} | {"C": values[-1].stored(output)}
        if self.reduction is not None:
            mode, axes = self.reduction
            reduced = reduce(
                outputs["C"] if self.product_is_output else values[-1], getattr(cudnn.reduction_mode, mode), axes
            )
            outputs["R"] = reduced.stored(torch.float32)
        return outputs
