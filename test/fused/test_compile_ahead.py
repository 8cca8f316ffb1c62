"""Kernels found by recording on meta tensors, and compiled in parallel: what is found, and how workers fail."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn
from cudnn.attention.compile_ahead import attention_kernels
from cudnn.attention.fused import fused_sdpa
from cudnn.fused.grouped import ExpertsGemm
from cudnn.moe import compile_ahead
from cudnn.moe.compile_ahead import module_kernels, on_meta
from cudnn.nn import MoE
from cudnn.runtime import cache, compile_pool, kernels
from cudnn.runtime.recording import recording
from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration

SMS = {"sm_90a": 132, "sm_100a": 148}
SOURCE = "cudnn_kernels.norm.rmsnorm_rht_amax:RmsNormRhtAmax"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and no pool for each test."""
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDNN_COMPILE_JOBS", "2")
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(kernels, "_pool", None)
    return tmp_path / "cache"


def key(columns: int) -> tuple[str, Any, str]:
    return SOURCE, RmsNormRhtAmaxConfiguration("bfloat16", columns, threads=32, teams=1, stages=2), "sm_90a"


# What is found.


LAYERS: dict[str, dict[str, Any]] = {
    "swiglu": {"renormalize": True},
    "fp8": {"fp8": True},
    "bias, geglu": {"bias": True, "activation": "geglu", "glu_layout": "concatenated"},
    "shared, correction": {"shared_experts": 1, "score": "sigmoid", "correction_bias": True},
    "srelu": {"activation": "srelu"},
}


@pytest.mark.parametrize("arch", SMS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_number_of_tokens_needs_another_kernel(name: str, arch: str) -> None:
    sizes = (384, 256, 24, 5) if name == "srelu" else (2048, 768, 128, 8)
    layer = MoE(*sizes, device="meta", **LAYERS[name])
    known = set(module_kernels(layer, 65536, arch, SMS[arch]))
    draw, clone = random.Random(0), on_meta(layer)
    for _ in range(15):
        x = torch.empty(draw.randint(1, 2 ** draw.randint(0, 16)), sizes[0], dtype=torch.bfloat16, device="meta")
        with recording(arch, SMS[arch]) as recorder:
            clone(x.requires_grad_()).sum().backward()
        assert recorder.keys
        assert known.issuperset(recorder.keys), x.shape


@pytest.mark.parametrize("arch", SMS)
def test_recorded_kernels_are_those_that_run(arch: str) -> None:
    """Calls on CPU tensors launch the recorded kernels and no others."""
    torch.manual_seed(0)
    layer = MoE(64, 64, 4, 2)
    x = torch.randn(24, 64).bfloat16().requires_grad_()
    launched: set[Any] = set()

    def emulated_kernel(*args: Any) -> Callable[..., None]:
        launched.add(args)
        return lambda *_: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cudnn.runtime.emulation.emulated_kernel", emulated_kernel)
        patch.setattr(ExpertsGemm, "check_values", lambda *_: None)  # nothing has written the offsets
        with cudnn.emulation(arch):
            layer(x).sum().backward()
    with recording(arch, SMS[arch]) as recorder:
        on_meta(layer)(x.detach().to("meta").requires_grad_()).sum().backward()
    assert set(recorder.keys) == launched


def test_recording_ends_with_its_block() -> None:
    layer, x = MoE(64, 64, 4, 2, device="meta"), torch.empty(8, 64, dtype=torch.bfloat16, device="meta")
    with recording("sm_90a", 132) as recorder:
        layer(x)
    count = len(recorder.keys)
    assert layer(x).shape == x.shape  # the fake kernels again
    assert len(recorder.keys) == count > 0


def test_a_copy_on_meta_has_no_hooks_and_leaves_the_layer() -> None:
    layer = MoE(64, 64, 4, 2)
    layer.register_forward_hook(lambda *_: pytest.fail("called"))
    clone = on_meta(layer)
    assert {p.device.type for p in clone.parameters()} == {"meta"}
    assert {p.device.type for p in layer.parameters()} == {"cpu"}
    clone(torch.empty(8, 64, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("arch", SMS)
def test_attention_of_a_sequence(arch: str) -> None:
    known = attention_kernels((8, 2), (128, 128), torch.bfloat16, 4096, arch, SMS[arch])
    names = {source.rpartition(":")[2] for source, *_ in known}
    assert names == {"AttentionForward", "AttentionBackward", "AttentionDecode"}
    q, k, v = (torch.empty(1, h, 1000, 128, dtype=torch.bfloat16, device="meta") for h in (8, 2, 2))
    with recording(arch, SMS[arch]) as recorder:
        fused_sdpa(q, k, v, 1.0, True, -1)
    assert set(known).issuperset(recorder.keys)


# When it is compiled.


class Built:
    """Stands for the workers: records what they build; ``fails`` raises for a kernel."""

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.fails: set[Any] = set()
        self.killed = 0
        self.group: Any = types.SimpleNamespace(wait=lambda: None)

    def build(self, each: Any) -> tuple[bytes, float]:
        if each in self.fails:
            raise compile_pool.WorkerError("the process ended")
        self.keys.append(each)
        return repr(each).encode(), 0.1

    def close(self) -> None:
        """Nothing runs."""

    def kill(self) -> None:
        self.killed += 1


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    built = Built()
    monkeypatch.setattr(compile_pool, "start_workers", lambda count: [built] * count)
    monkeypatch.setattr(kernels, "build", lambda *each: f"here {each}".encode())
    monkeypatch.setattr(kernels.loader, "load", lambda content: content)
    return built


def test_the_first_missing_kernel_compiles_all(built: Built) -> None:
    keys = [key(512 * n) for n in range(1, 6)]
    with kernels.CompileAhead(lambda arch: keys):
        assert kernels.kernel(*keys[3]) == repr(keys[3]).encode()
    for each in keys:
        assert kernels.kernel(*each) == repr(each).encode()
    assert sorted(map(repr, built.keys)) == sorted(map(repr, keys))


def test_a_full_cache_lists_nothing(built: Built) -> None:
    cache.fetch(kernels.entry(*key(512)), lambda: b"there")
    with kernels.CompileAhead(lambda arch: pytest.fail("listed")):
        assert kernels.kernel(*key(512)) == b"there"
    assert not built.keys


def test_a_single_kernel_is_compiled_here(built: Built) -> None:
    with kernels.CompileAhead(lambda arch: [key(512)]):
        assert kernels.kernel(*key(512)).startswith(b"here")  # pyright: ignore
    assert not built.keys


def test_workers_start_while_kernels_are_listed(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """They import the compiler meanwhile. Those without work end."""
    monkeypatch.setenv("CUDNN_COMPILE_JOBS", "4")
    started: list[int] = []
    monkeypatch.setattr(compile_pool, "start_workers", lambda count: started.append(count) or [built] * count)

    def listed(count: int, arch: str) -> list[Any]:
        assert started == [4]
        return [key(512 * n) for n in range(1, count + 1)]

    for count in (1, 2):
        started.clear()
        monkeypatch.setattr(kernels, "_pool", None)
        with kernels.CompileAhead(functools.partial(listed, count)):
            kernels.kernel(*key(512 * count))
        assert started == [4], "the pool took the workers that were there"
    assert not kernels.pool()._idle


def settled() -> None:
    """Waits for what the pool compiles."""
    for future in list(kernels.pool()._futures.values()):
        future.exception(60)


@pytest.fixture
def early(built: Built, monkeypatch: pytest.MonkeyPatch) -> Built:
    """The CPU stands for a GPU where layers are constructed."""
    monkeypatch.setattr(compile_ahead, "_known", set())
    monkeypatch.setattr(compile_ahead, "_compiles_early", lambda device, dtype: device.type == "cpu")
    monkeypatch.setattr(compile_ahead, "_gpu_kernels", lambda module: module_kernels(module, 64, "sm_90a", 132))
    return built


@pytest.mark.parametrize("mode", ["", "inference", "default device"])
def test_construction_compiles_in_the_background(mode: str, early: Built) -> None:
    """The same kernels within PyTorch's modes, and those of gradients that are added to ``main_grad``."""
    within = {"inference": torch.inference_mode, "default device": lambda: torch.device("cpu")}
    with within.get(mode, contextlib.nullcontext)():
        layer = MoE(64, 64, 4, 2, into_main_grad=True)
    settled()
    wanted = module_kernels(MoE(64, 64, 4, 2, device="meta", into_main_grad=True), 64, "sm_90a", 132)
    assert set(early.keys) == set(wanted)
    assert layer.up.device.type == "cpu"
    MoE(64, 64, 4, 2, into_main_grad=True)
    assert len(early.keys) == len(wanted), "layers of the same kind need the same kernels"
    kernels.pool().submit = lambda keys: pytest.fail("listed again")  # pyright: ignore
    with kernels.CompileAhead(lambda arch: pytest.fail("listed again")):
        assert kernels.kernel(*wanted[0]) == repr(wanted[0]).encode()


def test_a_call_takes_what_construction_submitted(early: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the kernel that is being compiled, and lists nothing."""
    free, build = threading.Event(), early.build
    monkeypatch.setattr(early, "build", lambda each: (free.wait(10), build(each))[1])
    with kernels.compile_in_background(lambda: [key(512), key(1024)]):
        pass
    threading.Timer(0.2, free.set).start()
    with kernels.CompileAhead(lambda arch: pytest.fail("listed again")):
        assert kernels.kernel(*key(1024)) == repr(key(1024)).encode()
    settled()


class _WithRoute(MoE):
    def route(self, x: torch.Tensor) -> Any:
        pytest.fail("called")


def test_where_construction_compiles_nothing(early: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: Any) -> list[Any]:
        raise RuntimeError("no")

    MoE(64, 64, 4, 2, device="meta")
    _WithRoute(64, 64, 4, 2)
    with monkeypatch.context() as patch:
        for jobs in ("0", "many"):
            patch.setenv("CUDNN_COMPILE_JOBS", jobs)
            MoE(64, 64, 4, 2)
    monkeypatch.setattr(compile_ahead, "_known", set())
    monkeypatch.setattr(compile_ahead, "_gpu_kernels", fail)
    MoE(64, 64, 4, 2)  # and nothing is raised
    assert not early.keys
    assert not kernels.pool()._idle


def test_a_construction_that_fails_ends_its_workers(early: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one on a machine without a GPU: workers start before CUDA is initialized."""

    def fail(module: MoE) -> None:
        assert kernels.pool()._idle
        raise RuntimeError("no GPU")

    monkeypatch.setattr(MoE, "reset_parameters", fail)
    with pytest.raises(RuntimeError, match="no GPU"):
        MoE(64, 64, 4, 2)
    assert early.killed
    assert not early.keys
    assert not kernels.pool()._idle


def test_devices_and_modes_that_compile_early(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = functools.partial(compile_ahead._compiles_early, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: pytest.fail("initializes CUDA"))
        assert compiles(torch.device("cuda", 1))
    assert not compiles(torch.device("cpu"))
    assert not compiles(torch.device("meta"))
    assert not compile_ahead._compiles_early(torch.device("cuda"), torch.float32)
    with FakeTensorMode():
        assert not compiles(torch.device("cuda"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not compiles(torch.device("cuda"))


def test_a_first_call_in_inference_mode_compiles_all(built: Built) -> None:
    layer, found = MoE(64, 64, 4, 2, device="meta"), []

    def listed(arch: str) -> list[Any]:
        found.extend(module_kernels(layer, 64, arch, 132))
        return found

    with torch.inference_mode(), kernels.CompileAhead(listed):
        kernels.kernel(*key(512))
    assert found
    settled()


@pytest.mark.parametrize("waits", [True, False])
def test_early_workers_leave_no_process(waits: bool, folder: Path, tmp_path: Path) -> None:
    """A program that forks, as data loaders do, and ends with its kernels or before they are compiled."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from cudnn.runtime import kernels\n"
        "from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration as C\n"
        f"keys = [({SOURCE!r}, C('bfloat16', 512 * n, threads=32, teams=1, stages=2), 'sm_90a') for n in (1, 2)]\n"
        "with kernels.compile_in_background(lambda: keys):\n"
        "    pass\n"
        "pool = kernels.pool()\n"
        "print(*{worker.group.pid for worker in pool._workers})\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(kernels.pool() is pool)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        f"for key in keys if {waits} else ():\n"
        "    assert pool.take(key, pool.pending(key))[:4] == b'\\x7fELF'\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(list(folder.glob("*.kernel"))) == 2 or not waits
    deadline = time.monotonic() + 10
    while _lives(int(run.stdout)):  # killed workers are there until init has waited for them
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _lives(group: int) -> bool:
    """Whether a process group has processes."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_outer_block_has_precedence(built: Built) -> None:
    both = [key(512), key(1024)]
    with kernels.CompileAhead(lambda arch: both), kernels.CompileAhead(lambda arch: pytest.fail("listed")):
        kernels.kernel(*both[0])
        kernels.kernel(*key(2048))  # not listed: compiled alone
    kernels.kernel(*both[1])  # waits for the worker
    assert set(map(repr, built.keys)) == set(map(repr, both))


def test_what_a_worker_cannot_compile_is_compiled_here(built: Built, caplog: pytest.LogCaptureFixture) -> None:
    both = [key(512), key(1024)]
    built.fails = {both[0]}
    with kernels.CompileAhead(lambda arch: both):
        assert kernels.kernel(*both[0]).startswith(b"here")  # pyright: ignore
        assert kernels.kernel(*both[1]) == repr(both[1]).encode()
    assert "a worker did not compile" in caplog.text


def test_kernels_that_cannot_be_listed(built: Built, caplog: pytest.LogCaptureFixture) -> None:
    def fail(arch: str) -> list[Any]:
        raise ValueError("no")

    with kernels.CompileAhead(fail):
        assert kernels.kernel(*key(512)).startswith(b"here")  # pyright: ignore
    assert "one after another: ValueError: no" in caplog.text


def test_another_process_that_compiles_is_waited_for_last(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_COMPILE_JOBS", "1")
    both, free = [key(512), key(1024)], threading.Event()
    store = cache.user()
    assert store is not None
    store.make()
    with cache._lock(store.path(kernels.entry(*both[0])), wait=True):
        futures = kernels.pool().submit(both)
        assert futures[1].result(10) == repr(both[1]).encode()
        assert not futures[0].done()
        free.set()
    assert futures[0].result(10) == repr(both[0]).encode()


def test_workers_share_the_cpus_with_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDNN_COMPILE_JOBS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    assert compile_pool.jobs() == compile_pool.MOST_WORKERS
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert compile_pool.jobs() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    assert compile_pool.jobs() == 1


def test_no_workers(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_COMPILE_JOBS", "0")
    with kernels.CompileAhead(lambda arch: [key(512), key(1024)]):
        assert kernels.kernel(*key(512)).startswith(b"here")  # pyright: ignore
    assert not built.keys


def test_ranks_of_a_host_begin_with_different_kernels(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key(512 * n) for n in range(1, 5)]
    monkeypatch.setenv("CUDNN_COMPILE_JOBS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for future in kernels.pool().submit(keys):
        future.result(10)
    assert built.keys == keys[2:] + keys[:2]


def test_a_forked_process_has_a_pool_of_its_own(built: Built) -> None:
    parent = kernels.pool()
    child = os.fork()
    if not child:
        os._exit(kernels.pool() is parent)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kernels.pool() is parent


def test_workers_compile_for_a_script_without_a_main_guard(folder: Path, tmp_path: Path) -> None:
    """A script at top level, where multiprocessing's spawn would run it again in each worker."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from cudnn.runtime import kernels\n"
        "from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration as C\n"
        f"keys = [({SOURCE!r}, C('bfloat16', 512 * n, threads=32, teams=1, stages=2), 'sm_90a') for n in (1, 2)]\n"
        "objects = [f.result() for f in kernels.pool().submit(keys)]\n"
        "assert all(b'ELF' in x[:4] for x in objects) and objects[0] != objects[1]\n"
        "assert 'cutlass' not in sys.modules\n"
    )
    paths = os.pathsep.join(sys.path)
    run = subprocess.run([sys.executable, script], env={**os.environ, "PYTHONPATH": paths}, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    assert len(list(folder.glob("*.kernel"))) == 2


def test_kernels_are_compiled_where_no_folder_can_be_written(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "user", lambda: None)
    both = [key(512), key(1024)]
    assert [future.result(10) for future in kernels.pool().submit(both)] == [repr(each).encode() for each in both]


def test_a_worker_that_dies_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    workers = compile_pool.start_workers(2)
    for worker in workers:
        with pytest.raises(compile_pool.WorkerError, match="ended"):
            worker.build(key(512))
        worker.kill()
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(compile_pool.WorkerError, match="cannot be started"):
        compile_pool.start_workers(1)


def test_without_workers_kernels_are_compiled_here(
    built: Built, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(count: int) -> list[Any]:
        raise compile_pool.WorkerError("'' cannot be started")

    monkeypatch.setattr(compile_pool, "start_workers", fail)
    both = [key(512), key(1024)]
    with kernels.CompileAhead(lambda arch: both):
        assert kernels.kernel(*both[1]).startswith(b"here")  # pyright: ignore
    assert "compiled one after another: '' cannot be started" in caplog.text


def test_killed_workers_end() -> None:
    workers = compile_pool.start_workers(2)
    group = workers[0].group
    workers[1].kill()
    assert group.poll() is not None
    with pytest.raises(compile_pool.WorkerError):
        workers[0].build(key(512))
    workers[0].close()


def test_compile_takes_a_gpu_or_is_pytorch_s() -> None:
    layer = MoE(64, 64, 4, 2)
    with pytest.raises(RuntimeError, match=r"MoE.compile: device: got cpu; allowed: cuda.*cache warm --moe"):
        layer.compile(max_tokens=128)
    layer.compile(backend="eager", fullgraph=True)
    x = torch.randn(8, 64).bfloat16()
    torch.testing.assert_close(layer(x), layer.forward(x))


def test_the_command_compiles_a_layer(folder: Path) -> None:
    from cudnn.cli.cache import _layers

    labels = [kernel.label for kernel in _layers(["sm_90a"], ["64x64x4x2"], ["4x2x64x64"], ["bf16"], 64)]
    assert {label.split(",")[0] for label in labels} == {"--moe 64x64x4x2", "--attention 4x2x64x64"}
