"""The pool's state of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field

from trainer.engines.engine import Engine


@dataclass(slots=True, eq=False)
class EngineState:
    engine: Engine
    is_up: bool = False
    down_reason: str = "it has not answered yet"
    """The reason of the last failure. It has no meaning while `is_up` is true."""
    is_unresponsive: bool = False
    """True from a failure until a liveness probe or a bring-up succeeds. An unresponsive engine gets no weights,
    because every sync would wait for it. There is one exception: if all engines are unresponsive, all of them get the
    weights."""
    retry_at: float = 0.0
    """Time of the next bring-up."""
    requests: dict[object, asyncio.Timeout] = field(default_factory=dict)
    """The timeouts of the requests in flight, by their owners: the handle of a turn, or an object of the pool."""
    missed_scrapes: int = 0
    """Failed scrapes in a row."""
    computed_tokens: int = 0
    """The engine's token counter at the last scrape."""
    last_progress_at: float = 0.0
    """Time of the last scrape that found the counter changed or no request in flight."""
    failed_problems: set[Hashable] = field(default_factory=set)
    """The problems with a bad turn since the engine's last valid turn. A turn is bad if it failed with a `TurnError` or
    has a log-probability of NaN."""

    def cancel_requests(self, now: float) -> None:
        """Make all requests in flight raise `TimeoutError` in the tasks that await them."""
        for timeout in self.requests.values():
            if not timeout.expired():
                timeout.reschedule(now)
