"""`rstar-train entropy`: the tokens with the highest entropy, and an episode with these tokens marked."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import chain
from typing import Any

from rich.console import Console
from rich.text import Text

from trainer.episodes.forking_tokens import SampledToken, entropy_table, high_entropy_threshold, sampled_tokens
from trainer.runs.run_folder import RunFolder
from trainer.runs.show import ShowError
from trainer.runs.text_tables import escape_controls, table

MAX_KINDS = 15
Decode = Callable[[int], str]


def show_entropy(args: argparse.Namespace, decode: Decode) -> None:
    """Print the tables of a run, of one step, or with `--episode` the text of one episode. Raises `ShowError`."""
    folder = RunFolder(args.run)
    steps = folder.entropy_steps() if args.step is None else [args.step]
    rows = [row for step in steps for row in folder.read_entropies(step)]
    if not rows:
        raise ShowError(f"{args.run}: has no entropies; set storage.save_entropies before the run starts")
    tokens = list(chain.from_iterable(sampled_tokens(row["response_ids"], row["entropies"]) for row in rows))
    threshold, console = high_entropy_threshold(tokens), Console()
    if args.episode:
        console.print(_marked(_find(rows, args.episode), threshold, decode))
        return
    console.print(f"{len(rows)} episodes; high entropy: at least {threshold:.3g} nats, a fifth of all tokens")
    for title, is_reflection in (("The model's own text", False), ("Right after a tool response", True)):
        part = [token for token in tokens if token.is_reflection is is_reflection]
        _print_table(console, title, part, threshold, decode)


def _print_table(console: Console, title: str, tokens: list[SampledToken], threshold: float, decode: Decode) -> None:
    measured = entropy_table(tokens, threshold, MAX_KINDS)
    console.print(
        f"\n{title}: {measured.tokens} tokens, mean entropy {measured.mean_entropy:.3g} nats, "
        f"{measured.high_share:.1%} with high entropy"
    )
    rows = table("token", "count>", "mean entropy>")
    for kind in measured.frequent:
        rows.add_row(escape_controls(repr(decode(kind.id))), str(kind.count), f"{kind.mean_entropy:.3f}")
    console.print(rows)


def _find(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for row in rows:
        if name == f"{row['step']}/{row['problem']}/{row['sample']}":
            return row
    example = f"{rows[0]['step']}/{rows[0]['problem']}/{rows[0]['sample']}"
    raise ShowError(f"--episode {name}: expected STEP/PROBLEM/SAMPLE of an episode with entropies, such as {example}")


def _marked(row: dict[str, Any], threshold: float, decode: Decode) -> Text:
    """Return an episode's text. Tokens with high entropy are reversed, observations are dim."""
    text = Text()
    for token, entropy in zip(row["response_ids"], row["entropies"], strict=True):
        style = "dim" if entropy is None else "reverse" if entropy >= threshold else ""
        text.append(escape_controls(decode(token)), style)
    return text
