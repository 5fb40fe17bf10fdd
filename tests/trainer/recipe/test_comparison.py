"""Tests of the comparison of two evaluations: the paired interval, its counts, and which comparisons are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer import cli
from trainer.data.problems import write_problems
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.json_files import RecordError
from trainer.recipe.comparison import MAY_DIFFER, compare_evaluations, compare_rewards, paired_estimate
from trainer.recipe.evaluation import ALL, write_outcomes
from trainer.runs.run_folder import RunFolder

SETTINGS = {
    "limits": {"max_response_tokens": 24, "max_turns": 2, "max_tool_response_chars": 99},
    "samples": 2, "temperature": 0.6, "top_p": 0.95, "seed": 1, "model": "a",
}  # fmt: skip
BEFORE = {"p0": [1, 0], "p1": [0, 0], "p2": [1, 1], "p3": [0, 1], "p4": [1, 1]}
AFTER = {"p0": [1, 1], "p1": [0, 0], "p2": [0, 0], "p3": [1, 1], "p4": [1, 1]}


def write_evaluation(
    folder: Path,
    rewards: Mapping[str, Sequence[float | None]],
    *,
    problems_file: Path | None = None,
    answer: str = "1",
    **settings: object,
) -> Path:
    """Write an evaluation in which the problems have these rewards. Even numbers are from the source `even`."""
    problems = [Problem(id, f"text of {id}", answer, "odd" if int(id[1:]) % 2 else "even") for id in rewards]
    write_problems(problems, problems_file or folder / "problems.jsonl")
    RunFolder(folder).bind_config(SETTINGS | settings)
    write_outcomes(
        folder,
        (
            Episode(problem, sample, stop_reason=StopReason.FINISHED, reward=reward)
            for problem in problems
            for sample, reward in enumerate(rewards[problem.id])
        ),
    )
    return folder


def test_a_published_interval_of_matched_pairs_is_reproduced() -> None:
    """The bounds are those that the R package PropCIs documents for diffpropci.mp(b=40, c=20, n=160)."""
    estimate = paired_estimate([-1.0] * 40 + [1.0] * 20 + [0.0] * 100, 1)
    assert estimate.value == -0.125
    assert (estimate.low, estimate.high) == (pytest.approx(-0.21601726, abs=1e-6), pytest.approx(-0.03089632, abs=1e-6))


@pytest.mark.parametrize(("problems", "samples"), [(30, 1), (30, 8), (30, 32), (200, 2)])
def test_about_95_percent_of_the_intervals_contain_the_difference_of_all_problems(problems: int, samples: int) -> None:
    """In the first evaluation each problem is solved with a random probability. In the second evaluation this
    probability is higher by 0.1."""
    rng = random.Random(problems + samples)

    def accuracy(probability: float) -> float:
        return fmean(rng.random() < probability for _ in range(samples))

    contained = 0
    for _ in range(500):
        probabilities = [rng.betavariate(0.5, 0.5) * 0.9 for _ in range(problems)]
        estimate = paired_estimate([accuracy(p + 0.1) - accuracy(p) for p in probabilities], samples)
        contained += estimate.low <= 0.1 <= estimate.high
    assert 0.92 <= contained / 500 <= 0.985


def test_the_paired_interval_is_narrower_than_one_of_independent_problems() -> None:
    before = [[float(number % 2)] for number in range(100)]
    after = [[1.0], *before[1:]]
    difference = compare_rewards(list(zip(before, after, strict=True)), 1).difference
    assert difference
    independent_half_width = 1.96 * (2 * 0.25 / 100) ** 0.5
    assert (difference.high - difference.low) / 2 < independent_half_width / 3


def test_other_rewards_than_0_and_1_are_compared_by_accuracy_and_by_their_means() -> None:
    pairs = [([0.5, 2.0], [4.0, 0.5]), ([3.0], [-1.0]), ([], [1.0])]
    comparison = compare_rewards(pairs, 2, 1.0)
    assert (comparison.before, comparison.after, comparison.unscored) == ((1 / 2 + 1) / 2, (1 / 2 + 0) / 2, 1)
    # The differences of the means are 1 and -4. Their standard error is 2.5, and t of one degree of freedom is 12.706.
    reward = comparison.reward_difference
    assert reward
    assert (reward.low, reward.value, reward.high) == pytest.approx((-1.5 - 12.706 * 2.5, -1.5, -1.5 + 12.706 * 2.5))
    assert comparison.row()["reward_difference"] == "-1.500 [-33.265, +30.265]"
    assert compare_rewards(pairs[:1], 2).row()["reward_difference"] == "+1.000 [–]"
    binary = compare_rewards([([1.0], [0.0])], 1)
    assert binary.reward_difference is None and "reward_difference" not in binary.row()


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.integers(1, 64))
def test_an_interval_contains_its_value_and_is_never_empty(differences: list[float], samples: int) -> None:
    estimate = paired_estimate(differences, samples)
    assert -1 <= estimate.low <= estimate.value + 1e-9 <= estimate.high + 2e-9 <= 1 + 3e-9
    assert estimate.high > estimate.low


def test_the_counts_and_the_interval_of_a_comparison_equal_a_computation_by_hand(tmp_path: Path) -> None:
    before, after = write_evaluation(tmp_path / "a", BEFORE), write_evaluation(tmp_path / "b", AFTER, model="b", seed=2)
    comparisons = compare_evaluations(before, after)
    assert list(comparisons) == ["even", "odd", ALL]
    over_all = comparisons[ALL]
    assert (over_all.problems, over_all.samples, over_all.unscored) == (5, 2, 0)
    assert (over_all.before, over_all.after, over_all.better, over_all.worse) == (0.6, 0.6, 2, 1)
    assert over_all.difference
    assert over_all.difference == paired_estimate([0.5, 0, -1, 0.5, 0], 2)
    odd = comparisons["odd"]
    assert (odd.problems, odd.before, odd.after, odd.better, odd.worse) == (2, 0.25, 0.5, 1, 0)
    reverse = compare_evaluations(after, before)[ALL]
    assert reverse.difference
    assert (reverse.better, reverse.worse) == (1, 2)
    assert (reverse.difference.low, reverse.difference.high) == (-over_all.difference.high, -over_all.difference.low)


def test_an_outage_never_counts_as_a_wrong_answer(tmp_path: Path) -> None:
    before = write_evaluation(tmp_path / "a", {"p0": [1, None], "p1": [None, None], "p2": [1, 1]})
    after = write_evaluation(tmp_path / "b", {"p0": [1, 1], "p1": [1, 1], "p2": [None, None]})
    comparison = compare_evaluations(before, after)[ALL]
    assert (comparison.problems, comparison.unscored, comparison.before, comparison.after) == (3, 2, 1, 1)
    assert (comparison.better, comparison.worse) == (0, 0)
    down = write_evaluation(tmp_path / "c", {id: [None, None] for id in ("p0", "p1", "p2")})
    comparison = compare_evaluations(down, after)[ALL]
    assert (comparison.unscored, comparison.before, comparison.difference) == (3, None, None)


def test_evaluations_of_stages_have_their_problems_in_the_run_folder(tmp_path: Path) -> None:
    file = tmp_path / "run/data/eval.jsonl"
    stages = [
        write_evaluation(tmp_path / "run/stages" / stage / "eval", rewards, problems_file=file)
        for stage, rewards in (("sft", BEFORE), ("rl1", AFTER))
    ]
    of_model = write_evaluation(tmp_path / "run/eval/model", AFTER)
    assert compare_evaluations(stages[0], stages[1]) == compare_evaluations(stages[0], of_model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": BEFORE | {"p5": [1, 1]}}, "different problems: 1, such as 'p5'"),
        (
            {"rewards": {"p0": [1, 0]}},
            "different problems: 4, such as 'p1'",
        ),
        (
            {"answer": "2"},
            "different problems: 5, such as 'p0'",
        ),
        ({"samples": 1}, "different sampling settings (samples)"),
        ({"temperature": 1.0, "top_p": 1.0}, "different sampling settings (temperature, top_p)"),
        ({"limits": SETTINGS["limits"] | {"max_turns": 3}}, "sampling settings (limits.max_turns)"),  # type: ignore[operator]
        ({"engines.extra_body": {"top_k": 20}}, "different sampling settings (engines.extra_body)"),
    ],
)
def test_evaluations_of_other_problems_or_with_other_sampling_are_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write_evaluation(tmp_path / "a", BEFORE)
    after = write_evaluation(tmp_path / "b", **{"rewards": BEFORE} | changes)  # type: ignore[arg-type]
    assert cli.main(["compare", str(before), str(after)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rstar-train: the evaluations ")
    assert message in line


def test_the_model_and_its_engine_may_differ(tmp_path: Path) -> None:
    others = dict.fromkeys(MAY_DIFFER, "other") | {"engines.extra_body": {}, "engines.stop_strings": []}
    before = write_evaluation(tmp_path / "a", BEFORE)
    assert compare_evaluations(before, write_evaluation(tmp_path / "b", AFTER, **others))[ALL].problems == 5


def test_a_folder_without_a_finished_evaluation_is_refused(tmp_path: Path) -> None:
    before = write_evaluation(tmp_path / "a", BEFORE)
    with pytest.raises(RecordError, match=r"nowhere: expected an evaluation: RUN/stages/NAME/eval, or RUN/eval/MODEL"):
        compare_evaluations(before, tmp_path / "nowhere")
    unfinished = write_evaluation(tmp_path / "b", BEFORE | {"p1": [0]})
    with pytest.raises(RecordError, match=r"b: 1 of 5 problems are unfinished; repeat `rstar-train eval`"):
        compare_evaluations(before, unfinished)
    (unfinished / "config.json").unlink()
    with pytest.raises(RecordError, match=r"b: expected a finished evaluation, but it has no config\.json"):
        compare_evaluations(before, unfinished)


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(write_evaluation(tmp_path / "a", BEFORE)), str(write_evaluation(tmp_path / "b", AFTER))]
    assert cli.main(["compare", *folders]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["problems", "3", "2", "5"] in rows
    assert ["after", "0.667", "0.5", "0.6"] in rows
    assert ["better", "1", "1", "2"] in rows
    assert cli.main(["compare", *folders, "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert list(written) == ["even", "odd", ALL]
    assert written[ALL]["difference"].keys() == {"value", "low", "high"}
    assert (written[ALL]["better"], written[ALL]["worse"]) == (2, 1)
