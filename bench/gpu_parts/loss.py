"""The loss of `TokenBudgetTrainer` against TRL's own on this device: its kernels and its fused head.

TRL pads and batches the rows in another way, so sums are rounded differently. In float32 the gradients must be equal to
rounding. In bfloat16 the gradient of TRL in float32 is the reference: ours may be farther from it than TRL's own
gradient in bfloat16 by at most the factor `MAX_ROUNDING_RATIO`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from trl import GRPOTrainer

from bench.gpu_parts.check import Checks, Finding, Settings
from bench.gpu_parts.step import random_model, random_rows, train, write_tokenizer
from trainer.config import ModelShape
from trainer.training.token_budget import TokenBudgetTrainer

MAX_FLOAT32_ERROR = 1e-3
"""Largest relative difference of the gradients in float32."""
MAX_ROUNDING_RATIO = 1.5
ROWS, GROUP = 12, 4
Gradient = Callable[[Any, str], tuple[torch.Tensor, float]]
"""Takes the class of the trainer and a dtype. Returns the gradient and the loss of one step."""


def checks(settings: Settings) -> Checks:
    gradient = _gradients(settings)
    return {dtype: partial(_compare, gradient, dtype, settings.device) for dtype in ("float32", "bfloat16")}


def _compare(gradient: Gradient, dtype: str, device: str) -> Finding:
    (exact, exact_loss), (ours, loss) = gradient(GRPOTrainer, "float32"), gradient(TokenBudgetTrainer, dtype)
    error = _relative_error(ours, exact)
    finding = {"kernel": _kernel(device), "loss": loss, "trl_loss": exact_loss, "gradient_error": error}
    if dtype == "float32":
        is_same_loss = abs(loss - exact_loss) <= MAX_FLOAT32_ERROR * max(1.0, abs(exact_loss))
        return {"holds": is_same_loss and error <= MAX_FLOAT32_ERROR, **finding}
    trl_error = _relative_error(gradient(GRPOTrainer, dtype)[0], exact)
    return {"holds": error <= MAX_ROUNDING_RATIO * trl_error, **finding, "trl_gradient_error": trl_error}


def _gradients(settings: Settings) -> Gradient:
    """Return a function that computes the gradient and the loss of one step."""
    tokens, vocabulary = settings.choose((1500, 40_000), (20, 640))  # a tile has 32,768 entries
    shape = ModelShape(
        num_hidden_layers=2, hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=vocabulary, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    rows = random_rows(0, rows=ROWS, group=GROUP, max_tokens=tokens, vocabulary=vocabulary)
    tokenizer = write_tokenizer(settings.path / "tokenizer")

    @cache
    def gradient(kind: Any, dtype: str) -> tuple[torch.Tensor, float]:
        found: list[torch.Tensor] = []
        model = random_model(shape, settings.device)
        batches = {"micro_batches": 3} if kind is GRPOTrainer else {"micro_batch_tokens": 3 * tokens}
        arguments = {"bf16": dtype == "bfloat16", "use_cpu": settings.device == "cpu"}
        logs = train(
            kind, model, tokenizer, rows, settings.path, group=GROUP, gradients=found, arguments=arguments, **batches
        )
        return torch.cat([tensor.flatten() for tensor in found]), logs["loss"]

    return gradient


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _kernel(device: str) -> str:
    """Return "triton" if TRL's head uses its Triton kernels on this device."""
    use_triton = getattr(import_module("trl.kernels.chunked_logprob"), "_use_triton", None)
    return "unknown" if use_triton is None else "triton" if use_triton(torch.device(device)) else "torch"
