"""What holds for every fused API that the registry finds, whatever it computes."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnn
from cudnn import registry
from cudnn.cli import programs
from cudnn.cli.programs import dense
from cudnn.cli.programs.gemm_matrix import Variant
from cudnn.fused.dense import OPERAND_TYPES, blank
from support.selection import in_turn

pytest.importorskip("ptx_emulator")

ROOT = Path(__file__).parents[2]
NAMES = list(registry.packages())
GEMMS = registry.gemms()
NEW = ("gemm_geglu",)
"""Those that proved that a declaration is enough: at most 150 lines."""


@pytest.mark.parametrize("name", NAMES)
def test_public_names(name: str) -> None:
    api, module = registry.find(name), importlib.import_module(f"{registry.packages()[name]}.api")
    title = api.__name__
    assert getattr(cudnn, title) is api
    assert issubclass(getattr(cudnn, f"{title}Sm100"), api)
    assert getattr(cudnn, f"{name}_wrapper") is getattr(cudnn, f"{name}_wrapper_sm100") is registry.wrapper(name)
    assert getattr(module, f"_cache_of_{title}Objects") is getattr(module, f"_cache_of_{title}Sm100Objects")
    assert (ROOT / "docs" / "fused" / f"{name}.md").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_the_signatures_are_those_of_the_tensors(name: str) -> None:
    """``execute`` hands its arguments over in their order, which is what the call is bound by."""
    api = registry.find(name)
    declared = {spec.name for spec in api.tensors}
    samples = [p for p in inspect.signature(api).parameters if p.startswith("sample_")]
    assert {p.removeprefix("sample_") for p in samples} == declared == set(api.names)
    handed: list[Any] = []
    arguments = {p: p for p in inspect.signature(api.execute).parameters if p != "self"}
    stand_in = type("StandIn", (), {"run": lambda self, *given: handed.extend(given)})()
    api.execute(stand_in, **arguments)  # type: ignore[arg-type]
    tensors, scalars, stream, *_ = handed
    assert tensors == tuple(api.parameters[key] for key in api.names)
    assert tuple(x for x in scalars if x is not None) == api.run_time
    assert stream == "current_stream"
    optional = {spec.name for spec in api.tensors if spec.optional}
    for function, form in ((api, "sample_{}"), (api.execute, "{}_tensor")):
        parameters = inspect.signature(function).parameters
        defaults = {key for key in declared if parameters[form.format(key)].default is None}
        assert defaults <= optional


@pytest.mark.parametrize("name", NEW)
def test_a_declaration_is_short(name: str) -> None:
    path = ROOT / "python" / "cudnn" / name / "api.py"
    assert len(path.read_text().splitlines()) <= 150
    assert ast.parse(path.read_text())


@pytest.mark.parametrize(
    ("arch", "given"),
    in_turn(
        [
            {},
            {"dtype": "float8_e4m3fn", "scale": "float8_e8m0fnu", "vector": 32, "shape": (128, 128, 128, 1)},
            {"out": "float8_e4m3fn", "vector": 32},
        ],
        places=["reference", "sm_90a", "sm_100a"],
    ),
    ids=str,
)
@pytest.mark.parametrize("name", NEW)
def test_new_gemms(name: str, given: dict[str, Any], arch: str) -> None:
    problem = dense.make(Variant(name, **{"shape": (72, 128, 64, 2), **given}), "cpu")
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


@pytest.mark.parametrize("name", GEMMS)
def test_programs_see_wrong_results(name: str) -> None:
    program = programs.find(name)
    problem = program.make(program.shape, "cpu")
    results = problem.call()
    results[0].mul_(1.5)
    assert any(not each.passed for each in problem.compare(results))


@pytest.mark.parametrize("name", GEMMS)
def test_every_short_type_has_usual_tensors(name: str) -> None:
    api: Any = registry.find(name)
    for kind in OPERAND_TYPES.values():
        tensors = blank(api, (128, 128, 128, 1), kind, "meta")
        options = {"sf_vec_size": kind.vector} if kind.scale else {}
        assert api(**api.samples(tensors), **options, arch="sm_90a").check_support()
