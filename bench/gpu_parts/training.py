"""Trainings on the device: where the weights are, bfloat16, sharding on one and two processes, checkpoints, LoRA.

Each training is a short SFT on generated conversations. The losses of all of them are compared with those of float32 on
one process. `python -m bench.gpu_parts.training TRAINING.json` is a rank of a sharded training.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench.gpu_parts.__main__ import last_lines
from bench.gpu_parts.check import Checks, Finding, Settings, Skipped
from bench.gpu_parts.memory import SHAPES, SMALL
from bench.gpu_parts.step import random_model, write_tokenizer
from trainer.config import HardwareConfig, ModelConfig, RunConfig, SftConfig
from trainer.data import synthetic
from trainer.data.sources import read_conversations
from trainer.recipe.resource_plan import checkpoint_bytes, num_parameters
from trainer.recipe.rollout_session import load_chat_format
from trainer.runs.run_folder import RunFolder
from trainer.training.context import TrainingContext, distributed_state, leave_ranks
from trainer.training.sft import train_sft

MAX_LOSS_ERROR = 0.02
"""Largest relative difference of a loss in bfloat16 from the one in float32."""
CHECKPOINT_EXTRA = 0.01
CHECKPOINT_EXTRA_BYTES = 2_000_000
"""By how much of the planned size, and by how many bytes, a checkpoint may be larger than the plan. It also has a
tokenizer, the states of the schedule and of the random numbers, and the layout of shards."""
LORA = {"r": 8}


@dataclass(frozen=True)
class Training:
    """What a rank of a training gets. Its fields can be written as JSON."""

    model: str
    folder: str
    device: str
    steps: int
    dtype: str
    sharding: Any = "none"
    ranks: int = 1
    peft: dict[str, Any] = field(default_factory=dict)

    def context(self) -> TrainingContext:
        path, is_gpu = Path(self.folder), self.device == "cuda"
        hardware = HardwareConfig(
            nodes=1 if is_gpu else self.ranks, gpus_per_node=self.ranks if is_gpu else 0, sharding=self.sharding
        )
        return TrainingContext(
            Path(self.model), path / "sft", RunFolder(path), seed=0, dtype=self.dtype, peft=self.peft, hardware=hardware
        )


def checks(settings: Settings) -> Checks:
    shape = settings.choose(SHAPES["0.1B"], SMALL)
    settings.require_memory(20 * num_parameters(shape) / 1e9)
    model = write_tokenizer(settings.path / "model")
    random_model(shape, "cpu").save_pretrained(model)
    steps = settings.choose(10, 2)

    def training(name: str, dtype: str, **options: Any) -> Training:
        return Training(str(model), str(settings.path / name), settings.device, steps, dtype, **options)

    @cache
    def exact() -> list[dict[str, float]]:
        return run(training("float32", "float32"))["steps"]

    def compare(variant: Training) -> Finding:
        if settings.device == "cuda" and variant.ranks > settings.gpus:
            raise Skipped(f"{variant.ranks} processes need as many GPUs, since NCCL allows one process per GPU")
        found, expected = run(variant) if variant.sharding == "none" else run_ranks(variant), exact()
        losses = [[row["loss"] for row in rows] for rows in (found["steps"], expected)]
        error = max(abs(loss / other - 1) for loss, other in zip(*losses, strict=True))
        finding = {"loss_error": error, "first_loss": losses[0][0], "last_loss": losses[0][-1]}
        holds = error <= MAX_LOSS_ERROR and losses[0][-1] < losses[0][0]
        finding["checkpoint_mb"] = found["checkpoint_bytes"] / 1e6
        if not variant.peft:
            planned = checkpoint_bytes(shape, "adamw_torch", is_sharded=variant.sharding == "full")
            finding["planned_mb"] = planned / 1e6
            extra = found["checkpoint_bytes"] - planned
            holds = holds and 0 <= extra <= max(CHECKPOINT_EXTRA_BYTES, CHECKPOINT_EXTRA * planned)
        return {"holds": holds, **finding}

    variants = {
        "bfloat16": training("bfloat16", "bfloat16"),
        "bfloat16, sharded on one process": training("sharded-1", "bfloat16", sharding="full"),
        "bfloat16, sharded on two processes": training("sharded-2", "bfloat16", sharding="full", ranks=2),
    }
    lora = training("lora", "bfloat16", peft=LORA)
    return {
        "device placement": partial(_placement, settings, variants["bfloat16"], lora),
        **{name: partial(compare, variant) for name, variant in variants.items()},
        "LoRA, bfloat16 base": partial(_lora, lora),
    }


def _placement(settings: Settings, *trainings: Training) -> Finding:
    """Check where the weights to train are, and their dtype. Weights that an adapter freezes are in bfloat16."""
    expected = ["float32", "bfloat16"]
    devices, dtypes = [], []
    for training in trainings:
        parameters = list(training.context().load_model().parameters())
        devices += sorted({str(parameter.device) for parameter in parameters})
        dtypes += sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
    device = "cuda:0" if settings.device == "cuda" else "cpu"
    return {"holds": devices == [device] * 2 and dtypes == expected, "devices": devices, "dtypes": dtypes}


def _lora(training: Training) -> Finding:
    found = run(training)
    first, last = found["steps"][0]["loss"], found["steps"][-1]["loss"]
    checkpoint_mb = found["checkpoint_bytes"] / 1e6
    return {"holds": last < first, "first_loss": first, "last_loss": last, "checkpoint_mb": checkpoint_mb}


def run(training: Training) -> dict[str, Any]:
    """Train in this process, which is all of the training or one of its ranks. Return the metrics of each step and the
    bytes of the last checkpoint."""
    context = training.context()
    config = RunConfig(model=ModelConfig(system_prompt=synthetic.SYSTEM_PROMPT))
    chat_format = load_chat_format(config, context.model)
    sft = SftConfig(
        data=("generated",), epochs=1, batch_size=8, micro_batch_size=4, learning_rate=1e-3, save_steps=training.steps
    )
    conversations = read_conversations(f"generated:{8 * training.steps}")
    trained = train_sft(sft, context, conversations=conversations, chat_format=chat_format)
    size = sum(file.stat().st_size for file in trained.checkpoint.rglob("*") if file.is_file())
    return {"steps": list(context.run_folder.read_metrics()), "checkpoint_bytes": size}


def run_ranks(training: Training) -> dict[str, Any]:
    """Train in `training.ranks` processes. Raises `RuntimeError` with the end of their output if one of them fails."""
    folder = Path(training.folder)
    folder.mkdir()
    (folder / "training.json").write_text(json.dumps(asdict(training)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    # The address is that of this machine, so the name of the machine need not be known to a resolver.
    launcher = ["--nproc-per-node", str(training.ranks), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "bench.gpu_parts.training"]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, str(folder / "training.json")], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"the processes ended with exit code {ended.returncode}:\n{last_lines(ended.stdout)}")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def shard_on_cpus() -> None:
    """Make accelerate shard on CPUs, too. It shards on GPUs only, although torch can shard on CPUs with gloo."""
    from accelerate import DistributedType, PartialState

    init = PartialState.__init__

    def init_as_gpus(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init_as_gpus


def main(file: str) -> None:
    training = Training(**json.loads(Path(file).read_text()))
    if training.device == "cpu":
        shard_on_cpus()
    found = run(training)
    if distributed_state(training.context().hardware).is_main_process:
        Path(training.folder, "found.json").write_text(json.dumps(found))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
