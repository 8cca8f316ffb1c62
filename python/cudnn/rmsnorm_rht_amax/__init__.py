"""RMSNorm, a Hadamard transform of every 16 columns and the amax of every group of rows, in one kernel."""

from cudnn.rmsnorm_rht_amax.api import (
    RmsNormRhtAmax,
    RmsNormRhtAmaxSm100,
    rmsnorm_rht_amax_wrapper,
    rmsnorm_rht_amax_wrapper_sm100,
)
from cudnn_kernels.norm.heuristics import best_num_threads, pick_rows_per_cta

__all__ = [
    "RmsNormRhtAmax",
    "RmsNormRhtAmaxSm100",
    "best_num_threads",
    "pick_rows_per_cta",
    "rmsnorm_rht_amax_wrapper",
    "rmsnorm_rht_amax_wrapper_sm100",
]
