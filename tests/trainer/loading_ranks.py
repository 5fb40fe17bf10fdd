"""Loads a sharded model as one of the two processes that `torchrun` starts, and writes the peak of its memory.

    loading_ranks.py FOLDER      writes FOLDER/rank0.json or rank1.json

The program ends where the training would begin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from bench.gpu_parts.training import shard_on_cpus
from tests.trainer.sampling import model_folder
from trainer.config import HardwareConfig, SftConfig
from trainer.episodes.chat_format import rstar2_format
from trainer.runs.run_folder import RunFolder
from trainer.training.callback import MetricsCallback
from trainer.training.context import TrainingContext, distributed_state, leave_ranks, wait_for_ranks
from trainer.training.sft import train_sft

CONVERSATION = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "<reason>1</reason>"}]


class Loaded(BaseException):
    """The model is loaded."""


def main(folder: Path) -> None:
    hardware = HardwareConfig(nodes=2, sharding="full")
    shard_on_cpus()
    rank = distributed_state(hardware).process_index
    model = folder / "model"
    if rank == 0:
        _write_model(model)
    wait_for_ranks(hardware)
    chat_format = rstar2_format(AutoTokenizer.from_pretrained(model), tools=[], system_prompt="Go.")
    record: dict[str, Any] = {"model_bytes": (model / "model.safetensors").stat().st_size}

    def on_train_begin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        record["peak_bytes"] = _status_bytes("VmHWM") - resident_bytes
        weights = kwargs["model"].parameters()
        record["weights"] = [float(weight.full_tensor().detach().double().sum()) for weight in weights]
        raise Loaded

    MetricsCallback.on_train_begin = on_train_begin
    context = TrainingContext(model, folder / "stages/sft", RunFolder(folder), seed=0, hardware=hardware)
    sft = SftConfig(batch_size=2, micro_batch_size=1, epochs=1, max_conversation_tokens=96)
    resident_bytes = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    try:
        train_sft(sft, context, conversations=[CONVERSATION] * 2, chat_format=chat_format)
    except Loaded:
        (folder / f"rank{rank}.json").write_text(json.dumps(record))
    wait_for_ranks(hardware)
    leave_ranks()


def _write_model(path: Path) -> None:
    """Write a model of 230 MB, whose weights are much larger than other things in memory, with the tiny tokenizer."""
    config = Qwen3Config.from_pretrained(model_folder(path))
    for name, value in {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8}.items():
        setattr(config, name, value)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
