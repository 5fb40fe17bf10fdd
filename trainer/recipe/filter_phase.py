"""The phase `filter`: the difficulty filter of a stage."""

from __future__ import annotations

from trainer.data import problems as problem_data
from trainer.data.sources import read_problems
from trainer.episodes.reward import is_correct
from trainer.recipe import evaluation
from trainer.recipe.eval_phase import run_evaluation
from trainer.recipe.phases import FilterResult, Phase, RecipeRun


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
    stage.require_problems(len(kept), f"{len(problems) - len(kept)} of {len(problems)} are solved in every sample")
    problem_data.write_problems(kept, run.problems_path(stage))
    run.write_result(phase, FilterResult(len(problems), len(kept)))
