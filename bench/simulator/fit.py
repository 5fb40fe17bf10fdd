"""The constants of a simulated engine, fitted to the measured times of batches on a real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from bench.simulator.engine import EngineProfile

BLOCK_SIZE = 32
"""The smallest block that vLLM's attention on the CPU accepts."""
RESERVED_BLOCKS = 1
"""Blocks of the cache that vLLM does not use for contexts."""
KV_CAPACITY = 256 * BLOCK_SIZE
"""Tokens of a cache that is too small for the workload."""
MAX_RUNNING = 64

RUNNING = (1, 4, 12, 30, 60)
"""Sequences of the batches."""
CONTEXTS = (40, 150, 500)
"""Context tokens of each sequence."""
SAMPLED = (12, 96)
"""Tokens that each sequence samples."""
# In further batches the turns of the sequences start one by one, as in rollouts. Each start makes a decode step longer.
NUM_TURNS = 5
TOKENS_PER_TURN = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that run at once, each of some turns on fresh contexts.

    With one turn, all sequences start at once. With more turns, the first turns have different lengths, so that the
    later turns start one by one.
    """

    running: int
    context: int
    sampled: int
    turns: int = 1

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens to sample in each turn of each sequence."""
        later = [self.sampled] * (self.turns - 1)
        if not later:
            return [[self.sampled]] * self.running
        return [[1 + self.sampled * number // self.running, *later] for number in range(self.running)]

    @property
    def fits(self) -> bool:
        """Whether all contexts fit into a cache."""
        return self.running * -(-(self.context + self.sampled) // BLOCK_SIZE) * BLOCK_SIZE <= KV_CAPACITY

    @property
    def features(self) -> list[float]:
        """Five numbers: decode steps, sequences summed over the steps, contexts summed over the steps, prefilled
        tokens, and turns."""
        sampled = [sum(turns) for turns in self.lengths]
        contexts = sum(count * self.context + count * count / 2 for turns in self.lengths for count in turns)
        num_turns = self.running * self.turns
        return [max(sampled), sum(sampled), contexts, num_turns * self.context, num_turns]


BATCHES = [
    batch
    for batch in (
        *(Batch(*sizes) for sizes in product(RUNNING, CONTEXTS, SAMPLED)),
        *(Batch(*sizes, TOKENS_PER_TURN, NUM_TURNS) for sizes in product(RUNNING[1:], CONTEXTS[:2])),
    )
    if batch.fits
]


def fit_profile(passes: Sequence[Mapping[Batch, float]], num_servers: int) -> dict[str, Any]:
    """The profile of one of `num_servers` servers while all work, from the seconds of each batch in each pass.

    Least squares of relative errors, without negative constants. The passes are averaged, because a shared machine
    varies from minute to minute.
    """
    mean_s = {batch: fmean(seconds[batch] for seconds in passes) for batch in passes[0]}
    features = np.array([batch.features for batch in mean_s])
    seconds = np.array([*mean_s.values()])
    costs = _nonnegative_least_squares(features / seconds[:, None], np.ones(len(mean_s)))
    errors = features @ costs / seconds - 1
    names = ("base_s", "per_sequence_s", "per_context_s", "prefill_s", "turn_s")
    profile = EngineProfile(
        name="cpu-tiny",
        kv_capacity=KV_CAPACITY,
        max_running=MAX_RUNNING,
        **dict(zip(names, map(float, costs), strict=True)),
        block_size=BLOCK_SIZE,
        source=f"fitted to {len(mean_s)} kinds of batches, {num_servers} vLLM servers at once, in {len(passes)} passes",
    )
    return {
        "profile": asdict(profile),
        "residual": float(np.median(np.abs(errors))),
        "batches": [
            {**asdict(batch), "seconds": round(batch_s, 4), "error": round(float(error), 4)}
            for (batch, batch_s), error in zip(mean_s.items(), errors, strict=True)
        ],
    }


def _nonnegative_least_squares(features: Any, target: Any) -> Any:
    """Least squares in which the most negative coefficient is set to 0 until none is negative."""
    columns = list(range(features.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(features[:, columns], target, rcond=None)
        if (solution >= 0).all():
            costs = np.zeros(features.shape[1])
            costs[columns] = solution
            return costs
        columns.pop(int(solution.argmin()))
