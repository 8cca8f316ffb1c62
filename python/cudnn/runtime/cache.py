"""Compiled kernels on disk: written once, loaded by every later process.

A file holds one line of JSON, with the kernel's entry and the SHA-256 of the rest, then the object file.
Its content is machine code that will run, so nothing is read that another user could have written. Besides the user's
own folder there may be one of the system, which root fills and every user reads.
"""

from __future__ import annotations

import contextlib
import functools
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
_ROOT = 0
_LOG_AFTER = 5.0  # seconds after which a process that waits for another one logs it
_WAIT = 60.0  # seconds after which it waits no longer
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


@dataclass(frozen=True)
class Listed:
    """A file of the cache. ``entry`` is None, and ``fault`` says why, where the file would be refused."""

    path: Path
    size: int
    entry: Entry | None
    fault: str = ""


@dataclass(frozen=True)
class Store:
    """A folder of compiled kernels that belongs to ``owner``, a user's number; every user may read a ``shared`` one."""

    folder: Path
    owner: int
    shared: bool = False

    def path(self, entry: Entry) -> Path:
        """Where a kernel's file is, or would be."""
        return self.folder / entry.file_name

    def make(self) -> None:
        """Makes the folder, where it is not there.

        Raises:
            OSError: it cannot be made.
            UntrustedFileError: it belongs to or can be written by someone else.
        """
        self.folder.mkdir(mode=0o755 if self.shared else 0o700, parents=True, exist_ok=True)
        self.check()

    def check(self) -> None:
        """Raises where the folder is missing, or belongs to or can be written by someone else."""
        _check_owner(self.folder, self.folder.stat(), self.owner)

    def read(self, entry: Entry) -> bytes:
        """The object file of a kernel.

        Raises:
            FileNotFoundError: there is no such file.
            UntrustedFileError: it is no regular file, belongs to or can be written by someone else, or is damaged.
        """
        path = self.path(entry)
        stored_entry, content = _read(path, self.owner)
        if stored_entry != entry:
            raise UntrustedFileError(f"{path}: holds another kernel, {stored_entry}")
        return content

    def write(self, entry: Entry, content: bytes) -> None:
        """Keeps the object file of a kernel. Raises OSError."""
        path = self.path(entry)
        head = json.dumps({**asdict(entry), "sha256": hashlib.sha256(content).hexdigest()})
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=path.stem, suffix=".tmp")  # mode 0600
        try:
            with open(descriptor, "wb") as file:
                file.write(head.encode() + b"\n" + content)
                if self.shared:
                    os.fchmod(file.fileno(), 0o644)
            os.replace(temporary, path)  # a reader sees the old file or the new one, never a half
        except BaseException:
            os.unlink(temporary)
            raise

    def files(self) -> Iterator[Listed]:
        """What the folder holds under a kernel's name, oldest first."""
        files: list[tuple[Path, os.stat_result]] = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process may have removed it meanwhile
                files.append((path, path.lstat()))
        for path, status in sorted(files, key=lambda pair: pair[1].st_mtime):
            with contextlib.suppress(FileNotFoundError):
                yield self._listed(path, status.st_size)

    def _listed(self, path: Path, size: int) -> Listed:
        try:
            return Listed(path, size, _read(path, self.owner)[0])
        except UntrustedFileError as error:
            return Listed(path, size, None, str(error))


def folder() -> Path | None:
    """Where what is compiled here goes: ``CUDNN_KERNEL_CACHE``, else the user's cache folder, else one of this user in
    the folder for temporary files; None if no folder is writable. Logs a warning once.
    """
    chosen = settings.KERNEL_CACHE.get()
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            _warn_once(f"no kernel cache: {settings.KERNEL_CACHE.name}={chosen}: {error}")
            return None
    default = _usual_folder()
    if default is not None and _makes(default):
        return default
    why = f"{default} cannot be written to" if default is not None else "this user has no home folder"
    temporary = _temporary_folder()
    where = (
        f"in {temporary}"
        if temporary is not None
        else "nowhere, since no folder for temporary files is this user's alone"
    )
    _warn_once(f"{why}: compiled kernels are kept {where}; {settings.KERNEL_CACHE.name} chooses another folder")
    return temporary


def _usual_folder() -> Path | None:
    """The user's cache folder, which may not be there; None for a user without a home folder."""
    import platformdirs

    try:
        folder = Path(platformdirs.user_cache_path("cudnn-fused"), "kernels")
    except (RuntimeError, KeyError, OSError):  # neither HOME nor an entry in the list of users
        return None
    return folder if folder.is_absolute() else None


def _makes(folder: Path) -> bool:
    """Makes a folder, where it is not there; whether it can be written to."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _temporary_folder() -> Path | None:
    """A folder for temporary files of this user alone; None if it cannot be created, or is another user's."""
    try:
        top = Path(tempfile.gettempdir(), f"cudnn-fused-{os.getuid()}")
        top.mkdir(mode=0o700, exist_ok=True)
        status = top.lstat()  # a link could lead to another user's choice of folder
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        return None
    return top / "kernels"


def user() -> Store | None:
    """The cache of this user, which everything compiled goes to; None where no folder can be written to."""
    path = folder()
    return None if path is None else Store(path, os.getuid())


def unwritable() -> Store | None:
    """The user's cache folder where it can only be read, as in an image: :func:`user` is elsewhere then."""
    default = None if settings.KERNEL_CACHE.get() else _usual_folder()
    readable = default is not None and default.is_dir() and not _makes(default)
    return Store(default, os.getuid()) if default is not None and readable else None


def system(path: str = "") -> Store | None:
    """The cache that root filled, in a folder, else in ``CUDNN_SYSTEM_KERNEL_CACHE``; None without either."""
    chosen = path or settings.SYSTEM_KERNEL_CACHE.get()
    return Store(Path(chosen).expanduser(), _ROOT, shared=True) if chosen else None


class BusyError(Exception):
    """Another process, or another thread, is compiling the kernel."""


def lookup(entry: Entry) -> bytes | None:
    """The object file of a kernel, from the system's cache or the user's; None if neither has it."""
    for kept in (system(), unwritable()):
        content = _from_kept(kept, entry)
        if content is not None:
            return content
    store = user()
    with contextlib.suppress(OSError, UntrustedFileError):  # fetch() logs what is wrong
        return store.read(entry) if store is not None and store.check() is None else None
    return None


def fetch(entry: Entry, build: Callable[[], bytes], wait: bool = True) -> bytes:
    """The object file of a kernel, from the system's cache or the user's, or else from ``build``, and then kept.

    Two processes that need the same kernel build it once: the second one waits, though not for ever. Where the cache
    cannot be used, the log says why and the kernel is built for this process alone.

    Raises:
        BusyError: without ``wait``, another process is building it.
    """
    content = lookup(entry)
    if content is not None:
        return content
    store = user()
    if store is None:
        return build()
    try:
        store.make()
    except (OSError, UntrustedFileError) as error:
        _logger.warning("kernel cache not used: %s", error)
        return build()
    with _lock(store.path(entry), wait):
        content = find(store, entry)  # another process may have built it meanwhile
        if content is None:
            content = build()
            try:
                store.write(entry, content)
            except OSError as error:
                _logger.warning("compiled kernel not saved: %s", error)
        return content


def find(store: Store, entry: Entry) -> bytes | None:
    """The object file of a kernel, None if missing; logs a warning if the file is refused."""
    try:
        return store.read(entry)
    except FileNotFoundError:
        return None
    except UntrustedFileError as error:
        _logger.warning("compiled kernel refused; it will be built again: %s", error)
        return None


def _from_kept(store: Store | None, entry: Entry) -> bytes | None:
    """A kernel of a cache that is only read, None where it has none."""
    if store is None:
        return None
    whose = "system " * store.shared
    try:
        store.check()
        return store.read(entry)
    except FileNotFoundError:
        if not store.folder.is_dir():
            _warn_once(f"{whose}kernel cache not used: {store.folder}: no such folder")
    except (OSError, UntrustedFileError) as error:
        _warn_once(f"{whose}kernel cache not used: {error}")
    return None


@functools.cache
def _warn_once(text: str) -> None:
    _logger.warning("%s", text)


@contextlib.contextmanager
def _lock(path: Path, wait: bool) -> Iterator[None]:
    """Holds the lock of a kernel's file; without it, and not for ever, where another process keeps it.

    Raises:
        BusyError: without ``wait``, another process keeps it.
    """
    import filelock

    lock_path = path.with_suffix(".lock")
    lock = filelock.FileLock(lock_path, mode=0o600)
    try:
        try:
            lock.acquire(timeout=_LOG_AFTER if wait else 0)
        except filelock.Timeout:
            if not wait:
                raise BusyError(f"{lock_path}: held by another process") from None
            _logger.warning(
                "%s: another process has held it for %.0f s and should be compiling this kernel; waiting up to %.0f s",
                lock_path,
                _LOG_AFTER,
                _WAIT,
            )
            lock.acquire(timeout=_WAIT - _LOG_AFTER)
    except filelock.Timeout:
        _logger.warning(
            "%s: still held after %.0f s; the kernel is compiled here as well. `fuser %s` names the other process, "
            "which may be stopped",
            lock_path,
            _WAIT,
            lock_path,
        )
    except (OSError, NotImplementedError) as error:  # the latter from file systems without locks
        _logger.warning("%s: cannot be locked, other processes may compile the same kernel: %s", lock_path, error)
    try:
        yield
    finally:
        lock.release()


def _read(path: Path, owner: int) -> tuple[Entry, bytes]:
    """The kernel that a file describes, and its object file. Errors as those of :meth:`Store.read`."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for someone to write to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise UntrustedFileError(f"{path}: not a regular file")
        with open(descriptor, "rb") as file:
            _check_owner(path, status, owner)
            head, _, content = file.read().partition(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UntrustedFileError(f"{path}: {error.strerror}") from None
    try:
        described = json.loads(head)
        digest = described.pop("sha256")
        entry = Entry(**described)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UntrustedFileError(f"{path}: no compiled kernel") from None
    if digest != hashlib.sha256(content).hexdigest():
        raise UntrustedFileError(f"{path}: truncated or changed")
    return entry, content


def _check_owner(path: Path, status: os.stat_result, owner: int) -> None:
    if status.st_uid != owner:
        raise UntrustedFileError(f"{path}: belongs to user {status.st_uid}; allowed: user {owner}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFileError(f"{path}: others may write to it (mode {stat.S_IMODE(status.st_mode):o}); chmod go-w")


def clear() -> int:
    """Removes every compiled kernel of the user's, and what ``cudnn.autotune`` chose; the number of kernels removed.

    Folders stay, whatever their names.
    """
    removed, cache_folder = 0, folder()
    if cache_folder is None:
        return removed
    for pattern in (f"*{_SUFFIX}", "*.tmp", "*.lock", "plans/*"):
        for path in list(cache_folder.glob(pattern)):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
                removed += pattern == f"*{_SUFFIX}"
    return removed
