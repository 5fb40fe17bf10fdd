"""The phase `collect`: all episodes of a stage that trains on stored episodes."""

from __future__ import annotations

from dataclasses import replace

from trainer.data import problems as problem_data
from trainer.data.sources import read_problems
from trainer.recipe import collect_work
from trainer.recipe.phases import CollectResult, Phase, RecipeRun
from trainer.training.training_rows import problem_schedule


def collect(run: RecipeRun, phase: Phase) -> None:
    """Collect all episodes that a stage trains on, with the model before it."""
    stage = run.config.stage_config(phase.stage)
    seed = run.seed(phase.stage)
    problems = read_problems(str(run.problems_path(stage)))
    used = dict.fromkeys(problem_schedule(problems, stage.problems_per_step, stage.steps, seed))
    file, store = run.stage_dir(phase.stage) / "collected_problems.jsonl", run.collection_dir(stage)
    problem_data.write_problems(used, file)
    settings = replace(collect_work.stage_settings(run.config, stage), data=(str(file),), store=str(store))
    model = run.model_path(run.trained_model(phase.stage, of_previous_stage=True).model)
    status = collect_work.collect(RecipeRun(replace(run.config, seed=seed, collect=settings)), model)
    run.write_result(phase, CollectResult(status.stored_before + status.done, status.failed))
