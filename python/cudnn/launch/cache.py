"""Compiled kernels on disk: written once, loaded by every later process.

A file holds one line of JSON, which says what the kernel is and carries the SHA-256 of the rest, then the object file.
Its content is machine code that will run, so nothing is read that another user could have written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cudnn import settings

_SUFFIX = ".kernel"
_logger = logging.getLogger("cudnn.launch")


@dataclass(frozen=True)
class Entry:
    """What identifies a compiled kernel: any difference in it means another file."""

    name: str
    arch: str
    configuration: str
    source: str  # SHA-256 of the kernels' source
    toolchain: str  # versions of the compiler's packages, kind of host

    @property
    def file_name(self) -> str:
        key = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]
        return f"{self.name}-{self.arch}-{key}{_SUFFIX}"


class UntrustedFileError(Exception):
    """A file or folder of the cache that could be another user's work, or that is damaged."""


def folder() -> Path:
    """Where the cache is: ``CUDNN_KERNEL_CACHE``, else the user's cache folder."""
    chosen = settings.KERNEL_CACHE.get()
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_path("cudnn-fused"), "kernels")


def fetch(entry: Entry, build: Callable[[], bytes]) -> bytes:
    """The object file of a kernel, from the cache or else from ``build``, whose result is then kept.

    Two processes that need the same kernel build it once: the second one waits. Where the cache cannot be used, the log
    says why and the kernel is built for this process alone.
    """
    path = folder() / entry.file_name
    try:
        _check_folder(path.parent)
        content = _read_if_good(path, entry)
        if content is not None:
            return content
        import filelock

        with filelock.FileLock(path.with_suffix(".lock"), mode=0o600):
            content = _read_if_good(path, entry)  # another process may have built it meanwhile
            if content is None:
                content = build()
                _write(path, entry, content)
            return content
    except (OSError, UntrustedFileError) as error:
        _logger.warning("kernel cache not used: %s", error)
        return build()


def _read_if_good(path: Path, entry: Entry) -> bytes | None:
    try:
        return read(path, entry)
    except FileNotFoundError:
        return None
    except UntrustedFileError as error:
        _logger.warning("compiled kernel refused, to be built again: %s", error)
        return None


def read(path: Path, entry: Entry | None = None) -> bytes:
    """The object file that a cache file holds, of this very kernel where ``entry`` is given.

    Raises:
        FileNotFoundError: there is no such file.
        UntrustedFileError: it is a link, belongs to or can be written by someone else, or is damaged.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UntrustedFileError(f"{path}: {error.strerror}") from None
    with open(descriptor, "rb") as file:
        _check_owner(path, os.fstat(descriptor))
        head, _, content = file.read().partition(b"\n")
    try:
        described = json.loads(head)
        digest = described.pop("sha256")
        found = Entry(**described)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UntrustedFileError(f"{path}: no compiled kernel") from None
    if digest != hashlib.sha256(content).hexdigest():
        raise UntrustedFileError(f"{path}: truncated or changed")
    if entry is not None and found != entry:
        raise UntrustedFileError(f"{path}: holds another kernel, {found}")
    return content


def _write(path: Path, entry: Entry, content: bytes) -> None:
    head = json.dumps({**asdict(entry), "sha256": hashlib.sha256(content).hexdigest()})
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(head.encode() + b"\n" + content)
        os.replace(temporary, path)  # a reader sees the old file or the new one, never a half
    except BaseException:
        os.unlink(temporary)
        raise


def _check_folder(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(path, path.stat())


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.getuid():
        raise UntrustedFileError(f"{path}: belongs to user {status.st_uid}, not to this one ({os.getuid()})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFileError(f"{path}: others may write to it (mode {stat.S_IMODE(status.st_mode):o}); chmod go-w")


@dataclass(frozen=True)
class Listed:
    """A file of the cache. ``entry`` is None, and ``fault`` says why, where the file would be refused."""

    path: Path
    size: int
    entry: Entry | None
    fault: str = ""


def files() -> Iterator[Listed]:
    """Every file of the cache, oldest first."""
    paths = folder().glob(f"*{_SUFFIX}") if folder().is_dir() else ()
    for path in sorted(paths, key=lambda path: path.lstat().st_mtime):
        size = path.lstat().st_size
        try:
            read(path)
            with path.open("rb") as file:
                described = json.loads(file.readline())
            described.pop("sha256")
            yield Listed(path, size, Entry(**described))
        except UntrustedFileError as error:
            yield Listed(path, size, None, str(error))


def clear() -> int:
    """Removes every compiled kernel, and what ``cudnn.autotune`` chose; the number of kernels removed."""
    removed = 0
    for pattern in (f"*{_SUFFIX}", "*.tmp", "*.lock", "plans/*"):
        for path in list(folder().glob(pattern)):
            path.unlink(missing_ok=True)
            removed += pattern == f"*{_SUFFIX}"
    return removed
