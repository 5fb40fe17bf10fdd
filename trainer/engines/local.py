"""An engine inside this process: a transformers model that decodes many rows at once, on a CPU or on one GPU.

Invariants:
- On a CPU with a fixed number of threads, equal (weights, ids, seed) give tokens and log-probabilities that are equal
  bit for bit, whatever else is in the batch. So a resumed run samples what the killed run would have sampled. On other
  devices they are equal except for rounding, since the kernels there depend on the number of rows.
- Only the engine's own thread touches the model. Callers await futures, from any event loop.
- The engine owns the model: `load_weights` copies the trainer's weights into it.

A *slot* holds the keys and values of one request at a time. A forward pass has a row for each token that it computes:
one for each request that samples, and many for a prompt. Three rules ensure the first invariant:
- The number of rows is a multiple of `ROWS_PER_THREAD` times the number of threads. The kernels of MKL and oneDNN then
  compute each row in the same way, whatever the number of rows. `tests/trainer/engines/test_local.py` checks this.
- Attention has the same property (`trainer.engines.local_attention`). Experts are computed for each row on its own.
- Each request draws its random numbers from its own seed and position.

So a token has the same keys and values whether it was sampled or is part of a prompt, and they can be used for another
request that begins with the same ids: the next turn, or another sample of the same problem. `PrefixCache` keeps them.
Of several prompts that begin with the same ids, one is computed first, and the others continue from its keys and
values.

Suffixes of names of tensors give their dimensions: R rows, V vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from trainer.engines.engine import (
    LIVENESS_IDS,
    EngineCapacity,
    EngineError,
    Generation,
    SamplingParams,
    TurnError,
    Weights,
)
from trainer.engines.local_attention import ATTENTION_NAME, LENGTH_MULTIPLE, Chunk, PrefixCache, SlotCache, round_up

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPERTS_NAME = "batched_mm"
ROWS_PER_THREAD = 4
"""The number of rows of a pass is a multiple of this number times the number of threads. The matrix products of MKL
divide the rows among the threads. If rows remain, another kernel computes them, and it rounds differently."""
MAX_PROMPT_ROWS = 512
"""Tokens of prompts in one pass. More are not computed faster, and requests that sample wait for them."""
MAX_LARGE_ROWS = 64
"""Tokens of scoring requests in one pass, which need a row of logits each, and tokens of prompts of a mixture of
experts, whose rows have copies of their experts' weights."""
UNUSED_MASK = torch.zeros(1, 1, 1, 1)
"""transformers passes a mask of four dimensions to the attention, which has masks of its own."""
SHARED_IDS = 32
"""A prompt whose next ids are those of another prompt waits until the other one has computed them."""
TOP_P_DISABLED = 2.0
"""A top-p that keeps every id. It is well above 1, since the probabilities may sum to slightly more than 1."""


class LocalEngine:
    """Continuous batching over `max_num_seqs` slots of at most `max_model_len` tokens, on the device of the model. The
    constructor starts the engine's thread, and `close` ends it.

    All slots together have at most `max_positions` positions, which take at most `max_cache_bytes`. Requests wait if
    they would exceed this. Devices other than the CPU have fewer slots instead, since their slots take their memory at
    once. The constructor raises `ValueError` if not even one request of `max_model_len` tokens fits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str = "local",
        max_num_seqs: int = 64,
        max_model_len: int = 1024,
        max_cache_bytes: float = math.inf,
    ) -> None:
        layer_types = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if layer_types != {"full_attention"}:
            raise ValueError(f"expected a model with full attention in all layers, got {sorted(layer_types)}; use vLLM")
        window = None if getattr(model.config, "layer_types", None) else getattr(model.config, "sliding_window", None)
        if window and window < max_model_len:
            raise ValueError(
                f"expected max_model_len={max_model_len} to be at most the model's sliding window of {window}; lower "
                "engines.max_model_len, or use vLLM"
            )
        self.name = name
        self.weight_version = 0
        self.max_model_len = max_model_len
        self.computed_positions = 0
        """Positions computed so far, prompts included."""
        self._model = model.eval().requires_grad_(False)
        self._device = model.device
        self._model.set_attn_implementation(ATTENTION_NAME)
        # One product per row and expert, so a row's result does not depend on the experts of other rows.
        self._model.set_experts_implementation(EXPERTS_NAME)
        has_experts = any(name.endswith(".experts") for name, _ in model.named_modules())
        if has_experts and model.config._experts_implementation != EXPERTS_NAME:
            raise ValueError(f"expected experts that transformers can run by {EXPERTS_NAME!r}, got others; use vLLM")
        # transformers 5.24 renamed the cache argument of `forward` to `cache`.
        takes_cache = "cache" in inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if takes_cache else "past_key_values"
        self._max_prompt_rows = MAX_LARGE_ROWS if has_experts else MAX_PROMPT_ROWS
        self._row_multiple = ROWS_PER_THREAD * torch.get_num_threads()
        position_bytes = _bytes_per_position(model)
        affordable_positions = max_cache_bytes / position_bytes
        is_lazy = self._device.type == "cpu"
        slot_positions = max_model_len if is_lazy else round_up(max_model_len, LENGTH_MULTIPLE)
        if affordable_positions < slot_positions:
            raise ValueError(
                f"expected memory for the keys and values of max_model_len={max_model_len} tokens, "
                f"{slot_positions * position_bytes / 1e9:.1f} GB, got {max_cache_bytes / 1e9:.1f} GB; lower "
                "engines.max_model_len"
            )
        self.max_num_seqs = max_num_seqs if is_lazy else int(min(max_num_seqs, affordable_positions // slot_positions))
        self.max_positions = int(min(self.max_num_seqs * max_model_len, affordable_positions))
        query_group_size = model.config.num_attention_heads // model.config.num_key_value_heads
        self._cache = SlotCache(self.max_num_seqs, max_model_len, query_group_size, self._device)
        self._reserved_positions = [0] * self.max_num_seqs
        """For each slot, the positions of its longest request so far."""
        self._prefix_cache = PrefixCache(self.max_positions)
        self._running: dict[int, _LocalRequest] = {}
        self._free_slots = list(range(self.max_num_seqs))
        self._waiting: deque[_LocalRequest] = deque()
        self._inbox: queue.SimpleQueue[tuple[Future[None], Callable[[], object]]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._thread_main, name=f"engine-{name}", daemon=True)
        self._thread.start()

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue `ids`.

        Raises `EngineError` if the engine has failed or is closed, `TurnError` if a logit is not finite (no id can then
        be sampled), and `ValueError` for an invalid request.
        """
        if sampling.max_tokens < 1:
            raise ValueError(f"expected max_tokens of at least 1, got {sampling.max_tokens}")
        request = _LocalRequest(self._validated(ids, sampling.max_tokens), len(ids), sampling)
        await self._submit(request.finished, lambda: self._waiting.append(request))
        sampled = tuple(request.ids[request.prompt_length :])
        has_stop_token = sampled[-1] in sampling.stop_ids
        return Generation(sampled, tuple(request.logprobs), has_stop_token, self.name, self.weight_version)

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of `ids[1:]` given the ids before it, at temperature 1."""
        request = _LocalRequest(self._validated(ids, 0), len(ids), None)
        if not request.is_complete:
            await self._submit(request.finished, lambda: self._waiting.append(request))
        return request.logprobs

    async def check_alive(self) -> None:
        """Raises `EngineError`."""
        await self.logprobs(LIVENESS_IDS)

    check_weights = check_alive  # an engine in this process cannot lose its weights

    async def load_weights(self, weights: Weights | Path, version: int) -> None:
        """Copy a state dict's tensors, or load a saved model. Raises `RuntimeError` while requests are in flight."""
        if not isinstance(weights, Mapping):
            weights = AutoModelForCausalLM.from_pretrained(weights, dtype=self._model.dtype).state_dict()

        done: Future[None] = Future()

        def load() -> None:
            self._discard_finished()
            if count := len(self._running) + len(self._waiting):
                _resolve(
                    done, RuntimeError(f"expected an idle engine to load weights, got {count} requests; await them")
                )
                return
            self._model.load_state_dict(weights)
            self._prefix_cache = PrefixCache(self._prefix_cache.max_positions)
            self.weight_version = version
            _resolve(done)

        await self._submit(done, load)

    async def capacity(self) -> EngineCapacity:
        return EngineCapacity(self.max_positions, self.max_num_seqs)

    async def stats(self) -> None:
        """Return None: every running request has its own slot, so no request is preempted."""

    async def close(self) -> None:
        """End the thread after its current step. Unfinished requests raise `EngineError`."""

        def close() -> None:
            raise EngineError("it is closed")  # in the engine's thread, which ends with this error

        self._inbox.put((Future(), close))
        await asyncio.to_thread(self._thread.join)

    def _validated(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        if not 0 < len(ids) <= self.max_model_len - max_tokens:
            raise ValueError(
                f"expected 1 to {self.max_model_len} tokens in all, got {len(ids)} ids and max_tokens={max_tokens}"
            )
        if not 0 <= min(ids) <= max(ids) < self._model.config.vocab_size:
            raise ValueError(f"expected ids below {self._model.config.vocab_size}, got {min(ids)} to {max(ids)}")
        return list(ids)

    async def _submit(self, done: Future[None], job: Callable[[], object]) -> None:
        """Run `job` in the engine's thread between two decode steps, and wait until `done` is resolved."""
        self._inbox.put((done, job))
        # Checked after `put`: either the failure is found here, or the thread still takes the job and fails it.
        if self._failure is not None:
            raise EngineError(f"engine {self.name} has ended: {self._failure}") from self._failure
        await asyncio.wrap_future(done)

    # All methods below run in the engine's thread.

    def _thread_main(self) -> None:
        done: Future[None] = Future()
        try:
            with torch.inference_mode():
                while True:
                    while not self._inbox.empty() or not (self._running or self._waiting):
                        done, job = self._inbox.get()
                        job()
                    self._discard_finished()
                    while self._waiting and (slot := self._find_slot(self._waiting[0])) is not None:
                        self._free_slots.remove(slot)
                        self._running[slot] = self._waiting.popleft()
                    if self._running:
                        self._step()
        except BaseException as error:  # boundary: the thread ends, so all waiting callers must get the error
            self._failure = error
        pending = [done, *(request.finished for request in (*self._running.values(), *self._waiting))]
        while not self._inbox.empty():
            pending.append(self._inbox.get()[0])
        for future in pending:
            _resolve(future, EngineError(f"engine {self.name} failed: {self._failure!r}"))

    def _discard_finished(self) -> None:
        """Free the slots of cancelled requests, and remove such requests from the queue."""
        self._waiting = deque(request for request in self._waiting if not request.finished.done())
        for slot, request in list(self._running.items()):
            if request.finished.done():
                # The context of a prompt that was not completed may contain NaN, which only its last logits show.
                self._release(slot, keeps_context=request.num_missing <= 1)

    def _find_slot(self, request: _LocalRequest) -> int | None:
        """Return a free slot for a request, and reserve its positions there. None if no slot is free, or if the memory
        of the cache does not suffice: a slot keeps the memory of its longest request."""
        if not self._free_slots:
            return None
        reserved, wanted = self._reserved_positions, request.max_positions
        slot = min(self._free_slots, key=lambda slot: (reserved[slot] < wanted, abs(reserved[slot] - wanted)))
        if sum(reserved) - reserved[slot] + max(reserved[slot], wanted) > self.max_positions:
            if self._running:
                return None
            self._cache.free_memory()
            reserved[:] = [0] * len(reserved)
        reserved[slot] = max(reserved[slot], wanted)
        return slot

    def _release(self, slot: int, *, keeps_context: bool = True) -> None:
        """Free a slot. Its context is kept for requests that begin with the same ids, or cleared."""
        request = self._running.pop(slot)
        self._free_slots.append(slot)
        if not keeps_context:
            # A masked NaN would still make the next request's attention NaN.
            self._cache.clear(slot, self._reserved_positions[slot])
        elif request.sampling and request.num_computed:
            self._store_prefix(slot, request)

    def _store_prefix(self, slot: int, request: _LocalRequest) -> None:
        states = self._cache.read(slot, request.num_computed)
        self._prefix_cache.store(request.ids[: request.num_computed], states)

    def _restore_prefix(self, slot: int, request: _LocalRequest) -> None:
        """Take the keys and values of the longest cached prefix, if it is longer than what is computed."""
        num_cached, states = self._prefix_cache.longest_prefix(request.ids)
        num_cached = min(num_cached, len(request.ids) - 1)  # the last id's logits are needed
        if num_cached > request.num_computed:
            self._cache.write(slot, states, num_cached)
            request.num_computed = num_cached

    def _step(self) -> None:
        """Compute the next tokens of running requests, and sample an id for each request whose ids are all computed."""
        chunks, shared_slots = self._next_chunks()
        sampling_rows: dict[int, int] = {}
        """For each slot that samples, the row of its last token."""
        scored_chunks: list[Chunk] = []
        scored_rows: list[int] = []
        num_rows = 0
        for chunk in chunks:
            request = self._running[chunk.slot]
            if request.sampling is None:
                scored_chunks.append(chunk)
                scored_rows += range(num_rows, num_rows + chunk.num_tokens)
            elif chunk.num_tokens == request.num_missing:
                sampling_rows[chunk.slot] = num_rows + chunk.num_tokens - 1
            request.num_computed += chunk.num_tokens
            num_rows += chunk.num_tokens
        ids = [self._running[chunk.slot].ids[chunk.start : chunk.start + chunk.num_tokens] for chunk in chunks]
        logits_RV = self._forward(chunks, ids, [*sampling_rows.values(), *scored_rows])
        self.computed_positions += num_rows
        for slot in shared_slots:
            self._store_prefix(slot, self._running[slot])
        num_sampling = len(sampling_rows)
        requests = [self._running[slot] for slot in sampling_rows]
        for slot, id, logprob in zip(sampling_rows, *_sample_ids(logits_RV[:num_sampling], requests), strict=True):
            self._add_results(slot, [logprob], [id])
        scored_logits = logits_RV[num_sampling:].split([chunk.num_tokens for chunk in scored_chunks])
        for chunk, logits in zip(scored_chunks, scored_logits, strict=True):
            next_ids = self._running[chunk.slot].ids[chunk.start + 1 : chunk.start + chunk.num_tokens + 1]
            next_ids = torch.tensor(next_ids, device=self._device)
            logprobs = logits.log_softmax(-1).gather(-1, next_ids[:, None])[:, 0].tolist()
            self._add_results(chunk.slot, logprobs, [])

    def _next_chunks(self) -> tuple[list[Chunk], set[int]]:
        """Return what the next pass computes, in the order of the slots, and the slots whose context must then be
        stored, since other prompts continue it."""
        chunks: list[Chunk] = []
        rows_left = {True: self._max_prompt_rows, False: MAX_LARGE_ROWS}
        slots_by_ids: dict[tuple[int, ...], int] = {}
        shared_slots: set[int] = set()
        for slot, request in self._running.items():
            is_sampling = request.sampling is not None
            if is_sampling and request.num_missing > 1:
                self._restore_prefix(slot, request)
            num_tokens = request.num_missing
            if num_tokens > 1:
                next_ids = tuple(request.ids[: request.num_computed + SHARED_IDS])
                if is_sampling and next_ids in slots_by_ids:
                    shared_slots.add(slots_by_ids[next_ids])
                    continue
                num_tokens = min(num_tokens, rows_left[is_sampling])
                if not num_tokens:
                    continue
                rows_left[is_sampling] -= num_tokens
                if is_sampling:
                    slots_by_ids[next_ids] = slot
            chunks.append(Chunk(slot, request.num_computed, num_tokens))
        return sorted(chunks, key=lambda chunk: chunk.slot), shared_slots

    def _forward(
        self, chunks: Sequence[Chunk], chunk_ids: Sequence[Sequence[int]], logits_rows: Sequence[int]
    ) -> torch.Tensor:
        """Compute `chunks`, which have these ids. Return the logits of these rows."""
        ids = [id for ids_of_chunk in chunk_ids for id in ids_of_chunk]
        slot_groups = self._cache.prepare_pass(chunks, self._model.dtype)
        num_unused, num_unused_logits = -len(ids) % self._row_multiple, -len(logits_rows) % self._row_multiple
        inputs = {
            "input_ids": torch.tensor([[*ids, *[0] * num_unused]], device=self._device),
            "position_ids": pad(self._cache.positions_R, (0, num_unused))[None],
            "attention_mask": UNUSED_MASK,
            "logits_to_keep": torch.tensor(
                [*logits_rows, *[0] * num_unused_logits], dtype=torch.long, device=self._device
            ),
            self._cache_argument: self._cache,
        }
        logits_RV: torch.Tensor = self._model(**inputs, use_cache=True, slot_groups=slot_groups).logits[0]
        return logits_RV[: len(logits_rows)].float()

    def _add_results(self, slot: int, logprobs: Sequence[float], ids: Sequence[int]) -> None:
        """Add the results of a pass to the request in a slot: log-probabilities, and the id that was sampled. Finish
        the request if it is complete, or if a log-probability is not finite."""
        request = self._running[slot]
        if not all(map(math.isfinite, logprobs)):
            self._release(slot, keeps_context=False)
            message = f"engine {self.name}: expected finite logits, got others at position {request.num_computed - 1}"
            error = TurnError(f"{message}; if it happens often, check the weights of the last sync")
            _resolve(request.finished, error)
            return
        request.logprobs += logprobs
        request.ids += ids
        if request.is_complete:
            self._release(slot)
            _resolve(request.finished)


@dataclass(slots=True, eq=False)
class _LocalRequest:
    ids: list[int]
    """The prompt and the ids sampled so far."""
    prompt_length: int
    sampling: SamplingParams | None
    """How to continue `ids`. With None, the request scores `ids` and samples nothing."""
    num_computed: int = 0
    """Number of `ids` whose keys and values are in the cache."""
    logprobs: list[float] = field(default_factory=list)
    finished: Future[None] = field(default_factory=Future)
    """Resolved when the request is complete."""

    @property
    def max_positions(self) -> int:
        """The positions that the request may need."""
        return self.prompt_length + (self.sampling.max_tokens if self.sampling else 0)

    @property
    def num_missing(self) -> int:
        """Number of ids that must be computed before the next id is sampled or, in a scoring request, before the last
        id is scored."""
        return (len(self.ids) if self.sampling else self.prompt_length - 1) - self.num_computed

    @property
    def is_complete(self) -> bool:
        if self.sampling is None:
            return self.num_missing <= 0
        num_sampled = len(self.ids) - self.prompt_length
        return num_sampled > 0 and (num_sampled == self.sampling.max_tokens or self.ids[-1] in self.sampling.stop_ids)


def _bytes_per_position(model: PreTrainedModel) -> int:
    """Return the bytes of the keys and values of one position in all layers."""
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_size * model.dtype.itemsize)


def _resolve(future: Future[None], error: Exception | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # the caller has cancelled it
        future.set_exception(error) if error else future.set_result(None)


def _sample_ids(logits_RV: torch.Tensor, requests: Sequence[_LocalRequest]) -> tuple[list[int], list[float]]:
    """Return the next id of each request, and the log-probability of this id."""
    settings = [request.sampling or SamplingParams(1) for request in requests]
    device = logits_RV.device
    logits_RV = logits_RV / torch.tensor([sampling.temperature for sampling in settings], device=device)[:, None]
    if any(sampling.top_p < 1 for sampling in settings):
        top_p = [sampling.top_p if sampling.top_p < 1 else TOP_P_DISABLED for sampling in settings]
        logits_RV = _apply_top_p(logits_RV, torch.tensor(top_p, device=device))
    logprobs_RV = logits_RV.log_softmax(-1)
    cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
    uniform = [
        _seeded_uniform(sampling.seed or 0, len(request.ids))
        for sampling, request in zip(settings, requests, strict=True)
    ]
    target_R = torch.tensor(uniform, dtype=torch.double, device=device) * cumulative_RV[:, -1]
    ids_R = torch.searchsorted(cumulative_RV, target_R[:, None], right=True)[:, 0]
    # If a logit is NaN, all log-probabilities of its row are NaN, and the sampled id is one past the vocabulary.
    chosen_R = logprobs_RV.gather(-1, ids_R.clamp(max=logprobs_RV.shape[1] - 1)[:, None])[:, 0]
    return ids_R.tolist(), chosen_R.tolist()


def _apply_top_p(logits_RV: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Set the logits to -inf outside the smallest set of most likely ids with a total probability of `top_p`."""
    ordered_RV, order_RV = logits_RV.softmax(-1).sort(dim=-1, descending=True, stable=True)
    is_outside_RV = ordered_RV.cumsum(-1) - ordered_RV >= top_p_R[:, None]
    return logits_RV.masked_fill(is_outside_RV.scatter(-1, order_RV, is_outside_RV), -torch.inf)


def _seeded_uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1) that follows from the seed and the position. The number has only 40 bits. So its
    product with a sum in double precision is always less than the sum, also after rounding."""
    return int.from_bytes(hashlib.blake2b(b"%d:%d" % (seed, position), digest_size=5).digest()) / 2**40
