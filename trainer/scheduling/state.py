"""The state of each engine and each episode in the scheduler. Only the scheduler changes it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto

from trainer.scheduling.kv_forecast import KvForecast, Reservation

EpisodeKey = Hashable

INITIAL_TARGET_UTILIZATION = 0.95
MIN_TARGET_UTILIZATION = 0.5
MAX_TARGET_UTILIZATION = 1.0
RATE_SMOOTHING = 0.05
"""Weight of a new turn's decode speed in its engine's moving average."""


class EpisodeState(Enum):
    """The states of the table in `trainer.scheduling.scheduler`."""

    WAITING = auto()
    """The episode is queued, resumed or displaced, and waits for a turn."""
    RUNNING = auto()
    PARKED = auto()
    OVER = auto()


@dataclass(slots=True)
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
    state: EpisodeState = EpisodeState.WAITING
    turn_started_at: float = 0.0
    counted_length: int = 0
    """The length with which the length model counts the episode: the largest length that the episode has had, known or
    extrapolated."""
    expected_length: float | None = None
    """The expected final length, which the length model includes in the group's mean. None before the first turn."""
    last_engine: str = ""
    """Name of the engine that ran the last turn."""


@dataclass(slots=True)
class ScheduledEngine:
    name: str
    forecast: KvForecast
    kv_capacity: int = 0
    """Tokens of the KV cache."""
    max_running: int = 0
    """Turns that the engine runs at once."""
    is_up: bool = False
    reserved_tokens: float = 0.0
    """The expected peak of the engine's KV tokens, headroom included, as of the last `refresh_reserved`."""
    free_tokens: float = 0.0
    """Tokens that may still be reserved, as of the last `refresh_reserved`. The number can be negative after the target
    utilization has fallen."""
    predicted_ends: list[tuple[float, int, ScheduledEpisode, Reservation]] = field(default_factory=list)
    """A heap of (decode step, tie breaker, episode, reservation). The episode is expected to end at this decode step or
    later. The tie breaker is unique, so episodes are never compared. An entry is stale once the episode has another
    reservation or none."""
    worst_case_tokens: int = 0
    """The KV tokens that the engine's episodes will hold if every one of them grows to its maximum length."""
    num_running: int = 0
    episodes: dict[EpisodeKey, ScheduledEpisode] = field(default_factory=dict)
    """Running and parked episodes with a reservation here."""
    groups: Counter[Hashable] = field(default_factory=Counter)
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
        if tokens <= 0 or duration_s <= 0:
            return
        self.decode_steps, self.decode_steps_at = self.decode_step(now), now
        rate = tokens / duration_s
        self.tokens_per_s += (rate - self.tokens_per_s) * (RATE_SMOOTHING if self.tokens_per_s else 1.0)

    def drop_stale_predictions(self) -> None:
        """Pop entries whose reservation was replaced or released, so that the first entry is valid."""
        while self.predicted_ends and self.predicted_ends[0][2].reservation is not self.predicted_ends[0][3]:
            heapq.heappop(self.predicted_ends)

    def refresh_reserved(self, now: float) -> None:
        """Recompute the reserved and the free tokens."""
        self.reserved_tokens = self.forecast.peak(self.decode_step(now))
        self.free_tokens = self.kv_capacity * self.target_utilization - self.reserved_tokens
