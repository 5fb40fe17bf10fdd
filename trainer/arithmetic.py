"""What a run needs before it runs: parameters, memory of a GPU that trains, KV cache, rollouts that fit, tokens.

Exact: parameters, weights, gradients, optimizer states, bytes of KV per token, tokens of a step. Estimates, marked so:
activations and logits, which depend on what the attention and the loss keep. Nothing here says how long anything takes.

Training keeps float32 weights, gradients and both of Adam's moments, 16 bytes a parameter: at the paper's learning rate
of 1e-6 an update is smaller than bfloat16 can tell from nothing. Passes, and engines, compute in `model.dtype`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config import ConfigError, RunConfig, Shape, StageConfig, urls

BYTES = {"float32": 4, "bfloat16": 2}
MASTER = 4
"""Bytes of a number in the weights that train, in their gradients and in each of Adam's two moments."""
GB = 10**9
PROMPT = 1024
"""Tokens allowed for a prompt: rStar2's system message with the tool's schema, and a long problem."""


def shape_of(model: Mapping[str, Any]) -> Shape:
    """The sizes in a model's config.json. Raises `ConfigError` where one is missing."""
    try:
        heads = model["num_attention_heads"]
        return Shape(
            layers=model["num_hidden_layers"],
            hidden=model["hidden_size"],
            intermediate=model["intermediate_size"],
            heads=heads,
            kv_heads=model.get("num_key_value_heads") or heads,
            head_dim=model.get("head_dim") or model["hidden_size"] // heads,
            vocab=model["vocab_size"],
            is_tied=bool(model.get("tie_word_embeddings", False)),
        )
    except KeyError as missing:
        raise ConfigError(f"the model's config.json has no {missing}; state its sizes in [model.shape]") from None


def parameters(shape: Shape) -> int:
    """Of a Qwen3 decoder: grouped-query attention with normed queries and keys, a gated MLP, no biases.

    Qwen2.5 has biases on queries, keys and values instead of the norms: 0.01 % more.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (queries + 2 * keys) + queries * shape.hidden + 2 * shape.head_dim
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    embeddings = shape.vocab * shape.hidden * (1 if shape.is_tied else 2)
    return shape.layers * layer + shape.hidden + embeddings


def kv_bytes(shape: Shape, dtype: str = "bfloat16") -> int:
    """Of one token: a key and a value for each layer and KV head."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[dtype]


def activation_bytes(shape: Shape, tokens: int, dtype: str, *, is_checkpointing: bool) -> int:
    """An estimate of what a backward pass over `tokens` needs, the logits aside; attention keeps no matrix.

    A layer keeps the inputs and outputs of its two norms, queries, keys, values, attention's output, and four widths of
    its MLP. Recomputing, all layers keep their input and one layer all the rest.
    """
    inner = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 4 * shape.intermediate
    layer = (4 * shape.hidden + inner) * BYTES[dtype] * tokens
    kept = shape.layers * shape.hidden * BYTES[dtype] * tokens
    return kept + layer if is_checkpointing else shape.layers * layer


def logit_bytes(shape: Shape, tokens: int, dtype: str) -> int:
    """An estimate: logits as they are computed, in float32 for the softmax, and their gradient."""
    return tokens * shape.vocab * (BYTES[dtype] + 2 * MASTER)


@dataclass(frozen=True)
class StagePlan:
    """Tokens of a step at most: every rollout as long as it may be."""

    name: str
    rollouts: int
    trained: int
    sampled_tokens: int
    trained_tokens: int
    train_bytes: int
    """Of one GPU (or of the machine, on a CPU): weights, gradients, moments, activations, logits."""
    rollouts_per_engine: int
    """Of full length, at once, each after a prompt of `PROMPT` tokens."""


@dataclass(frozen=True)
class Plan:
    """The arithmetic of a run. Bytes are of one GPU that trains or, without GPUs, of the machine."""

    parameters: int
    kv_bytes_per_token: int
    gpus: int
    weight_bytes: int
    gradient_bytes: int
    adam_bytes: int
    engines: int
    engine_bytes: int
    """Of one GPU of an engine: its share of the weights, and KV."""
    kv_tokens: int
    """That one engine's cache holds; 0 where too little is left for one."""
    stages: tuple[StagePlan, ...]


def plan(config: RunConfig, shape: Shape) -> Plan:
    """What `config` asks of its machines, for a model of `shape`."""
    hardware, engines, dtype = config.hardware, config.engines, config.model.dtype
    count, gpus, per_token = parameters(shape), hardware.nodes * hardware.gpus, kv_bytes(shape, dtype)
    states = count * MASTER // (max(1, gpus) if hardware.sharding == "full" else 1)
    if engines.kind == "local":
        kv_tokens = engines.slots * engines.max_length
        engine_bytes = kv_tokens * per_token
    else:
        engine_bytes = int(engines.gpu_memory * hardware.gpu_gb * GB)
        left = engine_bytes * engines.tensor_parallel - count * BYTES[dtype]
        kv_tokens = max(0, left // per_token)
    return Plan(
        parameters=count,
        kv_bytes_per_token=per_token,
        gpus=gpus,
        weight_bytes=states,
        gradient_bytes=states,
        adam_bytes=2 * states,
        engines=1 if engines.kind == "local" else len(urls(engines.endpoints)) or engines.count,
        engine_bytes=engine_bytes,
        kv_tokens=kv_tokens,
        stages=tuple(_stage(stage, config, shape, 4 * states, kv_tokens) for stage in config.stages),
    )


def shortfalls(plan: Plan, config: RunConfig) -> list[str]:
    """What does not fit, by estimate, and which setting helps. Of a CPU's memory, which is not stated, nothing."""
    hardware = config.hardware
    if not plan.gpus:
        return []
    said = []
    have, engine = hardware.gpu_gb * GB, 0 if hardware.engine_gpus else plan.engine_bytes
    for stage in plan.stages:
        if stage.train_bytes + engine > have:
            said.append(
                f"stages.{stage.name}: a GPU needs about {(stage.train_bytes + engine) / GB:.1f} GB and has "
                f"{have / GB:.1f}: lower micro_batch or engines.gpu_memory, set is_checkpointing or hardware.sharding"
            )
        if not stage.rollouts_per_engine:
            said.append(
                f"stages.{stage.name}: an engine's cache of {plan.kv_tokens:,} tokens holds no rollout of full length: "
                "raise engines.gpu_memory or engines.tensor_parallel"
            )
    return said


def _stage(stage: StageConfig, config: RunConfig, shape: Shape, states: int, kv_tokens: int) -> StagePlan:
    dtype, engines = config.model.dtype, config.engines
    longest = min(engines.max_length, stage.max_tokens + PROMPT)
    tokens = stage.micro_batch * stage.max_tokens
    activations = activation_bytes(shape, tokens, dtype, is_checkpointing=stage.is_checkpointing)
    return StagePlan(
        name=stage.name,
        rollouts=stage.prompts * stage.samples,
        trained=stage.prompts * stage.keep,
        sampled_tokens=stage.prompts * stage.samples * stage.max_tokens,
        trained_tokens=stage.prompts * stage.keep * stage.max_tokens,
        train_bytes=states + activations + logit_bytes(shape, tokens, dtype),
        rollouts_per_engine=min(engines.slots, kv_tokens // longest),
    )
