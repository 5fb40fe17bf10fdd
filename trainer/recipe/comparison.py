"""Comparison of two evaluations of the same problems: the differences in accuracy and in mean reward, each with a
paired 95 % interval.

- The accuracy of a problem is the share of correct episodes among its episodes with a reward. Its difference is the
  accuracy after minus the accuracy before. Problems without a reward in one of the evaluations are left out and
  counted.
- The interval of the mean difference says what to expect for other problems of the same kind. It is computed in two
  steps. First two problems are added, which both models solve with probability 1/2. Then the interval is the normal
  approximation. Without the added problems, it would be empty if no problem changed. With one episode per problem, this
  is the interval Wald+2 of Agresti and Min (Statistics in Medicine 24, 2005).
- If a reward is neither 0 nor 1, the mean rewards are compared too. The interval of their difference is Student's t
  interval over the problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.data.sources import read_problems
from trainer.episodes.episode import Problem
from trainer.episodes.reward import is_correct
from trainer.json_files import RecordError, differing_settings
from trainer.recipe.evaluation import ALL, Estimate, Z, read_outcomes, reward_estimate
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

RewardPair = tuple[list[float], list[float]]
"""The rewards of a problem's scored episodes in the first and in the second evaluation."""


@dataclass(frozen=True, slots=True)
class EvaluationComparison:
    """Two evaluations of one set of problems. If no problem is scored in both, the values after `worse` are None."""

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
    reward_difference: Estimate | None = None
    """The mean reward after minus the mean reward before. None if all rewards are 0 or 1."""

    def row(self) -> dict[str, Any]:
        """Return the numbers for a table."""
        cells = {name: _cell(getattr(self, name)) for name in ("difference", "reward_difference")}
        return {name: value for name, value in (asdict(self) | cells).items() if value or name != "reward_difference"}


def compare_evaluations(before: Path, after: Path) -> dict[str, EvaluationComparison]:
    """Return the comparisons by source and over `ALL`.

    `before` and `after` are folders that `rstar-train eval` has written. Raises `RecordError` if one of them has no
    finished evaluation, or if the evaluations have different problems or different sampling settings.
    """
    (problems, others), settings = map(_read_problems, (before, after)), _read_settings(before)
    asked, asked_after = (
        {(p.id, p.text, p.answer, p.environment, p.reward) for p in each} for each in (problems, others)
    )
    if different := sorted({id for id, *_ in asked ^ asked_after}):
        raise RecordError(
            f"the evaluations are over different problems: {len(different)}, such as {different[0]!r:.80}"
        )
    if names := list(differing_settings(settings, _read_settings(after))):
        raise RecordError(f"the evaluations have different sampling settings ({', '.join(names)})")
    samples, correct_above = settings["samples"], settings.get("reward.correct_above", 0.0)
    rewards = [_rewards(folder, problems, samples) for folder in (before, after)]
    by_source: dict[str, list[RewardPair]] = {}
    for problem, *pair in zip(problems, *rewards, strict=True):
        by_source.setdefault(problem.source, []).append((pair[0], pair[1]))
    by_source[ALL] = [pair for pairs in by_source.values() for pair in pairs]
    return {source: compare_rewards(pairs, samples, correct_above) for source, pairs in by_source.items()}


def compare_rewards(pairs: Sequence[RewardPair], samples: int, correct_above: float = 0.0) -> EvaluationComparison:
    """Return the comparison of two evaluations. `pairs` has the rewards (before, after) of each problem's scored
    episodes, at most `samples` in each evaluation."""
    both = [pair for pair in pairs if all(pair)]
    scored = [(_accuracy(before, correct_above), _accuracy(after, correct_above)) for before, after in both]
    differences = [after - before for before, after in scored]
    is_binary = all(reward in (0, 1) for pair in both for rewards in pair for reward in rewards)
    return EvaluationComparison(
        problems=len(pairs),
        samples=samples,
        unscored=len(pairs) - len(scored),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
        before=fmean(before for before, _ in scored) if scored else None,
        after=fmean(after for _, after in scored) if scored else None,
        difference=paired_estimate(differences, samples) if scored else None,
        reward_difference=(
            None if is_binary else reward_estimate([(fmean(after) - fmean(before), 1) for before, after in both])
        ),
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


def _accuracy(rewards: Sequence[float], correct_above: float) -> float:
    return fmean(is_correct(reward, correct_above) for reward in rewards)


def _cell(estimate: Estimate | None) -> str | None:
    if estimate is None:
        return None
    bounds = "–" if estimate.low is None else f"{estimate.low:+.3f}, {estimate.high:+.3f}"
    return f"{estimate.value:+.3f} [{bounds}]"


def _rewards(eval_dir: Path, problems: Sequence[Problem], samples: int) -> list[list[float]]:
    """Return the rewards of each problem's scored episodes."""
    outcomes = read_outcomes(eval_dir)
    keys = [[(problem.id, sample) for sample in range(samples)] for problem in problems]
    if unfinished := sum(not outcomes.keys() >= set(group) for group in keys):
        raise RecordError(f"{eval_dir}: {unfinished} of {len(keys)} problems are unfinished; repeat `rstar-train eval`")
    return [[reward for key in group if (reward := outcomes[key].reward) is not None] for group in keys]
