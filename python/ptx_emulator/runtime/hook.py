"""Redirects kernels that the CuTe DSL compiles inside `emulate` to the emulator, without a C compiler and without CUDA.

After the DSL's passes the host function is LLVM dialect that calls about a dozen functions of the CUDA runtime. The
hook gives these functions bodies that jump to ctypes callbacks, for the plain JIT engine and for TVM-FFI. Code that is
compiled outside `emulate` is unchanged. A block belongs to its thread (its `contextvars` context): other threads can be
in separate blocks, or compile for a GPU, at the same time. The DSL compiles for one thread at a time.
"""

from __future__ import annotations

import ctypes
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptx_emulator.errors import EmulatorError
from ptx_emulator.machine import Options, execute
from ptx_emulator.memory import reachable, storages, torch_storages
from ptx_emulator.report import Report
from ptx_emulator.runtime.launch import Dim3, Runtime

CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_100f": (10, 0), "sm_103a": (10, 3)}
_DL_CPU, _DL_CUDA = 1, 2  # DLDeviceType
MARK = "ptx_emulator.emulated"  # an attribute of modules


@dataclass
class Session:
    """One `emulate` block."""

    arch: str
    options: Options
    ranges: set[tuple[int, int]]
    report: Report


_session: ContextVar[Session | None] = ContextVar("ptx_emulator", default=None)
_error: ContextVar[BaseException | None] = ContextVar("ptx_emulator_error", default=None)
_arguments: ContextVar[list[Any] | None] = ContextVar("ptx_emulator_arguments", default=None)  # of a TVM-FFI call


class _Later:
    """A host engine that is created on first use: functions of TVM FFI create another one and never use it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        engine = self._make()
        self.__dict__ |= {"_make": lambda: engine}
        return getattr(engine, name)


class Hook:
    """The patch of the DSL."""

    def __init__(self) -> None:
        self.installed = False
        self.source_lines = True  # for messages; compiling them in takes a third more time
        self.lock = threading.RLock()  # the DSL's own state is that of one compilation
        # Compiled code holds the addresses of these callbacks for as long as the process lives.
        self.runtimes: list[Runtime] = []

    @property
    def session(self) -> Session | None:
        """The active `emulate` block."""
        return _session.get()

    def enter(self, session: Session) -> None:
        self.install()
        self.raise_pending()  # of a call outside
        _session.set(session)

    def leave(self) -> None:
        _session.set(None)
        _error.set(None)

    def run(
        self, ptx: str, entry: str, grid: Dim3, block: Dim3, cluster: Dim3, shared: int, values: list[bytes]
    ) -> None:
        session = self.session
        if session is None:
            raise EmulatorError(
                f"{entry} was compiled for the emulator: call it inside `with ptx_emulator.emulate(...)`"
            )
        if _error.get() is not None:
            return
        self.check_target(ptx, entry)
        arguments = _arguments.get()
        live = torch_storages() if arguments is None else storages(arguments)
        ranges = reachable(live, values) | session.ranges
        execute(
            ptx,
            entry,
            grid,
            block,
            cluster,
            shared,
            values,
            report=session.report,
            ranges=ranges,
            options=session.options,
        )

    def check_target(self, ptx: str, entry: str) -> None:
        """A module for one chip does not run on another."""
        session = self.session
        target = re.search(r"^\s*\.target\s+(\w+)", ptx, re.MULTILINE)
        if session is not None and target is not None and target[1] != session.arch and target[1] in CAPABILITY:
            raise EmulatorError(
                f"{entry} was compiled for {target[1]}, and this block emulates {session.arch}: compile it again "
                f"inside the block, or call it inside `emulate({target[1]!r})`"
            )

    def failed(self, error: BaseException) -> None:
        """Keeps the first error of a launch until somebody can raise it."""
        _error.set(_error.get() or error)

    def raise_pending(self) -> None:
        error = _error.get()
        _error.set(None)
        if error is not None:
            raise error

    # -- compile time
    def compile(self, original: Any, compiler: Any, module: Any, pipeline: str, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        if session is None:
            return original(compiler, module, pipeline, *args, **kwargs)
        with tempfile.TemporaryDirectory(prefix="ptx_emulator-") as folder:
            pipeline = re.sub(r"dump-ptx-path='[^']*'", "", pipeline)
            pipeline = re.sub(r"\}\s*\)\s*$", f" dump-ptx-path='{folder}/kernel'}})", pipeline)
            result = original(compiler, module, pipeline, *args, **kwargs)
            texts = [p.read_text() for p in sorted(Path(folder).glob("*.ptx"))]
        if texts:
            major, minor = CAPABILITY[session.arch]
            runtime = Runtime("\n".join(texts), self.run, self.failed, (major, minor, session.options.multiprocessors))
            self.runtimes.append(runtime)
            give_bodies(result, runtime)
        return result

    def install(self) -> None:
        with self.lock:
            if not self.installed:
                self._install()
                self.installed = True

    def _install(self) -> None:
        from cutlass.base_dsl import jit_executor
        from cutlass.base_dsl.compiler import Compiler
        from cutlass.cutlass_dsl import cuda_jit_executor

        hook = self
        compile_, jit, run_program = Compiler.compile, Compiler.jit, jit_executor.JitExecutor.run_compiled_program
        compiled, module = (cuda_jit_executor.CudaDialectJitCompiledFunction, cuda_jit_executor.CudaDialectJitModule)
        devices, unload = compiled.num_devices.func, module.unload

        def compile_hooked(self: Any, module: Any, pipeline: str, *args: Any, **kwargs: Any) -> Any:
            return hook.compile(compile_, self, module, pipeline, *args, **kwargs)

        def run_hooked(self: Any, exe_args: list[Any]) -> Any:
            result = run_program(self, exe_args)
            hook.raise_pending()
            return result

        def num_devices(self: Any) -> int:
            return devices(self) if hook.session is None else 1

        def unload_hooked(self: Any) -> None:
            # Handle 1 is ours: the CUDA runtime must not see it.
            self.cuda_library[:] = [x for x in self.cuda_library if int(x) != 1]
            unload(self)

        def jit_hooked(self: Any, module: Any, opt_level: int = 2, *args: Any, **kwargs: Any) -> Any:
            if hook.session is None:
                return jit(self, module, opt_level, *args, **kwargs)
            return _Later(lambda: jit(self, module, 0, *args, **kwargs))  # host code that runs once a launch

        Compiler.compile, Compiler.jit = compile_hooked, jit_hooked  # type: ignore[method-assign]
        self.refuse_export()
        jit_executor.JitExecutor.run_compiled_program = run_hooked  # type: ignore[method-assign]
        compiled.num_devices = property(num_devices)  # type: ignore[assignment]
        module.unload = unload_hooked  # type: ignore[method-assign]
        self.install_tvm_ffi()
        self.install_settings()

    def install_settings(self) -> None:
        """Within a block the DSL compiles for its architecture, keeps nothing in its caches and asks for no device."""
        import cutlass.cute  # noqa: F401  (creates the DSL object)
        from cutlass.base_dsl.compiler import CompileCallable
        from cutlass.cutlass_dsl import CuTeDSL
        from cutlass.utils import HardwareInfo

        dsl = CuTeDSL._get_dsl()
        settings: dict[str, Callable[[Session], Any]] = {
            "arch": lambda session: session.arch,
            "no_cache": lambda _: True,
            "disable_file_caching": lambda _: True,
            "lineinfo": lambda _: self.source_lines,
        }
        base = type(dsl.envar)
        properties = {name: self._setting(base, name, value) for name, value in settings.items()}
        dsl.envar.__class__ = type(base.__name__, (base,), properties)

        def multiprocessors(session: Session, *_: Any, **__: Any) -> int:
            return session.options.multiprocessors

        hardware: dict[str, Callable[..., Any]] = {
            "__init__": lambda session, *a, **k: None,
            "get_max_active_clusters": lambda session, cluster_size, *a, **k: max(
                1, multiprocessors(session) // cluster_size
            ),
            "get_device_multiprocessor_count": multiprocessors,
            "get_l2_cache_size_in_bytes": lambda session, *a, **k: 50 << 20,
        }
        for name, answer in hardware.items():
            self._answer(HardwareInfo, name, answer)
        self._answer(type(dsl), "_runtime_can_run_compiled", lambda *_: True)
        self._take_tensors()
        self._one_at_a_time(CompileCallable, "_compile")
        self._one_at_a_time(type(dsl), "_func")
        self._one_at_a_time(type(dsl), "_preprocess_and_replace_code")
        self._trace_faster()

    def _trace_faster(self) -> None:
        """What the DSL finds out for every operation is found once for a line of Python: a fourth of its time."""
        from cutlass._mlir import ir
        from cutlass._mlir_helpers import op as helpers
        from cutlass.base_dsl import pyir_core

        op: Any = helpers
        used = {
            "_is_framework_stack_frame",
            "_fast_frameinfo",
            "_get_location_from_frame_info",
            "_get_caller_frame_info",
            "_pyir_auto_load_arg",
        }
        if not used <= vars(op).keys():  # this version finds it another way
            return
        find, is_framework = op._fast_frameinfo, op._is_framework_stack_frame
        make, load = op._get_location_from_frame_info, op._pyir_auto_load_arg
        # Code objects stay in these tables, or their numbers could become another's.
        known, places = dict[int, tuple[Any, bool]](), dict[tuple[int, int], tuple[Any, Any]]()
        locations, context = dict[int, tuple[Any, Any]](), None  # which the locations belong to

        def caller() -> Any:
            """The place of the first frame above an operation's wrapper that is not the DSL's."""
            frame: Any = sys._getframe(2)
            while frame is not None:
                code = frame.f_code
                entry = known.get(id(code))
                if entry is None:
                    entry = known[id(code)] = code, is_framework(frame) or code.co_filename == __file__
                if not entry[1]:
                    break
                frame = frame.f_back
            else:
                frame = sys._getframe(2)
            key = id(frame.f_code), frame.f_lasti
            if key not in places:
                places[key] = frame.f_code, find(frame)
            return places[key][1]

        def location(info: Any) -> Any:
            nonlocal context
            current = ir.Context.current  # pyright: ignore[reportAttributeAccessIssue]
            if current is not context:
                locations.clear()
                context = current
            if id(info) not in locations:
                locations[id(info)] = info, make(info)
            return locations[id(info)][1]

        op._get_caller_frame_info, op._get_location_from_frame_info = caller, location
        active = vars(pyir_core)["_PYIR_CANDIDATE_REGISTRY_ACTIVE"]
        op._pyir_auto_load_arg = lambda arg: load(arg) if active[0] else arg

    def _take_tensors(self) -> None:
        """Within a block the DSL sees the tensors of the CPU in global memory, as it would see them on the chip."""
        from cutlass.cute.runtime import _Tensor

        cls: Any = _Tensor
        make = cls.__init__

        def init(this: Any, *args: Any, **kwargs: Any) -> None:
            make(this, *args, **kwargs)
            if self.session is None:
                return
            if hasattr(this, "_tvm_ffi_tensor"):  # its device decides where TVM-FFI gets the stream from
                this._tvm_ffi_tensor = sys.modules["tvm_ffi"].from_dlpack(_OnChip(this._dlpack_data))
                this._dlpack_data = this._tvm_ffi_tensor.__dlpack__()
            else:
                on_the_chip(this._dlpack_data)

        cls.__init__ = init

    def _setting(self, base: type, name: str, value: Callable[[Session], Any]) -> property:
        """An attribute that has another value within a block."""
        own = vars(_owner(base, name))[name]
        if not isinstance(own, property):
            own = property(lambda envar: vars(envar)[name], lambda envar, new: vars(envar).update({name: new}))

        def read(envar: Any) -> Any:
            session = self.session
            return own.__get__(envar) if session is None else value(session)

        return property(read, own.fset, own.fdel)

    def _answer(self, cls: type, name: str, answer: Callable[..., Any]) -> None:
        """A method that is answered here within a block."""
        owner = _owner(cls, name)
        original = vars(owner)[name]

        def method(this: Any, *args: Any, **kwargs: Any) -> Any:
            session = self.session
            return original(this, *args, **kwargs) if session is None else answer(session, *args, **kwargs)

        setattr(owner, name, method)

    def _one_at_a_time(self, cls: type, name: str) -> None:
        owner = _owner(cls, name)
        original = vars(owner)[name]
        static = isinstance(original, staticmethod)
        function = original.__func__ if static else original

        def locked(*args: Any, **kwargs: Any) -> Any:
            with self.lock:
                return function(*args, **kwargs)

        setattr(owner, name, staticmethod(locked) if static else locked)

    def refuse_export(self) -> None:
        """What was compiled for the emulator holds addresses of this process: no object file may be made of it."""
        from cutlass.base_dsl import export

        original = export.get_export_module

        def hooked(module: Any, *args: Any, **kwargs: Any) -> Any:
            if MARK in module.operation.attributes:
                raise EmulatorError(
                    "compiled within ptx_emulator.emulate: it calls this process and has no object file"
                )
            return original(module, *args, **kwargs)

        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})  # to ask a module for a name may import others (transformers)
            if names.get("get_export_module") is original:
                names["get_export_module"] = hooked

    def install_tvm_ffi(self) -> None:
        try:
            from cutlass.base_dsl.tvm_ffi_builder import tvm_ffi_builder
            from cutlass.cutlass_dsl import tvm_ffi_provider
        except ImportError:  # apache-tvm-ffi is optional
            return
        hook = self
        compiler: Any = vars(tvm_ffi_provider)["_aot_support"]
        export = compiler.export_module_to_bytes

        def export_hooked(*args: Any, **kwargs: Any) -> Any:
            """Within a block the host's code, which checks arguments and calls the emulator, is not optimised."""
            return export(*args, **kwargs if hook.session is None else kwargs | {"opt_level": 0})

        compiler.export_module_to_bytes = export_hooked
        # The generated code compares the device type of each tensor with the compiled one: CPU tensors must pass.
        builder = next(c for c in vars(tvm_ffi_builder).values() if "decode_param_tensor" in getattr(c, "__dict__", ()))
        decode, device_type = (builder.decode_param_tensor, tvm_ffi_builder.TVMFFIBuilder.load_dltensor_device_type)

        def decode_hooked(self: Any, block: Any, param: Any, *args: Any) -> Any:
            self.expected_device_type = param.dlpack_device_type
            return decode(self, block, param, *args)

        def device_type_hooked(self: Any, tensor: Any) -> Any:
            return device_type(self, tensor) if hook.session is None else self.i32(self.expected_device_type)

        builder.decode_param_tensor = decode_hooked
        base: Any = tvm_ffi_builder.TVMFFIBuilder
        base.load_dltensor_device_type = device_type_hooked
        for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
            cls = getattr(tvm_ffi_provider, name)

            def call(self: Any, *args: Any, original: Any = cls.__call__, **kwargs: Any) -> Any:
                _arguments.set([*args, *kwargs.values()])
                try:
                    result = original(self, *args, **kwargs)
                finally:
                    _arguments.set(None)
                hook.raise_pending()
                return result

            cls.__call__ = call


HOOK = Hook()


def _owner(cls: type, name: str) -> Any:
    """The class of a hierarchy that defines `name`."""
    return next(each for each in cls.__mro__ if name in vars(each))


class _OnChip:
    """What a DLPack capsule holds, as an object on a GPU."""

    def __init__(self, capsule: Any) -> None:
        on_the_chip(capsule)
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DL_CUDA, 0


def on_the_chip(capsule: Any) -> None:
    """Changes the device of a DLPack capsule from the CPU to a GPU."""
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    if type(capsule).__name__ != "PyCapsule":
        return
    name = api.PyCapsule_GetName(capsule)
    before = {b"dltensor": 0, b"dltensor_versioned": 32}.get(name)  # bytes before the DLTensor
    if before is not None:
        device = ctypes.c_int32.from_address(api.PyCapsule_GetPointer(capsule, name) + before + 8)
        if device.value == _DL_CPU:
            device.value = _DL_CUDA


def give_bodies(module: Any, runtime: Runtime) -> None:
    """Defines the declared runtime functions of an LLVM-dialect module as jumps to `runtime`."""
    import cutlass._mlir.ir

    ir: Any = cutlass._mlir.ir

    with module.context, ir.Location.unknown():
        module.operation.attributes[MARK] = ir.UnitAttr.get()
        for op in list(module.body.operations):
            if op.operation.name != "llvm.func":
                continue
            name = ir.StringAttr(op.attributes["sym_name"]).value
            address = runtime.address(name)
            if address is None or len(op.regions[0].blocks):
                continue
            text = str(op.attributes["function_type"].value)  # !llvm.func<i32 (ptr, ptr)>
            result, inputs = re.fullmatch(r"!llvm\.func<(\S+) \((.*)\)>", text).groups()  # type: ignore[union-attr]
            types = ["!llvm.ptr" if t == "ptr" else t for t in inputs.split(", ") if t]
            names = ", ".join(f"%a{i}" for i in range(len(types)))
            arguments = ", ".join(f"%a{i}: {t}" for i, t in enumerate(types))
            back = "" if result == "void" else f" -> {result}"
            call = f"llvm.call %p({names}) : !llvm.ptr, ({', '.join(types)}) -> {'()' if not back else result}"
            body = f"{call}\nllvm.return" if not back else f"%r = {call}\nllvm.return %r : {result}"
            source = (
                f"llvm.func @{name}({arguments}){back} {{\n%c = llvm.mlir.constant({address} : i64) : i64\n"
                f"%p = llvm.inttoptr %c : i64 to !llvm.ptr\n{body}\n}}"
            )
            defined = ir.Module.parse(source)
            op.operation.erase()
            defined.body.operations[0].operation.clone(ir.InsertionPoint(module.body))
