"""Run by `torchrun` in two processes: two steps of a stage, and what each rank had, as JSON in the folder given."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.trainer.sampling import Sampler, problems
from trainer import grpo
from trainer.background import Background
from trainer.config import HardwareConfig, StageConfig
from trainer.grpo import Rollouts, train_stage
from trainer.progress import Training, ranks
from trainer.record import RunFolder

HARDWARE = HardwareConfig(nodes=2)


def main(model: Path, folder: Path) -> None:
    rank = ranks(HARDWARE).process_index
    stage = StageConfig(
        name="rl1", steps=2, max_tokens=16, max_turns=2, prompts=2, samples=4, keep=4, micro_batch=2, lr=1e-3
    )  # fmt: skip
    passes: list[Any] = []
    compute_loss = grpo.GRPOTrainer.compute_loss

    def spy(self: Any, model: Any, inputs: Any, **more: Any) -> Any:
        self.spied = model
        passes.append(inputs["completion_ids"].tolist())
        return compute_loss(self, model, inputs, **more)

    grpo.GRPOTrainer.compute_loss = spy
    run = Training.run
    trainers: list[Any] = []
    Training.run = lambda self, trainer, start: trainers.append(trainer) or run(self, trainer, start)
    with ExitStack() as stack:
        rollouts = None
        if rank == 0:
            sampler = Sampler(model)
            rollouts = Rollouts(stack.enter_context(Background()), sampler, sampler)
        train_stage(
            replace(stage, warmup_steps=0),
            Training(model, folder / "stages/rl1", RunFolder(folder), seed=3, hardware=HARDWARE),
            problems=problems(6), rollouts=rollouts,
        )  # fmt: skip
    digest = hashlib.sha256()
    for _, tensor in sorted(trainers[0].model.state_dict().items()):
        digest.update(tensor.numpy().tobytes())
    (folder / f"rank{rank}.json").write_text(json.dumps({"passes": passes, "weights": digest.hexdigest()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
