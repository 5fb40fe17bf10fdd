"""Training steps of TRL's `GRPOTrainer`, or of a subclass, on given rows: without engines, tools and checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trainer.config import ModelShape
from trainer.data import synthetic
from trainer.data.tiny_model import write_tiny_model
from trainer.training.context import RankArguments
from trainer.training.token_budget import IMPORTANCE_RATIO_CAP

Rows = dict[str, list[Any]]
"""The columns that TRL's `rollout_func` returns, and the column `score`."""


class Arguments(RankArguments, GRPOConfig):  # type: ignore[misc]
    """TRL's arguments, for one process on one device."""


class _NoEngines:
    def sync_weights(self) -> None:
        pass


def write_tokenizer(folder: Path) -> Path:
    """Write the tiny model, whose tokenizer the trainers need, and return its folder."""
    write_tiny_model(folder, conversations=synthetic.conversations(50, 0, fault_seed=0))
    return folder


def random_model(shape: ModelShape, device: str, dtype: str = "float32", seed: int = 0) -> Qwen3ForCausalLM:
    """Return a Qwen3 with random weights."""
    sizes = {name: value for name, value in asdict(shape).items() if value is not None}
    config = Qwen3Config(**sizes | {"head_dim": shape.head_size, "max_position_embeddings": 1 << 15})
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).to(getattr(torch, dtype))


def random_rows(seed: int, *, rows: int, group: int, max_tokens: int, vocabulary: int) -> Rows:
    """Return rows of very different lengths, with observations. The first group has no token in the loss. The
    log-probabilities are not those of the model."""
    rng = random.Random(seed)
    columns: Rows = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "score")}
    for row in range(rows):
        length = rng.choice((1, 3, max_tokens // 3, max_tokens))
        columns["prompt_ids"].append([rng.randrange(vocabulary) for _ in range(rng.randint(1, max_tokens // 2))])
        columns["completion_ids"].append([rng.randrange(vocabulary) for _ in range(length)])
        columns["logprobs"].append([rng.uniform(-9, -3) for _ in range(length)])
        columns["env_mask"].append([int(rng.random() < 0.7) if row >= group else 0 for _ in range(length)])
        columns["score"].append(float(rng.random() < 0.5))
    return columns


def train(
    kind: type[GRPOTrainer],
    model: PreTrainedModel,
    tokenizer: Path,
    rows: Rows,
    folder: Path,
    *,
    group: int,
    micro_batches: int = 1,
    callbacks: Sequence[TrainerCallback] = (),
    gradients: list[torch.Tensor] | None = None,
    arguments: dict[str, Any],
    **options: Any,
) -> dict[str, float]:
    """Train steps on the same `rows`, and return what the trainer has logged for the last one.

    `gradients`: receives the gradients of each step. `arguments`: further arguments of GRPOConfig. `options`: further
    arguments of `kind`.
    """
    num_rows = len(rows["score"])
    correction = {
        "vllm_importance_sampling_correction": kind is GRPOTrainer,  # `TokenBudgetTrainer` corrects itself
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": IMPORTANCE_RATIO_CAP,
    }
    settings: dict[str, Any] = {
        "per_device_train_batch_size": num_rows // micro_batches, "gradient_accumulation_steps": micro_batches,
        "num_generations": group, "max_completion_length": max(map(len, rows["completion_ids"])), "max_steps": 1,
        "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dapo", "scale_rewards": "group",
        "max_grad_norm": 1e9, "bf16": False, "report_to": "none", "disable_tqdm": True, "learning_rate": 0.0,
        "gradient_checkpointing": False, "shuffle_dataset": False, "save_strategy": "no", "logging_steps": 1,
        "dataloader_pin_memory": False, **correction, **arguments,
    }  # fmt: skip
    trainer = kind(
        model=model,
        reward_funcs=lambda score, **_: score,
        args=Arguments(str(folder), **settings),
        train_dataset=Dataset.from_dict({"prompt": [""] * (num_rows // group * settings["max_steps"])}),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
        rollout_func=lambda prompts, trainer: deepcopy(rows),
        callbacks=list(callbacks),
        **options,
    )
    trainer.vllm_generation, trainer.use_vllm, trainer._last_loaded_step = _NoEngines(), True, -1
    clip = trainer.accelerator.clip_grad_norm_

    def keep_gradients(parameters: Any, *rest: Any) -> Any:
        parameters = list(parameters)
        if gradients is not None:
            gradients.extend(parameter.grad.clone() for parameter in parameters if parameter.grad is not None)
        return clip(parameters, *rest)

    trainer.accelerator.clip_grad_norm_ = keep_gradients
    trainer.train()
    logs: dict[str, float] = [log for log in trainer.state.log_history if "loss" in log][-1]
    return logs | getattr(trainer, "loss_means", {})  # means that `TokenBudgetTrainer` does not log
