"""What attention's forward and backward pass share: their attributes, and the way from ``Q K^T`` to masked scores.

That way is a chain of steps, each a method of ``ScoreGraph`` from scores to scores that returns them unchanged
where it does not apply. A new feature of the scores is one more step in the lists of ``forward.py`` and
``backward.py``.
"""

from __future__ import annotations

import copy
import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from cudnn.arrays.layout import broadcast, row_major
from cudnn.enums import attention_implementation, data_type, diagonal_alignment, reduction_mode
from cudnn.errors import cudnnGraphNotSupportedError, make_error
from cudnn.pygraph.attention import support
from cudnn.pygraph.attention.operations import DiagonalBandMask, HeadReduction, PagedCacheLoad, RandomMask, Softmax
from cudnn.pygraph.lowering import Lowering
from cudnn.pygraph.matmul import Matmul
from cudnn.pygraph.node import Context, Node
from cudnn.pygraph.subgraph import SubGraph
from cudnn.pygraph.tensor import Tensor
from cudnn.reference.attention import Masks, Modifiers, alibi_slopes, gathered, random_mask
from cudnn.reference.executor import run_node

A = TypeVar("A", bound="Attention")
ScoreModifier = Callable[..., Tensor]
BAND_MASK_SINCE = 92100  # cuDNN's own operations for the band mask and the softmax
MODIFIER_PORT = "Score_mod_"
EXACT_PORTS = (
    "Seq_len_q",
    "Seq_len_kv",
    "Page_table_K",
    "Page_table_V",
    "Dropout_seed",
    "Dropout_offset",
    "Block_mask",
)
OFFSET_TYPES = (data_type.INT32, data_type.INT64)


@dataclasses.dataclass
class Recording:
    """What a node's score modifiers did, once: their operations, and for each the scores given and returned."""

    nodes: list[Node]
    ends: list[tuple[Tensor, Tensor]]

    def runner(self, tensors: Mapping[int, Any]) -> Modifiers:
        """The same for the reference formulas; ``tensors`` are the values of other tensors by ``id``."""
        values = dict(tensors)
        done: set[int] = set()

        def run(index: int, scores: Any) -> Any:
            start, end = self.ends[index]
            values[id(start)] = scores
            for node in self.nodes:
                ready = all(t.value is not None or id(t) in values for t in node.inputs.values())
                if id(node) not in done and ready:
                    results = run_node(node, lambda tensor: values[id(tensor)], scores.device)
                    values.update({id(tensor): results[port] for port, tensor in node.outputs.items()})
                    done.add(id(node))
            return values[id(end)].to(scores.dtype)

        return run


@dataclasses.dataclass(eq=False, kw_only=True)
class Attention(Node):
    """Attributes and inputs of both passes.

    Inputs: Q ``[b, h_q, s_q, d_qk]``, K ``[b, h_k, s_kv, d_qk]``, V ``[b, h_v, s_kv, d_v]``; optional Attn_scale (one
    element), Bias (broadcasts to ``[b, h_q, s_q, s_kv]``), Seq_len_q and Seq_len_kv (INT32 ``[b, 1, 1, 1]``), Sink
    (``[1, h_q, 1, 1]``), Page_table_K and Page_table_V (INT32 ``[b, 1, pages, 1]``; K or V are then containers of pages
    ``[pages, h, tokens, d]``), Dropout_seed and Dropout_offset (INT64, one element), or Dropout_mask, Dropout_scale and
    Dropout_scale_inv in their place. Inputs named ``Score_mod_0`` onwards are what the score modifiers use.
    """

    optional = frozenset(
        {"Attn_scale", "Bias", "Seq_len_q", "Seq_len_kv", "Sink", "Block_mask", "Page_table_K", "Page_table_V"}
    )
    fp8_ports: ClassVar[Sequence[str]] = ()  # inputs that are in fp8; none where all are in 16 bits

    attn_scale: float | None = None
    use_padding_mask: bool = False
    use_alibi_mask: bool = False
    diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT
    left_bound: int | None = None
    right_bound: int | None = None
    dropout_probability: float = 0.0
    paged_max_seq_len_kv: int | None = None
    score_mod: ScoreModifier | None = None
    implementation: attention_implementation = attention_implementation.AUTO

    recorded: Recording | None = dataclasses.field(default=None, init=False)

    @property
    def exact_ports(self) -> frozenset[str]:  # type: ignore[override]
        modifier_ports = (port for port in self.inputs if port.startswith(MODIFIER_PORT))
        return frozenset((*EXACT_PORTS, *modifier_ports))

    @property
    def pool_ports(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(port for port in "KV" if f"Page_table_{port}" in self.inputs)

    @property
    def functions(self) -> tuple[ScoreModifier | None, ...]:
        """The score modifiers, that of the forward pass first."""
        return (self.score_mod,)

    @property
    def bottom_right(self) -> bool:
        return self.diagonal_alignment == diagonal_alignment.BOTTOM_RIGHT

    @property
    def is_paged(self) -> bool:
        return "Page_table_K" in self.inputs or "Page_table_V" in self.inputs

    @property
    def is_ragged(self) -> bool:
        return any(tensor.ragged_offset is not None for tensor in (*self.inputs.values(), *self.outputs.values()))

    @property
    def has_dropout(self) -> bool:
        return self.dropout_probability > 0 or "Dropout_mask" in self.inputs

    @property
    def s_kv(self) -> int:
        """Number of keys: a dimension of K or V, or, where both are paged, what the call or another tensor says."""
        inputs, outputs = self.inputs, self.outputs
        if self.paged_max_seq_len_kv is not None and self.is_paged:
            return self.paged_max_seq_len_kv
        for port in ("K", "V"):
            if f"Page_table_{port}" not in inputs:
                return inputs[port].dim[2]
        for tensor in (inputs.get("Bias"), outputs.get("RNG_DUMP")):
            if tensor is not None and len(tensor.dim) == 4:
                return tensor.dim[3]
        return min(inputs[f"Page_table_{port}"].dim[2] * inputs[port].dim[2] for port in ("K", "V"))

    @property
    def score_dim(self) -> list[int]:
        """``[b, h_q, s_q, s_kv]``."""
        return [*self.inputs["Q"].dim[:3], self.s_kv]

    def rows(self, port: str) -> Tensor | None:
        return self.inputs.get("Seq_len_kv" if port in ("dK", "dV") else "Seq_len_q")

    @property
    def has_bounds(self) -> bool:
        return self.left_bound is not None or self.right_bound is not None

    def check_shapes(self) -> None:
        """Refuses inputs whose shapes do not fit each other."""
        self.rank_check((4,), "Q", "K", "V")
        q, k, v = (self.inputs[port].dim for port in "QKV")
        pages = [port for port in "KV" if f"Page_table_{port}" in self.inputs]
        fits = k[3] == q[3] and (len(pages) > 0 or k[2] == v[2])
        if not fits or any(self.inputs[port].dim[0] != q[0] for port in "KV" if port not in pages):
            raise make_error(
                ValueError,
                self.where,
                "Q, K and V",
                f"dim={q}, dim={k} and dim={v}",
                "[b, h_q, s_q, d_qk], [b, h_k, s_kv, d_qk] and [b, h_v, s_kv, d_v]",
                "give the logical shape batch, heads, sequence, head size; strides describe its layout in memory",
            )
        scores = self.score_dim
        for port in ("Bias", "Dropout_mask"):
            if port in self.inputs:
                self.check_shape(
                    port,
                    lambda dim: broadcast([dim, scores]) == scores and len(dim) == 4,
                    f"a shape that broadcasts to [b, h_q, s_q, s_kv] = {scores}",
                )
        one_each = [q[0], 1, 1, 1]
        for port in ("Seq_len_q", "Seq_len_kv"):
            if port in self.inputs:
                self.check_shape(port, lambda dim: dim == one_each, f"[b, 1, 1, 1] = {one_each}")
                self.check_integers(port, data_type.INT32)
        for port in pages:
            table = f"Page_table_{port}"
            self.check_shape(
                table,
                lambda dim: len(dim) == 4 and dim[0] == q[0] and dim[1] == dim[3] == 1,
                f"[b, 1, pages, 1] with b = {q[0]}",
            )
            self.check_integers(table, data_type.INT32)
        for port in ("Attn_scale", "Dropout_seed", "Dropout_offset", "Dropout_scale", "Dropout_scale_inv"):
            if port in self.inputs:
                self.check_shape(port, lambda dim: all(extent == 1 for extent in dim), "one element")
        if "Sink" in self.inputs:
            sink = [1, q[1], 1, 1]
            self.check_shape("Sink", lambda dim: dim == sink, f"[1, h_q, 1, 1] = {sink}")
        for tensor in (*self.inputs.values(), *self.outputs.values()):
            if tensor.ragged_offset is not None and tensor.dim:
                self._check_offsets(tensor, tensor.ragged_offset)

    def _check_offsets(self, tensor: Tensor, offset: Tensor) -> None:
        if offset.dim[:1] != [tensor.dim[0] + 1] or offset.data_type not in (*OFFSET_TYPES, data_type.NOT_SET):
            raise make_error(
                ValueError,
                self.where,
                f"ragged_offset of tensor {tensor.name!r}",
                f"{offset.data_type.name} dim={offset.dim}",
                f"INT32 or INT64 [b + 1, 1, 1, 1] = {[tensor.dim[0] + 1, 1, 1, 1]}",
                "pass the start of every entry in elements, and the end of the last one",
            )

    def check_integers(self, port: str, *dtypes: data_type) -> None:
        """Refuses an input of another type than the integers allowed."""
        tensor = self.inputs[port]
        if tensor.data_type not in (*dtypes, data_type.NOT_SET):
            raise make_error(
                ValueError,
                self.where,
                f"{port} (tensor {tensor.name!r})",
                tensor.data_type.name,
                " or ".join(dtype.name for dtype in dtypes),
                "convert it",
            )

    def check_shape(self, port: str, fits: Callable[[list[int]], bool], allowed: str) -> None:
        """Refuses an input or output that has a shape, but not a fitting one."""
        tensor = self.inputs.get(port) or self.outputs[port]
        if tensor.dim and not fits(tensor.dim):
            raise make_error(
                ValueError,
                self.where,
                f"{port} (tensor {tensor.name!r})",
                f"dim={tensor.dim}",
                allowed,
                "correct its shape",
            )

    def check_implementation(self, unsupported_reason: str) -> None:
        """Refuses an implementation that was asked for but cannot be used, cuDNN's one operation for a reason given."""
        if self.implementation is attention_implementation.UNIFIED and unsupported_reason:
            raise make_error(
                cudnnGraphNotSupportedError,
                self.where,
                "implementation",
                f"UNIFIED, but {unsupported_reason}",
                "AUTO or COMPOSITE",
                "leave it out",
            )
        if self.implementation is attention_implementation.FUSED:
            from cudnn.pygraph import fused_engine  # which loads PyTorch

            fused_engine.refuse(self)

    def attributes(self) -> dict[str, Any]:
        """As any node's; a function becomes its name, by which a restored graph can refuse to run without it."""
        fields = super().attributes()
        return {
            key: getattr(value, "__name__", repr(value)) if callable(value) else value for key, value in fields.items()
        }

    def check_functions(self) -> None:
        """Refuses to go on with the names of functions."""
        for function in self.functions:
            if isinstance(function, str):
                raise make_error(
                    cudnnGraphNotSupportedError,
                    self.where,
                    "score modifier",
                    f"the name of a Python function, {function!r}, from a serialized graph",
                    "the function",
                    "build the graph again with it, or restore its plan",
                )

    def record(self, context: Context) -> None:
        """Runs the score modifiers once, to learn what tensors they use and to refuse what they do wrong.

        What they use becomes inputs of the node. They run again when the node is lowered.
        """
        self.check_functions()
        modifiers = self.functions
        for port in [port for port in self.inputs if port.startswith(MODIFIER_PORT)]:
            del self.inputs[port]
        if not any(modifiers):
            return
        graph = ScoreGraph(self, context, 0)
        ends: list[tuple[Tensor, Tensor]] = []
        for modifier in modifiers:
            start = self.virtual_scores(context)
            ends.append((start, start if modifier is None else graph.called(modifier, start)))
        self.recorded = Recording(graph.nodes, ends)
        known = {id(start) for start, _ in ends}
        for node in graph.nodes:
            for tensor in node.inputs.values():
                if id(tensor) not in known and not (tensor.is_virtual and not tensor.dim):
                    self.inputs[f"{MODIFIER_PORT}{len(known) - len(ends)}"] = tensor
                    known.add(id(tensor))
            node.prepare(graph.context)
            known.update(id(tensor) for tensor in node.outputs.values())

    def virtual_scores(self, context: Context) -> Tensor:
        """A stand-in for the scores: virtual, row-major, in the graph's intermediate type."""
        dims = self.score_dim
        return Tensor(dims, row_major(dims), context.intermediate_data_type, is_virtual=True, name="scores")

    def masks(self, values: Mapping[str, Any]) -> Masks:
        """The same in the terms of the reference formulas."""
        self.check_functions()
        masks = Masks(
            scale=values.get("Attn_scale", self.attn_scale),
            bias=values.get("Bias"),
            alibi=self.use_alibi_mask,
            seq_len_q=values.get("Seq_len_q"),
            seq_len_kv=values.get("Seq_len_kv"),
            left_bound=self.left_bound,
            right_bound=self.right_bound,
            bottom_right=self.bottom_right,
            sink=values.get("Sink"),
        )
        if self.recorded is not None:
            masks.modifiers = self.recorded.runner(
                {id(tensor): values[port] for port, tensor in self.inputs.items() if port.startswith(MODIFIER_PORT)}
            )
        if "Dropout_mask" in values:
            masks.dropout = values["Dropout_mask"], values["Dropout_scale"]
        elif self.dropout_probability:
            keep = 1 - self.dropout_probability
            mask = random_mask(values["Dropout_seed"], values["Dropout_offset"], keep, self.score_dim)
            masks.dropout = mask.to(values["Q"].device), 1 / keep
        return masks

    def infer_extras(self) -> None:
        """Shapes and types of the dropout mask, and of the largest absolute values that the passes in fp8 have."""
        for port, tensor in self.outputs.items():
            if port == "RNG_DUMP":
                tensor.fill(self.score_dim)
            elif port.startswith("Amax"):
                tensor.fill([1, 1, 1, 1])
                if tensor.data_type is data_type.NOT_SET:
                    tensor.data_type = data_type.FLOAT

    def with_mask(self, results: dict[str, Any], masks: Masks) -> dict[str, Any]:
        """The results with the dropout mask, where it is wanted."""
        if "RNG_DUMP" in self.outputs and masks.dropout is not None:
            results["RNG_DUMP"] = masks.dropout[0]
        return results

    def dense(self, values: Mapping[str, Any], port: str) -> Any:
        """K or V ``[b, h, s_kv, d]`` for the reference formulas, gathered from its pages where it is paged."""
        table = values.get(f"Page_table_{port}")
        return values[port] if table is None else gathered(values[port], table, self.s_kv)

    def alibi(self, lowering: Lowering) -> Tensor | None:
        """The slopes of ALiBi, in the graph's part of the workspace."""
        if not self.use_alibi_mask:
            return None
        heads = self.score_dim[1]
        words = struct.unpack(f"{heads}i", struct.pack(f"{heads}f", *alibi_slopes(heads)))
        slopes = Tensor([1, heads, 1, 1], [heads, 1, 1, 1], data_type.FLOAT, name="ALiBi slopes")
        return lowering.scratch(slopes, 4 * heads, list(words))

    def lower(self, lowering: Lowering) -> None:
        support.check_types(self, *self.fp8_ports)
        self.apart(lowering).lower_apart(lowering)

    def lower_apart(self, lowering: Lowering) -> None:
        """Lowers the node, with a tensor for every input, of types that cuDNN computes."""
        raise NotImplementedError

    def apart(self: A, lowering: Lowering) -> A:
        """The node with a tensor for every input, where one tensor is passed twice: the same memory under several uids.

        Plans of cuDNN 9.19 with one uid for Q and V stop with a misaligned address on an H200.
        """
        inputs = dict(self.inputs)
        for port, tensor in self.inputs.items():
            first = next(other for other, candidate in self.inputs.items() if candidate is tensor)
            if port != first and not tensor.is_virtual:
                inputs[port] = Tensor.like(tensor, f"{tensor.name} as {port}")
                lowering.alias(inputs[port], tensor, axes=range(len(tensor.dim)))
        if inputs == self.inputs:
            return self
        node = copy.copy(self)
        node.inputs = inputs
        return node

    def transposed(self, lowering: Lowering, port: str) -> Tensor:
        """K or V described as ``[b, h, d, s]``, as cuDNN's patterns want it: the same memory under another uid.

        The user's tensor stays as it is, since it may appear again in the graph (as V, in another node).
        """
        tensor = self.inputs[port]
        if tensor.is_virtual:
            raise make_error(
                cudnnGraphNotSupportedError,
                self.where,
                f"input {port} (tensor {tensor.name!r})",
                "a virtual tensor",
                "a tensor in memory",
                "call set_output(True) on it and run attention as a separate graph",
            )
        view = swapped(tensor)
        lowering.alias(view, tensor, axes=[0, 1, 3, 2])
        return view


def swapped(tensor: Tensor) -> Tensor:
    """A description of the tensor with its last two dimensions exchanged."""
    return exchange(Tensor.like(tensor, f"{tensor.name} transposed"))


def exchange(tensor: Tensor) -> Tensor:
    """Exchanges the last two dimensions of a description."""
    for field in (tensor.dim, tensor.stride):
        field[2], field[3] = field[3], field[2]
    return tensor


class ScoreGraph(SubGraph[Tensor]):
    """The smaller operations that an attention node is made of; ``version`` is that of cuDNN."""

    def __init__(self, node: Attention, context: Context, version: int) -> None:
        super().__init__(dataclasses.replace(context, compute_data_type=node.compute_data_type))
        self.node = node
        self.version = version
        self.lengths = node.inputs.get("Seq_len_q"), node.inputs.get("Seq_len_kv")  # of the padding mask
        self.slopes: Tensor | None = None  # of ALiBi, FLOAT [1, h_q, 1, 1] in memory

    # Parts.
    def apply(self, steps: Sequence[Callable[[ScoreGraph, Tensor], Tensor]], scores: Tensor) -> Tensor:
        """Runs the steps one after the other."""
        for step in steps:
            scores = step(self, scores)
        return scores

    def scores(self, tensor: Tensor) -> Tensor:
        """Gives a result the row-major shape of the scores, whatever the strides of what it was made from."""
        dims = self.node.score_dim
        return tensor.set_dim(dims).set_stride(row_major(dims))

    def product(self, a: Tensor, b: Tensor, **lengths: Tensor | None) -> Tensor:
        """Matrix product; ``m``, ``n``, ``k`` are optional valid extents of each batch entry."""
        overrides = {f"override_{axis}": length for axis, length in lengths.items()}
        return self._add(Matmul, "", None, {"A": a, "B": b, **overrides}, ["C"]).outputs["C"]

    def reduced(self, x: Tensor, mode: reduction_mode) -> Tensor:
        """Reduction of the last dimension of a ``[b, h_q, s_q, .]`` tensor."""
        dims = [*self.node.score_dim[:3], 1]
        return self.reduction(x, mode).set_dim(dims).set_stride(row_major(dims))

    def into(self, tensor: Tensor) -> None:
        """Lets the last operation write a tensor that is there already."""
        (port,) = self.nodes[-1].outputs
        self.nodes[-1].outputs[port] = tensor

    def written(self, result: Tensor, target: Tensor | None) -> Tensor:
        """The result of the last operation, in ``target`` if it is passed."""
        if target is None:
            return result
        self.into(target)
        return target

    def called(self, modifier: ScoreModifier, scores: Tensor) -> Tensor:
        """What a user's function makes of the scores."""
        if not callable(modifier):
            allowed = "a function (graph, scores) that returns a cudnn.tensor"
            raise make_error(TypeError, self.node.where, "score_mod", repr(modifier), allowed)
        modified = modifier(self, scores)
        if not isinstance(modified, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise make_error(
                TypeError,
                self.node.where,
                "score_mod",
                f"a function that returned {type(modified).__name__}",
                "one that returns a cudnn.tensor",
                "return the result of its last operation",
            )
        return modified if modified is scores else self.scores(modified)

    @staticmethod
    def number(value: float) -> Tensor:
        """A FLOAT constant."""
        return Tensor.constant(value, data_type.FLOAT, 4)

    @staticmethod
    def integer(value: int) -> Tensor:
        """An INT32 constant."""
        return Tensor.constant(value, data_type.INT32, 4)

    def index(self, scores: Tensor, axis: int) -> Tensor:
        """Row (axis 2) or column (axis 3) of each score."""
        return self.scores(self.gen_index(scores, axis, data_type.INT32)).set_data_type(data_type.INT32)

    def where(self, scores: Tensor, keep: Tensor) -> Tensor:
        """Scores where ``keep`` is true, else -inf."""
        self.scores(keep).set_data_type(data_type.BOOLEAN)
        return self.scores(self.binary_select(scores, self.number(float("-inf")), keep))

    def at_most(self, scores: Tensor, bound: float) -> Tensor:
        """The smaller of each score and the bound."""
        return self.scores(self.min(scores, self.number(bound)))

    def softmax(self, scores: Tensor, sink: Tensor | None, outputs: Mapping[str, Tensor]) -> Tensor:
        """cuDNN's softmax operation; ``outputs`` (Stats, Max, Sum_exp) are written too."""
        node = self._add(Softmax, "", None, {"X": scores, "Sink": sink}, ["Y"])
        node.outputs.update(outputs)
        return self.scores(node.outputs["Y"])

    def small_softmax(self, scores: Tensor, sink: Tensor | None, outputs: Mapping[str, Tensor]) -> Tensor:
        """The same in smaller operations, for versions of cuDNN without one for it."""
        largest = self.reduced(scores, reduction_mode.MAX)
        if sink is not None:
            largest = self.max(largest, sink)
        largest = self.written(largest, outputs.get("Max"))
        powers = self.scores(self.exp(self.scores(self.sub(scores, largest))))
        total = self.reduced(powers, reduction_mode.ADD)
        if sink is not None:
            total = self.add(total, self.exp(self.sub(sink, largest)))
        total = self.written(total, outputs.get("Sum_exp"))
        if not ("Max" in outputs or "Sum_exp" in outputs) or "Stats" in outputs:
            # Also where no operation reads them: the engines match a softmax with statistics only.
            self.written(self.add(self.log(total), largest), outputs.get("Stats"))
        return self.scores(self.div(powers, total))

    def pages(self, port: str, transposed: bool) -> Tensor:
        """K or V, gathered from its pages: ``[b, h, s_kv, d]``, or ``[b, h, d, s_kv]`` over the same strides."""
        node = self.node
        container, length = node.inputs[port], self.lengths[1]
        heads, size = container.dim[1], container.dim[3]
        inputs = {"Container": container, "Page_table": node.inputs[f"Page_table_{port}"], "Sequence": length}
        out = self._add(PagedCacheLoad, "", None, inputs, ["Y"]).outputs["Y"]
        dims = [node.score_dim[0], heads, node.s_kv, size]
        out.set_dim(dims).set_stride(row_major(dims)).set_data_type(container.data_type)
        return exchange(out) if transposed else out

    def random_mask(self, probability: float) -> Tensor:
        """1 with this probability and else 0, for every score; into the tensor that the user gave for it."""
        inputs = {"Seed": self.node.inputs["Dropout_seed"], "Offset": self.node.inputs["Dropout_offset"]}
        node = self._add(RandomMask, "", None, inputs, ["Y"], probability=probability)
        return self.scores(self.written(node.outputs["Y"], self.node.outputs.get("RNG_DUMP")))

    def dropped(self, weights: Tensor) -> Tensor:
        """Dropout: with a random mask, or with the mask and scale that the user gave."""
        node = self.node
        if node.dropout_probability:
            mask = self.random_mask(1 - node.dropout_probability)
            kept = self.scores(self.mul(weights, mask))
            return self.scores(self.mul(kept, self.number(1 / (1 - node.dropout_probability))))
        if "Dropout_mask" in node.inputs:
            scaled = self.scores(self.mul(weights, node.inputs["Dropout_scale"]))
            return self.scores(self.mul(scaled, node.inputs["Dropout_mask"]))
        return weights

    def heads_summed(self, x: Tensor, dim: Sequence[int]) -> Tensor:
        """The sum of the gradients of the heads of Q that share one of K or V."""
        node = self._add(HeadReduction, "", None, {"X": x}, ["Y"], mode=reduction_mode.ADD)
        return node.outputs["Y"].set_dim(dim).set_stride(row_major(dim))

    # Steps.
    def scaled(self, scores: Tensor) -> Tensor:
        """The attention scale."""
        scale = self.node.inputs.get("Attn_scale")
        if scale is None and self.node.attn_scale is not None:
            scale = self.number(self.node.attn_scale)
        return scores if scale is None else self.scores(self.mul(scores, scale))

    def biased(self, scores: Tensor) -> Tensor:
        """The additive bias."""
        bias = self.node.inputs.get("Bias")
        return scores if bias is None else self.scores(self.add(scores, bias))

    # Parts of what is in fp8.
    def times(self, x: Tensor, *ports: str) -> Tensor:
        """``x`` times the node's inputs of these ports, one after the other."""
        for port in ports:
            product = self.mul(x, self.node.inputs[port])
            x = product.set_dim(x.dim).set_stride(x.stride) if x.dim else product
        return x

    def amax(self, x: Tensor, port: str) -> None:
        """Writes the largest absolute value of ``x`` to an output of the node."""
        self.reduction(x, reduction_mode.AMAX)
        self.into(self.node.outputs[port])

    def descaled(self, scores: Tensor) -> Tensor:
        """The scales of Q and K in fp8."""
        return self.times(scores, "Descale_q", "Descale_k")

    def modified(self, scores: Tensor) -> Tensor:
        """The user's own function."""
        return scores if self.node.score_mod is None else self.called(self.node.score_mod, scores)

    def with_alibi(self, scores: Tensor) -> Tensor:
        """ALiBi: the distance of column from row, times a slope for each head."""
        if self.slopes is None:
            return scores
        distance = self.integers("SUB", self.index(scores, 3), self.index(scores, 2))
        return self.scores(self.add(scores, self.scores(self.mul(distance, self.slopes))))

    def padded(self, scores: Tensor) -> Tensor:
        """The mask of rows and columns beyond the sequence lengths."""
        seq_len_q, seq_len_kv = self.lengths
        if seq_len_q is None or seq_len_kv is None:
            return scores
        boolean = data_type.BOOLEAN
        row_valid = self.cmp_lt(self.index(scores, 2), seq_len_q, boolean).set_data_type(boolean)
        column_valid = self.cmp_lt(self.index(scores, 3), seq_len_kv, boolean).set_data_type(boolean)
        keep = self.logical_and(self.scores(row_valid), self.scores(column_valid), boolean)
        return self.where(scores, keep)

    def right_bounded(self, scores: Tensor) -> Tensor:
        """The mask right of the diagonal: the column is at most row + s_kv - s_q (bottom right only) + right bound."""
        shift = self.node.right_bound
        if shift is None:
            return scores
        seq_len_q, seq_len_kv = self.ends if self.node.bottom_right else (None, None)
        right = self.integer(shift) if shift else None
        if self.version >= BAND_MASK_SINCE:
            lengths = {"Seq_len_q": seq_len_q, "Seq_len_kv": seq_len_kv}
            return self.banded("CMP_GE", scores, {**lengths, "Shift_right": right})
        diagonal = self.index(scores, 2)
        if seq_len_q is not None and seq_len_kv is not None:
            diagonal = self.integers("SUB", self.integers("ADD", diagonal, seq_len_kv), seq_len_q)
        if right is not None:
            diagonal = self.integers("ADD", diagonal, right)
        return self.where(scores, self.cmp_ge(diagonal, self.index(scores, 3), data_type.BOOLEAN))

    def left_bounded(self, scores: Tensor) -> Tensor:
        """The mask left of the window: column + left bound - s_kv + s_q (bottom right only) is greater than the row."""
        width = self.node.left_bound
        if width is None:
            return scores
        seq_len_q, seq_len_kv = self.lengths if self.node.bottom_right else (None, None)
        if self.node.bottom_right and seq_len_q is None:
            s_q, s_kv = self.node.score_dim[2:]
            width += s_q - s_kv
        # cuDNN's attention engines match a FLOAT bound, save where sequence lengths are subtracted from it.
        left = self.number(width) if seq_len_q is None else self.integer(width)
        if self.version >= BAND_MASK_SINCE:
            return self.banded("CMP_GT", scores, {"Seq_len_q": seq_len_q, "Seq_len_kv": seq_len_kv, "Left": left})
        shifted = self.integers("ADD", self.index(scores, 3), left)
        if seq_len_q is not None and seq_len_kv is not None:
            shifted = self.integers("ADD", self.integers("SUB", shifted, seq_len_kv), seq_len_q)
        return self.where(scores, self.cmp_gt(shifted, self.index(scores, 2), data_type.BOOLEAN))

    # Parts of the masks.
    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Where the bottom-right diagonal ends: at the lengths of the padding mask, else at the tensor's."""
        seq_len_q, seq_len_kv = self.lengths
        if seq_len_q is not None and seq_len_kv is not None:
            return seq_len_q, seq_len_kv
        s_q, s_kv = self.node.score_dim[2:]
        return self.integer(s_q), self.integer(s_kv)

    def banded(self, comparison: str, scores: Tensor, bounds: Mapping[str, Tensor | None]) -> Tensor:
        """cuDNN's band mask operation."""
        inputs = {"X": scores, "Fill": self.number(float("-inf")), **bounds}
        return self._add(DiagonalBandMask, "", None, inputs, ["Y"], comparison=comparison).outputs["Y"]

    def integers(self, mode: str, index: Tensor, other: Tensor) -> Tensor:
        """Index arithmetic, in the type of a constant operand."""
        dtype = other.data_type if other.value is not None else data_type.INT32
        operation = self.add if mode == "ADD" else self.sub
        return self.scores(operation(index, other, dtype)).set_data_type(dtype)
