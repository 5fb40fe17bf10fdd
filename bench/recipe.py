"""The whole recipe, once: the gain of each stage, its duration, and the share of the trainer's own overhead.

    python -m bench.recipe [--config configs/tiny.toml] [--folder runs/recipe] [--json]

Runs `configs/tiny.toml` from nothing, as `rstar-train recipe` does. A training step consists of generation, tool calls,
optimisation, and overhead, which docs/algorithm.md defines by wall clock and by CPU time. Durations are kept in the run
folder, so a run that was interrupted resumes and counts as a whole.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.tables import Block, Result, Table
from trainer.config_loading import load_config
from trainer.recipe.phases import RecipeRun
from trainer.recipe.runner import PhaseFailed, run_recipe

CONFIG = Path(__file__).parent.parent / "configs" / "tiny.toml"
# Requirements on configs/tiny.toml with two cores:
MAX_SECONDS = 1200.0
MIN_ACCURACY_GAIN = 0.15
MAX_OVERHEAD_SHARE = 0.05
STAGE_FIELDS = ("name", "accuracy", "tool_error_ratio", "one_answer", "seconds")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe. Return exit code 1 if it failed, or a requirement is not met."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("recipe", __doc__)
    folder = Path("runs/recipe")
    parser.add_argument("--folder", type=Path, default=folder, help=f"the run folder (default: {folder})")
    parser.add_argument("--config", type=Path, default=CONFIG, help="(default: configs/tiny.toml)")
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="such as sft.epochs=1"
    )
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    config = load_config(args.config, {}, args.set)
    start = perf_counter()
    try:
        run = run_recipe(replace(config, run_dir=str(args.folder)))
    except PhaseFailed as error:
        raise command.BenchFailed(str(error)) from None
    return {"config": args.config.name, **summarize(run, perf_counter() - start)}


def summarize(run: RecipeRun, wall_s: float = 0.0) -> dict[str, Any]:
    """The result of a finished run.

    The duration of the run is `wall_s`. The sum of the durations of its phases, without the start of their processes,
    is larger if the run was resumed. The duration is then this sum.
    """
    stages = run.summary()["stages"]
    steps = [row for row in run.run_folder.read_metrics() if "step_s" in row]
    if not steps or len(stages) < 2:
        raise command.BenchFailed(f"{run.dir}: expected SFT and a stage of RL, each evaluated")
    step_s = sum(row["step_s"] for row in steps)
    seconds = max(wall_s, sum(result.seconds for phase in run.phases() if (result := run.result(phase))))
    gain = stages[-1]["accuracy"] - stages[0]["accuracy"]
    overhead_share = sum(row["overhead_s"] for row in steps) / step_s
    return {
        "stages": [{name: row[name] for name in STAGE_FIELDS} for row in stages],
        "seconds": seconds,
        "gain": gain,
        "problems": run.eval_problems_path().read_bytes().count(b"\n"),
        "steps": len(steps),
        "overhead_share": overhead_share,
        "overhead_cpu_share": sum(row["overhead_cpu_s"] for row in steps) / step_s,
        "rewards": [row["reward"] for row in steps],
        "requirements": [
            requirements.at_most("seconds on two cores, from nothing", MAX_SECONDS, round(seconds)),
            requirements.at_least("accuracy above SFT's", MIN_ACCURACY_GAIN, round(gain, 3)),
            requirements.at_most("overhead as a share of the steps", MAX_OVERHEAD_SHARE, round(overhead_share, 4)),
        ],
    }


def tables(result: Result) -> list[Block]:
    """A row for each stage, and the requirements."""
    rows = [
        (row["name"], *(f"{row[name]:.3f}" for name in STAGE_FIELDS[1:4]), f"{row['seconds']:.0f}")
        for row in result["stages"]
    ]
    return [
        Table(("", "accuracy", "tool errors", "one answer", "seconds"), rows),
        requirements.requirement_table(result["requirements"]),
        f"The accuracy is that of {result['problems']} held-out problems at temperature 1. The overhead of a step is "
        "the time in which neither generation, tool calls nor optimisation run; in parallel with them, the trainer's "
        f"own code used a CPU for {result['overhead_cpu_share']:.0%} of the time.",
    ]


def draw(axes: Any, result: Result) -> None:
    """The reward of each training step."""
    axes.plot(range(1, len(result["rewards"]) + 1), result["rewards"])
    axes.set_xlabel("training step of RL")
    axes.set_ylabel("mean reward of the sampled episodes")
    accuracies = " → ".join(f"{row['accuracy']:.3f}" for row in result["stages"])
    axes.set_title(f"{result['config']}: accuracy {accuracies}")


if __name__ == "__main__":
    raise SystemExit(main())
