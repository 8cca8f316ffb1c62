"""Runs cases on the GPU through the CUDA driver, which compiles the PTX.

A fault of one kernel ends the CUDA context of its process and a kernel may never end: cases run in a child process,
which is replaced by another one for the rest of them.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from calibration.case import Case
from calibration.maps import PROMOTIONS, SWIZZLES, TYPES, Map, base
from ptx_emulator.numerics import Array

LIMIT = 15.0  # seconds for one case, the compilation included
FAULTS = 700  # from here on, errors of running kernels: most of them end the context


class GPUError(RuntimeError):
    """An error of the CUDA driver. `fatal`: the context is lost."""

    def __init__(self, message: str, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _call(function: str, *arguments: Any) -> Any:
    driver = _driver()
    status, *results = getattr(driver, function)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise GPUError(f"{function}: {status.name}", FAULTS <= int(status) < FAULTS + 100)
    return results[0] if len(results) == 1 else results


class Device:
    """The first GPU, its context current in this thread."""

    def __init__(self) -> None:
        driver = _driver()
        _call("cuInit", 0)
        device = _call("cuDeviceGet", 0)
        self.context = _call("cuDevicePrimaryCtxRetain", device)
        _call("cuCtxSetCurrent", self.context)
        self.name = _call("cuDeviceGetName", 100, device).split(b"\0", 1)[0].decode()
        attribute = driver.CUdevice_attribute
        self.capability = tuple(
            _call("cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{x}"), device)
            for x in ("MAJOR", "MINOR")
        )
        self.driver_version = str(_call("cuDriverGetVersion"))
        self.arch = "sm_{}{}a".format(*self.capability)


def encode_by_driver(m: Map, address: int) -> bytes:
    driver = _driver()
    number = TYPES[m.kind][0]
    encoded = _call(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType(number),
        len(m.sizes),
        address,
        [driver.cuuint64_t(x) for x in m.sizes],
        [driver.cuuint64_t(x) for x in m.strides or (16,)],
        [driver.cuuint32_t(x) for x in m.box],
        [driver.cuuint32_t(x) for x in m.element_strides],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(SWIZZLES[m.swizzle]),
        driver.CUtensorMapL2promotion(PROMOTIONS[m.promotion]),
        driver.CUtensorMapFloatOOBfill(int(m.nan_fill)),
    )
    return ctypes.string_at(encoded.getPtr(), 128)


def _load(text: str) -> Any:
    """The module, or an error with what the driver's compiler has to say."""
    driver = _driver()
    log = bytearray(8192)
    options = [driver.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, driver.CUjit_option.CU_JIT_ERROR_LOG_BUFFER]
    image = text.encode() + b"\0"
    status, module = driver.cuModuleLoadDataEx(image, 2, options, [len(log), log])
    if status != driver.CUresult.CUDA_SUCCESS:
        said = bytes(log).split(b"\0", 1)[0].decode(errors="replace").strip()
        raise GPUError(f"cuModuleLoadDataEx: {status.name}: {said}", False)
    return module


def run_on_gpu(case: Case, arch: str) -> list[Array]:
    """The outputs, by the GPU whose context is current."""
    driver = _driver()
    module = _load(case.text(arch))
    arrays = [np.ascontiguousarray(x) for x in (*case.inputs, *case.outputs)]
    buffers = [_call("cuMemAlloc", x.nbytes) for x in arrays]
    for buffer, array in zip(buffers, arrays, strict=True):
        _call("cuMemcpyHtoD", buffer, array.ctypes.data, array.nbytes)
    addresses = [int(b) for b in buffers]
    values: list[Any] = [ctypes.c_uint64(a) for a in addresses]
    values += [ctypes.create_string_buffer(encode_by_driver(m, base(m, addresses)), 128) for m in case.maps]
    parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = case.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = case.block, 1, 1
    config.sharedMemBytes, config.hStream, config.numAttrs = 0, 0, 0
    if case.cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = case.cluster, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
    _call("cuLaunchKernelEx", config, _call("cuModuleGetFunction", module, b"k"), ctypes.addressof(parameters), 0)
    _call("cuCtxSynchronize")
    results = []
    for buffer, array in list(zip(buffers, arrays, strict=True))[len(case.inputs) :]:
        result = np.empty_like(array)
        _call("cuMemcpyDtoH", result.ctypes.data, buffer, result.nbytes)
        results.append(result)
    for buffer in buffers:
        _call("cuMemFree", buffer)
    _call("cuModuleUnload", module)
    return results


# -- many cases
def serve(cases: list[Case], arch: str, folder: Path) -> None:
    """The child: one line per case on standard output, its outputs in `folder` under its number, until one is fatal."""
    device = Device()
    print(f"device {device.name}|{device.driver_version}|{device.arch}", flush=True)
    for number, case in enumerate(cases):
        print(f"start {number}", flush=True)
        try:
            outputs = run_on_gpu(case, arch)
        except GPUError as error:
            print(f"error {number} {json.dumps(str(error))}", flush=True)
            if error.fatal:
                return
            continue
        for index, output in enumerate(outputs):
            np.save(folder / f"{case_file(case)}.{index}.npy", output)
        print(f"done {number}", flush=True)


def case_file(case: Case) -> str:
    return "".join(c if c.isalnum() else "_" for c in case.id)


def run_all(cases: list[Case], arch: str) -> tuple[dict[str, list[Array]], dict[str, str], dict[str, str]]:
    """(outputs by case, errors by case, what the GPU is called), every case run apart from the faults of others."""
    outputs: dict[str, list[Array]] = {}
    errors: dict[str, str] = {}
    device: dict[str, str] = {}
    left = cases
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while left:
            finished = _child(left, arch, folder, errors, device)
            for case in left[:finished]:
                if case.id not in errors:
                    outputs[case.id] = [
                        np.load(folder / f"{case_file(case)}.{i}.npy") for i in range(len(case.outputs))
                    ]
            left = left[finished:]
    return outputs, errors, device


def _child(cases: list[Case], arch: str, folder: Path, errors: dict[str, str], device: dict[str, str]) -> int:
    """Runs cases until one ends the process; how many are done with, the last of them perhaps in error."""
    command = [sys.executable, "-m", "calibration", "--serve", str(folder), "--arch", arch]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert child.stdin is not None and child.stdout is not None  # noqa: PT018
    child.stdin.write("\n".join(c.id for c in cases))
    child.stdin.close()
    current, done, noise, late = 0, 0, [], False

    def stop() -> None:
        nonlocal late
        late = True
        child.kill()

    timer = threading.Timer(60.0, stop)  # creating the context takes a while
    timer.start()
    for line in child.stdout:
        what, _, rest = line.rstrip("\n").partition(" ")
        if what == "device":
            device["name"], device["driver"], device["arch"] = rest.split("|")
        elif what == "start":
            current = int(rest)
            timer.cancel()
            timer = threading.Timer(LIMIT, stop)
            timer.start()
        elif what == "done":
            done = int(rest) + 1
        elif what == "error":
            number, _, message = rest.partition(" ")
            errors[cases[int(number)].id] = json.loads(message)
            done = int(number) + 1
        else:
            noise.append(line)
    timer.cancel()
    child.wait()
    if done < len(cases) and cases[done - 1].id not in errors:
        why = f"no end within {LIMIT:g} s" if late else f"process ended with {child.returncode}"
        errors[cases[current].id] = f"{why}: {''.join(noise)[-1000:]}"
        done = current + 1
    return done
