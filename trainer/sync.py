"""Weights from the trainer to engines, by three ways behind one face, and the proof that they arrived.

A sync is proven by log-probabilities: trainer and engine score the same sequence, and what they say must agree. That
shows weights that did not arrive, arrived in part, or are used in another way. What it cannot show is a step's small
change where the engine's own rounding (bfloat16) is larger.

The ways: `direct` hands tensors to engines in this process; `ByFile` saves them to a folder that engines see as well,
which works everywhere; `ByNccl` broadcasts them from GPU to GPU through vLLM's weight-transfer API (RCCL on AMD), and
has not been run on a GPU yet.
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
    """From this process's GPU to those of vLLM servers, started with `--weight-transfer-config '{"backend": "nccl"}'`.

    It needs vLLM here too, of the servers' version (0.32 or later): its sender is used. All engines take part in a
    transfer or none: one that is lost in the midst of it leaves the others waiting, and the run must be started again.
    Not run on a GPU yet.
    """

    def __init__(self, *, gpus_per_engine: int = 1) -> None:
        self._gpus = gpus_per_engine
        self._sender: Any = None

    async def __call__(self, engines: Sequence[Any], weights: Weights, version: int) -> list[BaseException | None]:
        self._weights, self._engines, self._loop = _once(weights), engines, asyncio.get_running_loop()
        try:
            if self._sender is None:
                self._sender = await asyncio.to_thread(self._join)
            await asyncio.to_thread(self._sender.send_weights)
            await asyncio.gather(*(engine.renew(version) for engine in engines))
        except EngineFailed as why:
            raise SyncFailed(
                f"expected all {len(engines)} engines in a transfer, got {why}; start the run again"
            ) from why
        finally:
            self._weights = {}
        return [None] * len(engines)

    def _join(self) -> Any:
        """One communicator of this process, rank 0, and of every worker of every engine."""
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        carrier = self

        class Source(WeightSource):  # type: ignore[misc]
            def metadata(self) -> list[Any]:
                return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in carrier._weights.items()]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return ((name, each.to("cuda")) for name, each in carrier._weights.items())

        world = 1 + self._gpus * len(self._engines)
        about = NCCLTrainerInitInfo(rank=0, master_address=gethostname(), master_port=free_port(""), world_size=world)
        return NCCLTrainerWeightTransferEngine.trainer_init(about, client=self, source=Source())

    # vLLM's `VLLMWeightSyncClient`, for several servers at once; its sender calls these from threads.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        firsts = [init_info["rank_offset"] + self._gpus * number for number in range(len(self._engines))]
        self._post("/init_weight_transfer_engine", *({"init_info": {**init_info, "rank_offset": n}} for n in firsts))

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", *[{}] * len(self._engines))

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", *[{"update_info": update_info}] * len(self._engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", *[{"weight_version": weight_version}] * len(self._engines))

    def _post(self, route: str, *bodies: dict[str, Any]) -> None:
        async def post() -> None:
            await asyncio.gather(
                *(engine.post(route, body) for engine, body in zip(self._engines, bodies, strict=True))
            )

        asyncio.run_coroutine_threadsafe(post(), self._loop).result()


def _once(weights: Weights) -> dict[str, torch.Tensor]:
    """Each tensor under its first name: a tied output layer is the embedding again."""
    first: dict[int, str] = {}
    return {
        name: each.contiguous() for name, each in weights.items() if first.setdefault(each.data_ptr(), name) == name
    }
