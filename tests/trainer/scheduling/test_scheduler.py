"""The scheduler under random turns and engine failures: no episode is lost or placed twice, and all reservations
end."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.placement import POLICIES, round_robin
from tests.trainer.engine_loads import engine_loads
from trainer.scheduling.kv_forecast import KvForecast
from trainer.scheduling.length_model import LengthModel
from trainer.scheduling.scheduler import TARGET_DECREASE_FACTOR, EngineStats, Placement, Scheduler
from trainer.scheduling.state import INITIAL_TARGET_UTILIZATION, MIN_TARGET_UTILIZATION

MAX_CONTEXT = 400
CAPACITY = 1000


@dataclass
class World:
    """Drives a scheduler with random episodes, turns and engine failures, and checks each placement."""

    scheduler: Scheduler
    rng: random.Random
    now: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)
    running: dict[int, str] = field(default_factory=dict)
    parked: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    finished: list[int] = field(default_factory=list)
    log: list[Placement] = field(default_factory=list)

    def submit(self, key: int, group: int) -> None:
        self.lengths[key] = self.rng.randint(1, 40)
        self.turns[key] = self.rng.randint(1, 5)
        self.scheduler.submit(key, group, self.lengths[key], MAX_CONTEXT)
        self.waiting.add(key)

    def place(self) -> None:
        for placement in self.scheduler.place(self.now):
            assert placement.episode in self.waiting, "placed though it did not wait"
            self.waiting.remove(placement.episode)
            self.running[placement.episode] = placement.engine
            self.log.append(placement)

    def step(self) -> None:
        """Something happens: a turn ends, a tool answers, an episode is cancelled."""
        self.now += self.rng.random()
        choices = sorted(self.running) + sorted(self.parked)
        if not choices:
            return
        key = self.rng.choice(choices)
        if key in self.parked:
            self.parked.remove(key)
            self.waiting.add(key)
            self._grow(key)
            self.scheduler.resume(key, self.lengths[key], self.now)
            return
        del self.running[key]
        self._grow(key)
        self.turns[key] -= 1
        if self.turns[key] == 0 or self.lengths[key] == MAX_CONTEXT or self.rng.random() < 0.05:
            self.scheduler.complete(key, self.now, self.lengths[key] if self.rng.random() < 0.9 else None)
            self.finished.append(key)
        else:
            self.parked.add(key)
            self.scheduler.park(key, self.lengths[key], self.now)

    def cancel(self) -> None:
        """Whatever it is at: in the queue, running, in a tool call, wanting its next turn."""
        choices = sorted({*self.running, *self.parked, *self.waiting})
        if choices:
            key = self.rng.choice(choices)
            self.running.pop(key, None)
            self.parked.discard(key)
            self.waiting.discard(key)
            self.scheduler.complete(key, self.now)
            self.finished.append(key)

    def lose_engine(self, engine: str) -> None:
        orphans = self.scheduler.remove_engine(engine)
        assert sorted(orphans) == sorted(key for key, name in self.running.items() if name == engine)
        for key in orphans:
            del self.running[key]
            self.waiting.add(key)

    def _grow(self, key: int) -> None:
        self.lengths[key] = min(MAX_CONTEXT, self.lengths[key] + self.rng.randint(0, 150))


def make_world(policy: str, seed: int, engines: int = 3) -> World:
    scheduler = Scheduler(MAX_CONTEXT, POLICIES[policy]())
    for number in range(engines):
        scheduler.add_engine(f"e{number}", CAPACITY, 64)
    return World(scheduler, random.Random(seed))


def play(policy: str, seed: int, episodes: int = 60, accidents: bool = False) -> World:
    world = make_world(policy, seed)
    for key in range(episodes):
        world.submit(key, key // 8)
    world.place()
    for turn in range(10_000):
        if len(world.finished) == episodes:
            break
        if accidents and turn % 37 == 36:
            name = f"e{world.rng.randrange(3)}"
            world.lose_engine(name)
            world.cancel()
            world.place()
            world.cancel()
            world.scheduler.add_engine(name, CAPACITY, 64)
            if turn % 74 == 73:
                world.scheduler.start_training_step()
        if turn % 5 == 0:
            gauge = EngineStats(world.rng.randint(0, 1) * turn, world.rng.randint(0, 2), world.rng.random())
            world.scheduler.observe(f"e{world.rng.randrange(3)}", gauge, world.now)
        world.step()
        world.place()
        for book in engine_loads(world.scheduler).values():
            assert min(book.values()) >= 0, "a ledger that is negative"
    return world


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), accidents=st.booleans())
def test_every_episode_ends_once_and_leaves_no_reservation(policy: str, seed: int, accidents: bool) -> None:
    world = play(policy, seed, accidents=accidents)
    assert sorted(world.finished) == list(range(60))
    assert not world.waiting
    assert not any(world.scheduler.lengths._in_bucket), "an episode that is not thought to be over"
    for book in engine_loads(world.scheduler).values():
        assert not any(book.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_events_lead_to_the_same_decisions(policy: str) -> None:
    assert play(policy, 7, accidents=True).log == play(policy, 7, accidents=True).log


def test_the_next_turn_runs_on_the_same_engine() -> None:
    world = make_world("kv", 0)
    world.submit(0, 0)
    world.place()
    (first,) = world.log
    world.scheduler.park(0, 100, 1.0)
    world.scheduler.resume(0, 120, 2.0)
    (again,) = world.scheduler.place(2.0)
    assert again == Placement(0, first.engine)


def test_an_episode_migrates_from_a_full_engine_to_an_empty_one() -> None:
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("old", CAPACITY)
    for key in range(4):
        scheduler.submit(key, key, 50, MAX_CONTEXT)
    assert len(scheduler.place(0.0)) == 4
    scheduler.add_engine("new", CAPACITY)
    scheduler.park(0, 60, 1.0)
    scheduler.resume(0, 70, 1.0)
    assert scheduler.place(1.0) == [Placement(0, "new", is_migration=True)]


@given(
    lengths=st.lists(st.integers(2, MAX_CONTEXT), max_size=12),
    turns=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_an_episode_alone_on_its_engine_never_migrates(lengths: list[int], turns: list[int]) -> None:
    """The headroom counts on the other engine as well, so an empty engine is not emptier than this one."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("old", CAPACITY)
    for key, length in enumerate(lengths):
        scheduler.submit(key, key, 1, MAX_CONTEXT)
        scheduler.place(0.0)
        scheduler.complete(key, 1.0, length)
    scheduler.submit("alone", 0, 1, MAX_CONTEXT)
    assert scheduler.place(2.0) == [Placement("alone", "old")]
    scheduler.add_engine("new", CAPACITY)
    for turn, length in enumerate(itertools.accumulate(turns, initial=5)):
        scheduler.park("alone", length, 3.0 + turn)
        scheduler.resume("alone", length, 3.0 + turn)
        assert scheduler.place(3.0 + turn) == [Placement("alone", "old")]


def test_turns_of_a_removed_engine_are_placed_on_another() -> None:
    world = make_world("kv", 3, engines=2)
    for key in range(4):
        world.submit(key, 0)
    world.place()
    engine = world.log[0].engine
    world.lose_engine(engine)
    world.place()
    assert set(world.running.values()) == {"e1" if engine == "e0" else "e0"}
    assert sorted(world.running) == [0, 1, 2, 3]


def test_a_displaced_turn_does_not_delay_resumed_ones() -> None:
    scheduler = Scheduler(MAX_CONTEXT)
    for name in ("e0", "e1"):
        scheduler.add_engine(name, MAX_CONTEXT)
    for key, length in enumerate((MAX_CONTEXT - 1, MAX_CONTEXT - 2)):
        scheduler.submit(key, key, length, MAX_CONTEXT)
    on = {placed.engine: placed.episode for placed in scheduler.place(0.0)}
    scheduler.park(on["e1"], MAX_CONTEXT, 1.0)
    assert scheduler.remove_engine("e0") == [on["e0"]]
    scheduler.submit("new", 2, 1, MAX_CONTEXT)
    assert scheduler.place(2.0) == []
    scheduler.resume(on["e1"], MAX_CONTEXT, 3.0)
    assert scheduler.place(3.0) == [Placement(on["e1"], "e1")]
    scheduler.complete(on["e1"], 4.0, MAX_CONTEXT)
    assert scheduler.place(4.0)[0] == Placement(on["e0"], "e1", is_migration=True)


def test_nothing_is_placed_while_weights_change() -> None:
    world = make_world("kv", 0)
    world.submit(0, 0)
    world.scheduler.is_paused = True
    assert world.scheduler.place(0.0) == []
    world.scheduler.is_paused = False
    assert len(world.scheduler.place(0.0)) == 1


def test_an_empty_engine_admits_an_episode_that_fits_nowhere() -> None:
    scheduler = Scheduler(10 * CAPACITY)
    scheduler.add_engine("small", CAPACITY)
    scheduler.submit("long", 0, 5 * CAPACITY, 10 * CAPACITY)
    assert scheduler.place(0.0) == [Placement("long", "small")]


def test_an_empty_engine_admits_the_head_of_the_queue_even_if_another_has_more_free_tokens() -> None:
    """The large engine is full and still has more free tokens than the small one."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("large", 10 * MAX_CONTEXT)
    for key in range(9):
        scheduler.submit(key, key, MAX_CONTEXT, MAX_CONTEXT)
    assert len(scheduler.place(0.0)) == 9
    scheduler.submit("next", 9, MAX_CONTEXT, MAX_CONTEXT)
    assert scheduler.place(1.0) == []
    scheduler.add_engine("small", MAX_CONTEXT // 8)
    scheduler.observe("large", EngineStats(0), 2.0)
    assert scheduler.place(2.0) == [Placement("next", "small")]


def test_resumed_turns_do_not_shift_the_round_robin_order() -> None:
    scheduler = Scheduler(MAX_CONTEXT, round_robin())
    for name in ("e0", "e1"):
        scheduler.add_engine(name, CAPACITY)
    began = []
    for key in range(6):
        scheduler.submit(key, 0, 10, MAX_CONTEXT)
        (placed,) = scheduler.place(float(key))
        began.append(placed.engine)
        for turn in range(key):
            scheduler.park(key, 20 + 2 * turn, key + 0.5)
            scheduler.resume(key, 21 + 2 * turn, key + 0.5)
            scheduler.place(key + 0.5)
    assert began == ["e0", "e1"] * 3


def test_stale_predictions_are_dropped_without_any_observation() -> None:
    """The engine is never observed and never without an episode."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", 100 * MAX_CONTEXT)
    most = 0
    for key in range(200):
        scheduler.submit(key, key, 10, MAX_CONTEXT)
        scheduler.place(float(key))
        for turn in range(5):
            scheduler.park(key, 20 + 2 * turn, key + 0.5)
            scheduler.resume(key, 21 + 2 * turn, key + 0.5)
            scheduler.place(key + 0.5)
        if key:
            scheduler.complete(key - 1, key + 0.5, 40)
        most = max(most, len(scheduler.engines["e0"].predicted_ends))
    assert engine_loads(scheduler)["e0"]["episodes"] == 1
    assert most < 100


def test_reservations_never_exceed_the_target_utilization() -> None:
    """The contexts cannot grow, so exactly as many are admitted as fit."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", CAPACITY)
    for key in range(20):
        scheduler.submit(key, key, MAX_CONTEXT, MAX_CONTEXT)
    assert len(scheduler.place(0.0)) == int(CAPACITY * INITIAL_TARGET_UTILIZATION) // MAX_CONTEXT
    assert engine_loads(scheduler)["e0"]["resident_tokens"] <= CAPACITY


def two_groups_begun() -> Scheduler:
    """Return a scheduler with two groups of two episodes (0 and 1, 2 and 3). The first of each group runs."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", 10 * MAX_CONTEXT, 2)
    for key, group in enumerate(["short", "short", "long", "long"]):
        scheduler.submit(key, group, 10, MAX_CONTEXT)
    assert [placed.episode for placed in scheduler.place(0.0)] == [0, 2]
    return scheduler


def test_a_group_with_long_finished_episodes_is_admitted_first() -> None:
    scheduler = two_groups_begun()
    scheduler.complete(0, 1.0, 20)
    scheduler.complete(2, 1.0, 350)
    assert [placed.episode for placed in scheduler.place(1.0)] == [3, 1]


def test_a_group_with_long_running_episodes_is_admitted_first() -> None:
    """No episode has finished; the length of a finished turn is enough."""
    scheduler = two_groups_begun()
    scheduler.park(2, 300, 1.0)
    assert [placed.episode for placed in scheduler.place(1.0)] == [3]


def test_a_group_with_an_overdue_turn_is_admitted_first() -> None:
    """Before a turn ends, only the engine's speed shows how long it has become."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", 10 * MAX_CONTEXT, 2)
    for key in ("quick", "long"):
        scheduler.submit(key, key, 10, MAX_CONTEXT)
    assert len(scheduler.place(0.0)) == 2
    scheduler.complete("quick", 1.0, MAX_CONTEXT)
    scheduler.submit("new", "new", 10, MAX_CONTEXT)
    assert len(scheduler.place(1.25)) == 1
    for group in ("new", "long"):
        scheduler.submit(f"another {group}", group, 10, MAX_CONTEXT)
    scheduler.observe("e0", EngineStats(0), 1.3)
    scheduler.add_engine("e0", 10 * MAX_CONTEXT, 3)
    assert [placed.episode for placed in scheduler.place(1.3)] == ["another long"]


def test_a_long_prompt_does_not_raise_its_groups_priority() -> None:
    """While no length is known, equally many episodes of each group are admitted."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", 10 * MAX_CONTEXT, 8)
    for key in range(16):
        scheduler.submit(key, key // 8, (10, MAX_CONTEXT // 2)[key // 8], MAX_CONTEXT)
    assert sorted(placed.episode // 8 for placed in scheduler.place(0.0)) == [0] * 4 + [1] * 4


def test_preemptions_lower_the_target_utilization_and_quiet_observations_raise_it() -> None:
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", CAPACITY)
    before = scheduler.engines["e0"].target_utilization
    scheduler.observe("e0", EngineStats(preemptions=3), 1.0)
    less = scheduler.engines["e0"].target_utilization
    assert less < before
    scheduler.submit("a", 0, 10, MAX_CONTEXT)
    scheduler.observe("e0", EngineStats(preemptions=3), 2.0)
    assert less < scheduler.engines["e0"].target_utilization <= before


def test_each_burst_of_preemptions_lowers_the_target_once_down_to_its_minimum() -> None:
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", CAPACITY)
    seen = [scheduler.engines["e0"].target_utilization]
    for scrape in range(1, 40):
        scheduler.observe("e0", EngineStats(preemptions=scrape), float(scrape))
        seen.append(scheduler.engines["e0"].target_utilization)
    assert seen[1] == pytest.approx(seen[0] * TARGET_DECREASE_FACTOR)
    assert seen[2] == pytest.approx(seen[0] * TARGET_DECREASE_FACTOR * TARGET_DECREASE_FACTOR)
    assert seen[-1] == MIN_TARGET_UTILIZATION


def test_an_overfull_engine_lowers_its_target_once() -> None:
    """The engine keeps its episodes, so preemptions carry no new information until its reservations fit again."""
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.add_engine("e0", CAPACITY)
    for key in range(3):
        scheduler.submit(key, key, CAPACITY // 3, CAPACITY)
    assert len(scheduler.place(0.0)) == 2
    for key, more in enumerate((600, 500)):
        scheduler.park(key, more, 1.0)
    for scrape in range(1, 9):
        scheduler.observe("e0", EngineStats(preemptions=scrape), float(scrape))
    assert scheduler.engines["e0"].target_utilization == pytest.approx(
        INITIAL_TARGET_UTILIZATION * TARGET_DECREASE_FACTOR
    )


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda s: s.submit("a", 0, 10, MAX_CONTEXT), "expected a new key"),
        (lambda s: s.submit("b", 0, MAX_CONTEXT + 1, MAX_CONTEXT), "1 to 400 tokens"),
        (lambda s: s.park("a", 20, 0.0), "expected a running episode, got a waiting one"),
        (lambda s: s.resume("a", 20, 0.0), "expected a parked episode, got a waiting one"),
    ],
)
def test_an_impossible_event_is_a_value_error(act: object, says: str) -> None:
    scheduler = Scheduler(MAX_CONTEXT)
    scheduler.submit("a", 0, 10, MAX_CONTEXT)
    with pytest.raises(ValueError, match=says):
        act(scheduler)  # type: ignore[operator]


@settings(max_examples=100, deadline=None)
@given(
    entries=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=30),
    now=st.integers(0, 600),
)
def test_the_peak_equals_that_of_a_walk_over_all_steps(entries: list[tuple[int, int]], now: int) -> None:
    ledger, width = KvForecast(10.0), 10.0
    kept = [ledger.reserve(context, 0.0, [float(growth)]) for context, growth in entries]

    def held(tick: float) -> float:
        """Parts end in the middle of their bucket; those that are overdue, at once."""
        ends = [int(growth / width) for _, growth in entries]
        alive = [
            context
            for (context, _), end in zip(entries, ends, strict=True)
            if end > int(now / width) and end * width + 5 >= tick
        ]
        return sum(context + tick for context in alive)

    ticks = [bucket * width + 5 for bucket in range(int(now / width) + 1, 60)]
    slow = max([sum(context + now for context, _ in entries), *(held(tick) for tick in ticks)])
    assert ledger.peak(float(now)) == pytest.approx(slow)
    for entry in kept:
        ledger.release(entry)
    assert ledger.peak(0.0) == 0.0
    assert (ledger.resident_tokens, ledger.num_episodes) == (0, 0)


def test_the_length_model_is_not_biased_to_episodes_that_finish_first() -> None:
    """Of 100 episodes half end at 50 and half at 350. When only the short ones have ended, the mean must not be 50."""
    lengths = LengthModel(MAX_CONTEXT)
    for _ in range(100):
        lengths.on_start(0)
    for _ in range(50):
        lengths.on_finish(0, 50)
    for _ in range(50):
        lengths.on_growth(0, 200)
    assert lengths.mean_length_above(0) > 150
    assert lengths.mean_length_above(100) > 200
    for _ in range(50):
        lengths.on_finish(200, 350)
    assert lengths.mean_length_above(0) == pytest.approx(200, rel=0.1)
    assert lengths.mean_length_above(100) == pytest.approx(350, rel=0.1)


def test_a_cancelled_episode_counts_as_longer_than_it_is() -> None:
    """Otherwise a training step that cancels its stragglers would teach that all episodes are short."""

    def mean(cut_at: float) -> float:
        scheduler = Scheduler(MAX_CONTEXT)
        scheduler.add_engine("e0", 100 * MAX_CONTEXT)
        for key in range(60):
            scheduler.submit(key, key, 10, MAX_CONTEXT)
        assert len(scheduler.place(0.0)) == 60
        for key in range(30):
            scheduler.complete(key, 10.0, 50)
        for key in range(30, 60):
            scheduler.complete(key, cut_at)
        return scheduler.lengths.mean_length_above(0)

    assert mean(cut_at=70.0) > 1.5 * mean(cut_at=10.0)


def test_a_groups_own_episodes_weigh_more_than_the_stage() -> None:
    lengths = LengthModel(MAX_CONTEXT)
    for group, length in (("hard", 300), ("easy", 20)):
        for _ in range(8):
            lengths.on_start(0)
            lengths.update_group(group, None, lengths.mean_length_above(0))
        for _ in range(4):
            lengths.on_finish(0, length)
            lengths.update_group(group, lengths.mean_length_above(0), length)
    assert lengths.group_mean("hard") > lengths.mean_length_above(0) > lengths.group_mean("easy")
    assert max(lengths.growth_quantiles("hard", 0, MAX_CONTEXT)) > max(lengths.growth_quantiles("easy", 0, MAX_CONTEXT))
    assert max(lengths.growth_quantiles("hard", 390, MAX_CONTEXT)) <= 10


def test_the_length_model_stays_valid_over_thousands_of_steps() -> None:
    """Decay leaves the prior, and an extrapolated length may be corrected one training step later."""
    lengths = LengthModel(MAX_CONTEXT)
    for _ in range(2000):
        lengths.on_start(10)
        lengths.on_growth(10, MAX_CONTEXT)
        lengths.decay()
        lengths.on_finish(MAX_CONTEXT, 20)
        assert 0 < lengths.mean_length_above(0) <= lengths.mean_length_above(MAX_CONTEXT // 2) <= MAX_CONTEXT
