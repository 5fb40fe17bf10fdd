"""Tests of the reports of pass@k (one of k samples is correct) and pass^k (all k samples are correct): their values,
intervals and counts."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from rich.console import Console

from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.recipe.evaluation import ALL
from trainer.recipe.pass_at_k import Attempt, pass_hat, pass_reports, pass_table


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 1, 2), (5, 0, 3), (5, 5, 1), (6, 5, 6), (6, 4, 3)])
def test_pass_hat_k_is_the_share_of_draws_with_correct_samples_only(samples: int, correct: int, k: int) -> None:
    draws = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
    assert pass_hat(k, samples, correct) == pytest.approx(sum(map(all, draws)) / len(draws))


def attempts(problem: str, label: str, *rewards: float | None) -> list[Attempt]:
    return [Attempt(problem, label, reward) for reward in rewards]


def test_the_measures_equal_a_computation_by_hand() -> None:
    reports = pass_reports(
        [
            *attempts("a", "level 1", 1, 0, 0, 0),
            *attempts("b", "level 1", 1, 1, 1, 1),
            *attempts("c", "level 2", 0, 1, None),
            Attempt("d", "level 2", 0.0, has_answer=False),
            Attempt("e", "level 2", 0.0, is_hidden=True),
        ]
    )
    assert list(reports) == ["level 1", "level 2", ALL]
    values = {label: {name: m.value for name, m in report.measures.items()} for label, report in reports.items()}
    assert values["level 1"] == pytest.approx(
        {"pass@1": 0.625, "pass@2": 0.75, "pass^2": 0.5, "pass@4": 1.0, "pass^4": 0.5}
    )
    assert values["level 2"] == pytest.approx({"pass@1": 0.25, "pass@2": 1.0, "pass^2": 0.0})
    assert values[ALL]["pass@1"] == pytest.approx((0.25 + 1 + 0.5 + 0) / 4)
    assert reports[ALL].problems_at_k == {1: 4, 2: 3, 4: 2}
    level_2 = reports["level 2"]
    assert (level_2.problems, level_2.attempts, level_2.correct, level_2.without_answer) == (3, 3, 1, 1)
    assert (level_2.infrastructure_failures, level_2.hidden) == (1, 1)


def test_an_attempt_is_correct_if_its_reward_is_above_the_bound() -> None:
    tried = attempts("a", "x", -1.0, 0.5, 3.0)
    assert [pass_reports(tried, above)[ALL].correct for above in (-2.0, 0.0, 0.5, 3.0)] == [3, 2, 1, 0]
    overdue = Episode(Problem("p", "", ""), 0, stop_reason=StopReason.DEADLINE)
    assert pass_reports([Attempt.of(overdue)], -2.0)[ALL].correct == 0


def test_the_largest_number_of_attempts_is_a_k() -> None:
    assert list(pass_reports(attempts("a", "x", 1, 0, 0))[ALL].problems_at_k) == [1, 2, 3]


def test_without_a_scored_attempt_there_is_no_measure() -> None:
    for report in (pass_reports([])[ALL], pass_reports(attempts("a", "x", None))[ALL]):
        assert (report.attempts, report.measures, report.problems_at_k) == (0, {}, {})


def test_the_interval_is_over_problems_and_agrees_with_a_bootstrap() -> None:
    rng = random.Random(5)
    chances = [rng.random() for _ in range(60)]
    outcomes = [[float(rng.random() < chance) for _ in range(4)] for chance in chances]
    estimate = pass_reports(
        Attempt(str(number), "x", reward) for number, rewards in enumerate(outcomes) for reward in rewards
    )[ALL].measures["pass@1"]
    drawn = [statistics.mean(map(statistics.mean, rng.choices(outcomes, k=60))) for _ in range(2000)]
    low, *_, high = statistics.quantiles(drawn, n=40)  # 2.5 % and 97.5 %
    assert (estimate.low, estimate.high) == (pytest.approx(low, abs=0.02), pytest.approx(high, abs=0.02))


def test_an_attempt_is_read_from_an_episode() -> None:
    def episode(options: dict[str, object], answer: str | None, reward: float | None) -> Episode:
        problem = Problem("p", "", "", "my source", "qa", options)
        return Episode(problem, 0, stop_reason=StopReason.FINISHED, answer=answer, reward=reward)

    assert Attempt.of(episode({"level": 3}, "x", 1.0)) == Attempt("p", "level 3", 1.0)
    assert Attempt.of(episode({}, None, 0.0)) == Attempt("p", "my source", 0.0, has_answer=False)
    hidden = Attempt.of(episode({"level": 1, "answer_is_hidden": True}, "x", 0.0))
    assert hidden == Attempt("p", "level 1", 0.0, is_hidden=True)


def test_the_table_has_a_column_per_label_and_counts_failures_separately() -> None:
    reports = pass_reports([*attempts("a", "level 1", 1, 0), *attempts("b", "level 2", None, 0)])
    console = Console(width=120, record=True)
    console.print(pass_table(reports, "GAIA-format"))
    lines = console.export_text().splitlines()
    assert lines[1].split()[-5:] == ["level", "1", "level", "2", "all"]
    failures = next(line for line in lines if line.startswith("infrastructure failures"))
    assert failures.split()[-3:] == ["0", "1", "1"]
