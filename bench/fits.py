"""Which models can the trainer train on which GPUs, by its resource plan?

    python -m bench.fits [--tokens 16384] [--json]

This measures nothing. Engines have GPUs of their own, passes compute in bfloat16 with gradient checkpointing, and with
several GPUs weights, gradients and moments are sharded. An adapter is not sharded: each GPU has all weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from typing import Any

from bench.harness import arguments, command
from bench.harness.tables import Block, Result, Table
from trainer.config import (
    ConfigError,
    EnginesConfig,
    HardwareConfig,
    ModelConfig,
    ModelShape,
    RunConfig,
    StageConfig,
)
from trainer.recipe.resource_plan import GB, num_parameters, resource_plan

SHAPES = {
    "Qwen2.5-0.5B": ModelShape(24, 896, 4864, 14, 2, 151_936, tie_word_embeddings=True),
    "Qwen2.5-1.5B": ModelShape(28, 1536, 8960, 12, 2, 151_936, tie_word_embeddings=True),
    "Qwen2.5-7B": ModelShape(28, 3584, 18_944, 28, 4, 152_064),
    "Qwen3-14B": ModelShape(40, 5120, 17_408, 40, 8, 151_936, 128),
    "Qwen3-32B": ModelShape(64, 5120, 25_600, 64, 8, 151_936, 128),
}
TRAININGS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, `paged_adamw_8bit`": {"optim": "paged_adamw_8bit"},
    "LoRA": {"peft": {"r": 16}},
}
GPUS = tuple(product((80, 192), (1, 2, 8)))
"""Pairs of the memory of a GPU in GB and the number of GPUs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compute the table. Always return 0."""
    parser = arguments.parser("fits", __doc__)
    parser.add_argument("--tokens", type=arguments.count, default=16_384, help="micro_batch_tokens (default: 16384)")
    return command.run_benchmark(parser, argv, _measure, tables)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "tokens": args.tokens,
        "rows": [
            {
                "model": model,
                "parameters": num_parameters(shape),
                "training": training,
                "gb": [
                    needed_gb(shape, memory_gb, gpus, args.tokens, **TRAININGS[training]) for memory_gb, gpus in GPUS
                ],
            }
            for model, shape in SHAPES.items()
            for training in TRAININGS
        ],
    }


def needed_gb(
    shape: ModelShape, memory_gb: int, gpus: int, tokens: int, peft: dict[str, Any] | None = None, **stage: Any
) -> float | None:
    """Return the GB that the training takes on each GPU. None if they do not fit, or if the trainer refuses the
    settings."""
    is_sharded = gpus > 1 and not peft
    try:
        config = RunConfig(
            model=ModelConfig(path="model", peft=peft or {}),
            engines=EnginesConfig(kind="vllm", endpoints=("http://engine",)),
            hardware=HardwareConfig(
                gpus_per_node=gpus, gpu_memory_gb=memory_gb, engine_gpus=1, sharding="full" if is_sharded else "none"
            ),
            stages={"rl": StageConfig(name="rl", micro_batch_tokens=tokens, gradient_checkpointing=True, **stage)},
        )
    except (ConfigError, ValueError):
        return None
    plan = resource_plan(config, shape).stages["rl"]
    return round(plan.train_bytes / GB, 1) if plan.gpu_share is not None and plan.gpu_share <= 1 else None


def tables(result: Result) -> list[Block]:
    """Return a table that has a row for each model and training, and a column for each number and size of GPUs."""
    heads = ("model", "training", *(f"{gpus} × {memory_gb} GB" for memory_gb, gpus in GPUS))
    rows = [
        (row["model"], row["training"], *("–" if gb is None else f"{gb:g}" for gb in row["gb"]))
        for row in result["rows"]
    ]
    return [Table(heads, rows), f"GB on each training GPU, with passes of {result['tokens']:,} tokens; – does not fit."]


if __name__ == "__main__":
    raise SystemExit(main())
