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
from trainer.episodes.metrics import METRICS, of_step


def slowly(episodes: list[Episode]) -> dict[str, float]:
    """Episode by episode, turn by turn."""
    names = "n reward calls failed calls_right failed_right one use len turns said surprise"
    sums = dict.fromkeys(names.split(), 0.0)
    total = dict.fromkeys(("unavailable", "tokens", "seconds_generate", "seconds_tools"), 0.0)
    for one in episodes:
        total["tokens"] += len([bit for bit in one.mask if bit])
        for turn in one.steps:
            total["seconds_generate"] += turn.generate_s
            total["seconds_tools"] += turn.tools_s
        if one.reward is None:
            total["unavailable"] += one.stop is not StopReason.CANCELLED
            continue
        calls = [call for turn in one.steps for call in turn.calls if call.status != "unavailable"]
        failed = [call for call in calls if call.status != "ok"]
        adds = {
            "n": 1, "reward": one.reward, "calls": len(calls), "failed": len(failed), "one": one.answer_tags == 1,
            "use": bool(calls), "len": len(one.ids), "turns": len(one.steps),
            "said": sum(bit == 1 for bit in one.mask),
            "surprise": sum(-logprob for logprob, bit in zip(one.logprobs, one.mask, strict=True) if bit),
            "calls_right": len(calls) if one.reward else 0, "failed_right": len(failed) if one.reward else 0,
        }  # fmt: skip
        sums = {name: sums[name] + added for name, added in adds.items()}

    def over(part: str, whole: str) -> float:
        return sums[part] / sums[whole] if sums[whole] else math.nan

    return total | {
        "reward": over("reward", "n"), "calls": over("calls", "n"), "turns": over("turns", "n"),
        "length": over("len", "n"), "one_answer": over("one", "n"), "tool_use": over("use", "n"),
        "entropy": over("surprise", "said"),
        "tool_error_ratio": over("failed", "calls"), "tool_error_ratio_correct": over("failed_right", "calls_right"),
    }  # fmt: skip


@given(
    st.lists(
        st.lists(st.tuples(st.integers(), st.sampled_from(["", "cancelled", "unavailable"])), max_size=4), max_size=4
    )
)
def test_a_step_comes_to_what_a_slow_reckoning_says(drawn: list[list[tuple[int, str]]]) -> None:
    groups = [[_episode(seed, end) for seed, end in some] for some in drawn]
    used = [[index for index, one in enumerate(group) if one.reward is not None][:2] for group in groups]
    made = of_step(groups, used)
    everyone = [one for group in groups for one in group]
    for name, number in slowly(everyone).items():
        assert made[name] == pytest.approx(number, nan_ok=True), name
    in_loss = [group[index] for group, some in zip(groups, used, strict=True) for index in some]
    assert made["reward_kept"] == pytest.approx(slowly(in_loss)["reward"], nan_ok=True)
    assert (made["kept"], made["dropped"]) == (len(in_loss), len(everyone) - len(in_loss))
    assert made["groups_dropped"] == used.count([])
    assert made.keys() <= METRICS.keys()


def _episode(seed: int, end: str) -> Episode:
    one = episode(random.Random(seed), "p", 0, skill=0.5)
    return replace(one, stop=StopReason(end), reward=None) if end else one


def test_a_chart_has_one_axis_and_as_many_lines_as_can_be_told_apart() -> None:
    charts: dict[str, list[str]] = {}
    for metric in METRICS.values():
        assert bool(metric.chart) == bool(metric.label)
        charts.setdefault(metric.chart, []).append(metric.axis)
    del charts[""]
    assert all(len(axes) <= 5 for axes in charts.values())
    # The first says which; others may leave it out.
    assert all(axis in (axes[0], "count") for axes in charts.values() for axis in axes)
