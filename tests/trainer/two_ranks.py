"""Run by `torchrun` in two processes: trains two steps of a stage and writes each rank's results as JSON to a
directory.

The second step's rollouts take longer than the default process group lets an exchange take.
With "full" as the third argument the model is sharded by FSDP, as on GPUs.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from tests.trainer.sampling import Sampler, problems
from trainer.config import HardwareConfig, StageConfig
from trainer.rollout.loop_thread import LoopThread
from trainer.runs.run_folder import RunFolder
from trainer.training import grpo
from trainer.training.context import TrainingContext, distributed_state
from trainer.training.grpo import RolloutRuntime, train_stage

TIMEOUT_S = 5
"""Seconds that the default group allows once training has begun."""
ROLLOUT_S = 8
"""Seconds that the second step's rollouts take at least."""


def main(model: Path, folder: Path, sharding: Any = "none") -> None:
    hardware = HardwareConfig(nodes=2, sharding=sharding)
    if sharding == "full":
        PartialState.__init__ = _as_on_gpus(PartialState.__init__)
    rank = distributed_state(hardware).process_index
    stage = StageConfig(
        name="rl1", steps=2, max_response_tokens=16, max_turns=2, problems_per_step=2, samples_per_problem=4,
        kept_per_problem=4, micro_batch_size=2, learning_rate=1e-3
    )  # fmt: skip
    passes: list[Any] = []
    compute_loss = grpo.GRPOTrainer.compute_loss

    def spy(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
        distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
        passes.append(inputs["completion_ids"].tolist())
        return compute_loss(self, model, inputs, **more)

    grpo.GRPOTrainer.compute_loss = spy
    reduced: list[bool] = []
    post_backward = FSDPParamGroup.post_backward

    def spy_on_fsdp(self: Any, *unused: Any) -> None:
        post_backward(self, *unused)
        reduced.append(all(each.unsharded_accumulated_grad is None for each in self.fsdp_params) and self.reduce_grads)

    FSDPParamGroup.post_backward = spy_on_fsdp
    waits: list[tuple[str, float]] = []
    for name in ("scatter_object_list", "barrier"):
        setattr(torch.distributed, name, _noting(name, getattr(torch.distributed, name), waits))
    train = TrainingContext.train
    trainers: list[Any] = []
    TrainingContext.train = lambda self, trainer, start: trainers.append(trainer) or train(self, trainer, start)
    with ExitStack() as stack:
        rollouts = None
        if rank == 0:
            sampler = Sampler(model, before=lambda step: time.sleep(ROLLOUT_S) if step else None)
            rollouts = RolloutRuntime(stack.enter_context(LoopThread()), sampler, sampler)
        train_stage(
            replace(stage, warmup_steps=0),
            TrainingContext(model, folder / "stages/rl1", RunFolder(folder), seed=3, hardware=hardware),
            problems=problems(6), rollouts=rollouts,
        )  # fmt: skip
    digest = hashlib.sha256()
    for _, tensor in sorted(trainers[0].model.state_dict().items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.numpy().tobytes())
    found = {"passes": passes, "weights": digest.hexdigest(), "waits": waits, "reduced": reduced, "limit_s": TIMEOUT_S}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def _as_on_gpus(init: Any) -> Any:
    """Make accelerate shard on the CPU: it does so on GPUs only, although torch can with gloo."""

    def init_as_on_gpus(self: Any, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    return init_as_on_gpus


def _noting(name: str, function: Any, waits: list[tuple[str, float]]) -> Any:
    """Return `function` with a record of its process group and duration."""

    def noting(*args: Any, group: Any = None, **more: Any) -> Any:
        which = "default" if group is None or group is distributed_c10d._get_default_group() else "own"
        start = time.monotonic()
        function(*args, group=group, **more)
        waits.append((f"{name}: {which}, {torch.distributed.get_backend(group)}", time.monotonic() - start))

    return noting


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
