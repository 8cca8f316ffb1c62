"""The warm path of wrappers: a generated function for calls whose arguments are like those of an earlier call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from cudnn import settings
from cudnn.api_base import TupleDict
from cudnn.lazy import torch
from cudnn.runtime.call import on_stream
from cudnn.runtime.codegen import define
from cudnn.runtime.tensor_guards import guard

if TYPE_CHECKING:
    from cudnn.fused.host import FusedAPI

STREAMS = ("stream", "current_stream")
MAX_CALLS = 8
"""Remembered calls of an API, most recent first."""
MAX_SEEN = 64
"""Sizes of an API's earlier calls."""
_seen: dict[type, dict[Any, bool]] = {}
_calls: dict[type, list[Callable[[Mapping[str, Any]], TupleDict | None]]] = {}
_IMMUTABLE = (type(None), bool, int, float, str, Enum)

_TEMPLATE = '''
def repeat(arguments):
    """The wrapper's results, or None for arguments that differ from those of the earlier call."""
    if len(arguments) != {count}:
        return None
    try:
        if not ({same}) or settings() != known_settings:
            return None
        {tensors}
        {numbers}
    except KeyError:
        return None
    if not ({strided}) or not matches({given}):
        return None
    if objects.get(key) is not operation or api.execute is not execute:
        return None
    {stream}
    if stream is None:
        {allocated}
    else:
        with on_stream(stream, {first}):
            {allocated_on_stream}
    operation.run(({ordered}), ({scalars}), stream, None)
    return TupleDict({{{returned}}})
'''


class Key(tuple[Any, ...]):
    """A cache key that computes its hash once."""

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash


def forget() -> None:
    """Forgets all calls."""
    _seen.clear()
    _calls.clear()


def repeat(api: type[FusedAPI], arguments: Mapping[str, Any]) -> TupleDict | None:
    """The results of a call like an earlier one, else None."""
    for position, call in enumerate(calls := _calls.get(api, ())):
        results = call(arguments)
        if results is not None:
            if position:
                _calls[api] = [call, *(each for each in calls if each is not call)]
            return results
    return None


def remember(
    api: type[FusedAPI],
    arguments: Mapping[str, Any],
    defaults: Mapping[str, Any],
    parameters: Mapping[str, str],
    inputs: Mapping[str, Any],
    allocated: Mapping[str, Any],
    key: Key,
    operation: Any,
) -> None:
    """Remembers a call, if everything in it follows from the metadata of its tensors and from its other arguments.

    Only a call whose sizes came before is remembered: writing its function takes longer than deriving all else, and
    programs whose sizes never come again would pay that at every call.

    Args:
        arguments: of the wrapper, as they were passed.
        defaults: The arguments that were not passed.
        parameters: of tensors, by name of tensor.
        inputs: tensors by name: a call with views or copies of the arguments is not remembered.
        allocated: results by name.
        key: of the ``operation`` in the wrapper's cache.
    """
    plain = frozenset((torch.Tensor, torch.nn.Parameter))
    tensors = [name for name, value in arguments.items() if type(value) in plain]
    scalars = [name for name in api.run_time if name in arguments]
    sizes = (key, *((arguments[name].shape, arguments[name].stride()) for name in tensors))
    seen = _seen.setdefault(api, {})
    if seen.pop(sizes, None) is None:
        while len(seen) >= MAX_SEEN:
            del seen[next(iter(seen))]
        seen[sizes] = True
        return
    fixed = [name for name in arguments if name not in (*tensors, *scalars, *STREAMS)]
    derived = getattr(api.execute, "is_derived", False)  # others do more than ``run``
    unchanged = all(inputs[name] is arguments.get(parameter) for name, parameter in parameters.items())
    dense = all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in allocated.values())
    if not (derived and unchanged and dense and all(_is_immutable(arguments[name]) for name in fixed)):
        return
    stream = next((name for name in STREAMS if name in arguments), None)
    local = {parameter: f"t{i}" for i, parameter in enumerate(tensors)}
    values = {name: local.get(parameter, "None") for name, parameter in parameters.items()}
    values |= {name: f"r{i}" for i, name in enumerate(allocated)}
    values_of_scalars = {name: f"default_{name}" for name in api.run_time if name in defaults}
    values_of_scalars |= {name: f"s{i}" for i, name in enumerate(scalars)}
    allocations, scope = [], {f"e{i}": arguments[name] for i, name in enumerate(fixed)}
    for i, (name, x) in enumerate(allocated.items()):
        scope[f"empty{i}"] = _empty_like(x)
        allocations.append(f"r{i} = empty{i}()")
        fill = api.spec(name).fill
        if fill is not None:
            scope[f"fill{i}"] = fill
            allocations.append(f"r{i}.fill_(fill{i})")
    allocations = allocations or ["pass"]
    source = _TEMPLATE.format(
        count=len(arguments),
        same=" and ".join(f"arguments[{name!r}] is e{i}" for i, name in enumerate(fixed)) or "True",
        tensors="; ".join(f"{name} = arguments[{parameter!r}]" for parameter, name in local.items()),
        numbers="\n        ".join(_NUMBER.format(i=i, name=name) for i, name in enumerate(scalars)),
        strided=" and ".join(
            f"type({t}) in plain and {t}.layout is strided and not {t}.is_nested" for t in local.values()
        ),
        given=", ".join(local.values()),
        stream=f"stream = arguments[{stream!r}]" if stream else "stream = None",
        first=next(iter(local.values())),
        allocated="\n        ".join(allocations),
        allocated_on_stream="\n            ".join(allocations),
        ordered="".join(f"{values.get(name, 'None')}, " for name in api.names),
        scalars="".join(f"{values_of_scalars.get(name)}, " for name in api.scalars),
        returned=", ".join(f"'{name}_tensor': {values.get(name, 'None')}" for name in api.returns),
    )
    scope |= {
        "settings": settings.texts,
        "known_settings": settings.texts(),
        "matches": guard([arguments[n] for n in tensors]),
    }
    scope |= {"objects": api.objects, "key": key, "operation": operation, "api": api, "execute": api.execute}
    scope |= {"on_stream": on_stream, "TupleDict": TupleDict}
    scope |= {f"default_{name}": value for name, value in defaults.items()}
    scope |= {"plain": plain, "strided": torch.strided}  # PyTorch's guard ends the process for tensors without strides
    scope["numbers"] = frozenset((float, int, type(None)))
    _calls[api] = [define("repeat", source, scope), *_calls.get(api, ())][:MAX_CALLS]


_NUMBER = """s{i} = arguments[{name!r}]
        if type(s{i}) not in numbers:
            return None"""


def _empty_like(x: Any) -> Callable[[], Any]:
    """A function that allocates tensors with the metadata of x, which it does not keep."""
    return functools.partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _is_immutable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_immutable, value))
    return isinstance(value, (*_IMMUTABLE, torch.dtype))
