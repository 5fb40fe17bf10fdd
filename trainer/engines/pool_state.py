"""The state of an engine pool, and the rules by which an engine is marked down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from trainer.engines.busy_timer import BusyTimer
from trainer.engines.engine import Engine, EngineError
from trainer.engines.engine_state import EngineState
from trainer.scheduling.scheduler import Placement, Scheduler

logger = logging.getLogger(__name__)

ALL_DOWN_TIMEOUT_S = 60.0
"""Seconds after which episodes fail because all engines are down."""
TURN_TIMEOUT_FACTOR = 10.0
"""A turn times out after this multiple of the time that `max_tokens` would take at the engine's recent decode speed,
but never before `turn_timeout_s`."""


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


class Handle(Protocol):
    """The part of an episode's handle that the pool uses."""

    placement: Placement | None
    """The placement of the requested turn. None until the turn is placed, and after its engine is marked down."""

    def set_placement(self, placement: Placement) -> None: ...

    def notify(self) -> None: ...


class PoolState:
    """The part of an engine pool that its episode handles use. `EnginePool` is the only subclass and describes the
    arguments."""

    def __init__(
        self,
        engines: Sequence[Engine],
        scheduler: Scheduler,
        *,
        turn_timeout_s: float,
        retry_after_s: float,
        all_down_timeout_s: float,
        on_turn: Callable[[TurnRecord], None] | None,
    ) -> None:
        self.scheduler = scheduler
        self.engine_states = {engine.name: EngineState(engine) for engine in engines}
        self.weight_version = 0
        self.is_sleeping = False
        """True from `EnginePool.sleep` to the next weight sync. All engines are then down."""
        self.on_turn = on_turn
        self.busy_timer = BusyTimer()
        """Runs while an engine generates, a tool call runs or an answer is checked. The rest of a rollout's wall time
        is overhead."""
        self.handles: dict[Hashable, Handle] = {}
        self.scheduler_event = asyncio.Event()
        """Set after each event that was reported to the scheduler."""
        self.request_ended = asyncio.Event()
        """Set when a request or a placed turn has ended."""
        self._turn_timeout_s, self._retry_after_s = turn_timeout_s, retry_after_s
        self._all_down_timeout_s = all_down_timeout_s
        self._all_down_since = 0.0

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def request_timeout_s(self, state: EngineState, max_tokens: int) -> float:
        """Return the seconds that a turn of up to `max_tokens` may take on the engine."""
        rate = self.scheduler.engines[state.engine.name].tokens_per_s
        return max(self._turn_timeout_s, TURN_TIMEOUT_FACTOR * max_tokens / rate if rate else 0.0)

    @asynccontextmanager
    async def request(self, state: EngineState, owner: object, timeout_s: float) -> AsyncIterator[None]:
        """Register a request to an engine while the block runs. `owner` is the request's key, which must be unique at
        the engine. Raises `TimeoutError` after `timeout_s` or when the engine is marked down."""
        try:
            async with asyncio.timeout(timeout_s) as state.requests[owner]:
                yield
        finally:
            del state.requests[owner]
            self.request_ended.set()

    def mark_failed(self, state: EngineState, reason: str) -> None:
        """Mark an engine down after a failure. Its running turns are placed again."""
        self._mark_down(state)
        self._schedule_retry(state, reason)

    def has_given_up(self) -> bool:
        """Return whether all engines have been down for `all_down_timeout_s`."""
        is_down = not (self.scheduler.is_paused or self.is_sleeping or self._is_any_up())
        return is_down and self.now() - self._all_down_since >= self._all_down_timeout_s

    def down_reasons(self) -> dict[str, str]:
        """Return the engines that are down, each with its reason."""
        return {name: state.down_reason for name, state in self.engine_states.items() if not state.is_up}

    def all_down_error(self) -> EngineError:
        """Return an error with the reason of each engine."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.down_reasons().items())
        return EngineError(f"all {len(self.engine_states)} engines are down: {reasons}")

    def _is_any_up(self) -> bool:
        return any(state.is_up for state in self.engine_states.values())

    def _schedule_retry(self, state: EngineState, reason: str) -> None:
        logger.warning("engine %s is down, next attempt in %g s: %s", state.engine.name, self._retry_after_s, reason)
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
