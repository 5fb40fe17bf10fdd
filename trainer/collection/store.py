"""A durable store of episodes, keyed by problem and sample.

    manifest.json        layout version and the settings of the collection
    episodes/N.jsonl     shards: one row per finished episode, only appended
    turns/N.jsonl        journal: rows of unfinished episodes; a row has what an episode has gained since its last row
    failures.jsonl       one row per failed try of an episode
    index.sqlite3        where each episode is, and what queries need; rebuilt from the shards if it is missing

Invariants:
- One process writes (a lock file). Any number of processes may read at the same time.
- `EpisodeStore.write` returns after fsync. From then on an episode counts, and no second episode is ever stored under
  the same key.
- A kill at any moment leaves at most one torn row in a file, its last one. The next writer removes the torn row. A
  damaged row anywhere else is a `RecordError` that names the file and the position.
- The memory of writer and reader does not grow with the number of stored episodes.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from trainer.episodes.episode import Episode, FailureKind, StopReason
from trainer.json_files import (
    RecordError,
    check_layout,
    check_same_settings,
    complete_lines,
    read_json,
    read_rows,
    remove_torn_line,
    write_json,
    write_rows,
)

LAYOUT_VERSION = 1
SHARD_BYTES = 256 << 20
"""If a shard has this size in bytes or more, the next episode goes into a new shard."""
JOURNAL_BYTES = 64 << 20
"""If a file of the journal has this size in bytes or more, the next turn goes into a new file. Files without unfinished
episodes are deleted."""
LOCK_TIMEOUT_S = 60.0
"""Seconds that a process waits for the index while another process uses it."""
PAGE_ROWS = 1000
"""Rows that a reader takes from the index at once. The reader parses the episodes of these rows afterwards, without a
lock on the index."""

COLUMNS = (
    "problem", "sample", "shard", "offset", "length",
    "reward", "stop_reason", "turns", "tool_calls", "failed_tool_calls", "sampled_tokens", "duration_s", "has_logprobs",
)  # fmt: skip
"""The columns that a query may name."""

Row = TypeVar("Row")


class Key(NamedTuple):
    """One attempt at a problem. At most one episode is stored for it."""

    problem: str
    sample: int

    @classmethod
    def of(cls, episode: Episode) -> Key:
        return cls(episode.problem.id, episode.sample)


BEFORE_ALL = Key("", -1)
"""A key that is less than the key of every episode."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A try of an episode that ended without an episode."""

    key: Key
    kind: FailureKind
    error: str


@dataclass(frozen=True, slots=True)
class Growth:
    """The part of an unfinished episode from `start_token` on (`Episode.tail`). If `start_token` is 0, earlier rows of
    the episode no longer count."""

    start_token: int
    tail: Episode


_EPISODE, _GROWTH, _FAILURE = TypeAdapter(Episode), TypeAdapter(Growth), TypeAdapter(Failure)


class EpisodeStore:
    """The writer of the store in the directory `path`. It is a context manager.

    `settings` are those of the collection. Raises `RecordError` if the directory has a store of other settings or of
    another layout, if a file is damaged, or if another process writes.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.failures: Counter[tuple[Key, FailureKind]] = Counter()
        """Failed tries of the samples that have no episode."""
        self._unfinished: dict[Key, Episode] = {}
        self._journal_keys: dict[int, set[Key]] = {}
        """The unfinished episodes that have rows in each journal file."""
        self._is_broken = False
        path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            lock = stack.enter_context((path / "lock").open("ab"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RecordError(
                    f"{path}: another process writes this store; stop it, or use another directory"
                ) from None
            _bind_manifest(path / "manifest.json", json.loads(json.dumps(settings)))
            self._remove_torn_rows()
            self._index = self._open_index()
            stack.callback(self._index.close)
            self._read_journal()
            self._read_failures()
            self._shards = stack.enter_context(closing(_Appender(path / "episodes", SHARD_BYTES)))
            self._journal = stack.enter_context(closing(_Appender(path / "turns", JOURNAL_BYTES)))
            self._failed = stack.enter_context((path / "failures.jsonl").open("ab"))
            self._files = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def __contains__(self, key: Key) -> bool:
        """Whether the store has the episode of `key`."""
        return bool(self._index.execute("SELECT 1 FROM episodes WHERE problem = ? AND sample = ?", key).fetchone())

    def take_unfinished(self, key: Key) -> Episode | None:
        """Return the episode that an earlier writer left unfinished, up to its last turn in the journal; else None."""
        return self._unfinished.pop(key, None)

    def write(
        self, episodes: Sequence[Episode] = (), growth: Sequence[Growth] = (), failures: Sequence[Failure] = ()
    ) -> None:
        """Write and fsync. An episode is dropped if another one is already stored under its key.

        After an `OSError`, such as a full disk, the store accepts nothing more: a new writer has to repair it.
        """
        if self._is_broken:
            raise OSError(f"{self.path}: an earlier write failed; open the store again")
        self._is_broken = True
        self._write(episodes, growth, failures)
        self._is_broken = False

    def _write(self, episodes: Sequence[Episode], growth: Sequence[Growth], failures: Sequence[Failure]) -> None:
        accepted: dict[Key, Episode] = {}
        for episode in episodes:
            if (key := Key.of(episode)) not in self:
                accepted.setdefault(key, episode)
        for item in growth:
            number, _, _ = self._journal.append(_GROWTH.dump_json(item))
            self._journal_keys.setdefault(number, set()).add(Key.of(item.tail))
        for failure in failures:
            self._failed.write(_FAILURE.dump_json(failure) + b"\n")
            self.failures[failure.key, failure.kind] += 1
        rows = [
            (*key, *self._shards.append(_EPISODE.dump_json(episode)), *_summary(episode))
            for key, episode in accepted.items()
        ]
        self._journal.sync()
        if failures:
            self._failed.flush()
            os.fsync(self._failed.fileno())
        self._shards.sync()
        _insert(self._index, rows)
        for key in accepted:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        """Drop what was kept for an episode while it was unfinished. Delete the journal files that no unfinished
        episode needs."""
        for kind in FailureKind:
            self.failures.pop((key, kind), None)
        for number, keys in list(self._journal_keys.items()):
            keys.discard(key)
            if not keys and number != self._journal.number:
                del self._journal_keys[number]
                self._journal.path(number).unlink()

    def _remove_torn_rows(self) -> None:
        for path in (*self.path.glob("*/*.jsonl"), *self.path.glob("failures.jsonl")):
            with path.open("ab+") as file:
                remove_torn_line(file)

    def _open_index(self) -> sqlite3.Connection:
        """Open the index and add the episodes that it lacks. If the index contradicts the shards, build it anew."""
        index_path = self.path / "index.sqlite3"
        for is_last_try in (False, True):
            index = sqlite3.connect(index_path, timeout=LOCK_TIMEOUT_S, check_same_thread=False)
            try:
                self._update_index(index)
                return index
            except BaseException as error:
                index.close()
                if is_last_try or not isinstance(error, sqlite3.DatabaseError | _IndexAhead):
                    raise
                index_path.unlink()
        raise AssertionError

    def _update_index(self, index: sqlite3.Connection) -> None:
        index.execute("PRAGMA synchronous = OFF")  # only the shards must be durable: the index is rebuilt from them
        columns = ", ".join(COLUMNS)
        index.execute(f"CREATE TABLE IF NOT EXISTS episodes ({columns}, PRIMARY KEY (problem, sample)) WITHOUT ROWID")
        index.execute(f"SELECT {columns} FROM episodes LIMIT 0")  # fails for an index of other columns
        for number, path in _numbered_files(self.path / "episodes"):
            (end,) = index.execute("SELECT max(offset + length) FROM episodes WHERE shard = ?", (number,)).fetchone()
            if (end or 0) > path.stat().st_size:
                raise _IndexAhead
            _insert(
                index,
                (
                    (*Key.of(episode), number, offset, length, *_summary(episode))
                    for offset, length, episode in _rows(path, _EPISODE, end or 0)
                ),
            )

    def _read_journal(self) -> None:
        """Rebuild the unfinished episodes. Delete the journal files that have none of them."""
        for number, path in _numbered_files(self.path / "turns"):
            keys = self._journal_keys.setdefault(number, set())
            for offset, _, item in _rows(path, _GROWTH):
                key = Key.of(item.tail)
                if key in self:
                    continue
                if item.start_token == 0:
                    self._unfinished[key] = item.tail
                elif key in self._unfinished and item.start_token == self._unfinished[key].response_length:
                    self._unfinished[key] = self._unfinished[key].with_tail(item.tail)
                else:
                    raise RecordError(
                        f"{path}, byte {offset}: token {item.start_token} of {key} does not follow the rows before it"
                    )
                keys.add(key)
            if not keys:
                del self._journal_keys[number]
                path.unlink()

    def _read_failures(self) -> None:
        for _, _, failure in _rows(self.path / "failures.jsonl", _FAILURE):
            if failure.key not in self:
                self.failures[failure.key, failure.kind] += 1


class StoreReader:
    """Reads a store, also while another process writes it. Raises `RecordError` if there is none.

    It is a context manager.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: dict[str, Any] = _read_manifest(path / "manifest.json")["settings"]
        """The settings of the collection."""
        index_path = path / "index.sqlite3"
        try:
            self._index = sqlite3.connect(
                f"file:{quote(str(index_path))}?mode=ro", uri=True, timeout=LOCK_TIMEOUT_S, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise RecordError(f"{index_path}: {error}; `rstar-train collect` builds it from the episodes") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._index.close()

    def query(
        self,
        columns: str = "*",
        where: str = "1",
        parameters: Sequence[object] = (),
        *,
        after: Key = BEFORE_ALL,
        limit: int = -1,
    ) -> list[tuple[Any, ...]]:
        """Return the rows of the index whose keys are greater than `after`, in the order of problem and sample. If
        `limit` is not negative, return at most `limit` rows. `where` is a SQL condition on `COLUMNS`."""
        where_behind = f"({where}) AND (problem, sample) > (?, ?)"
        statement = f"SELECT {columns} FROM episodes WHERE {where_behind} ORDER BY problem, sample LIMIT {limit}"
        try:
            return self._index.execute(statement, (*parameters, *after)).fetchall()
        except sqlite3.Error as error:
            raise RecordError(f"{where!r}: {error}; expected a SQL condition on {', '.join(COLUMNS)}") from error

    def episodes(self, where: str = "1", parameters: Sequence[object] = ()) -> Iterator[Episode]:
        """Yield the episodes that `query` selects."""
        columns, last = "problem, sample, shard, offset, length", BEFORE_ALL
        while page := self.query(columns, where, parameters, after=last, limit=PAGE_ROWS):
            last = Key(*page[-1][:2])
            with ExitStack() as stack:
                shards = {
                    number: stack.enter_context(path.open("rb"))
                    for number, path in _numbered_files(self.path / "episodes")
                }
                for _, _, number, offset, length in page:
                    shards[number].seek(offset)
                    yield _EPISODE.validate_json(shards[number].read(length))


def remove_episodes(path: Path, stop_reason: StopReason) -> None:
    """Remove the episodes with this stop reason from the store at `path`, so that they are collected again. The caller
    makes sure that no process uses the store."""
    files = (*path.glob("episodes/*.jsonl"), *path.glob("turns/*.jsonl"))
    rows = (_episode_in(row) for file in files for row in read_rows(file))
    removed = {_key_in(episode) for episode in rows if episode["stop_reason"] == stop_reason}
    if not removed:
        return
    for file in files:
        write_rows(file, (row for row in read_rows(file) if _key_in(_episode_in(row)) not in removed))
    (path / "index.sqlite3").unlink(missing_ok=True)


def _episode_in(row: Mapping[str, Any]) -> Mapping[str, Any]:
    episode: Mapping[str, Any] = row.get("tail", row)  # a row of the journal is a `Growth`
    return episode


def _key_in(episode: Mapping[str, Any]) -> Key:
    return Key(episode["problem"]["id"], episode["sample"])


class _IndexAhead(Exception):
    """The index has an episode that no shard has. This happens if the machine loses power before the shard is
    written."""


class _Appender:
    """Appends rows to numbered files in a directory. Once a file has `max_bytes`, the next row goes into a new file."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        directory.mkdir(exist_ok=True)
        self._directory, self._max_bytes = directory, max_bytes
        self.number = max((number for number, _ in _numbered_files(directory)), default=1)
        self._open()

    def close(self) -> None:
        self._file.close()

    def path(self, number: int) -> Path:
        return self._directory / f"{number:06}.jsonl"

    def append(self, row: bytes) -> tuple[int, int, int]:
        """Return the file's number, the row's offset and its length in bytes."""
        if self._file.tell() >= self._max_bytes:
            self.sync()
            self._file.close()
            self.number += 1
            self._open()
        offset = self._file.tell()
        length = self._file.write(row + b"\n")
        self._is_synced = False
        return self.number, offset, length

    def sync(self) -> None:
        if not self._is_synced:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._is_synced = True

    def _open(self) -> None:
        self._file = self.path(self.number).open("ab")
        self._is_synced = True
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)  # otherwise a power failure could lose the new file's name
        finally:
            os.close(directory)


def _numbered_files(directory: Path) -> list[tuple[int, Path]]:
    return [(int(path.stem), path) for path in sorted(directory.glob("*.jsonl"))]


def _rows(path: Path, adapter: TypeAdapter[Row], start: int = 0) -> Iterator[tuple[int, int, Row]]:
    """Yield offset, length in bytes and content of each row from byte `start` on."""
    for offset, line in complete_lines(path, start):
        try:
            yield offset, len(line), adapter.validate_json(line)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise RecordError(f"{path}, byte {offset}: expected a row of JSON, got {line[:80]!r}: {reason}") from error


def _bind_manifest(path: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a new store; check those of an existing one."""
    if not path.exists():
        write_json(path, {"layout_version": LAYOUT_VERSION, "settings": settings})
        return
    check_same_settings(path.parent, settings, _read_manifest(path)["settings"])


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path)
    if manifest is None:
        raise RecordError(f"{path.parent}: expected a store of episodes, which has a manifest.json")
    check_layout(path.parent, manifest.get("layout_version"), LAYOUT_VERSION)
    return manifest


def _summary(episode: Episode) -> tuple[Any, ...]:
    """Return the values of the columns from `reward` on."""
    return (
        episode.reward, episode.stop_reason, len(episode.turns), episode.num_tool_calls, episode.num_failed_tool_calls,
        episode.sampled_tokens, episode.duration_s, episode.known_logprobs is not None,
    )  # fmt: skip


def _insert(index: sqlite3.Connection, rows: Iterable[tuple[Any, ...]]) -> None:
    marks = ", ".join("?" * len(COLUMNS))
    with index:
        index.executemany(f"INSERT INTO episodes ({', '.join(COLUMNS)}) VALUES ({marks})", rows)
