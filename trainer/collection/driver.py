"""Drives a collection: opens groups, gives episodes to an executor, stores what comes back, retries what failed.

A *try* is one submission of an episode to the executor. A *refill* is a further sample of a problem that replaces a
failed episode.

             open group        submit            Finished, stored
    problem ------------> queued ------> running ----------------> done
                            ^               | TryFailed
                            +--- back-off --+-------> failed, if a budget is used up: another sample replaces it

Invariants:
- A turn or an episode counts only once it is on disk. The events that arrive together share one fsync.
- An episode that is stored is not run again. An episode that was interrupted continues after its last finished turn.
- Failures of the infrastructure and failures of the environment are counted apart, and each episode has a budget for
  each kind. Failures of the environment are remembered over restarts. Failures of the infrastructure are not, because a
  restart may cure them.
- A group that lacks an episode is refilled with further samples of its problem, at most `max_refills`.
- Memory grows with the number of running episodes and open groups only.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from trainer.collection.store import EpisodeStore, Failure, Growth, Key
from trainer.collection.work import CollectionError, EpisodeExecutor, Event, Finished, Progress, Try, TryFailed
from trainer.config import CollectConfig
from trainer.episodes.episode import Episode, FailureKind, Problem, StopReason

logger = logging.getLogger(__name__)

MIN_RETRY_DELAY_S = 0.1
"""Seconds until an episode is tried again after its first failure. Each further failure doubles the delay."""
MAX_RETRY_DELAY_S = 30.0
"""Maximum of this delay in seconds."""
MIN_UNAVAILABLE = 10
"""`max_unavailable_share` applies only beyond this number of unavailable episodes, or of problems whose environment has
failed. A share of few episodes says little."""
STATUS_INTERVAL_S = 1.0
"""Seconds between two writes of status.json."""
TRY_GRACE_S = 60.0
"""Seconds that a try may take in addition to its deadlines, for example to close its environment."""


@dataclass(slots=True)
class CollectionStatus:
    """Numbers of episodes by state, and times. The times are sums over the episodes that this process has finished."""

    total: int | None = None
    """Episodes that the collection is meant to have; None if unknown."""
    running: int = 0
    retrying: int = 0
    """Episodes that wait for their next try."""
    stored_before: int = 0
    """Episodes that an earlier process has stored."""
    done: int = 0
    timed_out: int = 0
    """Episodes among `done` that exceeded their deadline."""
    failed: int = 0
    failed_tries: dict[str, int] = field(default_factory=dict)
    """The number of failed tries, by kind of failure."""
    resumed: int = 0
    """Episodes that continued after a turn that an earlier try had finished."""
    groups: int = 0
    incomplete_groups: int = 0
    refills: int = 0
    sampled_tokens: int = 0
    wait_s: float = 0.0
    generate_s: float = 0.0
    tool_s: float = 0.0
    duration_s: float = 0.0

    @property
    def queued(self) -> int | None:
        if self.total is None:
            return None
        # A failed episode and the refill that replaces it count as one of `total`.
        open_or_done = self.stored_before + self.done + self.failed - self.refills + self.running + self.retrying
        return max(0, self.total - open_or_done)

    def count_episode(self, episode: Episode) -> None:
        self.done += 1
        self.timed_out += episode.stop_reason is StopReason.DEADLINE
        self.sampled_tokens += episode.sampled_tokens
        self.duration_s += episode.duration_s
        for turn in episode.turns:
            self.wait_s += turn.wait_s
            self.generate_s += turn.generate_s
            self.tool_s += turn.tool_s


@dataclass(slots=True)
class _Group:
    problem: Problem
    unused_samples: Iterator[int]
    """Indices of the samples that may still be run."""
    num_open: int = 0
    """Episodes that are neither stored nor failed."""
    num_missing: int = 0
    """Episodes that failed and could not be replaced."""


@dataclass(slots=True)
class _Pending:
    """An episode that is neither stored nor failed."""

    group: _Group
    episode: Episode
    """The episode up to its last reported turn. `_handle` writes this turn to disk before it acts on the events."""
    failures: Counter[FailureKind]
    num_tries: int = 0
    submitted_at: float = math.inf
    """Monotonic time of the last try; infinite while no executor has the episode."""


class Collection:
    """One run of a collection.

    `problems`: used in place of `limits.data`. A problem is read when it is needed.
    `num_problems`: the number of problems, if it is known.
    `seed`, `weight_version`: the fields of new episodes.
    `on_status`: called every `STATUS_INTERVAL_S` and at the end.
    """

    def __init__(
        self,
        store: EpisodeStore,
        executor: EpisodeExecutor,
        problems: Iterable[Problem],
        limits: CollectConfig,
        *,
        num_problems: int | None = None,
        seed: int | None = None,
        weight_version: int | None = None,
        on_status: Callable[[CollectionStatus], None] = lambda _status: None,
    ) -> None:
        self.status = CollectionStatus(None if num_problems is None else num_problems * limits.samples_per_problem)
        self._store, self._executor, self._limits = store, executor, limits
        self._on_status, self._seed, self._weight_version = on_status, seed, weight_version
        self.lost: dict[Key, str] = {}
        """The last failure of each episode that this process has given up."""
        # The turns and the score have one deadline each. A try that takes longer than both hangs, and counts as a
        # failure of the environment.
        self._max_try_s = 2 * limits.deadline_s + TRY_GRACE_S
        self._problems = iter(problems)
        self._has_problems = True
        """Whether `problems` may have more problems."""
        self._pending: dict[Key, _Pending] = {}
        self._ready: deque[Key] = deque()
        """New episodes that no executor has."""
        self._retries: list[tuple[float, Key]] = []
        """A heap of the monotonic times at which episodes are tried again."""
        self._num_unavailable = 0
        """Episodes that have failed because of the infrastructure."""
        self._failing_problems: set[str] = set()
        """Problems with an episode that has failed because of its environment."""
        self._reported_at = -math.inf

    async def run(self) -> CollectionStatus:
        """Collect until every group is complete or has failed. Raises `CollectionError`."""
        self._submit()
        while self._pending or self._has_problems:
            self._report()
            can_retry = bool(self._retries) and self._executor.free_slots > 0
            next_retry_s = self._retries[0][0] - time.monotonic() if can_retry else math.inf
            events: list[Event] = []
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(STATUS_INTERVAL_S, next_retry_s))):
                    events = await self._executor.next_events()
            if current := [*self._current(events), *self._cancel_overdue()]:
                await self._handle(current)
            self._submit()
        self._report(is_last=True)
        return self.status

    def _submit(self) -> None:
        """Submit episodes while the executor has free slots. Episodes that are tried again come first, then new
        ones."""
        while self._executor.free_slots > 0 and (key := self._next_key()) is not None:
            pending = self._pending[key]
            self.status.resumed += bool(pending.episode.turns)
            pending.num_tries += 1
            pending.submitted_at = time.monotonic()
            # The executor changes the episode, so it gets a copy.
            self._executor.submit(Try(key, pending.num_tries), pending.episode.tail(0, 0))

    def _current(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events of tries that still run. Drop events of earlier tries, which come too late."""
        for event in events:
            pending = self._pending.get(event.by.key)
            if pending and event.by.number == pending.num_tries and math.isfinite(pending.submitted_at):
                if not isinstance(event, Progress):
                    pending.submitted_at = math.inf
                yield event

    def _cancel_overdue(self) -> Iterator[Event]:
        """Cancel tries that exceed `_max_try_s`, and yield their failures."""
        submitted_before = time.monotonic() - self._max_try_s
        for key, pending in self._pending.items():
            if pending.submitted_at < submitted_before:
                pending.submitted_at = math.inf
                overdue = Try(key, pending.num_tries)
                self._executor.cancel(overdue)
                yield TryFailed(overdue, FailureKind.ENVIRONMENT, f"did not end within {self._max_try_s:g} s")

    def _next_key(self) -> Key | None:
        if self._retries and self._retries[0][0] <= time.monotonic():
            return heapq.heappop(self._retries)[1]
        while not self._ready and self._has_problems:
            if (problem := next(self._problems, None)) is None:
                self._has_problems = False
            else:
                self._open_group(problem)
        return self._ready.popleft() if self._ready else None

    def _open_group(self, problem: Problem) -> None:
        """Queue the episodes of a problem that are not stored."""
        limits = self._limits
        samples = range(limits.samples_per_problem + limits.max_refills)
        unused = [sample for sample in samples if Key(problem.id, sample) not in self._store]
        num_stored = len(samples) - len(unused)
        group = _Group(problem, (sample for sample in unused if not self._is_given_up(Key(problem.id, sample))))
        self.status.stored_before += num_stored
        for _ in range(limits.samples_per_problem - num_stored):
            self._open_sample(group)
        self._close_group(group)  # for a group whose episodes are all stored or given up

    def _is_given_up(self, key: Key) -> bool:
        return self._store.failures[key, FailureKind.ENVIRONMENT] > self._limits.max_environment_failures

    def _open_sample(self, group: _Group) -> int | None:
        """Queue a further sample of a problem and return its index. Return None if no sample is left."""
        if (sample := next(group.unused_samples, None)) is None:
            group.num_missing += 1
            return None
        key = Key(group.problem.id, sample)
        failures = Counter({FailureKind.ENVIRONMENT: self._store.failures[key, FailureKind.ENVIRONMENT]})
        episode = self._store.take_unfinished(key) or Episode(
            group.problem, sample, seed=self._seed, weight_version=self._weight_version
        )
        self._pending[key] = _Pending(group, episode, failures)
        self._ready.append(key)
        group.num_open += 1
        return sample

    def _close_group(self, group: _Group) -> None:
        """Count the group if none of its episodes is open."""
        if not group.num_open:
            self.status.groups += 1
            self.status.incomplete_groups += bool(group.num_missing)
            if group.num_missing:
                logger.warning("problem %s lacks %d episodes that failed", group.problem.id, group.num_missing)

    async def _handle(self, events: Sequence[Event]) -> None:
        """Make events durable, and then act on them."""
        finished: list[Episode] = []
        growth: list[Growth] = []
        failed: list[TryFailed] = []
        for event in events:
            pending = self._pending[event.by.key]
            match event:
                case Progress(_, gained):
                    is_restart = gained.start_token == 0  # also true for the first turn of an episode
                    pending.episode = gained.tail if is_restart else pending.episode.with_tail(gained.tail)
                    growth.append(gained)
                case Finished(_, reward):
                    pending.episode.reward = reward
                    finished.append(pending.episode)
                case TryFailed():
                    failed.append(event)
        ended = {Key.of(episode) for episode in finished}
        growth = [gained for gained in growth if Key.of(gained.tail) not in ended]
        failures = [Failure(event.by.key, event.kind, event.error) for event in failed]
        await self._write(finished, growth, failures)
        for episode in finished:
            self.status.count_episode(episode)
            self._end(Key.of(episode))
        for event in failed:
            self._try_failed(event)

    async def _write(self, episodes: list[Episode], growth: list[Growth], failures: list[Failure]) -> None:
        """Write in a thread, since an fsync may take long. A cancellation waits for the write to end, so that only one
        write runs at a time."""
        write = asyncio.ensure_future(asyncio.to_thread(self._store.write, episodes, growth, failures))
        try:
            await asyncio.shield(write)
        except asyncio.CancelledError:
            await asyncio.wait([write])
            raise

    def _end(self, key: Key) -> None:
        group = self._pending.pop(key).group
        group.num_open -= 1
        self._close_group(group)

    def _try_failed(self, event: TryFailed) -> None:
        """Try an episode again after a delay, or give it up and open another sample of its problem."""
        key, kind, limits = event.by.key, event.kind, self._limits
        pending = self._pending[key]
        pending.failures[kind] += 1
        self.status.failed_tries[kind] = self.status.failed_tries.get(kind, 0) + 1
        failures = pending.failures[kind]
        is_infrastructure = kind is FailureKind.INFRASTRUCTURE
        if failures <= (limits.max_infrastructure_failures if is_infrastructure else limits.max_environment_failures):
            delay_s = min(MAX_RETRY_DELAY_S, MIN_RETRY_DELAY_S * 2 ** (pending.failures.total() - 1))
            heapq.heappush(self._retries, (time.monotonic() + delay_s, key))
            return
        self.status.failed += 1
        self.lost[key] = event.error
        refill = self._open_sample(pending.group)
        self.status.refills += refill is not None
        logger.warning(
            "problem %s, sample %d failed %d times (%s): %s; %s",
            *(*key, failures, kind, event.error),
            f"sample {refill} replaces it" if refill is not None else "no sample is left to replace it",
        )
        self._end(key)
        if is_infrastructure:
            self._num_unavailable += 1
            failed, total, what = self._num_unavailable, self.status.done + self.status.failed, "episodes"
        else:  # count problems: one that always fails does so in all samples, before most other episodes have ended
            self._failing_problems.add(key.problem)
            open_problems = {pending.problem for pending in self._pending}
            failed, total, what = len(self._failing_problems), self.status.groups + len(open_problems), "problems"
        if failed > max(MIN_UNAVAILABLE, limits.max_unavailable_share * total):
            raise CollectionError(
                f"{failed} of {total} {what} failed because of the {kind}, at most {limits.max_unavailable_share:.0%} "
                f"may (max_unavailable_share); the last failure: {event.error}. Mend it and run the same command "
                "again: it continues"
            )

    def _report(self, *, is_last: bool = False) -> None:
        if is_last or time.monotonic() - self._reported_at >= STATUS_INTERVAL_S:
            self._reported_at = time.monotonic()
            self.status.retrying = len(self._retries)
            self.status.running = len(self._pending) - len(self._ready) - len(self._retries)
            self._on_status(self.status)
