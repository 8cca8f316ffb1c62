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
from cudnn.fused.examples import Comparison, draw
from cudnn.fused.gemm import OPERAND_TYPES
from cudnn.fused.grouped import ExpertsGemm, operands
from cudnn.lazy import torch

SLACK = 1e-4  # error of a product and what follows it, relative to the largest


@dataclass(frozen=True)
class Variant:
    """An API with operands of a kind, by its short name."""

    api: str
    kind: str

    def __str__(self) -> str:
        return f"{self.api} {self.kind}"

    def make(self, device: str) -> Problem:
        """On random tensors of the API's example."""
        api: Any = registry.find(self.api)
        return make(api, api.example[1], device, self.kind)


def variants(full: bool) -> list[Variant]:
    """All APIs, in bfloat16 or with each of their usual kinds of operands that have no scale factors."""
    apis = {name: api for name in registry.packages() if issubclass(api := registry.find(name), ExpertsGemm)}
    kinds = {name: [kind for kind in api.usual_types if not OPERAND_TYPES[kind].scale] for name, api in apis.items()}
    return [Variant(name, kind) for name in apis for kind in (kinds[name] if full else kinds[name][:1])]


def program(api: type[ExpertsGemm]) -> Program:
    """The program of an API: bfloat16."""
    dimensions, shape = api.example
    return Program(api.title, dimensions, shape, lambda sizes, device: make(api, sizes, device))


def make(api: type[ExpertsGemm], shape: tuple[int, ...], device: str, kind: str = "bf16") -> Problem:
    """The API on random tensors of a shape. The reference runs on the CPU, where it can follow addresses."""
    given = inputs(api, shape, "cpu", kind)
    used = {name: tensor.to(device) for name, tensor in given.items()}
    if api.tokens == "k":  # wrappers of gradients take them as matrices
        used |= {"a": used["a"][..., 0], "b": used["b"][..., 0].T}
    wrapper: Any = registry.wrapper(api.folder())
    required = [p.name for p in inspect.signature(wrapper).parameters.values() if p.default is p.empty]
    arguments = dict.fromkeys(required)
    if api.takes_addresses():
        used |= addresses(used)
        arguments |= {"n": given["b"].shape[0], "b_dtype": given["b"].dtype}
    arguments |= {api.parameters[name]: tensor for name, tensor in used.items() if name in api.parameters}

    def compared(results: TupleDict) -> list[Comparison]:
        found = {name: results[f"{name}_tensor"] for name in api.returns if results[f"{name}_tensor"] is not None}
        found = {name: tensor.cpu() for name, tensor in found.items()}
        exact = expected(api, given, found)
        return [judge(name, tensor, exact[name], SLACK, api.roundings) for name, tensor in found.items()]

    return Problem(lambda: wrapper(**arguments), compared)


def inputs(
    api: type[ExpertsGemm], shape: tuple[int, ...], device: str, kind: str = "bf16", drawn_on: str = "cpu"
) -> dict[str, Any]:
    """Random inputs by name, of a kind of operands; weights, and their addresses where an API takes nothing else."""
    sizes = api.example_sizes(dict(zip(api.example[0], shape, strict=True))) | {"vector": OPERAND_TYPES[kind].vector}
    given = api.blank(shape, kind, device)
    for spec in (*operands(), *api.tensors) if api.takes_addresses() else api.tensors:
        if spec.name in given:
            if spec.draw == "ends":
                values = ends(sizes["experts"], sizes[api.tokens], api.group_rows, device)
            else:
                values = draw(spec, spec.layout.shape(sizes), device, drawn_on)
            given[spec.name].copy_(values)
    if api.takes_addresses():
        given |= addresses(given)
    return given


def addresses(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of each expert's weights."""
    b = given["b"]
    return {"b_ptrs": torch.tensor([x.data_ptr() for x in b.unbind(2)], dtype=torch.int64, device=b.device)}


def ends(experts: int, tokens: int, rows: int, device: str) -> Any:
    """Where experts end that have 1, 2, 3 ... parts of the tokens, rounded down to multiples of ``rows``."""
    parts = torch.arange(1, experts + 1, dtype=torch.int64, device="cpu").cumsum(0)
    return (parts * tokens // parts[-1] // rows * rows).int().to(device)


def expected(api: type[ExpertsGemm], given: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The results in float32, before rounding."""
    made: Any = api
    object_ = made(**api.samples({**given, **found}), **api.hidden_weights(given))
    exact = {
        name: torch.full_like(tensor, api.spec(name).fill or 0.0, dtype=torch.float32) for name, tensor in found.items()
    }
    tensors = {name: api.fitted(name, x) for name, x in {**given, **exact}.items() if name in api.parameters}
    object_.reference({**tensors, **{name: getattr(object_, name) for name in api.scalars}})
    return exact
