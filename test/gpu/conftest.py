"""Every test of this folder needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnn.attention import graphs
from cudnn.pygraph import operator_graphs


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("gpu")


@pytest.fixture
def outputs_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the memory that attention's operators write to, before they do."""

    def run(cache: Any, describe: Any, inputs: Any, outputs: dict[str, torch.Tensor], options: Any) -> None:
        for x in outputs.values():
            x.fill_(torch.nan)
        operator_graphs.run(cache, describe, inputs, outputs, options)

    monkeypatch.setattr(graphs, "run", run)
