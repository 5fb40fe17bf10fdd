"""How far a stage has come: what TRL's trainers report, kept on disk.

Invariants:
- A checkpoint counts only once it is whole: a mark is put into it last, so one that a kill tore is passed over.
- Every optimiser step has one row of metrics, written before the checkpoint of that step.
- Steps are those of the whole run: `first_step` is how many came before the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from trainer.config import ConfigError, HardwareConfig, SftConfig, StageConfig
from trainer.runs.run_folder import RunFolder

_MARK = "whole"
CHECKPOINTS_KEPT = 2
"""While the newer one is being written, the older one is what a kill leaves."""
RANKS_WAIT_S = 24 * 3600
"""Seconds that other ranks wait for the first one's engines and rollouts: a step of long episodes may take hours."""
COLLECTIVE_S = 3600
"""Seconds that any other exchange between ranks may take. The longest is a checkpoint that the first rank writes."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a stage leaves: a model's folder, and the checkpoint from which the next one may keep the optimiser."""

    model: Path
    checkpoint: Path


@dataclass(frozen=True, slots=True)
class Training:
    """What SFT and a stage are told alike."""

    model: Path
    """The folder or hub name of what is trained."""
    out: Path
    """Where checkpoints and the trained model go; its name is the stage's."""
    record: RunFolder
    seed: int
    first_step: int = 0
    """Steps of the run that came before."""
    dtype: str = "float32"
    """What passes compute in; weights are float32 whatever it says."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def arguments(self, settings: SftConfig | StageConfig, rows: int) -> dict[str, Any]:
        """What both of TRL's trainers are told alike, for steps of `rows` rows. Raises `ConfigError`."""
        world, is_sharded = ranks(self.hardware).num_processes, self.hardware.sharding == "full"
        return {
            "output_dir": str(self.out / "checkpoints"),
            "seed": self.seed,
            "per_device_train_batch_size": settings.micro_batch,
            "gradient_accumulation_steps": rows // (settings.micro_batch * world),
            "optim": "adamw_torch",
            "learning_rate": settings.lr,
            "use_cpu": not self.hardware.gpus,
            "model_init_kwargs": {"dtype": "float32"},  # steps of 1e-6 would be lost in bfloat16
            "bf16": self.dtype == "bfloat16",
            "gradient_checkpointing": settings.is_checkpointing,
            "ddp_find_unused_parameters": False,
            "fsdp": is_sharded or None,
            # Gradients are reduced and sharded after every micro-batch. Without this each rank would keep those of the
            # whole model until the last one, and sum them in bfloat16 (`no_sync` of FSDP).
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": is_sharded}},
            "save_strategy": "steps",
            "save_steps": settings.save_steps,
            "save_total_limit": CHECKPOINTS_KEPT,
            "logging_steps": 1,
            "dataloader_pin_memory": self.hardware.gpus > 0,
            "report_to": "none",
            "disable_tqdm": True,
        }

    def run(self, trainer: Any, start: Path | None) -> Trained:
        """Train, from checkpoint `start` on if there is one, and save the model."""
        trainer.remove_callback(PrinterCallback)
        # A tied weight is written once, under its first name: on a resume the other is not missing.
        trainer.model._keys_to_ignore_on_save = set(trainer.model.all_tied_weights_keys)
        trainer.train(resume_from_checkpoint=str(start) if start else None)
        trainer.save_model(str(self.out / "model"))
        wait_for_ranks(self.hardware)  # the first one marks checkpoints
        checkpoint = latest(self.out / "checkpoints")
        assert checkpoint is not None, f"{self.out}: the last step has a checkpoint"
        return Trained(self.out / "model", checkpoint)


class OneGpu(TrainingArguments):  # type: ignore[misc]
    """Arguments of a process that trains on one GPU. Alone, it would share its passes out to all that it sees."""

    @property
    def n_gpu(self) -> int:
        return 1 if super().n_gpu else 0


class Progress(TrainerCallback):  # type: ignore[misc]
    """Writes rows and marks checkpoints, on the first rank. `offset` is added to the trainer's own count of steps."""

    def __init__(self, training: Training, *, offset: int) -> None:
        self.stage, self.record, self.offset = training.out.name, training.record, offset

    def numbers(self, logs: Mapping[str, float]) -> dict[str, float]:
        """A row's metrics, from what the trainer logged of a step."""
        logged = {name: float(logs[name]) for name in ("loss", "grad_norm") if name in logs}
        return {"learning_rate": self._lr, **logged}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A step has the rate that is due at its middle: at its beginning the first step's is 0, which teaches nothing.
        schedule, groups = kwargs["lr_scheduler"], kwargs["optimizer"].param_groups
        for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            self._lr = group["lr"] = base * factor(schedule.last_epoch + 0.5)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Mapping[str, float], **_: Any
    ) -> None:
        if "loss" in logs and state.is_world_process_zero:  # the last log is of the whole training
            step = self.offset + state.global_step
            self.record.append_metrics({"step": step, "stage": self.stage, **self.numbers(logs)})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / _MARK).touch()


@contextmanager
def usable(model: Path) -> Iterator[None]:
    """What cannot be loaded, or not be worked with, is a wrong setting."""
    try:
        yield
    except (OSError, ValueError) as why:
        raise ConfigError(f"model {model}: {' '.join(str(why).split())}") from why


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a stage's `checkpoints`."""
    return max((mark.parent for mark in folder.glob(f"checkpoint-*/{_MARK}")), key=steps_of, default=None)


def steps_of(checkpoint: Path) -> int:
    """The optimiser steps that are in a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def ranks(hardware: HardwareConfig) -> PartialState:
    """The processes that train together, as torchrun started them; one alone is rank 0.

    Raises `ConfigError` where they are not as `hardware` says.
    """
    said = f"hardware: nodes={hardware.nodes}, gpus={hardware.gpus}"
    if hardware.gpus and not torch.cuda.is_available():  # a GPU may be ROCm's
        raise ConfigError(f"{said}: expected GPUs, got none that torch can use; gpus=0 trains on the CPU")
    state = PartialState(cpu=not hardware.gpus, timeout=timedelta(seconds=COLLECTIVE_S))
    expected = hardware.nodes * max(1, hardware.gpus)
    if state.num_processes != expected:
        raise ConfigError(
            f"{said}: expected {expected} processes that train, got {state.num_processes}; have hardware.launch start "
            "so many, for a GPU each, such as by torchrun --nproc-per-node"
        )
    waiting_group()
    return state


@cache
def waiting_group() -> Any:
    """The process group on which ranks wait for the first one: gloo, with a timeout of `RANKS_WAIT_S`.

    A rank that waits on NCCL or RCCL keeps a core busy and a kernel on its GPU, which an engine may be using. A rank
    that waits on gloo sleeps in the kernel. None where there is one rank. All ranks make it together, in `ranks`.
    """
    if not torch.distributed.is_initialized():
        return None
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=RANKS_WAIT_S))


def wait_for_ranks(hardware: HardwareConfig) -> None:
    """Return once every rank has called this."""
    if ranks(hardware).num_processes > 1:
        torch.distributed.barrier(group=waiting_group())
