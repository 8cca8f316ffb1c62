"""What holds for every fused API that the registry finds, whatever it computes."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnn
import cudnn.ops
from cudnn import demo_cases
from cudnn.demo_cases import dense
from cudnn.demo_cases.gemm_variants import Variant
from cudnn.fused import registry
from cudnn.fused.dense import empty_tensors
from cudnn.fused.gemm import OPERAND_TYPES
from cudnn.fused.grouped import ExpertsGemm
from cudnn.fused.host import FusedAPI
from support.api_cases import BY_NAME
from support.pages import transformer_engine_calls
from support.selection import in_turn, within

pytest.importorskip("ptx_emulator")

ROOT = Path(__file__).parents[2]
NAMES = list(registry.packages())
GEMMS = registry.gemms()
E4M3 = torch.float8_e4m3fn
GROUPED = [name for name in NAMES if issubclass(registry.find(name), ExpertsGemm)]
NEW = ("gemm_geglu", "gemm_rope", "gemm_dswiglu")
"""Those that proved that a declaration is enough: at most 210 lines, of which `ruff format` gives each argument one."""


@pytest.mark.parametrize("name", NAMES)
def test_public_names(name: str) -> None:
    api, module = registry.find(name), importlib.import_module(f"{registry.packages()[name]}.api")
    title = api.__name__
    for space in (cudnn, importlib.import_module(registry.packages()[name])):
        assert getattr(space, title) is api
        assert getattr(space, f"{title}Sm100").__name__ == f"{title}Sm100"
        assert issubclass(getattr(space, f"{title}Sm100"), api)
        assert getattr(space, f"{name}_wrapper") is getattr(space, f"{name}_wrapper_sm100") is registry.wrapper(name)
    assert getattr(module, f"_cache_of_{title}Objects") is getattr(module, f"_cache_of_{title}Sm100Objects")
    heading = re.compile(rf"^#+ {re.escape(api.title)}$", re.MULTILINE)
    assert any(heading.search(page.read_text()) for page in (ROOT / "docs").rglob("*.md")), "no page describes it"


@pytest.mark.parametrize("name", NAMES)
def test_the_signatures_are_those_of_the_tensors(name: str) -> None:
    """``execute`` hands its arguments over in their order, which is what the call is bound by."""
    api = registry.find(name)
    declared, sampled = {spec.name for spec in api.tensors}, {spec.name for spec in api.tensors if spec.sampled}
    samples = [p for p in inspect.signature(api).parameters if p.startswith("sample_")]
    assert {p.removeprefix("sample_") for p in samples} - {"wgrad_expert"} == sampled
    assert set(api.names) == declared
    handed: list[Any] = []
    arguments = {p: p for p in inspect.signature(api.execute).parameters if p != "self"}
    stand_in = type("StandIn", (), {"run": lambda self, *kwargs: handed.extend(kwargs)})()
    api.execute(stand_in, **arguments)  # type: ignore[arg-type]
    tensors, scalars, stream, *_ = handed
    assert tensors == tuple(api.parameters[key] for key in api.names)
    assert tuple(x for x in scalars if x is not None) == api.run_time
    assert stream == "current_stream"
    optional = {spec.name for spec in api.tensors if spec.optional}
    if name in GROUPED:  # their signatures are those that existing programs know: weights may come in other ways
        return
    for function, names in ((api, {key: f"sample_{key}" for key in sampled}), (api.execute, api.parameters)):
        parameters = inspect.signature(function).parameters
        assert {key for key, parameter in names.items() if parameters[parameter].default is None} <= optional


@pytest.mark.parametrize("name", NAMES)
def test_operators_have_the_arguments_of_their_wrappers(name: str) -> None:
    """As ``help`` and editors show them, but for hints and streams. Those of dense GEMMs choose types by inputs."""
    operator = getattr(cudnn.ops, name)
    if hasattr(operator, "operator"):
        shown, operator = inspect.signature(operator).parameters, operator.operator
        own = inspect.signature(operator).parameters
        assert list(shown) == [*own, "returns"]
        assert {p: x.default for p, x in shown.items()} == {
            p: None if p.endswith("_dtype") or p == "returns" else own[p].default for p in shown
        }
    ours = inspect.signature(operator).parameters
    theirs = {p.removesuffix("_tensor"): x for p, x in inspect.signature(registry.wrapper(name)).parameters.items()}
    assert next(iter(ours)) == next(iter(theirs))
    assert {p: x.default for p, x in ours.items()} == {p: theirs[p].default for p in ours}


def known_signatures() -> dict[str, str]:
    """Arguments in their order, those after ``*`` by name only, by the function's path in ``cudnn``."""
    text = (ROOT / "test" / "support" / "data" / "signatures.txt").read_text()
    return dict(re.findall(r"^(\S+)\n((?: +.+\n)+)", text, re.MULTILINE))


def test_signatures_that_existing_programs_know() -> None:
    """Ours may have more arguments."""
    assert len(known_signatures()) > 37
    for path, arguments in known_signatures().items():
        function: Any = functools.reduce(getattr, path.split("."), cudnn)
        ours = {p.name: p.kind for p in inspect.signature(function).parameters.values() if p.name != "self"}
        positional, _, named = arguments.partition("*")
        order = [name for name, kind in ours.items() if kind is not inspect.Parameter.KEYWORD_ONLY]
        assert order[: len(positional.split())] == positional.split(), path
        assert {*named.split()} <= {*ours}, path


def test_calls_of_transformer_engine() -> None:
    """The arguments on its page exist in this library's and the other frontend's functions."""
    calls = transformer_engine_calls()
    assert len(calls) == 8
    for name, keywords in calls.items():
        assert keywords <= {*inspect.signature(getattr(cudnn, name)).parameters}, name
        assert keywords <= {*known_signatures()[name].split()}, name


@pytest.mark.parametrize(
    ("name", "tile", "vector"),
    [("gemm_amax", 128, 32), ("gemm_swiglu", 128, 16), ("gemm_srelu", 256, 16), ("gemm_dsrelu", 256, 16)],
)
def test_defaults_that_existing_programs_know(name: str, tile: int, vector: int) -> None:
    actual = {key: p.default for key, p in inspect.signature(registry.find(name)).parameters.items()}
    assert (actual["mma_tiler_mn"], actual["sf_vec_size"], actual["acc_dtype"]) == ((tile, tile), vector, torch.float32)


_ROWS = "d_row d_col dprob dbias amax sfd_row sfd_col"
_VALUES = "c d d_col amax sfd_row sfd_col"
RESULTS = {
    "grouped_gemm": "d c",
    "grouped_gemm_glu": _VALUES,
    "grouped_gemm_glu_hadamard": "c d amax post_rht_amax",
    "grouped_gemm_glu_hadamard_quant": "c d sfd rht_rowwise sfrht_rowwise rht_colwise sfrht_colwise",
    "grouped_gemm_dglu": _ROWS,
    "grouped_gemm_swiglu": _VALUES,
    "grouped_gemm_dswiglu": _ROWS.replace(" dbias", ""),
    "grouped_gemm_srelu": _VALUES,
    "grouped_gemm_dsrelu": "d_row d_col d_srelu dprob dbias amax sfd_row sfd_col sfd_col_d_srelu",
    "grouped_gemm_quant": "d d_col amax sfd_row sfd_col",
    "grouped_gemm_wgrad": "wgrad",
    "discrete_grouped_gemm_swiglu": _VALUES,
    "discrete_grouped_gemm_dswiglu": _ROWS,
}
DEFAULTS = {
    "mma_tiler_mn": (256, 256),
    "cluster_shape_mn": None,
    "sf_vec_size": 16,
    "vector_f32": False,
    "m_aligned": 256,
    "discrete_col_sfd": False,
    "use_dynamic_sched": False,
    "b_major": "k",
    "cd_major": "n",
    "epilogue_op": None,
    "acc_dtype": None,
    "c_dtype": None,
    "d_dtype": None,
    "wgrad_dtype": None,
    "current_stream": None,
    "linear_offset": None,
    "geglu_alpha": 1.702,
    "glu_clamp_max": 7.0,
    "glu_clamp_min": -7.0,
    "situ_beta1": 4.0,
    "situ_beta2": 25.0,
    "generate_c": False,
    "generate_dbias": False,
    "generate_amax": True,
    "output_mode": "dense",
    "accumulate_on_output": False,
    "use_single_group_runtime_offsets": False,
    "sf_fp8_dtype_override": None,
    "norm_const": 1.0,
    "rht_norm_const": 1.0,
    "round_dgrad_to_input_dtype": False,
    "use_dsrelu_reuse": False,
}


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


Q, LSE, I32 = zeros(1, 32, 2, 256).transpose(1, 2), torch.zeros(1, 2, 32), torch.int32
ROWS, PAIR = zeros(8, 2, 64), torch.tensor([8], dtype=I32)
STUBBED: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "attention": (cudnn.sdpa.SdpafwdSm100D256, lambda _: cudnn.sdpa.sdpa_fwd_wrapper_sm100_d256(Q, Q, Q)),
    "its gradients": (
        cudnn.sdpa.SdpabwdSm100D256,
        lambda _: cudnn.sdpa.sdpa_bwd_wrapper_sm100_d256(Q, Q, Q, Q, Q, LSE),
    ),
    "a sliding window": (
        cudnn.NSA.SlidingWindowAttention,
        lambda _: cudnn.NSA.sliding_window_attention_wrapper(
            ROWS, ROWS, ROWS, seq_len_q_tensor=PAIR, seq_len_kv_tensor=PAIR, left_bound=8
        ),
    ),
    "selection": (
        cudnn.NSA.SelectionAttention,
        lambda _: cudnn.NSA.selection_attention_wrapper(
            ROWS, ROWS, ROWS, zeros(8, 2, 1, dtype=I32), zeros(8, 2, dtype=I32), torch.tensor([0, 8], dtype=I32)
        ),
    ),
    "top-k": (
        cudnn.NSA.TopKReduction,
        lambda _: cudnn.NSA.topk_reduction_wrapper(zeros(1, 2, 64, 64), zeros(1, 2, 8, 64), torch.zeros(1, 2, 64)),
    ),
    "gradients of experts' weights, of any tokens": (
        cudnn.GroupedGemmWgrad,
        lambda tokens: cudnn.grouped_gemm_wgrad_wrapper(
            zeros(64, tokens), zeros(tokens, 96), zeros(128, 4), zeros(128, 4), torch.tensor([8, tokens], dtype=I32)
        ),
    ),
}


@pytest.mark.parametrize("name", STUBBED)
def test_stubs_of_existing_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They replace ``check_support``, ``compile``, and ``execute``, which takes names alone; wrappers keep objects."""
    (api, call), calls = STUBBED[name], list[str]()
    monkeypatch.setattr(api, "check_support", lambda self: True)
    monkeypatch.setattr(api, "compile", lambda self: calls.append("compile"))
    monkeypatch.setattr(api, "execute", lambda self, **named: calls.append("execute"))
    api.objects.clear()
    for tokens in (20, 160):
        call(tokens)
    assert calls == ["compile", "execute", "execute"]
    module = importlib.import_module(api.__module__)
    assert len(getattr(module, f"_cache_of_{api.__name__}Objects", api.objects)) == len(api.objects) == 1
    api.objects.clear()


@pytest.mark.parametrize("name", GROUPED)
def test_results_and_defaults_that_existing_programs_know(name: str) -> None:
    """In their order; what a call may leave out is the same for the class and the wrapper."""
    api, activation = registry.find(name), "dswiglu" if "_dglu" in name or "_dswiglu" in name else "swiglu"
    assert api.returns == tuple(RESULTS[name].split())
    for function in (api, registry.wrapper(name)):
        actual = {key: p.default for key, p in inspect.signature(function).parameters.items()}
        known = {key: value for key, value in (DEFAULTS | {"act_func": activation}).items() if key in actual}
        assert {key: actual[key] for key in known} == known


@pytest.mark.parametrize("name", NEW)
def test_a_declaration_is_short(name: str) -> None:
    path = ROOT / "python" / "cudnn" / name / "api.py"
    assert len(path.read_text().splitlines()) <= 210
    assert ast.parse(path.read_text())


@pytest.mark.parametrize(
    ("arch", "kwargs"),
    in_turn(
        [
            {"dtype": "float8_e4m3fn", "scale": "float8_e8m0fnu", "vector": 32, "shape": (128, 128, 128, 1)},
            {"out": "float8_e4m3fn", "vector": 32},
            {},
        ],
        1,  # the plain ones are emulated as programs, too
        places=["reference", "sm_90a", "sm_100a"],
    ),
    ids=str,
)
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.full if x in BY_NAME else []) for x in NEW])
def test_new_gemms(name: str, kwargs: dict[str, Any], arch: str) -> None:
    problem = dense.make(Variant(name, **{"shape": (72, 128, 64, 2), **kwargs}), "cpu")
    if arch == "reference":
        results = problem.call()
    else:
        with cudnn.emulation(arch, races=True):
            results = problem.call()
    assert [each for each in problem.compare(results) if not each.passed] == []


def test_geglu_is_what_it_says() -> None:
    """Against the formula, value by value in float64; clamped on both sides, of numbers other than the usual ones."""
    a, b = torch.randn(40, 32, 1).bfloat16(), 3 * torch.randn(128, 32, 1).bfloat16()
    numbers = {"linear_offset": 0.5, "geglu_alpha": 1.2, "glu_clamp_max": 5.0, "glu_clamp_min": -3.0}
    ab12, c, *_ = cudnn.gemm_geglu_wrapper(a, b, ab12_dtype=torch.float32, c_dtype=torch.float16, **numbers)
    z = ab12[..., 0].double()
    up, gate = torch.cat([z[:, :32], z[:, 64:96]], 1), torch.cat([z[:, 32:64], z[:, 96:]], 1)
    assert float(up.max()) > 5 > -3 > float(up.min())
    g, u = gate.clamp(max=5.0), up.clamp(-3.0, 5.0)
    torch.testing.assert_close(c[..., 0].double(), (u + 0.5) * g / (1 + torch.exp(-1.2 * g)), rtol=1e-3, atol=1e-3)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The heads (m, heads, rotary) rotated, in float64, by complex multiplication."""
    pairs = x.unflatten(2, (-1, 2)) if interleaved else x.unflatten(2, (2, -1)).mT
    turned = torch.view_as_complex(pairs.double().contiguous()) * torch.complex(cos.double(), sin.double()).unsqueeze(1)
    pairs = torch.view_as_real(turned)
    return (pairs if interleaved else pairs.mT).flatten(2)


SLOW = [pytest.param(arch, marks=pytest.mark.full) for arch in ("sm_90a", "sm_100a")]


@pytest.mark.parametrize("where", ["reference", *SLOW, pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head", "rotary"), [(192, 64), (128, 96), (80, 32), (64, 48), (256, 80)])
def test_rope_is_what_it_says(head: int, rotary: int, interleaved: bool, where: str) -> None:
    """Against complex numbers: part of a head, some of the heads, with positions; rows without an angle become NaN."""
    a, b = torch.randn(40, 64, 1).half(), torch.randn(4 * head, 64, 1).half()
    cos, sin = torch.randn(2, 9, rotary // 2)
    positions = torch.randint(0, 9, (40,), dtype=torch.int32)
    positions[3], positions[5] = -1, 9
    options = {"head_size": head, "rotary_size": rotary, "rotated_begin": head, "rotated_end": 3 * head}
    kwargs = [x.cuda() if where == "gpu" else x for x in (a, b, cos, sin, positions)]
    with within(where):
        c, _ = cudnn.gemm_rope_wrapper(*kwargs, **options, interleaved=interleaved, c_dtype=torch.float32)
    expected = (a[..., 0].double() @ b[..., 0].double().T).unflatten(1, (4, head))
    rows = positions.long().clamp(0, 8)
    expected[:, 1:3, :rotary] = rotated(expected[:, 1:3, :rotary], cos[rows], sin[rows], interleaved)
    expected[3, 1:3, :rotary] = expected[5, 1:3, :rotary] = float("nan")
    torch.testing.assert_close(c[..., 0].cpu().double(), expected.flatten(1), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_rope_turns_back() -> None:
    """The inverse of a rotation, of what it made."""
    x, eye = torch.randn(40, 128, 1), torch.eye(128).unsqueeze(2)
    angles = torch.rand(40, 64) * 6
    cos, sin = angles.cos(), angles.sin()
    once, _ = cudnn.gemm_rope_wrapper(x, eye, cos, sin, c_dtype=torch.float32)
    back, _ = cudnn.gemm_rope_wrapper(once, eye, cos, sin, inverse=True, c_dtype=torch.float32)
    assert not torch.allclose(once, x, atol=0.5)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_rope(interleaved: bool) -> None:
    a, b = (torch.randn(rows, 32, 1, requires_grad=True) for rows in (24, 256))
    cos, sin = torch.randn(2, 24, 64)
    weight = torch.randn(24, 256)
    c, _ = cudnn.ops.gemm_rope(a, b, cos, sin, rotated_end=128, interleaved=interleaved, c_dtype=torch.float32)
    (c[..., 0] * weight).sum().backward()
    x, y = (t.detach().double().requires_grad_() for t in (a, b))
    z = (x[..., 0] @ y[..., 0].T).unflatten(1, (2, 128))
    z = torch.cat([rotated(z[:, :1], cos, sin, interleaved), z[:, 1:]], 1).flatten(1)
    (z * weight).sum().backward()
    torch.testing.assert_close(a.grad, x.grad.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(b.grad, y.grad.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rotary_size": 24}, r"head_size and rotary_size: got \(128, 24\); allowed: multiples of 16"),
        ({"head_size": 80, "rotary_size": 96}, r"got \(80, 96\); allowed: multiples of 16, rotary_size up to 256 and"),
        ({"head_size": 256, "rotary_size": 128}, "n: got 384; allowed: multiples of head_size"),
        ({"rotated_begin": 64}, r"rotated_begin and rotated_end: got \(64, 384\); allowed: multiples of 128"),
        ({"rotated_end": 512}, r"got \(0, 512\); allowed: multiples of 128, in order, up to 384"),
        ({"rows": 41}, "rows of cos and sin: got 41; allowed: 40, those of a. To fix it, pass positions"),
    ],
)
def test_what_rope_refuses(kwargs: dict[str, Any], message: str) -> None:
    half = kwargs.get("rotary_size", 128) // 2
    cos = sin = torch.randn(kwargs.pop("rows", 40), half)
    a, b = torch.randn(40, 64, 1), torch.randn(384, 64, 1)
    with pytest.raises(ValueError, match=message):
        cudnn.gemm_rope_wrapper(a, b, cos, sin, **kwargs)


def test_rope_of_wide_halves_of_8_bits() -> None:
    a, b = torch.zeros(16, 64, 1, dtype=E4M3), torch.zeros(256, 64, 1, dtype=E4M3)
    cos = sin = torch.zeros(16, 128)
    with pytest.raises(NotImplementedError, match="got 256 of 256, so 256 columns in one tile; allowed: at most 128"):
        cudnn.gemm_rope_wrapper(a, b, cos, sin, head_size=256)
    for wide in ({"accurate": True}, {"interleaved": True}):
        assert cudnn.gemm_rope_wrapper(a, b, cos, sin, head_size=256, **wide)[0].shape == (16, 256, 1)


@pytest.mark.parametrize("name", GEMMS)
def test_programs_see_wrong_results(name: str) -> None:
    program = demo_cases.find(name)
    problem = program.make(program.shape, "cpu")
    results = problem.call()
    results[0].mul_(1.5)
    assert any(not each.passed for each in problem.compare(results))


@pytest.mark.parametrize("name", GEMMS)
def test_every_short_type_has_usual_tensors(name: str) -> None:
    api: Any = registry.find(name)
    for kind in OPERAND_TYPES.values():
        tensors = empty_tensors(api, (128, 128, 128, 1), kind, "meta")
        options = {"sf_vec_size": kind.vector} if kind.scale else {}
        assert api(**api.samples(tensors), **options, arch="sm_90a").check_support()


def test_an_object_shows_its_tensors_and_needs_an_architecture_without_a_gpu() -> None:
    with torch.device("meta"):
        x, w, amax = torch.empty(16, 512).bfloat16(), torch.empty(512).bfloat16(), torch.empty(8)
    norm = cudnn.RmsNormRhtAmax(x, w, x, amax)
    assert repr(norm).startswith("<cudnn.RmsNormRhtAmax: x bfloat16 (16, 512), ")
    with pytest.raises(RuntimeError, match=r'device: got meta; .* To fix it, pass arch="sm_90a" or arch="sm_100a"'):
        norm.check_support()


def test_a_fused_api_without_flops_is_refused_where_it_is_defined() -> None:
    with pytest.raises(TypeError, match="Uncounted: flops: got no definition; allowed: a class method"):
        type("Uncounted", (FusedAPI,), {"tensors": (), "execute": lambda self: None})
    type("Uncounted", (FusedAPI,), {"tensors": (), "execute": lambda self: None, "counted": False})
