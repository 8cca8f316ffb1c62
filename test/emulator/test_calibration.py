"""The emulator against what an H200 did with the same kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import calibration
import cudnn
from calibration import Case, Difference, Golden, Tolerance
from calibration.__main__ import write
from calibration.cases import tensors
from calibration.maps import Map
from emulator.golden.kernels import FILE, KERNELS, Kernel
from ptx_emulator import Misaligned, UnsupportedPTX

ARCH = "sm_90a"
CASES = calibration.cases(ARCH)


@pytest.fixture(scope="module")
def golden() -> Golden:
    return calibration.load(calibration.path(ARCH))


@pytest.fixture(scope="module")
def kernels() -> Iterator[Golden]:
    with cudnn.emulation(ARCH):
        yield calibration.load(FILE)


def expected_outputs(golden: Golden, case: Case | Kernel) -> list[calibration.Kept]:
    assert case.id in golden.outputs, "no result of a GPU for this case"
    fingerprint, outputs = golden.outputs[case.id]
    assert fingerprint == case.fingerprint(ARCH), "the GPU ran another version of this case"
    return outputs


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_the_emulator_does_what_the_chip_did(case: Case, golden: Golden) -> None:
    chip = expected_outputs(golden, case)
    if case.refused:
        with pytest.raises((UnsupportedPTX, NotImplementedError)):
            calibration.run_emulated(case, ARCH)
        return
    found = calibration.compare(case, chip, calibration.run_emulated(case, ARCH))
    assert not found.wrong, str(found)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_kernels_do_what_they_did_on_the_chip(kernel: Kernel, kernels: Golden) -> None:
    found = calibration.compare(kernel, expected_outputs(kernels, kernel), kernel.output("cpu"))
    assert not found.wrong, str(found)


def test_the_files_name_their_gpu_and_hold_nothing_else(golden: Golden) -> None:
    for about in (golden.about, calibration.load(FILE).about):
        assert set(about) == {"name", "driver", "arch", "date"}
        assert about["arch"] == ARCH
    assert set(golden.outputs) == {case.id for case in CASES}
    assert calibration.path(ARCH).stat().st_size < 1 << 20


def test_names_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES)


# -- the comparison itself
def found(chip: np.ndarray, emulated: np.ndarray, tolerance: Tolerance) -> Difference:
    return calibration.difference(chip, emulated, tolerance)


def test_one_bit_is_a_difference() -> None:
    a = np.arange(8, dtype=np.uint32)
    b = a.copy()
    b[5] ^= 1 << 20
    assert not found(a, a.copy(), Tolerance()).wrong
    assert found(a, b, Tolerance()).wrong == 1
    assert str(found(a, b, Tolerance())).endswith("first: [5] 0x5 on the chip, 0x100005 here")


def test_units_in_the_last_place_across_zero_and_nan() -> None:
    a = np.array([1.0, 2.0, 0.0, np.nan, np.inf, -1e-45], np.float32).view(np.uint32)
    b = np.array([np.nextafter(np.float32(1), np.float32(2)), 2.0, -0.0, np.nan, np.inf, 1e-45], np.float32).view(
        np.uint32
    )
    b[3] ^= 1
    one = found(a, b, Tolerance("f32", 1))
    assert (one.unequal, one.wrong, one.ulps, one.nan) == (3, 1, 2, 1)
    assert not found(a, b, Tolerance("f32", 2)).wrong
    assert found(a, b, Tolerance("f32")).wrong == 3
    assert not found(a, b, Tolerance("f32", 1, 1e-40)).wrong
    for other in (np.nan, np.inf, 3.4e38):
        changed = a.copy()
        changed[0] = np.float32(other).view(np.uint32)
        assert found(a, changed, Tolerance("f32", 100, 1.0)).wrong == 1


def test_packed_halves_are_compared_one_by_one() -> None:
    a = np.array([0x3C003C00], np.uint32)
    b = np.array([0x3C013C02], np.uint32)
    assert found(a, b, Tolerance("f16", 1)).wrong == 1
    assert found(a, b, Tolerance("bf16", 2)).wrong == 0


def store(file: Path, case: Case, *outputs: np.ndarray) -> None:
    expected_outputs = calibration.collect(ARCH, [case], {case.id: list(outputs)})
    calibration.save(file, Golden({"name": "x"}, expected_outputs))


def test_outputs_of_several_dimensions(tmp_path: Path) -> None:
    outputs = np.arange(60, dtype=np.uint32).reshape(5, 12), np.arange(3, dtype=np.uint16)
    store(tmp_path / "g.xz", CASES[0], *outputs)
    _, chip = calibration.load(tmp_path / "g.xz").outputs[CASES[0].id]
    assert not calibration.compare(CASES[0], chip, outputs).wrong
    assert [k.values.tolist() for k in chip] == [x.reshape(-1).tolist() for x in outputs]


def test_results_are_added_to_those_a_file_has(tmp_path: Path) -> None:
    file, value = tmp_path / "g.xz", np.arange(3, dtype=np.uint32)
    for number, add in ((1, 0), (0, 0), (1, 5)):
        case = CASES[number]
        write(file, Golden({"name": str(add)}, calibration.collect(ARCH, [case], {case.id: [value + add]})), ARCH)
    read = calibration.load(file)
    assert read.about == {"name": "5"}
    assert list(read.outputs) == [CASES[0].id, CASES[1].id]
    assert [expected_outputs[0].values[0] for _, expected_outputs in read.outputs.values()] == [0, 5]


def test_large_outputs_are_kept_as_a_sample_and_a_hash(tmp_path: Path) -> None:
    case = replace(CASES[0], outputs=(np.zeros(65536, np.uint32),))
    output = np.arange(65536, dtype=np.uint32)
    store(tmp_path / "g.xz", case, output)
    read = calibration.load(tmp_path / "g.xz")
    assert read.about == {"name": "x"}
    fingerprint, chip = read.outputs[case.id]
    assert fingerprint == case.fingerprint(ARCH)
    assert chip[0].step > 1
    assert len(chip[0].values) < 2048
    assert not calibration.compare(case, chip, [output]).wrong
    changed = output.copy()
    changed[1] = 0  # not one of the elements kept
    assert calibration.compare(case, chip, [changed]).wrong


def test_a_fingerprint_changes_with_what_the_gpu_would_see() -> None:
    case = CASES[0]
    inputs = (case.inputs[0] ^ 1, *case.inputs[1:])
    changes = [
        {"body": case.body + "exit;"},
        {"block": 32},
        {"inputs": inputs},
        {"maps": (Map(0, "u8", (16,), (), (16,)),)},
    ]
    marks = {replace(case, **change).fingerprint(ARCH) for change in changes}  # type: ignore[arg-type]
    assert len(marks | {case.fingerprint(ARCH)}) == 5


# -- what the chip refuses, and what the emulator does not know of tensor maps
@pytest.mark.parametrize("coordinates", [(4, 0), (-4, 1), (1, 0)])
def test_an_innermost_coordinate_that_is_not_a_multiple_of_16_bytes(coordinates: tuple[int, int]) -> None:
    source = np.zeros(1024, np.uint32)
    m = Map(1, "u16", (32, 20), (64,), (16, 8))
    with pytest.raises(Misaligned, match=f"innermost coordinate {coordinates[0]}: its bytes are not a multiple of 16"):
        calibration.run_emulated(tensors.loads("x", m, [coordinates], source), ARCH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nan_fill": True}, "unknown bits 0x8000"),
        ({"steps": (1, 2)}, "tensor map with element strides"),
    ],
)
def test_tensor_maps_that_are_refused(change: dict[str, object], message: str) -> None:
    m = replace(Map(1, "f16", (64, 64), (128,), (16, 16)), **change)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedPTX, match=re.escape(message)):
        calibration.run_emulated(tensors.loads("x", m, [(0, 0)], np.zeros(2048, np.uint32)), ARCH)


# -- the command
def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "calibration", *arguments]
    return subprocess.run(
        line, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    done = command("--only", "copies/bulk.load", "barrier/*")
    assert done.returncode == 0, done.stderr
    assert "copies" in done.stdout
    found = json.loads(command("--only", "copies/bulk.load", "--json").stdout)
    assert found["families"]["copies"]["equal"] == 1
    missing = command("--only", "copies/*", "--missing")
    assert (missing.returncode, "copies" in missing.stdout) == (0, False)
    empty = tmp_path / "empty.xz"
    calibration.save(empty, Golden({}, {}))
    failed = command("--only", "copies/bulk.load", "--golden", str(empty))
    assert failed.returncode == 1
    assert "copies/bulk.load: no result of a GPU" in failed.stdout
