"""CuTe DSL kernels behind the fused APIs of ``cudnn``.

``norm`` holds RMSNorm + Hadamard transform + amax; the others come with their APIs. This package knows tiles,
pipelines and architectures; it imports neither PyTorch nor ``cudnn``, so that a kernel can be read, compiled and tested
by itself.
"""
