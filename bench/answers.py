"""How many labelled pairs of answers does each strictness get wrong, and what does a check cost?

    python -m bench.answers [--rounds 3] [--json]

A strictness is a set of rules by which an answer is right. Both strictnesses check the same pairs, in turn, so that
other load on the machine affects both. A false equivalent is a pair of different answers that is found equivalent. Such
pairs are harmful in training, since the model finds them and is rewarded for them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.tables import Block, Result, Table
from bench.servers import service
from bench.workloads.answer_pairs import LabelledPair, labelled_pairs
from sandbox.client import Client
from sandbox.types import Outcome, Strictness, Verdict

MAX_WRONG_SHARE = 0.01
"""Maximum share of the pairs whose verdict differs from the label."""
MAX_COST_RATIO = 1.5
"""Maximum CPU time of a strict check, as a multiple of one by math-verify."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Return exit code 1 if a requirement is not met: no strict verdict is a false `equivalent`,
    and the share of wrong strict verdicts and their CPU time have maxima."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("answers", __doc__, "python")
    parser.add_argument("--rounds", type=arguments.count, default=3, help="checks of each pair (default: 3)")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    pairs = labelled_pairs()
    texts = [(pair.gold, pair.answer) for pair in pairs]
    runs: dict[Strictness, list[list[Verdict]]] = {strictness: [] for strictness in Strictness}
    with service.running(service.guest_python(args.python)) as server, Client(server.url) as client:
        client.verify(texts[:1])  # starts the zygote of checks
        with command.counted_progress("rounds", args.rounds) as advance:
            for _ in range(args.rounds):
                for strictness in Strictness:
                    runs[strictness].append(client.verify(texts, strictness=strictness))
                advance()
    rows = {strictness.value: summarize(pairs, verdicts) for strictness, verdicts in runs.items()}
    strict, library = rows[Strictness.STRICT], rows[Strictness.MATH_VERIFY]
    cost_ratio = strict["mean_cpu_ms"] / library["mean_cpu_ms"]
    return {
        "pairs": len(pairs),
        "strictness": rows,
        "requirements": [
            requirements.at_most("false equivalents", 0, strict["false_equivalent"]),
            requirements.at_most("share of wrong verdicts", MAX_WRONG_SHARE, strict["wrong"] / len(pairs)),
            requirements.at_most("CPU time, times that of math-verify", MAX_COST_RATIO, round(cost_ratio, 3)),
        ],
    }


def summarize(pairs: Sequence[LabelledPair], runs: Sequence[Sequence[Verdict]]) -> dict[str, Any]:
    """Return the counts of the first run, and the CPU time per check over all runs."""
    found = [verdict.outcome is Outcome.EQUIVALENT for verdict in runs[0]]
    wrong = [pair for pair, is_equivalent in zip(pairs, found, strict=True) if is_equivalent != pair.are_equivalent]
    cpu_ms = [verdict.usage.cpu_ms for verdicts in runs for verdict in verdicts]
    return {
        "wrong": len(wrong),
        "false_equivalent": sum(not pair.are_equivalent for pair in wrong),
        "mean_cpu_ms": round(mean(cpu_ms), 3),
        "median_cpu_ms": round(median(cpu_ms), 3),
    }


def tables(result: Result) -> list[Block]:
    """A row for each strictness."""
    rows = [
        (
            f"`{name}`",
            f"{result['pairs']}",
            f"{row['wrong']}",
            f"{row['false_equivalent']}",
            f"{row['median_cpu_ms']:.1f}",
            f"{row['mean_cpu_ms']:.1f}",
        )
        for name, row in result["strictness"].items()
    ]
    head = ("strictness", "pairs", "wrong", "false equivalents", "CPU ms per check, median", "mean")
    return [Table(head, rows)]


if __name__ == "__main__":
    raise SystemExit(main())
