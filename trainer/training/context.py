"""The parts that SFT and an RL stage share: arguments of TRL, checkpoints, the saved model, and the ranks.

A rank is one of the processes that train together.

Invariants:
- The last file of a checkpoint is its mark. A checkpoint without a mark, which a kill has left incomplete, is never
  used.
- Training steps are counted over the whole run. `first_step` is the number of steps before the stage.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainingArguments
from transformers.initialization import no_init_weights
from transformers.trainer_callback import PrinterCallback

from trainer.config import ConfigError, HardwareConfig, SftConfig, StageConfig, needs_bitsandbytes
from trainer.json_files import read_json, write_json
from trainer.runs.run_folder import RunFolder
from trainer.training.adapters import peft_config, plain_weights, save_plain_model

if TYPE_CHECKING:
    from transformers import Trainer

COMPLETE_MARK = "complete"
"""Name of the file that marks a checkpoint as complete."""
MIN_CHECKPOINTS = 2
"""Least number of checkpoints on disk during a training. If a kill comes while the newest is written, one is left."""
BEST_MARK = "best/best.json"
"""The file with the step and the accuracy of a stage's best evaluation, relative to the stage's folder. The model of
that step is in the same folder."""
COLLECTIVE_TIMEOUT_S = 24 * 3600
"""Seconds that the other ranks wait for the first rank's engines and rollouts. Rollouts of long episodes take hours."""
EXCHANGE_TIMEOUT_S = 3600
"""Timeout in seconds of any other exchange between ranks. The longest wait is for a checkpoint that the first rank
writes."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The result of a training: a model folder, and the checkpoint from which the next stage may take its optimizer."""

    model: Path
    checkpoint: Path


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """The inputs that SFT and an RL stage have in common."""

    model: Path
    """The folder or hub name of the model to train."""
    stage_dir: Path
    """The folder for checkpoints and the trained model, named after the stage."""
    run_folder: RunFolder
    seed: int
    first_step: int = 0
    """The number of training steps of the run before this stage."""
    dtype: str = "float32"
    """The dtype of forward and backward passes, and of the weights that an adapter freezes. Weights that are trained
    are float32 in any case."""
    attn_implementation: str = ""
    """The implementation of attention; if empty, the one that transformers chooses."""
    peft: Mapping[str, Any] = field(default_factory=dict)
    """The options of a peft adapter. If they are empty, the training changes the model's own weights."""
    eval_steps: int = 0
    """The number of training steps between two evaluations inside an RL stage. With 0 there is no evaluation."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    correct_above: float = 0.0
    """An episode with a larger reward is correct."""
    keep_checkpoints: int = 0
    """The number of the newest checkpoints that stay on disk, if it is more than `MIN_CHECKPOINTS`."""
    engines_sleep: bool = False
    """Whether the engines are on the training GPUs, and free their memory by vLLM's sleep mode between rollouts."""

    def trl_arguments(
        self, settings: SftConfig | StageConfig, rows: int, micro_batch_rows: int | None = None
    ) -> dict[str, Any]:
        """Return the arguments that TRL's trainers for SFT and for GRPO have in common.

        A step has `rows` rows. A rank computes them in micro-batches of `micro_batch_rows` rows. With None, all rows of
        a rank are one batch. Raises `ConfigError`.
        """
        if needs_bitsandbytes(settings.optim) and not find_spec("bitsandbytes"):
            raise ConfigError(f"optim={settings.optim}: bitsandbytes is not installed; pip install it, or change optim")
        num_ranks, is_sharded = distributed_state(self.hardware).num_processes, self.hardware.sharding == "full"
        micro_batch_rows = micro_batch_rows or rows // num_ranks
        return {
            "output_dir": str(self.checkpoints_dir),
            "seed": self.seed,
            "per_device_train_batch_size": micro_batch_rows,
            "gradient_accumulation_steps": rows // (micro_batch_rows * num_ranks),
            "optim": settings.optim,
            "learning_rate": settings.learning_rate,
            "use_cpu": not self.hardware.gpus_per_node,
            "bf16": self.dtype == "bfloat16",
            "gradient_checkpointing": settings.gradient_checkpointing,
            "ddp_find_unused_parameters": False,
            "fsdp": is_sharded or None,
            # Each rank writes its own part of a checkpoint. The first rank gives each rank its weights (`load_model`).
            "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": True},
            # Gradients are reduced and sharded after every micro-batch. Otherwise (`no_sync` of FSDP) each rank would
            # keep the gradients of the whole model until the last micro-batch, and sum them in bfloat16.
            "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": is_sharded}},
            "save_strategy": "steps",
            "save_steps": settings.save_steps,
            "save_total_limit": max(MIN_CHECKPOINTS, self.keep_checkpoints),
            "logging_steps": 1,
            "logging_nan_inf_filter": False,  # otherwise a loss of NaN is logged as 0
            "dataloader_pin_memory": self.hardware.gpus_per_node > 0,
            "report_to": "none",
            "disable_tqdm": True,
        }

    def load_model(self) -> PreTrainedModel:
        """Return the model to train, on the device of this rank.

        With sharding, only the first rank loads the weights, into its machine's memory. The weights of other ranks have
        no values, and take no memory as long as nothing is written to them. FSDP then gives each rank its part.
        """
        state, is_sharded = distributed_state(self.hardware), self.hardware.sharding == "full"
        # In bfloat16, updates of 1e-6 would be rounded to zero. Weights that are frozen have no updates.
        options: dict[str, Any] = {"dtype": getattr(torch, self.dtype if self.peft else "float32")}
        if self.attn_implementation:
            options["attn_implementation"] = self.attn_implementation
        if not is_sharded or state.is_main_process:
            on_gpu = self.hardware.gpus_per_node > 0 and not is_sharded
            device_map = {"": state.local_process_index} if on_gpu else None
            return AutoModelForCausalLM.from_pretrained(self.model, device_map=device_map, **options)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.model), **options)
        model.tie_weights()
        return model

    def peft_config(self) -> Any:
        """Return peft's config of the adapter to train, or None. Raises `ConfigError`."""
        return peft_config(self.peft, self.model)

    def latest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint of this stage."""
        return latest_checkpoint(self.checkpoints_dir)

    def truncate_run(self, steps: int) -> None:
        """Delete the metrics and episodes after the stage's first `steps` steps; on the first rank only."""
        if self.is_first_rank:
            self.run_folder.truncate_after(self.first_step + steps)

    def train(self, trainer: Trainer, checkpoint: Path | None) -> TrainedModel:
        """Train, from `checkpoint` if given, and save the model."""
        trainer.remove_callback(PrinterCallback)
        # A tied weight is saved only under the first of its names. Without this line, a resumed training reports the
        # other names as missing.
        trainer.model._keys_to_ignore_on_save = set(trainer.model.all_tied_weights_keys)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        weights = plain_weights(trainer)
        if trainer.is_world_process_zero():
            save_plain_model(trainer, weights, self.stage_dir / "model")
        wait_for_ranks(self.hardware)  # until the first rank has marked the last checkpoint
        last = self.latest_checkpoint()
        assert last is not None, f"{self.stage_dir}: expected a checkpoint of the last step"
        return TrainedModel(self.stage_dir / "model", last)

    def keep_if_best(self, trainer: Trainer, weights: Mapping[str, torch.Tensor], step: int, accuracy: float) -> None:
        """Save the model with `weights` as the stage's best one, if its accuracy is higher than that of all earlier
        ones."""
        mark = self.stage_dir / BEST_MARK
        folder, part, old = mark.parent, mark.parent.with_name("best.part"), mark.parent.with_name("best.old")
        if old.exists() and not folder.exists():  # a kill came between the two renamings below
            old.rename(folder)
        best = read_json(mark)
        if best is None or accuracy > best["accuracy"]:
            save_plain_model(trainer, weights, part)
            write_json(part / mark.name, {"step": step, "accuracy": accuracy})
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            part.rename(folder)
            shutil.rmtree(old, ignore_errors=True)

    @property
    def is_first_rank(self) -> bool:
        return bool(distributed_state(self.hardware).is_main_process)

    @property
    def checkpoints_dir(self) -> Path:
        return self.stage_dir / "checkpoints"


class RankArguments(TrainingArguments):  # type: ignore[misc]
    """transformers' arguments for one rank, which has one GPU and maybe a part of a sharded model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fsdp and self.bf16:
            # With accelerate's own policy, gradients would be summed over ranks in bfloat16, and the log-probabilities
            # that the model returns would be rounded to bfloat16, in steps of 0.03.
            self.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    @property
    def n_gpu(self) -> int:
        """One GPU. With the real number, transformers would split each batch over all visible GPUs if only one process
        trains."""
        return 1 if super().n_gpu else 0


@contextmanager
def model_errors_as_config_errors(model: Path) -> Iterator[None]:
    """Turn the OSError or ValueError of an unusable model into a `ConfigError` that names the model."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model}: {' '.join(str(error).split())}") from error


def latest_checkpoint(checkpoints_dir: Path) -> Path | None:
    """Return the newest complete checkpoint in a stage's `checkpoints`."""
    marks = checkpoints_dir.glob(f"checkpoint-*/{COMPLETE_MARK}")
    return max((mark.parent for mark in marks), key=checkpoint_step, default=None)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the number of optimizer steps in a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def distributed_state(hardware: HardwareConfig) -> PartialState:
    """Return the state of the processes that train together. torchrun has started them. A single process is rank 0.

    Raises `ConfigError` if the number of processes or of GPUs does not match `hardware`.
    """
    settings = f"hardware: nodes={hardware.nodes}, gpus_per_node={hardware.gpus_per_node}"
    if hardware.gpus_per_node and not torch.cuda.is_available():  # true for ROCm, too
        raise ConfigError(f"{settings}: expected GPUs, but torch can use none; gpus_per_node=0 trains on the CPU")
    state = PartialState(cpu=not hardware.gpus_per_node, timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S))
    expected = hardware.nodes * max(1, hardware.gpus_per_node)
    if state.num_processes != expected:
        raise ConfigError(
            f"{settings}: expected {expected} training processes, got {state.num_processes}; set hardware.launcher to "
            "a command that starts one process per GPU, such as torchrun --nproc-per-node"
        )
    waiting_group()
    return state


@cache
def waiting_group() -> Any:
    """Return the gloo process group on which ranks wait for the first rank. None if there is only one rank.

    A rank that waits on NCCL or RCCL keeps a core busy, and keeps a kernel on its GPU although an engine may use this
    GPU. A rank that waits on gloo sleeps. All ranks create the group together, in `distributed_state`.
    """
    if not torch.distributed.is_initialized():
        return None
    return torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))


def wait_for_ranks(hardware: HardwareConfig) -> None:
    """Return once every rank has called this."""
    if distributed_state(hardware).num_processes > 1:
        torch.distributed.barrier(group=waiting_group())


def leave_ranks() -> None:
    """End the process groups of this process, after its last exchange with other ranks.

    Without this call, the threads of gloo may abort the process while it exits ("terminate called without an active
    exception"). A phase that has done its work would then count as failed.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        waiting_group.cache_clear()
