"""Tests of the passes of `TokenBudgetTrainer`. A pass is one forward and backward computation of some rows of a step.

The loss and the gradients equal those of TRL, and only few of the computed positions are padding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.trainer.sampling import QUIET_LIBRARIES
from trainer.training.token_budget import IMPORTANCE_RATIO_CAP, TokenBudgetTrainer, pack_rows

pytestmark = QUIET_LIBRARIES
ROWS, GROUP = 12, 4
VOCABULARY = 300


def rollout(seed: int) -> Callable[..., dict[str, list[Any]]]:
    """Return a `rollout_func` with rows of very different lengths, observations, and rows without a token in the loss.
    The engine's log-probabilities differ from the trainer's."""
    rng = random.Random(seed)
    rows: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "score")
    }
    for row in range(ROWS):
        length = rng.choice((1, 3, 20, 60))
        rows["prompt_ids"].append([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))])
        rows["completion_ids"].append([rng.randrange(VOCABULARY) for _ in range(length)])
        rows["logprobs"].append([rng.uniform(-9, -3) for _ in range(length)])
        rows["env_mask"].append([int(rng.random() < 0.7) if row // GROUP else 0 for _ in range(length)])
        rows["score"].append(float(rng.random() < 0.5))
    return lambda prompts, trainer: deepcopy(rows)


def gradients(kind: type[GRPOTrainer], model: Path, tmp_path: Path, seed: int, **options: Any) -> Any:
    """Return the loss, and the gradients of one step."""
    is_trl = kind is GRPOTrainer
    correction = {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": IMPORTANCE_RATIO_CAP,
    }
    arguments = GRPOConfig(
        str(tmp_path / kind.__name__), per_device_train_batch_size=ROWS // 3 if is_trl else ROWS,
        gradient_accumulation_steps=3 if is_trl else 1, num_generations=GROUP, max_completion_length=64, max_steps=1,
        beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo", scale_rewards="group", max_grad_norm=1e9,
        use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, learning_rate=0.0, shuffle_dataset=False,
        vllm_importance_sampling_correction=is_trl, save_strategy="no", logging_steps=1, dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"}, **correction,
    )  # fmt: skip
    trainer = kind(
        model=str(model),
        reward_funcs=lambda score, **_: score,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [""] * (ROWS // GROUP)}),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=rollout(seed),
        **options,
    )
    trainer.vllm_generation, trainer.use_vllm, trainer._last_loaded_step = _NoEngines(), True, -1
    found: list[Any] = []
    clip = trainer.accelerator.clip_grad_norm_

    def keep_gradients(parameters: Any, *rest: Any) -> Any:
        parameters = list(parameters)
        found.extend(parameter.grad.clone() for parameter in parameters if parameter.grad is not None)
        return clip(parameters, *rest)

    trainer.accelerator.clip_grad_norm_ = keep_gradients
    trainer.train()
    (logs,) = [log for log in trainer.state.log_history if "loss" in log]
    return logs | getattr(trainer, "loss_means", {}), found


class _NoEngines:
    def sync_weights(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("micro_batch_tokens", [90, 250, 100_000])
def test_loss_gradients_and_correction_are_those_of_trl(
    model: Path, tmp_path: Path, seed: int, micro_batch_tokens: int
) -> None:
    trl_logs, trl_gradients = gradients(GRPOTrainer, model, tmp_path, seed)
    logs, found = gradients(TokenBudgetTrainer, model, tmp_path, seed, micro_batch_tokens=micro_batch_tokens)
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
