"""CuTe DSL kernels behind the fused APIs of ``cudnn``.

No kernel is here yet: they come with the fused APIs. This package knows tiles, pipelines and architectures; it imports
neither PyTorch nor ``cudnn``, so that a kernel can be read, compiled and tested by itself.
"""
