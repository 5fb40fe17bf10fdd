"""Comparison of two evaluations of the same problems: the difference in accuracy, with a paired 95 % interval.

- The accuracy of a problem is the mean reward of its episodes with a reward. Its difference is the accuracy after minus
  the accuracy before. Problems without a reward in one of the evaluations are left out and counted.
- The interval of the mean difference says what to expect for other problems of the same kind. It is computed in two
  steps. First two problems are added, which both models solve with probability 1/2. Then the interval is the normal
  approximation. Without the added problems, it would be empty if no problem changed. With one episode per problem, this
  is the interval Wald+2 of Agresti and Min (Statistics in Medicine 24, 2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.data.sources import read_problems
from trainer.episodes.episode import Problem
from trainer.episodes.metrics import METRICS
from trainer.json_files import RecordError, differing_settings
from trainer.recipe.evaluation import ALL, Estimate, Z, read_outcomes
from trainer.recipe.phases import EVAL_SET
from trainer.runs.run_folder import RunFolder

MAY_DIFFER = frozenset({
    "model", "weights", "data", "seed", "engines.model_name", "engines.prompt_format", "dtype", "chat_format",
    "chat_template", "system_prompt",
})  # fmt: skip
"""Settings of an evaluation that may differ, since they are not about sampling. Instead of the setting `data`, the
problems themselves are compared."""
ADDED_PROBLEMS = 2
"""The number of problems added for the interval."""


@dataclass(frozen=True, slots=True)
class EvaluationComparison:
    """Two evaluations of one set of problems. If no problem is scored in both, the last three values are None."""

    problems: int
    samples: int
    """Episodes per problem."""
    unscored: int
    """Problems without a reward in one of the evaluations, which are left out of the other numbers."""
    better: int
    """Problems whose accuracy is higher after than before."""
    worse: int
    before: float | None
    """Mean accuracy over the problems in the first evaluation."""
    after: float | None
    """Mean accuracy over the problems in the second evaluation."""
    difference: Estimate | None

    def row(self) -> dict[str, Any]:
        """Return the numbers for a table."""
        estimate = self.difference
        cell = f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]" if estimate else None
        return asdict(self) | {"difference": cell}


def compare_evaluations(before: Path, after: Path) -> dict[str, EvaluationComparison]:
    """Return the comparisons by source and over `ALL`.

    `before` and `after` are folders that `rstar-train eval` has written. Raises `RecordError` if one of them has no
    finished evaluation, or if the evaluations have different problems or different sampling settings.
    """
    (problems, others), settings = map(_read_problems, (before, after)), _read_settings(before)
    asked, asked_after = ({(p.id, p.text, p.answer, p.environment) for p in each} for each in (problems, others))
    if different := sorted({id for id, *_ in asked ^ asked_after}):
        raise RecordError(
            f"the evaluations are over different problems: {len(different)}, such as {different[0]!r:.80}"
        )
    if names := list(differing_settings(settings, _read_settings(after))):
        raise RecordError(f"the evaluations have different sampling settings ({', '.join(names)})")
    samples = settings["samples"]
    accuracies = [_accuracies(folder, problems, samples) for folder in (before, after)]
    by_source: dict[str, list[tuple[float | None, float | None]]] = {}
    for problem, *pair in zip(problems, *accuracies, strict=True):
        by_source.setdefault(problem.source, []).append((pair[0], pair[1]))
    by_source[ALL] = [pair for pairs in by_source.values() for pair in pairs]
    return {source: compare_accuracies(pairs, samples) for source, pairs in by_source.items()}


def compare_accuracies(pairs: Sequence[tuple[float | None, float | None]], samples: int) -> EvaluationComparison:
    """Return the comparison of the accuracies (before, after) of each problem. An accuracy is None if no episode of the
    problem has a reward."""
    scored = [(before, after) for before, after in pairs if before is not None and after is not None]
    differences = [after - before for before, after in scored]
    return EvaluationComparison(
        problems=len(pairs),
        samples=samples,
        unscored=len(pairs) - len(scored),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
        before=fmean(before for before, _ in scored) if scored else None,
        after=fmean(after for _, after in scored) if scored else None,
        difference=paired_estimate(differences, samples) if scored else None,
    )


def paired_estimate(differences: Sequence[float], samples: int) -> Estimate:
    """Return the mean of `differences` with its interval. Each of them is a difference between two accuracies, and an
    accuracy is a mean over `samples` episodes."""
    value, count = fmean(differences), len(differences) + ADDED_PROBLEMS
    center = sum(differences) / count
    # The variance of an accuracy of an added problem is 1/4 divided by `samples`. The variance of a difference is twice
    # that.
    squares = sum(difference**2 for difference in differences) + ADDED_PROBLEMS / (2 * samples)
    half_width = Z * ((squares / count - center**2) / count) ** 0.5
    return Estimate(value, max(-1.0, min(value, center - half_width)), min(1.0, max(value, center + half_width)))


def _read_problems(eval_dir: Path) -> list[Problem]:
    """Return the problems of an evaluation. `eval --model` writes them to its own folder. For the evaluation of a
    stage, `prepare` has written them to the run folder."""
    for file in (eval_dir / "problems.jsonl", eval_dir / f"../../../data/{EVAL_SET}.jsonl"):
        if file.is_file():
            return read_problems(str(file))
    raise RecordError(f"{eval_dir}: expected an evaluation: RUN/stages/NAME/eval, or RUN/eval/MODEL")


def _read_settings(eval_dir: Path) -> dict[str, Any]:
    """Return the settings that decide how an evaluation samples. An empty setting counts as missing, since a folder
    does not have the settings that only another kind of engine uses."""
    if (config := RunFolder(eval_dir).read_config()) is None:
        raise RecordError(f"{eval_dir}: expected a finished evaluation, but it has no config.json")
    return {name: value for name, value in config.items() if name not in MAY_DIFFER and value}


def _accuracies(eval_dir: Path, problems: Sequence[Problem], samples: int) -> list[float | None]:
    """Return the accuracy of each problem; None if none of its episodes has a reward."""
    outcomes = read_outcomes(eval_dir)
    keys = [[(problem.id, sample) for sample in range(samples)] for problem in problems]
    if unfinished := sum(not outcomes.keys() >= set(group) for group in keys):
        raise RecordError(f"{eval_dir}: {unfinished} of {len(keys)} problems are unfinished; repeat `rstar-train eval`")
    sums = [METRICS["reward"].sums(outcomes[key] for key in group) for group in keys]
    return [total / count if count else None for total, count in sums]
