"""How kernels run: compilation, the kernel cache, streams, calls on tensors, and operators registered with PyTorch."""
