"""The grouped fused GEMMs for tests: random tokens of experts, and what the results are, in float64.

Operands and formats are those of ``support.oracle``; nothing here computes with the library.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cudnn.fused import registry
from support import oracle
from support.api_cases import check_quantized
from support.oracle import BF16, E4M3, E8M0, F16, FP4, Operand
from support.selection import within

OPERAND_TYPES: Mapping[str, tuple[Any, Any, int]] = {
    "bf16": (BF16, None, 16),
    "fp16": (F16, None, 16),
    "fp8": (E4M3, None, 16),
    "fp8_128": (E4M3, torch.float32, 128),
    "mxfp8": (E4M3, E8M0, 32),
    "mxfp4": (FP4, E8M0, 32),
    "nvfp4": (FP4, E4M3, 16),
}
"""Types of elements and of scale factors, and how many elements share one."""


@dataclass
class Problem:
    """A call of a wrapper: inputs by name, other arguments; ``ends`` are those of experts."""

    name: str
    ends: Sequence[int]
    inputs: dict[str, Any]
    options: dict[str, Any]
    product: torch.Tensor  # (m, n), float64; rows of no expert are 0
    experts: torch.Tensor  # of each row of an expert
    doubt: torch.Tensor | float = 0.0  # how far each d may lie from what is expected, beyond its own rounding
    results: Any = field(default=None)
    kept: list[torch.Tensor] = field(default_factory=list)  # what addresses lead to

    @property
    def rows(self) -> int:
        """Rows of experts."""
        return self.ends[-1]

    def value(self, name: str) -> Any:
        """An input in float64, of the rows of experts, (m, 1) or (1,); 1 if it is absent."""
        x = self.inputs.get(name)
        return torch.ones((), dtype=torch.float64) if x is None else x.double().reshape(-1, 1)[: self.rows]


def operand(
    operand_type: str, rows: int, k: int, experts: int, device: str, major: str = "k", shared: int = 1
) -> Operand:
    """A random operand; ``shared`` rows share a float32 scale factor."""
    dtype, scale, vector = OPERAND_TYPES[operand_type]
    if scale is None:
        return oracle.plain(rows, k, experts, dtype, major, device)
    return oracle.scaled(rows, k, experts, dtype, scale, vector, major, device, shared)


def by_expert(scales: torch.Tensor, ends: Sequence[int], vector: int) -> torch.Tensor:
    """Scale factors as weight gradients take them: (128 rows, 4 groups), those of each expert's groups together."""
    shape = (128 * scales.shape[2], 4 * scales.shape[4])
    return oracle.atoms_by_part(scales, ends, vector).view(torch.uint8).view(shape).view(scales.dtype)


def unpacked_fp4(pairs: torch.Tensor) -> torch.Tensor:
    """Pairs of elements of four bits (rows, k / 2, experts) as bytes that count as one element each (rows, k, experts):
    the pairs are in the first half of the memory.
    """
    packed = pairs.view(torch.uint8)
    rows, half, experts = packed.shape
    memory = torch.zeros(experts, rows, 2 * half, dtype=torch.uint8)
    memory.view(-1)[: packed.numel()] = packed.permute(2, 0, 1).reshape(-1)
    return memory.permute(1, 2, 0)


def use_pointers(p: Problem) -> None:
    """Replaces the problem's weights and scale factors by pointers to separate copies; of their halves, if the problem
    has any.
    """
    b, scales = p.inputs.pop("b"), p.inputs.pop("sfb")
    major = "k" if b.stride(1) == 1 else "n"
    p.options |= {"n": b.shape[0], "b_dtype": b.dtype, "b_major": major}
    p.kept = []
    if p.options.get("glu_layout") == "concatenated":
        b = torch.cat(b.chunk(2, 0), 2)
    elif p.options.get("b_halves"):
        b = torch.cat(b.chunk(2, 1), 2)
        b = b.permute(2, 1, 0).contiguous().permute(2, 1, 0) if major == "n" else b
    for name, x in (("b_ptrs", b), ("sfb_ptrs", scales)):
        if x is not None:
            p.inputs[name], copies = oracle.addresses_of(x)
            p.kept += copies


def problem(
    name: str,
    operand_type: str = "bf16",
    ends: Sequence[int] = (70, 70, 200),
    m: int = 0,
    n: int = 128,
    k: int = 128,
    *,
    inputs: Mapping[str, Any] | None = None,
    major: str = "k",
    device: str = "cpu",
    shared: int = 128,
    **options: Any,
) -> Problem:
    """A problem for a wrapper. ``inputs``: the types of further ones, ``prob``, ``bias``, ``alpha``, say; ``shared``:
    rows of weights that share a float32 factor.
    """
    experts, m = len(ends), m or ends[-1]
    a, b = operand(operand_type, m, k, 1, device), operand(operand_type, n, k, experts, device, major, shared)
    index = None
    if inputs and "a_index" in inputs:
        a = operand(operand_type, m // 2, k, 1, device)
        index = torch.randint(-1, m // 2 + 1, (m,), dtype=inputs["a_index"], device=device)
        a.values = torch.cat([a.values, torch.zeros_like(a.values[:1])])[
            torch.where((index < 0) | (index >= m // 2), m // 2, index).long()
        ]
    starts = [0, *ends[:-1]]
    product = torch.zeros(m, n, dtype=torch.float64, device=device)
    for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
        product[start:end] = a.values[start:end, :, 0] @ b.values[:, :, expert].T
    tensors: dict[str, Any] = {
        "a": a.tensor,
        "b": b.tensor,
        "sfa": a.scales,
        "sfb": b.scales,
        "padded_offsets": torch.tensor(ends, dtype=torch.int32, device=device),
        "alpha": torch.linspace(0.5, 1.5, experts, device=device),
    }
    for key, dtype in (inputs or {}).items():
        if key == "alpha":
            tensors[key] = tensors[key].to(dtype)
        elif key == "bias":
            tensors[key] = torch.randn(experts, n, device=device).to(dtype).T
        elif key == "a_index":
            tensors[key] = index
        elif key == "norm_const":
            tensors[key] = torch.tensor([0.5], device=device)
        elif key == "beta":
            tensors[key] = torch.linspace(1.5, 0.5, experts, device=device).to(dtype)
        elif key == "dprob":
            tensors[key] = torch.zeros(m, 1, 1, device=device)
        elif key == "c":
            columns = n if "srelu" in name else 2 * n
            tensors[key] = 3 * torch.randn(m, columns, 1, device=device).to(dtype)
        elif key == "activation":
            tensors[key] = torch.full((m, n, 1), torch.nan, device=device).to(dtype)
        else:
            tensors[key] = (torch.rand(m, 1, 1, device=device) + 0.5).to(dtype)
    counts = torch.tensor([end - start for start, end in zip(starts, ends, strict=True)], device=device)
    owners = torch.repeat_interleave(torch.arange(experts, device=device), counts)
    if OPERAND_TYPES[operand_type][1] is not None:
        options.setdefault("sf_vec_size", OPERAND_TYPES[operand_type][2])
    p = Problem(name, ends, tensors, options, product, owners)
    if name.startswith("discrete"):
        use_pointers(p)
    return p


def run(p: Problem, where: str) -> None:
    """Calls the wrapper: PyTorch on CPU tensors, the kernel in the emulator, or the kernel on the GPU."""
    wrapper, parameters = registry.wrapper(p.name), registry.find(p.name).parameters
    arguments = {parameters[key]: tensor for key, tensor in p.inputs.items() if key in parameters}
    required = [q.name for q in inspect.signature(wrapper).parameters.values() if q.default is q.empty]
    arguments = {**dict.fromkeys(required), **arguments, **p.options}
    with within(where):
        p.results = wrapper(**arguments)


def check(p: Problem, slack: float = 3e-5) -> None:
    """All results of a problem that was run."""
    x, scales = p.value("alpha")[p.experts] * p.product[: p.rows], p.inputs["sfa"]
    if p.inputs["a"].dtype == E4M3 and (scales is None or scales.dtype == torch.float32):
        slack = 1e-3  # Hopper's 8-bit MMAs accumulate with fewer bits
    values = FORMULAS[p.name](p, x, slack)
    if p.name == "grouped_gemm_glu_hadamard_quant":
        return  # has checked all
    results = {key.removesuffix("_tensor"): tensor for key, tensor in p.results.items() if tensor is not None}
    results |= {"d": results["d_row"]} if "d_row" in results else {}
    if "amax" in results:
        roles = results["amax"].shape[1]
        zero = p.name == "grouped_gemm_glu_hadamard" and p.options.get("semantics") != "1.23"
        empty = 0.0 if zero else float("-inf")
        largest = torch.full((len(p.ends), roles), empty, dtype=torch.float64, device=x.device)
        owners = p.experts[:, None].expand(-1, roles)
        low, high = (
            largest.scatter_reduce(0, owners, of.unflatten(1, (-1, roles, 32 if roles > 1 else 1)).amax((1, 3)), "amax")
            for of in (values.abs() - p.doubt, values.abs() + p.doubt)
        )
        amax = results["amax"].flatten(1).double()
        assert bool(((amax >= low * (1 - 16 * slack)) & (amax <= high * (1 + 16 * slack))).all())
    if "dbias" in results:
        sums = torch.zeros(len(p.ends), values.shape[1], dtype=torch.float64, device=x.device)
        oracle.assert_rounded(results["dbias"].squeeze(-1), sums.index_add_(0, p.experts, values), 16 * slack)
    if "sfd_row" not in results:
        oracle.assert_rounded(flat(results["d"])[: p.rows], values, 4 * slack, p.doubt)
        return
    norm = float(p.inputs["norm_const"])
    d = flat(results["d"])[: p.rows, :, None]
    if results["sfd_row"].dtype == torch.float32:
        check_quantized(d, results["sfd_row"][: p.rows], values[..., None], norm, 4 * slack)
        return
    check_quantized(d, results["sfd_row"][:, :, : p.rows // 128], values[..., None], norm, 4 * slack)
    check_columns(p, results["d_col"], results["sfd_col"], values, 4 * slack)


def check_columns(
    p: Problem, quantized: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, slack: float
) -> None:
    """Values quantised by 32 tokens of a column."""
    norm = float(p.inputs["norm_const"])
    columns, by_expert = flat(quantized)[: p.rows, :, None].transpose(0, 1), values[..., None].transpose(0, 1)
    if not p.options.get("discrete_col_sfd"):
        check_quantized(columns, scales[..., : p.rows // 128, :], by_expert, norm, slack)
        return
    memory, start, atoms = oracle.memory_of(scales), 0, -(-values.shape[1] // 128)
    for end in p.ends:
        first = start // 128 * atoms * 512
        expert_scales = memory[first : first + (end - start) * atoms * 4]
        expert_scales = oracle.atoms_of(expert_scales, 128 * atoms, (end - start) // 32)
        if end > start:
            check_quantized(columns[:, start:end], expert_scales, by_expert[:, start:end], norm, slack)
        start = end


def flat(x: torch.Tensor) -> torch.Tensor:
    """(m, n) of (m, n, 1) or (m, n)."""
    return x[..., 0] if x.ndim == 3 else x


def biased(p: Problem, x: torch.Tensor, factor: Any = 1.0) -> torch.Tensor:
    bias = p.inputs.get("bias")
    return x if bias is None else x + factor * bias.double().T[p.experts]


def grouped(p: Problem, x: torch.Tensor, slack: float) -> torch.Tensor:
    """The plain product."""
    c = biased(p, x, p.value("prob"))
    if p.options.get("generate_c"):
        oracle.assert_rounded(flat(p.results["c_tensor"])[: p.rows], c, slack)
    return c if p.inputs.get("bias") is not None else c * p.value("prob")


def quant(p: Problem, x: torch.Tensor, slack: float) -> torch.Tensor:
    x = x * p.value("row_scale")
    return biased(p, x, p.value("prob")) if p.inputs.get("bias") is not None else x * p.value("prob")


def glu(p: Problem, x: torch.Tensor, slack: float) -> torch.Tensor:
    """Also sets ``p.doubt``: a gate and its other half may be far larger than what the two make."""
    c = biased(p, x)
    if p.results["c_tensor"] is not None:
        oracle.assert_rounded(flat(p.results["c_tensor"])[: p.rows], c, slack)
    c.requires_grad_()
    y = gated(p, *(c[:, columns] for columns in gates_and_others(p, c)))
    slopes = torch.autograd.grad(y.sum(), c)[0].abs()
    p.doubt = error_of(y.detach(), sum(slopes[:, columns] for columns in gates_and_others(p, c)), x)
    return y.detach()


def error_of(y: torch.Tensor, slopes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Of y(x) in float32, whose slopes are these."""
    return 2.0**-19 * slopes * x.abs().max() + 2.0**-20 * y.abs()


def gated(p: Problem, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    if p.options.get("act_func") == "situglu":
        return situ(p, g, u) * p.value("prob")
    if p.options.get("act_func") == "geglu":
        top, bottom = p.options.get("glu_clamp_max", 7.0), p.options.get("glu_clamp_min", -7.0)
        g, u = g.clamp(max=top), u.clamp(bottom, top) + linear_offset(p)
    slope = p.options.get("geglu_alpha", 1.702) if p.options.get("act_func") == "geglu" else 1.0
    return u * g * torch.sigmoid(slope * g) * p.value("prob")


def gates_and_others(p: Problem, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of their columns in c."""
    columns = torch.arange(c.shape[1] // 2, device=c.device)
    if p.options.get("glu_layout") == "concatenated":
        return columns, columns + len(columns)
    return columns // 32 * 64 + columns % 32, columns // 32 * 64 + columns % 32 + 32


def situ(p: Problem, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    first, second = p.options.get("situ_beta1", 4.0), p.options.get("situ_beta2", 25.0)
    return first * torch.tanh(g / first) * torch.sigmoid(g) * second * torch.tanh(u / second)


def clamped(p: Problem, x: torch.Tensor) -> torch.Tensor:
    """The ReLU of squared ReLUs."""
    scale = p.options.get("tanh_clamp_scale")
    return x.clamp(min=0) if scale is None else scale * torch.tanh(x.clamp(min=0) / scale)


def linear_offset(p: Problem) -> float:
    """That of geglu: 1 unless the call has another; for the APIs of pointer arrays only it was 0."""
    older = p.options.get("semantics") == "1.23" and p.name.startswith("discrete")
    return p.options.get("linear_offset", 0.0 if older else 1.0)


def hadamard(p: Problem, x: torch.Tensor, slack: float) -> torch.Tensor:
    """The activation, rotated by 16 columns of a row in the older version; else by 16 tokens for another amax."""
    activation, signs = srelu if p.options.get("act_func") == "srelu" else glu, oracle.signs_of(16).to(x)
    y = activation(p, x, slack)
    rounded, doubt = oracle.rounding_interval(y, p.doubt, BF16)  # it is rounded before it is rotated
    assert float(doubt.mean() / y.abs().mean()) < 1e-4  # rounding moves them by 1e-3 on average
    if p.options.get("semantics") == "1.23":
        assert len(p.results) == 3
        p.doubt = doubt.unflatten(1, (-1, 16)).sum(2).repeat_interleave(16, 1)
        return (rounded.unflatten(1, (-1, 16)) @ signs).flatten(1, 2)
    amax = p.results["post_rht_amax_tensor"][:, 0].double()
    for largest, start, end in zip(amax, (0, *p.ends[:-1]), p.ends, strict=True):
        rotated = (signs @ rounded[start:end].unflatten(0, (-1, 16))).abs()
        assert_largest(largest, rotated / 4, doubt[start:end].unflatten(0, (-1, 16)).sum(1, keepdim=True) / 4)
    return y


def assert_largest(largest: torch.Tensor, magnitudes: torch.Tensor, doubt: torch.Tensor) -> None:
    """``largest`` is the largest of values that lie within ``doubt`` of others; 0 of none."""
    low, high = ((magnitudes + sign * doubt).max() if len(magnitudes) else 0.0 for sign in (-1, 1))
    assert low * (1 - 2.0**-20) <= largest <= high * (1 + 2.0**-20), f"{largest} is not within [{low}, {high}]"


def transformed(p: Problem, x: torch.Tensor, slack: float) -> torch.Tensor:
    """The activation, rounded to bfloat16, and its transform: both rounded or quantised to four bits."""
    c, options, results = biased(p, x), p.options, p.results
    oracle.assert_rounded(flat(results["c_tensor"])[: p.rows], c, slack)
    if options.get("act_func") == "srelu":
        y = c.clamp(min=0) ** 2
    else:
        g, u = (half.flatten(1) for half in c.unflatten(1, (-1, 2, 32)).unbind(2))
        limit, geglu = options.get("glu_limit", math.inf), options.get("act_func") == "geglu"
        g, u = g.clamp(-limit, limit), u.clamp(-limit, limit) + geglu
        y = u * g * torch.sigmoid((1.702 if geglu else 1.0) * g) * options.get("glu_alpha", 1.0)
    v, signs = (y * p.value("prob")).to(BF16).double(), oracle.signs_of(16).to(x) / 4
    check_transformed(results["d_tensor"], results["sfd_tensor"], v, options.get("norm_const", 1.0))
    norm = options.get("rht_norm_const", 1.0)
    if results["rht_rowwise_tensor"] is not None:
        rows = (v.unflatten(1, (-1, 16)) @ signs).flatten(1).to(BF16).double()
        check_transformed(results["rht_rowwise_tensor"], results["sfrht_rowwise_tensor"], rows, norm)
    if results["rht_colwise_tensor"] is not None:
        n, data, scales = v.shape[1], results["rht_colwise_tensor"].view(torch.uint8), results["sfrht_colwise_tensor"]
        for o, end in itertools.pairwise(dict.fromkeys((0, *p.ends))):  # without empty experts
            t = end - o
            rotated = (signs @ v[o:end].unflatten(0, (-1, 16))).flatten(0, 1).to(BF16).double().T
            i, j = torch.arange(n)[:, None], torch.arange(t // 16)
            offsets = ((i % 32 * 4 + i // 32 % 4) * (n // 128) + i // 128) * (t // 16) + j % 4 * (t // 64) + j // 4
            expert_scales = scales[n // 16 * o :][offsets.to(scales.device)].double()
            check_elements_of_four_bits(
                data[n * o // 2 : n * end // 2].view(n, t // 2, 1), expert_scales, rotated, norm
            )
    return v


def check_transformed(actual: torch.Tensor, scales: torch.Tensor | None, values: torch.Tensor, norm: float) -> None:
    """Values in bfloat16, or with a factor for every 16 columns of a row."""
    m, n = values.shape
    if scales is None:
        oracle.assert_rounded(flat(actual)[:m], values, 2.0**-8)
        return
    decoded_scales = oracle.from_atoms(scales, m, n // 16)[..., 0].view(scales.dtype).double()
    check_elements_of_four_bits(actual[:m], decoded_scales, values, norm)


def check_elements_of_four_bits(actual: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, norm: float) -> None:
    """Of rows whose every 16 values share a factor: rounding values of an accuracy of 8 bits may move both a little."""
    blocks = values.unflatten(1, (-1, 16))
    wanted = (blocks.abs().amax(2) / 6 * norm).clamp(max=448)
    torch.testing.assert_close(scales, wanted, rtol=0.07, atol=2e-3)
    divisors = torch.where(scales > 0, scales, math.inf).unsqueeze(2)
    oracle.assert_rounded(actual, (blocks * norm / divisors).flatten(1)[..., None], 2.0**-6)
    assert bool((oracle.unpacked(actual).abs() > 4).any())


def srelu(p: Problem, x: torch.Tensor, slack: float) -> torch.Tensor:
    c = biased(p, x)
    oracle.assert_rounded(flat(p.results["c_tensor"])[: p.rows], c, slack)
    r = clamped(p, c)
    p.doubt = error_of(r * r * p.value("prob"), 2 * r * p.value("prob"), x)
    return r * r * p.value("prob")


def dglu(p: Problem, x: torch.Tensor, slack: float) -> torch.Tensor:
    """alpha is squared for dswiglu and, now, for dgeglu; beta is for dswiglu and for operands without scale factors."""
    act_func, older = p.options.get("act_func", "dswiglu"), p.options.get("semantics") == "1.23"
    swiglu = act_func != "dgeglu"
    alpha = p.value("alpha")[p.experts]
    x = x / alpha if older and not swiglu else x * alpha
    if p.options.get("round_dgrad_to_input_dtype"):
        x = x.to(p.inputs["a"].dtype).double()
    c = flat(p.inputs["c"])[: p.rows].double()
    if p.inputs.get("beta") is not None and (swiglu or (p.inputs["sfa"] is None and not older)):
        c = c * p.value("beta")[p.experts]
    gate, other = gates_and_others(p, c)
    g, u = c[:, gate].requires_grad_(), c[:, other].requires_grad_()
    numbers = {"glu_clamp_max": 7.0, "glu_clamp_min": -7.0, "linear_offset": linear_offset(p), "geglu_alpha": 1.702}
    top, bottom, offset, slope = (p.options.get(key, value) for key, value in numbers.items())
    offset, slope = (0.0, 1.0) if swiglu else (offset, slope)
    g_, u_ = (g, u) if swiglu else (g.clamp(max=top), u.clamp(bottom, top))
    y = situ(p, g, u) if act_func == "dsituglu" else (u_ + offset) * g_ * torch.sigmoid(slope * g_)
    by_gate, by_other = torch.autograd.grad(y, (g, u), x)
    d = torch.empty(p.rows, c.shape[1], dtype=torch.float64, device=x.device)
    d[:, gate], d[:, other] = by_gate, by_other
    if p.results["dprob_tensor"] is not None:
        oracle.assert_rounded(p.results["dprob_tensor"].reshape(-1)[: p.rows], (x * y.detach()).sum(1), 10 * slack)
    if "activation" in p.inputs:
        assert p.results["activation_tensor"] is p.inputs["activation"]
        oracle.assert_rounded(flat(p.inputs["activation"])[: p.rows], y.detach() * p.value("prob"), slack)
    return d * p.value("prob")


def dsrelu(p: Problem, x: torch.Tensor, slack: float) -> torch.Tensor:
    c, prob = flat(p.inputs["c"])[: p.rows].double(), p.value("prob")
    older, scale = p.options.get("semantics") == "1.23", p.options.get("tanh_clamp_scale")
    r, other = (clamped(p, x), c) if older else (clamped(p, c), x)
    oracle.assert_rounded(p.results["dprob_tensor"].reshape(-1)[: p.rows], (r * r * other).sum(1), 10 * slack)
    assert len(p.results) == (7 if older else 9)
    if not older:
        again, norm = r * r * prob, p.inputs.get("norm_const")
        if norm is None:
            oracle.assert_rounded(flat(p.results["d_srelu_tensor"])[: p.rows], again, slack)
        else:
            check_columns(p, p.results["d_srelu_tensor"], p.results["sfd_col_d_srelu_tensor"], again, slack)
    slope = 1.0 if scale is None else 1 - (r / scale) ** 2
    return 2 * r * slope * other * prob


FORMULAS = {
    "grouped_gemm": grouped,
    "grouped_gemm_quant": quant,
    "grouped_gemm_glu": glu,
    "grouped_gemm_swiglu": glu,
    "grouped_gemm_glu_hadamard": hadamard,
    "grouped_gemm_glu_hadamard_quant": transformed,
    "discrete_grouped_gemm_swiglu": glu,
    "grouped_gemm_srelu": srelu,
    "grouped_gemm_dglu": dglu,
    "grouped_gemm_dswiglu": dglu,
    "discrete_grouped_gemm_dswiglu": dglu,
    "grouped_gemm_dsrelu": dsrelu,
}
"""What d is before rounding, for each API; other results are checked on the way."""
