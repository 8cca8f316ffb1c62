"""The dense fused GEMMs side by side: samples, definitions, names, for tests that run over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from cudnn import gemm_amax, gemm_dsrelu, gemm_dswiglu, gemm_srelu, gemm_swiglu
from cudnn.demo_cases.gemm_variants import Variant
from support import oracle
from support.oracle import BF16, E4M3, E5M2, E8M0, F32, FP4, Operand
from support.selection import within


@dataclass(frozen=True)
class Family:
    """A fused GEMM. ``results`` by name, as the wrapper returns them; ``result`` is the last of the epilogue."""

    name: str
    cls: Any
    wrapper: Callable[..., Any]
    module: Any
    results: tuple[str, ...]
    result: str
    extra: tuple[str, ...] = ()  # names of inputs other than the operands
    quantized: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def cache(self) -> dict[Any, Any]:
        return getattr(self.module.api, f"_cache_of_{self.cls.__name__}Objects")

    @property
    def columns(self) -> float:
        """Columns of the result for each column of the GEMM."""
        return {"gemm_swiglu": 0.5, "gemm_dswiglu": 2}.get(self.name, 1)


FAMILIES = (
    Family("gemm_amax", gemm_amax.GemmAmax, gemm_amax.gemm_amax_wrapper, gemm_amax, ("c", "amax"), "c"),
    Family(
        "gemm_swiglu",
        gemm_swiglu.GemmSwiglu,
        gemm_swiglu.gemm_swiglu_wrapper,
        gemm_swiglu,
        ("ab12", "c", "sfc", "amax"),
        "c",
        quantized="sfc",
    ),
    Family(
        "gemm_srelu",
        gemm_srelu.GemmSrelu,
        gemm_srelu.gemm_srelu_wrapper,
        gemm_srelu,
        ("c", "d", "amax", "sfd"),
        "d",
        ("prob",),
        "sfd",
    ),
    Family(
        "gemm_dsrelu",
        gemm_dsrelu.GemmDsrelu,
        gemm_dsrelu.gemm_dsrelu_wrapper,
        gemm_dsrelu,
        ("d", "dprob", "amax", "sfd"),
        "d",
        ("c", "prob"),
        "sfd",
    ),
)
"""Those that programs know from cuDNN."""
OURS = (
    Family(
        "gemm_dswiglu",
        gemm_dswiglu.GemmDswiglu,
        gemm_dswiglu.gemm_dswiglu_wrapper,
        gemm_dswiglu,
        ("d_ab12", "c", "dprob", "amax", "sfd"),
        "d_ab12",
        ("ab12", "prob"),
        "sfd",
    ),
)
NAMES = [family.name for family in FAMILIES]
BY_NAME = {family.name: family for family in (*FAMILIES, *OURS)}


@dataclass
class Case:
    """Tensors by argument's name, and the operands behind them."""

    family: Family
    a: Operand
    b: Operand
    tensors: dict[str, Any]
    vector: int
    layout: dict[str, str] = field(default_factory=dict)

    @property
    def order(self) -> tuple[bool, bool]:
        """Whether up and gate are halves, and whether gate is first."""
        return self.layout.get("glu_layout") == "concatenated", self.layout.get("glu_order") == "gate_up"

    def samples(self) -> dict[str, Any]:
        return {f"sample_{name}": tensor for name, tensor in self.tensors.items()}

    def arguments(self) -> dict[str, Any]:
        return {f"{name}_tensor": tensor for name, tensor in self.tensors.items()}

    def operation(self, **more: Any) -> Any:
        """Made for these tensors, with the options that they need; ``more`` are others."""
        return self.family.cls(**self.samples(), **{**options(self), **more})


def result(rows: int, columns: int, l: int, dtype: Any, major: str, device: str) -> torch.Tensor:  # noqa: E741
    """A dense result, NaN in it where its type has one."""
    if dtype == FP4:
        packed = torch.empty_strided(
            (rows, columns // 2, l), (columns // 2, 1, rows * columns // 2), dtype=torch.uint8, device=device
        )
        return (packed if device == "meta" else packed.fill_(0x5A)).view(FP4)
    shape, stride = (rows, columns, l), (1, rows, rows * columns) if major == "m" else (columns, 1, rows * columns)
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return tensor if device == "meta" else tensor.fill_(float("nan"))


def without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def case(
    name: str,
    m: int = 128,
    n: int = 256,
    k: int = 128,
    l: int = 1,  # noqa: E741
    *,
    dtype: Any = BF16,
    majors: str = "kkn",
    out: Any = BF16,
    side: Any = BF16,
    scale: Any = None,
    vector: int = 0,
    amax: bool | None = None,
    device: str = "cpu",
    rows: int = 128,
    **layout: str,
) -> Case:
    """A problem: ``out`` is the result's type, ``side`` that of ab12 or c, None for no ab12; ``majors``: a, b, out.

    ``rows`` of B share a float32 factor. The c of dSwiGLU is there for results of 32 bits.
    ``layout``: glu_layout and glu_order.
    """
    family = BY_NAME[name]
    vector = vector or (128 if scale == F32 else 32 if scale == E8M0 or out in (E4M3, E5M2) else 16)
    memory = "cpu" if device == "meta" else device
    directions = ["k" if major == "k" else "mn" for major in majors[:2]]
    if scale is not None or dtype == FP4:
        a, b = (
            oracle.scaled(size, k, l, dtype, scale or E8M0, vector, major, memory, block if scale == F32 else 1)
            for size, major, block in zip((m, n), directions, (1, rows), strict=True)
        )
    else:
        a, b = (oracle.plain(rows, k, l, dtype, major, memory) for rows, major in zip((m, n), directions, strict=True))
    columns = int(n * family.columns)
    tensors: dict[str, Any] = {"a": a.tensor, "b": b.tensor, "sfa": a.scales, "sfb": b.scales}
    tensors[family.result] = result(m, columns, l, out, majors[2], memory)
    if name == "gemm_swiglu":
        tensors["ab12"] = None if side is None else result(m, n, l, side, majors[2], memory)
    elif name == "gemm_srelu":
        tensors["c"] = result(m, n, l, side, majors[2], memory)
    elif name == "gemm_dsrelu":
        major = "mn" if majors[2] == "m" else "k"
        tensors["c"] = oracle.strided(torch.randn(m, n, l, device=memory).to(side), major)
        tensors["dprob"] = torch.zeros(m, 1, l, device=memory)
    elif name == "gemm_dswiglu":
        major = "mn" if majors[2] == "m" else "k"
        tensors["ab12"] = oracle.strided(torch.randn(m, 2 * n, l, device=memory).to(side), major)
        tensors["c"] = result(m, n, l, BF16, majors[2], memory) if out == F32 else None
        tensors["dprob"] = torch.zeros(m, 1, l, device=memory)
    if "prob" in family.extra:
        tensors["prob"] = torch.randn(m, 1, l, device=memory)
    if amax is None:
        amax = name == "gemm_amax" or (dtype == FP4 and out == BF16)
    roles = 2 if name == "gemm_dswiglu" else 1
    tensors["amax"] = torch.full((roles,), float("-inf"), device=memory) if amax else None
    if family.quantized:
        quantized = out in (E4M3, E5M2)
        if vector == 128:
            scales = oracle.strided(torch.full((m, -(-columns // vector), l), torch.nan, device=memory), "mn")
        else:
            codes = torch.full((m, -(-columns // vector), l), 77, dtype=torch.uint8, device=memory)
            scales = oracle.in_atoms(codes).view(E8M0)
        tensors[family.quantized] = scales if quantized else None
        tensors["norm_const"] = torch.tensor([0.01], device=memory) if quantized else None
    if device == "meta":
        tensors = {key: None if tensor is None else without_data(tensor) for key, tensor in tensors.items()}
    return Case(family, a, b, tensors, vector, layout)


def options(problem: Case) -> dict[str, Any]:
    """Options that the problem needs: a tile that divides it, the number of elements that share a factor."""
    chosen: dict[str, Any] = {"sf_vec_size": problem.vector, **problem.layout}
    if problem.family.name not in ("gemm_amax", "gemm_swiglu"):
        chosen["mma_tiler_mn"] = (128, 128)
    return chosen


def of_variant(v: Variant, device: str = "cpu") -> Case:
    """The problem of a variant, on new tensors."""
    types = {name: getattr(torch, getattr(v, name)) for name in ("out", "side")}
    dtype = FP4 if v.dtype == "uint8" else getattr(torch, v.dtype)
    scale = getattr(torch, v.scale) if v.scale else None
    problem = case(v.api, *v.shape, **types, dtype=dtype, majors=v.majors, scale=scale, vector=v.vector, device=device)
    if v.dtype == "uint8":
        for name in ("a", "b"):
            problem.tensors[name] = problem.tensors[name].view(torch.uint8)
    return problem


def execute(problem: Case, where: str, alpha: float | None = None, **more: Any) -> Any:
    """Executes a problem there, without races in the emulator, whose report it returns; ``more`` are options."""
    gemm = problem.operation(**more)
    with within(where) as report:
        gemm(**problem.arguments(), **({} if alpha is None else {"alpha": alpha}))
    return report


def slack(problem: Case) -> float:
    """Error of the GEMM relative to its largest element: TF32 has 10 bits, 8-bit MMAs accumulate with few."""
    sfa = problem.tensors["sfa"]
    if sfa is not None and sfa.dtype != F32:
        return 2e-5
    return {F32: 3e-3, E4M3: 1e-3, E5M2: 1e-3}.get(problem.tensors["a"].dtype, 2e-5)


def check(problem: Case, alpha: float = 1.0, slack: float = 1e-5) -> None:
    """The results of an executed problem, against their definitions in float64."""
    tensors, name = problem.tensors, problem.family.name
    z = alpha * oracle.matmul(problem.a, problem.b)
    if name == "gemm_swiglu":
        if tensors["ab12"] is not None:
            oracle.assert_rounded(tensors["ab12"], z, slack)
        values = oracle.swiglu(z, *problem.order)
    elif name == "gemm_srelu":
        oracle.assert_rounded(tensors["c"], z, slack)
        values = oracle.srelu(z, tensors["prob"])
    elif name == "gemm_dsrelu":
        values, dprob = oracle.dsrelu(z, tensors["c"], tensors["prob"])
        oracle.assert_rounded(tensors["dprob"], dprob, 10 * slack)
    elif name == "gemm_dswiglu":
        values, dprob, c = oracle.dswiglu(z, tensors["ab12"], tensors["prob"], *problem.order)
        oracle.assert_rounded(tensors["dprob"], dprob, 10 * slack)
        if tensors["c"] is not None:
            oracle.assert_rounded(tensors["c"], c, 1e-6)
    else:
        values = z
    slack *= 4 if name != "gemm_amax" else 1  # GEMM results are multiplied
    if tensors["amax"] is not None:
        blocks = values.abs().unsqueeze(2)
        if name == "gemm_dswiglu":
            blocks = values.abs().unflatten(1, (-1, 2, values.shape[1] // 2 if problem.order[0] else 32))
        torch.testing.assert_close(
            tensors["amax"].double().flatten(), blocks.transpose(0, 2).flatten(1).amax(1), rtol=4 * slack, atol=0
        )
    actual = tensors[problem.family.result]
    scales = tensors.get(problem.family.quantized)
    if scales is None:
        oracle.assert_rounded(actual, values, slack)
    else:
        check_quantized(actual, scales, values, float(tensors["norm_const"]), slack)


def check_quantized(actual: Any, scales: Any, values: torch.Tensor, norm: float, slack: float) -> None:
    """Scale factors exact, but where the largest value lies within ``slack`` of a power of two; elements rounded."""
    m, n, _ = values.shape
    limit = {E4M3: 448.0, E5M2: 128.0}[actual.dtype]
    if scales.dtype == F32:
        padded = torch.nn.functional.pad(values, (0, 0, 0, -n % 128)).unflatten(1, (-1, 128))
        least = slack * values.abs().max() / limit * norm
        torch.testing.assert_close(
            scales.double(), padded.abs().amax(2) / limit * norm, rtol=1e-6, atol=float(least), check_stride=False
        )
        check_elements(actual, values, norm / scales.double().repeat_interleave(128, 1)[:, :n], slack)
        return
    blocks = -(-n // 32)
    codes = oracle.from_atoms(scales, m, blocks)
    padded = torch.nn.functional.pad(values, (0, 0, 0, -n % 32)).unflatten(1, (-1, 32))
    largest = padded.abs().amax(2) / limit * norm
    error = slack * values.abs().max() / limit * norm
    low, high = (oracle.e8m0_code_above((largest + sign * error).clamp(min=0)) for sign in (-1, 1))
    assert bool(((codes >= low) & (codes <= high)).all())
    assert float((low == high).double().mean()) > 0.3  # TF32 leaves some open
    check_elements(actual, values, norm / oracle.e8m0_values(codes).repeat_interleave(32, 1)[:, :n], slack)
    outside = scales.view(torch.uint8).clone()
    outside[oracle.scale_index(m, blocks, values.shape[2], outside.device)] = 0
    assert not outside.any()  # what pads the atoms


def check_elements(actual: Any, values: torch.Tensor, factor: torch.Tensor, slack: float) -> None:
    """Quantised elements: values times what they were multiplied by, rounded."""
    limit = {E4M3: 448.0, E5M2: 128.0}[actual.dtype]
    step = torch.finfo(actual.dtype).eps * (values * factor).abs().clamp(
        min=2.0**-6 if actual.dtype == E4M3 else 2.0**-14
    )
    allowed = 0.505 * step + slack * values.abs().max() * factor
    assert bool(((actual.double() - (values * factor).clamp(-2 * limit, 2 * limit)).abs() <= allowed).all())
