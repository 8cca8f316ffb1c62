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

    def read(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """A matrix (T, columns) as an operand of the products by row: its rows and their numbers, or copies in order.

        Blackwell's kernels load rows by number. So can Hopper's; but on an H200 they take 1.25 to 1.9 times as long as
        with copied rows, whose copies cost less. They are gone when the pass ends. Rows of no choice are not written.
        """
        if _arch(x) != "sm_90a":
            return x, self.token
        copied = x.new_empty(self.count, x.shape[1])
        spread(x, self.of_choice, copied)
        return copied, None

    def scattered(self, values: Tensor) -> Tensor:
        """Values of choices, (T, K), as values of rows."""
        place = self.of_choice.flatten().long()
        place = place.where(place >= 0, self.count)  # those that were dropped, behind the rows
        return values.new_empty(self.count + 1).index_copy_(0, place, values.flatten())[:-1]

    def of_choices(self, values: Tensor) -> Tensor:
        """Values of rows as values of choices, (T, K); 0 where one was dropped."""
        return values[self.of_choice.long()].masked_fill_(self.of_choice < 0, 0.0)


@dataclass(frozen=True)
class Experts:
    """The weights ``up`` (E, N, H) and ``down`` (E, H, I): each a list of one tensor, or of one for each expert.

    N is I or, for a gated activation, 2 I: of every 64 rows, the first 32 are gates.
    """

    up: Sequence[Tensor]
    down: Sequence[Tensor]
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    numbers: Sequence[float]

    @property
    def options(self) -> dict[str, Any]:
        """What an API of gated activations is told."""
        return dict(zip(NUMBERS, self.numbers, strict=True))


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
    """The addresses of tensors, on their device: kept, since a CUDA graph cannot make them."""
    return _pointers(tensors[0].device, *(tensor.data_ptr() for tensor in tensors))


@functools.lru_cache(maxsize=1024)
def _pointers(device: Any, *addresses: int) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _arch(x: Tensor) -> str | None:
    """The architecture whose kernels run on a tensor's device; None for the reference."""
    return launch.device_architecture(x.get_device()) if x.is_cuda else launch.emulated_architecture()


_OBJECTS: dict[Any, Any] = {}


def execute(name: str, tensors: dict[str, Any], **options: Any) -> None:
    """Runs a fused API by its name on tensors by theirs; it is compiled where no call of the kind has been."""
    api = registry.find(name)
    scalars = {option: options.pop(option) for option in api.run_time if option in options}
    given = {s.name: None if tensors.get(s.name) is None else api.fitted(s.name, tensors[s.name]) for s in api.tensors}
    weights = given.get("b")
    shape = None if weights is None else weights.shape  # other sizes have other tiles
    kinds = (api.cache_key(given, options), shape, tuple(options.items()))
    key = (name, kinds, settings.CLUSTER_OVERLAP_MARGIN.get())
    operation = _OBJECTS.get(key)
    if operation is None:
        operation = api(**api.samples(tensors), **options)
        operation.check_support()
        operation.compile()
        _OBJECTS[key] = operation
    operation.execute(**{parameter: tensors.get(n) for n, parameter in api.parameters.items()}, **scalars)
