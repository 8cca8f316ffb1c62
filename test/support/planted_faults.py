"""Thirty faults of one line each, most of them once made or nearly made, and the few tests that must notice each.

    python test/support/planted_faults.py [WORDS...]

plants each fault, or those whose names contain one of the words, in a copy of the source tree and runs its tests there:
they must fail. Prints a table; exits 1 where a fault was not noticed. A default test keeps the list true to the source.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS, HOST, EMULATOR = "kernels/cudnn_kernels", "python/cudnn", "python/ptx_emulator"


@dataclass(frozen=True)
class Fault:
    """``old``, which stands once in ``path``, becomes ``new``; ``tests`` are pytest's arguments."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mutated(self, text: str) -> str:
        assert text.count(self.old) == 1, f"{self.name}: found {text.count(self.old)} times in {self.path}"
        return text.replace(self.old, self.new)


def _test(path: str, words: str = "") -> tuple[str, ...]:
    return (f"test/{path}", "-k", words) if words else (f"test/{path}",)


_EPILOGUE, _GEMM = "kernels/test_epilogue.py::", "kernels/test_gemm.py::"
FAULTS = [
    # kernels
    Fault(
        "a stage is released while its MMAs run",
        f"{KERNELS}/sm90/gemm.py",
        "warpgroup.wait_group(1)\n            if k > 0:",
        "warpgroup.wait_group(2)\n            if k > 0:",
        _test(f"{_GEMM}test_clusters", "sm_90a"),
    ),
    Fault(
        "zeros for an expert without tokens, Hopper",
        f"{KERNELS}/sm90/gemm.py",
        "if k_tiles == 0:  # an empty group\n                acc.fill(0.0)",
        "if k_tiles == 0:  # an empty group\n                acc.fill(1.0)",
        _test(f"{_GEMM}test_k_of_experts", "sm_90a"),
    ),
    Fault(
        "zeros for an expert without tokens, Blackwell",
        f"{KERNELS}/sm100/gemm.py",
        "values.fill(0.0)  # no MMA",
        "values.fill(1.0)  # no MMA",
        _test(f"{_GEMM}test_k_of_experts", "sm_100a"),
    ),
    Fault(
        "the accumulator is released before its last subtile is read",
        f"{KERNELS}/sm100/gemm.py",
        "step == len(subtile_passes) - 1 and not",
        "step == 0 and not",
        _test(f"{_EPILOGUE}test_operations", "257-200"),
    ),
    Fault(
        "a CTA releases only stages of its column",
        f"{KERNELS}/pipeline/cluster.py",
        "lane % cluster.m == m or lane // cluster.m == n",
        "lane % cluster.m == m",
        _test(f"{_GEMM}test_clusters", "sm_90a"),
    ),
    Fault(
        "partial sum of the fp8 promotion",
        f"{KERNELS}/sm90/gemm.py",
        "k % self.promotion_interval == self.promotion_interval - 1 or k == k_tiles - 1",
        "k % self.promotion_interval == self.promotion_interval - 1",
        _test("kernels/test_gemm.py", "test_types_and_majors and sm_90a"),
    ),
    # epilogues
    Fault(
        "a row beyond the tensor is added to",
        f"{KERNELS}/epilogue/reductions.py",
        "row < tile.end:\n        offset = cute",
        "row <= tile.end:\n        offset = cute",
        _test(f"{_EPILOGUE}test_operations", "257-200"),
    ),
    Fault(
        "column scale factors are read before they are written",
        f"{KERNELS}/epilogue/quantize.py",
        "        tile.barrier()\n        y = self.params",
        "        y = self.params",
        _test(f"{_EPILOGUE}test_random_epilogues", "sm_90a"),
    ),
    Fault(
        "powers of two are rounded to nearest",
        f"{KERNELS}/epilogue/quantize.py",
        "((1 << 23) - 1)",
        "(1 << 22)",
        _test(f"{_EPILOGUE}test_e8m0_factors"),
    ),
    Fault(
        "a scale factor of 0 is inverted",
        f"{KERNELS}/epilogue/quantize.py",
        "select_(rounded == 0.0, Float32(0.0), inverse)",
        "inverse",
        _test(f"{_EPILOGUE}test_e4m3_factors"),
    ),
    Fault(
        "scale factors in another order",
        f"{KERNELS}/epilogue/quantize.py",
        "position = (row & 31, row >> 5 & 3, row",
        "position = (row >> 2 & 31, row & 3, row",
        _test(f"{_EPILOGUE}test_factors_have_the_128_by_4_layout"),
    ),
    Fault(
        "a bias makes rows outside count",
        f"{KERNELS}/epilogue/arithmetic.py",
        "pick(row_idx < tile.end, 1.0, 0.0)",
        "Float32(1.0)",
        _test(f"{_EPILOGUE}test_a_bias_is_added_to_rows_that_there_are", "sm_90a"),
    ),
    Fault(
        "gate and up are swapped",
        f"{KERNELS}/epilogue/arithmetic.py",
        "(not gate_first, gate_first)",
        "(gate_first, not gate_first)",
        _test(f"{_EPILOGUE}test_operations", "65-192"),
    ),
    Fault(
        "the probability's gradient of a gate",
        f"{KERNELS}/epilogue/arithmetic.py",
        "y = u * d_up",
        "y = g * d_up",
        _test("fused/test_gemm_results.py::test_partial_tiles", "gemm_dswiglu"),
    ),
    Fault(
        "a rotation's sign",
        f"{KERNELS}/epilogue/rotate.py",
        "-(right * angles[1])",
        "right * angles[1]",
        _test(f"{_EPILOGUE}test_rotations"),
    ),
    # schedules
    Fault(
        "tiles of the expert before are not counted",
        f"{KERNELS}/schedule/tile_maps.py",
        "if lane >= 1 << step:",
        "if lane > 1 << step:",
        _test(f"{_GEMM}test_rows_of_experts", "many"),
    ),
    Fault(
        "an expert's last tile is missing",
        f"{KERNELS}/schedule/tile_maps.py",
        "return (rows + (height - 1)) // height",
        "return rows // height",
        _test(f"{_GEMM}test_rows_of_experts", "any"),
    ),
    Fault(
        "tiles beyond the last raster group",
        f"{KERNELS}/schedule/tile_maps.py",
        "cutlass.min(m - group * swizzle_size, swizzle_size)",
        "swizzle_size",
        _test(f"{_GEMM}test_clusters", "sm_100a"),
    ),
    # other kernels
    Fault(
        "the norm's stage is refilled before it is stored",
        f"{KERNELS}/norm/rmsnorm_rht_amax.py",
        "cute.arch.cp_async_bulk_wait_group(1, read=True)",
        "cute.arch.cp_async_bulk_wait_group(2, read=True)",
        _test("kernels/test_rmsnorm_rht_amax_emulated.py::test_values_without_races"),
    ),
    Fault(
        "the row sum is not rescaled to the new maximum",
        f"{KERNELS}/attention/softmax.py",
        "order, state.row_sum[slot] * row_scale)",
        "order, state.row_sum[slot])",
        _test("kernels/test_attention.py::test_forward"),
    ),
    Fault(
        "a scale factor of 0",
        f"{KERNELS}/gemm/prepare_operand.py",
        "special = code - Uint32(1) >= Uint32(254)",
        "special = code >= Uint32(255)",
        _test("kernels/test_operand.py::test_every_code_times_every_scale"),
    ),
    # the way to a kernel
    Fault(
        "a result may overlap itself",
        f"{HOST}/api_base.py",
        "if step < reach:",
        "if step < 0:",
        _test("fused/test_given_tensors.py::test_what_is_refused"),
    ),
    Fault(
        "a damaged kernel is loaded",
        f"{HOST}/runtime/cache.py",
        "if digest != hashlib.sha256(content).hexdigest():",
        "if False:",
        _test("fused/test_kernel_cache.py"),
    ),
    Fault(
        "relocations forget the table that they are relative to",
        f"{HOST}/runtime/elf.py",
        "value = addresses[symbol] + addend - (base + table)",
        "value = addresses[symbol] + addend - base",
        _test("fused/test_launch.py"),
    ),
    # graphs
    Fault(
        "a slice of a slice",
        f"{HOST}/pygraph/lowering.py",
        "offset += inner",
        "offset = inner",
        _test("graph/test_structure.py", "cudnn_sees or cudnn_takes or alignment"),
    ),
    Fault(
        "groups that end where the next one begins",
        f"{HOST}/pygraph/reduction.py",
        "[*first[1:], x.shape[1]]",
        "[*first[1:], x.shape[1] - 1]",
        _test("graph/test_reduction.py"),
    ),
    Fault(
        "results of fp8 overflow",
        f"{HOST}/reference/memory.py",
        "value = value.float().clamp(-limit, limit)",
        "value = value.float()",
        _test("reference/test_precision.py::test_fp8_saturates"),
    ),
    # the emulator
    Fault(
        "a barrier's next phase needs one arrival",
        f"{EMULATOR}/sync.py",
        "barrier.pending = barrier.count",
        "barrier.pending = 1",
        _test(f"{_GEMM}test_clusters", "sm_90a"),
    ),
    Fault(
        "writes of other components are no races",
        f"{EMULATOR}/race.py",
        "return (other != who) & (clock[row, plane, other] < events.epoch[event])",
        "return other == who",
        _test("emulator/test_mutations.py::test_each_synchronisation_is_missed", "rmsnorm"),
    ),
    Fault(
        "out-of-bounds elements of a TMA load are not zero",
        f"{EMULATOR}/tma.py",
        "high = [min(b, d - c) for",
        "high = [b for",
        _test(f"{_GEMM}test_odd_sizes", "sm_90a"),
    ),
]


def noticed(fault: Fault, tree: Path) -> tuple[bool, str]:
    """Whether a fault's tests fail, or crash, in a copy of the source tree, and the last line that pytest prints."""
    path = tree / fault.path
    text = path.read_text()
    path.write_text(fault.mutated(text))
    try:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(tree / x) for x in ("python", "kernels"))}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *fault.tests]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(text)
    last = (done.stdout.strip() or done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[-1]
    return done.returncode < 0 or (done.returncode == 1 and re.search(r"\d+ failed", last) is not None), last


def main(words: list[str]) -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("python", "kernels", "test", "docs", "pyproject.toml", "README.md"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        for fault in FAULTS:
            if words and not any(word in fault.name for word in words):
                continue
            start = time.perf_counter()
            detected, last = noticed(fault, tree)
            missed += not detected
            outcome, seconds = "noticed" if detected else "MISSED", time.perf_counter() - start
            print(f"{outcome:7} {seconds:5.0f} s  {fault.name} ({fault.path}): {last}", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
