"""pass@1, pass@k and pass^k of a collection by level, with 95 % intervals.

- pass@k is the probability that at least one of k attempts is correct. Its unbiased estimate for a problem with n >= k
  attempts, c of which are correct, is 1 - C(n-c, k) / C(n, k) (Chen et al., arXiv 2107.03374).
- pass^k is the probability that all k attempts are correct. Its unbiased estimate is C(c, k) / C(n, k) (tau-bench,
  arXiv 2406.12045).
- The intervals are Wilson's. The attempts at one problem are not independent, so the number of independent trials is
  estimated from the variance between problems (`trainer.recipe.evaluation.ratio_estimate`).

Invariants:
- An infrastructure failure is counted separately, never as a wrong answer. A missing answer is a wrong answer.
- A problem whose correct answer is hidden is counted, but it is part of no measure.
- Memory grows with the number of problems, not with the number of attempts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import comb, inf
from typing import NamedTuple

from rich.table import Table

from trainer.episodes.episode import Episode, StopReason
from trainer.episodes.reward import is_correct
from trainer.recipe.evaluation import ALL, Estimate, pass_at, ratio_estimate
from trainer.runs.text_tables import table


class Attempt(NamedTuple):
    """The facts about one attempt at a problem from which reports are computed."""

    problem: str
    label: str
    """The attempts with the same label have a common report."""
    reward: float | None
    """The reward of the attempt. None if infrastructure failed."""
    has_answer: bool = True
    is_hidden: bool = False
    """Whether the correct answer is unknown."""

    @classmethod
    def of(cls, episode: Episode) -> Attempt:
        """Return the attempt of a finished episode. The label is the problem's level, or else its source."""
        problem, options = episode.problem, episode.problem.options
        label = f"level {options['level']}" if "level" in options else problem.source
        is_hidden = bool(options.get("answer_is_hidden"))
        # Training gives no reward to an attempt that passed its deadline. Here it counts as wrong, since it has not
        # solved the problem.
        reward = -inf if episode.stop_reason is StopReason.DEADLINE else episode.reward
        return cls(problem.id, label, reward, episode.answer is not None, is_hidden)


@dataclass(frozen=True, slots=True)
class PassReport:
    """The measures over one set of problems. `measures` has no entry for a measure that has no data."""

    problems: int = 0
    attempts: int = 0
    """Attempts with a reward and a known correct answer."""
    correct: int = 0
    without_answer: int = 0
    """The number of `attempts` without an answer, which count as wrong."""
    infrastructure_failures: int = 0
    hidden: int = 0
    """Attempts at problems whose correct answer is unknown."""
    measures: Mapping[str, Estimate] = field(default_factory=dict)
    """pass@k and pass^k by name."""
    problems_at_k: Mapping[int, int] = field(default_factory=dict)
    """For each k, the number of problems with at least k attempts. pass@k and pass^k are computed from these
    problems."""


def pass_reports(attempts: Iterable[Attempt], correct_above: float = 0.0) -> dict[str, PassReport]:
    """Return the reports by label and over `ALL`. k is 1, 2, 4, ... and the largest number of attempts. An attempt is
    correct if its reward is above `correct_above`."""
    by_label: defaultdict[str, defaultdict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for attempt in attempts:
        counts = by_label[attempt.label][attempt.problem]
        if attempt.reward is None:
            counts["infrastructure_failures"] += 1
        elif attempt.is_hidden:
            counts["hidden"] += 1
        else:
            counts["attempts"] += 1
            counts["correct"] += is_correct(attempt.reward, correct_above)
            counts["without_answer"] += not attempt.has_answer
    problems = {label: list(by_problem.values()) for label, by_problem in sorted(by_label.items())}
    return {label: _report(counts) for label, counts in {**problems, ALL: [*chain(*problems.values())]}.items()}


def pass_hat(k: int, samples: int, correct: int) -> float:
    """Return pass^k of a problem: the probability that `k` of its `samples` episodes, drawn without replacement,
    are all correct."""
    return comb(correct, k) / comb(samples, k)


def pass_table(reports: Mapping[str, PassReport], title: str = "") -> Table:
    """Return a table with a column per label, and each number with its interval."""
    # The first head says what the brackets in the cells are. "…" lets the texts of a column wrap.
    rows = table("[95 %]", *(f"{label}…" for label in reports), title=title)
    for name in dict.fromkeys(name for report in reports.values() for name in report.measures):
        rows.add_row(name, *(str(report.measures.get(name, "-")) for report in reports.values()))
    counted = ("problems", "attempts", "correct", "without_answer", "infrastructure_failures", "hidden")
    for name in counted:
        rows.add_row(name.replace("_", " "), *(str(getattr(report, name)) for report in reports.values()))
    return rows


def _report(problems: list[Counter[str]]) -> PassReport:
    most_attempts = max((counts["attempts"] for counts in problems), default=0)
    measures, problems_at_k = dict[str, Estimate | None](), dict[int, int]()
    # The powers of two up to `most_attempts`, and `most_attempts` itself unless it is 0.
    for k in sorted({1 << n for n in range(most_attempts.bit_length())} | {most_attempts} - {0}):
        counts_at_k = [(counts["attempts"], counts["correct"]) for counts in problems if counts["attempts"] >= k]
        problems_at_k[k] = len(counts_at_k)
        for name, probability in {f"pass@{k}": pass_at, f"pass^{k}": pass_hat}.items():
            if name != "pass^1":  # equal to pass@1
                # The weight 1.0 makes all problems count equally. The number of independent trials cannot exceed
                # the number of episodes.
                chances = [(probability(k, *counts), 1.0) for counts in counts_at_k]
                episodes = sum(attempts for attempts, _ in counts_at_k)
                measures[name] = ratio_estimate(chances, is_share=True, max_trials=episodes)
    return PassReport(
        problems=len(problems),
        **sum(problems, Counter[str]()),  # the keys of the counters are fields of `PassReport`
        measures={name: estimate for name, estimate in measures.items() if estimate},
        problems_at_k=problems_at_k,
    )
