"""What a run needs, against numbers worked out by hand and against published ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config import ConfigError, ModelShape
from trainer.config_loading import load_config
from trainer.recipe.resource_plan import (
    BYTES,
    GB,
    activation_bytes,
    kv_bytes_per_token,
    logit_bytes,
    num_parameters,
    pass_weight_bytes,
    resource_plan,
    shape_of,
)

CONFIGS = Path(__file__).parents[3] / "configs"

SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "head_dim"),
)


def sizes(*numbers: int) -> dict[str, int]:
    return dict(zip(SIZES, numbers, strict=True))


QWEN3_14B = ModelShape(**sizes(40, 5120, 17408, 40, 8, 151936, 128))
QWEN25_1B = ModelShape(**sizes(28, 1536, 8960, 12, 2, 151936, 128), tie_word_embeddings=True)
SMALL = ModelShape(**sizes(2, 10, 30, 4, 2, 7, 3))


def test_parameters_are_those_of_the_published_models() -> None:
    assert num_parameters(QWEN3_14B) == 14_768_307_200
    # Its biases on queries, keys and values, less the norms that it does not have.
    assert num_parameters(QWEN25_1B) + 28 * (1536 + 2 * 256) - 28 * 2 * 128 == 1_543_714_304


def test_parameters_by_hand() -> None:
    attention = 10 * 12 + 2 * 10 * 6 + 12 * 10 + 3 + 3
    layer = attention + 3 * 10 * 30 + 10 + 10
    assert num_parameters(SMALL) == 2 * layer + 10 + 2 * 7 * 10
    assert num_parameters(replace(SMALL, tie_word_embeddings=True)) == num_parameters(SMALL) - 70


def test_kv_of_a_token_is_the_paper_s_160_kib() -> None:
    assert kv_bytes_per_token(QWEN3_14B) == 160 * 1024
    assert kv_bytes_per_token(QWEN3_14B) * 10_000 == pytest.approx(1.6e9, rel=0.03)
    assert kv_bytes_per_token(SMALL, "float32") == 2 * 2 * 2 * 3 * 4


def test_activations_by_hand() -> None:
    a_layer = 4 * 10 + 2 * 12 + 2 * 6 + 4 * 30
    assert activation_bytes(SMALL, 5, "bfloat16", gradient_checkpointing=False) == 2 * 5 * 2 * a_layer
    assert activation_bytes(SMALL, 5, "bfloat16", gradient_checkpointing=True) == 5 * 2 * (2 * 10 + a_layer)
    assert logit_bytes(SMALL, 5, "float32") == 5 * 7 * (4 + 4 + 4)


def test_weights_of_a_pass_by_hand() -> None:
    layer = (10 * 12 + 2 * 10 * 6 + 12 * 10 + 3 + 3) + 3 * 10 * 30 + 10 + 10
    assert pass_weight_bytes(SMALL, "bfloat16", is_sharded=True) == 2 * 2 * (2 * 7 * 10 + 2 * layer)
    assert pass_weight_bytes(SMALL, "bfloat16", is_sharded=False) == 2 * num_parameters(SMALL)
    assert pass_weight_bytes(SMALL, "float32", is_sharded=False) == 0


def test_the_paper_s_run_fits_its_machines() -> None:
    config = load_config(CONFIGS / "qwen3-14b-mi300x.toml", {})
    assert config.model.shape == QWEN3_14B
    run = resource_plan(config, QWEN3_14B)
    assert (run.gpus, run.engines) == (64, 64)
    assert run.weight_bytes * 4 == 14_768_307_200 * 16 // 64
    assert run.kv_tokens == (96_000_000_000 - 2 * 14_768_307_200) // 163_840
    first = run.stages["rl1"]
    assert (first.episodes, first.trained_rows) == (512 * 32, 512 * 16)
    assert (first.sampled_tokens, first.trained_tokens) == (16384 * 8192, 8192 * 8192)
    assert first.episodes_per_engine == run.kv_tokens // (8192 + 1024)
    assert first.train_bytes == 16 * (run.parameters // 64) + pass_weight_bytes(
        QWEN3_14B, "bfloat16", is_sharded=True
    ) + activation_bytes(QWEN3_14B, 8192, "bfloat16", gradient_checkpointing=True) + logit_bytes(
        QWEN3_14B, 8192, "bfloat16"
    )
    assert run.disk_bytes == 14_768_307_200 * (4 * 12 + 4 * 4 + 2 * 2)
    assert all(stage.gpu_share < 1 for stage in run.stages.values())


def test_the_document_has_the_sizes_that_a_weight_sync_writes_gathers_and_holds() -> None:
    text = (CONFIGS.parent / "docs/mi300x.md").read_text(encoding="utf-8").partition("## Weight sync")[2]
    written, gathered = (num_parameters(QWEN3_14B) * BYTES[dtype] for dtype in ("bfloat16", "float32"))
    assert [f"{size / GB:.1f} GB" in text for size in (written, gathered, written + gathered)] == [True] * 3


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_configuration_that_states_a_gpu_s_memory_fits_it(file: Path) -> None:
    config = load_config(file, {})
    assert config.model.shape
    run = resource_plan(config, config.model.shape)
    phases = run.phases()
    if config.hardware.gpu_memory_gb:
        assert {name: phase.gpu_share for name, phase in phases.items() if not (phase.gpu_share or 0) < 1} == {}
    assert {name for name, phase in phases.items() if phase.episodes_per_engine == 0} == set()


def test_sft_s_plan_by_hand() -> None:
    config = load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {})
    tokens, run = config.sft.micro_batch_size * config.sft.max_conversation_tokens, resource_plan(config, QWEN25_1B)
    expected = (
        18 * num_parameters(QWEN25_1B)  # float32 weights, gradients, two moments; weights in bfloat16
        + activation_bytes(QWEN25_1B, tokens, "bfloat16", gradient_checkpointing=True)
        + logit_bytes(QWEN25_1B, tokens, "bfloat16")
    )
    assert (run.sft.train_bytes, run.sft.trained_tokens) == (expected, 64 * 4096)
    assert run.sft.gpu_share == expected / 80e9, "the run's own engine is not there during SFT"
    beside = resource_plan(
        load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {}, ["engines.endpoints=http://a"]), QWEN25_1B
    )
    assert beside.sft.gpu_share == (expected + 24e9) / 80e9
    assert (
        resource_plan(load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {}, ["sft.data=[]"]), QWEN25_1B).sft is None
    )
    long = ["sft.micro_batch_size=8", "sft.gradient_checkpointing=false"]
    assert resource_plan(load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {}, long), QWEN25_1B).sft.gpu_share > 2


def test_the_document_s_table_has_the_values_of_the_dry_run() -> None:
    text = (CONFIGS.parent / "docs/mi300x.md").read_text(encoding="utf-8")
    run = resource_plan(load_config(CONFIGS / "qwen3-14b-mi300x.toml", {}), QWEN3_14B)
    longest = max(stage.train_bytes for stage in run.stages.values())
    rows = (
        *(f"| {run.parameters:,} |", f"| {run.weight_bytes * 4 / GB:.1f} GB per GPU |"),
        *(f"| {longest / GB:.1f} GB per GPU |", f"| {run.sft.train_bytes / GB:.1f} GB per GPU |"),
        *(f"| {run.kv_tokens:,} |", f"| {run.disk_bytes / GB / 1000:.1f} TB |"),
        f"with {192 - 96 - longest / GB:.0f} GB left",
    )
    assert [row for row in rows if row not in text] == []


def shares(file: str, shape: ModelShape, *sets: str) -> list[float]:
    return [stage.gpu_share for stage in resource_plan(load_config(CONFIGS / file, {}, sets), shape).stages.values()]


def test_the_paper_s_run_does_not_fit_without_sharding_or_with_too_small_a_kv_cache() -> None:
    assert min(shares("qwen3-14b-mi300x.toml", QWEN3_14B, "hardware.sharding=none")) > 1
    config = load_config(CONFIGS / "qwen3-14b-mi300x.toml", {}, ["engines.gpu_memory_utilization=0.15"])
    assert resource_plan(config, QWEN3_14B).stages["rl1"].episodes_per_engine == 0


def test_one_gpu_holds_the_small_run() -> None:
    run = resource_plan(load_config(CONFIGS / "qwen2.5-1.5b-single-gpu.toml", {}), QWEN25_1B)
    assert (run.gpus, run.engines) == (1, 1)
    assert max(shares("qwen2.5-1.5b-single-gpu.toml", QWEN25_1B)) < 1


def test_engines_of_their_own_leave_the_training_gpus_alone() -> None:
    much = "engines.gpu_memory_utilization=0.95"
    assert min(shares("qwen3-14b-mi300x.toml", QWEN3_14B, much)) > 1
    assert max(shares("qwen3-14b-mi300x.toml", QWEN3_14B, much, "hardware.engine_gpus=64")) < 1


def test_an_engine_in_the_process_caches_what_its_slots_may_hold() -> None:
    config = load_config(
        None,
        {},
        ["engines.max_num_seqs=8", "engines.max_model_len=32", "eval.max_response_tokens=16", "model.dtype=float32"],
    )
    run = resource_plan(config, SMALL)
    assert (run.gpus, run.engines, run.kv_tokens) == (0, 1, 256)
    assert run.engine_gpu_bytes == 256 * kv_bytes_per_token(SMALL, "float32")


def test_a_shape_is_read_from_a_model_s_own_file() -> None:
    theirs = {**sizes(40, 5120, 17408, 40, 8, 151936, 128), "tie_word_embeddings": False, "model_type": "qwen3"}
    assert shape_of(theirs) == QWEN3_14B
    del theirs["head_dim"]
    assert shape_of(theirs).head_size == 128
    del theirs["vocab_size"]
    with pytest.raises(ConfigError, match=r"the model's config\.json: vocab_size: expected a value, got none"):
        shape_of(theirs)
