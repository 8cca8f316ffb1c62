"""A GEMM whose epilogue rotates heads by the positions of rows: a projection with rotary embeddings, in one kernel."""

from cudnn.gemm_rope.api import GemmRope, GemmRopeSm100, gemm_rope_wrapper, gemm_rope_wrapper_sm100

__all__ = ["GemmRope", "GemmRopeSm100", "gemm_rope_wrapper", "gemm_rope_wrapper_sm100"]
