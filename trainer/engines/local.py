"""An engine inside this process: a transformers model that decodes many rows at once, for runs on a CPU.

Invariants:
- The same (weights, ids, sampling.seed) gives the same tokens and log-probabilities, bit for bit, whatever shares the
  batch, whichever slot it gets and whenever it comes, on one machine with one number of threads. So a killed run that
  resumes samples what it would have sampled. Three rules make it so: every forward pass has the same shape, `slots`
  rows of one token, prompts included; attention is summed in blocks of fixed size; every row draws its random numbers
  from its own seed and position.
- All that touches the model happens in one thread of its own; asyncio futures lead outward, to any event loop.
- The model belongs to the engine: the trainer's weights come in by `load`.

A prompt takes the same path as what is sampled after it. So keys and values outlive a row's time in its slot: the next
turn, or another sample of the same problem, begins where a context that was computed ends or branches off, with the
same bits as from nothing. Those used last are kept, as many positions as the slots have.

Letters: S slots, B blocks, N of them in use, K key heads, G query heads for each, D of a head, V vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import logging
import math
import queue
import re
import threading
import warnings
from bisect import bisect, bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.functional import threshold
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.cache_utils import Cache

from trainer.engines.vllm_client import Capacity, EngineFailed, Generation, Sampling, TurnFailed

log = logging.getLogger(__name__)

log = logging.getLogger(__name__)

ATTENTION = "rstar_slots"
BLOCK = 64
"""Positions in one block of attention."""
FAINTEST = -80.0
"""Of a weight's logarithm, the largest being 0: what is fainter weighs nothing."""
NOWHERE = -1e9
SAMPLED = -1  # where an id is not given
KEEP_ALL = 2.0  # a top-p that drops nothing, however a sum rounds
DEPRECATIONS = (DeprecationWarning, FutureWarning, PendingDeprecationWarning)

Answer = Future[None]
T = TypeVar("T")


class LocalEngine:
    """Continuous batching over `slots` rows of at most `max_length` tokens. It starts its thread; `close` ends it."""

    def __init__(self, model: Any, *, name: str = "local", slots: int = 64, max_length: int = 1024) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"expected a model whose layers all attend to everything, got {sorted(kinds)}; use vLLM")
        self.name = name
        self.version = 0
        self.slots = slots
        self.max_length = max_length
        self.tokens = 0
        """Positions computed so far, prompts included."""
        self._model = model.eval().requires_grad_(False)
        self._model.set_attn_implementation(ATTENTION)
        # The cache's argument of `forward` is named `cache` since transformers 5.24.
        takes_cache = "cache" in inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if takes_cache else "past_key_values"
        self._cache = _SlotCache(slots, max_length)
        self._kept = _Kept(slots * max_length)
        self._running: dict[int, _Row] = {}
        self._free = list(range(slots))
        self._waiting: deque[_Row] = deque()
        self._inbox: queue.SimpleQueue[tuple[Answer, Callable[[], object]]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"engine-{name}", daemon=True)
        self._thread.start()

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `ids`. Raises `EngineFailed` once it has failed or is closed, `TurnFailed` where a logit is no
        number, `ValueError` for a wrong request."""
        if sampling.max_tokens < 1:
            raise ValueError(f"expected max_tokens of at least 1, got {sampling.max_tokens}")
        row = _Row(self._checked(ids, sampling.max_tokens), len(ids), sampling)
        await self._ask(row.answer, lambda: self._waiting.append(row))
        sampled = tuple(row.ids[row.prompt :])
        is_stopped = sampled[-1:] != () and sampled[-1] in sampling.stop_ids
        return Generation(sampled, tuple(row.logprobs), is_stopped, self.name, self.version, not row.is_over)

    async def interrupt(self, requests: Collection[str]) -> None:
        """Have these requests answered with what there is. Asked again for what is missing, it samples the same."""
        names = frozenset(requests)

        def interrupt() -> None:
            for row in [*self._running.values(), *self._waiting]:
                if row.sampling and row.sampling.request in names:
                    _end(row.answer)
            _end(done)

        await self._ask(done := Answer(), interrupt)

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Of `ids[1:]`, each given what stands before it, at temperature 1."""
        row = _Row(self._checked(ids, 0), len(ids), None)
        if not row.is_over:
            await self._ask(row.answer, lambda: self._waiting.append(row))
        return row.logprobs

    async def load(self, weights: Mapping[str, Any] | Path, version: int) -> None:
        """Take over a state dict's tensors (copied) or a saved model's. Nothing may be generating."""
        if not isinstance(weights, Mapping):
            path, dtype = weights, self._model.dtype
            weights = log_deprecations(lambda: AutoModelForCausalLM.from_pretrained(path, dtype=dtype)).state_dict()

        def load() -> None:
            self._drop()  # what was cancelled before is no hindrance
            if count := len(self._running) + len(self._waiting):
                _end(done, RuntimeError(f"expected an idle engine to load, got {count} requests; await them"))
                return
            self._model.load_state_dict(weights)
            self._kept = _Kept(self._kept.room)
            self.version = version
            _end(done)

        await self._ask(done := Answer(), load)

    async def capacity(self) -> Capacity:
        return Capacity(self.slots * self.max_length, self.slots)

    async def gauge(self) -> None:
        """Nothing that its caller does not know: every running row has its room."""

    async def close(self) -> None:
        """End the thread after its current step. What still waits fails."""

        def close() -> None:
            raise EngineFailed("it is closed")

        self._inbox.put((Answer(), close))
        await asyncio.to_thread(self._thread.join)

    def _checked(self, ids: Sequence[int], more: int) -> list[int]:
        if not 0 < len(ids) <= self.max_length - more:
            raise ValueError(f"expected 1 to {self.max_length} tokens in all, got {len(ids)} ids and {more} to come")
        if not 0 <= min(ids) <= max(ids) < self._model.config.vocab_size:
            raise ValueError(f"expected ids below {self._model.config.vocab_size}, got {min(ids)} to {max(ids)}")
        return list(ids)

    async def _ask(self, answer: Answer, do: Callable[[], object]) -> None:
        """Have the thread do something between two steps, and wait for what comes of it."""
        self._inbox.put((answer, do))
        if self._failure is not None:  # after the put: this sees that the thread has ended, or the thread sees the job
            raise EngineFailed(f"engine {self.name} ended before: {self._failure}") from self._failure
        await asyncio.wrap_future(answer)

    # What follows runs in the engine's thread.

    def _work(self) -> None:
        asked = Answer()
        try:
            with torch.inference_mode():
                while True:
                    while not self._inbox.empty() or not (self._running or self._waiting):
                        asked, do = self._inbox.get()
                        do()
                    self._drop()
                    while self._waiting and self._free:
                        self._seat(self._waiting.popleft())
                    if self._running:
                        self._step()
        except BaseException as why:  # the thread's end: whoever waits must hear of it
            self._failure = why
        left = [asked, *(row.answer for row in (*self._running.values(), *self._waiting))]
        while not self._inbox.empty():
            left.append(self._inbox.get()[0])
        for answer in left:
            _end(answer, EngineFailed(f"engine {self.name} failed: {self._failure!r}"))

    def _drop(self) -> None:
        """What is answered, or nobody waits for any more."""
        self._waiting = deque(row for row in self._waiting if not row.answer.done())
        for slot in [slot for slot, row in self._running.items() if row.answer.done()]:
            self._release(slot)

    def _seat(self, row: _Row) -> None:
        slot = self._free.pop()
        self._running[slot] = row
        if row.sampling:  # scores need all positions
            held, states = self._kept.longest(row.ids)
            row.done = min(held, len(row.ids) - 1)  # what comes after the last id is asked: it is computed again
            if states is not None:
                self._cache.write(slot, states)

    def _release(self, slot: int, *, is_broken: bool = False) -> None:
        row = self._running.pop(slot)
        self._free.append(slot)
        if is_broken:
            self._cache.clear(slot)  # a mask does not hide NaN from the next row
        elif row.sampling and row.done:
            self._kept.keep(row.ids[: row.done], self._cache.read(slot, row.done))

    def _step(self) -> None:
        """One token of every running row. Idle ones compute too, at their first position, which nobody reads."""
        tokens, positions = [0] * self.slots, [0] * self.slots
        for slot, row in self._running.items():
            tokens[slot], positions[slot] = row.ids[row.done], row.done
        logits_SV = self._forward(torch.tensor(tokens), torch.tensor(positions))
        self.tokens += len(self._running)
        ids, logprobs = _choose(logits_SV, self._running)
        for slot, row in list(self._running.items()):
            if not math.isfinite(logprobs[slot]):
                self._release(slot, is_broken=True)
                said = f"engine {self.name}: expected finite logits, got others at position {row.done}"
                _end(row.answer, TurnFailed(f"{said}; if it happens often, look at the weights of the last sync"))
                continue
            row.done += 1
            if row.sampling is None or row.done == len(row.ids):
                row.logprobs.append(logprobs[slot])
            if row.done == len(row.ids):
                row.ids.append(ids[slot])
            if row.is_over:
                self._release(slot)
                _end(row.answer)

    def _forward(self, tokens_S: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
        inputs = {
            "input_ids": tokens_S[:, None],
            "position_ids": positions_S[:, None],
            "attention_mask": self._cache.aim(positions_S)[None],
            self._cache_argument: self._cache,
        }
        output = log_deprecations(lambda: self._model(**inputs, use_cache=True))
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


def log_deprecations(function: Callable[[], T]) -> T:
    """Call `function`. Where warnings are errors (`-W error`), log each deprecation that it raises, ignore it from then
    on, and call `function` again, which must therefore be safe to repeat."""
    ignored: set[str] = set()
    while True:
        try:
            return function()
        except DEPRECATIONS as why:
            if str(why) in ignored:  # it is raised as an exception, not by `warnings.warn`
                raise
            ignored.add(str(why))
            log.warning("%s: %s", type(why).__name__, why)
            warnings.filterwarnings("ignore", re.escape(str(why)), type(why))


@dataclass(slots=True, eq=False)
class _Row:
    """One request: `ids`, what has been sampled included, of which the cache holds the first `done`."""

    ids: list[int]
    prompt: int
    sampling: Sampling | None
    """None scores `ids` instead of continuing them."""
    done: int = 0
    logprobs: list[float] = field(default_factory=list)
    answer: Answer = field(default_factory=Answer)
    """Comes once the row is over, or as far as it shall go."""

    @property
    def is_over(self) -> bool:
        if self.sampling is None:
            return self.done >= self.prompt - 1
        sampled = len(self.ids) - self.prompt
        return sampled > 0 and (sampled == self.sampling.max_tokens or self.ids[-1] in self.sampling.stop_ids)


def _end(answer: Answer, error: Exception | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        answer.set_exception(error) if error else answer.set_result(None)


def _choose(logits_SV: torch.Tensor, rows: Mapping[int, _Row]) -> tuple[list[int], list[float]]:
    """The next id of every slot and its log-probability: sampled, or what stands there for scores."""
    slots = logits_SV.shape[0]
    temperature, top_p, uniform, given = [1.0] * slots, [KEEP_ALL] * slots, [0.0] * slots, [SAMPLED] * slots
    for slot, row in rows.items():
        if row.sampling is None:
            given[slot] = row.ids[row.done + 1]
        else:
            temperature[slot] = row.sampling.temperature
            top_p[slot] = row.sampling.top_p if row.sampling.top_p < 1 else KEEP_ALL
            uniform[slot] = _uniform(row.sampling.seed or 0, len(row.ids))
    logits_SV = logits_SV / torch.tensor(temperature)[:, None]
    if min(top_p) < 1:
        logits_SV = _nucleus(logits_SV, torch.tensor(top_p))
    logprobs_SV = logits_SV.log_softmax(-1)
    cumulative_SV = logprobs_SV.double().exp().cumsum(-1)
    target_S = torch.tensor(uniform, dtype=torch.double) * cumulative_SV[:, -1]
    sampled_S = torch.searchsorted(cumulative_SV, target_S[:, None], right=True)[:, 0]
    given_S = torch.tensor(given)
    ids_S = torch.where(given_S == SAMPLED, sampled_S, given_S)
    # A logit that is not a number makes every log-probability of its row one, and the id one past the end.
    chosen_S = logprobs_SV.gather(-1, ids_S.clamp(max=logprobs_SV.shape[1] - 1)[:, None])[:, 0]
    return ids_S.tolist(), chosen_S.tolist()


def _nucleus(logits_SV: torch.Tensor, top_p_S: torch.Tensor) -> torch.Tensor:
    """Without what is outside the smallest set of likeliest ids that holds `top_p` of the probability."""
    ordered_SV, order_SV = logits_SV.softmax(-1).sort(dim=-1, descending=True, stable=True)
    is_outside_SV = ordered_SV.cumsum(-1) - ordered_SV >= top_p_S[:, None]
    return logits_SV.masked_fill(is_outside_SV.scatter(-1, order_SV, is_outside_SV), -torch.inf)


def _uniform(seed: int, position: int) -> float:
    """In [0, 1), with 40 bits: times a sum of probabilities in double precision it stays below the sum."""
    return int.from_bytes(hashlib.blake2b(b"%d:%d" % (seed, position), digest_size=5).digest()) / 2**40


class _SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of all slots, each at its own position: for each layer [2, B, S, K, D, BLOCK]."""

    def __init__(self, slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self._slots, self._blocks = torch.arange(slots), max_length // BLOCK + 1
        self._layers: dict[int, torch.Tensor] = {}

    def aim(self, positions_S: torch.Tensor) -> torch.Tensor:
        """Where the next pass writes. Returns 0 where it attends, else `NOWHERE`: [N, S, BLOCK]."""
        self._block_S, self._offset_S = positions_S // BLOCK, positions_S % BLOCK
        self._used = int(self._block_S.max()) + 1
        is_ahead = torch.arange(self._used * BLOCK).view(self._used, 1, BLOCK) > positions_S[:, None]
        return torch.zeros(is_ahead.shape).masked_fill_(is_ahead, NOWHERE)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.stack((key_states, value_states), 1)[:, :, :, 0]  # [S, 2, K, D]
        if layer_idx not in self._layers:
            slots, _, heads, size = states.shape
            self._layers[layer_idx] = states.new_zeros(2, self._blocks, slots, heads, size, BLOCK)
        held = self._layers[layer_idx]
        held[:, self._block_S, self._slots, :, :, self._offset_S] = states
        return held[0, : self._used], held[1, : self._used]

    def clear(self, slot: int) -> None:
        for held in self._layers.values():
            held[:, :, slot] = 0

    def read(self, slot: int, positions: int) -> list[torch.Tensor]:
        """A copy of a slot's first `positions`, and of what is after them in their last block."""
        return [held[:, : -(-positions // BLOCK), slot].clone() for held in self._layers.values()]

    def write(self, slot: int, states: Sequence[torch.Tensor]) -> None:
        for held, theirs in zip(self._layers.values(), states, strict=True):
            held[:, : theirs.shape[1], slot] = theirs


class _Kept:
    """States of contexts by their ids, those used last: about `room` positions in all."""

    def __init__(self, room: int) -> None:
        self.room = self._free = room
        self._states: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._sorted: list[tuple[int, ...]] = []
        """The keys in order: what begins most like a context stands beside it."""

    def keep(self, ids: Sequence[int], states: list[torch.Tensor]) -> None:
        ids = tuple(ids)
        at = bisect(self._sorted, ids)
        if at and self._sorted[at - 1] == ids[: len(self._sorted[at - 1])]:  # all of it is in the new one
            self._drop(self._sorted[at - 1])
        insort(self._sorted, ids)
        self._states[ids] = states
        self._free -= _size(states)
        while self._free < 0:
            self._drop(next(iter(self._states)))

    def _drop(self, ids: tuple[int, ...]) -> None:
        self._free += _size(self._states.pop(ids))
        del self._sorted[bisect_left(self._sorted, ids)]

    def longest(self, ids: Sequence[int]) -> tuple[int, list[torch.Tensor] | None]:
        """How many ids at the start are those of a context, and its states."""
        at = bisect(self._sorted, tuple(ids))
        near = self._sorted[max(at - 1, 0) : at + 1]
        common, best = max(((_common(ids, other), other) for other in near), default=(0, ()))
        if not common:
            return 0, None
        self._states[best] = states = self._states.pop(best)
        return common, states


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _size(states: Sequence[torch.Tensor]) -> int:
    return int(states[0].shape[1]) * BLOCK


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one token per slot. A block in which a row has nothing adds exact zeros, so changes no bit."""
    used, slots, key_heads, size, _ = key.shape
    query_SKGD = query.reshape(slots, key_heads, -1, size) * scaling
    scores = attention_mask.view(used, slots, 1, 1, BLOCK) + query_SKGD @ key
    # Where exp comes to less than a normal number, or to none, it takes ten times as long.
    weights = (scores - scores.amax(-1, keepdim=True).amax(0)).clamp_(min=FAINTEST).exp_()
    weights = threshold(weights, 2 * math.exp(FAINTEST), 0.0)
    total = sum(weights.sum(-1, keepdim=True))
    output_SKGD = sum(weights @ value.transpose(-1, -2)) / total
    return output_SKGD.reshape(slots, 1, -1, size), None


AttentionInterface.register(ATTENTION, _attend)
