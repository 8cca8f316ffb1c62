"""What the kernels of a layer of experts work on: the rows by expert, and the experts' weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudnn import launch, registry, settings
from cudnn.lazy import torch
from cudnn.moe.combining import spread

if TYPE_CHECKING:
    from torch import Tensor

GATED = ("swiglu", "geglu")
ACTIVATIONS = (*GATED, "srelu")
COPIED = 896  # on Hopper, from so many columns on, tokens are copied into the experts' order for gradients
MANY = 1024  # and with fewer rows an expert, on average, for every product
NUMBERS = ("linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min")


@dataclass(frozen=True)
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

    def read(self, x: Tensor, columns: int = 0) -> tuple[Tensor, Tensor | None]:
        """A matrix (T, H) as an operand of products by row: itself and the rows' numbers, or a copy in the experts'
        order, which is gone when the pass ends. The copy's rows of no choice are not written. ``columns``, of the
        backward pass, are those of up's product.

        Blackwell's kernels load rows by number. So do Hopper's where experts have many rows, nearly as fast as in order
        where two CTAs share them, as in the up projection. Rows that are not shared arrive at 2.0 to 2.6 TB/s on an
        H200, and a copy takes 0.6 ps for an element of a row: so a copy pays from about 900 columns on. With few rows
        an expert it always does: the forward pass was 1.6 to 2.1 times as fast.
        """
        if self.by_number(x, columns):
            return x, self.token
        copied = x.new_empty(self.count, x.shape[1])
        spread(x, self.of_choice, copied)
        return copied, None

    def by_number(self, x: Tensor, columns: int = 0) -> bool:
        """Whether :meth:`read` gives a matrix as it is."""
        many = self.count >= MANY * self.offsets.shape[0]
        return _arch(x) != "sm_90a" or (many and columns < COPIED)

    def scattered(self, values: Tensor) -> Tensor:
        """Values of choices, (T, K), as values of rows, and one more: where choices were dropped, in row -1."""
        found = values.new_empty(self.count + 1)
        found[self._places.flatten()] = values.flatten()
        return found

    def of_choices(self, values: Tensor) -> Tensor:
        """Values of rows, and one more, as values of choices, (T, K)."""
        return values[self._places]

    @functools.cached_property
    def _places(self) -> Tensor:
        return self.of_choice.long()


@dataclass(frozen=True)
class Experts:
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

    @property
    def options(self) -> dict[str, Any]:
        """What an API of gated activations is told."""
        return {"glu_layout": self.glu_layout, **dict(zip(NUMBERS, self.numbers, strict=True))}


def is_list(weights: Sequence[Tensor]) -> bool:
    """Whether each expert has a tensor of its own."""
    return weights[0].ndim == 2


def shape_of(weights: Sequence[Tensor]) -> tuple[int, int, int]:
    """(E, rows, columns) of weights."""
    rows, columns = weights[0].shape[-2:]
    return (len(weights) if is_list(weights) else weights[0].shape[0], rows, columns)


def operand(weights: Sequence[Tensor], transposed: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and options of a grouped GEMM for weights (n, k) of each expert or, ``transposed``, (k, n)."""
    if not is_list(weights):
        (every,) = weights
        return {"b": every.permute(2, 1, 0) if transposed else every.permute(1, 2, 0)}, {}
    experts, rows, columns = shape_of(weights)
    shape, major = ((columns, rows), "n") if transposed else ((rows, columns), "k")
    options = {"num_experts": experts, "b_shape": shape, "b_dtype": weights[0].dtype, "b_major": major}
    return {"b_ptrs": pointers(weights)}, options


def pointers(tensors: Sequence[Tensor]) -> Tensor:
    """The addresses of tensors, on their device: kept, since a CUDA graph cannot make them.

    If another stream reads them than the one they were made on, PyTorch's allocator is told, so that their memory is
    not used again too early once other addresses have taken their place.
    """
    made, stream = _pointers(tensors[0].device, *(tensor.data_ptr() for tensor in tensors))
    if made.is_cuda and launch.raw_stream(None, made.get_device()) != stream:
        made.record_stream(torch.cuda.current_stream(made.device))
    return made


@functools.lru_cache(maxsize=1024)
def _pointers(device: Any, *addresses: int) -> tuple[Tensor, int]:
    """The addresses in a tensor, and the stream that it was made on."""
    made = torch.tensor(addresses, dtype=torch.int64, device=device)
    return made, launch.raw_stream(None, made.get_device()) if made.is_cuda else 0


def ones(count: int, device: Any) -> Tensor:
    """Ones in float32, kept where they are not made within a CUDA graph, which would make them each time."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.ones(count, device=device)
    return _ones(count, device)


@functools.cache  # never freed: any stream may still read it
def _ones(count: int, device: Any) -> Tensor:
    made = torch.ones(count, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # once: calls on other streams read it, too
    return made


def _arch(x: Tensor) -> str | None:
    """The architecture whose kernels run on a tensor's device; None for the reference."""
    return launch.device_architecture(x.get_device()) if x.is_cuda else launch.emulated_architecture()


_OBJECTS: dict[Any, Any] = {}


def execute(name: str, tensors: dict[str, Any], margin: int = 0, **options: Any) -> None:
    """Runs a fused API by its name on tensors by theirs; it is compiled where no call of the kind has been. It leaves
    ``margin`` clusters of the GPU to others.

    Kinds differ in types, options, and the sizes and strides of weights or, for gradients of weights, in their size and
    the number of tokens to an expert, as a power of two: other sizes have other tiles.
    """
    api = registry.find(name)
    scalars = {option: options.pop(option) for option in api.run_time if option in options}
    a, b = tensors["a"], tensors.get("b")
    sizes: Any = None  # of weights behind addresses, in options
    if b is not None and "offsets" in tensors:
        sizes = (a.shape[0], b.shape[1], (b.shape[0] // tensors["offsets"].shape[0]).bit_length())
    elif b is not None:
        sizes = (b.shape, b.stride())
    types = tuple([(n, t.dtype) for n, t in tensors.items() if t is not None])
    environment = (settings.CLUSTER_OVERLAP_MARGIN.get(), settings.SEMANTICS.get(), margin)
    key = (name, a.device, sizes, types, tuple(options.items()), environment)
    operation = _OBJECTS.get(key)
    if operation is None:
        operation = api(**api.samples(tensors), **options)
        operation.margin += margin
        operation.check_support()
        operation.compile()
        _OBJECTS[key] = operation
    # What ``execute`` does, whose many arguments by name take the host's time.
    operation.run(tuple(map(tensors.get, api.names)), tuple(map(scalars.get, api.scalars)), None, None)
