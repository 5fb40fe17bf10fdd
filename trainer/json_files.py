"""JSON files and files of JSON rows, safe against a kill while they are written.

Invariants:
- `write_json` and `write_rows` replace a file as a whole or not at all.
- `append_rows` writes each row in one line. A kill leaves at most one torn line, the last line of the file. Readers
  skip it, and the next append removes it.
- `read_rows` holds one row at a time, since a file of episodes may have gigabytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO


class RecordError(ValueError):
    """A file or folder was not written by this version of the trainer, or is damaged."""


def write_json(path: Path, value: object) -> None:
    _replace(path, [json.dumps(value, indent=2), "\n"])


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object that `write_json` has written. None if there is no file. Raises `RecordError` if the file does
    not contain an object."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise RecordError(f"{path}: expected an object in JSON: {error}") from error


def write_rows(path: Path, rows: Iterable[object]) -> None:
    _replace(path, (_line(row) for row in rows))


def append_rows(path: Path, rows: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        remove_torn_line(file)
        file.writelines(_line(row).encode() for row in rows)


def remove_torn_line(file: BinaryIO) -> None:
    """Truncate a file after its last complete line. The file must be open for reading and writing."""
    if file.seek(0, os.SEEK_END):  # an empty file cannot be mapped
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        file.truncate(end)


def complete_lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each complete line from byte `start` on; none if there is no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield start, line
            start += len(line)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a file; none if there is no file. Raises `RecordError` for a line that is no JSON."""
    for number, (_, line) in enumerate(complete_lines(path), 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            message = f"{path}, line {number}: expected a row of JSON, got {line[:80]!r}: {error}"
            raise RecordError(message) from error


def check_layout(folder: Path, version: object, expected: int) -> None:
    """Raise `RecordError` if the files of `folder` have another layout version than this trainer's."""
    if version != expected:
        raise RecordError(
            f"{folder}: expected layout_version {expected}, got {version!r}; read this folder with the version of the "
            "trainer that wrote it"
        )


def check_same_settings(
    folder: Path, mine: Mapping[str, Any], theirs: Mapping[str, Any], changeable: tuple[str, ...] = ()
) -> None:
    """Raise `RecordError` if a setting differs and its name matches none of the patterns in `changeable`. In a pattern,
    * stands for any text."""
    names = differing_settings(mine, theirs)
    if differing := [name for name in names if not any(fnmatchcase(name, pattern) for pattern in changeable)]:
        raise RecordError(
            f"{folder} was written with other settings ({', '.join(differing[:5])}); use the same settings to continue "
            "it, or another folder to start anew"
        )


def differing_settings(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the settings that differ."""
    for name in sorted(mine.keys() | theirs.keys()):
        left, right = mine.get(name), theirs.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from differing_settings(left, right, f"{prefix}{name}.")
        elif left != right:
            yield prefix + name


def _replace(path: Path, texts: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(texts)
    part.replace(path)


def _line(row: object) -> str:
    return json.dumps(row, separators=(",", ":"), default=_fields) + "\n"


def _fields(value: Any) -> Mapping[str, Any]:
    """Return the fields of a dataclass, without the deep copy of `asdict`. A class may define its own `row_fields`."""
    if hasattr(value, "row_fields"):
        return dict(value.row_fields())
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
