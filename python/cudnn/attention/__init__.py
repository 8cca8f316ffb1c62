"""Scaled dot-product attention as operators of PyTorch: by graphs of cuDNN, and by the kernels of ``cudnn.sdpa``."""
