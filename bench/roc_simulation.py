"""What the arms of bench.roc should do to a policy of three probabilities, within seconds.

    python -m bench.roc_simulation [--seeds 16] [--steps 20] [--learning-rate 0.2] [--json]

The policy has a logit for the failing spelling of each of two calls, and one for the meaning of the ambiguous word
(`bench.workloads.ambiguous_problems`). A failed call is tried again and then works. Training has a limit of turns: with
8 an error costs nothing; with 4, an episode with two errors has no turn left for its answer; with 3, one error is
enough. The evaluation is exact and has 8 turns. Selection is that of `trainer.episodes.roc`, advantages are those of
GRPO, and the optimizer is Adam with the constants of the trainer. A step of the learning rate moves a logit, not the
weights of a model, so steps and not learning rates can be compared with bench.roc.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from bench.harness import arguments, command
from bench.harness.statistics import mean_sd
from bench.harness.tables import Block, Result, Table, format_mean_sd
from bench.roc import ARMS, NAMES
from trainer.episodes import roc
from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus, Turn

TRAINING_TURNS = (8, 4, 3)
"""Turns in training. Errors cost nothing, some, and much reward."""
EVALUATION_TURNS = 8
PROBLEMS_PER_STEP = 8
CLEAN_TURNS = 3
"""Turns of an episode without an error: two calls and the answer."""
TRAINED = ("grpo-g", "grpo-2g", "uniform", "roc")
ADAM = (0.9, 0.999, 1e-8)

Choice = tuple[bool, bool, bool]
"""Whether the first and the second call fail, and whether the word is read with its first meaning."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulation."""
    parser = arguments.parser("roc_simulation", __doc__)
    parser.add_argument("--seeds", type=arguments.count, default=16, help="number of seeds (default: 16)")
    parser.add_argument("--steps", type=arguments.count, default=20, help="optimizer steps (default: 20)")
    parser.add_argument(
        "--learning-rate", type=arguments.seconds, default=0.2, help="of Adam, on the logits (default: 0.2)"
    )
    return command.run_benchmark(parser, argv, _measure, tables)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for turns, arm in product(TRAINING_TURNS, TRAINED):
        runs = [simulate(arm, turns, seed, args.steps, args.learning_rate) for seed in range(args.seeds)]
        before, after, accuracy = ([run[column] for run in runs] for column in range(3))
        row = {"before": mean_sd(before), "after": mean_sd(after), "accuracy": mean_sd(accuracy)}
        results.setdefault(str(turns), {})[arm] = row
    return {"training_turns": results, "seeds": args.seeds, "steps": args.steps}


def simulate(arm: str, max_turns: int, seed: int, steps: int, learning_rate: float) -> tuple[float, float, float]:
    """Train once. Return the share of failing calls in correct episodes before and after, and the accuracy after."""
    settings = ARMS[arm]
    rng, selection_rng = random.Random(f"{seed}"), random.Random(f"select {seed}")
    logits, moments = [0.0] * 3, [(0.0, 0.0)] * 3
    before, _ = _evaluate(logits)
    for step in range(1, steps + 1):
        gradients = [0.0] * 3
        for _ in range(PROBLEMS_PER_STEP):
            coin = rng.random() < 0.5
            choices = [_choose(logits, rng) for _ in range(settings["samples_per_problem"])]
            group = [_episode(choice, coin, max_turns) for choice in choices]
            kept = _select(group, settings, selection_rng)
            rewards = [group[i].reward or 0.0 for i in kept]
            spread = mean_sd(rewards) or {}
            for i, reward in zip(kept, rewards, strict=True):
                advantage = (reward - spread["mean"]) / (spread["sd"] + 1e-4) / len(kept) / PROBLEMS_PER_STEP
                for k, chosen in enumerate(choices[i]):
                    gradients[k] += advantage * (chosen - _sigmoid(logits[k]))
        first, second, epsilon = ADAM
        for k, gradient in enumerate(gradients):
            mean, square = moments[k]
            mean, square = first * mean + (1 - first) * gradient, second * square + (1 - second) * gradient**2
            moments[k] = mean, square
            scale = math.sqrt(square / (1 - second**step)) + epsilon
            logits[k] += learning_rate * mean / (1 - first**step) / scale
    return before, *_evaluate(logits)


def tables(result: Result) -> list[Block]:
    """A row for each arm of each dose."""
    rows = [
        (turns, NAMES[arm], *(format_mean_sd(row[name]) for name in ("before", "after", "accuracy")))
        for turns, arms in result["training_turns"].items()
        for arm, row in arms.items()
    ]
    heading = ("turns in training", "", "tool errors of correct, before", "after", "accuracy")
    return [Table(heading, rows), f"{result['seeds']} seeds, {result['steps']} steps; mean ± deviation over seeds."]


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def _select(group: Sequence[Episode], settings: Mapping[str, Any], rng: random.Random) -> list[int]:
    mode, count = settings["roc_mode"], settings["kept_per_problem"]
    return list(range(count)) if mode == "off" else roc.resample_on_correct(group, count, mode=mode, rng=rng)


def _choose(logits: Sequence[float], rng: random.Random) -> Choice:
    first, second, meaning = (rng.random() < _sigmoid(logit) for logit in logits)
    return first, second, meaning


def _evaluate(logits: Sequence[float]) -> tuple[float, float]:
    """The exact share of failing calls in correct episodes, and the exact accuracy."""
    calls = failed = accuracy = 0.0
    for choice, coin in product(product((False, True), repeat=3), (False, True)):
        odds = (
            _sigmoid(logit) if chosen else 1 - _sigmoid(logit) for logit, chosen in zip(logits, choice, strict=True)
        )
        episode = _episode(choice, coin, EVALUATION_TURNS)
        weight = math.prod(odds) / 2 * (episode.reward or 0.0)
        accuracy += weight
        calls, failed = calls + weight * episode.num_tool_calls, failed + weight * episode.num_failed_tool_calls
    return failed / calls, accuracy


_EPISODES: dict[tuple[Choice, bool, int], Episode] = {}


def _episode(choice: Choice, coin: bool, max_turns: int) -> Episode:
    """The episode of a choice. Equal arguments give the same object, since a simulation has a million of them."""
    if (choice, coin, max_turns) not in _EPISODES:
        _EPISODES[choice, coin, max_turns] = _new_episode(choice, coin, max_turns)
    return _EPISODES[choice, coin, max_turns]


def _new_episode(choice: Choice, coin: bool, max_turns: int) -> Episode:
    first, second, meaning = choice
    calls = [status for fails in (first, second) for status in [ToolCallStatus.ERROR] * fails + [ToolCallStatus.OK]]
    turns = [Turn(0, 0, "", (ToolCall("python", {}, status, ""),)) for status in calls[:max_turns]]
    is_answered = CLEAN_TURNS + first + second <= max_turns
    if is_answered:
        turns.append(Turn(0, 0, "", ()))
    return Episode(
        Problem("p", "", "1"),
        0,
        turns=turns,
        stop_reason=StopReason.FINISHED,
        answer_blocks=int(is_answered),
        reward=float(is_answered and meaning == coin),
    )


if __name__ == "__main__":
    raise SystemExit(main())
