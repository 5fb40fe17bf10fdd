"""The phase `prepare`: the problems of a run and, if the run generates it, the tiny model."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from trainer.config import TINY_MODEL, RunConfig, SamplingConfig, StageConfig
from trainer.data import problems as problem_data
from trainer.data import tiny_model
from trainer.data.sources import tokenizer_conversations
from trainer.environments.own_reward import check_reward
from trainer.environments.registry import check_problem, environment_class
from trainer.episodes.chat_format import ChatFormat
from trainer.episodes.episode import Problem
from trainer.episodes.reward import NoRewardsError, VerifyOutcome
from trainer.json_files import write_json
from trainer.progress_bar import progress_bar
from trainer.recipe.phases import EVAL_SET, INITIAL_STAGE, Phase, RecipeRun, TrainResult
from trainer.recipe.rollout_session import connect_sandbox, load_chat_format
from trainer.rollout.loop_thread import LoopThread


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
        problems, report = prepare_problems(config, name, sources, chat_format, response_tokens)
        problem_data.write_problems(problems, path)
        reports[name] = asdict(report)
    write_json(run.dir / "data" / "report.json", reports)
    for stage in stages:
        _require_problems(run, stage, reports[run.unfiltered_path(stage).stem])
    run.write_result(phase, TrainResult(model, step=0))


def _require_problems(run: RecipeRun, stage: StageConfig, report: Mapping[str, Any]) -> None:
    """Raise `ConfigError` with the reasons for which problems were dropped, if a stage has too few of them."""
    total = Counter[str]()
    for source_counts in report["counts"].values():
        total.update(source_counts)
    first_of = {
        dropped["reason"]: " (the first is {row} of {source}: {details})".format_map(dropped)
        for dropped in reversed(report["examples"])
    }
    reasons = ", ".join(f"{number} {label}{first_of.get(label, '')}" for label, number in total.items())
    stage.require_problems(total["kept"], f"its data has {reasons}; {run.dir}/data/report.json names dropped rows")


def prepare_problems(
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
