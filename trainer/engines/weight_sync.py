"""Gives the trainer's weights to engines, and checks that they have arrived.

The check compares log-probabilities: trainer and engine score the same `NUM_PROBES` sequences (a sync probe), and the
root mean square (RMS) of the differences must not exceed a bound. The bound is what rounding can explain, and depends
on the model: the trainer scores the sequences in float32 and in bfloat16, and the bound is a multiple (`BOUNDS`) of the
RMS of the differences between these two. A fixed tolerance cannot separate rounding from wrong weights, because
rounding grows with the size of the logits. A maximum over tokens cannot either, because the largest rounding error has
a long tail.

Measured on a CPU with random Qwen3 models (2 and 4 layers of width 64, weights with a standard deviation of 0.02 or
0.1, embeddings of up to 10 times that). The engine was the same model in the engine's dtype with other attention
kernels; no GPU and no vLLM took part.

                                                      RMS of the difference divided by the bound
    weights of the engine            models           engine in bfloat16    engine in float32
    equal                            10,000           at most 0.71          at most 0.004
    one layer of another model       10 per size      at least 5.1          at least 660
    two layers exchanged             10 per size      at least 1.2          at least 150

- A ratio of 1 would be a false alarm, and its logarithm is 0. With equal weights in bfloat16, the mean of the ratios'
  logarithms is at least 8 of their standard deviations below 0.
- The ratio 1.2 was measured on models with large embeddings, in which the layers hardly matter. In these models, a
  single wrong MLP matrix is not always detected in bfloat16 (a ratio of 0.74 was measured).
- A layer that misses one training step is detected if the step moves its weights by 5 to 10 % of their standard
  deviation in bfloat16, or by 0.1 to 0.5 % in float32. So a missed step at a learning rate of 1e-4 is detected in
  float32 only, and a missed step at 1e-6 in neither dtype. For such steps the engine's answer that it has loaded the
  weights is the only evidence.

There are two transfers:
- `load_by_engine` makes each engine load the weights itself: from tensors in this process, or from the directory in
  which `FileWeightStore` keeps them. This works everywhere.
- `BroadcastTransfer` sends the weights through torch.distributed: by gloo, or from GPU to GPU by NCCL (RCCL on AMD).
  The transfer by NCCL has not run on a GPU yet.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch.distributed import TCPStore
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.engines import weight_group
from trainer.engines.engine import Engine, EngineError, LoadsWeights, Weights, WeightTransfer
from trainer.engines.vllm_client import VllmEngine

TRANSFER_TIMEOUT_S = 120.0
"""Seconds that each wait of a broadcast may take: for a receiver to join, or to receive a bucket."""
NUM_PROBES = 16
"""Number of probe sequences."""
PROBE_TOKENS = 8
"""Number of random ids in each probe sequence."""
BOUNDS = {"bfloat16": 2.0, "float32": 2.0**-6}
"""The largest accepted difference between engine and trainer, by the engine's dtype, as a multiple of
`ExpectedLogprobs.rounding`."""


class WeightSyncError(Exception):
    """An engine has other weights than the trainer. Its samples would be off-policy, so the run must stop."""


@dataclass(frozen=True, slots=True)
class ExpectedLogprobs:
    """The log-probabilities that the trainer computes for the probe, and the size of their rounding."""

    logprobs: torch.Tensor
    """Shape [NUM_PROBES, PROBE_TOKENS - 1]: one for each token but the first, given the tokens before it."""
    rounding: float
    """RMS of the difference between the trainer's bfloat16 and float32 log-probabilities."""


class SyncProbe:
    """A fixed set of sequences that the trainer and the engines score. `dtype` is the engines' dtype.

    `model` is a directory or hub name; only its configuration is read.
    """

    def __init__(self, model: Path | str, dtype: str = "float32") -> None:
        config = AutoConfig.from_pretrained(model)
        # Parameters stay empty, because `_score` uses those of a state dict. A state dict does not have all buffers, so
        # the model has real ones.
        with init_empty_weights(include_buffers=False):
            self._model = AutoModelForCausalLM.from_config(config).eval()
        self._dtype = dtype
        rng = random.Random(0)
        self.sequences = [rng.choices(range(config.vocab_size), k=PROBE_TOKENS) for _ in range(NUM_PROBES)]

    def expected_logprobs(self, weights: Weights) -> ExpectedLogprobs:
        """Score the probe with the trainer's weights. Raises `WeightSyncError` if a result is not finite."""
        exact = self._score(_cast(weights, torch.float32))
        if not exact.isfinite().all():
            raise WeightSyncError(
                "expected finite log-probabilities of the trainer's own model, got others: training has diverged; "
                "continue from an earlier checkpoint with a lower learning rate or max_grad_norm"
            )
        return ExpectedLogprobs(exact, _rms(self._score(_cast(weights, torch.bfloat16)) - exact))

    async def check(self, engine: Engine, expected: ExpectedLogprobs) -> None:
        """Raise `WeightSyncError` if the engine's log-probabilities differ from the expected ones, and `EngineError` if
        the engine does not return them."""
        scores = await asyncio.gather(*map(engine.logprobs, self.sequences))
        logprobs = torch.tensor(scores, dtype=torch.float64)
        bound, difference = BOUNDS[self._dtype] * expected.rounding, _rms(logprobs - expected.logprobs)
        if not difference <= bound:  # also true if the difference is NaN
            raise WeightSyncError(
                f"engine {engine.name} at version {engine.weight_version}: expected log-probabilities within "
                f"{bound:.2g} of the trainer's (root mean square of {logprobs.numel()}; {BOUNDS[self._dtype]:g} times "
                f"the rounding of bfloat16, for an engine that computes in {self._dtype}), got a difference of "
                f"{difference:.2g}: it has other weights or computes less exactly; see its log, and compare its "
                "--model and --dtype with the run's"
            )

    def _score(self, weights: Weights) -> torch.Tensor:
        ids = torch.tensor(self.sequences, device=next(iter(weights.values())).device)
        with torch.no_grad():
            logits = functional_call(self._model, dict(weights), kwargs={"input_ids": ids, "use_cache": False}).logits
        return logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].cpu()


def _cast(weights: Weights, dtype: torch.dtype) -> Weights:
    """Cast all tensors. Tied tensors stay tied."""
    copies = {tensor.data_ptr(): tensor.to(dtype) for tensor in weights.values()}
    return {name: copies[tensor.data_ptr()] for name, tensor in weights.items()}


def _rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())


async def load_by_engine(
    engines: Sequence[LoadsWeights], weights: Weights | Path, version: int
) -> list[BaseException | None]:
    """Make all engines load the weights at the same time. Return the error of each engine, or None."""
    return await _errors_of(engine.load_weights(weights, version) for engine in engines)


class WakingTransfer:
    """Wakes sleeping engines in two steps, and runs another transfer between them. First the engine allocates memory
    for the weights; then `transfer` gives it the weights; then it allocates memory for the KV cache. So the transfer
    and the KV cache never need their memory at the same time. Engines that are awake stay awake."""

    def __init__(self, transfer: WeightTransfer) -> None:
        self._transfer = transfer

    async def __call__(self, engines: Sequence[VllmEngine], weights: Any, version: int) -> list[BaseException | None]:
        torch.cuda.empty_cache()  # the probe and the store have left memory in torch's cache; the engines need it
        errors = dict(zip(engines, await _errors_of(engine.wake_up("weights") for engine in engines), strict=True))
        awake = [engine for engine, error in errors.items() if error is None]
        errors |= zip(awake, await self._transfer(awake, weights, version), strict=True)
        loaded = [engine for engine, error in errors.items() if error is None]
        errors |= zip(loaded, await _errors_of(engine.wake_up("kv_cache") for engine in loaded), strict=True)
        return [errors[engine] for engine in engines]


async def _errors_of(calls: Iterable[Awaitable[None]]) -> list[BaseException | None]:
    """Await all calls at the same time. Return the `EngineError` of each, or None."""
    return list(await asyncio.gather(*(_error_of(call, EngineError) for call in calls)))


async def _error_of(call: Awaitable[None], *kinds: type[Exception]) -> Exception | None:
    """Await `call`. Return the error that it raises if the error is of one of `kinds`. Without an error return None."""
    try:
        await call
    except kinds as error:
        return error
    return None


class FileWeightStore:
    """Stores weights as safetensors, rounded to the engines' `dtype`, in one subdirectory of `directory` per
    version."""

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        self._directory = directory.absolute()  # servers may have other working directories
        self._dtype = getattr(torch, dtype)

    async def save(self, weights: Weights, version: int) -> Path:
        """Write the weights. Return their directory, which lasts until `delete_others`."""
        directory = self._directory / f"v{version:06d}"
        await asyncio.to_thread(self._write, directory, weights)
        return directory

    async def delete_others(self, keep: Path | None) -> None:
        """Delete all versions but `keep`, also those of an earlier run that was killed."""
        for directory in await asyncio.to_thread(list, self._directory.glob("v*")):
            if directory != keep:
                await asyncio.to_thread(shutil.rmtree, directory)

    def _write(self, directory: Path, weights: Weights) -> None:
        shutil.rmtree(directory, ignore_errors=True)  # a killed run may have left it
        directory.mkdir(parents=True)
        rounded = {name: tensor.to(self._dtype) for name, tensor in _without_tied_copies(weights).items()}
        save_file(rounded, directory / "model.safetensors")


class NoAnswerError(EngineError):
    """An engine has not answered a call to its workers. The call may still run there."""


class BroadcastTransfer:
    """Sends weights, rounded to `dtype`, from this process to the workers of all engines at once (`weight_group`).

    The servers need `--worker-extension-cls vllm_worker.Worker`. Each transfer has a new process group, so a restarted
    server takes part in the next transfer.

    A server may die or may not join. Each wait for it then ends with an error after `timeout_s` at the latest, and each
    request to it after 3 times `timeout_s`. gloo notices a death at once. A failure of one server breaks the transfer
    to all servers, so the engines that have answered with an error get the weights once more.

    NCCL and RCCL have not run on a GPU yet.
    """

    def __init__(self, backend: str, dtype: str, *, timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        self._backend, self._dtype, self._timeout_s = backend, getattr(torch, dtype), timeout_s

    async def __call__(
        self, engines: Sequence[VllmEngine], weights: Weights, version: int
    ) -> list[BaseException | None]:
        tensors = _without_tied_copies(weights)
        errors = dict(zip(engines, await self._broadcast(engines, tensors, version), strict=True))
        failed = [engine for engine, error in errors.items() if error and not isinstance(error, NoAnswerError)]
        if failed and len(engines) > 1:
            errors |= zip(failed, await self._broadcast(failed, tensors, version), strict=True)
        return [errors[engine] for engine in engines]

    async def _broadcast(
        self, engines: Sequence[VllmEngine], tensors: Weights, version: int
    ) -> list[BaseException | None]:
        store = TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self._timeout_s)
        )
        answers = await asyncio.gather(*(self._join(engine, store.port) for engine in engines))
        size, receiving = 1, []
        for engine, answer in zip(engines, answers, strict=True):
            if not isinstance(answer, BaseException):
                receiving.append((engine, size))
                size += len(answer["results"])
        errors: dict[VllmEngine, BaseException] = {
            engine: answer for engine, answer in zip(engines, answers, strict=True) if isinstance(answer, Exception)
        }
        settings = (self._backend, self._timeout_s, tensors, self._dtype)
        sending = asyncio.to_thread(weight_group.send, store, size, *settings)
        send_error, receive_errors = await asyncio.gather(
            _error_of(sending, RuntimeError, OSError),  # torch.distributed's errors are RuntimeErrors
            _errors_of(self._receive(engine, first_rank, size, version) for engine, first_rank in receiving),
        )
        for (engine, _), error in zip(receiving, receive_errors, strict=True):
            if error is not None:
                errors[engine] = type(error)(f"{error} (sender: {send_error})") if send_error else error
        return [errors.get(engine) for engine in engines]

    async def _join(self, engine: VllmEngine, port: int) -> Any:
        """Make the engine's workers join. Return the engine's answer, which has one result per worker, or the error."""
        try:
            host = await asyncio.to_thread(_own_address, engine.url)
            return await self._call(engine, "join_weight_store", host=host, port=port)
        except (EngineError, OSError) as error:
            return error

    async def _receive(self, engine: VllmEngine, first_rank: int, size: int, version: int) -> None:
        await self._call(engine, "receive_weights", first_rank=first_rank, size=size, backend=self._backend)
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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        probe.connect((urlsplit(url).hostname, 9))
        address: str = probe.getsockname()[0]
        return address


def _without_tied_copies(weights: Weights) -> dict[str, torch.Tensor]:
    """Return the weights, where a tensor with several names is only under its first one. For example, a tied output
    layer is the same tensor as the embedding."""
    first_names: dict[int, str] = {}
    return {
        name: tensor.contiguous()
        for name, tensor in weights.items()
        if first_names.setdefault(tensor.data_ptr(), name) == name
    }
