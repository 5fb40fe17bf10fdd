"""Which models can the trainer train on which GPUs, by its resource plan?

    python -m bench.fits [--tokens 16384] [--count] [--json]

Engines have GPUs of their own, passes compute in bfloat16 with gradient checkpointing, and with several GPUs weights,
gradients and moments are sharded. With `--count` the plan is compared with the peak of a training step, whose tensors
`bench.training_peak` counts. This takes minutes, but neither GPUs nor memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
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
from trainer.recipe.resource_plan import GB, num_parameters, resource_plan, training_memory

SHAPES = {
    "Qwen2.5-0.5B": ModelShape(24, 896, 4864, 14, 2, 151_936, tie_word_embeddings=True),
    "Qwen2.5-1.5B": ModelShape(28, 1536, 8960, 12, 2, 151_936, tie_word_embeddings=True),
    "Qwen2.5-7B": ModelShape(28, 3584, 18_944, 28, 4, 152_064),
    "Qwen3-14B": ModelShape(40, 5120, 17_408, 40, 8, 151_936, 128),
    "Qwen3-32B": ModelShape(64, 5120, 25_600, 64, 8, 151_936, 128),
}
LORA_RANK = 16
TRAININGS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, `paged_adamw_8bit`": {"optim": "paged_adamw_8bit"},
    "LoRA": {"peft": {"r": LORA_RANK}},
}
SMALL_SHAPE = ModelShape(12, 768, 2048, 12, 4, 32_000, 64)
"""A model of 130 million parameters, whose plan is compared only."""
GPUS = tuple(product((80, 192), (1, 2, 8)))
"""Pairs of the memory of a GPU in GB and the number of GPUs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compute the table. Always return 0."""
    parser = arguments.parser("fits", __doc__)
    parser.add_argument("--tokens", type=arguments.count, default=16_384, help="micro_batch_tokens (default: 16384)")
    parser.add_argument("--count", action="store_true", help="compare the plan with counted tensors")
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
        "counted": list(_comparisons(args.tokens)) if args.count else [],
    }


def _comparisons(tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the planned and the counted peak of each training: of small models with short passes, with and without
    gradient checkpointing, and of large models as in the first table."""
    small = {"0.1B": SMALL_SHAPE, "Qwen2.5-0.5B": SHAPES["Qwen2.5-0.5B"]}
    large = {model: SHAPES[model] for model in ("Qwen2.5-7B", "Qwen3-14B", "Qwen3-32B")}
    for (model, shape), pass_tokens, is_checkpointed in product(small.items(), (1024, 8192), (True, False)):
        for lora_rank, gpus in product((0, LORA_RANK), (1, 2)):
            yield compared(model, shape, pass_tokens, lora_rank, gpus, gradient_checkpointing=is_checkpointed)
    for (model, shape), lora_rank, gpus in product(large.items(), (0, LORA_RANK), (1, 2, 8)):
        yield compared(model, shape, tokens, lora_rank, gpus, gradient_checkpointing=True)


def compared(
    model: str, shape: ModelShape, tokens: int, lora_rank: int, gpus: int, *, gradient_checkpointing: bool
) -> dict[str, Any]:
    """Return the planned and the counted GB of a training's peak on each of `gpus` sharded GPUs."""
    from bench.training_peak import counted_peak

    planned = training_memory(
        shape, tokens, "bfloat16", gradient_checkpointing=gradient_checkpointing, lora_rank=lora_rank, shards=gpus
    )
    counted = counted_peak(
        shape, tokens, "bfloat16", gradient_checkpointing=gradient_checkpointing, lora_rank=lora_rank, ranks=gpus
    )
    return {
        "model": model,
        "training": "LoRA" if lora_rank else "full",
        "tokens": tokens,
        "gradient_checkpointing": gradient_checkpointing,
        "gpus": gpus,
        "planned_gb": round(planned.peak / GB, 2),
        "counted_gb": round(max(counted.values()) / GB, 2),
    }


def needed_gb(
    shape: ModelShape, memory_gb: int, gpus: int, tokens: int, peft: dict[str, Any] | None = None, **stage: Any
) -> float | None:
    """Return the GB that the training takes on each GPU. None if they do not fit, or if the trainer refuses the
    settings."""
    try:
        config = RunConfig(
            model=ModelConfig(path="model", peft=peft or {}),
            engines=EnginesConfig(kind="vllm", endpoints=("http://engine",)),
            hardware=HardwareConfig(
                gpus_per_node=gpus, gpu_memory_gb=memory_gb, engine_gpus=1, sharding="full" if gpus > 1 else "none"
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
    blocks: list[Block] = [Table(heads, rows)]
    blocks.append(f"GB on each training GPU, with passes of {result['tokens']:,} tokens; – does not fit.")
    if result["counted"]:
        blocks += _comparison_table(result["counted"])
    return blocks


def _comparison_table(counted: Sequence[dict[str, Any]]) -> list[Block]:
    """Return a table of planned and counted GB, with a column for each number of GPUs."""
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for row in counted:
        checkpointing = "yes" if row["gradient_checkpointing"] else "no"
        key = (row["model"], row["training"], f"{row['tokens']:,}", checkpointing)
        cells.setdefault(key, {})[row["gpus"]] = f"{row['planned_gb']:g} / {row['counted_gb']:g}"
    gpus = sorted({row["gpus"] for row in counted})
    heads = ("model", "training", "tokens", "checkpointing", *(f"{number} GPU{'s' * (number > 1)}" for number in gpus))
    rows = [(*key, *(values.get(number, "") for number in gpus)) for key, values in cells.items()]
    ratios = [row["planned_gb"] / row["counted_gb"] for row in counted]
    summary = f"GB planned / GB counted, on each GPU. Planned is {min(ratios):.2f} to {max(ratios):.2f} of counted."
    return [Table(heads, rows), summary]


if __name__ == "__main__":
    raise SystemExit(main())
