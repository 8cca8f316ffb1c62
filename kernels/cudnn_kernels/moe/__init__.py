"""Kernels around the products of a mixture of experts: routing before them, sums of experts' results after them."""
