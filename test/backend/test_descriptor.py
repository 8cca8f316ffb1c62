from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from cudnn.backend import library
from cudnn.backend.descriptor import Descriptor
from cudnn.backend.enums import Attribute, DataType, DescriptorType, RngDistribution
from cudnn.errors import CudnnError
from support import descriptors

pytestmark = pytest.mark.usefixtures("libcudnn")


def test_values_come_back_as_set() -> None:
    tensor = descriptors.tensor(7, [2, 3, 4], [12, 4, 1], DataType.BFLOAT16)
    assert tensor.get(Attribute.TENSOR_UNIQUE_ID) == 7
    assert tensor.get(Attribute.TENSOR_DIMENSIONS) == [2, 3, 4]
    assert tensor.get(Attribute.TENSOR_STRIDES) == [12, 4, 1]
    assert DataType(tensor.get(Attribute.TENSOR_DATA_TYPE)) is DataType.BFLOAT16
    assert tensor.get(Attribute.TENSOR_IS_VIRTUAL) is False


def test_numbers_and_values_left_out() -> None:
    generator = Descriptor.make(
        DescriptorType.RNG,
        {
            Attribute.RNG_DISTRIBUTION: RngDistribution.BERNOULLI,
            Attribute.RNG_BERNOULLI_DIST_PROBABILITY: 0.25,
            Attribute.RNG_NORMAL_DIST_MEAN: None,
        },
    )
    assert generator.get(Attribute.RNG_BERNOULLI_DIST_PROBABILITY) == 0.25


@pytest.mark.deviceless_919
def test_a_failure_names_status_attribute_descriptor_and_cudnns_text() -> None:
    tensor = Descriptor(DescriptorType.TENSOR)
    with pytest.raises(CudnnError) as caught:
        tensor.set(Attribute.MATMUL_COMP_TYPE, DataType.FLOAT)
    assert "setting MATMUL_COMP_TYPE of the descriptor TENSOR failed: CUDNN_STATUS_BAD_PARAM" in str(caught.value)
    assert caught.value.status // 1000 == 2
    assert not caught.value.not_supported
    with pytest.raises(CudnnError, match=r"finalizing the descriptor TENSOR failed: .* says: .*dim") as caught:
        descriptors.tensor(1, [2, -3], [3, 1])
    assert caught.value.status_name == "CUDNN_STATUS_BAD_PARAM"


def test_reading_before_finalize_is_an_error() -> None:
    with pytest.raises(CudnnError, match="reading TENSOR_UNIQUE_ID of the descriptor TENSOR failed"):
        Descriptor(DescriptorType.TENSOR).get(Attribute.TENSOR_UNIQUE_ID)


def test_setting_after_finalize_is_an_error() -> None:
    with pytest.raises(CudnnError, match="setting TENSOR_UNIQUE_ID"):
        descriptors.tensor(1, [4], [1]).set(Attribute.TENSOR_UNIQUE_ID, 2)


def test_children_live_as_long_as_their_parent() -> None:
    graph = descriptors.matmul()  # nothing else holds its operation, its tensors and its matmul descriptor
    gc.collect()
    (operation,) = graph.descriptor._keep
    assert operation.kind is DescriptorType.OPERATION_MATMUL
    assert len(operation._keep) == 4
    assert graph.engine_count > 0


def test_close_destroys_once() -> None:
    tensor = descriptors.tensor(1, [4], [1])
    tensor.close()
    tensor.close()
    with pytest.raises(CudnnError, match=r"NULL_POINTER|BAD_PARAM"):
        tensor.get(Attribute.TENSOR_UNIQUE_ID)


def test_memory_comes_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    def work() -> None:
        for _ in range(3000):
            descriptors.tensor(1, [64, 64, 64, 64], [262144, 4096, 64, 1])

    work()
    before = resident()
    for _ in range(4):
        work()
    pages_per_descriptor = (resident() - before) / 12000
    assert pages_per_descriptor * 4096 < 16


def test_the_interpreter_ends_quietly_with_live_descriptors(libcudnn: library.Library) -> None:
    program = (
        "from support.driver import load_stub_driver; load_stub_driver()\n"
        "from support import descriptors\n"
        "graph = descriptors.matmul(); graph.itself = graph\n"
        "import builtins; builtins.kept = graph\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
