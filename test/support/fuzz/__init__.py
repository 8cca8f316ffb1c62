"""Random graphs of several families, each a pure-data case sampled from a seed, checked by an independent formula."""

from support.fuzz.attention import AttentionCase
from support.fuzz.attention_fp8 import AttentionFp8Case
from support.fuzz.case import Case
from support.fuzz.convolution import ConvolutionCase
from support.fuzz.matmul import MatmulCase
from support.fuzz.unaligned import UnalignedMatmulCase

FAMILIES: dict[str, type[Case]] = {
    case.family: case for case in (MatmulCase, ConvolutionCase, AttentionCase, AttentionFp8Case, UnalignedMatmulCase)
}

__all__ = ["FAMILIES", "Case"]
