"""cuDNN's own texts about failures, which run to thousands of characters, cut down to what went wrong."""

from __future__ import annotations

import re

_ENGINE = re.compile(r'\{"engineId":(-?\d+).*?\}\}')
_CAUSE = re.compile(r"(?:Warning|Error): (CUDNN_STATUS_\w+); Reason: (.*?)(?= (?:Warning|Error|Info): |$)")
_OTHER_DEVICE = "CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH"


def root_causes(text: str) -> str:
    """What each engine failed on, once, without the functions that passed it on.

    cuDNN writes, engine by engine, the failed condition first and then every caller of the function where it stands.
    Engines for other devices are left out where there are any for this one. A text of another form is returned as it
    is.

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
        if cause is not None and not start[1].startswith("-"):  # no engine, but the heuristics' want of one
            engines.setdefault((cause[1], _condition(cause[2])), {})[start[1]] = None
    # cuDNN's text may end in the middle of a cause that stands before it too.
    engines = {
        (status, what): numbers
        for (status, what), numbers in engines.items()
        if not any(status == other and whole != what and whole.startswith(what) for other, whole in engines)
    }
    here = {about: numbers for about, numbers in engines.items() if about[0] != _OTHER_DEVICE}
    said = [
        f"engine{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {status}: {what}"
        for (status, what), numbers in (here or engines).items()
    ]
    return "; ".join(said) or text


def _condition(reason: str) -> str:
    """What failed, without the place in cuDNN's source."""
    return reason.partition(" at: ")[0].rstrip(" .")
