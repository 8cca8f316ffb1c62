"""Grouped GEMM of weight gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from cudnn.api_base import ceil_div
from cudnn.errors import refusal
from cudnn.fused.gemm import NARROW
from cudnn.fused.grouped import FLOATS, MOST_EXPERTS, ExpertsGemm
from cudnn.fused.layouts import Contiguous, OneMatrix, Sizes, TensorSpec, Transposed, Weights
from cudnn.fused.positional import older_order
from cudnn.fused.wrapper import call
from cudnn.gemm.formats import FLOAT4, FLOAT8, SCALES
from cudnn.gemm.reference import evaluate
from cudnn.lazy import torch
from cudnn_kernels import epilogue
from cudnn_kernels.schedule import GroupedK

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

TYPES = (*NARROW, *FLOAT8, FLOAT4, "uint8")
OF_EXPERTS = Contiguous("experts", alignment=4)


class WGradInputOrder(Enum):
    """How the tokens of several experts lie: in one matrix, or each expert's in a matrix of its own."""

    Tensor2D = "tensor2d"
    TensorRagged = "tensor_ragged"


class GroupedGemmWgrad(ExpertsGemm):
    """The gradients of the weights of all experts: products over the tokens of each.

        wgrad[e] = global_scale_a[e] * global_scale_b[e] * a[:, tokens of e] b[tokens of e, :]

    accumulated in float32, rounded when stored; 0 for an expert without tokens. Expert e has the tokens from
    ``offsets[e - 1]`` to before ``offsets[e]``, multiples of 16 bytes for an operand whose tokens are contiguous.
    Tokens beyond the last one's end are not read.

    Args:
        sample_a ... sample_global_scale_b: tensors like those that ``execute`` will get.
        num_experts, wgrad_shape, wgrad_dtype, sample_wgrad_expert: of gradients behind addresses.
        accumulate_on_output: the gradients are added to.
        input_order: ``"tensor2d"``, or ``"tensor_ragged"``, which is the same unless tokens are contiguous.
        others: as those of :class:`cudnn.GroupedGemmQuant`.
    """

    title = "Grouped GEMM of weight gradients"
    tensors = (
        TensorSpec("a", OneMatrix("m", "k", "mk"), TYPES, about="hidden = m, tokens = k"),
        TensorSpec("b", Transposed("n", "k", "nk"), TYPES, same="a"),
        TensorSpec("sfa", Contiguous("atoms of m", "factors of k"), SCALES, optional=True),
        TensorSpec("sfb", Contiguous("atoms of n", "factors of k"), SCALES, optional=True, same="sfa"),
        TensorSpec("offsets", OF_EXPERTS, ("int32",), draw="ends", about="the token where each expert ends"),
        TensorSpec("wgrad", Weights("m", "n", "mn", "experts"), FLOATS, written=True),
        TensorSpec("wgrad_ptrs", OF_EXPERTS, ("int64",), optional=True, sampled=False),
        TensorSpec("global_scale_a", OF_EXPERTS, ("float32",), optional=True, draw="uniform"),
        TensorSpec("global_scale_b", OF_EXPERTS, ("float32",), optional=True, draw="uniform"),
    )
    returns = ("wgrad",)
    sized_by = ("a", "b", "offsets")
    buffers = ("wgrad_tensor",)
    example = (("m", "n", "k", "experts"), (128, 128, 192, 3))
    usual_types = ("bf16", "fp16")
    usual_shapes = ((4096, 4096, 8192, 8),)
    shapes = ((4096, 4096, 16384, 8), (2048, 7168, 16384, 64))
    steps = (8, 8, 64, 1)
    tile_n = (64, 128, 192, 256)
    hints = (*ExpertsGemm.hints, "wgrad_ptrs", "output_mode", "input_order", "descriptor_workspace")
    result = ("wgrad", "")
    tokens = "k"
    inner = 0

    accumulate_on_output: bool
    input_order: Any

    @older_order(
        "self sample_a sample_b sample_sfa sample_sfb sample_offsets sample_wgrad sample_wgrad_expert num_experts "
        "wgrad_shape wgrad_dtype sample_global_scale_a sample_global_scale_b acc_dtype mma_tiler_mn cluster_shape_mn "
        "sf_vec_size accumulate_on_output"
    )
    def __init__(
        self, sample_a: Tensor, sample_b: Tensor, sample_sfa: Tensor | None, sample_sfb: Tensor | None,
        sample_offsets: Tensor, sample_wgrad: Tensor | None = None, sample_wgrad_expert: Tensor | None = None,
        num_experts: int | None = None, wgrad_shape: tuple[int, int] | None = None,
        wgrad_dtype: dtype | None = None, sample_global_scale_a: Tensor | None = None,
        sample_global_scale_b: Tensor | None = None, acc_dtype: dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256), cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16, sf_fp8_dtype_override: str | None = None, accumulate_on_output: bool = False,
        input_order: Any = WGradInputOrder.Tensor2D, *, arch: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(locals())
        self.schedule = GroupedK()

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, a_tensor: Tensor, b_tensor: Tensor, sfa_tensor: Tensor | None, sfb_tensor: Tensor | None,
        offsets_tensor: Tensor, wgrad_tensor: Tensor | None = None, wgrad_ptrs: Tensor | None = None,
        global_scale_a: Tensor | None = None, global_scale_b: Tensor | None = None, current_stream: Any = None, *,
        descriptor_workspace: Tensor | None = None, workspace_tensor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Writes ``wgrad_tensor``. See :attr:`FusedAPI.run`."""
        self.run(
            (a_tensor, b_tensor, sfa_tensor, sfb_tensor, offsets_tensor, wgrad_tensor, wgrad_ptrs, global_scale_a,
             global_scale_b), (), current_stream, workspace_tensor,
        )  # fmt: skip

    def operations(self) -> tuple[Any, ...]:
        names = ("global_scale_a", "global_scale_b")
        return (*(epilogue.MultiplyGroup(name) for name in names if self.given(name)), self.store("wgrad"))

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        """Sizes by name: those of a (m, k), b (k, n) and offsets (experts,).

        Raises:
            ValueError: other dimensions, one of size 0 beside the tokens, or more than 1024 experts.
        """
        for name, rank, dims in (("a", 3, "(hidden, tokens)"), ("b", 3, "(tokens, hidden)"), ("offsets", 1, "(e,)")):
            if len(shapes[name]) != rank:
                raise ValueError(refusal(cls._title(), f"{name} tensor", f"the shape {tuple(shapes[name])}", dims))
        (m, k, _), n, experts = shapes["a"], shapes["b"][0], shapes["offsets"][0]
        if min(m, n, experts) < 1 or experts > MOST_EXPERTS:
            got, allowed = f"{m} x {n}, experts={experts}", f"at least 1, at most {MOST_EXPERTS} experts"
            raise ValueError(refusal(cls._title(), "sizes", got, allowed))
        factors = 4 * ceil_div(ceil_div(k, options.get("sf_vec_size", 16)), 4)
        atoms = {f"atoms of {name}": 128 * ceil_div(size, 128) for name, size in (("m", m), ("n", n))}
        return {"m": m, "n": n, "k": k, "l": 1, "experts": experts, "factors of k": factors, **atoms}

    @classmethod
    def example_sizes(cls, sizes: Sizes) -> dict[str, int]:
        m, n, k, experts = (sizes[name] for name in ("m", "n", "k", "experts"))
        return cls.sizes_of({"a": (m, k, 1), "b": (n, k, 1), "offsets": (experts,)}, cls.defaults())

    @classmethod
    def cache_key(cls, given: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Types, majors and all sizes but the number of tokens."""
        kinds = tuple((name, None if t is None else (t.dtype, t.device)) for name, t in given.items())
        (m, _, _), n, experts = given["a"].shape, given["b"].shape[0], given["offsets"].shape
        return (kinds, cls.majors_of(given), m, n, experts)

    @classmethod
    def presented(cls, name: str, tensor: Any, given: Mapping[str, Any]) -> Any:
        return tensor.permute(2, 0, 1)

    @classmethod
    def results(cls, given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        return {"wgrad": (cls.given_or(given["wgrad_dtype"]), "n")}

    def check_options(self) -> None:
        super().check_options()
        orders = [order.value for order in WGradInputOrder]
        if getattr(self.input_order, "value", self.input_order) not in orders:
            raise self.error("input_order", repr(self.input_order), " or ".join(map(repr, orders)))
        if self.accumulate_on_output:
            raise self.unsupported("accumulate_on_output", True, "False")

    def check_groups(self, sizes: Sizes) -> None:
        if self.scaled:
            raise self.unsupported("sfa and sfb tensors", "tensors", "None: operands without scale factors")
        if self.given("global_scale_a") != self.given("global_scale_b"):
            raise self.error("global_scale_a and global_scale_b", "one of them", "both or none")
        by_token = "k" in (self.major("a"), self.major("b"))
        if getattr(self.input_order, "value", self.input_order) == "tensor_ragged" and by_token:
            raise self.unsupported("input_order", "'tensor_ragged' with contiguous tokens", "'tensor2d'")

    def check_own_rules(self, sizes: Sizes) -> None:
        if self.major("wgrad") != "n":
            raise self.error("wgrad tensor", "columns that are contiguous", "rows that are")

    def run_empty(self, tensors: Sequence[Any]) -> None:
        tensors[self.names.index("wgrad")].zero_()

    def reference(self, tensors: Mapping[str, Any]) -> None:
        a, b = (tensors[name].float() for name in "ab")
        ends = tensors["offsets"].tolist()
        spans = zip([0, *ends[:-1]], ends, strict=True)
        products = [a[:, start:end, 0] @ b[:, start:end, 0].T for start, end in spans]
        evaluate(self.operations(), torch.stack(products, -1), tensors)


class GroupedGemmWgradSm100(GroupedGemmWgrad):
    """:class:`GroupedGemmWgrad` by the name that existing programs use. The wrapper makes objects of it."""


@older_order(
    "a_tensor b_tensor sfa_tensor sfb_tensor offsets_tensor output_mode wgrad_tensor wgrad_ptrs global_scale_a "
    "global_scale_b acc_dtype wgrad_dtype mma_tiler_mn cluster_shape_mn sf_vec_size accumulate_on_output current_stream"
)
def grouped_gemm_wgrad_wrapper(
    a_tensor: Tensor, b_tensor: Tensor, sfa_tensor: Tensor | None, sfb_tensor: Tensor | None, offsets_tensor: Tensor,
    output_mode: str = "dense", wgrad_tensor: Tensor | None = None, wgrad_ptrs: Tensor | None = None,
    global_scale_a: Tensor | None = None, global_scale_b: Tensor | None = None, acc_dtype: dtype | None = None,
    wgrad_dtype: dtype | None = None, mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None, sf_vec_size: int = 16, sf_fp8_dtype_override: str | None = None,
    accumulate_on_output: bool = False, input_order: Any = WGradInputOrder.Tensor2D, current_stream: Any = None, *,
    descriptor_workspace: Tensor | None = None,
) -> TupleDict:  # fmt: skip
    """Allocates the gradients, compiles where that was not done yet, and executes: ``wgrad_tensor``.

    ``wgrad_tensor``: written and returned, where it is given. ``output_mode``: ``"dense"``. Other arguments and errors
    as those of :class:`GroupedGemmWgrad`.
    """
    if output_mode not in ("dense", "discrete"):
        raise ValueError(refusal("grouped_gemm_wgrad_wrapper", "output_mode", repr(output_mode), "'dense'"))
    if output_mode == "discrete":
        raise NotImplementedError(refusal("grouped_gemm_wgrad_wrapper", "output_mode", "'discrete'", "'dense'"))
    return call(GroupedGemmWgradSm100, locals())


grouped_gemm_wgrad_wrapper_sm100 = grouped_gemm_wgrad_wrapper
_cache_of_GroupedGemmWgradObjects = _cache_of_GroupedGemmWgradSm100Objects = GroupedGemmWgrad.objects  # noqa: N816
