"""``cudnn explain``: describes a graph of a program, a file or an example, and what runs it or why nothing does."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import cudnn
from cudnn.backend.handle import gpu_available
from cudnn.cli import progress
from cudnn.cli.commands import check_choice, option_error
from cudnn.errors import CudnnError, CudnnLibraryError

EXAMPLES = {
    "attention": "causal_attention",
    "conv": "convolution",
    "matmul": "matmul_bias_gelu",
    "rmsnorm": "rmsnorm",
}
"""Names of examples, and their functions in ``cudnn.cli.demo``."""

FORMATS = ("text", "svg")


def main(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[FILE.py[:NAME] | FILE]",
            help="A Python program, whose graphs are explained; with NAME a function of it that returns a graph, or a "
            "variable. Or a file with what graph.serialize() or str(graph) gave.",
        ),
    ] = "",
    example: Annotated[str, typer.Option(help=f"A built-in graph instead: {', '.join(EXAMPLES)}.")] = "",
    form: Annotated[str, typer.Option("--format", help="text or svg.")] = "text",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write there instead of printing.")] = None,
    device_properties: Annotated[
        Path | None,
        typer.Option(
            metavar="JSON",
            help="Plan for the device that this file describes, without a GPU here: the "
            "output of cudnn.create_device_properties(0).serialize() on a machine that has it.",
        ),
    ] = None,
) -> None:
    """Explain a graph: its tensors, what it fuses into, the plan and its kernels, or which nodes are refused and why.

    The graph is built for the GPU here, for a described device, or for the reference executor.

    Exit code 1 if a graph is refused.
    """
    check_choice("--format", form, FORMATS)
    if bool(target) == bool(example):
        raise typer.BadParameter("allowed: a file or --example, one of the two.", param_hint="FILE")
    if example:
        check_choice("--example", example, EXAMPLES)
    properties = None if device_properties is None else _properties(device_properties)
    with progress.shown(f"running {target}" if target.partition(":")[0].endswith(".py") else "reading the graph"):
        graphs = [_example(example)] if example else _load(target)
    if form == "svg" and len(graphs) > 1:
        allowed = "one graph for an SVG file; FILE.py:NAME takes one"
        raise option_error("FILE", f"{len(graphs)} graphs", allowed)
    explanations = []
    with progress.shown("building plans", len(graphs)) as steps:
        for graph in graphs:
            explanations.append(_explain(graph, properties))
            steps.advance()
    text = "\n\n".join(getattr(explanation, form)().rstrip() for explanation in explanations) + "\n"
    console = Console(highlight=False)
    if output is not None:
        output.write_text(text, encoding="utf-8")
        console.print(f"written: {output}", markup=False, soft_wrap=True)
    elif form == "text":
        for line in text.splitlines():
            style = "red" if line.startswith("refused:") else "bold" if line and line[0] != " " else ""
            console.print(line, style=style, markup=False, soft_wrap=True)
    else:
        sys.stdout.write(text)
    raise typer.Exit(1 if any(explanation.reasons for explanation in explanations) else 0)


def _properties(path: Path) -> Any:
    """The described device."""
    refuse = functools.partial(option_error, "--device-properties")
    if gpu_available():
        # With a GPU, cuDNN loads the modules that it builds for the described device into the driver.
        raise refuse(
            "a described device on a machine with a GPU", "a machine without a GPU; leave it out to plan for this GPU"
        )
    try:
        return cudnn.create_device_properties(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(str(error), "a file that can be read") from None
    except (CudnnError, CudnnLibraryError, cudnn.cudnnGraphNotSupportedError) as error:
        allowed = "what serialize() gave with this version of cuDNN, and a CUDA driver's library; see `cudnn info`"
        raise refuse(f"{path}, which cuDNN refuses ({error})", allowed) from None


def _example(name: str) -> Any:
    from cudnn.cli import demo

    return getattr(demo, EXAMPLES[name])(None, "cuda" if gpu_available() else "cpu").graph


def _load(target: str) -> list[Any]:
    path, _, name = target.rpartition(":") if ".py:" in target else (target, "", "")
    if not Path(path).is_file():
        raise option_error("FILE", repr(target), "a file that exists")
    graphs = _of_program(Path(path), name) if path.endswith(".py") else [_restored(Path(path))]
    if not graphs:
        allowed = "a program with a graph in a variable, or FILE.py:NAME with a function that returns one"
        raise option_error("FILE", f"{target!r}, without a graph", allowed)
    return graphs


def _restored(path: Path) -> Any:
    graph = cudnn.pygraph()
    try:
        graph.deserialize(path.read_bytes())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="FILE") from None
    return graph


def _of_program(path: Path, name: str) -> list[Any]:
    """The graphs in a program's variables, or in the variable or function result ``name``.

    If the program raises an error, the graphs in the frames of its traceback; without any the error is raised again.
    """
    from cudnn.pygraph.explain.dry_run import REFUSALS

    path = path.resolve()
    namespace: dict[str, Any] = {"__name__": path.stem if name else "__main__", "__file__": str(path)}
    saved = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(path)], [str(path.parent), *sys.path]
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
        if not name:
            return _graphs(namespace.values())
        if name not in namespace:
            raise option_error("FILE.py:NAME", repr(name), f"a name in {path.name}")
        value = namespace[name]
        return _graphs([value() if callable(value) and not _graphs([value]) else value])
    except REFUSALS as error:
        frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
        graphs = _graphs(value for local in reversed(frames) for value in local.values())
        if not graphs:
            raise
        where = f"{path.name} stopped: {type(error).__name__}: {error}"
        Console(stderr=True, highlight=False).print(where, markup=False, soft_wrap=True)
        return graphs[:1]
    finally:
        sys.argv, sys.path[:] = saved


def _graphs(values: Iterable[Any]) -> list[Any]:
    """The distinct graphs among values. Of a list or tuple, as ``cudnn.jit`` returns it, the first item counts."""
    graphs: dict[int, Any] = {}
    for value in values:
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, cudnn.Graph):
            value = value._described
        if isinstance(value, cudnn.pygraph):
            graphs[id(value)] = value
    return list(graphs.values())


def _explain(graph: Any, properties: Any) -> Any:
    """Builds the graph where it has no plan yet; a refusal becomes part of the explanation."""
    from cudnn.pygraph.explain.dry_run import REFUSALS, for_device

    if properties is not None:
        graph = for_device(graph, properties)
    if not graph.get_execution_plan_count():
        with suppress(*REFUSALS):  # explain() reports the error in more detail
            graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph.explain()
