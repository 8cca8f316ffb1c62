"""What kernels are called in profilers: short names that tell which is which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cudnn
from cudnn import demo_cases
from cudnn.demo_cases import dense
from cudnn.demo_cases.gemm_variants import E4M3, Variant

ROOT = Path(__file__).parents[2]
SMALL = (128, 128, 128, 1)


@pytest.mark.parametrize(
    ("arch", "variant", "names"),
    [
        (
            "sm_90a",
            Variant("gemm_amax", SMALL, E4M3, "mkn"),
            ["cudnn_prepare_operand_sm90_cutlass_0", "cudnn_gemm_sm90_cutlass_1"],
        ),
        ("sm_100a", Variant("gemm_amax", SMALL), ["cudnn_gemm_sm100_cutlass_0"]),
    ],
)
def test_gemms(arch: str, variant: Variant, names: list[str]) -> None:
    with cudnn.emulation(arch) as report:
        dense.make(variant, "cpu").call()
    assert [launch.kernel for launch in report.launches] == names


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_norm(arch: str) -> None:
    program = demo_cases.find("rmsnorm_rht_amax")
    with cudnn.emulation(arch) as report:
        program.make(program.shape, "cpu").call()
    assert [launch.kernel for launch in report.launches] == ["cudnn_rmsnorm_rht_amax_cutlass_0"]


def test_every_kernel_is_named() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        named = [ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "set_kernel_name"]
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        kernels = [f.name for f in functions if any("cute.kernel" in ast.unparse(d) for d in f.decorator_list)]
        assert sorted(named) == sorted(kernels), path
