"""Rollouts on simulated engines: scripted episodes under a placement policy.

Everything is seeded, and nothing reads a clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.simulator.engine import EngineProfile, EngineRequest, SimulatedEngine
from bench.simulator.oracle import ORACLE, Oracle
from bench.simulator.placement import POLICIES
from bench.simulator.scripts import EpisodeScript, Workload
from trainer.scheduling.scheduler import EngineStats, Placement, Scheduler

SCRAPE_INTERVAL_S = 1.0
"""Seconds between two scrapes of an engine."""


@dataclass(frozen=True, slots=True)
class TurnTrace:
    """One turn: from its placement on an engine to its last token. Times are in seconds after the start."""

    episode: int
    engine: str
    started_at: float
    ended_at: float
    context: int
    """Tokens at the start."""
    sampled: int
    is_migration: bool


def teach_lengths(scheduler: Scheduler, previous_step: Sequence[EpisodeScript]) -> None:
    """Give the scheduler the lengths of the episodes of the preceding training step."""
    for script in previous_step:
        scheduler.lengths.on_start(script.prompt)
        scheduler.lengths.on_finish(script.prompt, script.length)
    scheduler.start_training_step()


class Simulation:
    """A rollout of `workload` on `num_engines` engines. After `run`, `engines` has the counters and `turns` the turns.

    `policy` is one of `bench.simulator.placement`, or `ORACLE`.
    """

    def __init__(self, workload: Workload, profile: EngineProfile, num_engines: int, policy: str) -> None:
        self.turns: list[TurnTrace] = []
        """In the order in which they ended."""
        self.scripts = workload.scripts
        self.engines = {name: SimulatedEngine(name, profile) for name in (f"e{n}" for n in range(num_engines))}
        if policy == ORACLE:
            self.scheduler: Scheduler = Oracle(workload.max_context_tokens, workload.scripts)
        else:
            self.scheduler = POLICIES[policy](workload.max_context_tokens)
        teach_lengths(self.scheduler, workload.previous_step)
        for name in self.engines:
            self.scheduler.add_engine(name, profile.kv_capacity, profile.max_running, block_size=profile.block_size)
        self.max_response_tokens = workload.max_response_tokens
        self.next_turn = [0] * len(self.scripts)
        self.context = [script.prompt for script in self.scripts]
        self.new_tokens = [*self.context]
        self.num_finished = 0
        self.placed: dict[int, tuple[Placement, float]] = {}
        self.now = 0.0
        self._events: list[tuple[float, int, str, object]] = []
        self._order = itertools.count()
        self._event_times: dict[str, float] = {}

    def run(self) -> Simulation:
        """Run all episodes to their ends. Returns the simulation."""
        for key, script in enumerate(self.scripts):
            self.scheduler.submit(key, script.group, script.prompt, script.prompt + self.max_response_tokens)
        self._push_event(SCRAPE_INTERVAL_S, "scrape", None)
        self._place(self.engines.values())
        while self.num_finished < len(self.scripts):
            self.now, _, kind, subject = heapq.heappop(self._events)
            if kind == "tool":
                assert isinstance(subject, int)
                self._resume(subject)
            elif kind == "scrape":
                self._scrape()
            else:
                assert isinstance(subject, SimulatedEngine)
                if self._event_times.get(subject.name) == self.now:
                    self._after_event(subject, subject.advance(self.now))
        return self

    def _push_event(self, time: float, kind: str, subject: object) -> None:
        heapq.heappush(self._events, (time, next(self._order), kind, subject))

    def _after_event(self, engine: SimulatedEngine, ended: Sequence[EngineRequest]) -> None:
        for request in ended:
            self._end_turn(request)
        if ended:
            self._place([engine])
        else:
            self._schedule(engine)

    def _end_turn(self, request: EngineRequest) -> None:
        key = request.episode
        script, turn = self.scripts[key], self.next_turn[key]
        sampled, observed, tool_s = script.turns[turn]
        placement, started_at = self.placed.pop(key)
        context = self.context[key]
        self.turns.append(
            TurnTrace(key, placement.engine, started_at, self.now, context, sampled, placement.is_migration)
        )
        self.context[key] += sampled
        self.next_turn[key] += 1
        if self.next_turn[key] == len(script.turns):
            self.scheduler.complete(key, self.now, self.context[key])
            self.num_finished += 1
            return
        self.scheduler.park(key, self.context[key], self.now)
        self.new_tokens[key] = observed
        self.context[key] += observed
        self._push_event(self.now + tool_s, "tool", key)

    def _resume(self, key: int) -> None:
        self.scheduler.resume(key, self.context[key], self.now)
        self._place([])

    def _scrape(self) -> None:
        for engine in self.engines.values():
            stats = EngineStats(engine.preemptions, len(engine.waiting), engine.used / engine.profile.kv_capacity)
            self.scheduler.update_stats(engine.name, stats, self.now)
        self._push_event(self.now + SCRAPE_INTERVAL_S, "scrape", None)
        self._place([])

    def _place(self, changed: Iterable[SimulatedEngine]) -> None:
        touched = {engine.name: engine for engine in changed}
        for placement in self.scheduler.place(self.now):
            key, engine = placement.episode, self.engines[placement.engine]
            assert isinstance(key, int)
            self.placed[key] = placement, self.now
            script = self.scripts[key]
            sampled = script.turns[self.next_turn[key]][0]
            request = EngineRequest(key, script.group, script.prompt, self.context[key], sampled, self.new_tokens[key])
            if engine.name not in touched:
                for ended in engine.advance(self.now):
                    self._end_turn(ended)
                touched[engine.name] = engine
            engine.submit(request)
        for engine in touched.values():
            self._schedule(engine)

    def _schedule(self, engine: SimulatedEngine) -> None:
        event_at = max(engine.next_event_at(), self.now)
        self._event_times[engine.name] = event_at
        if event_at < math.inf:
            self._push_event(event_at, "engine", engine)
