"""Executors in this process: `sequential` runs one episode at a time, `local` runs many in one event loop."""

from __future__ import annotations

import asyncio
from typing import Self

from trainer.collection.work import Event, EventQueue, Finished, Progress, RunEpisode, Try, TryFailed
from trainer.episodes.episode import Episode
from trainer.rollout.episode_runner import EpisodeError


class LocalExecutor:
    """Runs at most `max_episodes` at once, each with `run_episode`. If `run_episode` raises anything but
    `EpisodeError`, `next_events` raises it too, since it is a bug."""

    def __init__(self, run_episode: RunEpisode, max_episodes: int) -> None:
        self._run_episode, self._max_episodes = run_episode, max_episodes
        self._tasks: dict[Try, asyncio.Task[None]] = {}
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

    def submit(self, by: Try, episode: Episode) -> None:
        self._tasks[by] = asyncio.create_task(self._run(by, episode))

    def cancel(self, by: Try) -> None:
        if task := self._tasks.get(by):
            task.cancel()

    async def next_events(self) -> list[Event]:
        return await self._events.next()

    async def _run(self, by: Try, episode: Episode) -> None:
        try:
            reward = await self._run_episode(episode, lambda growth: self._events.put(Progress(by, growth)))
        except EpisodeError as error:
            self._events.put(TryFailed(by, error.kind, str(error)))
        except Exception as error:
            self._events.fail(error)
        else:
            self._events.put(Finished(by, reward))
        finally:
            del self._tasks[by]
            self._events.wake()
