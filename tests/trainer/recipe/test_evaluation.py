"""Evaluation: the numbers by hand, ours never counted as theirs, and nothing run twice."""

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
    unfinished_problems,
)
from trainer.runs.run_folder import RunFolder

PROBLEMS = [
    Problem(f"p{number}", f"text {number}", str(number), "even" if number % 2 == 0 else "odd") for number in range(4)
]


def outcome(reward: float | None = 1.0, **some: Any) -> EpisodeOutcome:
    of_all = {
        "num_tool_calls": 2, "num_failed_tool_calls": 1, "answer_blocks": 1, "num_turns": 3, "response_length": 10,
        "stop_reason": "finished",
    }  # fmt: skip
    return EpisodeOutcome(reward, **{**of_all, **some})


def calling(calls: int, failed: int, **fields: Any) -> EpisodeOutcome:
    return outcome(num_tool_calls=calls, num_failed_tool_calls=failed, **fields)


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


class Collector:
    """Of problem n, the first n samples are right. Fails, or ends without verdicts, where it is told to."""

    def __init__(self, *, failing: str = "", unavailable: Sequence[tuple[str, int]] = ()) -> None:
        self.requested: list[str] = []
        self.failing, self.unavailable = failing, unavailable

    async def __call__(self, problems: Sequence[Problem], samples: int) -> list[list[Episode]]:
        (problem,) = problems
        self.requested.append(problem.id)
        if problem.id == self.failing:
            await asyncio.sleep(0)  # those asked for before it are done by then
            raise RuntimeError("killed")
        right = int(problem.answer)
        group = [episode(problem, sample, float(sample < right)) for sample in range(samples)]
        return [[replace(one, reward=None) if (problem.id, one.sample) in self.unavailable else one for one in group]]


def run(
    collector: Collector, folder: Path, advance: Callable[[int], None] = lambda done: None
) -> dict[str, EvalReport]:
    missing = unfinished_problems(PROBLEMS, 2, folder)
    asyncio.run(evaluate_problems(missing, 2, collector, run_folder=RunFolder(folder), on_progress=advance))
    return read_eval_reports(PROBLEMS, 2, folder)


def rows_of(folder: Path) -> list[tuple[str, int]]:
    """Whose episodes are written, one by one."""
    return sorted((row["problem"]["id"], row["sample"]) for row in RunFolder(folder).read_episodes(0))


ALL_ROWS = [(problem.id, sample) for problem in PROBLEMS for sample in range(2)]


def value(report: EvalReport, name: str = "accuracy") -> float:
    return report.measures[name].value


@pytest.mark.parametrize(("samples", "right", "j"), [(4, 1, 2), (5, 0, 3), (5, 5, 1), (6, 2, 6), (6, 4, 3)])
def test_pass_at_counts_the_draws(samples: int, right: int, j: int) -> None:
    draws = list(itertools.combinations([True] * right + [False] * (samples - right), j))
    assert pass_at(j, samples, right) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_numbers_by_hand() -> None:
    made = summarize(
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
    assert (made.problems, made.episodes, made.unavailable) == (4, 5, 3)
    assert {name: value(made, name) for name in EVAL_METRICS} == pytest.approx(
        {
            "accuracy": 2 / 5,
            "tool_error_ratio": 2 / 10,
            "tool_error_ratio_correct": 1 / 8,
            "tool_use": 3 / 5,
            "one_answer": 3 / 5,
            "tool_calls": 10 / 5,
            "turns": 3,
            "response_length": 70 / 5,
        }
    )
    assert [value(made, f"pass@{j}") for j in (1, 2)] == pytest.approx([0.5, 0.5])
    assert made.stop_reasons == {"finished": 4, "turn_limit": 1}


def test_an_unavailable_episode_is_no_reward_of_0() -> None:
    right, lost = [outcome(1.0), outcome(1.0)], [outcome(None), outcome(None)]
    assert value(summarize([right, lost], 2)) == 1
    nothing = summarize([lost], 2)
    assert (nothing.measures, nothing.episodes, nothing.unavailable) == ({}, 0, 2)
    of_all = {"accuracy": None, "accuracy_interval": None, "tool_error_ratio": None, "one_answer": None}
    assert summary_scores({"some": nothing, ALL: nothing}) == {**of_all, "accuracy_by_source": {"some": None}}


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=4, max_size=4), max_size=8))
def test_estimates_are_in_their_intervals_and_agree(rewards: list[list[float | None]]) -> None:
    made = summarize([[outcome(reward) for reward in some] for some in rewards], 4)
    assert made.episodes + made.unavailable == 4 * len(rewards)
    shares = {name: made.measures[name] for name in made.measures if name in ("accuracy", "tool_use") or "@" in name}
    for estimate in shares.values():
        assert 0 <= estimate.low <= estimate.value + 1e-9 <= estimate.high + 2e-9 <= 1 + 3e-9
    if all(None not in some for some in rewards) and rewards:
        assert value(made, "pass@1") == pytest.approx(value(made))
        chances = [value(made, f"pass@{j}") for j in (1, 2, 4)]
        assert chances == sorted(chances)


def test_the_interval_is_that_of_the_normal_distribution() -> None:
    made = summarize([[outcome(float(number % 4 == 0))] for number in range(400)], 1).measures["accuracy"]
    half = 1.96 * (0.25 * 0.75 / 400) ** 0.5
    assert (made.low, made.high) == (pytest.approx(0.25 - half, abs=0.006), pytest.approx(0.25 + half, abs=0.006))


@pytest.mark.parametrize(("right", "low", "high"), [(30, 0.886, 1), (0, 0, 0.114), (29, 0.833, 0.994)])
def test_problems_that_agree_do_not_prove_that_all_would(right: int, low: float, high: float) -> None:
    """Wilson's interval of 30 trials, by its published formula."""
    made = summarize([[outcome(float(number < right))] for number in range(30)], 1)
    for name in ("accuracy", "pass@1"):
        found = made.measures[name]
        assert (found.low, found.high) == (pytest.approx(low, abs=0.001), pytest.approx(high, abs=0.001))
    one_answer = summarize([[outcome(), outcome(answer_blocks=2)]] * 30, 2).measures["one_answer"]
    assert one_answer.high - one_answer.low > 0.3
    assert made.measures["response_length"] == Estimate(10, 10, 10)


def test_samples_of_a_problem_are_no_problems() -> None:
    made = summarize([[outcome(float(number % 2))] * 50 for number in range(40)], 50).measures["accuracy"]
    once = summarize([[outcome(float(number % 2))] for number in range(40)], 1).measures["accuracy"]
    assert (made.low, made.high) == (pytest.approx(once.low), pytest.approx(once.high))


def test_the_interval_of_a_ratio_agrees_with_a_bootstrap_over_problems() -> None:
    rng = random.Random(5)
    groups = [
        [
            outcome(num_tool_calls=(calls := rng.randrange(5)), num_failed_tool_calls=rng.randint(0, calls))
            for _ in range(3)
        ]
        for _ in range(40)
    ]
    drawn = []
    for _ in range(2000):
        flat = [one for some in rng.choices(groups, k=len(groups)) for one in some]
        drawn.append(sum(one.num_failed_tool_calls for one in flat) / sum(one.num_tool_calls for one in flat))
    made = summarize(groups, 3).measures["tool_error_ratio"]
    low, *_, high = statistics.quantiles(drawn, n=40)  # 2.5 % apart
    assert (made.low, made.high) == (pytest.approx(low, abs=0.012), pytest.approx(high, abs=0.012))


def test_reports_are_by_source_and_overall(tmp_path: Path) -> None:
    seen: list[int] = []
    reports = run(Collector(), tmp_path, advance=seen.append)
    assert list(reports) == ["even", "odd", ALL]
    assert [value(one) for one in reports.values()] == [0.5, 0.75, 0.625]
    assert seen == [1, 2, 3, 4]
    assert reports[ALL].measures["pass@2"].value == 0.75
    assert reports_from_json(json.loads(json.dumps({name: asdict(one) for name, one in reports.items()}))) == reports
    by_source = summary_scores(reports)["accuracy_by_source"]
    assert by_source == {name: asdict(reports[name].measures["accuracy"]) for name in ("even", "odd")}


def test_the_table_has_every_measure_with_its_interval(tmp_path: Path) -> None:
    reports = run(Collector(), tmp_path)
    lines = {}
    for width in (80, 66):
        out = io.StringIO()
        Console(file=out, width=width).print(report_table(reports))
        assert max(map(len, out.getvalue().splitlines())) <= width
        lines[width] = out.getvalue()
    shown = {line[:25].strip(): line[25:].split() for line in lines[80].splitlines()}
    assert (shown["problems"], shown["avg@2"][::2]) == (["2", "2", "4"], ["0.500", "0.750", "0.625"])
    for name in ("pass@2", "tool error ratio", "tool use", "tool calls", "one answer", "response length"):
        measure = reports["even"].measures[name.replace(" ", "_")]
        assert shown[name][:2] == str(measure).split(), name
        assert str(measure).split()[1] in lines[66], "what does not fit stands below, in one piece"


def test_what_was_measured_is_not_run_again(tmp_path: Path) -> None:
    expected = run(Collector(), tmp_path / "whole")
    with pytest.raises(ExceptionGroup):
        run(Collector(failing="p2"), tmp_path / "killed")
    again = Collector()
    assert run(again, tmp_path / "killed") == expected
    assert again.requested[0] == "p2"
    assert set(again.requested) < {problem.id for problem in PROBLEMS}
    third = Collector()
    assert run(third, tmp_path / "killed") == expected
    assert third.requested == []
    rows = list(RunFolder(tmp_path / "killed").read_episodes(0))
    assert {row["group"]: row["problem"]["id"] for row in rows} == {n: one.id for n, one in enumerate(PROBLEMS)}
    assert rows_of(tmp_path / "killed") == ALL_ROWS


@pytest.mark.parametrize("lines", [1, 2])
def test_a_kill_between_episodes_and_outcomes_leaves_one_row_of_each(tmp_path: Path, lines: int) -> None:
    run(Collector(), tmp_path)
    outcomes = tmp_path / "outcomes.jsonl"
    outcomes.write_bytes(b"".join(outcomes.read_bytes().splitlines(keepends=True)[:-lines]))
    again = Collector()
    run(again, tmp_path)
    assert len(again.requested) == 1
    assert rows_of(tmp_path) == ALL_ROWS


def test_episodes_that_an_outage_left_unscored_are_run_again(tmp_path: Path) -> None:
    first = run(Collector(unavailable=[("p1", 0)]), tmp_path)
    assert first[ALL].unavailable == 1
    again = Collector()
    assert run(again, tmp_path) == run(Collector(), tmp_path / "whole")
    assert again.requested == ["p1"]
    assert rows_of(tmp_path) == ALL_ROWS
