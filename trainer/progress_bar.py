"""How far a long command is, on stderr: a bar or, where that is no terminal, a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINES = 10
"""Of a whole whose size is known; else a line has `A_LINE`."""
A_LINE = 100_000


@contextmanager
def bar(name: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A function that is told how much is done, and what else to show."""
    console, told = Console(stderr=True), 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(name, total=total)

        def advance(done: int, text: str = "") -> None:
            nonlocal told
            bars.update(task, completed=done, description=f"{name}  {text}")
            lines = done // A_LINE if total is None else LINES * done // total
            if not console.is_terminal and lines > told:
                told = lines
                print(f"{name}: {done}{f'/{total}' if total else ''}  {text}".rstrip(), file=sys.stderr, flush=True)

        yield advance
