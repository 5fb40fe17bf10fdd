"""The phase `eval`, and the other evaluations of a model: of any folder, inside a stage, and of the filter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

from trainer.config import SamplingConfig
from trainer.data import problems as problem_data
from trainer.data.sources import read_problems
from trainer.environments.registry import check_problem
from trainer.episodes.episode import Problem
from trainer.episodes.reward import NoRewardsError
from trainer.progress_bar import progress_bar
from trainer.recipe import evaluation
from trainer.recipe.phases import EVAL_SET, INITIAL_STAGE, SFT, EvalResult, Phase, RecipeRun
from trainer.recipe.prepare_phase import prepare_problems
from trainer.recipe.rollout_session import endpoint_settings, load_chat_format, open_rollout, prompt_settings
from trainer.recipe.training_inputs import open_run_trackers
from trainer.rollout.runtime import RolloutRuntime
from trainer.runs.run_folder import RunFolder


def evaluate(run: RecipeRun, phase: Phase) -> dict[str, evaluation.EvalReport]:
    """Evaluate the model of a stage on the run's held-out problems. The results go to the trackers as well."""
    trained, limits = run.trained_model(phase.stage), run.config.eval
    problems, out = read_problems(str(run.eval_problems_path())), run.stage_dir(phase.stage) / "eval"
    with open_run_trackers(run) as track:
        reports = run_evaluation(run, trained.model, problems, out, limits, limits.samples_per_problem)
        track(evaluation.tracker_row(reports, trained.step))
    content = {source: asdict(report) for source, report in reports.items()}
    run.write_result(phase, EvalResult(evaluation.summary_scores(reports), content))
    return reports


def evaluate_model(run: RecipeRun, model: str, out: Path | None = None) -> dict[str, evaluation.EvalReport]:
    """Evaluate any model with the run's settings. By default `out` is a folder for this model in the run folder."""
    config, path = run.config, run.model_path(model)
    if path.is_dir():  # give the folder one name, for relative and absolute paths
        path, run_dir = path.resolve(), run.dir.resolve()
        model = str(path.relative_to(run_dir) if path.is_relative_to(run_dir) else path)
    identity = {
        "weights": list(map(_file_identity, sorted(path.glob("*.safetensors")))),
        "data": [_file_identity(file) if (file := Path(source)).is_file() else source for source in config.eval.data],
    }
    out = out or run.dir / "eval" / quote(model, safe="")
    if not (file := out / "problems.jsonl").exists():
        chat_format, sources = load_chat_format(config, path), config.eval.data
        response_tokens = config.eval.max_response_tokens
        problems, _ = prepare_problems(config, EVAL_SET, sources, chat_format, response_tokens)
        problem_data.write_problems(problems, file)
    problems = read_problems(str(file))
    return run_evaluation(run, model, problems, out, config.eval, config.eval.samples_per_problem, identity=identity)


def _file_identity(file: Path) -> tuple[str, int, int]:
    stat = file.stat()
    return file.name, stat.st_size, stat.st_mtime_ns


def run_evaluation(
    run: RecipeRun,
    model: str,
    problems: Sequence[Problem],
    out: Path,
    limits: SamplingConfig,
    samples: int,
    *,
    seed_name: str = "eval",
    outcomes_only: bool = False,
    identity: Mapping[str, object] | None = None,
    rollouts: RolloutRuntime | None = None,
) -> dict[str, evaluation.EvalReport]:
    """Collect `samples` episodes per problem in the folder `out`. Return the reports by source and over all sources.

    `rollouts`: engines that have the weights of the model. Without it, engines are opened.
    `identity`: more values that must be equal for all episodes in `out`, such as the sizes of files.

    Episodes that are already in `out` are not collected again. Raises `RecordError` if they were collected with another
    model, other settings or other values of `identity`, and `NoRewardsError` if no episode has a reward.
    """
    for problem in problems:
        check_problem(problem)
    seed, run_folder = run.seed(seed_name), RunFolder(out)
    run_folder.bind_config(
        {
            **evaluation.sampling_settings(limits, samples),
            **prompt_settings(run.config.model),
            "dtype": run.config.model.dtype,
            "seed": seed,
            "model": model,
            **endpoint_settings(run.config.engines),
            **run.config.reward.recorded(),
            **(identity or {}),
        }
    )
    if missing := evaluation.unfinished_problems(problems, samples, out):
        done_before = len(problems) - len(missing)
        opened = nullcontext(rollouts) if rollouts else open_rollout(run, run.model_path(model))
        with opened as runtime, progress_bar(unquote(out.name), len(problems)) as advance:
            runtime.loop_thread.run(
                evaluation.evaluate_problems,
                missing,
                samples,
                partial(runtime.collector.collect, limits=limits, seed=seed),
                run_folder=run_folder,
                outcomes_only=outcomes_only,
                on_progress=lambda done: advance(done_before + done),
            )
    reports = evaluation.read_eval_reports(problems, samples, out, run.config.reward.correct_above)
    if not reports[evaluation.ALL].episodes:
        raise NoRewardsError(f"no episode of {len(problems)} problems has a reward; {out} has the errors")
    return reports


def rollout(run: RecipeRun, stage: str, *, num_problems: int, samples: int, out: Path) -> None:
    """Collect episodes of the run's first training problems into a folder that `show` opens."""
    limits = run.config.rl if stage in (INITIAL_STAGE, SFT) else run.config.stage_config(stage)
    problems = read_problems(str(run.problems_path(limits)))[:num_problems]
    run_evaluation(run, run.trained_model(stage).model, problems, out, limits, samples, seed_name="rollout")
