"""The kernel, compiled for both architectures without a GPU and, where the emulator is there, run."""

from __future__ import annotations

import re

import pytest

from cudnn_kernels.norm.heuristics import USUAL_COLUMNS, configure_rmsnorm_rht_amax
from cudnn_kernels.pipeline.shared_memory import SHARED_MEMORY
from support.compiled import compile_kernel
from support.selection import in_turn

COLUMNS = list(dict.fromkeys([*USUAL_COLUMNS[::3], 65536, *USUAL_COLUMNS]))


@pytest.mark.parametrize(("arch", "columns"), in_turn(COLUMNS, 4))
def test_no_local_memory_and_wide_accesses(arch: str, columns: int) -> None:
    from cudnn_kernels import fakes
    from cudnn_kernels.norm import rmsnorm_rht_amax as module

    configuration = configure_rmsnorm_rht_amax("bfloat16", columns)
    kernel = {"sm_90a": module.RmsNormRhtAmax, "sm_100a": module.BlackwellRmsNormRhtAmax}[arch]
    compiled = compile_kernel(arch, kernel(configuration), *fakes.arguments(configuration))
    assert compiled.stack == 0
    assert compiled.registers * configuration.threads * configuration.teams <= 64 * 1024
    accesses = re.findall(r"(?:ld|st)\.(?:global|shared)\.(?:v\d\.)?b\d+", compiled.ptx)
    vectors = [access for access in accesses if access.endswith(".v4.b32")]
    pieces = -(-configuration.cta_columns // (16 * configuration.threads))
    assert len(vectors) >= 8 * pieces, accesses  # of each block: sum of squares, x, w, result, two halves each
    assert ("mul.rn.f32x2" in compiled.ptx) == (arch == "sm_100a")
    assert "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" in compiled.ptx
    assert "cp.async.bulk.global.shared::cta.bulk_group" in compiled.ptx


@pytest.mark.parametrize("threads", [None, 32, 64, 96, 128, 256, 512, 1024])
@pytest.mark.parametrize("columns", [256, 512, 768, 2048, 4096, 7168, 8192, 16384, 24576, 32768, 40960, 45056, 65536])
def test_configurations_fit(columns: int, threads: int | None) -> None:
    c = configure_rmsnorm_rht_amax("bfloat16", columns, threads)
    assert c.shared_memory <= SHARED_MEMORY
    assert c.stages >= 2
    assert 1 <= c.teams <= 16  # named barriers, one per team
    assert c.threads * c.teams <= 1024
    assert c.threads % 32 == 0
    assert (c.ctas, c.cta_columns) == ((2, columns // 2) if columns > 40960 else (1, columns))
    assert c.teams == 1 or c.ctas == 1
