"""The tokens with the highest entropy: which words they are, and the episodes in which they are marked."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from trainer.episodes.forking_tokens import entropy_table, high_entropy_threshold, sampled_tokens
from trainer.runs.run_folder import RunFolder
from trainer.runs.text_tables import ShowError, escape_controls, table

STYLES = {"sampled": "", "tool": "dim", "forking": "reverse", "reflection": "reverse bold"}
"""The kinds of token in an episode, with their styles in the terminal. Forking and reflection tokens have high
entropy."""
Decode = Callable[[Sequence[int]], str]
Row = dict[str, Any]


def show_entropy(args: argparse.Namespace, decode: Decode) -> None:
    """Print the tables of a run or of one step. Raises `ShowError` if there are no entropies."""
    folder = RunFolder(args.run)
    print_tables(read_steps(folder, folder.entropy_steps() if args.step is None else [args.step]), decode)


def read_steps(folder: RunFolder, steps: Iterable[int]) -> list[Row]:
    """Return the entropies of some steps. Raises `ShowError` if there are none."""
    if rows := [row for step in steps for row in folder.read_entropies(step)]:
        return rows
    raise ShowError(f"{folder.path}: has no entropies here; set storage.save_entropies before the run starts")


def print_tables(rows: Sequence[Row], decode: Decode, max_kinds: int = 15) -> None:
    """Print two tables of the most frequent tokens with high entropy: one for the model's own text, and one for the
    tokens right after tool responses."""
    tokens = list(chain.from_iterable(sampled_tokens(row["response_ids"], row["entropies"]) for row in rows))
    threshold, console = high_entropy_threshold(tokens), Console(highlight=False, markup=False)
    console.print(f"Episodes: {len(rows)}; high entropy: at least {threshold:.3g} nats, a fifth of all tokens")
    for title, is_reflection in (("The model's own text", False), ("Right after a tool response", True)):
        part = [token for token in tokens if token.is_reflection is is_reflection]
        measured = entropy_table(part, threshold, max_kinds)
        console.print(
            f"\n{title}: {measured.tokens} tokens, mean entropy {measured.mean_entropy:.3g} nats, "
            f"{measured.high_share:.1%} with high entropy"
        )
        lines = table("token", "count>", "mean entropy>")
        for kind in measured.frequent:
            lines.add_row(escape_controls(repr(decode([kind.id]))), str(kind.count), f"{kind.mean_entropy:.3f}")
        console.print(lines)


def print_episode(folder: RunFolder, name: str, decode: Decode) -> None:
    """Print an episode in which its forking and reflection tokens are marked, and then tables of these tokens.

    A terminal shows marked tokens in reverse colours. In a file or a pipe, which has no styles, they are in brackets.
    """
    steps, text, console = folder.entropy_steps(), Text(), Console()
    rows = read_steps(folder, [step for step in steps if name.startswith(f"{step}/")] or steps[:1])
    by_name = {f"{row['step']}/{row['problem']}/{row['sample']}": row for row in rows}
    if name not in by_name:
        raise ShowError(f"--episode {name}: expected STEP/PROBLEM/SAMPLE with entropies, such as {next(iter(by_name))}")
    for kind, part in marked_text(by_name[name], decode):
        has_brackets = kind in ("forking", "reflection") and not console.is_terminal
        text.append(f"⟦{escape_controls(part)}⟧" if has_brackets else escape_controls(part), STYLES[kind])
    console.print(text, soft_wrap=True)
    print_tables([by_name[name]], decode)


def add_marked_text(folder: RunFolder, episodes: Iterable[Row], decode: Decode) -> None:
    """Add `marked_text` to the rows of episodes that have entropies. In `episodes`, the rows of a step must be
    contiguous."""
    for step, rows in groupby(episodes, key=lambda row: row["step"]):
        measured = {(row["problem"], row["sample"]): row for row in folder.read_entropies(step)}
        for row in rows:
            if found := measured.get((row["problem"]["id"], row["sample"])):
                row["marked_text"] = list(marked_text(found, decode))


def marked_text(row: Row, decode: Decode) -> Iterator[tuple[str, str]]:
    """Yield the text of an episode in parts, each with the kind of its tokens, a key of `STYLES`."""
    sampled = list(sampled_tokens(row["response_ids"], row["entropies"]))
    threshold, remaining = high_entropy_threshold(sampled), iter(sampled)
    kinds = ["tool" if entropy is None else next(remaining).kind(threshold) for entropy in row["entropies"]]
    for kind, part in groupby(zip(kinds, row["response_ids"], strict=True), key=lambda pair: pair[0]):
        yield kind, decode([token for _, token in part])
