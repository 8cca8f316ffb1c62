"""The reference executor: runs a graph with PyTorch, on the device where its tensors lie."""

from cudnn.reference.executor import ReferenceProgram

__all__ = ["ReferenceProgram"]
