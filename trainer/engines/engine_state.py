"""What the pool knows of one engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from trainer.engines.engine import Engine


@dataclass(slots=True, eq=False)
class EngineState:
    engine: Engine
    is_up: bool = False
    down_reason: str = "it has not answered yet"
    """Why the engine is down. Meaningless while `is_up` is true."""
    is_unresponsive: bool = False
    """True from a failure until a liveness probe or a bring-up succeeds. Such an engine gets no weights, because every
    sync would wait for it; if all engines are unresponsive, all get them."""
    retry_at: float = 0.0
    """Time of the next bring-up."""
    requests: dict[object, asyncio.Timeout] = field(default_factory=dict)
    """The timeouts of the requests in flight, by their owner."""
    missed_scrapes: int = 0
    """Failed scrapes in a row."""
    computed_tokens: int = 0
    """The engine's token counter at the last scrape."""
    last_progress_at: float = 0.0
    """Last time at which the counter had changed or no request was in flight."""
    non_finite_episodes: set[int] = field(default_factory=set)
    """Episodes that got a log-probability that is not finite, since the engine's last valid turn."""

    def cancel_requests(self, now: float) -> None:
        """Make all requests in flight raise `TimeoutError` in the tasks that await them."""
        for timeout in self.requests.values():
            if not timeout.expired():
                timeout.reschedule(now)
