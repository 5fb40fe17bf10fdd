"""Tests of the resource plan (memory, disk and time of a run) by published numbers and by computations by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config import ConfigError, ModelShape, Optimizer
from trainer.config_loading import load_config
from trainer.recipe.resource_plan import (
    BYTES,
    GB,
    HEAD_BYTES_PER_VALUE,
    PROMPT_ALLOWANCE,
    TILE_TOKENS,
    TILE_VOCABULARY,
    PhasePlan,
    ResourcePlan,
    TrainingMemory,
    adapter_parameters,
    known_shape,
    kv_bytes_per_token,
    misfits,
    num_parameters,
    resource_plan,
    shape_of,
    training_memory,
)

CONFIGS = Path(__file__).parents[3] / "configs"

SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "head_dim"),
)


def sizes(*numbers: int) -> dict[str, int]:
    """Return a model's sizes by name, from numbers in the order of `SIZES`."""
    return dict(zip(SIZES, numbers, strict=True))


QWEN3_14B = ModelShape(**sizes(40, 5120, 17408, 40, 8, 151936, 128))
QWEN3_32B = ModelShape(**sizes(64, 5120, 25600, 64, 8, 151936, 128))
QWEN25_1B = ModelShape(**sizes(28, 1536, 8960, 12, 2, 151936, 128), tie_word_embeddings=True)
SMALL = ModelShape(**sizes(2, 10, 30, 4, 2, 7, 3))
# The terms are: queries; keys and values; the output; two norms of the head size.
SMALL_ATTENTION = 10 * 12 + 2 * 10 * 6 + 12 * 10 + 3 + 3
# The terms are: the attention; the MLP; two norms of the hidden size.
SMALL_LAYER = SMALL_ATTENTION + 3 * 10 * 30 + 10 + 10
"""Parameters of a layer of `SMALL`, by hand."""


def test_parameters_are_those_of_the_published_models() -> None:
    assert num_parameters(QWEN3_14B) == 14_768_307_200
    assert num_parameters(QWEN3_32B) == 32_762_123_264
    # Qwen2.5 has biases on queries, keys and values in each layer, and no norms of queries and keys.
    biases, norms = 28 * (1536 + 2 * 256), 28 * 2 * 128
    assert num_parameters(QWEN25_1B) + biases - norms == 1_543_714_304


def test_parameters_equal_a_computation_by_hand() -> None:
    assert num_parameters(SMALL) == 2 * SMALL_LAYER + 10 + 2 * 7 * 10, "layers, the last norm, both embeddings"
    assert num_parameters(replace(SMALL, tie_word_embeddings=True)) == num_parameters(SMALL) - 7 * 10


def test_the_kv_cache_of_a_token_has_the_size_that_the_paper_states() -> None:
    assert kv_bytes_per_token(QWEN3_14B) == 160 * 1024
    assert kv_bytes_per_token(QWEN3_14B) * 10_000 == pytest.approx(1.6e9, rel=0.03)
    # Key and value, two layers, two heads of size 3, four bytes.
    assert kv_bytes_per_token(SMALL, "float32") == 2 * 2 * 2 * 3 * 4


SMALL_SAVED = {"full": 26 * 10 + 8 * 30 + 10 * 12 + 10 * 6, "LoRA": 18 * 10 + 8 * 30 + 10 * 12 + 8 * 6}
"""Bytes per token that a layer of `SMALL` saves in bfloat16: of its hidden size, MLP, queries and keys."""


def test_the_memory_of_a_full_training_equals_a_computation_by_hand() -> None:
    """The pass has 5 tokens. The tile of logits is larger than everything else in this model."""
    parameters, tile = num_parameters(SMALL), 5 * TILE_VOCABULARY * 2
    embedding_gradient, loss = 7 * 10 * 4, HEAD_BYTES_PER_VALUE * 5 * 10
    copies = 2 * SMALL_LAYER * 2
    # The weights in bfloat16 that the forward pass keeps are larger than the gradient of the embedding.
    expected = TrainingMemory(
        weights=4 * parameters,
        gradients=4 * parameters,
        moments=8 * parameters,
        activations=2 * 5 * 4 * 10,
        layer=5 * 4 * 30 + SMALL_LAYER * (2 + 4) + 5 * SMALL_SAVED["full"],
        head=tile + loss + copies,
        update=4 * parameters,
    )
    assert training_memory(SMALL, 5, "bfloat16", gradient_checkpointing=True) == expected
    assert expected.peak == 16 * parameters + expected.activations + expected.head
    stored = training_memory(SMALL, 5, "bfloat16", gradient_checkpointing=False)
    assert stored == replace(
        expected,
        activations=2 * 5 * SMALL_SAVED["full"],
        layer=5 * 4 * 30 + SMALL_LAYER * (2 + 4) + copies,
        head=tile + loss + copies + embedding_gradient,
    )


def test_the_memory_of_an_adapter_equals_a_computation_by_hand() -> None:
    adapter = 2 * 16 * (4 * 10 + 2 * 12 + 2 * 6 + 3 * (10 + 30))  # two layers; the rank; inputs and outputs
    assert adapter_parameters(SMALL, 16) == adapter
    assert training_memory(SMALL, 5, "bfloat16", gradient_checkpointing=True, lora_rank=16) == TrainingMemory(
        weights=2 * num_parameters(SMALL) + 4 * adapter,
        gradients=4 * adapter,
        moments=8 * adapter,
        activations=2 * 5 * 2 * 10,
        layer=5 * 9 * 30 + 5 * SMALL_SAVED["LoRA"],
        head=5 * TILE_VOCABULARY * 2 + HEAD_BYTES_PER_VALUE * 5 * 10,
        update=4 * adapter,
    )


def test_sharding_divides_what_is_kept_and_gathers_layers_and_the_head() -> None:
    whole, part = (
        training_memory(SMALL, 5, "bfloat16", gradient_checkpointing=True, shards=shards) for shards in (1, 4)
    )
    assert (part.weights, part.gradients, part.moments, part.update) == tuple(
        size // 4 for size in (whole.weights, whole.gradients, whole.moments, whole.update)
    )
    saved = 16 * 10 + 8 * 30 + 10 * 12 + 10 * 6
    # The weights of two layers and the gradients of one, in bfloat16.
    assert part.layer == 5 * (4 * 30 + saved) + 3 * SMALL_LAYER * 2
    tile, loss = 5 * TILE_VOCABULARY * 2, HEAD_BYTES_PER_VALUE * 5 * 10
    assert part.head == tile + loss + (2 * 7 * 10 + SMALL_LAYER) * 2 + 7 * 10 * 4


def test_the_update_of_torchs_adam_takes_a_copy_of_the_weights_unless_it_is_fused() -> None:
    plain, fused = (
        training_memory(QWEN3_14B, 1024, "bfloat16", optim, gradient_checkpointing=True)
        for optim in ("adamw_torch", "adamw_torch_fused")
    )
    assert plain.peak == 20 * num_parameters(QWEN3_14B), "weights, gradients, two moments, and a copy"
    assert fused.update == 0 and fused.peak < plain.peak


def test_the_tiles_have_the_size_that_trl_has() -> None:
    kernel, utils = (pytest.importorskip(f"trl.{name}") for name in ("kernels.chunked_logprob", "trainer.utils"))
    assert (TILE_TOKENS, TILE_VOCABULARY) == (kernel.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE)


def test_the_run_of_the_paper_fits_its_machines() -> None:
    config = load_config(CONFIGS / "qwen3-14b-mi300x.toml", {})
    assert config.model.shape == QWEN3_14B
    run = resource_plan(config, QWEN3_14B)
    assert (run.gpus, run.engines) == (64, 64)
    parameters = num_parameters(QWEN3_14B)
    # 16 bytes per parameter: weights, gradients and two moments. 64 GPUs share them.
    assert run.weight_bytes * 4 == parameters * 16 // 64
    # Half of a GPU of 192 GB, less the weights in bfloat16, at 160 KiB per token.
    assert run.kv_tokens == (96 * GB - 2 * parameters) // (160 * 1024)
    first = run.stages["rl1"]
    assert (first.episodes, first.trained_rows) == (512 * 32, 512 * 16)
    assert (first.sampled_tokens, first.trained_tokens) == (512 * 32 * 8192, 512 * 16 * 8192)
    assert first.episodes_per_engine == run.kv_tokens // (8192 + PROMPT_ALLOWANCE)
    needed = training_memory(QWEN3_14B, 14336, "bfloat16", gradient_checkpointing=True, shards=64)
    assert first.train_bytes == needed.peak
    assert needed.kept + needed.gradients == pytest.approx(16 * parameters / 64)
    # Four checkpoints of weights and moments, four trained models, two copies of synced weights.
    assert run.disk_bytes == parameters * (4 * 12 + 4 * 4 + 2 * 2)
    assert all(stage.gpu_share < 1 for stage in run.stages.values())


def test_an_adapter_needs_no_optimizer_states_of_the_model_and_evaluations_keep_a_second_model_per_stage() -> None:
    file, parameters = CONFIGS / "qwen2.5-1.5b-single-gpu.toml", num_parameters(QWEN25_1B)
    plain, adapted, evaluated = (
        resource_plan(load_config(file, {}, sets), QWEN25_1B)
        for sets in ((), ["model.peft.r=16"], ["eval.every_steps=5"])
    )
    # Four checkpoints of weights and moments; four trained models, which are bfloat16 with an adapter.
    assert adapted.disk_bytes == plain.disk_bytes - parameters * (4 * 12 + 4 * 2)
    # 20 bytes of training; with an adapter weights in bfloat16.
    assert adapted.sft.train_bytes < plain.sft.train_bytes - parameters * (20 - 2) / 2
    # The best model of each of the four phases, and one that is being written.
    assert evaluated.disk_bytes == plain.disk_bytes + 5 * parameters * 4


def test_an_adapter_for_14b_fits_a_gpu_of_80_gb() -> None:
    sets = [
        "hardware.nodes=1",
        "hardware.launcher=[]",
        "hardware.gpus_per_node=1",
        "hardware.gpu_memory_gb=80",
        "hardware.sharding=none",
    ]
    sets += ["hardware.engine_gpus=1", "engines.endpoints=http://engine", "model.peft.r=16"]
    run = resource_plan(load_config(CONFIGS / "qwen3-14b-mi300x.toml", {}, sets), QWEN3_14B)
    assert run.weight_bytes == 2 * num_parameters(QWEN3_14B)
    assert max(stage.gpu_share for stage in run.stages.values()) < 1


def test_moments_in_8_bits_take_2_bytes_and_paged_ones_leave_the_gpu() -> None:
    def moments(optim: Optimizer) -> float:
        return training_memory(QWEN25_1B, 8, "bfloat16", optim, gradient_checkpointing=True).moments / parameters

    def plan(*sets: str) -> ResourcePlan:
        return resource_plan(load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {}, sets), QWEN25_1B)

    parameters, plain = num_parameters(QWEN25_1B), plan()
    optims: tuple[Optimizer, ...] = ("adamw_torch", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit")
    assert list(map(moments, optims)) == [8, 2, 0, 0]
    reduced = plan("sft.optim=adamw_8bit", "rl.optim=adamw_8bit")
    assert reduced.disk_bytes == plain.disk_bytes - 4 * 6 * parameters
    # Without the copy that the update of `adamw_torch` takes, the peak is in a pass.
    assert reduced.sft.train_bytes < plain.sft.train_bytes - 6 * parameters
    assert plan("sft.optim=paged_adamw_32bit").disk_bytes == plain.disk_bytes


def test_checkpoints_that_are_kept_take_disk_space() -> None:
    def checkpoints(keep: int) -> float:
        sets = [f"storage.keep_checkpoints={keep}"]
        config = load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {}, sets)
        return resource_plan(config, QWEN25_1B).disk_bytes / num_parameters(QWEN25_1B) / 12

    # The run has four trainings. Of the last one, one checkpoint more is being written.
    assert [checkpoints(keep) - checkpoints(0) for keep in (1, 2, 3)] == pytest.approx([3 - 1, 6 - 1, 9 - 1 + 1])


def test_docs_mi300x_md_states_the_sizes_of_a_weight_sync() -> None:
    text = (CONFIGS.parent / "docs/mi300x.md").read_text(encoding="utf-8").partition("## Weight sync")[2]
    written, gathered = (num_parameters(QWEN3_14B) * BYTES[dtype] for dtype in ("bfloat16", "float32"))
    assert [f"{size / GB:.1f} GB" in text for size in (written, gathered)] == [True] * 2


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_configuration_that_states_the_memory_of_a_gpu_fits_it(file: Path) -> None:
    config = load_config(file, {})
    shape = known_shape(config)
    assert shape, "the file has no [model.shape]"
    run = resource_plan(config, shape)
    phases = run.phases()
    if config.hardware.gpu_memory_gb:
        assert {name: phase.gpu_share for name, phase in phases.items() if not (phase.gpu_share or 0) < 1} == {}
    assert {name for name, phase in phases.items() if phase.episodes_per_engine == 0} == set()


def test_the_plan_of_sft_equals_a_computation_by_hand() -> None:
    def sft_plan(*sets: str) -> PhasePlan | None:
        return resource_plan(load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {}, sets), QWEN25_1B).sft

    sft, plan = load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {}).sft, sft_plan()
    tokens = sft.micro_batch_size * sft.max_conversation_tokens
    expected = training_memory(QWEN25_1B, tokens, "bfloat16", gradient_checkpointing=True).peak
    assert (plan.train_bytes, plan.trained_tokens) == (expected, 64 * 4096)
    assert plan.gpu_share == expected / 80e9, "the run's own engine does not exist during SFT"
    assert sft_plan("engines.endpoints=http://a").gpu_share == (expected + 24e9) / 80e9, "an engine at an endpoint does"
    assert sft_plan("sft.data=[]") is None
    assert sft_plan("sft.micro_batch_size=8", "sft.gradient_checkpointing=false").gpu_share > 1


def test_docs_mi300x_md_has_the_values_of_the_dry_run() -> None:
    text = (CONFIGS.parent / "docs/mi300x.md").read_text(encoding="utf-8")
    run = resource_plan(load_config(CONFIGS / "qwen3-14b-mi300x.toml", {}), QWEN3_14B)
    longest = max(stage.train_bytes for stage in run.stages.values())
    rows = (
        *(f"| {run.parameters:,} |", f"| {run.weight_bytes * 4 / GB:.1f} GB per GPU |"),
        *(f"| {longest / GB:.1f} GB per GPU |", f"| {run.sft.train_bytes / GB:.1f} GB per GPU |"),
        *(f"| {run.kv_tokens:,} |", f"| {run.disk_bytes / GB / 1000:.1f} TB |"),
        f"with {192 - 96 - longest / GB:.0f} GB left",  # of a GPU, half of which the engine has
    )
    assert [row for row in rows if row not in text] == []


def test_aworld_s_run_fits_its_two_nodes() -> None:
    config = load_config(CONFIGS / "qwen3-32b-gaia.toml", {})
    assert config.model.shape == QWEN3_32B
    run = resource_plan(config, QWEN3_32B)
    assert run.gpus + config.hardware.engine_gpus == 2 * 8
    assert run.engines * config.engines.tensor_parallel_size == config.hardware.engine_gpus
    assert misfits(config, run) == {name: [] for name in ("sft", "cycle1", "cycle2", "cycle3", "cycle4")}
    # Eight attempts per problem, 1,200 s each, all of them kept, and collected before each stage on Ray nodes.
    assert (config.collect.executor, config.collect.deadline_s) == ("ray", 1200)
    for stage in config.stages.values():
        assert (stage.episodes, stage.roc_mode) == ("collected", "off")
        assert (stage.samples_per_problem, stage.kept_per_problem) == (8, 8)


def test_docs_collection_md_has_the_values_of_the_dry_run() -> None:
    text = (CONFIGS.parent / "docs/collection.md").read_text(encoding="utf-8")
    config = load_config(CONFIGS / "qwen3-32b-gaia.toml", {})
    run, stage = resource_plan(config, QWEN3_32B), config.stages["cycle1"]
    plan = run.stages["cycle1"]
    cycle, at_once = plan.episodes * stage.steps, plan.episodes_per_engine
    in_flight = 2 * config.collect.episodes_per_worker
    hours = math.ceil(cycle / in_flight) * config.collect.deadline_s / 3600
    rows = (
        *(f"| {run.parameters:,} |", f"| {run.weight_bytes * 4 / GB:.1f} GB per GPU |"),
        *(f"| {plan.train_bytes / GB:.1f} GB per GPU |", f"| {plan.gpu_share:.0%}".replace("%", " % |")),
        *(f"on 2 GPUs | {2 * run.parameters / GB:.1f} GB |", f"| {run.kv_bytes_per_token // 1024} KiB |"),
        *(f"| {run.kv_tokens:,} |", f"| {at_once} and {at_once * run.engines} |", f"| {in_flight} |", f"| {cycle} |"),
        *(f"| {plan.sampled_tokens * stage.steps / 1e6:.1f} million |", f"| {hours:.0f} hour |"),
        f"| {run.disk_bytes / GB / 1000:.1f} TB |",
    )
    assert [row for row in rows if row not in text] == []


def gpu_shares(file: str, shape: ModelShape, *sets: str) -> list[float]:
    """Return the share of a GPU's memory that each RL stage takes."""
    return [stage.gpu_share for stage in resource_plan(load_config(CONFIGS / file, {}, sets), shape).stages.values()]


def test_the_run_of_the_paper_does_not_fit_without_sharding_or_with_too_small_a_kv_cache() -> None:
    assert min(gpu_shares("qwen3-14b-mi300x.toml", QWEN3_14B, "hardware.sharding=none")) > 1
    config = load_config(CONFIGS / "qwen3-14b-mi300x.toml", {}, ["engines.gpu_memory_utilization=0.15"])
    assert resource_plan(config, QWEN3_14B).stages["rl1"].episodes_per_engine == 0


def test_the_small_run_fits_one_gpu() -> None:
    run = resource_plan(load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {}), QWEN25_1B)
    assert (run.gpus, run.engines) == (1, 1)
    assert max(gpu_shares("qwen2.5-1.5b-single-gpu.toml", QWEN25_1B)) < 1


def test_engines_on_gpus_of_their_own_take_no_memory_of_the_training_gpus() -> None:
    large_engine = "engines.gpu_memory_utilization=0.95"
    assert min(gpu_shares("qwen3-14b-mi300x.toml", QWEN3_14B, large_engine)) > 1
    assert max(gpu_shares("qwen3-14b-mi300x.toml", QWEN3_14B, large_engine, "hardware.engine_gpus=64")) < 1


def test_an_engine_that_sleeps_takes_no_memory_beside_a_pass() -> None:
    sets = ["engines.gpu_memory_utilization=0.9", "engines.sleep_mode=true"]
    plan = resource_plan(load_config(CONFIGS / "qwen3-14b-mi300x.toml", {}, sets), QWEN3_14B)
    assert plan.stages["rl1"].gpu_share == pytest.approx((3 * plan.weight_bytes + 0.9 * 192e9) / 192e9)
    sets[0] = "engines.gpu_memory_utilization=0.05"
    plan = resource_plan(load_config(CONFIGS / "qwen3-14b-mi300x.toml", {}, sets), QWEN3_14B)
    assert plan.stages["rl1"].gpu_share == pytest.approx(plan.stages["rl1"].train_bytes / 192e9)


def test_the_kv_cache_of_a_local_engine_holds_max_num_seqs_sequences_of_maximum_length() -> None:
    config = load_config(
        None,
        {},
        ["engines.max_num_seqs=8", "engines.max_model_len=32", "eval.max_response_tokens=16", "model.dtype=float32"],
    )
    run = resource_plan(config, SMALL)
    assert (run.gpus, run.engines, run.kv_tokens) == (0, 1, 8 * 32)
    weights = 4 * num_parameters(SMALL)
    running_and_cached = 2 * 8 * 32 * kv_bytes_per_token(SMALL, "float32")
    assert run.engine_gpu_bytes == weights + running_and_cached


def local_engine_plan(*sets: str, machine_bytes: float = math.inf) -> ResourcePlan:
    sets = ("engines.kind=local", "engines.gpu_memory_utilization=0.9", *sets)
    return resource_plan(load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {}, sets), QWEN25_1B, machine_bytes)


def test_a_local_engine_takes_memory_of_the_training_gpu_and_has_the_slots_that_fit_there() -> None:
    """The GPU has 80 GB. The weights of the engine take 3.1 GB, and its keys and values at most a quarter of the rest,
    19.2 GB: 41 slots of 16,384 tokens of 28,672 bytes. The prefix cache takes as much again."""
    plan = local_engine_plan("engines.max_model_len=16384", "engines.max_num_seqs=64")
    assert plan.kv_bytes_per_token == 28_672
    assert plan.kv_tokens == 40 * 16_384
    stage, weights = plan.stages["rl1"], 2 * num_parameters(QWEN25_1B)
    assert stage.episodes_per_engine == 40
    assert plan.engine_gpu_bytes == weights + 2 * plan.kv_tokens * plan.kv_bytes_per_token
    assert stage.gpu_share == pytest.approx((stage.train_bytes + plan.engine_gpu_bytes) / 80e9)
    assert plan.sft and plan.sft.gpu_share == pytest.approx(plan.sft.train_bytes / 80e9)


@pytest.mark.parametrize("set", ["engines.device=cpu", "engines.device=cuda:1", "hardware.engine_gpus=1"])
def test_a_local_engine_on_another_device_takes_no_memory_of_the_training_gpu(set: str) -> None:
    stage = local_engine_plan(set).stages["rl1"]
    assert stage.gpu_share == pytest.approx(stage.train_bytes / 80e9)


def test_a_local_engine_on_the_cpu_takes_at_most_half_of_the_memory_that_its_weights_leave() -> None:
    weights, available = 2 * num_parameters(QWEN25_1B), 10 * GB
    plan = local_engine_plan("engines.device=cpu", machine_bytes=available)
    assert plan.engine_gpu_bytes == pytest.approx(weights + (available - weights) / 2, rel=1e-3)


def test_the_lines_about_a_local_engine_that_does_not_fit_name_its_own_settings() -> None:
    sets = ["engines.kind=local", "hardware.gpu_memory_gb=4", "engines.max_model_len=16384"]
    config = load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {}, sets)
    share, cache = misfits(config, resource_plan(config, QWEN25_1B))["rl1"]
    assert share.endswith("or lower engines.max_num_seqs")
    assert cache.endswith("holds 0 tokens, fewer than one episode; lower engines.max_model_len")


def test_a_shape_is_read_from_the_config_json_of_the_model() -> None:
    model_config = {**sizes(40, 5120, 17408, 40, 8, 151936, 128), "tie_word_embeddings": False, "model_type": "qwen3"}
    assert shape_of(model_config) == QWEN3_14B
    del model_config["head_dim"]
    assert shape_of(model_config).head_size == 5120 // 40
    del model_config["vocab_size"]
    with pytest.raises(ConfigError, match=r"the model's config\.json: vocab_size: expected a value, got none"):
        shape_of(model_config)
