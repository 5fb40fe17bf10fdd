"""Medians over rounds. Every round measures each system once, so that other load on the machine affects all systems
equally."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Row = TypeVar("Row")


def median_of_ratios(ours: Sequence[Row], others: Sequence[Row], ratio: Callable[[Row, Row], float]) -> float:
    """The median over rounds of each round's own ratio."""
    return statistics.median(ratio(a, b) for a, b in zip(ours, others, strict=True))


def median_of_rows(rows: Sequence[Mapping[str, Any]], digits: int = 4) -> dict[str, Any]:
    """The median of each field over rounds, in nested dictionaries too."""
    return {
        name: median_of_rows([row[name] for row in rows], digits)
        if isinstance(value, Mapping)
        else round(statistics.median(row[name] for row in rows), digits)
        for name, value in rows[0].items()
    }


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The names in an order that starts with another one in each round."""
    turn %= len(names)
    return [*names[turn:], *names[:turn]]
