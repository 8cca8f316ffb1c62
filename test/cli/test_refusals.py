"""Arguments that commands refuse before they start: exit code 2, and a message with the allowed values."""

from __future__ import annotations

import pytest

from cudnn import bench, demo_cases
from support.cli import invoke, words

REFUSED = {
    "bench": [
        (["nothing"], f"got 'nothing'; allowed: all, {', '.join(bench.BENCHMARKS)}."),
        (["sdpa", "--quick", "--all"], "--quick: allowed: without --shapes and --all."),
        ([], "NAME: got nothing; allowed: "),
        (["gemm_swiglu", "--dtype", "int8"], "got 'int8'; allowed: bf16, fp16, fp8, fp8_128, mxfp8, nvfp4."),
        (["rmsnorm_rht_amax", "--dtype", "fp8"], "got 'fp8'; allowed: bf16."),
        (["gemm_amax", "--no-ab12"], "got gemm_amax; allowed: only with results that have ab12."),
        (["gemm_swiglu", "--shapes", "128x64"], "got '128x64'; allowed: MxNxK, N a multiple of 64, K"),
        (["gemm_swiglu", "--shapes", "128x64x64,8x65x64"], "got '8x65x64'; allowed: MxNxK"),
        (["gemm_swiglu", "--shapes", "0x64x64"], "got '0x64x64'; allowed: MxNxK"),
        (["gemm_swiglu", "--shapes", "1x-64x64"], "got '1x-64x64'; allowed: MxNxK"),
        (["gemm_amax", "--routing", "zipf"], "got 'zipf'; allowed: uniform."),
        (["--from-csv", "missing.csv"], "missing.csv"),
        (["--from-csv", __file__], "no CSV file of `cudnn bench`"),
        (["gemm_swiglu", "--ranks", "2"], "allowed: 2 to 16, with moe, --quick"),
        (["moe", "--ranks", "1"], "allowed: 2 to 16, with moe, --quick"),
        (["moe", "--ranks", "2", "--all"], "allowed: 2 to 16, with moe, --quick"),
    ],
    "emulate": [
        (["nothing"], f"TARGET: got 'nothing'; allowed: {demo_cases.PROGRAMS[0]}, "),
        (["missing.py"], "TARGET: got 'missing.py'; allowed: a file that exists."),
        (["rmsnorm_rht_amax", "--arch", "sm_80"], "--arch: got 'sm_80'; allowed: sm_90a, sm_100a."),
        (["rmsnorm_rht_amax", "--scheduler", "fair"], "got 'fair'; allowed: lowest-pc, random, lazy."),
        (["rmsnorm_rht_amax", "--shape", "16"], "got '16'; allowed: m x n such as 512x512."),
        (["rmsnorm_rht_amax", "--shape", "0x512"], "got '0x512'; allowed: m x n"),
        (["rmsnorm_rht_amax", "more"], "ARGUMENTS: got 'more'; allowed: only with a script."),
        (["--shape", "16x512", __file__], "--shape: got '16x512'; allowed: only with a fused API."),
    ],
    "explain": [
        ([], "allowed: a file or --example, one of the two"),
        (["program.py", "--example", "conv"], "one of the two"),
        (["--example", "rope"], "got 'rope'; allowed: attention, conv, matmul, rmsnorm"),
        (["--example", "conv", "--format", "png"], "got 'png'; allowed: text, svg"),
        (["absent.py"], "got 'absent.py'; allowed: a file that exists"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "said"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_what_is_refused(command: str, arguments: list[str], said: str) -> None:
    result = invoke(command, *arguments)
    assert result.exit_code == 2
    assert said.replace(" ", "") in words(result).replace(" ", "")  # the message is wrapped anywhere
