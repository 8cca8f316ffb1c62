"""Normalizations fused with what follows them."""
