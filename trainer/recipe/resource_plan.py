"""Computes what a run needs: parameters, training memory, KV cache, episodes that fit, tokens per step, disk space.

| exact                                                      | estimated                                              |
|------------------------------------------------------------|--------------------------------------------------------|
| parameters; bytes of weights, gradients and Adam's moments | activations, the head, the backward pass of a layer    |
| bytes of KV cache per token, tokens per step               | (these depend on attention, loss and sharding)         |

Training keeps weights, gradients and both of Adam's moments in float32, which takes 16 bytes per parameter. The update
of torch's Adam takes 4 more for a while. In bfloat16 the updates of the paper's learning rate, 1e-6, would be rounded
to zero. Passes and engines compute in `model.dtype`. An adapter freezes the model's weights, which are then in
`model.dtype`, and have no gradients and no moments. With sharding, each GPU keeps its share of the weights, the
gradients and both moments; gradients are sharded after every pass. `bench.fits` compares these estimates with the
counted tensors of training steps. Nothing here estimates time. An engine's *KV cache* holds the keys and values of its
sequences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import (
    TINY_MODEL,
    TINY_SHAPE,
    ConfigError,
    ModelShape,
    Optimizer,
    RunConfig,
    SftConfig,
    StageConfig,
    expand_urls,
)
from trainer.config_loading import validate_tree

BYTES = {"float32": 4, "bfloat16": 2}
TRAIN_BYTES_PER_VALUE = 4
"""Bytes of a value in the trained weights, their gradients, and each of Adam's two moments."""
MOMENT_BYTES = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"), 2 * TRAIN_BYTES_PER_VALUE),
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit"), 2),
}
"""Bytes of the two moments of a parameter, by optimizer. Those of a paged one leave a GPU whose memory is short."""
UPDATE_BYTES = {"adamw_torch": TRAIN_BYTES_PER_VALUE}
"""Bytes of a parameter that the update of an optimizer takes for a while; 0 for the optimizers that are not named."""
TILE_TOKENS = 4096
"""The number of tokens in a tile of logits in TRL (`trl/kernels/chunked_logprob.py`)."""
TILE_VOCABULARY = 32768
"""The number of vocabulary entries in such a tile."""
HEAD_BYTES_PER_VALUE = 20
"""Bytes of each value of the model's outputs during the loss: the outputs, their norm, and the gradients."""
GB = 10**9
CACHE_MEMORY_SHARE = 0.25
"""Largest share of the memory that is available at the start of a local engine, after its weights are loaded, for the
keys and values of its running requests. Its prefix cache may take as much again. The rest is for the training."""
DEFAULT_LORA_RANK = 8
"""The rank of peft's LoRA if `[model.peft]` does not set `r`. Adapters of other kinds are smaller."""
PROMPT_ALLOWANCE = 1024
"""Assumed tokens of a prompt: rStar2's system message with the tool's schema, and a long problem."""
LESS_MEMORY_ADVICE = "lower micro_batch_tokens (sft: micro_batch_size) or set gradient_checkpointing or sharding"


class LayerBytes(NamedTuple):
    """Bytes per token that the backward pass of a layer needs."""

    hidden: int
    """Per value of the hidden size. The next three are per value of the MLP's width, of the queries, and of the keys.
    These four are saved by the forward pass."""
    intermediate: int
    queries: int
    keys: int
    gradients: int
    """Per value of the MLP's width, for the gradients of the layer while they are computed."""
    input: int
    """Per value of the hidden size, for the input of the layer, which gradient checkpointing saves."""


def layer_bytes(dtype: str, *, is_adapted: bool, is_sharded: bool) -> LayerBytes:
    """Return the bytes that a layer needs. They were counted on Qwen3 in transformers 5.24, by listing the tensors that
    are saved for the backward pass.

    Without sharding, passes in bfloat16 read float32 weights (autocast), and each linear layer saves a copy of its
    input in bfloat16. FSDP casts the weights instead, so layers share their inputs. An adapter has float32 weights in
    both cases, and the frozen norms and linear layers save less.
    """
    if dtype == "float32":
        return LayerBytes(16, 16, 12, 12, 8, 4) if is_adapted else LayerBytes(24, 16, 16, 16, 8, 4)
    if is_adapted:
        return LayerBytes(12, 8, 8, 8, 5, 2) if is_sharded else LayerBytes(18, 8, 10, 8, 9, 2)
    return LayerBytes(16, 8, 10, 10, 4, 2) if is_sharded else LayerBytes(26, 8, 10, 10, 4, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """The memory of a training in bytes, on each training GPU or, without GPUs, in the machine."""

    weights: int
    gradients: int
    moments: int
    activations: int
    """What the forward pass saves for the backward pass."""
    layer: int
    """What the backward pass of a layer needs in addition: weights in the dtype of the pass, gradients and, with
    gradient checkpointing, the activations of the layer."""
    head: int
    """What the loss needs in addition."""
    update: int
    """What the update of the optimizer or the gathering of tied embeddings needs in addition, without activations."""

    @property
    def kept(self) -> int:
        """The bytes between two steps."""
        return self.weights + self.moments

    @property
    def peak(self) -> int:
        a_pass = self.activations + max(self.layer, self.head)
        return self.kept + self.gradients + max(a_pass, self.update)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """The needs of SFT or of a stage, if every episode has its maximum length. A value that does not apply is None."""

    episodes: int | None = None
    """Episodes sampled per training step."""
    trained_rows: int
    sampled_tokens: int | None = None
    trained_tokens: int
    train_bytes: int
    """Memory of one training GPU or, without GPUs, of the machine."""
    gpu_share: float | None
    """The share of a GPU's memory that training and an engine on it take. More than 1 does not fit."""
    episodes_per_engine: int | None = None
    """Episodes of maximum length that one engine runs at once. 0 does not fit."""


@dataclass(frozen=True, slots=True)
class ResourcePlan:
    """What a run needs. Bytes are per training GPU or, without GPUs, of the machine."""

    parameters: int
    kv_bytes_per_token: int
    gpus: int
    weight_bytes: int
    engines: int
    engine_gpu_bytes: int
    """Bytes that an engine takes on each of its GPUs. A local engine takes them on its device, which can be the CPU.
    They are for its weights, for the keys and values of its running requests, and as many for its prefix cache."""
    kv_tokens: int
    """Tokens in an engine's KV cache."""
    disk_bytes: int
    sft: PhasePlan | None
    stages: Mapping[str, PhasePlan]

    def phases(self) -> dict[str, PhasePlan]:
        """Return the plans of SFT, if there is one, and of the stages."""
        return {**({"sft": self.sft} if self.sft else {}), **self.stages}


def shape_of(model: Mapping[str, Any]) -> ModelShape:
    """Return the sizes in a model's config.json. Raises `ConfigError` if one is missing."""
    sizes = {size.name: model[size.name] for size in fields(ModelShape) if size.name in model}
    return validate_tree(ModelShape, sizes, "the model's config.json: ")


def known_shape(config: RunConfig) -> ModelShape | None:
    """Return the sizes in the model's folder, or those of a model that the run generates. If the folder is not on this
    machine, return the sizes in `config`, or None. Raises `ConfigError`."""
    if config.model.path == TINY_MODEL:
        return TINY_SHAPE
    file = Path(config.model.path) / "config.json"
    if not file.exists():
        return config.model.shape
    try:
        return shape_of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {config.model.path}: config.json cannot be used: {error}") from error


def num_parameters(shape: ModelShape) -> int:
    """Return the parameters of a Qwen3 decoder: grouped-query attention with query and key norms, gated MLP, no biases.

    Qwen2.5 has biases on queries, keys and values instead of the norms, 0.01 % more.
    """
    return shape.num_hidden_layers * _layer_parameters(shape) + shape.hidden_size + _embedding_parameters(shape)


def adapter_parameters(shape: ModelShape, lora_rank: int) -> int:
    """Return the parameters of a LoRA adapter of all linear layers. Each has two matrices of this rank."""
    queries, keys = shape.num_attention_heads * shape.head_size, shape.num_key_value_heads * shape.head_size
    attention = 4 * shape.hidden_size + 2 * queries + 2 * keys
    return shape.num_hidden_layers * lora_rank * (attention + 3 * (shape.hidden_size + shape.intermediate_size))


def _layer_parameters(shape: ModelShape) -> int:
    hidden, head = shape.hidden_size, shape.head_size
    queries, keys = shape.num_attention_heads * head, shape.num_key_value_heads * head
    attention = hidden * (queries + 2 * keys) + queries * hidden + 2 * head
    return attention + 3 * hidden * shape.intermediate_size + 2 * hidden


def _embedding_parameters(shape: ModelShape) -> int:
    return shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)


def kv_bytes_per_token(shape: ModelShape, dtype: str = "bfloat16") -> int:
    """Return the bytes of a key and a value for each layer and KV head."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_size * BYTES[dtype]


def training_memory(
    shape: ModelShape,
    tokens: int,
    dtype: str,
    optim: Optimizer = "adamw_torch",
    *,
    gradient_checkpointing: bool,
    lora_rank: int = 0,
    shards: int = 1,
) -> TrainingMemory:
    """Estimate the memory of a training with passes of `tokens` that compute in `dtype`.

    The estimate assumes an attention kernel that does not store the matrix of scores. `lora_rank`: the rank of an
    adapter of all linear layers; with 0 all weights are trained. `shards`: the number of GPUs that share the weights,
    gradients and moments.
    """
    size, parameters, is_sharded = BYTES[dtype], num_parameters(shape), shards > 1
    trained = adapter_parameters(shape, lora_rank) if lora_rank else parameters
    frozen_bytes = parameters * size if lora_rank else 0
    per_value = layer_bytes(dtype, is_adapted=bool(lora_rank), is_sharded=is_sharded)
    saved = (
        per_value.hidden * shape.hidden_size
        + per_value.intermediate * shape.intermediate_size
        + (per_value.queries * shape.num_attention_heads + per_value.keys * shape.num_key_value_heads) * shape.head_size
    )
    layers, layer_parameters = shape.num_hidden_layers, _layer_parameters(shape)
    vocabulary = shape.vocab_size * shape.hidden_size
    layer = tokens * per_value.gradients * shape.intermediate_size
    head = min(tokens, TILE_TOKENS) * TILE_VOCABULARY * size + HEAD_BYTES_PER_VALUE * tokens * shape.hidden_size
    update = trained * UPDATE_BYTES.get(optim, 0) // shards
    head_gradient = 0 if lora_rank else vocabulary * TRAIN_BYTES_PER_VALUE
    if is_sharded:
        # Two layers are gathered at a time, and the gradients of one are not sharded yet. Tied embeddings are gathered,
        # and keep their gradients, until the end of the backward pass.
        shared = vocabulary * size if shape.tie_word_embeddings else 0
        layer += (2 if lora_rank else 3) * layer_parameters * size + shared * (1 if lora_rank else 2)
        # The head is gathered into a buffer and then copied; later its gradients are as large as the buffer. Tied
        # embeddings are gathered before the first layer.
        head += ((1 if shared and lora_rank else 2) * vocabulary + layer_parameters) * size + head_gradient
        update = max(update, 2 * shared)
    elif not lora_rank:
        # Autocast keeps a copy of all weights of layers in `dtype` until the end of the forward pass. Without
        # checkpointing the backward pass needs the copies, too.
        copies = layers * layer_parameters * size if size < TRAIN_BYTES_PER_VALUE else 0
        layer_gradients = layer_parameters * (size + TRAIN_BYTES_PER_VALUE)
        shared = vocabulary * TRAIN_BYTES_PER_VALUE if shape.tie_word_embeddings else 0
        layer += shared + layer_gradients + (0 if gradient_checkpointing else copies)
        head += max(copies, head_gradient) if gradient_checkpointing else copies + head_gradient
    return TrainingMemory(
        weights=(frozen_bytes + trained * TRAIN_BYTES_PER_VALUE) // shards,
        gradients=trained * TRAIN_BYTES_PER_VALUE // shards,
        moments=0 if "paged" in optim else trained * MOMENT_BYTES[optim] // shards,
        activations=layers * tokens * (per_value.input * shape.hidden_size if gradient_checkpointing else saved),
        layer=layer + (tokens * saved if gradient_checkpointing else 0),
        head=head,
        update=update,
    )


def checkpoint_bytes(shape: ModelShape, optim: Optimizer, *, is_sharded: bool) -> int:
    """Return the bytes of a checkpoint: the weights and their moments. A sharded one has the embeddings twice if the
    output layer shares them."""
    shared = shape.vocab_size * shape.hidden_size if is_sharded and shape.tie_word_embeddings else 0
    return num_parameters(shape) * (TRAIN_BYTES_PER_VALUE + MOMENT_BYTES[optim]) + shared * TRAIN_BYTES_PER_VALUE


def disk_bytes(config: RunConfig, shape: ModelShape, num_phases: int) -> int:
    """Return the bytes of checkpoints, synced weights and the models of `num_phases` phases, without episodes."""
    uses_files = config.engines.kind == "vllm" and config.engines.weight_sync == "file"
    synced = 2 * BYTES[config.model.dtype] if uses_files else 0  # the weights of the engines, and those being written
    keep, is_sharded = config.storage.keep_checkpoints, config.hardware.sharding == "full"
    # At least two of the training that runs, one that is being written, and at least one of a previous stage.
    checkpoints = max(2, keep) + 1 + max(1, keep * (num_phases - 1))
    sizes = (checkpoint_bytes(shape, settings.optim, is_sharded=is_sharded) for settings in config.trainings().values())
    # The checkpoints of an adapter are small.
    stored = 0 if config.model.peft else checkpoints * max(sizes, default=0)
    models = 2 * num_phases + 1 if config.eval.every_steps else num_phases  # with the best, and one being written
    weights = BYTES[config.model.dtype] if config.model.peft else TRAIN_BYTES_PER_VALUE
    return stored + num_parameters(shape) * (models * weights + synced)


def resource_plan(config: RunConfig, shape: ModelShape, machine_bytes: float = math.inf) -> ResourcePlan:
    """Return what `config` needs for a model of `shape`. `machine_bytes`: the memory that is available to a local
    engine on the CPU."""
    hardware, engines, dtype = config.hardware, config.engines, config.model.dtype
    parameters, gpus = num_parameters(shape), hardware.nodes * hardware.gpus_per_node
    per_token, is_sharded = kv_bytes_per_token(shape, dtype), hardware.sharding == "full"
    is_adapted, shards = bool(config.model.peft), max(1, gpus) if is_sharded else 1
    weight_bytes = parameters * (BYTES[dtype] if is_adapted else TRAIN_BYTES_PER_VALUE) // shards
    max_num_seqs, shares_gpu = engines.max_num_seqs, not hardware.engine_gpus
    if engines.kind == "local":
        is_on_cpu = config.local_device == "cpu"
        shares_gpu = not is_on_cpu and int(config.local_device.partition(":")[2] or 0) < hardware.gpus_per_node
        device_bytes = machine_bytes if is_on_cpu else hardware.gpu_memory_gb * GB or math.inf
        engine_weights = parameters * BYTES[dtype]
        affordable_tokens = CACHE_MEMORY_SHARE * max(0, device_bytes - engine_weights) / per_token
        if not is_on_cpu:  # the slots of a GPU take their memory at once, so fewer fit
            max_num_seqs = int(min(max_num_seqs, affordable_tokens // engines.max_model_len))
        kv_tokens = int(min(max_num_seqs * engines.max_model_len, affordable_tokens))
        engine_gpu_bytes = engine_weights + 2 * kv_tokens * per_token
    elif engines.kind == "openai":
        kv_tokens = engine_gpu_bytes = 0  # unknown, and not on this run's GPUs
    else:
        engine_gpu_bytes = int(engines.gpu_memory_utilization * hardware.gpu_memory_gb * GB)
        kv_tokens = max(0, engine_gpu_bytes * engines.tensor_parallel_size - parameters * BYTES[dtype]) // per_token
    shared_bytes = engine_gpu_bytes if shares_gpu else 0  # of an engine on the training GPUs

    def memory(settings: SftConfig | StageConfig, tokens: int, engine_gpu_bytes: int) -> tuple[int, float | None]:
        """Return (train_bytes, gpu_share) for passes of `tokens`, beside an engine of `engine_gpu_bytes`."""
        needed = training_memory(
            shape,
            tokens,
            dtype,
            settings.optim,
            gradient_checkpointing=settings.gradient_checkpointing,
            lora_rank=int(config.model.peft.get("r", DEFAULT_LORA_RANK)) if is_adapted else 0,
            shards=shards,
        )
        if not gpus or not hardware.gpu_memory_gb:
            return needed.peak, None
        while_engines_sample = needed.kept if engines.sleep_mode else needed.peak
        used_bytes = max(needed.peak, while_engines_sample + engine_gpu_bytes)
        return needed.peak, used_bytes / (hardware.gpu_memory_gb * GB)

    def stage_plan(stage: StageConfig) -> PhasePlan:
        max_tokens, problems = stage.max_response_tokens, stage.problems_per_step
        train_bytes, gpu_share = memory(stage, stage.micro_batch_tokens, shared_bytes)
        context_tokens = min(engines.max_model_len, max_tokens + PROMPT_ALLOWANCE)
        return PhasePlan(
            episodes=problems * stage.samples_per_problem,
            trained_rows=problems * stage.kept_per_problem,
            sampled_tokens=problems * stage.samples_per_problem * max_tokens,
            trained_tokens=problems * stage.kept_per_problem * max_tokens,
            train_bytes=train_bytes,
            gpu_share=gpu_share,
            episodes_per_engine=min(max_num_seqs, kv_tokens // context_tokens),
        )

    sft = config.sft
    # Engines that the run starts do not exist during SFT; engines at endpoints do.
    sft_pass_tokens = sft.micro_batch_size * sft.max_conversation_tokens
    sft_bytes, sft_share = memory(sft, sft_pass_tokens, shared_bytes if engines.endpoints else 0)
    sft_plan = PhasePlan(
        trained_rows=sft.batch_size,
        trained_tokens=sft.batch_size * sft.max_conversation_tokens,
        train_bytes=sft_bytes,
        gpu_share=sft_share,
    )
    return ResourcePlan(
        parameters=parameters,
        kv_bytes_per_token=per_token,
        gpus=gpus,
        weight_bytes=weight_bytes,
        engines=1 if engines.kind == "local" else len(expand_urls(engines.endpoints)) or engines.count,
        engine_gpu_bytes=engine_gpu_bytes,
        kv_tokens=kv_tokens,
        disk_bytes=disk_bytes(config, shape, len(config.stages) + bool(sft.data)),
        sft=sft_plan if sft.data else None,
        stages={name: stage_plan(stage) for name, stage in config.stages.items()},
    )


def misfits(config: RunConfig, plan: ResourcePlan) -> dict[str, list[str]]:
    """Return, by phase, a line for each thing that does not fit a GPU or an engine of the size in `config`."""
    is_local = config.engines.kind == "local"
    is_memory_known = is_local or config.hardware.gpu_memory_gb > 0
    lines: dict[str, list[str]] = {}
    for name, phase in plan.phases().items():
        where = name if name == "sft" else f"stages.{name}"
        lines[name] = []
        if (phase.gpu_share or 0) > 1:
            lines[name].append(
                f"memory: {where}: training and the engine on the same GPU take {phase.gpu_share:.0%} of its "
                f"{config.hardware.gpu_memory_gb:.0f} GB; {LESS_MEMORY_ADVICE}, or lower "
                f"engines.{'max_num_seqs' if is_local else 'gpu_memory_utilization'}"
            )
        if is_memory_known and phase.episodes_per_engine == 0:
            lines[name].append(
                f"memory: {where}: an engine's KV cache holds {plan.kv_tokens} tokens, fewer than one episode; "
                + ("" if is_local else "raise engines.gpu_memory_utilization or engines.tensor_parallel_size, or ")
                + f"lower {'engines.max_model_len' if is_local else 'max_response_tokens'}"
            )
    return lines
