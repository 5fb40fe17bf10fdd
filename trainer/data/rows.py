"""Reads the rows of a file: `.jsonl`, `.json`, `.csv` or `.parquet`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import to_json

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class DataError(ValueError):
    """A source or a row that cannot be read. The message says what was expected and what came."""


def file_rows(file: Path) -> Iterator[Any]:
    """Yield the decoded rows of a file whose suffix is one of `FILE_SUFFIXES`. Raises `DataError`.

    A line that is not JSON, or that has unpaired surrogates, is yielded as bytes. A row of CSV is a mapping from the
    names in the first line to texts. If a row has more cells than names, the further cells are a list under the key
    None.
    """
    if not file.is_file():
        raise DataError(f"{file}: no such file")
    match file.suffix:
        case ".jsonl":
            with file.open("rb") as lines:
                yield from (_decode(line) for line in lines if line.strip())
        case ".json":
            rows = _decode(file.read_bytes())
            if not isinstance(rows, list):
                raise DataError(
                    f"{file}: expected an array of rows, got {type(rows).__name__}; a file of lines is .jsonl"
                )
            yield from rows
        case ".csv":
            yield from _csv_rows(file)
        case ".parquet":
            try:
                from pyarrow import ArrowInvalid, parquet
            except ModuleNotFoundError:
                raise DataError(f"{file}: a Parquet file needs pyarrow: pip install pyarrow") from None
            try:
                for batch in parquet.ParquetFile(file).iter_batches():
                    yield from batch.to_pylist()
            except ArrowInvalid as error:
                raise DataError(f"{file}: expected a Parquet file ({error})") from None


def _csv_rows(file: Path) -> Iterator[dict[str | None, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            yield from reader
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{file}: after line {reader.line_num}: expected CSV in UTF-8 ({error})") from None


def _decode(text: bytes) -> Any:
    try:
        row = json.loads(text)
        if b"\\u" in text:
            to_json(row)  # fails for unpaired surrogates, which no file of episodes can hold
        return row
    except ValueError:
        return text
