"""How far a long command is: a bar on a terminal, else a line now and then. On standard error, which nobody parses."""

from __future__ import annotations

import contextlib
import datetime
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

PERIOD = 10.0  # seconds between two lines where there is no terminal
_REFRESH = 0.5


class Steps:
    """``advance`` counts what is done; ``doing`` says what comes next."""

    def __init__(self, doing: str, total: float | None) -> None:
        self.doing, self.total, self.done = doing, total, 0.0

    def advance(self, doing: str = "", by: float = 1.0) -> None:
        self.done += by
        self.doing = doing or self.doing


@contextlib.contextmanager
def shown(
    doing: str, total: float | None = None, *, quiet: bool = False, look: Callable[[Steps], None] | None = None
) -> Iterator[Steps]:
    """Shows within the block what is being done and, with a ``total``, how much of it has been.

    Args:
        doing: What is being done, until a step says otherwise.
        total: The number of steps; without it the bar only moves.
        quiet: Show nothing.
        look: Is called now and then, to bring the steps up to date where the work itself cannot.
    """
    steps = Steps(doing, total)
    if quiet:
        yield steps
        return
    console, over = Console(stderr=True, highlight=False), threading.Event()
    with contextlib.ExitStack() as stack:
        tell = _bar(steps, console, stack) if console.is_terminal else _lines(steps, console)

        def watch() -> None:
            while not over.wait(_REFRESH if console.is_terminal else PERIOD):
                if look is not None:
                    look(steps)
                tell()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        yield steps


def _bar(steps: Steps, console: Console, stack: contextlib.ExitStack) -> Callable[[], None]:
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    # What the command prints meanwhile goes above the bar, unless it is piped elsewhere.
    bar = stack.enter_context(Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()))
    task = bar.add_task(steps.doing, total=steps.total)
    return lambda: bar.update(task, description=steps.doing, completed=steps.done)


def _lines(steps: Steps, console: Console) -> Callable[[], None]:
    start = time.monotonic()

    def tell() -> None:
        elapsed = datetime.timedelta(seconds=round(time.monotonic() - start))
        share = "" if steps.total is None else f"{steps.done:.0f} of {steps.total:.0f}, "
        console.print(f"{elapsed}  {share}{steps.doing}", markup=False, soft_wrap=True)

    return tell
