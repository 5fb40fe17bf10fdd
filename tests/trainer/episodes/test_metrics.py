"""Tests of the table of metrics: its numbers equal those of a plain implementation, computed from the scored
episodes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.run_folders import episode
from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus, Turn
from trainer.episodes.metrics import METRICS, step_metrics, warnings


def expected_metrics(episodes: list[Episode]) -> dict[str, float]:
    """Compute the metrics that follow from single episodes, without the table."""
    scored = [episode for episode in episodes if episode.reward is not None]
    correct = [episode for episode in scored if episode.reward]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else math.nan

    def tool_calls(some_episodes: list[Episode]) -> list[ToolCall]:
        calls = [call for episode in some_episodes for turn in episode.turns for call in turn.tool_calls]
        return [call for call in calls if call.status != "unavailable"]

    def tool_error_ratio(some_episodes: list[Episode]) -> float:
        return mean([call.status != "ok" for call in tool_calls(some_episodes)])

    all_turns = [turn for episode in episodes for turn in episode.turns]
    sampled_logprobs = [
        logprob for episode in scored for logprob, bit in zip(episode.logprobs, episode.loss_mask, strict=True) if bit
    ]
    return {
        "unavailable_episodes": sum(episode.reward is None for episode in episodes),
        "sampled_tokens": sum(episode.loss_mask.count(1) for episode in episodes),
        "generate_s_sum": sum(turn.generate_s for turn in all_turns),
        "wait_s_sum": sum(turn.wait_s for turn in all_turns),
        "tool_s_sum": sum(turn.tool_s for turn in all_turns),
        "reward": mean([episode.reward or 0.0 for episode in scored]),
        "tool_calls": mean([len(tool_calls([episode])) for episode in scored]),
        "turns": mean([len(episode.turns) for episode in scored]),
        "response_length": mean([len(episode.response_ids) for episode in scored]),
        "one_answer": mean([episode.answer_blocks == 1 for episode in scored]),
        "tool_use": mean([bool(tool_calls([episode])) for episode in scored]),
        "entropy": -mean(sampled_logprobs),
        "truncated_share": mean([episode.stop_reason in ("token_limit", "turn_limit") for episode in scored]),
        "tool_error_ratio": tool_error_ratio(scored),
        "tool_error_ratio_correct": tool_error_ratio(correct),
    }


seeds_and_stop_reasons = st.tuples(st.integers(), st.sampled_from(["", "unavailable"]))
"""Seeds and stop reasons. With an empty text, the random episode keeps its own stop reason, and has a reward."""


@given(st.lists(st.lists(seeds_and_stop_reasons, max_size=4), max_size=4))
def test_the_metrics_of_a_step_equal_those_of_a_plain_implementation(drawn_groups: list[list[tuple[int, str]]]) -> None:
    groups = [[make_episode(seed, stop_reason) for seed, stop_reason in drawn] for drawn in drawn_groups]
    in_loss = [[index for index, episode in enumerate(group) if episode.reward is not None][:2] for group in groups]
    metrics = step_metrics(groups, in_loss)
    episodes = [episode for group in groups for episode in group]
    for name, value in expected_metrics(episodes).items():
        assert metrics[name] == pytest.approx(value, nan_ok=True), name
    episodes_in_loss = [group[index] for group, indices in zip(groups, in_loss, strict=True) for index in indices]
    assert metrics["reward_in_loss"] == pytest.approx(expected_metrics(episodes_in_loss)["reward"], nan_ok=True)
    assert metrics["episodes_in_loss"] == len(episodes_in_loss)
    assert metrics["episodes_not_in_loss"] == len(episodes) - len(episodes_in_loss)
    assert metrics["zero_variance_groups"] == in_loss.count([])
    assert metrics.keys() <= METRICS.keys()


def test_tool_errors_of_correct_episodes_are_those_above_the_bound() -> None:
    group = [replace(make_episode(seed, ""), reward=seed / 10) for seed in range(10)]
    for correct_above in (0.0, 0.55):
        correct = [replace(one, reward=1.0) for one in group if one.reward is not None and one.reward > correct_above]
        metrics = step_metrics([group], [[0]], correct_above)
        assert metrics["tool_error_ratio_correct"] == step_metrics([correct], [[0]])["tool_error_ratio"]
        assert metrics["reward"] == pytest.approx(0.45)


def make_episode(seed: int, stop_reason: str) -> Episode:
    random_episode = episode(random.Random(seed), "p", 0, skill=0.5)
    if not stop_reason:
        return random_episode
    return replace(random_episode, stop_reason=StopReason(stop_reason), reward=None)


def test_a_chart_has_one_axis_and_few_enough_lines_to_distinguish() -> None:
    charts: dict[str, list[str]] = {}
    for metric in METRICS.values():
        assert bool(metric.chart) == bool(metric.label)
        charts.setdefault(metric.chart, []).append(metric.axis)
    del charts[""]
    assert all(len(axes) <= 5 for axes in charts.values())
    # The first metric of a chart sets the axis. The others repeat it or keep the default, "count".
    assert all(axis in (axes[0], "count") for axes in charts.values() for axis in axes)


def episode_of(stop_reason: StopReason, *calls: tuple[str, ToolCallStatus]) -> Episode:
    turns = [Turn(0, 0, "", (ToolCall("python", {"code": code}, status, ""),)) for code, status in calls]
    return Episode(Problem("p", "", ""), 0, turns=turns, stop_reason=stop_reason, reward=0.0)


def test_a_failed_call_that_is_repeated_to_the_turn_limit_is_measured_and_warned_of() -> None:
    error, ok = ToolCallStatus.ERROR, ToolCallStatus.OK
    stuck = episode_of(StopReason.TURN_LIMIT, *[("1/0", error)] * 9)
    debugged = episode_of(StopReason.FINISHED, ("1/0", error), ("1/1", ok), ("1/1", ok), ("x", error), ("1/0", error))
    group = [stuck] * 19 + [debugged]
    metrics = step_metrics([group], [[]])
    assert metrics["repeated_call_share"] == (19 * 8 + 1) / (19 * 9 + 5)
    assert metrics["truncated_share"] == 0.95
    assert [line.partition(":")[0] for line in warnings(metrics)] == [
        "truncated_share is 95%",
        "repeated_call_share is 87%",
    ]
    assert warnings(step_metrics([[debugged]], [[]])) == warnings({"truncated_share": None}) == []
