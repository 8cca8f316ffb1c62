"""The tables against NVIDIA's header, where a cuDNN package brings one, and against the loaded library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cudnn import enums as public
from cudnn.backend import enums, library
from cudnn.backend.descriptor import Descriptor
from cudnn.backend.enums import Attribute, AttributeType, DescriptorType, Versioned
from cudnn.errors import cudnnGraphNotSupportedError

OLDEST = 90000
PREFIXES: dict[str, type[Versioned]] = {
    "CUDNN_TYPE_": AttributeType,
    "CUDNN_DATA_": enums.DataType,
    "CUDNN_POINTWISE_": enums.PointwiseMode,
    "CUDNN_REDUCE_TENSOR_": enums.ReduceTensorOp,
    "CUDNN_RESAMPLE_": enums.ResampleMode,
    "CUDNN_TENSOR_REORDERING_": enums.TensorReordering,
    "CUDNN_NORM_FWD_": enums.NormFwdPhase,
    "CUDNN_GENSTATS_": enums.GenStatsMode,
    "CUDNN_RNG_DISTRIBUTION_": enums.RngDistribution,
    "CUDNN_RESHAPE_": enums.ReshapeMode,
    "CUDNN_MOE_GROUPED_MATMUL_MODE_": enums.MoeGroupedMatmulMode,
    "CUDNN_NUMERICAL_NOTE_": enums.NumericalNote,
    "CUDNN_BEHAVIOR_NOTE_": enums.BehaviorNote,
    "CUDNN_KNOB_TYPE_": enums.KnobType,
    "CUDNN_HEUR_MODE_": enums.HeurMode,
    "CUDNN_STATUS_": enums.Status,
}


@pytest.fixture(scope="module")
def header(libcudnn: library.Library) -> dict[str, tuple[int, int]]:
    """From the name of every enumerator to its number and the version that brought it."""
    include = Path(libcudnn.path).resolve().parents[1] / "include"
    texts = [path.read_text(errors="replace") for path in sorted(include.glob("cudnn_graph_v9.h"))]
    if not texts or libcudnn.version < 92800:
        pytest.skip("no header of cuDNN 9.28 next to the library")
    pattern = re.compile(r"\b(CUDNN_\w+)(?: +CUDNN_DEPRECATED_ENUM)? *=\s*(-?\d+),?\s*(/\*\*.*?\*/)?", re.DOTALL)
    found: dict[str, tuple[int, int]] = {}
    for name, number, comment in pattern.findall("".join(texts)):
        since = re.search(r"@since cuDNN (\d+)\.(\d+)", comment)
        version = int(since[1]) * 10000 + int(since[2]) * 100 if since else OLDEST
        found[name] = int(number), max(version, OLDEST)
    return found


def test_every_attribute_is_the_headers(header: dict[str, tuple[int, int]]) -> None:
    ours = {f"CUDNN_ATTR_{attribute.name}": (int(attribute), attribute.since) for attribute in Attribute}
    assert len(ours) > 250
    assert {name: header.get(name) for name in ours} == ours


def test_every_descriptor_is_the_headers(header: dict[str, tuple[int, int]]) -> None:
    theirs = {
        name: number for name, (number, _) in header.items() if re.fullmatch(r"CUDNN_BACKEND_\w+_DESCRIPTOR", name)
    }
    ours = {f"CUDNN_BACKEND_{kind.name}_DESCRIPTOR": int(kind) for kind in DescriptorType}
    assert ours == theirs


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_value_is_the_headers(header: dict[str, tuple[int, int]], prefix: str) -> None:
    ours = {prefix + member.name: int(member) for member in PREFIXES[prefix]}
    assert {name: header.get(name, (None,))[0] for name in ours} == ours


def test_public_names_have_a_backend_number() -> None:
    pairs = [
        (public.data_type, enums.DataType),
        (public.reduction_mode, enums.ReduceTensorOp),
        (public.resample_mode, enums.ResampleMode),
        (public.padding_mode, enums.PaddingMode),
        (public.numerical_note, enums.NumericalNote),
        (public.behavior_note, enums.BehaviorNote),
        (public.knob_type, enums.KnobType),
        (public.tensor_reordering, enums.TensorReordering),
        (public.norm_forward_phase, enums.NormFwdPhase),
        (public.reshape_mode, enums.ReshapeMode),
        (public.convolution_mode, enums.ConvolutionMode),
        (public.moe_grouped_matmul_mode, enums.MoeGroupedMatmulMode),
    ]
    for ours, backend in pairs:
        assert set(ours.__members__) - {"NOT_SET"} <= set(backend.__members__), ours


@pytest.mark.deviceless_919
@pytest.mark.parametrize(
    "kind", [kind for kind in DescriptorType if not re.search("SIGNAL|INFO|BAND_MATRIX", kind.name)]
)
def test_descriptors_are_gated_by_version(libcudnn: library.Library, kind: DescriptorType) -> None:
    if kind.since > libcudnn.version:
        with pytest.raises(cudnnGraphNotSupportedError, match=f"{kind.name} needs cuDNN"):
            Descriptor(kind)
    else:
        descriptor = Descriptor(kind)
        assert descriptor.pointer
        descriptor.close()


def test_a_newer_attribute_is_refused_by_name_and_versions(
    libcudnn: library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = Descriptor(DescriptorType.TENSOR)
    monkeypatch.setattr(libcudnn, "version", 91000)
    with pytest.raises(cudnnGraphNotSupportedError) as caught:
        tensor.set(Attribute.TENSOR_RAGGED_OFFSET_MULTIPLIER, 2)
    for part in ("TENSOR_RAGGED_OFFSET_MULTIPLIER", "9.24.0", "9.10.0"):
        assert part in str(caught.value)
    with pytest.raises(cudnnGraphNotSupportedError, match=r"TENSOR_RAGGED_OFFSET_MULTIPLIER.*9\.24\.0"):
        tensor.get(Attribute.TENSOR_RAGGED_OFFSET_MULTIPLIER)
