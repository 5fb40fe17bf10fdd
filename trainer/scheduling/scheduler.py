"""Where rollouts run: a pure state machine over engines, episodes and their key-value caches (arXiv 2508.20722, 3.2).

    wants a turn ──place──> running on an engine ──park──> in a tool call ──wake──> wants a turn
                                  └──complete──> over

Whoever owns engines (the live pool, the simulator, a test) tells the scheduler what happened, with the time at which it
did, and asks `place` after each event: nothing here waits, polls, or knows a client.

Invariants:
- An episode is placed at most once per turn; it is forgotten by `complete` alone, and never lost with an engine.
- The ledger of an engine holds every episode that was placed there and has not ended: those in a tool call too, whose
  context the engine may still hold and will need again. It is exact at any time, unlike a scraped gauge, and all zeros
  once every episode is complete.
- The next turn of an episode that has a place is never held up: its tokens are in the ledger already.
- New episodes wait in one queue, and none begins before who is first in it then: "kv" may put another first as it
  learns lengths. It lets no engine stand without any episode while one waits, however long that may be, so that none
  starves: what a step hands in has an end.
- The same events give the same decisions.

Lengths are in tokens of a whole context: prompt and response, tool tokens included.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from trainer.scheduling.kv_forecast import Entry, Ledger
from trainer.scheduling.length_model import Lengths

Key = Hashable
_FREE = attrgetter("free")

EASE, CUT = 0.01, 0.95
"""Additive increase and multiplicative decrease of the share of a cache that is promised, per quiet observation and per
burst of preemptions: to compute some contexts anew costs less than to leave a fifth of a cache empty."""
APPETITE, LEAST, MOST = 0.95, 0.5, 1.0
FULL = 0.9
LIGHTER = 0.7
"""An episode goes on elsewhere if with it less than this share of what its engine has promised is promised there."""
BUCKETS = 32
"""Of the ledgers, in the longest context."""
LOOKS = 8
"""Episodes, at most, that an observation asks how far they have come: it takes no longer where many began together.
With two, kv promised more than it should, and preempted twice as often."""
RATE_SHARE = 0.05
"""What a turn's speed counts for in that of its engine."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The next turn of `episode` runs on `engine`."""

    episode: Key
    engine: str
    has_moved: bool = False
    """Whether its last turn ran elsewhere, so that its context is computed anew."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """What an engine says of itself. Late, and blind to contexts whose rollout is in a tool call: it corrects the
    ledger, and does not replace it."""

    preemptions: int
    """Since the engine's start."""
    waiting: int = 0
    """Requests that it has taken and cannot run."""
    used: float = 0.0
    """Share of its key-value cache."""
    tokens: int = 0
    """Computed since its start: how one that hangs is told from one that works."""


@dataclass(slots=True)
class _Engine:
    name: str
    ledger: Ledger
    capacity: int = 0
    """Tokens that its cache holds."""
    most_running: int = 0
    is_up: bool = False
    promised: float = 0.0
    """Tokens, at the time when most are; as of the last change, as is `free`."""
    free: float = 0.0
    """Tokens that may be promised yet."""
    due: list[tuple[float, int, _Episode, Entry]] = field(default_factory=list)
    """A heap: the tick by which an episode was to be over, if as short as can be, and what was expected of it."""
    reserved: int = 0
    """What its episodes hold if each becomes as long as it may."""
    running: int = 0
    here: dict[Key, _Episode] = field(default_factory=dict)
    groups: Counter[Hashable] = field(default_factory=Counter)
    appetite: float = APPETITE
    """How much of the capacity is promised: learnt from preemptions."""
    preemptions: int = 0
    is_overfull: bool = False
    """Since preemptions began, and until what is promised fits again."""
    ticks: float = 0.0
    ticked_at: float = 0.0
    rate: float = 0.0
    """Tokens that a running turn grows by in a second."""

    def tick(self, now: float) -> float:
        return self.ticks + self.rate * (now - self.ticked_at)

    def learn_rate(self, tokens: int, seconds: float, now: float) -> None:
        """A turn that took `seconds` sampled `tokens`."""
        if tokens <= 0 or seconds <= 0:
            return
        self.ticks, self.ticked_at = self.tick(now), now
        rate = tokens / seconds
        self.rate += (rate - self.rate) * (RATE_SHARE if self.rate else 1.0)

    def forget(self) -> None:
        """What is due first is still expected."""
        while self.due and self.due[0][2].entry is not self.due[0][3]:
            heapq.heappop(self.due)

    def reckon(self, now: float) -> None:
        """Its books have changed."""
        self.promised = self.ledger.peak(self.tick(now))
        self.free = self.capacity * self.appetite - self.promised


@dataclass(slots=True)
class _Episode:
    key: Key
    group: Hashable
    order: int
    length: int
    most: int
    engine: _Engine | None = None
    entry: Entry | None = None
    """What it is in its engine's ledger for."""
    is_waiting: bool = True
    is_running: bool = False
    is_over: bool = False
    began: float = 0.0
    """Its turn that runs."""
    told: int = 0
    """The length that is known, or thought, to have been reached."""
    guess: float | None = None
    """What its siblings are told of it, once it has begun."""
    last: str = ""
    """The engine of its last turn."""


class Scheduler:
    """Decides where turns run. `policy` is one of `POLICIES`; those but "kv" are there to be compared with."""

    def __init__(self, most_tokens: int, policy: str = "kv") -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
        self.policy = policy
        self.lengths = Lengths(most_tokens)
        self.is_held = False
        """While set, nothing is placed: the weights are being changed."""
        self._width = max(1.0, most_tokens / BUCKETS)
        self._pick, queue = POLICIES[policy]
        self._engines: dict[str, _Engine] = {}
        self.engines: list[_Engine] = []
        """Those that take turns, in the order in which they came."""
        self._changed: dict[str, _Engine] = {}
        """Those whose room has to be worked out anew."""
        self._open: dict[str, _Engine] = {}
        self._refused: _Episode | None = None
        """A new one that none but those in `_open` could take: who waits costs nothing until something changes."""
        self._episodes: dict[Key, _Episode] = {}
        self._woken: deque[_Episode] = deque()
        self._homeless: deque[_Episode] = deque()
        """Those of them whose engine was lost: before what is new, since they have begun."""
        self._queue: _Queue = queue(self)
        self._orders = itertools.count()
        self._ties = itertools.count()
        """Of the heaps of what is due: who is expected to be over at the same tick."""
        self._numbers: dict[Hashable, int] = {}

    # --- what happened ---

    def new_step(self) -> None:
        """Other prompts, and a policy that may have changed: what was learnt of lengths counts for less."""
        self.lengths.fade()
        self._numbers.clear()
        for episode in self._episodes.values():
            if episode.guess is not None:  # it goes on in this step, too
                episode.guess = self.lengths.beyond(episode.length)
                self.lengths.tell(episode.group, None, episode.guess)

    def up(
        self, name: str, capacity: int, most_running: int = 1 << 30, *, block: int = 1, preemptions: int = 0
    ) -> None:
        """An engine takes part (again): its cache holds `capacity` tokens in blocks of `block`, and it runs
        `most_running` turns at once. It has had `preemptions`, of which nothing is learnt."""
        engine = self._engines.setdefault(name, _Engine(name, Ledger(self._width)))
        engine.capacity, engine.most_running, engine.is_up = capacity, most_running, True
        engine.preemptions, engine.ledger.margin = preemptions, block / 2
        self._changed[name] = engine
        self._count_up()

    def drain(self, name: str) -> None:
        """The engine takes no more turns; those that run there end there."""
        self._engines[name].is_up = False
        self._count_up()

    def lost(self, name: str) -> list[Key]:
        """The engine is gone, with all contexts. The turns that ran there, which want a place again."""
        engine = self._engines[name]
        self.drain(name)
        orphans = list(engine.here.values())
        running = [episode for episode in orphans if episode.is_running]
        for episode in orphans:
            self._leave(episode)
        for episode in running:
            engine.running -= 1
            episode.is_running, episode.is_waiting = False, True
            self._homeless.append(episode)
        return [episode.key for episode in running]

    def submit(self, key: Key, group: Hashable, length: int, most: int) -> None:
        """A new episode with a prompt of `length` wants its first turn; its context never exceeds `most`."""
        if key in self._episodes:
            raise ValueError(f"episode {key!r} is here already")
        if not 0 < length <= most:
            raise ValueError(f"episode {key!r}: expected a prompt of 1 to {most} tokens, got {length}")
        episode = _Episode(key, group, next(self._orders), length, most)
        self._episodes[key] = episode
        self._queue.push(episode)

    def park(self, key: Key, length: int, now: float) -> None:
        """The turn is over, the context has `length`, and a tool call runs."""
        episode = self._running(key)
        self._check(episode, length)
        self._stop(episode, length, now)
        self._grow(episode, length, now)

    def wake(self, key: Key, length: int, now: float) -> None:
        """The tool has answered; with that the context has `length`, and the episode wants its next turn."""
        episode = self._episodes[key]
        if episode.is_running or episode.is_waiting:
            raise ValueError(f"episode {key!r} is not in a tool call")
        self._check(episode, length)
        self._grow(episode, length, now)
        episode.is_waiting = True
        self._woken.append(episode)

    def complete(self, key: Key, now: float, length: int | None = None) -> None:
        """The episode is over, with `length`; None if it was cut short: it would have been as long, at least."""
        episode = self._episodes[key]
        if length is not None:
            self._check(episode, length)
        elif episode.is_running and episode.engine is not None:
            self._guess_progress(episode, episode.engine.tick(now))
        if episode.is_running:
            self._stop(episode, length, now)
        if episode.engine is not None:
            self._leave(episode)
        del self._episodes[key]
        episode.is_over = True
        if episode.guess is None:
            return
        if length is None:
            self.lengths.left(episode.told)
            length = int(self.lengths.beyond(episode.told))
        else:
            self.lengths.ended(episode.told, length)
        self.lengths.tell(episode.group, episode.guess, length)
        self._queue.touch(episode.group)

    def observe(self, name: str, gauge: Gauge, now: float) -> None:
        """Corrects how much of the engine's cache is promised: less after preemptions, more while there are none and
        episodes wait."""
        engine = self._engines[name]
        fresh, engine.preemptions = gauge.preemptions - engine.preemptions, gauge.preemptions
        fits = engine.free >= 0
        if fresh > 0:
            if fits or not engine.is_overfull:  # one burst of preemptions is one mistake
                engine.appetite = max(LEAST, engine.appetite * CUT)
            engine.is_overfull = True
        elif fits:
            engine.is_overfull = False
            if not gauge.waiting and gauge.used < FULL and len(self._queue):
                engine.appetite = min(MOST, engine.appetite + EASE)
        self._look(engine, now)
        self._changed[name] = engine
        self.settle(now)

    # --- what to do ---

    def place(self, now: float) -> list[Placement]:
        """All turns that can begin now."""
        if self.is_held or not self.engines:
            return []
        placed: list[Placement] = []
        while self._woken:
            episode = self._woken.popleft()
            if episode.engine is None or not episode.engine.is_up:
                self._homeless.append(episode)
            elif not episode.is_over:
                placed.append(self._begin(episode, self._again(episode, episode.engine, now), now))
        while self._homeless:
            if not self._homeless[0].is_over:
                engine = self._pick(self, self._homeless[0], now)
                if engine is None:
                    return placed
                placed.append(self._begin(self._homeless[0], engine, now))
            self._homeless.popleft()
        while (new := self._queue.first()) is not None:
            engine = self._pick(self, new, now)
            if engine is None:
                break
            self._queue.pop()
            placed.append(self._begin(new, engine, now))
        return placed

    # --- the books ---

    def books(self) -> dict[str, dict[str, int]]:
        """Of each engine, what it is in for: episodes, turns that run, tokens of contexts, tokens at the very most."""
        return {
            name: {
                "episodes": engine.ledger.episodes,
                "running": engine.running,
                "held": engine.ledger.held,
                "reserved": engine.reserved,
            }
            for name, engine in self._engines.items()
        }

    @property
    def running(self) -> int:
        """Turns that have a place."""
        return sum(engine.running for engine in self._engines.values())

    def rate(self, name: str) -> float:
        """Tokens that a turn on the engine samples in a second, lately; 0 where none has ended."""
        return self._engines[name].rate

    def appetite(self, name: str) -> float:
        """The share of an engine's cache that is promised."""
        return self._engines[name].appetite

    def number_of(self, group: Hashable) -> int:
        """Of a group, in the order in which they came."""
        return self._numbers.setdefault(group, len(self._numbers))

    def settle(self, now: float) -> None:
        """Work out the room of engines whose books have changed."""
        for engine in self._changed.values():
            engine.reckon(now)
        self._open.update(self._changed)
        self._changed.clear()

    def most_free(self, episode: _Episode, now: float) -> _Engine | None:
        """The engine with most tokens that are not promised; where its prompt is held already, it needs fewer."""
        self.settle(now)
        best, most, group, saved = None, -math.inf, episode.group, episode.length
        engines = self._open.values() if episode is self._refused else self.engines
        for engine in engines:
            free = engine.free + saved if group in engine.groups else engine.free
            if free > most and engine.is_up and engine.running < engine.most_running:
                best, most = engine, free
        if best is not None and self.fits(episode, best, now):
            return best
        idle = [engine for engine in engines if not engine.ledger.episodes and engine.is_up]
        if idle:
            return max(idle, key=_FREE)
        self._refused = episode
        self._open.clear()
        return None

    def fits(self, episode: _Episode, engine: _Engine, now: float) -> bool:
        """Whether all of the engine's episodes, and this one, are expected to have room at any time."""
        ledger, room = engine.ledger, engine.capacity * engine.appetite
        if engine.reserved + episode.most + 2 * ledger.margin * (ledger.episodes + 1) <= room:
            return True  # however long they become
        if engine.free < 0:
            return False  # even without it
        growths = self.lengths.growths(episode.group, episode.length, episode.most)
        return ledger.peak_with(episode.length, engine.tick(now), growths) <= room

    def _again(self, episode: _Episode, home: _Engine, now: float) -> _Engine:
        """Where an episode goes on. A boundary between turns is a free chance to leave a full engine, but for the
        context that is computed anew."""
        if self.policy != "kv" or len(self._engines) == 1:
            return home
        self.settle(now)
        best, most = max(self.engines, key=_FREE), LIGHTER * home.promised / home.capacity
        if best.running >= best.most_running or best.promised / best.capacity >= most:
            return home
        length = max(episode.length, episode.told)
        growths = self.lengths.growths(episode.group, length, episode.most)
        there = best.ledger.peak_with(length, best.tick(now), growths)
        return best if there / best.capacity < most else home

    def _count_up(self) -> None:
        self.engines = [engine for engine in self._engines.values() if engine.is_up]

    def _begin(self, episode: _Episode, engine: _Engine, now: float) -> Placement:
        if episode.engine is not engine:
            if episode.engine is not None:
                self._leave(episode)
            self._enter(episode, engine, now)
        if episode.guess is None:
            episode.guess = self.lengths.beyond(0)  # of who has only begun nothing is known, whatever its prompt
            self.lengths.tell(episode.group, None, episode.guess)
            self.lengths.began(episode.length)
            episode.told = episode.length
        episode.is_waiting, episode.is_running, episode.began = False, True, now
        engine.running += 1
        has_moved = episode.last not in ("", engine.name)
        episode.last = engine.name
        return Placement(episode.key, engine.name, has_moved)

    def _stop(self, episode: _Episode, length: int | None, now: float) -> None:
        """Its turn no longer runs."""
        engine, episode.is_running = episode.engine, False
        assert engine is not None
        engine.running -= 1
        if length is not None:
            engine.learn_rate(length - episode.length, now - episode.began, now)

    def _enter(self, episode: _Episode, engine: _Engine, now: float) -> None:
        episode.engine = engine
        engine.here[episode.key] = episode
        engine.reserved += episode.most
        engine.groups[episode.group] += 1
        self._reckon(episode, engine, engine.tick(now))

    def _reckon(self, episode: _Episode, engine: _Engine, tick: float) -> None:
        """What is to be expected of it from here on."""
        if episode.entry is not None:
            engine.ledger.leave(episode.entry)
        length = max(episode.length, episode.told)
        growths = self.lengths.growths(episode.group, length, episode.most)
        episode.entry = engine.ledger.enter(length, tick, growths)
        soon = tick + max(growths[0], self._width / 2)
        heapq.heappush(engine.due, (soon, next(self._ties), episode, episode.entry))
        self._changed[engine.name] = engine

    def _leave(self, episode: _Episode) -> None:
        engine, entry = episode.engine, episode.entry
        assert engine is not None
        assert entry is not None
        episode.engine = episode.entry = None
        engine.ledger.leave(entry)
        del engine.here[episode.key]
        engine.reserved -= episode.most
        engine.groups[episode.group] -= 1
        if not engine.groups[episode.group]:
            del engine.groups[episode.group]
        engine.forget()  # nobody looks at an engine that has no gauge
        self._changed[engine.name] = engine

    def _grow(self, episode: _Episode, length: int, now: float) -> None:
        self._reached(episode, length)
        episode.length = length
        engine = episode.engine
        if engine is not None:
            self._reckon(episode, engine, engine.tick(now))

    def _check(self, episode: _Episode, length: int) -> None:
        if not episode.length <= length <= episode.most:
            raise ValueError(
                f"episode {episode.key!r}: expected {episode.length} to {episode.most} tokens of context, got {length}"
            )

    def _look(self, engine: _Engine, now: float) -> None:
        """Those that end say so at once, those that go on only after a turn. Were they not taken to have come as far as
        their engine is fast, everything would seem to be short, and they would be promised less than they need."""
        tick, due = engine.tick(now), engine.due
        for _ in range(LOOKS):
            engine.forget()
            if not due or due[0][0] > tick:
                break
            episode = heapq.heappop(due)[2]
            if episode.is_running:
                self._guess_progress(episode, tick)
                self._reckon(episode, engine, tick)

    def _guess_progress(self, episode: _Episode, tick: float) -> None:
        entry = episode.entry
        assert entry is not None
        self._reached(episode, min(episode.most, entry.context + int(tick - entry.tick)))

    def _reached(self, episode: _Episode, length: int) -> None:
        """Its siblings, too, are expected to be longer the longer it gets."""
        if length > episode.told:
            self.lengths.grew(episode.told, length)
            episode.told = length
            before, episode.guess = episode.guess, self.lengths.beyond(length)
            self.lengths.tell(episode.group, before, episode.guess)
            self._queue.touch(episode.group)

    def _running(self, key: Key) -> _Episode:
        episode = self._episodes[key]
        if not episode.is_running:
            raise ValueError(f"episode {key!r} has no turn that runs")
        return episode


class _Queue(Protocol):
    """New episodes."""

    def __len__(self) -> int: ...
    def push(self, episode: _Episode) -> None: ...
    def first(self) -> _Episode | None: ...
    def pop(self) -> None: ...
    def touch(self, group: Hashable) -> None:
        """More is known of the lengths in `group`."""


class _Fifo:
    """In the order in which they came."""

    def __init__(self, _: Scheduler) -> None:
        self._episodes: deque[_Episode] = deque()

    def __len__(self) -> int:
        return len(self._episodes)

    def push(self, episode: _Episode) -> None:
        self._episodes.append(episode)

    def first(self) -> _Episode | None:
        while self._episodes and self._episodes[0].is_over:
            self._episodes.popleft()
        return self._episodes[0] if self._episodes else None

    def pop(self) -> None:
        self._episodes.popleft()

    def touch(self, group: Hashable) -> None:
        pass


class _Longest:
    """The longest expected first, so that none of them is left for the end; as long as nothing is known, the group of
    which fewest have begun, so that something is."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._lengths = scheduler.lengths
        self._waiting: dict[Hashable, deque[_Episode]] = {}
        self._begun: Counter[Hashable] = Counter()
        self._ranks: dict[Hashable, tuple[float, int, int, Hashable]] = {}
        self._heap: list[tuple[float, int, int, Hashable]] = []
        self._count = 0
        self._orders: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return self._count

    def push(self, episode: _Episode) -> None:
        self._orders.setdefault(episode.group, episode.order)
        self._waiting.setdefault(episode.group, deque()).append(episode)
        self._count += 1
        self.touch(episode.group)

    def first(self) -> _Episode | None:
        while self._heap:
            rank = self._heap[0]
            group = rank[-1]
            waiting = self._waiting.get(group)
            if waiting and waiting[0].is_over:
                self._drop(group)
            elif waiting and self._ranks[group] is rank:
                return waiting[0]
            else:
                heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        group = self._heap[0][-1]
        self._begun[group] += 1
        self._drop(group)

    def touch(self, group: Hashable) -> None:
        if group in self._waiting:
            rank = (-self._lengths.of_group(group), self._begun[group], self._orders[group], group)
            self._ranks[group] = rank
            heapq.heappush(self._heap, rank)

    def _drop(self, group: Hashable) -> None:
        self._waiting[group].popleft()
        self._count -= 1
        if self._waiting[group]:
            self.touch(group)
        else:
            del self._waiting[group], self._begun[group], self._ranks[group], self._orders[group]


Pick = Callable[[Scheduler, _Episode, float], _Engine | None]


def _least_promised(scheduler: Scheduler, episode: _Episode, _: float) -> _Engine | None:
    """The authors' rule: room for the longest that every episode could become; they poll, this does not."""
    best = min(scheduler.engines, key=lambda engine: engine.reserved - engine.capacity)
    return best if best.reserved + episode.most <= best.capacity or not best.ledger.episodes else None


def _fewest(scheduler: Scheduler, _: _Episode, __: float) -> _Engine | None:
    return min(scheduler.engines, key=lambda engine: engine.ledger.episodes)


def _by_turns(scheduler: Scheduler, episode: _Episode, _: float) -> _Engine | None:
    engines = scheduler.engines
    return engines[episode.order % len(engines)]


def _by_group(scheduler: Scheduler, episode: _Episode, _: float) -> _Engine | None:
    engines = scheduler.engines
    return engines[scheduler.number_of(episode.group) % len(engines)]


POLICIES: dict[str, tuple[Pick, Callable[[Scheduler], _Queue]]] = {
    "static": (_by_group, _Fifo),
    "round_robin": (_by_turns, _Fifo),
    "least_inflight": (_fewest, _Fifo),
    "reserve_worst_case": (_least_promised, _Fifo),
    "kv": (Scheduler.most_free, _Longest),
}
