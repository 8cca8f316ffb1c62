"""The body of every wrapper: allocates the results, compiles at the first call, and executes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cudnn import settings
from cudnn.api_base import TupleDict, check_tensor
from cudnn.errors import make_error
from cudnn.fused import argument_types, registry, repeated
from cudnn.fused.host import FusedAPI
from cudnn.fused.object_cache import cache_object, options_of
from cudnn.fused.positional import older_order
from cudnn.runtime.call import on_stream
from cudnn.runtime.codegen import with_parameters_of

Signature = TypeVar("Signature", bound=Callable[..., TupleDict])


@dataclass(frozen=True)
class Arguments:
    """A wrapper's arguments, sorted: inputs by name, the constructor's options, results, the object's cache key.

    ``empty``: there is nothing to compute.
    """

    inputs: Mapping[str, Any]
    options: Mapping[str, Any]
    allocated: Mapping[str, Any]
    key: repeated.Key
    empty: bool


def wrapper(api: type[FusedAPI]) -> Callable[[Signature], Signature]:
    """Makes a function that is only a signature, below its ``older_order`` if it has one, the wrapper of an API.

    The warm path looks only at the arguments that a call passes: wrappers have up to 44.
    """

    def decorate(declared: Signature) -> Signature:
        older, complete = getattr(declared, "older_order", None), with_parameters_of(declared, "return locals()")
        complete = older_order(older)(complete) if older else complete
        parameters = inspect.signature(declared).parameters.values()
        ordered = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        agreed = getattr(complete, "agreed", ordered)

        @functools.wraps(declared)
        def run(*positional: Any, **named: Any) -> TupleDict:
            passed = named
            if positional:
                passed = dict(zip(agreed, positional, strict=False), **named)
                if len(passed) < len(positional) + len(named):  # in one of two orders; or one is passed twice
                    passed = complete(*positional, **named)
            results = repeated.repeat(api, passed)
            return _run(api, complete(**passed), passed) if results is None else results

        return run  # pyright: ignore[reportReturnType]

    return decorate


def call(api: type[FusedAPI], arguments: Mapping[str, Any]) -> TupleDict:
    """Runs an API on the arguments, ``locals()``, of a wrapper that does more, and returns the results by name."""
    results = repeated.repeat(api, arguments)
    return _run(api, arguments, arguments) if results is None else results


def _run(api: type[FusedAPI], arguments: Mapping[str, Any], passed: Mapping[str, Any]) -> TupleDict:
    """Derives what a call needs from its arguments, of which the caller ``passed`` some, and runs it."""
    complete, arguments = arguments, api.normalize_arguments(argument_types.checked(*_function(api), arguments))
    prepared = prepare(api, arguments)
    tensors = {**prepared.inputs, **prepared.allocated}
    returned = TupleDict({f"{name}_tensor": tensors.get(name) for name in api.returns})
    operation: Any = api.objects.get(prepared.key)
    stream = stream_of(arguments)
    if operation is None:
        operation = api(**api.samples(tensors), **prepared.options)
        operation.check_support()
        if prepared.empty:
            every = [tensors.get(name) for name in api.names]
            with on_stream(stream, every[0]):
                operation.run_empty(every)
            return returned
        operation.compile()
        cache_object(api.objects, prepared.key, operation)
    scalars = {name: arguments[name] for name in api.run_time if name in arguments}
    named = {parameter: tensors.get(name) for name, parameter in api.parameters.items()}
    operation.execute(**named, **scalars, current_stream=stream)
    parameters = _tensors(api, tuple(arguments))
    defaults = {name: value for name, value in complete.items() if name not in passed}
    inputs, allocated = prepared.inputs, prepared.allocated
    repeated.remember(api, passed, defaults, parameters, inputs, allocated, prepared.key, operation)
    return returned


def stream_of(arguments: Mapping[str, Any]) -> Any:
    """The stream among a wrapper's arguments; None: PyTorch's current one."""
    return arguments["stream"] if "stream" in arguments else arguments.get("current_stream")


def supports(*features: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Sets ``supports_<feature>`` attributes of a function, which programs query."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        vars(function).update({f"supports_{feature}": True for feature in features})
        return function

    return decorate


def prepare(api: type[FusedAPI], arguments: Mapping[str, Any]) -> Arguments:
    """Sorts a wrapper's arguments and allocates the results."""
    where = f"{api.folder()}_wrapper"
    inputs = {name: arguments[parameter] for name, parameter in _tensors(api, tuple(arguments)).items()}
    for name, value in arguments.items():
        if name.endswith("_major") and name not in _options(api) and value not in api.majors:
            raise make_error(ValueError, where, name, repr(value), " or ".join(map(repr, api.majors)))
    options = {name: arguments[name] for name in _options(api) if name in arguments}
    try:
        inputs = api.resolved(inputs, stream_of(arguments))
        inputs = api.reinterpret(inputs, options)
        fitted = {name: None if tensor is None else api.canonicalize(name, tensor) for name, tensor in inputs.items()}
        results = api.results({**arguments, **fitted})
        for name in [name for name in results if inputs.get(name) is not None]:
            dtype, _ = results.pop(name)
            api.check_buffer(name, inputs, dtype)
        allocated = allocate(api, fitted, options, results, stream_of(arguments))
        described = api.cache_key(fitted, options)
    except (AttributeError, TypeError, RuntimeError):
        for name, tensor in inputs.items():
            if tensor is not None or not api.spec(name).optional:
                check_tensor(where, name, tensor)
        raise
    types = tuple((name, dtype, major) for name, (dtype, major) in results.items())
    key = repeated.Key((described, types, tuple(options.items()), settings.CLUSTER_OVERLAP_MARGIN.get()))
    allocated = {name: api.restore_layout(name, tensor, inputs) for name, tensor in allocated.items()}
    first = fitted[api.leading(fitted)]
    return Arguments(inputs, options, allocated, key, empty=first is not None and 0 in first.shape)


def sizes(api: type[FusedAPI], arguments: Mapping[str, Any]) -> dict[str, int]:
    """All sizes by name, from a wrapper's arguments; allocates nothing."""
    inputs = {name: arguments[parameter] for name, parameter in _tensors(api, tuple(arguments)).items()}
    options = {name: arguments[name] for name in _options(api) if name in arguments}
    inputs = api.reinterpret(inputs, options)
    fitted = {name: None if tensor is None else api.canonicalize(name, tensor) for name, tensor in inputs.items()}
    return api.sizes_of(api.shapes_of(fitted, options), options)


def allocate(
    api: type[FusedAPI],
    inputs: Mapping[str, Any],
    options: Mapping[str, Any],
    results: Mapping[str, tuple[Any, str]],
    stream: Any = None,
) -> dict[str, Any]:
    """Tensors for results of these types and majors, filled where the kernel adds to them.

    Memory and fills are of the ``stream`` that the kernel runs on: on another one, the kernel could come before the
    fill, and before kernels that still use the memory.
    """
    first = inputs[api.sized_by[0]]
    sizes = api.sizes_of(api.shapes_of(inputs, options), options)
    allocated: dict[str, Any] = {}
    with on_stream(stream, first):
        for name, (dtype, major) in results.items():
            spec = api.spec(name)
            tensor = spec.layout.allocate(sizes, major, dtype, first.device)
            if spec.fill is not None:
                tensor.fill_(spec.fill)
            allocated[name] = tensor.view(*tensor.shape, *(1,) * spec.padding) if spec.padding else tensor
    return allocated


@functools.cache
def _function(api: type[FusedAPI]) -> tuple[str, Callable[..., Any]]:
    """An API's wrapper, and its name in messages."""
    name = api.folder()
    return f"{name}_wrapper", registry.wrapper(name)


@functools.cache
def _tensors(api: type[FusedAPI], parameters: tuple[str, ...]) -> dict[str, str]:
    """The tensors among a wrapper's parameters: the names of both."""
    declared = {spec.name for spec in api.tensors}
    named = {parameter.removesuffix("_tensor"): parameter for parameter in parameters}
    return {name: parameter for name, parameter in named.items() if name in declared}


@functools.cache
def _options(api: type[FusedAPI]) -> tuple[str, ...]:
    """The constructor's arguments without samples and arguments of ``execute``."""
    return tuple(n for n in options_of(api) if n not in api.run_time)
