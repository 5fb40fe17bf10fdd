"""The tokens with the highest entropy in a run with `storage.save_entropies = true`: forking and reflection tokens.

    python -m examples.entropy RUN                             # the most frequent tokens with high entropy
    python -m examples.entropy RUN --episode 12/PROBLEM/SAMPLE  # one episode, in which these tokens are marked

rStar2-Agent (arXiv 2508.20722, section 5.4) studies these tokens. Reflection tokens come right after a tool response:
with them the model reacts to the response. Forking tokens are in the rest of the model's text. Entropies are in nats.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from trainer.json_files import RecordError, read_rows
from trainer.runs.run_folder import RunFolder
from trainer.runs.text_tables import ShowError, escape_controls, table

STYLES = {"sampled": "", "tool": "dim", "forking": "reverse", "reflection": "reverse bold"}
"""The kinds of token in an episode, with their styles in the terminal. Forking and reflection tokens have high
entropy."""
Decode = Callable[[Sequence[int]], str]
Row = dict[str, Any]
TOP_SHARE = 0.2
"""The share of all tokens that have high entropy."""
LEAST_ENTROPY = 1e-4
"""The smallest positive entropy in nats that is recorded, since entropies are recorded with four decimals."""
REFLECTION_TOKENS = 10
"""The first sampled tokens after a tool response, in this number, are reflection tokens."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that the model sampled, its entropy, and whether it is a reflection token."""

    id: int
    entropy: float
    is_reflection: bool

    def kind(self, threshold: float) -> str:
        """Return "forking" or "reflection" for an entropy of at least `threshold`, else "sampled"."""
        high = "reflection" if self.is_reflection else "forking"
        return high if self.entropy >= threshold else "sampled"


@dataclass(frozen=True, slots=True)
class TokenKind:
    """A token id with the number and mean entropy of its tokens that have high entropy."""

    id: int
    count: int
    mean_entropy: float


@dataclass(frozen=True, slots=True)
class EntropyTable:
    """The tokens of the model's own text, or those right after tool responses."""

    tokens: int
    mean_entropy: float
    high_share: float
    """Fraction of the tokens with high entropy."""
    frequent: list[TokenKind]
    """The most frequent token ids with high entropy."""


def sampled_tokens(ids: Sequence[int], entropies: Sequence[float | None]) -> Iterator[SampledToken]:
    """Yield the sampled tokens of a response. A token without an entropy is an observation."""
    since_observation = REFLECTION_TOKENS
    for token, entropy in zip(ids, entropies, strict=True):
        if entropy is None:
            since_observation = 0
            continue
        yield SampledToken(token, entropy, since_observation < REFLECTION_TOKENS)
        since_observation += 1


def high_entropy_threshold(tokens: Iterable[SampledToken]) -> float:
    """Return the lowest entropy among the fifth of the tokens that has the highest entropies. Infinity without tokens.

    The result is always positive. So if a model is sure of most tokens, fewer than a fifth of them have high entropy.
    """
    ordered = sorted(token.entropy for token in tokens)
    least = ordered[min(len(ordered) - 1, round(len(ordered) * (1 - TOP_SHARE)))] if ordered else float("inf")
    return max(least, LEAST_ENTROPY)


def entropy_table(tokens: Sequence[SampledToken], threshold: float, max_kinds: int) -> EntropyTable:
    """Return the table of some tokens. A token has high entropy if its entropy is at least `threshold`."""
    by_id: defaultdict[int, list[float]] = defaultdict(list)
    for token in tokens:
        if token.entropy >= threshold:
            by_id[token.id].append(token.entropy)
    kinds = [TokenKind(id, len(entropies), fmean(entropies)) for id, entropies in by_id.items()]
    kinds.sort(key=lambda kind: (-kind.count, -kind.mean_entropy))
    num_high = sum(kind.count for kind in kinds)
    mean = fmean(token.entropy for token in tokens) if tokens else 0.0
    return EntropyTable(len(tokens), mean, num_high / max(1, len(tokens)), kinds[:max_kinds])


def read_steps(folder: RunFolder, step: int | None) -> list[Row]:
    """Return the entropies of one step or of all. Raises `ShowError` if there are none."""
    files = sorted(folder.path.glob("entropies/step_*.jsonl" if step is None else f"entropies/step_{step:06}.jsonl"))
    if rows := [row for file in files for row in read_rows(file)]:
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


def print_episode(rows: Sequence[Row], name: str, decode: Decode) -> None:
    """Print an episode in which its forking and reflection tokens are marked, and then tables of these tokens.

    A terminal shows marked tokens in reverse colours. In a file or a pipe, which has no styles, they are in brackets.
    """
    text, console = Text(), Console()
    by_name = {f"{row['step']}/{row['problem']}/{row['sample']}": row for row in rows}
    if name not in by_name:
        raise ShowError(f"--episode {name}: expected STEP/PROBLEM/SAMPLE with entropies, such as {next(iter(by_name))}")
    for kind, part in marked_text(by_name[name], decode):
        has_brackets = kind in ("forking", "reflection") and not console.is_terminal
        text.append(f"⟦{escape_controls(part)}⟧" if has_brackets else escape_controls(part), STYLES[kind])
    console.print(text, soft_wrap=True)
    print_tables([by_name[name]], decode)


def marked_text(row: Row, decode: Decode) -> Iterator[tuple[str, str]]:
    """Yield the text of an episode in parts, each with the kind of its tokens, a key of `STYLES`."""
    sampled = list(sampled_tokens(row["response_ids"], row["entropies"]))
    threshold, remaining = high_entropy_threshold(sampled), iter(sampled)
    kinds = ["tool" if entropy is None else next(remaining).kind(threshold) for entropy in row["entropies"]]
    for kind, part in groupby(zip(kinds, row["response_ids"], strict=True), key=lambda pair: pair[0]):
        yield kind, decode([token for _, token in part])


def decoder(run: Path, model: str) -> Decode:
    """Return the function from token ids to text, by the tokenizer of `model` or of the run. Without one it shows the
    ids."""
    found = sorted(run.glob("stages/*/model/tokenizer_config.json"))  # every model of a run has the same
    if not model and not found:
        return lambda ids: "".join(f"[{token}]" for token in ids)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model or found[0].parent)
    return lambda ids: str(tokenizer.decode(ids))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Show the tokens of a run that had the highest entropy.")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--step", type=int, metavar="STEP", help="only this step")
    parser.add_argument("--episode", metavar="STEP/PROBLEM/SAMPLE", help="print this episode with its tokens marked")
    parser.add_argument("--model", default="", metavar="PATH", help="the tokenizer (default: the run's own)")
    args = parser.parse_args(argv)
    try:
        rows = read_steps(RunFolder(args.run), args.step)
        decode = decoder(args.run, args.model)
        if args.episode:
            print_episode(rows, args.episode, decode)
        else:
            print_tables(rows, decode)
    except (ShowError, RecordError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
