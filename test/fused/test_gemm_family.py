"""What the dense fused GEMMs have in common, on CPU tensors: results, refusals, the wrappers' contract."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from cudnn.runtime import launch
from cudnn_kernels.signature import bind
from support import oracle
from support.api_cases import BY_NAME, FAMILIES, NAMES, Case, Family, case, check, options
from support.oracle import BF16, E4M3, E5M2, E8M0, F16, F32, FP4
from support.recorded import OnGpu, Recorded
from support.selection import ARCHES, in_turn


@pytest.fixture(params=FAMILIES, ids=NAMES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(params=ARCHES)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


def supported(problem: Case, arch: str, **more: Any) -> bool:
    return problem.operation(arch=arch, **more).check_support()


def run(problem: Case, **more: Any) -> None:
    problem.operation()(**problem.arguments(), **more)


# Results on CPU tensors; test_gemm_results.py has more.


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemm_amax"])
def test_alpha(name: str) -> None:
    problem = case(name)
    gemm = problem.operation(alpha=-0.5)
    gemm(**problem.arguments())
    check(problem, alpha=1.0 if name == "gemm_swiglu" else -0.5)
    problem = case(name)
    gemm(**problem.arguments(), alpha=None)
    check(problem, alpha=-0.5)
    problem = case(name)
    gemm(**problem.arguments(), alpha=0.25)
    check(problem, alpha=0.25)


def test_amax_is_raised_from_what_it_was(family: Family) -> None:
    problem = case(family.name, amax=True, out=F32 if family.name != "gemm_swiglu" else BF16)
    run(problem)
    first = float(problem.tensors["amax"])
    assert 0 < first < 1e6
    problem.tensors["amax"].fill_(1e6)
    run(problem)
    assert float(problem.tensors["amax"]) == 1e6
    problem.tensors["amax"] = torch.full((1, 1, 1), float("-inf"))
    run(problem)
    assert float(problem.tensors["amax"]) == first


def test_bytes_are_four_bit_elements(family: Family) -> None:
    problem = case(family.name, dtype=FP4, scale=E8M0, vector=32)
    for name in ("a", "b"):
        problem.tensors[name] = problem.tensors[name].view(torch.uint8)
    run(problem)
    check(problem)


# Refused calls, with their messages.


def change(problem: Case, **tensors: Any) -> Case:
    problem.tensors.update(tensors)
    return problem


def meta(*shape: int, dtype: Any = BF16, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta") if stride else None
    return torch.empty(shape, dtype=dtype, device="meta") if tensor is None else tensor


REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], type[Exception], str]] = [
    # changes of the problem, of tensors, of options; the error, its words
    ({}, {"a": None}, {}, ValueError, "a tensor: got None; allowed: a tensor"),
    ({}, {"a": meta(128, 128)}, {}, ValueError, r"a tensor: got the shape \(128, 128\); allowed: three dimensions,"),
    ({}, {"b": meta(256)}, {}, ValueError, r"b tensor: got the shape \(256,\); allowed: three dimensions, \(n, k, l\)"),
    ({}, {"b": meta(256, 64, 1)}, {}, ValueError, r"b tensor shape mismatch: expected \(256, 128, 1\), got \(256, 64,"),
    ({}, {"a": meta(128, 0, 1)}, {}, ValueError, "sizes: got n=256, k=0, l=1; allowed: at least 1"),
    (
        {"l": 2},
        {"a": meta(128, 128, 2)},
        {},
        ValueError,
        r"a tensor stride mismatch: expected \(128, 1, 16384\) or \(1, 128, 16384\), or further apart by multiples of "
        r"16 bytes, got \(256, 2, 1\). To fix it, pass tensor.permute\(2, 0, 1\).contiguous\(\).permute\(1, 2, 0\)",
    ),
    ({}, {"a": meta(128, 128, 1, dtype=torch.int32, stride=(128, 1, 16384))}, {}, ValueError, "a tensor dtype"),
    (
        {},
        {"b": meta(256, 128, 1, dtype=F16, stride=(128, 1, 32768))},
        {},
        ValueError,
        "b tensor dtype mismatch: expected torch.bfloat16, got torch.float16",
    ),
    ({}, {"amax": meta(2, dtype=F32)}, {}, ValueError, r"amax tensor shape mismatch: expected \(1,\), got \(2,\)"),
    ({"amax": True}, {"amax": meta(1)}, {}, ValueError, "amax tensor dtype mismatch: expected torch.float32"),
    ({"k": 124}, {}, {}, ValueError, "a tensor, its contiguous dimension: got 124; allowed: multiples of 8"),
    ({"dtype": E4M3, "k": 72}, {}, {}, ValueError, "a tensor, its contiguous dimension: got 72; allowed: multiples of"),
    ({"dtype": F32, "k": 6}, {}, {}, ValueError, "a tensor, its contiguous dimension: got 6; allowed: multiples of 4"),
    (
        {"dtype": FP4, "scale": E8M0, "k": 80},
        {},
        {},
        ValueError,
        "a tensor, its contiguous dimension: got 80; allowed: multiples of 32",
    ),
    ({"m": 100, "majors": "mkn"}, {}, {}, ValueError, "a tensor, its contiguous dimension: got 100; allowed:"),
    ({"dtype": E4M3, "scale": E8M0}, {"sfb": None}, {}, ValueError, "sfa and sfb tensors: got one of them; allowed:"),
    ({"dtype": FP4}, {"sfa": None, "sfb": None}, {}, ValueError, "sfa and sfb tensors: got None; allowed: scale"),
    (
        {"dtype": BF16},
        {
            "sfa": meta(32, 4, 1, 4, 2, 1, dtype=E8M0, stride=(16, 4, 1024, 1, 512, 1024)),
            "sfb": meta(32, 4, 2, 4, 2, 1, dtype=E8M0, stride=(16, 4, 1024, 1, 512, 2048)),
        },
        {"sf_vec_size": 16},
        ValueError,
        "a tensor dtype, with scale factors: got bfloat16",
    ),
    (
        {"dtype": FP4, "scale": E8M0},
        {"sfa": meta(32, 4, 1, 4, 2, 1, dtype=E8M0)},
        {},
        ValueError,
        r"sfa tensor shape mismatch: expected \(32, 4, 1, 4, 1, 1\), got \(32, 4, 1, 4, 2, 1\)",
    ),
    (
        {"dtype": FP4, "scale": E8M0},
        {"sfa": meta(32, 4, 1, 4, 1, 1, dtype=E8M0, stride=(1, 32, 512, 128, 512, 512))},
        {},
        ValueError,
        "sfa tensor stride",
    ),
    (
        {"dtype": FP4, "scale": E8M0},
        {"sfb": meta(32, 4, 2, 4, 1, 1, dtype=E4M3, stride=(16, 4, 512, 1, 512, 1024))},
        {},
        ValueError,
        "sfb tensor dtype mismatch: expected torch.float8_e8m0fnu, got torch.float8_e4m3fn",
    ),
    ({"dtype": FP4, "scale": E4M3, "vector": 32}, {}, {}, ValueError, "sf_vec_size: got 32; allowed: 16, for scale"),
    (
        {"dtype": E4M3, "scale": E4M3, "vector": 16},
        {},
        {},
        ValueError,
        "scale factors: got float8_e4m3fn for 16 elements; allowed: float8_e8m0fnu for 32, of float8_e4m3fn",
    ),
    (
        {"dtype": E5M2, "scale": E8M0, "vector": 16},
        {},
        {},
        ValueError,
        "scale factors: got float8_e8m0fnu for 16 elements; allowed: float8_e8m0fnu for 32, of float8_e5m2",
    ),
    ({"dtype": E4M3, "scale": F32}, {}, {"sf_vec_size": 32}, ValueError, "sf_vec_size: got 32; allowed: 128, for"),
    (
        {"dtype": E4M3, "scale": F32},
        {"sfb": meta(3, 1, 1, dtype=F32)},
        {},
        ValueError,
        r"sfb tensor shape mismatch: expected \(2, 1, 1\), got \(3, 1, 1\)",
    ),
    (
        {"dtype": BF16},
        {"sfa": meta(128, 1, 1, dtype=F32), "sfb": meta(2, 1, 1, dtype=F32)},
        {"sf_vec_size": 128},
        ValueError,
        "a tensor dtype, with scale factors: got bfloat16",
    ),
    (
        {"dtype": E4M3},
        {"sfa": meta(128, 1, 1, dtype=E8M0), "sfb": meta(2, 1, 1, dtype=E8M0)},
        {"sf_vec_size": 128},
        ValueError,
        "scale factors: got float8_e8m0fnu for 128 elements of float8_e4m3fn; allowed: float32 for 128",
    ),
    ({}, {}, {"sf_vec_size": 8}, ValueError, "sf_vec_size: got 8; allowed: 16, 32 or 128"),
    ({}, {}, {"acc_dtype": torch.bfloat16}, ValueError, "acc_dtype: got torch.bfloat16; allowed: torch.float32"),
    ({}, {}, {"mma_tiler_mn": (64, 128)}, ValueError, r"mma_tiler_mn: got \(64, 128\); allowed: 128 or 256 rows"),
    ({}, {}, {"mma_tiler_mn": (128, 48)}, ValueError, r"mma_tiler_mn: got \(128, 48\); allowed: .* columns"),
    ({}, {}, {"cluster_shape_mn": (3, 1)}, ValueError, r"cluster_shape_mn: got \(3, 1\); allowed: powers of 2 up to"),
    ({}, {}, {"cluster_shape_mn": (0, 1)}, ValueError, r"cluster_shape_mn: got \(0, 1\); allowed: powers of 2 up to"),
    ({}, {"b": torch.empty_strided((256, 128, 1), (128, 1, 32768), dtype=BF16)}, {}, ValueError, "samples: got a on "),
    ({}, {}, {"arch": None}, RuntimeError, "device: got meta; allowed: cuda or cpu; others, such as meta, with arch. "),
    ({}, {}, {"arch": "sm_80"}, RuntimeError, "architecture: got sm_80; allowed: sm_90a, sm_100a"),
]


@pytest.mark.parametrize(("kwargs", "tensors", "more", "error", "words"), REFUSED)
def test_what_is_not_supported_is_refused(
    family: Family,
    arch: str,
    kwargs: dict[str, Any],
    tensors: dict[str, Any],
    more: dict[str, Any],
    error: Any,
    words: str,
) -> None:
    problem = change(case(family.name, **{"device": "meta", **kwargs}), **tensors)
    with pytest.raises(error, match=f"{family.cls.__name__}: {words}"):
        problem.operation(**{"arch": arch, **more}).check_support()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemm_amax"])  # which takes no 256 rows at all
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_tile_of_256_rows_needs_an_even_cluster(arch: str, name: str) -> None:
    problem = case(name, device="meta")
    words = r"cluster_shape_mn: got \(1, 1\); allowed: an even number of rows, for a tile"
    with pytest.raises(ValueError, match=words):
        problem.operation(arch=arch, mma_tiler_mn=(256, 256), cluster_shape_mn=(1, 1)).check_support()


@pytest.mark.parametrize("name", [name for name in NAMES if BY_NAME[name].quantized])
@pytest.mark.parametrize(
    ("missing", "more", "words"),
    [
        (["norm_const"], {}, "and norm_const tensors: got None; allowed: tensors, required for float8_e4m3fn"),
        (["quantized"], {}, "and norm_const tensors: got None; allowed: tensors, required for float8_e4m3fn"),
        ([], {"sf_vec_size": 16}, "tensor shape mismatch"),
    ],
)
def test_quantised_results_need_scale_factors(
    name: str, arch: str, missing: Any, more: dict[str, Any], words: str
) -> None:
    problem = case(name, out=E4M3, device="meta")
    for key in missing:
        problem.tensors[problem.family.quantized if key == "quantized" else key] = None
    with pytest.raises(ValueError, match=words):
        supported(problem, arch, **more)


@pytest.mark.parametrize("name", [name for name in NAMES if BY_NAME[name].quantized])
def test_scale_factors_of_a_result_are_powers_of_two(name: str, arch: str) -> None:
    problem = case(name, out=E4M3, device="meta")
    scales = problem.tensors[problem.family.quantized]
    wrong = torch.empty_strided(scales.shape, scales.stride(), dtype=E4M3, device="meta")
    with pytest.raises(ValueError, match="got float8_e4m3fn for 32 elements; allowed: float8_e8m0fnu for 32"):
        supported(change(problem, **{problem.family.quantized: wrong}), arch)


@pytest.mark.parametrize("name", [name for name in NAMES if BY_NAME[name].quantized])
def test_scale_factors_that_are_not_needed_stay_and_are_mentioned(name: str, caplog: Any) -> None:
    problem, other = case(name), case(name, out=E4M3)
    kept = {key: other.tensors[key] for key in (problem.family.quantized, "norm_const")}
    change(problem, **kept)
    before = kept[problem.family.quantized].view(torch.uint8).clone()
    problem.vector = 32
    run(problem)
    assert torch.equal(kept[problem.family.quantized].view(torch.uint8), before)
    for key in kept:
        assert f"{key} is not used: the result has the type bfloat16" in caplog.messages


def test_factors_of_128_in_operands_and_gated_results() -> None:
    problem = case("gemm_swiglu", dtype=E4M3, scale=F32, out=E4M3, side=None, device="meta")
    supported(problem, "sm_90a")
    accurate = problem.family.cls(**problem.samples(), sf_vec_size=128, arch="sm_90a", accurate=True)
    with pytest.raises(NotImplementedError, match="accurate, for sfa and sfc of float32, on sm_90a: got True"):
        accurate.check_support()
    with pytest.raises(NotImplementedError, match="sfa and sfc tensors, on sm_100a: got float32 for both; allowed"):
        supported(problem, "sm_100a")
    plain = case("gemm_swiglu", dtype=E4M3, out=E4M3, vector=128, side=None, device="meta")
    with pytest.raises(NotImplementedError, match="a tensor dtype, for sfc of float32, on sm_90a: got float8_e4m3fn"):
        supported(plain, "sm_90a")


@pytest.mark.parametrize(("arch", "family"), in_turn(FAMILIES, 2), ids=lambda x: getattr(x, "name", x))
def test_compilation_for_a_chip_that_is_not_here(family: Family, arch: str) -> None:
    """In earnest, for a GPU; the compiled function refuses CPU tensors before it starts anything."""
    problem = case(family.name, device="meta")
    gemm = problem.operation(arch=arch)
    gemm.compile()
    kernel = gemm._compiled_kernel
    gemm.compile()
    assert gemm._compiled_kernel is kernel
    ((source, configuration, _),) = gemm.kernels()
    assert launch.kernel(source, configuration, arch) is kernel
    with pytest.raises((TypeError, ValueError), match=r"argument|Expect"):
        kernel(torch.empty(1))


def test_workspace(family: Family) -> None:
    """Operands that Hopper's tensor cores cannot read are converted in the workspace: bytes, rounded up to 256 each."""
    for kwargs, size in (
        ({"dtype": BF16, "majors": "mnn"}, 0),
        ({"dtype": E4M3}, 0),
        ({"dtype": E4M3, "majors": "mkn"}, 128 * 128),
        ({"dtype": F32, "majors": "mnn"}, (128 + 256) * 128 * 4),
        ({"dtype": E4M3, "scale": E8M0, "majors": "mnn"}, (128 + 256) * 128 * 2),
        ({"dtype": E4M3, "scale": F32}, 0),
        ({"dtype": E4M3, "scale": F32, "majors": "mkn"}, 128 * 128),
        ({"dtype": FP4, "scale": E8M0, "l": 2}, (128 + 256) * 128 * 2 * 2),
        ({"dtype": F32, "majors": "mkn", "m": 4, "k": 5 * 4}, 512),  # 4 rows of 80 bytes
    ):
        problem = case(family.name, device="meta", **kwargs)
        assert problem.operation(arch="sm_90a").workspace_size() == size
        assert problem.operation(arch="sm_100a").workspace_size() == 0
    assert case(family.name, dtype=FP4, scale=E8M0).operation().workspace_size() == 0  # on the CPU


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a": torch.empty(128, 64, 1).bfloat16()}, "tensor shape mismatch"),
        (
            {"a": oracle.plain(128, 128, dtype=F16).tensor},
            "a tensor dtype mismatch: expected torch.bfloat16, got torch.f",
        ),
        (
            {"a": oracle.plain(128, 128, major="mn").tensor},
            "a tensor stride mismatch: expected k-major, got|expected k-major",
        ),
        ({"a": torch.empty(128, 256, 1).bfloat16()[:, ::2]}, "a tensor stride mismatch"),
        ({"a": torch.empty(16384).bfloat16()}, "a tensor: got the shape"),
        ({"sfa": torch.empty(1)}, "sfa tensor: got a tensor; allowed: None, as the sample"),
        ({"a": None}, "a tensor: got None; allowed: a tensor, as the sample"),
        ({"b": None}, "b tensor: got None; allowed: a tensor, as the sample"),
    ],
)
def test_other_tensors_than_the_samples_are_refused(family: Family, tensors: dict[str, Any], words: str) -> None:
    problem = case(family.name)
    gemm = problem.operation()
    gemm.compile()
    gemm.execute(**problem.arguments())
    with pytest.raises(ValueError, match=f"{family.cls.__name__}: .*(?:{words})"):
        gemm.execute(**change(problem, **tensors).arguments())


def test_execute_before_compile_is_refused(family: Family) -> None:
    problem = case(family.name)
    with pytest.raises(RuntimeError, match=rf"{family.cls.__name__}: the kernel is not compiled. To fix it, call comp"):
        problem.operation().execute(**problem.arguments())


def test_cluster_overlap_margin(family: Family, arch: str, monkeypatch: pytest.MonkeyPatch, kernels: Recorded) -> None:
    problem = case(family.name)
    monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", "10")
    gemm = compiled(problem, arch)
    gemm.execute(**on_gpu(problem))
    size = tiling(gemm)[1][0] * tiling(gemm)[1][1]
    ((_, arguments),) = kernels.calls
    assert arguments[-2] == (78 // size - 10) * size
    monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", "148")
    assert gemm.check_support()  # read when the object is made
    with pytest.raises(ValueError, match="CUDNNFE_CLUSTER_OVERLAP_MARGIN: got 148; allowed: less than"):
        supported(problem, arch)
    monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", "-1")
    with pytest.raises(ValueError, match="CUDNNFE_CLUSTER_OVERLAP_MARGIN: got '-1'; allowed: a number, 0 or more"):
        problem.operation()


# The wrappers.


def call(problem: Case, **more: Any) -> Any:
    family, tensors = problem.family, problem.tensors
    kwargs = {f"{name}_tensor": tensors[name] for name in ("a", "b", "sfa", "sfb", *family.extra)}
    return family.wrapper(**kwargs, **{**options(problem), **more})


def check_found(problem: Case, actual: Any) -> list[str]:
    """Which results there are, after a look at their numbers."""
    family = problem.family
    assert list(actual.keys()) == [f"{name}_tensor" for name in family.results]
    names = [name for name in family.results if actual[f"{name}_tensor"] is not None]
    problem.tensors |= {name: actual[f"{name}_tensor"] for name in names}
    check(problem)
    return names


TYPES: dict[str, dict[str, Any]] = {
    "gemm_amax": {"c_dtype": BF16},
    "gemm_swiglu": {"ab12_dtype": BF16, "c_dtype": BF16},
    "gemm_srelu": {},
    "gemm_dsrelu": {},
}


@pytest.mark.parametrize("major", ["m", "n"])
def test_wrapper(family: Family, major: str) -> None:
    problem = case(family.name, majors=f"kk{major}")
    word = "d_major" if family.name == "gemm_dsrelu" else "c_major"
    kwargs = dict(problem.tensors)
    actual = call(problem, **{word: major}, **TYPES[family.name])
    names = {
        "gemm_amax": ["c", "amax"],
        "gemm_swiglu": ["ab12", "c"],
        "gemm_srelu": ["c", "d"],
        "gemm_dsrelu": ["d", "dprob"],
    }
    assert check_found(problem, actual) == names[family.name]
    for name in names[family.name]:
        if name == "amax":
            assert actual["amax_tensor"].shape == (1, 1, 1)
        elif kwargs[name] is not None:
            assert actual[f"{name}_tensor"].stride() == kwargs[name].stride()
    with pytest.raises(ValueError, match=f"{family.name}_wrapper: {word}: got 'k'; allowed: 'm' or 'n'"):
        call(problem, **{word: "k"})


def test_wrapper_of_four_bit_operands(family: Family) -> None:
    problem = case(family.name, dtype=FP4, scale=E4M3)
    actual = call(problem, **TYPES[family.name])
    assert "amax" in check_found(problem, actual)
    assert actual["amax_tensor"].shape == ((1, 1, 1) if family.name in ("gemm_amax", "gemm_swiglu") else (1,))


@pytest.mark.parametrize("name", [name for name in NAMES if BY_NAME[name].quantized])
def test_wrapper_of_quantised_results(name: str) -> None:
    problem = case(name, out=E4M3, majors="kkn")
    types = {"gemm_swiglu": {"ab12_dtype": BF16, "c_dtype": E4M3}}.get(name, {"d_dtype": E4M3})
    actual = call(problem, norm_const_tensor=problem.tensors["norm_const"], **types)
    assert problem.family.quantized in check_found(problem, actual)
    with pytest.raises(ValueError, match="norm_const tensors: got None"):
        call(problem, **types)


def test_the_wrapper_compiles_once(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with check, compile and execute replaced, as a test of a user may do; execute gets keywords only."""
    calls: list[object] = []
    monkeypatch.setattr(family.cls, "check_support", lambda self: calls.append("check") or True)
    monkeypatch.setattr(family.cls, "compile", lambda self: calls.append("compile"))
    monkeypatch.setattr(family.cls, "execute", lambda self, **tensors: calls.append("execute"))
    for name in ("CUDNN_FE_GEMM_DYNAMIC_M", "CUDNN_FE_GEMM_DYNAMIC_MNKL"):
        monkeypatch.delenv(name, raising=False)

    def compiles(*shapes: tuple[int, int, int, int]) -> tuple[int, int]:
        calls.clear()
        family.cache.clear()
        for shape in shapes:
            call(case(family.name, *shape))
        assert calls.count("execute") == len(shapes)
        assert calls.count("check") == calls.count("compile")
        return calls.count("compile"), len(family.cache)

    first, taller, other = (256, 256, 512, 2), (384, 256, 512, 2), (384, 384, 640, 3)
    assert compiles(first, first) == (1, 1)
    assert compiles(first, taller) == (2, 2)
    monkeypatch.setenv("CUDNN_FE_GEMM_DYNAMIC_M", "")
    assert compiles(first, taller) == (1, 1)
    assert compiles(first, other) == (2, 2)
    monkeypatch.setenv("CUDNN_FE_GEMM_DYNAMIC_MNKL", "0")
    assert compiles(first, taller, other) == (1, 1)
    calls.clear()
    family.cache.clear()
    for kwargs in ({"majors": "kkn"}, {"majors": "mkn"}, {"majors": "knn"}, {"dtype": F16}, {"dtype": F16}):
        call(case(family.name, **kwargs))
    assert calls.count("compile") == len(family.cache) == 4
    family.cache.clear()


def test_the_wrapper_gives_cached_objects_other_sizes(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_FE_GEMM_DYNAMIC_MNKL", "1")
    family.cache.clear()
    for shape in ((128, 256, 128, 1), (3, 128, 64, 2), (200, 192, 8, 3)):
        problem = case(family.name, *shape, majors="kkn")
        check_found(problem, call(problem, **TYPES[family.name]))
    assert len(family.cache) == 1
    (gemm,) = family.cache.values()
    gemm.execute(**case(family.name, 0).arguments())
    family.cache.clear()


# The call of a compiled kernel, with tensors that say they are on a GPU.


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def on_gpu(problem: Case) -> dict[str, Any]:
    return {name: None if tensor is None else OnGpu(tensor) for name, tensor in problem.arguments().items()}


def tiling(gemm: Any) -> tuple[Any, Any]:
    """Tile (m, n) and cluster of the kernel."""
    ((_, configuration, _),) = gemm.kernels()
    configuration = getattr(configuration, "gemm", configuration)
    return configuration.tile[:2], configuration.cluster


def compiled(problem: Case, arch: str = "sm_90a") -> Any:
    gemm = problem.operation(arch=arch)
    gemm.compile()
    return gemm


def test_what_the_kernel_is_given(family: Family, arch: str, kernels: Recorded) -> None:
    problem = case(family.name, amax=True, out=E4M3 if family.quantized else BF16)
    tensors = on_gpu(problem)
    alpha = {} if family.name == "gemm_amax" else {"alpha": 0.5}
    gemm = compiled(problem, arch)
    gemm.execute(**tensors, **alpha)
    gemm.execute(**tensors, **alpha, current_stream=3)
    for call, stream in zip(kernels.calls, (17, 3), strict=True):
        bound = bind(gemm.kernels()[0][1].slots(), call[1])
        numbers = {**alpha, "num_sms": 78, "stream": stream}
        assert call[0] == "Gemm"
        assert {key: bound.pop(key) for key in numbers} == numbers
        assert set(bound) == {key for key, tensor in problem.tensors.items() if tensor is not None}
        assert all(tensor is tensors[f"{key}_tensor"] for key, tensor in bound.items())


def test_block_scaled_operands(family: Family, arch: str, kernels: Recorded) -> None:
    """Hopper's kernel prepares them in a workspace, the caller's or one of the call; Blackwell's has none."""
    problem = case(family.name, dtype=E4M3, scale=E8M0, majors="mkn", l=2)
    gemm = compiled(problem, arch)
    tensors = on_gpu(problem)
    size = gemm.workspace_size()
    workspace = torch.empty(size + 100, dtype=torch.uint8)
    for kwargs in (workspace, workspace, None):
        kernels.calls.clear()
        gemm.execute(**tensors, workspace_tensor=kwargs)
        ((name, arguments),) = kernels.calls
        bound = bind(gemm.kernels()[0][1].slots(), arguments)
        assert all(bound[key] is tensors[f"{key}_tensor"] for key in ("a", "b", "sfa", "sfb"))
        assert (bound["num_sms"], bound["stream"]) == (78, 17)
        assert name == "Gemm"
        if arch == "sm_100a":
            assert size == 0
            continue
        used = bound["workspace"]
        assert used.dtype == torch.uint8
        assert used is kwargs if kwargs is not None else used.numel() == size


def test_tile_and_cluster_are_followed_on_blackwell(family: Family) -> None:
    """Columns are rounded up: to pairs of gates and others, or to atoms of scale factors."""
    problem = case(family.name, 256, 512, 512, device="meta")
    tile, cluster = ((128, 256), (1, 1)) if family.name in ("gemm_amax", "gemm_swiglu") else ((256, 192), (4, 2))

    def chosen(problem: Case, arch: str = "sm_100a", **more: Any) -> Any:
        return tiling(problem.operation(arch=arch, **more))

    assert chosen(problem, mma_tiler_mn=tile, cluster_shape_mn=cluster) == (tile, cluster)
    assert chosen(problem, "sm_90a", mma_tiler_mn=tile, cluster_shape_mn=cluster) == chosen(problem, "sm_90a")
    if family.name == "gemm_swiglu":
        assert chosen(problem, mma_tiler_mn=(128, 96))[0] == (128, 128)
    if family.name in ("gemm_srelu", "gemm_dsrelu"):
        problem = case(family.name, 256, 512, 512, dtype=FP4, scale=E8M0, device="meta")
        assert chosen(problem, mma_tiler_mn=(128, 192))[0] == (128, 256)
        problem = case(family.name, 256, 512, 512, out=F32, side=F32, device="meta")  # more would spill registers
        assert chosen(problem, mma_tiler_mn=(128, 192))[0] == (128, 128)


@pytest.mark.parametrize(
    ("workspace", "words"),
    [
        (torch.empty(8, dtype=torch.uint8), r"got 8 bytes at .* allowed: at least 98304 bytes.* workspace_size\(\)"),
        (torch.empty(98304), r"got torch.float32 of the shape \(98304,\); allowed: torch.uint8 of one dimension"),
        (torch.empty(98304 * 2, dtype=torch.uint8)[::2], "allowed: torch.uint8 of one dimension, contiguous"),
        (torch.empty(98304, dtype=torch.uint8, device="meta"), "without data, as on the meta device"),
        (torch.empty(98305, dtype=torch.uint8)[1:], "allowed: at least 98304 bytes, aligned to 16"),
    ],
)
def test_workspaces_that_do_not_fit(family: Family, kernels: Recorded, workspace: torch.Tensor, words: str) -> None:
    problem = case(family.name, dtype=E4M3, scale=E8M0)
    gemm = compiled(problem)
    with pytest.raises(ValueError, match=f"workspace_tensor: .*{words}"):
        gemm.execute(**on_gpu(problem), workspace_tensor=workspace)
    assert kernels.calls == []


def test_scale_factors_of_another_size_never_reach_the_kernel(family: Family, arch: str, kernels: Recorded) -> None:
    problem, smaller = (case(family.name, m, dtype=FP4, scale=E8M0) for m in (256, 128))
    gemm = compiled(problem, arch)
    gemm.execute(**on_gpu(problem))
    kernels.calls.clear()
    with pytest.raises(ValueError, match="sfa tensor shape mismatch: expected"):
        gemm.execute(**{**on_gpu(problem), "sfa_tensor": OnGpu(smaller.tensors["sfa"])})
    with pytest.raises(ValueError, match="tensor shape mismatch: expected"):
        gemm.execute(**{**on_gpu(problem), "a_tensor": OnGpu(smaller.tensors["a"])})
    assert kernels.calls == []


def test_what_the_kernel_refuses_is_worded_anew(family: Family, kernels: Recorded) -> None:
    problem = case(family.name)
    gemm = compiled(problem)
    kernels.refusing = True
    with pytest.raises(ValueError, match="Mismatched Tensor on argument #0"):
        gemm.execute(**on_gpu(problem))
    with pytest.raises(ValueError, match=f"{family.cls.__name__}: a tensor dtype mismatch: expected torch.bfloat16"):
        gemm.execute(**{**on_gpu(problem), "a_tensor": OnGpu(problem.tensors["a"].half())})


def test_results_without_rows_follow_the_stream_given(kernels: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an API does there, zeros for example, and not PyTorch's current stream."""
    done: list[Any] = []

    @contextlib.contextmanager
    def within(stream: Any) -> Any:
        done.append(stream)
        yield
        done.append("left")

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    gemm = compiled(case("gemm_amax"))
    monkeypatch.setattr(gemm, "run_empty", lambda tensors: done.append("run"))
    for stream, expected in ((None, ["run"]), (3, [3, "run", "left"])):
        done.clear()
        gemm.execute(**on_gpu(case("gemm_amax", 0)), current_stream=stream)
        assert done == expected
    assert not kernels.calls


def test_no_rows_start_no_kernel(family: Family, kernels: Recorded) -> None:
    gemm = compiled(case(family.name))
    gemm.execute(**on_gpu(case(family.name, 0)))
    assert kernels.calls == []


def test_a_tensor_without_a_sample_starts_no_kernel(family: Family, kernels: Recorded) -> None:
    problem = case(family.name)
    gemm = compiled(problem)
    gemm.execute(**on_gpu(problem))
    kernels.calls.clear()
    for kwargs in (on_gpu(problem), on_gpu(case(family.name, 0))):
        with pytest.raises(ValueError, match="sfa tensor: got a tensor; allowed: None, as the sample"):
            gemm.execute(**{**kwargs, "sfa_tensor": OnGpu(torch.empty(1))})
    assert kernels.calls == []


def test_an_object_of_cpu_samples_takes_cpu_tensors(family: Family, kernels: Recorded) -> None:
    problem = case(family.name)
    gemm = problem.operation()
    gemm.compile()
    with pytest.raises(RuntimeError, match="got CUDA tensors; allowed: CPU tensors, as the samples"):
        gemm.execute(**on_gpu(problem))


def test_dequantisation_is_said_once(family: Family, kernels: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    from cudnn.runtime.call import warn_once

    warn_once.cache_clear()
    for _ in range(2):
        compiled(case(family.name, dtype=FP4, scale=E8M0))
    compiled(case(family.name))
    compiled(case(family.name, dtype=FP4, scale=E8M0), "sm_100a")
    said = [message for message in caplog.messages if "dequantized to bfloat16 on sm_90a" in message]
    assert said == [
        f"{family.cls.__name__}: block-scaled operands are dequantized to bfloat16 on sm_90a, whose tensor cores know "
        "no block scales"
    ]
