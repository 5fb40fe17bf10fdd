"""Tests of the placement rules of other trainers, on engines whose loads are set step by step."""

from __future__ import annotations

import pytest

from bench.simulator import pause_at_tools, placement
from bench.simulator.pause_at_tools import PauseAtTools
from trainer.scheduling.scheduler import Placement, Scheduler

MAX_CONTEXT = 400
CAPACITY = 1000


def start(scheduler: Scheduler, lengths: list[int], now: float = 0.0) -> dict[int, str]:
    """Submit episodes, each in a group of its own, and return the engine of each that starts."""
    for key, length in enumerate(lengths):
        scheduler.submit(key, key, length, MAX_CONTEXT)
    return {placement.episode: placement.engine for placement in scheduler.place(now)}


@pytest.fixture
def sticky(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.setattr(placement, "BALANCE_ABS_THRESHOLD", 3)
    return placement.POLICIES["sticky_least_loaded"](MAX_CONTEXT)


@pytest.mark.parametrize(("num_started", "expected"), [(3, "old"), (4, "new")])
def test_a_sticky_episode_leaves_an_engine_only_if_the_load_differs_by_more_than_the_bound(
    sticky: Scheduler, num_started: int, expected: str
) -> None:
    sticky.add_engine("old", CAPACITY)
    start(sticky, [10] * num_started)
    sticky.add_engine("new", CAPACITY)
    sticky.park(0, 20, 1.0)
    sticky.resume(0, 30, 2.0)  # with this turn, "old" would run 3 or 4 turns, and "new" none
    assert sticky.place(2.0) == [Placement(0, expected, is_migration=expected == "new")]


def paused(lengths: list[int]) -> PauseAtTools:
    scheduler = PauseAtTools(MAX_CONTEXT)
    scheduler.add_engine("e0", CAPACITY)
    assert start(scheduler, lengths) == dict.fromkeys(range(len(lengths)), "e0")
    return scheduler


def test_new_episodes_wait_while_the_cache_has_no_room_for_them_and_their_buffers() -> None:
    scheduler = PauseAtTools(MAX_CONTEXT)
    scheduler.add_engine("e0", CAPACITY)
    buffer = min(pause_at_tools.BUFFER_TOKENS, MAX_CONTEXT // 32)
    length = CAPACITY // 4 - buffer
    assert set(start(scheduler, [length] * 5)) == {0, 1, 2, 3}
    scheduler.complete(0, 1.0, length)
    assert [placement.episode for placement in scheduler.place(1.0)] == [4]


def test_an_overfull_engine_pauses_the_smallest_episode_in_a_tool_call_first() -> None:
    scheduler = paused([200, 100, 150, 50])
    for key, length in ((0, 390), (1, 300), (2, 250)):  # with episode 3 and the buffers, 990 tokens
        scheduler.park(key, length, 0.0)
    scheduler.place(1.0)  # a check
    assert {key for key, episode in scheduler._episodes.items() if episode.engine is None} == {2}
    scheduler.resume(2, 260, 1.5)
    assert scheduler.place(1.5) == []
    scheduler.complete(0, 2.5, 390)
    assert scheduler.place(2.5) == [Placement(2, "e0")]


def test_a_running_episode_is_paused_only_at_the_end_of_its_turn() -> None:
    scheduler = paused([300, 310, 320])
    scheduler._episodes[0].length = 390  # as if the turn of episode 0 had streamed 90 tokens
    scheduler.place(1.0)
    assert all(episode.engine is not None for episode in scheduler._episodes.values())
    scheduler.park(1, 330, 1.2)
    assert scheduler._episodes[1].engine is None
    scheduler.resume(1, 340, 1.3)
    assert scheduler.place(1.3) == []


def test_an_engine_without_episodes_takes_one_that_exceeds_its_cache() -> None:
    scheduler = PauseAtTools(MAX_CONTEXT)
    scheduler.add_engine("e0", 100)
    assert start(scheduler, [200, 200]) == {0: "e0"}
    scheduler.complete(0, 1.0, 200)
    assert scheduler.place(1.0) == [Placement(1, "e0")]
