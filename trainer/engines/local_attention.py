"""Attention and KV caches of `LocalEngine`.

Invariant: on a CPU, the attention of a token has the same bits whatever else the forward pass computes, and however its
context was divided into forward passes.

Dimensions of tensors: R rows of a pass, N slots, T tokens of each slot, L positions, K key heads, G query heads per key
head, D head size.
"""

from __future__ import annotations

import math
import mmap
from bisect import bisect, bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

ATTENTION_NAME = "rstar_slots"
ROW_MULTIPLE = 4
"""The kernels of MKL round the rows of a matrix product differently if their number is not a multiple of 4."""
LENGTH_MULTIPLE = 512
"""Attention reads this many positions, or a multiple. torch computes attention in blocks of 512 positions, and MKL sums
over a shorter block in another order. Positions after that of a token are masked, so they add exact zeros."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one slot that a forward pass computes: those at the positions from `start`."""

    slot: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _SlotGroup:
    """Neighbouring slots with one token each, or one slot with any number of tokens: one call of the kernel."""

    slots: slice
    rows: slice
    length: int
    mask: torch.Tensor
    """[N, 1, T x G, L], with the number of rows rounded up to `ROW_MULTIPLE`."""


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values of all slots, each slot at its own position. Per layer: [2, N, K, L, D].

    On a CPU, the kernel gives a page of memory only when it is written, so the cache takes memory for the longest
    context that each slot has had. Other devices give the memory of all slots in the first forward pass.
    """

    def __init__(self, num_slots: int, max_length: int, query_group_size: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self._num_slots, self._query_group_size, self._device = num_slots, query_group_size, device
        self._max_length = round_up(max_length, LENGTH_MULTIPLE)
        self._layers: dict[int, torch.Tensor] = {}

    def prepare_pass(self, chunks: Sequence[Chunk], dtype: torch.dtype) -> list[_SlotGroup]:
        """Set the positions that the next pass writes. Its rows are the tokens of `chunks`, which are in the order of
        their slots. Return the groups for `_attend`."""
        slot_of_row = [chunk.slot for chunk in chunks for _ in range(chunk.num_tokens)]
        position_of_row = [chunk.start + index for chunk in chunks for index in range(chunk.num_tokens)]
        self._slots_R = torch.tensor(slot_of_row, device=self._device)
        self.positions_R = torch.tensor(position_of_row, device=self._device)
        groups, first_row = [], 0
        for members in _group_chunks(chunks):
            rows = slice(first_row, first_row + sum(chunk.num_tokens for chunk in members))
            positions_NT = self.positions_R[rows].view(len(members), -1)
            length = round_up(max(chunk.start + chunk.num_tokens for chunk in members), LENGTH_MULTIPLE)
            last_positions = positions_NT.repeat_interleave(self._query_group_size, 1)
            last_positions = pad(last_positions, (0, -last_positions.shape[1] % ROW_MULTIPLE))[..., None]
            is_ahead = torch.arange(length, device=self._device) > last_positions
            mask = torch.zeros(is_ahead.shape, dtype=dtype, device=self._device)
            mask = mask.masked_fill_(is_ahead, -torch.inf)[:, None]
            slots = slice(members[0].slot, members[-1].slot + 1)
            groups.append(_SlotGroup(slots, rows, length, mask))
            first_row = rows.stop
        return groups

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of the pass's rows, [1, K, R, D], and return the layer's keys and values of all slots. Rows
        that only fill the pass are last. They are not written."""
        if layer_idx not in self._layers:
            _, heads, _, size = key_states.shape
            shape = (2, self._num_slots, heads, self._max_length, size)
            self._layers[layer_idx] = _zeros(shape, key_states.dtype, self._device)
        layer = self._layers[layer_idx]
        for all_states, states in zip(layer, (key_states, value_states), strict=True):
            all_states[self._slots_R, :, self.positions_R] = states[0, :, : len(self._slots_R)].transpose(0, 1)
        return layer[0], layer[1]

    def free_memory(self) -> None:
        """Clear all slots. On a CPU, give their memory back to the kernel."""
        for layer_idx, layer in self._layers.items():
            self._layers[layer_idx] = _zeros(layer.shape, layer.dtype, self._device)

    def clear(self, slot: int, num_positions: int) -> None:
        for layer in self._layers.values():
            layer[:, slot, :, :num_positions] = 0

    def read(self, slot: int, num_positions: int) -> list[torch.Tensor]:
        """Return a copy of a slot's first `num_positions`, for each layer: [2, K, L, D]."""
        return [layer[:, slot, :, :num_positions].clone() for layer in self._layers.values()]

    def write(self, slot: int, states: Sequence[torch.Tensor], num_positions: int) -> None:
        """Restore the first `num_positions` of what `read` has returned."""
        for layer, layer_states in zip(self._layers.values(), states, strict=True):
            layer[:, slot, :, :num_positions] = layer_states[:, :, :num_positions]


def _group_chunks(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Divide chunks into groups for `_SlotGroup`."""

    def key(indexed: tuple[int, Chunk]) -> tuple[bool, int]:
        index, chunk = indexed
        # Neighbouring slots have the same difference of slot and index.
        return (True, chunk.slot - index) if chunk.num_tokens == 1 else (False, index)

    for _, members in groupby(enumerate(chunks), key):
        yield [chunk for _, chunk in members]


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU they take no memory until they are written; `torch.zeros` writes them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class PrefixCache:
    """Keys and values of contexts, by the contexts' ids. The cache holds at most `max_positions` positions. The least
    recently used context is evicted first."""

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
        self._num_free -= len(ids)
        while self._num_free < 0:
            self._evict(next(iter(self._states)))

    def _evict(self, ids: tuple[int, ...]) -> None:
        del self._states[ids]
        self._num_free += len(ids)
        del self._sorted[bisect_left(self._sorted, ids)]

    def longest_prefix(self, ids: Sequence[int]) -> tuple[int, list[torch.Tensor]]:
        """Return the length of the longest cached prefix of `ids`, and the states that hold it."""
        index = bisect(self._sorted, tuple(ids))
        neighbours = self._sorted[max(index - 1, 0) : index + 1]
        length, best = max(((_common_prefix(ids, other), other) for other in neighbours), default=(0, ()))
        if not length:
            return 0, []
        self._states[best] = states = self._states.pop(best)
        return length, states


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(a), len(b)))


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    slot_groups: Sequence[_SlotGroup],
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for the rows of a pass. `query` is [1, K x G, R, D]; the result is [1, R, K x G, D].

    The query heads that share a key head are the rows of one matrix, so each key is read once for all of them.
    """
    _, heads, num_rows, size = query.shape
    key_heads = key.shape[1]
    output = query.new_zeros(num_rows, heads, size)
    for group in slot_groups:
        num_slots = group.slots.stop - group.slots.start
        query_KGNTD = query[0, :, group.rows].view(key_heads, heads // key_heads, num_slots, -1, size)
        rows_NKRD = query_KGNTD.permute(2, 0, 3, 1, 4).reshape(num_slots, key_heads, -1, size)
        num_query_rows = rows_NKRD.shape[2]
        attended_NKRD = scaled_dot_product_attention(
            pad(rows_NKRD, (0, 0, 0, -num_query_rows % ROW_MULTIPLE)),
            key[group.slots, :, : group.length],
            value[group.slots, :, : group.length],
            attn_mask=group.mask,
            scale=scaling,
        )[:, :, :num_query_rows]
        attended_NKTGD = attended_NKRD.unflatten(2, (-1, heads // key_heads))
        output[group.rows] = attended_NKTGD.permute(0, 2, 1, 3, 4).reshape(-1, heads, size)
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, _attend)
