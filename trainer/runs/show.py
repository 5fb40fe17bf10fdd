"""`rstar-train show`: shows a run folder in the terminal, or writes one HTML page that loads nothing else.

Invariants:
- The command only reads. It may be used while the run goes on.
- Text written by a model is untrusted: the terminal shows its control characters escaped, and the page inserts it as
  text only.
- The size of the episodes in the page is bounded. For a big run, the page has whole groups of some steps that are
  spread over the run, and states how many episodes it leaves out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import groupby
from secrets import token_hex
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.episodes.metrics import METRICS, warnings
from trainer.runs.run_folder import RunFolder
from trainer.runs.text_tables import ShowError, escape_controls, format_number, sparkline, spread, table

Row = dict[str, Any]
MAX_EPISODE_BYTES = 32 << 20
"""Maximum number of bytes of JSON for all episodes of a page together."""


def show_run(args: argparse.Namespace) -> None:
    """Show a run as the command line asks. Raises `ShowError`, or `RecordError` for another layout."""
    folder = RunFolder(args.run)
    has_metrics = (args.run / "metrics.jsonl").exists()
    if folder.read_config() is None and not has_metrics and not folder.episode_steps():
        raise ShowError(f"{args.run}: expected a run folder, but it has no config, metrics or episodes")
    if args.html:
        _write_page(folder, args)
    else:
        _print_run(folder)


# The page


def _write_page(folder: RunFolder, args: argparse.Namespace) -> None:
    steps = folder.episode_steps() if args.step is None else [args.step]
    metrics, episodes = list(folder.read_metrics()), sample_episodes(folder, steps, args.max_episodes)
    text = page({
        "name": folder.path.resolve().name,
        "made_at": time.time(),
        "about": {name: asdict(replace(metric, numerator=None, denominator=None)) for name, metric in METRICS.items()},
        "config": folder.read_config(),
        "summary": folder.read_summary(),
        "metrics": metrics,
        "episodes": episodes,
    })  # fmt: skip
    try:
        args.html.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShowError(f"--html {args.html}: expected a writable file, got: {error.strerror}") from error
    print(f"{args.html}: {len(text) / 1e6:.1f} MB, {len(metrics)} steps, {len(episodes)} episodes")


def page(data: Row) -> str:
    """Return the page that shows `data`. Its content policy allows only its own script, and no loading."""
    text = files("trainer.runs").joinpath("show.html").read_text(encoding="utf-8").replace("{{nonce}}", token_hex())
    # "<" could end the script element or begin a comment. JSON allows to escape it.
    return text.replace("{{data}}", json.dumps(data).replace("<", "\\u003c"))


def sample_episodes(folder: RunFolder, steps: list[int], max_episodes: int) -> list[Row]:
    """Return at most `max_episodes` episodes: the first groups of some steps, which are spread over `steps`."""
    group_size = next((len(group) for step in steps for group in _groups(folder, step)), 1)
    steps = spread(steps, max(1, max_episodes // group_size))
    episodes: list[Row] = []
    for number, step in enumerate(steps, 1):
        limit = max(group_size, max_episodes) * number // len(steps)
        for group in _groups(folder, step):
            if len(episodes) + len(group) > limit:
                break
            episodes += group
    is_too_large = max_episodes > 1 and sum(len(json.dumps(row)) for row in episodes) > MAX_EPISODE_BYTES
    return sample_episodes(folder, steps, max_episodes // 2) if is_too_large else episodes[:max_episodes]


def _groups(folder: RunFolder, step: int) -> Iterator[list[Row]]:
    """Yield the groups of a step without token ids, which the page does not show."""
    hidden = {"response_ids", "prompt_ids", "logprobs"}
    for _, rows in groupby(folder.read_episodes(step), key=lambda row: row["group"]):
        yield [{key: row[key] for key in row.keys() - hidden} for row in rows]


# The terminal


def _print_run(folder: RunFolder) -> None:
    console = Console(highlight=False, markup=False)
    rows = list(folder.read_metrics())
    if rows:
        age_s = time.time() - (folder.path / "metrics.jsonl").stat().st_mtime
        stage = escape_controls(rows[-1]["stage"])
        console.print(f"{folder.path}: step {rows[-1]['step']}, {stage}, written {age_s:,.0f} s ago")
        for warning in warnings(rows[-1]):
            console.print(f"warning: {warning}")
        tables = _stage_table(rows, folder.read_summary()), _time_table(rows), _metric_table(rows, console.width)
        console.print(*tables, sep="\n")
    else:
        console.print(f"{folder.path}: no training step is finished yet")
    if folder.episode_steps():
        console.print(f"--html FILE also shows episodes of {len(folder.episode_steps())} steps.")


def _stage_table(rows: Sequence[Row], summary: Row | None) -> Table:
    stages = table("stage", "steps>", "reward>", "tool errors (correct)>", "one answer>", "length>", "accuracy>")
    results = {stage["name"]: stage for stage in (summary or {}).get("stages", ())}
    for name, group in groupby(rows, key=lambda row: row["stage"]):
        stage = list(group)
        changes = []
        for key in ("reward", "tool_error_ratio_correct", "one_answer", "response_length"):
            values = [row[key] for row in stage if row.get(key) is not None]
            changes.append(f"{format_number(values[0])} → {format_number(values[-1])}" if values else "–")
        accuracy = format_number(results.get(name, {}).get("accuracy"))
        stages.add_row(escape_controls(name), str(len(stage)), *changes, accuracy)
    return stages


def _time_table(rows: Sequence[Row]) -> Table:
    """Return the shares of a step's time, and the shares of the time of its episodes, of which many run at once."""
    times = table(
        "stage", "s per step>…", "wait for episodes>…", "weight sync>…", "training>…", "rest>…",
        "episodes: engine wait>…", "sampling>…", "tools>…",
    )  # fmt: skip
    for name, group in groupby(rows, key=lambda row: row["stage"]):
        stage = [row for row in group if row.get("step_s")]
        if stage:
            all_s = sum(row["step_s"] for row in stage)
            step = [_sum(stage, part) / all_s for part in ("rollout_wait_s", "weight_sync_s", "optimize_s")]
            episodes = [_sum(stage, part) for part in ("wait_s_sum", "generate_s_sum", "tool_s_sum")]
            shown = [*step, 1 - sum(step), *(seconds / (sum(episodes) or 1) for seconds in episodes)]
            step_s = format_number(all_s / len(stage))
            times.add_row(escape_controls(name), step_s, *(f"{share:.1%}" for share in shown))
    return times


def _sum(rows: Sequence[Row], metric: str) -> float:
    return sum(row.get(metric) or 0.0 for row in rows)


def _metric_table(rows: Sequence[Row], width: int) -> Table:
    has_descriptions = width >= 120
    metrics = table("", "first>", "last>", "trend", *(["…"] if has_descriptions else []))
    for key, metric in METRICS.items():
        if values := [row[key] for row in rows if row.get(key) is not None]:
            description = [metric.description] if has_descriptions else []
            ends = (format_number(values[0]), format_number(values[-1]))
            metrics.add_row(key, *ends, sparkline(values), *description)
    return metrics
