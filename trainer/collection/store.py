"""A durable store of episodes, keyed by task and attempt.

    manifest.json        layout version and the settings of the collection
    episodes/N.jsonl     shards: one row per finished episode, only appended
    turns/N.jsonl        journal: one row per write of an unfinished episode, with all that it has gained since the last
    failures.jsonl       one row per failed try of an episode
    index.sqlite3        where each episode is, and what queries need; rebuilt from the shards if it is missing

Invariants:
- One process writes (a lock file). Any number of processes may read at the same time.
- `EpisodeStore.write` returns after fsync. An episode counts from then on, and no second episode is ever stored under
  its key.
- A kill at any moment leaves at most one torn row, at the end of a file. The next writer removes it. A damaged row
  anywhere else is a `RecordError` that names the file and the position.
- The memory of writer and reader does not grow with the number of stored episodes.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainer.episodes.episode import Episode
from trainer.episodes.records import extend_episode, growth_row, header_row, new_episode
from trainer.json_files import RecordError, json_line, read_json, write_json

LAYOUT_VERSION = 1
SHARD_BYTES = 256 << 20
"""Size in bytes from which the next episode goes into a new shard."""
JOURNAL_BYTES = 64 << 20
"""Size in bytes from which the next turn goes into a new file. Files without unfinished episodes are deleted."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS episodes (
    task TEXT, attempt INTEGER, shard INTEGER, offset INTEGER, length INTEGER,
    reward REAL, stop_reason TEXT, turns INTEGER, tool_calls INTEGER, failed_tool_calls INTEGER,
    sampled_tokens INTEGER, duration_s REAL,
    PRIMARY KEY (task, attempt)
) WITHOUT ROWID
"""
_LOCATION_COLUMNS = ("task", "attempt", "shard", "offset", "length")
_EPISODE_COLUMNS = ("reward", "stop_reason", "turns", "tool_calls", "failed_tool_calls", "sampled_tokens", "duration_s")
COLUMNS = (*_LOCATION_COLUMNS, *_EPISODE_COLUMNS)
"""The columns that a query may name."""


class Key(NamedTuple):
    """One attempt at one task. At most one episode is stored for it."""

    task: str
    attempt: int

    @classmethod
    def of(cls, episode: Episode) -> Key:
        return cls(episode.problem.id, episode.sample)


class FailureKind(StrEnum):
    """What failed, since each kind has its own budget."""

    INFRASTRUCTURE = "infrastructure"
    """A node, an actor, an engine or the sandbox."""
    TASK = "task"
    """The task's environment raised an exception, exceeded its deadline or answered differently on replay."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A try of an episode that ended without an episode."""

    key: Key
    kind: FailureKind
    error: str


@dataclass(frozen=True, slots=True)
class Growth:
    """What an unfinished episode has gained since its last row in the journal. Both starts are 0 for its first row."""

    key: Key
    row: Mapping[str, Any]

    @classmethod
    def of(cls, episode: Episode, start_token: int, start_turn: int) -> Growth:
        header = {} if start_token or start_turn else header_row(episode)
        return cls(Key.of(episode), header | growth_row(episode, start_token, start_turn))


class EpisodeStore:
    """The writer of the store in the directory `path`. It is a context manager.

    `settings` are those of the collection. Raises `RecordError` if the directory has a store of other settings or of
    another layout, if a file is damaged, or if another process writes.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.removed_rows = 0
        """Torn rows that this writer has found and removed."""
        self.failures: Counter[tuple[Key, FailureKind]] = Counter()
        """Failed tries of the attempts that have no episode."""
        path.mkdir(parents=True, exist_ok=True)
        self._lock = (path / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise RecordError(f"{path}: another process writes this store; stop it, or use another directory") from None
        try:
            _bind_manifest(path / "manifest.json", json.loads(json.dumps(settings)))
            self._index = self._open_index()
            self._unfinished: dict[Key, Episode] = {}
            self._journal_keys: dict[int, set[Key]] = {}
            """The unfinished episodes that have rows in each journal file."""
            self._read_journal()
            self._read_failures()
        except BaseException:
            self._lock.close()
            raise
        self._shards = _Appender(path / "episodes", SHARD_BYTES)
        self._journal = _Appender(path / "turns", JOURNAL_BYTES)
        self._failed = (path / "failures.jsonl").open("ab")
        self._is_broken = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in (self._shards, self._journal, self._failed, self._index, self._lock):
            file.close()

    def __contains__(self, key: Key) -> bool:
        """Whether the store has the episode of `key`."""
        return bool(self._index.execute("SELECT 1 FROM episodes WHERE task = ? AND attempt = ?", key).fetchone())

    def take_unfinished(self, key: Key) -> Episode | None:
        """Return the episode that an earlier writer left unfinished, up to its last turn in the journal; else None."""
        return self._unfinished.pop(key, None)

    def write(
        self, episodes: Sequence[Episode] = (), growth: Sequence[Growth] = (), failures: Sequence[Failure] = ()
    ) -> list[bool]:
        """Write and fsync. Return for each episode whether it was stored; False if its key has one already.

        After an `OSError`, such as a full disk, the store accepts nothing more: a new writer has to repair it.
        """
        if self._is_broken:
            raise OSError(f"{self.path}: an earlier write failed; open the store again")
        self._is_broken = True
        is_stored = self._write(episodes, growth, failures)
        self._is_broken = False
        return is_stored

    def _write(self, episodes: Sequence[Episode], growth: Sequence[Growth], failures: Sequence[Failure]) -> list[bool]:
        accepted: dict[Key, Episode] = {}
        is_stored = []
        for episode in episodes:
            key = Key.of(episode)
            is_stored.append(key not in accepted and key not in self)
            if is_stored[-1]:
                accepted[key] = episode
        for item in growth:
            number, _, _ = self._journal.append({"task": item.key.task, "attempt": item.key.attempt, **item.row})
            self._journal_keys.setdefault(number, set()).add(item.key)
        for failure in failures:
            row = {"task": failure.key.task, "attempt": failure.key.attempt, "kind": failure.kind}
            self._failed.write(json_line({**row, "error": failure.error}).encode())
            self.failures[failure.key, failure.kind] += 1
        rows = [
            (*key, *self._shards.append(header_row(episode) | growth_row(episode)), *_summary(episode))
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
        return is_stored

    def _forget(self, key: Key) -> None:
        """Drop what was kept for an unfinished episode, and the journal files that no unfinished episode needs."""
        for kind in FailureKind:
            self.failures.pop((key, kind), None)
        for number, keys in list(self._journal_keys.items()):
            keys.discard(key)
            if not keys and number != self._journal.number:
                del self._journal_keys[number]
                self._journal.path(number).unlink()

    def _open_index(self) -> sqlite3.Connection:
        """Open the index and add the episodes that it lacks. An index that contradicts the shards is built anew."""
        index_path = self.path / "index.sqlite3"
        try:
            return self._update_index(sqlite3.connect(index_path, check_same_thread=False))
        except (sqlite3.DatabaseError, _IndexAhead):
            index_path.unlink()
            return self._update_index(sqlite3.connect(index_path, check_same_thread=False))

    def _update_index(self, index: sqlite3.Connection) -> sqlite3.Connection:
        index.execute("PRAGMA synchronous = OFF")  # the shards are what must be durable
        index.execute(_SCHEMA)
        for number, path in _numbered_files(self.path / "episodes"):
            (end,) = index.execute("SELECT max(offset + length) FROM episodes WHERE shard = ?", (number,)).fetchone()
            if (end or 0) > path.stat().st_size:
                index.close()
                raise _IndexAhead
            for offset, length, row in self._repaired_rows(path, end or 0):
                episode = _episode(row)
                _insert(index, [(*Key.of(episode), number, offset, length, *_summary(episode))])
        return index

    def _read_journal(self) -> None:
        """Rebuild the unfinished episodes, and delete the journal files that have none."""
        for number, path in _numbered_files(self.path / "turns"):
            keys = self._journal_keys.setdefault(number, set())
            for offset, _, row in self._repaired_rows(path):
                key = Key(row["task"], row["attempt"])
                if key in self:
                    continue
                if "problem" in row:
                    self._unfinished[key] = new_episode(row)
                try:
                    extend_episode(self._unfinished[key], row)
                except (KeyError, ValueError) as error:
                    raise RecordError(f"{path}, byte {offset}: expected the next turn of {key}: {error}") from error
                keys.add(key)
            if not keys:
                del self._journal_keys[number]
                path.unlink()

    def _read_failures(self) -> None:
        for _, _, row in self._repaired_rows(self.path / "failures.jsonl"):
            key = Key(row["task"], row["attempt"])
            if key not in self:
                self.failures[key, FailureKind(row["kind"])] += 1

    def _repaired_rows(self, path: Path, start: int = 0) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield offset, length and content of each row from byte `start` on; remove a torn last row."""
        if not path.exists():
            return
        with path.open("rb+") as file:
            file.seek(start)
            offset = start
            for line in file:
                try:
                    row = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    row = None
                if row is None:
                    if file.read(1):
                        raise RecordError(f"{path}, byte {offset}: expected a row of JSON, got {line[:80]!r}")
                    file.truncate(offset)
                    self.removed_rows += 1
                    return
                yield offset, len(line), row
                offset += len(line)


class StoreReader:
    """Reads a store, also while another process writes it. Raises `RecordError` if there is none."""

    def __init__(self, path: Path) -> None:
        _check_layout(path / "manifest.json", read_json(path / "manifest.json"))
        self.path = path
        self._index = sqlite3.connect(f"file:{path / 'index.sqlite3'}?mode=ro", uri=True, timeout=30)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the collection."""
        return dict((read_json(self.path / "manifest.json") or {})["settings"])

    def query(
        self, columns: str = "*", where: str = "1", parameters: Sequence[object] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """Yield rows of the index in the order of task and attempt. `where` is a SQL condition on `COLUMNS`."""
        try:
            yield from self._index.execute(
                f"SELECT {columns} FROM episodes WHERE {where} ORDER BY task, attempt", parameters
            )
        except sqlite3.OperationalError as error:
            raise RecordError(f"{where!r}: {error}; expected a SQL condition on {', '.join(COLUMNS)}") from error

    def episodes(self, where: str = "1", parameters: Sequence[object] = ()) -> Iterator[Episode]:
        """Yield the episodes that `query` selects."""
        for shard, offset, length in self.query("shard, offset, length", where, parameters):
            with (self.path / "episodes" / _file_name(shard)).open("rb") as file:
                file.seek(offset)
                yield _episode(json.loads(file.read(length)))


class _IndexAhead(Exception):
    """The index has an episode that no shard has. The machine lost power before the index was written."""


class _Appender:
    """Appends rows to numbered files in a directory. A file that has `max_bytes` is followed by another."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        directory.mkdir(exist_ok=True)
        self._directory, self._max_bytes = directory, max_bytes
        self.number = max((number for number, _ in _numbered_files(directory)), default=1)
        self._open()

    def path(self, number: int) -> Path:
        return self._directory / _file_name(number)

    def append(self, row: object) -> tuple[int, int, int]:
        """Return the file's number, the row's offset and its length in bytes."""
        if self._file.tell() >= self._max_bytes:
            self.sync()
            self._file.close()
            self.number += 1
            self._open()
        line, offset = json_line(row).encode(), self._file.tell()
        self._file.write(line)
        self._is_synced = False
        return self.number, offset, len(line)

    def sync(self) -> None:
        if not self._is_synced:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._is_synced = True

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = self.path(self.number).open("ab")
        self._is_synced = True
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)  # otherwise a power failure could lose the new file's name
        finally:
            os.close(directory)


def _file_name(number: int) -> str:
    return f"{number:06}.jsonl"


def _numbered_files(directory: Path) -> list[tuple[int, Path]]:
    return [(int(path.stem), path) for path in sorted(directory.glob("*.jsonl"))]


def _bind_manifest(path: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a new store; check those of an existing one."""
    manifest = read_json(path)
    if manifest is None:
        write_json(path, {"layout_version": LAYOUT_VERSION, "settings": settings})
        return
    _check_layout(path, manifest)
    names = settings.keys() | manifest["settings"].keys()
    if differing := [name for name in sorted(names) if settings.get(name) != manifest["settings"].get(name)]:
        raise RecordError(
            f"{path.parent} has a collection with other settings ({', '.join(differing[:5])}); use the same settings "
            "to continue it, or another directory to start a new one"
        )


def _check_layout(path: Path, manifest: Mapping[str, Any] | None) -> None:
    if manifest is None:
        raise RecordError(f"{path.parent}: expected a store of episodes, which has a manifest.json")
    if (version := manifest.get("layout_version")) != LAYOUT_VERSION:
        raise RecordError(
            f"{path.parent}: expected layout_version {LAYOUT_VERSION}, got {version!r}; read this store with the "
            "version of the trainer that wrote it"
        )


def _episode(row: Mapping[str, Any]) -> Episode:
    episode = new_episode(row)
    extend_episode(episode, row)
    return episode


def _summary(episode: Episode) -> tuple[Any, ...]:
    """Return the values of `_EPISODE_COLUMNS`."""
    return (
        episode.reward, episode.stop_reason, len(episode.turns), episode.num_tool_calls, episode.num_failed_tool_calls,
        episode.sampled_tokens, episode.duration_s,
    )  # fmt: skip


def _insert(index: sqlite3.Connection, rows: Iterable[tuple[Any, ...]]) -> None:
    marks = ", ".join("?" * len(COLUMNS))
    with index:
        index.executemany(f"INSERT INTO episodes ({', '.join(COLUMNS)}) VALUES ({marks})", rows)
