"""An engine inside this process: a transformers model that decodes many rows at once, for runs on a CPU.

Invariants:
- The same (weights, ids, sampling.seed) gives the same tokens and log-probabilities, bit for bit, whatever shares the
  batch, whichever slot it gets and whenever it comes, on one machine with one number of threads. So a killed run that
  resumes samples what it would have sampled. Three rules make it so: every forward pass has the same shape, `slots`
  rows of one token, prompts included; attention is summed in blocks of fixed size; every row draws its random numbers
  from its own seed and position.
- All that touches the model happens in one thread of its own; asyncio futures lead outward, to any event loop.
- The model belongs to the engine: the trainer's weights come in by `load`.

A prompt takes the same path as what is sampled after it. So a slot's keys and values can be kept while a tool runs, and
the next turn begins where the last one ended, with the same bits as from nothing.

Letters: S slots, L positions, H query heads, K key heads, D of a head, V vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.cache_utils import Cache

from trainer.engine import Capacity, EngineFailed, Generation, Sampling

ATTENTION = "rstar_slots"
BLOCK = 64
"""Positions in one block of attention."""
SAMPLED, LIKELIEST = -1, -2  # how an id is chosen where it is not given
KEEP_ALL = 2.0  # a top-p that drops nothing, however a sum rounds


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
        self._cache = _SlotCache(slots, max_length)
        self._running: dict[int, _Row] = {}
        self._free: dict[int, list[int]] = {slot: [] for slot in range(slots)}
        """What each holds, the one that was free longest first."""
        self._waiting: deque[_Row] = deque()
        self._inbox: queue.SimpleQueue[_Row | _Task | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"engine-{name}", daemon=True)
        self._thread.start()

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `ids`. Raises `EngineFailed` once it has failed or is closed, `ValueError` for a wrong request."""
        if sampling.max_tokens < 1:
            raise ValueError(f"expected max_tokens of at least 1, got {sampling.max_tokens}")
        row = _Row(self._checked(ids, sampling.max_tokens), len(ids), sampling)
        await self._answer(row)
        sampled = tuple(row.ids[row.prompt :])
        is_stopped = sampled[-1:] != () and sampled[-1] in sampling.stop_ids
        return Generation(sampled, tuple(row.logprobs), is_stopped, self.name, self.version, not row.is_over)

    async def interrupt(self, requests: Collection[str]) -> None:
        """Have these requests answered with what there is. Asked again for what is missing, it samples the same."""
        names = frozenset(requests)

        def interrupt() -> None:
            for row in [*self._running.values(), *self._waiting]:
                if row.sampling and row.sampling.request in names:
                    _settle(row)

        await self._answer(_Task(interrupt))

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Of `ids[1:]`, each given what stands before it, at temperature 1."""
        row = _Row(self._checked(ids, 0), len(ids), None)
        if not row.is_over:
            await self._answer(row)
        return row.logprobs

    async def load(self, weights: Mapping[str, Any] | Path, version: int) -> None:
        """Take over a state dict's tensors (copied) or a saved model's. Nothing may be generating."""
        if not isinstance(weights, Mapping):
            weights = AutoModelForCausalLM.from_pretrained(weights, dtype=self._model.dtype).state_dict()

        def load() -> Exception | None:
            if self._running or self._waiting:
                return RuntimeError(f"expected an idle engine to load, got {len(self._running)} running; await them")
            self._model.load_state_dict(weights)
            self._free = {slot: [] for slot in self._free}
            self.version = version
            return None

        await self._answer(_Task(load))

    async def capacity(self) -> Capacity:
        return Capacity(self.slots * self.max_length, self.slots)

    async def gauge(self) -> None:
        """Nothing that its caller does not know: every running row has its room."""

    async def close(self) -> None:
        """End the thread after its current step. What still waits fails."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _checked(self, ids: Sequence[int], more: int) -> list[int]:
        if not 0 < len(ids) <= self.max_length - more:
            raise ValueError(f"expected 1 to {self.max_length} tokens in all, got {len(ids)} ids and {more} to come")
        if not 0 <= min(ids) <= max(ids) < self._model.config.vocab_size:
            raise ValueError(f"expected ids below {self._model.config.vocab_size}, got {min(ids)} to {max(ids)}")
        return list(ids)

    async def _answer(self, job: _Row | _Task) -> None:
        self._inbox.put(job)
        if self._failure is not None:  # after the put: this sees that the thread has ended, or the thread sees the job
            raise EngineFailed(f"engine {self.name} ended before: {self._failure}") from self._failure
        await asyncio.wrap_future(job.future)

    # What follows runs in the engine's thread.

    def _work(self) -> None:
        failure: BaseException = EngineFailed(f"engine {self.name} is closed")
        try:
            with torch.inference_mode():
                while self._take():
                    if self._running:
                        self._step()
        except BaseException as error:  # the thread's end: whoever waits must hear of it
            failure = error
        self._failure = failure
        left: list[_Row | _Task] = [*self._running.values(), *self._waiting]
        while not self._inbox.empty():
            left += [job for job in [self._inbox.get()] if job is not None]
        for job in left:
            _settle(job, EngineFailed(f"engine {self.name} failed: {failure!r}"))

    def _take(self) -> bool:
        """Take what has come, waiting for it when there is nothing to do. False once the engine is closed."""
        while not self._inbox.empty() or not (self._running or self._waiting):
            match self._inbox.get():
                case None:
                    return False
                case _Task() as task:
                    _settle(task, task.run())
                case row:
                    self._waiting.append(row)
        for slot in [slot for slot, row in self._running.items() if row.future.done()]:
            self._release(slot)
        while self._waiting and self._free:
            self._seat(self._waiting.popleft())
        return True

    def _seat(self, row: _Row) -> None:
        """Into the free slot that holds most of its ids, else into the one that was free longest."""
        if row.future.done():
            return
        held, slot = max(
            ((len(ids), slot) for slot, ids in self._free.items() if ids and ids == row.ids[: len(ids)]),
            default=(0, next(iter(self._free))),
        )
        del self._free[slot]
        # The last id is computed again even where it is held: what comes after it is asked. Scores need them all.
        row.done = min(held, len(row.ids) - 1) if row.sampling else 0
        self._running[slot] = row

    def _release(self, slot: int) -> None:
        row = self._running.pop(slot)
        self._free[slot] = row.ids[: row.done]

    def _step(self) -> None:
        """One token of every running row. Idle rows compute too, after the end of what they hold."""
        tokens = [0] * self.slots
        positions = [0] * self.slots
        for slot, held in self._free.items():
            positions[slot] = len(held)
        for slot, row in self._running.items():
            tokens[slot], positions[slot] = row.ids[row.done], row.done
        logits_SV = self._forward(torch.tensor(tokens), torch.tensor(positions))
        self.tokens += len(self._running)
        ids, logprobs = _choose(logits_SV, self._running)
        for slot, row in list(self._running.items()):
            row.done += 1
            if row.sampling is None or row.done == len(row.ids):
                row.logprobs.append(logprobs[slot])
            if row.done == len(row.ids):
                row.ids.append(ids[slot])
            if row.is_over:
                self._release(slot)
                _settle(row)

    def _forward(self, tokens_S: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
        mask_SL = self._cache.aim(positions_S).to(self._model.dtype)
        output = self._model(
            input_ids=tokens_S[:, None],
            position_ids=positions_S[:, None],
            attention_mask=mask_SL[:, None, None, :],
            past_key_values=self._cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


@dataclass(slots=True, eq=False)
class _Row:
    """One request: `ids`, what has been sampled included, of which the cache holds the first `done`."""

    ids: list[int]
    prompt: int
    sampling: Sampling | None
    """None scores `ids` instead of continuing them."""
    done: int = 0
    logprobs: list[float] = field(default_factory=list)
    future: Future[None] = field(default_factory=Future)
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        seed = self.sampling.seed if self.sampling else 0
        self.seed = secrets.randbits(63) if seed is None else seed

    @property
    def is_over(self) -> bool:
        if self.sampling is None:
            return self.done >= self.prompt - 1
        sampled = len(self.ids) - self.prompt
        return sampled > 0 and (sampled == self.sampling.max_tokens or self.ids[-1] in self.sampling.stop_ids)


@dataclass(slots=True, eq=False)
class _Task:
    """Something else to do in the engine's thread."""

    run: Callable[[], Exception | None]
    future: Future[None] = field(default_factory=Future)


def _settle(job: _Row | _Task, error: Exception | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        job.future.set_exception(error) if error else job.future.set_result(None)


def _choose(logits_SV: torch.Tensor, rows: Mapping[int, _Row]) -> tuple[list[int], list[float]]:
    """The next id of every slot and its log-probability: sampled, likeliest, or what stands there for scores."""
    slots = logits_SV.shape[0]
    temperature, top_p, uniform, given = [1.0] * slots, [KEEP_ALL] * slots, [0.0] * slots, [SAMPLED] * slots
    for slot, row in rows.items():
        if row.sampling is None:
            given[slot] = row.ids[row.done + 1]
        elif row.sampling.temperature == 0:
            given[slot] = LIKELIEST
        else:
            temperature[slot] = row.sampling.temperature
            top_p[slot] = row.sampling.top_p if row.sampling.top_p < 1 else KEEP_ALL
            uniform[slot] = _uniform(row.seed, len(row.ids))
    logits_SV = logits_SV / torch.tensor(temperature)[:, None]
    if min(top_p) < 1:
        logits_SV = _nucleus(logits_SV, torch.tensor(top_p))
    logprobs_SV = logits_SV.log_softmax(-1)
    cumulative_SV = logprobs_SV.double().exp().cumsum(-1)
    target_S = torch.tensor(uniform, dtype=torch.double) * cumulative_SV[:, -1]
    sampled_S = torch.searchsorted(cumulative_SV, target_S[:, None], right=True)[:, 0]
    given_S = torch.tensor(given)
    if LIKELIEST in given:
        given_S = torch.where(given_S == LIKELIEST, logits_SV.argmax(-1), given_S)
    ids_S = torch.where(given_S == SAMPLED, sampled_S, given_S)
    # A logit that is not a number makes every log-probability of its row one, and the id one past the end.
    chosen_S = logprobs_SV.gather(-1, ids_S.clamp(max=logprobs_SV.shape[1] - 1)[:, None])[:, 0]
    if not chosen_S.isfinite().all():
        raise FloatingPointError("expected finite logits, got others; look at the weights of the last sync")
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
    """Keys and values of all slots, each at its own position, as blocks: [L / BLOCK, S, K, BLOCK, D] in every layer."""

    def __init__(self, slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self._blocks = max_length // BLOCK + 1
        self._rows_S = torch.arange(slots)
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def aim(self, positions_S: torch.Tensor) -> torch.Tensor:
        """Where the next pass writes. Returns 0 where it attends, else -inf, up to the end of the last used block."""
        self._block_S, self._offset_S = positions_S // BLOCK, positions_S % BLOCK
        self._used = int(self._block_S.max()) + 1
        is_ahead_SL = torch.arange(self._used * BLOCK) > positions_S[:, None]
        return torch.zeros(is_ahead_SL.shape).masked_fill(is_ahead_SL, -torch.inf)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._put(self._keys, key_states, layer_idx), self._put(self._values, value_states, layer_idx)

    def _put(self, held: dict[int, torch.Tensor], states_SK1D: torch.Tensor, layer: int) -> torch.Tensor:
        if layer not in held:
            slots, heads, _, size = states_SK1D.shape
            held[layer] = states_SK1D.new_zeros(self._blocks, slots, heads, BLOCK, size)
        held[layer][self._block_S, self._rows_S, :, self._offset_S] = states_SK1D[:, :, 0]
        return held[layer][: self._used]


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
    slots, heads, _, size = query.shape
    used, key_heads = key.shape[0], key.shape[2]
    query_SKGD = query.reshape(slots, key_heads, heads // key_heads, size)
    mask = attention_mask.reshape(slots, used, 1, 1, BLOCK).transpose(0, 1)
    scores = mask + query_SKGD @ key.transpose(-1, -2) * scaling
    weights = (scores - scores.amax((0, -1), keepdim=True)).exp()
    total = sum(weights.sum(-1, keepdim=True))
    output_SKGD = sum(weights @ value) / total
    return output_SKGD.reshape(slots, 1, heads, size), None


AttentionInterface.register(ATTENTION, _attend)
