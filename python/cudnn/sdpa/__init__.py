"""Attention by kernels of our own, forward and backward."""

from cudnn.sdpa.backward import SdpaBackward, SdpabwdSm100D256, sdpa_bwd_wrapper_sm100_d256
from cudnn.sdpa.forward import SdpaForward, SdpafwdSm100D256, sdpa_fwd_wrapper_sm100_d256

__all__ = [
    "FASTER_THAN_CUDNN",
    "SdpaBackward",
    "SdpaForward",
    "SdpabwdSm100D256",
    "SdpafwdSm100D256",
    "sdpa_bwd_wrapper_sm100_d256",
    "sdpa_fwd_wrapper_sm100_d256",
]

FASTER_THAN_CUDNN = {
    "sm_90a": frozenset(
        {(256, 256, causal, gradients) for causal in (False, True) for gradients in (False, True)}
        | {(128, 128, True, False), (128, 128, True, True), (192, 128, False, False), (192, 128, True, False)}
    )
}
"""Where docs/performance.md has these kernels faster than cuDNN's: d, dv, whether causal, whether with gradients."""
