"""What refusals of descriptions have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import cudnn
from support.graphs import reference_graph


def check_refused(build: Callable[[cudnn.pygraph], Any], error: type[Exception], words: Sequence[str]) -> None:
    """That what ``build`` describes is refused, at the call or when it is validated, in these words."""
    graph = reference_graph()
    with pytest.raises(error) as caught:  # noqa: PT012
        build(graph).set_output(True)
        graph.validate()
    assert [word for word in words if word not in str(caught.value)] == []
