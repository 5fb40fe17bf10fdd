"""The phase `grpo`: one RL stage, with evaluations inside it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from trainer.collection.store import StoreReader
from trainer.collection.stored_collector import NoEngines, StoredCollector, stored_problems
from trainer.config import ONLINE_SETTINGS, ConfigError, StageConfig
from trainer.data.sources import read_problems
from trainer.episodes.reward import check_unavailable
from trainer.json_files import read_json
from trainer.recipe import collect_work, evaluation
from trainer.recipe.eval_phase import run_evaluation
from trainer.recipe.phases import Phase, RecipeRun, TrainResult
from trainer.recipe.rollout_session import open_rollout
from trainer.recipe.training_inputs import join_ranks, training_context
from trainer.rollout.loop_thread import LoopThread
from trainer.rollout.runtime import RolloutRuntime
from trainer.training.context import BEST_MARK, leave_ranks, wait_for_ranks
from trainer.training.grpo import train_stage


def grpo(run: RecipeRun, phase: Phase, store: Path | None = None) -> None:
    """Train one RL stage. With `store`, train on the episodes in this store, and sample nothing."""
    stage, is_first_rank = run.config.stage_config(phase.stage), join_ranks(run.config)
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
        training_context(run, phase, stage.steps) as (context, track),
        _open_rollout(run, stage, context.model, store) if is_first_rank else nullcontext() as rollouts,
    ):
        wait_for_ranks(run.config.hardware)  # until the first rank has opened its engines, which may take minutes

        def evaluate(steps: int) -> float:
            reports = _evaluate_step(run, stage, rollouts, steps)
            track(evaluation.tracker_row(reports, context.first_step + steps))
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
    problems, limits = read_problems(str(run.eval_problems_path())), run.config.eval
    reports = run_evaluation(run, model, problems, out, limits, limits.samples_per_problem, rollouts=rollouts)
    report = reports[evaluation.ALL]
    total = report.episodes + report.unavailable
    cause = "the log names each of them"
    check_unavailable(report.unavailable, total, stage.max_unavailable_share, str(out), first_failure=cause)
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
