"""``cudnn cache``: the compiled kernels on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cudnn.cli.commands import Command, Group, check_choice, option_error, sizes
from cudnn.fused.registry import compiled

if TYPE_CHECKING:
    from cudnn.fused.warm import Kernel
    from cudnn.runtime.cache import Store

_NO_CACHE = "no folder can be written to: compiled kernels are not kept; set CUDNN_KERNEL_CACHE"

app = typer.Typer(cls=Group, help="Compiled kernels on disk: list, clear, warm.", no_args_is_help=True)


@app.command("list", cls=Command)
def _list(
    full: Annotated[bool, typer.Option("--full", help="Show configurations in full.")] = False,
) -> None:
    """Show every compiled kernel: name, architecture, size, configuration, and what would be refused."""
    from cudnn.runtime import cache

    user = cache.user()
    for store in (cache.system(), cache.unwritable(), user):
        if store is not None:
            _show(store, full)
    if user is None:
        typer.echo(_NO_CACHE)


def _show(store: Store, full: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    files = list(store.files())
    table = Table(box=box.SIMPLE, expand=True)
    table.add_column("kernel", no_wrap=True)
    table.add_column("arch", no_wrap=True)
    table.add_column("KiB", justify="right", no_wrap=True)
    table.add_column("configuration", overflow="fold" if full else "ellipsis", no_wrap=not full, ratio=1)
    for file in files:
        if file.entry is not None:
            size = f"{file.size / 1024:.0f}"
            table.add_row(file.entry.name, file.entry.arch, size, Text(file.entry.configuration))
    console = Console(highlight=False)
    whose = ", the system's" if store.shared else ""
    refused = [file for file in files if file.entry is None]
    count = f"{table.row_count} compiled kernels" + (f", {len(refused)} refused" if refused else "")
    console.print(f"{store.folder}{whose}: {count}", soft_wrap=True, markup=False)
    if table.row_count:
        console.print(table)
    for file in refused:
        console.print(f"refused: {file.fault}", style="red", soft_wrap=True, markup=False)


@app.command("clear", cls=Command)
def _clear() -> None:
    """Remove every compiled kernel of this user. The next use compiles again."""
    from cudnn.runtime import cache

    store, removed = cache.user(), cache.clear()
    if store is None:
        typer.echo(_NO_CACHE)
        return
    typer.echo(f"{store.folder}: {removed} compiled kernels removed")
    for file in store.files():
        typer.echo(f"not removed: {file.fault}")


@app.command("warm", cls=Command)
def _warm(
    arch: Annotated[
        list[str],
        typer.Option(metavar="ARCH", help="sm_90a (H100, H200) or sm_100a (B200); no such GPU is needed."),
    ],
    api: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"One of {', '.join(compiled())}; default: all.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="Of the operands: bf16, fp16, fp8, mxfp8 or nvfp4; default: all."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            help="MxNxK of a GEMM, MxN of the norm, BxHxSxDxDV of attention; default: language models'.",
        ),
    ] = None,
    moe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HxIxExK",
            help="cudnn.nn.MoE of hidden size H, intermediate size I, E experts, K of them per token, for all numbers "
            "of tokens, forward and backward.",
        ),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QxKxDxV",
            help="Attention of Q query and K key heads, head sizes D of queries and keys and V of values, full and "
            "causal, forward and backward.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of one call, for --moe and --attention.")
    ] = 65536,
    system: Annotated[
        str, typer.Option(metavar="DIR", help="Into this folder, for CUDNN_SYSTEM_KERNEL_CACHE. For root alone.")
    ] = "",
    jobs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Kernels compiled at a time; each takes 0.5 GB of memory.")
    ] = 1,
) -> None:
    """Compile kernels ahead of time, for example for an image: those of a model's layers (--moe, --attention), or of
    fused APIs (--api, --shape), else those of common calls.

    All but --max-tokens, --system and --jobs may be given several times.
    """
    from cudnn.fused import warm
    from cudnn.runtime import cache

    for option, values, allowed in (("--arch", arch, warm.architectures()), ("--api", api or [], tuple(compiled()))):
        for value in values:
            check_choice(option, value, allowed)
    store = cache.system(system) if system else cache.user()
    if store is None:
        typer.echo(f"cudnn cache warm: {_NO_CACHE}", err=True)
        raise typer.Exit(1)
    if os.getuid() != store.owner:
        allowed = "root, because files of other users are refused when kernels are loaded"
        raise option_error("--system", f"user {os.getuid()}", allowed)
    try:
        shapes = [sizes(text, "sizes such as 4096x4096x4096") for text in shape or ()]
        layers = _layers(arch, moe or (), attention or (), dtype or ("bf16",), max_tokens)
        kernels = [] if layers and not api and not shapes else warm.wanted(arch, api or (), dtype or (), shapes)
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error), param_hint="--moe, --attention, --shape, --dtype") from None
    kernels = list({(each.source, each.configuration, each.arch): each for each in (*layers, *kernels)}.values())
    try:
        _compile(kernels, store, jobs)
    except (OSError, cache.UntrustedFileError) as error:
        typer.echo(f"cudnn cache warm: {error}", err=True)
        raise typer.Exit(1) from None


def _layers(
    archs: Sequence[str], moe: Sequence[str], attention: Sequence[str], dtypes: Sequence[str], max_tokens: int
) -> list[Kernel]:
    """The kernels of --moe and --attention."""
    from cudnn.fused.warm import Kernel

    kernels = []
    for option, texts, allowed, kernels_of in (
        ("--moe", moe, "HxIxExK, such as 2048x768x128x8", _moe_kernels),
        ("--attention", attention, "QxKxDxV, such as 32x4x128x128", _attention_kernels),
    ):
        for text in texts:
            shape = sizes(text, allowed, 4, option)
            for dtype in dtypes:
                for arch in archs:
                    keys = kernels_of(shape, dtype, max_tokens, arch)
                    kernels += [Kernel(f"{option} {text}, {dtype}, {arch}", *key) for key in keys]
    return kernels


def _moe_kernels(shape: tuple[int, ...], dtype: str, max_tokens: int, arch: str) -> list[Any]:
    """The kernels of a layer, for the largest GPU of the architecture. ``fp8``: a bfloat16 layer's with fp8 GEMMs."""
    from cudnn.moe.compile_ahead import module_kernels
    from cudnn.nn import MoE
    from cudnn_kernels.architecture import ARCHITECTURES

    layer = MoE(*shape, fp8=dtype == "fp8", device="meta", dtype=_dtype("--moe", dtype, ("bf16", "fp16", "fp8")))
    return module_kernels(layer, max_tokens, arch, ARCHITECTURES[arch].num_sms)


def _attention_kernels(shape: tuple[int, ...], dtype: str, max_tokens: int, arch: str) -> list[Any]:
    from cudnn.attention.compile_ahead import attention_kernels
    from cudnn_kernels.architecture import ARCHITECTURES

    (q_heads, kv_heads, d, d_v), torch_dtype = shape, _dtype("--attention", dtype, ("bf16", "fp16"))
    sizes_of_heads = (q_heads, kv_heads), (d, d_v)
    return attention_kernels(*sizes_of_heads, torch_dtype, max_tokens, arch, ARCHITECTURES[arch].num_sms)


def _dtype(option: str, name: str, allowed: Sequence[str]) -> Any:
    import torch

    check_choice(f"--dtype with {option}", name, allowed)
    return torch.float16 if name == "fp16" else torch.bfloat16


def _compile(kernels: list[Kernel], store: Store, jobs: int) -> None:
    from rich.console import Console

    from cudnn.cli import progress
    from cudnn.fused import warm

    console = Console(highlight=False)
    compiled = 0
    with progress.shown("compiling kernels", len(kernels)) as steps:
        for number, (kernel, seconds) in enumerate(warm.warm(kernels, store, jobs), start=1):
            outcome = f"{seconds:.1f} s" if seconds else "was there"
            console.print(f"{number}/{len(kernels)} {kernel.label}: {outcome}", soft_wrap=True)
            compiled += bool(seconds)
            steps.advance()
    cached = len(kernels) - compiled
    console.print(f"{store.folder}: {compiled} kernels compiled, {cached} were already there", soft_wrap=True)
