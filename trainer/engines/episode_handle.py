"""An episode's access to the engine pool."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

from trainer.engines.engine import EngineError, Generation, SamplingParams, TurnError
from trainer.engines.engine_state import EngineState
from trainer.engines.pool_state import PoolState, TurnRecord
from trainer.scheduling.scheduler import Placement

MAX_FAILURES_PER_TURN = 3
"""If a turn fails this number of times, its episode fails, because the turn itself may be the cause."""
MAX_FAILED_PROBLEMS = 3
"""An engine is marked down after bad turns of this number of problems, without a valid turn between them. A turn is bad
if it failed with a `TurnError` or has log-probabilities of NaN."""


class _Aborted(Exception):
    """The handle was aborted before its turn was placed."""


class EpisodeHandle:
    """An episode's access to the pool. It generates one turn after another. Each turn continues the context of the
    previous turn."""

    def __init__(self, pool: PoolState, key: int, group: Hashable, max_context_tokens: int, request_id: str) -> None:
        self.key = key
        self.length = 0
        """Tokens of the context after the last turn."""
        self.request_id = request_id
        self.placement: Placement | None = None
        """The placement of the requested turn."""
        self.is_aborted = False
        self._pool, self._group, self._max_context_tokens = pool, group, max_context_tokens
        self._is_submitted = False
        self._placement_changed: asyncio.Future[None] | None = None

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue `ids`. If an engine fails, another engine continues them.

        Raises `EngineError` when all engines are down or the turn has failed `MAX_FAILURES_PER_TURN` times. After an
        exception the scheduler drops the episode; the next call submits it as a new one.
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
            wait_s = pool.now() - requested_at
            return Generation((), (), False, "", pool.weight_version, is_aborted=True, wait_s=wait_s)
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
        return replace(generation, wait_s=started_at - requested_at)

    def set_placement(self, placement: Placement) -> None:
        self.placement = placement
        self.notify()

    def notify(self) -> None:
        """Make a waiting `generate` check again its placement, its abort flag and whether the pool has given up."""
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
            timeout_s = pool.request_timeout_s(state, sampling.max_tokens)
            try:
                with pool.busy_timer:
                    async with pool.request(state, self, timeout_s):
                        generation = await state.engine.generate(ids, sampling)
                # If the placement has changed, the engine was marked down meanwhile, and the turn is placed again.
                if self.placement is placement:
                    if failures + 1 == MAX_FAILURES_PER_TURN or self._accepts(generation, state):
                        return generation, placement, started_at
                    failures += 1
            except TurnError as error:
                failures += 1
                if failures == MAX_FAILURES_PER_TURN:
                    raise
                if self.placement is placement:
                    self._blame(state, str(error))
            except (EngineError, TimeoutError) as error:
                if self.placement is placement:  # otherwise the engine is already down, because of another request
                    reason = str(error) or f"engine {placement.engine}: no answer in {timeout_s:.0f} s"
                    pool.mark_failed(state, reason)
                    failures += 1
                    if failures == MAX_FAILURES_PER_TURN:
                        raise EngineError(f"the same turn failed {failures} times, the last: {reason}") from error

    def _accepts(self, generation: Generation, state: EngineState) -> bool:
        """Return whether to use a turn. A turn with NaN is used too, unless the engine is marked down because of it."""
        if generation.logprobs is None or math.isfinite(sum(generation.logprobs)):
            state.failed_problems.clear()
            return True
        return not self._blame(state, "log-probabilities of NaN")

    def _blame(self, state: EngineState, reason: str) -> bool:
        """Count a failed turn of the engine; return whether this marks the engine down."""
        state.failed_problems.add(self._group)
        is_down = len(state.failed_problems) >= MAX_FAILED_PROBLEMS
        if is_down:
            problems = f"turns of {MAX_FAILED_PROBLEMS} problems in a row failed"
            self._pool.mark_failed(state, f"{problems}; the last: {reason}")
        return is_down

    async def _wait_for_placement(self) -> Placement:
        while self.placement is None or self.is_aborted:
            if self.is_aborted:
                raise _Aborted
            if self._pool.has_given_up():
                raise self._pool.all_down_error()
            self._placement_changed = asyncio.get_running_loop().create_future()
            await self._placement_changed
        return self.placement
