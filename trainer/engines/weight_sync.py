"""Weights from the trainer to engines, by three ways behind one face, and the proof that they arrived.

A sync is proven by log-probabilities: trainer and engine score the same `PROBES`, and the root mean square of the
difference must be no larger than rounding explains. How large rounding is follows from the model itself: the trainer
scores the probes in float32 and once more in bfloat16, and the root mean square of that difference is the rounding.
`BOUNDS` are multiples of it. A maximum over tokens, or a fixed tolerance, does not separate the two cases: rounding
grows with the size of the logits, and its largest value has a long tail.

Measured on a CPU with random Qwen3 models of 2 and 4 layers of width 64, of ten kinds: weights with a standard
deviation of 0.02 or 0.1, embeddings of up to 10 times that. The engine was the same model in the engine's dtype with
other attention kernels; every other probe was scored a sequence at a time. No GPU and no vLLM took part.
- Equal weights, 10,000 models with probes of their own, both dtypes: none is above its bound. The largest difference is
  0.71 of the bound in bfloat16, where the mean of its logarithm is at least 8 standard deviations below the bound, and
  0.004 in float32.
- Each layer with the weights of another random model, and each two layers exchanged, 10 models of each kind: all are
  found. The smallest difference is 5.1 and 1.2 times the bound in bfloat16, 660 and 150 times in float32. The 1.2 is of
  layers that hardly matter beside large embeddings. There a single matrix of an MLP is not always found in bfloat16
  (0.74).
- A layer that misses one step, which moves each of its weights by the same amount: it is found if the amount is 5 to 10
  % of the weights' standard deviation in bfloat16, or 0.1 to 0.5 % in float32. So a step at a learning rate of 1e-4
  that one layer misses is found in float32 only, and one of 1e-6 in neither: in bfloat16 it is smaller than rounding,
  and the bound for float32 leaves room for kernels that are less exact. For such steps there is only the engine's word
  that it has loaded the weights.

The ways: `direct` hands engines what they load: tensors to engines in this process, or the folder in which `ByFile`
keeps the weights, which servers see as well and which works everywhere; `ByNccl` sends them from GPU to GPU by vLLM's
weight-transfer API (RCCL on AMD), and no GPU has run it yet.
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

from trainer.engines.pool import Engine, Weights
from trainer.engines.vllm_client import EngineFailed
from trainer.engines.vllm_servers import free_port

PROBES, PROBE_TOKENS = 16, 8
"""Sequences of random ids, and the tokens of each: an engine computes the tokens of a sequence one by one."""
BOUNDS = {"bfloat16": 2.0, "float32": 2.0**-6}
"""The largest difference between engine and trainer, by the engine's dtype, in units of bfloat16's rounding."""


class SyncFailed(Exception):
    """An engine has other weights than the trainer. Sampling from it would train on a lie: the run must stop."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What engines must say of the probes under some weights."""

    logprobs: torch.Tensor
    """Of all tokens of a probe but its first, given the tokens before them: [PROBES, PROBE_TOKENS - 1]."""
    rounding: float
    """The root mean square of the error that the trainer makes in bfloat16."""


class Reference:
    """The trainer's side of a proof: log-probabilities of fixed probes under any weights of one architecture.

    `dtype` is what the engines compute in.
    """

    def __init__(self, model: Path | str, dtype: str = "float32") -> None:
        config = AutoConfig.from_pretrained(model)
        with init_empty_weights(include_buffers=False):  # a state dict's tensors take the parameters' places
            self._model = AutoModelForCausalLM.from_config(config).eval()
        self._dtype = dtype
        draw = random.Random(0)
        self.probes = [draw.choices(range(config.vocab_size), k=PROBE_TOKENS) for _ in range(PROBES)]

    def logprobs(self, weights: Weights) -> Expected:
        """Raises `SyncFailed` where these are no numbers: no engine could sample."""
        exact = self._score(_as(torch.float32, weights))
        if not exact.isfinite().all():
            raise SyncFailed(
                "expected finite log-probabilities of the trainer's own model, got others: training has diverged; go "
                "on from an earlier checkpoint, with a lower lr or max_grad_norm"
            )
        return Expected(exact, _rms(self._score(_as(torch.bfloat16, weights)) - exact))

    async def check(self, engine: Engine, expected: Expected) -> None:
        """Raises `SyncFailed` where the engine says something else, `EngineFailed` where it says nothing."""
        said = torch.tensor(await asyncio.gather(*map(engine.logprobs, self.probes)), dtype=torch.float64)
        bound, got = BOUNDS[self._dtype] * expected.rounding, _rms(said - expected.logprobs)
        if not got <= bound:
            raise SyncFailed(
                f"engine {engine.name} at version {engine.version}: expected log-probabilities within {bound:.2g} of "
                f"the trainer's (root mean square of {said.numel()}; {BOUNDS[self._dtype]:g} times the rounding of "
                f"bfloat16, for an engine that computes in {self._dtype}), got a difference of {got:.2g}: it has other "
                "weights or computes less exactly; see its log, and compare its --model and --dtype with the run's"
            )

    def _score(self, weights: Weights) -> torch.Tensor:
        ids = torch.tensor(self.probes, device=next(iter(weights.values())).device)
        with torch.no_grad():
            logits = functional_call(self._model, dict(weights), kwargs={"input_ids": ids, "use_cache": False}).logits
        return logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].cpu()


def _as(dtype: torch.dtype, weights: Weights) -> Weights:
    """Of tensors that several names share one copy."""
    copies = {each.data_ptr(): each.to(dtype) for each in weights.values()}
    return {name: copies[each.data_ptr()] for name, each in weights.items()}


def _rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())


async def direct(engines: Sequence[Any], weights: Weights | Path, version: int) -> list[BaseException | None]:
    """To engines that take them from where they are: to those in this process as tensors, which they copy."""

    async def load(engine: Any) -> BaseException | None:
        try:
            await engine.load(weights, version)
        except EngineFailed as why:
            return why
        return None

    return list(await asyncio.gather(*map(load, engines)))


class ByFile:
    """Keeps weights as safetensors in `folder`, which is made, rounded to the engines' `dtype`; a folder a version."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self._folder = folder.absolute()  # servers may run in other directories
        self._dtype = getattr(torch, dtype)

    async def keep(self, weights: Weights, version: int) -> Path:
        """Its folder, which engines load until `drop`."""
        here = self._folder / f"v{version:06d}"
        await asyncio.to_thread(self._save, here, weights)
        return here

    async def drop(self, *, but: Path | None) -> None:
        """Delete all versions but one, those of a run that was killed here too."""
        for folder in await asyncio.to_thread(list, self._folder.glob("v*")):
            if folder != but:
                await asyncio.to_thread(shutil.rmtree, folder)

    def _save(self, folder: Path, weights: Weights) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed here
        folder.mkdir(parents=True)
        rounded = {name: each.to(self._dtype) for name, each in _once(weights).items()}
        save_file(rounded, folder / "model.safetensors")


class ByNccl:
    """From this process's GPU to those of vLLM servers, one server after the other, by vLLM's own sender and client.

    Servers are started with `--weight-transfer-config '{"backend": "nccl"}'`, and vLLM is needed here too, of their
    version (0.31 or later). Each has a communicator of its own with this process, which is rank 0: one that is lost
    takes part again with the first sync after it is back, since no weights are kept for it in between, and a transfer
    that it dies in never ends. Not run on a GPU yet.
    """

    def __init__(self, *, gpus_per_engine: int = 1) -> None:
        self._gpus = gpus_per_engine
        self._senders: dict[str, Any] = {}
        self._weights: dict[str, torch.Tensor] = {}

    async def __call__(self, engines: Sequence[Any], weights: Weights, version: int) -> list[BaseException | None]:
        self._weights = _once(weights)
        try:
            return [await self._send(engine, version) for engine in engines]
        finally:
            self._weights = {}

    async def _send(self, engine: Any, version: int) -> BaseException | None:
        try:
            if engine.name not in self._senders:
                self._senders[engine.name] = await asyncio.to_thread(self._join, engine.url)
            await asyncio.to_thread(self._senders[engine.name].send_weights)
            await engine.renew(version)
        except (EngineFailed, OSError) as why:  # an OSError is what vLLM's client raises
            self._senders.pop(engine.name, None)
            return why
        return None

    def _join(self, url: str) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        carrier = self

        class Source(WeightSource):  # type: ignore[misc]
            def metadata(self) -> list[Any]:
                return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in carrier._weights.items()]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return ((name, each.to("cuda")) for name, each in carrier._weights.items())

        here = {"master_address": gethostname(), "master_port": free_port(""), "world_size": 1 + self._gpus}
        about, client = NCCLTrainerInitInfo(rank=0, **here), HTTPVLLMWeightSyncClient(url)
        return NCCLTrainerWeightTransferEngine.trainer_init(about, client=client, source=Source())


def _once(weights: Weights) -> dict[str, torch.Tensor]:
    """Each tensor under its first name: a tied output layer is the embedding again."""
    first: dict[int, str] = {}
    return {
        name: each.contiguous() for name, each in weights.items() if first.setdefault(each.data_ptr(), name) == name
    }
