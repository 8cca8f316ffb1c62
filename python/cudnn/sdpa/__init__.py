"""Attention by fused kernels, forward and backward."""

from cudnn.sdpa.bwd import SdpaBackward, SdpabwdSm100D256, sdpa_bwd_wrapper_sm100_d256
from cudnn.sdpa.fwd import SdpaForward, SdpafwdSm100D256, sdpa_fwd_wrapper_sm100_d256

__all__ = [
    "SdpaBackward",
    "SdpaForward",
    "SdpabwdSm100D256",
    "SdpafwdSm100D256",
    "sdpa_bwd_wrapper_sm100_d256",
    "sdpa_fwd_wrapper_sm100_d256",
]
