"""Engines: token ids in, token ids and their log-probabilities out. What one is asked and answers, and vLLM over HTTP.

Invariants:
- Log-probabilities are of the distribution that was sampled from: after temperature and top-p (vLLM: processed ones).
- An engine that is lost, hangs or answers nonsense raises `EngineFailed`, and nothing it said is repaired: the ids are
  all there is, so another engine can continue. A request that no engine could serve is a `ValueError`.
- `version` is that of the weights: the number of the last sync.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to continue. Temperature 0 takes the likeliest token; its log-probabilities are those of temperature 1."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Any of these ends the stretch, and is its last id."""
    seed: int | None = None
    """Of 63 bits. None: a fresh one."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled: `ids` and their log-probabilities, of one length, at least one and at most `max_tokens`."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_stopped: bool
    """Ended with a stop id; otherwise it has `max_tokens`."""
    engine: str
    version: int


class EngineFailed(Exception):
    """Ours, never the model's: the engine was lost, hung, or answered nonsense. Another may continue."""
