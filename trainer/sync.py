"""Weights from the trainer to engines, by three ways behind one face, and the proof that they arrived.

A sync is proven by log-probabilities: trainer and engine score the same sequence, and what they say must agree. That
shows weights that did not arrive, arrived in part, or are used in another way. What it cannot show is a step's small
change where the engine's own rounding (bfloat16) is larger.

The ways: `direct` hands tensors to engines in this process; `ByFile` saves them to a folder that engines see as well,
which works everywhere; `ByNccl` sends them from GPU to GPU by vLLM's weight-transfer API (RCCL on AMD), and no GPU has
run it yet.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.engine import EngineFailed
from trainer.pool import Engine, Weights
from trainer.vllm_server import free_port

PROBE_TOKENS = 8
"""All weights have a part in each: more would show nothing else, and an engine computes them one by one."""


class SyncFailed(Exception):
    """An engine has other weights than the trainer. Sampling from it would train on a lie: the run must stop."""


class Reference:
    """The trainer's side of a proof: log-probabilities of a fixed sequence under any weights of one architecture.

    `tolerance` bounds the largest difference: 1e-3 where both compute in float32, about 0.1 where one has bfloat16.
    """

    def __init__(self, model: Path | str, *, tolerance: float = 1e-3) -> None:
        config = AutoConfig.from_pretrained(model)
        with init_empty_weights(include_buffers=False):  # a state dict's tensors take the parameters' places
            self._model = AutoModelForCausalLM.from_config(config).eval()
        self.tolerance = tolerance
        self.ids = random.Random(0).choices(range(config.vocab_size), k=PROBE_TOKENS)

    def logprobs(self, weights: Weights) -> list[float]:
        """Of `ids[1:]`, each given what stands before it."""
        device = next(iter(weights.values())).device
        ids = torch.tensor([self.ids], device=device)
        with torch.no_grad():
            logits = functional_call(self._model, dict(weights), kwargs={"input_ids": ids, "use_cache": False}).logits
        logprobs = logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return [float(value) for value in logprobs]

    async def check(self, engine: Engine, expected: Sequence[float]) -> None:
        """Raises `SyncFailed` where the engine says something else, `EngineFailed` where it says nothing."""
        said = await engine.logprobs(self.ids)
        worst = max(abs(ours - its) for ours, its in zip(expected, said, strict=True))
        if not worst <= self.tolerance:
            raise SyncFailed(
                f"engine {engine.name} at version {engine.version}: expected log-probabilities within "
                f"{self.tolerance} of the trainer's, got a difference of {worst:.6f}: it has other weights"
            )


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
    """As safetensors in `folder`, which is made and holds one version at a time, as the engines' `dtype`."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self._folder, self._dtype = folder, getattr(torch, dtype)

    async def __call__(self, engines: Sequence[Any], weights: Weights, version: int) -> list[BaseException | None]:
        here = self._folder / f"v{version:06d}"
        await asyncio.to_thread(self._save, here, weights)
        try:
            return await direct(engines, here, version)
        finally:
            await asyncio.to_thread(shutil.rmtree, here)

    def _save(self, folder: Path, weights: Weights) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed here
        folder.mkdir(parents=True)
        rounded = {name: each.to(self._dtype) for name, each in _once(weights).items()}
        save_file(rounded, folder / "model.safetensors")


class ByNccl:
    """From this process's GPU to those of vLLM servers, one server after the other, by vLLM's own sender and client.

    Servers are started with `--weight-transfer-config '{"backend": "nccl"}'`, and vLLM is needed here too, of their
    version (0.31 or later). Each has a communicator of its own with this process, which is rank 0: one that is lost
    takes part again once it is back, though a transfer that it dies in never ends. Not run on a GPU yet.
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
