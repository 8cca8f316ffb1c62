"""RMSNorm + Hadamard transform + amax: the class, and the function that allocates the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudnn import launch
from cudnn.api_base import APIBase, TensorDesc, TupleDict, check_tensor, overlapping, unpad
from cudnn.errors import refusal
from cudnn.lazy import torch
from cudnn.registry import Usual
from cudnn.rmsnorm_rht_amax import reference
from cudnn_kernels.norm.heuristics import (
    BLOCK,
    MAXIMUM_COLUMNS,
    USUAL_COLUMNS,
    WARP,
    best_num_threads,
    configure_rmsnorm_rht_amax,
    pick_rows_per_cta,
)

_KERNELS: Mapping[str, str] = {
    "sm_90a": "cudnn_kernels.norm.rmsnorm_rht_amax:RmsNormRhtAmax",
    "sm_100a": "cudnn_kernels.norm.rmsnorm_rht_amax:BlackwellRmsNormRhtAmax",
}
"""The kernel by architecture."""


class RmsNormRhtAmax(APIBase):
    """RMSNorm, a normalised Hadamard transform of every 16 columns, and the largest magnitude of every group of rows.

        y[i, :] = x[i, :] * rsqrt(mean(x[i, :]^2) + eps) * w            in float32
        o[i, :] = each 16 columns of y[i, :] times H16 / 4              rounded to the type of x
        amax[g] = max |o| over rows g * rows_per_cta ... (g + 1) * rows_per_cta - 1, before rounding

    ===========  ======================  ==============  =====================================
    tensor       shape                   strides         type
    ===========  ======================  ==============  =====================================
    x, o         (m, n), (..., n)        contiguous      bfloat16 or float16
    w            (n,)                    (1,)            that of x
    amax         (m / rows_per_cta,)     (1,)            float32; overwritten, NaN where y has one
    ===========  ======================  ==============  =====================================

    Trailing dimensions of size 1 are ignored; dimensions before the last are taken together as rows, where their
    strides allow it: x may be (batch, sequence, n), say. A compiled object serves every ``m``, a compiled kernel every
    ``eps`` and ``rows_per_cta`` as well.

    Args:
        sample_x, sample_w, sample_o, sample_amax: tensors like those that ``execute`` will get.
        eps: added to the mean square.
        num_threads: threads that share a row; default: the kernel's choice, for n with a ``best_num_threads(n)``.
        rows_per_cta: rows that share one amax; default: ``pick_rows_per_cta(m)``.
        arch: ``"sm_90a"`` or ``"sm_100a"``, to check and compile for a chip that is not here; default: that of the
            tensors' device. On CPU tensors ``execute`` runs the reference in PyTorch, or, within ``cudnn.emulation``,
            the kernel itself.
    """

    def __init__(
        self,
        sample_x: Any,
        sample_w: Any,
        sample_o: Any,
        sample_amax: Any,
        eps: float = 1e-5,
        num_threads: int | None = None,
        rows_per_cta: int | None = None,
        arch: str | None = None,
    ) -> None:
        super().__init__()
        samples = (("x", sample_x), ("w", sample_w), ("o", sample_o), ("amax", sample_amax))
        for name, sample in samples:
            check_tensor(self._title(), name, sample)
        self.x_desc = self._rows(self._describe(sample_x, "x"), "x")
        self.w_desc = unpad(self._describe(sample_w, "w"), 1)
        self.o_desc = self._rows(self._describe(sample_o, "o"), "o")
        self.amax_desc = unpad(self._describe(sample_amax, "amax"), 1)
        self.eps = float(eps)
        columns = self.x_desc.shape[-1] if self.x_desc.ndim else 0
        self.num_threads = num_threads if num_threads is not None else best_num_threads(columns)
        self.rows_per_cta = rows_per_cta if rows_per_cta is not None else pick_rows_per_cta(self.x_desc.shape[0])
        self._chosen_threads = num_threads
        self._checked = 0  # rows of the last call on a GPU
        self._arch = arch

    @classmethod
    def _rows(cls, x: Any, name: str) -> Any:
        """A tensor, or description, as (rows, columns)."""
        x = unpad(x, 2)
        if x.ndim < 3:
            return x
        try:
            return x.view(-1, x.shape[-1])
        except RuntimeError as error:
            got = f"the strides {tuple(x.stride if isinstance(x, TensorDesc) else x.stride())} of {tuple(x.shape)}"
            allowed = "dimensions that one stride leads through, before the last"
            raise ValueError(refusal(cls._title(), name, got, allowed, f"pass {name}.contiguous()")) from error

    def check_support(self) -> bool:
        """True where the samples, the options and the architecture are supported.

        Raises:
            ValueError: a shape, stride, type or option.
            NotImplementedError: rows that do not fit into shared memory twice.
            RuntimeError: no kernel for the architecture.
        """
        where = self._title()
        if self.x_desc.ndim != 2:
            got, allowed = f"the shape {self.x_desc.shape}", "two dimensions or more, rows and columns"
            raise ValueError(refusal(where, "x", got, allowed))
        m, n = self.x_desc.shape
        self._check_columns(n)
        self._check_rows(m)
        self._check_shape(self.w_desc, (n,))
        self._check_shape(self.o_desc, (m, n))
        self._check_shape(self.amax_desc, (m // self.rows_per_cta,))
        for desc in (self.x_desc, self.o_desc):
            self._check_stride(desc, (n, 1))
        for desc in (self.w_desc, self.amax_desc):
            self._check_stride(desc, (1,))
        self._check_dtype(self.x_desc, torch.bfloat16, torch.float16)
        self._check_dtype(self.w_desc, self.x_desc.dtype)
        self._check_dtype(self.o_desc, self.x_desc.dtype)
        self._check_dtype(self.amax_desc, torch.float32)
        self._check_threads(n)
        devices = {str(desc.device) for desc in (self.x_desc, self.w_desc, self.o_desc, self.amax_desc)}
        if len(devices) > 1:
            raise ValueError(refusal(where, "samples", f"the devices {', '.join(sorted(devices))}", "one device"))
        if n > MAXIMUM_COLUMNS:
            raise NotImplementedError(refusal(where, "columns of x", n, f"at most {MAXIMUM_COLUMNS}"))
        if self._target() is None and self.x_desc.device.type != "cpu":
            raise RuntimeError(refusal(where, "device", self.x_desc.device, "cuda or cpu", 'pass arch="sm_90a"'))
        self._is_supported = True
        return True

    def _check_columns(self, n: int) -> None:
        if n == 0 or n % BLOCK:
            raise ValueError(refusal(self._title(), "columns of x", n, f"multiples of {BLOCK}"))

    def _check_rows(self, m: int) -> None:
        check_rows_per_cta(self._title(), self.rows_per_cta, m)

    def _check_threads(self, n: int) -> None:
        where, threads = self._title(), self.num_threads
        if threads is None:
            raise ValueError(refusal(where, "columns of x", n, "multiples of 512", "or give num_threads"))
        if threads <= 0 or threads > 1024 or threads % WARP:
            raise ValueError(refusal(where, "num_threads", threads, f"multiples of {WARP} from {WARP} to 1024"))
        if n % threads or n // threads % 8:
            raise ValueError(refusal(where, "num_threads", threads, f"{n} / num_threads a multiple of 8"))

    def _target(self) -> str | None:
        """The architecture to compile for: as given, or the device's; None on the CPU."""
        device = self.x_desc.device
        arch = self._arch
        if arch is None and device.type == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError(refusal(self._title(), "device", device, "a CUDA device that is available"))
            arch = launch.device_architecture(device.index if device.index is not None else torch.cuda.current_device())
        if arch is not None:
            launch.pick(_KERNELS, arch, self._title())
        return arch

    def kernels(self) -> list[tuple[str, Any, str]]:
        arch = self._target()
        return [] if arch is None else [(_KERNELS[arch], self._configuration(), arch)]

    def compile(self) -> None:
        """Compiles, or loads what an earlier process compiled; on CPU samples for the emulator, within its block."""
        if self._compiled_kernel is not None:
            return
        if not self._is_supported:
            self.check_support()
        arch = self._target()
        self._kernel = self._configuration()
        emulated = launch.emulated_architecture()
        if arch is None and emulated:
            launch.compile_for_emulation(launch.pick(_KERNELS, emulated, self._title()), self._kernel, emulated)
        if arch is None:
            self._compiled_kernel = _compiled_from_cpu_samples
        else:
            self._compiled_kernel = launch.kernel(_KERNELS[arch], self._kernel, arch)

    def _configuration(self) -> Any:
        dtype = str(self.x_desc.dtype).removeprefix("torch.")
        return configure_rmsnorm_rht_amax(dtype, self.x_desc.shape[1], self._chosen_threads)

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_tensor: Any, w_tensor: Any, o_tensor: Any, amax_tensor: Any, current_stream: Any = None
    ) -> None:
        """Writes ``o_tensor`` and ``amax_tensor``, in the order of ``current_stream`` (None: PyTorch's current stream).

        Allocates nothing and waits for nothing, so it can be captured in a CUDA graph and called from several threads.

        Raises:
            RuntimeError: not compiled yet.
            ValueError, TypeError: a tensor is not like its sample; the number of rows may differ.
        """
        run = self._compiled_kernel
        if run is None:
            raise self._not_compiled()
        try:
            if x_tensor.ndim != 2 or w_tensor.ndim != 1 or o_tensor.ndim != 2 or amax_tensor.ndim != 1:
                x_tensor, o_tensor = self._rows(x_tensor, "x"), self._rows(o_tensor, "o")
                w_tensor, amax_tensor = unpad(w_tensor, 1), unpad(amax_tensor, 1)
            m = x_tensor.shape[0]
            if m != amax_tensor.shape[0] * self.rows_per_cta:
                raise self._refuse("amax tensor shape", tuple(amax_tensor.shape), f"({m} / {self.rows_per_cta},)")
            if m == 0:
                return
            if x_tensor.is_cuda:
                if m != self._checked:
                    self._check_memory(x_tensor, w_tensor, o_tensor, amax_tensor)
                    self._checked = m
                index = x_tensor.get_device()
                run(x_tensor, w_tensor, o_tensor, amax_tensor, self.eps, launch.raw_stream(current_stream, index))
                return
        except (TypeError, ValueError, AttributeError, RuntimeError):
            self._check_like_samples(x_tensor, w_tensor, o_tensor, amax_tensor)  # says it better
            raise
        self._execute_on_cpu(x_tensor, w_tensor, o_tensor, amax_tensor, current_stream)

    def _check_like_samples(self, x: Any, w: Any, o: Any, amax: Any) -> None:
        """Raises where a tensor of a call, without trailing dimensions of size 1, is unlike its sample."""
        for name, tensor in (("x", x), ("w", w), ("o", o), ("amax", amax)):
            check_tensor(self._title(), name, tensor)
        m, n = x.shape[0], self.x_desc.shape[1]
        kind = self.x_desc.dtype
        for name, tensor, shape, dtype in (
            ("x", x, (m, n), kind),
            ("w", w, (n,), kind),
            ("o", o, (m, n), kind),
            ("amax", amax, (m // self.rows_per_cta,), torch.float32),
        ):
            if tensor.device != x.device:
                raise self._refuse(f"{name} tensor device", tensor.device, x.device)
            desc = self._describe(tensor, name)
            self._check_shape(desc, shape)
            self._check_dtype(desc, dtype)
            self._check_stride(desc, (n, 1) if len(shape) == 2 else (1,))
        self._check_memory(x, w, o, amax)

    def _check_memory(self, x: Any, w: Any, o: Any, amax: Any) -> None:
        """Raises where a tensor begins at an odd address or a result overlaps another tensor; ``o`` may be ``x``."""
        for name, tensor, step in (("x", x, 16), ("w", w, 16), ("o", o, 16), ("amax", amax, 4)):
            if tensor.data_ptr() % step:
                got = f"{tensor.data_ptr():#x}"
                allowed = f"multiples of {step} bytes"
                raise ValueError(refusal(self._title(), f"{name} tensor, its address", got, allowed, "pass a copy"))
        pairs = [("o", o, "w", w), ("amax", amax, "x", x), ("amax", amax, "w", w), ("amax", amax, "o", o)]
        if o.data_ptr() != x.data_ptr():
            pairs.append(("o", o, "x", x))
        for name, tensor, rest, other in pairs:
            if overlapping(tensor, other):
                got, allowed = f"memory that {rest} uses too", "memory of its own"
                raise ValueError(refusal(self._title(), f"{name} tensor", got, allowed, "allocate it"))

    def _execute_on_cpu(self, x: Any, w: Any, o: Any, amax: Any, stream: Any) -> None:
        """The reference or the emulator; both refuse what a GPU's kernels refuse."""
        self._check_like_samples(x, w, o, amax)
        if stream is not None:
            launch.raw_stream(stream, 0)
        arch = launch.emulated_architecture()
        if arch:
            source = launch.pick(_KERNELS, arch, self._title())
            launch.emulate(source, self._configuration(), arch, x, w, o, amax, self.eps)
            return
        launch.say_reference_runs(self._title())
        with torch.no_grad():  # kernels record nothing for autograd
            result, largest = reference.rmsnorm_rht_amax(x, w, self.eps, self.rows_per_cta)
            o.copy_(result)
            amax.copy_(largest)


def _compiled_from_cpu_samples(*_: Any) -> None:
    raise RuntimeError(
        refusal("RmsNormRhtAmax", "tensors", "CUDA tensors", "CPU tensors, as the samples", "compile from CUDA samples")
    )


class RmsNormRhtAmaxSm100(RmsNormRhtAmax):
    """:class:`RmsNormRhtAmax` by the name that existing programs use. The wrapper makes objects of it."""


def check_rows_per_cta(where: str, rows: int, m: int) -> None:
    """Raises unless groups of so many rows make up all ``m``."""
    if rows < 1 or m % rows:
        raise ValueError(refusal(where, "rows_per_cta", rows, f"divisors of the {m} rows of x"))


_cache_of_RmsNormRhtAmaxObjects: dict[tuple[Any, ...], RmsNormRhtAmax] = {}  # noqa: N816  (part of the public contract)
_cache_of_RmsNormRhtAmaxSm100Objects = _cache_of_RmsNormRhtAmaxObjects  # noqa: N816


def rmsnorm_rht_amax_wrapper(
    x_tensor: Any,
    w_tensor: Any,
    eps: float = 1e-5,
    num_threads: int | None = None,
    rows_per_cta: int | None = None,
    current_stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles where that was not done yet, and executes: ``o_tensor, amax_tensor``.

    Arguments and errors as those of :class:`RmsNormRhtAmax`. Nothing is recorded for autograd: the results have no
    ``grad_fn``. ``cudnn.ops.rmsnorm_rht_amax`` is the operator for ``torch.compile``.
    """
    try:
        x_tensor, w_tensor = unpad(x_tensor, 2), unpad(w_tensor, 1)
        strides = x_tensor.stride(), w_tensor.stride()
    except (AttributeError, TypeError):
        check_tensor("rmsnorm_rht_amax_wrapper", "x", x_tensor)
        check_tensor("rmsnorm_rht_amax_wrapper", "w", w_tensor)
        raise
    x = RmsNormRhtAmax._rows(x_tensor, "x")
    m = x.shape[0]
    rows = rows_per_cta if rows_per_cta is not None else pick_rows_per_cta(m)
    if rows < 1 or m % rows:
        check_rows_per_cta("rmsnorm_rht_amax_wrapper", rows, m)
    o_tensor = torch.empty_like(x_tensor)
    amax_tensor = torch.empty(m // rows, dtype=torch.float32, device=x.device)
    key = (
        x.dtype,
        x.shape[1:],
        strides,
        w_tensor.dtype,
        w_tensor.shape,
        x.device,
        w_tensor.device,
        eps,
        num_threads,
        rows,
    )
    api = _cache_of_RmsNormRhtAmaxObjects.get(key)
    if api is None:
        api = RmsNormRhtAmaxSm100(x_tensor, w_tensor, o_tensor, amax_tensor, eps, num_threads, rows)
        api.check_support()
        api.compile()
        _cache_of_RmsNormRhtAmaxObjects[key] = api
    api.execute(
        x_tensor=x_tensor,
        w_tensor=w_tensor,
        o_tensor=o_tensor,
        amax_tensor=amax_tensor,
        current_stream=current_stream,
    )
    return TupleDict(o_tensor=o_tensor, amax_tensor=amax_tensor)


def _usual(dtype: str, shape: tuple[int, ...], arch: str) -> list[RmsNormRhtAmax]:
    x = torch.empty(shape, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], device="meta")
    amax = torch.empty(shape[0] // max(1, pick_rows_per_cta(shape[0])), device="meta")
    return [RmsNormRhtAmax(x, x[0], x, amax, arch=arch)]


USUAL = Usual(("bf16", "fp16"), ("m", "n"), tuple((4096, n) for n in USUAL_COLUMNS), _usual)
rmsnorm_rht_amax_wrapper_sm100 = rmsnorm_rht_amax_wrapper
