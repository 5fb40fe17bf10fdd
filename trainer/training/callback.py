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
    def __init__(self, context: TrainingContext, *, step_offset: int) -> None:
        """`step_offset` plus the trainer's own step count is the training step of the run."""
        self.stage, self.run_folder, self.step_offset = context.stage_dir.name, context.run_folder, step_offset
        self._hardware = context.hardware

    def metrics_from_logs(self, logs: Mapping[str, float]) -> dict[str, float]:
        """Return a step's metrics, computed from the values that the trainer has logged for it."""
        logged = {name: float(logs[name]) for name in ("loss", "grad_norm") if name in logs}
        return {"learning_rate": self._learning_rate, **logged}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A warm-up begins with a learning rate of 0, with which a step would have no effect. So each step uses the rate
        # that the schedule has in the middle of the step.
        schedule, groups = kwargs["lr_scheduler"], kwargs["optimizer"].param_groups
        for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            self._learning_rate = group["lr"] = base * factor(schedule.last_epoch + 0.5)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Mapping[str, float], **_: Any
    ) -> None:
        step = self.step_offset + state.global_step
        if diverged := [name for name in ("loss", "grad_norm") if not isfinite(logs.get(name, 0.0))]:  # on all ranks
            raise TrainingDiverged(
                f"{self.stage}, step {step}: {diverged[0]} is {logs[diverged[0]]}: expected a finite number; lower the "
                "learning rate, in a new run folder. The last checkpoint has the weights of an earlier step"
            )
        if "loss" in logs and state.is_world_process_zero:  # the log at the end of the training has no loss
            self.run_folder.append_metrics({"step": step, "stage": self.stage} | self.metrics_from_logs(logs))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        wait_for_ranks(self._hardware)  # until each rank has written its part
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE_MARK).touch()
