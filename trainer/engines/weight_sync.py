"""Gives the trainer's weights to engines, and checks that they have arrived.

The check compares log-probabilities: trainer and engine score the same `NUM_PROBES` sequences (a sync probe), and the
root mean square (RMS) of the differences must not exceed a bound that rounding explains. The bound depends on the
model: the trainer scores the sequences in float32 and in bfloat16, and the bound is a multiple (`BOUNDS`) of the RMS of
that difference. A fixed tolerance, or a maximum over tokens, cannot separate rounding from wrong weights, because
rounding grows with the size of the logits and its largest value has a long tail.

Measured on a CPU with random Qwen3 models (2 and 4 layers of width 64, weights with a standard deviation of 0.02 or
0.1, embeddings of up to 10 times that). The engine was the same model in the engine's dtype with other attention
kernels; no GPU and no vLLM took part.

                                                      RMS of the difference divided by the bound
    weights of the engine            models           engine in bfloat16    engine in float32
    equal                            10,000           at most 0.71          at most 0.004
    one layer of another model       10 per size      at least 5.1          at least 660
    two layers exchanged             10 per size      at least 1.2          at least 150

- With equal weights in bfloat16, the logarithms of these ratios have a mean at least 8 of their standard deviations
  below 0, the logarithm of a ratio of 1.
- The ratio 1.2 belongs to models with large embeddings, in which the layers hardly matter. In these models, a single
  wrong MLP matrix is not always detected in bfloat16 (its ratio was 0.74).
- A layer that misses one training step is detected if the step moves its weights by 5 to 10 % of their standard
  deviation in bfloat16, or by 0.1 to 0.5 % in float32. So a missed step at a learning rate of 1e-4 is detected in
  float32 only, and a missed step at 1e-6 in neither dtype. For such steps the engine's answer that it has loaded the
  weights is the only evidence.

Transfers: `load_by_engine` makes each engine load the weights itself, from tensors in this process or from the
directory in which `FileWeightStore` keeps them; that works everywhere. `NcclTransfer` sends them from GPU to GPU by
vLLM's weight-transfer API (RCCL on AMD); it has not run on a GPU yet.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.engines.engine import Engine, EngineError, LoadsWeights, Weights
from trainer.engines.vllm_client import VllmEngine
from trainer.engines.vllm_servers import free_port

NUM_PROBES, PROBE_TOKENS = 16, 8
"""Number of probe sequences, and number of random ids in each sequence."""
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
        # Parameters stay empty, because each state dict brings its own. A state dict has no buffers, so they are real.
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
        """Raise `WeightSyncError` if the engine's log-probabilities differ, and `EngineError` if it does not
        return them."""
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

    async def load(engine: LoadsWeights) -> BaseException | None:
        try:
            await engine.load_weights(weights, version)
        except EngineError as error:
            return error
        return None

    return list(await asyncio.gather(*map(load, engines)))


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


class NcclTransfer:
    """Sends weights from this process's GPU to the GPUs of vLLM servers, one server after the other.

    The servers need `--weight-transfer-config '{"backend": "nccl"}'`, and this process needs vLLM in their version
    (0.31 or later). Each server has its own communicator with this process, which is rank 0. A restarted server joins
    again at the first sync after its return. A transfer during which a server dies never ends. This class has not run
    on a GPU yet.
    """

    def __init__(self, *, gpus_per_engine: int = 1) -> None:
        self._gpus_per_engine = gpus_per_engine
        self._senders: dict[str, Any] = {}
        self._weights: dict[str, torch.Tensor] = {}

    async def __call__(
        self, engines: Sequence[VllmEngine], weights: Weights, version: int
    ) -> list[BaseException | None]:
        self._weights = _without_tied_copies(weights)
        try:
            return [await self._send(engine, version) for engine in engines]
        finally:
            self._weights = {}

    async def _send(self, engine: VllmEngine, version: int) -> BaseException | None:
        try:
            if engine.name not in self._senders:
                self._senders[engine.name] = await asyncio.to_thread(self._connect, engine.url)
            await asyncio.to_thread(self._senders[engine.name].send_weights)
            await engine.reset_prefix_cache(version)
        except (EngineError, OSError) as error:  # vLLM's client raises OSError
            self._senders.pop(engine.name, None)
            return error
        return None

    def _connect(self, url: str) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        transfer = self

        class Source(WeightSource):  # type: ignore[misc]
            def metadata(self) -> list[Any]:
                weights = transfer._weights.items()
                return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return ((name, tensor.to("cuda")) for name, tensor in transfer._weights.items())

        address = {
            "master_address": gethostname(),
            "master_port": free_port(host=""),  # engines connect from other machines
            "world_size": 1 + self._gpus_per_engine,
        }
        init_info, client = NCCLTrainerInitInfo(rank=0, **address), HTTPVLLMWeightSyncClient(url)
        return NCCLTrainerWeightTransferEngine.trainer_init(init_info, client=client, source=Source())


def _without_tied_copies(weights: Weights) -> dict[str, torch.Tensor]:
    """Return each tensor under its first name only. A tied output layer, for example, is the same tensor as the
    embedding."""
    first_names: dict[int, str] = {}
    return {
        name: tensor.contiguous()
        for name, tensor in weights.items()
        if first_names.setdefault(tensor.data_ptr(), name) == name
    }
