"""The fuzzers of the GPU tests, without a GPU: their first problems on the reference executor, and asked of cuDNN."""

from __future__ import annotations

from typing import Any

import pytest

from gpu import fuzz_convolution, fuzz_matmul
from gpu.common import assert_accurate, count_refused
from support.graphs import reference_graph, run


@pytest.mark.parametrize("fuzzer", [fuzz_matmul, fuzz_convolution])
def test_reference_executor(fuzzer: Any) -> None:
    for _, problem in fuzzer.problems(12, "cpu"):
        graph = reference_graph(io=problem.kind)
        values, out = problem.build(graph)
        (result,) = run(graph, values, out)
        assert_accurate(result, problem.formula, problem.kind)


@pytest.mark.parametrize("fuzzer", [fuzz_matmul, fuzz_convolution])
def test_cudnn_has_engines(fuzzer: Any, device_properties: Any) -> None:
    count = 30
    refused = count_refused(fuzzer.problems(count, "cpu"), device_properties)
    assert refused <= count // 10, f"{refused} of {count} refused"
