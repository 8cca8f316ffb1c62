"""Operands of the layer's grouped GEMMs: the permutation of tokens, the experts' weights, and the compiled GEMMs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cudnn import settings
from cudnn.errors import make_error
from cudnn.fused import registry
from cudnn.fused.gated import LAYOUTS
from cudnn.lazy import torch
from cudnn.moe.combining import permute, permute_weights, unpermute_weights
from cudnn.runtime.kernels import CompileAhead
from cudnn.runtime.pointer_arrays import pointers
from cudnn.runtime.recording import Key
from cudnn.runtime.run import architecture, constant

if TYPE_CHECKING:
    from torch import Tensor

GATED = ("swiglu", "geglu")
ACTIVATIONS = (*GATED, "srelu")
WIDE = (torch.float32, torch.float64)  # types that only the reference takes
# On Hopper a GEMM reads a permuted copy of the tokens instead of gathering rows
PERMUTE_COLUMNS = 896  # in the backward pass, if the GEMM has at least this many columns per expert,
PERMUTE_COLUMNS_DW_UP = 2048  # in the weight gradient of up, which may run concurrently with a combine,
GATHER_ROWS = 1024  # and always if experts have fewer rows than this on average.
RECIPES = ("forward", "blockwise", "blockwise_save16")
SEPARATE = "separate"
GLU_LAYOUTS = (*LAYOUTS, SEPARATE)  # of the up weights of a gated activation
ACT_PARAMS = ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min")


@dataclass
class Permutation:
    """The (token, k) slots sorted by expert, as R rows: the fields of :class:`cudnn.moe.Routing` without its weights.

    - ``offsets`` int32 (E,): where the rows of each expert end (an inclusive cumulative sum).
    - ``gather_idx`` int32 (R,): the token of each row.
    - ``scatter_idx`` int32 (T, K): the row of each slot, -1 for a dropped slot.
    - ``batch_invariant``: whether rows are gathered or copied does not depend on their number.
    """

    offsets: Tensor
    gather_idx: Tensor
    scatter_idx: Tensor
    batch_invariant: bool = field(default=False, kw_only=True)
    is_sorted: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        """R."""
        return self.gather_idx.shape[0]

    def operand(self, x: Tensor, large: bool = False) -> tuple[Tensor, Tensor | None]:
        """The A operand of a grouped GEMM: (T, n) and the row indices to gather, or a permuted copy (R, n) and None.

        The copy lives until the end of the pass; its rows without a slot are not initialized.
        """
        if self.gathers(x, large):
            return x, self.gather_idx
        log_permute_once()
        permuted = x.new_empty(self.rows, x.shape[1])
        permute(x, self.scatter_idx, permuted)
        return permuted, None

    def gathers(self, x: Tensor, large: bool = False) -> bool:
        """Whether the GEMM gathers rows of x itself.

        Blackwell's kernels always gather (TMA gather). Hopper's gather with cp.async, without multicast, at 2.0 to 2.6
        TB/s on an H200; a permuted copy costs 0.6 ps per element. The copy pays from about 900 GEMM columns on
        (``large``), or 2,048 if a combine runs concurrently, and always with few rows per expert: there the forward
        pass is 1.6 to 2.1 times as fast.
        """
        many = self.rows >= GATHER_ROWS * self.offsets.shape[0] and not self.batch_invariant
        return architecture(x) != "sm_90a" or (many and not large)

    def gemm_weights(self, weights: Tensor | None, required: bool) -> Tensor | None:
        """The weights by which the up GEMM multiplies rows: none, as combine does; ones if they are ``required``."""
        return weights.new_ones(self.rows) if required and weights is not None else None

    def weights_of_rows(self, weights: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The weights (R, 1, 1) of rows from those of slots (T, K), and zeros of that shape for their gradient."""
        assert weights is not None
        return permute_weights(weights, self.scatter_idx, self.rows)

    def weights_of_slots(self, values: Tensor) -> Tensor:
        """Values of rows (R, 1, 1) by slot (T, K)."""
        return unpermute_weights(values, self.scatter_idx)


@dataclass
class SortedRows:
    """R rows that a dispatcher has sorted by expert, instead of a :class:`Permutation` of tokens.

    Weights are (R, 1), or None for ones. The up GEMM's epilogue multiplies them.
    """

    offsets: Tensor
    rows: int
    is_sorted: ClassVar[bool] = True
    gather_idx: ClassVar[None] = None
    scatter_idx: ClassVar[None] = None

    def operand(self, x: Tensor, large: bool = False) -> tuple[Tensor, None]:
        """The A operand: the rows themselves."""
        return x, None

    def gathers(self, x: Tensor, large: bool = False) -> bool:
        """Whether the GEMM gathers rows."""
        return False

    def gemm_weights(self, weights: Tensor | None, required: bool) -> Tensor | None:
        """The weights (R, 1, 1), or None."""
        if weights is not None:
            return weights.view(-1, 1, 1)
        return torch.ones(self.rows, 1, 1, dtype=torch.float32, device=self.offsets.device) if required else None

    def weights_of_rows(self, weights: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The weights (R, 1, 1), and zeros of that shape for their gradient; None without weights."""
        prob = self.gemm_weights(weights, False)
        return prob, None if prob is None else torch.zeros_like(prob)

    def weights_of_slots(self, values: Tensor) -> Tensor:
        """Values of rows (R, 1, 1) as (R, 1)."""
        return values.view(-1, 1)

    @property
    def expert(self) -> Tensor:
        """The expert of each row, int64 (R, 1); E for a padding row."""
        row = torch.arange(self.rows, dtype=torch.int64, device=self.offsets.device)
        return torch.searchsorted(self.offsets.long(), row, right=True).view(-1, 1)


@functools.cache
def log_permute_once() -> None:
    """Logs once that tokens are copied."""
    settings.configure_logging().info("moe_mlp: tokens are permuted into a copy sorted by expert, freed after the pass")


class Experts(NamedTuple):
    """The weights ``up`` (E, N, H) and ``down`` (E, H, I): each a list of one tensor, or of one tensor per expert.

    N is I or, for a gated activation, 2 I. ``glu_layout`` "interleaved": of every 64 rows the first 32 are gates;
    "concatenated": the first I rows are gates; "separate": ``up`` has the tensors of the gates (E, I, H) and then as
    many of the up projections. The pre-activation and ``up_bias`` of separate weights are concatenated. ``fp8``: a name
    in :data:`RECIPES` or "", as :func:`recipe_of` returns. ``batch_invariant`` as in :class:`Permutation`.
    """

    up: Sequence[Tensor]
    down: Sequence[Tensor]
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    act_params: Sequence[float]
    glu_layout: str
    fp8: str = ""
    batch_invariant: bool = False

    @property
    def trains_fp8(self) -> bool:
        """Whether the backward GEMMs take e4m3 operands too."""
        return self.fp8.startswith("blockwise")

    def receives_fp8(self, trains: bool) -> bool:
        """Whether ranks send tokens in e4m3; ``trains``: a backward pass follows, which may need them in 16 bits."""
        return self.trains_fp8 or (bool(self.fp8) and not trains)

    @property
    def receives_fp8_gradients(self) -> bool:
        """Whether ranks send the outputs' gradients in e4m3. Those of ``down_bias``, and of the weights that multiply
        it, need them in 16 bits.
        """
        return self.trains_fp8 and self.down_bias is None

    @property
    def up_shape(self) -> tuple[int, int, int]:
        """(E, N, H)."""
        return up_shape(self.up, self.glu_layout)

    @property
    def halves(self) -> int:
        """2 if gates and up projections have separate tensors, else 1."""
        return 1 + (self.glu_layout == SEPARATE)


def recipe_of(where: str, fp8: bool | str) -> str:
    """The name in :data:`RECIPES` of an operator's argument ``fp8``; "" for False.

    Raises:
        ValueError: it is none.
    """
    recipe = {False: "", True: RECIPES[0]}.get(fp8, fp8) if isinstance(fp8, bool) else fp8
    if recipe not in ("", *RECIPES):
        allowed = "False, True or 'forward', 'blockwise', 'blockwise_save16'"
        raise make_error(ValueError, where, "fp8", repr(fp8), allowed)
    return recipe


def is_list(weights: Sequence[Tensor]) -> bool:
    """Whether each expert has a separate tensor."""
    return weights[0].ndim == 2


def shape_of(weights: Sequence[Tensor]) -> tuple[int, int, int]:
    """(E, rows, columns) of weights."""
    rows, columns = weights[0].shape[-2:]
    return (len(weights) if is_list(weights) else weights[0].shape[0], rows, columns)


def up_shape(up: Sequence[Tensor], glu_layout: str) -> tuple[int, int, int]:
    """(E, N, H) of up weights."""
    experts, rows, columns = shape_of(up)
    if glu_layout != SEPARATE:
        return experts, rows, columns
    return (experts // 2 if is_list(up) else experts), 2 * rows, columns


def matrix(x: Tensor) -> Tensor:
    """A matrix (m, k) in the layout of the fused APIs, (m, k, 1)."""
    return x.unsqueeze(0).permute(1, 2, 0)


def transposed(x: Tensor) -> Tensor:
    """A matrix (k, m) as (m, k, 1)."""
    return x.unsqueeze(0).permute(2, 1, 0)


def weight_operand(weights: Sequence[Tensor], transpose: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The B operand and its options: each expert's weight (n, k) or, with ``transpose``, (k, n)."""
    if not is_list(weights):
        (stacked,) = weights
        return {"b": stacked.permute(2, 1, 0) if transpose else stacked.permute(1, 2, 0)}, {}
    return {"b_ptrs": pointers(weights)}, _pointer_options(weights, shape_of(weights), transpose)


def _pointer_options(weights: Sequence[Tensor], of: tuple[int, int, int], transpose: bool) -> dict[str, Any]:
    """The options of a B operand whose weights (E, rows, columns) are behind pointers."""
    experts, rows, columns = of
    shape, major = ((columns, rows), "n") if transpose else ((rows, columns), "k")
    return {"num_experts": experts, "b_shape": shape, "b_dtype": weights[0].dtype, "b_major": major}


def up_operand(e: Experts, transpose: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """:func:`weight_operand` of up. A TMA box reaches both halves of one stack, but not two addresses: gates and
    up projections that are separate, or in a list, are loaded by separate boxes.
    """
    weights, are_listed = e.up, is_list(e.up)
    if e.glu_layout != SEPARATE and (e.glu_layout != LAYOUTS[1] or not are_listed or transpose):
        return weight_operand(weights, transpose)
    experts, rows, columns = e.up_shape
    half = rows // 2 * columns * weights[0].element_size()  # bytes of a matrix of gates

    def spread(firsts: Sequence[int]) -> Sequence[int | range]:
        """The addresses of all gates, then those of all up projections, each of an expert."""
        if e.glu_layout != SEPARATE:
            return [*firsts, *(first + half for first in firsts)]
        return firsts if are_listed else [range(first, first + experts * half, half) for first in firsts]

    options = _pointer_options(weights, e.up_shape, transpose)
    return {"b_ptrs": pointers(weights, spread)}, {**options, "b_halves": True} if transpose else options


_ONES: dict[Any, Tensor] = {}


def ones(count: int, device: Any) -> Tensor:
    """float32 ones (count,), cached; within a CUDA graph capture they are part of the graph."""
    cached = _ONES.get((count, device))
    if cached is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.ones(count, dtype=torch.float32, device=device)
        cached = _ONES[count, device] = constant(lambda: torch.ones(count, dtype=torch.float32, device=device))
        if device.type == "cuda":
            torch.cuda.default_stream(device).synchronize()  # once: calls on any stream read them
    return cached


class GroupedGemmOps:
    """The compiled grouped GEMMs of layers with one configuration: see :func:`grouped_gemm_ops`."""

    def __init__(self, e: Experts) -> None:
        glu_layout = LAYOUTS[1] if e.glu_layout == SEPARATE else e.glu_layout
        act_params = {"glu_layout": glu_layout, **dict(zip(ACT_PARAMS, e.act_params, strict=True))}
        self.act_options: dict[str, Any] = {}  # of the up GEMM, with the activation in its epilogue
        self.dact_options: dict[str, Any] = {"deterministic": True}  # of the GEMM that ends in its derivative
        if e.activation in GATED:
            self.act_options = {"act_func": e.activation, **act_params}
            self.dact_options = {"act_func": f"d{e.activation}", "_deterministic": True, **act_params}
        self._compiled: dict[Any, tuple[Any, Sequence[str], tuple[Any, ...]]] = {}
        self.layer_kernels: Callable[[str], Iterable[Key]] | None = None  # see :mod:`cudnn.moe.compile_ahead`

    def run(self, key: Any, name: str, tensors: dict[str, Any], *options: Mapping[str, Any], margin: int = 0) -> None:
        """Runs the fused API ``name`` on tensors by argument name; it leaves ``margin`` clusters of the GPU free.

        Calls with the same ``key`` differ in nothing but the tensors' addresses and numbers of rows.
        """
        compiled = self._compiled.get(key)
        if compiled is None:
            merged = {name: value for each in options for name, value in each.items()}
            with CompileAhead(self.layer_kernels) if self.layer_kernels else contextlib.nullcontext():
                compiled = self._compiled[key] = _compile(name, tensors, merged, margin)
        operation, names, scalars = compiled
        # ``execute`` without its keyword arguments, which cost host time.
        operation.run(tuple(map(tensors.get, names)), scalars, None, None)


def _compile(name: str, tensors: dict[str, Any], options: dict[str, Any], margin: int) -> Any:
    """The API's object, the names of its tensors, and the scalars of each call, both in the order of the arguments."""
    api = registry.find(name)
    scalars = {option: options.pop(option) for option in api.run_time if option in options}
    operation = api(**api.samples(tensors), **options)
    operation.margin += margin
    if operation.dtype("a") in WIDE:
        operation.run = operation.run_reference
    else:
        operation.check_support()
        operation.compile()
    return operation, api.names, tuple(scalars.get(each, getattr(operation, each)) for each in api.scalars)


_OPS: dict[Any, GroupedGemmOps] = {}


def environment() -> tuple[int, str]:
    """The settings of grouped GEMMs."""
    return settings.CLUSTER_OVERLAP_MARGIN.get(), settings.SEMANTICS.get()


def grouped_gemm_ops(x: Tensor, e: Experts) -> GroupedGemmOps:
    """The cached GEMMs of a layer. The key: device, dtype, weight shapes, biases, activation, and settings."""
    sizes = (len(e.up), e.up[0].shape, len(e.down), e.down[0].shape, e.up_bias is None, e.down_bias is None)
    arch = None if x.is_cuda else architecture(x)
    key = (x.device, arch, x.dtype, sizes, e.activation, *e.act_params, e.glu_layout, e.fp8, environment())
    ops = _OPS.get(key)
    if ops is None:
        ops = _OPS[key] = GroupedGemmOps(e)
    return ops
