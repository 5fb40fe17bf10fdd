"""Does Resample on Correct (RoC) lead to fewer failing tool calls in correct episodes, without loss of accuracy?

    python -m bench.roc [--task costly|free] [--seeds 5] [--steps 30] [--max-turns N] [--arms roc,grpo-g,grpo-2g]
                        [--folder runs/roc] [--json]
    python -m bench.roc --config configs/smollm2.toml --before-sft --seeds 3 --steps 10 --arms roc,grpo-g

The task `costly` has the generated problems of configs/tiny.toml. On it, an episode with failing calls is less often
correct. On the task `free` (bench/workloads/ambiguous_problems.py), a failing call costs nearly no reward. This is
checked after SFT: the share of failing calls in correct episodes must be nearly equal to their share in all episodes.
With a lower `--max-turns`, errors cost reward on the task `free`, too.

For each seed, the tiny model gets SFT once and is then trained in several ways ("arms"):

| arm     | samples per problem | kept episodes                | cost, compared with `roc`          |
|---------|---------------------|------------------------------|------------------------------------|
| roc     | 2G                  | G, selected by RoC           |                                    |
| grpo-g  | G                   | all                          | half the sampling, equal training  |
| grpo-2g | 2G                  | all                          | equal sampling, twice the training |
| uniform | 2G                  | G, drawn at random           | equal                              |

`uniform` keeps the numbers of correct and of wrong episodes that RoC keeps.

All other settings are those of configs/tiny.toml, and all models are evaluated on the same held-out problems.
`--config` replaces these settings and the model. With `--before-sft`, a pretrained model is also evaluated before SFT.
Seeds differ in model, problems and sampling. So arms are compared within a seed, and the table has the mean of these
differences and their deviation over seeds. Every arm of every seed is a recipe with its own run folder, so an
interrupted comparison can be resumed. The whole comparison takes hours on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.harness import arguments, command
from bench.harness.requirements import Requirement, at_least, at_most, requirement_table
from bench.harness.statistics import mean_sd, sign_flip_p
from bench.harness.tables import STDERR, Block, Result, Table, format_mean_sd
from bench.workloads.ambiguous_problems import write_files
from trainer.config import RunConfig, StageConfig
from trainer.config_loading import load_config
from trainer.recipe.evaluation import read_outcomes
from trainer.recipe.evaluation import summarize as summarize_episodes
from trainer.recipe.phases import INITIAL_STAGE, RecipeRun
from trainer.recipe.runner import NO_PREFLIGHT, PhaseFailed, run_recipe

CONFIG = Path(__file__).parent.parent / "configs" / "tiny.toml"
GROUP = 8
"""G, the number of kept episodes per problem."""
ARMS: dict[str, dict[str, Any]] = {
    "roc": {"samples_per_problem": 2 * GROUP, "kept_per_problem": GROUP, "roc_mode": "paper"},
    "grpo-g": {"samples_per_problem": GROUP, "kept_per_problem": GROUP, "roc_mode": "off"},
    "grpo-2g": {"samples_per_problem": 2 * GROUP, "kept_per_problem": 2 * GROUP, "roc_mode": "off"},
    "uniform": {"samples_per_problem": 2 * GROUP, "kept_per_problem": GROUP, "roc_mode": "uniform"},
}
DEFAULT_ARMS = "roc,grpo-g,grpo-2g"
BEFORE_SFT = "before-sft"
"""Name of the evaluation of the model before SFT."""
NAMES = {
    BEFORE_SFT: "before SFT",
    "sft": "after SFT",
    "roc": "RoC, 2G to G",
    "grpo-g": "GRPO, all of G",
    "grpo-2g": "GRPO, all of 2G",
    "uniform": "uniform, 2G to G",
}
TASKS: dict[str, Callable[[Path], list[str]]] = {
    "costly": lambda folder: [],
    "free": lambda folder: [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'problems.jsonl'}",
        f"sft.data={folder / 'conversations.jsonl'}",
        f"eval.data={folder / 'held_out.jsonl'}",
        *("engines.max_num_seqs=128", "engines.max_model_len=448", "sft.epochs=1", "rl.problems_per_step=8"),
        *("stages.rl3.max_turns=8", "eval.samples_per_problem=2"),
    ],
}
"""Functions that take the folder with the files of a task. They return the settings that differ from the
configuration."""
FREE_FILES = {"problems": 1024, "conversations": 16000, "held_out": 256}
"""Numbers of rows in the files of the task `free`. There are enough problems that a stage repeats none. After SFT on
6,000 conversations, the model copies numbers wrongly more often after an error, so errors cost reward. After 16,000
conversations this hardly happens."""
MAX_GATE = 0.01
"""The requirement on the task `free` after SFT: the share of failing calls in correct episodes and their share in all
episodes differ by at most this. The comparison ends before RL if the difference exceeds this bound by two standard
errors or more."""
MAX_ERROR_RATIO = 0.5
"""The requirement on the task `free`: RoC's share of failing calls, divided by the share of each other arm, is at most
this."""
MAX_P = 0.01
"""The requirement on the task `free`: the p-value of this difference is at most this."""
STAGE = "rl"
"""Name of the only RL stage of an arm."""
MEASURES = {
    "accuracy": "accuracy",
    "tool_error_ratio_correct": "tool errors of correct",
    "tool_error_ratio": "tool errors",
    "one_answer": "one answer",
    "response_length": "tokens per episode",
}
"""Measures of an evaluation, with their headings in the table."""
COSTS = {"episodes": "episodes", "sampled_tokens": "tokens sampled", "episodes_in_loss": "in the loss"}
"""Sums over the training steps, with their headings."""
CURVES = ("tool_error_ratio_correct", "one_answer", "reward")
"""Metrics of each training step that the result has."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Return exit code 1 if a run failed."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("roc", __doc__)
    arms = arguments.names_of(ARMS)
    parser.add_argument("--task", choices=TASKS, default="costly", help="whether a failing call costs reward")
    parser.add_argument("--max-turns", type=arguments.count, help="turns in training (default: those of the stage)")
    parser.add_argument("--seeds", type=arguments.count, default=5, help="number of seeds, from 0 up (default: 5)")
    parser.add_argument("--steps", type=arguments.count, default=30, help="training steps of RL (default: 30)")
    parser.add_argument("--arms", type=arms, default=arms(DEFAULT_ARMS), help=f"of {','.join(ARMS)}")
    parser.add_argument("--before-sft", action="store_true", help="also evaluate the model before SFT")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/roc"), help="parent of the run folders (default: runs/roc)"
    )
    parser.add_argument("--config", type=Path, default=CONFIG, help="shared settings (default: configs/tiny.toml)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace a setting, such as sft.epochs=1"
    )
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    try:
        sft_runs = [_run_sft(args, seed) for seed in range(args.seeds)]
        gate = _gate([measured(run, "sft") for run in sft_runs]) if args.task == "free" else {}
        seeds = [_run_arms(args, seed, sft_run) for seed, sft_run in enumerate(sft_runs)]
    except PhaseFailed as error:
        raise command.BenchFailed(str(error)) from None
    result = {"task": args.task, "steps": args.steps, "group": GROUP, **gate, **summarize(seeds)}
    if args.task == "free" and not args.max_turns:
        result["requirements"] = _requirements(result)
    return result


def _shared_settings(args: argparse.Namespace, seed: int) -> RunConfig:
    folder = args.folder / f"task-{seed}"
    shared = load_config(args.config, {}, [*TASKS[args.task](folder), *args.set])
    if not shared.stages:
        raise command.BenchFailed(f"{args.config}: expected a stage, which gives all arms their lengths and turns")
    if args.task == "free" and not folder.exists():
        write_files(folder, seed, **FREE_FILES)
    return shared


def _run_sft(args: argparse.Namespace, seed: int) -> RecipeRun:
    return run_recipe(sft_config(_shared_settings(args, seed), args.folder / f"sft-{seed}", seed), log=_log)


def _gate(rows: Sequence[Result]) -> dict[str, Any]:
    """Return the mean over the seeds of a difference: the share of failing calls in correct episodes minus their share
    in all episodes. Raises `BenchFailed` if the difference shows that errors cost or bring reward."""
    if any(row["tool_error_ratio_correct"] is None for row in rows):
        raise command.BenchFailed("after SFT no episode with a tool call is correct; raise sft.epochs")
    gate = mean_sd([row["tool_error_ratio_correct"] - row["tool_error_ratio"] for row in rows])
    assert gate is not None
    standard_error = gate["sd"] / len(rows) ** 0.5
    if abs(gate["mean"]) - 2 * standard_error >= MAX_GATE:
        raise command.BenchFailed(
            f"after SFT the share of failing calls in correct episodes less that in all is {gate['mean']:.4f} ± "
            f"{standard_error:.4f}; expected less than {MAX_GATE} in size, since errors should cost no reward; raise "
            "--seeds, or the number of conversations for SFT"
        )
    return {"gate": gate}


def _run_arms(args: argparse.Namespace, seed: int, sft_run: RecipeRun) -> dict[str, Result]:
    rows = {}
    if args.before_sft:
        rows[BEFORE_SFT] = measured(_evaluate_before_sft(sft_run), BEFORE_SFT)
    rows["sft"] = measured(sft_run, "sft")
    for arm in args.arms:
        folder = args.folder / f"{arm}{f'-{args.max_turns}-turns' if args.max_turns else ''}-{seed}"
        config = arm_config(_shared_settings(args, seed), arm, sft_run, folder, args.steps, args.max_turns)
        rows[arm] = measured(run_recipe(config, log=_log), STAGE)
    return rows


def _evaluate_before_sft(sft_run: RecipeRun) -> RecipeRun:
    """Evaluate the model from which SFT has started, as a stage of the run."""
    out = sft_run.stage_dir(BEFORE_SFT) / "eval"
    arguments = [str(sft_run.dir), "--model", str(sft_run.model_path(sft_run.trained_model(INITIAL_STAGE).model))]
    command_line = [sys.executable, "-m", "trainer", "eval", *arguments, "--out", str(out), NO_PREFLIGHT]
    if exit_code := subprocess.run(command_line, stdout=subprocess.DEVNULL, check=False).returncode:
        raise command.BenchFailed(f"the evaluation before SFT failed with exit code {exit_code}")
    return sft_run


def _requirements(result: Result) -> list[Requirement]:
    errors = {arm: row["tool_error_ratio_correct"]["mean"] for arm, row in result["arms"].items()}
    gate = at_most("after SFT: errors of correct less all, size", MAX_GATE, round(abs(result["gate"]["mean"]), 4))
    return [gate] + [
        requirement
        for arm, row in result["differences"].items()
        for requirement in (
            at_most(f"errors of RoC over {NAMES[arm]}", MAX_ERROR_RATIO, errors["roc"] / errors[arm]),
            at_most(f"p of the difference to {NAMES[arm]}", MAX_P, row["tool_error_ratio_correct"]["p"]),
            at_least(f"accuracy of RoC less {NAMES[arm]}", 0, row["accuracy"]["mean"]),
        )
    ]


def sft_config(shared: RunConfig, folder: Path, seed: int) -> RunConfig:
    """The settings of SFT alone. It is evaluated with the length and turns of the longest stage, like every arm."""
    longest = _longest_stage(shared)
    limits = replace(shared.eval, max_response_tokens=longest.max_response_tokens, max_turns=longest.max_turns)
    return replace(shared, seed=seed, run_dir=str(folder), stages={}, eval=limits)


def arm_config(
    shared: RunConfig, arm: str, sft_run: RecipeRun, folder: Path, steps: int, max_turns: int | None = None
) -> RunConfig:
    """One long stage that starts from the model of `sft_run`, with the arm's settings."""
    config = sft_run.config
    longest = _longest_stage(shared)
    longest = replace(longest, max_turns=max_turns or longest.max_turns)
    stage = replace(longest, name=STAGE, steps=steps, difficulty_filter_samples=0, reset_optimizer=False, **ARMS[arm])
    model = replace(config.model, path=str(sft_run.dir / sft_run.trained_model("sft").model))
    return replace(config, run_dir=str(folder), model=model, sft=replace(config.sft, data=()), stages={STAGE: stage})


def _longest_stage(shared: RunConfig) -> StageConfig:
    return max(shared.stages.values(), key=lambda stage: (stage.max_response_tokens, stage.max_turns))


def measured(run: RecipeRun, stage: str) -> dict[str, Any]:
    """The measures of a run's last evaluation, and the costs of its training steps."""
    outcomes = sorted(read_outcomes(run.stage_dir(stage) / "eval").items())
    by_problem = groupby(outcomes, key=lambda item: item[0][0])
    groups = [[outcome for _, outcome in items] for _, items in by_problem]
    evaluation = summarize_episodes(groups, run.config.eval.samples_per_problem)
    steps = [row for row in run.run_folder.read_metrics() if row["stage"] == stage]
    return {
        **{name: evaluation.measures[name].value if name in evaluation.measures else None for name in MEASURES},
        "unavailable": evaluation.unavailable,
        "episodes": sum(row.get("episodes_in_loss", 0) + row.get("episodes_not_in_loss", 0) for row in steps),
        "sampled_tokens": sum(row.get("sampled_tokens", 0) for row in steps),
        "episodes_in_loss": sum(row.get("episodes_in_loss", 0) for row in steps),
        "curves": {name: [row.get(name) for row in steps] for name in CURVES},
    }


def summarize(seeds: Sequence[Mapping[str, Result]]) -> dict[str, Any]:
    """Each arm's values over the seeds, and the differences of RoC from the other arms within a seed."""
    arms = list(seeds[0])

    def values(arm: str, name: str) -> list[float | None]:
        return [rows[arm][name] for rows in seeds]

    def differences(arm: str, name: str) -> list[float]:
        pairs = zip(values("roc", name), values(arm, name), strict=True)
        return [roc - other for roc, other in pairs if roc is not None and other is not None]

    def curve(arm: str, name: str, value: str) -> list[float | None]:
        steps = zip(*(rows[arm]["curves"][name] for rows in seeds), strict=False)
        return [(mean_sd(step) or {}).get(value) for step in steps]

    def compared(arm: str, name: str) -> dict[str, float] | None:
        values = differences(arm, name)
        return {**mean_sd(values), "p": sign_flip_p(values)} if values else None

    others = [arm for arm in arms if "roc" in arms and arm in ARMS and arm != "roc"]
    return {
        "seeds": len(seeds),
        "names": {arm: NAMES[arm] for arm in arms},
        "arms": {arm: {name: mean_sd(values(arm, name)) for name in (*MEASURES, *COSTS)} for arm in arms},
        "differences": {arm: {name: compared(arm, name) for name in MEASURES} for arm in others},
        "runs": [{arm: {k: v for k, v in row.items() if k != "curves"} for arm, row in rows.items()} for rows in seeds],
        **{
            key: {arm: {name: curve(arm, name, value) for name in CURVES} for arm in arms if arm in ARMS}
            for key, value in (("curves", "mean"), ("curve_deviations", "sd"))
        },
    }


def tables(result: Result) -> list[Block]:
    """A row for each arm, and one for each difference from RoC."""
    names, measures = result["names"], {**MEASURES, **COSTS}
    rows = [(names[arm], *(format_mean_sd(row[name]) for name in measures)) for arm, row in result["arms"].items()]
    rows += [
        (f"RoC less {names[arm]}", *(format_mean_sd(row.get(name)) for name in measures))
        for arm, row in result["differences"].items()
    ]
    blocks: list[Block] = [
        Table(("", *measures.values()), rows),
        f"{result['seeds']} seeds, {result['steps']} steps, G = {result['group']}; mean ± deviation over seeds.",
    ]
    if "gate" in result:
        blocks.append(
            "After SFT, the share of failing calls in correct episodes less that in all: "
            f"{result['gate']['mean']:.4f}, standard error {result['gate']['sd'] / result['seeds'] ** 0.5:.4f}."
        )
    if "requirements" in result:
        blocks.append(requirement_table(result["requirements"]))
    return blocks


def draw(axes: Any, result: Result) -> None:
    """Tool errors of correct episodes by training step: the mean over seeds, with its deviation as a band."""
    name = "tool_error_ratio_correct"
    for arm, curves in result["curves"].items():
        deviations = result.get("curve_deviations", {}).get(arm, {}).get(name, [0] * len(curves[name]))
        points = [
            (step, mean, sd or 0)
            for step, (mean, sd) in enumerate(zip(curves[name], deviations, strict=True), 1)
            if mean is not None
        ]
        if points:
            steps, means, sds = zip(*points, strict=True)
            (line,) = axes.plot(steps, means, label=NAMES[arm])
            low, high = ([mean + sign * sd for mean, sd in zip(means, sds, strict=True)] for sign in (-1, 1))
            axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
    axes.set_xlabel("training step")
    axes.set_ylabel("failing tool calls in correct episodes")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Mean of {result['seeds']} seeds, G = {result['group']}")
    if axes.lines:  # there is none if no episode was correct
        axes.legend()


def _log(text: str) -> None:
    STDERR.print(text, highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
