"""The engine pool: reports events to the scheduler, runs the turns that it places, and handles engine failures.

    engine state     cause                                                     next state
    down             bring-up: weights checked, capacity and stats read         up
    up               failed or timed-out turn, stalled token counter,          down, unresponsive
                     `MAX_MISSED_SCRAPES` failed scrapes
    unresponsive     liveness probe computes log-probabilities                 down, bring-up after `retry_after_s`
    up or down       weight sync                                               down, then bring-up with new weights

Invariants:
- Only placed turns are requests to engines. All others wait in the pool; nothing polls for a placement.
- An engine that is lost does not end its turns: they run again on another engine from the same ids, or wait for one.
- Only engines whose weights are checked after the last sync generate. With a weight store, a failed engine gets the
  last weights again before its bring-up, since it may have restarted; without one it waits for the next sync.
- A weight sync waits for running turns; new turns wait for the sync. An engine that hangs delays one sync at most.
- A turn with a log-probability that is not finite runs again. The engine is lost only after several in a row.
- However a turn ends, also by cancellation, the scheduler is updated before anything else runs.
- All tasks run in one event loop and end with the pool's `async with` block.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Self

from trainer.engines.busy_timer import BusyTimer
from trainer.engines.engine import (
    Engine,
    EngineError,
    Generation,
    NonFiniteLogprobError,
    SamplingParams,
    Weights,
    WeightStore,
    WeightTransfer,
)
from trainer.engines.engine_state import EngineState
from trainer.scheduling.scheduler import Placement, Scheduler

if TYPE_CHECKING:
    from trainer.engines.weight_sync import ExpectedLogprobs, SyncProbe

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 20.0
"""Seconds that one metrics scrape or abort request may take. A server with a thousand running requests answers slowly
but is not dead."""
MAX_MISSED_SCRAPES = 3
"""An engine is marked down after this many failed scrapes in a row."""
STALL_TIMEOUT_S = 120.0
"""An engine with running turns is marked down if its token counter has not changed for this many seconds."""
BRING_UP_TIMEOUT_S = 60.0
"""Seconds that a bring-up or a liveness probe may take."""
ALL_DOWN_TIMEOUT_S = 60.0
"""Seconds after which episodes fail because all engines are down."""
TURN_TIMEOUT_FACTOR = 10.0
"""A turn times out after this multiple of the time that `max_tokens` would take at the engine's recent decode speed,
but never before `turn_timeout_s`."""
MAX_FAILURES_PER_TURN = 3
"""A turn that has failed on this many engines fails its episode, because the turn may be the cause."""
MAX_NON_FINITE_EPISODES = 3
"""An engine is marked down after turns of this many episodes in a row had log-probabilities that are not finite."""
UNKNOWN_VERSION = -1
"""The weight version of an engine whose weights are not those of the last sync."""
LIVENESS_PROBE_IDS = (0, 0)
"""Token ids that every vocabulary has. Scoring them proves that the model runs; `/metrics` can answer while the model
hangs."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A finished turn. Times are the event loop's, in seconds."""

    episode: int
    group: Hashable
    engine: str
    requested_at: float
    started_at: float
    ended_at: float
    context_tokens: int
    """Tokens of the context before the turn."""
    sampled_tokens: int
    is_migration: bool
    """True if the episode's last turn ran on another engine."""


class EnginePool:
    """A context manager that owns and closes its engines, and `scheduler`, which no other pool may use.

    `transfer`, `probe`: needed only for `sync_weights`.
    `store`: keeps weights for engines that come back.
    `turn_timeout_s`: the shortest timeout of a turn, whatever the engine's speed.
    `retry_after_s`: seconds from a failure of an engine to its next bring-up.
    `all_down_timeout_s`: seconds that episodes wait while all engines are down.
    `on_turn`: called after each turn.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        scheduler: Scheduler,
        transfer: WeightTransfer | None = None,
        store: WeightStore | None = None,
        probe: SyncProbe | None = None,
        scrape_interval_s: float = 1.0,
        turn_timeout_s: float = 600.0,
        retry_after_s: float = 30.0,
        all_down_timeout_s: float = ALL_DOWN_TIMEOUT_S,
        on_turn: Callable[[TurnRecord], None] | None = None,
    ) -> None:
        if not engines or len({engine.name for engine in engines}) < len(engines):
            raise ValueError(f"expected engines with different names, got {[engine.name for engine in engines]}")
        self.scheduler = scheduler
        self.engine_states = {engine.name: EngineState(engine) for engine in engines}
        self.weight_version = 0
        self.on_turn = on_turn
        self.busy_timer = BusyTimer()
        """Runs while an engine generates or while a caller marks other work (tool calls, answer checks). The rest of a
        rollout's wall time is overhead."""
        self.nan_turns = 0
        """Number of turns with a log-probability that was not finite."""
        self.handles: dict[Hashable, EpisodeHandle] = {}
        self.name = token_hex(4)
        """Prefix of this pool's request ids, because other clients may use the same servers."""
        self.scheduler_event = asyncio.Event()
        """Set after each event that was reported to the scheduler."""
        self.request_ended = asyncio.Event()
        """Set when a request or a placed turn has ended."""
        self._transfer, self._store, self._probe = transfer, store, probe
        self._scrape_interval_s, self._turn_timeout_s = scrape_interval_s, turn_timeout_s
        self._retry_after_s, self._all_down_timeout_s = retry_after_s, all_down_timeout_s
        self._expected: ExpectedLogprobs | None = None  # of the last sync's weights
        self._stored: Path | None = None  # the last sync's weights
        self._keys = itertools.count()
        self._tasks = asyncio.TaskGroup()
        self._background_tasks: list[asyncio.Task[None]] = []
        self._all_down_since = 0.0

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._all_down_since = self.now()
        coroutines = [self._dispatch_placements(), *map(self._monitor, self.engine_states.values())]
        self._background_tasks = [self._tasks.create_task(coroutine) for coroutine in coroutines]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._background_tasks:
            task.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await asyncio.gather(*(state.engine.close() for state in self.engine_states.values()))
            if self._store is not None:
                await self._store.delete_others(None)

    @asynccontextmanager
    async def open_episode(self, *, group: Hashable, max_context_tokens: int) -> AsyncIterator[EpisodeHandle]:
        """Open a handle for one episode of the problem `group`."""
        handle = EpisodeHandle(self, next(self._keys), group, max_context_tokens)
        try:
            yield handle
        except BaseException:
            handle.close(None)
            raise
        handle.close(None if handle.is_aborted else handle.length)

    async def abort(self, handles: Iterable[EpisodeHandle]) -> None:
        """Make `generate` of these handles return at once, now and from now on, with the ids sampled so far."""
        handles = set(handles)
        for handle in handles:
            handle.is_aborted = True
            handle.notify()
        request_ids = {
            state: [handle.request_id for handle in handles if handle in state.requests]
            for state in self.engine_states.values()
        }
        await asyncio.gather(*(self._abort_requests(state, ids) for state, ids in request_ids.items() if ids))

    async def _abort_requests(self, state: EngineState, request_ids: Sequence[str]) -> None:
        try:
            async with self.request(state, object(), SCRAPE_TIMEOUT_S):
                await state.engine.abort(request_ids)
        except (EngineError, TimeoutError) as error:  # the turns end later, by themselves
            logger.warning("engine %s could not abort %d requests: %r", state.engine.name, len(request_ids), error)

    async def sync_weights(self, weights: Weights, version: int | None = None) -> int:
        """Give all responsive engines `weights` and check them. Return the version (default: the last plus 1).

        If no engine loads them and they are stored, wait for the first engine that comes back, except at the first
        sync.

        Raises `WeightSyncError` when an engine's log-probabilities differ from the trainer's, and `EngineError` when no
        engine has loaded the weights.
        """
        if self._transfer is None or self._probe is None:
            raise ValueError("expected a pool with `transfer` and `probe`, got one without; see engines.weight_sync")
        if self.scheduler.is_paused:
            raise RuntimeError("expected one weight sync at a time; await the first")
        self.scheduler.is_paused = True
        try:
            await self._wait_until_idle()
            expected = await asyncio.to_thread(self._probe.expected_logprobs, weights)
            version = self.weight_version + 1 if version is None else version
            stored = await self._store.save(weights, version) if self._store else None
            may_wait = self._stored is not None
            self.weight_version, self._expected, self._stored = version, expected, stored
            states = self._invalidate_weights()
            engines = [state.engine for state in states]
            errors = await self._transfer(engines, weights if stored is None else stored, version)
            for state, error in zip(states, errors, strict=True):
                if error is not None:
                    self._schedule_retry(state, str(error) or repr(error))
            loaded = [state for state, error in zip(states, errors, strict=True) if error is None]
            results = await asyncio.gather(*map(self._bring_up_after_sync, loaded), return_exceptions=True)
            for exception in filter(None, results):
                raise exception
        finally:
            self.scheduler.is_paused = False
            self.scheduler_event.set()
        self.scheduler.start_training_step()
        self._all_down_since = self.now()
        while not self._is_any_up():
            if not may_wait or self.has_given_up():
                raise self.all_down_error()
            await asyncio.sleep(self._scrape_interval_s)
        if self._store is not None:
            await self._store.delete_others(stored)
        return version

    # --- for episode handles ---

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def request_timeout_s(self, state: EngineState, max_tokens: int) -> float:
        """Return the seconds that a turn of up to `max_tokens` may take on the engine."""
        rate = self.scheduler.engines[state.engine.name].tokens_per_s
        return max(self._turn_timeout_s, TURN_TIMEOUT_FACTOR * max_tokens / rate if rate else 0.0)

    @asynccontextmanager
    async def request(self, state: EngineState, owner: object, timeout_s: float) -> AsyncIterator[None]:
        """Register a request to an engine. Raises `TimeoutError` after `timeout_s` or when the engine is marked
        down."""
        try:
            async with asyncio.timeout(timeout_s) as state.requests[owner]:
                yield
        finally:
            del state.requests[owner]
            self.request_ended.set()

    def mark_failed(self, state: EngineState, reason: str) -> None:
        """Mark an engine down that has lost its contexts. Its turns are placed again."""
        logger.warning("engine %s is down, next attempt in %g s: %s", state.engine.name, self._retry_after_s, reason)
        self._mark_down(state)
        self._schedule_retry(state, reason)

    def has_given_up(self) -> bool:
        """Return whether all engines have been down for `all_down_timeout_s`."""
        is_down = not (self.scheduler.is_paused or self._is_any_up())
        return is_down and self.now() - self._all_down_since >= self._all_down_timeout_s

    def all_down_error(self) -> EngineError:
        reasons = "; ".join(f"{name}: {state.down_reason}" for name, state in self.engine_states.items())
        return EngineError(f"all {len(self.engine_states)} engines are down: {reasons}")

    # --- engine failures and bring-up ---

    def _is_any_up(self) -> bool:
        return any(state.is_up for state in self.engine_states.values())

    def _schedule_retry(self, state: EngineState, reason: str) -> None:
        state.down_reason, state.is_unresponsive = reason, True
        state.retry_at = self.now() + self._retry_after_s

    def _mark_down(self, state: EngineState) -> None:
        now = self.now()
        state.cancel_requests(now)
        if not state.is_up:
            return
        state.is_up = False
        for key in self.scheduler.remove_engine(state.engine.name):
            self.handles[key].placement = None
        if not self._is_any_up():
            self._all_down_since = now
        self.scheduler_event.set()
        self.request_ended.set()

    def _invalidate_weights(self) -> list[EngineState]:
        """Mark all engines down, since new weights invalidate their KV caches. Return the engines that will receive the
        new weights: the responsive ones, or all if none is."""
        all_states = list(self.engine_states.values())
        for state in all_states:
            self._mark_down(state)
            state.engine.weight_version = UNKNOWN_VERSION
        states = [state for state in all_states if not state.is_unresponsive] or all_states
        for state in states:
            state.down_reason = "it does not have the weights of the last sync"
        return states

    async def _bring_up_after_sync(self, state: EngineState) -> None:
        try:
            await self._bring_up(state, self._turn_timeout_s)  # a long timeout: the sync needs all engines
        except (EngineError, TimeoutError) as error:
            reason = str(error) or f"no log-probabilities after the weight sync in {self._turn_timeout_s:g} s"
            self._schedule_retry(state, reason)

    async def _bring_up(self, state: EngineState, timeout_s: float) -> None:
        """Check the engine's weights, since it may have restarted, and mark it up."""
        engine = state.engine
        async with self.request(state, state, timeout_s):
            if self._probe is not None and self._expected is not None:
                await self._probe.check(engine, self._expected)
            capacity, stats = await engine.capacity(), await engine.stats()
        self.scheduler.add_engine(
            engine.name,
            capacity.kv_tokens,
            capacity.max_running,
            block_size=capacity.block_size,
            preemptions=0 if stats is None else stats.preemptions,
        )
        state.is_up, state.is_unresponsive, state.missed_scrapes = True, False, 0
        state.last_progress_at = self.now()
        state.non_finite_episodes.clear()
        self.scheduler_event.set()

    async def _retry(self, state: EngineState) -> None:
        try:
            if self._stored is not None:
                await self._load_stored_weights(state)
            await self._bring_up(state, BRING_UP_TIMEOUT_S)
        except Exception as error:  # boundary: no failure of one engine may end the pool; `all_down_error` reports it
            if not self.scheduler.is_paused:  # otherwise a weight sync has cancelled the attempt
                self._schedule_retry(state, str(error) or repr(error))

    async def _load_stored_weights(self, state: EngineState) -> None:
        """Give the engine the last sync's weights. The probe alone would not detect that one small step is missing."""
        assert self._transfer is not None
        async with self.request(state, state, self._turn_timeout_s):
            (error,) = await self._transfer([state.engine], self._stored, self.weight_version)
        if error is not None:
            raise error

    async def _probe_liveness(self, state: EngineState) -> None:
        with suppress(Exception):  # boundary: the engine stays down whatever it raises
            async with self.request(state, state, BRING_UP_TIMEOUT_S):
                await state.engine.logprobs(LIVENESS_PROBE_IDS)
                state.is_unresponsive = False

    async def _monitor(self, state: EngineState) -> None:
        while True:
            if state.is_up:
                await self._scrape(state)
            elif self.scheduler.is_paused:
                pass  # a request would delay the weight sync
            elif state.is_unresponsive:
                await self._probe_liveness(state)
            elif state.retry_at <= self.now() and (
                self._stored is not None or state.engine.weight_version == self.weight_version
            ):
                await self._retry(state)
            if self.has_given_up():
                for handle in self.handles.values():
                    handle.notify()
            await asyncio.sleep(self._scrape_interval_s)

    async def _scrape(self, state: EngineState) -> None:
        """Pass the engine's stats to the scheduler. The engine is marked down after `MAX_MISSED_SCRAPES` failures in a
        row, not at once: a failing request is better evidence than a missed scrape."""
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                stats = await state.engine.stats()
        except (EngineError, TimeoutError) as error:
            state.missed_scrapes += 1
            if state.is_up and state.missed_scrapes >= MAX_MISSED_SCRAPES:
                self.mark_failed(state, f"no answer to {MAX_MISSED_SCRAPES} scrapes: {error!r}")
            return
        state.missed_scrapes = 0
        if stats is None or not state.is_up:
            return
        now = self.now()
        self.scheduler.observe(state.engine.name, stats, now)
        self.scheduler_event.set()
        if stats.computed_tokens != state.computed_tokens or not state.requests:
            state.computed_tokens, state.last_progress_at = stats.computed_tokens, now
        elif now - state.last_progress_at > STALL_TIMEOUT_S:
            self.mark_failed(state, f"no token computed in {STALL_TIMEOUT_S:g} s")

    # --- placements ---

    async def _dispatch_placements(self) -> None:
        """Call the scheduler once for all events of the same moment, and start the turns that it places."""
        while True:
            await self.scheduler_event.wait()
            self.scheduler_event.clear()
            for placement in self.scheduler.place(self.now()):
                self.handles[placement.episode].set_placement(placement)

    async def _wait_until_idle(self) -> None:
        """Wait until no request is in flight. Bring-ups are cancelled, because the engines get new weights anyway."""
        for state in self.engine_states.values():
            if not state.is_up:
                state.cancel_requests(self.now())
        while any(state.requests for state in self.engine_states.values()) or self.scheduler.num_running:
            self.request_ended.clear()
            await self.request_ended.wait()


class _Aborted(Exception):
    """The handle was aborted before its turn was placed."""


class EpisodeHandle:
    """An episode's access to the pool. It generates one turn after the other; each continues the context of the
    last."""

    def __init__(self, pool: EnginePool, key: int, group: Hashable, max_context_tokens: int) -> None:
        self.key = key
        self.length = 0
        """Tokens of the context after the last turn."""
        self.request_id = f"{pool.name}-{key}"
        self.placement: Placement | None = None
        """The placement of the requested turn."""
        self.is_aborted = False
        self._pool, self._group, self._max_context_tokens = pool, group, max_context_tokens
        self._is_submitted = False
        self._placement_changed: asyncio.Future[None] | None = None

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue `ids`, on another engine if one fails.

        Raises `EngineError` when all engines are down or the turn has failed on `MAX_FAILURES_PER_TURN` of them. After
        an exception the scheduler drops the episode; the next call submits it as a new one.
        """
        pool, requested_at, context_tokens = self._pool, self._pool.now(), len(ids)
        sampling = replace(sampling, request_id=self.request_id)
        self._request_turn(context_tokens)
        try:
            generation, placement, started_at = await self._generate_with_failover(ids, sampling)
            ended_at, length = pool.now(), context_tokens + len(generation.ids)
            pool.scheduler.park(self.key, length, ended_at)
        except _Aborted:
            self.close(None)
            return Generation((), (), False, "", pool.weight_version, is_aborted=True)
        except BaseException:
            self.close(None)
            raise
        self.placement, self.length = None, length
        pool.scheduler_event.set()
        if pool.on_turn is not None:
            record = TurnRecord(
                episode=self.key,
                group=self._group,
                engine=placement.engine,
                requested_at=requested_at,
                started_at=started_at,
                ended_at=ended_at,
                context_tokens=context_tokens,
                sampled_tokens=len(generation.ids),
                is_migration=placement.is_migration,
            )
            pool.on_turn(record)
        return generation

    def set_placement(self, placement: Placement) -> None:
        self.placement = placement
        self.notify()

    def notify(self) -> None:
        """Make a waiting `generate` check its placement, abort flag and the pool's state again."""
        if self._placement_changed is not None and not self._placement_changed.done():
            self._placement_changed.set_result(None)

    def close(self, length: int | None) -> None:
        """Complete the episode with `length` tokens; None means that it was cancelled. Later calls do nothing."""
        if self._is_submitted:
            self._is_submitted, self.placement = False, None
            pool = self._pool
            del pool.handles[self.key]
            pool.scheduler.complete(self.key, pool.now(), length)
            pool.scheduler_event.set()
            pool.request_ended.set()

    def _request_turn(self, length: int) -> None:
        pool = self._pool
        if self._is_submitted:
            pool.scheduler.resume(self.key, length, pool.now())
        else:
            pool.scheduler.submit(self.key, self._group, length, self._max_context_tokens)
            pool.handles[self.key] = self
            self._is_submitted = True
        pool.scheduler_event.set()

    async def _generate_with_failover(
        self, ids: Sequence[int], sampling: SamplingParams
    ) -> tuple[Generation, Placement, float]:
        """Return the turn, its placement and its start time."""
        pool, failures = self._pool, 0
        while True:
            placement, started_at = await self._wait_for_placement(), pool.now()
            state = pool.engine_states[placement.engine]
            timeout_s = pool.request_timeout_s(state, sampling.max_tokens)
            try:
                with pool.busy_timer:
                    async with pool.request(state, self, timeout_s):
                        generation = await state.engine.generate(ids, sampling)
                if self.placement is placement:  # otherwise the engine was marked down as it answered
                    state.non_finite_episodes.clear()
                    return generation, placement, started_at
            except NonFiniteLogprobError as error:
                pool.nan_turns += 1
                failures += 1
                if failures == MAX_FAILURES_PER_TURN:
                    raise
                state.non_finite_episodes.add(self.key)
                if self.placement is placement and len(state.non_finite_episodes) >= MAX_NON_FINITE_EPISODES:
                    pool.mark_failed(state, f"{MAX_NON_FINITE_EPISODES} episodes in a row failed; the last: {error}")
            except (EngineError, TimeoutError) as error:
                if self.placement is placement:  # otherwise the engine is already down, because of another request
                    reason = str(error) or f"engine {placement.engine}: no answer in {timeout_s:.0f} s"
                    pool.mark_failed(state, reason)
                    failures += 1
                    if failures == MAX_FAILURES_PER_TURN:
                        raise EngineError(f"the same turn failed on {failures} engines, the last: {reason}") from error

    async def _wait_for_placement(self) -> Placement:
        while self.placement is None or self.is_aborted:
            if self.is_aborted:
                raise _Aborted
            if self._pool.has_given_up():
                raise self._pool.all_down_error()
            self._placement_changed = asyncio.get_running_loop().create_future()
            await self._placement_changed
        return self.placement
