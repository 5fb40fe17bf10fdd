"""The episodes of a store as tables: one row per episode, and what share of the problems they solve."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from trainer.collection.store import COLUMNS, StoreReader
from trainer.recipe.pass_at_k import Attempt, pass_reports, pass_table
from trainer.runs.text_tables import format_number, table

SHOWN_COLUMNS = [name for name in COLUMNS if name not in ("shard", "offset", "length")]


def episode_report(reader: StoreReader, where: str, max_rows: int) -> tuple[dict[str, Any], list[Table]]:
    """Return the first episodes that satisfy `where`, and the measures over all of them: for JSON, and as tables.

    Raises `RecordError` for a condition that is no SQL.
    """
    rows = reader.query(", ".join(SHOWN_COLUMNS), where, limit=max_rows)
    correct_above = reader.settings.get("reward.correct_above", 0.0)
    reports = pass_reports(map(Attempt.of, reader.episodes(where)), correct_above)
    shown = table("problem…", *(name.replace("_", "\n") + ">" for name in SHOWN_COLUMNS[1:]))
    for row in rows:
        shown.add_row(*(value if isinstance(value, str) else format_number(value) for value in row))
    content = {
        "episodes": [dict(zip(SHOWN_COLUMNS, row, strict=True)) for row in rows],
        "reports": {name: asdict(report) for name, report in reports.items()},
    }
    return content, [shown, pass_table(reports, title="solved")]
