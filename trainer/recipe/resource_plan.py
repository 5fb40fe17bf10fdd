"""What a run needs before it runs: parameters, memory of a GPU that trains, KV cache, rollouts that fit, tokens.

Exact: parameters, weights, gradients, optimizer states, bytes of KV per token, tokens of a step. Estimates, marked so:
activations, logits and the weights that a pass holds, which depend on what the attention, the loss and the sharding
keep. Nothing here says how long anything takes.

Training keeps float32 weights, gradients and both of Adam's moments, 16 bytes a parameter: at the paper's learning rate
of 1e-6 an update is smaller than bfloat16 can tell from nothing. Passes, and engines, compute in `model.dtype`. With
sharding each GPU keeps its share of all four, of the gradients too: they are sharded after every micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, RunConfig, SftConfig, Shape, StageConfig, checked, urls

BYTES = {"float32": 4, "bfloat16": 2}
MASTER = 4
"""Bytes of a number in the weights that train, in their gradients and in each of Adam's two moments."""
GB = 10**9
ADAM = 2 * MASTER
"""Bytes of a parameter's two moments."""
CHECKPOINTS = 4
"""Checkpoints on the disk at once, at most: two are kept, one is being written, one is of the training before."""
PROMPT = 1024
"""Tokens allowed for a prompt: rStar2's system message with the tool's schema, and a long problem."""


def shape_of(model: Mapping[str, Any]) -> Shape:
    """The sizes in a model's config.json. Raises `ConfigError` where one is missing."""
    sizes = {size.name: model[size.name] for size in fields(Shape) if size.name in model}
    return checked(Shape, sizes, "the model's config.json: ")


def known_shape(config: RunConfig) -> Shape | None:
    """The sizes in the model's folder if it is here, else those that `config` states. Raises `ConfigError`."""
    file = Path(config.model.path) / "config.json"
    if not file.exists():
        return config.model.shape
    try:
        return shape_of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as why:
        raise ConfigError(f"model {config.model.path}: config.json cannot be used: {why}") from why


def parameters(shape: Shape) -> int:
    """Of a Qwen3 decoder: grouped-query attention with normed queries and keys, a gated MLP, no biases.

    Qwen2.5 has biases on queries, keys and values instead of the norms: 0.01 % more.
    """
    return shape.num_hidden_layers * _layer_parameters(shape) + shape.hidden_size + _embedding_parameters(shape)


def _layer_parameters(shape: Shape) -> int:
    hidden, head = shape.hidden_size, shape.head
    queries, keys = shape.num_attention_heads * head, shape.num_key_value_heads * head
    attention = hidden * (queries + 2 * keys) + queries * hidden + 2 * head
    return attention + 3 * hidden * shape.intermediate_size + 2 * hidden


def _embedding_parameters(shape: Shape) -> int:
    """Of the input and, where it is another one, of the output."""
    return shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)


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
    """An estimate: logits as they are computed, in float32 for the softmax, and their gradient.

    TRL 1.16 computes them in tiles and needs less; older releases that we allow keep them all.
    """
    return tokens * shape.vocab_size * (BYTES[dtype] + 2 * MASTER)


def pass_weight_bytes(shape: Shape, dtype: str, *, is_sharded: bool) -> int:
    """An estimate of the weights that a pass holds as `dtype`, beside the float32 ones that train.

    Sharded: the embeddings and two layers, gathered, with as many gradients on their way to their shards. Unsharded:
    a copy of all, unless it computes in float32.
    """
    if is_sharded:
        return 2 * (_embedding_parameters(shape) + 2 * _layer_parameters(shape)) * BYTES[dtype]
    return 0 if BYTES[dtype] == MASTER else parameters(shape) * BYTES[dtype]


def disk_bytes(config: RunConfig, shape: Shape, trainings: int) -> int:
    """Of the checkpoints and models of so many trainings, and of weights on their way to engines; without episodes."""
    is_sent = config.engines.kind == "vllm" and config.engines.sync == "file"
    sent = 2 * BYTES[config.model.dtype] if is_sent else 0  # those that engines have, and newer ones
    return parameters(shape) * (CHECKPOINTS * (MASTER + ADAM) + trainings * MASTER + sent)


Plan = dict[str, Any]


def plan(config: RunConfig, shape: Shape) -> Plan:
    """What `config` asks of its machines, for a model of `shape`.

    Bytes are of one GPU that trains or, without GPUs, of the machine; `engine_bytes` are of one GPU of an engine.
    `gpu_share` is what training and an engine beside it need of a GPU's memory: more than 1 does not fit. `sft` is None
    where there is none.
    """
    hardware, engines, dtype = config.hardware, config.engines, config.model.dtype
    count, gpus, per_token = parameters(shape), hardware.nodes * hardware.gpus, kv_bytes(shape, dtype)
    is_sharded = hardware.sharding == "full"
    weight_bytes = count * MASTER // (max(1, gpus) if is_sharded else 1)
    if engines.kind == "local":
        kv_tokens = engines.slots * engines.max_length
        engine_bytes = kv_tokens * per_token
    else:
        engine_bytes = int(engines.gpu_memory * hardware.gpu_gb * GB)
        kv_tokens = max(0, engine_bytes * engines.tensor_parallel - count * BYTES[dtype]) // per_token

    def memory(settings: SftConfig | StageConfig, row_tokens: int, beside: int) -> Plan:
        """Of a GPU that trains on rows of `row_tokens`, with `beside` bytes taken by an engine."""
        tokens = settings.micro_batch * row_tokens
        activations = activation_bytes(shape, tokens, dtype, is_checkpointing=settings.is_checkpointing)
        pass_bytes = activations + logit_bytes(shape, tokens, dtype)
        train_bytes = 4 * weight_bytes + pass_weight_bytes(shape, dtype, is_sharded=is_sharded) + pass_bytes
        share = (train_bytes + beside) / (hardware.gpu_gb * GB) if gpus and hardware.gpu_gb else None
        return {"train_bytes": train_bytes, "gpu_share": share}

    shared_bytes = 0 if hardware.engine_gpus else engine_bytes

    def of(stage: StageConfig) -> Plan:
        """A step's, were every rollout as long as it may be."""
        longest = min(engines.max_length, stage.max_tokens + PROMPT)
        return {
            "rollouts": stage.prompts * stage.samples,
            "trained": stage.prompts * stage.keep,
            "sampled_tokens": stage.prompts * stage.samples * stage.max_tokens,
            "trained_tokens": stage.prompts * stage.keep * stage.max_tokens,
            **memory(stage, stage.max_tokens, shared_bytes),
            "rollouts_per_engine": min(engines.slots, kv_tokens // longest),
        }

    sft = config.sft
    of_sft = {
        "rollouts": None,
        "trained": sft.batch,
        "sampled_tokens": None,
        "trained_tokens": sft.batch * sft.max_length,
        # Engines that the run starts are not there yet; those at endpoints are.
        **memory(sft, sft.max_length, shared_bytes if engines.endpoints else 0),
        "rollouts_per_engine": None,
    }
    return {
        "parameters": count,
        "kv_bytes_per_token": per_token,
        "gpus": gpus,
        "weight_bytes": weight_bytes,
        "engines": 1 if engines.kind == "local" else len(urls(engines.endpoints)) or engines.count,
        "engine_bytes": engine_bytes,
        "kv_tokens": kv_tokens,
        "disk_bytes": disk_bytes(config, shape, len(config.stages) + bool(config.sft.data)),
        "sft": of_sft if sft.data else None,
        "stages": {name: of(stage) for name, stage in config.stages.items()},
    }
