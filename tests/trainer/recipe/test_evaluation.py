"""Tests of evaluations: their measures and intervals, unavailable episodes, and the resumption of an evaluation."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus, Turn
from trainer.recipe.evaluation import (
    ALL,
    EVAL_METRICS,
    EpisodeOutcome,
    Estimate,
    EvalReport,
    evaluate_problems,
    pass_at,
    read_eval_reports,
    report_table,
    reports_from_json,
    summarize,
    summary_scores,
    t_quantile,
    tracker_row,
    unfinished_problems,
)
from trainer.runs.run_folder import RunFolder

PROBLEMS = [
    Problem(f"p{number}", f"text {number}", str(number), "even" if number % 2 == 0 else "odd") for number in range(4)
]


def outcome(reward: float | None = 1.0, **fields: Any) -> EpisodeOutcome:
    defaults = {
        "num_tool_calls": 2, "num_failed_tool_calls": 1, "answer_blocks": 1, "num_turns": 3, "response_length": 10,
        "stop_reason": "finished",
    }  # fmt: skip
    return EpisodeOutcome(reward, **{**defaults, **fields})


def episode(problem: Problem, sample: int, reward: float | None) -> Episode:
    statuses = [ToolCallStatus.ERROR] * sample + [ToolCallStatus.OK]
    calls = tuple(ToolCall("python", {"code": "1"}, status, "1") for status in statuses)
    ids = tuple(range(5 + sample))
    return Episode(
        problem,
        sample,
        prompt_ids=(1, 2),
        response_ids=ids,
        logprobs=(-0.5,) * len(ids),
        loss_mask=(1,) * len(ids),
        turns=(Turn(0, 3, "", calls), Turn(3, len(ids), "")),
        stop_reason=StopReason.UNAVAILABLE if reward is None else StopReason.FINISHED,
        answer="1",
        answer_blocks=1 + sample % 2,
        reward=reward,
    )


class FakeCollector:
    """A collector in which the first n samples of problem number n are correct. The problem `failing` raises an error.
    The episodes (problem, sample) in `unavailable` have no reward."""

    def __init__(self, *, failing: str = "", unavailable: Sequence[tuple[str, int]] = ()) -> None:
        self.requested: list[str] = []
        self.failing, self.unavailable = failing, unavailable

    async def __call__(self, problems: Sequence[Problem], samples: int) -> list[list[Episode]]:
        (problem,) = problems
        self.requested.append(problem.id)
        if problem.id == self.failing:
            await asyncio.sleep(0)  # meanwhile the problems before it finish
            raise RuntimeError("killed")
        num_correct = int(problem.answer)
        group = [episode(problem, sample, float(sample < num_correct)) for sample in range(samples)]
        return [[replace(e, reward=None) if (problem.id, e.sample) in self.unavailable else e for e in group]]


def evaluate(
    collector: FakeCollector, eval_dir: Path, on_progress: Callable[[int], None] = lambda done: None
) -> dict[str, EvalReport]:
    """Evaluate the problems that are not finished in `eval_dir`, with two samples of each."""
    unfinished = unfinished_problems(PROBLEMS, 2, eval_dir)
    run_folder = RunFolder(eval_dir)
    asyncio.run(evaluate_problems(unfinished, 2, collector, run_folder=run_folder, on_progress=on_progress))
    return read_eval_reports(PROBLEMS, 2, eval_dir)


def written_episodes(eval_dir: Path) -> list[tuple[str, int]]:
    """Return (problem, sample) of each written episode."""
    return sorted((row["problem"]["id"], row["sample"]) for row in RunFolder(eval_dir).read_episodes(0))


ALL_EPISODES = [(problem.id, sample) for problem in PROBLEMS for sample in range(2)]


def value(report: EvalReport, name: str = "accuracy") -> float:
    return report.measures[name].value


@pytest.mark.parametrize(("samples", "num_correct", "j"), [(4, 1, 2), (5, 0, 3), (5, 5, 1), (6, 2, 6), (6, 4, 3)])
def test_pass_at_j_is_the_share_of_draws_with_a_correct_sample(samples: int, num_correct: int, j: int) -> None:
    draws = list(itertools.combinations([True] * num_correct + [False] * (samples - num_correct), j))
    assert pass_at(j, samples, num_correct) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_measures_equal_a_computation_by_hand() -> None:
    report = summarize(
        [
            [
                outcome(1.0, num_tool_calls=4, num_failed_tool_calls=1),
                outcome(0.0, answer_blocks=2, stop_reason="turn_limit"),
            ],
            [
                outcome(0.0, num_tool_calls=0, num_failed_tool_calls=0, response_length=30),
                outcome(0.0, num_tool_calls=0, num_failed_tool_calls=0),
            ],
            [
                outcome(None, num_tool_calls=9, num_failed_tool_calls=9),
                outcome(1.0, num_tool_calls=4, num_failed_tool_calls=0, answer_blocks=0),
            ],
            [outcome(None), outcome(None)],
        ],
        2,
    )
    assert (report.problems, report.episodes, report.unavailable) == (4, 5, 3)
    assert {name: value(report, name) for name in ("accuracy", "reward", *EVAL_METRICS)} == pytest.approx(
        {
            "accuracy": 2 / 5,
            "reward": 2 / 5,
            "tool_error_ratio": 2 / 10,
            "tool_error_ratio_correct": 1 / 8,
            "tool_use": 3 / 5,
            "one_answer": 3 / 5,
            "tool_calls": 10 / 5,
            "turns": 3,
            "response_length": 70 / 5,
        }
    )
    assert [value(report, f"pass@{j}") for j in (1, 2)] == pytest.approx([0.5, 0.5])
    assert report.stop_reasons == {"finished": 4, "turn_limit": 1}


def test_an_unavailable_episode_does_not_count_as_a_reward_of_0() -> None:
    correct, unavailable = [outcome(1.0), outcome(1.0)], [outcome(None), outcome(None)]
    assert value(summarize([correct, unavailable], 2)) == 1
    report = summarize([unavailable], 2)
    assert (report.measures, report.episodes, report.unavailable) == ({}, 0, 2)
    scores = {"accuracy": None, "accuracy_interval": None, "tool_error_ratio": None, "one_answer": None}
    assert summary_scores({"math": report, ALL: report}) == {**scores, "accuracy_by_source": {"math": None}}


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=4, max_size=4), max_size=8))
def test_an_interval_contains_its_value_and_pass_at_j_grows_with_j(rewards: list[list[float | None]]) -> None:
    report = summarize([[outcome(reward) for reward in group] for group in rewards], 4)
    assert report.episodes + report.unavailable == 4 * len(rewards)
    shares = [report.measures[name] for name in report.measures if name in ("accuracy", "tool_use") or "@" in name]
    for estimate in shares:
        # Each bound may exceed the next by a rounding error.
        assert 0 <= estimate.low <= estimate.value + 1e-9 <= estimate.high + 2e-9 <= 1 + 3e-9
    if all(None not in group for group in rewards) and rewards:
        assert value(report, "pass@1") == pytest.approx(value(report))
        chances = [value(report, f"pass@{j}") for j in (1, 2, 4)]
        assert chances == sorted(chances)


def test_with_many_problems_the_interval_is_that_of_the_normal_distribution() -> None:
    accuracy = summarize([[outcome(float(number % 4 == 0))] for number in range(400)], 1).measures["accuracy"]
    half_width = 1.96 * (0.25 * 0.75 / 400) ** 0.5
    assert accuracy.low == pytest.approx(0.25 - half_width, abs=0.006)
    assert accuracy.high == pytest.approx(0.25 + half_width, abs=0.006)


@pytest.mark.parametrize(("num_correct", "low", "high"), [(30, 0.886, 1), (0, 0, 0.114), (29, 0.833, 0.994)])
def test_the_interval_of_problems_with_equal_outcomes_is_not_empty(num_correct: int, low: float, high: float) -> None:
    """The expected bounds are Wilson's interval of 30 trials, by its published formula."""
    report = summarize([[outcome(float(number < num_correct))] for number in range(30)], 1)
    for name in ("accuracy", "pass@1"):
        estimate = report.measures[name]
        assert estimate.low == pytest.approx(low, abs=0.001)
        assert estimate.high == pytest.approx(high, abs=0.001)
    # All problems have the same share of correct samples, 1 of 2. Each problem counts as one trial.
    one_answer = summarize([[outcome(), outcome(answer_blocks=2)]] * 30, 2).measures["one_answer"]
    assert one_answer.high - one_answer.low > 0.3
    assert report.measures["response_length"] == Estimate(10, 10, 10), "a mean without variance has no interval"


@pytest.mark.parametrize(("samples", "correct"), [(8, (4, 5)), (32, (15, 16, 17))])
def test_problems_that_agree_by_chance_count_as_no_more_trials_than_episodes(
    samples: int, correct: tuple[int, ...]
) -> None:
    report = summarize([[outcome(float(n < num)) for n in range(samples)] for num in correct], samples)
    share, episodes = sum(correct) / len(correct) / samples, len(correct) * samples
    for name in ("accuracy", "pass@1"):
        estimate = report.measures[name]
        assert estimate.value == share
        assert estimate.high - estimate.low >= 1.9 * 1.96 * (share * (1 - share) / episodes) ** 0.5


def test_the_t_quantile_is_that_of_the_published_table() -> None:
    for degrees, quantile in (
        (1, 12.71),
        (2, 4.303),
        (3, 3.182),
        (5, 2.571),
        (10, 2.228),
        (30, 2.042),
        (100, 1.984),
        (10**6, 1.960),
    ):
        assert t_quantile(degrees) == pytest.approx(quantile, rel=0.01)


def test_more_samples_of_the_same_problems_do_not_narrow_the_interval() -> None:
    many, single = (
        summarize([[outcome(float(number % 2))] * samples for number in range(40)], samples).measures["accuracy"]
        for samples in (50, 1)
    )
    assert many.low == pytest.approx(single.low, abs=0.005) and many.low < single.low
    assert many.high == pytest.approx(single.high, abs=0.005) and many.high > single.high


def test_the_interval_of_a_ratio_agrees_with_a_bootstrap_over_problems() -> None:
    rng = random.Random(5)
    groups = []
    for _ in range(40):
        calls = [rng.randrange(5) for _ in range(3)]
        groups.append([outcome(num_tool_calls=n, num_failed_tool_calls=rng.randint(0, n)) for n in calls])
    ratios = []
    for _ in range(2000):
        drawn = list(itertools.chain(*rng.choices(groups, k=len(groups))))
        ratios.append(sum(e.num_failed_tool_calls for e in drawn) / sum(e.num_tool_calls for e in drawn))
    estimate = summarize(groups, 3).measures["tool_error_ratio"]
    low, *_, high = statistics.quantiles(ratios, n=40)  # 2.5 % and 97.5 %
    assert (estimate.low, estimate.high) == (pytest.approx(low, abs=0.012), pytest.approx(high, abs=0.012))


def test_rewards_of_0_and_1_have_equal_intervals_for_accuracy_and_mean_reward() -> None:
    measures = summarize([[outcome(float(number % 3 == 0)), outcome(None)] for number in range(9)], 2).measures
    assert measures["reward"] == measures["accuracy"]
    assert "reward" not in summary_scores({ALL: summarize([[outcome()]], 1)})


def test_accuracy_and_mean_reward_differ_for_other_rewards() -> None:
    groups = [[outcome(5.0), outcome(3.0)], [outcome(-2.0), outcome(0.5)]]
    for correct_above, accuracy, failed in ((0.0, 3 / 4, 1 / 2), (3.0, 1 / 4, 1 / 4), (9.0, 0, None)):
        groups[0][0] = groups[0][0]._replace(num_failed_tool_calls=0 if failed == 1 / 2 else 1)
        report = summarize(groups, 2, correct_above)
        assert (value(report), value(report, "reward")) == (accuracy, 6.5 / 4)
        assert value(report, "pass@1") == accuracy
        assert ("tool_error_ratio_correct" in report.measures) == (accuracy > 0)
    scores = summary_scores({ALL: summarize(groups, 2)})
    assert (scores["accuracy"], scores["reward"]) == (3 / 4, 6.5 / 4)


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=2), min_size=2, max_size=8))
def test_any_real_rewards_have_intervals_that_contain_their_means(rewards: list[list[float]]) -> None:
    measures = summarize([[outcome(reward) for reward in group] for group in rewards], 2).measures
    reward, accuracy = measures["reward"], measures["accuracy"]
    assert reward.low - 1e-6 <= reward.value <= reward.high + 1e-6
    assert 0 <= accuracy.low <= accuracy.value + 1e-9 <= accuracy.high + 2e-9 <= 1 + 3e-9
    json.dumps(asdict(reward), allow_nan=False)


def test_the_interval_of_the_mean_reward_is_that_of_student() -> None:
    """The means of the problems are 1, 3 and 8. Their standard error is (13 / 3) ** 0.5, and t is 4.303."""
    reward = summarize([[outcome(0.0), outcome(2.0)], [outcome(3.0)] * 2, [outcome(8.0)] * 2], 2).measures["reward"]
    half_width = 4.303 * (13 / 3) ** 0.5
    assert (reward.low, reward.value, reward.high) == pytest.approx((4 - half_width, 4, 4 + half_width))
    one_problem = summarize([[outcome(5.0), outcome(3.0)]], 2).measures["reward"]
    assert one_problem == Estimate(4.0, None, None)
    assert str(one_problem) == "4.000 [–]"


def test_the_intervals_of_real_rewards_contain_the_true_mean_in_95_of_100_evaluations() -> None:
    """Each reward is skill of the problem - 1, where the skill and the noise are uniform: the true mean is -0.5."""
    rng, num_problems, evaluations = random.Random(3), 12, 400
    hits = 0
    for _ in range(evaluations):
        skills = [rng.random() for _ in range(num_problems)]
        groups = [[outcome(skill - 1 + rng.uniform(-0.5, 0.5)) for _ in range(2)] for skill in skills]
        reward = summarize(groups, 2).measures["reward"]
        hits += reward.low <= -0.5 <= reward.high
    # Three standard deviations of a binomial with 400 trials are 3.3 %.
    assert abs(hits / evaluations - 0.95) < 0.033


def test_the_table_shows_the_mean_reward_only_if_it_differs_from_the_accuracy() -> None:
    for reward, is_shown in ((1.0, False), (0.5, True)):
        report = summarize([[outcome(reward)], [outcome(0.0)]], 1)
        table = report_table({"math": report, ALL: report})
        assert ("reward" in list(table.columns[0].cells)) == is_shown


def test_trackers_get_all_measures_and_the_accuracy_of_each_source() -> None:
    math, code = summarize([[outcome(2.0)]], 1), summarize([[outcome(None)]], 1)
    row = tracker_row({"math": math, "code": code, ALL: math}, 7)
    assert (row["step"], row["eval/accuracy"], row["eval/reward"], row["eval/pass@1"]) == (7, 1, 2, 1)
    assert [name for name in row if name.count("/") > 1] == ["eval/math/accuracy"]


def test_there_is_a_report_per_source_and_one_over_all(tmp_path: Path) -> None:
    progress: list[int] = []
    reports = evaluate(FakeCollector(), tmp_path, on_progress=progress.append)
    assert list(reports) == ["even", "odd", ALL]
    assert [value(report) for report in reports.values()] == [0.5, 0.75, 0.625]
    assert progress == [1, 2, 3, 4]
    assert reports[ALL].measures["pass@2"].value == 0.75
    as_json = json.dumps({name: asdict(report) for name, report in reports.items()})
    assert reports_from_json(json.loads(as_json)) == reports
    by_source = summary_scores(reports)["accuracy_by_source"]
    assert by_source == {name: asdict(reports[name].measures["accuracy"]) for name in ("even", "odd")}


def test_the_table_has_every_measure_with_its_interval(tmp_path: Path) -> None:
    reports = evaluate(FakeCollector(), tmp_path)
    text_by_width = {}
    for width in (80, 66):
        out = io.StringIO()
        Console(file=out, width=width).print(report_table(reports))
        text_by_width[width] = out.getvalue()
        assert max(map(len, text_by_width[width].splitlines())) <= width
    # The first column is 25 characters wide. Each cell is a value and its interval.
    shown = {line[:25].strip(): line[25:].split() for line in text_by_width[80].splitlines()}
    assert (shown["problems"], shown["avg@2"][::2]) == (["2", "2", "4"], ["0.500", "0.750", "0.625"])
    for name in ("pass@2", "tool error ratio", "tool use", "tool calls", "one answer", "response length"):
        measure = reports["even"].measures[name.replace(" ", "_")]
        assert shown[name][:2] == str(measure).split(), name
        assert str(measure).split()[1] in text_by_width[66], "an interval wraps as a whole"


def test_a_resumed_evaluation_samples_only_unfinished_problems(tmp_path: Path) -> None:
    expected = evaluate(FakeCollector(), tmp_path / "whole")
    with pytest.raises(ExceptionGroup):
        evaluate(FakeCollector(failing="p2"), tmp_path / "killed")
    second = FakeCollector()
    assert evaluate(second, tmp_path / "killed") == expected
    assert second.requested[0] == "p2"
    assert set(second.requested) < {problem.id for problem in PROBLEMS}
    third = FakeCollector()
    assert evaluate(third, tmp_path / "killed") == expected
    assert third.requested == []
    rows = list(RunFolder(tmp_path / "killed").read_episodes(0))
    assert {row["group"]: row["problem"]["id"] for row in rows} == {
        number: problem.id for number, problem in enumerate(PROBLEMS)
    }
    assert written_episodes(tmp_path / "killed") == ALL_EPISODES


@pytest.mark.parametrize("num_lost", [1, 2])
def test_after_a_kill_between_episodes_and_outcomes_each_episode_has_one_row(tmp_path: Path, num_lost: int) -> None:
    evaluate(FakeCollector(), tmp_path)
    outcomes = tmp_path / "outcomes.jsonl"
    outcomes.write_bytes(b"".join(outcomes.read_bytes().splitlines(keepends=True)[:-num_lost]))
    second = FakeCollector()
    evaluate(second, tmp_path)
    assert len(second.requested) == 1
    assert written_episodes(tmp_path) == ALL_EPISODES


def test_problems_with_an_episode_that_an_outage_left_unscored_are_sampled_again(tmp_path: Path) -> None:
    first = evaluate(FakeCollector(unavailable=[("p1", 0)]), tmp_path)
    assert first[ALL].unavailable == 1
    second = FakeCollector()
    assert evaluate(second, tmp_path) == evaluate(FakeCollector(), tmp_path / "whole")
    assert second.requested == ["p1"]
    assert written_episodes(tmp_path) == ALL_EPISODES
