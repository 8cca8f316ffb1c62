"""What the kernels of a layer of experts work on: the rows by expert, and the experts' weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn import settings
from cudnn.fused import registry
from cudnn.lazy import torch
from cudnn.moe.combining import spread
from cudnn.runtime.address_tables import pointers
from cudnn.runtime.run import architecture, lasting

if TYPE_CHECKING:
    from torch import Tensor

GATED = ("swiglu", "geglu")
ACTIVATIONS = (*GATED, "srelu")
WIDE = (torch.float32, torch.float64)  # types that only the reference takes
COPIED = 896  # rows of an expert's up from which on, on Hopper, tokens are copied in the experts' order for gradients
COPIED_UP = 2048  # the same for that of up, beside whose product the rows of another gradient are summed then
MANY = 1024  # and with fewer rows an expert, on average, for every product
NUMBERS = ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min")


@dataclass
class Rows:
    """The choices of the tokens, sorted by expert: where each expert's rows end, ``offsets`` (E,), the ``token`` (T K,)
    of each row, and the row ``of_choice`` (T, K), -1 for a choice that was dropped.
    """

    offsets: Tensor
    token: Tensor
    of_choice: Tensor

    @property
    def count(self) -> int:
        return self.token.shape[0]

    def read(self, x: Tensor, large: bool = False) -> tuple[Tensor, Tensor | None]:
        """A matrix (T, H) as an operand of products by row: itself and the rows' numbers, or a copy in the experts'
        order, which is gone when the pass ends. The copy's rows of no choice are not written.

        Blackwell's kernels load rows by number. So do Hopper's where experts have many rows and the product is not
        ``large``, as gradients may be: rows that are not shared arrive at 2.0 to 2.6 TB/s on an H200, and a copy takes
        0.6 ps for an element of a row, so it pays from about 900 columns on, or 2,048 where sums run beside the
        product. With few rows an expert it always does: the forward pass was 1.6 to 2.1 times as fast.
        """
        if self.by_number(x, large):
            return x, self.token
        say_copied()
        found = x.new_empty(self.count, x.shape[1])
        spread(x, self.of_choice, found)
        return found, None

    def by_number(self, x: Tensor, large: bool = False) -> bool:
        """Whether :meth:`read` gives a matrix as it is."""
        many = self.count >= MANY * self.offsets.shape[0]
        return architecture(x) != "sm_90a" or (many and not large)


@functools.cache
def say_copied() -> None:
    """Says in the log, once, that tokens are copied."""
    settings.configure_logging().info("moe_mlp: tokens are copied into the experts' order, for the time of a pass")


class Experts(NamedTuple):
    """The weights ``up`` (E, N, H) and ``down`` (E, H, I): each a list of one tensor, or of one for each expert.

    N is I or, for a gated activation, 2 I: of every 64 rows, the first 32 are gates, or those of the first half, as
    ``glu_layout`` says. With ``fp8`` the forward products are of e4m3.
    """

    up: Sequence[Tensor]
    down: Sequence[Tensor]
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    numbers: Sequence[float]
    glu_layout: str
    fp8: bool = False


def is_list(weights: Sequence[Tensor]) -> bool:
    """Whether each expert has a tensor of its own."""
    return weights[0].ndim == 2


def shape_of(weights: Sequence[Tensor]) -> tuple[int, int, int]:
    """(E, rows, columns) of weights."""
    rows, columns = weights[0].shape[-2:]
    return (len(weights) if is_list(weights) else weights[0].shape[0], rows, columns)


def matrix(x: Tensor) -> Tensor:
    """A matrix (m, k) in the dimensions that kernels take, (m, k, 1)."""
    return x.unsqueeze(0).permute(1, 2, 0)


def transposed(x: Tensor) -> Tensor:
    """A matrix (k, m) as (m, k, 1)."""
    return x.unsqueeze(0).permute(2, 1, 0)


def operand(weights: Sequence[Tensor], back: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and options of a grouped GEMM for weights (n, k) of each expert or, ``back``, (k, n)."""
    if not is_list(weights):
        (every,) = weights
        return {"b": every.permute(2, 1, 0) if back else every.permute(1, 2, 0)}, {}
    experts, rows, columns = shape_of(weights)
    shape, major = ((columns, rows), "n") if back else ((rows, columns), "k")
    options = {"num_experts": experts, "b_shape": shape, "b_dtype": weights[0].dtype, "b_major": major}
    return {"b_ptrs": pointers(weights)}, options


_ONES: dict[Any, Tensor] = {}  # never freed: any stream may still read them


def ones(count: int, device: Any) -> Tensor:
    """Ones in float32, kept where they are not made within a CUDA graph, which would make them each time."""
    found = _ONES.get((count, device))
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.ones(count, dtype=torch.float32, device=device)
        found = _ONES[count, device] = lasting(lambda: torch.ones(count, dtype=torch.float32, device=device))
        if device.type == "cuda":
            torch.cuda.default_stream(device).synchronize()  # once: calls on any stream read them
    return found


class Products:
    """The grouped GEMMs of layers of one kind, each compiled at its first call: see :func:`products`."""

    def __init__(self, e: Experts) -> None:
        numbers = {"glu_layout": e.glu_layout, **dict(zip(NUMBERS, e.numbers, strict=True))}
        self.up: dict[str, Any] = {}  # options of up's product, and of the gradient of what it made
        self.by_hidden: dict[str, Any] = {"deterministic": True}
        if e.activation in GATED:
            self.up = {"act_func": e.activation, **numbers}
            self.by_hidden = {"act_func": f"d{e.activation}", "_deterministic": True, **numbers}
        self.known: dict[Any, tuple[Any, Sequence[str], tuple[Any, ...]]] = {}

    def run(self, place: Any, name: str, tensors: dict[str, Any], *options: Mapping[str, Any], margin: int = 0) -> None:
        """Runs a fused API by its name on tensors by theirs; it leaves ``margin`` clusters of the GPU to others.

        At a ``place`` in the layer, everything but the tensors' addresses and numbers of rows is the same in all calls.
        """
        known = self.known.get(place)
        if known is None:
            known = self.known[place] = _made(name, tensors, {k: v for o in options for k, v in o.items()}, margin)
        operation, names, scalars = known
        # What ``execute`` does, whose many arguments by name take the host's time.
        operation.run(tuple(map(tensors.get, names)), scalars, None, None)


def _made(name: str, tensors: dict[str, Any], options: dict[str, Any], margin: int) -> Any:
    """An API's object, the names of its tensors, and the scalars of each call, in the order that it takes."""
    api = registry.find(name)
    scalars = {option: options.pop(option) for option in api.run_time if option in options}
    operation = api(**api.samples(tensors), **options)
    operation.margin += margin
    if operation.dtype("a") in WIDE:
        operation.run = operation.refer
    else:
        operation.check_support()
        operation.compile()
    return operation, api.names, tuple(scalars.get(each, getattr(operation, each)) for each in api.scalars)


_PRODUCTS: dict[Any, Products] = {}


def environment() -> tuple[int, str]:
    """The settings of grouped GEMMs."""
    return settings.CLUSTER_OVERLAP_MARGIN.get(), settings.SEMANTICS.get()


def products(x: Tensor, e: Experts) -> Products:
    """Those of a layer: kinds differ in types, options, the sizes of weights, and the settings of grouped GEMMs."""
    sizes = (len(e.up), e.up[0].shape, len(e.down), e.down[0].shape, e.up_bias is None, e.down_bias is None)
    key = (x.device, x.dtype, sizes, e.activation, *e.numbers, e.glu_layout, e.fp8, environment())
    found = _PRODUCTS.get(key)
    if found is None:
        found = _PRODUCTS[key] = Products(e)
    return found
