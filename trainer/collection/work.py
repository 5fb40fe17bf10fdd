"""The messages between the driver of a collection and its workers.

    driver --- Episode: new, or up to its last finished turn --> worker
    driver <-- Progress: one finished turn, several times ------ worker
    driver <-- Finished | TryFailed: once ---------------------- worker

A worker may end at any moment. The driver then has all turns whose `Progress` arrived, and gives the episode to another
worker. Each submission of an episode is a try with a number of its own. The driver drops events of earlier tries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from trainer.collection.store import Growth, Key
from trainer.episodes.episode import Episode, FailureKind


class Try(NamedTuple):
    """One submission of an episode."""

    key: Key
    number: int


@dataclass(frozen=True, slots=True)
class Progress:
    """An episode has gained a turn, or is complete except for its score."""

    by: Try
    growth: Growth


@dataclass(frozen=True, slots=True)
class Finished:
    """An episode is complete and scored. All its turns were sent before."""

    by: Try
    reward: float | None


@dataclass(frozen=True, slots=True)
class TryFailed:
    """A try of an episode ended without a result."""

    by: Try
    kind: FailureKind
    error: str


Event = Progress | Finished | TryFailed


RunEpisode = Callable[[Episode, Callable[[Growth], None]], Awaitable[float | None]]
"""Completes an episode in place and returns its reward. Calls its second argument after each turn. Raises
`trainer.rollout.episode_runner.EpisodeError`."""


class EventQueue:
    """Events in the order of their arrival. `next` takes all of them at once, so that a single fsync makes all of them
    durable."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._has_events = asyncio.Event()
        self._error: BaseException | None = None

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._has_events.set()

    def wake(self) -> None:
        """Make `next` return, even if there are no events."""
        self._has_events.set()

    def fail(self, error: BaseException) -> None:
        """Make `next` raise `error` after all earlier events are taken."""
        self._error = self._error or error
        self._has_events.set()

    async def next(self) -> list[Event]:
        await self._has_events.wait()
        events, self._events = self._events, []
        if not events and self._error:
            raise self._error
        if not self._error:
            self._has_events.clear()
        return events


class EpisodeExecutor(Protocol):
    """Runs episodes at some place. It is a context manager, and belongs to one event loop."""

    @property
    def free_slots(self) -> int:
        """The number of episodes that can be submitted now."""

    def submit(self, by: Try, episode: Episode) -> None:
        """Begin a try of an episode. Its events come from `next_events`, and end with `Finished` or `TryFailed`."""

    def cancel(self, by: Try) -> None:
        """End a try. Some of its events may still come."""

    async def next_events(self) -> list[Event]:
        """Wait for events or for more free slots. The list may be empty if there are more free slots. Raises
        `CollectionError` if no episode can run any more."""


class CollectionError(Exception):
    """The collection cannot go on. What it has stored is kept."""
