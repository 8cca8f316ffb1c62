"""CuTe DSL kernels behind the fused APIs of ``cudnn``.

A fused GEMM is three things: a mainloop, one for each architecture (``sm90``, ``sm100``); a ``schedule``, which says
which tile is next and where its operands lie; an ``epilogue``, a tuple of small operations on the accumulator.
``norm`` holds RMSNorm + Hadamard transform + amax. This package imports neither PyTorch nor ``cudnn``, so that a kernel
can be read, compiled and tested independently.
"""
