"""The engine pool: reports events to the scheduler, runs the turns that it places, and handles engine failures.

An engine is up or down. After a failure it is also unresponsive, until it answers a liveness probe. A *scrape* reads an
engine's counters. A *bring-up* checks an engine and marks it up.

    engine is               event                                                 engine becomes
    down                    bring-up (weights checked, capacity and stats read)   up
    up                      a turn failed or timed out, the token counter         down and unresponsive
                            stalled, or `MAX_MISSED_SCRAPES` scrapes failed
    down and unresponsive   the liveness probe ran the model                      down; bring-up after `retry_after_s`
    up or down              weight sync                                           down; bring-up with the new weights
    up or down              sleep                                                 down until the next weight sync

Invariants:
- A turn is sent to an engine only after the scheduler has placed the turn. Until then the turn waits in the pool,
  without polling.
- The turns of an engine that is marked down do not fail. Each turn runs again from the same ids: on another engine or,
  if all are down, on the first engine that comes back.
- An engine generates only after its weights have been checked since the last sync. With a weight store, a failed engine
  gets the last weights again before its bring-up, since it may have restarted. Without a store it waits for the next
  sync.
- A weight sync waits for running turns; new turns wait for the sync. An engine that hangs delays one sync at most.
- Engines that sleep get no turn and no liveness probe. An engine that restarts meanwhile is awake, so it is put to
  sleep again.
- A turn that fails with a `TurnError` runs again. A turn with log-probabilities of NaN is returned as it is. Both count
  against the engine: it is marked down after such turns of several problems in a row. Turns of a single problem do not
  suffice, since the problem itself may be the cause.
- However a turn ends, also by cancellation, the scheduler is updated before anything else runs.
- All tasks run in one event loop and end with the pool's `async with` block.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Self

from trainer.engines.engine import Engine, EngineError, Weights, WeightStore, WeightTransfer
from trainer.engines.engine_state import EngineState
from trainer.engines.episode_handle import EpisodeHandle
from trainer.engines.pool_state import ALL_DOWN_TIMEOUT_S, PoolState, TurnRecord
from trainer.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from trainer.engines.weight_sync import ExpectedLogprobs, SyncProbe

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 20.0
"""Seconds that a metrics scrape or an abort request may take. A server with a thousand running requests answers slowly
but is not dead."""
MAX_MISSED_SCRAPES = 3
"""An engine is marked down after this number of failed scrapes in a row."""
STALL_TIMEOUT_S = 120.0
"""An engine with running turns is marked down if its token counter has not changed for this number of seconds."""
BRING_UP_TIMEOUT_S = 60.0
"""Seconds that a bring-up or a liveness probe may take."""
UNKNOWN_VERSION = -1
"""The weight version of an engine whose weights are not those of the last sync."""


class EnginePool(PoolState):
    """A context manager that owns its engines and its scheduler, and closes the engines. No other pool may use them.

    `transfer`: gives weights to the engines, and checks them; needed only for `sync_weights`.
    `probe`: checks the engines' log-probabilities; with `probes_once`, only after the first sync.
    `store`: keeps weights for engines that come back.
    `turn_timeout_s`: the minimum timeout of a turn, for engines of any speed.
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
        probes_once: bool = False,
        scrape_interval_s: float = 1.0,
        turn_timeout_s: float = 600.0,
        retry_after_s: float = 30.0,
        all_down_timeout_s: float = ALL_DOWN_TIMEOUT_S,
        on_turn: Callable[[TurnRecord], None] | None = None,
    ) -> None:
        if not engines or len({engine.name for engine in engines}) < len(engines):
            raise ValueError(f"expected engines with different names, got {[engine.name for engine in engines]}")
        super().__init__(
            engines,
            scheduler,
            turn_timeout_s=turn_timeout_s,
            retry_after_s=retry_after_s,
            all_down_timeout_s=all_down_timeout_s,
            on_turn=on_turn,
        )
        self._name = token_hex(4)  # prefix of request ids, because other clients may use the same servers
        self._transfer, self._store, self._probe, self._probes_once = transfer, store, probe, probes_once
        self._scrape_interval_s = scrape_interval_s
        self._expected: ExpectedLogprobs | None = None  # for the weights of the last sync, if the probe checks them
        self._has_synced = False
        self._stored: Path | None = None  # the last sync's weights
        self._keys = itertools.count()
        self._tasks = asyncio.TaskGroup()
        self._background_tasks: list[asyncio.Task[None]] = []

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
        key = next(self._keys)
        handle = EpisodeHandle(self, key, group, max_context_tokens, request_id=f"{self._name}-{key}")
        try:
            yield handle
        except BaseException:
            handle.close(None)
            raise
        handle.close(None if handle.is_aborted else handle.length)

    async def abort(self, handles: Iterable[EpisodeHandle]) -> None:
        """End the running turns of these handles with the ids sampled so far. Later turns end at once, without ids."""
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
            # The key of the request is a new object, since several aborts may be in flight at the same time.
            async with self.request(state, object(), SCRAPE_TIMEOUT_S):
                await state.engine.abort(request_ids)
        except (EngineError, TimeoutError) as error:  # the turns then run to their normal end
            logger.warning("engine %s could not abort %d requests: %r", state.engine.name, len(request_ids), error)

    async def sync_weights(self, weights: Weights, version: int | None = None) -> int:
        """Give all responsive engines `weights` and check them. Return `version` (default: the last version plus 1).

        If no engine loads the weights, a pool with a weight store waits until an engine is up again. The first sync
        does not wait: engines that have never loaded weights are more likely misconfigured than down for a while.

        Raises `WeightSyncError` when an engine's log-probabilities differ from the trainer's, and `EngineError` when no
        engine has loaded the weights.
        """
        if self._transfer is None:
            raise ValueError("expected a pool with `transfer`, got one without; see engines.weight_sync")
        async with self._paused():
            probe = None if self._probes_once and self._has_synced else self._probe
            expected = await asyncio.to_thread(probe.expected_logprobs, weights) if probe else None
            version = self.weight_version + 1 if version is None else version
            stored = await self._store.save(weights, version) if self._store else None
            may_wait = self._stored is not None
            self.weight_version, self._expected, self._stored = version, expected, stored
            states = self._invalidate_weights()
            engines = [state.engine for state in states]
            errors = await self._transfer(engines, weights if stored is None else stored, version)
            for state, error in zip(states, errors, strict=True):
                if error is not None:
                    state.engine.weight_version = UNKNOWN_VERSION  # it may have the weights and lack a KV cache
                    self._schedule_retry(state, str(error) or repr(error))
            loaded = [state for state, error in zip(states, errors, strict=True) if error is None]
            results = await asyncio.gather(*map(self._bring_up_after_sync, loaded), return_exceptions=True)
            for exception in filter(None, results):
                raise exception
            self._has_synced |= self._is_any_up()
        self.scheduler.start_training_step()
        self._all_down_since = self.now()
        while not self._is_any_up():
            if not may_wait or self.has_given_up():
                raise self.all_down_error()
            await asyncio.sleep(self._scrape_interval_s)
        if self._store is not None:
            await self._store.delete_others(stored)
        return version

    async def sleep(self) -> None:
        """Make the engines free their memory until the next weight sync. They must have vLLM's sleep mode, and the
        `transfer` of the pool has to wake them. Running turns end first; new turns wait for the sync.

        An engine that fails to sleep may keep its memory. It counts as unresponsive until it sleeps.
        """
        async with self._paused():
            self.is_sleeping = True
            await asyncio.gather(*map(self._put_to_sleep, self.engine_states.values()))

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Wait until no request is in flight, then run the block. No turn is placed until the block ends. `is_sleeping`
        is false from the beginning of the wait."""
        if self.scheduler.is_paused:
            raise RuntimeError("expected one weight sync at a time; await the first")
        self.scheduler.is_paused, self.is_sleeping = True, False
        try:
            await self._wait_until_idle()
            yield
        finally:
            self.scheduler.is_paused = False
            self.scheduler_event.set()

    # --- bring-up and monitoring ---

    def _invalidate_weights(self) -> list[EngineState]:
        """Mark all engines down, since new weights invalidate their KV caches. Return the engines that get the new
        weights: the responsive engines, or all engines if none is responsive."""
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
            await self._bring_up(state, self._turn_timeout_s)  # a long timeout, so that a slow engine is not lost
        except (EngineError, TimeoutError) as error:
            reason = str(error) or f"no log-probabilities after the weight sync in {self._turn_timeout_s:g} s"
            self._schedule_retry(state, reason)

    async def _bring_up(self, state: EngineState, timeout_s: float) -> None:
        """Check the engine's weights, since the engine may have restarted, and mark it up."""
        engine: Any = state.engine
        async with self.request(state, state, timeout_s):
            if self._probe is not None and self._expected is not None:
                await self._probe.check(engine, self._expected)
            elif self._transfer is not None:
                await engine.check_weights()
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
        state.failed_problems.clear()
        self.scheduler_event.set()

    async def _retry(self, state: EngineState) -> None:
        try:
            if self._stored is not None:
                await self._load_stored_weights(state)
            await self._bring_up(state, BRING_UP_TIMEOUT_S)
        except Exception as error:  # boundary: no failure of one engine may end the pool; `all_down_error` reports it
            if not self.scheduler.is_paused:  # during a weight sync, the sync itself brings the engine up
                self._schedule_retry(state, str(error) or repr(error))

    async def _load_stored_weights(self, state: EngineState) -> None:
        """Give the engine the last sync's weights, since the probe may not detect weights that miss a small step."""
        assert self._transfer is not None
        async with self.request(state, state, self._turn_timeout_s):
            (error,) = await self._transfer([state.engine], self._stored, self.weight_version)
        if error is not None:
            raise error

    async def _probe_liveness(self, state: EngineState) -> None:
        with suppress(Exception):  # boundary: whatever the probe raises, the engine stays down
            async with self.request(state, state, BRING_UP_TIMEOUT_S):
                await state.engine.check_alive()
                state.is_unresponsive = False

    async def _put_to_sleep(self, state: EngineState, *, unless_sleeping: bool = False) -> None:
        self._mark_down(state)
        engine: Any = state.engine
        try:
            async with self.request(state, state, BRING_UP_TIMEOUT_S):
                if not (unless_sleeping and await engine.is_sleeping()):
                    await engine.sleep()
                state.is_unresponsive = False
        except (EngineError, TimeoutError) as error:
            if self.is_sleeping:  # otherwise a weight sync has cancelled the request
                self.mark_failed(state, f"it does not sleep and may keep its memory: {error!r}")

    async def _monitor(self, state: EngineState) -> None:
        while True:
            if state.is_up:
                await self._scrape(state)
            elif self.scheduler.is_paused:
                pass  # a request would delay the weight sync
            elif self.is_sleeping:
                if state.retry_at <= self.now():
                    await self._put_to_sleep(state, unless_sleeping=True)
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
        """Pass the engine's stats to the scheduler. `MAX_MISSED_SCRAPES` missed scrapes in a row mark the engine down.
        A single one does not, since a failed turn is better evidence."""
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                stats = await state.engine.stats()
        except (EngineError, TimeoutError) as error:
            state.missed_scrapes += 1
            has_ended = state.engine.weight_version != self.weight_version  # the server refused the connection
            if state.is_up and (has_ended or state.missed_scrapes >= MAX_MISSED_SCRAPES):
                self.mark_failed(state, f"no answer to {state.missed_scrapes} scrapes: {error!r}")
            return
        state.missed_scrapes = 0
        if stats is None or not state.is_up:
            return
        now = self.now()
        self.scheduler.update_stats(state.engine.name, stats, now)
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
