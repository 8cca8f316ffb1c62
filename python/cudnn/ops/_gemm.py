"""What the operators of the fused GEMMs share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cudnn.gemm.base import FusedGemm, allocate
from cudnn.lazy import torch

Results = Mapping[str, tuple[Any, str]]


def operator(
    api: type[FusedGemm], order: Sequence[str], results: Callable[[Mapping[str, Any]], Results]
) -> Callable[[Callable[..., Any]], Any]:
    """Registers what calls a wrapper as an operator of the function's name, which returns the results in ``order``.

    ``results`` tells types and majors of what the wrapper allocates from the call's arguments by name, for tracing.
    """

    def registered(function: Any) -> Any:
        @functools.wraps(function)
        def run(*positional: Any, **named: Any) -> tuple[Any, ...]:
            a = positional[0]
            return _present(function(*positional, **named), order, a)

        operation = torch.library.custom_op(f"cudnn::{function.__name__}", run, mutates_args=())
        signature = inspect.signature(function)

        @operation.register_fake
        def _(*positional: Any, **named: Any) -> tuple[Any, ...]:
            bound = signature.bind(*positional, **named)
            bound.apply_defaults()
            given = bound.arguments
            made = allocate(api, given["a"], given["b"], results(given), given["sf_vec_size"])
            return _present({f"{name}_tensor": tensor for name, tensor in made.items()}, order, given["a"])

        return operation

    return registered


def _present(results: Mapping[str, Any], order: Sequence[str], like: Any) -> tuple[Any, ...]:
    """Results in order; operators return tensors, so one without elements stands for one that there is not."""
    found = [results.get(f"{name}_tensor") for name in order]
    return tuple(like.new_empty(0, dtype=torch.float32) if tensor is None else tensor for tensor in found)
