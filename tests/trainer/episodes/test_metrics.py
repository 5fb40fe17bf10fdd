"""The table of metrics: its numbers are what a slow, obvious reckoning says, over episodes that have a verdict."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.run_folders import episode
from trainer.episodes.episode import Episode, StopReason
from trainer.episodes.metrics import METRICS, step_metrics


def slowly(episodes: list[Episode]) -> dict[str, float]:
    """Episode by episode, turn by turn."""
    names = "n reward tool_calls failed calls_right failed_right one use len turns said surprise"
    sums = dict.fromkeys(names.split(), 0.0)
    total = dict.fromkeys(("unavailable_episodes", "sampled_tokens", "generate_s_sum", "tool_s_sum"), 0.0)
    for one in episodes:
        total["sampled_tokens"] += len([bit for bit in one.loss_mask if bit])
        for turn in one.turns:
            total["generate_s_sum"] += turn.generate_s
            total["tool_s_sum"] += turn.tool_s
        if one.reward is None:
            total["unavailable_episodes"] += one.stop_reason is not StopReason.CANCELLED
            continue
        calls = [call for turn in one.turns for call in turn.tool_calls if call.status != "unavailable"]
        failed = [call for call in calls if call.status != "ok"]
        adds = {
            "n": 1, "reward": one.reward, "tool_calls": len(calls), "failed": len(failed),
            "one": one.answer_blocks == 1,
            "use": bool(calls), "len": len(one.response_ids), "turns": len(one.turns),
            "said": sum(bit == 1 for bit in one.loss_mask),
            "surprise": sum(-logprob for logprob, bit in zip(one.logprobs, one.loss_mask, strict=True) if bit),
            "calls_right": len(calls) if one.reward else 0, "failed_right": len(failed) if one.reward else 0,
        }  # fmt: skip
        sums = {name: sums[name] + added for name, added in adds.items()}

    def over(part: str, whole: str) -> float:
        return sums[part] / sums[whole] if sums[whole] else math.nan

    return total | {
        "reward": over("reward", "n"), "tool_calls": over("tool_calls", "n"), "turns": over("turns", "n"),
        "response_length": over("len", "n"), "one_answer": over("one", "n"), "tool_use": over("use", "n"),
        "entropy": over("surprise", "said"),
        "tool_error_ratio": over("failed", "tool_calls"),
        "tool_error_ratio_correct": over("failed_right", "calls_right"),
    }  # fmt: skip


@given(
    st.lists(
        st.lists(st.tuples(st.integers(), st.sampled_from(["", "cancelled", "unavailable"])), max_size=4), max_size=4
    )
)
def test_the_metrics_of_a_step_equal_those_of_a_plain_implementation(drawn: list[list[tuple[int, str]]]) -> None:
    groups = [[_episode(seed, end) for seed, end in some] for some in drawn]
    used = [[index for index, one in enumerate(group) if one.reward is not None][:2] for group in groups]
    made = step_metrics(groups, used)
    everyone = [one for group in groups for one in group]
    for name, number in slowly(everyone).items():
        assert made[name] == pytest.approx(number, nan_ok=True), name
    in_loss = [group[index] for group, some in zip(groups, used, strict=True) for index in some]
    assert made["reward_in_loss"] == pytest.approx(slowly(in_loss)["reward"], nan_ok=True)
    assert (made["episodes_in_loss"], made["episodes_not_in_loss"]) == (len(in_loss), len(everyone) - len(in_loss))
    assert made["zero_variance_groups"] == used.count([])
    assert made.keys() <= METRICS.keys()


def _episode(seed: int, end: str) -> Episode:
    one = episode(random.Random(seed), "p", 0, skill=0.5)
    return replace(one, stop_reason=StopReason(end), reward=None) if end else one


def test_a_chart_has_one_axis_and_few_enough_lines_to_distinguish() -> None:
    charts: dict[str, list[str]] = {}
    for metric in METRICS.values():
        assert bool(metric.chart) == bool(metric.label)
        charts.setdefault(metric.chart, []).append(metric.axis)
    del charts[""]
    assert all(len(axes) <= 5 for axes in charts.values())
    # The first says which; others may leave it out.
    assert all(axis in (axes[0], "count") for axes in charts.values() for axis in axes)
