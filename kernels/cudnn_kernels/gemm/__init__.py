"""What the GEMM kernels of all architectures share; their mainloops are ``sm90.gemm`` and ``sm100.gemm``.

``problem``: what to compute. ``configuration``: what a kernel is compiled for, and its arguments. ``mainloop``: from
the arguments of a call to the launch. ``tile_operand``: TMA loads of A and B. ``gather``: gathered operands.
``scale_factors``: fp32 scale factors of accumulators. ``scale_factor_atoms``: the 128 x 4 layout of block scale
factors. ``prepare_operand``: the kernel that dequantizes or transposes operands first. ``projection``,
``projection_kernel``: the projection of MLA's queries.
"""
