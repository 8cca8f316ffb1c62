"""The grouped fused GEMMs on random tokens, experts of different sizes, compared with their references in float32."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cudnn.api_base import TupleDict
from cudnn.demo_cases import Problem, Program
from cudnn.demo_cases.gemm_operands import judge
from cudnn.fused import registry
from cudnn.fused.examples import Comparison, random_input
from cudnn.fused.gemm import OPERAND_TYPES
from cudnn.fused.grouped import ExpertsGemm, operands
from cudnn.lazy import torch

TOLERANCE = 1e-4  # error of the GEMM and its epilogue, relative to the largest result


@dataclass(frozen=True)
class Variant:
    """An API and the short name of an operand type."""

    api: str
    kind: str

    def __str__(self) -> str:
        return f"{self.api} {self.kind}"

    def make(self, device: str) -> Problem:
        """On random tensors of the API's example."""
        api: Any = registry.find(self.api)
        return make(api, api.example[1], device, self.kind)


def variants(full: bool) -> list[Variant]:
    """All APIs in bfloat16, or with ``full`` in each of their usual operand types without scale factors."""
    apis = {name: api for name in registry.packages() if issubclass(api := registry.find(name), ExpertsGemm)}
    types_of = {name: [kind for kind in api.aot_dtypes if not OPERAND_TYPES[kind].scale] for name, api in apis.items()}
    return [Variant(name, kind) for name in apis for kind in (types_of[name] if full else types_of[name][:1])]


def program(api: type[ExpertsGemm]) -> Program:
    """The program of an API: bfloat16."""
    dimensions, shape = api.example
    return Program(api.title, dimensions, shape, lambda sizes, device: make(api, sizes, device))


def make(api: type[ExpertsGemm], shape: tuple[int, ...], device: str, kind: str = "bf16") -> Problem:
    """The API on random tensors of a shape. The reference runs on the CPU, where it can dereference pointers."""
    cpu_inputs = inputs(api, shape, "cpu", kind)
    device_inputs = {name: tensor.to(device) for name, tensor in cpu_inputs.items()}
    if api.tokens == "k":  # wrappers of weight gradients take matrices
        device_inputs |= {"a": device_inputs["a"][..., 0], "b": device_inputs["b"][..., 0].T}
    wrapper: Any = registry.wrapper(api.folder())
    required = [p.name for p in inspect.signature(wrapper).parameters.values() if p.default is p.empty]
    arguments = dict.fromkeys(required)
    if api.needs_pointers():
        device_inputs |= addresses(device_inputs)
        arguments |= {"n": cpu_inputs["b"].shape[0], "b_dtype": cpu_inputs["b"].dtype}
    arguments |= {api.parameters[name]: tensor for name, tensor in device_inputs.items() if name in api.parameters}

    def compare_results(results: TupleDict) -> list[Comparison]:
        outputs = {name: results[f"{name}_tensor"] for name in api.returns if results[f"{name}_tensor"] is not None}
        outputs = {name: tensor.cpu() for name, tensor in outputs.items()}
        reference = expected(api, cpu_inputs, outputs)
        return [judge(name, tensor, reference[name], TOLERANCE, api.roundings) for name, tensor in outputs.items()]

    return Problem(lambda: wrapper(**arguments), compare_results)


def inputs(
    api: type[ExpertsGemm], shape: tuple[int, ...], device: str, kind: str = "bf16", generated_on: str = "cpu"
) -> dict[str, Any]:
    """Random inputs by name, of an operand type. For an API that takes pointers, weights and their pointers."""
    sizes = api.example_sizes(dict(zip(api.example[0], shape, strict=True))) | {"vector": OPERAND_TYPES[kind].vector}
    tensors = api.empty_tensors(shape, kind, device)
    for spec in (*operands(), *api.tensors) if api.needs_pointers() else api.tensors:
        if spec.name in tensors:
            if spec.init == "ends":
                values = ends(sizes["experts"], sizes[api.tokens], api.group_rows, device)
            else:
                values = random_input(spec, spec.layout.shape(sizes), device, generated_on)
            tensors[spec.name].copy_(values)
    if api.needs_pointers():
        tensors |= addresses(tensors)
    return tensors


def addresses(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The pointers to each expert's weights."""
    b = tensors["b"]
    return {"b_ptrs": torch.tensor([x.data_ptr() for x in b.unbind(2)], dtype=torch.int64, device=b.device)}


def ends(experts: int, tokens: int, rows: int, device: str) -> Any:
    """End row of each expert, rounded down to a multiple of ``rows``; sizes are proportional to 1, 2, 3 ..."""
    shares = torch.arange(1, experts + 1, dtype=torch.int64, device="cpu").cumsum(0)
    return (shares * tokens // shares[-1] // rows * rows).int().to(device)


def expected(api: type[ExpertsGemm], inputs: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    """The results in float32, before rounding."""
    untyped_api: Any = api
    op = untyped_api(**api.samples({**inputs, **outputs}), **api.pointer_options(inputs))
    exact = {
        name: torch.full_like(tensor, api.spec(name).fill or 0.0, dtype=torch.float32)
        for name, tensor in outputs.items()
    }
    tensors = {name: api.canonicalize(name, x) for name, x in {**inputs, **exact}.items() if name in api.parameters}
    op.reference({**tensors, **{name: getattr(op, name) for name in api.scalars}})
    return exact
