"""Writes a training's metrics and marks its checkpoints, on the first rank.

Invariants:
- Every optimizer step has one row of metrics, written before the checkpoint of that step.
- No checkpoint has the weights of a step whose loss or gradient was not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer.training.context import COMPLETE_MARK, TrainingContext, wait_for_ranks


class TrainingDiverged(Exception):
    """The loss or the gradient of a step was not finite, so neither are the weights after it."""


class MetricsCallback(TrainerCallback):  # type: ignore[misc]
    """Does this for SFT, whose loop is that of transformers."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._learning_rate = set_learning_rate(kwargs["optimizer"], kwargs["lr_scheduler"])

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Mapping[str, float], **_: Any
    ) -> None:
        if "loss" in logs:  # the log at the end of the training has none
            logged = {name: float(logs[name]) for name in ("loss", "grad_norm") if name in logs}
            step = self._context.first_step + state.global_step
            write_metrics(self._context, step, {"learning_rate": self._learning_rate, **logged})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        mark_checkpoint(self._context, state.global_step)


def set_learning_rate(optimizer: Any, schedule: Any) -> float:
    """Give the optimizer the rate that `schedule` has in the middle of the next step, and return this rate. A warm-up
    begins with a learning rate of 0, with which a step would have no effect."""
    rate = 0.0
    for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        rate = group["lr"] = base * factor(schedule.last_epoch + 0.5)
    return rate


def write_metrics(context: TrainingContext, step: int, row: Mapping[str, float]) -> None:
    """Write the row of a step of the run, on the first rank. Raise `TrainingDiverged` on all ranks if its loss or its
    gradient is not finite."""
    if diverged := [name for name in ("loss", "grad_norm") if not isfinite(row.get(name, 0.0))]:
        raise TrainingDiverged(
            f"{context.stage_dir.name}, step {step}: {diverged[0]} is {row[diverged[0]]}: expected a finite number; "
            "lower the learning rate, in a new run folder. The last checkpoint has the weights of an earlier step"
        )
    if context.is_first_rank:
        context.run_folder.append_metrics({"step": step, "stage": context.stage_dir.name, **row})


def mark_checkpoint(context: TrainingContext, optimizer_steps: int) -> None:
    """Mark the checkpoint after this number of optimizer steps as complete, once each rank has written its part."""
    wait_for_ranks(context.hardware)
    if context.is_first_rank:
        Path(context.checkpoints_dir, f"checkpoint-{optimizer_steps}", COMPLETE_MARK).touch()
