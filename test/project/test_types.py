"""What type checkers make of programs that use the library: types instead of ``Any``, and mistakes are found."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cudnn
from cudnn.fused import registry
from cudnn.pygraph.methods import Methods

ROOT = Path(__file__).parents[2]

PROGRAM = """
import cudnn
import torch
from cudnn.experimental.ops import moe_grouped_matmul, scaled_dot_product_attention
from cudnn.ops import causal_conv1d, gemm_swiglu
from typing_extensions import assert_type

x, w = torch.randn(4, 128, 256), torch.randn(1, 256, 512)
with cudnn.Graph(inputs=["linear::A", "linear::B"], outputs=["y"]) as graph:
    product = graph.matmul(name="linear", A=x, B=w)
    assert_type(product, cudnn.tensor)
    graph.gelu(input=product).set_output(True).set_name("y")
assert_type(graph, cudnn.Graph)
assert_type(graph.get_workspace_size(), int)
y = graph(x, w)

q = torch.randn(1, 2, 8, 16)
with cudnn.Graph() as attention:
    o, stats = attention.sdpa(q, q, q, attn_scale=0.25, use_causal_mask=True)
    o.set_output(True).set_dim(q.shape).set_stride(q.stride())
with cudnn.Graph() as norm:
    scale, bias = torch.ones(1, 256, 1, 1), torch.zeros(1, 256, 1, 1)
    rows = norm.layernorm(torch.randn(8, 256, 1, 1), scale, bias)
    rows[0].set_output(True)
with cudnn.Graph() as norm:
    rows = norm.layernorm(cudnn.norm_forward_phase.INFERENCE, torch.randn(8, 256, 1, 1), scale, bias)

steps = cudnn.pygraph(backend="reference", io_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT)
tq = steps.tensor_like(q)
to, _ = steps.sdpa(tq, tq, tq, generate_stats=False)
to.set_output(True).set_dim(q.shape).set_stride(q.stride())

a = torch.randn(1, 128, 64).bfloat16().permute(1, 2, 0)
assert_type(gemm_swiglu(a, a, c_dtype=torch.bfloat16), torch.Tensor)
m = a[..., 0]
assert_type(gemm_swiglu(m, m, returns=("c", "ab12")), tuple[torch.Tensor, ...])
assert_type(cudnn.ops.gemm_amax(a, a), torch.Tensor)
assert_type(cudnn.ops.gated_mlp(m, m, torch.ones(64, 64).bfloat16()), torch.Tensor)
assert_type(scaled_dot_product_attention(q, q, q), torch.Tensor)
assert_type(causal_conv1d(x, torch.ones(128, 4)), torch.Tensor)
first = torch.zeros(2, 1, 1, dtype=torch.int32)
assert_type(moe_grouped_matmul(torch.randn(1, 8, 16), torch.randn(2, 32, 16).mT, first), torch.Tensor)
c = cudnn.gemm_swiglu_wrapper(a, a)["c_tensor"]


def emulated() -> None:
    with cudnn.emulation("sm_90a", races=True) as report:
        print(report)
"""

MISTAKES = """
import cudnn
import torch

x = torch.randn(1, 8, 8)
with cudnn.Graph() as graph:
    graph.matmull(A=x, B=x)  # wrong
    graph.matmul(A=x)  # wrong
    graph.matmul(A=x, B="x")  # wrong
    graph.layernorm(x)  # wrong
    graph.build()  # wrong
    graph.matmul(A=x, B=x).set_dim("8")  # wrong
cudnn.gemm_swigluu(x, x)  # wrong
cudnn.ops.gemm_gelu(x, x)  # wrong
cudnn.ops.gemm_swiglu(x)  # wrong
cudnn.ops.gemm_swiglu(x, x, alpha="1")  # wrong
"""


def public_names() -> list[str]:
    """Those that are loaded at their first use too."""
    names = [f"cudnn.{name}" for name in (*cudnn.__all__, *cudnn._LAZY, *cudnn._LAZY_MODULES, *cudnn._fused_names())]
    names += [f"cudnn.ops.{name}" for name in dir(cudnn.ops) if name in (*cudnn.ops._OWN, *registry.packages())]
    return names + [f"cudnn.experimental.ops.{name}" for name in cudnn.experimental.ops.__all__]


@pytest.fixture(scope="module")
def diagnostics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What pyright says of each program, by name."""
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    folder = tmp_path_factory.mktemp("types")
    names = "import cudnn\n" + "".join(f"reveal_type({name})\n" for name in public_names())
    for name, program in (("program", PROGRAM), ("mistakes", MISTAKES), ("names", names)):
        (folder / f"{name}.py").write_text(program)
    paths = [str(ROOT / "python"), str(ROOT / "kernels")]
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": paths, "include": ["*.py"]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    by_file: dict[str, list[dict[str, Any]]] = {"program": [], "mistakes": [], "names": []}
    for diagnostic in json.loads(done.stdout)["generalDiagnostics"]:
        by_file[Path(diagnostic["file"]).stem].append(diagnostic)
    return by_file


def test_the_program_runs() -> None:
    exec(compile(PROGRAM, "program.py", "exec"), {})


def test_pyright_knows_the_types(diagnostics: dict[str, Any]) -> None:
    assert [diagnostic for diagnostic in diagnostics["program"] if diagnostic["severity"] != "information"] == []


def test_pyright_finds_mistakes(diagnostics: dict[str, Any]) -> None:
    lines = {
        diagnostic["range"]["start"]["line"]
        for diagnostic in diagnostics["mistakes"]
        if diagnostic["severity"] == "error"
    }
    assert lines == {number for number, line in enumerate(MISTAKES.splitlines()) if line.endswith("# wrong")}


def test_every_public_name_has_a_type(diagnostics: dict[str, Any]) -> None:
    reported = diagnostics["names"]
    assert [diagnostic["message"] for diagnostic in reported if diagnostic["severity"] == "error"] == []
    assert len(reported) == len(public_names())
    assert [diagnostic["message"] for diagnostic in reported if diagnostic["message"].endswith('is "Any"')] == []


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_knows_the_types(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    # PyTorch itself would take it a minute.
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n")
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT / "kernels")])
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "program.py"]
    environment = {**os.environ, "MYPYPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_type_checkers_know_the_operations_of_graphs() -> None:
    """And those alone."""
    known = {name for name in dir(Methods) if not name.startswith("_")}
    methods = {name for name in dir(cudnn.Graph()) if not name.startswith("_")}
    assert known == methods - set(vars(cudnn.Graph))
