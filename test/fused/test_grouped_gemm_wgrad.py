"""Weight gradients of the experts, with and without scale factors, against their formula; and what they refuse."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import cudnn
from cudnn.fused.gradients import WGradInputOrder
from cudnn.fused.grouped import gather
from support import grouped, kernel_inputs
from support.oracle import BF16, E4M3, E8M0, F32, FP4
from support.selection import within

pytest.importorskip("ptx_emulator")

I32 = torch.int32
WHERE = [
    "reference",
    *(pytest.param(arch, marks=pytest.mark.full) for arch in ("sm_90a", "sm_100a")),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


def gradients(ends: tuple[int, ...], tokens: int, indexed: str = "", **more: Any) -> None:
    """``indexed`` operands gather their tokens from half the number."""
    a, b = torch.randn(tokens, 136).bfloat16(), torch.randn(tokens, 72).bfloat16()
    offsets = torch.tensor(ends, dtype=torch.int32)
    arguments = {"a": a, "b": b}
    for name in indexed:
        arguments[name], more[f"{name}_index"] = kernel_inputs.gathered(arguments[name][..., None], 0)
        arguments[name] = arguments[name][..., 0]
    a, b = (gather(x, more.get(f"{name}_index")) for name, x in arguments.items())
    (wgrad,) = cudnn.grouped_gemm_wgrad_wrapper(
        arguments["a"].T, arguments["b"], None, None, offsets, wgrad_dtype=F32, **more
    )
    start = 0
    for expert, end in enumerate(ends):
        scale = more["global_scale_a"][expert] * more["global_scale_b"][expert] if "global_scale_a" in more else 1.0
        expected = scale * (a[start:end].double().T @ b[start:end].double())
        torch.testing.assert_close(wgrad[expert].double(), expected, rtol=1e-4, atol=1e-4)
        start = end


SLOW = [pytest.param(*case, marks=pytest.mark.full) for case in (("sm_100a", ""), ("sm_90a", "b"), ("sm_100a", "a"))]


@pytest.mark.parametrize(
    ("where", "indexed"), [*(("reference", names) for names in ("", "a", "b", "ab")), ("sm_90a", ""), *SLOW]
)
def test_weight_gradients(where: str, indexed: str) -> None:
    scales = {} if indexed else {name: torch.rand(3) + 0.5 for name in ("global_scale_a", "global_scale_b")}
    with within(where):
        gradients((5, 5, 180), 200, indexed, **scales)


def test_numbers_of_tokens() -> None:
    """What is refused, before anything runs; and no numbers, which are nothing to do."""
    p = grouped.problem("grouped_gemm", "fp8", inputs={"a_index": I32})
    with pytest.raises(ValueError, match="a_index tensor: got a tensor, for float8_e4m3fn; allowed: None, but for"):
        grouped.run(p, "reference")
    p = grouped.problem("grouped_gemm", inputs={"a_index": I32, "prob": F32})
    p.inputs["a_index"] = p.inputs["a_index"][1:]
    with pytest.raises(ValueError, match=r"prob tensor shape mismatch: expected \(199, 1, 1\)"):
        grouped.run(p, "reference")
    p.inputs |= {"a_index": p.inputs["a_index"][:0], "prob": p.inputs["prob"][:0]}
    grouped.run(p, "sm_90a")
    assert p.results["d_tensor"].shape == (0, 128, 1)
    x, index = torch.zeros(64, 32).bfloat16(), torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ValueError, match="a_index tensor: got a tensor, with contiguous tokens of a; allowed: None"):
        cudnn.grouped_gemm_wgrad_wrapper(x.T.contiguous(), x, None, None, index[:2], a_index=index)


def scaled_gradients(where: str, operand_type: str, ends: tuple[int, ...], **more: Any) -> None:
    """Operands with scale factors, separate for each expert; with other tokens after the last one."""
    m, n, tokens, device = 136, 72, more.pop("offsets_of", ends[-1]) + 128, "cuda" if where == "gpu" else "cpu"
    a, b = (grouped.operand(operand_type, rows, tokens, 1, device) for rows in (m, n))
    vector = grouped.OPERAND_TYPES[operand_type][2]
    sfa, sfb = (grouped.by_expert(x.scales, sorted(ends), vector) for x in (a, b))
    names = more.pop("scales_of", () if operand_type == "mxfp8" else ("global_scale_a", "global_scale_b"))
    scales = {key: torch.rand(len(ends), device=device) + 0.5 for key in names}
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    for x in (a, b) if "input_order" in more else ():
        raw, packed = x.tensor[..., 0].view(torch.uint8), 2 if operand_type != "mxfp8" else 1
        parts = raw.tensor_split([end // packed for end in ends], 1)
        x.tensor = torch.cat([part.reshape(-1) for part in parts]).view(raw.shape).view(x.tensor.dtype)[..., None]
    addressed = more.pop("addressed", False)
    out: Any = torch.full((len(ends), m, n), 2.0, device=device)
    out = [x.clone() for x in out] if addressed else out
    arguments = {"wgrad_tensor": out}
    if addressed:
        arguments = {"output_mode": "discrete", "wgrad_ptrs": torch.tensor([x.data_ptr() for x in out], device=device)}
    with within(where):
        cudnn.grouped_gemm_wgrad_wrapper(
            a.tensor[..., 0],
            b.tensor[..., 0].T,
            sfa,
            sfb,
            offsets,
            wgrad_dtype=F32,
            sf_vec_size=vector,
            **arguments,
            **scales,
            **more,
        )
    start = 0
    for expert, end in enumerate(ends):
        expected = a.values[:, start:end, 0] @ b.values[:, start:end, 0].T
        for scale in scales.values():
            expected = expected * scale[expert].double()
        expected = expected + (2.0 if more.get("accumulate_on_output") else 0.0)
        torch.testing.assert_close(out[expert].double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        start = end


def packed_gradients(where: str, apart: int = 0, **more: Any) -> None:
    """An object for pointer arrays of gradients, called with one tensor; its experts' matrices may lie apart."""
    m, n, ends, device = 64, 96, (64, 64, 192), "cuda" if where == "gpu" else "cpu"
    a, b = (torch.randint(-3, 4, (ends[-1], rows), device=device).bfloat16() for rows in (m, n))
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    options = {"num_experts": len(ends), "wgrad_shape": (m, n), "wgrad_dtype": F32, **more}
    operation = cudnn.GroupedGemmWgradSm100(a.T, b, None, None, offsets, **options)
    assert operation.check_support()
    operation.compile()
    memory = torch.full((len(ends), m * n + apart), 2.0, device=device)
    wgrad = memory.as_strided((len(ends), m, n), (m * n + apart, n, 1))
    with within(where):
        for _ in range(2):
            wgrad.fill_(2.0)
            operation.execute(a.T, b, None, None, offsets, wgrad_tensor=wgrad)
        actual = wgrad.clone()
        wgrad.fill_(2.0)
        addresses = torch.tensor([x.data_ptr() for x in wgrad], device=device)
        operation.execute(a.T, b, None, None, offsets, wgrad_ptrs=addresses)  # addresses still do
    assert torch.equal(wgrad, actual)
    assert (memory[:, m * n :] == 2.0).all()
    start = 0
    for expert, end in enumerate(ends):
        expected = a[start:end].T.double() @ b[start:end].double()
        assert torch.equal(wgrad[expert].double(), expected + (2.0 if more else 0.0))
        start = end


@pytest.mark.parametrize("where", ["reference", "sm_90a", "sm_100a", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_packed_gradients_behind_addresses(where: str) -> None:
    packed_gradients(where, apart=32)
    packed_gradients(where, accumulate_on_output=True)


@pytest.mark.parametrize(
    ("wgrad", "message"),
    [
        (torch.empty(3, 64, 32), r"wgrad tensor: got torch.float32 of the shape \(3, 64, 32\).*\(3, 64, 96\)"),
        (torch.empty(2, 64, 96), r"shape \(2, 64, 96\)"),
        (torch.empty(3, 64, 96).bfloat16(), "wgrad tensor: got torch.bfloat16"),
        (torch.empty(3, 96, 64).mT, "each matrix contiguous"),
    ],
)
def test_packed_gradients_that_do_not_fit(wgrad: torch.Tensor, message: str) -> None:
    a, b, offsets = torch.zeros(64, 64).bfloat16(), torch.zeros(64, 96).bfloat16(), torch.tensor([0, 0, 64]).int()
    options = {"num_experts": 3, "wgrad_shape": (64, 96), "wgrad_dtype": F32}
    operation = cudnn.GroupedGemmWgradSm100(a.T, b, None, None, offsets, **options)
    operation.check_support()
    operation.compile()
    with pytest.raises(ValueError, match=message):
        operation.execute(a.T, b, None, None, offsets, wgrad_tensor=wgrad)


SCALED: list[dict[str, Any]] = [
    {"operand_type": "mxfp8", "ends": (128, 128, 384), "accumulate_on_output": True},
    {"operand_type": "nvfp4", "ends": (64, 64, 192), "addressed": True},
    {"operand_type": "mxfp4", "ends": (128, 256), "addressed": True, "accumulate_on_output": True},
    {"operand_type": "nvfp4", "ends": (64, 64, 256), "input_order": "tensor_ragged"},
    {"operand_type": "mxfp8", "ends": (128, 384, 384), "addressed": True, "input_order": WGradInputOrder.TensorRagged},
]


@pytest.mark.parametrize(
    "arguments", SCALED, ids=lambda arguments: "-".join(map(str, arguments)) + arguments["operand_type"]
)
@pytest.mark.parametrize("where", WHERE)
def test_scaled_weight_gradients(where: str, arguments: dict[str, Any]) -> None:
    scaled_gradients(where, **arguments)


@pytest.mark.parametrize("where", WHERE)
def test_gradients_of_experts_matrices(where: str) -> None:
    """Of bfloat16: the contiguous tokens of each expert are a separate matrix; those of b are strided."""
    device, ends = "cuda" if where == "gpu" else "cpu", (64, 64, 200)
    a, b = torch.randn(136, 208, device=device).bfloat16(), torch.randn(208, 72, device=device).bfloat16()
    parts = torch.cat([x.reshape(-1) for x in a.tensor_split(ends, 1)]).view(a.shape)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    with within(where):
        (wgrad,) = cudnn.grouped_gemm_wgrad_wrapper(
            parts, b, None, None, offsets, wgrad_dtype=F32, input_order="tensor_ragged"
        )
        for actual, start, end in zip(wgrad, (0, *ends[:-1]), ends, strict=True):
            torch.testing.assert_close(actual, a[:, start:end].float() @ b[start:end].float(), rtol=1e-4, atol=1e-4)
        with pytest.raises(
            NotImplementedError, match=r"input_order: got 'tensor_ragged' .*; allowed: with scale factors or"
        ):
            cudnn.grouped_gemm_wgrad_wrapper(parts.half(), b.half(), None, None, offsets, input_order="tensor_ragged")


NO_TOKENS = [(BF16, None, 16, {}), (E4M3, E8M0, 32, {}), (FP4, E4M3, 16, {"input_order": "tensor_ragged"})]


@pytest.mark.parametrize(("dtype", "scale", "vector", "more"), NO_TOKENS, ids=["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("where", WHERE)
def test_gradients_of_no_tokens_are_zero(where: str, dtype: Any, scale: Any, vector: int, more: dict[str, Any]) -> None:
    """In a tensor and at addresses, or added to what they were. Empty operands are as Transformer Engine makes them."""
    device = "cuda" if where == "gpu" else "cpu"
    out = torch.full((2, 16, 32), 7.0, device=device)
    nothing, offsets = torch.empty(0, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    a, b = nothing.to(BF16), nothing.to(BF16)
    if scale is not None:
        a, b = (nothing.to(torch.uint8).view(dtype) for _ in range(2))
    a, b, factors = a.as_strided((16, 0), (16, 1)), b.as_strided((0, 32), (32, 1)), None
    if scale is not None:
        factors = nothing.to(torch.uint8).as_strided((128, 0), (16, 1)).view(scale)
    if more:
        more = more | {f"global_scale_{name}": torch.zeros(2, device=device) for name in "ab"}
    arguments: dict[str, Any] = {"wgrad_dtype": F32, "sf_vec_size": vector, **more}
    behind = {"output_mode": "discrete", "wgrad_ptrs": torch.tensor([x.data_ptr() for x in out], device=device)}
    with within(where):
        call = functools.partial(cudnn.grouped_gemm_wgrad_wrapper, a, b, factors, factors, offsets, **arguments)
        for added in (True, False):
            call(**behind, accumulate_on_output=added)
            assert bool((out == 7.0).all()) if added else not out.any()
        out.fill_(7.0)
        (wgrad,) = call(wgrad_tensor=out)
        assert wgrad is out
        assert not out.any()
        out.fill_(7.0)
        scales = {key: x for key, x in more.items() if key.startswith("global")}
        others = {f"sample_{key}" if key in scales else key: x for key, x in more.items()}
        made = cudnn.GroupedGemmWgrad(a, b, factors, factors, offsets, out, sf_vec_size=vector, **others)
        made.compile()
        made.execute(a, b, factors, factors, offsets, out, **scales)
        assert not out.any()


def test_samples_that_tell_where_experts_end() -> None:
    """Of gradients with scale factors, ends are looked at when an object is made; float4 with 8-bit scale factors has
    global ones.
    """
    for ends, error in (
        ((128, 64), "offsets: got .128, 64.; allowed: numbers that do not decrease, from 0 to 320"),
        ((64, 384), "offsets: got .64, 384.; allowed: numbers that do not"),
    ):
        with pytest.raises(ValueError, match=error):
            scaled_gradients("reference", "nvfp4", ends, offsets_of=192)
    with pytest.raises(
        ValueError, match=r"global_scale_a and global_scale_b: got None; allowed: both, for scale factors"
    ):
        scaled_gradients("reference", "nvfp4", (64, 192), scales_of=())
    a, factors = torch.zeros(128, 128).to(E4M3), torch.ones(128, 4).to(E8M0)
    with pytest.raises(ValueError, match=r"offsets tensor: got the shape \(1, 2\); allowed: \(e,\)"):
        cudnn.GroupedGemmWgrad(a, a.T, factors, factors, torch.tensor([[64, 128]]).int(), sf_vec_size=32)


def test_values_of_weight_gradients() -> None:
    """Contiguous tokens of experts are multiples of 16 bytes, those with scale factors of four blocks."""
    a, b = torch.zeros(64, 200).bfloat16(), torch.zeros(200, 32).bfloat16()
    for ends, allowed in (((64, 100), "multiples of 8"), ((64, 208), "from 0 to 200, multiples of 8")):
        with pytest.raises(ValueError, match=f"offsets: got .*; allowed: .*{allowed}"):
            cudnn.grouped_gemm_wgrad_wrapper(a, b, None, None, torch.tensor(ends, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"offsets: got \[64, 192\]; allowed: .*, multiples of 128"):
        scaled_gradients("reference", "mxfp8", (64, 192))
