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
from itertools import groupby, islice
from secrets import token_hex
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from trainer.metrics import METRICS
from trainer.record import RunFolder

Row = dict[str, Any]
One = TypeVar("One")

MOST_EPISODES = 400
MOST_BYTES = 32 << 20
"""Of the page's episodes, together."""
MOST_LISTED = 40
"""Episodes listed in the terminal."""
BARS = "▁▂▃▄▅▆▇█"
BARS_WIDE = 32

# Controls but tab and newline, lone surrogates, and what changes the direction of writing.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class ShowError(ValueError):
    """There is no run to show, or nowhere to write the page."""


def run(args: argparse.Namespace) -> None:
    """Show a run as the command line says. Raises `ShowError`, or `RecordError` for what is no run's."""
    folder = RunFolder(args.run)
    if folder.config() is None and not (args.run / "metrics.jsonl").exists() and not folder.steps():
        raise ShowError(f"{args.run}: expected the folder of a run, found no config, metrics or episodes in it")
    show = _write_page if args.html else _print
    show(folder, args)


def _chosen_steps(folder: RunFolder, args: argparse.Namespace) -> list[int]:
    return [step for step in folder.steps() if args.step is None or any(step in some for some in args.step)]


def _chosen(folder: RunFolder, step: int, args: argparse.Namespace) -> Iterator[Row]:
    for row in folder.episodes(step):
        if args.problem in (None, row["problem"]["id"]) and args.sample in (None, row["sample"]):
            yield row


# The page


def _write_page(folder: RunFolder, args: argparse.Namespace) -> None:
    most = MOST_EPISODES if args.episodes is None else args.episodes
    metrics, episodes = list(folder.metrics()), sample(folder, args, most)
    text = page({
        "name": folder.path.resolve().name,
        "made_at": time.time(),
        "about": {name: asdict(replace(metric, part=None, whole=None)) for name, metric in METRICS.items()},
        "config": folder.config(),
        "summary": folder.summary(),
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
    text = files("trainer").joinpath("show.html").read_text(encoding="utf-8").replace("{{nonce}}", token_hex())
    # In a script element only "<" could end it, and JSON may write it so.
    return text.replace("{{data}}", json.dumps(data).replace("<", "\\u003c"))


def sample(folder: RunFolder, args: argparse.Namespace, most: int) -> list[Row]:
    """At most `most` of the episodes asked for: whole groups, the first ones of steps spread over all of them."""
    steps = _chosen_steps(folder, args)
    size = next((len(group) for step in steps for group in _groups(folder, step, args)), 1)
    if args.problem is None:
        steps = _spread(steps, max(1, most // size))
    found: list[Row] = []
    for number, step in enumerate(steps, 1):
        room = most if args.problem else max(size, most) * number // len(steps)
        for group in _groups(folder, step, args):
            if len(found) + len(group) > room:
                break
            found += group
    is_over = most > 1 and sum(len(json.dumps(row)) for row in found) > MOST_BYTES
    return sample(folder, args, most // 2) if is_over else found[:most]


def _groups(folder: RunFolder, step: int, args: argparse.Namespace) -> Iterator[list[Row]]:
    """Without tokens, which the page does not show."""
    for _, rows in groupby(_chosen(folder, step, args), key=lambda row: row["group"]):
        yield [{key: row[key] for key in row.keys() - {"ids", "prompt_ids", "logprobs"}} for row in rows]


def _spread(items: list[One], most: int) -> list[One]:
    """At most `most` of them, evenly, both ends among them."""
    if len(items) <= most:
        return items
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)] if most > 1 else items[-1:]


# The terminal


def _print(folder: RunFolder, args: argparse.Namespace) -> None:
    console = Console(highlight=False, markup=False)
    if args.step is None and args.problem is None and args.sample is None:
        _print_run(console, folder)
        args.step = [range(last, last + 1) for last in folder.steps()[-1:]]
    most = MOST_LISTED if args.episodes is None else args.episodes
    rows = (row for step in _chosen_steps(folder, args) for row in _chosen(folder, step, args))
    found = list(islice(rows, most + 1))
    for row in found[:most]:
        console.print(clean(_line(row)), soft_wrap=True)
    if len(found) == 1:
        console.print(clean("\n".join(_whole(found[0]))))
    elif found:
        more = f"More than {most} match; --episodes N for more. " if len(found) > most else ""
        console.print(f"{more}--step, --problem and --sample show one whole.")
    else:
        console.print("No episodes match." if folder.steps() else "No episodes yet.")


def _print_run(console: Console, folder: RunFolder) -> None:
    rows = list(folder.metrics())
    if rows:
        age = time.time() - (folder.path / "metrics.jsonl").stat().st_mtime
        console.print(f"{folder.path}: step {rows[-1]['step']}, {clean(rows[-1]['stage'])}, written {age:,.0f} s ago")
        console.print(_stages(rows, folder.summary()), _numbers(rows, console.width), sep="\n")
    else:
        console.print(f"{folder.path}: no step is done yet")


def _stages(rows: Sequence[Row], summary: Row | None) -> Table:
    made = table("stage", "steps>", "reward>", "errors if right>", "one answer>", "length>", "accuracy>")
    results = {stage["name"]: stage for stage in (summary or {}).get("stages", ())}
    for name, some in groupby(rows, key=lambda row: row["stage"]):
        stage = list(some)
        ends = [
            f"{figure(have[0])} → {figure(have[-1])}" if have else "–"
            for key in ("reward", "tool_error_ratio_correct", "one_answer", "length")
            for have in [[row[key] for row in stage if row.get(key) is not None]]
        ]
        made.add_row(clean(name), str(len(stage)), *ends, figure(results.get(name, {}).get("accuracy")))
    return made


def _numbers(rows: Sequence[Row], width: int) -> Table:
    made = table("", "first>", "last>", "course", *(["…"] if width >= 120 else []))
    for key, metric in METRICS.items():
        if have := [row[key] for row in rows if row.get(key) is not None]:
            made.add_row(key, figure(have[0]), figure(have[-1]), bars(have), *([metric.about] if width >= 120 else []))
    return made


def bars(values: list[float]) -> str:
    """The course of values in a few characters, from their least to their greatest."""
    chosen = _spread(values, BARS_WIDE)
    low, high = min(chosen), max(chosen)
    return "".join(BARS[round((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in chosen)


def _line(row: Row) -> str:
    return (
        f"{row['step']:>6} {row['problem']['id']} #{row['sample']}: reward {figure(row['reward'])}, "
        f"{'kept' if row['kept'] else 'dropped'}, {row['stop']}, {row['failed_calls']}/{row['calls']} calls failed, "
        f"penalty {figure(row['p_err'] + row['p_format'])}, {row['response_tokens']} tokens; {row['answer'] or '–'}"
    )


def _whole(row: Row) -> Iterator[str]:
    """What an episode's line does not say, but for its tokens."""
    yield row["problem"]["text"]
    yield f"expected {row['problem']['answer']}; {row['why']} {row['error']}"
    for number, turn in enumerate(row["turns"], 1):
        place = f"tokens {turn['start']} to {turn['end']}, {turn['engine']}, weights {turn['version']}"
        yield f"\n── turn {number}: {place}\n{turn['text']}"
        for call in turn["calls"]:
            yield f"── {call['name']}: {call['status']}, {figure(call['seconds'])} s\n{call['code']}"
            yield f"── its response{', cut' if call['is_cut'] else ''}\n{call['response']}"


def table(*heads: str) -> Table:
    """An empty table; a head that ends in > is of numbers, one that ends in … of text that may need several lines."""
    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for head in heads:
        justify: Any = "right" if head.endswith(">") else "left"
        made.add_column(head.rstrip(">…"), justify=justify, no_wrap=not head.endswith("…"), overflow="fold")
    return made


def clean(text: str) -> str:
    """`text` with what a terminal could obey made visible."""
    return _UNSEEN.sub(lambda match: f"⟨{ord(match[0]):02x}⟩", text)


def figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
