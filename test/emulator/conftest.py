"""The DSL is what these tests are about: without it there is nothing to run."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")
