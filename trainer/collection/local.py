"""Executors in this process: `sequential` runs one episode at a time, `local` runs many in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from trainer.collection.store import Key
from trainer.collection.work import Event, EventQueue, Finished, Progress, RunEpisode, TryError, TryFailed
from trainer.episodes.episode import Episode


class LocalExecutor:
    """Runs at most `max_episodes` at once, each with `run_episode`, whose bugs `next_events` raises."""

    def __init__(self, run_episode: RunEpisode, max_episodes: int) -> None:
        self._run_episode, self._max_episodes = run_episode, max_episodes
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._events = EventQueue()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @property
    def free_slots(self) -> int:
        return self._max_episodes - len(self._tasks)

    def submit(self, episode: Episode) -> None:
        key = Key.of(episode)
        assert key not in self._tasks, f"{key} is running"
        self._tasks[key] = asyncio.create_task(self._run(key, episode))

    def cancel(self, key: Key) -> None:
        if task := self._tasks.get(key):
            task.cancel()

    async def next_events(self) -> list[Event]:
        return await self._events.next()

    async def _run(self, key: Key, episode: Episode) -> None:
        try:
            event = await run_to_event(key, episode, self._run_episode, self._events.put)
        except Exception as error:
            self._events.fail(error)
        else:
            self._events.put(event)
        finally:
            del self._tasks[key]


async def run_to_event(key: Key, episode: Episode, run_episode: RunEpisode, on_event: Callable[[Event], None]) -> Event:
    """Run an episode, and return its last event. The others go to `on_event`."""
    try:
        reward = await run_episode(episode, lambda growth: on_event(Progress(key, growth)))
    except TryError as error:
        return TryFailed(key, error.kind, str(error))
    return Finished(key, reward)
