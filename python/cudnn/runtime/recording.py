"""Finds the kernels that calls need without running them.

Within :func:`recording`, operators and fused APIs on meta tensors behave as on a GPU: they check their arguments,
choose configurations and allocate results, but each launch is recorded instead. No memory is used and no GPU is needed.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, Any, str]
"""A kernel: its source ``module:class``, its configuration, and its architecture."""


@dataclass
class Recorder:
    """The kernels that calls on meta tensors launched, in the order of their first launch.

    ``num_sms``: the number of SMs of the GPU that the calls are meant for.
    """

    arch: str
    num_sms: int
    keys: dict[Key, None] = field(default_factory=dict)

    def launch(self, source: str, configuration: Any, arch: str) -> None:
        """Records a launch."""
        self.keys.setdefault((source, configuration, arch))


MAX_TOKENS = 65536
"""Of one call, unless it has more or the caller says otherwise."""

_current: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("cudnn_recorder", default=None)
current = _current.get
"""The recorder of the innermost :func:`recording`, None outside of it."""


@contextlib.contextmanager
def recording(arch: str, num_sms: int) -> Iterator[Recorder]:
    """Records the kernels for ``arch`` that calls on meta tensors launch in this thread."""
    token = _current.set(recorder := Recorder(arch, num_sms))
    try:
        yield recorder
    finally:
        _current.reset(token)


def token_counts(max_tokens: int, steps: int = 2) -> list[int]:
    """Numbers of tokens up to ``max_tokens`` that together need all configurations: ``steps`` per power of two."""
    exponents = range(steps * max_tokens.bit_length() + 1)
    counts = {min(max_tokens, round(2 ** (exponent / steps))) for exponent in exponents}
    return sorted({count + delta for count in counts for delta in (-1, 0) if count + delta > 0})


Pass = Callable[[int, bool], Callable[[], Any]]
"""A forward pass of a number of tokens, which saves what a backward pass needs if it is to; returns the latter."""


def record(forward: Pass, max_tokens: int, arch: str, num_sms: int, trains: bool = True) -> list[Key]:
    """The kernels of a pass on meta tensors for up to ``max_tokens`` tokens: first those of the forward passes."""
    counts = token_counts(max_tokens)
    with recording(arch, num_sms) as recorder:
        for count in counts:
            forward(count, False)
        for backward in [forward(count, True) for count in counts] if trains else ():
            backward()
    return list(recorder.keys)
