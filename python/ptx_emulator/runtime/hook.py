"""Points what the CuTe DSL compiles inside `emulate` at the emulator, without a C compiler and without CUDA.

After the DSL's passes the host function is LLVM dialect with about a dozen undeclared bodies, the CUDA runtime's.
They are given bodies here that jump to ctypes callbacks, which works for the plain JIT engine and for TVM-FFI alike.
Everything compiled outside `emulate` stays as it was.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptx_emulator.errors import EmulatorError
from ptx_emulator.machine import Options, execute
from ptx_emulator.memory import reachable, torch_storages
from ptx_emulator.report import Report
from ptx_emulator.runtime.launch import Dim3, Runtime

CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_100f": (10, 0), "sm_103a": (10, 3)}
MARK = "ptx_emulator.emulated"  # an attribute of modules


@dataclass
class Session:
    """One `emulate` block."""

    arch: str
    options: Options
    ranges: set[tuple[int, int]]
    report: Report = field(default_factory=Report)


class Hook:
    """The one patch of the DSL; `session` is the active `emulate` block."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.error: BaseException | None = None  # the first one of a launch that nobody has raised yet
        self.installed = False
        # Compiled code holds the addresses of these callbacks for as long as the process lives.
        self.runtimes: list[Runtime] = []

    def run(
        self, ptx: str, entry: str, grid: Dim3, block: Dim3, cluster: Dim3, shared: int, values: list[bytes]
    ) -> None:
        session = self.session
        if session is None:
            raise EmulatorError(
                f"{entry} was compiled for the emulator: call it inside `with ptx_emulator.emulate(...)`"
            )
        if self.error is not None:
            return
        ranges = reachable(torch_storages(), values) | session.ranges
        execute(
            ptx, entry, grid, block, cluster, shared, values, report=session.report,
            ranges=ranges, options=session.options,
        )  # fmt: skip

    def failed(self, error: BaseException) -> None:
        self.error = self.error or error

    def raise_pending(self) -> None:
        error, self.error = self.error, None
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
        if self.installed:
            return
        self.installed = True
        from cutlass.base_dsl import jit_executor
        from cutlass.base_dsl.compiler import Compiler
        from cutlass.cutlass_dsl import cuda_jit_executor

        hook = self
        compile_, run_program = (Compiler.compile, jit_executor.JitExecutor.run_compiled_program)
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

        Compiler.compile = compile_hooked  # type: ignore[method-assign]
        self.refuse_export()
        jit_executor.JitExecutor.run_compiled_program = run_hooked  # type: ignore[method-assign]
        compiled.num_devices = property(num_devices)  # type: ignore[assignment]
        module.unload = unload_hooked  # type: ignore[method-assign]
        self.install_tvm_ffi()

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

        for module in [m for m in sys.modules.values() if getattr(m, "get_export_module", None) is original]:
            module.get_export_module = hooked  # type: ignore[attr-defined]

    def install_tvm_ffi(self) -> None:
        try:
            from cutlass.base_dsl.tvm_ffi_builder import tvm_ffi_builder
            from cutlass.cutlass_dsl import tvm_ffi_provider
        except ImportError:  # apache-tvm-ffi is optional
            return
        hook = self
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
                result = original(self, *args, **kwargs)
                hook.raise_pending()
                return result

            cls.__call__ = call


HOOK = Hook()


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


@contextlib.contextmanager
def swapped(target: Any, **values: Any) -> Iterator[None]:
    """Attributes of an object or a class replaced for a while."""
    saved = {name: vars(target)[name] if isinstance(target, type) else getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(target, name, value)


@contextlib.contextmanager
def dsl_settings(arch: str, multiprocessors: int) -> Iterator[None]:
    """The DSL compiles for `arch`, keeps nothing in its caches and does not ask for a device."""
    import cutlass.cute  # noqa: F401  (creates the DSL object)
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.utils import HardwareInfo

    dsl = CuTeDSL._get_dsl()
    hardware: dict[str, Any] = {
        "__init__": lambda self, *a, **k: None,
        "get_max_active_clusters": lambda self, size, *a, **k: max(1, multiprocessors // size),
        "get_device_multiprocessor_count": lambda self, *a, **k: multiprocessors,
        "get_l2_cache_size_in_bytes": lambda self, *a, **k: 50 << 20,
    }
    runs: dict[str, Any] = {"_runtime_can_run_compiled": lambda self, runtime, compiled: True}
    settings = swapped(dsl.envar, arch=arch, no_cache=True, disable_file_caching=True, lineinfo=True)
    owner = next(c for c in type(dsl).__mro__ if "_runtime_can_run_compiled" in vars(c))
    with settings, swapped(HardwareInfo, **hardware), swapped(owner, **runs):
        yield
