"""Trains two steps of a stage as one of the two processes that `torchrun` starts, and writes what the process did.

    two_ranks.py MODEL RUN_DIR [none|full] [DTYPE] [PEFT]      writes RUN_DIR/rank0.json or rank1.json

PEFT is a table `[model.peft]` in JSON. With "full" the model is sharded by FSDP, as on GPUs. The second step's rollouts
take longer than the timeout of the default process group. The first rank also writes the gradients of the first step,
as `record_gradients` describes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from bench.gpu_parts.training import shard_on_cpus
from tests.trainer.sampling import Sampler, problems
from trainer.config import HardwareConfig, StageConfig
from trainer.rollout.loop_thread import LoopThread
from trainer.rollout.runtime import RolloutRuntime
from trainer.runs.run_folder import RunFolder
from trainer.training.adapters import plain_weights
from trainer.training.context import TrainingContext, distributed_state, leave_ranks
from trainer.training.grpo import train_stage
from trainer.training.token_budget import TokenBudgetTrainer

DEFAULT_TIMEOUT_S = 5
"""Timeout of the default process group once training has begun."""
SECOND_ROLLOUT_S = 8
"""Seconds by which the second step's rollouts are delayed."""
STAGE = StageConfig(
    name="rl1", steps=2, max_response_tokens=16, max_turns=2, problems_per_step=4, samples_per_problem=4,
    kept_per_problem=4, micro_batch_tokens=20, learning_rate=1e-3, warmup_steps=0, save_steps=1,
)  # fmt: skip
SEED, NUM_PROBLEMS = 3, 6


def main(model: Path, run_dir: Path, sharding: Any = "none", dtype: str = "float32", peft: str = "{}") -> None:
    hardware = HardwareConfig(nodes=2, sharding=sharding)
    if sharding == "full":
        shard_on_cpus()
    rank = distributed_state(hardware).process_index
    record_gradients(run_dir / "gradients.pt")
    batches: list[Any] = []
    compute_loss = TokenBudgetTrainer.compute_loss

    def record_loss(self: Any, model: Any, inputs: Any, **options: Any) -> Any:
        distributed_c10d._set_pg_timeout(timedelta(seconds=DEFAULT_TIMEOUT_S))
        batches.append(inputs["completion_ids"].tolist())
        return compute_loss(self, model, inputs, **options)

    TokenBudgetTrainer.compute_loss = record_loss
    reduced: list[tuple[bool, str]] = []
    post_backward = FSDPParamGroup.post_backward

    def record_reduction(self: Any, *args: Any) -> None:
        post_backward(self, *args)
        has_no_rest = all(param.unsharded_accumulated_grad is None for param in self.fsdp_params)
        dtype = self._reduce_dtype or self.mp_policy.param_dtype  # None: gradients are reduced in the dtype of the pass
        if any(param.sharded_param.requires_grad for param in self.fsdp_params):
            reduced.append((has_no_rest and self.reduce_grads, str(dtype)))

    FSDPParamGroup.post_backward = record_reduction
    score, dtypes = TokenBudgetTrainer._score, set[str]()

    def record_dtypes(self: Any, *args: Any) -> Any:
        logps, entropies = score(self, *args)
        dtypes.update((str(logps.dtype), str(entropies.dtype)))
        return logps, entropies

    TokenBudgetTrainer._score = record_dtypes
    waits: list[tuple[str, float]] = []
    for name in ("scatter_object_list", "barrier"):
        setattr(torch.distributed, name, _recording_waits(name, getattr(torch.distributed, name), waits))
    train = TrainingContext.train
    trainers: list[Any] = []

    def record_trainer(self: Any, trainer: Any, checkpoint: Path | None) -> Any:
        trainers.append(trainer)
        return train(self, trainer, checkpoint)

    TrainingContext.train = record_trainer
    evaluations: list[int] = []

    def evaluate(steps: int) -> float:
        evaluations.append(steps)
        return 0.5

    with ExitStack() as stack:
        rollouts = None
        if rank == 0:
            sampler = Sampler(model, on_collect=lambda index: time.sleep(SECOND_ROLLOUT_S) if index == 1 else None)
            rollouts = RolloutRuntime(stack.enter_context(LoopThread()), sampler, sampler)
        context = TrainingContext(
            model, run_dir / "stages/rl1", RunFolder(run_dir), seed=SEED, hardware=hardware, eval_steps=STAGE.steps,
            dtype=dtype, peft=json.loads(peft),
        )  # fmt: skip
        evaluate_first = evaluate if rollouts else None
        train_stage(STAGE, context, problems=problems(NUM_PROBLEMS), rollouts=rollouts, evaluate=evaluate_first)
    engine_dtype = getattr(torch, dtype)
    gathered, rounded = plain_weights(trainers[0]), plain_weights(trainers[0], engine_dtype)
    recorded = {
        "batches": batches,  # response ids of each row of each step
        "weights": _digest({name: _whole(part) for name, part in trainers[0].model.state_dict().items()}),
        "rounded_before": _digest(rounded),
        "rounded_after": _digest({name: weight.to(engine_dtype) for name, weight in gathered.items()}),
        "sent_dtypes": sorted({str(weight.dtype) for weight in rounded.values()}),
        "num_weights": len(rounded),
        "waits": waits,  # exchanges with the other rank, each with its seconds
        # For each backward pass of a sharded module with trained weights: whether all gradients are reduced after it,
        # and in which dtype.
        "reduced": reduced,
        "score_dtypes": sorted(dtypes),  # of log-probabilities and entropies
        "evaluations": evaluations,
        "default_timeout_s": DEFAULT_TIMEOUT_S,
    }
    (run_dir / f"rank{rank}.json").write_text(json.dumps(recorded))
    leave_ranks()


def record_gradients(file: Path) -> None:
    """Patch transformers so that `file` gets the gradients of the first step: one tensor of all parameters
    that are trained."""
    clip = Accelerator.clip_grad_norm_

    def record(self: Any, parameters: Any, *rest: Any) -> Any:
        parameters = list(parameters)
        if not file.exists():
            trained = (parameter for parameter in parameters if parameter.requires_grad)
            gradients = torch.cat([_whole(parameter.grad).flatten() for parameter in trained])
            if self.is_main_process:
                torch.save(gradients, file)
        return clip(self, parameters, *rest)

    Accelerator.clip_grad_norm_ = record


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode() + weight.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _recording_waits(name: str, function: Any, waits: list[tuple[str, float]]) -> Any:
    """Wrap `function` so that its process group, backend and duration are appended to `waits`."""

    def wrapped(*args: Any, group: Any = None, **options: Any) -> Any:
        is_default = group is None or group is distributed_c10d._get_default_group()
        started_at = time.monotonic()
        function(*args, group=group, **options)
        call = f"{name}: {'default' if is_default else 'own'}, {torch.distributed.get_backend(group)}"
        waits.append((call, time.monotonic() - started_at))

    return wrapped


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
