"""Attention, backward."""

from cudnn.sdpa.bwd.api import SdpaBackward, SdpabwdSm100D256, sdpa_bwd_wrapper_sm100_d256

__all__ = ["SdpaBackward", "SdpabwdSm100D256", "sdpa_bwd_wrapper_sm100_d256"]
