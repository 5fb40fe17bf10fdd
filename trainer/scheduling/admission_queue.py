"""The order in which new episodes are admitted."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Hashable
from typing import Protocol

from trainer.scheduling.length_model import LengthModel
from trainer.scheduling.state import EpisodeState, ScheduledEpisode


class AdmissionQueue(Protocol):
    """Episodes that have not had a turn. Episodes that are over may stay in the queue; `peek` skips them."""

    def __len__(self) -> int: ...
    def push(self, episode: ScheduledEpisode) -> None: ...
    def peek(self) -> ScheduledEpisode | None:
        """Return the next episode, or None if the queue is empty."""

    def pop(self) -> None:
        """Remove the episode that `peek` has returned."""

    def reprioritize(self, group: Hashable) -> None:
        """Update the order after the expected length of `group` has changed."""


class FifoQueue:
    """Admits episodes in the order of their arrival."""

    def __init__(self, _: LengthModel) -> None:
        self._episodes: deque[ScheduledEpisode] = deque()

    def __len__(self) -> int:
        return len(self._episodes)

    def push(self, episode: ScheduledEpisode) -> None:
        self._episodes.append(episode)

    def peek(self) -> ScheduledEpisode | None:
        while self._episodes and self._episodes[0].state is EpisodeState.OVER:
            self._episodes.popleft()
        return self._episodes[0] if self._episodes else None

    def pop(self) -> None:
        self._episodes.popleft()

    def reprioritize(self, group: Hashable) -> None:
        pass


class LongestFirstQueue:
    """Admits the group with the longest expected episodes first, so that no long episode starts last.

    Among groups of equal expected length, the one with the fewest admitted episodes comes first, so that the length
    model soon has a length of each group. Within a group, episodes are admitted in the order of their arrival.
    """

    def __init__(self, lengths: LengthModel) -> None:
        self._lengths = lengths
        self._waiting: dict[Hashable, deque[ScheduledEpisode]] = {}
        self._num_admitted: Counter[Hashable] = Counter()
        self._ranks: dict[Hashable, tuple[float, int, int, Hashable]] = {}
        """The current rank of each waiting group; other entries of the heap are stale."""
        self._heap: list[tuple[float, int, int, Hashable]] = []
        self._num_waiting = 0
        self._arrivals: dict[Hashable, int] = {}
        """Arrival index of the first waiting episode of each group. It is unique, so ranks never compare groups."""

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, episode: ScheduledEpisode) -> None:
        self._arrivals.setdefault(episode.group, episode.arrival_index)
        self._waiting.setdefault(episode.group, deque()).append(episode)
        self._num_waiting += 1
        self.reprioritize(episode.group)

    def peek(self) -> ScheduledEpisode | None:
        while self._heap:
            rank = self._heap[0]
            group = rank[-1]
            waiting = self._waiting.get(group)
            if waiting and waiting[0].state is EpisodeState.OVER:
                self._remove_first(group)
            elif waiting and self._ranks[group] is rank:
                return waiting[0]
            else:
                heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        group = self._heap[0][-1]
        self._num_admitted[group] += 1
        self._remove_first(group)

    def reprioritize(self, group: Hashable) -> None:
        if group in self._waiting:
            rank = (-self._lengths.group_mean(group), self._num_admitted[group], self._arrivals[group], group)
            self._ranks[group] = rank
            heapq.heappush(self._heap, rank)

    def _remove_first(self, group: Hashable) -> None:
        self._waiting[group].popleft()
        self._num_waiting -= 1
        if self._waiting[group]:
            self.reprioritize(group)
        else:
            del self._waiting[group], self._num_admitted[group], self._ranks[group], self._arrivals[group]
