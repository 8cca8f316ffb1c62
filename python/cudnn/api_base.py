"""What every fused API shares: descriptions of tensors, the check / compile / execute contract, results by name."""

from __future__ import annotations

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from cudnn.errors import make_error
from cudnn.lazy import torch
from cudnn.strided import check_strided


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def is_power_of_2(n: int) -> bool:
    """True for 1, 2, 4, 8 ..."""
    return n > 0 and n & (n - 1) == 0


_warned: set[str] = set()
_warned_lock = threading.Lock()


def warn_experimental_api_once(logger: logging.Logger, name: str) -> None:
    """Warns, once per name and process, that an API may still change. For APIs of other packages: ours document it."""
    with _warned_lock:
        if name in _warned:
            return
        _warned.add(name)
    logger.warning("%s is an experimental API", name)


def _reset_experimental_api_warning_registry() -> None:
    with _warned_lock:
        _warned.clear()


class TupleDict(dict[str, Any]):
    """Results by name, ``result["o_tensor"]``, by position, ``result[0]``, or unpacked: ``o, amax = result``."""

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.values())

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        if not 0 <= key < len(self):
            raise IndexError(f"result {key}: there are {len(self)}, numbered from 0: {', '.join(self.keys())}")
        return tuple(self.values())[key]


def check_tensor(where: str, name: str, tensor: Any) -> None:
    """Raises unless it is a ``torch.Tensor`` with strides, or stands for one."""
    if hasattr(tensor, "data_ptr"):
        if not torch.compiler.is_compiling():  # which traces no more than strided tensors
            check_strided(where, f"{name} tensor", tensor)
        return
    type_ = type(tensor)
    hint = f"pass torch.from_numpy({name})" if type_.__module__ == "numpy" else ""
    got = f"{type_.__module__}.{type_.__qualname__}".removeprefix("builtins.")
    raise make_error(TypeError, where, f"{name} tensor", got, "a torch.Tensor", hint)


def check_rank(where: str, name: str, tensor: Any, ranks: Sequence[int], allowed: str) -> None:
    """Raises unless a tensor has one of these numbers of dimensions."""
    if tensor.ndim not in ranks:
        raise make_error(ValueError, where, f"{name} tensor", f"the shape {tuple(tensor.shape)}", allowed)


def stride_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions from the innermost to the outermost: by stride, then by size."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (stride[dim], shape[dim])))


@dataclass(frozen=True)
class TensorDesc:
    """What is known of a tensor without its data. Shape and strides count elements.

    The methods that change the shape do what their namesakes of ``torch.Tensor`` do, and raise the same errors, as long
    as the result begins where the tensor begins.

    Raises:
        TypeError: ``device`` is nothing that ``torch.device`` takes.
        ValueError: ``stride`` or ``stride_order`` has another length than ``shape``, or the latter is no permutation.
    """

    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    stride_order: tuple[int, ...]
    device: Any
    interpret_uint8_as_fp4x2: bool = False
    ndim: int = field(init=False)
    name: str = ""

    def __post_init__(self) -> None:
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise TypeError(f"TensorDesc: device: got {self.device!r}; allowed: what torch.device takes.") from error
        rank = len(self.shape)
        if len(self.stride) != rank:
            raise ValueError(f"TensorDesc: stride: got {self.stride}; allowed: {rank} entries, one per dimension.")
        if sorted(self.stride_order) != list(range(rank)):
            raise ValueError(
                f"TensorDesc: stride_order: got {self.stride_order}; allowed: a permutation of {tuple(range(rank))}."
            )
        for key, value in {
            "shape": tuple(self.shape),
            "stride": tuple(self.stride),
            "stride_order": tuple(self.stride_order),
            "device": device,
            "ndim": rank,
        }.items():
            object.__setattr__(self, key, value)

    @classmethod
    def of(cls, tensor: Any, name: str = "", interpret_uint8_as_fp4x2: bool = False) -> TensorDesc:
        """Describes a ``torch.Tensor``. Packed four-bit elements are counted as elements, two to a byte.

        Raises:
            RuntimeError: a packed tensor has no dimension of stride 1.
        """
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        packed = str(tensor.dtype) == "torch.float4_e2m1fn_x2"
        if packed or (interpret_uint8_as_fp4x2 and tensor.dtype == torch.uint8):
            inner = max((dim for dim in range(len(shape)) if stride[dim] == 1), key=lambda d: shape[d], default=None)
            if inner is None:
                raise RuntimeError(f"{name}: packed four-bit elements need a dimension of stride 1; got {stride}")
            shape = tuple(size * 2 if dim == inner else size for dim, size in enumerate(shape))
            stride = tuple(step if dim == inner else step * 2 for dim, step in enumerate(stride))
        return cls(
            tensor.dtype, shape, stride, stride_order(shape, stride), tensor.device, interpret_uint8_as_fp4x2, name=name
        )

    def _stand_in(self) -> Any:
        return torch.empty_strided(self.shape, self.stride, dtype=torch.int8, device="meta")

    def _like(self, tensor: Any) -> TensorDesc:
        if tensor.storage_offset() != 0:
            raise RuntimeError(f"TensorDesc: storage offset: got {tensor.storage_offset()}; allowed: 0.")
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return replace(self, shape=shape, stride=stride, stride_order=stride_order(shape, stride))

    def __len__(self) -> int:
        return len(self._stand_in())

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dimension."""
        return self._stand_in().size() if dim is None else self._stand_in().size(dim)

    def permute(self, *dims: Any) -> TensorDesc:
        """As ``torch.Tensor.permute``."""
        return self._like(self._stand_in().permute(*dims))

    def transpose(self, dim0: int, dim1: int) -> TensorDesc:
        """As ``torch.Tensor.transpose``."""
        return self._like(self._stand_in().transpose(dim0, dim1))

    def squeeze(self, dim: int | tuple[int, ...] | None = None) -> TensorDesc:
        """As ``torch.Tensor.squeeze``."""
        return self._like(self._stand_in().squeeze() if dim is None else self._stand_in().squeeze(dim))

    def unsqueeze(self, dim: int) -> TensorDesc:
        """As ``torch.Tensor.unsqueeze``."""
        return self._like(self._stand_in().unsqueeze(dim))

    def is_contiguous(self, memory_format: Any = None) -> bool:
        """As ``torch.Tensor.is_contiguous``."""
        return self._stand_in().is_contiguous(memory_format=memory_format or torch.contiguous_format)

    def contiguous(self) -> TensorDesc:
        """As ``torch.Tensor.contiguous``."""
        return self._like(self._stand_in().contiguous())

    def view(self, *shape: Any) -> TensorDesc:
        """As ``torch.Tensor.view`` with a shape."""
        return self._like(self._stand_in().view(*shape))

    def as_strided(self, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0) -> TensorDesc:
        """As ``torch.Tensor.as_strided``, within the elements that this tensor has."""
        result = self._like(self._stand_in().as_strided(size, stride, storage_offset))
        if _extent(result) > _extent(self):
            raise RuntimeError(
                f"TensorDesc: as_strided: got {tuple(size)} with strides {tuple(stride)}; allowed: a range within "
                f"{self.shape} with strides {self.stride}."
            )
        return result


def same_stride(shape: Sequence[int], stride: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides lead to the same elements of a shape, if it has some."""
    return 0 in shape or all(a == b for size, a, b in zip(shape, stride, other, strict=True) if size > 1)


def is_non_overlapping(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two elements share memory. False also for some interleaved layouts without shared memory."""
    reach = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1):
        if step < reach:
            return False
        reach += (size - 1) * step
    return True


def overlapping(x: Any, y: Any) -> bool:
    """Whether two tensors of a device share memory.

    Column slices of one tensor do not. The result may be True for other interleaved tensors that share no memory.
    """
    if x.numel() == 0 or y.numel() == 0:
        return False
    distance = y.data_ptr() - x.data_ptr()
    if not -_bytes(y) < distance < _bytes(x):
        return False
    pitch = math.gcd(*_pitches(x), *_pitches(y))
    if pitch == 0:
        return True
    distance %= pitch
    return distance < _run(x) or distance + _run(y) > pitch


def _bytes(x: Any) -> int:
    """From the first to the last, both included."""
    return (1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _pitches(x: Any) -> list[int]:
    """The strides in bytes, but for that between neighbors."""
    return [s * x.element_size() for n, s in zip(x.shape, x.stride(), strict=True) if n > 1 and s != 1]


def _run(x: Any) -> int:
    """Bytes of consecutive elements."""
    return x.element_size() * max([1, *(n for n, s in zip(x.shape, x.stride(), strict=True) if s == 1)])


def _extent(desc: TensorDesc) -> int:
    """Elements from the first to the last."""
    if 0 in desc.shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(desc.shape, desc.stride, strict=True))


class APIBase(ABC):
    """A fused operation for tensors like the samples that its constructor got.

    The constructor keeps descriptions only and touches no GPU. ``check_support`` raises where the operation cannot run,
    ``compile`` builds the kernel once, ``execute`` runs it on tensors given by keyword.
    """

    uncompiled: ClassVar[type[Exception]] = RuntimeError
    """What ``execute`` raises before ``compile``."""

    def __init__(self) -> None:
        self._logger = logging.getLogger(type(self).__name__)
        self._interpret_uint8_as_fp4x2 = False
        self._is_supported = False
        self._kernel: Any = None
        self._compiled_kernel: Any = None

    @abstractmethod
    def check_support(self) -> bool:
        """True if the operation is supported; else an exception names what is not supported and what is allowed."""

    @abstractmethod
    def compile(self) -> None:
        """Compiles the kernel; calls ``check_support`` first if needed. A second call does nothing."""

    @abstractmethod
    def execute(self, **tensors: Any) -> None:
        """Runs the compiled kernel on tensors like the samples, in the order of ``current_stream``.

        Raises:
            RuntimeError: not compiled yet.
        """

    def kernels(self) -> list[tuple[str, Any, str]]:
        """The kernels that ``compile`` loads: source, configuration and architecture; none on the CPU."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Compiles if needed, and executes."""
        if self._compiled_kernel is None:
            self.compile()
        self.execute(*args, **kwargs)

    def __repr__(self) -> str:
        descs = {name: desc for name, desc in vars(self).get("descs", {}).items() if desc is not None}
        descriptions = (f"{name} {str(x.dtype).removeprefix('torch.')} {x.shape}" for name, x in descs.items())
        return f"<cudnn.{type(self).__name__}: {', '.join(descriptions)}>"

    @classmethod
    def _title(cls) -> str:
        """The name in messages: that of the class, without the suffix that existing programs know it by."""
        return cls.__name__.removesuffix("Sm100")

    @classmethod
    def check_required(cls, **tensors: Any) -> None:
        """Raises unless these, which a constructor or wrapper looks at before all else is checked, are tensors."""
        for name, tensor in tensors.items():
            if tensor is None:
                raise make_error(ValueError, cls._title(), f"{name} tensor", "None", "a tensor")
            check_tensor(cls._title(), name, tensor)

    @classmethod
    def tensor_key(cls, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a wrapper's objects depend on: types, devices, shapes and strides of the tensors that are given."""
        try:
            return tuple(None if t is None else (t.dtype, t.device, t.shape, t.stride()) for t in tensors.values())
        except (AttributeError, TypeError):
            for name, tensor in tensors.items():
                if tensor is not None:
                    check_tensor(cls._title(), name, tensor)
            raise

    def _describe(self, tensor: Any, name: str) -> TensorDesc | None:
        if tensor is None:
            return None
        check_tensor(self._title(), name, tensor)
        return TensorDesc.of(tensor, name, self._interpret_uint8_as_fp4x2)

    def _not_compiled(self) -> Exception:
        hint = "call compile() before execute()"
        return self.uncompiled(f"{self._title()}: the kernel is not compiled. To fix it, {hint}.")

    def _refuse(self, what: str, got: object, expected: object, hint: str = "") -> ValueError:
        text = f"{self._title()}: {what} mismatch: expected {expected}, got {got}"
        return ValueError(f"{text}. To fix it, {hint}." if hint else text)

    def _check_shape(self, desc: TensorDesc | None, expected: Sequence[int]) -> None:
        if desc is not None and desc.shape != tuple(expected):
            raise self._refuse(f"{desc.name} tensor shape", desc.shape, tuple(expected))

    def _check_stride(self, desc: TensorDesc | None, *allowed: Sequence[int]) -> None:
        """Strides are compared exactly, but for those of dimensions of size 1: no element lies there."""
        if desc is None or any(same_stride(desc.shape, desc.stride, stride) for stride in allowed):
            return
        raise self._refuse(f"{desc.name} tensor stride", desc.stride, " or ".join(str(tuple(s)) for s in allowed))

    def _check_dtype(self, desc: TensorDesc | None, *allowed: Any) -> None:
        if desc is not None and desc.dtype not in allowed:
            raise self._refuse(f"{desc.name} tensor dtype", desc.dtype, " or ".join(map(str, allowed)))


def unpad(tensor: Any, rank: int) -> Any:
    """The tensor, or description, without the trailing dimensions of size 1 that it has beyond ``rank``."""
    while tensor.ndim > rank and tensor.shape[-1] == 1:
        tensor = tensor.squeeze(-1)
    return tensor


def pad(tensor: Any, rank: int) -> Any:
    """The tensor, or description, with trailing dimensions of size 1 up to ``rank``."""
    while tensor.ndim < rank:
        tensor = tensor.unsqueeze(-1)
    return tensor
