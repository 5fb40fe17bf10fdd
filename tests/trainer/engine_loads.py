"""Reads the load of each engine from a scheduler, for assertions."""

from __future__ import annotations

from bench.simulator.placement import worst_case_tokens
from trainer.scheduling.scheduler import Scheduler


def engine_loads(scheduler: Scheduler) -> dict[str, dict[str, int]]:
    """Return the load of each engine by its name. All numbers are 0 once every episode is complete."""
    return {
        name: {
            "episodes": engine.forecast.num_episodes,
            "running": engine.num_running,
            "resident_tokens": engine.forecast.resident_tokens,
            "worst_case_tokens": worst_case_tokens(engine),
        }
        for name, engine in scheduler.engines.items()
    }
