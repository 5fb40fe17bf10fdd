"""The state machine of one engine of a pool.

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
- An engine generates only after its weights have been checked since the last sync. With a weight store, a failed engine
  gets the last weights again before its bring-up, since it may have restarted. Without a store it waits for the next
  sync.
- Engines that sleep get no turn and no liveness probe. An engine that restarts meanwhile is awake, so it is put to
  sleep again.
- A turn with log-probabilities of NaN, or that failed with a `TurnError`, counts against the engine: it is marked down
  after such turns of several problems in a row. Turns of a single problem do not suffice, since the problem itself may
  be the cause.
- When an engine is marked down, its requests raise `TimeoutError` in the tasks that await them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from trainer.engines.engine import Engine, EngineError, Generation

if TYPE_CHECKING:
    from trainer.engines.pool import EnginePool

logger = logging.getLogger(__name__)

TURN_TIMEOUT_FACTOR = 10.0
"""A turn times out after this multiple of the time that `max_tokens` would take at the engine's recent decode speed,
but never before `turn_timeout_s`."""
SCRAPE_TIMEOUT_S = 20.0
"""Seconds that a metrics scrape may take. A server with a thousand running requests answers slowly
but is not dead."""
MAX_MISSED_SCRAPES = 3
"""An engine is marked down after this number of failed scrapes in a row."""
STALL_TIMEOUT_S = 120.0
"""An engine with running turns is marked down if its token counter has not changed for this number of seconds."""
BRING_UP_TIMEOUT_S = 60.0
"""Seconds that a bring-up or a liveness probe may take."""
MAX_FAILED_PROBLEMS = 3
"""An engine is marked down after bad turns of this number of problems, without a valid turn between them. A turn is bad
if it failed with a `TurnError` or has log-probabilities of NaN."""
UNKNOWN_VERSION = -1
"""The weight version of an engine whose weights are not those of the last sync."""


class EngineState:
    def __init__(self, engine: Engine, pool: EnginePool) -> None:
        self.engine = engine
        self.is_up = False
        self.down_reason = "it has not answered yet"
        """The reason of the last failure. It has no meaning while `is_up` is true."""
        self.is_unresponsive = False
        """True from a failure until a liveness probe or a bring-up succeeds. An unresponsive engine gets no weights,
        because every sync would wait for it. There is one exception: if all engines are unresponsive, all of them get
        the weights."""
        self.requests: dict[object, asyncio.Timeout] = {}
        """The timeouts of the requests in flight, by their owners: the handle of a turn, or another object."""
        self._pool = pool
        self.retry_at = 0.0
        """Time of the next bring-up."""
        self._missed_scrapes = 0
        """Failed scrapes in a row."""
        self._computed_tokens = 0
        """The engine's token counter at the last scrape."""
        self._last_progress_at = 0.0
        """Time of the last scrape that found the counter changed or no request in flight."""
        self._failed_problems: set[Hashable] = set()
        """The problems with a bad turn since the engine's last valid turn."""

    # --- requests ---

    @asynccontextmanager
    async def request(self, owner: object, timeout_s: float) -> AsyncIterator[None]:
        """Register a request to the engine while the block runs. `owner` is the request's key, which must be unique.
        Raises `TimeoutError` after `timeout_s` or when the engine is marked down."""
        try:
            async with asyncio.timeout(timeout_s) as self.requests[owner]:
                yield
        finally:
            del self.requests[owner]
            self._pool.request_ended.set()

    def cancel_requests(self) -> None:
        """Make all requests in flight raise `TimeoutError` in the tasks that await them."""
        for timeout in self.requests.values():
            if not timeout.expired():
                timeout.reschedule(self._pool.now())

    def turn_timeout_s(self, max_tokens: int) -> float:
        """Return the seconds that a turn of up to `max_tokens` may take."""
        rate = self._pool.scheduler.engines[self.engine.name].tokens_per_s
        return max(self._pool.turn_timeout_s, TURN_TIMEOUT_FACTOR * max_tokens / rate if rate else 0.0)

    def accepts(self, generation: Generation, problem: Hashable) -> bool:
        """Return whether to use a turn. A turn with NaN is used too, unless the engine is marked down because of it."""
        if generation.logprobs is None or math.isfinite(sum(generation.logprobs)):
            self._failed_problems.clear()
            return True
        return not self.blame(problem, "log-probabilities of NaN")

    def blame(self, problem: Hashable, reason: str) -> bool:
        """Count a bad turn; return whether this marks the engine down."""
        self._failed_problems.add(problem)
        is_down = len(self._failed_problems) >= MAX_FAILED_PROBLEMS
        if is_down:
            self.mark_failed(f"turns of {MAX_FAILED_PROBLEMS} problems in a row failed; the last: {reason}")
        return is_down

    # --- transitions ---

    def mark_failed(self, reason: str) -> None:
        """Mark the engine down after a failure. Its running turns are placed again."""
        self.mark_down()
        self.schedule_retry(reason)

    def mark_down(self) -> None:
        self.cancel_requests()
        if self.is_up:
            self.is_up = False
            self._pool.remove_engine(self.engine.name)

    def schedule_retry(self, reason: str) -> None:
        delay_s = self._pool.retry_after_s
        logger.warning("engine %s is down, next attempt in %g s: %s", self.engine.name, delay_s, reason)
        self.down_reason, self.is_unresponsive = reason, True
        self.retry_at = self._pool.now() + delay_s

    def invalidate_weights(self) -> None:
        """Mark the engine down, since new weights invalidate its KV cache."""
        self.mark_down()
        self.engine.weight_version = UNKNOWN_VERSION

    async def bring_up_after_sync(self) -> None:
        timeout_s = self._pool.turn_timeout_s  # a long timeout, so that a slow engine is not lost
        try:
            await self._bring_up(timeout_s)
        except (EngineError, TimeoutError) as error:
            self.schedule_retry(str(error) or f"no log-probabilities after the weight sync in {timeout_s:g} s")

    async def put_to_sleep(self, *, unless_sleeping: bool = False) -> None:
        self.mark_down()
        engine: Any = self.engine
        try:
            async with self.request(self, BRING_UP_TIMEOUT_S):
                if not (unless_sleeping and await engine.is_sleeping()):
                    await engine.sleep()
                self.is_unresponsive = False
        except (EngineError, TimeoutError) as error:
            if self._pool.is_sleeping:  # otherwise a weight sync has cancelled the request
                self.mark_failed(f"it does not sleep and may keep its memory: {error!r}")

    async def _bring_up(self, timeout_s: float) -> None:
        """Check the engine's weights, since the engine may have restarted, and mark it up."""
        pool, engine = self._pool, cast(Any, self.engine)
        async with self.request(self, timeout_s):
            if pool.probe is not None and pool.expected is not None:
                await pool.probe.check(engine, pool.expected)
            elif pool.can_sync:
                await engine.check_weights()
            capacity, stats = await engine.capacity(), await engine.stats()
        pool.scheduler.add_engine(
            engine.name,
            capacity.kv_tokens,
            capacity.max_running,
            block_size=capacity.block_size,
            preemptions=0 if stats is None else stats.preemptions,
        )
        self.is_up, self.is_unresponsive, self._missed_scrapes = True, False, 0
        self._last_progress_at = pool.now()
        self._failed_problems.clear()
        pool.scheduler_event.set()

    # --- monitoring ---

    async def monitor(self, interval_s: float) -> None:
        """Scrape the engine while it is up, and try to bring it up while it is down."""
        pool = self._pool
        while True:
            if self.is_up:
                await self._scrape()
            elif pool.scheduler.is_paused:
                pass  # a request would delay the weight sync
            elif self.is_unresponsive and not pool.is_sleeping:
                await self._probe_liveness()
            elif self.retry_at <= pool.now():
                if pool.is_sleeping:
                    await self.put_to_sleep(unless_sleeping=True)
                elif pool.stored is not None or self.engine.weight_version == pool.weight_version:
                    await self._retry()
            pool.notify_if_given_up()
            await asyncio.sleep(interval_s)

    async def _scrape(self) -> None:
        """Pass the engine's stats to the scheduler. `MAX_MISSED_SCRAPES` missed scrapes in a row mark the engine down.
        A single one does not, since a failed turn is better evidence."""
        pool, engine = self._pool, self.engine
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                stats = await engine.stats()
        except (EngineError, TimeoutError) as error:
            self._missed_scrapes += 1
            has_ended = engine.weight_version != pool.weight_version  # the server refused the connection
            if self.is_up and (has_ended or self._missed_scrapes >= MAX_MISSED_SCRAPES):
                self.mark_failed(f"no answer to {self._missed_scrapes} scrapes: {error!r}")
            return
        self._missed_scrapes = 0
        if stats is None or not self.is_up:
            return
        now = pool.now()
        pool.scheduler.update_stats(engine.name, stats, now)
        pool.scheduler_event.set()
        if stats.computed_tokens != self._computed_tokens or not self.requests:
            self._computed_tokens, self._last_progress_at = stats.computed_tokens, now
        elif now - self._last_progress_at > STALL_TIMEOUT_S:
            self.mark_failed(f"no token computed in {STALL_TIMEOUT_S:g} s")

    async def _probe_liveness(self) -> None:
        with suppress(Exception):  # boundary: whatever the probe raises, the engine stays down
            async with self.request(self, BRING_UP_TIMEOUT_S):
                await self.engine.check_alive()
                self.is_unresponsive = False

    async def _retry(self) -> None:
        pool = self._pool
        try:
            if pool.stored is not None:
                # The engine gets the last sync's weights, since the probe may not detect weights that miss a small
                # step.
                async with self.request(self, pool.turn_timeout_s):
                    await pool.load_stored_weights(self.engine)
            await self._bring_up(BRING_UP_TIMEOUT_S)
        except Exception as error:  # boundary: no failure of one engine may end the pool; `all_down_error` reports it
            if not pool.scheduler.is_paused:  # during a weight sync, the sync itself brings the engine up
                self.schedule_retry(str(error) or repr(error))
