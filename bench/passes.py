"""How many positions does a training step compute for each token in its loss?

    python -m bench.passes [--steps 20] [--without-signal 0.4] [--json]

Counts positions of generated rows with the lengths of the paper's first RL stage (rStar2-Agent, arXiv 2508.20722,
section 4): responses of 1K to 4K tokens on average, and of 8,192 tokens at most. No model runs. A rank has 128 rows of
8 problems per step, as in configs/qwen3-14b-mi300x.toml. These figures are assumptions, because the paper does not
state them: a prompt of 200 to 500 tokens with the description of the tool, up to 4 tool responses of 20 to 200 tokens,
and problems without a learning signal (`--without-signal`).

- TRL pads all rows of a step to the longest prompt and the longest response, and computes them twice.
- The token budget (`trainer/training/token_budget.py`) computes the rows in the loss once, in passes of rows of similar
  length.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import arguments, command
from bench.harness.requirements import at_most, requirement_table
from bench.harness.tables import Block, Result, Table
from trainer.config_loading import load_config
from trainer.training.token_budget import pack_rows

CONFIG = Path(__file__).parent.parent / "configs" / "qwen3-14b-mi300x.toml"
PROMPT_TOKENS = (200, 500)
TOOL_RESPONSES = (0, 4)
TOOL_RESPONSE_TOKENS = (20, 200)
LOG_MEAN, LOG_DEVIATION = 7.6, 0.7
"""Of the natural logarithm of a response's tokens. Their mean is 2,500."""
MAX_PER_LOSS_TOKEN = 1.15


class Row(NamedTuple):
    """Numbers of tokens."""

    prompt: int
    response: int
    """With tool responses."""
    loss: int


def main(argv: Sequence[str] | None = None) -> int:
    """Count, and return exit code 1 if a step computes more than 1.15 positions per token in the loss."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("passes", __doc__)
    parser.add_argument("--steps", type=arguments.count, default=20, help="steps of one rank (default: 20)")
    parser.add_argument(
        "--without-signal", type=float, default=0.4, help="share of problems with equal rewards (default: 0.4)"
    )
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    config = load_config(CONFIG, {}, [])
    stage = next(iter(config.stages.values()))
    num_ranks = config.hardware.nodes * config.hardware.gpus_per_node
    num_problems = stage.problems_per_step // num_ranks
    rng = random.Random(0)
    totals: Counter[str] = Counter()
    for _ in range(args.steps):
        rows = [
            row
            for _ in range(num_problems)
            for row in generated_rows(rng, stage.kept_per_problem, stage.max_response_tokens, args.without_signal)
        ]
        totals.update(counted(rows, stage.micro_batch_tokens))
    per_loss_token = {name: totals[name] / totals["loss"] for name in totals if name != "loss"}
    requirement = at_most("positions computed per token in the loss", MAX_PER_LOSS_TOKEN, per_loss_token["budget"])
    return {
        "steps": args.steps,
        "without_signal": args.without_signal,
        "micro_batch_tokens": stage.micro_batch_tokens,
        "per_loss_token": per_loss_token,
        "requirements": [requirement],
    }


def generated_rows(rng: random.Random, count: int, max_response: int, without_signal: float) -> Iterator[Row]:
    """Yield the kept rows of one problem. None has a token in the loss if the problem has no learning signal."""
    prompt, has_signal = rng.randint(*PROMPT_TOKENS), rng.random() >= without_signal
    for _ in range(count):
        tool = sum(rng.randint(*TOOL_RESPONSE_TOKENS) for _ in range(rng.randint(*TOOL_RESPONSES)))
        response = min(max_response, round(rng.lognormvariate(LOG_MEAN, LOG_DEVIATION)) + tool)
        yield Row(prompt, response, max(0, response - tool) if has_signal else 0)


def counted(rows: Sequence[Row], micro_batch_tokens: int) -> dict[str, int]:
    """Return the tokens in the loss, and the positions that each way computes. "unpadded" are the tokens of the rows in
    the loss, "responses" those without prompts: what no padding, and shared prompts, would leave."""
    in_loss = [row for row in rows if row.loss]
    lengths = [row.prompt + row.response for row in in_loss]
    groups = pack_rows(lengths, range(len(in_loss)), micro_batch_tokens)
    longest = max(row.prompt for row in rows) + max(row.response for row in rows)
    return {
        "loss": sum(row.loss for row in rows),
        "trl": 2 * len(rows) * longest,
        "once": len(rows) * longest,
        "budget": sum(len(group) * lengths[group[0]] for group in groups),
        "unpadded": sum(lengths),
        "responses": sum(row.response for row in in_loss),
    }


NAMES = {
    "trl": "TRL: all rows padded to the longest, computed twice",
    "once": "the same, computed once",
    "budget": "token budget",
    "unpadded": "if nothing were padded",
    "responses": "if also the prompts were not computed",
}


def tables(result: Result) -> list[Block]:
    """Positions per token in the loss, and the requirement."""
    rows = [(name, f"{result['per_loss_token'][key]:.2f}") for key, name in NAMES.items()]
    share = result["without_signal"]
    return [
        Table(("", "positions computed per token in the loss"), rows),
        f"{share:.0%} of the problems have no learning signal; a pass has {result['micro_batch_tokens']:,} positions.",
        requirement_table(result["requirements"]),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
