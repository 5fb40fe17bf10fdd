"""`rstar-train show`: a run's folder in the terminal, or as one page of HTML that needs nothing else.

It only reads, and may do so while the run goes on. What it shows was written by a model: in the terminal control
characters are made visible, and the page puts every text in as text. Of a big run the page takes a bounded sample,
whole groups of steps that are spread over the run, and says what it left out.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import groupby
from secrets import token_hex
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from trainer.episodes.metrics import METRICS
from trainer.runs.run_folder import RunFolder

Row = dict[str, Any]
One = TypeVar("One")

MOST_BYTES = 32 << 20
"""Of the page's episodes, together."""
BARS = "▁▂▃▄▅▆▇█"
BARS_WIDE = 32

# Controls but tab and newline, lone surrogates, and what changes the direction of writing.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class ShowError(ValueError):
    """There is no run to show, or nowhere to write the page."""


def run(args: argparse.Namespace) -> None:
    """Show a run as the command line says. Raises `ShowError`, or `RecordError` for what is no run's."""
    folder = RunFolder(args.run)
    if folder.read_config() is None and not (args.run / "metrics.jsonl").exists() and not folder.episode_steps():
        raise ShowError(f"{args.run}: expected the folder of a run, found no config, metrics or episodes in it")
    show = _write_page if args.html else _print
    show(folder, args)


# The page


def _write_page(folder: RunFolder, args: argparse.Namespace) -> None:
    steps = folder.episode_steps() if args.step is None else [args.step]
    metrics, episodes = list(folder.read_metrics()), sample(folder, steps, args.episodes)
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
    except OSError as why:
        raise ShowError(f"--html {args.html}: expected a file that can be written, got: {why.strerror}") from why
    print(f"{args.html}: {len(text) / 1e6:.1f} MB, {len(metrics)} steps, {len(episodes)} episodes")


def page(data: Row) -> str:
    """The page that shows `data`. Its policy lets only its own script run, and load nothing."""
    text = files("trainer.runs").joinpath("show.html").read_text(encoding="utf-8").replace("{{nonce}}", token_hex())
    # In a script element only "<" could end it, and JSON may write it so.
    return text.replace("{{data}}", json.dumps(data).replace("<", "\\u003c"))


def sample(folder: RunFolder, steps: list[int], most: int) -> list[Row]:
    """At most `most` episodes of `steps`: whole groups, the first ones of steps spread over all of them."""
    size = next((len(group) for step in steps for group in _groups(folder, step)), 1)
    steps = _spread(steps, max(1, most // size))
    found: list[Row] = []
    for number, step in enumerate(steps, 1):
        room = max(size, most) * number // len(steps)
        for group in _groups(folder, step):
            if len(found) + len(group) > room:
                break
            found += group
    is_over = most > 1 and sum(len(json.dumps(row)) for row in found) > MOST_BYTES
    return sample(folder, steps, most // 2) if is_over else found[:most]


def _groups(folder: RunFolder, step: int) -> Iterator[list[Row]]:
    """Without tokens, which the page does not show."""
    for _, rows in groupby(folder.read_episodes(step), key=lambda row: row["group"]):
        yield [{key: row[key] for key in row.keys() - {"response_ids", "prompt_ids", "logprobs"}} for row in rows]


def _spread(items: list[One], most: int) -> list[One]:
    """At most `most` of them, evenly, both ends among them."""
    if len(items) <= most:
        return items
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)] if most > 1 else items[-1:]


# The terminal


def _print(folder: RunFolder, args: argparse.Namespace) -> None:
    console = Console(highlight=False, markup=False)
    rows = list(folder.read_metrics())
    if rows:
        age = time.time() - (folder.path / "metrics.jsonl").stat().st_mtime
        console.print(f"{folder.path}: step {rows[-1]['step']}, {clean(rows[-1]['stage'])}, written {age:,.0f} s ago")
        console.print(_stages(rows, folder.read_summary()), _numbers(rows, console.width), sep="\n")
    else:
        console.print(f"{folder.path}: no step is done yet")
    if folder.episode_steps():
        console.print(f"--html FILE shows episodes of {len(folder.episode_steps())} steps, too.")


def _stages(rows: Sequence[Row], summary: Row | None) -> Table:
    made = table("stage", "steps>", "reward>", "errors if right>", "one answer>", "length>", "accuracy>")
    results = {stage["name"]: stage for stage in (summary or {}).get("stages", ())}
    for name, some in groupby(rows, key=lambda row: row["stage"]):
        stage = list(some)
        ends = [
            f"{figure(have[0])} → {figure(have[-1])}" if have else "–"
            for key in ("reward", "tool_error_ratio_correct", "one_answer", "response_length")
            for have in [[row[key] for row in stage if row.get(key) is not None]]
        ]
        made.add_row(clean(name), str(len(stage)), *ends, figure(results.get(name, {}).get("accuracy")))
    return made


def _numbers(rows: Sequence[Row], width: int) -> Table:
    made = table("", "first>", "last>", "course", *(["…"] if width >= 120 else []))
    for key, metric in METRICS.items():
        if have := [row[key] for row in rows if row.get(key) is not None]:
            made.add_row(
                key, figure(have[0]), figure(have[-1]), bars(have), *([metric.description] if width >= 120 else [])
            )
    return made


def bars(values: list[float]) -> str:
    """The course of values in a few characters, from their least to their greatest."""
    chosen = _spread(values, BARS_WIDE)
    low, high = min(chosen), max(chosen)
    return "".join(BARS[round((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in chosen)


def table(*heads: str) -> Table:
    """An empty table; a head that ends in > is of numbers, one that ends in … of what may need several lines."""
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for head in heads:
        name = head.rstrip(">…")
        justify: Any = "right" if ">" in head[len(name) :] else "left"
        made.add_column(name, justify=justify, no_wrap="…" not in head[len(name) :], overflow="fold")
    return made


def clean(text: str) -> str:
    """`text` with what a terminal could obey made visible."""
    return _UNSEEN.sub(lambda match: f"⟨{ord(match[0]):02x}⟩", text)


def figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
