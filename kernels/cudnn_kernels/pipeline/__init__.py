"""What kernels of all kinds share: rings of buffers, clusters, the copy engine's tensors, tensor cores' operands.

``ring`` holds buffers with two barriers each, ``cluster`` the CTAs that start together, ``copy`` the copy engine's view
of tensors, ``tile_operand`` how A and B come tile by tile, ``gather`` lines of operands by their numbers, ``factors``
those of sums, ``mainloop`` what GEMMs of all architectures do from arguments to launch, ``operand`` the kernel that
writes operands anew before, ``wgmma`` Hopper's tensor cores, ``barriers`` the named barriers of a CTA, ``regions`` the
parts of a workspace. A kernel has roles, methods that some of its warps run; what passes between roles is in rings.
"""
