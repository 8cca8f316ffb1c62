"""Kernels around the grouped GEMMs of a mixture of experts: routing, quantization, combine and exchange."""
