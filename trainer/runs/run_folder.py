"""The folder of a training run: configuration, metrics and episodes as plain JSON. docs/runs.md describes its files.

Invariants:
- Rows of metrics and episodes are only appended; the other files are replaced as a whole.
- One process writes. Any number of processes may read at the same time.
- `layout_version` in config.json and summary.json is `LAYOUT_VERSION`.
- Training steps are counted over the whole run, from 1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from trainer.episodes import roc
from trainer.episodes.episode import Episode
from trainer.episodes.metrics import METRICS
from trainer.json_files import (
    append_rows,
    check_layout,
    check_same_settings,
    read_json,
    read_rows,
    write_json,
    write_rows,
)

LAYOUT_VERSION = 2

_EPISODE_FIELDS = (
    "problem", "sample", "reward", "stop_reason", "answer", "answer_blocks", "num_tool_calls", "num_failed_tool_calls",
    "turns", "sampled_tokens", "response_length", "duration_s", "error", "prompt_ids", "response_ids",
    "weight_versions",
)  # fmt: skip
"""The keys of an episode's row that are attributes of `Episode`."""


@dataclass
class RunFolder:
    """The folder of one run. The constructor touches no file. Methods that write create missing directories."""

    path: Path
    save_logprobs: bool = False
    """Whether episode rows have the log-probability of each token, which doubles their size."""
    save_entropies: bool = False
    """Whether the entropy of each token in the loss is written, computed by the pass of the loss."""
    on_metrics: Callable[[Mapping[str, Any]], None] = lambda row: None
    """Receives each row of metrics, to pass it on to trackers (`trainer.runs.trackers`)."""

    # Writing

    def bind_config(
        self, config: Mapping[str, Any], saved: Mapping[str, Any] | None = None, *, changeable: tuple[str, ...] = ()
    ) -> None:
        """Write `config` as the folder's configuration.

        Raises `RecordError` if the folder already has a configuration, and it differs in a setting that matches none of
        the patterns in `changeable`. `saved` is the folder's configuration, with defaults for the settings that it
        lacks. Without `saved`, config.json is compared as it is.
        """
        mine, theirs = json.loads(json.dumps([config, saved or self.read_config()]))
        check_same_settings(self.path, mine, theirs or mine, changeable)
        write_json(self.path / "config.json", {"layout_version": LAYOUT_VERSION, "config": mine})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the results so far: `{"stages": [{"name", "accuracy", "tool_error_ratio", "one_answer", "seconds"}]}`.

        The rows of `stages` may have more keys.
        """
        write_json(self.path / "summary.json", {"layout_version": LAYOUT_VERSION, **summary})

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a training step's row: `step`, `stage` and any of `METRICS`. NaN and infinity are written as null."""
        assert row.keys() - METRICS.keys() == {"step", "stage"}, (
            f"expected step, stage and names of METRICS, got {sorted(row)}"
        )
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        append_rows(self._metrics_path, [finite])
        self.on_metrics(finite)

    def write_episodes(
        self,
        step: int,
        stage: str,
        groups: Sequence[Sequence[Episode]],
        selected: Sequence[Sequence[int]],
        reasons: Sequence[Sequence[str]] | None = None,
        *,
        first_group: int = 0,
    ) -> None:
        """Append the episodes of a training step.

        `selected`: for each group, the indices of its selected episodes.
        `reasons`: for each group, a sentence per episode that says why it was selected or not.
        `first_group`: the number of the first group, if the groups of a step are written in several calls.
        """
        rows = (
            {"step": step, "stage": stage, "group": first_group + number}
            | {"is_selected": index in indices, "selection_reason": reasons[number][index] if reasons else ""}
            | self._episode_row(episode)
            for number, (group, indices) in enumerate(zip(groups, map(frozenset, selected), strict=True))
            for index, episode in enumerate(group)
        )
        append_rows(self._step_path("episodes", step), rows)

    def filter_episodes(self, step: int, is_kept: Callable[[Mapping[str, Any]], bool]) -> None:
        """Delete the rows of a step's episodes for which `is_kept` is false."""
        if self._step_path("episodes", step).exists():
            write_rows(self._step_path("episodes", step), (row for row in self.read_episodes(step) if is_kept(row)))

    def write_entropies(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the entropies of a training step: `step`, `problem`, `sample`, `response_ids`, and `entropies` in nats,
        null for an observation."""
        write_rows(self._step_path("entropies", step), rows)

    def truncate_after(self, step: int) -> None:
        """Delete all metrics and episodes after `step`, the step of the checkpoint from which the run continues."""
        if self._metrics_path.exists():
            kept = takewhile(lambda row: bool(row["step"] <= step), self.read_metrics())
            write_rows(self._metrics_path, kept)
        for file in self.path.glob("*/step_*.jsonl"):
            if _step_of(file) > step:
                file.unlink()

    # Reading

    def read_config(self) -> dict[str, Any] | None:
        """Return the run's configuration; None if there is none yet. Raises `RecordError` for another layout."""
        content = read_json(self.path / "config.json")
        if content is None:
            return None
        check_layout(self.path, content.get("layout_version"), LAYOUT_VERSION)
        return dict(content["config"])

    def read_summary(self) -> dict[str, Any] | None:
        return read_json(self.path / "summary.json")

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of metrics in order."""
        return read_rows(self._metrics_path)

    def episode_steps(self) -> list[int]:
        """Return the training steps that have episodes, ascending."""
        return sorted(map(_step_of, self.path.glob("episodes/step_*.jsonl")))

    def read_episodes(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of a step's episodes in the order in which they were written."""
        return read_rows(self._step_path("episodes", step))

    def read_entropies(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of a step's entropies."""
        return read_rows(self._step_path("entropies", step))

    @property
    def _metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def _step_path(self, folder: str, step: int) -> Path:
        return self.path / folder / f"step_{step:06}.jsonl"

    def _episode_row(self, episode: Episode) -> dict[str, Any]:
        row = {name: getattr(episode, name) for name in _EPISODE_FIELDS} | {
            "p_err": roc.p_err(episode),
            "p_format": roc.p_format(episode),
            "prompt_tokens": len(episode.prompt_ids),
            # Runs of equal value as [start, end, value].
            "loss_mask": [[*run.span(), run[0][0]] for run in re.finditer(rb"\x00+|\x01+", bytes(episode.loss_mask))],
        }
        if self.save_logprobs:
            row["logprobs"] = [
                None if logprob is None or not math.isfinite(logprob) else round(logprob, 6)
                for logprob in episode.logprobs
            ]
        return row


def _step_of(file: Path) -> int:
    """Return the training step of a file named `step_000001.jsonl`."""
    return int(file.stem.removeprefix("step_"))
