"""The dense fused GEMMs on random tensors of a variant, compared with their epilogues on float64 accumulators."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from cudnn.api_base import TupleDict
from cudnn.demo_cases import Problem, Program
from cudnn.demo_cases.gemm_operands import NORM_CONST, judge, judge_quantized, matrix, operands, plain
from cudnn.demo_cases.gemm_variants import FP4, Variant
from cudnn.fused import dense as declared
from cudnn.fused import registry
from cudnn.fused.dense import DenseGemm
from cudnn.fused.examples import Comparison, compare, random_input
from cudnn.fused.gemm import OperandType
from cudnn.fused.layouts import Matrix
from cudnn.gemm.reference import evaluate
from cudnn.lazy import torch
from cudnn_kernels import epilogue

ALPHA = 0.5


def program(api: type[DenseGemm]) -> Program:
    """The program of an API: bfloat16 of one matrix."""
    name = api.folder()
    dimensions, shape = api.example
    return Program(api.title, dimensions, shape, lambda sizes, device: make(plain(name, sizes), device))


def make(v: Variant, device: str) -> Problem:
    """The API on random tensors of a variant."""
    api: Any = registry.find(v.api)
    x = operands(v, device)
    inputs = {"a": x.a, "b": x.b, "sfa": x.sfa, "sfb": x.sfb, **_other_inputs(api, v, device)}

    def call() -> Any:
        return _by_class(api, v, inputs, device) if v.out == FP4 else _by_wrapper(api, v, inputs)

    def compare_results(results: Any) -> list[Comparison]:
        return judge_results(api, v, inputs, results, x.product, x.tolerance)

    return Problem(call, compare_results)


def _other_inputs(api: type[DenseGemm], v: Variant, device: str) -> dict[str, Any]:
    """Required inputs other than the operands: matrices of the type ``side``, others of their first type."""
    inputs: dict[str, Any] = {}
    sizes = sizes_of(api, v)
    if v.quantizes and any(spec.name == "norm_const" for spec in api.tensors):
        inputs["norm_const"] = torch.full((1,), NORM_CONST, dtype=torch.float32, device=device)
    for spec in declared.further_inputs(api):
        shape = spec.layout.shape(sizes)
        if spec.optional:
            continue
        if isinstance(spec.layout, Matrix):
            inputs[spec.name] = matrix(shape[0], shape[1], shape[2], v.side, v.majors[2] == "n", device)
        else:
            inputs[spec.name] = random_input(spec, shape, device).to(getattr(torch, spec.types[0]))
    return inputs


def sizes_of(api: type[DenseGemm], v: Variant) -> dict[str, int]:
    """Sizes by name."""
    m, n, k, batch = v.shape
    return api.sizes_of({"a": (m, k, batch), "b": (n, k, batch)}, {"sf_vec_size": v.vector, **api.defaults()})


def _by_wrapper(api: type[DenseGemm], v: Variant, inputs: Mapping[str, Any]) -> TupleDict:
    wrapper: Any = registry.wrapper(v.api)
    values = {**inputs, "alpha": ALPHA, "mma_tiler_mn": v.tile, "cluster_shape_mn": v.cluster, "sf_vec_size": v.vector}
    arguments: dict[str, Any] = {}
    for name in inspect.signature(wrapper).parameters:
        plain_name = name.removesuffix("_tensor")
        if plain_name in values:
            arguments[name] = values[plain_name]
        elif name.endswith("_major"):
            arguments[name] = v.majors[2]
        elif name.endswith("_dtype") and name not in api.hints:
            arguments[name] = getattr(torch, v.out if name == f"{api.result[0]}_dtype" else v.side)
    return wrapper(**arguments)


def _by_class(api: Any, v: Variant, inputs: Mapping[str, Any], device: str) -> TupleDict:
    """Calls the class, because a wrapper allocates no packed (fp4) results."""
    tensors = {**empty_tensors(api, v, device), **inputs}
    options = {"mma_tiler_mn": v.tile, "cluster_shape_mn": v.cluster, "sf_vec_size": v.vector}
    op = api(**api.samples(tensors), **options)
    op(**{parameter: tensors.get(name) for name, parameter in api.parameters.items()})
    return TupleDict({f"{name}_tensor": tensors.get(name) for name in api.returns})


def empty_tensors(api: type[DenseGemm], v: Variant, device: str) -> dict[str, Any]:
    """Tensors of a variant; only those that kernels add to are initialized."""
    operand_type = OperandType(v.dtype, "bfloat16", v.scale, v.vector)
    return declared.empty_tensors(api, v.shape, operand_type, device, out=v.out, side=v.side, majors=v.majors)


@functools.cache
def supported(v: Variant) -> bool:
    """Whether the API's ``check_support`` accepts a variant."""
    api: Any = registry.find(v.api)
    tensors = empty_tensors(api, v, "meta")
    options = {"mma_tiler_mn": v.tile, "cluster_shape_mn": v.cluster, "sf_vec_size": v.vector, "arch": "sm_100a"}
    try:
        op = api(**api.samples(tensors), **options)
        return op.check_support()
    except (ValueError, NotImplementedError, RuntimeError):
        return False


def judge_results(
    api: Any, v: Variant, inputs: Mapping[str, Any], results: Mapping[str, Any], product: Any, tolerance: float
) -> list[Comparison]:
    """Compares every result with its value before rounding. An activation multiplies the GEMM's error by up to four."""
    outputs = {name: results[f"{name}_tensor"] for name in api.returns if results[f"{name}_tensor"] is not None}
    tensors = {**inputs, **outputs}
    op = api(**api.samples(tensors), sf_vec_size=v.vector)
    operations = [_exact(o) for o in op.operations() if not isinstance(o, epilogue.QuantizeRows)]
    sizes = sizes_of(api, v)
    exact: dict[str, Any] = {**inputs, **{name: getattr(op, name) for name in api.scalars}}
    if "alpha" in api.scalars:
        exact["alpha"] = ALPHA
    for name in outputs:
        shape = api.spec(name).layout.shape(sizes)
        exact[name] = torch.full(shape, api.spec(name).fill or 0.0, dtype=torch.float64, device=product.device)
    evaluate(operations, product, exact)
    comparisons: list[Comparison] = []
    epilogue_tolerance = tolerance
    for o in op.operations():
        name = getattr(o, "tensor", "")
        if isinstance(o, epilogue.StoreTile) and name in outputs:
            comparisons += (
                judge_quantized(v, api.result, outputs, exact[name], epilogue_tolerance)
                if _scaled(api, name, outputs)
                else [judge(name, outputs[name], exact[name], epilogue_tolerance)]
            )
        elif isinstance(o, epilogue.SumRow):
            comparisons.append(
                judge(name, outputs[name], exact[name], 10 * tolerance)
            )  # sums of squares, terms of either sign
        elif isinstance(o, epilogue.Amax):
            comparisons.append(compare(name, outputs[name].flatten(), exact[name], 4 * epilogue_tolerance))
        elif not isinstance(o, (epilogue.Scale, epilogue.LoadTile)):
            epilogue_tolerance = 4 * tolerance
    return comparisons


def _scaled(api: type[DenseGemm], name: str, outputs: Mapping[str, Any]) -> bool:
    return name == api.result[0] and api.result[1] in outputs


def _exact(operation: Any) -> Any:
    """A store without rounding."""
    if isinstance(operation, epilogue.StoreTile):
        return dataclasses.replace(operation, dtype="float32")
    return operation
