"""GEMM + amax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudnn.errors import make_error
from cudnn.fused.dense import DenseGemm, amax, operands
from cudnn.fused.gemm import NARROW
from cudnn.fused.host import derived
from cudnn.fused.layouts import Matrix, Sizes, TensorSpec
from cudnn.fused.wrapper import wrapper
from cudnn.gemm.formats import FLOAT4, FLOAT8, SCALES, name_of
from cudnn.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = ["GemmAmax", "GemmAmaxSm100", "gemm_amax_wrapper", "gemm_amax_wrapper_sm100"]


class GemmAmax(DenseGemm):
    """A GEMM, and the largest magnitude of its result.

        acc  = (a * sfa) (b * sfb)^T                 in float32
        amax = max(amax, max |acc|)                  before rounding, over everything
        c    = acc                                   rounded

    float32 operands are multiplied in TF32. A compiled object serves tensors of all sizes, of the samples' types and
    majors.

    Args:
        sample_a ... sample_amax: tensors like those that ``execute`` will get; sample_sfa, sample_sfb may be None.
        acc_dtype: float32.
        mma_tiler_mn, cluster_shape_mn: checked. sm_100a follows them; on sm_90a the heuristics choose tiles.
        sf_vec_size: elements along k that share a scale factor: 16, 32 or 128.
        arch, accurate: as for :class:`cudnn.GemmSwiglu`.
    """

    title = "GEMM + amax"
    tensors = (
        *operands((*SCALES, "int8")),
        TensorSpec(
            "c",
            Matrix("m", "n", "mn"),
            ("float32", *NARROW, *reversed(FLOAT8), FLOAT4, "uint8"),
            written=True,
            about="four bits of four-bit operands only",
        ),
        amax(dimensions=3, optional=False),
    )
    returns = ("c", "amax")
    result = ("c", "")
    tile_n = (128, 256)
    largest_cluster = 4

    def __init__(
        self,
        sample_a: Tensor,
        sample_b: Tensor,
        sample_sfa: Tensor | None,
        sample_sfb: Tensor | None,
        sample_c: Tensor,
        sample_amax: Tensor,
        acc_dtype: dtype = torch.float32,
        mma_tiler_mn: tuple[int, int] = (128, 128),
        cluster_shape_mn: tuple[int, int] = (1, 1),
        sf_vec_size: int = 32,
        arch: str | None = None,
        accurate: bool = False,
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        b_tensor: Tensor,
        sfa_tensor: Tensor | None,
        sfb_tensor: Tensor | None,
        c_tensor: Tensor,
        amax_tensor: Tensor,
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``c_tensor`` and raises ``amax_tensor``. See :attr:`FusedAPI.run`."""

    def operations(self) -> tuple[Any, ...]:
        return self.result_epilogue("c")

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        if name_of(arguments["c_dtype"]) == FLOAT4:
            allowed = "torch.float32, float16, bfloat16, float8_e4m3fn, float8_e5m2"
            hint = "use the class GemmAmax"
            raise make_error(ValueError, "gemm_amax_wrapper", "c_dtype", arguments["c_dtype"], allowed, hint)
        return {"c": (arguments["c_dtype"], arguments["c_major"]), "amax": (torch.float32, "")}

    def _check_tiles(self) -> None:
        if self.mma_tiler_mn[0] == 256:
            raise self.unsupported("mma_tiler_mn", self.mma_tiler_mn, "128 rows")
        super()._check_tiles()

    def check_own_rules(self, sizes: Sizes) -> None:
        a, c, (_, columns) = self.dtype_name("a"), self.dtype_name("c"), self.mma_tiler_mn
        if c == FLOAT4 and a != FLOAT4:
            raise self.error("c tensor dtype", c, f"other types, for operands of {a}")
        if a in FLOAT8 and c in FLOAT8:
            raise self.unsupported("c tensor dtype", c, f"float32, float16, bfloat16, for operands of {a}")
        if a == FLOAT4 and columns == 256 and sizes["k"] <= 128:
            raise self.error("mma_tiler_mn", self.mma_tiler_mn, f"128 columns, for operands of {a} with k up to 128")
        wide = c not in (FLOAT4, *FLOAT8)
        if self.scaled and columns == 256 and self.sf_vec_size == 16 and wide:
            raise self.unsupported("mma_tiler_mn", self.mma_tiler_mn, f"128 columns, for sf_vec_size=16 and c of {c}")


class GemmAmaxSm100(GemmAmax):
    """:class:`GemmAmax` by the name that existing programs use. The wrapper makes objects of it."""


@wrapper(GemmAmaxSm100)
def gemm_amax_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor,
    sfa_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    c_major: str = "n",
    c_dtype: dtype = torch.float32,
    acc_dtype: dtype = torch.float32,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] = (1, 1),
    sf_vec_size: int = 32,
    stream: Any = None,
    accurate: bool = False,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes: ``c_tensor, amax_tensor``.

    ``amax_tensor`` has the shape (1, 1, 1). Arguments and errors as those of :class:`GemmAmax`; a four-bit ``c`` is the
    class's alone. Nothing is recorded for autograd: the results have no ``grad_fn``. ``cudnn.ops.gemm_amax`` is the
    operator for ``torch.compile``.
    """
    ...


gemm_amax_wrapper_sm100 = gemm_amax_wrapper
