"""Registers functions as PyTorch operators that keep their types for type checkers, with autocast rules."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._functorch.utils import unwrap_dead_wrappers
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad

from cudnn.errors import find_signature_error, make_error
from cudnn.runtime import kernels, recording
from cudnn.runtime.flops import register as register_flops
from cudnn.runtime.launch_sequence import repeated
from cudnn.runtime.vmap import one_by_one
from cudnn.strided import check_strided

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_CAST = (torch.float32, torch.float16, torch.bfloat16)  # float64 and types of 8 bits and fewer stay what they are
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_operand_classes: set[type] = set()
_WRONG_TYPE = re.compile(r"for argument '(?P<argument>\w+)' but instead found type '(?P<type>[^']*)'")
_library = torch.library.Library("cudnn", "FRAGMENT")
_CURE = "To fix it, detach its tensors, or compute this part in PyTorch."
SMALL = 2**23
"""Elements of a tensor with more of which a GPU takes longer than the host,"""
FEW = 2**20
"""and of tokens, of which a layer of experts makes several copies."""
_TWICE = f"nothing here is differentiated twice. {_CURE}"


class Operator(Protocol[P, R_co]):
    """What :func:`custom_op` returns, with the types of the function behind it."""

    register_autograd: Any
    register_fake: Any
    register_vmap: Any
    register_torch_dispatch: Any

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def custom_op(
    name: str,
    autocast: Collection[str] = (),
    schema: str | None = None,
    mutates: Collection[str] = (),
    *,
    flops: Callable[..., int],
    repeats: int = 0,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Registers a function as the operator ``cudnn::<name>``, which ``mutates`` these arguments.

    ``autocast`` names the tensors, or lists of them, that take the type of ``torch.autocast``, as PyTorch's own
    operators of the kind do: those of 32 and 16 bits. The operator itself then runs outside of autocast. ``schema``:
    from the function's types. ``flops``: the number of floating-point operations, from the shapes of the arguments
    that it names; see :func:`cudnn.runtime.flops.register`. ``repeats``: the most elements of the
    first tensor with which launches are repeated; see :func:`cudnn.runtime.launch_sequence.repeated`.
    """

    def register(function: Callable[P, R]) -> Operator[P, R]:
        operator: Any = torch.library.custom_op(f"cudnn::{name}", function, mutates_args=mutates, schema=schema)
        operator.__class__ = _Operator
        operator.__doc__ = inspect.getdoc(function)
        operator.__signature__ = inspect.signature(function)  # that of __call__ is generic
        names = list(operator.__signature__.parameters)
        positions = frozenset(names.index(each) for each in autocast)
        operator.prepare(positions, repeats)
        register_flops(operator, flops)
        for device in ("cpu", "cuda") if autocast else ():
            _library.impl(name, _cast(operator, device, positions), f"Autocast{device.upper()}")
        return operator

    return register


class _Operator(CustomOpDef):
    """A custom operator whose function is called directly, without PyTorch's dispatcher, if nothing has to observe the
    call.

    PyTorch's own way to it takes 0.1 to 0.3 ms of the host's time for operators with many arguments. Modes, transforms,
    autocast, the profiler, tracing, compilers and tensors of other classes go that way.
    """

    def prepare(self, cast: Collection[int], repeats: int) -> None:
        """Precomputes what calls need of the schema."""
        arguments = self._opoverload._schema.arguments
        self._count, self._cast, self._has_autocast = len(arguments), cast, bool(cast)
        self._places = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
        self._mutated = [i for i in self._places if arguments[i].alias_info is not None]
        parameters = inspect.signature(self._init_fn).parameters.values()
        self._parameters = [(p.name, p.default, _classes(a.type)) for p, a in zip(parameters, arguments, strict=True)]
        self._function, self._rule = None, None
        function = self._init_fn
        self._run = repeated(function, self._places, repeats, self._mutated) if repeats else function
        self._last = _differentiable(self, self._refuse, lambda **_: None)
        self._apply = _plain_apply(self._last)
        if not self._mutated:  # PyTorch takes no gradient of others; theirs are refused in its words
            super().register_autograd(self._refuse)

    def __repr__(self) -> str:
        return f"<operator {self._opoverload._schema}>"

    def _refuse(self, *_: Any) -> Any:
        why = f": {_TWICE}" if "_bwd" in self._qualname else f". {_CURE}"
        raise RuntimeError(f"{self._qualname} has no gradient{why}")

    def register_autograd(self, backward: Callable[..., Any], /, *, setup_context: Any = None) -> None:
        super().register_autograd(backward, setup_context=setup_context)
        self._function = _differentiable(self, backward, setup_context)
        self._apply = _plain_apply(self._function)

    def register_fake(self, function: Callable[..., Any], /) -> Callable[..., Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """PyTorch calls it too where only some tensors are on the meta device, and results would be without values."""

        @functools.wraps(function)
        def described(*args: Any, **kwargs: Any) -> Any:
            results = function(*args, **kwargs)
            names = (argument.name for argument in self._opoverload._schema.arguments)
            by_name = {**dict(zip(names, args, strict=False)), **kwargs}
            listed = {name: x if isinstance(x, (list, tuple)) else [x] for name, x in by_name.items()}
            tensors = {name: [t for t in x if isinstance(t, torch.Tensor)] for name, x in listed.items()}
            devices = {name: str(x[0].device) for name, x in tensors.items() if x}
            if len({device == "meta" for device in devices.values()}) > 1:
                raise make_error(ValueError, self._qualname, "devices", devices, "one device", "move them to one")
            return results

        super().register_fake(described)
        return function

    def register_vmap(self, func: Callable[..., Any]) -> Any:
        self._rule = func
        return super().register_vmap(func)

    def _dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """A call through PyTorch's dispatcher, whose errors for wrong arguments are replaced by clearer ones."""
        try:
            return self._opoverload(*args, **kwargs)
        except RuntimeError as error:
            self._refuse_unstrided(args, kwargs, error)
            message = str(error)
            if not message.startswith((f"{self._qualname}() ", "Unknown keyword argument")):
                raise
            if wrong := find_signature_error(self._qualname, self._init_fn, args, kwargs):
                raise wrong from error
            if match := _WRONG_TYPE.search(message):
                allowed = inspect.signature(self._init_fn).parameters[match["argument"]].annotation
                if isinstance(allowed, type):
                    allowed = f"{allowed.__module__}.{allowed.__qualname__}".removeprefix("builtins.")
                raise make_error(TypeError, self._qualname, match["argument"], match["type"], allowed) from error
            raise

    def _refuse_unstrided(self, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> None:
        """Raises, of an error about tensors that have no strides, a better one."""
        names = [argument.name for argument in self._opoverload._schema.arguments]
        try:
            for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
                for x in value if isinstance(value, (list, tuple)) else [value]:
                    check_strided(self._qualname, name, x)
        except TypeError as better:
            raise better from error

    def _complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """All arguments in order, with the defaults.

        None if some are missing, unknown or given twice, or one is of a type that the schema has not.
        """
        rest = self._parameters[len(args) :]
        complete = (*args, *[kwargs.get(name, default) for name, default, _ in rest])
        if len(args) > self._count or sum(name in kwargs for name, _, _ in rest) != len(kwargs):
            return None
        fits = all(isinstance(x, classes) for x, (_, _, classes) in zip(complete, self._parameters, strict=True))
        return complete if fits else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._opoverload(*args, **kwargs)
        derived = differentiating()
        if kwargs or len(args) != self._count:
            complete = self._complete(args, kwargs)
            if complete is None:  # PyTorch finds out what is wrong
                return self._dispatch(*args, **kwargs)
            args = complete
        tensors: list[torch.Tensor] = []
        for position in self._places:
            value = args[position]
            if isinstance(value, (list, tuple)):
                tensors += value
            elif value is not None:
                tensors.append(value)
        writes = any(len(args[position]) for position in self._mutated)
        if derived and not writes:
            device = tensors[0].device.type
            if self._has_autocast and torch.is_autocast_enabled(device):
                return _cast(self, device, self._cast)(*args)
            return (self._function or self._last).apply(args, *tensors)
        if needs_dispatch(tensors, self._has_autocast):
            return self._dispatch(*args)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return self._opoverload(*args) if writes else self._apply(args, *tensors)
        for position in self._mutated:
            torch.autograd.graph.increment_version(args[position])
        return self._run(*args)


_CLASSES: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "float": (float, int, torch.SymFloat, torch.SymInt),
    "int": (int, torch.SymInt, torch.dtype),
    "bool": (bool,),
    "str": (str,),
}


def _classes(schema_type: Any) -> tuple[type, ...]:
    """The Python classes of an argument by its type in a schema, where "int" is a dtype too."""
    name = str(schema_type)
    inner = name.removeprefix("Optional[").removesuffix("]") if name.startswith("Optional[") else name
    classes = (list, tuple) if inner.startswith("List[") else _CLASSES[inner]
    return classes if inner == name else (*classes, type(None))


def _plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``apply`` where no transform of ``torch.func`` is active, without PyTorch's 20 to 40 us for the signature of
    ``forward``.
    """
    base: Any = super(torch.autograd.Function, function)
    apply = base.apply
    return lambda *args: apply(*unwrap_dead_wrappers(args))


def once_differentiable(
    backward: Callable[..., tuple[torch.Tensor | None, ...]],
) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """Decorates the backward pass of an ``autograd.Function``: a double backward raises.

    PyTorch's ``once_differentiable`` lets gradients count as constants where those of the results need no gradient.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        # They lead to what they were made of, so that a gradient that is asked for by its tensors comes by here, too.
        sources = [x for x in (*gradients, *ctx.saved_tensors) if x is not None and x.requires_grad]
        with torch.no_grad():
            results = backward(ctx, *gradients)
        make = torch._C._functions.DelayedError  # pyright: ignore[reportAttributeAccessIssue]
        refuse = make(f"cudnn: {_TWICE}".encode(), len(results) + len(sources))
        return refuse(*(None if x is None else x.detach().requires_grad_() for x in results), *sources)[: len(results)]

    return call


def may_overwrite(saved: torch.Tensor) -> bool:
    """Whether the backward pass that calls this may overwrite a tensor that it saved: autograd frees the graph.

    The tensor then counts as changed in place. If it is read again, as by a second try after an error, autograd raises.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if getattr(autograd, "_get_current_graph_task_keep_graph", lambda: True)():
        return False
    torch.autograd.graph.increment_version(saved)
    return True


def differentiating() -> bool:
    """Whether a transform of ``torch.func`` is a derivative, or there may be tangents. PyTorch's own way to an operator
    refuses the former in reverse mode, and finds 0 in forward mode.
    """
    if forward_ad._current_level >= 0:
        return True
    stack = get_interpreter_stack() if torch._C._are_functorch_transforms_active() else None
    return any(each.key() in (TransformType.Grad, TransformType.Jvp) for each in stack or ())


def register_operand_class(tensor_class: type) -> None:
    """Tensors of a class without storage, which operators' functions read themselves, need no dispatcher."""
    _operand_classes.add(tensor_class)


def needs_dispatch(tensors: Iterable[torch.Tensor], has_autocast: bool) -> bool:
    """Whether a call with these tensors has to go through PyTorch's dispatcher (modes, transforms, autocast,
    profiler...).
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._are_functorch_transforms_active()
        or _profiler_enabled()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or (has_autocast and (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")))
    ):
        return True
    for x in tensors:
        if type(x) in _operand_classes:
            continue
        if type(x) not in _PLAIN or not torch._C._has_storage(x) or x.is_neg():
            return True
        if x.is_meta and recording.current() is None:
            return True
    return False


def _differentiable(operator: Any, backward: Callable[..., Any], setup: Callable[..., Any]) -> Any:
    """The operator's function for autograd: of its arguments, and of the tensors among them, some of them in lists."""
    positions = operator._places

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(arguments: tuple[Any, ...], *_: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            function = operator._init_fn if torch._C._are_functorch_transforms_active() else operator._run
            with kernels.CompileAhead(functools.partial(_both_passes, operator, arguments)):
                result = function(*arguments)
            return tuple(result) if isinstance(result, list) else result  # a list would have no gradient

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            arguments = inputs[0]
            setup(ctx=ctx, inputs=arguments, output=output)
            values = [arguments[position] for position in positions]
            ctx.lengths = [len(x) if isinstance(x, (list, tuple)) else None if x is None else -1 for x in values]

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...], *_: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            if operator._rule is None:
                return one_by_one(operator, info.batch_size, in_dims[0], arguments)
            return operator._rule(info, in_dims[0], *arguments)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            asked = ctx.needs_input_grad
            flags = iter(asked[1:])
            needs: list[Any] = [False] * (positions[-1] + 1)
            for position, length in zip(positions, ctx.lengths, strict=True):
                if length is not None:
                    needs[position] = next(flags) if length < 0 else [next(flags) for _ in range(length)]
            ctx.needs_input_grad = tuple(needs)
            try:
                results = backward(ctx, *gradients)
            finally:
                ctx.needs_input_grad = asked  # a graph that is kept may be gone through again
            results = results if isinstance(results, tuple) else (results,)
            flat: list[Any] = [None]
            for position, length in zip(positions, ctx.lengths, strict=True):
                if length is not None:
                    flat += [results[position]] if length < 0 else results[position]
            return tuple(flat)

    return Differentiable


def _both_passes(operator: Any, arguments: tuple[Any, ...], arch: str) -> list[recording.Key]:
    """The kernels of an operator's call with these arguments, and of its gradient."""
    devices = [x.get_device() for x in arguments if isinstance(x, torch.Tensor) and x.is_cuda]
    num_sms = torch.cuda.get_device_properties(devices[0]).multi_processor_count
    with recording.recording(arch, num_sms) as recorder, torch.enable_grad():
        results = operator(*(_meta(x) for x in arguments))
        results = results if isinstance(results, (tuple, list)) else (results,)
        results = [x for x in results if x.requires_grad]
        torch.autograd.backward(results, [torch.empty_like(x) for x in results])
    return list(recorder.keys)


def _meta(x: Any) -> Any:
    """A tensor, or each of a list, on the meta device, with the same strides; other values as they are."""
    if isinstance(x, (list, tuple)):
        return [_meta(each) for each in x]
    return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _cast(operator: Any, device: str, positions: Collection[int]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        cast_arguments = [in_type(x, dtype) if position in positions else x for position, x in enumerate(arguments)]
        with torch.autocast(device, enabled=False):
            return operator(*cast_arguments)

    return call


def autocast_type(x: torch.Tensor) -> torch.dtype | None:
    """What autocast, where it is on for the tensor's device, makes of its type. It knows no device "meta"."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if not x.is_meta and torch.is_autocast_enabled(device_type) else None


def in_type(x: Any, dtype: torch.dtype) -> Any:
    """A tensor, or each of a list, in a type, as autocast has it."""
    if isinstance(x, (list, tuple)):
        return [in_type(each, dtype) for each in x]
    return x.to(dtype) if x is not None and x.dtype in _CAST else x
