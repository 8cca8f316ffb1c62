"""Attention problems for tests: graphs for them, and their solution in PyTorch, sharing no code with the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

import cudnn
from cudnn.datatypes import _cudnn_to_torch_data_type
from support.dense_attention import attend, band, slopes
from support.fuzz.harness import Memory
from support.graphs import FLOAT, HALF, MODES, like, packed, reference_graph

INT32, BOOLEAN = cudnn.data_type.INT32, cudnn.data_type.BOOLEAN
CAP, FAR = 3.0, -1e30


@dataclass
class Problem:
    """One attention problem: shapes and features.

    Attributes:
        lengths_q, lengths_kv: Of a padding mask.
        options: Arguments of both passes as they are.
        dropout: Probability; the sampled mask is the output RNG_DUMP.
        own_mask: Dropout by a mask and a scale of the caller's.
        statistics: Outputs Max and Sum_exp too.
        modifier: A function of the scores, by its name in ``MODIFIERS``.
        ragged: Only the valid rows are in memory, one batch entry after the other.
        page: Tokens of a page, where K and V are paged; else 0. ``packed``: the tables have no gaps.
        blocks: A mask of tiles of 128 rows and 128 columns.
    """

    b: int = 2
    h_q: int = 4
    h_k: int = 2
    h_v: int = 2
    s_q: int = 192
    s_kv: int = 192
    d_qk: int = 64
    d_v: int = 64
    scale: float | None = 0.15
    bias: tuple[int, ...] = ()
    lengths_q: tuple[int, ...] = ()
    lengths_kv: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    dropout: float = 0.0
    own_mask: bool = False
    sink: bool = False
    statistics: bool = False
    modifier: str = ""
    ragged: bool = False
    page: int = 0
    packed: bool = False
    blocks: bool = False

    @property
    def left(self) -> int | None:
        names = ("sliding_window_length", "diagonal_band_left_bound", "left_bound")
        return next((self.options[name] for name in names if name in self.options), None)

    @property
    def right(self) -> int | None:
        causal = self.options.get("use_causal_mask") or self.options.get("use_causal_mask_bottom_right")
        return 0 if causal else self.options.get("diagonal_band_right_bound")

    @property
    def bottom_right(self) -> bool:
        alignment = self.options.get("diagonal_alignment")
        return bool(self.options.get("use_causal_mask_bottom_right")) or (
            alignment is not None and alignment.name == "BOTTOM_RIGHT"
        )

    def rows(self, entry: int) -> int:
        return self.lengths_q[entry] if self.lengths_q else self.s_q

    def columns(self, entry: int) -> int:
        return self.lengths_kv[entry] if self.lengths_kv else self.s_kv

    def visible(self) -> torch.Tensor:
        """``[b, 1, s_q, s_kv]``."""
        seen = torch.zeros(self.b, 1, self.s_q, self.s_kv, dtype=torch.bool)
        left = None if self.left is None else self.left - 1
        for entry in range(self.b):
            rows, columns = self.rows(entry), self.columns(entry)
            seen[entry, 0, :rows, :columns] = band(rows, columns, left, self.right, self.bottom_right)
        return seen

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Random q, k, v and dO (batch, sequence, heads, size in memory), bias if the problem has one."""

        def random(heads: int, sequence: int, size: int) -> torch.Tensor:
            return torch.randn(self.b, sequence, heads, size, device=device).to(dtype).transpose(1, 2)

        made = {
            "q": random(self.h_q, self.s_q, self.d_qk),
            "k": random(self.h_k, self.s_kv, self.d_qk),
            "v": random(self.h_v, self.s_kv, self.d_v),
            "dO": random(self.h_q, self.s_q, self.d_v),
        }
        if self.bias:
            made["bias"] = torch.randn(self.bias, device=device).to(dtype)
        if self.sink:
            made["sink"] = torch.randn(1, self.h_q, 1, 1, device=device)
        if self.own_mask:
            made["mask"] = (torch.rand(self.b, self.h_q, self.s_q, self.s_kv, device=device) < 0.5).to(dtype)
        if self.blocks:
            tiles = -(-self.s_q // 128), -(-self.s_kv // 128)
            made["block_mask"] = torch.randint(
                1, 256, (self.b, self.h_q, tiles[0], -(-tiles[1] // 8)), dtype=torch.uint8, device=device
            )
        return made

    def tiles(self, block_mask: torch.Tensor) -> torch.Tensor:
        """``[b, h_q, s_q, s_kv]``: the tiles that take part, one at a time."""
        seen = torch.zeros(self.b, self.h_q, self.s_q, self.s_kv, dtype=torch.bool)
        for entry, head, row, byte in torch.cartesian_prod(*(torch.arange(n) for n in block_mask.shape)).tolist():
            for bit in range(8):
                column = 128 * (8 * byte + bit)
                keep = bool(int(block_mask[entry, head, row, byte]) >> bit & 1)
                seen[entry, head, 128 * row : 128 * (row + 1), column : column + 128] = keep
        return seen

    def lengths(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """seq_len_q and seq_len_kv."""
        if not self.lengths_q:
            return {}
        pairs = {"seq_len_q": self.lengths_q, "seq_len_kv": self.lengths_kv}
        return {
            name: torch.tensor(ends, dtype=torch.int32, device=device).view(-1, 1, 1, 1) for name, ends in pairs.items()
        }

    def valid(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Which rows of a tensor of Q's, or of K's, sequence length count, as ``[b, 1, s, 1]``."""
        rows = torch.tensor([self.rows(entry) for entry in range(self.b)], device=device).view(-1, 1, 1, 1)
        columns = torch.tensor([self.columns(entry) for entry in range(self.b)], device=device).view(-1, 1, 1, 1)
        return {
            "q": torch.arange(self.s_q, device=device).view(1, 1, -1, 1) < rows,
            "kv": torch.arange(self.s_kv, device=device).view(1, 1, -1, 1) < columns,
        }


@dataclass
class Modifier:
    """A function of the scores for the graph and for PyTorch, and its gradient for the graph; ``cap``: a constant."""

    forward: Callable[..., cudnn.tensor]
    backward: Callable[..., cudnn.tensor]
    formula: Callable[[torch.Tensor], torch.Tensor]


def softcap(cap: cudnn.tensor) -> Modifier:
    """``cap * tanh(scores / cap)``."""
    kept: list[cudnn.tensor] = []

    def forward(graph: Any, scores: cudnn.tensor) -> cudnn.tensor:
        kept[:] = [graph.div(scores, cap)]
        return graph.mul(graph.tanh(kept[0]), cap)

    def backward(graph: Any, gradient: cudnn.tensor) -> cudnn.tensor:
        return graph.tanh_backward(gradient, kept[0])

    return Modifier(forward, backward, lambda x: CAP * torch.tanh(x / CAP))


def own_causal(far: cudnn.tensor) -> Modifier:
    """A causal mask made of the indices of the scores."""

    def forward(graph: Any, scores: cudnn.tensor) -> cudnn.tensor:
        row, column = (graph.gen_index(scores, axis, compute_data_type=INT32).set_data_type(INT32) for axis in (2, 3))
        keep = graph.cmp_ge(row, column, compute_data_type=BOOLEAN).set_data_type(BOOLEAN)
        return graph.binary_select(scores, far, keep)

    def formula(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.ones_like(x, dtype=torch.bool).tril(), x, max(FAR, torch.finfo(x.dtype).min))

    return Modifier(forward, lambda graph, gradient: gradient, formula)


MODIFIERS = {"softcap": (softcap, CAP), "own causal": (own_causal, FAR)}


def attention(problem: Problem, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """O, Stats, Max, Sum_exp, dQ, dK, dV, dBias, dSink, in ``dtype`` by matrix products, softmax and autograd.

    ``tensors`` has the mask of dropout, if any, as ``mask``.
    """
    leaves = {
        name: x.detach().to(dtype).clone().requires_grad_()
        for name, x in tensors.items()
        if name in ("q", "k", "v", "bias", "sink")
    }
    q = leaves["q"]
    bias = leaves["bias"] if problem.bias else 0.0
    if problem.options.get("use_alibi_mask"):
        distance = torch.arange(problem.s_kv) - torch.arange(problem.s_q).unsqueeze(1)
        bias = bias + (slopes(problem.h_q).view(-1, 1, 1) * distance).to(q)
    visible = problem.visible()
    if problem.blocks:
        visible = visible & problem.tiles(tensors["block_mask"])
    kept = tensors["mask"].to(dtype) / (1 - (problem.dropout or OWN_DROPOUT)) if "mask" in tensors else 1.0
    modify = MODIFIERS[problem.modifier][0](cudnn.tensor()).formula if problem.modifier else None
    o, *statistics, _ = attend(
        q,
        leaves["k"],
        leaves["v"],
        visible.to(q.device),
        scale=1.0 if problem.scale is None else problem.scale,
        modify=modify,
        bias=bias,
        sink=leaves.get("sink"),
        kept=kept,
    )
    stats, largest = (x.unsqueeze(-1) for x in statistics)
    named = {"q": "dQ", "k": "dK", "v": "dV", "bias": "dBias", "sink": "dSink"}
    valid = problem.valid(str(q.device))["q"]
    gradients = torch.autograd.grad(o, list(leaves.values()), torch.where(valid, tensors["dO"].to(dtype), 0.0))
    actual = {"O": o, "Stats": stats, "Max": largest, "Sum_exp": torch.exp(stats - largest).nan_to_num(0.0)}
    return {name: x.detach() for name, x in actual.items()} | {
        named[name]: gradient for name, gradient in zip(leaves, gradients, strict=True)
    }


OWN_DROPOUT = 0.5  # exact in FLOAT, and its inverse too
BOTTOM_RIGHT = cudnn.diagonal_alignment.BOTTOM_RIGHT
CASES = {
    "plain": Problem(),
    "one head of K and V": Problem(h_k=1, h_v=1),
    "as many heads": Problem(h_k=4, h_v=4),
    "fewer heads of V than of K": Problem(h_k=4, h_v=2),
    "odd lengths": Problem(s_q=131, s_kv=259),
    "d_v smaller": Problem(d_qk=192, d_v=128),
    "head size 128": Problem(d_qk=128, d_v=128),
    "no scale": Problem(scale=None, d_qk=32, d_v=32),
    "causal": Problem(s_kv=200, options={"use_causal_mask": True}),
    "causal, s_q > s_kv": Problem(s_q=200, s_kv=136, options={"use_causal_mask": True}),
    "causal bottom right": Problem(s_q=136, s_kv=200, options={"use_causal_mask_bottom_right": True}),
    "right bound": Problem(options={"diagonal_band_right_bound": 5}),
    "right bound bottom right": Problem(
        s_q=128, s_kv=200, options={"diagonal_band_right_bound": 9, "diagonal_alignment": BOTTOM_RIGHT}
    ),
    "left bound": Problem(options={"diagonal_band_left_bound": 40}),
    "sliding window": Problem(options={"use_causal_mask": True, "sliding_window_length": 40}),
    "sliding window bottom right": Problem(
        s_q=136, s_kv=200, options={"use_causal_mask_bottom_right": True, "diagonal_band_left_bound": 40}
    ),
    "padding": Problem(s_q=130, s_kv=200, lengths_q=(77, 130), lengths_kv=(128, 33)),
    "padding, causal": Problem(s_kv=200, lengths_q=(77, 192), lengths_kv=(200, 199), options={"use_causal_mask": True}),
    "padding, causal bottom right": Problem(
        s_kv=200, lengths_q=(77, 120), lengths_kv=(200, 133), options={"use_causal_mask_bottom_right": True}
    ),
    "padding, sliding window bottom right": Problem(
        s_kv=200,
        lengths_q=(77, 120),
        lengths_kv=(200, 133),
        options={"use_causal_mask_bottom_right": True, "diagonal_band_left_bound": 30},
    ),
    "bias": Problem(bias=(1, 4, 192, 192)),
    "bias for each batch entry": Problem(bias=(2, 1, 192, 192)),
    "bias, causal": Problem(bias=(1, 4, 192, 192), options={"use_causal_mask": True}),
    "bias, padding": Problem(bias=(1, 4, 192, 192), lengths_q=(77, 192), lengths_kv=(128, 33)),
    "ALiBi, causal": Problem(options={"use_alibi_mask": True, "use_causal_mask": True}),
    "ALiBi of three heads": Problem(h_q=3, h_k=1, h_v=1, options={"use_alibi_mask": True, "use_causal_mask": True}),
    "dropout": Problem(dropout=0.25),
    "dropout, causal": Problem(dropout=0.25, options={"use_causal_mask": True}),
    "dropout, padding, bias": Problem(dropout=0.4, bias=(1, 4, 192, 192), lengths_q=(77, 192), lengths_kv=(128, 33)),
    "a dropout mask": Problem(own_mask=True),
    "sink": Problem(sink=True),
    "sink, causal": Problem(sink=True, options={"use_causal_mask": True}),
    "sink, padding": Problem(sink=True, lengths_q=(77, 192), lengths_kv=(128, 33)),
    "statistics": Problem(statistics=True),
    "softcap": Problem(modifier="softcap"),
    "a causal mask as score modifier": Problem(modifier="own causal"),
    "ragged": Problem(ragged=True, s_kv=200, lengths_q=(77, 192), lengths_kv=(200, 33)),
    "ragged, causal": Problem(
        ragged=True, lengths_q=(192, 60), lengths_kv=(192, 60), options={"use_causal_mask": True}
    ),
    "ragged, sliding window": Problem(
        ragged=True,
        lengths_q=(77, 192),
        lengths_kv=(77, 192),
        options={"use_causal_mask": True, "sliding_window_length": 40},
    ),
    "paged": Problem(page=64, lengths_q=(77, 192), lengths_kv=(128, 190)),
    "paged, causal": Problem(page=64, lengths_q=(77, 192), lengths_kv=(128, 192), options={"use_causal_mask": True}),
    "paged, packed tables": Problem(page=64, packed=True, lengths_q=(77, 192), lengths_kv=(60, 190)),
    "paged, one query": Problem(page=64, s_q=1, lengths_q=(1, 1), lengths_kv=(128, 190)),
    "ragged queries, paged": Problem(ragged=True, page=64, lengths_q=(77, 192), lengths_kv=(128, 190)),
}
DROPOUT_CASES = [name for name, problem in CASES.items() if problem.dropout]
BACKWARD_CASES = [name for name, problem in CASES.items() if problem.h_k == problem.h_v and not problem.page]


def _offsets(lengths: Sequence[int], step: int, device: Any = "cpu") -> torch.Tensor:
    """Where each batch entry starts, and where the last one ends, ``[b + 1, 1, 1, 1]``."""
    return torch.tensor([0, *accumulate(step * n for n in lengths)], dtype=torch.int32, device=device).view(-1, 1, 1, 1)


def _rows(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The valid rows of ``[b, h, s, d]`` one after the other, ``[rows, h, d]``."""
    return torch.cat([entry[:, :length].transpose(0, 1) for entry, length in zip(x, lengths, strict=True)])


class Described:
    """A graph with attention in it: the data of its inputs, and its outputs by name.

    ``lengths`` has the rows of each batch entry of the outputs that are ragged.
    """

    def __init__(self, graph: cudnn.pygraph, problem: Problem, device: torch.device) -> None:
        self.graph, self.problem, self.device = graph, problem, device
        self.inputs: dict[cudnn.tensor, torch.Tensor] = {}
        self.outputs: dict[str, cudnn.tensor] = {}
        self.lengths: dict[str, Sequence[int]] = {}
        self._offsets: dict[tuple[Any, ...], cudnn.tensor] = {}

    # Inputs.
    def tensor(self, name: str, data: torch.Tensor) -> cudnn.tensor:
        made = like(self.graph, data, name)
        self.inputs[made] = data
        return made

    def number(self, value: float) -> cudnn.tensor:
        """A FLOAT of one element, passed by value."""
        made = self.graph.tensor([1] * 4, [1] * 4, FLOAT, is_pass_by_value=True)
        self.inputs[made] = torch.full((1, 1, 1, 1), value)
        return made

    def rows(self, name: str, data: torch.Tensor, lengths: Sequence[int]) -> cudnn.tensor:
        """Q, K, V, O or Stats, ragged if the problem is ragged."""
        if not self.problem.ragged:
            return self.tensor(name, data)
        made = self.graph.tensor(list(data.shape), [1] * 4, data.dtype, name=name)
        self._make_ragged(made, lengths)
        self.inputs[made] = data if data.is_meta else _rows(data, lengths)
        return made

    def _make_ragged(self, tensor: cudnn.tensor, lengths: Sequence[int]) -> None:
        _, heads, rows, size = tensor.get_dim()
        tensor.set_stride([rows * heads * size, size, heads * size, 1])
        key = (*lengths, heads * size)
        if key not in self._offsets:
            self._offsets[key] = self.tensor("offsets", _offsets(lengths, heads * size, self.device))
        tensor.set_ragged_offset(self._offsets[key])

    def pages(self, name: str, data: torch.Tensor, lengths: Sequence[int]) -> dict[str, cudnn.tensor]:
        """K or V cut into pages that lie in any order, and the table that finds them."""
        page = self.problem.page
        count = -(-data.shape[2] // page)
        whole = torch.nn.functional.pad(data, (0, 0, 0, count * page - data.shape[2]))
        numbers = torch.randperm(len(data) * count, device=self.device).int()
        container = torch.empty(
            len(data) * count, data.shape[1], page, data.shape[3], dtype=data.dtype, device=data.device
        )
        if not data.is_meta:
            container[numbers.long()] = whole.unflatten(2, (count, page)).transpose(1, 2).flatten(0, 1)
        table = numbers.view(len(data), 1, count, 1)
        used = [-(-length // page) for length in lengths]
        made = self.tensor(f"pages of {name}", table)
        if self.problem.packed:
            made.set_ragged_offset(self.tensor("offsets of pages", _offsets(used, 1, self.device)))
            self.inputs[made] = _rows(table, used)
        return {name: self.tensor(name, container), f"paged_attention_{name}_table": made}

    # Outputs.
    def output(self, name: str, dim: Sequence[int], dtype: Any) -> cudnn.tensor:
        """An output that the caller makes."""
        self.outputs[name] = self.graph.tensor(list(dim), packed(*dim), dtype, name=name)
        return self.outputs[name]

    def give(self, name: str, tensor: cudnn.tensor, dim: Sequence[int], lengths: Sequence[int]) -> None:
        """A real output of the method, ragged if the problem is ragged."""
        self.outputs[name] = tensor.set_output(True)
        if self.problem.ragged:
            self.lengths[name] = lengths
            self._make_ragged(tensor.set_dim(list(dim)), lengths)

    def give_largest(self, tensors: Sequence[Any], *names: str) -> None:
        """The further outputs of the fp8 methods."""
        self.outputs |= {f"Amax_{name}": x.set_output(True) for name, x in zip(names, tensors, strict=False)}

    def run(self) -> dict[str, torch.Tensor]:
        """Builds and executes the graph; nothing may be written outside the outputs and the workspace.

        Rows that a ragged output leaves out are 0 in what is returned.
        """
        self.graph.build(MODES)
        memory: dict[str, Memory] = {}
        for name, tensor in self.outputs.items():
            dim, stride = tensor.get_dim(), tensor.get_stride()
            count = 1 + sum((extent - 1) * step for extent, step in zip(dim, stride, strict=True))
            if name in self.lengths:
                count = sum(self.lengths[name]) * dim[1] * dim[3]
            kind = _cudnn_to_torch_data_type(tensor.get_data_type())
            memory[name] = Memory(count, kind, self.device)
        workspace = Memory(self.graph.get_workspace_size(), torch.uint8, self.device)
        pack = {tensor: memory[name].elements for name, tensor in self.outputs.items()}
        self.graph.execute({**self.inputs, **pack}, workspace.elements)
        assert workspace.guards_hold(), "wrote outside the workspace"
        actual: dict[str, torch.Tensor] = {}
        for name, tensor in self.outputs.items():
            assert memory[name].guards_hold(), f"wrote outside {name}"
            actual[name] = self._dense(name, tensor, memory[name].elements)
        return actual

    def _dense(self, name: str, tensor: cudnn.tensor, elements: torch.Tensor) -> torch.Tensor:
        if name not in self.lengths:
            return elements.as_strided(tensor.get_dim(), tensor.get_stride())
        _, heads, _, size = dim = tensor.get_dim()
        whole = torch.zeros(dim, dtype=elements.dtype, device=elements.device)
        entries = elements.view(-1, heads, size).split(list(self.lengths[name]))
        for entry, rows in zip(whole, entries, strict=True):
            entry[:, : len(rows)] = rows.transpose(0, 1)
        return whole


def describe(
    graph: cudnn.pygraph,
    problem: Problem,
    data: dict[str, torch.Tensor],
    scale: torch.Tensor | None = None,
    stats: bool = True,
    factors: dict[str, torch.Tensor] | None = None,
    **options: Any,
) -> Described:
    """The backward pass where ``data`` has O and Stats, else the forward pass. ``scale`` replaces the number.

    ``factors``: the per-tensor scales of fp8 tensors, by the names of the call's arguments.
    """
    device = data["q"].device
    described = Described(graph, problem, torch.device("cpu") if device.type == "meta" else device)
    rows = [problem.rows(entry) for entry in range(problem.b)]
    columns = [problem.columns(entry) for entry in range(problem.b)]
    backward = "Stats" in data
    arguments: dict[str, Any] = {**problem.options, **options, "name": "attention", "attn_scale": problem.scale}
    if scale is not None:
        arguments["attn_scale"] = graph.tensor_like(scale, "scale")
        described.inputs[arguments["attn_scale"]] = scale
    arguments["q"] = described.rows("q", data["q"], rows)
    for name in "kv":
        if problem.page:
            arguments |= described.pages(name, data[name], columns)
        else:
            arguments[name] = described.rows(name, data[name], columns)
    if problem.page:
        arguments["paged_attention_max_seq_len_kv"] = problem.s_kv
    arguments |= {name: described.tensor(name, value.to(described.device)) for name, value in (factors or {}).items()}
    arguments |= {name: described.tensor(name, data[name]) for name in ("bias", "block_mask") if name in data}
    if problem.lengths_q:
        lengths = problem.lengths(str(described.device))
        arguments |= {
            "use_padding_mask": True,
            **{name: described.tensor(name, value) for name, value in lengths.items()},
        }
    if problem.sink:
        arguments["sink_token"] = described.tensor("sink", data["sink"])
    if problem.own_mask:
        numbers = (1 / (1 - OWN_DROPOUT), 1 - OWN_DROPOUT)[: 1 + backward]
        scales = (described.tensor("factor", torch.full((1, 1, 1, 1), x, device=described.device)) for x in numbers)
        arguments["dropout"] = (described.tensor("mask", data["mask"]), *scales)
    elif problem.dropout:
        seeds = (
            described.tensor(name, torch.full((1, 1, 1, 1), value, device=described.device))
            for name, value in (("seed", 1234567), ("offset", 89))
        )
        arguments["dropout"] = (problem.dropout, *seeds)
        if not (backward and factors):
            arguments["rng_dump"] = described.output(
                "RNG_DUMP", [problem.b, problem.h_q, problem.s_q, problem.s_kv], FLOAT
            )
    if problem.modifier:
        make, value = MODIFIERS[problem.modifier]
        modifier = make(described.number(value))
        arguments["score_mod"] = modifier.forward
        if backward:
            arguments["score_mod_bprop"] = modifier.backward
    if backward:
        if problem.bias:
            arguments["dBias"] = described.output("dBias", data["bias"].shape, data["bias"].dtype)
        if problem.sink:
            arguments["dSink_token"] = described.output("dSink", data["sink"].shape, FLOAT)
        given = (("o", "O"), ("dO", "dO"), ("stats", "Stats"))
        arguments |= {name: described.rows(name, data[port], rows) for name, port in given}
        call = graph.sdpa_fp8_backward if factors else graph.sdpa_backward
        gradients = call(**arguments)
        for name, gradient in zip("qkv", gradients[:3], strict=True):
            described.give(f"d{name.upper()}", gradient, data[name].shape, rows if name == "q" else columns)
        described.give_largest(gradients[3:], "dQ", "dK", "dV", "dP")
    else:
        shape = [problem.b, problem.h_q, problem.s_q, 1]
        if problem.statistics:
            arguments |= {
                "score_max": described.output("Max", shape, FLOAT),
                "score_sum_exp": described.output("Sum_exp", shape, FLOAT),
            }
        o, statistics, *largest = (graph.sdpa_fp8 if factors else graph.sdpa)(**arguments, generate_stats=stats)
        assert o is not None
        described.give("O", o, [*shape[:3], problem.d_v], rows)
        if statistics is not None:
            described.give("Stats", statistics, shape, rows)
        described.give_largest(largest, "S", "O")
    return described


def backward_data(problem: Problem, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The forward pass's data with O and Stats of the right shape, for graphs that are built but not run."""
    o = torch.empty_like(data["dO"], dtype=data["q"].dtype)
    return {**data, "O": o, "Stats": torch.empty(*o.shape[:3], 1, device=o.device)}


def small(graph: cudnn.pygraph, s_q: int = 64, s_kv: int = 64, d: int = 64, kind: Any = HALF) -> list[cudnn.tensor]:
    """q, k, v with batch and sequence before heads in memory."""
    shapes = [[2, 4, s_q, d], [2, 2, s_kv, d], [2, 2, s_kv, d]]
    return [graph.tensor(dim, [dim[1] * dim[2] * d, d, dim[1] * d, 1], kind) for dim in shapes]


def checked(graph: cudnn.pygraph | None = None, **options: Any) -> list[Any]:
    """Validates a small forward graph."""
    shape: dict[str, Any] = {name: options.pop(name) for name in ("s_q", "s_kv", "d", "kind") if name in options}
    graph = graph or reference_graph(HALF)
    results = graph.sdpa(*small(graph, **shape), name="attention", **options)
    for result in results:
        if result is not None:
            result.set_output(True)
    graph.validate()
    return results


def checked_backward(graph: cudnn.pygraph, d: int = 64, d_v: int | None = None, s: int = 64, **options: Any) -> None:
    """Validates a small backward graph."""
    problem = Problem(d_qk=d, d_v=d_v or d, s_q=s, s_kv=s, options=options)
    data = backward_data(problem, problem.tensors(torch.float16, "meta"))
    describe(graph, problem, data).graph.validate()
