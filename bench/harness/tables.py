"""One table, printed on a terminal or written as Markdown.

A benchmark describes its result once, as a list of blocks: a block is a `Table` or a sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import table as rich_table
from rich.console import Console

STDERR = Console(stderr=True)
STDOUT = Console(width=None if sys.stdout.isatty() else 160)
"""A file or pipe has no width of its own; the default of 80 columns would break the cells of a table."""

Result = Mapping[str, Any]
"""The JSON object of one benchmark."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; the first column is left-aligned, the others are right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    """Heading above the table."""

    @classmethod
    def from_cells(cls, rows: Sequence[Mapping[str, str]], title: str = "") -> Table:
        """A table of at least one row. Each row has its cells by column, in the same order."""
        return cls(list(rows[0]), [list(row.values()) for row in rows], title)

    @classmethod
    def of_percentiles(cls, head: str, rows: Mapping[str, Mapping[str, float]], points: Sequence[str]) -> Table:
        """A table of two columns: the name of a row, and its percentiles in ms."""
        cells = [(name, percentile_list(row, *points)) for name, row in rows.items()]
        return cls((head, " / ".join(points) + " ms"), cells)


Block = Table | str


def show(blocks: Sequence[Block]) -> None:
    """Print blocks on the terminal."""
    for block in blocks:
        if isinstance(block, str):
            STDOUT.print(block, highlight=False, markup=False)
            continue
        table = rich_table.Table(
            title=block.title or None, box=None, header_style="bold", title_style="bold", title_justify="left"
        )
        for number, column in enumerate(block.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in block.rows:
            table.add_row(*(cell.replace("`", "") for cell in row))
        STDOUT.print(table)


def markdown(blocks: Sequence[Block]) -> str:
    """The blocks as Markdown, an empty line between them."""
    return "\n\n".join(block if isinstance(block, str) else _markdown_table(block) for block in blocks)


def _markdown_table(table: Table) -> str:
    lines = [f"{table.title}:", ""] if table.title else []
    lines += [f"| {' | '.join(table.columns)} |", f"|---|{'---:|' * (len(table.columns) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in table.rows)])


def number(value: float) -> str:
    """Whole from 100 up, else with one decimal."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def percentile_list(values_ms: Mapping[str, float], *names: str) -> str:
    """Several percentiles in one cell."""
    return " / ".join(number(values_ms[name]) for name in names)


def count_list(result: Result, names: Sequence[str]) -> str:
    """Several counts of a result in one sentence."""
    return ", ".join(f"{result[name]:,} {name}" for name in names)


def format_mean_sd(value: Mapping[str, float] | None) -> str:
    """A mean and its standard deviation over seeds; `-` if nothing was measured."""
    if value is None:
        return "-"
    mean, sd = value["mean"], value["sd"]
    digits = 0 if abs(mean) >= 100 or mean == sd == 0 else 3
    return f"{mean:,.{digits}f} ± {sd:,.{digits}f}"
