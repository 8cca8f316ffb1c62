"""Warp-wide instructions other than those that ``test_calibration.py`` compares with the chip."""

from __future__ import annotations

import numpy as np
import pytest

import ptx_emulator
from emulator.harness import elementwise, run


def test_float_reduction_and_nan() -> None:
    a = np.random.default_rng(5).standard_normal(32).astype(np.float32)
    got = elementwise("redux.sync.max.abs.f32 %d, %a, -1;", "b32", a).view(np.float32)
    assert (got == np.abs(a).max()).all()
    a[3] = np.nan
    got = elementwise("redux.sync.max.f32 %d, %a, -1;", "b32", a).view(np.float32)
    assert (got == np.nanmax(a)).all()
    assert np.isnan(elementwise("redux.sync.max.NaN.f32 %d, %a, -1;", "b32", a).view(np.float32)).all()


def test_registers_are_handed_over_by_whole_warps_in_steps_of_eight() -> None:
    code = """setp.lt.u32 %p1, %r99, LIMIT; @%p1 bra P; setmaxnreg.inc.sync.aligned.u32 COUNT; ret;
      P: setmaxnreg.dec.sync.aligned.u32 40;"""
    run(code.replace("LIMIT", "128").replace("COUNT", "240"), block=256, races=True)
    with pytest.raises(ptx_emulator.CollectiveError, match="setmaxnreg executed by 16 of 32 threads"):
        run(code.replace("LIMIT", "112").replace("COUNT", "240"), block=256)
    for count in ("16", "44", "264"):
        with pytest.raises(ptx_emulator.UnsupportedPTX, match="a multiple of 8 from 24 to 256"):
            run(code.replace("LIMIT", "128").replace("COUNT", count), block=256)
