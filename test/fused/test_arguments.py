"""Arguments of wrong types, shapes, strides, devices and values, of every fused API that the registry finds.

All are refused before anything runs, in words that name the argument, what it got and what is allowed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from cudnn import demo_cases
from cudnn.fused import registry, wrapper
from cudnn.fused.host import FusedAPI

pytest.importorskip("ptx_emulator")
NAMES = list(registry.packages())
RELATED = {"offsets": ("wgrad",), "cum_seqlen_q": ("cum_seqlen_k", "query_offsets")}
"""Tensors of which others have the sizes: a message may name those."""


@dataclass
class Seen:
    """What a call of a wrapper was given and made: its arguments, the constructor's, and those of the kernel."""

    api: Any
    wrapped: dict[str, Any]
    constructed: dict[str, Any]
    tensors: tuple[Any, ...]
    scalars: tuple[Any, ...]
    operation: FusedAPI


@pytest.fixture(scope="module", params=registry.compiled())
def seen(request: pytest.FixtureRequest) -> Seen:
    """The example of an API on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        return of_program(request.param, patch) if request.param in NAMES else of_zeros(request.param, patch)


def of_program(name: str, patch: pytest.MonkeyPatch) -> Seen:
    """What the program of an API calls."""
    actual: dict[str, Any] = constructions(patch)
    prepare, run = wrapper.prepare, FusedAPI.run_on_cpu

    def prepared(api: Any, arguments: Any) -> Any:
        actual["wrapped"] = dict(arguments)
        return prepare(api, arguments)

    def ran(self: FusedAPI, tensors: Any, scalars: Any, *rest: Any) -> None:
        actual.update(operation=self, tensors=tensors, scalars=scalars)
        run(self, tensors, scalars, *rest)

    patch.setattr(wrapper, "prepare", prepared)
    patch.setattr(FusedAPI, "run_on_cpu", ran)
    api, program = registry.find(name), demo_cases.find(name)
    api.objects.clear()
    program.make(program.shape, "cpu").call()
    parameters = inspect.signature(registry.wrapper(name)).parameters
    actual["wrapped"] = {key: x for key, x in actual["wrapped"].items() if key in parameters}
    return Seen(api, **actual)


def of_zeros(name: str, patch: pytest.MonkeyPatch) -> Seen:
    """Those that share a folder have no programs: zeros in tensors like those that are compiled for ahead of time."""
    actual, preset = constructions(patch), registry.aot_preset(name)
    _, shape = preset.objects.__self__.example  # type: ignore[attr-defined]
    api: Any = type(next(iter(preset.objects(preset.dtypes[0], shape, preset.architectures[0]))))
    kwargs = {
        key: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_() if isinstance(x, torch.Tensor) else x
        for key, x in actual["constructed"].items()
    }
    kwargs["arch"] = None
    operation = api(**kwargs)
    operation.compile()
    tensors = tuple(kwargs.get(f"sample_{key}") for key in operation.names)
    return Seen(api, {}, kwargs, tensors, (None,) * len(operation.scalars), operation)


def constructions(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the constructor called last was given."""
    actual: dict[str, Any] = {}
    initialise = FusedAPI.__init__

    def constructed(self: FusedAPI, kwargs: Any) -> None:
        actual["constructed"] = {key: kwargs[key] for key in inspect.signature(type(self)).parameters}
        initialise(self, kwargs)

    patch.setattr(FusedAPI, "__init__", constructed)
    return actual


def refused(call: Callable[[], Any], *names: str) -> str:
    """What is wrong with how a call is refused; nothing where all is well."""
    try:
        call()
    except (ValueError, TypeError, NotImplementedError) as error:
        words = str(error)
        well = (
            any(name in words for name in names) and "got " in words and ("allowed: " in words or "expected" in words)
        )
        return "" if well else f"{type(error).__name__}: {words}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it passed"


def spoiled(tensor: torch.Tensor, written: bool) -> Iterator[tuple[str, Any]]:
    """What no call takes in a tensor's place."""
    yield from (("a string", "x"), ("an array", np.zeros(3, np.float32)), ("a number", 1.5))
    for dtype in (torch.int64, torch.bool, torch.complex64):
        if dtype != tensor.dtype:
            yield str(dtype), torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    yield "meta", tensor.to("meta")
    yield "no dimension", torch.empty((), dtype=tensor.dtype)
    # Every bit is set: -1, which no offset is. With one expert more, offsets of this shape would be taken.
    size = (tensor.numel() + 1) * tensor.itemsize
    yield "one dimension", torch.full((size,), 255, dtype=torch.uint8).view(tensor.dtype)
    if written and tensor.numel() > 1:
        dim = max(range(tensor.ndim), key=lambda dim: tensor.shape[dim])
        yield "one element for all", tensor.narrow(dim, 0, 1).expand(tensor.shape)


def shifted(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    """A copy at an address that is no multiple of this number of bytes."""
    size = (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.itemsize
    memory = torch.zeros(size + 2 * alignment, dtype=torch.uint8)
    start = (tensor.itemsize - memory.data_ptr()) % alignment
    return memory[start : start + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def test_tensors_of_a_call(seen: Seen) -> None:
    faults = {}
    for i, name in enumerate(seen.operation.names):
        tensor, spec = seen.tensors[i], seen.api.spec(name)
        kwargs: list[tuple[str, Any]] = [("a string", "x")]
        if tensor is not None:
            kwargs = [*spoiled(tensor, spec.written), ("None", None)]
            if tensor.itemsize < spec.layout.alignment:
                kwargs.append(("its address", shifted(tensor, spec.layout.alignment)))
        for kind, wrong in kwargs:
            names = (name, *RELATED.get(name, ()), *["device"] * (kind == "meta"))
            tensors = (*seen.tensors[:i], wrong, *seen.tensors[i + 1 :])
            faults[name, kind] = refused(
                lambda kwargs=tensors: seen.operation.run(kwargs, seen.scalars, None, None), *names
            )
    assert {key: words for key, words in faults.items() if words} == {}


def test_numbers_of_a_call(seen: Seen) -> None:
    faults = {}
    for i, name in enumerate(seen.api.scalars):
        limits = () if name in seen.api.limits else (math.inf,)
        for wrong in (math.nan, *limits, "x", True, 1j, [1.0], torch.ones(())):
            scalars = (*seen.scalars[:i], wrong, *seen.scalars[i + 1 :])
            faults[name, str(wrong)] = refused(lambda s=scalars: seen.operation.run(seen.tensors, s, None, None), name)
    for name, place in (("stream", 0), ("workspace", 1)):
        for wrong in ("x", 1.5, torch.ones(1)):
            kwargs = [None, None]
            kwargs[place] = wrong  # type: ignore[call-overload]
            faults[name, str(wrong)] = refused(
                lambda g=kwargs: seen.operation.run(seen.tensors, seen.scalars, *g), name
            )
    assert {key: words for key, words in faults.items() if words} == {}


WRONG = {
    "bool": ("no", 2, 1.0, []),
    "int": ("16", 1.5, True, []),
    "float": ("x", True, []),
    "str": (5, b"x", []),
    "dtype": ("float16", 16, []),
    "tuple[int, int]": ("xy", 128, (128,), (128.0, 128), []),
}
"""By annotation; None too, unless the annotation allows it."""


def options(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Names of a function's parameters that are no tensors, with values of wrong types."""
    for p in inspect.signature(function).parameters.values():
        kind = str(p.annotation).removesuffix(" | None")
        optional = kind != str(p.annotation)
        for wrong in (*WRONG.get(kind, ()), *([] if optional or kind not in WRONG else [None])):
            yield p.name, wrong


def test_options_of_a_constructor(seen: Seen) -> None:
    def build(**more: Any) -> None:
        seen.api(**{**seen.constructed, **more}).check_support()

    kwargs = options(seen.api)
    faults = {(name, str(x)): refused(lambda name=name, x=x: build(**{name: x}), name) for name, x in kwargs}
    assert {key: words for key, words in faults.items() if words} == {}


def test_arguments_of_a_wrapper(seen: Seen) -> None:
    if not seen.wrapped:
        pytest.skip("it has no wrapper")
    function = registry.wrapper(seen.api.folder())
    faults = {}
    for name, wrong in options(function):
        faults[name, str(wrong)] = refused(lambda name=name, x=wrong: function(**{**seen.wrapped, name: x}), name)
    for name, tensor in seen.wrapped.items():
        for kind, wrong in spoiled(tensor, False) if isinstance(tensor, torch.Tensor) else ():
            names = (name.removesuffix("_tensor"), "b_ptrs") if "padded" in name else (name.removesuffix("_tensor"),)
            faults[name, kind] = refused(lambda name=name, x=wrong: function(**{**seen.wrapped, name: x}), *names)
    assert {key: words for key, words in faults.items() if words} == {}
