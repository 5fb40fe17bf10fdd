"""The work of each phase of a recipe. It connects data, models, engines and tools. Each phase has its own process.

Invariants:
- The work of a phase depends on the configuration, its seed, and the results of earlier phases only.
- The first rank writes the phase's result file last.
- Only the first rank uses engines, tools and the run folder.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from transformers import AutoConfig

from trainer.collection.store import StoreReader
from trainer.collection.stored_collector import NoEngines, StoredCollector, stored_problems
from trainer.config import ONLINE_SETTINGS, TINY_MODEL, ConfigError, ModelShape, RunConfig, SamplingConfig, StageConfig
from trainer.data import problems as problem_data
from trainer.data import tiny_model
from trainer.data.sources import read_conversations, read_problems, tokenizer_conversations
from trainer.environments.own_reward import check_reward
from trainer.environments.registry import check_problem, environment_class
from trainer.episodes.chat_format import ChatFormat
from trainer.episodes.episode import Problem
from trainer.episodes.reward import VerifyOutcome, is_correct
from trainer.json_files import differing_settings, read_json, write_json
from trainer.progress_bar import progress_bar
from trainer.recipe import collect_work, evaluation
from trainer.recipe.phases import (
    EVAL_SET,
    INITIAL_STAGE,
    SFT,
    CollectResult,
    EvalResult,
    FilterResult,
    Phase,
    RecipeRun,
    TrainResult,
)
from trainer.recipe.rollout_session import (
    connect_sandbox,
    endpoint_settings,
    load_chat_format,
    open_rollout,
    prompt_settings,
)
from trainer.rollout.loop_thread import LoopThread
from trainer.rollout.runtime import RolloutRuntime
from trainer.runs.run_folder import RunFolder
from trainer.runs.trackers import LogMetrics, open_trackers
from trainer.training.context import (
    BEST_MARK,
    TrainingContext,
    checkpoint_step,
    distributed_state,
    latest_checkpoint,
    leave_ranks,
    model_errors_as_config_errors,
    wait_for_ranks,
    waiting_group,
)
from trainer.training.grpo import NoRewardsError, train_stage
from trainer.training.sft import train_sft
from trainer.training.training_rows import problem_schedule

PROGRESS_METRICS = ("reward", "tool_error_ratio", "loss")
"""Metrics shown beside a progress bar."""


def prepare(run: RecipeRun, phase: Phase) -> None:
    """Write the problems to train and to evaluate on and, if the run generates it, the tiny model."""
    config, model = run.config, run.config.model.path
    check_reward(config)
    if model == TINY_MODEL:
        path = run.stage_dir(INITIAL_STAGE) / "model"
        taught = tokenizer_conversations(config.sft.data, tiny_model.NUM_CONVERSATIONS, config.seed)
        tiny_model.write_tiny_model(path, config.seed, taught)
        model = run.relative(path)
    chat_format, stages = load_chat_format(config, run.model_path(model)), config.stages.values()
    own_data = {stage.name: stage.data for stage in stages if stage.data}
    reports = {}
    for name, sources in {"train": config.data.train, EVAL_SET: config.eval.data, **own_data}.items():
        path = run.dir / "data" / f"{name}.jsonl"
        training_stages = [stage for stage in stages if run.unfiltered_path(stage) == path]
        limits: Sequence[SamplingConfig] = [config.eval] if name == EVAL_SET else training_stages
        response_tokens = max((limit.max_response_tokens for limit in limits), default=0)
        problems, report = _prepare_problems(config, name, sources, chat_format, response_tokens)
        problem_data.write_problems(problems, path)
        reports[name] = asdict(report)
    write_json(run.dir / "data" / "report.json", reports)
    for stage in stages:
        _check_enough_problems(run, stage, reports[run.unfiltered_path(stage).stem]["counts"])
    run.write_result(phase, TrainResult(model, step=0))


def _check_enough_problems(run: RecipeRun, stage: StageConfig, counts: Mapping[str, Mapping[str, int]]) -> None:
    """Raise `ConfigError` with the reasons for which problems were dropped, if a stage has too few of them."""
    total = Counter[str]()
    for source_counts in counts.values():
        total.update(source_counts)
    if total["kept"] < stage.problems_per_step:
        raise ConfigError(
            f"stages.{stage.name}: expected at least problems_per_step={stage.problems_per_step} problems, got "
            f"{total['kept']}: its data has {', '.join(f'{n} {label}' for label, n in total.items())}; "
            f"{run.dir}/data/report.json names dropped rows. Give other problems, or lower problems_per_step"
        )


def _prepare_problems(
    config: RunConfig,
    name: str,
    sources: Sequence[str],
    chat_format: ChatFormat,
    response_tokens: int,
) -> tuple[list[Problem], problem_data.PrepareReport]:
    """Return the problems whose prompts leave `response_tokens` for a response, and whose answers can be parsed. Raises
    `ConfigError` for a problem whose environment cannot be used."""
    is_eval = name == EVAL_SET
    max_prompt_tokens = config.engines.max_model_len - response_tokens

    def prompt_tokens(problem: Problem) -> int:
        check_problem(problem)
        return len(chat_format.encode_prompt(environment_class(problem.environment).prompt(problem)))

    with progress_bar(name) as advance:
        problems, report = problem_data.prepare_problems(
            sources,
            decontaminate_against=() if is_eval else (*config.data.decontaminate_against, *config.eval.data),
            integer_answers_only=config.data.integer_answers_only and not is_eval,
            seed=config.seed,
            held_out=is_eval,
            max_length=problem_data.MaxLength(max_prompt_tokens, prompt_tokens),
            find_unparsable=partial(_unparsable_answers, config),
            reward=config.reward.function,
            on_progress=advance,
        )
    for source, counts in report.counts.items():
        print(f"{name}: {source}: {', '.join(f'{n} {label}' for label, n in counts.items())}", file=sys.stderr)
    # A dropped evaluation problem is printed, since the accuracy is then not that of the whole benchmark.
    for dropped in report.examples if is_eval else ():
        print(f"{name}: {'{source}: {row}: {reason}: {details}'.format_map(dropped)}", file=sys.stderr)
    return problems, report


def _unparsable_answers(config: RunConfig, answers: Sequence[str]) -> Collection[str]:
    """Return the answers that the checker does not find equivalent to themselves. With such an answer, every response
    to the problem would be wrong."""
    with LoopThread() as loop_thread:
        sandbox = loop_thread.enter(connect_sandbox(config.sandbox))
        outcomes = loop_thread.run(sandbox.answer_checker.verify, [(answer, answer) for answer in answers])
    if unchecked := outcomes.count(VerifyOutcome.UNAVAILABLE):
        raise NoRewardsError(f"{unchecked} of {len(answers)} answers could not be checked, since the sandbox failed")
    checked = zip(answers, outcomes, strict=True)
    return {answer for answer, outcome in checked if outcome is not VerifyOutcome.EQUIVALENT}


def sft(run: RecipeRun, phase: Phase) -> None:
    """Train the first model on conversations."""
    config, is_first_rank = run.config, _join_ranks(run.config)
    conversations = [
        messages for source in config.sft.data for messages in read_conversations(source, seed=config.seed)
    ]
    steps = round(config.sft.epochs * len(conversations) / config.sft.batch_size)
    with _training_context(run, phase, steps) as context:
        chat_format = load_chat_format(config, context.model)
        trained = train_sft(config.sft, context, conversations=conversations, chat_format=chat_format)
    if is_first_rank:
        step = context.first_step + checkpoint_step(trained.checkpoint)
        run.write_result(phase, TrainResult(run.relative(trained.model), step))
    leave_ranks()


def collect(run: RecipeRun, phase: Phase) -> None:
    """Collect all episodes that a stage trains on, with the model before it."""
    stage = run.config.stage_config(phase.stage)
    seed = derive_seed(run.config, phase.stage)
    problems = read_problems(str(run.problems_path(stage)))
    used = dict.fromkeys(problem_schedule(problems, stage.problems_per_step, stage.steps, seed))
    file, store = run.stage_dir(phase.stage) / "collected_problems.jsonl", run.collection_dir(stage)
    problem_data.write_problems(used, file)
    settings = replace(collect_work.stage_settings(run.config, stage), data=(str(file),), store=str(store))
    model = run.model_path(run.trained_model(phase.stage, of_previous_stage=True).model)
    status = collect_work.collect(RecipeRun(replace(run.config, seed=seed, collect=settings)), model)
    run.write_result(phase, CollectResult(status.stored_before + status.done, status.failed))


def grpo(run: RecipeRun, phase: Phase, store: Path | None = None) -> None:
    """Train one RL stage. With `store`, train on the episodes in this store, and sample nothing."""
    stage, is_first_rank = run.config.stage_config(phase.stage), _join_ranks(run.config)
    checkpoint = run.trained_model(phase.stage, of_previous_stage=True).checkpoint
    if stage.difficulty_filter_samples:
        run.require_result(Phase("filter", phase.stage))
    if store is None and stage.episodes == "collected":
        run.require_result(Phase("collect", phase.stage))
        store = run.collection_dir(stage)
    if store is not None and run.config.eval.every_steps:
        raise ConfigError("eval: every_steps: expected 0 for a training on stored episodes, which has no engines")
    if store is not None and (online := [name for name in ONLINE_SETTINGS if getattr(stage, name)]):
        raise ConfigError(f"stages.{stage.name}: {', '.join(online)}: expected none of these with stored episodes")
    if store is None:
        problems = read_problems(str(run.problems_path(stage)))
    else:
        problems = stored_problems(store, min_episodes=stage.kept_per_problem)
    with (
        _training_context(run, phase, stage.steps) as context,
        _open_rollout(run, stage, context.model, store) if is_first_rank else nullcontext() as rollouts,
    ):
        wait_for_ranks(run.config.hardware)  # until the first rank has opened its engines, which may take minutes

        def evaluate(steps: int) -> float:
            reports = _evaluate_step(run, stage, rollouts, steps)
            context.run_folder.on_metrics(evaluation.tracker_row(reports, context.first_step + steps))
            return reports[evaluation.ALL].measures["accuracy"].value

        trained = train_stage(
            stage,
            context,
            problems=problems,
            rollouts=rollouts,
            optimizer_checkpoint=run.dir / checkpoint if checkpoint and not stage.reset_optimizer else None,
            evaluate=evaluate if rollouts else None,
        )
    if is_first_rank:
        model, checkpoint = run.relative(trained.model), run.relative(trained.checkpoint)
        best = read_json(run.stage_dir(stage.name) / BEST_MARK) or {}
        run.write_result(phase, TrainResult(model, context.first_step + stage.steps, checkpoint, best))
    leave_ranks()


def _evaluate_step(
    run: RecipeRun, stage: StageConfig, rollouts: RolloutRuntime | None, steps: int
) -> dict[str, evaluation.EvalReport]:
    """Evaluate the weights in the engines, after `steps` steps of the stage.

    The evaluation after the last step is also the one of the phase `eval`, which later finds its episodes in the
    folder.
    """
    is_last = steps == stage.steps
    out = run.stage_dir(stage.name) / ("eval" if is_last else f"eval_steps/step_{steps:06}")
    # A folder that exists is of a step that a kill has undone. Its weights may have differed.
    shutil.rmtree(out, ignore_errors=True)
    model = run.relative(run.stage_dir(stage.name) / "model") + ("" if is_last else f" after {steps} steps")
    problems = read_problems(str(run.eval_problems_path()))
    reports = run_evaluation(run, model, problems, out, run.config.eval, _eval_samples(run), rollouts=rollouts)
    report = reports[evaluation.ALL]
    if report.unavailable > stage.max_unavailable_share * (report.episodes + report.unavailable):
        raise NoRewardsError(
            f"{out}: {report.unavailable} episodes have no reward, since the infrastructure failed; at most "
            f"{stage.max_unavailable_share:.0%} may (max_unavailable_share). Mend it and run the same command again"
        )
    return reports


@contextmanager
def _open_rollout(run: RecipeRun, stage: StageConfig, model: Path, store: Path | None) -> Iterator[RolloutRuntime]:
    """Open the source of a stage's episodes: a store, the nodes of a cluster, or engines of this process."""
    if store is not None:
        with LoopThread() as loop_thread, StoreReader(store) as reader:
            yield RolloutRuntime(loop_thread, StoredCollector(reader), NoEngines())
    elif stage.episodes == "cluster":
        with collect_work.open_cluster_rollout(run, stage, model) as rollouts:
            yield rollouts
    else:
        with open_rollout(run, model) as rollouts:
            yield rollouts


def filter_problems(run: RecipeRun, phase: Phase) -> None:
    """Keep the stage's problems that the model before it does not solve in every sample."""
    stage, model = run.config.stage_config(phase.stage), run.trained_model(phase.stage, of_previous_stage=True).model
    problems, filter_dir = read_problems(str(run.unfiltered_path(stage))), run.stage_dir(phase.stage) / "filter"
    samples = stage.difficulty_filter_samples
    run_evaluation(run, model, problems, filter_dir, stage, samples, seed_name=str(phase), outcomes_only=True)
    outcomes = evaluation.read_outcomes(filter_dir)
    above = run.config.reward.correct_above
    unsolved = {problem for (problem, _), outcome in outcomes.items() if not is_correct(outcome.reward, above)}
    kept = [problem for problem in problems if problem.id in unsolved]
    if len(kept) < stage.problems_per_step:
        raise ConfigError(
            f"stages.{stage.name}: {len(kept)} of {len(problems)} problems are not always solved: expected at least "
            f"problems_per_step={stage.problems_per_step}; add problems, or lower problems_per_step"
        )
    problem_data.write_problems(kept, run.problems_path(stage))
    run.write_result(phase, FilterResult(len(problems), len(kept)))


PHASE_FUNCTIONS: Mapping[str, Callable[[RecipeRun, Phase], None]] = {
    "prepare": prepare,
    "sft": sft,
    "filter": filter_problems,
    "collect": collect,
    "grpo": grpo,
}
"""The work of each phase except `eval`, whose function also returns the reports."""


def evaluate(run: RecipeRun, phase: Phase) -> dict[str, evaluation.EvalReport]:
    """Evaluate the model of a stage on the run's held-out problems. The results go to the trackers as well."""
    trained, limits = run.trained_model(phase.stage), run.config.eval
    problems, out = read_problems(str(run.eval_problems_path())), run.stage_dir(phase.stage) / "eval"
    with _open_trackers(run) as track:
        reports = run_evaluation(run, trained.model, problems, out, limits, _eval_samples(run))
        track(evaluation.tracker_row(reports, trained.step))
    content = {source: asdict(report) for source, report in reports.items()}
    run.write_result(phase, EvalResult(evaluation.summary_scores(reports), content))
    return reports


def _open_trackers(run: RecipeRun) -> AbstractContextManager[LogMetrics]:
    tracking = run.config.tracking
    return open_trackers(tracking.trackers, run.dir, asdict(run.config), project=tracking.project)


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
        problems, _ = _prepare_problems(config, EVAL_SET, sources, chat_format, response_tokens)
        problem_data.write_problems(problems, file)
    problems = read_problems(str(file))
    return run_evaluation(run, model, problems, out, config.eval, _eval_samples(run), identity=identity)


def _file_identity(file: Path) -> tuple[str, int, int]:
    stat = file.stat()
    return file.name, stat.st_size, stat.st_mtime_ns


def _eval_samples(run: RecipeRun) -> int:
    return run.config.eval.samples_per_problem


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
    seed, run_folder = derive_seed(run.config, seed_name), RunFolder(out)
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


@contextmanager
def _training_context(run: RecipeRun, phase: Phase, steps: int) -> Iterator[TrainingContext]:
    """Yield the inputs of a training. Its metrics go to the trackers and a progress bar as well."""
    config, stage, run_folder = run.config, phase.stage, run.run_folder
    before = run.trained_model(stage, of_previous_stage=True)
    if checkpoint := latest_checkpoint(run.stage_dir(stage) / "checkpoints"):
        _check_same_model(run.model_path(before.model), checkpoint)
    with ExitStack() as stack:
        if distributed_state(config.hardware).is_main_process:
            track = stack.enter_context(_open_trackers(run))
            advance = stack.enter_context(progress_bar(stage, steps))

            def on_metrics(row: Mapping[str, Any]) -> None:
                track(row)
                if "stage" not in row:  # an evaluation, which is no progress
                    return
                shown = [f"{name} {row[name]:.3g}" for name in PROGRESS_METRICS if row.get(name) is not None]
                advance(row["step"] - before.step, "  ".join(shown))

            run_folder = replace(run_folder, on_metrics=on_metrics)
        yield TrainingContext(
            run.model_path(before.model),
            run.stage_dir(stage),
            run_folder,
            seed=derive_seed(config, stage),
            first_step=before.step,
            dtype=config.model.dtype,
            attn_implementation=config.model.attn_implementation,
            peft=config.model.peft,
            eval_steps=config.eval.every_steps,
            correct_above=config.reward.correct_above,
            hardware=config.hardware,
            keep_checkpoints=config.storage.keep_checkpoints,
            engines_sleep=config.engines.sleep_mode,
        )


def derive_seed(config: RunConfig, name: str) -> int:
    """Return a seed for the phase or stage `name`. Different names give different seeds, so that two stages do not have
    the same order of problems."""
    return random.Random(f"{config.seed} {name}").getrandbits(31)


def _join_ranks(config: RunConfig) -> bool:
    """Wait for all ranks, and return whether this is the first one. Raises `ConfigError` on every rank if their
    settings differ."""
    state, group = distributed_state(config.hardware), waiting_group()
    if group is not None:
        settings: list[dict[str, Any]] = [{}] * state.num_processes
        torch.distributed.all_gather_object(settings, asdict(config), group=group)
        if names := sorted({name for other in settings for name in differing_settings(settings[0], other)}):
            raise ConfigError(
                f"rank {state.process_index}: the ranks have different settings ({', '.join(names[:5])}); start all of "
                "them with the same file, variables and --set"
            )
    return bool(state.is_main_process)


def _check_same_model(model: Path, checkpoint: Path) -> None:
    """Raise `ConfigError` if a checkpoint has another architecture or other sizes than the model that is trained. The
    checkpoint of an adapter has no config of a model, and is not compared."""
    if not (checkpoint / "config.json").exists():
        return
    with model_errors_as_config_errors(model):
        mine, theirs = (AutoConfig.from_pretrained(path).get_text_config() for path in (model, checkpoint))
    names = ["model_type", *(size.name for size in fields(ModelShape) if size.name != "tie_word_embeddings")]
    values = {name: [getattr(config, name, None) for config in (mine, theirs)] for name in names}
    if differing := [f"{name} is {new} and not {old}" for name, (old, new) in values.items() if old != new]:
        raise ConfigError(
            f"{checkpoint}: expected a checkpoint of {model}, got another model's ({', '.join(differing)}); delete "
            "the checkpoints of this stage, or give another --run-dir"
        )
