"""Writes the tables of docs/containers.md from rows.json, which has a row for each set-up and one for each image.

python -m tests.containers.report --check     # fail if the tables are not what the rows say
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.machines.report import NOT_RUN, Row, calls_cell, problems, tests_cell

ROWS = Path(__file__).with_name("rows.json")
PAGE = Path(__file__).parents[2] / "docs" / "containers.md"
BLOCK = re.compile(r"(<!-- containers -->\n).*?(<!-- /containers -->)", re.DOTALL)
SET_UPS, IMAGES = "set_ups", "images"
COLUMNS = ("set-up", "level", "calls", "escape", "server", "Linux", "engine", "date")


def main(argv: list[str]) -> int:
    old = PAGE.read_text()
    new = BLOCK.sub(lambda match: match[1] + tables(read_rows()) + match[2], old)
    if argv != ["--check"]:
        PAGE.write_text(new)
    elif new != old:
        print(
            f"report: {PAGE.name} is not what {ROWS.name} says; run python -m tests.containers.report", file=sys.stderr
        )
        return 1
    return 0


def read_rows() -> dict[str, dict[str, Row]]:
    return dict(json.loads(ROWS.read_text())) if ROWS.exists() else {IMAGES: {}, SET_UPS: {}}


def write_rows(kind: str, rows: Mapping[str, Row]) -> None:
    """Replace rows of set-ups or images. Parts of a set-up that were not run this time keep their results if the kernel
    and the engine are the same."""
    all_rows = read_rows()
    for name, row in rows.items():
        old = {key: part for key, part in all_rows[kind].get(name, {}).items() if key != "problem"}
        is_same = all(old.get(key) == row.get(key) for key in ("kernel", "engine"))
        all_rows[kind][name] = {**old, **row} if is_same else row
    ROWS.write_text(json.dumps(all_rows, indent=1) + "\n")


def tables(rows: Mapping[str, Mapping[str, Row]]) -> str:
    set_ups = [["set-up", *COLUMNS[1:]], *map(cells, rows[SET_UPS].values())]
    images = [["image", "size", "what is in it", "date"]]
    for name, image in rows[IMAGES].items():
        directories = ", ".join(f"`{path}` {mb} MB" for path, mb in image["directories_mb"].items())
        rest = image["mb"] - sum(image["directories_mb"].values())
        images.append(
            [name, f"{image['mb']} MB", f"{directories}, the base image and all else {rest} MB", image["date"]]
        )
    found = [f"- {name}: {problem}\n" for name, row in rows[SET_UPS].items() for problem in problems(row)]
    holds = "What does not hold:\n\n" + "".join(found) if found else "All of it holds.\n"
    return f"{_table(set_ups)}\n{holds}\n{_table(images)}"


def cells(row: Row) -> list[Any]:
    return [
        row["set_up"],
        row.get("doctor", {}).get("level") or NOT_RUN,
        calls_cell(row.get("mix")),
        tests_cell(row.get("escape")),
        tests_cell(row.get("server")),
        row["kernel"],
        row["engine"],
        row["date"],
    ]


def _table(rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(row) + " |\n" for row in rows]
    return "".join([lines[0], "|---" * len(rows[0]) + "|\n", *lines[1:]])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
