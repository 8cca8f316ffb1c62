"""RMSNorm + Hadamard transform + amax on the GPU: values, memory around the results, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnn.rmsnorm_rht_amax import RmsNormRhtAmax, best_num_threads, rmsnorm_rht_amax_wrapper
from gpu.common import assert_allocates_nothing_and_waits_for_nothing
from support.rmsnorm import assert_right

GUARD = 4096  # elements around a result that must stay as they are


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of NaN within a larger one of sevens, and the larger one."""
    count = torch.Size(shape).numel()
    memory = torch.full((count + 2 * GUARD,), 7.0, dtype=dtype, device="cuda")
    inside = memory[GUARD : GUARD + count].view(shape)
    inside.fill_(float("nan"))
    return inside, memory


def problem(m: int, n: int, dtype: torch.dtype = torch.bfloat16, rows: int = 2) -> dict[str, torch.Tensor]:
    x = torch.randn(m, n, device="cuda").to(dtype)
    w = (torch.rand(n, device="cuda") + 0.5).to(dtype)
    return {
        "x_tensor": x,
        "w_tensor": w,
        "o_tensor": torch.full_like(x, float("nan")),
        "amax_tensor": torch.full((m // rows,), float("nan"), device="cuda"),
    }


def compiled(tensors: dict[str, torch.Tensor], rows: int = 2, **options: Any) -> RmsNormRhtAmax:
    samples = {"sample_" + name.removesuffix("_tensor"): tensor for name, tensor in tensors.items()}
    norm = RmsNormRhtAmax(**samples, rows_per_cta=rows, **options)
    norm.compile()
    return norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "n", "threads", "rows"),
    [
        (256, 2048, None, 2),
        (256, 4096, None, 4),
        (256, 7168, None, 8),
        (256, 8192, None, 2),
        (256, 16384, None, 2),
        (128, 32768, None, 2),
        (4096, 4096, None, 8),
        (2112, 2048, 32, 1),
        (96, 256, 32, 3),
        (96, 768, 96, 1),
        (96, 512, 64, 96),
        (6, 40960, 1024, 2),
        (6, 65536, None, 2),
        (1024, 65536, None, 8),
        (21, 65536, 512, 3),
        (300, 45056, 512, 4),
        (2, 4096, None, 2),
        (1, 4096, None, 1),
    ],
)
def test_values_and_guards(dtype: torch.dtype, m: int, n: int, threads: int | None, rows: int) -> None:
    tensors = problem(m, n, dtype, rows)
    tensors["o_tensor"], o_memory = guarded((m, n), dtype)
    tensors["amax_tensor"], amax_memory = guarded((m // rows,), torch.float32)
    norm = compiled(tensors, rows, num_threads=threads or best_num_threads(n), eps=1e-3)
    norm.execute(**tensors)
    assert_right(*tensors.values(), eps=1e-3)
    for memory in (o_memory, amax_memory):
        assert bool((memory[:GUARD] == 7).all())
        assert bool((memory[-GUARD:] == 7).all())


def test_more_elements_than_32_bits_count() -> None:
    m, n = 147456, 16384  # 2.4e9 elements
    x = torch.randn(512, n, device="cuda").bfloat16().repeat(m // 512, 1)
    w = (torch.rand(n, device="cuda") + 0.5).bfloat16()
    o, amax = rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=8)
    assert_right(x[:512], w, o[:512], amax[:64])
    for part in range(0, m, 16384):
        assert bool((o[part : part + 16384].view(-1, 512, n) == o[:512]).all())
    assert bool((amax.view(-1, 64) == amax[:64]).all())


def test_in_place() -> None:
    tensors = problem(512, 4096)
    norm = compiled(tensors)
    norm.execute(**tensors)
    expected = tensors["o_tensor"].clone()
    norm.execute(**{**tensors, "o_tensor": tensors["x_tensor"]})
    assert torch.equal(tensors["x_tensor"], expected)


def test_repeats_bit_for_bit_whatever_the_number_of_rows() -> None:
    tensors = problem(4096, 4096, rows=8)
    norm = compiled(tensors, 8)
    norm.execute(**tensors)
    first = tensors["o_tensor"].clone()
    few = {name: tensor[:64] if name != "w_tensor" else tensor for name, tensor in tensors.items()}
    few["amax_tensor"] = tensors["amax_tensor"][:8]
    for _ in range(5):
        tensors["o_tensor"].fill_(float("nan"))
        norm.execute(**few)
        assert torch.equal(tensors["o_tensor"][:64], first[:64])


def test_execute_allocates_nothing_and_waits_for_nothing() -> None:
    tensors = problem(1024, 4096)
    norm = compiled(tensors)
    assert_allocates_nothing_and_waits_for_nothing(lambda: norm.execute(**tensors))
