"""Runs random episodes on a scheduler and checks each placement."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from bench.simulator.placement import POLICIES
from tests.trainer.engine_loads import engine_loads
from trainer.scheduling.scheduler import EngineStats, Placement, Scheduler

MAX_CONTEXT = 400
"""Tokens of the longest context."""
CAPACITY = 1000
"""Tokens of an engine's KV cache: two contexts of the largest size fit, three do not."""
MAX_EVENTS = 10_000
"""Bounds a run whose episodes never finish. Runs of 60 episodes need a few hundred events."""
GROUP_SIZE = 8


@dataclass
class RandomEpisodes:
    """Episodes with random turns. Each episode is in exactly one of `running`, `parked`, `waiting` and `finished`."""

    scheduler: Scheduler
    rng: random.Random
    now: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens of each episode's context."""
    turns_left: dict[int, int] = field(default_factory=dict)
    running: dict[int, str] = field(default_factory=dict)
    """The engine of each episode with a running turn."""
    parked: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    finished: list[int] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)

    def submit(self, key: int, group: int) -> None:
        self.lengths[key] = self.rng.randint(1, 40)
        self.turns_left[key] = self.rng.randint(1, 5)
        self.scheduler.submit(key, group, self.lengths[key], MAX_CONTEXT)
        self.waiting.add(key)

    def place(self) -> None:
        for placement in self.scheduler.place(self.now):
            assert placement.episode in self.waiting, "an episode was placed that did not wait for a turn"
            self.waiting.remove(placement.episode)
            self.running[placement.episode] = placement.engine
            self.placements.append(placement)

    def end_turn_or_tool_call(self) -> None:
        """End the running turn or the tool call of a random episode."""
        self.now += self.rng.random()
        keys = sorted(self.running) + sorted(self.parked)
        if not keys:
            return
        key = self.rng.choice(keys)
        if key in self.parked:
            self.parked.remove(key)
            self.waiting.add(key)
            self._grow(key)
            self.scheduler.resume(key, self.lengths[key], self.now)
            return
        del self.running[key]
        self._grow(key)
        self.turns_left[key] -= 1
        if self.turns_left[key] == 0 or self.lengths[key] == MAX_CONTEXT or self.rng.random() < 0.05:
            self.scheduler.complete(key, self.now, self.lengths[key] if self.rng.random() < 0.9 else None)
            self.finished.append(key)
        else:
            self.parked.add(key)
            self.scheduler.park(key, self.lengths[key], self.now)

    def cancel(self) -> None:
        """Cancel a random unfinished episode, whatever its state."""
        keys = sorted({*self.running, *self.parked, *self.waiting})
        if keys:
            key = self.rng.choice(keys)
            self.running.pop(key, None)
            self.parked.discard(key)
            self.waiting.discard(key)
            self.scheduler.complete(key, self.now)
            self.finished.append(key)

    def lose_engine(self, engine: str) -> None:
        displaced = self.scheduler.remove_engine(engine)
        assert sorted(displaced) == sorted(key for key, name in self.running.items() if name == engine)
        for key in displaced:
            del self.running[key]
            self.waiting.add(key)

    def update_stats(self, max_preemptions: int) -> None:
        """Report random stats of a random engine."""
        stats = EngineStats(self.rng.randint(0, 1) * max_preemptions, self.rng.randint(0, 2), self.rng.random())
        self.scheduler.update_stats(f"e{self.rng.randrange(3)}", stats, self.now)

    def _grow(self, key: int) -> None:
        self.lengths[key] = min(MAX_CONTEXT, self.lengths[key] + self.rng.randint(0, 150))


def episodes_on_engines(policy: str, seed: int, num_engines: int = 3) -> RandomEpisodes:
    """Return an empty run on engines with the names e0, e1 and so on."""
    scheduler = POLICIES[policy](MAX_CONTEXT)
    for number in range(num_engines):
        scheduler.add_engine(f"e{number}", CAPACITY, max_running=64)
    return RandomEpisodes(scheduler, random.Random(seed))


def run_episodes(policy: str, seed: int, num_episodes: int = 60, *, has_failures: bool = False) -> RandomEpisodes:
    """Run all episodes to their ends. With failures, an engine is lost and two episodes are cancelled at times."""
    episodes = episodes_on_engines(policy, seed)
    for key in range(num_episodes):
        episodes.submit(key, key // GROUP_SIZE)
    episodes.place()
    for event in range(MAX_EVENTS):
        if len(episodes.finished) == num_episodes:
            break
        if has_failures and event % 37 == 36:
            name = f"e{episodes.rng.randrange(3)}"
            episodes.lose_engine(name)
            episodes.cancel()
            episodes.place()
            episodes.cancel()
            episodes.scheduler.add_engine(name, CAPACITY, max_running=64)
            if event % 74 == 73:
                episodes.scheduler.start_training_step()
        if event % 5 == 0:
            episodes.update_stats(max_preemptions=event)
        episodes.end_turn_or_tool_call()
        episodes.place()
        for load in engine_loads(episodes.scheduler).values():
            assert min(load.values()) >= 0, f"a load is negative: {load}"
    return episodes
