"""Tests of training steps that collect their episodes through an executor: the order of groups, weight versions, and a
step that is continued."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.collection.hosts import NUM_TURNS, CountingEnvironment, journal_rows, make_host, wait_for
from trainer.collection import driver
from trainer.collection.cluster_collector import ClusterCollector, CollectionError
from trainer.collection.local import LocalExecutor
from trainer.collection.store import Growth
from trainer.collection.stored_collector import NoEngines
from trainer.collection.work import RunEpisode
from trainer.config import CollectConfig
from trainer.episodes.episode import Episode, FailureKind, Problem, StopReason
from trainer.rollout.episode_runner import EpisodeError

pytest.importorskip("transformers")
pytestmark = pytest.mark.asyncio

PROBLEMS = [Problem(f"p{index}", "Count.", str(NUM_TURNS - 1)) for index in range(3)]


@pytest.fixture(autouse=True)
def short_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MIN_RETRY_DELAY_S", 0.001)


class Engines(NoEngines):
    """Engines that load all weights, except for those that are down."""

    def __init__(self, down: dict[str, str] | None = None) -> None:
        self.engine_states, self._down = {"a": None, "b": None}, down or {}

    def down_reasons(self) -> dict[str, str]:
        return self._down


async def collect(
    path: Path, run_episode: RunEpisode, version: int, *, seed: int = 0, engines: Any = None, **limits: int
) -> list[list[Episode]]:
    async with LocalExecutor(run_episode, 4) as executor:
        config = CollectConfig(samples_per_problem=1, **limits)
        collector = ClusterCollector(executor, engines or Engines(), config, path)
        await collector.sync_weights({}, version)
        return await collector.collect(PROBLEMS[::-1], 2, seed=seed)  # in an order that is not that of the ids


async def test_groups_come_in_order_with_the_version_of_the_last_sync(tmp_path: Path) -> None:
    collected = await collect(tmp_path, make_host().run, version=7)
    assert [[(e.problem.id, e.sample, e.reward) for e in group] for group in collected] == [
        [(f"p{index}", sample, 1.0) for sample in range(2)] for index in (2, 1, 0)
    ]
    assert {tuple(episode.weight_versions) for group in collected for episode in group} == {((0, 7),)}


async def test_the_seed_of_a_step_is_that_of_its_episodes(tmp_path: Path) -> None:
    seeds: list[int | None] = []

    async def run(episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        seeds.append(episode.seed)
        return await make_host().run(episode, on_growth)

    for version, seed in ((1, 11), (2, 12)):
        collected = await collect(tmp_path, run, version, seed=seed)
        assert {episode.seed for group in collected for episode in group} == set(seeds) == {seed}
        seeds.clear()


async def test_a_step_does_not_begin_while_an_engine_lacks_the_weights(tmp_path: Path) -> None:
    engines = Engines({"b": "no space left on device"})
    with pytest.raises(CollectionError, match=r"^1 of 2 engines lack the last weights: b: no space left on device\."):
        await collect(tmp_path, make_host().run, 1, engines=engines)


async def test_an_episode_that_fails_for_good_is_unavailable_and_its_group_keeps_its_size(tmp_path: Path) -> None:
    host = make_host()

    async def run(episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        if episode.problem.id == "p1" and episode.sample != 1:
            raise EpisodeError(FailureKind.ENVIRONMENT, "it does not work")
        return await host.run(episode, on_growth)

    _, group, _ = await collect(tmp_path, run, version=1, max_refills=1)
    assert [(episode.sample, episode.reward, episode.stop_reason) for episode in group] == [
        (1, 1.0, StopReason.FINISHED),
        (0, None, StopReason.UNAVAILABLE),
    ]
    assert group[1].error == "it does not work"


async def test_a_step_is_continued_after_a_kill_and_dropped_when_a_later_one_begins(tmp_path: Path) -> None:
    async def hang(episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        if episode.problem.id == "p0":
            await asyncio.Event().wait()
        return await make_host().run(episode, on_growth)

    task = asyncio.create_task(collect(tmp_path, hang, version=3))
    store = tmp_path / "weights-000003"
    await wait_for(
        lambda: journal_rows(store) >= 1 and (store / "episodes/000001.jsonl").read_bytes().count(b"\n") == 4
    )
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    again: list[str] = []

    async def run(episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        again.append(episode.problem.id)
        return await make_host().run(episode, on_growth)

    await collect(tmp_path, run, version=3)
    assert again == ["p0", "p0"]
    await collect(tmp_path, run, version=4)
    assert os.listdir(tmp_path) == ["weights-000004"]


async def test_episodes_beyond_their_deadline_are_sampled_again_when_the_step_is_repeated(tmp_path: Path) -> None:
    def slow_in_p1(problem: Problem) -> CountingEnvironment:
        is_slow = problem.id == "p1"
        return CountingEnvironment(before_step=lambda count: asyncio.sleep(3600) if is_slow else None)

    _, overdue, _ = await collect(tmp_path, make_host(slow_in_p1, deadline_s=0.3).run, version=3)
    assert {(episode.stop_reason, episode.reward) for episode in overdue} == {(StopReason.DEADLINE, None)}
    assert {episode.error for episode in overdue} == {"the episode did not end within 0.3 s (collect.deadline_s)"}
    again: list[str] = []

    async def run(episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        again.append(episode.problem.id)
        return await make_host().run(episode, on_growth)

    collected = await collect(tmp_path, run, version=3)
    assert again == ["p1", "p1"]
    assert {episode.reward for group in collected for episode in group} == {1.0}
