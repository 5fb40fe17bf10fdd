"""Attention and KV caches of `LocalEngine`: one token per slot, summed in blocks of a fixed size.

Invariant: the result of a slot has the same bits whatever the other slots hold and however long they are.

Dimensions of tensors: S slots, B blocks, N blocks in use, K key heads, G query heads per key head, D head size.
"""

from __future__ import annotations

import math
import mmap
from bisect import bisect, bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import threshold
from transformers import AttentionInterface
from transformers.cache_utils import Cache

ATTENTION_NAME = "rstar_slots"
ATTENTION_BLOCK = 64
"""Positions per block of attention."""
MIN_LOG_WEIGHT = -80.0
"""An attention weight becomes 0 if its logarithm minus the logarithm of the largest weight is below about this number.
Without this bound `exp` would return subnormal numbers, which takes ten times as long."""
MASKED_LOGIT = -1e9


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of all slots, each slot at its own position. Per layer: [2, B, S, K, D, ATTENTION_BLOCK].

    The kernel gives a page of memory only when it is written, so the cache takes memory for the longest context that
    each slot has had.
    """

    def __init__(self, num_slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self._slots, self._num_blocks = torch.arange(num_slots), max_length // ATTENTION_BLOCK + 1
        self._layers: dict[int, torch.Tensor] = {}

    def prepare_step(self, positions_S: torch.Tensor) -> torch.Tensor:
        """Set the positions that the next pass writes. Return the attention mask [N, S, ATTENTION_BLOCK]: 0 at and
        before each slot's position, `MASKED_LOGIT` after it."""
        self._block_S, self._offset_S = positions_S // ATTENTION_BLOCK, positions_S % ATTENTION_BLOCK
        self._num_used = int(self._block_S.max()) + 1
        positions = torch.arange(self._num_used * ATTENTION_BLOCK)
        is_ahead = positions.view(self._num_used, 1, ATTENTION_BLOCK) > positions_S[:, None]
        return torch.zeros(is_ahead.shape).masked_fill_(is_ahead, MASKED_LOGIT)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.stack((key_states, value_states), 1)[:, :, :, 0]  # [S, 2, K, D]
        if layer_idx not in self._layers:
            num_slots, _, heads, size = states.shape
            shape = (2, self._num_blocks, num_slots, heads, size, ATTENTION_BLOCK)
            self._layers[layer_idx] = _lazy_zeros(shape, states.dtype)
        layer = self._layers[layer_idx]
        layer[:, self._block_S, self._slots, :, :, self._offset_S] = states
        return layer[0, : self._num_used], layer[1, : self._num_used]

    def free_memory(self) -> None:
        """Clear all slots, and give their memory back to the kernel."""
        for layer_idx, layer in self._layers.items():
            self._layers[layer_idx] = _lazy_zeros(layer.shape, layer.dtype)

    def clear(self, slot: int, num_positions: int) -> None:
        for blocks in self._blocks(slot, num_positions):
            blocks.zero_()

    def read(self, slot: int, num_positions: int) -> list[torch.Tensor]:
        """Return a copy of the blocks that hold a slot's first `num_positions`, for each layer."""
        return [blocks.clone() for blocks in self._blocks(slot, num_positions)]

    def _blocks(self, slot: int, num_positions: int) -> list[torch.Tensor]:
        num_blocks = -(-num_positions // ATTENTION_BLOCK)  # rounded up
        return [layer[:, :num_blocks, slot] for layer in self._layers.values()]

    def write(self, slot: int, states: Sequence[torch.Tensor]) -> None:
        """Restore what `read` has returned."""
        for layer, layer_states in zip(self._layers.values(), states, strict=True):
            layer[:, : layer_states.shape[1], slot] = layer_states


def _lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take no memory until they are written. `torch.zeros` writes them."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class PrefixCache:
    """Keys and values of finished contexts, by the contexts' ids. The cache holds about `max_positions` positions. The
    least recently used context is evicted first."""

    def __init__(self, max_positions: int) -> None:
        self.max_positions = self._num_free = max_positions
        self._states: dict[tuple[int, ...], list[torch.Tensor]] = {}
        """The entries, in the order of their last use."""
        self._sorted: list[tuple[int, ...]] = []
        """The keys in lexical order, so that the context with the longest common prefix is a neighbour."""

    def store(self, ids: Sequence[int], states: list[torch.Tensor]) -> None:
        ids = tuple(ids)
        index = bisect(self._sorted, ids)
        previous = self._sorted[index - 1] if index else ()
        if previous and previous == ids[: len(previous)]:  # the new context contains the previous one
            self._evict(previous)
        insort(self._sorted, ids)
        self._states[ids] = states
        self._num_free -= _num_positions(states)
        while self._num_free < 0:
            self._evict(next(iter(self._states)))

    def _evict(self, ids: tuple[int, ...]) -> None:
        self._num_free += _num_positions(self._states.pop(ids))
        del self._sorted[bisect_left(self._sorted, ids)]

    def longest_prefix(self, ids: Sequence[int]) -> tuple[int, list[torch.Tensor] | None]:
        """Return the length of the longest cached prefix of `ids`, and the states that hold it."""
        index = bisect(self._sorted, tuple(ids))
        neighbours = self._sorted[max(index - 1, 0) : index + 1]
        length, best = max(((_common_prefix(ids, other), other) for other in neighbours), default=(0, ()))
        if not length:
            return 0, None
        self._states[best] = states = self._states.pop(best)
        return length, states


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(a), len(b)))


def _num_positions(states: Sequence[torch.Tensor]) -> int:
    return int(states[0].shape[1]) * ATTENTION_BLOCK


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for one token per slot, with sums in float32. Blocks after a slot's position add exact zeros,
    so they change no bit of the slot's result."""
    num_used, num_slots, key_heads, size, _ = key.shape
    query_SKGD = query.reshape(num_slots, key_heads, -1, size) * scaling
    scores = attention_mask.view(num_used, num_slots, 1, 1, ATTENTION_BLOCK) + query_SKGD @ key
    weights = (scores - scores.amax(-1, keepdim=True).amax(0)).clamp_(min=MIN_LOG_WEIGHT).exp_()
    weights = threshold(weights, 2 * math.exp(MIN_LOG_WEIGHT), 0.0)
    # `sum` adds the blocks one after another, so the order of the additions is fixed.
    total = sum(weights.sum(-1, keepdim=True))
    output_SKGD = sum((weights.to(value.dtype) @ value.transpose(-1, -2)).float()) / total
    return output_SKGD.to(query.dtype).reshape(num_slots, 1, -1, size), None


AttentionInterface.register(ATTENTION_NAME, _attend)
