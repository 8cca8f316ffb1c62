"""``cudnn cache warm``: which kernels it compiles, and that calls then find them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import cudnn
from cudnn.cli import app
from cudnn.fused import warm
from cudnn.fused.host import FusedAPI
from cudnn.fused.registry import aot_preset, compiled, find, gemms, wrapper
from cudnn.gemm import quantize_rows
from cudnn.runtime import cache, kernels
from cudnn.sdpa import SdpabwdSm100D256, SdpafwdSm100D256, sdpa_bwd_wrapper_sm100_d256, sdpa_fwd_wrapper_sm100_d256
from support.selection import brief

ARCHITECTURES = ("sm_90a", "sm_100a")
GEMMS = gemms()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "_loaded", {})
    return tmp_path / "cache"


def _below(cls: type) -> set[type]:
    return {cls, *(each for sub in cls.__subclasses__() for each in _below(sub))}


def test_every_fused_api_is_known() -> None:
    for module in pkgutil.walk_packages(cudnn.__path__, "cudnn."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    classes = {cls for cls in _below(FusedAPI) if "execute" in vars(cls) and cls.__module__.startswith("cudnn.")}
    known = {name: aot_preset(name) for name in compiled()}
    assert {api.objects.__self__ for api in known.values()} == classes
    both = warm.wanted(ARCHITECTURES)
    for arch in ARCHITECTURES:
        labels = {kernel.label.split(",")[0] for kernel in both if kernel.arch == arch}
        assert labels == {name for name, api in known.items() if arch in api.architectures}
    assert len({(kernel.source, kernel.configuration, kernel.arch) for kernel in both}) == len(both)
    assert {kernel.arch for kernel in both} == set(ARCHITECTURES)


def _operand(dtype: str, rows: int, k: int, block: int = 1) -> tuple[Any, Any, dict[str, int]]:
    """Elements, scale factors, and what a call must be told of them."""
    x = torch.zeros(1, rows, k, dtype=torch.bfloat16).permute(1, 2, 0)
    if dtype == "fp8_128":
        return *quantize_rows(x, torch.float8_e4m3fn, torch.float32, 128, rows=block), {"sf_vec_size": 128}
    if dtype == "mxfp8":
        return *quantize_rows(x, torch.float8_e4m3fn, torch.float8_e8m0fnu, 32), {"sf_vec_size": 32}
    if dtype == "nvfp4":
        return *quantize_rows(x, torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16), {"sf_vec_size": 16}
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[dtype]
    return x.to(kind), None, {}


def _call(name: str, dtype: str, out: Any) -> None:
    """A wrapper on CPU tensors; its results are of the type ``out``, or of those that it takes for itself."""
    m, n, k = 256, 4096, 256
    a, sfa, options = _operand(dtype, m, k)
    b, sfb, _ = _operand(dtype, n, k, 128)
    prob = torch.zeros(1, m, 1).permute(1, 2, 0)
    c, ab12 = (torch.zeros(1, m, width, dtype=out or torch.bfloat16).permute(1, 2, 0) for width in (n, 2 * n))
    arguments = {"a_tensor": a, "b_tensor": b, "sfa_tensor": sfa, "sfb_tensor": sfb, "prob_tensor": prob, "c_tensor": c}
    arguments |= {"ab12_tensor": ab12, **dict.fromkeys(("cos_tensor", "sin_tensor"), torch.zeros(m, 64))}
    parameters = inspect.signature(wrapper(name)).parameters
    types = {p: out for p in parameters if out and p.endswith("_dtype") and p != "acc_dtype"}
    optional = {"prob_tensor"} if "ab12_tensor" in parameters else set()
    taken = {p: tensor for p, tensor in arguments.items() if p in parameters and p not in optional}
    wrapper(name)(**taken, **options, **types)


TYPES = ("bf16", "fp16", "fp8", "fp8_128", "mxfp8", "nvfp4")
DEFAULTS = {
    "gemm_amax": TYPES,
    "gemm_geglu": TYPES,
    "gemm_rope": TYPES,
    "gemm_swiglu": ("bf16", "fp16", "fp8", "fp8_128", "nvfp4"),  # ab12 of float32 is refused for mxfp8
    "gemm_srelu": ("bf16", "fp8", "fp8_128", "mxfp8", "nvfp4"),  # bfloat16, which is not usual from float16
    "gemm_dsrelu": ("bf16", "fp8", "fp8_128", "mxfp8", "nvfp4"),
    "gemm_dswiglu": ("bf16", "fp8", "fp8_128", "mxfp8", "nvfp4"),
}
"""Operands of calls that leave the types of results to the wrapper."""
CALLS = [(name, dtype, True) for name in GEMMS for dtype in TYPES]
CALLS += [(name, dtype, False) for name, dtypes in DEFAULTS.items() for dtype in dtypes]


@pytest.mark.parametrize(("name", "dtype", "typed"), CALLS)
def test_the_kernels_of_usual_calls_are_among_them(
    name: str, dtype: str, typed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find(name), "reference", lambda *_: None)  # nothing looks at the results
    objects = find(name).objects
    objects.clear()
    _call(name, dtype, (torch.float16 if dtype == "fp16" else torch.bfloat16) if typed else None)
    (operation,) = objects.values()
    objects.clear()
    assert operation.kernels() == []  # on the CPU
    for arch in ARCHITECTURES:
        operation.arch = arch
        wanted = [(k.source, k.configuration, k.arch) for k in warm.wanted([arch], [name], [dtype])]
        for kernel in operation.kernels():
            assert kernel in wanted


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernels_of_usual_attention_are_among_them(causal: bool, packed: bool) -> None:
    b, h, s, d = 2, 4, 256, 256
    ends = torch.tensor([0, 200, 512], dtype=torch.int32) if packed else None
    shape = (b * s, h, d) if packed else (b, s, h, d)
    q, k, v, do = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(4))
    q, k, v, do = (x if packed else x.transpose(1, 2) for x in (q, k, v, do))
    SdpafwdSm100D256.objects.clear()
    SdpabwdSm100D256.objects.clear()
    o, lse = sdpa_fwd_wrapper_sm100_d256(q, k, v, ends, ends, is_causal=causal)
    sdpa_bwd_wrapper_sm100_d256(q, k, v, o, do, lse, ends, ends, is_causal=causal)
    for name, cls in (("sdpa_forward", SdpafwdSm100D256), ("sdpa_backward", SdpabwdSm100D256)):
        (operation,) = {id(each): each for each in cls.objects.values()}.values()
        operation.arch = "sm_90a"
        wanted = [(k.source, k.configuration, k.arch) for k in warm.wanted(["sm_90a"], [name], ["bf16"])]
        assert operation.kernels()
        for kernel in operation.kernels():
            assert kernel in wanted


def test_shapes_choose_among_kernels() -> None:
    """On Hopper, wide GEMMs without ab12 have different tiles."""

    def tiles(n: int) -> set[Any]:
        return {k.configuration.tile for k in warm.wanted(["sm_90a"], ["gemm_swiglu"], ["bf16"], [(256, n, 256)])}

    assert tiles(128) == {(128, 128, 64)}
    assert tiles(4096) == {(128, 256, 64)}
    assert tiles(28672) == {(128, 256, 64), (128, 192, 64)}
    assert tiles(128) | tiles(4096) | tiles(28672) == {
        k.configuration.tile for k in warm.wanted(["sm_90a"], ["gemm_swiglu"], ["bf16"])
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api", "gemm"], f"got 'gemm'; allowed: {compiled()[0]}, "),
        (["--dtype", "int8"], "got 'int8'; allowed: bf16, "),
        (["--api", "gemm_amax", "--shape", "128x128"], "gemm_amax: shape: got 128x128; allowed: m x n x k. To fix it,"),
        (["--shape", "128xn"], "got '128xn'; allowed: sizes such as"),
        (["--api", "gemm_amax", "--shape", "128x128x3"], "contiguous dimension: got 3; allowed: multiples of"),
        (["--api", "rmsnorm_rht_amax", "--shape", "2x131072"], "columns of x"),
        (["--jobs", "0"], "--jobs"),
        (["--api", "nsa_top_k", "--arch", "sm_100a"], "architecture: got sm_100a; allowed: sm_90a"),
    ],
)
def test_what_is_refused(arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn.NSA.TopKReduction, "architectures", ("sm_90a",))  # as that of an API with fewer kernels
    done = CliRunner().invoke(app, ["cache", "warm", "--arch", "sm_90a", *arguments], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(("arch", "jobs"), brief([("sm_90a", 1), ("sm_100a", 2)], 0))
def test_calls_find_what_was_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arch: str, jobs: int, tmp_path: Path
) -> None:
    chosen = ["--api", "gemm_amax", "--dtype", "bf16", "--shape", "128x128x128"]
    command = ["cache", "warm", "--arch", arch, *chosen, "--jobs", str(jobs)]
    if jobs > 1:
        monkeypatch.setattr(cache, "_ROOT", cache.user().owner)
        command += ["--system", str(tmp_path / "system")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "2 kernels compiled, 0 were already there" in done.output
    assert "0 kernels compiled, 2 were already there" in CliRunner().invoke(app, command).output
    if jobs > 1:
        monkeypatch.setenv("CUDNN_SYSTEM_KERNEL_CACHE", str(tmp_path / "system"))
        assert not folder.exists()

    def not_again(*_: Any) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernels, "build", not_again)
    a = torch.empty_strided((64, 128, 1), (128, 1, 64 * 128), dtype=torch.bfloat16, device="meta")
    c = torch.empty_strided((64, 64, 1), (64, 1, 64 * 64), dtype=torch.float32, device="meta")
    cudnn.GemmAmax(a, a, None, None, c, torch.empty(1, device="meta"), arch=arch).compile()


def test_a_cache_that_cannot_be_written_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.joinpath("file").write_text("")
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(folder.parent / "file" / "below"))
    done = CliRunner().invoke(app, ["cache", "warm", "--arch", "sm_90a", "--api", "rmsnorm_rht_amax"])
    assert done.exit_code == 1
    assert "Not a directory" in done.output


def test_usual_shapes_have_the_dimensions() -> None:
    for name in compiled():
        api = aot_preset(name)
        assert {len(shape) for shape in api.shapes} == {len(api.dimensions)}
