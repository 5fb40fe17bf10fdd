"""Progress of a long command on stderr: a bar, or a line now and then if stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

MAX_LINES = 10
"""Lines printed if the total is known and stderr is no terminal."""
ITEMS_PER_LINE = 100_000
"""Items per printed line if the total is unknown."""


@contextmanager
def progress_bar(name: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Yield a function that takes the number of finished items and a text to show."""
    console, printed = Console(stderr=True), 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn()) if total else ()
    with Progress(*columns, *left, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(name, total=total)

        def advance(done: int, text: str = "") -> None:
            nonlocal printed
            bars.update(task, completed=done, description=f"{name}  {text}")
            lines = done // ITEMS_PER_LINE if total is None else MAX_LINES * done // total
            if not console.is_terminal and lines > printed:
                printed = lines
                print(f"{name}: {done}{f'/{total}' if total else ''}  {text}".rstrip(), file=sys.stderr, flush=True)

        yield advance
