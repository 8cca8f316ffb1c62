"""CuTe DSL kernels behind the fused APIs of ``cudnn``.

A fused GEMM is three things: a mainloop, one for each architecture (``sm90``, ``sm100``); a ``schedule``, which says
which tile is next and where its operands lie; an ``epilogue``, a tuple of small operations on the accumulator.
``gemm`` has what the GEMMs of both architectures share, ``attention`` what attention does, ``pipeline`` the building
blocks of all kernels. ``moe`` holds the kernels around expert GEMMs, ``norm`` RMSNorm + Hadamard transform + amax. No
two packages import each other: ``pyproject.toml`` lists the layers. This package imports neither PyTorch nor ``cudnn``,
so that a kernel can be read, compiled and tested independently.
"""
