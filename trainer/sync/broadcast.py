"""The transfer of weights from this process to the workers of all engines at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed import TCPStore

from trainer.engines.engine import EngineError, Weights
from trainer.engines.vllm_client import VllmEngine
from trainer.sync import weight_group
from trainer.sync.saved_tensors import saved_tensors
from trainer.sync.transfers import errors_of, result_or_error

TRANSFER_TIMEOUT_S = 120.0
"""Maximum seconds of each single wait in a broadcast: until a receiver has joined, or until it has a bucket."""


class NoAnswerError(EngineError):
    """An engine has not answered a call to its workers. The call may still run there."""


class BroadcastTransfer:
    """Sends weights, rounded to `dtype`, from this process to the workers of all engines at once (`weight_group`).

    `model`: a model of the same class as the trained model, loaded from the same folder. Its weights are not used.

    The servers need `--worker-extension-cls vllm_worker.Worker`. Each transfer has a new process group, so a restarted
    server takes part in the next transfer.

    A server may die or may not join. Each wait for it then ends with an error after `timeout_s` at the latest, and each
    request to it after 3 times `timeout_s`. gloo notices a death at once. A failure of one server breaks the transfer
    to all servers, so the engines that have answered with an error get the weights once more.

    NCCL and RCCL have not run on a GPU yet.
    """

    def __init__(self, backend: str, model: Any, dtype: str, *, timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        self._backend, self._model, self._dtype, self._timeout_s = backend, model, getattr(torch, dtype), timeout_s

    async def __call__(
        self, engines: Sequence[VllmEngine], weights: Weights, version: int
    ) -> list[BaseException | None]:
        errors = dict(zip(engines, await self._broadcast(engines, weights, version), strict=True))
        failed = [engine for engine, error in errors.items() if error and not isinstance(error, NoAnswerError)]
        if failed and len(engines) > 1:
            errors |= zip(failed, await self._broadcast(failed, weights, version), strict=True)
        return [errors[engine] for engine in engines]

    async def _broadcast(
        self, engines: Sequence[VllmEngine], weights: Weights, version: int
    ) -> list[BaseException | None]:
        store = TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self._timeout_s)
        )
        joining = (result_or_error(self._join(engine, store.port), EngineError, OSError) for engine in engines)
        errors: dict[VllmEngine, BaseException | None] = {}
        first_ranks, size = {}, 1  # rank 0 is the sender
        for engine, answer in zip(engines, await asyncio.gather(*joining), strict=True):
            if isinstance(answer, Exception):
                errors[engine] = answer
            else:
                first_ranks[engine] = size
                size += len(answer["results"])
        if first_ranks:
            tensors = saved_tensors(self._model, weights, self._dtype)
            sending = asyncio.to_thread(weight_group.send, store, size, self._backend, self._timeout_s, tensors)
            options = {"size": size, "backend": self._backend}
            receiving = (
                result_or_error(self._call(engine, "receive_weights", first_rank=rank, **options), EngineError)
                for engine, rank in first_ranks.items()
            )
            # torch.distributed's errors are RuntimeErrors.
            checksums, *answers = await asyncio.gather(result_or_error(sending, RuntimeError, OSError), *receiving)
            finishing = (
                self._finish(engine, answer, checksums, version)
                for engine, answer in zip(first_ranks, answers, strict=True)
            )
            errors |= zip(first_ranks, await errors_of(finishing), strict=True)
        return [errors[engine] for engine in engines]

    async def _join(self, engine: VllmEngine, port: int) -> Any:
        """Make the engine's workers join. Return the engine's answer, which has one result per worker."""
        host = await asyncio.to_thread(_own_address, engine.url)
        return await self._call(engine, "join_weight_store", host=host, port=port)

    async def _finish(self, engine: VllmEngine, answer: Any, checksums: Any, version: int) -> None:
        """Check what the engine has loaded. `answer` may be the error of the engine, and `checksums` the error of the
        sender. If one of them is an error, raise it."""
        if errors := [str(outcome) for outcome in (answer, checksums) if isinstance(outcome, Exception)]:
            kind = type(answer) if isinstance(answer, EngineError) else EngineError
            raise kind(f"engine {engine.name}: {'; sender: '.join(errors)}")
        engine.check_loaded(answer, checksums)
        await engine.reset_prefix_cache(version)

    async def _call(self, engine: VllmEngine, method: str, **arguments: Any) -> Any:
        """Call the method on each worker of the engine."""
        body = {"method": method, "kwargs": {**arguments, "timeout_s": self._timeout_s}}
        try:
            async with asyncio.timeout(3 * self._timeout_s):
                return await engine.post("/collective_rpc", body)
        except TimeoutError as error:
            raise NoAnswerError(f"engine {engine.name}: no answer to {method} in {3 * self._timeout_s:g} s") from error


def _own_address(url: str) -> str:
    """Return the address of this machine from which it reaches the host of `url`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((urlsplit(url).hostname, 9))  # any port: a datagram socket sends nothing when it connects
        address: str = probe.getsockname()[0]
        return address
