"""Several engines behind one face: every episode has a seat, and every seat an engine that it keeps while that answers.

Invariants:
- An engine that fails rests, and its episodes go on elsewhere from the same ids. It is asked again after its rest, once
  it has proven its weights; what it missed of a sync it gets with the next one.
- Only engines with the weights of the last sync sample, and a sync counts only for engines that have proven it.
- Nothing generates during a sync: a seat then, or a sync while there are seats, is an error of the caller.
- Everything belongs to one event loop, and nothing polls.

Where an episode goes is the least loaded engine's affair here; what is to know of it when it comes is in `seat`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from trainer.engine import EngineFailed, Generation, Sampling

Weights = Mapping[str, Any]
"""A state dict: tensors by their name in the checkpoint."""


class Engine(Protocol):
    name: str
    version: int

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation: ...

    async def logprobs(self, ids: Sequence[int]) -> list[float]: ...

    async def close(self) -> None: ...


class Carry(Protocol):
    async def __call__(self, engines: Sequence[Any], weights: Weights, version: int) -> Sequence[BaseException | None]:
        """Bring weights to engines; for each, what went wrong."""
        ...


class Reference(Protocol):
    """What the trainer says of a sequence: the other half of a proof (`trainer.sync.Reference`)."""

    def logprobs(self, weights: Weights) -> Any: ...

    async def check(self, engine: Engine, expected: Any) -> None:
        """Raises `SyncFailed`, or `EngineFailed`."""
        ...


@dataclass(slots=True, eq=False)
class Desk:
    """An engine and what the pool knows of it."""

    engine: Engine
    seats: int = 0
    requests: int = 0
    tokens: int = 0
    failures: int = 0
    rests_until: float | None = None
    """Of the pool's clock; None while it works."""
    why: str = ""
    """Its last failure."""


class Pool:
    """A context manager that owns its engines. `carry` and `reference` are needed only for `sync`."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        carry: Carry | None = None,
        reference: Reference | None = None,
        rest_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not engines or len({engine.name for engine in engines}) < len(engines):
            raise ValueError(f"expected engines with names of their own, got {[engine.name for engine in engines]}")
        self.desks = [Desk(engine) for engine in engines]
        self.version = 0
        self._carry, self._reference, self._rest_s, self._clock = carry, reference, rest_s, clock
        self._expected: Any = None  # what the reference said of the last sync's weights
        self._is_syncing = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(desk.engine.close() for desk in self.desks))

    @asynccontextmanager
    async def seat(self, *, group: str, prompt_tokens: int) -> AsyncIterator[Seat]:
        """A place to generate for one episode of the problem `group`. Raises `EngineFailed` when no engine is left."""
        if self._is_syncing:
            raise RuntimeError("expected no new episode during a sync; await it first")
        seat = Seat(self, await self.place())
        try:
            yield seat
        finally:
            seat.desk.seats -= 1

    async def sync(self, weights: Weights) -> int:
        """Give all engines `weights`, and prove it. Returns their version, one more than the last.

        Raises `SyncFailed` when an engine took them and says something else than the trainer, `EngineFailed` when none
        took them.
        """
        if self._carry is None or self._reference is None:
            raise ValueError("expected a pool with carry and reference to sync, got one without; see trainer.sync")
        if self._is_syncing or any(desk.seats for desk in self.desks):
            raise RuntimeError("expected a pool without episodes to sync; await them first")
        self._is_syncing = True
        try:
            engines = [desk.engine for desk in self.desks]
            self._expected = await asyncio.to_thread(self._reference.logprobs, weights)
            self.version += 1
            failed = await self._carry(engines, weights, self.version)
            for desk, why in zip(self.desks, failed, strict=True):
                desk.rests_until = None
                if why is not None:
                    self.rest(desk, why)
            await asyncio.gather(*(self._prove(desk) for desk in self.desks if desk.rests_until is None))
        finally:
            self._is_syncing = False
        if all(desk.rests_until is not None for desk in self.desks):
            raise self.none_left()
        return self.version

    async def place(self) -> Desk:
        """The usable engine with fewest episodes, and a seat there."""
        for desk in self.desks:
            if (
                desk.rests_until is not None
                and desk.rests_until <= self._clock()
                and desk.engine.version == self.version
            ):
                await self._readmit(desk)
        usable = [desk for desk in self.desks if desk.rests_until is None]
        if not usable:
            raise self.none_left()
        desk = min(usable, key=lambda desk: desk.seats)
        desk.seats += 1
        return desk

    async def _readmit(self, desk: Desk) -> None:
        """Back to work, if it has the weights that it should have: it may have been started anew."""
        back: float | None = self._clock()
        desk.rests_until = math.inf  # one tries; others go elsewhere meanwhile
        try:
            if self._reference is not None and self._expected is not None:
                await self._reference.check(desk.engine, self._expected)
            back = None
        except Exception as why:  # whatever it is, this engine is not used for now, and why is said where none is left
            back = self._clock() + self._rest_s
            desk.why = str(why)
        finally:
            desk.rests_until = back

    async def _prove(self, desk: Desk) -> None:
        assert self._reference is not None
        try:
            await self._reference.check(desk.engine, self._expected)
        except EngineFailed as why:
            self.rest(desk, why)

    def rest(self, desk: Desk, why: BaseException) -> None:
        desk.failures += 1
        desk.why = str(why)
        desk.rests_until = self._clock() + self._rest_s

    def none_left(self) -> EngineFailed:
        said = "; ".join(
            f"{desk.engine.name}: {desk.why or 'it has not the weights of the last sync'}" for desk in self.desks
        )
        return EngineFailed(f"no engine is left of {len(self.desks)}: {said}")


class Seat:
    """One episode's place. Its engine stays the same for the prefix cache, until it fails."""

    def __init__(self, pool: Pool, desk: Desk) -> None:
        self.desk = desk
        self._pool = pool

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `ids`, on another engine where one fails. Raises `EngineFailed` when none is left to try."""
        for _ in self._pool.desks:
            if self.desk.rests_until is not None:
                await self._move()
            desk = self.desk
            desk.requests += 1
            try:
                made = await desk.engine.generate(ids, sampling)
            except EngineFailed as why:
                self._pool.rest(desk, why)
                continue
            desk.tokens += len(made.ids)
            return made
        raise self._pool.none_left()

    async def _move(self) -> None:
        desk = await self._pool.place()
        self.desk.seats -= 1
        self.desk = desk
