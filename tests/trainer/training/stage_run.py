"""Runs one RL stage on the tiny model with fake rollouts, and compares weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.sampling import Sampler, problems
from trainer.config import StageConfig
from trainer.episodes.episode import Problem
from trainer.rollout.loop_thread import LoopThread
from trainer.rollout.runtime import RolloutRuntime
from trainer.runs.run_folder import RunFolder
from trainer.training.context import TrainedModel, TrainingContext
from trainer.training.grpo import train_stage
from trainer.training.token_budget import TokenBudgetTrainer

STAGE = StageConfig(
    name="rl1", steps=2, max_response_tokens=16, max_turns=2, problems_per_step=2, samples_per_problem=8,
    kept_per_problem=4, micro_batch_tokens=64, learning_rate=1e-3, warmup_steps=0, save_steps=2, max_grad_norm=1e6,
)  # fmt: skip
ROWS_PER_STEP = STAGE.problems_per_step * STAGE.kept_per_problem
SEED = 3

Weights = dict[str, torch.Tensor]


class StageRun:
    """A stage in a run folder. Each `run` continues from the newest checkpoint."""

    def __init__(self, path: Path, model: Path, loop_thread: LoopThread, **changes: Any) -> None:
        """`changes` are the settings of the stage that differ from those of `STAGE`."""
        self.model, self.loop_thread = model, loop_thread
        self.stage = replace(STAGE, **changes)
        self.run_folder = RunFolder(path)

    def run(
        self,
        sampler: Sampler,
        *,
        num_problems: int = 6,
        chosen: Sequence[Problem] = (),
        optimizer_checkpoint: Path | None = None,
        sleep: Callable[[], Awaitable[None]] | None = None,
        evaluate: Callable[[int], float] | None = None,
        **context_options: Any,
    ) -> TrainedModel:
        stage_dir = self.run_folder.path / "stages" / self.stage.name
        return train_stage(
            self.stage,
            TrainingContext(self.model, stage_dir, self.run_folder, seed=SEED, **context_options),
            problems=chosen or problems(num_problems),
            rollouts=RolloutRuntime(self.loop_thread, sampler, sampler, sleep),
            optimizer_checkpoint=optimizer_checkpoint,
            evaluate=evaluate,
        )


def load_weights(model: Path) -> Weights:
    return AutoModelForCausalLM.from_pretrained(model).state_dict()


def are_equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def record_loss_inputs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list to which the inputs of each loss are appended, one entry per step."""
    recorded: list[dict[str, Any]] = []
    compute_loss = TokenBudgetTrainer.compute_loss

    def record(self: Any, model: Any, inputs: dict[str, Any], **options: Any) -> Any:
        recorded.append(inputs)
        return compute_loss(self, model, inputs, **options)

    monkeypatch.setattr(TokenBudgetTrainer, "compute_loss", record)
    return recorded
