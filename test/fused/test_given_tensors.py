"""What callers hand to the fused GEMMs: strides, addresses, types. The same is taken and refused everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cudnn
from cudnn.fused import registry
from support import oracle
from support.api_cases import FAMILIES, NAMES, Case, Family, case, check, execute, options, slack
from support.oracle import BF16, E4M3, E8M0, F16, F32, FP4
from support.selection import ARCHES, WHERE, brief, in_turn

pytest.importorskip("ptx_emulator")

GUARD = 7


@pytest.fixture(params=FAMILIES, ids=NAMES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def created(name: str, where: str, *size: int, **kwargs: Any) -> Case:
    return case(name, *size, **kwargs, device="cuda" if where == "gpu" else "cpu")


def matrices(problem: Case) -> list[str]:
    return [name for name in ("a", "b", "ab12", "c", "d") if problem.tensors.get(name) is not None]


def placed(tensor: torch.Tensor, order: tuple[int, ...], more: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The values in memory that holds the dimensions in ``order``, with a larger row pitch; and that memory."""
    raw = tensor.view(torch.uint8) if tensor.dtype == FP4 else tensor
    shape = [raw.shape[dim] for dim in order]
    memory = torch.empty([*shape[:-1], shape[-1] + more], dtype=torch.uint8, device=tensor.device).to(raw.dtype)
    memory.fill_(GUARD)
    back = [order.index(dim) for dim in range(3)]
    view = memory[..., : shape[-1]].permute(back)
    view.copy_(raw)
    return (view.view(tensor.dtype) if tensor.dtype == FP4 else view), memory


def inner(tensor: torch.Tensor) -> int:
    return tensor.stride().index(1)


@pytest.mark.parametrize(
    ("where", "name", "inside", "kwargs"),
    in_turn(
        [
            ("gemm_swiglu", False, {"dtype": BF16, "majors": "kkn"}),
            ("gemm_swiglu", True, {"dtype": F16, "majors": "mnm", "out": F16}),
            ("gemm_dsrelu", True, {"dtype": F32, "majors": "mkn", "m": 64}),
            ("gemm_dsrelu", False, {"dtype": E4M3, "scale": E8M0, "majors": "knm"}),
            ("gemm_amax", False, {"dtype": FP4, "scale": E8M0, "vector": 32}),
        ],
        2,
        places=WHERE,
    ),
    ids=str,
)
def test_rows_and_matrices_lie_apart(where: str, name: str, kwargs: dict[str, Any], inside: bool) -> None:
    """Rows need only begin at multiples of 16 bytes; the memory between them is not touched."""
    problem = created(name, where, **{"m": 128, "n": 128, "k": 64, "l": 2, **kwargs})
    memories = []
    for key in matrices(problem):
        tensor = problem.tensors[key]
        last = inner(tensor)
        order = (1 - last, 2, last) if inside else (2, 1 - last, last)
        more = 48 // tensor.element_size()
        problem.tensors[key], memory = placed(tensor, order, more)
        memories.append(memory[..., -more:])
    execute(problem, where)
    check(problem, slack=slack(problem))
    assert all(bool((memory.float() == GUARD).all()) for memory in memories)


@pytest.mark.parametrize(("where", "name"), in_turn(NAMES, 1, places=WHERE))
def test_strides_of_extents_of_one_may_be_any(where: str, name: str) -> None:
    """``x.unsqueeze(-1)`` is a batch of one."""
    problem = created(name, where, 128, 128, 64)
    for key, tensor in problem.tensors.items():
        if tensor is not None and tensor.ndim == 3:
            problem.tensors[key] = tensor[..., 0].unsqueeze(-1)
            assert problem.tensors[key].stride(2) == 1
    execute(problem, where)
    check(problem, slack=slack(problem))


@pytest.mark.parametrize("where", brief(WHERE, 0, 2, 3))
def test_strides_of_scale_factors_of_one_atom(where: str) -> None:
    """Those of dimensions of size 1: a contiguous tensor of the same memory."""
    problem = created("gemm_amax", where, 128, 128, 128, dtype=FP4, scale=E8M0, vector=32)
    for key in ("sfa", "sfb"):
        factors = problem.tensors[key]
        assert factors.shape == (32, 4, 1, 4, 1, 1)
        problem.tensors[key] = factors.as_strided(factors.shape, (16, 4, 7, 1, 5, 3))
    execute(problem, where)
    check(problem, slack=slack(problem))


@pytest.mark.parametrize("where", brief(WHERE, 0, 1, 3))
def test_one_operand_for_all_of_a_batch(where: str) -> None:
    """``expand``: the stride 0, of an operand; results have separate memory."""
    problem = created("gemm_amax", where, 128, 128, 64, 3)
    problem.tensors["b"] = problem.tensors["b"][..., :1].expand(-1, -1, 3)
    problem.b.values = problem.b.values[..., :1].expand(-1, -1, 3)
    execute(problem, where)
    check(problem, slack=slack(problem))
    problem.tensors["c"] = problem.tensors["c"][..., :1].expand(-1, -1, 3)
    with pytest.raises(
        ValueError, match=r"c tensor stride mismatch: .* got .* To fix it, allocate it as torch.empty\("
    ):
        execute(problem, where)


@pytest.mark.parametrize("where", WHERE)
def test_one_row(where: str) -> None:
    """Of a longer tensor, so that the stride of its only row is any."""
    problem = created("gemm_amax", where, 1, 128, 64)
    problem.tensors["a"] = torch.cat([problem.tensors["a"]] * 2, dim=1)[:, :64]
    execute(problem, where)
    check(problem, slack=slack(problem))
    problem.tensors["a"] = problem.tensors["a"].as_strided((1, 64, 1), (1, 1, 1))
    execute(problem, where)
    check(problem, slack=slack(problem))


@pytest.mark.parametrize(("where", "name"), in_turn(["gemm_srelu", "gemm_dsrelu"], 1, places=WHERE))
def test_four_bit_operands_with_results_of_any_major(where: str, name: str) -> None:
    problem = created(name, where, 128, 128, 128, 2, dtype=FP4, scale=E8M0, majors="kkm")
    execute(problem, where)
    check(problem, slack=slack(problem))


# What is refused, before anything starts.


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same at an address that is no multiple of 16, though one of 4."""
    memory = torch.zeros(tensor.numel() * tensor.element_size() + 16, dtype=torch.uint8, device=tensor.device)
    start = (4 - memory.data_ptr()) % 16
    flat = memory[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def neighbour(problem: Case, name: str, other: str) -> Case:
    """The tensors ``name`` and ``other`` in the same memory, the one half an extent behind."""
    first, second = problem.tensors[name], problem.tensors[other]
    memory = torch.zeros(first.numel() + second.numel(), dtype=first.dtype, device=first.device)
    problem.tensors[name] = memory[: first.numel()].as_strided(first.shape, first.stride())
    start = first.numel() // 2
    problem.tensors[other] = memory[start : start + second.numel()].as_strided(second.shape, second.stride())
    return problem


def change(**tensors: Any) -> Callable[[Case], Case]:
    def changed(problem: Case) -> Case:
        for name, tensor in tensors.items():
            problem.tensors[name] = tensor(problem.tensors[name])
        return problem

    return changed


REFUSED: list[tuple[Callable[[Case], Case], dict[str, Any], type[Exception], str]] = [
    (change(a=shifted), {}, ValueError, r"a tensor, its address: got 0x\w*4; allowed: multiples of 16 bytes."),
    (change(c=shifted), {}, ValueError, "c tensor, its address: got"),
    (change(c=lambda x: x[:1].expand_as(x)), {}, ValueError, "c tensor stride mismatch"),
    (change(a=lambda x: x[:, :60]), {}, ValueError, "b tensor shape mismatch"),
    (
        lambda p: neighbour(p, "ab12", "c"),
        {},
        ValueError,
        "ab12 tensor: got memory that c uses too; allowed: separate memory",
    ),
    (
        lambda p: neighbour(p, "a", "c"),
        {},
        ValueError,
        "c tensor: got memory that a uses too; allowed: separate memory",
    ),
    (change(), {"alpha": "1"}, TypeError, "alpha: got str; allowed: a float"),
    (change(), {"alpha": torch.ones(1)}, TypeError, r"alpha: got Tensor; allowed: a float. To fix it, pass alpha.it"),
    (change(), {"current_stream": "0"}, TypeError, "current_stream: got str; allowed: None, an int, a torch"),
    (change(), {"workspace_tensor": 5}, TypeError, "workspace tensor: got int; allowed: a torch.Tensor"),
    (change(), {"workspace_tensor": torch.empty(64)}, ValueError, "workspace_tensor: got torch.float32 of the shape"),
    (
        change(a=lambda x: np.zeros(x.shape, np.float16)),
        {},
        TypeError,
        r"a tensor: got numpy.ndarray; allowed: a torch.Tensor. To fix it, pass torch.from_numpy\(a\)",
    ),
    (change(c=lambda x: 5), {}, TypeError, "c tensor: got int; allowed: a torch.Tensor"),
]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("changed", "more", "error", "words"), REFUSED, ids=[words[:40] for *_, words in REFUSED])
def test_what_is_refused(where: str, changed: Any, more: dict[str, Any], error: Any, words: str) -> None:
    """In the same words everywhere; those of the launcher, which numbers arguments, are not seen."""
    problem = created("gemm_swiglu", where, 128, 128, 64)
    gemm = problem.operation()
    with cudnn.emulation(where) if where in ARCHES else contextlib.nullcontext():
        gemm.compile()
        with pytest.raises(error, match=words):
            gemm.execute(**{**changed(problem).arguments(), **more})


def test_what_the_constructors_and_wrappers_refuse(family: Family) -> None:
    problem = case(family.name, 128, 128, 64)
    for tile in ("x", "xy", 128, (128,), (128.0, 128), (128, 128, 1), None):
        with pytest.raises(TypeError, match=r"mma_tiler_mn: got .*; allowed: two integers, of rows and columns"):
            problem.operation(mma_tiler_mn=tile)
    with pytest.raises(TypeError, match="cluster_shape_mn: got 'x'; allowed: two integers"):
        problem.operation(cluster_shape_mn="x")
    if family.name != "gemm_amax":
        with pytest.raises(TypeError, match="alpha: got str; allowed: a float"):
            problem.operation(alpha="x")
    array = np.zeros((128, 64, 1), np.float16)
    with pytest.raises(
        TypeError, match=r"a tensor: got numpy.ndarray; allowed: a torch.Tensor. To fix it, pass torch.f"
    ):
        family.cls(**{**problem.samples(), "sample_a": array}, **options(problem))
    kwargs = {key: problem.tensors[key] for key in ("a", "b", "sfa", "sfb", *family.extra)}
    for key in ("a", "b"):
        with pytest.raises(
            TypeError, match=rf"{key} tensor: got numpy.ndarray; allowed: a torch.Tensor. To fix it, pass"
        ):
            family.wrapper(**{f"{name}_tensor": tensor for name, tensor in {**kwargs, key: array}.items()})


def test_two_dimensions_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"three dimensions, \(m, k, l\). To fix it, pass a.unsqueeze\(-1\), a"):
        cudnn.gemm_amax_wrapper(torch.randn(64, 64), torch.randn(64, 64))


def test_columns_of_one_tensor_do_not_overlap() -> None:
    """Results side by side in the rows of one tensor."""
    problem = case("gemm_srelu", 128, 128, 64)
    memory = torch.zeros(128, 256, 1).bfloat16()
    problem.tensors["c"], problem.tensors["d"] = memory[:, :128], memory[:, 128:]
    execute(problem, "reference")
    check(problem)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_overlap_is_seen_at_the_first_call_of_a_size(name: str) -> None:
    problem = created(name, "gpu", 128, 128, 64)
    gemm = problem.operation()
    gemm.compile()
    with pytest.raises(ValueError, match="tensor: got memory that"):
        gemm.execute(**neighbour(problem, "a", problem.family.result).arguments())


# In emulation.


@pytest.mark.parametrize(("arch", "kwargs"), in_turn([{}, {"dtype": E4M3, "scale": E8M0}], 1), ids=str)
def test_compile_compiles_for_the_emulator(arch: str, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case("gemm_amax", 128, 128, 96, **kwargs)
    gemm = problem.operation()
    compiled: list[str] = []
    from cudnn.runtime import kernels

    original = kernels.compile_kernel
    monkeypatch.setattr(kernels, "compile_kernel", lambda *a: compiled.append(a[2]) or original(*a))
    monkeypatch.setattr(kernels, "_emulated", {})
    with cudnn.emulation(arch):
        gemm.compile()
        assert compiled == [arch]
        gemm.execute(**problem.arguments())
    assert compiled == [arch]
    check(problem, slack=slack(problem))


def test_a_workspace_in_the_emulator() -> None:
    """Of the size that it is asked for; a smaller one is refused."""
    problem = case("gemm_amax", 128, 128, 128, dtype=E4M3, scale=E8M0)
    gemm = problem.operation()
    assert gemm.workspace_size() == 0  # the reference's
    with cudnn.emulation("sm_90a"):
        size = gemm.workspace_size()
        assert size == 2 * 128 * 128 * 2
        gemm.compile()
        workspace = torch.zeros(size, dtype=torch.uint8)
        gemm.execute(**problem.arguments(), workspace_tensor=workspace)
        with pytest.raises(ValueError, match=r"workspace_tensor: got \d+ bytes at .*; allowed: at least 65536 bytes"):
            gemm.execute(**problem.arguments(), workspace_tensor=workspace[16:])
    assert bool(workspace.any())
    check(problem, slack=slack(problem))


# Autograd.


@pytest.mark.parametrize(("where", "name"), in_turn(NAMES, 1, places=WHERE))
def test_nothing_is_recorded_for_autograd(where: str, name: str) -> None:
    problem = created(name, where, 128, 128, 64)
    tensors = problem.tensors
    kwargs = {key: tensors[key] for key in ("a", "b", "sfa", "sfb", *problem.family.extra)}
    kwargs = {key: None if tensor is None else tensor.requires_grad_() for key, tensor in kwargs.items()}
    with cudnn.emulation(where) if where in ARCHES else contextlib.nullcontext():
        actual = problem.family.wrapper(**{f"{key}_tensor": tensor for key, tensor in kwargs.items()})
    for tensor in actual:
        assert tensor is None or (tensor.grad_fn is None and not tensor.requires_grad)
    for function in (problem.family.wrapper, getattr(cudnn, f"{name}_wrapper_sm100")):
        assert f"cudnn.ops.{name}" in (function.__doc__ or "")


# GEMM + SwiGLU: types and weights.


def test_the_result_has_the_type_of_the_input_if_asked_for() -> None:
    from cudnn.ops import gemm_swiglu

    a, b = oracle.plain(40, 64, dtype=BF16).tensor, oracle.plain(64, 64, dtype=BF16).tensor
    assert cudnn.gemm_swiglu_wrapper(a, b)["c_tensor"].dtype == F16
    assert cudnn.gemm_swiglu_wrapper(a, b, c_dtype=None)["c_tensor"].dtype == BF16
    arguments = (a, b, 1.0, "n", BF16, None)
    assert gemm_swiglu(*arguments)[1].dtype == BF16
    torch.library.opcheck(gemm_swiglu.operator, arguments)  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.parametrize("l", [0, 1, 3])
def test_interleaved_weights(l: int) -> None:  # noqa: E741
    """Of a batch too: ``up * silu(gate)`` of two products."""
    gate, up = (torch.randn(96, 64, *[l] * bool(l)).bfloat16() for _ in range(2))
    w = cudnn.interleave_gate_up(gate, up)
    assert w.shape == (192, *gate.shape[1:])
    for i in range(192):
        source = (gate if i // 32 % 2 else up)[i // 64 * 32 + i % 32]
        assert torch.equal(w[i], source)
    assert torch.equal(cudnn.interleave_gate_up(up, gate, gate_first=True), w)
    assert cudnn.interleave_gate_up(gate.clone().requires_grad_(), up).requires_grad
    x = torch.randn(40, 64, max(l, 1)).permute(2, 0, 1).contiguous().permute(1, 2, 0).bfloat16()
    c = cudnn.gemm_swiglu_wrapper(x, w if l else w.unsqueeze(-1), ab12_dtype=None, c_dtype=None)["c_tensor"]
    z = [torch.einsum("mkl,nkl->mnl", x.float(), part.float().reshape(96, 64, -1)) for part in (gate, up)]
    torch.testing.assert_close(c.float(), z[1] * torch.nn.functional.silu(z[0]), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", ["gemm_swiglu", "gemm_geglu"])
@pytest.mark.parametrize("order", ["up_gate", "gate_up"])
def test_halves_of_weights(name: str, order: str) -> None:
    """Taken as they are, or interleaved once: the same results, ab12 in the order of the weights."""
    whole = (torch.randint(-4, 5, (rows, 64, 2)) / 8 for rows in (40, 192))  # sums of their products are exact
    x, halves = (oracle.strided(each.bfloat16(), "k") for each in whole)
    wrapper, kwargs = registry.wrapper(name), {"ab12_dtype": F32, "c_dtype": BF16}
    actual = wrapper(x, halves, **kwargs, glu_layout="concatenated", glu_order=order)
    woven = cudnn.interleave_glu_weights(halves, order=order)
    expected = wrapper(x, woven, **kwargs)
    assert torch.equal(actual["c_tensor"], expected["c_tensor"])
    pairs = expected["ab12_tensor"].unflatten(1, (-1, 2, 32)).unbind(2)
    apart = torch.cat([each.flatten(1, 2) for each in (pairs if order == "up_gate" else pairs[::-1])], 1)
    assert torch.equal(actual["ab12_tensor"], apart)
    kept = cudnn.interleave_glu_weights(halves, order=order, gate_first=order == "gate_up")
    same = wrapper(x, kept, **kwargs, glu_order=order)
    assert torch.equal(same["c_tensor"], expected["c_tensor"])


@pytest.mark.parametrize(
    ("shape", "order", "words"),
    [
        ((96, 8), "up_gate", r"weights: got the shape \(96, 8\); allowed: .* inner a multiple of 32"),
        ((64,), "up_gate", "weights: got the shape"),
        ((64, 8), "gate", "order: got 'gate'; allowed: 'up_gate' or 'gate_up'"),
    ],
)
def test_halves_that_cannot_be_interleaved(shape: tuple[int, ...], order: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"interleave_glu_weights: {words}"):
        cudnn.interleave_glu_weights(torch.ones(shape), order=order)


def test_interleaved_four_bit_weights() -> None:
    bytes_ = torch.arange(128, dtype=torch.uint8).view(64, 2)
    gate, up = bytes_.view(FP4), (bytes_ + 128).view(FP4)
    woven = cudnn.interleave_gate_up(gate, up).view(torch.uint8)
    assert torch.equal(woven[:32], bytes_[:32] + 128)
    assert torch.equal(woven[32:64], bytes_[:32])


@pytest.mark.parametrize(
    ("gate", "up", "words"),
    [
        (
            torch.ones(64, 8),
            torch.ones(32, 8),
            r"got torch.float32 \(64, 8\) and torch.float32 \(32, 8\); allowed: one",
        ),
        (torch.ones(32, 8), torch.ones(32, 8).half(), "got .*; allowed: one shape and type"),
        (torch.ones(48, 8), torch.ones(48, 8), "got the shape .48, 8.; allowed: .* a multiple of 32"),
        (torch.ones(32), torch.ones(32), "got the shape .32,.; allowed:"),
    ],
)
def test_weights_that_cannot_be_interleaved(gate: torch.Tensor, up: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=f"interleave_gate_up: gate and up: {words}"):
        cudnn.interleave_gate_up(gate, up)
