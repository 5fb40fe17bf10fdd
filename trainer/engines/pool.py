"""Several engines behind one face: tells the scheduler what happens to them and to episodes, and does what it decides.

Invariants:
- Where and when a turn runs is the scheduler's affair. It hears of every event, is asked after each, and nothing polls.
- Only turns that have a place are requests. All others wait here, as many as there are.
- An engine that dies or hangs loses its place, not its turns: they go on elsewhere, from the same ids, or wait until it
  is back where it is the only one. It takes part again once it has proven its weights. Where weights are kept (`Keep`),
  it first gets the last ones again, as it may have been started anew; otherwise what it missed of a sync it gets with
  the next one, if it computes by then.
- Kept weights stay until newer ones are proven.
- A turn with a log-probability that is no number is asked for again; it is not its engine's failure.
- Only engines with the weights of the last sync sample, and a sync counts only for engines that have proven it. It
  waits for the turns that run; those that come meanwhile wait for it.
- An engine that hangs keeps at most one sync waiting, for as long as `carry` does, and never an interrupt.
- However a turn ends, by an exception or cancelled, the books say so before anything else happens.
- Everything belongs to one event loop, and every task to the pool's block.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any, Protocol, Self

from trainer.engines.vllm_client import Capacity, EngineFailed, Generation, Sampling, TurnFailed
from trainer.scheduling.scheduler import EngineStats, Placement, Scheduler

logger = logging.getLogger(__name__)

GAUGE_S = 20.0
"""For one scrape, or to interrupt: a server with a thousand requests is late, too."""
PATIENCE_S = 60.0
MISSES = 3
"""Scrapes in a row without an answer, after which an engine counts as lost."""
STALL_S = 120.0
"""Without one token computed, though turns run there."""
PROOF_S = 60.0
"""For an engine that wants to take part again."""
OLD = -1
"""The version of any weights but those of the last sync."""
SIGN_OF_LIFE = (0, 0)
"""Ids of any vocabulary. A server may answer scrapes though what computes behind it hangs."""
SLACK = 10.0
"""How many times the time that its tokens take at the engine's usual speed a turn may need."""
TRIES = 3
"""Engines that may fail at one turn before it counts as what makes them fail."""
BROKEN_TURNS = 3
"""Episodes in a row without one good answer between whose turns have a log-probability that is no number, after which
the engine counts as lost."""

Weights = Mapping[str, Any]
"""A state dict: tensors by their name in the checkpoint."""


class Engine(Protocol):
    name: str
    version: int

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation: ...

    async def logprobs(self, ids: Sequence[int]) -> list[float]: ...

    async def capacity(self) -> Capacity: ...

    async def gauge(self) -> EngineStats | None: ...

    async def interrupt(self, requests: Collection[str]) -> None: ...

    async def close(self) -> None: ...


Carry = Callable[[Sequence[Any], Any, int], Awaitable[Sequence[BaseException | None]]]
"""Brings weights of a version, or what `Keep.keep` made of them, to engines; for each, what went wrong."""


class Keep(Protocol):
    """Keeps weights for as long as an engine may need them again (`trainer.engines.weight_sync.ByFile`)."""

    async def keep(self, weights: Weights, version: int) -> Any: ...

    async def drop(self, *, but: Any) -> None:
        """All that is kept but that; None is all."""
        ...


class Reference(Protocol):
    """What the trainer says of a sequence: the other half of a proof (`trainer.engines.weight_sync.Reference`)."""

    def logprobs(self, weights: Weights) -> Any: ...

    async def check(self, engine: Engine, expected: Any) -> None:
        """Raises `SyncFailed`, or `EngineFailed`."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """A turn that an engine has answered. Times are the event loop's."""

    episode: int
    group: Hashable
    engine: str
    wanted: float
    """When the episode asked for it."""
    began: float
    ended: float
    context: int
    """Tokens before it."""
    sampled: int
    has_moved: bool
    """Whether the episode's last turn ran elsewhere."""


@dataclass(slots=True, eq=False)
class Desk:
    """An engine and what the pool knows of it."""

    engine: Engine
    is_up: bool = False
    why: str = "it has not answered yet"
    """It is not up."""
    is_silent: bool = False
    """It failed, and has computed nothing since."""
    rests_until: float = 0.0
    requests: dict[object, asyncio.Timeout] = field(default_factory=dict)
    """What it is asked now, by whom, and what ends it."""
    misses: int = 0
    computed: int = 0
    """Tokens, as of its last scrape."""
    moved_at: float = 0.0
    """When that last grew, or nothing ran."""
    broken: set[int] = field(default_factory=set)
    """The episodes to which it gave a log-probability that is no number, since its last good answer."""

    def cut(self, now: float) -> None:
        """End all requests; those that wait for them get a `TimeoutError`."""
        for bound in self.requests.values():
            if not bound.expired():
                bound.reschedule(now)


class Busy:
    """A context manager for many at once, which counts the seconds in which anyone is inside."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock, self._inside, self._since = clock, 0, 0.0

    def __enter__(self) -> None:
        if not self._inside:
            self._since = self._clock()
        self._inside += 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        if not self._inside:
            self.seconds += self._clock() - self._since


class Pool:
    """A context manager that owns its engines. `carry` and `reference` are needed only for `sync`.

    `keep`: where weights stay for engines that come back; without it they wait for the next sync.
    `scheduler`: for this pool alone. `turn_s`: what any turn may take, however fast its engine is.
    `rest_s`: until an engine that failed is tried again. `patience_s`: how long episodes wait for one when all are
    down. `log` is told of every turn.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        scheduler: Scheduler,
        carry: Carry | None = None,
        keep: Keep | None = None,
        reference: Reference | None = None,
        scrape_s: float = 1.0,
        turn_s: float = 600.0,
        rest_s: float = 30.0,
        patience_s: float = PATIENCE_S,
        log: Callable[[Served], None] | None = None,
    ) -> None:
        if not engines or len({engine.name for engine in engines}) < len(engines):
            raise ValueError(f"expected engines with names of their own, got {[engine.name for engine in engines]}")
        self.scheduler = scheduler
        self.desks = {engine.name: Desk(engine) for engine in engines}
        self.version = 0
        self.log = log
        self.busy = Busy()
        """While an engine works at a turn, and while whoever uses the pool says that something else is done for one."""
        self._carry, self._keep, self._reference = carry, keep, reference
        self._scrape_s, self._turn_s, self._rest_s, self._patience_s = scrape_s, turn_s, rest_s, patience_s
        self._expected: Any = None  # what the reference said of the last sync's weights
        self._kept: Any = None
        """Those weights, where they are kept."""
        self.nan_turns = 0
        """Turns with a log-probability that was no number."""
        self.seats: dict[Hashable, Seat] = {}
        self.name = token_hex(4)
        """For engines, of which others may ask things too."""
        self._keys = itertools.count()
        self._tasks = asyncio.TaskGroup()
        self._watchers: list[asyncio.Task[None]] = []
        self.has_changed = asyncio.Event()
        """Something that the scheduler was told of."""
        self.has_ended = asyncio.Event()
        """A request, or a turn that had a place."""
        self._down_since = 0.0
        """When the last engine went down."""

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._down_since = self.now()
        jobs = [self._place(), *map(self._watch, self.desks.values())]
        self._watchers = [self._tasks.create_task(job) for job in jobs]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._watchers:
            task.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await asyncio.gather(*(desk.engine.close() for desk in self.desks.values()))
            if self._keep is not None:
                await self._keep.drop(but=None)

    @asynccontextmanager
    async def seat(self, *, group: Hashable, most_tokens: int) -> AsyncIterator[Seat]:
        """For one episode of the problem `group`, of which the context never exceeds `most_tokens`."""
        seat = Seat(self, next(self._keys), group, most_tokens)
        try:
            yield seat
        except BaseException:
            seat.leave(None)
            raise
        seat.leave(None if seat.is_interrupted else seat.length)

    async def interrupt(self, seats: Iterable[Seat]) -> None:
        """Have their `generate`, now and from now on, return at once what there is, marked as interrupted."""
        seats = set(seats)
        for seat in seats:
            seat.is_interrupted = True
            seat.look()
        asked = {desk: [seat.name for seat in desk.requests if seat in seats] for desk in self.desks.values()}
        await asyncio.gather(*(self._interrupt(desk, names) for desk, names in asked.items() if names))

    async def _interrupt(self, desk: Desk, names: Sequence[str]) -> None:
        try:
            async with self.asking(desk, object(), GAUGE_S):
                await desk.engine.interrupt(names)
        except (EngineFailed, TimeoutError) as why:  # what cannot be interrupted ends in its time
            logger.warning("engine %s could not interrupt %d requests: %r", desk.engine.name, len(names), why)

    async def sync(self, weights: Weights, version: int | None = None) -> int:
        """Give all engines `weights`, and prove it. Returns their version: the one given, else one more than the last.

        One that failed and has computed nothing since is left out, unless they all have. Where none takes them and they
        are kept, waits for the first that comes back; but not at the first sync, when none has ever been there.

        Raises `SyncFailed` when an engine took them and says something else than the trainer, `EngineFailed` when none
        took them.
        """
        if self._carry is None or self._reference is None:
            raise ValueError(
                "expected a pool with carry and reference to sync, got one without; see trainer.engines.weight_sync"
            )
        if self.scheduler.is_paused:
            raise RuntimeError("expected one sync at a time; await the first")
        self.scheduler.is_paused = True
        try:
            await self._drain()
            expected = await asyncio.to_thread(self._reference.logprobs, weights)
            version = self.version + 1 if version is None else version
            kept = await self._keep.keep(weights, version) if self._keep else None
            may_wait = self._kept is not None
            self.version, self._expected, self._kept = version, expected, kept
            desks = self._recall()
            failed = await self._carry([desk.engine for desk in desks], weights if kept is None else kept, version)
            for desk, why in zip(desks, failed, strict=True):
                if why is not None:
                    self._rest(desk, str(why) or repr(why))
            took = [desk for desk, why in zip(desks, failed, strict=True) if why is None]
            ends = await asyncio.gather(*map(self._prove, took), return_exceptions=True)
            for end in filter(None, ends):
                raise end
        finally:
            self.scheduler.is_paused = False
            self.has_changed.set()
        self.scheduler.start_training_step()
        self._down_since = self.now()
        while not self._is_any_up():
            if not may_wait or self.is_hopeless():
                raise self.none_left()
            await asyncio.sleep(self._scrape_s)
        if self._keep is not None:
            await self._keep.drop(but=kept)
        return version

    # --- for seats ---

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def limit_s(self, desk: Desk, tokens: int) -> float:
        """After which an engine that has not answered with `tokens` counts as lost."""
        rate = self.scheduler.engines[desk.engine.name].tokens_per_s
        return max(self._turn_s, SLACK * tokens / rate if rate else 0.0)

    @asynccontextmanager
    async def asking(self, desk: Desk, who: object, limit_s: float) -> AsyncIterator[None]:
        """A request to an engine. Raises `TimeoutError` when it takes too long, or the engine is taken down."""
        try:
            async with asyncio.timeout(limit_s) as desk.requests[who]:
                yield
        finally:
            del desk.requests[who]
            self.has_ended.set()

    def fail(self, desk: Desk, why: str) -> None:
        """The engine is lost, with all contexts; its turns want another place."""
        logger.warning("engine %s is left out for %g s: %s", desk.engine.name, self._rest_s, why)
        self._take_down(desk)
        self._rest(desk, why)

    def is_hopeless(self) -> bool:
        """Whether all engines are down, and have been for too long."""
        is_down = not (self.scheduler.is_paused or self._is_any_up())
        return is_down and self.now() - self._down_since >= self._patience_s

    def none_left(self) -> EngineFailed:
        said = "; ".join(f"{name}: {desk.why}" for name, desk in self.desks.items())
        return EngineFailed(f"no engine is left of {len(self.desks)}: {said}")

    # --- what happens to engines ---

    def _is_any_up(self) -> bool:
        return any(desk.is_up for desk in self.desks.values())

    def _rest(self, desk: Desk, why: str) -> None:
        desk.why, desk.is_silent, desk.rests_until = why, True, self.now() + self._rest_s

    def _take_down(self, desk: Desk) -> None:
        now = self.now()
        desk.cut(now)
        if not desk.is_up:
            return
        desk.is_up = False
        for key in self.scheduler.remove_engine(desk.engine.name):
            self.seats[key].placement = None
        if not self._is_any_up():
            self._down_since = now
        self.has_changed.set()
        self.has_ended.set()

    def _recall(self) -> list[Desk]:
        """No engine has a context left, nor weights to sample from, until it proves new ones. Those that get them."""
        every = list(self.desks.values())
        for desk in every:
            self._take_down(desk)
            desk.engine.version = OLD
        desks = [desk for desk in every if not desk.is_silent] or every
        for desk in desks:
            desk.why = "it has not the weights of the last sync"
        return desks

    async def _prove(self, desk: Desk) -> None:
        try:
            await self._admit(desk, self._turn_s)  # patiently: if all are late, all are needed
        except (EngineFailed, TimeoutError) as why:
            self._rest(desk, str(why) or f"no proof of its weights in {self._turn_s:g} s")

    async def _admit(self, desk: Desk, limit_s: float) -> None:
        """It takes part (again), if it has the weights that it should have: it may have been started anew."""
        engine = desk.engine
        async with self.asking(desk, desk, limit_s):
            if self._reference is not None and self._expected is not None:
                await self._reference.check(engine, self._expected)
            room, gauge = await engine.capacity(), await engine.gauge()
        now = self.now()
        preemptions = 0 if gauge is None else gauge.preemptions
        self.scheduler.add_engine(
            engine.name, room.tokens, room.running, block_size=room.block, preemptions=preemptions
        )
        desk.is_up, desk.is_silent, desk.misses, desk.moved_at = True, False, 0, now
        desk.broken.clear()
        self.has_changed.set()

    async def _try(self, desk: Desk) -> None:
        try:
            if self._kept is not None:
                await self._give_again(desk)
            await self._admit(desk, PROOF_S)
        except Exception as why:  # whatever it is, this engine is not used for now, and why is said where none is left
            if not self.scheduler.is_paused:  # else a sync cut it short
                self._rest(desk, str(why) or repr(why))

    async def _give_again(self, desk: Desk) -> None:
        """The weights of the last sync. The proof alone would not see that a small step is missing."""
        assert self._carry is not None
        async with self.asking(desk, desk, self._turn_s):
            (why,) = await self._carry([desk.engine], self._kept, self.version)
        if why is not None:
            raise why

    async def _listen(self, desk: Desk) -> None:
        """Until it computes again it gets no weights: the others would wait for one that hangs, at each sync."""
        with suppress(Exception):  # whatever it is, the engine is not used for now
            async with self.asking(desk, desk, PROOF_S):
                await desk.engine.logprobs(SIGN_OF_LIFE)
                desk.is_silent = False

    async def _watch(self, desk: Desk) -> None:
        while True:
            if desk.is_up:
                await self._scrape(desk)
            elif self.scheduler.is_paused:
                pass  # what it is asked would keep the sync waiting
            elif desk.is_silent:
                await self._listen(desk)
            elif desk.rests_until <= self.now() and (self._kept is not None or desk.engine.version == self.version):
                await self._try(desk)
            if self.is_hopeless():
                for seat in self.seats.values():
                    seat.look()
            await asyncio.sleep(self._scrape_s)

    async def _scrape(self, desk: Desk) -> None:
        """What the engine says of itself. One that does not is suspected only: those that it works for know better."""
        try:
            async with asyncio.timeout(GAUGE_S):
                gauge = await desk.engine.gauge()
        except (EngineFailed, TimeoutError) as why:
            desk.misses += 1
            if desk.is_up and desk.misses >= MISSES:
                self.fail(desk, f"no answer to {MISSES} scrapes: {why!r}")
            return
        desk.misses = 0
        if gauge is None or not desk.is_up:
            return
        now = self.now()
        self.scheduler.observe(desk.engine.name, gauge, now)
        self.has_changed.set()
        if gauge.computed_tokens != desk.computed or not desk.requests:
            desk.computed, desk.moved_at = gauge.computed_tokens, now
        elif now - desk.moved_at > STALL_S:
            self.fail(desk, f"not one token in {STALL_S:g} s")

    # --- what is to do ---

    async def _place(self) -> None:
        """Asks the scheduler once for all that happened at the same time."""
        while True:
            await self.has_changed.wait()
            self.has_changed.clear()
            for placement in self.scheduler.place(self.now()):
                self.seats[placement.episode].put(placement)

    async def _drain(self) -> None:
        """Until nothing runs; engines that are tried meanwhile get the new weights anyway."""
        for desk in self.desks.values():
            if not desk.is_up:
                desk.cut(self.now())
        while any(desk.requests for desk in self.desks.values()) or self.scheduler.num_running:
            self.has_ended.clear()
            await self.has_ended.wait()


class _Interrupted(Exception):
    """A turn that no engine has begun."""


class Seat:
    """One episode's: it wants turns, one after the other, and each continues the context of the last."""

    def __init__(self, pool: Pool, key: int, group: Hashable, most_tokens: int) -> None:
        self.key = key
        self.length = 0
        self.name = f"{pool.name}-{key}"
        """Of its requests, at engines."""
        self.placement: Placement | None = None
        """Of the turn that it wants, once that has a place."""
        self.is_interrupted = False
        self._pool, self._group, self._most = pool, group, most_tokens
        self._is_in = False
        self._waits: asyncio.Future[None] | None = None

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `ids`, on another engine where one fails. Raises `EngineFailed` when none is left, or this turn
        makes all fail. Cancelled, the episode is forgotten; asked again, it is a new one."""
        pool, wanted, context = self._pool, self._pool.now(), len(ids)
        sampling = replace(sampling, request=self.name)
        self._want(context)
        try:
            made, placement, began = await self._run(ids, sampling)
            ended, length = pool.now(), context + len(made.ids)
            pool.scheduler.park(self.key, length, ended)
        except _Interrupted:
            self.leave(None)
            return Generation((), (), False, "", pool.version, is_interrupted=True)
        except BaseException:
            self.leave(None)
            raise
        self.placement, self.length = None, length
        pool.has_changed.set()
        if pool.log is not None:
            about = (placement.engine, wanted, began, ended, context, len(made.ids), placement.is_migration)
            pool.log(Served(self.key, self._group, *about))
        return made

    def put(self, placement: Placement) -> None:
        """Its turn has a place."""
        self.placement = placement
        self.look()

    def look(self) -> None:
        """What it waits for may have come."""
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)

    def leave(self, length: int | None) -> None:
        """The episode is over, with `length`; None if something ended it."""
        if self._is_in:
            self._is_in, self.placement = False, None
            pool = self._pool
            del pool.seats[self.key]
            pool.scheduler.complete(self.key, pool.now(), length)
            pool.has_changed.set()
            pool.has_ended.set()

    def _want(self, length: int) -> None:
        pool = self._pool
        if self._is_in:
            pool.scheduler.resume(self.key, length, pool.now())
        else:
            pool.scheduler.submit(self.key, self._group, length, self._most)
            pool.seats[self.key] = self
            self._is_in = True
        pool.has_changed.set()

    async def _run(self, ids: Sequence[int], sampling: Sampling) -> tuple[Generation, Placement, float]:
        pool, failures = self._pool, 0
        while True:
            placement, began = await self._placed(), pool.now()
            desk = pool.desks[placement.engine]
            limit = pool.limit_s(desk, sampling.max_tokens)
            try:
                with pool.busy:
                    async with pool.asking(desk, self, limit):
                        made = await desk.engine.generate(ids, sampling)
                if self.placement is placement:  # else the engine was lost in the moment in which it answered
                    desk.broken.clear()
                    return made, placement, began
            except TurnFailed as error:
                pool.nan_turns += 1
                failures += 1
                if failures == TRIES:
                    raise
                desk.broken.add(self.key)
                if self.placement is placement and len(desk.broken) >= BROKEN_TURNS:
                    pool.fail(desk, f"{BROKEN_TURNS} episodes in a row, the last: {error}")
            except (EngineFailed, TimeoutError) as error:
                if self.placement is placement:  # else it is known, and was not this turn's doing
                    why = str(error) or f"engine {placement.engine}: no answer in {limit:.0f} s"
                    pool.fail(desk, why)
                    failures += 1
                    if failures == TRIES:
                        raise EngineFailed(f"{TRIES} engines failed at one turn, the last: {why}") from error

    async def _placed(self) -> Placement:
        while self.placement is None or self.is_interrupted:
            if self.is_interrupted:
                raise _Interrupted
            if self._pool.is_hopeless():
                raise self._pool.none_left()
            self._waits = asyncio.get_running_loop().create_future()
            await self._waits
        return self.placement
