"""What a run needs before it runs: parameters, memory of a GPU that trains, KV cache, rollouts that fit, tokens.

Exact: parameters, weights, gradients, optimizer states, bytes of KV per token, tokens of a step. Estimates, marked so:
activations and logits, which depend on what the attention and the loss keep. Nothing here says how long anything takes.

Training keeps float32 weights, gradients and both of Adam's moments, 16 bytes a parameter: at the paper's learning rate
of 1e-6 an update is smaller than bfloat16 can tell from nothing. Passes, and engines, compute in `model.dtype`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trainer.config import RunConfig, Shape, StageConfig, checked, urls

BYTES = {"float32": 4, "bfloat16": 2}
MASTER = 4
"""Bytes of a number in the weights that train, in their gradients and in each of Adam's two moments."""
GB = 10**9
PROMPT = 1024
"""Tokens allowed for a prompt: rStar2's system message with the tool's schema, and a long problem."""


def shape_of(model: Mapping[str, Any]) -> Shape:
    """The sizes in a model's config.json. Raises `ConfigError` where one is missing."""
    sizes = {size.name: model[size.name] for size in fields(Shape) if size.name in model}
    return checked(Shape, sizes, "the model's config.json: ")


def parameters(shape: Shape) -> int:
    """Of a Qwen3 decoder: grouped-query attention with normed queries and keys, a gated MLP, no biases.

    Qwen2.5 has biases on queries, keys and values instead of the norms: 0.01 % more.
    """
    hidden, head = shape.hidden_size, shape.head
    queries, keys = shape.num_attention_heads * head, shape.num_key_value_heads * head
    attention = hidden * (queries + 2 * keys) + queries * hidden + 2 * head
    layer = attention + 3 * hidden * shape.intermediate_size + 2 * hidden
    embeddings = shape.vocab_size * hidden * (1 if shape.tie_word_embeddings else 2)
    return shape.num_hidden_layers * layer + hidden + embeddings


def kv_bytes(shape: Shape, dtype: str = "bfloat16") -> int:
    """Of one token: a key and a value for each layer and KV head."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head * BYTES[dtype]


def activation_bytes(shape: Shape, tokens: int, dtype: str, *, is_checkpointing: bool) -> int:
    """An estimate of what a backward pass over `tokens` needs, the logits aside; attention keeps no matrix.

    A layer keeps the inputs and outputs of its two norms, queries, keys, values, attention's output, and four widths of
    its MLP. Recomputing, all layers keep their input and one layer all the rest.
    """
    inner = 2 * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head + 4 * shape.intermediate_size
    layer = (4 * shape.hidden_size + inner) * BYTES[dtype] * tokens
    kept = shape.num_hidden_layers * shape.hidden_size * BYTES[dtype] * tokens
    return kept + layer if is_checkpointing else shape.num_hidden_layers * layer


def logit_bytes(shape: Shape, tokens: int, dtype: str) -> int:
    """An estimate: logits as they are computed, in float32 for the softmax, and their gradient."""
    return tokens * shape.vocab_size * (BYTES[dtype] + 2 * MASTER)


Plan = dict[str, Any]


def plan(config: RunConfig, shape: Shape) -> Plan:
    """What `config` asks of its machines, for a model of `shape`.

    Bytes are of one GPU that trains or, without GPUs, of the machine; `engine_bytes` are of one GPU of an engine.
    `gpu_share` is what training and an engine beside it need of a GPU's memory: more than 1 does not fit.
    """
    hardware, engines, dtype = config.hardware, config.engines, config.model.dtype
    count, gpus, per_token = parameters(shape), hardware.nodes * hardware.gpus, kv_bytes(shape, dtype)
    weight_bytes = count * MASTER // (max(1, gpus) if hardware.sharding == "full" else 1)
    if engines.kind == "local":
        kv_tokens = engines.slots * engines.max_length
        engine_bytes = kv_tokens * per_token
    else:
        engine_bytes = int(engines.gpu_memory * hardware.gpu_gb * GB)
        kv_tokens = max(0, engine_bytes * engines.tensor_parallel - count * BYTES[dtype]) // per_token

    shared_bytes = 0 if hardware.engine_gpus else engine_bytes

    def of(stage: StageConfig) -> Plan:
        """A step's, were every rollout as long as it may be."""
        tokens = stage.micro_batch * stage.max_tokens
        activations = activation_bytes(shape, tokens, dtype, is_checkpointing=stage.is_checkpointing)
        train_bytes = 4 * weight_bytes + activations + logit_bytes(shape, tokens, dtype)
        needed, longest = train_bytes + shared_bytes, min(engines.max_length, stage.max_tokens + PROMPT)
        return {
            "rollouts": stage.prompts * stage.samples,
            "trained": stage.prompts * stage.keep,
            "sampled_tokens": stage.prompts * stage.samples * stage.max_tokens,
            "trained_tokens": stage.prompts * stage.keep * stage.max_tokens,
            "train_bytes": train_bytes,
            "gpu_share": needed / (hardware.gpu_gb * GB) if gpus and hardware.gpu_gb else None,
            "rollouts_per_engine": min(engines.slots, kv_tokens // longest),
        }

    return {
        "parameters": count,
        "kv_bytes_per_token": per_token,
        "gpus": gpus,
        "weight_bytes": weight_bytes,
        "engines": 1 if engines.kind == "local" else len(urls(engines.endpoints)) or engines.count,
        "engine_bytes": engine_bytes,
        "kv_tokens": kv_tokens,
        "stages": {name: of(stage) for name, stage in config.stages.items()},
    }
