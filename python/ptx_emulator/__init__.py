"""Runs PTX, and kernels of the CuTe DSL, on NumPy: every thread of the grid, with faults and races reported.

    import ptx_emulator

    with ptx_emulator.emulate("sm_100a", races=True) as report:
        compiled = cute.compile(kernel, a, b)   # CPU tensors
        compiled(a, b)
    print(report)

It knows PTX and the DSL's runtime interface, and needs neither a GPU nor a CUDA driver. It counts, it does not time.
"""

from ptx_emulator.api import emulate as emulate
from ptx_emulator.api import run as run
from ptx_emulator.api import run_ptx as run_ptx
from ptx_emulator.api import run_triton as run_triton
from ptx_emulator.errors import BarrierError as BarrierError
from ptx_emulator.errors import CollectiveError as CollectiveError
from ptx_emulator.errors import Deadlock as Deadlock
from ptx_emulator.errors import EmulatorError as EmulatorError
from ptx_emulator.errors import Fault as Fault
from ptx_emulator.errors import Misaligned as Misaligned
from ptx_emulator.errors import OutOfBounds as OutOfBounds
from ptx_emulator.errors import RaceError as RaceError
from ptx_emulator.errors import TensorMemoryError as TensorMemoryError
from ptx_emulator.errors import UninitializedRead as UninitializedRead
from ptx_emulator.errors import UnsupportedPTX as UnsupportedPTX
from ptx_emulator.report import Finding as Finding
from ptx_emulator.report import Instruction as Instruction
from ptx_emulator.report import Launch as Launch
from ptx_emulator.report import Report as Report
from ptx_emulator.timeline import Timeline as Timeline
