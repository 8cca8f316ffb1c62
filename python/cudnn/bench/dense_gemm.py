"""Benchmarks of the dense fused GEMMs, from their declarations."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cudnn
from cudnn.bench import Benchmark, gemm, returning
from cudnn.bench.operands import Operands, batched, operands
from cudnn.fused.dense import DenseGemm, empty_tensors, further_inputs
from cudnn.fused.examples import random_input
from cudnn.fused.gemm import OPERAND_TYPES, OperandType
from cudnn.fused.layouts import Matrix
from cudnn.gemm.formats import name_of
from cudnn.gemm.reference import evaluate
from cudnn.lazy import torch
from cudnn_kernels import epilogue


def benchmark(api: type[DenseGemm]) -> Benchmark:
    """The benchmark of an API against cuBLAS, cuBLAS then the epilogue in torch.compile, and the API's peers."""
    before, after = split(operations(api, OPERAND_TYPES["bf16"]))
    numbers = {name: value for name, value in api.defaults().items() if name in api.scalars}
    all_operations = (*before, *after)
    matrices = sum(width * o.staged_bits / 16 for o, width in zip(all_operations, widths(all_operations), strict=True))
    return gemm.benchmark(
        gemm.Fused(
            api.__name__,
            api.title.removeprefix("GEMM + "),
            functools.partial(formula, after, widths(after), numbers),
            functools.partial(prepare, api),
            functools.partial(extras, api),
            preact=next((o.tensor for o in before), ""),
            optional=next((o.tensor for o in before if api.spec(o.tensor).optional), ""),
            gated=api.pairs > 1,
            matrices=matrices,
            scaled="alpha" in api.scalars,
            peers={name: functools.partial(peer, api, source) for name, source in api.peers.items()},
            host={f"{api.__name__}.execute, all tensors": functools.partial(all_tensors, api)} if api.result[1] else {},
        )
    )


def operations(api: Any, operand_type: OperandType) -> Any:
    """The epilogue for an operand type, with all optional results."""
    tensors = empty_tensors(api, (256, 256, 256, 1), operand_type, "meta")
    options = {"sf_vec_size": operand_type.vector} if operand_type.scale else {}
    return api(**api.samples(tensors), **options).operations()


def split(operations: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """Splits an epilogue into the stores of the GEMM's output and the remaining operations.

    Another library's GEMM has already written that output.
    """
    keeps_product = (epilogue.Scale, epilogue.StoreTile, epilogue.LoadTile, epilogue.Amax)
    stores, later, product_changed = list[Any](), list[Any](), False
    for o in operations:
        product_changed |= not isinstance(o, keeps_product)
        if isinstance(o, epilogue.StoreTile) and not product_changed:
            stores.append(o)
        elif not isinstance(o, epilogue.Scale):
            later.append(o)
    return stores, later


def widths(operations: Sequence[Any]) -> list[float]:
    """Columns of each operation's tensors per column of the accumulator."""
    return [float(width) for width in epilogue.widths_of(operations)[0]]


def formula(
    operations: list[Any], widths: list[float], numbers: Mapping[str, float], z: Any, extras: gemm.Extras, out: Any
) -> dict[str, Any]:
    """The epilogue as torch.compile takes it: computes in float32, rounds to ``out``, returns results by name."""
    results: dict[str, Any] = {}
    rows, columns = z.shape
    for o, width in zip(operations, widths, strict=True):
        if isinstance(o, epilogue.StoreTile):
            results[o.tensor] = torch.empty(rows, int(columns * width), dtype=out, device=z.device)
        elif isinstance(o, epilogue.Amax):
            results[o.tensor] = torch.full((o.roles,), float("-inf"), dtype=torch.float32, device=z.device)
        elif isinstance(o, epilogue.SumRow):
            results[o.tensor] = torch.zeros(rows, 1, dtype=torch.float32, device=z.device)
    evaluate(operations, z.float(), {**numbers, **extras, **results})
    return results


def extras(api: type[DenseGemm], o: Operands, m: int, n: int) -> gemm.Extras:
    """Inputs other than A and B: matrices in the 16-bit type, positive vectors with a value per row."""
    sizes = api.sizes_of({"a": (m, 1, 1), "b": (n, 1, 1)}, {**api.defaults(), "sf_vec_size": 16})
    inputs: gemm.Extras = {}
    for spec in further_inputs(api):
        if spec.optional:
            continue
        x = random_input(spec, spec.layout.shape(sizes), o.a.plain.device)
        inputs[spec.name] = x.to(o.out)[..., 0] if isinstance(spec.layout, Matrix) else x.flatten(1)
    return inputs


def prepare(api: type[DenseGemm], o: Operands, extras: gemm.Extras, keep: bool) -> Callable[[], gemm.Results]:
    """The API on the benchmark's operands. Results are initialized to NaN, or to the value that kernels add to."""
    operand_type = OperandType(
        name_of(o.a.tensor.dtype), name_of(o.out), name_of(o.a.scale.dtype) if o.vector else "", o.vector or 16
    )
    return _executed(api, o, operand_type, extras, keep, "")


def all_tensors(api: type[DenseGemm]) -> Callable[[], gemm.Results]:
    """The API with all of its tensors: MXFP8 operands and, where the API supports it, an MXFP8 result."""
    size = gemm.HOST_SIZE
    o = operands("mxfp8", size, size, size)
    operand_type = OPERAND_TYPES["mxfp8"]
    try:
        return _executed(api, o, operand_type, extras(api, o, size, size), True, "float8_e4m3fn")
    except (ValueError, NotImplementedError):
        return _executed(api, o, operand_type, extras(api, o, size, size), True, "")


def _executed(
    api: Any, o: Operands, operand_type: OperandType, extras: gemm.Extras, keep: bool, out: str
) -> Callable[[], gemm.Results]:
    (m, k), n = o.a.plain.shape, o.peer_b.shape[0]
    optional = [spec.name for spec in api.tensors if spec.optional and isinstance(spec.layout, Matrix)]
    tensors = empty_tensors(
        api, (m, n, k, 1), operand_type, o.a.plain.device, out=out, without=() if keep else optional
    )
    for name in api.returns:
        if name in tensors and isinstance(api.spec(name).layout, Matrix) and tensors[name].element_size() > 1:
            tensors[name].fill_(float("nan"))
    if "norm_const" in tensors:
        tensors["norm_const"].fill_(1.0)
    tensors |= {"a": o.a.tensor, "b": o.b.tensor, **{name: _batched(api, name, x) for name, x in extras.items()}}
    if o.vector:
        tensors |= {"sfa": o.a.scale, "sfb": o.b.scale}
    scalars = {"alpha": o.alpha} if "alpha" in api.scalars else {}
    op = api(**api.samples(tensors), **scalars, **({"sf_vec_size": o.vector} if o.vector else {}))
    results = {name: tensors[name] for name in api.returns if name in tensors}
    arguments = {parameter: tensors.get(name) for name, parameter in api.parameters.items()}
    return gemm.executed(op, {**arguments, **scalars}, results)


def _batched(api: type[DenseGemm], name: str, x: Any) -> Any:
    return x if api.spec(name).layout.rank == x.ndim else batched(x)


def peer(api: type[DenseGemm], source: str, o: Operands, keep: bool) -> Callable[[], gemm.Results]:
    """A peer's kernel, ``file:function`` of the source tree, called with A, B, the output matrices and alpha."""
    path, _, name = source.partition(":")
    kernel = getattr(source_module(path), name)
    operand_type = OperandType("bfloat16", name_of(o.out))
    (m, k), n = o.a.plain.shape, o.peer_b.shape[0]
    outputs = empty_tensors(api, (m, n, k, 1), operand_type, o.a.plain.device)
    matrices = [name for name in api.returns if isinstance(api.spec(name).layout, Matrix)]
    results = {name: outputs[name][..., 0] if keep or not api.spec(name).optional else None for name in matrices}
    run = functools.partial(kernel, o.a.plain, o.peer_b, *results.values(), o.peer_alpha)
    return returning(run, results)


@functools.cache
def source_module(path_in_tree: str) -> Any:
    """Imports a file of the source tree, which the installed package lacks.

    Raises:
        FileNotFoundError: the package does not run from a source tree.
    """
    path = Path(cudnn.__file__).parents[2] / path_in_tree
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path}: the peer is part of the source tree; run from there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
