"""Lets libcudnn build graphs for a device that is not there: a stub of the CUDA driver, and two device descriptions."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
DEVICES = ("h200", "b200")


def load_stub_driver() -> str:
    """Loads the stub where no real driver is. Returns why it cannot, or the empty string once a driver is loaded.

    Must run before libcudnn is loaded: its engines look for ``libcuda.so.1`` once.
    """
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return ""
    except OSError:
        pass
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "no C compiler to build the stub driver with"
    names = (_HERE / "driver_names.txt").read_text().split()
    generated = "".join(f"int {name}(void) {{ return NO_DEVICE; }}\n" for name in names)
    source = (_HERE / "driver_stub.c").read_text() + generated
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"cudnn-fused-stub-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / "libcuda.so.1"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", "-o", str(built), "-x", "c", "-"]
            subprocess.run([compiler, *options], input=source, text=True, check=True)
            built.replace(library)  # atomic: several test processes may build at once
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return ""


@functools.cache
def device_json(device: str, version: int) -> str:
    """What cuDNN ``version`` wants to know about ``device`` (``"h200"`` or ``"b200"``), as JSON text."""
    recorded = "h200_cudnn928_deviceprop.json" if version >= 92000 else "h200_cudnn919_deviceprop.json"
    properties = json.loads((_HERE / "data" / recorded).read_text())
    if device == "b200":
        properties |= {"deviceVer": 1000, "deviceName": "NVIDIA B200", "multiProcessorCount": 148}
    elif device != "h200":
        raise ValueError(f"device: got {device!r}; allowed: {', '.join(DEVICES)}.")
    return json.dumps(properties)
