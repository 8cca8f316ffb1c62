"""PTX instructions to Python source."""

from ptx_emulator.codegen.program import Program, load

__all__ = ["Program", "load"]
