"""Normalisations fused with what follows them."""
