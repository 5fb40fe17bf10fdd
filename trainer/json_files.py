"""JSON files and files of JSON rows, safe against a kill while they are written.

Invariants:
- `write_json` and `write_rows` replace a file as a whole or not at all.
- `append_rows` writes each row in one line. A kill leaves at most one torn line, the last; readers skip it and the next
  append overwrites it.
- `read_rows` holds one row at a time, since a file of episodes may have gigabytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any


class RecordError(ValueError):
    """A file or folder was not written by this version of the trainer, or is damaged."""


def write_json(path: Path, value: object) -> None:
    _replace(path, [json.dumps(value, indent=2), "\n"])


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object that `write_json` wrote; None if there is no file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def write_rows(path: Path, rows: Iterable[object]) -> None:
    _replace(path, (json_line(row) for row in rows))


def append_rows(path: Path, rows: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if size := file.seek(0, os.SEEK_END):
            with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            if end < size:
                file.truncate(end)
        file.writelines(json_line(row).encode() for row in rows)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a file; none if there is no file. Raises `RecordError` for a line that is no JSON."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                message = f"{path}, line {number}: expected a row of JSON, got {line[:80]!r}: {error}"
                raise RecordError(message) from error


def _replace(path: Path, texts: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(texts)
    part.replace(path)


def json_line(row: object) -> str:
    return json.dumps(row, separators=(",", ":"), default=_fields) + "\n"


def _fields(value: Any) -> Mapping[str, Any]:
    """Return a dataclass's fields without `asdict`'s deep copy; a type may return more from `row_fields`."""
    if hasattr(value, "row_fields"):
        return dict(value.row_fields())
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
