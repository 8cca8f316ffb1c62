"""Weight gradients of experts: grouped GEMMs over variable ranges of k (varlen_k)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from cudnn.api_base import ceil_div, check_rank, check_tensor, unpad
from cudnn.errors import make_error
from cudnn.fused import pointer_arrays
from cudnn.fused.gemm import NARROW
from cudnn.fused.grouped import FLOATS, MOST_EXPERTS, ExpertsGemm, gather
from cudnn.fused.host import ALIGNMENT
from cudnn.fused.layouts import (
    Contiguous,
    FlatScales,
    Gradients,
    Matrix,
    Sizes,
    TensorSpec,
    TokenBlocks,
    TransposedTokenBlocks,
)
from cudnn.fused.wrapper import stream_of
from cudnn.gemm.formats import BITS, BLOCKWISE_DTYPE, BLOCKWISE_SIZE, FLOAT4, FLOAT8, SCALES, name_of, wide
from cudnn.gemm.reference import evaluate
from cudnn.gemm.scales import dequantize, token_block_ranges
from cudnn.lazy import torch
from cudnn.runtime.call import on_stream
from cudnn_kernels import epilogue
from cudnn_kernels.gemm.problem import Operand
from cudnn_kernels.schedule import VarlenK

TYPES = (*NARROW, *FLOAT8, FLOAT4, "uint8")
OF_EXPERTS = Contiguous("experts", alignment=4)
UNREAD = 128  # tokens of the placeholder operands of an empty call


class WGradInputOrder(Enum):
    """The layout of the experts' tokens: one matrix, or a separate dense matrix for each expert."""

    Tensor2D = "tensor2d"
    TensorRagged = "tensor_ragged"


class ExpertGradients(ExpertsGemm):
    """Weight gradients of each expert: a GEMM over its range of tokens, the GEMM's k (varlen_k)."""

    tensors = (
        TensorSpec("a", TokenBlocks("m", "tokens of a", "mk"), TYPES, about="hidden = m, tokens = k"),
        TensorSpec("b", TransposedTokenBlocks("n", "tokens of b", "nk"), TYPES, same_dtype="a"),
        TensorSpec("sfa", FlatScales("m", "scales of k"), (*SCALES, BLOCKWISE_DTYPE), optional=True),
        TensorSpec("sfb", FlatScales("n", "scales of k"), (*SCALES, BLOCKWISE_DTYPE), optional=True, same_dtype="sfa"),
        TensorSpec("offsets", OF_EXPERTS, ("int32",), init="ends", about="the token where each expert ends"),
        TensorSpec("wgrad", Gradients("m", "n", "mn", "experts"), FLOATS, optional=True, written=True),
        TensorSpec("wgrad_ptrs", Contiguous("experts", alignment=8), ("int64",), optional=True, sampled=False),
        TensorSpec("global_scale_a", OF_EXPERTS, ("float32",), optional=True, init="uniform"),
        TensorSpec("global_scale_b", OF_EXPERTS, ("float32",), optional=True, init="uniform"),
        *(
            TensorSpec(
                f"{name}_index",
                Contiguous("k", alignment=4),
                ("int32",),
                optional=True,
                about=f"token i is number {name}_index[i] of {name}, one that it has not is zeros; for 16-bit types",
            )
            for name in "ab"
        ),
    )
    returns = ("wgrad",)
    sized_by = ("a", "b", "offsets")
    counted_by = ("a_index", "b_index")
    buffers = ("wgrad_tensor",)
    example = (("m", "n", "k", "experts"), (128, 128, 192, 3))
    aot_dtypes = ("bf16", "fp16")
    aot_shapes = ((4096, 4096, 8192, 8),)
    shapes = ((28672, 4096, 32768, 8), (2816, 2048, 32768, 64), (1536, 2048, 65536, 128))
    steps = (8, 8, 64, 1)
    tile_n = (64, 128, 192, 256)
    vectors = (16, 32, BLOCKWISE_SIZE)
    hints = (*ExpertsGemm.hints, "wgrad_ptrs", "output_mode", "input_order", "descriptor_workspace")
    result = ("wgrad", "")
    pointer_arguments = ("wgrad_ptrs",)
    tokens = "k"
    inner = 0

    accumulate_on_output: bool
    input_order: Any
    wgrad_shape: tuple[int, int] | None
    wgrad_dtype: Any

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.schedule = VarlenK(k_block=BLOCKWISE_SIZE if self.in_blocks else 0)
        self.expert = self._describe(arguments["sample_wgrad_expert"], "sample_wgrad_expert")
        offsets = arguments["sample_offsets"]
        read = type(offsets) is torch.Tensor and offsets.device.type == "cpu"  # on a GPU, that would wait for it
        if self.scaled and read and offsets.dtype == torch.int32:
            self.check_ends(offsets, self.sizes(self.descs))

    @property
    def in_blocks(self) -> bool:
        """Whether operands are blocks of 128 tokens of an expert, with float32 scale factors for each."""
        return self.dtype_name("sfa") == BLOCKWISE_DTYPE

    def operations(self) -> tuple[Any, ...]:
        names = ("global_scale_a", "global_scale_b")
        factors = [epilogue.MultiplyGroup(name) for name in names if self.has(name)]
        if self.has("wgrad"):
            store = replace(self.store("wgrad"), adds=bool(self.accumulate_on_output))
        else:
            dtype = name_of(self.wgrad_dtype)
            store = epilogue.StoreTile("wgrad_ptrs", dtype, adds=bool(self.accumulate_on_output), pointers=True)
        return (*factors, store)

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        """Sizes by name: those of a (m, k), b (k, n) and offsets (experts,). Blocks of tokens: k is 128, ``l`` their
        number.

        Raises:
            ValueError: other dimensions, another size than the tokens is 0, more than 1024 experts, or fewer blocks.
        """
        for name, rank, dims in (("a", 3, "(hidden, tokens)"), ("b", 3, "(tokens, hidden)"), ("offsets", 1, "(e,)")):
            if len(shapes[name]) != rank:
                raise make_error(ValueError, cls._title(), f"{name} tensor", f"the shape {tuple(shapes[name])}", dims)
        (m, k, _), n, experts = shapes["a"], shapes["b"][0], shapes["offsets"][0]
        if min(m, n, experts) < 1 or experts > MOST_EXPERTS:
            got, allowed = f"{m} x {n}, experts={experts}", f"at least 1, at most {MOST_EXPERTS} experts"
            raise make_error(ValueError, cls._title(), "sizes", got, allowed)
        tokens, blocks = {"tokens of a": k, "tokens of b": shapes["b"][1]}, shapes["a"][2]
        (k,) = shapes.get("a_index", (k,))
        tokens |= {f"tokens of {name}": k for name in "ab" if f"{name}_index" not in shapes}
        vector = options.get("sf_vec_size", 16)
        cls.check_vector(vector)
        if (k != BLOCKWISE_SIZE or blocks < experts) if vector == BLOCKWISE_SIZE else blocks != 1:
            got = f"hidden = {m}, tokens = {k}, blocks = {blocks}, with sf_vec_size={vector}"
            allowed = "(blocks, hidden, 128) with sf_vec_size=128, at least a block an expert; else (hidden, tokens)"
            raise make_error(ValueError, cls._title(), "a tensor", got, allowed)
        factors = 4 * ceil_div(ceil_div(k, vector), 4)
        named = {"m": m, "n": n, "k": k, "l": blocks, "experts": experts, "scales of k": factors, "vector": vector}
        return {**named, **tokens}

    @classmethod
    def example_sizes(cls, sizes: Sizes) -> dict[str, int]:
        m, n, k, experts = (sizes[name] for name in ("m", "n", "k", "experts"))
        return cls.sizes_of({"a": (m, k, 1), "b": (n, k, 1), "offsets": (experts,)}, cls.defaults())

    @classmethod
    def cache_key(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
        """Types, majors and all sizes but the number of tokens."""
        types = tuple((name, None if t is None else (t.dtype, t.device)) for name, t in tensors.items())
        (m, _, _), n, experts = tensors["a"].shape, tensors["b"].shape[0], tensors["offsets"].shape
        wgrad, layout = tensors["wgrad"], cls.spec("wgrad").layout
        major = layout.major(wgrad.shape, wgrad.stride()) if wgrad is not None and isinstance(layout, Matrix) else ""
        return (types, cls.majors_of(tensors), major, m, n, experts)

    @classmethod
    def reinterpret(cls, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
        """``b`` of packed elements without tokens, whose bytes do not tell along which dimension they are packed."""
        b = tensors["b"]  # scale factors are flat
        if getattr(b, "ndim", 0) == 2 and not b.shape[0] and name_of(b.dtype) == FLOAT4:
            return {**tensors, "b": b.as_strided(b.shape, (1, UNREAD))}
        return tensors

    def reinterpret_call(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """For a call with one packed ``wgrad`` on an object of pointer arrays: the pointers of its matrices."""
        by_name = dict(zip(self.names, tensors, strict=True))
        wgrad = by_name["wgrad"]
        if self.has("wgrad") or wgrad is None or by_name["wgrad_ptrs"] is not None:
            return super().reinterpret_call(tensors)
        from cudnn.runtime.pointer_arrays import pointers  # which loads PyTorch

        check_tensor(self._title(), "wgrad", wgrad)
        expected, device = (self.num_experts, *(self.wgrad_shape or ())), by_name["a"].device
        got = f"{wgrad.dtype} of the shape {tuple(wgrad.shape)} and strides {wgrad.stride()} on {wgrad.device}"
        allowed = f"{self.wgrad_dtype} of the shape {expected}, each matrix contiguous, on {device}, or wgrad_ptrs"
        fits = tuple(wgrad.shape) == expected and name_of(wgrad.dtype) == name_of(self.wgrad_dtype)
        if not fits or wgrad.device != device or not wgrad[0].is_contiguous():
            raise self.error("wgrad tensor", got, allowed)
        replaced = {**by_name, "wgrad": None, "wgrad_ptrs": pointers(wgrad.unbind(0))}
        return super().reinterpret_call(tuple(replaced[name] for name in self.names))

    @classmethod
    def restore_layout(cls, name: str, tensor: Any, inputs: Mapping[str, Any]) -> Any:
        return tensor.permute(2, 0, 1)

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        return (
            {}
            if arguments["wgrad_ptrs"] is not None
            else {"wgrad": (cls.dtype_or_default(arguments["wgrad_dtype"]), "n")}
        )

    @classmethod
    def check_order(cls, order: Any) -> None:
        """Raises unless tokens may come in this order."""
        orders = [order.value for order in WGradInputOrder]
        if getattr(order, "value", order) not in orders:
            raise make_error(ValueError, cls._title(), "input_order", repr(order), " or ".join(map(repr, orders)))

    @classmethod
    def check_descriptors(cls, where: str, workspace: Any, experts: int, discrete: bool, like: Any) -> None:
        """Raises unless a ``descriptor_workspace`` is one that other kernels could use."""
        check_tensor(where, "descriptor_workspace", workspace)
        needed = cls.descriptor_bytes(experts, discrete)
        if workspace.dtype != torch.uint8 or not workspace.is_contiguous() or workspace.numel() < needed:
            got = f"{workspace.numel()} elements of {workspace.dtype}, strides {workspace.stride()}"
            allowed = f"at least {needed} bytes, torch.uint8, contiguous"
            hint = "ask get_grouped_gemm_wgrad_workspace_size"
            raise make_error(ValueError, where, "descriptor_workspace", got, allowed, hint)
        if workspace.device != like.device:
            raise make_error(
                ValueError, where, "descriptor_workspace", workspace.device, f"{like.device}, as the operands"
            )

    @staticmethod
    def descriptor_bytes(experts: int, discrete: bool) -> int:
        """Bytes of a ``descriptor_workspace``."""
        return max(128 * (5 if discrete else 4) * experts, 1)

    @classmethod
    def normalize_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Adds the options of pointer arrays, and a zero ``wgrad`` to accumulate on, if none was passed."""
        where, experts, b = "grouped_gemm_wgrad_wrapper", arguments["offsets_tensor"].numel(), arguments["b_tensor"]
        cls.check_order(arguments["input_order"])
        in_blocks = arguments["sf_vec_size"] == BLOCKWISE_SIZE
        for name, dims in (("a", "(hidden, tokens)"), ("b", "(tokens, hidden)")):
            rank, dims = (3, "(blocks, hidden, 128)") if in_blocks else (2, dims)
            check_rank(where, name, arguments[f"{name}_tensor"], (rank,), dims)
        wgrad, pointers = arguments["wgrad_tensor"], arguments["wgrad_ptrs"]
        m, n = cls.shape_of(arguments["a_tensor"])[int(in_blocks)], b.shape[1]  # packed elements lie along the tokens
        if (pointers is not None) != (arguments["output_mode"] == "discrete"):
            got = f"output_mode={arguments['output_mode']!r}, wgrad_ptrs {'None' if pointers is None else 'given'}"
            raise make_error(ValueError, where, "wgrad_ptrs", got, "addresses with output_mode='discrete', else None")
        dtype, device = cls.dtype_or_default(arguments["wgrad_dtype"]), arguments["a_tensor"].device
        if arguments["descriptor_workspace"] is not None:
            cls.check_descriptors(where, arguments["descriptor_workspace"], experts, pointers is not None, b)
        if pointers is not None:
            pointer_arrays.check(where, "wgrad_ptrs", pointers, experts, device)
            return {**arguments, "num_experts": experts, "wgrad_shape": (m, n), "wgrad_dtype": dtype}
        if wgrad is None and arguments["accumulate_on_output"]:
            with on_stream(stream_of(arguments), arguments["a_tensor"]):
                return {**arguments, "wgrad_tensor": torch.zeros(experts, m, n, dtype=dtype, device=device)}
        return arguments

    def check_options(self) -> None:
        super().check_options()
        self.check_order(self.input_order)

    def check_weights(self) -> None:
        if self.has("wgrad") == (self.num_experts is not None):
            got = "both" if self.has("wgrad") else "neither"
            raise self.error("sample_wgrad and num_experts", got, "one of them: a tensor, or pointers to gradients")
        if not self.has("wgrad") and (self.wgrad_shape is None or self.wgrad_dtype is None):
            got = f"{self.wgrad_shape} and {self.wgrad_dtype}"
            raise self.error("wgrad_shape and wgrad_dtype", got, "both, with num_experts")

    def check_sizes(self, sizes: Sizes) -> None:
        super().check_sizes(sizes)
        if self.wgrad_shape is not None and tuple(self.wgrad_shape) != (sizes["m"], sizes["n"]):
            raise self.error("wgrad_shape", self.wgrad_shape, f"({sizes['m']}, {sizes['n']}), of a and b")

        if self.expert is None:
            return
        expert, expected = unpad(self.expert, 2), (sizes["m"], sizes["n"])
        self._check_shape(expert, expected)
        self._check_stride(expert, (sizes["n"], 1))
        if self.has("wgrad_ptrs"):
            self._check_dtype(expert, self.wgrad_dtype)

    def check_groups(self, sizes: Sizes) -> None:
        if self.has("wgrad_ptrs") and name_of(self.wgrad_dtype) not in FLOATS:
            raise self.error("wgrad_dtype", self.wgrad_dtype, ", ".join(FLOATS))
        if self.has("global_scale_a") != self.has("global_scale_b"):
            raise self.error("global_scale_a and global_scale_b", "one of them", "both or none")
        if self.dtype_name("sfa") == SCALES[1] and not self.has("global_scale_a"):
            raise self.error("global_scale_a and global_scale_b", "None", f"both, for scale factors of {SCALES[1]}")
        for name in "ab":
            if self.has(f"{name}_index") and self.major(name) == "k":
                raise self.error(f"{name}_index tensor", f"a tensor, with contiguous tokens of {name}", "None, then")

    def check_ends(self, offsets: Any, sizes: Sizes, step: int = 1, last: int = 1) -> None:
        if self.in_blocks:  # the number of tokens that all experts' blocks hold
            sizes = {**sizes, self.tokens: (sizes["l"] - sizes["experts"] + 1) * BLOCKWISE_SIZE - 1}
        super().check_ends(offsets, sizes, step, last)

    def steps_of_ends(self) -> tuple[int, int]:
        """16 bytes of operands whose tokens are contiguous; four blocks of those that have scale factors. Any, of
        blocks of tokens.
        """
        if self.in_blocks:
            return 1, 1
        last = max(ALIGNMENT * 8 // BITS[self.dtype_name(name)] if self.major(name) == "k" else 1 for name in "ab")
        return (max(last, 4 * self.sf_vec_size) if self.scaled else last), last

    def ragged(self, name: str) -> bool:
        """Whether each expert has a separate matrix of an operand. MN-major: both layouts are the same."""
        order = getattr(self.input_order, "value", self.input_order)
        return order == WGradInputOrder.TensorRagged.value and self.major(name) == "k"

    def operand(self, name: str) -> Operand:
        return replace(super().operand(name), ragged=self.ragged(name))

    def check_own_rules(self, sizes: Sizes) -> None:
        if not (self.scaled or self.dtype_name("a") == "bfloat16") and any(map(self.ragged, "ab")):
            got = f"'tensor_ragged' with contiguous tokens of {self.dtype_name('a')}"
            raise self.unsupported("input_order", got, "with scale factors or bfloat16; else 'tensor2d'")

    def run_empty(self, tensors: Sequence[Any]) -> None:
        """Writes zeros unless it accumulates. For pointer arrays the kernel writes them, on placeholder operands."""
        by_name = dict(zip(self.names, tensors, strict=True))
        if self.accumulate_on_output:
            return
        if self.has("wgrad"):
            by_name["wgrad"].zero_()
            return
        sizes, stand_ins = self.sizes(self.descs), {}
        small_sizes = sizes | {name: UNREAD for name in sizes if name == "k" or name.startswith("tokens of")}
        small_sizes["scales of k"] = 4 * ceil_div(UNREAD, 4 * self.sf_vec_size)
        for name in ("a", "b", "sfa", "sfb", "a_index", "b_index"):
            if by_name[name] is not None:
                layout, x = self.spec(name).layout, by_name[name]
                major = self.major(name) if isinstance(layout, Matrix) else ""
                stand_ins[name] = layout.allocate(small_sizes, major, x.dtype, x.device)
        self.compile()
        self.run(tuple(stand_ins.get(name, x) for name, x in by_name.items()), (), None, None)

    def reference(self, tensors: Mapping[str, Any]) -> None:
        ends = tensors["offsets"].tolist()
        parts = self.expert_blocks if self.in_blocks else self.parts
        a, b = (parts(tensors, name, ends) for name in "ab")
        product = torch.stack([x @ y.T for x, y in zip(a, b, strict=True)], -1)
        if not self.has("wgrad_ptrs"):
            evaluate(self.operations(), product, tensors)
            return
        m, n, _ = product.shape
        targets = pointer_arrays.matrices(tensors["wgrad_ptrs"], m, n, self.wgrad_dtype)
        packed = torch.cat(targets, -1)
        evaluate(self.operations(), product, {**tensors, "wgrad_ptrs": packed})
        for expert, target in enumerate(targets):
            target.copy_(packed[..., expert : expert + 1])

    def expert_blocks(self, tensors: Mapping[str, Any], name: str, ends: Sequence[int]) -> list[Any]:
        """The dequantized operand of each expert (rows, tokens of its blocks)."""
        blocks = wide(tensors[name]) * tensors[f"sf{name}"]  # (rows, 128, blocks)
        return [blocks[..., x].transpose(1, 2).flatten(1) for _, x in token_block_ranges(tensors["offsets"])]

    def parts(self, tensors: Mapping[str, Any], name: str, ends: Sequence[int]) -> list[Any]:
        """The dequantized operand of each expert."""
        x, scales, vector = tensors[name], tensors.get(f"sf{name}"), self.sf_vec_size
        x = gather(x, tensors.get(f"{name}_index"), 1)
        rows, ragged = x.shape[0], self.ragged(name)
        atoms, first, values = ceil_div(x.shape[0], 128), 0, []
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            packed = 2 if name_of(x.dtype) == FLOAT4 else 1
            slice_ = x[:, start // packed : end // packed]
            if ragged:
                pitch, first_of_all = (end - start) // packed, x.storage_offset()
                slice_ = x.as_strided(slice_.shape, (pitch, 1, 1), first_of_all + rows * (start // packed))
            if scales is None or start == end:
                values.append(dequantize(slice_)[..., 0])
                continue
            groups = ceil_div(ceil_div(end - start, vector), 4)
            expert_scales = scales[first : first + atoms * groups * 512].view(1, atoms, groups, 32, 4, 4)
            values.append(dequantize(slice_, expert_scales.permute(3, 4, 1, 5, 2, 0), vector)[..., 0])
            first += atoms * groups * 512
        return values
