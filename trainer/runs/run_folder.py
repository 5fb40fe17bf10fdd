"""The folder of a run: what was asked, what each step measured, every episode. Plain JSON that anyone can read.

    config.json                      the resolved configuration
    metrics.jsonl                    one row a step; `trainer.episodes.metrics` names its numbers
    episodes/step_000012.jsonl       one row an episode, kept or not
    stages/<name>/                   checkpoints, the model, done.json: the recipe's
    summary.json                     what came out, stage by stage

Invariants:
- Rows are only appended, each in one line. A writer that is killed leaves at most one torn line, the last of its file:
  readers drop it and the next append takes its place.
- The other files appear whole or not at all.
- One process writes; any number read, while it writes too.
- Readers hold one row at a time, since a file of episodes may have gigabytes.
- config.json and summary.json say which `VERSION` of this layout the folder has. Steps are counted over the whole run,
  from 1.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from trainer.episodes import roc
from trainer.episodes.episode import Episode, ToolCall
from trainer.episodes.metrics import METRICS

VERSION = 1

_EPISODE = (
    "problem", "sample", "reward", "stop", "answer", "answer_tags", "calls", "failed_calls", "sampled_tokens",
    "seconds", "error", "prompt_ids", "ids", "versions",
)  # fmt: skip
"""What a row says of an episode as the episode says it."""


class RecordError(ValueError):
    """The folder is not what this version of the trainer writes, or holds what it cannot have written."""


@dataclass
class RunFolder:
    """The folder of one run. Making this object touches nothing; writers make what they need."""

    path: Path
    keep_logprobs: bool = False
    """Adds every token's log-probability to the episodes, about as much again as the rest."""
    log: Callable[[Mapping[str, Any]], None] = lambda row: None
    """Is told of each row of metrics: a tracker, see `trainer.runs.trackers`."""

    # Writing

    def claim(
        self, config: Mapping[str, Any], known: Mapping[str, Any] | None = None, *, may_differ: tuple[str, ...] = ()
    ) -> None:
        """Make the folder one of `config`, or see that it is, but for settings whose names begin as `may_differ` says.

        `known` is what the folder has, where someone reads it better than as it is written. Raises `RecordError`.
        """
        mine, theirs = json.loads(json.dumps([config, known or self.config()]))
        differing = [name for name in _differing(mine, theirs or mine) if not name.startswith(may_differ)]
        if differing:
            raise RecordError(
                f"{self.path} is of a run with other settings ({', '.join(differing[:5])}); expected the same ones to "
                "go on: give them, or another folder to start anew"
            )
        write_json(self.path / "config.json", {"version": VERSION, "config": mine})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """What came out so far: `{"stages": [{"name", "accuracy", "tool_error_ratio", "one_answer", "seconds"}]}`."""
        write_json(self.path / "summary.json", {"version": VERSION, **summary})

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add a step's numbers: `step`, `stage`, and any of `METRICS`. What is not finite is written as null."""
        assert row.keys() - METRICS.keys() == {"step", "stage"}, (
            f"expected them and names of METRICS, got {sorted(row)}"
        )
        whole = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}
        append_rows(self._metrics, [whole])
        self.log(whole)

    def write_episodes(
        self,
        step: int,
        stage: str,
        groups: Sequence[Sequence[Episode]],
        kept: Sequence[Sequence[int]],
        why: Sequence[Sequence[str]] | None = None,
        *,
        first_group: int = 0,
    ) -> None:
        """Add what a step sampled: groups of episodes, the indices kept of each, and why each was or was not.

        Who adds a step's groups in several calls says which number the first of each has.
        """
        rows = (
            {"step": step, "stage": stage, "group": first_group + number}
            | {"kept": index in indices, "why": why[number][index] if why else ""}
            | self._episode(episode)
            for number, (group, indices) in enumerate(zip(groups, map(frozenset, kept), strict=True))
            for index, episode in enumerate(group)
        )
        append_rows(self._episodes(step), rows)

    def keep_episodes(self, step: int, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
        """Forget those of a step's episodes whose row is not to be kept."""
        if self._episodes(step).exists():
            _write(self._episodes(step), map(_line, filter(is_kept, self.episodes(step))))

    def rewind(self, step: int) -> None:
        """Forget what was written after `step`: the one of the checkpoint from which the run goes on."""
        if self._metrics.exists():
            _write(self._metrics, map(_line, takewhile(lambda row: row["step"] <= step, self.metrics())))
        for later in self.steps():
            if later > step:
                self._episodes(later).unlink()

    # Reading

    def config(self) -> dict[str, Any] | None:
        """The configuration that was written; None before. Raises `RecordError` for another version's folder."""
        found = read_json(self.path / "config.json") or {"version": VERSION}
        if found.get("version") != VERSION:
            got = found.get("version")
            raise RecordError(f"{self.path}: expected version {VERSION}, got {got!r}; read it with its trainer")
        return found.get("config")

    def summary(self) -> dict[str, Any] | None:
        return read_json(self.path / "summary.json")

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The steps' rows, in order."""
        return read_rows(self._metrics)

    def steps(self) -> list[int]:
        """The steps that have episodes, ascending."""
        return sorted(int(path.stem[5:]) for path in self.path.glob("episodes/step_*.jsonl"))

    def episodes(self, step: int) -> Iterator[dict[str, Any]]:
        """The rows of a step's episodes, as they were written."""
        return read_rows(self._episodes(step))

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def _episodes(self, step: int) -> Path:
        return self.path / "episodes" / f"step_{step:06}.jsonl"

    def _episode(self, episode: Episode) -> dict[str, Any]:
        row = {name: getattr(episode, name) for name in _EPISODE} | {
            "p_err": roc.p_err(episode),
            "p_format": roc.p_format(episode),
            "prompt_tokens": len(episode.prompt_ids),
            "response_tokens": len(episode.ids),
            "turns": episode.steps,
            # Runs of equal mask as [start, end, mask].
            "mask": [[*run.span(), run[0][0]] for run in re.finditer(rb"\x00+|\x01+", bytes(episode.mask))],
        }
        return row | ({"logprobs": [round(one, 6) for one in episode.logprobs]} if self.keep_logprobs else {})


def write_json(path: Path, value: object) -> None:
    """Write a file whole or not at all."""
    _write(path, [json.dumps(value, indent=2), "\n"])


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote; None where nothing was."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to a file of rows, in place of a torn last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if size := file.seek(0, os.SEEK_END):
            with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                end = content.rfind(b"\n") + 1
            if end < size:
                file.truncate(end)
        file.writelines(_line(row).encode() for row in rows)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a file; none if it is not there. Raises `RecordError`."""
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
            except ValueError as why:
                raise RecordError(f"{path}, line {number}: expected a row of JSON, got {line[:80]!r}: {why}") from why


def _write(path: Path, texts: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(texts)
    part.replace(path)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"), default=_fields) + "\n"


def _fields(value: Any) -> dict[str, Any]:
    """What a dataclass holds, not copied as deep as `asdict` would."""
    fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
    return fields | {"has_failed": value.has_failed} if isinstance(value, ToolCall) else fields


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The names of settings, as a.b, that are not equal."""
    for name in sorted(mine.keys() | theirs.keys()):
        one, other = mine.get(name), theirs.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differing(one, other, f"{above}{name}.")
        elif one != other:
            yield above + name
