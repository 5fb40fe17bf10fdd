"""The local engine on the device: tokens per second, and its log-probabilities against those of the trainer's model."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench.gpu_parts.check import Checks, Finding, Settings
from bench.gpu_parts.memory import SHAPES, SMALL
from bench.gpu_parts.step import random_model
from trainer.config import ModelShape
from trainer.engines.engine import SamplingParams
from trainer.engines.local import LocalEngine
from trainer.sync.probe import BOUNDS, SyncProbe

PROMPT_TOKENS = 32


def checks(settings: Settings) -> Checks:
    shape = settings.choose(SHAPES["0.1B"], SMALL)
    return {dtype: partial(_measure, settings, shape, dtype) for dtype in ("bfloat16", "float32")}


def _measure(settings: Settings, shape: ModelShape, dtype: str) -> Finding:
    model = random_model(shape, settings.device, dtype)
    folder = settings.path / dtype
    model.config.save_pretrained(folder)  # the probe reads the sizes there
    return asyncio.run(_run(settings, model, folder, dtype))


async def _run(settings: Settings, model: Any, folder: Path, dtype: str) -> Finding:
    num_requests, num_tokens = settings.choose((64, 64), (4, 8))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = LocalEngine(model, max_num_seqs=num_requests, max_model_len=256)
    try:
        rng = random.Random(0)
        prompts = [[rng.randrange(model.config.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_requests)]
        sampling = [SamplingParams(max_tokens=num_tokens, seed=seed) for seed in range(num_requests)]
        started_at = perf_counter()
        generations = await asyncio.gather(*map(engine.generate, prompts, sampling))
        seconds = perf_counter() - started_at
        probe = SyncProbe(folder, dtype, device=settings.device)
        expected = probe.expected_logprobs(weights)
        scores = await asyncio.gather(*map(engine.logprobs, probe.sequences))
    finally:
        await engine.close()
    sampled = sum(len(generation.ids) for generation in generations)
    difference = float((torch.tensor(scores, dtype=torch.float64) - expected.logprobs).square().mean().sqrt())
    bound = BOUNDS[dtype] * expected.rounding
    return {
        "holds": difference <= bound, "tokens_per_s": sampled / seconds, "sequences": num_requests,
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
        "logprob_difference": difference, "bound": bound, "engine_device": str(model.device),
    }  # fmt: skip
