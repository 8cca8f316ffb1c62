"""Other libraries on our kernels."""
