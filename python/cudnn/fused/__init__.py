"""What all fused APIs share: declarations of tensors, one path from a call to a kernel, and what derives from a class.

An API is a folder with an ``api.py`` that declares it; nothing outside of the folder names it.
"""
