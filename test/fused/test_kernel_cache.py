"""The disk cache of compiled kernels, its failure modes, and the system's cache along with the user's."""

from __future__ import annotations

import fcntl
import os
import pwd
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cudnn.cli import app
from cudnn.runtime import cache, kernels, launch
from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration

ROOT = Path(__file__).parents[2]
SOURCE = "cudnn_kernels.norm.rmsnorm_rht_amax:RmsNormRhtAmax"
CONFIGURATION = RmsNormRhtAmaxConfiguration("bfloat16", 512, threads=32, teams=1, stages=2)
ENTRY = cache.Entry("Kernel", "sm_90a", "columns=512", "source", "toolchain")


@pytest.fixture(autouse=True)
def _each_warning_anew() -> None:
    cache._warn_once.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Stands for the compiler; counts."""

    def __init__(self, content: bytes = b"object") -> None:
        self.content, self.calls = content, 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.content


def python(code: str) -> subprocess.Popen[str]:
    """Another process."""
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT / "kernels")])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


def test_a_kernel_is_built_once(folder: Path) -> None:
    build = Builder()
    assert [cache.fetch(ENTRY, build) for _ in range(3)] == [b"object"] * 3
    assert build.calls == 1
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert oct((folder / ENTRY.file_name).stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("field", ["name", "arch", "configuration", "source", "toolchain"])
def test_whatever_differs_is_another_kernel(field: str) -> None:
    build = Builder()
    cache.fetch(ENTRY, build)
    cache.fetch(replace(ENTRY, **{field: "other"}), build)
    assert build.calls == 2


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _junk(path: Path) -> None:
    path.write_bytes(b"[1, 2]\n")


def _open_to_all(path: Path) -> None:
    path.chmod(0o666)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def _another_kernel(path: Path) -> None:
    other = replace(ENTRY, arch="sm_100a")
    cache.fetch(other, Builder(b"other"))
    (path.parent / other.file_name).rename(path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_truncate, "truncated or changed"),
        (_change, "truncated or changed"),
        (_empty, "no compiled kernel"),
        (_junk, "no compiled kernel"),
        (_open_to_all, "others may write to it"),
        (_link, "symbolic link"),
        (_another_kernel, "holds another kernel"),
    ],
)
def test_a_bad_file_is_refused_and_built_again(
    folder: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], words: str
) -> None:
    cache.fetch(ENTRY, Builder())
    spoil(folder / ENTRY.file_name)
    build = Builder()
    assert cache.fetch(ENTRY, build) == b"object"
    assert build.calls == 1
    assert any("refused" in message and words in message for message in caplog.messages)
    assert cache.fetch(ENTRY, build) == b"object"
    assert build.calls == 1


def test_someone_elses_file_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cache.fetch(ENTRY, Builder())
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    build = Builder()
    for _ in range(2):
        assert cache.fetch(ENTRY, build) == b"object"
    assert build.calls == 2  # the folder is someone else's too, so nothing is kept there
    assert all("kernel cache not used" in message and "belongs to user" in message for message in caplog.messages)


def test_without_a_place_to_write_kernels_are_built_for_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(tmp_path / "file" / "below"))
    assert cache.fetch(ENTRY, Builder()) == b"object"
    assert "kernel cache not used" in caplog.text


PROCESS = """
import sys, time
from cudnn.runtime import cache
def build():
    print("built", flush=True)
    time.sleep(0.5)
    return b"object"
print(cache.fetch(cache.Entry("Kernel", "sm_90a", "columns=512", "source", "toolchain"), build).decode())
"""


def test_processes_that_need_the_same_kernel_build_it_once() -> None:
    processes = [python(PROCESS) for _ in range(3)]
    output = [process.communicate()[0] for process in processes]
    assert "".join(output).count("built") == 1
    assert all(text.endswith("object\n") for text in output)


RELOAD = f"""
import sys, time
import torch, tvm_ffi
from cudnn.runtime import launch
from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration
start = time.process_time()
launch.kernel({SOURCE!r}, {CONFIGURATION!r}, "sm_90a")
print(time.process_time() - start, "cutlass" in sys.modules)
"""


def test_another_process_loads_what_one_compiled(folder: Path) -> None:
    """Without the compiler, in a tenth of the processor's time that it took, at most."""
    kernels._loaded.pop((SOURCE, CONFIGURATION, "sm_90a"), None)
    start = time.process_time()
    function = launch.kernel(SOURCE, CONFIGURATION, "sm_90a")
    most = (time.process_time() - start) / 10
    assert launch.kernel(SOURCE, CONFIGURATION, "sm_90a") is function
    (path,) = folder.glob("*.kernel")
    written = path.stat().st_mtime_ns
    for _ in range(3):  # a slow one may be the machine's fault
        seconds, loaded = python(RELOAD).communicate()[0].split()
        assert loaded == "False"
        if float(seconds) < most:
            break
    assert float(seconds) < most
    assert path.stat().st_mtime_ns == written


def test_command_line(folder: Path) -> None:
    cache.fetch(ENTRY, Builder())
    (folder / "junk.kernel").write_text("")
    listed = CliRunner().invoke(app, ["cache", "list"]).output
    assert "1 compiled kernels, 1 refused" in listed
    assert "columns=512" in listed
    assert "junk.kernel: no compiled kernel" in listed
    assert "2 compiled kernels removed" in CliRunner().invoke(app, ["cache", "clear"]).output
    assert list(folder.iterdir()) == []
    refused = CliRunner().invoke(app, ["cache", "warm", "--arch", "sm_80"])
    assert refused.exit_code == 2
    assert "allowed: sm_90a, sm_100a" in " ".join(refused.output.replace("│", " ").split())


FULL = """
import resource
from cudnn.runtime import cache
def build():
    print("built", flush=True)
    return b"object" * 1000
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # a file of more bytes cannot be written
print(len(cache.fetch(cache.Entry("Kernel", "sm_90a", "columns=512", "source", "toolchain"), build)))
"""


def test_what_a_full_disk_does_not_keep_is_compiled_once(folder: Path) -> None:
    output, errors = python(FULL).communicate()
    assert output.split() == ["built", "6000"], errors
    assert errors.count("compiled kernel not saved") == 1
    assert not list(folder.glob("*.kernel"))
    assert not list(folder.glob("*.tmp"))


def test_an_error_of_the_compiler_is_raised_at_once() -> None:
    calls = []

    def fail() -> bytes:
        calls.append(1)
        raise OSError("ptxas is missing")

    with pytest.raises(OSError, match="ptxas is missing"):
        cache.fetch(ENTRY, fail)
    assert len(calls) == 1


@pytest.fixture
def held(folder: Path) -> Iterator[int]:
    """The lock of the kernel's file, held as by a process that stands still."""
    folder.mkdir(mode=0o700)
    descriptor = os.open((folder / ENTRY.file_name).with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


@pytest.mark.usefixtures("held")
def test_a_process_that_stands_still_does_not_hold_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "_LOG_AFTER", 0.1)
    monkeypatch.setattr(cache, "_WAIT", 0.3)
    build = Builder()
    assert [cache.fetch(ENTRY, build) for _ in range(2)] == [b"object"] * 2
    assert build.calls == 1  # kept, though the lock was not to be had
    waiting, going_on = caplog.messages
    assert "another process has held it" in waiting
    assert "compiled here as well" in going_on
    assert "fuser" in going_on


def test_a_process_that_is_slow_is_waited_for(
    held: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "_LOG_AFTER", 0.1)

    class Log:
        """Releases the lock as soon as a waiting process logs."""

        def warning(self, *arguments: object) -> None:
            cache.user().write(ENTRY, b"its object")
            fcntl.flock(held, fcntl.LOCK_UN)

    monkeypatch.setattr(cache, "_logger", Log())
    build = Builder()
    assert cache.fetch(ENTRY, build) == b"its object"
    assert build.calls == 0


def test_without_locks_kernels_are_kept_all_the_same(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(mode=0o700)
    (folder / ENTRY.file_name).with_suffix(".lock").mkdir()
    build = Builder()
    assert [cache.fetch(ENTRY, build) for _ in range(2)] == [b"object"] * 2
    assert build.calls == 1
    assert ["cannot be locked" in message for message in caplog.messages] == [True]


def _folder(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # its address is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize(("make", "replaced"), [(_folder, False), (_pipe, True), (_socket, True)])
def test_what_is_no_file_neither_breaks_nor_hangs(
    folder: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None], replaced: bool
) -> None:
    folder.mkdir(mode=0o700)
    make(folder / ENTRY.file_name)
    (file,) = cache.user().files()
    assert file.entry is None
    listed = CliRunner().invoke(app, ["cache", "list"])
    assert listed.exit_code == 0, listed.output
    assert "0 compiled kernels, 1 refused" in listed.output
    build = Builder()
    for _ in range(2):
        assert cache.fetch(ENTRY, build) == b"object"
    assert build.calls == (1 if replaced else 2)
    refused = [message for message in caplog.messages if "refused" in message]
    assert len(refused) == build.calls
    cleared = CliRunner().invoke(app, ["cache", "clear"])
    assert cleared.exit_code == 0, cleared.output
    assert ("not removed" in cleared.output) != replaced


def test_each_refusal_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.fetch(ENTRY, Builder())
    (folder / ENTRY.file_name).write_bytes(b"")
    cache.fetch(ENTRY, Builder())
    assert ["no compiled kernel" in message for message in caplog.messages] == [True]


def test_a_file_that_vanishes_while_it_is_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [replace(ENTRY, configuration=str(number)) for number in range(3)]
    for entry in entries:
        cache.fetch(entry, Builder())
    files = cache.user().files()
    actual = [next(files)]
    cache.clear()
    assert len([*actual, *files]) == 1


# The system's cache.


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> cache.Store:
    """One that root filled with a kernel; whoever runs the tests stands for root, and is another user from here on."""
    monkeypatch.setenv("CUDNN_SYSTEM_KERNEL_CACHE", str(tmp_path / "system"))
    monkeypatch.setattr(cache, "_ROOT", os.getuid())
    cache._warn_once.cache_clear()
    store = cache.system()
    assert store is not None
    store.make()
    store.write(ENTRY, b"root's")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    return store


def _mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


def test_another_user_reads_what_root_compiled(folder: Path, system: cache.Store) -> None:
    build = Builder()
    assert cache.fetch(ENTRY, build) == b"root's"
    assert build.calls == 0
    assert not folder.exists()  # nothing is asked of the user's folder, which may be impossible to make
    assert (_mode(system.folder), _mode(system.path(ENTRY))) == ("0o755", "0o644")


def test_execution_does_not_write_to_it(folder: Path, system: cache.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # root runs a program
    monkeypatch.setenv("CUDNN_SYSTEM_KERNEL_CACHE", str(system.folder))
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(folder))
    monkeypatch.setattr(cache, "_ROOT", os.getuid())
    other = replace(ENTRY, configuration="columns=1024")
    assert cache.fetch(other, Builder()) == b"object"
    assert [path.name for path in system.folder.iterdir()] == [ENTRY.file_name]
    assert (folder / other.file_name).is_file()


@pytest.mark.parametrize("place", ["folder", "file"])
def test_what_others_could_have_written_is_refused(
    system: cache.Store, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = system.folder if place == "folder" else system.path(ENTRY)
    path.chmod(0o777)
    monkeypatch.setattr(os, "getuid", lambda: cache._ROOT)  # so that the user's cache works
    build = Builder()
    for number in range(3):
        assert cache.fetch(ENTRY, build) == b"object", number
    assert build.calls == 1
    assert ["others may write to it" in message for message in caplog.messages] == [True]


def test_what_does_not_belong_to_root_is_refused(
    system: cache.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("CUDNN_SYSTEM_KERNEL_CACHE", str(system.folder))
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(system.folder.parent / "cache"))
    monkeypatch.setattr(cache, "_ROOT", os.getuid() + 1)
    assert cache.fetch(ENTRY, Builder()) == b"object"
    assert ["belongs to user" in message for message in caplog.messages] == [True]


def test_a_system_cache_that_is_missing_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDNN_SYSTEM_KERNEL_CACHE", str(tmp_path / "nowhere"))
    cache._warn_once.cache_clear()
    for configuration in ("a", "b"):
        cache.fetch(replace(ENTRY, configuration=configuration), Builder())
    (message,) = caplog.messages
    assert "nowhere: no such folder" in message
    assert not (tmp_path / "nowhere").exists()


def test_both_caches_are_listed(folder: Path, system: cache.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: cache._ROOT)
    cache.fetch(replace(ENTRY, configuration="columns=1024"), Builder())
    output = CliRunner().invoke(app, ["cache", "list"]).output
    assert f"{system.folder}, the system's: 1 compiled kernels" in output
    assert f"{folder}: 1 compiled kernels" in output
    CliRunner().invoke(app, ["cache", "clear"])
    assert system.path(ENTRY).is_file()
    assert not list(folder.glob("*.kernel"))


@pytest.mark.usefixtures("system")
def test_only_root_fills_it() -> None:
    done = CliRunner().invoke(app, ["cache", "warm", "--arch", "sm_90a", "--system", "somewhere"])
    assert done.exit_code == 2
    assert "got user 12345; allowed: root" in " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of a user of whom the system knows nothing and who has no HOME."""

    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    for name in ("HOME", "XDG_CACHE_HOME", "CUDNN_KERNEL_CACHE", "CUDNN_SYSTEM_KERNEL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def _own(temporary: Path) -> Path:
    return temporary / f"cudnn-fused-{os.getuid()}"


def test_without_a_home_kernels_are_kept_among_temporary_files(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()
    assert [cache.fetch(ENTRY, build) for _ in range(2)] == [b"object"] * 2
    assert build.calls == 1
    own = _own(temporary)
    assert [path.stat().st_mode & 0o777 for path in (own, own / "kernels")] == [0o700] * 2
    assert (own / "kernels" / ENTRY.file_name).is_file()
    (message,) = caplog.messages
    assert message.startswith("this user has no home folder: compiled kernels are kept in")
    listed = CliRunner().invoke(app, ["cache", "list"])
    assert f"{own / 'kernels'}: 1 compiled kernels" in listed.output
    cleared = CliRunner().invoke(app, ["cache", "clear"])
    assert "1 compiled kernels removed" in cleared.output


def _is_a_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.touch()


def _is_read_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(home)) and may(path, mode))


@pytest.mark.parametrize("prepare", [_is_a_file, _is_read_only])
def test_a_home_that_cannot_be_written_to(
    temporary: Path,
    prepare: Callable[[Path, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    home = temporary.parent / "home"
    monkeypatch.setenv("HOME", str(home))
    prepare(home, monkeypatch)
    build = Builder()
    assert [cache.fetch(ENTRY, build) for _ in range(2)] == [b"object"] * 2
    assert build.calls == 1
    assert (_own(temporary) / "kernels" / ENTRY.file_name).is_file()
    (message,) = caplog.messages
    assert str(home) in message
    assert "cannot be written to" in message


def test_what_a_read_only_home_holds_is_read(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = temporary.parent / "home"
    monkeypatch.setenv("HOME", str(home))
    cache.fetch(ENTRY, Builder(b"of the image"))
    _is_read_only(home, monkeypatch)
    build, other = Builder(), replace(ENTRY, configuration="columns=1024")
    assert [cache.fetch(entry, build) for entry in (ENTRY, other, other)] == [b"of the image", b"object", b"object"]
    assert build.calls == 1
    assert (_own(temporary) / "kernels" / other.file_name).is_file()
    output = CliRunner().invoke(app, ["cache", "list"]).output
    assert output.count("1 compiled kernels") == 2


def _of_a_link(own: Path) -> None:
    target = own.parent / "elsewhere"
    target.mkdir(mode=0o700)
    own.symlink_to(target)


def _that_others_enter(own: Path) -> None:
    own.mkdir()
    own.chmod(0o755)


def _of_someone_else(own: Path) -> None:
    if os.getuid():
        pytest.skip("only root makes folders of other users")
    own.mkdir(mode=0o700)
    os.chown(own, 12345, -1)


def _without_any(own: Path) -> None:
    own.parent.rmdir()


@pytest.mark.parametrize("plant", [_of_a_link, _that_others_enter, _of_someone_else, _without_any])
def test_no_kernel_comes_from_a_temporary_folder_that_others_may_have_filled(
    temporary: Path, plant: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    own = _own(temporary)
    plant(own)
    if own.is_dir():
        store = cache.Store(own / "kernels", os.getuid())
        store.make()
        store.write(ENTRY, b"planted")
    build = Builder()
    assert [cache.fetch(ENTRY, build) for _ in range(2)] == [b"object"] * 2
    assert build.calls == 2  # nothing is kept
    (message,) = caplog.messages
    assert "kept nowhere" in message
    for command in ("list", "clear"):
        done = CliRunner().invoke(app, ["cache", command])
        assert done.exit_code == 0, done.output
        assert "compiled kernels are not kept" in done.output
    done = CliRunner().invoke(app, ["cache", "warm", "--arch", "sm_90a"])
    assert done.exit_code == 1
    assert "compiled kernels are not kept" in done.output


def test_a_chosen_folder_that_needs_a_home(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", "~/kernels")
    build = Builder()
    assert [cache.fetch(ENTRY, build) for _ in range(2)] == [b"object"] * 2
    assert build.calls == 2
    (message,) = caplog.messages
    assert "CUDNN_KERNEL_CACHE=~/kernels" in message
    assert not list(temporary.iterdir())
