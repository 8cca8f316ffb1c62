"""Attention, forward."""

from cudnn.sdpa.fwd.api import SdpaForward, SdpafwdSm100D256, sdpa_fwd_wrapper_sm100_d256

__all__ = ["SdpaForward", "SdpafwdSm100D256", "sdpa_fwd_wrapper_sm100_d256"]
