"""Gives the trainer's weights to engines, and checks that they have arrived.

There are two transfers:
- `load_by_engine` makes each engine load the weights itself: from tensors in this process, or from the directory in
  which `FileWeightStore` keeps them. This works everywhere.
- `BroadcastTransfer` sends the weights through torch.distributed: by gloo, or from GPU to GPU by NCCL (RCCL on AMD).
  The transfer by NCCL has not run on a GPU yet.

vLLM servers get the tensors that `save_pretrained` would write, under the same names. A mixture of experts has other
names and shapes in memory. A local engine is a model of the same class as the trainer's, so it gets the state dict.

There are two checks:
- Checksums, at each sync with `engines.sync_check = "checksum"` and at each broadcast. Each worker of a server computes
  the checksum of each tensor that it has received or read, and this process compares it with the tensor that it has
  sent. So a missed step, a file of another step, and changed or exchanged tensors are detected. The worker also names
  the parameters that it has not loaded, and compares the parameters of each layer with the layer's tensors
  (`weight_group.checked_load`). A layer that a worker changes while it loads it cannot be compared, as with tensor
  parallelism or packed experts; then the counts of loaded elements are the evidence that it has loaded all tensors. A
  local engine needs no checksums: it copies each tensor of the state dict or raises an error.
- The sync probe, at each sync with `engines.sync_check = "probe"`, and at the first sync with "checksum". Trainer and
  engine score the same `NUM_PROBES` sequences. The root mean square (RMS) of the differences should not exceed a bound:
  a multiple (`BOUNDS`) of the model's rounding error, which is the RMS of the differences between the trainer's scores
  in float32 and in bfloat16. The probe detects that an engine computes otherwise than the trainer, for any reason. It
  does not detect small steps: in bfloat16 a layer must differ by 5 to 10 % of its weights' standard deviation, in
  float32 by 0.1 to 0.5 %.

`BOUNDS` was measured on a CPU with random Qwen3 models of width 64; no GPU and no vLLM took part. With equal weights
the difference was at most 0.71 of the bound in bfloat16 (10,000 models) and 0.004 in float32; with one layer of another
model at least 5.1 and 660; with two layers exchanged at least 1.2 and 150. GPU kernels may round more. So a difference
above the bound is a warning, and only one above `ERROR_FACTOR` times the bound is an error.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import random
import re
import shutil
import socket
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate import cpu_offload, init_empty_weights
from safetensors.torch import save_file
from torch.distributed import TCPStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from trainer.engines import weight_group
from trainer.engines.engine import Engine, EngineError, LoadsWeights, Weights, WeightTransfer
from trainer.engines.vllm_client import CHECKSUMS_FILE, VllmEngine

logger = logging.getLogger(__name__)

TRANSFER_TIMEOUT_S = 120.0
"""Seconds that each wait of a broadcast may take: for a receiver to join, or to receive a bucket."""
MAX_FILE_BYTES = 2**32
"""Size of a file of `FileWeightStore`, unless the tensors of one layer take more. The rounded copies of its tensors are
in memory until it is written."""
NUM_PROBES = 16
"""Number of probe sequences."""
PROBE_TOKENS = 8
"""Number of random ids in each probe sequence."""
BOUNDS = {"bfloat16": 2.0, "float32": 2.0**-6}
"""The largest expected difference between engine and trainer, by the engine's dtype, as a multiple of
`ExpectedLogprobs.rounding`."""
ERROR_FACTOR = 8.0
"""A difference above this multiple of the bound is an error. Rounding can explain it only if the engine computes with 3
bits fewer than its dtype has, since each bit halves the error."""


class WeightSyncError(Exception):
    """An engine has other weights than the trainer, or the trainer's weights are not finite. The run must stop."""


@dataclass(frozen=True, slots=True)
class ExpectedLogprobs:
    """The log-probabilities that the trainer computes for the probe, and the size of their rounding."""

    logprobs: torch.Tensor
    """Shape [NUM_PROBES, PROBE_TOKENS - 1]: one for each token but the first, given the tokens before it."""
    rounding: float
    """RMS of the difference between the trainer's bfloat16 and float32 log-probabilities."""


class SyncProbe:
    """A fixed set of sequences that the trainer and the engines score.

    `model`: a directory or hub name; only its configuration is read.
    `dtype`: the engines' dtype.
    `tolerance`: a factor on the bound.
    `device`: where the trainer scores. The weights may be on another device: each module's weights are copied to
    `device` when the module runs, and freed after that.
    """

    def __init__(
        self, model: Path | str, dtype: str = "float32", *, tolerance: float = 1.0, device: str = "cpu"
    ) -> None:
        config = AutoConfig.from_pretrained(model)
        # Parameters stay empty, because `_score` gets them from a state dict. A state dict does not have all buffers,
        # so the model has real ones.
        with init_empty_weights(include_buffers=False):
            self._model = AutoModelForCausalLM.from_config(config).eval()
        self._dtype, self._tolerance, self._device = dtype, tolerance, torch.device(device)
        rng = random.Random(0)
        self.sequences = [rng.choices(range(config.vocab_size), k=PROBE_TOKENS) for _ in range(NUM_PROBES)]

    def expected_logprobs(self, weights: Weights) -> ExpectedLogprobs:
        """Score the probe with the trainer's weights. Raises `WeightSyncError` if a result is not finite."""
        exact = self._score(weights, torch.float32)
        _check_finite(exact, "the log-probabilities of the trainer's own model")
        return ExpectedLogprobs(exact, _rms(self._score(weights, torch.bfloat16) - exact))

    async def check(self, engine: Engine, expected: ExpectedLogprobs) -> None:
        """Log a warning if the engine's log-probabilities differ from the expected ones by more than the bound. Raise
        `WeightSyncError` if they differ far more, and `EngineError` if the engine does not return them."""
        scores = await asyncio.gather(*map(engine.logprobs, self.sequences))
        logprobs = torch.tensor(scores, dtype=torch.float64)
        bound = BOUNDS[self._dtype] * expected.rounding * self._tolerance
        difference = _rms(logprobs - expected.logprobs)
        if difference <= bound:
            return
        message = (
            f"engine {engine.name} at version {engine.weight_version}: expected log-probabilities within {bound:.2g} "
            f"of the trainer's (root mean square of {logprobs.numel()}; {BOUNDS[self._dtype]:g} times the rounding of "
            f"bfloat16 for an engine in {self._dtype}, times engines.probe_tolerance={self._tolerance:g}), got a "
            f"difference of {difference:.2g}"
        )
        if not difference <= ERROR_FACTOR * bound:  # also true if the difference is NaN
            raise WeightSyncError(
                f"{message}: it has other weights or computes less exactly; see its log, and compare its --model and "
                "--dtype with the run's"
            )
        logger.warning("%s; above %g times the bound the run ends", message, ERROR_FACTOR)

    def _score(self, weights: Weights, dtype: torch.dtype) -> torch.Tensor:
        model = copy.deepcopy(self._model)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)  # each weight is cast to this dtype when its module runs
        cpu_offload(model, self._device, state_dict=weights)
        ids = torch.tensor(self.sequences, device=self._device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        return logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].cpu()


def _check_all_finite(weights: Weights) -> None:
    for name, tensor in weights.items():
        _check_finite(tensor, name)


def _check_finite(tensor: torch.Tensor, what: str) -> None:
    if not tensor.sum().isfinite():
        raise WeightSyncError(
            f"expected finite numbers in {what}, got others: training has diverged; continue from an earlier "
            "checkpoint with a lower learning rate or max_grad_norm"
        )


def _rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())


def saved_tensors(model: Any, weights: Weights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors that `model.save_pretrained` would write for the state dict `weights`, rounded to
    `dtype`. They are converted layer by layer, so only one layer is copied at a time. `model` may be empty.

    Raises `WeightSyncError` if a weight is not finite.
    """
    names_by_layer: dict[str, list[str]] = defaultdict(list)
    for name in weights:
        if name not in model.all_tied_weights_keys:
            layer = re.match(r".*?\.\d+\.", name)
            names_by_layer[layer[0] if layer else ""].append(name)
    for names in names_by_layer.values():
        for name, tensor in revert_weight_conversion(model, {name: weights[name] for name in names}).items():
            rounded = tensor.to(dtype).contiguous()
            _check_finite(rounded, name)
            yield name, rounded


async def load_by_engine(
    engines: Sequence[LoadsWeights], weights: Weights | Path, version: int
) -> list[BaseException | None]:
    """Make all engines load the weights at the same time. Return the error of each engine, or None.

    Raises `WeightSyncError` if a weight in this process is not finite.
    """
    if not isinstance(weights, Path):
        await asyncio.to_thread(_check_all_finite, weights)
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
    return list(await asyncio.gather(*(_outcome_of(call, EngineError) for call in calls)))


async def _outcome_of(call: Awaitable[Any], *kinds: type[Exception]) -> Any:
    """Await `call`. Return its result, or the error that it raises if the error is of one of `kinds`."""
    try:
        return await call
    except kinds as error:
        return error


class FileWeightStore:
    """Stores weights as safetensors, in one subdirectory of `directory` per version.

    `model`: a model of the class of the trained one, loaded from the same folder; its weights are not used.
    `dtype`: the engines' dtype, to which weights are rounded.
    `has_checksums`: whether engines compare the checksums of the tensors.
    """

    def __init__(self, directory: Path, model: Any, dtype: str = "float32", *, has_checksums: bool = True) -> None:
        self._directory = directory.absolute()  # servers may have other working directories
        self._model, self._dtype, self._has_checksums = model, getattr(torch, dtype), has_checksums

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
        checksums: dict[str, int] = {}

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in saved_tensors(self._model, weights, self._dtype):
                if self._has_checksums:
                    checksums[name] = weight_group.checksum(tensor)
                yield name, tensor.cpu()

        for number, bucket in enumerate(weight_group.buckets(tensors(), MAX_FILE_BYTES), 1):
            save_file(dict(bucket), directory / f"model-{number:05d}.safetensors")
        if self._has_checksums:
            (directory / CHECKSUMS_FILE).write_text(json.dumps(checksums), encoding="utf-8")


class NoAnswerError(EngineError):
    """An engine has not answered a call to its workers. The call may still run there."""


class BroadcastTransfer:
    """Sends weights, rounded to `dtype`, from this process to the workers of all engines at once (`weight_group`).

    `model`: a model of the class of the trained one, loaded from the same folder; its weights are not used.

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
        joining = (_outcome_of(self._join(engine, store.port), EngineError, OSError) for engine in engines)
        outcomes = dict(zip(engines, await asyncio.gather(*joining), strict=True))
        first_ranks, size = {}, 1
        for engine, answer in outcomes.items():
            if not isinstance(answer, Exception):
                first_ranks[engine] = size
                size += len(answer["results"])
        if first_ranks:
            tensors = saved_tensors(self._model, weights, self._dtype)
            sending = asyncio.to_thread(weight_group.send, store, size, self._backend, self._timeout_s, tensors)
            options = {"size": size, "backend": self._backend}
            receiving = (
                _outcome_of(self._call(engine, "receive_weights", first_rank=rank, **options), EngineError)
                for engine, rank in first_ranks.items()
            )
            # torch.distributed's errors are RuntimeErrors.
            sent, *answers = await asyncio.gather(_outcome_of(sending, RuntimeError, OSError), *receiving)
            finishing = (self._finish(*pair, sent, version) for pair in zip(first_ranks, answers, strict=True))
            outcomes |= zip(first_ranks, await _errors_of(finishing), strict=True)
        return list(outcomes.values())

    async def _join(self, engine: VllmEngine, port: int) -> Any:
        """Make the engine's workers join. Return the engine's answer, which has one result per worker."""
        host = await asyncio.to_thread(_own_address, engine.url)
        return await self._call(engine, "join_weight_store", host=host, port=port)

    async def _finish(self, engine: VllmEngine, answer: Any, sent: Any, version: int) -> None:
        """Raise the error of the engine or of the sender. Without an error, check what the engine has loaded."""
        if errors := [str(outcome) for outcome in (answer, sent) if isinstance(outcome, Exception)]:
            kind = type(answer) if isinstance(answer, EngineError) else EngineError
            raise kind(f"engine {engine.name}: {'; sender: '.join(errors)}")
        engine.check_loaded(answer, sent)
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
