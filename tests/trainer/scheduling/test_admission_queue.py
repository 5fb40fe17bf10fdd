"""Tests of the order in which groups are admitted. Groups with long episodes come first. The lengths of finished,
running and overdue episodes all count."""

from __future__ import annotations

from tests.trainer.scheduling.random_episodes import MAX_CONTEXT
from trainer.scheduling.scheduler import EngineStats, Scheduler


def scheduler_with_two_started_groups() -> Scheduler:
    """Return a scheduler with two groups of two episodes: 0 and 1, 2 and 3. The first episode of each group runs."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", 10 * MAX_CONTEXT, max_running=2)
    for key, group in enumerate(["short", "short", "long", "long"]):
        scheduler.submit(key, group, 10, MAX_CONTEXT)
    assert [placement.episode for placement in scheduler.place(0.0)] == [0, 2]
    return scheduler


def test_a_group_with_long_finished_episodes_is_admitted_first() -> None:
    scheduler = scheduler_with_two_started_groups()
    scheduler.complete(0, 1.0, 20)
    scheduler.complete(2, 1.0, 350)
    assert [placement.episode for placement in scheduler.place(1.0)] == [3, 1]


def test_a_group_with_long_running_episodes_is_admitted_first() -> None:
    """No episode has finished. The length of a finished turn is enough for the order."""
    scheduler = scheduler_with_two_started_groups()
    scheduler.park(2, 300, 1.0)
    assert [placement.episode for placement in scheduler.place(1.0)] == [3]


def test_a_group_with_an_overdue_turn_is_admitted_first() -> None:
    """Before a turn ends, its length is only known from the speed of the engine."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", 10 * MAX_CONTEXT, max_running=2)
    for key in ("quick", "long"):
        scheduler.submit(key, key, 10, MAX_CONTEXT)
    assert len(scheduler.place(0.0)) == 2
    scheduler.complete("quick", 1.0, MAX_CONTEXT)  # 390 tokens in 1 s: `long` must have grown as fast
    scheduler.submit("new", "new", 10, MAX_CONTEXT)
    assert len(scheduler.place(1.25)) == 1
    for group in ("new", "long"):
        scheduler.submit(f"another {group}", group, 10, MAX_CONTEXT)
    scheduler.update_stats("e0", EngineStats(0), 1.3)
    scheduler.add_engine("e0", 10 * MAX_CONTEXT, max_running=3)
    assert [placement.episode for placement in scheduler.place(1.3)] == ["another long"]


def test_a_long_prompt_does_not_raise_its_groups_priority() -> None:
    """While no length is known, the same number of episodes of each group is admitted."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", 10 * MAX_CONTEXT, max_running=8)
    for key in range(16):  # two groups of 8
        group = key // 8
        scheduler.submit(key, group, (10, MAX_CONTEXT // 2)[group], MAX_CONTEXT)
    assert sorted(placement.episode // 8 for placement in scheduler.place(0.0)) == [0] * 4 + [1] * 4
