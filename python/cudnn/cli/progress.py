"""Progress of a long command on standard error: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import contextlib
import datetime
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

PERIOD = 10.0  # seconds between lines without a terminal
_REFRESH = 0.5


class Steps:
    """Progress of a command: ``advance`` counts completed steps; ``doing`` names the current one."""

    def __init__(self, doing: str, total: float | None) -> None:
        self.doing, self.total, self.done = doing, total, 0.0

    def advance(self, doing: str = "", by: float = 1.0) -> None:
        self.done += by
        self.doing = doing or self.doing


@contextlib.contextmanager
def shown(
    doing: str, total: float | None = None, *, quiet: bool = False, refresh: Callable[[Steps], None] | None = None
) -> Iterator[Steps]:
    """Shows the current step and, with a ``total``, the completed fraction while the block runs.

    Args:
        doing: Name of the first step.
        total: Number of steps; without it the bar only moves.
        quiet: Show nothing.
        refresh: Called periodically to update the steps, for work that cannot update them itself.
    """
    steps = Steps(doing, total)
    if quiet:
        yield steps
        return
    console, finished = Console(stderr=True, highlight=False), threading.Event()
    with contextlib.ExitStack() as stack:
        update = _bar(steps, console, stack) if console.is_terminal else _line_printer(steps, console)

        def watch() -> None:
            while not finished.wait(_REFRESH if console.is_terminal else PERIOD):
                if refresh is not None:
                    refresh(steps)
                update()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(finished.set)
        yield steps


def _bar(steps: Steps, console: Console, stack: contextlib.ExitStack) -> Callable[[], None]:
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    # Output of the command is printed above the bar, unless it is redirected.
    bar = stack.enter_context(Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()))
    task = bar.add_task(steps.doing, total=steps.total)
    return lambda: bar.update(task, description=steps.doing, completed=steps.done)


def _line_printer(steps: Steps, console: Console) -> Callable[[], None]:
    start = time.monotonic()

    def print_line() -> None:
        elapsed = datetime.timedelta(seconds=round(time.monotonic() - start))
        progress = "" if steps.total is None else f"{steps.done:.0f} of {steps.total:.0f}, "
        console.print(f"{elapsed}  {progress}{steps.doing}", markup=False, soft_wrap=True)

    return print_line
