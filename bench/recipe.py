"""The whole recipe, once: what each stage brings, how long it takes, and how much of that is the trainer's own.

    python -m bench.recipe [--config configs/tiny.toml] [--folder runs/recipe] [--json]

`configs/tiny.toml` from nothing, as `rstar-train recipe` runs it. A step is generation, tools, optimisation, and what
is neither; `docs/algorithm.md` says how the last is counted, by the wall clock and by the processor. What a stage has
taken is kept with it, so that a run that was stopped goes on and counts as a whole.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.harness import command
from trainer.config_loading import load_config
from trainer.recipe.phases import RecipeRun
from trainer.recipe.runner import PhaseFailed, run_recipe

CONFIG = Path(__file__).parent.parent / "configs" / "tiny.toml"
MOST_S, LEAST_GAIN, MOST_ALONE = 1200.0, 0.15, 0.05
"""What is asked of the tiny one on two cores."""

Figures = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """The recipe; 1 if it failed, or something that is asked of it does not hold."""
    args = _parser().parse_args(argv)
    return command.run_as_command("recipe", lambda: _measure(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("recipe", __doc__ or "")
    parser.add_argument("--folder", type=Path, default=Path("runs/recipe"), help="of the run (default: runs/recipe)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="(default: configs/tiny.toml)")
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="as sft.epochs=1")
    return parser


def _measure(args: argparse.Namespace) -> int:
    config = load_config(args.config, {}, args.set)
    began = perf_counter()
    try:
        run = run_recipe(replace(config, run_dir=str(args.folder)))
    except PhaseFailed as why:
        raise command.BenchFailed(str(why)) from None
    figures = {"bench": "recipe", "config": args.config.name, **measured(run, perf_counter() - began)}
    columns = {name: name.replace("_", " ") for name in ("accuracy", "tool_error_ratio", "one_answer", "seconds")}
    rows = ((row["name"], *(f"{row[name]:.3f}" for name in columns)) for row in figures["stages"])
    command.show(f"{args.config.name}: {figures['seconds']:.0f} s", ("", *columns.values()), rows)
    command.show_asked("What is asked of it", figures["verdicts"])
    command.plot(args.plot, lambda axes: draw(axes, figures))
    command.finish(figures, _parser(), args)
    return 0 if all(row["holds"] for row in figures["verdicts"]) else 1


def measured(run: RecipeRun, seconds: float = 0.0) -> dict[str, Any]:
    """What a run that is over says of itself, and how long it took: `seconds` by the clock, or, where more was done
    before, what its units say, who do not count the start of their processes."""
    stages = run.summary()["stages"]
    steps = [row for row in run.run_folder.read_metrics() if "step_s" in row]
    if not steps or len(stages) < 2:
        raise command.BenchFailed(f"{run.dir}: expected SFT and a stage of RL, each evaluated")
    whole_s = sum(row["step_s"] for row in steps)
    found: dict[str, Any] = {
        "stages": [
            {name: row[name] for name in ("name", "accuracy", "tool_error_ratio", "one_answer", "seconds")}
            for row in stages
        ],
        "seconds": max(seconds, sum(result.seconds for phase in run.phases() if (result := run.result(phase)))),
        "gain": stages[-1]["accuracy"] - stages[0]["accuracy"],
        "problems": run.eval_problems_path().read_bytes().count(b"\n"),
        "steps": len(steps),
        "alone": sum(row["overhead_s"] for row in steps) / whole_s,
        "own_cpu": sum(row["overhead_cpu_s"] for row in steps) / whole_s,
        "rewards": [row["reward"] for row in steps],
    }
    asked = (
        ("seconds on two cores, from nothing", f"≤ {MOST_S:g}", round(found["seconds"]), found["seconds"] <= MOST_S),
        ("accuracy, above SFT's", f"≥ {LEAST_GAIN:g}", round(found["gain"], 3), found["gain"] >= LEAST_GAIN),
        ("the trainer's own, of a step", f"≤ {MOST_ALONE:g}", round(found["alone"], 4), found["alone"] <= MOST_ALONE),
    )
    found["verdicts"] = [dict(zip(("what", "needed", "got", "holds"), row, strict=True)) for row in asked]
    return found


def draw(axes: Any, figures: Figures) -> None:
    """The reward, step by step."""
    axes.plot(range(1, len(figures["rewards"]) + 1), figures["rewards"])
    axes.set_xlabel("step of RL")
    axes.set_ylabel("mean reward of what was sampled")
    path = " → ".join(f"{row['accuracy']:.3f}" for row in figures["stages"])
    axes.set_title(f"{figures['config']}: accuracy {path}")


if __name__ == "__main__":
    raise SystemExit(main())
