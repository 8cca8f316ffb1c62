"""Arrays in memory: their strides, how DLPack describes them, and whether they fit the tensors of a graph."""
