"""Tests of the scheduler, which decides on which engine a turn runs. Turns and failures of engines are random. No
episode is lost or placed twice, and all reservations end."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.placement import POLICIES, RoundRobin
from tests.trainer.engine_loads import engine_loads
from tests.trainer.scheduling.random_episodes import CAPACITY, MAX_CONTEXT, episodes_on_engines, run_episodes
from trainer.scheduling.scheduler import EngineStats, Placement, Scheduler


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), has_failures=st.booleans())
def test_every_episode_ends_once_and_leaves_no_reservation(policy: str, seed: int, has_failures: bool) -> None:
    episodes = run_episodes(policy, seed, num_episodes=60, has_failures=has_failures)
    assert sorted(episodes.finished) == list(range(60))
    assert not episodes.waiting
    assert not any(episodes.scheduler.lengths._in_bucket), "the length model still counts an unfinished episode"
    for load in engine_loads(episodes.scheduler).values():
        assert not any(load.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_events_lead_to_the_same_decisions(policy: str) -> None:
    first, second = (run_episodes(policy, 7, has_failures=True) for _ in range(2))
    assert first.placements == second.placements


def test_the_next_turn_runs_on_the_same_engine() -> None:
    episodes = episodes_on_engines("kv", seed=0)
    episodes.submit(0, 0)
    episodes.place()
    (first,) = episodes.placements
    episodes.scheduler.park(0, 100, 1.0)
    episodes.scheduler.resume(0, 120, 2.0)
    assert episodes.scheduler.place(2.0) == [Placement(0, first.engine)]


def test_an_episode_migrates_from_a_full_engine_to_an_empty_one() -> None:
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("old", CAPACITY)
    for key in range(4):
        scheduler.submit(key, key, 50, MAX_CONTEXT)
    assert len(scheduler.place(0.0)) == 4
    scheduler.add_engine("new", CAPACITY)
    scheduler.park(0, 60, 1.0)
    scheduler.resume(0, 70, 1.0)
    assert scheduler.place(1.0) == [Placement(0, "new", is_migration=True)]


@given(
    earlier_lengths=st.lists(st.integers(2, MAX_CONTEXT), max_size=12),
    turn_lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_an_episode_alone_on_its_engine_never_migrates(earlier_lengths: list[int], turn_lengths: list[int]) -> None:
    """With the episode, the other engine would reserve as many tokens as the present engine does. So a migration has no
    advantage.

    The length model has learned `earlier_lengths`, on which the headroom depends.
    """
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("old", CAPACITY)
    for key, length in enumerate(earlier_lengths):
        scheduler.submit(key, key, 1, MAX_CONTEXT)
        scheduler.place(0.0)
        scheduler.complete(key, 1.0, length)
    scheduler.submit("alone", 0, 1, MAX_CONTEXT)
    assert scheduler.place(2.0) == [Placement("alone", "old")]
    scheduler.add_engine("new", CAPACITY)
    for turn, length in enumerate(itertools.accumulate(turn_lengths, initial=5)):
        scheduler.park("alone", length, 3.0 + turn)
        scheduler.resume("alone", length, 3.0 + turn)
        assert scheduler.place(3.0 + turn) == [Placement("alone", "old")]


def test_turns_of_a_removed_engine_are_placed_on_another() -> None:
    episodes = episodes_on_engines("kv", seed=3, num_engines=2)
    for key in range(4):
        episodes.submit(key, 0)
    episodes.place()
    lost = episodes.placements[0].engine
    episodes.lose_engine(lost)
    episodes.place()
    assert set(episodes.running.values()) == {"e1" if lost == "e0" else "e0"}
    assert sorted(episodes.running) == [0, 1, 2, 3]


def test_a_displaced_turn_does_not_delay_resumed_ones() -> None:
    """Each cache holds one context of the largest size."""
    scheduler = Scheduler(MAX_CONTEXT)
    for name in ("e0", "e1"):
        scheduler.add_engine(name, MAX_CONTEXT)
    for key, length in enumerate((MAX_CONTEXT - 1, MAX_CONTEXT - 2)):
        scheduler.submit(key, key, length, MAX_CONTEXT)
    episode_by_engine = {placement.engine: placement.episode for placement in scheduler.place(0.0)}
    displaced, resumed = episode_by_engine["e0"], episode_by_engine["e1"]
    scheduler.park(resumed, MAX_CONTEXT, 1.0)
    assert scheduler.remove_engine("e0") == [displaced]
    scheduler.submit("new", 2, 1, MAX_CONTEXT)
    assert scheduler.place(2.0) == []
    scheduler.resume(resumed, MAX_CONTEXT, 3.0)
    assert scheduler.place(3.0) == [Placement(resumed, "e1")]
    scheduler.complete(resumed, 4.0, MAX_CONTEXT)
    assert scheduler.place(4.0)[0] == Placement(displaced, "e1", is_migration=True)


def test_nothing_is_placed_while_the_scheduler_is_paused() -> None:
    episodes = episodes_on_engines("kv", seed=0)
    episodes.submit(0, 0)
    episodes.scheduler.is_paused = True
    assert episodes.scheduler.place(0.0) == []
    episodes.scheduler.is_paused = False
    assert len(episodes.scheduler.place(0.0)) == 1


def test_an_empty_engine_admits_an_episode_that_is_larger_than_its_cache() -> None:
    scheduler = Scheduler(10 * CAPACITY)
    scheduler.add_engine("small", CAPACITY)
    scheduler.submit("long", 0, 5 * CAPACITY, 10 * CAPACITY)
    assert scheduler.place(0.0) == [Placement("long", "small")]


def test_an_empty_engine_admits_the_head_of_the_queue_even_if_another_has_more_free_tokens() -> None:
    """The large engine has no room for the next episode. Still it has more free tokens than the whole cache of the
    small engine."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("large", 10 * MAX_CONTEXT)
    for key in range(9):
        scheduler.submit(key, key, MAX_CONTEXT, MAX_CONTEXT)
    assert len(scheduler.place(0.0)) == 9
    scheduler.submit("next", 9, MAX_CONTEXT, MAX_CONTEXT)
    assert scheduler.place(1.0) == []
    scheduler.add_engine("small", MAX_CONTEXT // 8)
    # Now the scheduler tries the large engine again, and compares it with the small one.
    scheduler.update_stats("large", EngineStats(preemptions=0), 2.0)
    assert scheduler.place(2.0) == [Placement("next", "small")]


def test_resumed_turns_do_not_shift_the_round_robin_order() -> None:
    scheduler = RoundRobin(MAX_CONTEXT)
    for name in ("e0", "e1"):
        scheduler.add_engine(name, CAPACITY)
    admission_engines = []
    for key in range(6):
        scheduler.submit(key, 0, 10, MAX_CONTEXT)
        (placement,) = scheduler.place(float(key))
        admission_engines.append(placement.engine)
        for turn in range(key):
            scheduler.park(key, 20 + 2 * turn, key + 0.5)
            scheduler.resume(key, 21 + 2 * turn, key + 0.5)
            scheduler.place(key + 0.5)
    assert admission_engines == ["e0", "e1"] * 3


@pytest.mark.parametrize(
    ("report_event", "message"),
    [
        (lambda s: s.submit("a", 0, 10, MAX_CONTEXT), "expected a new key"),
        (lambda s: s.submit("b", 0, MAX_CONTEXT + 1, MAX_CONTEXT), "1 to 400 tokens"),
        (lambda s: s.park("a", 20, 0.0), "expected a running episode, got a waiting one"),
        (lambda s: s.resume("a", 20, 0.0), "expected a parked episode, got a waiting one"),
    ],
)
def test_an_impossible_event_is_a_value_error(report_event: Callable[[Scheduler], None], message: str) -> None:
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.submit("a", 0, 10, MAX_CONTEXT)
    with pytest.raises(ValueError, match=message):
        report_event(scheduler)
