"""A lower bound on the makespan of a workload under any schedule.

The proof is in docs/scheduler.md. Its letters are used here: a is `per_sequence_s`, b is `per_context_s`, n is a number
of running sequences, and x is a weight from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulator.engine import EngineProfile
from bench.simulator.scripts import EpisodeScript

GRID_POINTS = 200
"""Points of the numerical integration over the fill level of a cache."""


def lower_bound_s(scripts: Sequence[EpisodeScript], profile: EngineProfile, engines: int) -> float:
    """Seconds that every schedule takes, even one that knows all lengths: the largest of three bounds.

    | bound | from | decides for |
    |---|---|---|
    | longest episode | one episode alone on an engine | few episodes |
    | work | the engines' work, and waiting for large batches | stage 1, cpu-tiny |
    | cache fill | decode steps that are wasted while caches fill | stage 2 |
    """
    block_size = profile.block_size
    loads = [load_of(script, block_size) for script in scripts]
    prompts = {script.group: script.prompt - _unshared(script.prompt, script.prompt, block_size) for script in scripts}
    prefill_s = profile.prefill_s * (sum(load.prefill for load in loads) + sum(prompts.values()))
    prefill_s += profile.turn_s * sum(len(load.spans) for load in loads)
    step_s = profile.base_s + max(profile.weights_s, profile.per_sequence_s)
    longest = max(load.alone_s(profile, step_s) + load.read * profile.per_context_s for load in loads)
    bounds = (_work_bound_s, _cache_fill_bound_s)
    # Both bounds hold for any x. Five values are tried.
    return max(longest, *(bound(loads, prefill_s, profile, engines, x / 4) for x in range(5) for bound in bounds))


@dataclass(frozen=True, slots=True)
class EpisodeLoad:
    """The work of an episode under any schedule."""

    sampled: int
    prefill: int
    """Tokens to prefill if another episode of the group has left the prompt in the cache."""
    tool_s: float
    read: float
    """Context tokens, summed over the sampled tokens."""
    held: float
    """The same sum without the prompt, whose tokens the cache holds once for the whole group."""
    spans: tuple[tuple[int, int], ...]
    """Context tokens at the start and the end of each turn."""

    def alone_s(self, profile: EngineProfile, step_s: float) -> float:
        """Seconds of the episode if each of its decode steps takes `step_s`."""
        turns_s = len(self.spans) * profile.turn_s
        return self.sampled * step_s + self.prefill * profile.prefill_s + turns_s + self.tool_s


def load_of(script: EpisodeScript, block_size: int = 1) -> EpisodeLoad:
    """The work of one script on an engine with blocks of `block_size` tokens."""
    spans = []
    known = context = script.prompt
    prefill = 0
    for sampled, observed, _ in script.turns:
        prefill += _unshared(context, known, block_size)
        known = context + sampled
        spans.append((context, known))
        context = known + observed
    tokens = sum(end - start for start, end in spans)
    read = sum(end * end - start * start for start, end in spans) / 2
    tool_s = sum(tool_s for _, _, tool_s in script.turns)
    return EpisodeLoad(tokens, prefill, tool_s, read, read - script.prompt * tokens, tuple(spans))


def _unshared(context: int, known: int, block_size: int) -> int:
    """Tokens of a context to prefill if the engine has computed the first `known` tokens before, in whole blocks."""
    return context - min(known, context - 1) // block_size * block_size


def _work_bound_s(
    loads: Sequence[EpisodeLoad], prefill_s: float, profile: EngineProfile, engines: int, x: float
) -> float:
    """A bound from the engines' work and the time that long episodes wait for large batches."""
    step_s = profile.base_s + (1 - x) * profile.weights_s
    a, b = x * profile.per_sequence_s, profile.per_context_s
    tokens = sum(load.sampled for load in loads)
    work = prefill_s + a * tokens + b * sum(load.read for load in loads)
    held = sum(load.held for load in loads) + profile.block_size // 2 * tokens
    full = step_s * max(held / _max_held(loads, profile), tokens / profile.max_running)
    alone_s = [load.alone_s(profile, step_s) for load in loads]
    waiting = [step_s * sum(_roots(a, b, *span) for span in load.spans) ** 2 for load in loads]
    low = max(alone_s) * 1.001  # the bound divides by the time beyond the longest episode alone
    high = (work + step_s * tokens) / engines + 2 * low
    best = 0.0
    while high - low > 1e-3 * high:
        time = (low + high) / 2
        weighted = sum(part / (time - alone) for part, alone in zip(waiting, alone_s, strict=True))
        if work + max(full, weighted) > engines * time:
            best = low = time
        else:
            high = time
    return best


def _cache_fill_bound_s(
    loads: Sequence[EpisodeLoad], prefill_s: float, profile: EngineProfile, engines: int, x: float
) -> float:
    """A bound from the decode steps that are wasted while caches fill."""
    base, weights, a, b = profile.base_s, profile.weights_s, profile.per_sequence_s, profile.per_context_s
    step_s, max_running = base + (1 - x) * weights, profile.max_running
    batches = (min(max_running, max(1.0, weights / a)) if a else max_running, max_running)  # one of them wastes least
    capacity = _max_held(loads, profile)
    tokens, held = sum(load.sampled for load in loads), sum(load.held for load in loads)
    fixed = prefill_s + b * (sum(load.read for load in loads) - held)
    base_time = time = (fixed + x * a * tokens + (b + step_s / capacity) * held) / engines

    def wasted(share: float) -> float:
        lost = step_s * share
        return min(profile.prefill_s, *((base + max(weights, a * n) - x * a * n - lost) / n for n in batches))

    first = wasted(0) * sum(load.prefill for load in loads) / engines
    for _ in range(3):  # a higher bound raises the next one
        waste = total = 0.0
        for part in range(1, GRID_POINTS + 1):
            share = part / GRID_POINTS
            total += wasted(share) * capacity / GRID_POINTS
            idle = 1 - (b * capacity + step_s) * share / (step_s + b * capacity * share)
            rest = time - x * a * share * capacity
            if rest > fixed / engines:
                waste = max(waste, min(total, idle * rest) * (1 - fixed / engines / rest))
        time = max(time, base_time + waste - first)
    return time


def _max_held(loads: Sequence[EpisodeLoad], profile: EngineProfile) -> int:
    """The maximum of tokens in an engine's cache. A single context may exceed the capacity."""
    return max(profile.kv_capacity, max(load.spans[-1][1] for load in loads) + profile.block_size // 2)


def _roots(a: float, b: float, start: float, end: float) -> float:
    """The sum of sqrt(a + b c) over contexts c from `start` to `end`."""
    if not b:
        return (end - start) * math.sqrt(a)
    return (math.pow(a + b * end, 1.5) - math.pow(a + b * start, 1.5)) / (1.5 * b)
