"""The sync probe: trainer and engine score the same `NUM_PROBES` sequences after a weight sync.

The root mean square (RMS) of the differences should not exceed a bound: a multiple (`BOUNDS`) of the model's rounding
error, which is the RMS of the differences between the trainer's scores in float32 and in bfloat16. The probe detects
that an engine computes otherwise than the trainer, for any reason. It does not detect small steps: in bfloat16 a layer
must differ by 5 to 10 % of its weights' standard deviation, in float32 by 0.1 to 0.5 %.

`BOUNDS` was measured on a CPU with random Qwen3 models of width 64; no GPU and no vLLM took part. With equal weights
the difference was at most 0.71 of the bound in bfloat16 (10,000 models) and 0.004 in float32; with one layer of another
model at least 5.1 and 660; with two layers exchanged at least 1.2 and 150. GPU kernels may round more. So a difference
above the bound is a warning, and only one above `ERROR_FACTOR` times the bound is an error.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import cpu_offload, init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.engines.engine import Engine, Weights
from trainer.sync.saved_tensors import WeightSyncError, check_finite

logger = logging.getLogger(__name__)

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
        check_finite(exact, "the log-probabilities of the trainer's own model")
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


def _rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())
