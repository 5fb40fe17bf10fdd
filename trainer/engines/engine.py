"""The interface of an engine: token ids in, token ids and their log-probabilities out.

Invariants of every engine:
- Log-probabilities are those of the distribution that was sampled from, after temperature and top-p. An engine that
  cannot be sure of this returns None for the whole turn. A log-probability that is not a finite number is returned as
  NaN.
- An engine that is down, hangs or returns an invalid answer raises `EngineError`. No token of an invalid answer is
  used, so another engine can generate the turn from the same ids.
- An invalid request, which no engine could ever serve, raises `ValueError`. A context that is too long is an example.
- `weight_version` is the version of the last weight sync, or 0 for the weights that the engine started with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainer.scheduling.scheduler import EngineStats

if TYPE_CHECKING:
    import torch

Weights = Mapping[str, "torch.Tensor"]
"""A state dict: tensors by their names in the checkpoint."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Any of these ids ends the turn and is its last id."""
    seed: int | None = None
    """A 63-bit seed. With None, vLLM chooses one and `LocalEngine` uses 0."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A sampled turn, of one id at least."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    """One number per id, NaN if it is not finite. None if the log-probabilities are unknown."""
    has_stop_token: bool
    """True if the last id is a stop id. Otherwise the turn was cut at a token limit."""
    engine: str
    weight_version: int
    wait_s: float = 0.0
    """Seconds from the request to the start of its generation at an engine."""


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    kv_tokens: int
    """Tokens of the KV cache."""
    max_running: int
    """Turns that run at once."""
    block_size: int = 1
    """Tokens of a KV block."""


LIVENESS_IDS = (0, 0)
"""Token ids that an engine scores to show that its model runs. An answer of `/metrics` does not show that, since a
server can answer it while its model hangs. Every vocabulary has the id 0. There are two ids because the first id of a
sequence has no score."""


class EngineError(Exception):
    """An infrastructure failure: the engine is down, hangs or returned an invalid answer. Another engine may
    continue the turn."""


class TurnError(EngineError):
    """This turn failed. The engine may still serve other turns."""


class Engine(Protocol):
    name: str
    weight_version: int

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue `ids`."""

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of `ids[1:]` given the ids before it, at temperature 1."""

    async def check_alive(self) -> None:
        """Run the model on one or two tokens. Raises `EngineError` if that fails."""

    async def capacity(self) -> EngineCapacity: ...

    async def stats(self) -> EngineStats | None:
        """Return the engine's counters, or None if it has none."""

    async def close(self) -> None: ...


class LoadsWeights(Protocol):
    """An engine that can load weights itself. The alternative is that this process broadcasts the weights to an
    engine's workers (`trainer.sync.broadcast.BroadcastTransfer`)."""

    name: str

    async def load_weights(self, weights: Any, version: int) -> None:
        """Load `weights`: tensors in this process or the path of a directory, as the engine supports."""

    async def check_weights(self) -> None:
        """Run the model, and check that the engine has not lost the weights of the last sync. Raises `EngineError`."""


class WeightStore(Protocol):
    """Stores weights for as long as an engine may have to load them again."""

    async def save(self, weights: Weights, version: int) -> Path: ...

    async def delete_others(self, keep: Path | None) -> None:
        """Delete all stored weights but `keep`."""


class WeightProbe(Protocol):
    """Compares what an engine computes with what the trainer computes with the same weights."""

    def expected_logprobs(self, weights: Weights) -> Any:
        """Return what the trainer computes, for `check`."""

    async def check(self, engine: Engine, expected: Any) -> None:
        """Raise an error if the engine computes something else."""


WeightTransfer = Callable[[Sequence[Any], Any, int], Awaitable[Sequence[BaseException | None]]]
"""Takes (engines, weights, version), and gives the weights to the engines. Returns the error of each engine, or None.

The engines are of the class that the transfer needs. The weights are `Weights` or, with a `WeightStore`, the path that
`WeightStore.save` has returned. So the type of both is Any."""
