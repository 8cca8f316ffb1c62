"""The base class of all fused APIs: descriptions, checks, compilation, execution on a GPU, in PyTorch or emulated."""

from __future__ import annotations

import functools
import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from cudnn import settings
from cudnn.api_base import APIBase, TensorDesc, check_tensor, overlapping, unpad
from cudnn.errors import checked_number, make_error
from cudnn.full_precision import full_precision
from cudnn.fused import argument_types
from cudnn.fused.layouts import Matrix, Sizes, TensorSpec
from cudnn.fused.positional import with_body
from cudnn.gemm.formats import BITS, dtypes, name_of
from cudnn.lazy import torch
from cudnn.runtime import launch, recording
from cudnn.runtime.call import Call, KernelPlan, on_stream
from cudnn.strided import check_output, check_resolved, resolved
from cudnn_kernels.architecture import ARCHITECTURES

_WITHOUT_GPU = 'pass arch="sm_90a" or arch="sm_100a", to check and compile without a GPU'
ALIGNMENT = 16  # bytes, of contiguous extents and of workspaces
Signature = TypeVar("Signature", bound=Callable[..., None])


def derived(execute: Signature) -> Signature:
    """Marks an ``execute`` that is only a signature: the class generates a body that calls ``run``, below its
    ``older_order`` if it has one.
    """
    execute.is_derived = True  # pyright: ignore[reportFunctionMemberAccess]
    return execute


def with_resolved_inputs(
    where: str, tensors: Mapping[str, Any], written: Collection[str], stream: Any
) -> Mapping[str, Any]:
    """Tensors by name, with copies made on ``stream`` of those that are negative views and not ``written``."""
    for name, x in tensors.items():
        if x is not None and not torch._C._has_storage(x):
            check_tensor(where, name, x)
    lazy = [name for name, x in tensors.items() if x is not None and x.is_neg() and name not in written]
    if not lazy:
        return tensors
    with on_stream(stream, tensors[lazy[0]]):
        return {**tensors, **{name: resolved(tensors[name]) for name in lazy}}


class FusedAPI(APIBase):
    """A fused operation: a subclass declares an API.

    A subclass writes its constructor, ``execute`` and the wrapper with their public signatures; the bodies of
    two are one call, and an ``execute`` that is :func:`derived` calls :attr:`run`. The rest follows from its
    declarations:

    - ``tensors``: every tensor of a call; ``returns``: those that the wrapper allocates and returns, in order
    - ``scalars``: numbers for the kernel, arguments of ``execute`` or, if None there, of the constructor
    - ``sized_by``: the tensors whose shapes determine all sizes, by :meth:`sizes_of`; ``fixed``: sizes that are
      those of the samples in every call
    - :meth:`check_rules`: raises for unsupported samples; :meth:`plan`: the kernel; :meth:`reference`: the definition
      in PyTorch; :meth:`results`: dtypes and majors of the wrapper's results
    """

    title: ClassVar[str]
    tensors: ClassVar[Sequence[TensorSpec]]
    returns: ClassVar[Sequence[str]]
    scalars: ClassVar[Sequence[str]] = ()
    integers: ClassVar[Sequence[str]] = ()  # integer scalars; others are floats
    limits: ClassVar[Sequence[str]] = ()  # scalars that may be infinite
    sized_by: ClassVar[Sequence[str]]
    fixed: ClassVar[Sequence[str]] = ()
    counted_by: ClassVar[Sequence[str]] = ()  # optional tensors that determine sizes too
    architectures: ClassVar[Sequence[str]] = tuple(ARCHITECTURES)
    packs: ClassVar[bool] = False  # bytes are pairs of four-bit elements

    hints: ClassVar[Sequence[str]] = ()  # options that change no result
    buffers: ClassVar[Sequence[str]] = ()  # arguments of the wrapper that hold results
    majors: ClassVar[Sequence[str]] = ("m", "n")  # that wrappers allocate results in
    example: ClassVar[tuple[tuple[str, ...], tuple[int, ...]]]  # the sizes of a small problem: names and numbers
    aot_dtypes: ClassVar[Sequence[str]]  # short names of operands' types
    aot_shapes: ClassVar[Sequence[tuple[int, ...]]]  # one for each kernel that sizes choose among
    peers: ClassVar[Mapping[str, str]] = {}  # other kernels for the benchmark: ``file:function`` of the source tree
    shapes: ClassVar[Sequence[tuple[int, ...]]]  # that the benchmark measures, each a multiple of ``steps``
    steps: ClassVar[Sequence[int]]
    formulas: ClassVar[
        Mapping[str, Callable[..., Any]]
    ] = {}  # for torch.compile, of the inputs and ``formula_options``
    formula_options: ClassVar[Sequence[str]] = ()
    autocast_inputs: ClassVar[Sequence[str]] = ()  # inputs that the operator casts under autocast, as torch.matmul does
    gradients: ClassVar[tuple[Callable[..., Any], Callable[..., Any]] | None] = None  # of the operator: setup, backward
    counted: ClassVar[bool] = True  # by :meth:`flops`; False where other code registers the operators, or none has any

    aliases: ClassVar[Mapping[str, str]] = {}  # parameters of ``execute`` that are not called after their tensors
    names: ClassVar[tuple[str, ...]]  # of the tensors, in the order of ``execute``
    parameters: ClassVar[Mapping[str, str]]  # those of ``execute``, by name of tensor
    run_time: ClassVar[tuple[str, ...]]  # the scalars that ``execute`` takes; others are the constructor's
    objects: ClassVar[dict[Any, Any]]  # compiled objects of the wrapper, by cache key
    arch: str | None = None
    validates: bool = False  # whether calls synchronize and check values on the GPU; read by compile()

    run: Callable[..., None]
    """What ``execute`` calls: ``run(tensors, scalars, stream, workspace)``, tensors in the order of its signature.

    The kernels follow what is queued on the stream, which may be an int, a ``CUstream`` or a ``torch.cuda.Stream``;
    None: PyTorch's current stream. The workspace has at least ``workspace_size()`` bytes, for the sizes of the call;
    None: PyTorch's allocator is asked. Nothing else is allocated and nothing waits, so a call can be captured in a CUDA
    graph. Several threads may use an object.
    Negative views, which would have to be copied, are refused.

    Raises:
        RuntimeError: not compiled yet.
        ValueError, TypeError: a tensor is not like its sample; sizes may differ.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "execute" in vars(cls):
            if cls.counted and vars(FusedAPI)["flops"].__func__ is getattr(cls.flops, "__func__", None):
                raise make_error(TypeError, cls.__name__, "flops", "no definition", "a class method", "count its GEMMs")
            declared = {spec.name for spec in cls.tensors}
            called = inspect.signature(cls.execute).parameters
            tensors = {cls.aliases.get(name, name.removesuffix("_tensor")): name for name in called}
            cls.parameters = {name: parameter for name, parameter in tensors.items() if name in declared}
            cls.names = tuple(cls.parameters)
            cls.run_time = tuple(name for name in cls.scalars if name in called)
            cls.objects = {}
            if getattr(cls.execute, "is_derived", False):
                cls.execute = cls._passing_on(cls.execute, called)
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{cls._table()}"
        if hasattr(cls, "objects"):  # existing programs look them up by this name
            setattr(sys.modules[cls.__module__], f"_cache_of_{cls.__name__}Objects", cls.objects)

    @classmethod
    def _passing_on(cls, declared: Callable[..., None], called: Mapping[str, inspect.Parameter]) -> Callable[..., None]:
        """``execute`` as declared, with a body: a call of :attr:`run`. Written out, it costs what one by hand costs."""
        tensors = "".join(f"{name}, " for name in cls.parameters.values())
        scalars = "".join(f"{name if name in cls.run_time else None}, " for name in cls.scalars)
        workspace = next((name for name in called if name.startswith("workspace")), None)
        body = f"self.run(({tensors}), ({scalars}), current_stream, {workspace})"
        return derived(with_body(declared, body))

    @classmethod
    def _table(cls) -> str:
        """The tensors, one a line, in the order of ``execute``."""
        lines = ["Tensors:"]
        for spec in (cls.spec(name) for name in cls.names):
            dtypes_text = f"the type of {spec.same_dtype}" if spec.same_dtype else ", ".join(spec.types)
            may = "; may be None" if spec.optional else ""
            lines.append(f"    {spec.name}: {spec.layout}: {dtypes_text}{f'; {spec.about}' if spec.about else ''}{may}")
        return "\n".join(lines)

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """``arguments``: those of the subclass's constructor, its ``locals()``. Only descriptions are kept."""
        super().__init__()
        arguments = argument_types.checked(self._title(), type(self).__init__, arguments)
        self._interpret_uint8_as_fp4x2 = self.packs
        raw = {name: arguments.get(f"sample_{name}") for name in (spec.name for spec in self.tensors)}
        samples = self.reinterpret(raw, arguments)
        self.descs: dict[str, TensorDesc | None] = {name: self._described(name, t) for name, t in samples.items()}
        self.reinterprets = any(samples[name] is not raw[name] for name in raw)
        self.noncanonical_samples = self.noncanonical(raw)
        for name, value in arguments.items():
            if not name.startswith("sample_") and name not in ("self", "__class__"):
                setattr(self, name, value)
        for name in self.scalars:
            setattr(self, name, self.checked_number(name, getattr(self, name)))
        self.margin = settings.CLUSTER_OVERLAP_MARGIN.get()
        self._plan: KernelPlan | None = None
        self._emulated: dict[str, Call] = {}
        self.run = self._run_uncompiled

    @classmethod
    def spec(cls, name: str) -> TensorSpec:
        """The declaration of a tensor."""
        return next(spec for spec in cls.tensors if spec.name == name)

    # Declared by subclasses.

    @classmethod
    @abstractmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        """Sizes by name, from the shapes of ``sized_by`` in elements and the constructor's options.

        Raises:
            ValueError: they have not the dimensions that they need.
        """

    @abstractmethod
    def check_rules(self, sizes: Sizes) -> None:
        """Raises for samples that this API does not support; their shapes, strides and dtypes are checked already."""

    def check_sizes(self, sizes: Sizes) -> None:
        """Raises for sizes that this API does not support, of the samples or of a call's tensors."""

    def unused(self) -> tuple[str, ...]:
        """Tensors with a sample that the kernel neither reads nor writes: a call may omit them."""
        return ()

    @abstractmethod
    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        """The kernel and its arguments on an architecture."""

    @abstractmethod
    def reference(self, tensors: Mapping[str, Any]) -> None:
        """Computes the results in PyTorch, into their tensors; scalars are among them, by name."""

    @classmethod
    def flops(cls, sizes: Sizes) -> int:
        """The number of floating-point operations of a call, for the operator's formula: ``cudnn.runtime.flops``.

        A class with an ``execute`` that does not define it raises TypeError, unless it is not ``counted``.
        """
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        """Dtypes and majors of the results that the wrapper allocates, from its arguments and its tensors by name."""

    def is_empty(self, tensors: Sequence[Any]) -> bool:
        """Whether :meth:`run_empty` is all that a call does: its first tensor has no elements."""
        return 0 in tensors[self.names.index(self.leading(self.descs))].shape

    def run_empty(self, tensors: Sequence[Any]) -> None:
        """Runs a call that has nothing to compute."""

    def check_alignment(self, descs: Mapping[str, TensorDesc | None]) -> None:
        """Raises for extents that TMA does not support, of samples or of a call's tensors."""

    def check_options(self) -> None:
        """Raises for options without which there are no sizes."""

    @classmethod
    def check_buffer(cls, name: str, tensors: Mapping[str, Any], dtype: Any) -> None:
        """Raises for a caller's tensor that a wrapper cannot return as a result of this type."""

    @classmethod
    def cache_key(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Cache key of the wrapper's compiled object."""
        return tuple(None if t is None else (t.dtype, t.device, t.shape, t.stride()) for t in tensors.values())

    @classmethod
    @abstractmethod
    def aot_preset(cls, dtype: str, shape: tuple[int, ...], arch: str) -> Iterable[FusedAPI]:
        """Objects as calls usually make them, for compiling ahead of time."""

    @property
    def constants(self) -> Mapping[str, Any]:
        """Numbers that a kernel takes which are those of the constructor, by name."""
        return {}

    @classmethod
    def normalize_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A wrapper's arguments, in the form that the rest of this class knows."""
        return arguments

    @classmethod
    def reinterpret(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Reinterprets tensors that depend on other arguments, such as flat scale factors, as views that fit their
        layouts.
        """
        return tensors

    def reinterpret_call(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same for the tensors of a call, in the order of ``names``."""
        by_name = dict(zip(self.names, tensors, strict=True))
        views = self.reinterpret(by_name, vars(self))
        return tensors if views is by_name else tuple(views[name] for name in self.names)

    @classmethod
    def shapes_of(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of ``sized_by``, in elements, of a wrapper's tensors by name."""
        return {name: cls.shape_of(tensors[name]) for name in cls.sized_by} | cls.counts(tensors)

    @classmethod
    def counts(cls, tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of those of ``counted_by`` that are given, tensors or descriptions by name."""
        return {name: x.shape for name in cls.counted_by if (x := tensors.get(name)) is not None}

    @classmethod
    def leading(cls, tensors: Mapping[str, Any]) -> str:
        """The name of the tensor that decides whether a call is empty: if it has no elements, nothing is computed."""
        return cls.sized_by[0]

    @classmethod
    def shape_of(cls, tensor: Any) -> tuple[int, ...]:
        """The shape of a tensor in elements."""
        return tensor.shape

    @classmethod
    @functools.cache
    def defaults(cls) -> dict[str, Any]:
        """The constructor's options that have a default."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty and not p.name.startswith("sample_")}

    @classmethod
    def example_sizes(cls, sizes: Sizes) -> dict[str, int]:
        """All sizes by name of a problem of an example's sizes."""
        shapes = {}
        for name in cls.sized_by:
            layout = cls.spec(name).layout
            shapes[name] = tuple(sizes.get(str(dim), 1) for dim in getattr(layout, "dims", ()))
        return cls.sizes_of(shapes, cls.defaults())

    @classmethod
    def samples(cls, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's arguments for tensors by name."""
        return {f"sample_{spec.name}": tensors.get(spec.name) for spec in cls.tensors if spec.sampled}

    @classmethod
    def restore_layout(cls, name: str, tensor: Any, inputs: Mapping[str, Any]) -> Any:
        """A result in the layout that the wrapper returns for its inputs' layout."""
        source = cls.spec(name).same_shape
        return tensor.view(unpad(inputs[source], cls.spec(source).layout.rank).shape) if source else tensor

    @classmethod
    def folder(cls) -> str:
        """The name of the folder that declares it: that of its operator, its program and its benchmark."""
        return cls.__module__.split(".")[-2]

    # Samples and tensors of calls.

    @classmethod
    def resolved(cls, tensors: Mapping[str, Any], stream: Any) -> Mapping[str, Any]:
        """Tensors by name, inputs that are negative views as copies made on ``stream``: for calls that may allocate."""
        written = {name for name in tensors if cls.spec(name).written}
        return with_resolved_inputs(cls._title(), tensors, written, stream)

    def has(self, name: str) -> bool:
        """Whether a tensor has a sample."""
        return self.descs.get(name) is not None

    def dtype(self, name: str) -> Any:
        """The dtype of a sample, None without a sample."""
        desc = self.descs.get(name)
        return None if desc is None else desc.dtype

    def sizes(self, descs: Mapping[str, Any]) -> dict[str, int]:
        """Sizes by name of described tensors."""
        return self.sizes_of({name: descs[name].shape for name in self.sized_by} | self.counts(descs), vars(self))

    def sizes_now(self, tensors: Sequence[Any]) -> dict[str, int]:
        """Sizes by name of a call's tensors."""
        return self.sizes({name: self._described(name, x) for name, x in zip(self.names, tensors, strict=True)})

    def canonicalize_all(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """A call's tensors in the canonical dimensions of their layouts."""
        return tuple(
            None if tensor is None else self.canonicalize(name, tensor)
            for name, tensor in zip(self.names, tensors, strict=True)
        )

    @classmethod
    def canonicalize(cls, name: str, tensor: Any) -> Any:
        """A tensor, or description, in the canonical dimensions of its layout."""
        layout = cls.spec(name).layout
        if layout.is_canonical(tensor):
            return tensor
        try:
            return layout.canonicalize(tensor)
        except RuntimeError as error:
            stride = tensor.stride if isinstance(tensor, TensorDesc) else tensor.stride()
            allowed = "dimensions that one stride leads through, before the last"
            got, hint = f"the strides {tuple(stride)} of {tuple(tensor.shape)}", f"pass {name}.contiguous()"
            raise make_error(ValueError, cls._title(), name, got, allowed, hint) from error

    def noncanonical(self, tensors: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of tensors whose dimensions are not those of their layouts, e.g. with trailing ones of size 1."""
        return tuple(
            name for name, t in tensors.items() if t is not None and not self.spec(name).layout.is_canonical(t)
        )

    def error(self, what: str, got: object, allowed: str, hint: str = "") -> ValueError:
        """The exception for a value that is not allowed."""
        return make_error(ValueError, self._title(), what, got, allowed, hint)

    def unsupported(self, what: str, got: object, allowed: str, hint: str = "") -> NotImplementedError:
        """The exception for a combination that no kernel supports."""
        return make_error(NotImplementedError, self._title(), what, got, allowed, hint)

    def _described(self, name: str, tensor: Any) -> TensorDesc | None:
        if tensor is None:
            return None
        check_tensor(self._title(), name, tensor)
        layout = self.spec(name).layout
        desc = self.canonicalize(name, TensorDesc.of(tensor, name, self.packs and isinstance(layout, Matrix)))
        if not desc.ndim:
            raise self.error(f"{name} tensor", "no dimension", str(layout))
        return desc

    # Support.

    def check_support(self) -> bool:
        """True where the samples, the options and the architecture are supported.

        Raises:
            ValueError: a shape, stride, type or option.
            NotImplementedError: a combination that could be, but is not supported.
            RuntimeError: no kernel for the architecture.
        """
        self.check_options()
        for spec in self.tensors:
            if not spec.optional and not self.has(spec.name):
                raise self.error(f"{spec.name} tensor", "None", "a tensor")
        sizes = self.sizes(self.descs)
        self._check_layouts(self.descs, sizes)
        for spec in self.tensors:
            self._check_type(spec)
        self.check_sizes(sizes)
        self.check_rules(sizes)
        devices = {name: str(desc.device) for name, desc in self.descs.items() if desc is not None}
        if len({*devices.values()}) > 1:
            got = ", ".join(f"{name} on {device}" for name, device in devices.items())
            raise self.error("samples", got, "one device")
        target = self._target()
        if target is not None:
            self.usable_sms(self.plan(target, sizes), ARCHITECTURES[target].num_sms)
        self._is_supported = True
        return True

    def _check_type(self, spec: TensorSpec) -> None:
        dtype, other = self.dtype(spec.name), self.dtype(spec.same_dtype)
        if dtype is not None and other is not None and name_of(dtype) != name_of(other):
            raise self._refuse(f"{spec.name} tensor dtype", dtype, other)
        self._check_dtype(self.descs.get(spec.name), *dtypes(spec.types))

    def _check_layouts(self, descs: Mapping[str, TensorDesc | None], sizes: Sizes) -> None:
        present = [(spec, desc) for spec in self.tensors if (desc := descs.get(spec.name)) is not None]
        for spec, desc in present:
            self._check_shape(desc, spec.layout.shape(sizes))
        for spec, desc in present:
            bits = BITS.get(name_of(desc.dtype), desc.dtype.itemsize * 8)
            if not spec.layout.accepts(desc.shape, desc.stride, sizes, bits, spec.written):
                allowed, hint = spec.layout.allowed(sizes, spec.written)
                raise self._refuse(f"{spec.name} tensor stride", desc.stride, allowed, hint)

    def _target(self) -> str | None:
        """The architecture to compile for: as given, or the device's; None on the CPU."""
        device, arch = self._device, self.arch
        where = self._title()
        if arch is None and device.type == "meta" and (recorder := recording.current()):
            arch = recorder.arch
        if arch is None and device.type == "cuda":
            if not torch.cuda.is_available():
                raise make_error(RuntimeError, where, "device", device, "a CUDA device that is available", _WITHOUT_GPU)
            arch = launch.device_architecture(device.index if device.index is not None else torch.cuda.current_device())
        if arch is not None:
            self._check_architecture(arch)
        elif device.type != "cpu":
            allowed = "cuda or cpu; others, such as meta, with arch"
            raise make_error(RuntimeError, where, "device", device, allowed, _WITHOUT_GPU)
        return arch

    def _check_architecture(self, arch: str) -> None:
        launch.pick(dict.fromkeys(self.architectures, ""), arch, self._title())

    @property
    def _device(self) -> Any:
        desc = self.descs[self.sized_by[0]]
        assert desc is not None
        return desc.device

    def usable_sms(self, plan: KernelPlan, count: int) -> int:
        """The number of SMs, of ``count``, that the kernel may use: ``margin`` clusters are left to other kernels."""
        if all(slot.name != "num_sms" for slot in plan.slots):
            return count
        clusters = count // plan.cluster_size - self.margin
        if clusters <= 0:
            name, all_ = settings.CLUSTER_OVERLAP_MARGIN.name, clusters + self.margin
            raise self.error(name, self.margin, f"less than the {all_} clusters that fit on the GPU")
        return clusters * plan.cluster_size

    @staticmethod
    @functools.cache
    def num_sms(index: int) -> int:
        """The number of SMs of a CUDA device."""
        return torch.cuda.get_device_properties(index).multi_processor_count

    def expected_num_sms(self) -> int:
        """The SMs of the samples' GPU or, with ``arch``, of that architecture's largest; an H200's on the CPU."""
        device = self._device
        if device.type == "cuda" and self.arch is None:
            return self.num_sms(device.index if device.index is not None else torch.cuda.current_device())
        if device.type == "meta" and (recorder := recording.current()):
            return recorder.num_sms
        return ARCHITECTURES[self._target() or "sm_90a"].num_sms

    # Compilation.

    def compile(self) -> None:
        """Compiles, or loads what an earlier process compiled; on CPU samples for the emulator, within its block."""
        if self._compiled_kernel is not None:
            return
        if not self._is_supported:
            self.check_support()
        arch = self._target()
        if arch is None:
            emulated = launch.emulated_architecture()
            if emulated:
                self._emulated_call(emulated)
            self._compiled_kernel = self.run = self._run_from_cpu_samples
            return
        self._plan = self.plan(arch, self.sizes(self.descs))
        self._kernel = self._plan.configuration
        if recording.current():
            self._compiled_kernel = self.run = functools.partial(_record, self._plan.source, self._kernel, arch)
            return
        self._compiled_kernel = launch.kernel(self._plan.source, self._plan.configuration, arch)
        self.run = Call(self, self._plan, self._compiled_kernel).run

    def kernels(self) -> list[tuple[str, Any, str]]:
        """The kernels that ``compile`` loads: source, configuration and architecture; none on the CPU."""
        arch = self._target()
        if arch is None:
            return []
        plan = self.plan(arch, self.sizes(self.descs))
        return [(plan.source, plan.configuration, arch)]

    def workspace_size(self) -> int:
        """Bytes of the workspace that ``execute`` needs for tensors of the samples' sizes; 0 for the reference."""
        arch, sizes = self._target(), self.sizes(self.descs)
        if arch is not None:
            return (self._plan or self.plan(arch, sizes)).workspace_size(sizes)
        emulated = launch.emulated_architecture()
        return self.plan(emulated, sizes).workspace_size(sizes) if emulated else 0

    # Execution without a GPU.

    def _run_uncompiled(self, *_: Any) -> None:
        raise self._not_compiled()

    def _run_from_cpu_samples(self, tensors: tuple[Any, ...], *rest: Any) -> None:
        if getattr(tensors[0], "is_cuda", False):
            allowed = "CPU tensors, as the samples"
            raise make_error(
                RuntimeError, self._title(), "tensors", "CUDA tensors", allowed, "compile from CUDA samples"
            )
        self.run_on_cpu(tensors, *rest)

    def run_on_cpu(self, tensors: tuple[Any, ...], scalars: tuple[Any, ...], stream: Any, workspace: Any) -> None:
        """Runs the reference or, within ``cudnn.emulation``, the kernel. Both raise the errors of a GPU's call."""
        tensors = self.reinterpret_call(tensors)
        self.check_call(tensors, scalars)
        if stream is not None:
            launch.raw_stream(stream, 0)
        arch = launch.emulated_architecture()
        call = self._emulated_call(arch) if arch else None
        if workspace is not None:
            self.check_workspace(tensors, workspace, call.plan if call else None)
        if self.is_empty(tensors):
            self.run_empty(tensors)
            return
        self.check_values(tensors)
        if call is None:
            self.run_reference(tensors, scalars)
            return
        call.emulate(
            self.canonicalize_all(tensors), self.resolve_scalars(scalars), ARCHITECTURES[arch].num_sms, workspace
        )

    def run_reference(self, tensors: tuple[Any, ...], scalars: tuple[Any, ...], *_: Any) -> None:
        """Runs the reference without checks, also for float64, which no kernel supports, in float64."""
        launch.log_reference_runs(self._title())
        arguments = (*self.canonicalize_all(tensors), *self.resolve_scalars(scalars))
        with torch.no_grad(), full_precision():  # kernels record nothing for autograd
            self.reference(dict(zip((*self.names, *self.scalars), arguments, strict=True)))

    def resolve_scalars(self, scalars: Sequence[Any]) -> tuple[Any, ...]:
        """A call's scalars; None is replaced by the constructor's."""
        return tuple(getattr(self, n) if s is None else s for n, s in zip(self.scalars, scalars, strict=True))

    def _emulated_call(self, arch: str) -> Call:
        """The kernel for the emulator, compiled at the first call."""
        if arch not in self._emulated:
            self._check_architecture(arch)
            plan = self.plan(arch, self.sizes(self.descs))
            kernel = launch.compile_for_emulation(plan.source, plan.configuration, arch)
            self._emulated[arch] = Call(self, plan, kernel)
        return self._emulated[arch]

    # Checks of a call.

    def check_call(self, tensors: Sequence[Any], scalars: Sequence[Any]) -> dict[str, int]:
        """Raises if a tensor of a call differs from its sample, sizes aside, or a scalar is no number. Returns the
        sizes.
        """
        for name, value in zip(self.scalars, scalars, strict=True):
            if value is not None:
                self.checked_number(name, value)
        return self._check_like_samples(dict(zip(self.names, tensors, strict=True)))

    def check_values(self, tensors: Sequence[Any]) -> None:
        """Raises for values in a call's tensors that the kernel does not support. On a GPU this synchronizes, so it is
        done only if ``validates``.
        """

    @classmethod
    def checked_number(cls, name: str, value: Any) -> Any:
        """A scalar, checked. Raises unless it is a finite number (``limits`` may be infinite)."""
        return checked_number(cls._title(), name, value, integer=name in cls.integers, limit=name in cls.limits)

    def check_workspace(self, tensors: Sequence[Any], workspace: Any, plan: KernelPlan | None) -> None:
        """Raises for a workspace of another dtype, shape, device or alignment, or a smaller one. Without a plan, 0
        bytes do.
        """
        check_tensor(self._title(), "workspace", workspace)
        check_output(self._title(), "workspace_tensor", workspace)
        needed = plan.workspace_size(self.sizes_now(tensors)) if plan else 0
        device = tensors[0].device
        if workspace.dtype != torch.uint8 or workspace.ndim != 1 or not workspace.is_contiguous():
            got = f"{workspace.dtype} of the shape {tuple(workspace.shape)}"
            raise self.error("workspace_tensor", got, "torch.uint8 of one dimension, contiguous")
        if workspace.device != device or workspace.numel() < needed or workspace.data_ptr() % ALIGNMENT:
            got = f"{workspace.numel()} bytes at {workspace.data_ptr():#x} on {workspace.device}"
            allowed = f"at least {needed} bytes, aligned to {ALIGNMENT}, on {device}"
            raise self.error("workspace_tensor", got, allowed, "call workspace_size()")

    def _sizes_of_call(self, descs: Mapping[str, Any]) -> dict[str, int]:
        sizes = self.sizes(descs)
        if self.fixed:
            samples = self.sizes(self.descs)
            sizes |= {name: samples[name] for name in self.fixed}
        return sizes

    def check_presence(self, tensors: Mapping[str, Any]) -> None:
        """Raises if a tensor of a call has no sample, or a sample has no tensor in the call."""
        for name, sample in self.descs.items():
            if (tensors[name] is None) != (sample is None) and (sample is None or name not in self.unused()):
                got, allowed = ("None", "a tensor") if sample is not None else ("a tensor", "None")
                raise self.error(f"{name} tensor", got, f"{allowed}, as the sample")

    def _check_like_samples(self, tensors: Mapping[str, Any]) -> dict[str, int]:
        self.check_presence(tensors)
        descs = {name: self._described(name, tensor) for name, tensor in tensors.items()}
        sizes = self._sizes_of_call(descs)
        self._check_layouts(descs, sizes)
        self.check_sizes(sizes)
        device = tensors[self.names[0]].device
        for name, sample in self.descs.items():
            desc = descs[name]
            if desc is None or sample is None:
                continue
            self._check_dtype(desc, sample.dtype)
            layout = self.spec(name).layout
            if isinstance(layout, Matrix):
                major = layout.major(sample.shape, sample.stride)
                inner = layout.majors.index(major)
                if desc.stride[inner] != 1 and desc.shape[inner] != 1:
                    raise self._refuse(f"{name} tensor stride", desc.stride, f"{major}-major")
            if str(desc.device) != str(device):
                raise self._refuse(f"{name} tensor device", desc.device, device)
        self.check_alignment(descs)
        self._check_memory(tensors)
        return sizes

    def _check_memory(self, tensors: Mapping[str, Any]) -> None:
        """Raises if an address is misaligned or a result overlaps another tensor."""
        unused = self.unused()
        present = [x for x in self.tensors if tensors.get(x.name) is not None and x.name not in unused]
        for spec in present:
            check = check_output if spec.written else check_resolved
            check(self._title(), f"{spec.name} tensor", tensors[spec.name])
        for spec in present:
            address, step = tensors[spec.name].data_ptr(), spec.layout.alignment
            if address % step:
                allowed = f"multiples of {step} bytes"
                raise self.error(f"{spec.name} tensor, its address", f"{address:#x}", allowed, "pass a copy")
        for i, one in enumerate(present):
            for other in present[i + 1 :]:
                result, input_ = (one, other) if one.written else (other, one)
                if not result.written or not overlapping(tensors[one.name], tensors[other.name]):
                    continue
                if result.may_alias == input_.name and _coincide(tensors[result.name], tensors[input_.name]):
                    continue
                got, allowed = f"memory that {input_.name} uses too", "separate memory"
                raise self.error(f"{result.name} tensor", got, allowed, "allocate it")


def _record(source: str, configuration: Any, arch: str, *_: Any) -> None:
    """What ``run`` is within :func:`cudnn.runtime.recording.recording`."""
    recorder = recording.current()
    assert recorder is not None, "an object that was compiled while recording runs nothing"
    recorder.launch(source, configuration, arch)


def _coincide(one: Any, other: Any) -> bool:
    """Whether each element of one tensor lies where the element of the other with the same indices does."""
    return (one.data_ptr(), one.dtype, one.stride()) == (other.data_ptr(), other.dtype, other.stride())
