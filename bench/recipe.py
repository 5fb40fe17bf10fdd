"""The whole recipe on several seeds: the accuracy after each stage, the time, and the trainer's own overhead.

    python -m bench.recipe [--seeds 5] [--config configs/tiny.toml] [--folder runs/recipe] [--json]

Runs `configs/tiny.toml` from nothing, as `rstar-train recipe` does, once for each seed. Seeds differ in model, problems
and sampling. A training step consists of generation, tool calls, optimisation, and overhead, which docs/algorithm.md
defines by wall clock and by CPU time. Each seed has a run folder, so an interrupted benchmark resumes. The seconds of
the interrupted runs count.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

from bench.harness import arguments, command, requirements
from bench.harness.tables import Block, Result, Table
from trainer.config import RunConfig
from trainer.config_loading import load_config
from trainer.json_files import read_json, write_json
from trainer.recipe.phases import RecipeRun
from trainer.recipe.runner import PhaseFailed, run_recipe

CONFIG = Path(__file__).parent.parent / "configs" / "tiny.toml"
# Requirements on configs/tiny.toml with two cores:
MAX_CPU_SECONDS = 480.0
"""CPU seconds of the run that takes most. On two quiet cores a run takes no more seconds than CPU seconds, since one
core is always busy. Its seconds depend on what else the machine does."""
MIN_MEAN_GAIN = 0.18
MIN_GAIN = 0.10
MAX_OVERHEAD_SHARE = 0.05
STAGE_FIELDS = ("name", "accuracy", "tool_error_ratio", "one_answer", "seconds")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipes. Return exit code 1 if one of them failed, or a requirement is not met."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("recipe", __doc__)
    folder = Path("runs/recipe")
    parser.add_argument("--seeds", type=arguments.count, default=5, help="number of seeds, from 0 up (default: 5)")
    parser.add_argument("--folder", type=Path, default=folder, help=f"parent of the run folders (default: {folder})")
    parser.add_argument("--config", type=Path, default=CONFIG, help="(default: configs/tiny.toml)")
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="such as sft.epochs=1"
    )
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    config = load_config(args.config, {}, args.set)
    seeds = range(args.seeds)
    runs = [_run(replace(config, seed=seed, run_dir=str(args.folder / f"seed-{seed}"))) for seed in seeds]
    return {"config": args.config.name, **summarize(runs)}


def _run(config: RunConfig) -> dict[str, Any]:
    """Run or continue a recipe, and return its result. The seconds of all its runs are kept beside its folder."""
    file = Path(f"{config.run_dir}.json")
    used = read_json(file) or {"seconds": 0.0, "cpu_s": 0.0}
    started_at, cpu_s_before = perf_counter(), command.children_cpu_s()
    try:
        run = run_recipe(config)
    except PhaseFailed as error:
        raise command.BenchFailed(str(error)) from None
    finally:
        used["seconds"] += perf_counter() - started_at
        used["cpu_s"] += command.children_cpu_s() - cpu_s_before
        write_json(file, used)
    return {"seed": config.seed, **summarize_run(run), **used}


def summarize_run(run: RecipeRun) -> dict[str, Any]:
    """Return the result of a finished run, without its duration."""
    stages = run.summary()["stages"]
    steps = [row for row in run.run_folder.read_metrics() if "step_s" in row]
    if not steps or len(stages) < 2:
        raise command.BenchFailed(f"{run.dir}: expected SFT and a stage of RL, each evaluated")
    step_s = sum(row["step_s"] for row in steps)
    return {
        "stages": [{name: row[name] for name in STAGE_FIELDS} for row in stages],
        "gain": stages[-1]["accuracy"] - stages[0]["accuracy"],
        "problems": run.eval_problems_path().read_bytes().count(b"\n"),
        "steps": len(steps),
        "overhead_share": sum(row["overhead_s"] for row in steps) / step_s,
        "overhead_cpu_share": sum(row["overhead_cpu_s"] for row in steps) / step_s,
        "rewards": [row["reward"] for row in steps],
    }


def summarize(runs: Sequence[Result]) -> dict[str, Any]:
    """Return the result of the runs of all seeds."""
    gains = [run["gain"] for run in runs]
    overhead_share = median(run["overhead_share"] for run in runs)
    cpu_s = max(run["cpu_s"] for run in runs)
    return {
        "mean_gain": fmean(gains),
        "runs": list(runs),
        "requirements": [
            requirements.at_least("accuracy above SFT's, mean of the seeds", MIN_MEAN_GAIN, round(fmean(gains), 3)),
            requirements.at_least("accuracy above SFT's, smallest of the seeds", MIN_GAIN, round(min(gains), 3)),
            requirements.at_most("CPU seconds of a run, largest of the seeds", MAX_CPU_SECONDS, round(cpu_s)),
            requirements.at_most(
                "overhead as a share of the steps, median of the seeds", MAX_OVERHEAD_SHARE, round(overhead_share, 4)
            ),
        ],
    }


def tables(result: Result) -> list[Block]:
    """A row for each seed, their means, and the requirements."""
    runs = result["runs"]
    stages = [stage["name"] for stage in runs[0]["stages"]]
    columns = ("seed", *stages, "gain", "tool errors", "one answer", "seconds", "CPU seconds")
    rows = {str(run["seed"]): _values(run) for run in runs}
    rows["mean"] = [fmean(column) for column in zip(*rows.values(), strict=True)]
    overhead_cpu_share = fmean(run["overhead_cpu_share"] for run in runs)
    return [
        Table(columns, [(seed, *map(_cell, columns[1:], values)) for seed, values in rows.items()]),
        requirements.requirement_table(result["requirements"]),
        f"The columns {', '.join(stages)} have the accuracy after each stage on {runs[0]['problems']} held-out "
        "problems at temperature 1. Tool errors (the share of failing tool calls) and one answer are those after the "
        "last stage. The overhead of a step is the time in which neither generation, tool calls nor optimisation run; "
        f"in parallel with them, the trainer's own code used a CPU for {overhead_cpu_share:.0%} of the time.",
    ]


def _values(run: Result) -> list[float]:
    last = run["stages"][-1]
    accuracies = [stage["accuracy"] for stage in run["stages"]]
    return [*accuracies, run["gain"], last["tool_error_ratio"], last["one_answer"], run["seconds"], run["cpu_s"]]


def _cell(column: str, value: float) -> str:
    return f"{value:.0f}" if "seconds" in column else f"{value:.3f}"


def draw(axes: Any, result: Result) -> None:
    """The reward of each training step, for each seed."""
    runs = result["runs"]
    for run in runs:
        axes.plot(range(1, len(run["rewards"]) + 1), run["rewards"], label=f"seed {run['seed']}")
    axes.legend()
    axes.set_xlabel("training step of RL")
    axes.set_ylabel("mean reward of the sampled episodes")
    accuracies = zip(*([stage["accuracy"] for stage in run["stages"]] for run in runs), strict=True)
    shown = " → ".join(f"{fmean(values):.3f}" for values in accuracies)
    axes.set_title(f"{result['config']}: mean accuracy of {len(runs)} seeds {shown}")


if __name__ == "__main__":
    raise SystemExit(main())
