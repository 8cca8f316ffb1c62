"""Rows in e4m3 with their scales in one tensor, which ranks exchange as they exchange rows of 16 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cudnn.moe.combining import permute
from cudnn.runtime.run import has_kernel
from cudnn_kernels.moe.configuration import BLOCK

_WORDS = BLOCK // 4 + 1  # of 128 values and their scale
_VECTOR = 4  # words of 16 bytes


class QuantizedRows(NamedTuple):
    """Rows (R, n) in e4m3, n a multiple of 128, each followed by its float32 scales, one for 128 values.

    ``words`` float32 (R, 33 n / 128, rounded up to a multiple of 4): the last words of a row may have no meaning.
    """

    words: torch.Tensor

    @staticmethod
    def empty(x: torch.Tensor) -> QuantizedRows:
        """Memory for the rows of x (R, n)."""
        width = x.shape[1] // BLOCK * _WORDS
        return QuantizedRows(x.new_empty(len(x), -(-width // _VECTOR) * _VECTOR, dtype=torch.float32))

    @property
    def columns(self) -> int:
        """n."""
        return self.words.shape[1] // _WORDS * BLOCK

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the values (R, n) and of their scales (R, n / 128)."""
        values, scales, _ = self.words.tensor_split([self.columns // 4, self.columns // BLOCK * _WORDS], 1)
        return values.view(torch.float8_e4m3fn), scales

    def permuted(self, scatter_idx: torch.Tensor, rows: int) -> QuantizedRows:
        """A copy of each row in the rows of its slots (T, K); the others of ``rows`` rows are not initialized."""
        permuted = self.words.new_empty(rows, self.words.shape[1])
        if has_kernel(self.words, "permute"):
            permute(self.words, scatter_idx, permuted)
        else:
            token, slot = (scatter_idx >= 0).nonzero(as_tuple=True)
            permuted[scatter_idx[token, slot].long()] = self.words[token]
        return QuantizedRows(permuted)


Rows = torch.Tensor | QuantizedRows
"""Rows of 16 bits or of float32, or rows that are quantized already."""
