"""The transfer by engines that load the weights themselves, and the transfer to engines that sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.engines.engine import EngineError, LoadsWeights, Weights, WeightTransfer
from trainer.engines.vllm_client import VllmEngine
from trainer.sync.saved_tensors import check_finite


async def load_by_engine(
    engines: Sequence[LoadsWeights], weights: Weights | Path, version: int
) -> list[BaseException | None]:
    """Make all engines load the weights at the same time. Return the error of each engine, or None.

    Raises `WeightSyncError` if a weight in this process is not finite.
    """
    if not isinstance(weights, Path):
        await asyncio.to_thread(_check_all_finite, weights)
    return await errors_of(engine.load_weights(weights, version) for engine in engines)


def _check_all_finite(weights: Weights) -> None:
    for name, tensor in weights.items():
        check_finite(tensor, name)


class WakingTransfer:
    """Wakes sleeping engines in two steps, and runs another transfer between them. First the engine allocates memory
    for the weights; then `transfer` gives it the weights; then it allocates memory for the KV cache. So the transfer
    and the KV cache never need their memory at the same time. Engines that are awake stay awake."""

    def __init__(self, transfer: WeightTransfer) -> None:
        self._transfer = transfer

    async def __call__(self, engines: Sequence[VllmEngine], weights: Any, version: int) -> list[BaseException | None]:
        torch.cuda.empty_cache()  # the probe and the store have left memory in torch's cache; the engines need it
        errors = dict(zip(engines, await errors_of(engine.wake_up("weights") for engine in engines), strict=True))
        awake = [engine for engine, error in errors.items() if error is None]
        errors |= zip(awake, await self._transfer(awake, weights, version), strict=True)
        loaded = [engine for engine, error in errors.items() if error is None]
        errors |= zip(loaded, await errors_of(engine.wake_up("kv_cache") for engine in loaded), strict=True)
        return [errors[engine] for engine in engines]


async def errors_of(calls: Iterable[Awaitable[None]]) -> list[BaseException | None]:
    """Await all calls at the same time. Return the `EngineError` of each, or None."""
    return list(await asyncio.gather(*(result_or_error(call, EngineError) for call in calls)))


async def result_or_error(call: Awaitable[Any], *kinds: type[Exception]) -> Any:
    """Await `call`. Return its result, or the error that it raises if the error is of one of `kinds`."""
    try:
        return await call
    except kinds as error:
        return error
