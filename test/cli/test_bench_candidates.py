"""The candidates of ``cudnn bench`` compute the same, on CPU tensors."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import cudnn
from cudnn import bench, lazy
from cudnn.bench import (
    Clock,
    Problem,
    Row,
    attention,
    dense_gemm,
    first_step,
    flash_attn,
    gated_mlp,
    gemm,
    gemm_peers,
    grouped,
    grouped_fp8,
    host,
    model,
    moe,
    moe_decode,
    moe_fp8,
    moe_peers,
    nsa,
    operands,
    report,
)
from cudnn.cli.bench import table
from cudnn.fused import registry
from cudnn.moe import quantizing

PEER = "benchmarks/triton_gemm_swiglu.py"


def in_torch(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Replaces it in PyTorch too: ``lazy.torch`` takes all of PyTorch's names again when it lacks one."""
    for module in (lazy.torch, torch):
        monkeypatch.setattr(module, name, value)


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks run on CPU tensors, and nothing is compiled."""
    monkeypatch.setattr(operands, "DEVICE", "cpu")
    in_torch(monkeypatch, "compile", lambda function, **options: function)


def timed(problem: Problem, yardsticks: tuple[str, ...]) -> list[Row]:
    """Every call takes a millisecond."""
    clock = Clock(lambda call, calls: 1e-3, 1, 1e-3, 1e-3, min)
    return bench.measure(dataclasses.replace(problem, clock=clock), yardsticks)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in bench.BENCHMARKS if name in registry.gemms() for dtype in ("bf16", "nvfp4")),
        *(("gemm_swiglu", dtype) for dtype in ("fp16", "fp8", "fp8_128", "mxfp8")),
    ],
)
def test_candidates_of_gemms_agree_on_cpu_tensors(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The APIs take what the benchmark gives them: on CPU tensors they run their references."""
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(gemm, "COPY_BYTES", 1 << 12)
    benchmark = bench.find(name)
    options = bench.Options(dtype, ((256, 256, 128),), without_optional=bool(benchmark.optional))
    rows = [row for problem in benchmark.problems(options) for row in timed(problem, benchmark.yardsticks)]
    refused = {row.name for row in rows if row.refused}
    allowed = {"our GEMM alone", "Triton, fused", "Triton, fused, no ab12", "torch._scaled_mm, blocks"}
    allowed |= {gemm_peers.QUACK, gemm_peers.DEEP_GEMM}  # not installed
    assert refused <= allowed, [row.refused for row in rows]
    assert [row.problem for row in rows][-1] == "host time, warm"


@pytest.mark.parametrize("name", [name for name in registry.packages() if "grouped" in name])
def test_candidates_of_grouped_gemms_agree_on_cpu_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    in_torch(monkeypatch, "_grouped_mm", grouped_product)
    benchmark = bench.find(name)
    step = registry.find(name).group_rows
    shape = (128, 192, 100, 3) if registry.find(name).tokens == "k" else (100 // step * step or 3 * step, 128, 128, 3)
    rows = [
        row
        for routing in grouped.ROUTINGS
        for problem in benchmark.problems(bench.Options("bf16", (shape,), routing=routing))[:1]
        for row in timed(problem, benchmark.yardsticks)
    ]
    assert {row.name for row in rows if row.refused} <= {"Triton", gemm_peers.QUACK}, [row.refused for row in rows]
    assert len({row.name for row in rows}) >= 3


def grouped_product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``torch._grouped_mm``, which the CPU has not in every version."""
    spans = list(itertools.pairwise([0, *offs.tolist()]))
    if b.ndim == 2:
        return torch.stack([a[:, x:y] @ b[x:y] for x, y in spans])
    return torch.cat([a[x:y] @ b[e] for e, (x, y) in enumerate(spans)])


def test_candidates_of_a_gated_mlp_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    shape, wide = (96, 128, 64), "cuBLAS, float32 result"  # which the CPU has not
    problems = bench.find("gated_mlp").problems(bench.Options("bf16", (shape,)))
    assert [problem.flops for problem in problems] == [18.0 * 96 * 128 * 64, 6.0 * 96 * 128 * 64]
    for problem in (*problems, *gated_mlp.gemm_problems(shape)):
        candidates = [each for each in problem.candidates() if each.name != wide]
        assert all(each.prepare is not None for each in candidates)
        refused = {each.name: each.check(each.prepare()()) for each in candidates if each.prepare is not None}
        assert set(refused.values()) == {""}, (problem.label, refused)
        zeros = {name: 0 * value for name, value in candidates[0].prepare()().items()}  # pyright: ignore[reportOptionalCall]
        assert "wrong result" in candidates[0].check(zeros)


def test_candidates_of_a_layer_of_experts_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(bench, "_peak", lambda call: 5e9)
    benchmark, shape = bench.find("moe"), (50, 64, 32, 4, 2)
    assert moe.flops_of(shape) == (6 * 50 * 64 * 32 * 2, 6 * 50 * 64 * 32 * 2, 12 * 50 * 64 * 32 * 2)
    here = [moe.PEER, *([moe.TRANSFORMERS] if moe_peers.has_transformers() else []), moe.LOOP, moe.OURS]
    shown = report.Report("", "bf16", "", "", benchmark.yardsticks)
    for problem in benchmark.problems(bench.Options("bf16", (shape,))):
        rows = timed(problem, benchmark.yardsticks)
        assert {row.name: row.refused for row in rows} == dict.fromkeys(here, ""), problem.label
        assert {row.memory for row in rows} == {5e9}
        shown.rows += rows
    console = Console(width=400)
    with console.capture() as printed:
        console.print(table(shown))
    assert "5.00" in printed.get()
    report.write_csv(shown, tmp_path / "run.csv")
    assert report.read_csv(tmp_path / "run.csv").rows[-1].memory == rows[-1].memory
    assert len(benchmark.problems(bench.Options("bf16"))) == 9
    assert len(benchmark.problems(bench.Options("bf16", all=True))) == 3 * (3 + 9 + 5)
    refused = {c.name: c.check({"y": torch.zeros(50, 64)}) for c in moe.candidates(shape, "forward")}
    assert all("wrong result: y is off by" in refused[name] for name in here)
    (fp8,) = (c for c in moe.candidates((50, 128, 128, 4, 2), "forward") if c.name == moe.FP8)
    assert not fp8.check(fp8.prepare()())


def test_candidates_of_attention_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    deselected: list[Any] = []
    monkeypatch.setattr(cudnn.pygraph, "deselect_engines", lambda self, names: deselected.append(names))
    benchmark, shape = bench.find("sdpa"), (2, 70, 4, 2, 64, 64)
    for case in (attention.Case(*shape), attention.Case(*shape, causal=True, window=20, dtype="fp16")):
        for which in attention.PASSES:
            found = [x for x in attention.candidates(case, which) if x.name != attention.FLEX]
            assert found[0].name == attention.GRAPH
            assert [x.check(x.prepare()()) for x in found] == [""] * len(found), (case.label, which)
            assert found[-1].ours
            assert "wrong result: " in found[-1].check(collections.defaultdict(lambda: torch.zeros(2, 4, 70, 64)))
    assert deselected == [["fused"]] * 8  # graphs, of which each pass has two: ours would be timed as cuDNN's
    assert attention.Case(1, 4, 1, 1, 8, 8, causal=True, window=1).flops("forward") == 2 * (8 - 2) * 16
    assert len(benchmark.problems(bench.Options("bf16", benchmark.quick, quick=True))) == 9
    assert len(benchmark.problems(bench.Options("bf16", all=True))) > 100


def test_candidates_of_native_sparse_attention_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "DEVICE", "cpu")
    monkeypatch.setattr(nsa, "CHECKED_TOKENS", 128)
    benchmark, shape = bench.find("nsa"), (128, 2, 1, 64)
    assert benchmark.quick == nsa.SHAPES
    assert nsa.flops_of(shape, nsa.STEPS[3]) == 4 * 128 * 2 * 64 * 2 * 64
    assert len(benchmark.problems(bench.Options("bf16", all=True))) == 6 * len(nsa.STEPS)
    quick = [x.label for x in benchmark.problems(bench.Options("bf16", nsa.SHAPES, quick=True))]
    assert not any("alike" in label for label in quick)
    assert all("whole" in label for label in quick[:6])
    assert len(quick) == 3 * 7
    for problem, step in zip(benchmark.problems(bench.Options("bf16", (shape,))), nsa.STEPS, strict=True):
        peer, ours, *_ = problem.candidates()
        assert (peer.name, ours.name, ours.ours) == (nsa.PEER, nsa.OURS, True)
        assert ours.prepare is not None
        results = ours.prepare()()
        assert ours.check(results) == "", problem.label
        changed = {x: found.roll(1, 1) + 1 for x, found in results.items()}
        few_tokens = nsa.make_tensors(shape, step.correlated)
        assert nsa.wrong(step, few_tokens, changed).startswith("wrong result: "), problem.label


def test_candidates_of_fp8_grouped_gemms_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    in_torch(monkeypatch, "_grouped_mm", grouped_product)
    benchmark = bench.find("grouped_gemm_fp8")
    problem, gradient = benchmark.problems(bench.Options("fp8", ((256, 128, 256, 2),)))
    rows = {row.name: row.refused for row in timed(problem, benchmark.yardsticks)}
    assert [name for name, refused in rows.items() if not refused] == [
        grouped_fp8.BF16,
        grouped_fp8.OURS_BF16,
        grouped_fp8.OURS,
    ]
    assert rows[gemm_peers.DEEP_GEMM] == f"{bench.MISSING}: No module named 'deep_gemm'"
    candidates = {candidate.name: candidate for candidate in grouped_fp8.candidates((256, 128, 256, 2))}
    assert candidates[grouped_fp8.OURS].check({"d": torch.zeros(256, 128)}).startswith("wrong result: d is off")
    assert len(benchmark.problems(bench.Options("fp8"))) == 2 * len(grouped_fp8.SHAPES)
    rows = {row.name: row.refused for row in timed(gradient, benchmark.yardsticks)}
    names = (grouped_fp8.WGRAD_BF16, grouped_fp8.WGRAD, grouped_fp8.WGRAD_ADDED)
    assert [name for name, refused in rows.items() if not refused] == [grouped_fp8.BF16, *names]
    assert gradient.label == "256x128x256x2 gradient of weights"
    *_, added = grouped_fp8.gradient_candidates((256, 128, 256, 2))
    assert added.check({"wgrad": torch.zeros(2, 128, 256)}).startswith("wrong result: wgrad is off")


def test_deep_gemm_gets_aligned_scales_and_the_expert_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that computes what DeepGEMM documents: operands (data, scales), B by expert, an expert for a row."""
    on_the_cpu(monkeypatch)
    in_torch(monkeypatch, "_grouped_mm", grouped_product)

    def dequantized(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        rows = 1 if scales.shape[-2] == x.shape[-2] else 128
        return x.float() * scales.repeat_interleave(rows, -2).repeat_interleave(128, -1)

    def dense(a: Any, b: Any, d: torch.Tensor) -> None:
        d.copy_(dequantized(*a) @ dequantized(*b).T)

    def by_expert(a: Any, b: Any, d: torch.Tensor, expert_of_row: torch.Tensor) -> None:
        assert expert_of_row.dtype == torch.int32
        weights = dequantized(*b)
        for expert in range(len(weights)):
            rows = expert_of_row == expert
            d[rows] = (dequantized(*a)[rows] @ weights[expert].T).to(d.dtype)

    def over_tokens(
        a: Any, b: Any, d: torch.Tensor, sizes: list[int], on_device: torch.Tensor, c: torch.Tensor
    ) -> None:
        assert on_device.tolist() == sizes
        starts = [0, *itertools.accumulate(sizes)]
        for expert, (start, end) in enumerate(itertools.pairwise(starts)):
            x, y = (
                dequantized(data[start * rows : end * rows].view(rows, -1), scales[:, start // 128 : end // 128])
                for (data, scales), rows in ((a, d.shape[1]), (b, d.shape[2]))
            )
            d[expert] = c[expert] + x @ y.T

    layout = types.SimpleNamespace(get_mn_major_tma_aligned_tensor=lambda x: x.mT.contiguous().mT)
    library = types.SimpleNamespace(fp8_gemm_nt=dense, m_grouped_fp8_gemm_nt_contiguous=by_expert)
    library.k_grouped_fp8_gemm_nt_contiguous = over_tokens
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    monkeypatch.setitem(sys.modules, "deep_gemm.utils.layout", layout)
    for name, shape, dtype in (
        ("gemm_swiglu", (256, 256, 256), "fp8_128"),
        ("grouped_gemm_fp8", (512, 128, 256, 2), "fp8"),
    ):
        benchmark = bench.find(name)
        problems = [x for x in benchmark.problems(bench.Options(dtype, (shape,))) if x.flops]
        for problem in problems:
            rows = timed(problem, benchmark.yardsticks)
            (peer,) = (row for row in rows if row.name == gemm_peers.DEEP_GEMM)
            assert (peer.refused, peer.package) == ("", "sgl-deep-gemm"), problem.label
    inputs = {"padded_offsets": torch.tensor([100, 256]), "a": torch.zeros(256, 128, 1)}
    inputs |= {"b": torch.zeros(128, 128, 2), "sfa": torch.ones(256, 1, 1), "sfb": torch.ones(1, 1, 2)}
    with pytest.raises(ValueError, match="ends at no multiple of 128"):
        grouped_fp8.deep_gemm(inputs)


def test_quack_runs_the_fastest_of_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        tile_m: int = 0
        tile_n: int = 0
        pingpong: bool = False

    used = []

    def tuned(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, config: Config, alpha: float = 1.0) -> None:
        used.append(config)
        d.copy_(alpha * a @ b)

    interface = types.SimpleNamespace(
        default_config=lambda device: Config(), gemm_tuned=types.SimpleNamespace(fn=tuned)
    )
    monkeypatch.setitem(sys.modules, "quack", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    clock = dataclasses.replace(gemm_peers.GPU, seconds=lambda call, calls: call() and float(used[-1].tile_n))
    monkeypatch.setattr(gemm_peers, "GPU", clock)
    a, b, d = torch.ones(4, 2), torch.ones(2, 3), torch.empty(4, 3)
    call = gemm_peers.quack(a, b, d, "z", alpha=0.5)
    assert (call()["z"] == 1).all()
    assert used[-1].tile_n == 192


def test_calls_of_the_host_benchmark_run_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    in_torch(monkeypatch, "_grouped_mm", grouped_product)
    monkeypatch.setattr(host, "QWEN3_EXPERTS", 8)
    benchmark = bench.find("host")
    function = types.SimpleNamespace(flash_attn_func=lambda *x, **options: x[0])
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", function)
    *warm, first = benchmark.problems(bench.Options("bf16", ((64,),)))
    assert {problem.clock for problem in warm} == {bench.HOST}
    for problem in warm:
        rows = timed(problem, benchmark.yardsticks)
        assert [row.refused for row in rows] == [""] * len(rows), problem.label
        assert rows[0].name == "torch.add(out=)"
        assert sum(row.ours for row in rows) >= 1
    folders: list[str] = []

    def run(folder: str, pause: float) -> dict[str, float]:
        warm = folder in folders
        folders.append(folder)
        return {"forward": 0.2 if warm else 5.0 - pause / 10, "backward": 0.1 if warm else 1.0}

    monkeypatch.setattr(first_step, "run", run)
    rows = bench.measure(first, benchmark.yardsticks)
    seconds = {row.name: round(row.microseconds) / 1e6 for row in rows}
    assert seconds == {first_step.COLD: 6.0, first_step.SECOND: 0.3, first_step.LATER: 5.0}


SMALL_CASES = (
    flash_attn.Case(4, 2, (64, 64), lengths=(33, 1, 14)),
    flash_attn.Case(4, 2, (64, 64), lengths=(33, 1, 14), window=5, sink=True),
    flash_attn.Case(2, 1, (192, 128), 2, 24),
    flash_attn.Case(2, 1, (64, 64), 2, 24, window=7, softcap=2.0),
    flash_attn.Case(2, 1, (64, 64), 2, 24, causal=False),
)


def flash_attention_4(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """A stand-in for the peer's module."""
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.SimpleNamespace(**functions))


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.label)
def test_functions_of_flash_attention_agree_on_cpu_tensors(
    case: flash_attn.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions get the arguments of the case: without its mask or its sinks a result is wrong, and not timed."""
    on_the_cpu(monkeypatch)
    from cudnn.ops import flash_attn_func, flash_attn_varlen_func

    def with_lse(function: Any, without: str = "") -> Any:
        def run(*tensors: Any, **options: Any) -> Any:
            options |= {"causal": False, "window_size": (None, None)} if without == "mask" else {}
            options = {name: value for name, value in options.items() if name != without}
            return function(*tensors, **options), None

        return run

    def measured() -> list[Row]:
        problems = [*flash_attn.timed((case,), bench.GPU), *flash_attn.host((case,))]
        return [row for problem in problems for row in timed(problem, bench.find("flash_attn").yardsticks)]

    both = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    flash_attention_4(monkeypatch, **{name: with_lse(function) for name, function in both.items()})
    rows = measured()
    assert [(row.name, row.refused, row.ours) for row in rows] == [
        ("FlashAttention-4", "", False),
        ("cudnn.ops", "", True),
    ] * 4
    assert [bool(row.flops) for row in rows] == [True] * 4 + [False] * 4  # host time has no rate
    assert all(row.ratios[0] == (1.0, 1.0, 1.0) for row in rows)
    for part in [*["mask"] * case.causal, *["learnable_sink"] * case.sink, *["softcap"] * (case.softcap > 0)]:
        flash_attention_4(monkeypatch, **{name: with_lse(function, part) for name, function in both.items()})
        refused = [row.refused.split(":")[0] for row in measured() if not row.ours]
        assert refused == ["wrong result"] * 4, part
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert [row.refused.split(":")[0] for row in measured()] == [bench.MISSING, ""] * 4


def test_problems_of_flash_attention() -> None:
    """Rates count unmasked scores; a quick run has some problems of each sort, in order of priority."""
    windowed, dense = SMALL_CASES[1], SMALL_CASES[2]
    visible = sum(min(i + 1, 5) for n in (33, 1, 14) for i in range(n))
    assert windowed.flops("forward") == 2 * 4 * visible * 128
    assert dense.flops("backward") == 2 * 2 * (2 * 24 * 25 / 2) * (3 * 192 + 2 * 128)
    assert windowed.label == "48x4x2x64x64 3 sequences, window 5, sinks"
    benchmark = bench.find("flash_attn")
    full, quick = (benchmark.problems(bench.Options("bf16", quick=x)) for x in (False, True))
    labels = [problem.label for problem in full]
    assert len(labels) == len(set(labels)) == 2 * (3 + 2 + 13) + 2
    assert [problem.label for problem in quick] == [*labels[:8], labels[10]]
    assert {(problem.clock, bool(problem.tokens)) for problem in quick} == {
        (bench.QUICK, False),
        (bench.HOST, False),
        (bench.QUICK, True),
    }
    (shape,) = benchmark.shapes("2x64x4x2x64x64")
    own = benchmark.problems(bench.Options("bf16", (shape,)))
    assert [problem.label for problem in own] == [f"2x64x4x2x64x64 causal, {x}" for x in ("forward", "backward")]


@pytest.mark.parametrize("index", [0, 1])
def test_training_steps_of_packed_batches_agree_on_cpu_tensors(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    on_the_cpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    spec = flash_attn.MODELS[index]
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    small |= {"head_dim": 64, "num_hidden_layers": 2}
    spec = dataclasses.replace(spec, lengths=(20, 1, 9), sizes={**spec.sizes, **small})
    rows = timed(flash_attn.step_problem(spec, bench.GPU), bench.find("flash_attn").yardsticks)
    assert [(row.name, row.refused.split(":")[0]) for row in rows] == [
        (spec.peer, ""),
        ("FlashAttention-4", bench.MISSING),
        ("cudnn.ops", ""),
    ]
    assert rows[-1].tokens == 30
    peer, _, ours = flash_attn.step_candidates(spec)
    peer.check(peer.prepare()())
    assert ours.check({"output": torch.zeros(1, 30, 64)}).startswith("wrong result: output is off") == (index == 0)


def test_a_model_runs_with_transformers_implementations_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    on_the_cpu(monkeypatch)
    small = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    monkeypatch.setattr(model, "SIZES", small)
    benchmark = bench.find("model")
    prefill, training = benchmark.problems(bench.Options("bf16", ((2, 40, 1),)))
    for problem in (prefill, training):
        rows = timed(problem, benchmark.yardsticks)
        assert [(row.name, row.refused) for row in rows] == [(name, "") for name in model.IMPLEMENTATIONS]
        assert rows[1].rate == "240 k tok/s"  # 80 tokens in a third of a millisecond
    peer, ours, _ = model.candidates((2, 40, 1), "training")
    assert peer.check(peer.prepare()()) == ""
    assert ours.check({"loss": torch.tensor(1.0)}).startswith("wrong result: loss is off")


def test_candidates_of_decode_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    in_torch(monkeypatch, "_grouped_mm", grouped_product)
    benchmark = bench.find("moe_decode")
    (problem,) = benchmark.problems(bench.Options("bf16", ((3, 128, 128, 4, 2),)))
    rows = timed(problem, benchmark.yardsticks)
    assert [(row.name, row.refused) for row in rows] == [(name, "") for name in moe_decode.NAMES]
    assert problem.flops == 6 * 3 * 128 * 128 * 2


def test_candidates_of_a_training_step_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """They add to the same main gradients; the weights are quantized once for four micro-batches."""
    on_the_cpu(monkeypatch)
    benchmark = bench.find("moe_fp8")
    (problem,) = benchmark.problems(bench.Options("fp8", ((40, 128, 128, 4, 2),)))
    quantized, quantize = [], quantizing._quantize
    monkeypatch.setattr(quantizing, "_quantize", lambda *a: (quantized.append(len(a[1])), quantize(*a)))
    _, forward, both, _ = problem.candidates()
    for candidate, copies in ((forward, [2] * 8), (both, [4] * 2)):
        call = candidate.prepare()
        quantized.clear()
        assert call()["y"].shape == (40, 128)
        assert quantized == copies
    rows = timed(problem, benchmark.yardsticks)
    assert [(row.name, row.refused) for row in rows] == [(name, "") for name in moe_fp8.RECIPES]
    assert problem.flops == 4 * 18 * 40 * 128 * 128 * 2


def test_lists_of_blocks_that_rows_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "DEVICE", "cpu")
    common = []
    for correlated in (False, True):
        rows = nsa.block_lists(8192, 2, correlated)[0]
        assert rows.shape == (8192, 2, 16)
        row_block = torch.arange(8192)[:, None] // 64
        assert (rows.amax(-1) == row_block).all()
        assert (rows == 0).any(-1).all()
        blocks = rows.sort(-1).values
        assert ((blocks.diff(dim=-1) > 0) | (blocks[..., 1:] < 0)).all()
        common.append(sum(len(set(x) & set(y)) for x, y in itertools.pairwise(rows[4096:, 0].tolist())) / 4095)
    assert common[0] < 7 < 13 < common[1]


def test_layers_of_models_and_routings() -> None:
    api = registry.find("grouped_gemm_glu")
    some = grouped.shapes(api, bench.Options("bf16"))
    assert some[(65536, 1536, 2048, 128)] == "Qwen3-30B-A3B, 8192 tokens"
    assert (65536, 2048, 768, 128) in grouped.shapes(registry.find("grouped_gemm_quant"), bench.Options("bf16"))
    assert (65536, 768, 2048, 128) in grouped.shapes(registry.find("grouped_gemm_dglu"), bench.Options("bf16"))
    assert (1536, 2048, 65536, 128) in grouped.shapes(registry.find("grouped_gemm_wgrad"), bench.Options("bf16"))
    assert len(grouped.shapes(api, bench.Options("bf16", all=True))) > 5 * 7
    assert grouped.ends("uniform", 4, 100) == [25, 50, 75, 100]
    stops = grouped.ends("zipf", 8, 1000)
    sizes = sorted((y - x for x, y in itertools.pairwise([0, *stops])), reverse=True)
    assert stops[-1] == 1000
    assert sizes[0] == pytest.approx(2 * sizes[1], abs=2) == pytest.approx(8 * sizes[7], abs=8)


def test_candidates_of_rmsnorm_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    benchmark = bench.find("rmsnorm_rht_amax")
    problem = benchmark.problems(bench.Options("bf16", ((64, 512),)))[0]
    rows = timed(problem, benchmark.yardsticks)
    assert [row.refused for row in rows] == [""] * 4
    assert all(row.ratios == ((1.0, 1.0, 1.0),) for row in rows)
    assert rows[0].rate == "0.00 TB/s"


def test_the_triton_kernel_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = dense_gemm.source_module(PEER)
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    source = importlib.import_module("triton.compiler").ASTSource
    for dtype, keep in (("bf16", True), ("fp8e4nv", False)):
        types = {**dict.fromkeys(("a", "b"), f"*{dtype}"), **dict.fromkeys(("ab12", "c"), "*bf16"), "alpha": "fp32"}
        types |= dict.fromkeys(("m", "n", "k"), "i32")
        constants = {**module.configurations()[0].kwargs, "CTAS": 132, "KEEP": keep}
        aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 3, 5, 6, 7)}
        kernel = module.gemm_swiglu_kernel
        made = source(kernel, types | dict.fromkeys(constants, "constexpr"), constants, aligned)
        compiled = triton.compile(made, target=target, options={"num_warps": 8, "num_stages": 3})
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


def test_without_the_source_tree_the_triton_kernel_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cudnn, "__file__", str(tmp_path / "site-packages" / "cudnn" / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="part of the source tree"):
        dense_gemm.source_module.__wrapped__(PEER)
