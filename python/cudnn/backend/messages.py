"""Shortens cuDNN's error messages, which have thousands of characters, to the root causes."""

from __future__ import annotations

import re

_ENGINE = re.compile(r'\{"engineId":(-?\d+).*?\}\}')
_CAUSE = re.compile(r"(?:Warning|Error): (CUDNN_STATUS_\w+); Reason: (.*?)(?= (?:Warning|Error|Info): |$)")
_OTHER_DEVICE = "CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH"


def root_causes(text: str) -> str:
    """The distinct conditions on which engines failed, without the call chain.

    For each engine cuDNN writes the failed condition, then every caller of the function that checks it. Engines for
    other devices are omitted if there are engines for this device. A text in another format is returned unchanged.

    >>> chain = "Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: check()"
    >>> first = "Warning: CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE; Reason: types differ at: a != b"
    >>> root_causes('{"engineId":4,"smVersion":900,"knobChoices":{}} ' + f"{first} {chain}")
    'engine 4: CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE: types differ'
    """
    starts = [*_ENGINE.finditer(text)]
    if not starts:
        cause = _CAUSE.search(text)
        return f"{cause[1]}: {_condition(cause[2])}" if cause is not None else text
    ends = [start.start() for start in starts[1:]] + [len(text)]
    engines: dict[tuple[str, str], dict[str, None]] = {}
    for start, end in zip(starts, ends, strict=True):
        cause = _CAUSE.search(text[start.end() : end].strip())
        if cause is not None and not start[1].startswith("-"):  # a negative id: the heuristics found no engine
            engines.setdefault((cause[1], _condition(cause[2])), {})[start[1]] = None
    # cuDNN truncates its text, possibly within a cause that an earlier engine has in full.
    engines = {
        (status, what): engine_ids
        for (status, what), engine_ids in engines.items()
        if not any(status == other and longer != what and longer.startswith(what) for other, longer in engines)
    }
    this_device = {cause: engine_ids for cause, engine_ids in engines.items() if cause[0] != _OTHER_DEVICE}
    messages = [
        f"engine{'s' * (len(engine_ids) > 1)} {', '.join(engine_ids)}: {status}: {what}"
        for (status, what), engine_ids in (this_device or engines).items()
    ]
    return "; ".join(messages) or text


def _condition(reason: str) -> str:
    """The failed condition, without its location in cuDNN's source."""
    return reason.partition(" at: ")[0].rstrip(" .")
