"""Building blocks of kernels: mbarrier pipelines, clusters, TMA, MMA operands, gathered operands, scale factors.

``mbarrier_pipeline``: producer/consumer pipelines. ``barriers``: named barriers and mbarriers. ``cluster``: multicast
and cluster synchronization. ``tma``: TMA views, loads and bulk copies. ``tile_operand``: TMA loads of A and B.
``gather``: gathered operands. ``scale_factors``: fp32 scale factors of accumulators. ``scale_factor_atoms``: the 128 x
4 layout of block scale factors. ``mainloop``: what the GEMMs of all architectures share. ``prepare_operand``: the
kernel that dequantizes or transposes operands first. ``wgmma``: Hopper's warpgroup MMAs. ``workspace``: suballocation
of the workspace. ``projection``: the projection of MLA's queries. ``vectors``: 16-byte loads and stores.
"""
