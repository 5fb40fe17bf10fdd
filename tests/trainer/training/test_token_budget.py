"""Tests of the passes of `TokenBudgetTrainer`. A pass is one forward and backward computation of some rows of a step.

The loss and the gradients equal those of TRL, and only few of the computed positions are padding.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from bench.gpu_parts.step import random_rows, train
from tests.trainer.sampling import QUIET_LIBRARIES
from trainer.training.token_budget import TokenBudgetTrainer, pack_rows

pytestmark = QUIET_LIBRARIES
ROWS, GROUP = 12, 4
VOCABULARY = 300


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("micro_batch_tokens", [90, 250, 100_000])
def test_loss_gradients_and_correction_are_those_of_trl(
    model: Path, tmp_path: Path, seed: int, micro_batch_tokens: int
) -> None:
    rows = random_rows(seed, rows=ROWS, group=GROUP, max_tokens=60, vocabulary=VOCABULARY)
    arguments = {"use_cpu": True, "bf16": False}

    def step(kind: type[GRPOTrainer], **options: Any) -> tuple[dict[str, float], list[torch.Tensor]]:
        found: list[torch.Tensor] = []
        weights = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
        logs = train(kind, weights, model, rows, tmp_path, group=GROUP, gradients=found, arguments=arguments, **options)
        return logs, found

    trl_logs, trl_gradients = step(GRPOTrainer, micro_batches=3)
    logs, found = step(TokenBudgetTrainer, micro_batch_tokens=micro_batch_tokens)
    assert len(found) == len(trl_gradients) > 0
    for gradient, expected in zip(found, trl_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)
    # TRL logs the loss of a step as the sum over its micro-batches.
    assert logs["loss"] == pytest.approx(trl_logs["loss"], rel=1e-3, abs=1e-6)
    for name, trl_name in (
        ("logprob_diff_mean", "sampling/sampling_logp_difference/mean"),
        ("importance_ratio_mean", "sampling/importance_sampling_ratio/mean"),
    ):
        assert logs[name] == pytest.approx(trl_logs[trl_name], rel=1e-3)


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=40),
    st.integers(100, 400),
)
def test_every_row_is_in_one_group_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    groups = list(pack_rows(lengths, range(len(lengths)), max_tokens))
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(len(group) * max(lengths[row] for row in group) <= max_tokens for group in groups)


def test_rows_of_the_papers_first_stage_are_padded_little() -> None:
    """A rank of the paper's run has 128 of 8,192 rows, of 1K to 4K tokens on average with a long tail up to 8K."""
    rng = random.Random(0)
    lengths = [min(8192, round(rng.lognormvariate(7.6, 0.7))) + rng.randint(80, 300) for _ in range(128)]
    positions = sum(len(group) * max(lengths[row] for row in group) for group in pack_rows(lengths, range(128), 14_336))
    assert positions < 1.15 * sum(lengths)
