"""The order in which new episodes are admitted."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Hashable

from trainer.scheduling.length_model import LengthModel
from trainer.scheduling.state import EpisodeState, ScheduledEpisode


class AdmissionQueue(ABC):
    """Episodes that have not had a turn.

    Groups are ordered by their rank. The group with the smallest rank comes first. Among groups of equal rank, the one
    whose first waiting episode arrived first comes first. Within a group, episodes are admitted in the order of their
    arrival. Episodes that are over may stay in the queue; `peek` skips them.
    """

    def __init__(self, lengths: LengthModel) -> None:
        self._lengths = lengths
        self._waiting: dict[Hashable, deque[ScheduledEpisode]] = {}
        self._num_admitted: Counter[Hashable] = Counter()
        self._entries: dict[Hashable, tuple[tuple[float, ...], int, Hashable]] = {}
        """The current entry of each waiting group in the heap: its rank, the arrival index of its first waiting
        episode, and the group. Arrival indices are unique, so groups are never compared. Other entries of the heap are
        stale."""
        self._heap: list[tuple[tuple[float, ...], int, Hashable]] = []

    @abstractmethod
    def _rank(self, group: Hashable) -> tuple[float, ...]: ...

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, episode: ScheduledEpisode) -> None:
        self._waiting.setdefault(episode.group, deque()).append(episode)
        self.reprioritize(episode.group)

    def peek(self) -> ScheduledEpisode | None:
        """Return the next episode, or None if the queue is empty."""
        while self._heap:
            entry = self._heap[0]
            group = entry[-1]
            waiting = self._waiting.get(group)
            if waiting and waiting[0].state is EpisodeState.OVER:
                self._remove_first(group)
            elif waiting and self._entries[group] is entry:
                return waiting[0]
            else:
                heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove the episode that `peek` has returned."""
        group = self._heap[0][-1]
        self._num_admitted[group] += 1
        self._remove_first(group)

    def reprioritize(self, group: Hashable) -> None:
        """Update the order after the expected length of `group` has changed."""
        if group in self._waiting:
            entry = (self._rank(group), self._waiting[group][0].arrival_index, group)
            self._entries[group] = entry
            heapq.heappush(self._heap, entry)

    def _remove_first(self, group: Hashable) -> None:
        self._waiting[group].popleft()
        if self._waiting[group]:
            self.reprioritize(group)
        else:
            del self._waiting[group], self._num_admitted[group], self._entries[group]


class FifoQueue(AdmissionQueue):
    """Admits episodes in the order of their arrival."""

    def _rank(self, group: Hashable) -> tuple[float, ...]:
        return ()


class LongestFirstQueue(AdmissionQueue):
    """Admits the group with the longest expected episodes first, so that no long episode starts last.

    Among groups of equal expected length, the one with the fewest admitted episodes comes first, so that the length
    model soon has a length of each group.
    """

    def _rank(self, group: Hashable) -> tuple[float, ...]:
        return -self._lengths.group_mean(group), self._num_admitted[group]
