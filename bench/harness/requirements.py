"""Bounds that a benchmark result must meet: name, bound, measured value, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.harness.tables import Table

Requirement = Mapping[str, Any]
"""The keys are `name`, `bound` (such as "≤ 0.05"), `measured` and `holds`."""


def at_most(name: str, bound: float, measured: float) -> Requirement:
    """A value that may not exceed `bound`."""
    return {"name": name, "bound": f"≤ {bound:g}", "measured": measured, "holds": measured <= bound}


def at_least(name: str, bound: float, measured: float) -> Requirement:
    """A value that must reach `bound`."""
    return {"name": name, "bound": f"≥ {bound:g}", "measured": measured, "holds": measured >= bound}


def none_of(counts: Mapping[str, int]) -> list[Requirement]:
    """One requirement per count, all of which must be 0."""
    return [at_most(name.replace("_", " "), 0, count) for name, count in counts.items()]


def hold(requirements: Iterable[Requirement]) -> bool:
    """Whether all requirements hold."""
    return all(requirement["holds"] for requirement in requirements)


def unmet(result: Mapping[str, Any]) -> list[str]:
    """The requirements of a result that do not hold, as at most one sentence."""
    rows = [row for row in result.get("requirements", ()) if not row["holds"]]
    parts = [f"{row['name']} is {_measured(row)}, expected {row['bound']}" for row in rows]
    return [f"Not met: {'; '.join(parts)}."] if parts else []


def requirement_table(requirements: Sequence[Requirement], title: str = "") -> Table:
    """All requirements as a table."""
    rows = [(row["name"], row["bound"], _measured(row), "yes" if row["holds"] else "**no**") for row in requirements]
    return Table(("requirement", "bound", "measured", "holds"), rows, title)


def _measured(row: Requirement) -> str:
    return f"{row['measured']:,.0f}" if row["measured"] >= 100 else f"{row['measured']:.3g}"
