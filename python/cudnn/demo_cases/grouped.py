"""The grouped fused GEMMs on random tokens of experts of different sizes, judged by their references in float32."""

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

TOLERANCE = 1e-4  # error of a product and what follows it, relative to the largest


@dataclass(frozen=True)
class Variant:
    """An API with operands of one type."""

    api: str
    operand_type: str

    def __str__(self) -> str:
        return f"{self.api} {self.operand_type}"

    def make(self, device: str) -> Problem:
        """On random tensors of the API's example."""
        api: Any = registry.find(self.api)
        return make(api, api.example[1], device, self.operand_type)


def variants(full: bool) -> list[Variant]:
    """All APIs, in bfloat16 or with each of their AOT operand types that have no scale factors."""
    apis = {name: api for name in registry.packages() if issubclass(api := registry.find(name), ExpertsGemm)}
    types = {name: [one for one in api.aot_dtypes if not OPERAND_TYPES[one].scale] for name, api in apis.items()}
    return [Variant(name, one) for name in apis for one in (types[name] if full else types[name][:1])]


def program(api: type[ExpertsGemm]) -> Program:
    """The program of an API: bfloat16."""
    dimensions, shape = api.example
    return Program(api.title, dimensions, shape, lambda sizes, device: make(api, sizes, device))


def make(api: type[ExpertsGemm], shape: tuple[int, ...], device: str, operand_type: str = "bf16") -> Problem:
    """The API on random tensors of a shape. The reference runs on the CPU, where it can follow addresses."""
    input_tensors = inputs(api, shape, "cpu", operand_type)
    used = {name: tensor.to(device) for name, tensor in input_tensors.items()}
    if api.tokens == "k":  # wrappers of gradients take them as matrices
        used |= {"a": used["a"][..., 0], "b": used["b"][..., 0].T}
    wrapper: Any = registry.wrapper(api.folder())
    required = [p.name for p in inspect.signature(wrapper).parameters.values() if p.default is p.empty]
    arguments = dict.fromkeys(required)
    if api.needs_pointers():
        used |= addresses(used)
        arguments |= {"n": input_tensors["b"].shape[0], "b_dtype": input_tensors["b"].dtype}
    arguments |= {api.parameters[name]: tensor for name, tensor in used.items() if name in api.parameters}

    def compared(results: TupleDict) -> list[Comparison]:
        output_tensors = {
            name: results[f"{name}_tensor"] for name in api.returns if results[f"{name}_tensor"] is not None
        }
        output_tensors = {name: tensor.cpu() for name, tensor in output_tensors.items()}
        exact = expected(api, input_tensors, output_tensors)
        return [judge(name, tensor, exact[name], TOLERANCE, api.roundings) for name, tensor in output_tensors.items()]

    return Problem(lambda: wrapper(**arguments), compared)


def inputs(
    api: type[ExpertsGemm], shape: tuple[int, ...], device: str, operand_type: str = "bf16", generated_on: str = "cpu"
) -> dict[str, Any]:
    """Random inputs by name: weights as tensors, and as pointers for APIs that take only pointers."""
    sizes = api.example_sizes(dict(zip(api.example[0], shape, strict=True))) | {
        "vector": OPERAND_TYPES[operand_type].vector
    }
    input_tensors = api.empty_tensors(shape, operand_type, device)
    for spec in (*operands(), *api.tensors) if api.needs_pointers() else api.tensors:
        if spec.name in input_tensors:
            if spec.init == "ends":
                values = ends(sizes["experts"], sizes[api.tokens], api.group_rows, device)
            else:
                values = random_input(spec, spec.layout.shape(sizes), device, generated_on)
            input_tensors[spec.name].copy_(values)
    if api.needs_pointers():
        input_tensors |= addresses(input_tensors)
    return input_tensors


def addresses(input_tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Those of each expert's weights."""
    b = input_tensors["b"]
    return {"b_ptrs": torch.tensor([x.data_ptr() for x in b.unbind(2)], dtype=torch.int64, device=b.device)}


def ends(experts: int, tokens: int, rows: int, device: str) -> Any:
    """Where experts end that have 1, 2, 3 ... parts of the tokens, rounded down to multiples of ``rows``."""
    parts = torch.arange(1, experts + 1, dtype=torch.int64, device="cpu").cumsum(0)
    return (parts * tokens // parts[-1] // rows * rows).int().to(device)


def expected(api: type[ExpertsGemm], input_tensors: dict[str, Any], output_tensors: dict[str, Any]) -> dict[str, Any]:
    """The results in float32, before rounding."""
    untyped: Any = api
    object_ = untyped(**api.samples({**input_tensors, **output_tensors}), **api.pointer_options(input_tensors))
    exact = {
        name: torch.full_like(tensor, api.spec(name).fill or 0.0, dtype=torch.float32)
        for name, tensor in output_tensors.items()
    }
    tensors = {
        name: api.canonicalize(name, x) for name, x in {**input_tensors, **exact}.items() if name in api.parameters
    }
    object_.reference({**tensors, **{name: getattr(object_, name) for name in api.scalars}})
    return exact
