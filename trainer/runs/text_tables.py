"""Tables and numbers for the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeVar

from rich.table import Table

T = TypeVar("T")

SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 32

# Controls except tab and newline, lone surrogates, and characters that change the direction of writing.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class ShowError(ValueError):
    """The folder to show is not a run folder, or the HTML page of a run cannot be written."""


def table(*heads: str, title: str = "") -> Table:
    """Return an empty table. The last character of a head describes its column: > for numbers, and … for texts that may
    wrap."""
    empty = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim"
    )
    for head in heads:
        name = head.rstrip(">…")
        flags = head[len(name) :]
        justify: Literal["left", "right"] = "right" if ">" in flags else "left"
        empty.add_column(name, justify=justify, no_wrap="…" not in flags, overflow="fold")
    return empty


def sparkline(values: list[float]) -> str:
    """Return at most `SPARKLINE_WIDTH` characters that show the trend of values. The lowest bar is the smallest of the
    shown values, and the highest bar is the largest."""
    chosen = spread(values, SPARKLINE_WIDTH)
    low, high = min(chosen), max(chosen)
    return "".join(SPARKS[round((value - low) / ((high - low) or 1) * (len(SPARKS) - 1))] for value in chosen)


def spread(items: Sequence[T], max_items: int) -> list[T]:
    """Return at most `max_items` items at even distances, the first and the last included."""
    if len(items) <= max_items:
        return list(items)
    if max_items == 1:
        return [items[-1]]
    return [items[i * (len(items) - 1) // (max_items - 1)] for i in range(max_items)]


def escape_controls(text: str) -> str:
    """Return `text` with visible codes in place of the characters that a terminal might obey."""
    return _UNSAFE.sub(lambda match: f"⟨{ord(match[0]):02x}⟩", text)


def format_number(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"
