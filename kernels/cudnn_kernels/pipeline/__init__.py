"""Building blocks of all kernels: mbarrier pipelines, clusters, TMA, MMA operands and fragments.

``mbarrier_pipeline``: producer/consumer pipelines. ``barriers``: named barriers and mbarriers. ``cluster``: multicast
and cluster synchronization. ``tma``: TMA views, loads and bulk copies. ``wgmma``: Hopper's warpgroup MMAs.
``fragment``: a thread's part of an accumulator, and warp-level reductions. ``shared_memory``: how many stages fit.
``workspace``: suballocation of the workspace. ``vectors``: 16-byte loads and stores. ``views``: views of matrices.
"""
