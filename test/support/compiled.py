"""What the compiler made of a kernel: its PTX, and the resources of its machine code."""

from __future__ import annotations

import struct
import tempfile
from dataclasses import dataclass
from typing import Any

from cudnn_kernels import compiler

_REGISTERS, _FRAME = 0x2F, 0x11  # attributes in a cubin's .nv.info sections: index of a function's symbol, value


@dataclass(frozen=True)
class Compiled:
    """Registers and bytes of stack are those of one thread. A stack means local memory: spills, or an indexed array."""

    ptx: str
    registers: int
    stack: int
    cubin: bytes


def compile_kernel(arch: str, kernel: Any, *arguments: Any) -> Compiled:
    """Compiles a kernel for an architecture; no GPU is needed."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --keep-cubin --dump-dir {folder}"
        artifacts = compiler.compile_for(arch, kernel, *arguments, options=options).artifacts
    info = _info(artifacts.CUBIN)
    return Compiled(artifacts.PTX, max(info[_REGISTERS]), max(info[_FRAME], default=0), artifacts.CUBIN)


def _info(cubin: bytes) -> dict[int, list[int]]:
    """The values of the attributes above, for every function."""
    values: dict[int, list[int]] = {_REGISTERS: [], _FRAME: []}
    offset, size, count, names = *struct.unpack_from("<Q", cubin, 0x28), *struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    for header in headers:
        name = cubin[headers[names][4] + header[0] :].split(b"\0", 1)[0]
        if name != b".nv.info":
            continue
        offset_, end = header[4], header[4] + header[5]
        while offset_ < end:
            form, attribute, value = struct.unpack_from("<BBH", cubin, offset_)
            offset_ += 4
            if form == 4:  # a value of `value` bytes follows
                if attribute in values:
                    values[attribute].append(struct.unpack_from("<II", cubin, offset_)[1])
                offset_ += value
    return values
