"""What ``fp8=True`` multiplies: rows and weights in e4m3, and who shares the weights' copies."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import cudnn
from cudnn import moe
from cudnn.moe import quantizing
from cudnn.moe.quantizing import quantized, quantized_weights
from cudnn.nn import MoE
from support import block_scales


@pytest.mark.full
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_kernel_of_e4m3(arch: str) -> None:
    """Rows, tokens by choice and weights: the bits of the reference; with zeros, and rows that fill no block."""
    x = torch.randn(150, 256).bfloat16()
    x[3, 128:] = 0.0
    offsets, _, scatter_idx = moe.sort(torch.randint(-1, 4, (150, 2), dtype=torch.int32), 4)
    weights = list(torch.randn(2, 128, 256).bfloat16())

    def made() -> list[torch.Tensor]:
        of_slots = [t[: offsets[-1]] for t in quantized(x, scatter_idx, 300)]
        every = [*quantized(x), *of_slots, *quantized_weights(weights, True)]
        return [t.view(torch.uint8) if t.itemsize == 1 else t for t in every]

    expected = made()
    with cudnn.emulation(arch, races=True):
        assert all(torch.equal(a, b) for a, b in zip(made(), expected, strict=True))
    narrow, factors = quantized(x)
    wide = (narrow.float().unflatten(1, (-1, 128)) * factors[..., None]).flatten(1)
    assert float((wide - x.float()).norm() / x.float().norm()) < 0.03


@pytest.mark.parametrize("arch", ["", "sm_90a", "sm_100a"])
def test_blocks_of_any_magnitude(arch: str) -> None:
    """Rows, tokens by choice and weights: 0, subnormal, tiny, largest, infinity, NaN, by the rule of scales."""
    x = block_scales.values(128).bfloat16()
    x[block_scales.AMAX.index(block_scales.LARGEST)] /= 2.0  # which bfloat16 would make infinity
    amax = x.float().abs().amax(1)
    rules = [block_scales.rule(float(value), 448.0, "float32") for value in amax]
    scales, multipliers = (torch.tensor(each, dtype=torch.float32) for each in zip(*rules, strict=True))
    expected = (x.float() * multipliers[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    scatter_idx = torch.arange(len(x), dtype=torch.int32).flip(0)[:, None].contiguous()
    weights = [row.expand(128, 128).contiguous() for row in x[:, None]]
    with cudnn.emulation(arch) if arch else contextlib.nullcontext():
        rows, of_slots, by_block = (
            quantized(x.float() if not arch else x),
            quantized(x, scatter_idx, len(x)),
            quantized_weights(weights, True),
        )
    actual = [rows, [t.view(torch.uint8).flip(0).view(t.dtype) if t.itemsize == 1 else t.flip(0) for t in of_slots]]
    actual.append([by_block[0][:, 5], by_block[1][:, 0]])
    for q, s in actual:
        assert block_scales.same(s[:, 0], scales)
        assert block_scales.same(q, expected)
        block_scales.check(x.float(), q.float(), s[:, 0], 448.0, "float32")


def test_weights_in_e4m3_follow_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept between passes without gradients, in memory that CUDA graphs may read, also for another call's list."""
    up, down = (torch.randn(4, n, 128).bfloat16() for n in (256, 128))
    captured = False
    monkeypatch.setattr(quantizing, "_captures", lambda x: captured)
    first = quantized_weights([up], False)
    before = [x.float().clone() for x in first]
    assert quantized_weights([up], False) is first
    with torch.no_grad():
        up.mul_(2.0)
    captured = True
    assert quantized_weights([up], False) is not first
    captured = False
    assert quantized_weights([up], False)[1] is first[1]
    assert torch.equal(first[0].float(), before[0])
    assert torch.equal(first[1], 2 * before[1])
    up.data.mul_(2.0)  # as Megatron's optimizers do, which no version tells
    assert torch.equal(quantized_weights([up], True)[1], 4 * before[1])
    up.data.mul_(2.0)
    assert torch.equal(quantized_weights([up], False)[1], 8 * before[1])
    captured = True
    assert quantized_weights([up], False)[1] is first[1]
    quantized_weights([up], True)  # replays of this train
    captured = False
    for factor in (8, 16):
        assert torch.equal(quantized_weights([up], False)[1], factor * before[1])
        up.data.mul_(2.0)
    captured = True
    quantized_weights([down], False)  # written by replays only
    captured = False
    assert quantized_weights([down], False) is quantized_weights([down], False)
    with torch.inference_mode():
        fixed = down.clone()
        assert quantized_weights([fixed], False) is not quantized_weights([fixed], False)


@pytest.mark.gpu
def test_weights_in_e4m3_on_other_streams() -> None:
    """Those that one stream makes, late, are waited for by another one."""
    up = torch.randn(4, 256, 128, device="cuda").bfloat16()
    expected = quantized_weights([up.clone()], False)[1].clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    quantized_weights([up], False)
    with torch.cuda.stream(torch.cuda.Stream()):
        actual = quantized_weights([up], False)[1].clone()
    torch.cuda.synchronize()
    assert torch.equal(actual, expected)


def test_one_thread_at_a_time_makes_weights_in_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    up = torch.randn(4, 256, 128).bfloat16()
    now, most = [0], [0]

    def slow(*_: Any) -> None:
        now[0] += 1
        most.append(now[0])
        time.sleep(0.02)
        now[0] -= 1

    monkeypatch.setattr(quantizing, "_quantize", slow)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda trains: quantized_weights([up], trains), [True, False] * 2))
    assert max(most) == 1 < len(most)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [True, "blockwise"])
def test_threads_share_a_layer_of_e4m3(fp8: bool | str) -> None:
    """Threads on separate streams, alternately with and without gradients: bitwise equal to one thread."""
    layer = MoE(256, 128, 8, 2, fp8=fp8, device="cuda")
    every = [torch.randn(tokens, 256, device="cuda").bfloat16() for tokens in (300, 1, 777, 64)]

    def passes_of(x: torch.Tensor) -> list[torch.Tensor]:
        y = layer(x)
        actual = [y.detach(), *torch.autograd.grad(y, [*layer.parameters()], torch.ones_like(y))]
        with torch.no_grad():
            return [*actual, layer(x)]

    expected = [passes_of(x) for x in every]
    torch.cuda.synchronize()

    def repeated(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(40):
                actual = passes_of(x)
        return actual

    with ThreadPoolExecutor(len(every)) as threads:
        actual = list(threads.map(repeated, every))
    torch.cuda.synchronize()
    for some, right in zip(actual, expected, strict=True):
        assert all(map(torch.equal, some, right))
