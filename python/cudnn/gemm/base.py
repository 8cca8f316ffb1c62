"""What every fused GEMM is: arguments and an epilogue, declared; from them follow checks, allocation and calls."""

from __future__ import annotations

import functools
import operator
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from cudnn import launch, settings
from cudnn.api_base import APIBase, TensorDesc, TupleDict, check_tensor, is_power_of_2, overlapping, unpad
from cudnn.errors import refusal
from cudnn.gemm.arguments import Argument, BlockScales, Matrix
from cudnn.gemm.formats import BITS, BLOCK_SCALED, FLOAT4, FLOAT8, SCALES, dtypes, name_of
from cudnn.gemm.plans import LoadedGemm, Plan
from cudnn.gemm.reference import raise_amax, store, store_quantized
from cudnn.lazy import torch
from cudnn_kernels import epilogue
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.problem import BlockScale, GemmProblem, Operand
from cudnn_kernels.schedule import Dense

_ALIGNMENT = 16  # bytes, of contiguous extents


class FusedGemm(APIBase):
    """A GEMM with an epilogue, on tensors like the samples.

    A subclass declares its ``arguments``, says which of them is ``quantized`` and by which scale factors, and gives the
    epilogue, the reference and the rules of its own.
    """

    arguments: ClassVar[Sequence[Argument]]
    pairs: ClassVar[int] = 1  # columns of the product for each column of the result
    quantized: ClassVar[tuple[str, str]] = ("", "")
    tile_n: ClassVar[Sequence[int]] = ()
    largest_cluster: ClassVar[int] = 16  # in each dimension
    default_cluster: ClassVar[tuple[int, int]] = (1, 1)  # for a tile of 256 rows
    schedule: ClassVar[Any] = Dense()

    def __init__(
        self,
        samples: Mapping[str, Any],
        *,
        alpha: float,
        acc_dtype: Any,
        mma_tiler_mn: tuple[int, int],
        cluster_shape_mn: tuple[int, int] | None,
        sf_vec_size: int,
        arch: str | None,
        vector_f32: bool = False,
    ) -> None:
        super().__init__()
        self._interpret_uint8_as_fp4x2 = True
        self.descs: dict[str, TensorDesc | None] = {name: self._described(name, t) for name, t in samples.items()}
        self._check_alpha(alpha)
        self.alpha = float(alpha)
        self.acc_dtype = acc_dtype
        self.mma_tiler_mn = self._pair("mma_tiler_mn", mma_tiler_mn)
        if cluster_shape_mn is None:
            cluster_shape_mn = self.default_cluster if self.mma_tiler_mn[0] == 256 else (1, 1)
        self.cluster_shape_mn = self._pair("cluster_shape_mn", cluster_shape_mn)
        self.sf_vec_size, self.vector_f32 = sf_vec_size, vector_f32
        self._margin = settings.CLUSTER_OVERLAP_MARGIN.get()
        self._arch = arch
        self._plan: Plan | None = None
        self._emulated: dict[str, LoadedGemm] = {}
        # Of the last call: the shapes and the workspace. One value, for threads that share the object.
        self._checked: tuple[list[Any], Callable[[], Any]] = ([], _none)

    def _pair(self, name: str, given: Any) -> tuple[int, int]:
        try:
            first, second = map(operator.index, given)
        except (TypeError, ValueError) as error:
            allowed = "two integers, of rows and columns"
            raise TypeError(refusal(self._title(), name, repr(given), allowed)) from error
        return first, second

    def _check_alpha(self, alpha: Any) -> None:
        if not isinstance(alpha, (float, int)):
            cure = "pass alpha.item()" if hasattr(alpha, "item") else ""
            raise TypeError(refusal(self._title(), "alpha", type(alpha).__name__, "a float", cure))

    @classmethod
    def argument(cls, name: str) -> Argument:
        """The argument of a name."""
        return next(argument for argument in cls.arguments if argument.name == name)

    # What a subclass says.

    @abstractmethod
    def operations(self) -> tuple[Any, ...]:
        """What becomes of the product, in the kernels' vocabulary."""

    @abstractmethod
    def check_options(self) -> None:
        """Raises for what this operation in particular does not take."""

    @abstractmethod
    def reference(self, tensors: Mapping[str, Any]) -> None:
        """Computes the results in PyTorch, into their tensors."""

    def result_epilogue(self, name: str) -> tuple[Any, ...]:
        """The end of every epilogue: the amax, the quantiser, the store of the result."""
        operations: list[Any] = [epilogue.Amax("amax")] if self.given("amax") else []
        if self.quantizes():
            _, scales = self.quantized
            operations.append(epilogue.QuantizeRows(scales, self.kind(name), self.kind(scales), self.sf_vec_size))
        return (*operations, epilogue.StoreTile(name, self.kind(name), self.major(name)))

    def store_result(self, tensors: Mapping[str, Any], name: str, values: Any) -> None:
        """The same in PyTorch."""
        if self.given("amax"):
            raise_amax(tensors["amax"], values)
        if self.quantizes():
            scales = tensors[self.quantized[1]]
            store_quantized(tensors[name], scales, values, self.sf_vec_size, tensors["norm_const"])
        else:
            store(tensors[name], values)

    # What was given.

    def given(self, name: str) -> bool:
        """Whether there is a sample of an argument."""
        return self.descs.get(name) is not None

    def kind(self, name: str) -> str:
        """The name of a sample's type, that of packed elements for bytes; ``""`` where there is none."""
        desc = self.descs.get(name)
        return "" if desc is None else name_of(desc.dtype)

    def major(self, name: str) -> str:
        """The dimension of stride 1 of a sample."""
        desc, layout = self.descs[name], self.argument(name).layout
        assert desc is not None and isinstance(layout, Matrix)  # noqa: PT018
        return layout.major(desc.shape, desc.stride)

    @property
    def scaled(self) -> bool:
        """Whether the operands have scale factors."""
        return self.given("sfa")

    def quantizes(self) -> bool:
        """Whether the result is written with scale factors."""
        result, scales = self.quantized
        return self.given(scales) and self.kind(result) in FLOAT8

    def sizes(self, descs: Mapping[str, Any]) -> dict[str, int]:
        """Sizes by name, from the shapes of A and B.

        Raises:
            ValueError: they have not three dimensions each, or one of size 0.
        """
        return type(self).sizes_of(descs["a"].shape, descs["b"].shape, self.sf_vec_size)

    @classmethod
    def sizes_of(cls, a: Sequence[int], b: Sequence[int], vector: int) -> dict[str, int]:
        """Sizes by name, from the shapes of A and B in elements. Errors as those of :meth:`sizes`."""
        for name, shape, dims in (("a", a, "(m, k, l)"), ("b", b, "(n, k, l)")):
            if len(shape) != 3:
                allowed = f"three dimensions, {dims}"
                cure = f"pass {name}.unsqueeze(-1), a batch of one" if len(shape) == 2 else ""
                raise ValueError(refusal(cls._title(), f"{name} tensor", f"the shape {tuple(shape)}", allowed, cure))
        (m, k, batch), n = a, b[0]
        if min(n, k, batch) < 1:
            raise ValueError(refusal(cls._title(), "sizes", f"n={n}, k={k}, l={batch}", "at least 1"))
        return {"m": m, "n": n, "k": k, "l": batch, "columns": n // cls.pairs, "vector": vector}

    # Support.

    def check_support(self) -> bool:
        """True where the samples, the options and the architecture are supported.

        Raises:
            ValueError: a shape, stride, type or option.
            NotImplementedError: a combination that could be, but is not supported.
            RuntimeError: no kernel for the architecture.
        """
        if self.sf_vec_size not in (16, 32):
            raise self._error("sf_vec_size", self.sf_vec_size, "16 or 32")
        self._check_present(self.descs)
        self._check_layouts(self.descs)
        self._check_types()
        self._check_alignment(self.descs)
        self._check_block_scales()
        self._check_quantized()
        self._check_tiles()
        self.check_options()
        self._check_devices()
        target = self._target()
        if target is not None:
            self._multiprocessors(self._plan_for(target), ARCHITECTURES[target].multiprocessors)
        self._is_supported = True
        return True

    def _error(self, what: str, got: object, allowed: str, cure: str = "") -> ValueError:
        return ValueError(refusal(self._title(), what, got, allowed, cure))

    def _unsupported(self, what: str, got: object, allowed: str) -> NotImplementedError:
        return NotImplementedError(refusal(self._title(), what, got, allowed))

    def _described(self, name: str, tensor: Any) -> TensorDesc | None:
        if tensor is None:
            return None
        argument = self.argument(name)
        check_tensor(self._title(), name, tensor)
        desc = TensorDesc.of(tensor, name, isinstance(argument.layout, Matrix))
        return unpad(desc, argument.layout.rank)

    def _check_present(self, descs: Mapping[str, Any]) -> None:
        for argument in self.arguments:
            if not argument.optional and descs.get(argument.name) is None:
                raise self._error(f"{argument.name} tensor", "None", "a tensor")

    def _check_layouts(self, descs: Mapping[str, TensorDesc | None]) -> None:
        sizes = self.sizes(descs)
        present = [(argument, desc) for argument in self.arguments if (desc := descs.get(argument.name)) is not None]
        for argument, desc in present:
            self._check_shape(desc, argument.layout.shape(sizes))
        for argument, desc in present:
            bits = BITS.get(name_of(desc.dtype), desc.dtype.itemsize * 8)
            if not argument.layout.accepts(desc.shape, desc.stride, sizes, bits, argument.written):
                allowed, cure = argument.layout.allowed(sizes, argument.written)
                raise self._refuse(f"{argument.name} tensor stride", desc.stride, allowed, cure)

    def _check_types(self) -> None:
        for argument in self.arguments:
            self._check_dtype(self.descs.get(argument.name), *dtypes(argument.types))
        for first, second in (("a", "b"), ("sfa", "sfb"), ("sfa", self.quantized[1])):
            if self.given(first) and self.given(second) and self.kind(first) != self.kind(second):
                raise self._refuse(f"{second} tensor dtype", self._dtype(second), self._dtype(first))
        if self.acc_dtype != torch.float32:
            self.check_accumulator()

    def check_accumulator(self) -> None:
        """Raises unless products can be accumulated in ``acc_dtype``, which is not float32."""
        raise self._error("acc_dtype", self.acc_dtype, "torch.float32")

    def _dtype(self, name: str) -> Any:
        desc = self.descs[name]
        return None if desc is None else desc.dtype

    def _check_alignment(self, descs: Mapping[str, TensorDesc | None]) -> None:
        for name, layout in [(a.name, a.layout) for a in self.arguments if isinstance(a.layout, Matrix)]:
            desc = descs.get(name)
            if desc is None:
                continue
            major, kind = layout.major(desc.shape, desc.stride), name_of(desc.dtype)
            extent = desc.shape[layout.majors.index(major)]
            step = _ALIGNMENT * 8 // BITS[kind]
            if extent % step:
                allowed = f"multiples of {step}, 16 bytes"
                raise self._error(f"{name} tensor, its contiguous dimension", extent, allowed, "pad it")
            if kind == FLOAT4 and major == layout.majors[0]:
                raise self._error(f"{name} tensor, packed", f"{major}-major", f"{layout.majors[1]}-major")

    def _check_block_scales(self) -> None:
        """Which scale factors go with which elements."""
        if self.given("sfa") != self.given("sfb"):
            raise self._error("sfa and sfb tensors", "one of them", "both or none")
        kind, scales, vector = self.kind("a"), self.kind("sfa"), self.sf_vec_size
        if not self.scaled:
            if kind == FLOAT4:
                raise self._error("sfa and sfb tensors", "None", f"scale factors, for {kind}")
            return
        if kind not in BLOCK_SCALED:
            raise self._error("a tensor dtype, with scale factors", kind, ", ".join([FLOAT4, *FLOAT8]))
        if (scales, vector) == (SCALES[1], 32):
            raise self._error("sf_vec_size", vector, f"16, for scale factors of {scales}")
        if kind in FLOAT8 and (scales, vector) != (SCALES[0], 32):
            raise self._error("scale factors", f"{scales} for {vector} elements", f"{SCALES[0]} for 32, of {kind}")

    def _check_quantized(self) -> None:
        """A result of 8 bits has scale factors; another one has none."""
        result, scales = self.quantized
        if not result:
            return
        if self.kind(result) not in FLOAT8:
            for name in (scales, "norm_const"):
                if self.given(name):
                    self._logger.warning("%s is not used: the result has the type %s", name, self.kind(result))
            return
        if not (self.given(scales) and self.given("norm_const")):
            raise self._error(
                f"{scales} and norm_const tensors", "None", f"tensors, required for {self.kind(result)} {result}"
            )
        if (self.kind(scales), self.sf_vec_size) != (SCALES[0], 32):
            raise self._error(
                f"{scales} tensor", f"{self.kind(scales)} for {self.sf_vec_size} elements", f"{SCALES[0]} for 32"
            )

    def _check_tiles(self) -> None:
        """The instruction's tile and the cluster. On Hopper both are hints that nothing depends on."""
        m, n = self.mma_tiler_mn
        if m not in (128, 256):
            raise self._error("mma_tiler_mn", self.mma_tiler_mn, "128 or 256 rows")
        if n not in self.tile_n:
            raise self._error("mma_tiler_mn", self.mma_tiler_mn, f"{', '.join(map(str, self.tile_n))} columns")
        if any(not is_power_of_2(size) or size > self.largest_cluster for size in self.cluster_shape_mn):
            raise self._error("cluster_shape_mn", self.cluster_shape_mn, f"powers of 2 up to {self.largest_cluster}")
        rows, columns = self.cluster_shape_mn
        if rows * columns > 16:
            raise self._error("cluster_shape_mn", self.cluster_shape_mn, "at most 16 CTAs")
        if m == 256 and rows % 2:
            raise self._error("cluster_shape_mn", self.cluster_shape_mn, "an even number of rows, for a tile of 256")

    def _check_devices(self) -> None:
        devices = {str(desc.device) for desc in self.descs.values() if desc is not None}
        if len(devices) > 1:
            raise self._error("samples", f"the devices {', '.join(sorted(devices))}", "one device")

    # Compilation.

    @property
    def _device(self) -> Any:
        desc = self.descs["a"]
        assert desc is not None
        return desc.device

    def _target(self) -> str | None:
        """The architecture to compile for: as given, or the device's; None on the CPU."""
        device, arch = self._device, self._arch
        where = self._title()
        if arch is None and device.type == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError(refusal(where, "device", device, "a CUDA device that is available"))
            arch = launch.device_architecture(device.index if device.index is not None else torch.cuda.current_device())
        if arch is not None:
            launch.pick(ARCHITECTURES, arch, where)
        elif device.type != "cpu":
            raise RuntimeError(refusal(where, "device", device, "cuda or cpu", 'pass arch="sm_90a"'))
        return arch

    def _operand(self, name: str) -> Operand:
        scale = BlockScale(self.kind(f"sf{name}"), self.sf_vec_size) if self.scaled else None
        return Operand(self.kind(name), "k" if self.major(name) == "k" else "mn", scale)

    def _plan_for(self, arch: str) -> Plan:
        sizes = self.sizes(self.descs)
        return Plan(
            arch,
            GemmProblem(
                self._operand("a"),
                self._operand("b"),
                tuple(self.operations()),
                self.schedule,
                sizes["n"],
                sizes["k"],
                self.mma_tiler_mn,
                self.cluster_shape_mn,
            ),
        )

    def _multiprocessors(self, plan: Plan, count: int) -> int:
        """How many of so many multiprocessors the kernels may use: the margin leaves some clusters to others."""
        clusters = count // plan.cluster_size - self._margin
        if clusters <= 0:
            name, all_ = settings.CLUSTER_OVERLAP_MARGIN.name, clusters + self._margin
            raise self._error(name, self._margin, f"less than the {all_} clusters that fit on the GPU")
        return clusters * plan.cluster_size

    def kernels(self) -> list[tuple[str, Any, str]]:
        arch = self._target()
        if arch is None:
            return []
        plan = self._plan_for(arch)
        return [(plan.source, plan.configuration, arch)]

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
                self._emulated_kernel(emulated)
            self._compiled_kernel = _compiled_from_cpu_samples
            return
        self._plan = self._plan_for(arch)
        self._kernel = self._plan.configuration
        loaded = self._plan.load(lambda source, c: launch.kernel(source, c, arch), self._title())
        absent = [name for name in self.descs if not self.given(name)]
        self._absent, self._nothing = _getter(absent), (None,) * len(absent)
        # The kernel itself relates the shapes that share sizes; scale factors and halves of columns it cannot.
        linked = [
            argument.name
            for argument in self.arguments
            if self.given(argument.name)
            and (isinstance(argument.layout, BlockScales) or getattr(argument.layout, "columns", "") == "columns")
        ]
        self._linked = _getter(["a", "b", *linked])
        self._limits: dict[int, int] = {}
        self._compiled_kernel = loaded

    def _limit(self, index: int) -> int:
        """How many multiprocessors of a device the kernels may use."""
        assert self._plan is not None
        self._limits[index] = self._multiprocessors(self._plan, multiprocessors(index))
        return self._limits[index]

    def workspace_size(self) -> int:
        """Bytes of the workspace that ``execute`` needs for tensors of the samples' sizes; 0 for the reference."""
        arch = self._target()
        if arch is not None:
            return self._workspace(self._plan or self._plan_for(arch), self.descs)
        emulated = launch.emulated_architecture()
        return self._workspace(self._plan_for(emulated), self.descs) if emulated else 0

    def _workspace(self, plan: Plan, descs: Mapping[str, Any]) -> int:
        return plan.workspace_size(self.sizes(descs))

    # Execution.

    def run(self, tensors: dict[str, Any], alpha: float | None, stream: Any, workspace: Any) -> None:
        """Runs the compiled kernels on a call's tensors by name: what ``execute`` does.

        The kernels follow what is queued on ``stream``, which may be an int, a ``CUstream`` or a ``torch.cuda.Stream``;
        None: PyTorch's current stream, which is the legacy default stream where no other was set. ``workspace`` has at
        least ``workspace_size()`` bytes, for the sizes of the call; None: PyTorch's allocator is asked. Nothing else
        is allocated and nothing waits, so a call can be captured in a CUDA graph. Several threads may use an object.

        The compiled function itself checks types, strides, addresses and the shapes that share sizes, and raises before
        anything is written but the workspace; what it says is then worded anew. That results overlap nothing is
        checked on a GPU when the sizes change, at the first call too.

        Raises:
            RuntimeError: not compiled yet.
            ValueError: a tensor is not like its sample, though sizes may differ; a result overlaps another tensor.
            TypeError: something else than a tensor, ``alpha`` or a stream.
        """
        kernel = self._compiled_kernel
        if kernel is None:
            raise self._not_compiled()
        a = tensors["a"]
        if not getattr(a, "is_cuda", False):
            self._run_on_cpu(tensors, self.alpha if alpha is None else alpha, stream, workspace)
            return
        if kernel is _compiled_from_cpu_samples:
            kernel()
        try:
            amax = tensors.get("amax")
            if amax is not None and amax.ndim != 1:
                tensors["amax"] = amax.view(1)
            if self._absent(tensors) != self._nothing:
                self._check_like_samples(tensors)
            seen = [tensor.shape for tensor in self._linked(tensors)]
            shapes, known = self._checked
            if seen != shapes or (workspace is not None and workspace is not known()):
                if a.shape[0] == 0:
                    return
                self._check_like_samples(tensors, shapes_only=True)
                known = _none
                if workspace is not None:
                    assert self._plan is not None
                    self._check_workspace(self._plan, tensors, workspace)
                    known = weakref.ref(workspace)
                self._checked = (seen, known)
            tensors["alpha"] = self.alpha if alpha is None else alpha
            index = a.get_device()
            limit = self._limits.get(index) or self._limit(index)
            kernel(tensors, limit, launch.raw_stream(stream, index), workspace)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            self._check_alpha(tensors.pop("alpha", self.alpha))
            self._check_like_samples(tensors)  # says it better, where a tensor is at fault
            raise

    def _unlike_sample(self, name: str, got: object, allowed: str) -> ValueError:
        return self._error(f"{name} tensor", got, allowed)

    def _check_workspace(self, plan: Plan | None, tensors: Mapping[str, Any], workspace: Any) -> None:
        check_tensor(self._title(), "workspace", workspace)
        found = {name: self._described(name, tensors[name]) for name in ("a", "b")}
        needed = self._workspace(plan, found) if plan else 0
        if workspace.dtype != torch.uint8 or workspace.ndim != 1 or not workspace.is_contiguous():
            got = f"{workspace.dtype} of the shape {tuple(workspace.shape)}"
            raise self._error("workspace_tensor", got, "torch.uint8 of one dimension, contiguous")
        if workspace.device != tensors["a"].device or workspace.numel() < needed or workspace.data_ptr() % _ALIGNMENT:
            got = f"{workspace.numel()} bytes at {workspace.data_ptr():#x} on {workspace.device}"
            allowed = f"at least {needed} bytes, aligned to {_ALIGNMENT}, on {tensors['a'].device}"
            raise self._error("workspace_tensor", got, allowed, "call workspace_size()")

    def _check_like_samples(self, tensors: Mapping[str, Any], shapes_only: bool = False) -> None:
        """Raises where a tensor of a call is unlike its sample, sizes aside."""
        for name, sample in self.descs.items():
            if (tensors[name] is None) != (sample is None):
                got, allowed = ("None", "a tensor") if sample is not None else ("a tensor", "None")
                raise self._unlike_sample(name, got, f"{allowed}, as the sample")
        found = {name: self._described(name, tensor) for name, tensor in tensors.items()}
        if shapes_only:
            sizes = self.sizes(found)
            for argument in self.arguments:
                self._check_shape(found.get(argument.name), argument.layout.shape(sizes))
            self._check_memory(tensors)
            return
        self._check_layouts(found)
        for name, sample in self.descs.items():
            desc = found[name]
            if desc is None or sample is None:
                continue
            self._check_dtype(desc, sample.dtype)
            layout = self.argument(name).layout
            if isinstance(layout, Matrix):
                inner = layout.majors.index(self.major(name))
                if desc.stride[inner] != 1 and desc.shape[inner] != 1:
                    raise self._refuse(f"{name} tensor stride", desc.stride, f"{self.major(name)}-major")
            if str(desc.device) != str(tensors["a"].device):
                raise self._refuse(f"{name} tensor device", desc.device, tensors["a"].device)
        self._check_alignment(found)
        self._check_memory(tensors)

    def _check_memory(self, tensors: Mapping[str, Any]) -> None:
        """Raises where a tensor begins at an odd address or a result overlaps another tensor."""
        present = [argument for argument in self.arguments if tensors.get(argument.name) is not None]
        for argument in present:
            address, step = tensors[argument.name].data_ptr(), argument.layout.alignment
            if address % step:
                allowed = f"multiples of {step} bytes"
                raise self._error(f"{argument.name} tensor, its address", f"{address:#x}", allowed, "pass a copy")
        for i, one in enumerate(present):
            for other in present[i + 1 :]:
                if (one.written or other.written) and overlapping(tensors[one.name], tensors[other.name]):
                    result, rest = (one.name, other.name) if one.written else (other.name, one.name)
                    got, allowed = f"memory that {rest} uses too", "memory of its own"
                    raise self._error(f"{result} tensor", got, allowed, "allocate it")

    def _run_on_cpu(self, tensors: dict[str, Any], alpha: float, stream: Any, workspace: Any) -> None:
        """The reference or the emulator; both refuse what a GPU's kernels refuse."""
        self._check_like_samples(tensors)
        self._check_alpha(alpha)
        if stream is not None:
            launch.raw_stream(stream, 0)
        arch = launch.emulated_architecture()
        kernel = self._emulated_kernel(arch) if arch else None
        if workspace is not None:
            self._check_workspace(kernel and kernel.plan, tensors, workspace)
        if tensors["a"].shape[0] == 0:
            return
        for name, tensor in tensors.items():
            if tensor is not None:
                tensors[name] = unpad(tensor, self.argument(name).layout.rank)
        tensors["alpha"] = alpha
        if kernel is None:
            launch.say_reference_runs(self._title())
            with torch.no_grad():  # kernels record nothing for autograd
                self.reference(tensors)
            return
        kernel(tensors, self._multiprocessors(kernel.plan, ARCHITECTURES[arch].multiprocessors), 0, workspace)

    def _emulated_kernel(self, arch: str) -> LoadedGemm:
        """The kernel for the emulator, compiled at the first call."""
        if arch not in self._emulated:
            launch.pick(ARCHITECTURES, arch, self._title())
            load = functools.partial(_emulated, arch)
            self._emulated[arch] = self._plan_for(arch).load(load, self._title())
        return self._emulated[arch]


def _none() -> None:
    """Stands for a reference to a workspace that there is not."""


def _getter(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Takes these of a call's tensors."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda tensors: tuple(tensors[name] for name in names)


def _emulated(arch: str, source: str, configuration: Any) -> Callable[..., None]:
    run = launch.compile_for_emulation(source, configuration, arch)
    return lambda *arguments: run(*arguments[:-1])


def _compiled_from_cpu_samples(*_: Any) -> None:
    allowed = "CPU tensors, as the samples"
    raise RuntimeError(refusal("fused GEMM", "tensors", "CUDA tensors", allowed, "compile from CUDA samples"))


@functools.cache
def multiprocessors(index: int) -> int:
    """How many multiprocessors a CUDA device has."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def call(
    api: type[FusedGemm],
    cache: dict[Any, Any],
    given: Mapping[str, Any],
    results: Mapping[str, tuple[Any, str]],
    order: Sequence[str],
    options: Mapping[str, Any],
    alpha: Mapping[str, float],
    stream: Any,
) -> TupleDict:
    """What every wrapper does: allocates the results, compiles where that was not done yet, and executes.

    ``results`` are the types and majors of what is to be allocated, ``order`` names what is returned, ``options`` are
    those of the class, ``alpha`` is empty or an argument of its call.
    """
    try:
        tensors = {**given, **allocate(api, given["a"], given["b"], results, options["sf_vec_size"])}
        kinds = _cache_key(api, given)
    except (AttributeError, TypeError):
        for name, tensor in given.items():
            if tensor is not None or not api.argument(name).optional:
                check_tensor(f"{api._title()}'s wrapper", name, tensor)
        raise
    key = (
        kinds,
        tuple((name, dtype, major) for name, (dtype, major) in results.items()),
        tuple(options.items()),
        settings.CLUSTER_OVERLAP_MARGIN.get(),
    )
    operation = cache.get(key)
    if operation is None:
        samples = {f"sample_{name}": tensors.get(name) for name in (x.name for x in api.arguments)}
        operation = api(**samples, **options)
        operation.check_support()
        operation.compile()
        cache[key] = operation
    named = {f"{name}_tensor": tensors.get(name) for name in (argument.name for argument in api.arguments)}
    operation.execute(**named, **alpha, current_stream=stream)
    return TupleDict({f"{name}_tensor": tensors.get(name) for name in order})


def allocate(
    api: type[FusedGemm], a: Any, b: Any, results: Mapping[str, tuple[Any, str]], vector: int
) -> dict[str, Any]:
    """Tensors for results of these types and majors."""
    sizes = api.sizes_of(_elements(a), _elements(b), vector)
    allocated: dict[str, Any] = {}
    for name, (dtype, major) in results.items():
        argument = api.argument(name)
        allocated[name] = argument.layout.allocate(sizes, major, dtype, a.device)
        if argument.fill is not None:
            allocated[name].fill_(argument.fill)
    return allocated


def check_major(where: str, what: str, major: str) -> None:
    """Raises unless a wrapper can allocate a result of that major."""
    if major not in ("m", "n"):
        raise ValueError(refusal(where, what, repr(major), "'m' or 'n'"))


def scale_type(scales: Any) -> Any:
    """The type of a result's scale factors, from those of A, where there are some."""
    return torch.float8_e8m0fnu if scales is None else scales.dtype


def _elements(tensor: Any) -> tuple[int, ...]:
    """The shape of an operand in elements."""
    if name_of(tensor.dtype) == FLOAT4:
        return TensorDesc.of(tensor, interpret_uint8_as_fp4x2=True).shape
    return tensor.shape


def _cache_key(api: type[FusedGemm], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells calls apart that need objects of their own: types, strides and sizes, as far as those are static."""
    kinds = tuple((name, None if t is None else (t.dtype, t.device)) for name, t in given.items())
    if not (settings.GEMM_DYNAMIC_M.get() or settings.GEMM_DYNAMIC_MNKL.get()):
        return kinds + tuple(None if t is None else (t.shape, t.stride()) for t in given.values())
    layouts = [(api.argument(name).layout, tensor) for name, tensor in given.items()]
    matrices = [(layout, tensor) for layout, tensor in layouts if isinstance(layout, Matrix)]
    majors = tuple(layout.major(tensor.shape, tensor.stride()) for layout, tensor in matrices)
    fixed = () if settings.GEMM_DYNAMIC_MNKL.get() else (given["a"].shape[1:], given["b"].shape)
    return kinds + majors + fixed
