"""Decides which engine runs each turn (arXiv 2508.20722, 3.2). It is a state machine over engines, episodes and KV
caches.

The owner of the engines (the pool, a simulator, a test) reports each event with its time and then calls `place`, which
returns the turns that start now. The scheduler does not wait, poll or send requests.

An *admission* is the start of an episode's first turn on an engine. A *displaced* episode has lost its engine. The
*reserved tokens* of an engine are the expected peak of the KV tokens of its episodes, and its *target utilization* is
the share of its KV cache that may be reserved. A *preemption* is the eviction of a running turn from the KV cache.

    episode state    event                 next state
    -                submit                WAITING   in the admission queue
    WAITING          returned by place     RUNNING   a first turn is an admission; a change of engine is a migration
    RUNNING          park                  PARKED    a tool call runs; the context may stay in the KV cache
    PARKED           resume                WAITING   for the next turn
    RUNNING          remove_engine         WAITING   displaced: the turn runs again on another engine
    any              complete              OVER      the scheduler drops the episode

    order of place   1. resumed episodes start at once: on their own engine, even if its KV cache is full, or on another
                        engine that is much emptier
                     2. displaced episodes start as soon as the KV cache of an engine has free tokens
                     3. the admission queue is read from its head, up to the first episode that no engine can take

Invariants:
- An episode is placed at most once per turn. Only `complete` drops an episode; the loss of its engine does not.
- Every running and parked episode has a reservation in the forecast of its engine's KV cache (`KvForecast`). The
  engine's own metrics lag; the forecast does not. It is all zeros once every episode is complete.
- While an episode waits, the default policy (`kv`) leaves no engine without episodes. So every episode is admitted at
  some time.
- The same events lead to the same decisions.

Lengths are tokens of a whole context: prompt and response, tool responses included.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter

from trainer.scheduling.admission_queue import AdmissionQueue, FifoQueue, LongestFirstQueue
from trainer.scheduling.kv_forecast import KvForecast
from trainer.scheduling.length_model import LengthModel
from trainer.scheduling.state import (
    MAX_TARGET_UTILIZATION,
    MIN_TARGET_UTILIZATION,
    EpisodeKey,
    EpisodeState,
    ScheduledEngine,
    ScheduledEpisode,
)

_free_tokens = attrgetter("free_tokens")
"""Key function that orders engines by their free tokens."""

TARGET_INCREASE = 0.01
"""Added to the target utilization per scrape without preemptions, while episodes wait."""
TARGET_DECREASE_FACTOR = 0.95
"""The target utilization is multiplied by this once per burst of preemptions. The factor is close to 1, because a lower
target leaves a part of the cache empty. An empty part costs more than recomputing the few contexts of a burst."""
KV_USAGE_FULL = 0.9
"""The target utilization does not rise while the engine reports that at least this share of its KV cache is used."""
MIGRATION_RATIO = 0.7
"""An episode migrates between two turns if the other engine, with the episode, has a much smaller reserved share of its
KV cache: below this fraction of the reserved share of the episode's present engine."""
FORECAST_BUCKETS = 32
"""Number of buckets into which a `KvForecast` divides the decode steps of the longest context."""
MAX_EXTRAPOLATIONS = 8
"""Maximum number of episodes whose length one call of `update_stats` extrapolates (`_extrapolate_overdue`). It bounds
the CPU time of the call when many episodes started together. With 2 instead of 8, the policy `kv` reserved too many
tokens and preemptions doubled."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision to run the next turn of `episode` on `engine`."""

    episode: EpisodeKey
    engine: str
    is_migration: bool = False
    """True if the episode's previous turn ran on another engine, so that `engine` has to recompute the context."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters that an engine reports. They lag and leave out parked contexts, so the scheduler uses them only to
    correct the target utilization."""

    preemptions: int
    """Preemptions since the engine's start."""
    num_waiting: int = 0
    """Requests that the engine has accepted and cannot run yet."""
    kv_usage: float = 0.0
    """Used share of the KV cache."""
    computed_tokens: int = 0
    """Tokens computed since the engine's start. If an engine hangs, this number stops to increase."""


def _stay(_scheduler: Scheduler, _episode: ScheduledEpisode, home: ScheduledEngine, _now: float) -> ScheduledEngine:
    return home


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """The rule that places turns."""

    pick: Callable[[Scheduler, ScheduledEpisode, float], ScheduledEngine | None]
    """Chooses an engine for an episode that has none, at the given time. None means that no engine can take it."""
    queue: Callable[[LengthModel], AdmissionQueue] = FifoQueue
    pick_next: Callable[[Scheduler, ScheduledEpisode, ScheduledEngine, float], ScheduledEngine] = _stay
    """Chooses the engine of an episode's next turn, given the engine that holds its context."""


class Scheduler:
    """Places turns by `policy` (default: `kv`). `max_context_tokens` bounds every episode's context.

    `lengths` replaces the length model, for simulations that know the lengths.
    """

    def __init__(
        self, max_context_tokens: int, policy: PlacementPolicy | None = None, *, lengths: LengthModel | None = None
    ) -> None:
        self.policy = policy or POLICIES["kv"]
        self.lengths = lengths or LengthModel(max_context_tokens)
        self.is_paused = False
        """While true, `place` returns nothing. Set during a weight sync, and while engines go to sleep."""
        self.engines: dict[str, ScheduledEngine] = {}
        """All engines that were ever added, by name."""
        self.up_engines: list[ScheduledEngine] = []
        self._bucket_width = max(1.0, max_context_tokens / FORECAST_BUCKETS)
        self._dirty: dict[str, ScheduledEngine] = {}
        """Engines whose free tokens have to be recomputed."""
        self._changed_since_refusal: dict[str, ScheduledEngine] = {}
        self._refused_head: ScheduledEpisode | None = None
        """The head of the queue, if no engine could admit it. While it is the head, only engines in
        `_changed_since_refusal` are tried again, so a waiting queue costs no CPU time."""
        self._episodes: dict[EpisodeKey, ScheduledEpisode] = {}
        self._resumed: deque[ScheduledEpisode] = deque()
        self._displaced: deque[ScheduledEpisode] = deque()
        self._queue = self.policy.queue(self.lengths)
        self._arrivals = itertools.count()
        self._tie_breakers = itertools.count()
        """Numbers that order those entries of `ScheduledEngine.predicted_ends` whose decode steps are equal."""

    # --- events ---

    def start_training_step(self) -> None:
        """Reduce the weight of the lengths learned so far: the problems are new, and the model has changed."""
        self.lengths.decay()
        for episode in self._episodes.values():
            if episode.expected_length is not None:  # it has had a turn, so it continues in the new step
                episode.expected_length = self.lengths.mean_length_above(episode.length)
                self.lengths.update_group(episode.group, None, episode.expected_length)

    def add_engine(
        self, name: str, kv_capacity: int, max_running: int = 1 << 30, *, block_size: int = 1, preemptions: int = 0
    ) -> None:
        """Place turns on an engine from now on. The engine may be new, or have been removed before.

        Its KV cache has `kv_capacity` tokens in blocks of `block_size`, and it runs `max_running` turns at once.
        `preemptions` is the present value of its counter.
        """
        engine = self.engines.setdefault(name, ScheduledEngine(name, KvForecast(self._bucket_width)))
        engine.kv_capacity, engine.max_running, engine.is_up = kv_capacity, max_running, True
        engine.preemptions = preemptions
        engine.forecast.block_slack = block_size / 2  # on average, a context leaves half of its last block empty
        self._dirty[name] = engine
        self._refresh_up()

    def remove_engine(self, name: str) -> list[EpisodeKey]:
        """Stop using an engine that has lost all its contexts. Return the episodes whose turns ran there. Their turns
        are placed again."""
        engine = self.engines[name]
        engine.is_up = False
        self._refresh_up()
        episodes = list(engine.episodes.values())
        for episode in episodes:
            self._unassign(episode)
        displaced = [episode for episode in episodes if episode.state is EpisodeState.RUNNING]
        for episode in displaced:
            engine.num_running -= 1
            episode.state = EpisodeState.WAITING
        self._displaced += displaced
        return [episode.key for episode in displaced]

    def submit(self, key: EpisodeKey, group: Hashable, length: int, max_context_tokens: int) -> None:
        """Queue a new episode with a prompt of `length` tokens.

        Raises `ValueError` if the key is in use or the prompt is empty or too long.
        """
        if key in self._episodes:
            raise ValueError(f"episode {key!r}: expected a new key, got one that is in use")
        if not 0 < length <= max_context_tokens:
            raise ValueError(f"episode {key!r}: expected a prompt of 1 to {max_context_tokens} tokens, got {length}")
        episode = ScheduledEpisode(key, group, next(self._arrivals), length, max_context_tokens)
        self._episodes[key] = episode
        self._queue.push(episode)

    def park(self, key: EpisodeKey, length: int, now: float) -> None:
        """End a turn that leads to a tool call. The context has `length` tokens now."""
        episode = self._running_episode(key)
        self._check_length(episode, length)
        self._stop_turn(episode, length, now)
        self._set_length(episode, length, now)

    def resume(self, key: EpisodeKey, length: int, now: float) -> None:
        """Request the next turn of a parked episode. The context, tool responses included, has `length` tokens now."""
        episode = self._episodes[key]
        if episode.state is not EpisodeState.PARKED:
            raise ValueError(f"episode {key!r}: expected a parked episode, got a {episode.state.name.lower()} one")
        self._check_length(episode, length)
        self._set_length(episode, length, now)
        episode.state = EpisodeState.WAITING
        self._resumed.append(episode)

    def complete(self, key: EpisodeKey, now: float, length: int | None = None) -> None:
        """Drop an episode that ended with `length` tokens.

        A length of None means that the episode was cancelled. It then counts in its group's mean with its expected
        final length.
        """
        episode = self._episodes[key]
        if length is not None:
            self._check_length(episode, length)
        elif episode.state is EpisodeState.RUNNING and episode.engine is not None:
            self._extrapolate_length(episode, episode.engine.decode_step(now))
        if episode.state is EpisodeState.RUNNING:
            self._stop_turn(episode, length, now)
        if episode.engine is not None:
            self._unassign(episode)
        del self._episodes[key]
        episode.state = EpisodeState.OVER
        if episode.expected_length is None:
            return
        if length is None:
            self.lengths.on_removed(episode.counted_length)
            length = int(self.lengths.mean_length_above(episode.counted_length))
        else:
            self.lengths.on_finish(episode.counted_length, length)
        self.lengths.update_group(episode.group, episode.expected_length, length)
        self._queue.reprioritize(episode.group)

    def update_stats(self, name: str, stats: EngineStats, now: float) -> None:
        """Adjust an engine's target utilization to its latest stats. Preemptions lower the target. Without preemptions,
        the target rises while episodes wait."""
        engine = self.engines[name]
        new_preemptions, engine.preemptions = stats.preemptions - engine.preemptions, stats.preemptions
        fits = engine.free_tokens >= 0
        if new_preemptions > 0:
            # A burst lowers the target only once. It lasts while the reservations exceed the lowered target: further
            # preemptions in this time belong to the burst.
            if fits or not engine.in_preemption_burst:
                target = engine.target_utilization * TARGET_DECREASE_FACTOR
                engine.target_utilization = max(MIN_TARGET_UTILIZATION, target)
            engine.in_preemption_burst = True
        elif fits:
            engine.in_preemption_burst = False
            if not stats.num_waiting and stats.kv_usage < KV_USAGE_FULL and len(self._queue):
                target = engine.target_utilization + TARGET_INCREASE
                engine.target_utilization = min(MAX_TARGET_UTILIZATION, target)
        self._extrapolate_overdue(engine, now)
        self._dirty[name] = engine
        self.refresh_free_tokens(now)

    # --- decisions ---

    def place(self, now: float) -> list[Placement]:
        """Return all turns that start now, in the order of the table above."""
        if self.is_paused or not self.up_engines:
            return []
        placements: list[Placement] = []
        while self._resumed:
            episode = self._resumed.popleft()
            if episode.engine is None:
                self._displaced.append(episode)
                continue
            placements.append(self._start_turn(episode, self.policy.pick_next(self, episode, episode.engine, now), now))
        while self._displaced:
            episode = self._displaced[0]
            if episode.state is not EpisodeState.OVER:
                if (engine := self.policy.pick(self, episode, now)) is None:
                    return placements
                placements.append(self._start_turn(episode, engine, now))
            self._displaced.popleft()
        while (head := self._queue.peek()) is not None and (engine := self.policy.pick(self, head, now)) is not None:
            self._queue.pop()
            placements.append(self._start_turn(head, engine, now))
        return placements

    @property
    def num_running(self) -> int:
        """Number of turns that are placed and have not ended."""
        return sum(engine.num_running for engine in self.engines.values())

    def refresh_free_tokens(self, now: float) -> None:
        """Recompute the free tokens of the engines that have changed."""
        for engine in self._dirty.values():
            engine.refresh_reserved(now)
        self._changed_since_refusal.update(self._dirty)
        self._dirty.clear()

    def pick_most_free(self, episode: ScheduledEpisode, now: float) -> ScheduledEngine | None:
        """Return the engine with the most free tokens if the episode fits there. Otherwise return an engine without
        episodes, or None if there is none.

        If an engine already holds the group's prompt, the prompt's tokens count as free, since they are shared.
        """
        self.refresh_free_tokens(now)
        best, most_free, group, prompt_tokens = None, -math.inf, episode.group, episode.length
        engines = self._changed_since_refusal.values() if episode is self._refused_head else self.up_engines
        for engine in engines:
            free = engine.free_tokens + prompt_tokens if group in engine.groups else engine.free_tokens
            if free > most_free and engine.is_up and engine.num_running < engine.max_running:
                best, most_free = engine, free
        if best is not None and self._fits(episode, best, now):
            return best
        idle = [engine for engine in engines if not engine.forecast.num_episodes and engine.is_up]
        if idle:
            return max(idle, key=_free_tokens)
        self._refused_head = episode
        self._changed_since_refusal.clear()
        return None

    def pick_emptier(self, episode: ScheduledEpisode, home: ScheduledEngine, now: float) -> ScheduledEngine:
        """Return the episode's own engine (`home`), or another one that is much emptier. The only cost of a migration
        is that the context is recomputed."""
        if len(self.engines) == 1:
            return home
        self.refresh_free_tokens(now)
        target = max(self.up_engines, key=_free_tokens)
        max_share = MIGRATION_RATIO * home.reserved_tokens / home.kv_capacity
        if target.num_running >= target.max_running or target.reserved_tokens / target.kv_capacity >= max_share:
            return home
        length = max(episode.length, episode.counted_length)
        growths = self.lengths.growth_quantiles(episode.group, length, episode.max_context_tokens)
        reserved_with_episode = target.forecast.peak_with(length, target.decode_step(now), growths)
        return target if reserved_with_episode / target.kv_capacity < max_share else home

    # --- helpers ---

    def _fits(self, episode: ScheduledEpisode, engine: ScheduledEngine, now: float) -> bool:
        """Return whether the expected peak, with the episode, is within the engine's target utilization."""
        forecast, target_tokens = engine.forecast, engine.kv_capacity * engine.target_utilization
        worst_case_tokens = engine.worst_case_tokens + episode.max_context_tokens
        if worst_case_tokens + 2 * forecast.block_slack * (forecast.num_episodes + 1) <= target_tokens:
            return True
        if engine.free_tokens < 0:
            return False
        growths = self.lengths.growth_quantiles(episode.group, episode.length, episode.max_context_tokens)
        return forecast.peak_with(episode.length, engine.decode_step(now), growths) <= target_tokens

    def _refresh_up(self) -> None:
        self.up_engines = [engine for engine in self.engines.values() if engine.is_up]

    def _start_turn(self, episode: ScheduledEpisode, engine: ScheduledEngine, now: float) -> Placement:
        if episode.engine is not engine:
            if episode.engine is not None:
                self._unassign(episode)
            self._assign(episode, engine, now)
        if episode.expected_length is None:
            episode.expected_length = self.lengths.mean_length_above(0)  # a long prompt does not imply a long response
            self.lengths.update_group(episode.group, None, episode.expected_length)
            self.lengths.on_start(episode.length)
            episode.counted_length = episode.length
        episode.state, episode.turn_started_at = EpisodeState.RUNNING, now
        engine.num_running += 1
        is_migration = episode.last_engine not in ("", engine.name)
        episode.last_engine = engine.name
        return Placement(episode.key, engine.name, is_migration)

    def _stop_turn(self, episode: ScheduledEpisode, length: int | None, now: float) -> None:
        engine, episode.state = episode.engine, EpisodeState.PARKED
        assert engine is not None
        engine.num_running -= 1
        if length is not None:
            engine.update_rate(length - episode.length, now - episode.turn_started_at, now)

    def _assign(self, episode: ScheduledEpisode, engine: ScheduledEngine, now: float) -> None:
        episode.engine = engine
        engine.episodes[episode.key] = episode
        engine.worst_case_tokens += episode.max_context_tokens
        engine.groups[episode.group] += 1
        self._update_reservation(episode, engine, engine.decode_step(now))

    def _unassign(self, episode: ScheduledEpisode) -> None:
        engine, reservation = episode.engine, episode.reservation
        assert engine is not None
        assert reservation is not None
        episode.engine = episode.reservation = None
        engine.forecast.release(reservation)
        del engine.episodes[episode.key]
        engine.worst_case_tokens -= episode.max_context_tokens
        engine.groups[episode.group] -= 1
        if not engine.groups[episode.group]:
            del engine.groups[episode.group]
        engine.drop_stale_predictions()  # also here, since `update_stats` is never called for an engine without stats
        self._dirty[engine.name] = engine

    def _update_reservation(self, episode: ScheduledEpisode, engine: ScheduledEngine, step: float) -> None:
        if episode.reservation is not None:
            engine.forecast.release(episode.reservation)
        length = max(episode.length, episode.counted_length)
        growths = self.lengths.growth_quantiles(episode.group, length, episode.max_context_tokens)
        episode.reservation = engine.forecast.reserve(length, step, growths)
        earliest_end = step + max(growths[0], self._bucket_width / 2)
        heapq.heappush(engine.predicted_ends, (earliest_end, next(self._tie_breakers), episode, episode.reservation))
        self._dirty[engine.name] = engine

    def _set_length(self, episode: ScheduledEpisode, length: int, now: float) -> None:
        self._record_progress(episode, length)
        episode.length = length
        engine = episode.engine
        if engine is not None:
            self._update_reservation(episode, engine, engine.decode_step(now))

    def _check_length(self, episode: ScheduledEpisode, length: int) -> None:
        if not episode.length <= length <= episode.max_context_tokens:
            raise ValueError(
                f"episode {episode.key!r}: expected a context of {episode.length} to {episode.max_context_tokens} "
                f"tokens, got {length}"
            )

    def _extrapolate_overdue(self, engine: ScheduledEngine, now: float) -> None:
        """Extrapolate the lengths of overdue episodes from the engine's decode speed.

        An episode is overdue if it still runs after its predicted end. Finished episodes report their length at once,
        running ones only at the end of a turn. Without the extrapolation, the length model is biased to short episodes
        and reserves too few tokens.
        """
        step, predicted_ends = engine.decode_step(now), engine.predicted_ends
        for _ in range(MAX_EXTRAPOLATIONS):
            engine.drop_stale_predictions()
            if not predicted_ends or predicted_ends[0][0] > step:
                break
            episode = heapq.heappop(predicted_ends)[2]
            if episode.state is EpisodeState.RUNNING:
                self._extrapolate_length(episode, step)
                self._update_reservation(episode, engine, step)

    def _extrapolate_length(self, episode: ScheduledEpisode, step: float) -> None:
        reservation = episode.reservation
        assert reservation is not None
        length = reservation.context + int(step - reservation.step)
        self._record_progress(episode, min(episode.max_context_tokens, length))

    def _record_progress(self, episode: ScheduledEpisode, length: int) -> None:
        """Report a new known length to the length model, which also raises the expectation of the episode's group."""
        if length > episode.counted_length:
            self.lengths.on_growth(episode.counted_length, length)
            episode.counted_length = length
            before, episode.expected_length = episode.expected_length, self.lengths.mean_length_above(length)
            self.lengths.update_group(episode.group, before, episode.expected_length)
            self._queue.reprioritize(episode.group)

    def _running_episode(self, key: EpisodeKey) -> ScheduledEpisode:
        episode = self._episodes[key]
        if episode.state is not EpisodeState.RUNNING:
            raise ValueError(f"episode {key!r}: expected a running episode, got a {episode.state.name.lower()} one")
        return episode


def _pick_worst_case(scheduler: Scheduler, episode: ScheduledEpisode, _: float) -> ScheduledEngine | None:
    """Return an engine that has room even if all its episodes grow to their maximum length. This is the paper's rule.
    The authors' code applies it by polling."""
    engine = min(scheduler.up_engines, key=lambda engine: engine.worst_case_tokens - engine.kv_capacity)
    fits = engine.worst_case_tokens + episode.max_context_tokens <= engine.kv_capacity
    return engine if fits or not engine.forecast.num_episodes else None


POLICIES = {
    "reserve_worst_case": PlacementPolicy(_pick_worst_case),
    "kv": PlacementPolicy(Scheduler.pick_most_free, LongestFirstQueue, Scheduler.pick_emptier),
}
