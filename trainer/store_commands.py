"""The commands of `rstar-train` that read a store of episodes.

Each command imports its modules itself, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import json
import sys


def episodes(args: argparse.Namespace) -> None:
    """List the episodes of a store, and what share of the problems they solve."""
    from rich.console import Console

    from trainer.collection.store import StoreReader
    from trainer.recipe.episode_table import episode_report

    with StoreReader(args.store) as reader:
        content, tables = episode_report(reader, args.where, args.limit)
    if args.json:
        print(json.dumps(content))
    else:
        Console().print(*tables)


def replay(args: argparse.Namespace) -> None:
    """Run a stored episode again from its recorded tool responses, and compare every token."""
    from trainer.collection.store import Key, StoreReader
    from trainer.recipe.stored_episodes import replay

    with StoreReader(args.store) as reader:
        episode = replay(reader, Key(args.problem, args.sample))
    for turn in episode.turns:
        print(turn.text, *(f"[{call.status}] {call.response}" for call in turn.tool_calls), sep="\n")
    size = f"{len(episode.turns)} turns and {episode.response_length} tokens"
    print(f"replay: {size} are equal; stop_reason={episode.stop_reason} reward={episode.reward}", file=sys.stderr)


def rescore(args: argparse.Namespace) -> None:
    """Score stored episodes again, by their own or another environment, without sampling."""
    from trainer.collection.store import StoreReader
    from trainer.recipe.stored_episodes import rescore

    with StoreReader(args.store) as reader:
        changes = rescore(
            reader,
            args.environment,
            args.out,
            where=args.where,
            sandbox=args.sandbox,
            answer_check=args.answer_check,
            answer_rounding=args.answer_rounding,
            reward=args.reward,
        )
    print(json.dumps(changes) if args.json else "\n".join(f"{change}: {n}" for change, n in sorted(changes.items())))
    changed = sum(n for change, n in changes.items() if len(set(change.split(" -> "))) == 2)
    print(f"{changed} of {changes.total()} rewards change", file=sys.stderr)


def export(args: argparse.Namespace) -> None:
    """Write stored episodes as JSONL: token ids as they were generated, or chat messages."""
    from trainer.collection.store import StoreReader
    from trainer.recipe.stored_episodes import export

    with StoreReader(args.store) as reader:
        count = export(reader, args.format, args.out, where=args.where, rewards=args.rewards)
    print(f"{args.out}: {count} rows", file=sys.stderr)
