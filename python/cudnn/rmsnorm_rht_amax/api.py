"""RMSNorm + Hadamard transform + amax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cudnn.errors import make_error
from cudnn.fused.host import FusedAPI, derived
from cudnn.fused.layouts import Contiguous, Rows, Sizes, TensorSpec
from cudnn.fused.wrapper import wrapper
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.rmsnorm_rht_amax import reference
from cudnn.runtime.call import KernelPlan
from cudnn_kernels.norm.heuristics import (
    BLOCK,
    MAXIMUM_COLUMNS,
    USUAL_COLUMNS,
    best_num_threads,
    configure_rmsnorm_rht_amax,
    pick_rows_per_cta,
)
from cudnn_kernels.threads import WARP_SIZE

if TYPE_CHECKING:
    from torch import Tensor

    from cudnn.api_base import TupleDict

_KERNELS: Mapping[str, str] = {
    "sm_90a": "cudnn_kernels.norm.rmsnorm_rht_amax:RmsNormRhtAmax",
    "sm_100a": "cudnn_kernels.norm.rmsnorm_rht_amax:BlackwellRmsNormRhtAmax",
}
_TYPES = ("bfloat16", "float16")


class RmsNormRhtAmax(FusedAPI):
    """RMSNorm, a normalized Hadamard transform of every 16 columns, and the largest magnitude of every group of rows.

        y[i, :] = x[i, :] * rsqrt(mean(x[i, :]^2) + eps) * w            in float32
        o[i, :] = each 16 columns of y[i, :] times H16 / 4              rounded to the type of x
        amax[g] = max |o| over rows g * rows_per_cta ... (g + 1) * rows_per_cta - 1, before rounding

    Trailing dimensions of size 1 are ignored; dimensions before the last are taken together as rows, where their
    strides allow it: x may be (batch, sequence, n), say. A compiled object serves every ``m``, a compiled kernel every
    ``eps`` and ``rows_per_cta`` as well.

    Args:
        sample_x, sample_w, sample_o, sample_amax: tensors like those that ``execute`` will get.
        eps: added to the mean square.
        num_threads: threads that share a row; default: the kernel's choice, for n with a ``best_num_threads(n)``.
        rows_per_cta: rows that share one amax; default: ``pick_rows_per_cta(m)``.
        arch: ``"sm_90a"`` or ``"sm_100a"``, to check and compile for a chip that is not here; default: that of the
            tensors' device. On CPU tensors ``execute`` runs the reference in PyTorch, or, within ``cudnn.emulation``,
            the kernel itself.
    """

    title = "RMSNorm + RHT + amax"
    tensors = (
        TensorSpec("x", Rows("m", "n"), _TYPES, about="dimensions before the last count as one"),
        TensorSpec("w", Contiguous("n"), _TYPES, same_dtype="x", init="uniform"),
        TensorSpec("o", Rows("m", "n"), _TYPES, same_dtype="x", written=True, same_shape="x", may_alias="x"),
        TensorSpec(
            "amax",
            Contiguous("groups", alignment=4),
            ("float32",),
            written=True,
            about="groups = m / rows_per_cta; overwritten, NaN where y has one",
        ),
    )
    returns = ("o", "amax")
    scalars = ("eps",)
    sized_by = ("x",)
    fixed = ("n",)
    hints = ("num_threads",)
    example = (("m", "n"), (16, 512))
    shapes = ((32768, 4096), (16384, 8192))
    steps = (8, 512)
    formulas = {  # noqa: RUF012
        "torch.compile, additions": reference.additions,
        "torch.compile, product": reference.product,
    }
    formula_options = ("eps", "rows_per_cta")
    aot_dtypes = ("bf16", "fp16")
    aot_shapes = tuple((4096, n) for n in USUAL_COLUMNS)

    num_threads: int | None
    rows_per_cta: int

    def __init__(
        self,
        sample_x: Tensor,
        sample_w: Tensor,
        sample_o: Tensor,
        sample_amax: Tensor,
        eps: float = 1e-5,
        num_threads: int | None = None,
        rows_per_cta: int | None = None,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())
        desc = self.descs["x"]
        rows, columns = desc.shape if desc is not None and desc.ndim == 2 else (0, 0)
        self.num_threads = num_threads if num_threads is not None else best_num_threads(columns)
        self.rows_per_cta = rows_per_cta if rows_per_cta is not None else pick_rows_per_cta(rows)
        self._chosen_threads = num_threads

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_tensor: Tensor, w_tensor: Tensor, o_tensor: Tensor, amax_tensor: Tensor, current_stream: Any = None
    ) -> None:
        """Writes ``o_tensor`` and ``amax_tensor``. See :attr:`FusedAPI.run`."""

    @classmethod
    def flops(cls, sizes: Mapping[str, int]) -> int:
        """None that PyTorch counts: element-wise operations, and a transform by sums and differences."""
        return 0

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        if len(shapes["x"]) != 2:
            got = f"the shape {tuple(shapes['x'])}"
            raise make_error(ValueError, cls._title(), "x", got, "two dimensions or more, rows and columns")
        (m, n), rows = shapes["x"], options["rows_per_cta"]
        rows = pick_rows_per_cta(m) if rows is None else rows
        if n == 0 or n % BLOCK:
            raise make_error(ValueError, cls._title(), "columns of x", n, f"multiples of {BLOCK}")
        if rows <= 0 or m % rows:
            raise make_error(ValueError, cls._title(), "rows_per_cta", rows, f"divisors of the {m} rows of x")
        return {"m": m, "n": n, "groups": m // rows}

    def check_rules(self, sizes: Sizes) -> None:
        n, threads = sizes["n"], self.num_threads
        if threads is None:
            raise self.error("columns of x", n, "multiples of 512", "pass num_threads")
        if threads <= 0 or threads > 1024 or threads % WARP_SIZE:
            raise self.error("num_threads", threads, f"multiples of {WARP_SIZE} from {WARP_SIZE} to 1024")
        if n % threads or n // threads % 8:
            raise self.error("num_threads", threads, f"{n} / num_threads a multiple of 8")
        if n > MAXIMUM_COLUMNS:
            raise self.unsupported("columns of x", n, f"at most {MAXIMUM_COLUMNS}")

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        configuration = configure_rmsnorm_rht_amax(name_of(self.dtype("x")), sizes["n"], self._chosen_threads)
        return KernelPlan(_KERNELS[arch], configuration)

    def reference(self, tensors: Mapping[str, Any]) -> None:
        o, amax = reference.rmsnorm_rht_amax(tensors["x"], tensors["w"], tensors["eps"], self.rows_per_cta)
        tensors["o"].copy_(o)
        tensors["amax"].copy_(amax)

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        return {"o": (arguments["x"].dtype, ""), "amax": (torch.float32, "")}

    @classmethod
    def cache_key(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
        """The number of rows compiles nothing, but for the rows that share an amax."""
        x, w = tensors["x"], tensors["w"]
        rows = options["rows_per_cta"] if options["rows_per_cta"] is not None else pick_rows_per_cta(x.shape[0])
        return (rows, x.dtype, x.shape[1:], x.stride(), x.device, w.dtype, w.shape, w.stride(), w.device)

    @classmethod
    def aot_preset(cls, dtype: str, shape: tuple[int, ...], arch: str) -> Iterable[FusedAPI]:
        x = torch.empty(shape, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype], device="meta")
        amax = torch.empty(shape[0] // max(1, pick_rows_per_cta(shape[0])), dtype=torch.float32, device="meta")
        return [cls(x, x[0], x, amax, arch=arch)]


class RmsNormRhtAmaxSm100(RmsNormRhtAmax):
    """:class:`RmsNormRhtAmax` by the name that existing programs use. The wrapper makes objects of it."""


@wrapper(RmsNormRhtAmaxSm100)
def rmsnorm_rht_amax_wrapper(
    x_tensor: Tensor,
    w_tensor: Tensor,
    eps: float = 1e-5,
    num_threads: int | None = None,
    rows_per_cta: int | None = None,
    current_stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes: ``o_tensor, amax_tensor``.

    Arguments and errors as those of :class:`RmsNormRhtAmax`. Nothing is recorded for autograd: the results have no
    ``grad_fn``. ``cudnn.ops.rmsnorm_rht_amax`` is the operator for ``torch.compile``.
    """
    ...


rmsnorm_rht_amax_wrapper_sm100 = rmsnorm_rht_amax_wrapper
