"""Every environment variable of the library: name, type, default, meaning. Read here and nowhere else, when used."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


# What ``os.environ`` keeps, without its conversion of names and texts, which takes 1 us.
_data: Any = getattr(os.environ, "_data", os.environ)
_key: Callable[[str], object] = getattr(os.environ, "encodekey", str) if _data is not os.environ else str


def _text(name: str) -> str | None:
    text = _data.get(_key(name))
    return os.fsdecode(text) if isinstance(text, bytes) else text


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable. ``get()`` reads it now: a change takes effect at the next call."""

    name: str
    type_name: str
    parse: Callable[[str], T]
    default: T
    meaning: str

    def get(self) -> T:
        """The variable's value, the default where it is not set.

        Raises:
            ValueError: the text is not of the variable's type; names the variable.
        """
        text = _text(self.name)
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(
                f"environment variable {self.name}: got {text!r}; allowed: {self.type_name}. "
                f"To fix it, unset it (default: {self.default!r}) or correct it."
            ) from None


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _architecture(text: str) -> str:
    if text not in ("", "sm_90a", "sm_100a"):
        raise ValueError(text)
    return text


def _semantics(text: str) -> str:
    if text not in ("1.23", "1.32"):
        raise ValueError(text)
    return text


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


LIBRARY_FOLDERS = Setting(
    "LD_LIBRARY_PATH",
    "folders, separated by `:`",
    lambda text: tuple(folder for folder in text.split(os.pathsep) if folder),
    (),
    "Where libcudnn is searched first, unless the process has loaded one already, such as PyTorch's. Then come Python "
    "packages that contain it, then the system.",
)
LOG_INFO = Setting(
    "CUDNN_FRONTEND_LOG_INFO",
    "1 or 0",
    _flag,
    False,
    "Logs what is built and run, and every validated graph as one line of JSON.",
)
LOG_FILE = Setting(
    "CUDNN_FRONTEND_LOG_FILE",
    "`stdout`, `stderr` or the path of a file to append to",
    str,
    "stderr",
    "Where the log goes when `CUDNN_FRONTEND_LOG_INFO` is on.",
)

KERNEL_CACHE = Setting(
    "CUDNN_KERNEL_CACHE",
    "the path of a folder",
    str,
    "",
    "Where compiled kernels of the fused APIs are kept, and in `plans` what `cudnn.autotune` chose; unset: the user's "
    "cache folder or, where that cannot be written to, `cudnn-fused-<uid>` among the temporary files. "
    "`cudnn cache list` shows it.",
)
SYSTEM_KERNEL_CACHE = Setting(
    "CUDNN_SYSTEM_KERNEL_CACHE",
    "the path of a folder",
    str,
    "",
    "A folder of compiled kernels that is read before the user's and never written: root filled it with "
    "`cudnn cache warm --system`, for an image say. Files that others than root could write are refused.",
)
COMPILE_JOBS: Setting[int | None] = Setting(
    "CUDNN_COMPILE_JOBS",
    "a number, 0 or more",
    _count,
    None,
    "How many processes compile an operation's kernels at the same time; 0: this process compiles them one after "
    "another, at calls that need them and never at a layer's construction. Unset: one for each CPU that this process "
    "may use, shared with the other ranks of its host, up to 8.",
)
LOCAL_RANK = Setting("LOCAL_RANK", "a number, 0 or more", _count, 0, "The rank within its host; `torchrun` sets it.")
LOCAL_WORLD_SIZE = Setting(
    "LOCAL_WORLD_SIZE",
    "a number, 0 or more",
    _count,
    1,
    "The ranks of this host, which share its CPUs when kernels are compiled; `torchrun` sets it.",
)
EMULATE = Setting(
    "CUDNN_EMULATE",
    "`sm_90a` or `sm_100a`",
    _architecture,
    "",
    "Fused APIs on CPU tensors run the real kernel for that architecture in the emulator, as in `cudnn.emulation`; "
    "unset: the reference in PyTorch.",
)

PLAN_CUDA_GRAPHS = Setting(
    "CUDNN_PLAN_CUDA_GRAPHS",
    "1 or 0",
    _flag,
    True,
    "Whether calls of a graph whose tensors lie where they lay before launch a CUDA graph that the plan keeps, instead "
    "of calling cuDNN. Read at a graph's first call with tensors of a kind.",
)
CLUSTER_OVERLAP_MARGIN = Setting(
    "CUDNNFE_CLUSTER_OVERLAP_MARGIN",
    "a number, 0 or more",
    _count,
    0,
    "How many clusters of thread blocks, of those that fit on the GPU, a fused GEMM leaves to other kernels. Read when "
    "its object is constructed.",
)
GEMM_DYNAMIC_M = Setting(
    "CUDNN_FE_GEMM_DYNAMIC_M",
    "any text, even an empty one",
    lambda text: True,
    False,
    "If set, wrappers of the dense fused GEMMs use one object for all m.",
)
GEMM_DYNAMIC_MNKL = Setting(
    "CUDNN_FE_GEMM_DYNAMIC_MNKL",
    "any text, even an empty one",
    lambda text: True,
    False,
    "If set, wrappers of the dense fused GEMMs use one object for all m, n, k and l.",
)

GROUPED_GEMM_DYNAMIC_MNKL = Setting(
    "CUDNN_FE_GROUPED_GEMM_DYNAMIC_MNKL",
    "`1`, or `0` for no",
    lambda text: text != "0",
    True,
    "Whether wrappers of the grouped fused GEMMs use one object for all m, n and k; else, for all m.",
)
SEMANTICS = Setting(
    "CUDNN_FRONTEND_SEMANTICS",
    "`1.32` or `1.23`",
    _semantics,
    "1.32",
    "Which version of the cuDNN frontend the grouped fused GEMMs follow where both give a call another meaning. Read "
    "when an object is constructed without `semantics=`.",
)

VALIDATE_DEVICE_VALUES = Setting(
    "CUDNN_FE_GROUPED_GEMM_VALIDATE_DEVICE_VALUES",
    "1 or 0",
    _flag,
    False,
    "Whether every call of a grouped fused GEMM waits for the GPU and checks where experts end, and addresses. Read "
    "when an object is compiled.",
)

SETTINGS = (
    LIBRARY_FOLDERS,
    LOG_INFO,
    LOG_FILE,
    KERNEL_CACHE,
    COMPILE_JOBS,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    SYSTEM_KERNEL_CACHE,
    EMULATE,
    PLAN_CUDA_GRAPHS,
    CLUSTER_OVERLAP_MARGIN,
    GEMM_DYNAMIC_M,
    GEMM_DYNAMIC_MNKL,
    GROUPED_GEMM_DYNAMIC_MNKL,
    SEMANTICS,
    VALIDATE_DEVICE_VALUES,
)


def texts() -> tuple[str | None, ...]:
    """The texts of all variables now, to be compared with those of another moment."""
    return tuple(map(_data.get, _SETTING_KEYS))


_SETTING_KEYS = [_key(setting.name) for setting in SETTINGS]


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # no subscript before Python 3.11


class _StandardStream(_StreamHandler):
    """Writes to what ``sys.stdout`` or ``sys.stderr`` is at that moment, so that redirections are followed."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._stream_name = name

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(sys, self._stream_name)


_configured: tuple[str, logging.Handler] | None = None


def configure_logging() -> logging.Logger:
    """The ``cudnn`` logger, writing where ``CUDNN_FRONTEND_LOG_INFO`` and ``CUDNN_FRONTEND_LOG_FILE`` say now.

    Cheap enough to call before every message that is not on a hot path. Without the variables the logger is an
    ordinary one of ``logging``: the application decides about handlers and level.
    """
    global _configured
    logger = logging.getLogger("cudnn")
    target = LOG_FILE.get() if LOG_INFO.get() else ""
    if target == (_configured[0] if _configured else ""):
        return logger
    if _configured is not None:
        logger.removeHandler(_configured[1])
        _configured[1].close()
        _configured = None
        logger.setLevel(logging.NOTSET)
    if target:
        standard = target in ("stdout", "stderr")
        handler = _StandardStream(target) if standard else logging.FileHandler(target, encoding="utf-8")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        _configured = (target, handler)
    return logger


def markdown_table() -> str:
    """The table of all variables in Markdown, for the documentation."""
    rows: list[str] = []
    for setting in SETTINGS:
        default = int(setting.default) if isinstance(setting.default, bool) else setting.default
        shown = "not set" if default in ((), "", None) else f"`{default}`"
        rows.append(f"| `{setting.name}` | {setting.type_name} | {shown} | {setting.meaning} |")
    return "\n".join(["| variable | value | default | meaning |", "|---|---|---|---|", *rows])


def environment_of_child(**changes: str) -> dict[str, str]:
    """The variables of a process started from here: this one's, with changes."""
    return {**os.environ, **changes}


def pass_on(values: Mapping[str, str]) -> None:
    """Sets variables of other libraries, which processes started from here inherit."""
    os.environ.update(values)
