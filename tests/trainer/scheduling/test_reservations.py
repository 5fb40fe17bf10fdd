"""Tests of reservations. The reservations of an engine are a forecast: the largest number of tokens that its admitted
episodes will hold in the KV cache.

The reservations stay below the target utilization (a share of the cache). Preemptions lower the target. The forecast is
exact.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.engine_loads import engine_loads
from tests.trainer.scheduling.random_episodes import CAPACITY, MAX_CONTEXT
from trainer.scheduling.scheduler import (
    INITIAL_TARGET_UTILIZATION,
    MIN_TARGET_UTILIZATION,
    TARGET_DECREASE_FACTOR,
    EngineStats,
    KvForecast,
    Scheduler,
)


def test_reservations_never_exceed_the_target_utilization() -> None:
    """The prompts have the maximum length already. So no context grows, and the episodes that fit now are admitted."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", CAPACITY)
    for key in range(20):
        scheduler.submit(key, group=key, length=MAX_CONTEXT, max_context_tokens=MAX_CONTEXT)
    assert len(scheduler.place(0.0)) == int(CAPACITY * INITIAL_TARGET_UTILIZATION) // MAX_CONTEXT
    assert engine_loads(scheduler)["e0"]["resident_tokens"] <= CAPACITY


def test_preemptions_lower_the_target_utilization_and_scrapes_without_preemptions_raise_it() -> None:
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", CAPACITY)
    initial = scheduler.engines["e0"].target_utilization
    scheduler.update_stats("e0", EngineStats(preemptions=3), 1.0)
    lowered = scheduler.engines["e0"].target_utilization
    assert lowered < initial
    scheduler.submit(
        "a", group=0, length=10, max_context_tokens=MAX_CONTEXT
    )  # the target rises only while an episode waits
    scheduler.update_stats("e0", EngineStats(preemptions=3), 2.0)
    assert lowered < scheduler.engines["e0"].target_utilization <= initial


def test_each_burst_of_preemptions_lowers_the_target_once_down_to_its_minimum() -> None:
    """A burst lasts while the reservations exceed the target. The engine has no reservations here, so each scrape with
    new preemptions is a burst of its own."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", CAPACITY)
    targets = [scheduler.engines["e0"].target_utilization]
    for preemptions in range(1, 40):
        scheduler.update_stats("e0", EngineStats(preemptions), float(preemptions))
        targets.append(scheduler.engines["e0"].target_utilization)
    assert targets[1] == pytest.approx(targets[0] * TARGET_DECREASE_FACTOR)
    assert targets[2] == pytest.approx(targets[0] * TARGET_DECREASE_FACTOR * TARGET_DECREASE_FACTOR)
    assert targets[-1] == MIN_TARGET_UTILIZATION


def test_an_overfull_engine_lowers_its_target_once() -> None:
    """The reservations exceed the target, and no episode leaves. So all preemptions belong to one burst."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", CAPACITY)
    for key in range(3):
        scheduler.submit(key, group=key, length=CAPACITY // 3, max_context_tokens=CAPACITY)
    assert len(scheduler.place(0.0)) == 2
    for key, length in enumerate((600, 500)):  # the turns end with contexts of 1100 tokens, in a cache of 1000
        scheduler.park(key, length, 1.0)
    for preemptions in range(1, 9):
        scheduler.update_stats("e0", EngineStats(preemptions), float(preemptions))
    assert scheduler.engines["e0"].target_utilization == pytest.approx(
        INITIAL_TARGET_UTILIZATION * TARGET_DECREASE_FACTOR
    )


@settings(max_examples=100, deadline=None)
@given(
    contexts_and_growths=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=30),
    now=st.integers(0, 600),
)
def test_the_peak_equals_the_largest_sum_over_all_later_steps(
    contexts_and_growths: list[tuple[int, int]], now: int
) -> None:
    width = 10.0
    forecast = KvForecast(width)
    reservations = [forecast.reserve(context, 0.0, [float(growth)]) for context, growth in contexts_and_growths]

    def tokens_at(step: float) -> float:
        """Sum the contexts at a step after `now`. An episode ends in the middle of its bucket of steps. If `now` is in
        this bucket or after it, the episode counts only at `now`."""
        end_buckets = [int(growth / width) for _, growth in contexts_and_growths]
        running = [
            context
            for (context, _), bucket in zip(contexts_and_growths, end_buckets, strict=True)
            if bucket > int(now / width) and bucket * width + width / 2 >= step
        ]
        return sum(context + step for context in running)

    num_buckets = int(500 / width) + 1  # no episode grows by more than 500 tokens
    bucket_middles = [bucket * width + width / 2 for bucket in range(int(now / width) + 1, num_buckets)]
    tokens_now = sum(context + now for context, _ in contexts_and_growths)
    expected = max([tokens_now, *map(tokens_at, bucket_middles)])
    assert forecast.peak(float(now)) == pytest.approx(expected)
    for reservation in reservations:
        forecast.release(reservation)
    assert forecast.peak(0.0) == 0.0
    assert (forecast.resident_tokens, forecast.num_episodes) == (0, 0)
