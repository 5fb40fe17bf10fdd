"""Whether Resample on Correct keeps its promise: fewer failing tool calls in correct rollouts, at no loss of accuracy.

    python -m bench.roc [--seeds 5] [--steps 30] [--arms roc,grpo-g,grpo-2g] [--folder runs/roc] [--plot F.png] [--json]

The tiny model, once taught by SFT for each seed, goes on in several ways: RoC samples 2G rollouts of a problem and
keeps G; GRPO keeps all of G, which costs half the sampling and the same training; GRPO keeps all of 2G, which costs the
same sampling and twice the training. All else is configs/tiny.toml's. What comes out is measured on the same fresh
problems. Seeds differ in everything: model, problems, sampling. So arms are compared within a seed, and the table says
what the differences were, with their spread over seeds.

Every arm of every seed is a recipe with a folder of its own: what is done is not run again, and a kill costs a step or
two. The whole takes hours on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from bench.harness import command
from trainer.config import RunConfig
from trainer.config_loading import load_config
from trainer.recipe.evaluation import read_outcomes, summarize
from trainer.recipe.phases import RecipeRun
from trainer.recipe.runner import PhaseFailed, run_recipe

CONFIG = Path(__file__).parent.parent / "configs" / "tiny.toml"
GROUP = 8
"""G. RoC samples twice as many."""
ARMS: dict[str, dict[str, Any]] = {
    "roc": {"samples_per_problem": 2 * GROUP, "kept_per_problem": GROUP, "roc_mode": "paper"},
    "grpo-g": {"samples_per_problem": GROUP, "kept_per_problem": GROUP, "roc_mode": "off"},
    "grpo-2g": {"samples_per_problem": 2 * GROUP, "kept_per_problem": 2 * GROUP, "roc_mode": "off"},
    "roc-released": {"samples_per_problem": 2 * GROUP, "kept_per_problem": GROUP, "roc_mode": "released"},
}
DEFAULT_ARMS = "roc,grpo-g,grpo-2g"
NAMES = {
    "sft": "before: SFT",
    "roc": "RoC, 2G to G",
    "grpo-g": "GRPO, all of G",
    "grpo-2g": "GRPO, all of 2G",
    "roc-released": "RoC as released, 2G to G",
}
STAGE = "rl"
MEASURES = {
    "accuracy": "accuracy",
    "tool_error_ratio_correct": "tool errors of correct",
    "tool_error_ratio": "tool errors",
    "one_answer": "one answer",
    "response_length": "tokens per episode",
}
COSTS = {"rollouts": "rollouts", "sampled_tokens": "tokens sampled", "in_loss": "rollouts in the loss"}
CURVES = ("tool_error_ratio_correct", "one_answer", "reward")

Figures = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """The comparison; 1 if a run failed."""
    args = _parser().parse_args(argv)
    return command.run_as_command("roc", lambda: _compare(args))


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("roc", __doc__ or "")
    parser.add_argument("--seeds", type=command.count, default=5, help="how many, from 0 up (default: 5)")
    parser.add_argument("--steps", type=command.count, default=30, help="of RL (default: 30)")
    parser.add_argument("--arms", type=_arms, default=_arms(DEFAULT_ARMS), help=f"of {','.join(ARMS)}")
    parser.add_argument("--folder", type=Path, default=Path("runs/roc"), help="where the runs are (default: runs/roc)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="what all arms share (default: configs/tiny.toml)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as sft.epochs=1")
    return parser


def _arms(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in ARMS]:
        raise argparse.ArgumentTypeError(f"unknown arm {unknown[0]!r}; expected some of {', '.join(ARMS)}")
    return names


def _compare(args: argparse.Namespace) -> int:
    shared = load_config(args.config, {}, args.set)
    if not shared.stages:
        raise command.BenchFailed(f"{args.config}: expected a stage, for the lengths and turns that all arms have")
    seeds = []
    try:
        for seed in range(args.seeds):
            taught = run_recipe(taught_by(shared, args.folder / f"sft-{seed}", seed), log=_say)
            rows = {"sft": measured(taught, "sft")}
            for arm in args.arms:
                config = arm_of(shared, arm, taught, args.folder / f"{arm}-{seed}", args.steps)
                rows[arm] = measured(run_recipe(config, log=_say), STAGE)
            seeds.append(rows)
    except PhaseFailed as why:
        raise command.BenchFailed(str(why)) from None
    figures = {"bench": "roc", "steps": args.steps, "group": GROUP, **summary(seeds)}
    _show(figures)
    command.plot(args.plot, lambda axes: draw(axes, figures))
    command.finish(figures, _parser(), args)
    return 0


def taught_by(shared: RunConfig, folder: Path, seed: int) -> RunConfig:
    """SFT and nothing after it. Evaluated at the length and turns of the longest stage, as every arm is."""
    longest = max(shared.stages.values(), key=lambda stage: (stage.max_response_tokens, stage.max_turns))
    limits = replace(shared.eval, max_response_tokens=longest.max_response_tokens, max_turns=longest.max_turns)
    return replace(shared, seed=seed, run_dir=str(folder), stages={}, eval=limits)


def arm_of(shared: RunConfig, arm: str, taught: RecipeRun, folder: Path, steps: int) -> RunConfig:
    """One long stage from the model of `taught`, in the arm's way."""
    config = taught.config
    longest = max(shared.stages.values(), key=lambda stage: (stage.max_response_tokens, stage.max_turns))
    stage = replace(longest, name=STAGE, steps=steps, difficulty_filter_samples=0, reset_optimizer=False, **ARMS[arm])
    model = replace(config.model, path=str(taught.dir / taught.trained_model("sft").model))
    return replace(config, run_dir=str(folder), model=model, sft=replace(config.sft, data=()), stages={STAGE: stage})


def measured(run: RecipeRun, stage: str) -> dict[str, Any]:
    """What a run's last evaluation and its metrics say."""
    outcomes = sorted(read_outcomes(run.stage_dir(stage) / "eval").items())
    groups = [[one for _, one in some] for _, some in groupby(outcomes, key=lambda item: item[0][0])]
    found = summarize(groups, run.config.eval.samples_per_problem)
    steps = [row for row in run.run_folder.read_metrics() if row["stage"] == stage]
    return {
        **{name: found.measures[name].value if name in found.measures else None for name in MEASURES},
        "unavailable": found.unavailable,
        "rollouts": sum(row.get("episodes_in_loss", 0) + row.get("episodes_not_in_loss", 0) for row in steps),
        "sampled_tokens": sum(row.get("sampled_tokens", 0) for row in steps),
        "in_loss": sum(row.get("episodes_in_loss", 0) for row in steps),
        "curves": {name: [row.get(name) for row in steps] for name in CURVES},
    }


def summary(seeds: Sequence[Mapping[str, Figures]]) -> dict[str, Any]:
    """Each arm's numbers over the seeds, and how far RoC is from the others within a seed."""
    arms = list(seeds[0])
    return {
        "seeds": len(seeds),
        "names": {arm: NAMES[arm] for arm in arms},
        "arms": {arm: {name: _spread(_of(seeds, arm, name)) for name in (*MEASURES, *COSTS)} for arm in arms},
        "differences": {
            arm: {
                name: _spread(
                    mine - its
                    for mine, its in zip(_of(seeds, "roc", name), _of(seeds, arm, name), strict=True)
                    if mine is not None and its is not None
                )
                for name in MEASURES
            }
            for arm in arms
            if "roc" in arms and arm not in ("roc", "sft")
        },
        "runs": [{arm: {k: v for k, v in row.items() if k != "curves"} for arm, row in rows.items()} for rows in seeds],
        "curves": {
            arm: {
                name: [_mean(step) for step in zip(*(rows[arm]["curves"][name] for rows in seeds), strict=False)]
                for name in CURVES
            }
            for arm in arms
            if arm != "sft"
        },
    }


def draw(axes: Any, figures: Figures) -> None:
    """Tool errors of correct rollouts, step by step, the mean over seeds."""
    for arm, curves in figures["curves"].items():
        points = [
            (step, value) for step, value in enumerate(curves["tool_error_ratio_correct"], 1) if value is not None
        ]
        axes.plot(*zip(*points, strict=True), label=NAMES[arm])
    axes.set_xlabel("step")
    axes.set_ylabel("failing tool calls in correct rollouts")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Mean of {figures['seeds']} seeds, G = {figures['group']}")
    if axes.lines:  # none where no rollout was right
        axes.legend()


def _show(figures: Figures) -> None:
    names = {**MEASURES, **COSTS}
    title = f"After {figures['steps']} steps, mean ± deviation over {figures['seeds']} seeds"
    _show_arms(title, names, {NAMES[arm]: its for arm, its in figures["arms"].items()})
    if figures["differences"]:
        less = {f"less {NAMES[arm]}": its for arm, its in figures["differences"].items()}
        _show_arms("RoC, within a seed", MEASURES, less)


def _show_arms(title: str, names: Mapping[str, str], arms: Mapping[str, Figures]) -> None:
    rows = ((shown, *(command.spread(its[name]) for its in arms.values())) for name, shown in names.items())
    command.show(title, ("", *arms), rows)


def _of(seeds: Sequence[Mapping[str, Figures]], arm: str, name: str) -> list[float | None]:
    return [rows[arm][name] for rows in seeds]


def _spread(values: Any) -> dict[str, float] | None:
    some = [value for value in values if value is not None]
    if not some:
        return None
    return {"mean": round(fmean(some), 4), "sd": round(stdev(some), 4) if len(some) > 1 else 0.0}


def _mean(values: Sequence[float | None]) -> float | None:
    some = [value for value in values if value is not None]
    return round(fmean(some), 4) if some else None


def _say(text: str) -> None:
    command.CONSOLE.print(text, highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
