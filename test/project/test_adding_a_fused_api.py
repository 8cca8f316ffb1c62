"""The page "Adding a fused API", followed to the letter: its files in a temporary folder, found and run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-a-fused-api.md"
BLOCKS = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```$', PAGE.read_text(), re.DOTALL | re.MULTILINE))
PROGRAM = """
import sys
import cudnn
cudnn.__path__.append(sys.argv[1])
from cudnn import bench
from cudnn.fused import registry, warm
assert "gemm_rows" in registry.packages() and "GemmRows" in dir(cudnn)
exec(compile(open(sys.argv[2]).read(), "page", "exec"))
assert bench.find("gemm_rows").yardsticks == ("cuBLAS", "cuBLAS + weights of rows")
assert warm.wanted(["sm_90a"], ["gemm_rows"])
"""


def test_the_page_is_enough(tmp_path: Path) -> None:
    for name, text in BLOCKS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert (tmp_path / "gemm_rows" / "api.py").is_file()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(tmp_path / "try it")]
    environment = {
        "PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'kernels'}",
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
