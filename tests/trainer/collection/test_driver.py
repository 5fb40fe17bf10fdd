"""Tests of the driver of a collection. Each episode is stored once, failures are retried within their budgets, and
groups with lost episodes are refilled."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.trainer.collection.hosts import NUM_TURNS, CountingEnvironment, journal_rows, make_host, wait_for
from trainer.collection import driver
from trainer.collection.driver import Collection, CollectionStatus
from trainer.collection.local import LocalExecutor
from trainer.collection.store import EpisodeStore, Growth, Key, StoreReader
from trainer.collection.work import CollectionError, RunEpisode
from trainer.config import CollectConfig
from trainer.episodes.episode import Episode, FailureKind, Problem, StopReason
from trainer.rollout.episode_runner import EpisodeError

pytest.importorskip("transformers")
pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def short_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MIN_RETRY_DELAY_S", 0.001)


def problems(number: int) -> Iterator[Problem]:
    return (Problem(f"p{index}", "Count.", str(NUM_TURNS - 1)) for index in range(number))


async def collect(
    path: Path,
    run_episode: RunEpisode,
    num_problems: int = 3,
    *,
    max_episodes: int = 4,
    samples: int = 2,
    **limits: float,
) -> CollectionStatus:
    with EpisodeStore(path, {}) as store:
        async with LocalExecutor(run_episode, max_episodes) as executor:
            own_limits = CollectConfig(samples_per_problem=samples, **limits)
            return await Collection(
                store, executor, problems(num_problems), own_limits, num_problems=num_problems
            ).run()


def stored(path: Path) -> list[Key]:
    with StoreReader(path) as reader:
        return [Key(*row) for row in reader.query("problem, sample")]


class FailingRuns:
    """Runs episodes. For some keys, `failures` has the kinds of the failures of their first tries, one per try."""

    def __init__(self, failures: dict[tuple[str, int], list[FailureKind]]) -> None:
        self.failures = {key: list(kinds) for key, kinds in failures.items()}
        self.tries: Counter[tuple[str, int]] = Counter()
        self._host = make_host()

    async def __call__(self, episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        key = Key.of(episode)
        self.tries[key] += 1
        if kinds := self.failures.get(key):
            raise EpisodeError(kinds.pop(0), "it failed")
        return await self._host.run(episode, on_growth)


@pytest.mark.parametrize("max_episodes", [1, 4, 100])
async def test_every_sample_of_every_problem_is_stored_once(tmp_path: Path, max_episodes: int) -> None:
    status = await collect(tmp_path, make_host().run, max_episodes=max_episodes)
    assert stored(tmp_path) == [Key(f"p{problem}", sample) for problem in range(3) for sample in range(2)]
    assert (status.done, status.groups, status.incomplete_groups) == (6, 3, 0)
    assert (status.queued, status.running) == (0, 0)
    with StoreReader(tmp_path) as reader:
        assert [episode.reward for episode in reader.episodes()] == [1.0] * 6


async def test_a_second_run_runs_only_what_is_missing(tmp_path: Path) -> None:
    await collect(tmp_path, make_host().run, 2)
    runs = FailingRuns({})
    status = await collect(tmp_path, runs, 3)
    assert set(runs.tries) == {("p2", 0), ("p2", 1)}
    assert (status.stored_before, status.done) == (4, 2)


async def test_a_failed_try_is_repeated_within_its_budget(tmp_path: Path) -> None:
    infrastructure, environment = FailureKind.INFRASTRUCTURE, FailureKind.ENVIRONMENT
    runs = FailingRuns({("p0", 0): [infrastructure] * 3 + [environment], ("p1", 1): [environment]})
    status = await collect(tmp_path, runs, max_infrastructure_failures=3, max_environment_failures=1)
    assert len(stored(tmp_path)) == 6
    assert (status.failed, status.failed_tries) == (0, {"infrastructure": 3, "environment": 2})
    assert json.loads(json.dumps(asdict(status)))["failed_tries"] == status.failed_tries
    assert runs.tries[("p0", 0)] == 5


async def test_a_sample_that_fails_for_good_is_replaced_and_never_run_again(tmp_path: Path) -> None:
    runs = FailingRuns({("p0", 1): [FailureKind.ENVIRONMENT] * 99})
    status = await collect(tmp_path, runs, 1)
    assert stored(tmp_path) == [Key("p0", 0), Key("p0", 2)]
    assert (status.failed, status.refills, status.groups, status.incomplete_groups) == (1, 1, 1, 0)
    tries = runs.tries[("p0", 1)]
    await collect(tmp_path, runs, 1)
    assert (tries, runs.tries[("p0", 1)]) == (2, 2)


async def test_a_group_that_cannot_be_refilled_is_closed_as_incomplete(tmp_path: Path) -> None:
    runs = FailingRuns({("p0", sample): [FailureKind.ENVIRONMENT] * 99 for sample in range(9)})
    status = await collect(tmp_path, runs, 2, max_refills=2)
    assert (status.groups, status.incomplete_groups, status.failed, status.refills) == (2, 1, 4, 2)


@pytest.mark.parametrize("kind", FailureKind)
async def test_a_long_outage_ends_the_collection_with_the_reason(tmp_path: Path, kind: FailureKind) -> None:
    async def outage(episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        raise EpisodeError(kind, "it is down")

    what = "episodes" if kind is FailureKind.INFRASTRUCTURE else "problems"
    with pytest.raises(CollectionError, match=rf"^11 of \d+ {what} failed because of the {kind}, .*: it is down"):
        await collect(tmp_path, outage, 40, max_infrastructure_failures=1)
    status = await collect(tmp_path, make_host().run, 40)  # the budget of a new run is its own
    assert status.done + status.stored_before >= 2 * (40 - 11)


async def test_a_problem_whose_environment_always_fails_does_not_end_the_collection(tmp_path: Path) -> None:
    runs = FailingRuns({("p0", sample): [FailureKind.ENVIRONMENT] * 99 for sample in range(99)})
    status = await collect(tmp_path, runs, 2, samples=16, max_refills=8)
    assert (status.groups, status.failed, status.done) == (2, 24, 16)


async def test_an_interrupted_collection_continues_inside_its_episodes(tmp_path: Path) -> None:
    async def hang(count: int) -> None:
        if count == NUM_TURNS - 2:
            await asyncio.Event().wait()

    hanging = make_host(lambda problem: CountingEnvironment(before_step=hang))
    task = asyncio.create_task(collect(tmp_path, hanging.run, 1, samples=1))
    await wait_for(lambda: journal_rows(tmp_path) == NUM_TURNS - 2)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    turns: list[int] = []

    async def run(episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        turns.append(len(episode.turns))
        return await make_host().run(episode, on_growth)

    status = await collect(tmp_path, run, 1, samples=1)
    assert (turns, status.resumed, status.done) == ([NUM_TURNS - 2], 1, 1)
    reference = tmp_path / "reference"
    await collect(reference, make_host().run, 1, samples=1)
    with StoreReader(tmp_path) as resumed, StoreReader(reference) as whole:
        assert [e.response_ids for e in resumed.episodes()] == [e.response_ids for e in whole.episodes()]


async def test_an_episode_beyond_its_deadline_is_stored_and_counted_apart(tmp_path: Path) -> None:
    host = make_host(lambda problem: CountingEnvironment(before_step=lambda count: asyncio.sleep(99)), deadline_s=0.1)
    status = await collect(tmp_path, host.run, 1)
    assert (status.done, status.timed_out, status.refills) == (2, 2, 0)
    with StoreReader(tmp_path) as reader:
        assert {(e.stop_reason, e.reward) for e in reader.episodes()} == {(StopReason.DEADLINE, None)}


async def test_a_try_that_does_not_end_is_cancelled_and_its_late_events_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "TRY_GRACE_S", 0.5)
    tries, host = 0, make_host()  # made here, because to make its tokenizer may take longer than a try may take
    late: list[Callable[[Growth], None]] = []

    async def run(episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        nonlocal tries
        tries += 1
        if tries == 1:
            late.append(on_growth)
            await asyncio.Event().wait()
        reward = await host.run(episode, on_growth)
        late[0](
            Growth(0, Episode(episode.problem, episode.sample))
        )  # if this late event counted, it would drop all turns of the episode
        return reward

    status = await collect(tmp_path, run, 1, samples=1, deadline_s=0.5)
    assert (tries, status.failed_tries, status.done) == (2, {"environment": 1}, 1)
    with StoreReader(tmp_path) as reader:
        assert [len(episode.turns) for episode in reader.episodes()] == [NUM_TURNS]


async def test_an_unexpected_exception_of_the_host_ends_the_collection(tmp_path: Path) -> None:
    async def bug(episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        await collect(tmp_path, bug)


async def test_the_driver_reads_problems_as_it_needs_them(tmp_path: Path) -> None:
    read = 0

    def counted() -> Iterator[Problem]:
        nonlocal read
        for problem in problems(1000):
            read += 1
            yield problem

    async def hang(episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        await asyncio.Event().wait()
        return None

    with EpisodeStore(tmp_path, {}) as store:
        async with LocalExecutor(hang, 6) as executor:
            task = asyncio.create_task(
                Collection(store, executor, counted(), CollectConfig(samples_per_problem=2)).run()
            )
            await wait_for(lambda: not executor.free_slots)
            assert read == 3
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
