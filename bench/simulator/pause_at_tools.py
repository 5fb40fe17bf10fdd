"""ThunderAgent's rule: episodes start at once, and are paused at tool calls while an engine's KV cache is too full.

It follows `ThunderAgent/scheduler/router.py` and `backend/state.py` of github.com/ThunderAgent-org/ThunderAgent at
a7eef77 (arXiv 2602.13692):

- An engine's use is the sum of the contexts of its episodes, those in tool calls included, and a buffer of
  `BUFFER_TOKENS` for each episode. Prompts that several episodes share count several times, as they do there.
- A check has two steps. First it resumes waiting episodes. Then it pauses episodes of each engine whose use exceeds the
  cache: at first episodes in tool calls, then running episodes, which are paused at the end of their turn. Smaller
  episodes are paused before larger ones.
- Waiting episodes resume in this order: episodes with a request, new episodes, episodes in tool calls. In each of these
  groups the smallest comes first. An episode resumes on the engine with the most free tokens, so it may change its
  engine.
- A new episode starts without a check if no episode waits and an engine has room.

There are two differences to the released code:
- The released code pauses all running episodes of an overfull engine, because it does not subtract the episodes that it
  has just marked. Here only the number of episodes is marked that is needed.
- The released code resumes the largest of the chosen episodes first, to pack engines tightly. Here the smallest is
  first, since contexts are small beside a cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from bench.simulator.fifo import FifoScheduler
from trainer.scheduling.scheduler import (
    EpisodeKey,
    EpisodeState,
    Placement,
    ScheduledEngine,
    ScheduledEpisode,
)

BUFFER_TOKENS = 100
"""The value of ThunderAgent's `BUFFER_PER_PROGRAM`, in tokens. If the maximum context is below 3,200 tokens, the buffer
is 1/32 of it."""
CHECK_INTERVAL_S = 1.0
"""ThunderAgent's default is 5 s, with which all makespans were between 1 and 2 % longer."""


class PauseAtTools(FifoScheduler):
    """A scheduler that follows the rule above. A paused episode has no engine. Between two checks, no episode starts
    while another one waits for an engine."""

    def __init__(self, max_context_tokens: int) -> None:
        super().__init__(max_context_tokens)
        self._buffer = min(BUFFER_TOKENS, max_context_tokens // 32)
        self._free: dict[str, float] = {}
        """Free tokens by engine: those at the last check minus the needs of the episodes that have started since."""
        self._next_check_at = 0.0
        self._may_start = True
        self._marked: set[EpisodeKey] = set()
        """Running episodes that will be paused at the end of their turn."""
        self._paused_in_tools: dict[EpisodeKey, ScheduledEpisode] = {}

    def park(self, key: EpisodeKey, length: int, now: float) -> None:
        super().park(key, length, now)
        if key in self._marked:
            self._pause(self._episodes[key])

    def resume(self, key: EpisodeKey, length: int, now: float) -> None:
        super().resume(key, length, now)
        self._paused_in_tools.pop(key, None)

    def complete(self, key: EpisodeKey, now: float, length: int | None = None) -> None:
        super().complete(key, now, length)
        self._marked.discard(key)
        self._paused_in_tools.pop(key, None)

    def place(self, now: float) -> list[Placement]:
        if self.is_paused or not self.up_engines:
            return []
        is_check = now >= self._next_check_at or not self.num_running
        if is_check:
            self._next_check_at, self._may_start = now + CHECK_INTERVAL_S, True
            self._free = {engine.name: self._free_tokens(engine, now) for engine in self.up_engines}
        placements = self._continue_turns(now)
        if self._may_start:
            placements += self._start_waiting(now)
            self._may_start = not (self._displaced or self._queue)
        if is_check:
            for engine in self.up_engines:
                self._pause_until_safe(engine, now)
        return placements

    def _continue_turns(self, now: float) -> list[Placement]:
        """Start the next turns of episodes that have an engine. The others wait."""
        resumed = [*self._resumed]
        self._resumed.clear()
        self._displaced += [episode for episode in resumed if episode.engine is None]
        return [self._start_turn(episode, episode.engine, now) for episode in resumed if episode.engine is not None]

    def _start_waiting(self, now: float) -> list[Placement]:
        placements: list[Placement] = []
        waiting = _smallest_first(self._displaced)
        self._displaced.clear()
        for episode in waiting:
            if (engine := self.pick(episode, now)) is not None:
                placements.append(self._start_turn(episode, engine, now))
            else:
                self._displaced.append(episode)
        placements += self._start_queued(now)
        for episode in _smallest_first(self._paused_in_tools.values()):
            if (engine := self.pick(episode, now)) is not None:
                self._assign(episode, engine, now)
                del self._paused_in_tools[episode.key]
        return placements

    def pick(self, episode: ScheduledEpisode, now: float) -> ScheduledEngine | None:
        """Return the engine with the most free tokens, and subtract from them what the episode needs. Return None if
        the episode does not fit there. An engine without episodes takes any episode."""
        engine = max(self.up_engines, key=lambda engine: self._free.get(engine.name, engine.kv_capacity))
        free, needed = self._free.get(engine.name, engine.kv_capacity), episode.length + self._buffer
        if free < needed and engine.forecast.num_episodes:
            return None
        self._free[engine.name] = free - needed
        return engine

    def _pause_until_safe(self, engine: ScheduledEngine, now: float) -> None:
        marked = [episode for key, episode in engine.episodes.items() if key in self._marked]
        free = self._free[engine.name] + sum(self._tokens(episode, now) + self._buffer for episode in marked)
        others = _smallest_first(episode for key, episode in engine.episodes.items() if key not in self._marked)
        for episode in sorted(others, key=lambda episode: episode.state is not EpisodeState.PARKED):
            if free >= 0:
                break
            free += self._tokens(episode, now) + self._buffer
            if episode.state is EpisodeState.PARKED:
                self._pause(episode)
            else:
                self._marked.add(episode.key)

    def _pause(self, episode: ScheduledEpisode) -> None:
        self._unassign(episode)
        self._marked.discard(episode.key)
        self._paused_in_tools[episode.key] = episode

    def _free_tokens(self, engine: ScheduledEngine, now: float) -> float:
        episodes = engine.episodes.values()
        return engine.kv_capacity - sum(self._tokens(episode, now) + self._buffer for episode in episodes)

    def _tokens(self, episode: ScheduledEpisode, now: float) -> float:
        """Return the length of an episode with an engine. ThunderAgent counts the tokens of a running turn as they are
        streamed; here they follow from the engine's decode speed."""
        if episode.state is not EpisodeState.RUNNING:
            return episode.length
        assert episode.engine is not None
        return episode.length + episode.engine.tokens_per_s * (now - episode.turn_started_at)


def _smallest_first(episodes: Iterable[ScheduledEpisode]) -> list[ScheduledEpisode]:
    alive = (episode for episode in episodes if episode.state is not EpisodeState.OVER)
    return sorted(alive, key=attrgetter("length", "arrival_index"))
