"""The folder of a run: what was asked, what each step measured, every episode. Plain JSON that anyone can read.

    config.json                      the resolved configuration
    metrics.jsonl                    one row a step; `METRICS` names its numbers
    episodes/step_000012.jsonl       one row an episode, kept or not
    stages/<name>/                   checkpoints, the model, done.json: the recipe's
    summary.json                     what came out, stage by stage

Invariants:
- Rows are only appended, each in one line. A writer that is killed leaves at most one torn line, the last of its file:
  readers drop it and the next append takes its place.
- The other files appear whole or not at all.
- One process writes; any number read, while it writes too.
- Readers hold one row at a time, since a file of episodes may have gigabytes.
- Every row says which `VERSION` of this layout it has. Steps are counted over the whole run, from 1.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, BinaryIO

from trainer import roc
from trainer.trajectory import Episode, ToolCall

VERSION = 1

METRICS = {
    "reward": "mean reward of the sampled episodes that have one",
    "reward_kept": "mean reward of those kept for the loss",
    "tool_error_ratio": "tool calls that failed, of all calls",
    "tool_error_ratio_correct": "the same over episodes with reward 1",
    "one_answer": "share of episodes with exactly one answer tag",
    "length": "mean tokens of a response, tool tokens included",
    "turns": "mean turns of an episode",
    "calls": "mean tool calls of an episode",
    "kept": "episodes kept for the loss; of a group of equal rewards none",
    "dropped": "episodes sampled and not kept",
    "groups_dropped": "groups left out of the loss, as all their rewards are equal",
    "unavailable": "episodes without a reward, since something of ours failed",
    "loss": "the optimised loss",
    "grad_norm": "norm of the gradient, before it is clipped",
    "kl_sampler": "mean |log-probability when sampled - when trained|",
    "lr": "learning rate",
    "tokens": "tokens sampled",
    "weight_version": "of the weights that sampled",
    "seconds_step": "the whole step",
    "seconds_rollout": "from the first episode to the last",
    "seconds_generate": "waiting for engines, summed over episodes",
    "seconds_tools": "waiting for tools, summed over episodes",
    "seconds_sync": "giving the engines new weights",
    "seconds_optimise": "forward, backward and the optimiser",
    "seconds_own": "the trainer's own work: neither engines, nor tools, nor the optimiser",
}
"""The numbers that a row of metrics may have. One that does not apply to a step, as a reward to SFT, is not there."""

_EPISODE = (
    "sample", "reward", "stop", "answer", "answer_tags", "calls", "failed_calls", "sampled_tokens", "seconds", "error",
)  # fmt: skip
"""What a row says of an episode as the episode says it."""


class RecordError(ValueError):
    """The folder is not what this version of the trainer writes, or holds what it cannot have written."""


class RunFolder:
    """The folder of one run. Making this object touches nothing; writers make what they need.

    `keep_logprobs` adds every token's log-probability to the episodes, about as much again as the rest. `log` is told
    of each row of metrics: a tracker, see `trainer.track`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        keep_logprobs: bool = False,
        log: Callable[[Mapping[str, Any]], None] = lambda row: None,
    ) -> None:
        self.path = Path(path)
        self.keep_logprobs = keep_logprobs
        self._log = log

    # Writing

    def write_config(self, config: Mapping[str, Any]) -> None:
        write_json(self.path / "config.json", {"version": VERSION, "config": config})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """What came out so far: `{"stages": [{"name", "accuracy", "tool_error_ratio", "one_answer", "seconds"}]}`."""
        write_json(self.path / "summary.json", {"version": VERSION, **summary})

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add a step's numbers: `step`, `stage`, and any of `METRICS`. What is not finite is written as null."""
        unknown = row.keys() - METRICS.keys() - {"step", "stage"}
        if unknown or not row.keys() >= {"step", "stage"}:
            raise ValueError(f"metrics: expected step, stage and names that record.METRICS has, got {sorted(row)}")
        numbers = {name: _finite(value) for name, value in row.items() if name not in ("step", "stage")}
        whole = {"version": VERSION, "step": int(row["step"]), "stage": str(row["stage"]), **numbers}
        append_rows(self._metrics, [whole])
        self._log(whole)

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
        assert len(groups) == len(kept), f"{len(groups)} groups, and what was kept of {len(kept)}"
        rows = (
            {"version": VERSION, "step": step, "stage": stage, "group": first_group + number}
            | {"kept": index in indices, "why": why[number][index] if why else ""}
            | self._episode(episode)
            for number, (group, indices) in enumerate(zip(groups, map(frozenset, kept), strict=True))
            for index, episode in enumerate(group)
        )
        append_rows(self._episodes(step), rows)

    def rewind(self, step: int) -> None:
        """Forget what was written after `step`: the one of the checkpoint from which the run goes on."""
        if self._metrics.exists():
            with self._metrics.open("rb+") as file:
                end = 0
                for line in _whole_lines(file):
                    if json.loads(line)["step"] > step:
                        break
                    end += len(line)
                file.truncate(end)
        for later in self.steps():
            if later > step:
                self._episodes(later).unlink()

    # Reading

    def config(self) -> dict[str, Any] | None:
        """The configuration that was written; None before."""
        found = self._read("config.json")
        return None if found is None else dict(found["config"])

    def summary(self) -> dict[str, Any] | None:
        return self._read("summary.json")

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The steps' rows, in order."""
        return read_rows(self._metrics)

    def steps(self) -> list[int]:
        """The steps that have episodes, ascending."""
        return sorted(int(path.stem[5:]) for path in self.path.glob("episodes/step_*.jsonl"))

    def episodes(self, step: int) -> Iterator[dict[str, Any]]:
        """The rows of a step's episodes, as they were written."""
        return read_rows(self._episodes(step))

    def stage_folder(self, name: str) -> Path:
        return self.path / "stages" / name

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def _episodes(self, step: int) -> Path:
        return self.path / "episodes" / f"step_{step:06}.jsonl"

    def _read(self, name: str) -> dict[str, Any] | None:
        found = read_json(self.path / name)
        return None if found is None else _known(found, self.path / name)

    def _episode(self, episode: Episode) -> dict[str, Any]:
        row = {name: getattr(episode, name) for name in _EPISODE} | {
            "p_err": roc.p_err(episode),
            "p_format": roc.p_format(episode),
            "prompt_tokens": len(episode.prompt_ids),
            "response_tokens": len(episode.ids),
            "problem": _fields(episode.problem),
            "turns": [_fields(turn) | {"calls": [_call(call) for call in turn.calls]} for turn in episode.steps],
            "mask": _spans(episode.mask),
            "prompt_ids": episode.prompt_ids,
            "ids": episode.ids,
        }
        return row | ({"logprobs": [round(one, 6) for one in episode.logprobs]} if self.keep_logprobs else {})


def write_json(path: Path, value: object) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None where nothing was."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _call(call: ToolCall) -> dict[str, Any]:
    return _fields(call) | {"has_failed": call.has_failed}


def _fields(value: Any) -> dict[str, Any]:
    """What a dataclass holds, not copied as deep as `asdict` would."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _spans(mask_T: Sequence[int]) -> list[list[int]]:
    """The runs of equal mask as `[start, end, mask]`."""
    mask, spans, start = bytes(mask_T), [], 0
    while start < len(mask):
        end = mask.find(1 - mask[start], start)
        end = len(mask) if end < 0 else end
        spans.append([start, end, mask[start]])
        start = end
    return spans


def _finite(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to a file of rows, in place of a torn last one; each row has `version`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        _mend(file)
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")


def _mend(file: BinaryIO) -> None:
    """Cut off a torn last line."""
    if size := file.seek(0, os.SEEK_END):
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        if end < size:
            file.truncate(end)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a file; none if it is not there. Raises `RecordError`."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(_whole_lines(file), 1):
            try:
                row = json.loads(line)
            except ValueError as why:
                raise RecordError(f"{path}, line {number}: expected a row of JSON, got {line[:80]!r}: {why}") from why
            yield _known(row, path)


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    return (line for line in file if line.endswith(b"\n"))


def _known(row: dict[str, Any], path: Path) -> dict[str, Any]:
    if row.get("version") != VERSION:
        raise RecordError(f"{path}: expected version {VERSION}, got {row.get('version')!r}; read it with its trainer")
    return row
