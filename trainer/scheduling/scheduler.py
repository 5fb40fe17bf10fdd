"""Decides which engine runs each turn (arXiv 2508.20722, 3.2). It is a state machine over engines, episodes and KV
caches. It has no clock, no random numbers and no I/O.

The owner of the engines (the pool, a simulator, a test) reports each event with its time and then calls `place`, which
returns the turns that start now.

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
                     3. the admission queue is read from its head, up to the first episode that no engine can take. The
                        group with the longest expected episodes comes first, so that no long episode starts last

Invariants:
- An episode is placed at most once per turn. Only `complete` drops an episode; the loss of its engine does not.
- Every running and parked episode has a reservation in the forecast of its engine's KV cache (`KvForecast`). The
  engine's own metrics lag; the forecast does not. It is all zeros once every episode is complete.
- While an episode waits, no engine is without episodes. So every episode is admitted at some time.
- The same events lead to the same decisions.

Lengths are tokens of a whole context: prompt and response, tool responses included.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter
from typing import NamedTuple

EpisodeKey = Hashable

INITIAL_TARGET_UTILIZATION = 0.95
MIN_TARGET_UTILIZATION = 0.5
TARGET_INCREASE = 0.01
"""Added to the target utilization per scrape without preemptions, while episodes wait. The target is at most 1."""
TARGET_DECREASE_FACTOR = 0.95
"""The target utilization is multiplied by this once per burst of preemptions. The factor is close to 1, because a lower
target leaves a part of the cache empty. An empty part costs more than recomputing the few contexts of a burst."""
KV_USAGE_FULL = 0.9
"""The target utilization does not rise while the engine reports that at least this share of its KV cache is used."""
MIGRATION_RATIO = 0.7
"""An episode migrates between two turns if the other engine, with the episode, has a much smaller reserved share of its
KV cache: below this fraction of the reserved share of the episode's present engine."""
HEADROOM_SIGMAS = 1.5
"""Headroom above the expected peak, in standard deviations of the summed lengths. Relative to the peak, the headroom is
larger for few episodes than for many."""
FORECAST_BUCKETS = 32
"""Number of buckets into which a `KvForecast` divides the decode steps of the longest context."""
MAX_EXTRAPOLATIONS = 8
"""Maximum number of episodes whose length one call of `update_stats` extrapolates (`_extrapolate_overdue`). It bounds
the CPU time of the call when many episodes started together. With 2 instead of 8, too many tokens were reserved and
preemptions doubled."""
RATE_SMOOTHING = 0.05
"""Weight of a new turn's decode speed in its engine's moving average."""
NUM_BUCKETS = 64
"""Number of buckets into which the `LengthModel` divides the lengths up to the longest context."""
NUM_QUANTILES = 4
"""The final length of an episode is unknown. It is represented by this number of equally likely lengths."""
PRIOR_WEIGHT = 4.0
"""The prior counts like this number of episodes. In the prior all lengths are equally likely."""
GROUP_PRIOR_WEIGHT = 2.0
"""A group's mean is computed as if the group had this number of further episodes, each with the mean length of all
episodes (shrinkage)."""
REFRESH_DIVISOR = 50
"""The distribution of lengths is recomputed when this fraction of the episodes counted so far has changed."""
STEP_DECAY = 0.5
"""Factor on the weight of all counted episodes at each training step, since lengths change while the model learns."""


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


class Reservation(NamedTuple):
    """The tokens reserved for one episode."""

    context: int
    """Tokens of the episode's context at `step`."""
    step: float
    """Decode step at which the reservation was made."""
    buckets: list[int]
    """The buckets in which equal shares of the episode end."""
    variance: float
    """Variance of `buckets`."""


class KvForecast:
    """The reservations of one engine: a forecast of how many tokens of its KV cache the episodes will use.

    Time is measured in decode steps, because every running context grows by one token per step. Steps are counted in
    buckets of `bucket_width`. The forecast splits each episode into equal shares, one for each length at which it may
    end. It does not reserve the mean final length of every episode: the episodes do not reach this length at the same
    time, so half of the cache would stay empty.

    Example: `reserve(context=100, step=0, growths=[50, 150])` with a bucket width of 100 steps

        bucket       0 (steps 0-99)     1 (steps 100-199)
        count        0.5                0.5
        offset       0.5 * (100 - 0)    0.5 * (100 - 0)

        tokens at step t = sum of (offset + count * t) over the buckets that end after t
    """

    def __init__(self, bucket_width: float) -> None:
        self.block_slack = 0.0
        """Tokens that each context occupies beyond its length, because the engine allocates whole blocks."""
        self.num_episodes = 0
        self.resident_tokens = 0
        """Sum of all contexts. The tokens of a context are those at the time of its reservation."""
        self._bucket_width = bucket_width
        self._ends: dict[int, list[float]] = {}
        """By bucket: the number of episodes that end in it, and the sum of (context - step) over them."""
        self._total_offset = self._variance = 0.0

    def reserve(self, context: int, step: float, growths: Sequence[float]) -> Reservation:
        """Add an episode with `context` tokens that will grow by one of the equally likely `growths`."""
        buckets, share = [int((step + growth) / self._bucket_width) for growth in growths], 1 / len(growths)
        mean = sum(buckets) * share
        variance = sum([bucket * bucket for bucket in buckets]) * share - mean * mean
        reservation = Reservation(context, step, buckets, variance)
        self._add(reservation, 1)
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Remove an episode."""
        self._add(reservation, -1)

    def peak(self, step: float) -> float:
        """Return the largest expected number of tokens at or after `step`, headroom included.

        Shares of episodes that should have ended before `step` are counted at `step`, but not at later steps.
        """
        # The loop goes from the last bucket to the first one after `step`. It computes the tokens at the middle of each
        # bucket, where the episodes that end in this bucket or later are resident.
        width, current = self._bucket_width, int(step / self._bucket_width)
        count = offset = 0.0
        peak = self._total_offset + self.num_episodes * (step + self.block_slack)  # now all episodes are resident
        for bucket in sorted(self._ends, reverse=True):
            if bucket <= current:
                break
            ended = self._ends[bucket]
            count += ended[0]
            offset += ended[1]
            tokens = offset + count * ((bucket + 0.5) * width + self.block_slack)
            if tokens > peak:
                peak = tokens
        return peak + HEADROOM_SIGMAS * width * math.sqrt(max(0.0, self._variance))

    def peak_with(self, context: int, step: float, growths: Sequence[float]) -> float:
        """Return the peak that there would be with one more episode (see `reserve`)."""
        reservation = self.reserve(context, step, growths)
        peak = self.peak(step)
        self.release(reservation)
        return peak

    def _add(self, reservation: Reservation, sign: int) -> None:
        context, step, buckets, variance = reservation
        share, offset = sign / len(buckets), context - step
        for bucket in buckets:
            ended = self._ends.setdefault(bucket, [0.0, 0.0])
            ended[0] += share
            ended[1] += share * offset
            if not ended[0]:
                del self._ends[bucket]  # its offset may differ from 0 by rounding errors
        self.num_episodes += sign
        self.resident_tokens += sign * context
        self._total_offset += sign * offset
        self._variance += sign * variance
        if not self.num_episodes:  # the sums may differ from 0 by rounding errors
            self._total_offset = self._variance = 0.0


class LengthModel:
    """Learns how long episodes become: from finished and running episodes, and from the other episodes of a group.

    Short episodes finish first. So while most episodes still run, the mean length of the finished ones is too small.
    The model therefore uses the product-limit estimate (Kaplan and Meier, 1958): of the episodes that reached a length,
    the share that ended there, for each length.

    All episodes of a hard problem tend to be long. So the mean of a group says more than the mean of all episodes.
    Running episodes count in the mean of their group with their expected length.
    """

    def __init__(self, max_length: int) -> None:
        self._bucket_width = max(1.0, max_length / NUM_BUCKETS)
        prior = PRIOR_WEIGHT / NUM_BUCKETS
        self._prior = [prior] * NUM_BUCKETS, [prior * (NUM_BUCKETS - 1 - bucket) for bucket in range(NUM_BUCKETS)]
        self._ended, self._passed = map(list, self._prior)
        """For each bucket, the number of episodes that ended in it, and of those that grew beyond it."""
        self._in_bucket = [0] * NUM_BUCKETS
        """Number of unfinished episodes whose length is in each bucket."""
        self._density: list[float] = []
        """Share of all episodes that end in each bucket. `_recompute` sets it together with `_mean_above`."""
        self._mean_above: list[float] = []
        """Mean final length of the episodes that end in each bucket or above. Empty until it is recomputed."""
        self._num_episodes = self._num_changes = 0.0
        """Episodes counted so far, with their weights, and changes since the distribution was last recomputed."""
        self._quantiles: dict[int, list[float]] = {}
        """A cache: quantiles of the growth of an episode, by the bucket of its length."""
        self._groups: dict[Hashable, list[float]] = {}
        """Sum of the expected lengths and number of episodes, by group."""

    def on_start(self, length: int) -> None:
        """Count an episode that starts with `length` tokens."""
        self._num_episodes += 1
        self._in_bucket[self._bucket(length)] += 1

    def on_growth(self, before: int, now: int) -> None:
        """Move an unfinished episode from length `before` to `now`."""
        if (last := self._bucket(now)) > (first := self._bucket(before)):
            self._in_bucket[first] -= 1
            self._in_bucket[last] += 1
            for bucket in range(first, last):
                self._passed[bucket] += 1
            self._invalidate()

    def on_finish(self, before: int, length: int) -> None:
        """Count an episode that ended with `length`. `before` is its last known length, or an extrapolated length. An
        extrapolated length may be larger than `length`."""
        self.on_growth(before, length)
        for bucket in range(self._bucket(length), self._bucket(before)):
            self._passed[bucket] = max(0.0, self._passed[bucket] - 1)  # `decay` may have made less of the 1 meanwhile
        self._ended[self._bucket(length)] += 1
        self.on_removed(max(before, length))

    def on_removed(self, length: int) -> None:
        """Drop an unfinished episode whose last known length is `length`. The buckets that it passed stay counted."""
        self._in_bucket[self._bucket(length)] -= 1
        self._invalidate()

    def decay(self) -> None:
        """Start a training step: reduce the weight of all counted episodes, but not of the prior, and drop all
        groups."""
        for counts, prior in zip((self._ended, self._passed), self._prior, strict=True):
            counts[:] = [base + (count - base) * STEP_DECAY for count, base in zip(counts, prior, strict=True)]
        self._groups.clear()
        self._num_episodes *= STEP_DECAY
        self._num_changes = self._num_episodes  # so that `_invalidate` drops the distribution now
        self._invalidate()

    def mean_length_above(self, length: int) -> float:
        """Return the mean final length of all episodes that become longer than `length`."""
        return max((self._mean_above or self._recompute())[self._bucket(length)], float(length))

    def update_group(self, group: Hashable, before: float | None, now: float) -> None:
        """Change one episode's expected length in `group` from `before` to `now`. `before` is None for a new
        episode."""
        total = self._groups.setdefault(group, [0.0, 0.0])
        total[0] += now - (before or 0.0)
        total[1] += before is None

    def group_mean(self, group: Hashable) -> float:
        """Return the expected length of a new episode in `group`."""
        mean = (self._mean_above or self._recompute())[0]
        total, count = self._groups.get(group, (0.0, 0.0))
        return (total + GROUP_PRIOR_WEIGHT * mean) / (count + GROUP_PRIOR_WEIGHT)

    def growth_quantiles(self, group: Hashable, length: int, max_length: int) -> list[float]:
        """Return how many tokens an episode of `group` with `length` tokens may still grow, at most to `max_length`.

        The `NUM_QUANTILES` numbers are equally likely.
        """
        mean = self.group_mean(group)  # first, because it recomputes `_mean_above` and `_density` if necessary
        scale, max_growth, bucket = mean / self._mean_above[0], float(max_length - length), self._bucket(length)
        if bucket not in self._quantiles:
            self._quantiles[bucket] = self._compute_quantiles(bucket)
        # A conditional expression is faster than `min`, in code that runs for each placement.
        return [scaled if (scaled := g * scale) < max_growth else max_growth for g in self._quantiles[bucket]]

    def _recompute(self) -> list[float]:
        """Compute the product-limit estimate.

        For each bucket, the number of episodes that ended there is divided by the number that could have ended there.
        An unfinished episode inside the bucket counts as half, because on average it has grown through half of the
        bucket without ending.
        """
        alive, self._density = 1.0, []
        for ended, passed, inside in zip(self._ended, self._passed, self._in_bucket, strict=True):
            self._density.append(alive * ended / (ended + passed + inside / 2))
            alive -= self._density[-1]
        self._density[-1] += alive  # the rest ends at the maximum
        share = total = 0.0
        self._mean_above = [0.0] * NUM_BUCKETS
        for bucket in reversed(range(NUM_BUCKETS)):
            middle = (bucket + 0.5) * self._bucket_width
            share += self._density[bucket]
            total += self._density[bucket] * middle
            self._mean_above[bucket] = total / share if share else middle
        return self._mean_above

    def _compute_quantiles(self, first: int) -> list[float]:
        """Return the growth of an episode whose length is in the bucket `first`, in tokens.

        The density of the lengths from `first` on is divided into `NUM_QUANTILES` equally likely parts. The result has
        the median of each part. Growth is measured from the middle of the first bucket, since the episode is there on
        average.
        """
        density, width = self._density[first:], self._bucket_width
        cumulative = [0.0, *itertools.accumulate(density)]
        if not cumulative[-1]:  # no episode is known to end from here on: rather reserve too many tokens than too few
            return [len(density) * width] * NUM_QUANTILES
        quantiles: list[float] = []
        for part in range(NUM_QUANTILES):
            target = (part + 0.5) / NUM_QUANTILES * cumulative[-1]
            bucket = bisect_left(cumulative, target) - 1
            quantiles.append(max(0.0, (bucket + (target - cumulative[bucket]) / density[bucket] - 0.5) * width))
        return quantiles

    def _invalidate(self) -> None:
        self._num_changes += 1
        if self._num_changes * REFRESH_DIVISOR >= self._num_episodes:
            self._num_changes, self._mean_above, self._quantiles = 0.0, [], {}

    def _bucket(self, length: int) -> int:
        return min(int(length / self._bucket_width), NUM_BUCKETS - 1)


class EpisodeState(Enum):
    """The states of the table above."""

    WAITING = auto()
    """The episode is queued, resumed or displaced, and waits for a turn."""
    RUNNING = auto()
    PARKED = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class ScheduledEpisode:
    key: EpisodeKey
    group: Hashable
    arrival_index: int
    length: int
    """Tokens of the context when the last turn or tool call ended."""
    max_context_tokens: int
    engine: ScheduledEngine | None = None
    """The engine that holds the reservation."""
    reservation: Reservation | None = None
    earliest_end: float = 0.0
    """The decode step of the engine at which the episode is expected to end at the earliest."""
    state: EpisodeState = EpisodeState.WAITING
    turn_started_at: float = 0.0
    counted_length: int = 0
    """The length with which the length model counts the episode: the largest length that the episode has had, known or
    extrapolated."""
    expected_length: float | None = None
    """The expected final length, which the length model includes in the group's mean. None before the first turn."""
    last_engine: str = ""
    """Name of the engine that ran the last turn."""


@dataclass(slots=True, eq=False)
class ScheduledEngine:
    name: str
    forecast: KvForecast
    kv_capacity: int = 0
    """Tokens of the KV cache."""
    max_running: int = 0
    """Turns that the engine runs at once."""
    is_up: bool = False
    reserved_tokens: float = 0.0
    """The expected peak of the engine's KV tokens, headroom included, as of the last `refresh_free_tokens`."""
    free_tokens: float = 0.0
    """Tokens that may still be reserved, as of the last `refresh_free_tokens`. The number can be negative after the
    target utilization has fallen."""
    num_running: int = 0
    episodes: dict[EpisodeKey, ScheduledEpisode] = field(default_factory=dict)
    """Running and parked episodes with a reservation here."""
    target_utilization: float = INITIAL_TARGET_UTILIZATION
    """Share of the KV capacity that may be reserved. Preemptions lower it."""
    preemptions: int = 0
    """The engine's counter at the last `update_stats`."""
    in_preemption_burst: bool = False
    """True from a preemption until the reservations fit and a scrape shows no new preemption."""
    decode_steps: float = 0.0
    """Decode steps at the time `decode_steps_at`."""
    decode_steps_at: float = 0.0
    tokens_per_s: float = 0.0
    """Decode speed of one running turn: a moving average. 0 until a turn has ended."""

    def decode_step(self, now: float) -> float:
        """Return the estimated number of decode steps until `now`."""
        return self.decode_steps + self.tokens_per_s * (now - self.decode_steps_at)

    def update_rate(self, tokens: int, duration_s: float, now: float) -> None:
        """Include the speed of a turn that sampled `tokens` in `duration_s`."""
        if tokens > 0 and duration_s > 0:
            self.decode_steps, self.decode_steps_at = self.decode_step(now), now
            smoothing = RATE_SMOOTHING if self.tokens_per_s else 1.0
            self.tokens_per_s += (tokens / duration_s - self.tokens_per_s) * smoothing


_free_tokens = attrgetter("free_tokens")
"""Key function that orders engines by their free tokens."""


class Scheduler:
    """Places turns. `max_context_tokens` bounds every episode's context.

    `lengths` replaces the length model, for simulations that know the lengths.
    """

    def __init__(self, max_context_tokens: int, *, lengths: LengthModel | None = None) -> None:
        self.lengths = lengths or LengthModel(max_context_tokens)
        self.is_paused = False
        """While true, `place` returns nothing. Set during a weight sync, and while engines go to sleep."""
        self.engines: dict[str, ScheduledEngine] = {}
        """All engines that were ever added, by name."""
        self.up_engines: list[ScheduledEngine] = []
        self._bucket_width = max(1.0, max_context_tokens / FORECAST_BUCKETS)
        self._dirty: dict[str, ScheduledEngine] = {}
        """Engines whose free tokens have to be recomputed."""
        self._episodes: dict[EpisodeKey, ScheduledEpisode] = {}
        self._resumed: deque[ScheduledEpisode] = deque()
        self._displaced: deque[ScheduledEpisode] = deque()
        self._queue: dict[Hashable, deque[ScheduledEpisode]] = {}
        """Episodes that have not had a turn, by group."""
        self._num_admitted: Counter[Hashable] = Counter()
        """Episodes that have left the queue, by group of the queue."""
        self._ranks: dict[Hashable, tuple[float, ...]] = {}
        """The position of each group in the queue, as of the last event of the group. The smallest comes first."""
        self._arrivals = itertools.count()

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
        self._refresh_up(engine)

    def remove_engine(self, name: str) -> list[EpisodeKey]:
        """Stop using an engine that has lost all its contexts. Return the episodes whose turns ran there. Their turns
        are placed again."""
        engine = self.engines[name]
        engine.is_up = False
        self._refresh_up(engine)
        displaced = [episode for episode in engine.episodes.values() if episode.state is EpisodeState.RUNNING]
        for episode in list(engine.episodes.values()):
            self._unassign(episode)
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
        self._queue.setdefault(group, deque()).append(episode)
        self._rerank(group)

    def park(self, key: EpisodeKey, length: int, now: float) -> None:
        """End a turn that leads to a tool call. The context has `length` tokens now."""
        episode = self._episode_in(key, EpisodeState.RUNNING, length)
        self._stop_turn(episode, length, now)
        self._set_length(episode, length, now)

    def resume(self, key: EpisodeKey, length: int, now: float) -> None:
        """Request the next turn of a parked episode. The context, tool responses included, has `length` tokens now."""
        episode = self._episode_in(key, EpisodeState.PARKED, length)
        self._set_length(episode, length, now)
        episode.state = EpisodeState.WAITING
        self._resumed.append(episode)

    def complete(self, key: EpisodeKey, now: float, length: int | None = None) -> None:
        """Drop an episode that ended with `length` tokens.

        A length of None means that the episode was cancelled. It then counts in its group's mean with its expected
        final length.
        """
        episode = self._episode_in(key, self._episodes[key].state, length)
        if episode.state is EpisodeState.RUNNING:
            if length is None:
                self._extrapolate_length(episode, now)
            self._stop_turn(episode, length, now)
        self._unassign(episode)
        if episode in self._queue.get(episode.group, ()):
            self._leave_queue(episode)
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
        self._rerank(episode.group)

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
            if not stats.num_waiting and stats.kv_usage < KV_USAGE_FULL and self._queue:
                engine.target_utilization = min(1.0, engine.target_utilization + TARGET_INCREASE)
        self._extrapolate_overdue(engine, now)
        self._dirty[engine.name] = engine
        self.refresh_free_tokens(now)

    # --- decisions ---

    def place(self, now: float) -> list[Placement]:
        """Return all turns that start now, in the order of the table above."""
        if self.is_paused or not self.up_engines:
            return []
        placements: list[Placement] = []
        while self._resumed:
            episode = self._resumed.popleft()
            if episode.state is EpisodeState.OVER or episode.engine is None:
                self._displaced.append(episode)
                continue
            placements.append(self._start_turn(episode, self.pick_next(episode, episode.engine, now), now))
        while self._displaced:
            episode = self._displaced[0]
            if episode.state is not EpisodeState.OVER:
                if (engine := self.pick(episode, now)) is None:
                    return placements
                placements.append(self._start_turn(episode, engine, now))
            self._displaced.popleft()
        return placements + self._start_queued(now)

    def _start_queued(self, now: float) -> list[Placement]:
        placements: list[Placement] = []
        while self._queue:
            head = self._queue[min(self._ranks, key=self._ranks.__getitem__)][0]
            if (engine := self.pick(head, now)) is None:
                break
            self._leave_queue(head)
            placements.append(self._start_turn(head, engine, now))
        return placements

    def rank(self, group: Hashable) -> tuple[float, ...]:
        """Return the position of a group in the queue; the smallest comes first. Among groups of equal expected length,
        the one with the fewest admitted episodes comes first, so that the length model soon has a length of each
        group. Within a group, episodes are admitted in the order of their arrival."""
        return -self.lengths.group_mean(group), self._num_admitted[group], self._queue[group][0].arrival_index

    def pick(self, episode: ScheduledEpisode, now: float) -> ScheduledEngine | None:
        """Return the engine with the most free tokens if all its episodes, with this one, are expected to fit there.
        Otherwise return an engine without episodes, or None if there is none."""
        self.refresh_free_tokens(now)
        has_slot = (engine for engine in self.up_engines if engine.num_running < engine.max_running)
        if (best := max(has_slot, key=_free_tokens, default=None)) is not None:
            peak = best.forecast.peak_with(*self._next_reservation(episode, best, now))
            if peak <= best.kv_capacity * best.target_utilization:
                return best
        idle = (engine for engine in self.up_engines if not engine.forecast.num_episodes)
        return max(idle, key=_free_tokens, default=None)

    def pick_next(self, episode: ScheduledEpisode, home: ScheduledEngine, now: float) -> ScheduledEngine:
        """Return the engine of an episode's next turn: its own (`home`), or another one that is much emptier. The only
        cost of a migration is that the context is recomputed."""
        if len(self.engines) == 1:
            return home
        self.refresh_free_tokens(now)
        target = max(self.up_engines, key=_free_tokens)
        max_share = MIGRATION_RATIO * home.reserved_tokens / home.kv_capacity
        if target.num_running >= target.max_running or target.reserved_tokens / target.kv_capacity >= max_share:
            return home
        reserved_with_episode = target.forecast.peak_with(*self._next_reservation(episode, target, now))
        return target if reserved_with_episode / target.kv_capacity < max_share else home

    @property
    def num_running(self) -> int:
        """Number of turns that are placed and have not ended."""
        return sum(engine.num_running for engine in self.engines.values())

    def refresh_free_tokens(self, now: float) -> None:
        """Recompute the free tokens of the engines that have changed."""
        for engine in self._dirty.values():
            engine.reserved_tokens = engine.forecast.peak(engine.decode_step(now))
            engine.free_tokens = engine.kv_capacity * engine.target_utilization - engine.reserved_tokens
        self._dirty.clear()

    # --- helpers ---

    def _next_reservation(
        self, episode: ScheduledEpisode, engine: ScheduledEngine, now: float
    ) -> tuple[int, float, list[float]]:
        """Return the arguments of `KvForecast.reserve` for an episode."""
        length = max(episode.length, episode.counted_length)
        growths = self.lengths.growth_quantiles(episode.group, length, episode.max_context_tokens)
        return length, engine.decode_step(now), growths

    def _refresh_up(self, engine: ScheduledEngine) -> None:
        self._dirty[engine.name] = engine
        self.up_engines = [engine for engine in self.engines.values() if engine.is_up]

    def _leave_queue(self, episode: ScheduledEpisode) -> None:
        waiting = self._queue[episode.group]
        waiting.remove(episode)
        self._num_admitted[episode.group] += 1
        if not waiting:
            del self._queue[episode.group], self._num_admitted[episode.group], self._ranks[episode.group]
        self._rerank(episode.group)

    def _rerank(self, group: Hashable) -> None:
        if group in self._queue:
            self._ranks[group] = self.rank(group)

    def _start_turn(self, episode: ScheduledEpisode, engine: ScheduledEngine, now: float) -> Placement:
        if episode.engine is not engine:
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
        episode.state = EpisodeState.PARKED
        if (engine := episode.engine) is not None:
            engine.num_running -= 1
            if length is not None:
                engine.update_rate(length - episode.length, now - episode.turn_started_at, now)

    def _assign(self, episode: ScheduledEpisode, engine: ScheduledEngine, now: float) -> None:
        episode.engine = engine
        engine.episodes[episode.key] = episode
        self._reserve(episode, engine, now)

    def _unassign(self, episode: ScheduledEpisode) -> None:
        if (engine := episode.engine) is not None:
            self._release(episode, engine)
            del engine.episodes[episode.key]
            episode.engine = None

    def _reserve(self, episode: ScheduledEpisode, engine: ScheduledEngine, now: float) -> None:
        """Replace the reservation of an episode by one for its present length."""
        self._release(episode, engine)
        length, step, growths = self._next_reservation(episode, engine, now)
        episode.reservation = engine.forecast.reserve(length, step, growths)
        episode.earliest_end = step + max(growths[0], self._bucket_width / 2)

    def _release(self, episode: ScheduledEpisode, engine: ScheduledEngine) -> None:
        if episode.reservation is not None:
            engine.forecast.release(episode.reservation)
        episode.reservation, self._dirty[engine.name] = None, engine

    def _set_length(self, episode: ScheduledEpisode, length: int, now: float) -> None:
        self._record_progress(episode, length)
        episode.length = length
        if episode.engine is not None:
            self._reserve(episode, episode.engine, now)

    def _extrapolate_overdue(self, engine: ScheduledEngine, now: float) -> None:
        """Extrapolate the lengths of overdue episodes from the engine's decode speed.

        An episode is overdue if it still runs after its predicted end. Finished episodes report their length at once,
        running ones only at the end of a turn. Without the extrapolation, the length model is biased to short episodes
        and reserves too few tokens.
        """
        step = engine.decode_step(now)
        overdue = [e for e in engine.episodes.values() if e.earliest_end <= step and e.state is EpisodeState.RUNNING]
        for episode in sorted(overdue, key=attrgetter("earliest_end"))[:MAX_EXTRAPOLATIONS]:
            self._extrapolate_length(episode, now)
            self._reserve(episode, engine, now)

    def _extrapolate_length(self, episode: ScheduledEpisode, now: float) -> None:
        if (engine := episode.engine) is not None and (reservation := episode.reservation) is not None:
            length = reservation.context + int(engine.decode_step(now) - reservation.step)
            self._record_progress(episode, min(episode.max_context_tokens, length))

    def _record_progress(self, episode: ScheduledEpisode, length: int) -> None:
        """Report a new known length to the length model, which also raises the expectation of the episode's group."""
        if length > episode.counted_length:
            self.lengths.on_growth(episode.counted_length, length)
            episode.counted_length = length
            before, episode.expected_length = episode.expected_length, self.lengths.mean_length_above(length)
            self.lengths.update_group(episode.group, before, episode.expected_length)
            self._rerank(episode.group)

    def _episode_in(self, key: EpisodeKey, state: EpisodeState, length: int | None) -> ScheduledEpisode:
        """Return an episode. Raises `ValueError` if it is in another state or cannot have `length` tokens."""
        episode = self._episodes[key]
        if episode.state is not state:
            expected, got = state.name.lower(), episode.state.name.lower()
            raise ValueError(f"episode {key!r}: expected a {expected} episode, got a {got} one")
        if length is not None and not episode.length <= length <= episode.max_context_tokens:
            raise ValueError(
                f"episode {key!r}: expected a context of {episode.length} to {episode.max_context_tokens} tokens, "
                f"got {length}"
            )
        return episode
