"""The measures of one policy's rollout, from its turns and the engines' counters."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.statistics import percentiles
from bench.simulator.profiles import Profile
from bench.simulator.simulation import Simulation, TurnTrace

POINTS = (50, 95, 99)
NUM_BINS = 240
"""Steps in time at which the use of the caches is computed."""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Sums of the engines' counters."""

    preemptions: int
    recomputed: int
    prefix_queries: int
    prefix_hits: int


def measured(
    turns: Sequence[TurnTrace], engines: Sequence[str], kv_capacity: int, counters: EngineCounters
) -> dict[str, Any]:
    """The measures of a policy; all episodes were submitted at time 0."""
    makespan = max(turn.ended_at for turn in turns)
    started: dict[int, float] = {}
    ended: dict[int, float] = {}
    for turn in turns:
        started[turn.episode] = min(turn.started_at, started.get(turn.episode, turn.started_at))
        ended[turn.episode] = max(turn.ended_at, ended.get(turn.episode, turn.ended_at))
    uses = [min(1.0, share) for shares in cache_uses(turns, engines, kv_capacity).values() for share in shares]
    busy_s = sum(_busy_seconds([turn for turn in turns if turn.engine == engine]) for engine in engines)
    hit_rate = counters.prefix_hits / counters.prefix_queries if counters.prefix_queries else 0.0
    return {
        "makespan_s": round(makespan, 3),
        "preemptions": counters.preemptions,
        "recomputed_tokens": counters.recomputed,
        "prefix_hit_rate": round(hit_rate, 4),
        "kv_use": round(statistics.fmean(uses), 4),
        "idle_share": round(1 - busy_s / (makespan * len(engines)), 4),
        "service_s": percentiles((ended[key] - started[key] for key in started), POINTS),
        "latency_s": percentiles(ended.values(), POINTS),
    }


def cache_uses(
    turns: Sequence[TurnTrace], engines: Sequence[str], kv_capacity: int, bins: int = NUM_BINS
) -> dict[str, list[float]]:
    """For each engine, the contexts of its turns as a share of its cache, at `bins` evenly spaced times until the last
    turn has ended. If a share is above 1, the contexts do not fit."""
    width = max(turn.ended_at for turn in turns) / bins
    uses = {engine: [0.0] * bins for engine in engines}
    for turn in turns:
        shares = uses[turn.engine]
        rate = turn.sampled / max(turn.ended_at - turn.started_at, 1e-9)
        for number in range(int(turn.started_at / width + 0.5), min(bins, int(turn.ended_at / width + 0.5))):
            shares[number] += (turn.context + rate * ((number + 0.5) * width - turn.started_at)) / kv_capacity
    return uses


def simulated(profile: Profile, policy: str, seed: int) -> dict[str, Any]:
    """A policy's measures on simulated engines."""
    run = Simulation(profile.workload(seed), profile.engine, profile.num_engines, policy).run()
    counters = EngineCounters(
        *(sum(getattr(engine, name) for engine in run.engines.values()) for name in EngineCounters.__slots__)
    )
    return measured(run.turns, [*run.engines], profile.engine.kv_capacity, counters)


def validation(
    real: Mapping[str, Sequence[Any]], simulated_rows: Mapping[str, Sequence[Any]]
) -> dict[str, dict[str, float]]:
    """The simulator's errors by policy.

    - Makespan: the relative error over all rounds, and that of the worst round.
    - Preemptions: the ratio of both sums. Each round counts one more than it had, since one more or less is chance.
    - Prefix hit rate: the difference.
    """
    errors = {}
    for policy, rows in real.items():
        both = (simulated_rows[policy], rows)
        preemptions = [sum(row["preemptions"] + 1 for row in side) for side in both]
        makespans = [sum(row["makespan_s"] for row in side) for side in both]
        hit_rates = [statistics.fmean(row["prefix_hit_rate"] for row in side) for side in both]
        round_errors = [a["makespan_s"] / b["makespan_s"] - 1 for a, b in zip(*both, strict=True)]
        errors[policy] = {
            "makespan": round(makespans[0] / makespans[1] - 1, 4),
            "worst_round": round(max(round_errors, key=abs), 4),
            "preemptions": round(preemptions[0] / preemptions[1], 3),
            "prefix_hit_rate": round(hit_rates[0] - hit_rates[1], 4),
        }
    return errors


def _busy_seconds(turns: Iterable[TurnTrace]) -> float:
    """Seconds in which at least one turn runs."""
    total = until = 0.0
    for turn in sorted(turns, key=lambda turn: turn.started_at):
        total += max(0.0, turn.ended_at - max(until, turn.started_at))
        until = max(until, turn.ended_at)
    return total
