"""PTX microkernels: one instruction per test, one element per thread."""

from __future__ import annotations

from typing import Any

import numpy as np

import ptx_emulator

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
WIDTH = {"b16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8}


def kernel(body: str, parameters: int = 1, shared: str = "", target: str = "sm_100a") -> str:
    """A module with the entry `k`; parameters p0, p1 ... are 64 bits wide, registers r, rd, f, h, p are declared."""
    declared = ",\n".join(f"  .param .b64 p{i}" for i in range(parameters))
    loads = "\n".join(f"  ld.param.b64 %rd{90 + i}, [p{i}];" for i in range(parameters))
    return f"""{HEADER.replace("sm_100a", target)}
.visible .entry k(
{declared}
)
{{
  .reg .pred %p<20>;
  .reg .b16 %h<20>;
  .reg .b32 %r<100>;
  .reg .b32 %f<40>;
  .reg .b64 %rd<100>;
  .reg .b128 %q<4>;
  {shared}
{loads}
  mov.u32 %r99, %tid.x;
{body}
  ret;
}}
"""


def elementwise(instruction: str, kind: str, *sources: np.ndarray, out: str = "", target: int = 0) -> np.ndarray:
    """Runs `instruction` with %d as target and %a, %b, %c as sources of type `kind`, one thread per element."""
    count = len(sources[0])
    width, wide = WIDTH[kind], WIDTH[out or kind]
    prefix = {2: "%h", 4: "%r", 8: "%rd"}
    lines = []
    for index in range(len(sources)):
        lines += [
            f"mul.wide.u32 %rd80, %r99, {width}; add.s64 %rd80, %rd80, %rd{90 + index};",
            f"ld.global.b{8 * width} {prefix[width]}{10 + index}, [%rd80];",
        ]
    text = instruction.replace("%d", f"{prefix[wide]}1")
    for index, name in enumerate("abc"):
        text = text.replace(f"%{name}", f"{prefix[width]}{10 + index}")
    lines += [
        text,
        f"mul.wide.u32 %rd80, %r99, {wide}; add.s64 %rd80, %rd80, %rd{90 + len(sources)};",
        f"st.global.b{8 * wide} [%rd80], {prefix[wide]}1;",
    ]
    result = np.zeros(count, {2: np.uint16, 4: np.uint32, 8: np.uint64}[wide])
    source = kernel("\n".join(lines), len(sources) + 1)
    ptx_emulator.run_ptx(source, "k", 1, count, [*sources, result], races=True)
    return result


def run(body: str, *arrays: Any, block: int = 32, shared: str = "", **options: Any) -> ptx_emulator.Launch:
    """Runs `body` with the arrays' addresses in %rd90, %rd91, ..."""
    grid = options.pop("grid", 1)
    return ptx_emulator.run_ptx(kernel(body, len(arrays), shared), "k", grid, block, arrays, **options)


def registers(first: int, count: int) -> str:
    return ", ".join(f"%r{first + i}" for i in range(count))


def core_matrices(rows: np.ndarray) -> bytes:
    """(rows, bytes along K) as blocks of 8 rows x 16 bytes, K first."""
    r, width = rows.shape
    return rows.reshape(r // 8, 8, width // 16, 16).transpose(0, 2, 1, 3).tobytes()
