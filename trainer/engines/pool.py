"""The engine pool: reports events to the scheduler, runs the turns that it places, and handles engine failures.
`trainer.engines.engine_state` has the states of an engine.

Invariants:
- A turn is sent to an engine only after the scheduler has placed the turn. Until then the turn waits in the pool,
  without polling.
- The turns of an engine that is marked down do not fail. Each turn runs again from the same ids: on another engine or,
  if all are down, on the first engine that comes back.
- A weight sync waits for running turns; new turns wait for the sync. An engine that hangs delays one sync at most.
- A turn that fails with a `TurnError` runs again. A turn with log-probabilities of NaN is returned as it is.
- However a turn ends, also by cancellation, the scheduler is updated before anything else runs.
- All tasks run in one event loop and end with the pool's `async with` block.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from trainer.engines.busy_timer import BusyTimer
from trainer.engines.engine import (
    Engine,
    EngineError,
    Generation,
    SamplingParams,
    TurnError,
    WeightProbe,
    Weights,
    WeightStore,
    WeightTransfer,
)
from trainer.engines.engine_state import UNKNOWN_VERSION, EngineState
from trainer.scheduling.scheduler import Placement, Scheduler

logger = logging.getLogger(__name__)

ALL_DOWN_TIMEOUT_S = 60.0
"""Seconds after which episodes fail because all engines are down."""
MAX_FAILURES_PER_TURN = 3
"""If a turn fails this number of times, its episode fails, because the turn itself may be the cause."""


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
    """True if the episode's previous turn ran on another engine."""


class EnginePool:
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
        probe: WeightProbe | None = None,
        probes_once: bool = False,
        scrape_interval_s: float = 1.0,
        turn_timeout_s: float = 600.0,
        retry_after_s: float = 30.0,
        all_down_timeout_s: float = ALL_DOWN_TIMEOUT_S,
        on_turn: Callable[[TurnRecord], None] | None = None,
    ) -> None:
        if not engines or len({engine.name for engine in engines}) < len(engines):
            raise ValueError(f"expected engines with different names, got {[engine.name for engine in engines]}")
        self.scheduler, self.probe, self.on_turn = scheduler, probe, on_turn
        self.turn_timeout_s, self.retry_after_s = turn_timeout_s, retry_after_s
        self.engine_states = {engine.name: EngineState(engine, self) for engine in engines}
        self.weight_version = 0
        self.expected: Any = None
        """What the probe expects with the weights of the last sync. None if it is unknown."""
        self.stored: Path | None = None
        """The stored weights of the last sync."""
        self.is_sleeping = False
        """True from `sleep` to the next weight sync. All engines are then down."""
        self.busy_timer = BusyTimer()
        """Runs while an engine generates, a tool call runs or an answer is checked. The rest of a rollout's wall time
        is overhead."""
        self.handles: dict[Hashable, EpisodeHandle] = {}
        self.scheduler_event = asyncio.Event()
        """Set after each event that was reported to the scheduler."""
        self.request_ended = asyncio.Event()
        """Set when a request or a placed turn has ended."""
        self._transfer, self._store = transfer, store
        self.can_sync = transfer is not None
        self._probes_once, self._has_synced = probes_once, False
        self._scrape_interval_s, self._all_down_timeout_s = scrape_interval_s, all_down_timeout_s
        self._all_down_since = 0.0
        self._keys = itertools.count()
        self._tasks = asyncio.TaskGroup()
        self._background_tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._all_down_since = self.now()
        monitors = [state.monitor(self._scrape_interval_s) for state in self.engine_states.values()]
        self._background_tasks = [
            self._tasks.create_task(coroutine) for coroutine in (self._dispatch_placements(), *monitors)
        ]
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

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @asynccontextmanager
    async def open_episode(self, *, group: Hashable, max_context_tokens: int) -> AsyncIterator[EpisodeHandle]:
        """Open a handle for one episode of the problem `group`."""
        key = next(self._keys)
        handle = EpisodeHandle(self, key, group, max_context_tokens)
        try:
            yield handle
        except BaseException:
            handle.close(None)
            raise
        handle.close(handle.length)

    # --- weights ---

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
            probe = None if self._probes_once and self._has_synced else self.probe
            expected = await asyncio.to_thread(probe.expected_logprobs, weights) if probe else None
            version = self.weight_version + 1 if version is None else version
            stored = await self._store.save(weights, version) if self._store else None
            may_wait = self.stored is not None
            self.weight_version, self.expected, self.stored = version, expected, stored
            all_states = list(self.engine_states.values())
            for state in all_states:
                state.invalidate_weights()
            states = [state for state in all_states if not state.is_unresponsive] or all_states
            for state in states:
                state.down_reason = "it does not have the weights of the last sync"
            engines = [state.engine for state in states]
            errors = await self._transfer(engines, weights if stored is None else stored, version)
            loaded = []
            for state, error in zip(states, errors, strict=True):
                if error is None:
                    loaded.append(state)
                else:
                    state.engine.weight_version = UNKNOWN_VERSION  # it may have the weights and lack a KV cache
                    state.schedule_retry(str(error) or repr(error))
            results = await asyncio.gather(*(state.bring_up_after_sync() for state in loaded), return_exceptions=True)
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

    def set_weight_version(self, version: int) -> None:
        """Report that another process has given weights of this version to all engines. An engine that is down because
        it has restarted since the last sync is tried again."""
        if version != self.weight_version:
            self.weight_version, self.expected = version, None
            for state in self.engine_states.values():
                state.engine.weight_version, state.retry_at = version, 0.0
            self.scheduler.start_training_step()

    async def load_stored_weights(self, engine: Engine) -> None:
        """Give an engine the weights of the last sync again."""
        assert self._transfer is not None
        (error,) = await self._transfer([engine], self.stored, self.weight_version)
        if error is not None:
            raise error

    async def sleep(self) -> None:
        """Make the engines free their memory until the next weight sync. They must have vLLM's sleep mode, and the
        `transfer` of the pool has to wake them. Running turns end first; new turns wait for the sync.

        An engine that fails to sleep may keep its memory. It counts as unresponsive until it sleeps.
        """
        async with self._paused():
            self.is_sleeping = True
            await asyncio.gather(*(state.put_to_sleep() for state in self.engine_states.values()))

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

    async def _wait_until_idle(self) -> None:
        """Wait until no request is in flight. Bring-ups are cancelled, because the engines get new weights anyway."""
        for state in self.engine_states.values():
            if not state.is_up:
                state.cancel_requests()
        while any(state.requests for state in self.engine_states.values()) or self.scheduler.num_running:
            self.request_ended.clear()
            await self.request_ended.wait()

    # --- engines that are down ---

    def remove_engine(self, name: str) -> None:
        """Place the turns of an engine again that is no longer up."""
        for key in self.scheduler.remove_engine(name):
            self.handles[key].placement = None
        if not self._is_any_up():
            self._all_down_since = self.now()
        self.scheduler_event.set()
        self.request_ended.set()

    def has_given_up(self) -> bool:
        """Return whether all engines have been down for `all_down_timeout_s`."""
        is_down = not (self.scheduler.is_paused or self.is_sleeping or self._is_any_up())
        return is_down and self.now() - self._all_down_since >= self._all_down_timeout_s

    def notify_if_given_up(self) -> None:
        if self.has_given_up():
            for handle in self.handles.values():
                handle.notify()

    def down_reasons(self) -> dict[str, str]:
        """Return the engines that are down, each with its reason."""
        return {name: state.down_reason for name, state in self.engine_states.items() if not state.is_up}

    def all_down_error(self) -> EngineError:
        """Return an error with the reason of each engine."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.down_reasons().items())
        return EngineError(f"all {len(self.engine_states)} engines are down: {reasons}")

    def _is_any_up(self) -> bool:
        return any(state.is_up for state in self.engine_states.values())

    async def _dispatch_placements(self) -> None:
        """Call the scheduler once for all events of the same moment, and start the turns that it places."""
        while True:
            await self.scheduler_event.wait()
            self.scheduler_event.clear()
            for placement in self.scheduler.place(self.now()):
                handle = self.handles[placement.episode]
                handle.placement = placement
                handle.notify()


class EpisodeHandle:
    """An episode's access to the pool. It generates one turn after another. Each turn continues the context of the
    previous turn."""

    def __init__(self, pool: EnginePool, key: int, group: Hashable, max_context_tokens: int) -> None:
        self.key = key
        self.length = 0
        """Tokens of the context after the last turn."""
        self.placement: Placement | None = None
        """The placement of the requested turn. None until the turn is placed, and after its engine is marked down."""
        self._pool, self._group, self._max_context_tokens = pool, group, max_context_tokens
        self._is_submitted = False
        self._placement_changed: asyncio.Future[None] | None = None

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue `ids`. If an engine fails, another engine continues them.

        Raises `EngineError` when all engines are down or the turn has failed `MAX_FAILURES_PER_TURN` times. After an
        exception the scheduler drops the episode; the next call submits it as a new one.
        """
        pool, requested_at, context_tokens = self._pool, self._pool.now(), len(ids)
        self._request_turn(context_tokens)
        try:
            generation, placement, started_at = await self._generate_with_failover(ids, sampling)
            ended_at, length = pool.now(), context_tokens + len(generation.ids)
            pool.scheduler.park(self.key, length, ended_at)
        except BaseException:
            self.close(None)
            raise
        self.placement, self.length = None, length
        pool.scheduler_event.set()
        if pool.on_turn is not None:
            times, tokens = (requested_at, started_at, ended_at), (context_tokens, len(generation.ids))
            record = TurnRecord(self.key, self._group, placement.engine, *times, *tokens, placement.is_migration)
            pool.on_turn(record)
        return replace(generation, wait_s=started_at - requested_at)

    def notify(self) -> None:
        """Make a waiting `generate` check again its placement and whether the pool has given up."""
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
            placement = await self._wait_for_placement()
            started_at = pool.now()
            state = pool.engine_states[placement.engine]
            timeout_s = state.turn_timeout_s(sampling.max_tokens)
            try:
                with pool.busy_timer:
                    async with state.request(self, timeout_s):
                        generation = await state.engine.generate(ids, sampling)
                # If the placement has changed, the engine was marked down meanwhile, and the turn is placed again.
                if self.placement is placement:
                    if failures + 1 == MAX_FAILURES_PER_TURN or state.accepts(generation, self._group):
                        return generation, placement, started_at
                    failures += 1
            except TurnError as error:
                failures += 1
                if failures == MAX_FAILURES_PER_TURN:
                    raise
                if self.placement is placement:
                    state.blame(self._group, str(error))
            except (EngineError, TimeoutError) as error:
                if self.placement is placement:  # otherwise the engine is already down, because of another request
                    reason = str(error) or f"engine {placement.engine}: no answer in {timeout_s:.0f} s"
                    state.mark_failed(reason)
                    failures += 1
                    if failures == MAX_FAILURES_PER_TURN:
                        raise EngineError(f"the same turn failed {failures} times, the last: {reason}") from error

    async def _wait_for_placement(self) -> Placement:
        while self.placement is None:
            if self._pool.has_given_up():
                raise self._pool.all_down_error()
            self._placement_changed = asyncio.get_running_loop().create_future()
            await self._placement_changed
        return self.placement
