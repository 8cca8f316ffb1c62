"""Random graphs on the GPU, against formulas in float64: a sample of each family; all of them with ``--full``.

``fuzz_run.py`` runs a single one. Where a graph destroys the CUDA context, those after it fail too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from support.fuzz import FAMILIES
from support.fuzz.harness import run

_CHUNK = 50
_SAMPLE = 2  # chunks of each family


def chunks() -> Iterator[object]:
    """Families and first seeds."""
    for name, family in FAMILIES.items():
        for start in range(0, family.full, _CHUNK):
            marks = [] if start < _SAMPLE * _CHUNK else [pytest.mark.full]
            yield pytest.param(name, start, id=f"{name}-{start}", marks=marks)


@pytest.mark.parametrize(("family", "start"), [*chunks()])
def test_random_graphs(family: str, start: int) -> None:
    outcomes = [run(FAMILIES[family].draw(seed), "cuda", "cudnn") for seed in range(start, start + _CHUNK)]
    failed = [f"seed {o.case.seed} ({o.plan or 'no plan'}): {o.message}" for o in outcomes if o.status == "failed"]
    assert not failed, "\n".join(failed)
    refused = Counter(outcome.reason for outcome in outcomes if outcome.status == "refused")
    # So few cases may be refused twice as often as all of them together.
    assert refused.total() <= 2 * FAMILIES[family].most_refused * _CHUNK, refused.most_common()
