"""``cudnn info``: the installation on this machine, its problems, and what it can run."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import cudnn
from cudnn.backend import handle, library
from cudnn.errors import CudnnLibraryError

_PACKAGE = re.compile(r"nvidia-cudnn-cu(\d+)")


@dataclass
class Facts:
    """The installation. Versions are strings as each package prints them, ``""`` if it is absent."""

    gpus: list[str] = field(default_factory=list)
    driver: str = ""
    driver_library: bool = False  # libcuda.so.1 loads, with a device or without
    torch: str = ""
    torch_cuda: str = ""
    torch_wants: list[str] = field(default_factory=list)  # its requirements on cuDNN packages
    packages: dict[str, str] = field(default_factory=dict)  # nvidia-cudnn-cu* distributions: version
    cudnn: str = ""
    cudnn_cuda: str = ""  # the CUDA version it was built with
    cudnn_path: str = ""
    cudnn_error: str = ""
    mapped: list[str] = field(default_factory=list)  # files of cuDNN in this process
    mismatched: list[str] = field(default_factory=list)  # sub-libraries that refuse the main library's version
    dsl: str = ""


@dataclass
class Problem:
    """A problem with the installation, and how to fix it."""

    what: str
    remedy: str


def collect() -> Facts:
    """Collects the facts about this machine. Loads PyTorch and libcudnn, like a program that uses both."""
    facts = Facts(dsl=_version("nvidia-cutlass-dsl"))
    _torch_facts(facts)
    facts.driver = driver_version()
    facts.driver_library = library.loads("libcuda.so.1")
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if _PACKAGE.fullmatch(name):
            facts.packages[name] = distribution.version
    try:
        loaded = library.load()
    except CudnnLibraryError as error:
        facts.cudnn_error = str(error)
        return facts
    facts.cudnn, facts.cudnn_path = library.format_version(loaded.version), loaded.path
    facts.cudnn_cuda = f"{loaded.cuda_version // 1000}.{loaded.cuda_version // 10 % 100}"
    facts.mismatched = _refusing_sub_libraries(loaded.path)
    facts.mapped = library.mapped_libraries("libcudnn")
    return facts


def diagnose(facts: Facts) -> list[Problem]:
    """The problems of an installation."""
    problems: list[Problem] = []

    def add(what: str, remedy: str) -> None:
        problems.append(Problem(what, remedy))

    reinstall = _reinstall(facts)
    if len(facts.packages) > 1:
        names = " and ".join(sorted(facts.packages))
        add(f"{names} are both installed: they write the same files, so one has damaged the other", reinstall)
    if facts.mismatched:
        add(f"sub-libraries of another version than libcudnn {facts.cudnn}: {', '.join(facts.mismatched)}", reinstall)
    folders = sorted({os.path.dirname(os.path.realpath(path)) for path in facts.mapped})
    if len(folders) > 1:
        add(
            f"this process has loaded cuDNN from {len(folders)} folders: {', '.join(folders)}",
            "keep one: take the others off LD_LIBRARY_PATH or uninstall them",
        )
    for wanted in map(Requirement, facts.torch_wants):
        version = facts.packages.get(wanted.name)
        if version is not None and not wanted.specifier.contains(version):
            package = f"{wanted.name}{wanted.specifier}"
            add(f"PyTorch asks for {package}; installed: {version}", f"pip install '{package}'")
    in_packages = os.sep + os.path.join("nvidia", "cudnn", "lib") + os.sep in facts.cudnn_path
    for name, version in facts.packages.items():
        if in_packages and not version.startswith(facts.cudnn + "."):
            add(f"{name} {version} is installed, but its folder holds cuDNN {facts.cudnn}", reinstall)
    if facts.torch_cuda and facts.cudnn and _major(facts.torch_cuda) != _major(facts.cudnn_cuda):
        add(f"PyTorch is built for CUDA {facts.torch_cuda}, this cuDNN for CUDA {facts.cudnn_cuda}", reinstall)
    return problems


def abilities(facts: Facts) -> list[tuple[str, bool, str]]:
    """What this machine can run: name, whether it can, and the library that runs it or what is missing."""
    library_found = f"cuDNN {facts.cudnn}" if facts.cudnn else ""
    plans = library_found and facts.gpus
    planning = library_found and facts.driver_library
    return [
        ("graphs through cuDNN", bool(plans), library_found if plans else "needs a GPU and libcudnn"),
        (
            "graphs on the reference executor",
            bool(facts.torch),
            f"PyTorch {facts.torch}" if facts.torch else "needs PyTorch",
        ),
        (
            "planning graphs for a GPU elsewhere",
            bool(planning),
            library_found if planning else "needs libcudnn and libcuda.so.1, the CUDA driver's library",
        ),
    ]


def show() -> None:
    """Prints everything as tables."""
    console = Console(highlight=False)
    facts = collect()
    console.print(f"[bold]cudnn-fused {cudnn.__version__}[/]")
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    table.add_row("GPU", "\n".join(facts.gpus) or "none")
    table.add_row("driver", facts.driver or "none")
    table.add_row("PyTorch", _with(facts.torch, f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "no CUDA"))
    cudnn_text = f"{facts.cudnn} (CUDA {facts.cudnn_cuda})\n{facts.cudnn_path}"
    table.add_row("cuDNN", cudnn_text if facts.cudnn else escape(facts.cudnn_error))  # it names extras, such as [cu12]
    table.add_row("cuDNN packages", "\n".join(" ".join(item) for item in facts.packages.items()) or "none")
    table.add_row("CuTe DSL", facts.dsl or "not installed")
    console.print(table)
    console.print("[bold]This machine can run[/]")
    can = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, supported, detail in abilities(facts):
        can.add_row(name, "[green]yes[/]" if supported else "[yellow]no[/]", detail)
    console.print(can)
    for problem in diagnose(facts):
        what, remedy = escape(problem.what), escape(problem.remedy)
        console.print(f"[bold yellow]Warning:[/] {what}.\n  To fix it: {remedy}.", soft_wrap=True)


def _torch_facts(facts: Facts) -> None:
    try:
        import torch
    except ImportError:
        return
    facts.torch, facts.torch_cuda = torch.__version__, torch.version.cuda or ""
    requirements = importlib.metadata.requires("torch") or []
    facts.torch_wants = [text for text in requirements if _PACKAGE.match(text)]
    if handle.gpu_available() and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            facts.gpus.append(
                f"{gpu.name}: compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} SMs, "
                f"{gpu.total_memory / 2**30:.0f} GiB"
            )


def _refusing_sub_libraries(path: str) -> list[str]:
    """The sub-libraries whose own version check fails: cuDNN has one in each."""
    main = ctypes.CDLL(path)
    names = ("Graph", "Ops", "Cnn", "Adv")
    return [f"libcudnn_{name.lower()}" for name in names if getattr(main, f"cudnn{name}VersionCheck")() != 0]


def driver_version() -> str:
    """The driver's version through NVML, ``""`` without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    if nvml.nvmlInit_v2():
        return ""
    text = ctypes.create_string_buffer(80)
    nvml.nvmlSystemGetDriverVersion(text, len(text))
    nvml.nvmlShutdown()
    return text.value.decode()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _major(version: str) -> str:
    return version.split(".")[0]


def _with(version: str, detail: str) -> str:
    return f"{version} ({detail})" if version else "not installed"


def _reinstall(facts: Facts) -> str:
    """The commands that reinstall one copy of cuDNN: the one PyTorch requires, else the one for PyTorch's CUDA."""
    wanted = next((Requirement(text) for text in facts.torch_wants), None)
    if wanted is not None:
        keep = f"{wanted.name}{wanted.specifier}"
    elif facts.torch_cuda:
        keep = f"nvidia-cudnn-cu{_major(facts.torch_cuda)}"
    else:
        keep = max(facts.packages, default="nvidia-cudnn-cu12")
    return f"pip uninstall -y {' '.join(sorted(facts.packages))}, then pip install '{keep}'"
