"""Peak memory of a training step against the resource plan, tokens per second, and the share of the card's peak."""

from __future__ import annotations

import ctypes
import resource
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import TrainerCallback

from bench import fits
from bench.gpu_parts.check import Checks, Finding, Settings, free_memory
from bench.gpu_parts.step import Rows, random_model, train, write_tokenizer
from trainer.config import EnginesConfig, ModelShape, RunConfig, StageConfig
from trainer.recipe.resource_plan import GB, num_parameters, resource_plan
from trainer.training.token_budget import TokenBudgetTrainer

MAX_RATIO = 1.1
"""Largest ratio of the measured to the planned peak."""
MIN_RATIO = 0.5
"""Smallest such ratio. A plan far above the need refuses runs that would fit."""
MAX_TOKENS = 16_384
PROMPT_TOKENS = 128
STEPS = 3
"""Training steps. The first one creates the optimizer's states, and the last one is timed."""
SHAPES = {
    "0.1B": ModelShape(30, 576, 1536, 9, 3, 49_152, tie_word_embeddings=True),  # SmolLM2-135M
    "0.5B": fits.SHAPES["Qwen2.5-0.5B"],
    "1.5B": fits.SHAPES["Qwen2.5-1.5B"],
}
SMALL = ModelShape(2, 64, 192, 2, 1, 640, tie_word_embeddings=True)
PEAK_FLOPS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200 NVL": 835e12, "H200": 989e12, "A100": 312e12,
    "L40S": 362e12, "L4": 121e12, "MI300X": 1307e12, "MI325X": 1307e12,
}  # fmt: skip
"""Dense bfloat16 matrix operations per second by a part of the card's name, from the data sheets of NVIDIA (half of the
figures with sparsity) and AMD. The first name that fits counts."""


def checks(settings: Settings) -> Checks:
    shapes = settings.choose(SHAPES, {"small": SMALL})
    tokens = settings.choose((4096, MAX_TOKENS), (256,))
    tokenizer = write_tokenizer(settings.path / "tokenizer")
    return {
        f"{name}, {count} tokens{', gradient checkpointing' * checkpointing}": partial(
            _measure, settings, shapes[name], count, checkpointing, tokenizer
        )
        for name, checkpointing, count in product(shapes, (False, True), tokens)
    }


def _measure(settings: Settings, shape: ModelShape, tokens: int, checkpointing: bool, tokenizer: Path) -> Finding:
    planned = planned_gb(shape, tokens, checkpointing)
    settings.require_memory(planned)
    free_memory()
    reset_peak(settings.device)
    used_gb = peak_gb(settings.device)
    clock = _StepClock(settings.device)
    arguments: dict[str, Any] = {
        "bf16": True, "use_cpu": settings.device == "cpu", "gradient_checkpointing": checkpointing,
        "max_steps": STEPS, "learning_rate": 1e-6, "optim": StageConfig.optim,
    }  # fmt: skip
    model, rows = random_model(shape, settings.device), _two_rows(tokens)
    options = {"micro_batch_tokens": tokens, "callbacks": [clock]}
    train(TokenBudgetTrainer, model, tokenizer, rows, settings.path, group=2, arguments=arguments, **options)
    measured_gb = peak_gb(settings.device) - used_gb
    ratio, tokens_per_s = measured_gb / planned, 2 * tokens / clock.seconds
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in settings.card), None)
    finding: Finding = {
        "planned_gb": planned, "measured_gb": measured_gb, "ratio": ratio, "tokens_per_s": tokens_per_s,
        "share_of_peak": tokens_per_s * flops_per_token(shape, tokens) / peak if peak else None,
    }  # fmt: skip
    if settings.device == "cpu":
        return {"holds": None, "reason": "the resident set of a process also has freed memory", **finding}
    return {"holds": MIN_RATIO <= ratio <= MAX_RATIO, **finding}


def planned_gb(shape: ModelShape, tokens: int, checkpointing: bool) -> float:
    """Return the resource plan's peak of an RL stage with passes of `tokens` in bfloat16."""
    stage = StageConfig(
        max_response_tokens=tokens - PROMPT_TOKENS, micro_batch_tokens=tokens, gradient_checkpointing=checkpointing
    )
    config = RunConfig(stages={"rl1": stage}, engines=EnginesConfig(max_model_len=2 * MAX_TOKENS))
    return resource_plan(config, shape).stages["rl1"].train_bytes / GB


class _StepClock(TrainerCallback):  # type: ignore[misc]
    """Measures the seconds of the last step."""

    seconds = 0.0

    def __init__(self, device: str) -> None:
        self._device = device

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started_at = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds = self._now() - self._started_at

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return perf_counter()


def _two_rows(tokens: int) -> Rows:
    """Return the two rows of a group. Each is a pass of its own, which attends over all `tokens`."""
    response = tokens - PROMPT_TOKENS
    return {
        "prompt_ids": [list(range(3, 3 + PROMPT_TOKENS))] * 2,
        "completion_ids": [[(7 * position + row) % 500 for position in range(response)] for row in (0, 1)],
        "logprobs": [[-6.0] * response] * 2,
        "env_mask": [[1] * response] * 2,
        "score": [0.0, 1.0],
    }


def flops_per_token(shape: ModelShape, tokens: int) -> float:
    """Return the matrix operations of a forward and a backward pass per token of a row. Operations that gradient
    checkpointing repeats do not count. With causal attention, a token attends to half of the row on average."""
    attention = 6 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_size * tokens
    return 6.0 * num_parameters(shape) + attention


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the kernel
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak of the resident set to its present size


def peak_gb(device: str) -> float:
    """Return the peak since `reset_peak`: of torch's allocations, or on a CPU of the resident set."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
