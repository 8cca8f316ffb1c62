"""The operators of the fused APIs for ``torch.compile``, from the wrappers' signatures."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from cudnn.fused import registry
from cudnn.fused.dense import DenseGemm
from cudnn.fused.host import FusedAPI
from cudnn.fused.linear import linear_operator
from cudnn.fused.wrapper import prepare, sizes
from cudnn.lazy import torch
from cudnn.runtime.registration import SMALL, custom_op

_STREAMS = ("stream", "current_stream")


def register(name: str) -> Any:
    """Registers ``torch.ops.cudnn.<name>`` for a fused API, which calls the wrapper and returns its results in order.

    It has the wrapper's arguments, without hints and streams. An absent result is a tensor without elements. The fake
    kernel, for tracing, allocates what the wrapper would; gradients flow where the API has some. Under autocast the
    GEMM's inputs are cast; results have the dtypes of the call, or their defaults.
    """
    api, wrapper = registry.find(name), registry.wrapper(name)
    signature, parameters = signature_of(api, wrapper)
    required = [p.name for p in inspect.signature(wrapper).parameters.values() if p.default is p.empty]
    left_out = dict.fromkeys(name for name in required if name in api.buffers)

    def run(*positional: Any, **named: Any) -> Any:
        return _present(api, wrapper(**bound(positional, named)), positional[0])

    def bound(positional: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        if not named and len(positional) == len(parameters):  # as calls without PyTorch's dispatcher pass them
            return {**left_out, **dict(zip(parameters.values(), positional, strict=True))}
        bound_arguments = signature.bind(*positional, **named)
        bound_arguments.apply_defaults()
        return {**left_out, **{parameters[name]: value for name, value in bound_arguments.arguments.items()}}

    def fake(*positional: Any, **named: Any) -> Any:
        arguments = {p.name: p.default for p in inspect.signature(wrapper).parameters.values()}
        prepared = prepare(api, api.normalize_arguments({**arguments, **bound(positional, named)}))
        tensors = {**prepared.inputs, **prepared.allocated}
        return _present(api, {f"{name}_tensor": tensors.get(name) for name in api.returns}, positional[0])

    def flops(*positional: Any) -> int:
        arguments = {p.name: p.default for p in inspect.signature(wrapper).parameters.values()}
        return api.flops(sizes(api, api.normalize_arguments({**arguments, **bound(positional, {})})))

    run.__name__, run.__doc__, run.__module__ = name, wrapper.__doc__, api.__module__
    run.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    schema = torch.library.infer_schema(run, mutates_args=())
    operator = custom_op(name, api.autocast_inputs, schema, flops=flops, repeats=SMALL)(run)
    operator.register_fake(fake)
    if api.gradients is not None:
        setup, backward = api.gradients
        operator.register_autograd(backward, setup_context=setup)
    return linear_operator(api, operator) if issubclass(api, DenseGemm) else operator


def signature_of(api: type[FusedAPI], wrapper: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, str]]:
    """The operator's signature, and the wrapper's parameters by the operator's. None of them is keyword-only: PyTorch
    takes no tensors so.
    """
    types = typing.get_type_hints(wrapper, localns={"Tensor": torch.Tensor, "dtype": torch.dtype, "TupleDict": Any})
    left_out = (*api.hints, *api.buffers, *_STREAMS)
    kept = [p for p in inspect.signature(wrapper).parameters.values() if p.name not in left_out]
    names = {p.name.removesuffix("_tensor"): p.name for p in kept}
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    renamed = [p.replace(name=n, annotation=types[p.name], kind=positional) for n, p in zip(names, kept, strict=True)]
    count = len(api.returns)
    result = tuple[(torch.Tensor,) * count] if count > 1 else torch.Tensor
    return inspect.Signature(renamed, return_annotation=result), names


def _present(api: type[FusedAPI], results: Mapping[str, Any], like: Any) -> Any:
    """Results in order. Operators return tensors, so an absent result is a tensor without elements."""
    ordered = [results.get(f"{name}_tensor") for name in api.returns]
    present = [like.new_empty(0, dtype=torch.float32) if tensor is None else tensor for tensor in ordered]
    return tuple(present) if len(present) > 1 else present[0]
