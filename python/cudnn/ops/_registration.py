"""How functions become operators of PyTorch: with their types, for type checkers, and with a rule for autocast."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_CAST = (torch.float32, torch.float16, torch.bfloat16)  # float64 and types of 8 bits and fewer stay what they are
_library = torch.library.Library("cudnn", "FRAGMENT")


class Operator(Protocol[P, R_co]):
    """What ``torch.library.custom_op`` returns, with the types of the function behind it."""

    register_autograd: Any
    register_fake: Any
    register_vmap: Any

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def custom_op(
    name: str, autocast: Collection[str] = (), schema: str | None = None, mutates: Collection[str] = ()
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Registers a function as the operator ``cudnn::<name>``, which ``mutates`` these arguments.

    ``autocast`` names the tensors, or lists of them, that take the type of ``torch.autocast``, as PyTorch's own
    operators of the kind do: those of 32 and 16 bits. The operator itself then runs outside of autocast. ``schema``:
    from the function's types.
    """

    def register(function: Callable[P, R]) -> Operator[P, R]:
        operator: Any = torch.library.custom_op(f"cudnn::{name}", function, mutates_args=mutates, schema=schema)
        names = list(inspect.signature(function).parameters)
        places = frozenset(names.index(each) for each in autocast)
        for device in ("cpu", "cuda") if autocast else ():
            _library.impl(name, _cast(operator, device, places), f"Autocast{device.upper()}")
        return operator

    return register


def _cast(operator: Any, device: str, places: Collection[int]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        taken = [in_type(x, dtype) if place in places else x for place, x in enumerate(arguments)]
        with torch.autocast(device, enabled=False):
            return operator(*taken)

    return call


def in_type(x: Any, dtype: torch.dtype) -> Any:
    """A tensor, or each of a list, in a type, as autocast has it."""
    if isinstance(x, (list, tuple)):
        return [in_type(each, dtype) for each in x]
    return x.to(dtype) if x is not None and x.dtype in _CAST else x
