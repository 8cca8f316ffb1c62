"""A gated MLP, the dense feed-forward layer of a transformer: operator, module, and the order of its kernels."""
