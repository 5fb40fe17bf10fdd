"""Two steps of the tiny recipe's first RL stage with a vLLM server, for each way to sync weights and to share the GPU.

The run checks each sync: the engine's tensors by checksums, and its log-probabilities by the sync probe.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.gpu_parts.check import Checks, Finding, Settings, Skipped
from bench.gpu_parts.recipe import PARITY, recipe_config, run_recipe, sandboxed
from bench.gpu_parts.step import write_tokenizer
from trainer.recipe.phases import RecipeRun

MAX_LOGPROB_DIFFERENCE = 0.02
"""Largest mean difference of an engine's log-probabilities in float32 from the trainer's."""
STEPS = 2
SMALL_STAGE = ("rl.problems_per_step=2", "rl.samples_per_problem=4", "rl.kept_per_problem=2", "eval.data=generated:8")
EXPERTS = "mixture of experts, weights by file"


def checks(settings: Settings) -> Checks:
    if not settings.vllm:
        raise Skipped("no vLLM: --vllm PYTHON names a Python that has it")
    changes = {
        "weights by file, engine beside the training rank": ("engines.weight_sync=file",),
        "weights by broadcast (gloo)": ("engines.weight_sync=gloo",),
        EXPERTS: ("engines.weight_sync=file",),
        "sleep mode": ("engines.sleep_mode=true",),
        "weights by broadcast (NCCL or RCCL)": ("engines.weight_sync=nccl", "hardware.engine_gpus=1"),
    }
    return {name: partial(_run, settings, name, options) for name, options in changes.items()}


def _run(settings: Settings, name: str, changes: tuple[str, ...]) -> Finding:
    if name == "sleep mode" and settings.device == "cpu":
        raise Skipped("vLLM has no sleep mode on CPUs")
    if "hardware.engine_gpus=1" in changes and settings.gpus < 2:
        raise Skipped("NCCL allows one process per GPU, so the engine needs a second one")
    if name == EXPERTS:
        changes += (f"model.path={write_experts(settings.path / 'experts')}",)
    options = ("engines.kind=vllm", f"engines.vllm_python={settings.vllm}", "engines.gpu_memory_utilization=0.3")
    config = recipe_config(
        settings, name.replace(" ", "-"), STEPS, *options, *SMALL_STAGE, PARITY, "sft.data=[]", *changes
    )
    with sandboxed(settings, config) as config:
        run_recipe(config)
    rows = list(RecipeRun(config).run_folder.read_metrics())
    difference = fmean(row["logprob_diff_mean"] for row in rows)
    holds = difference <= MAX_LOGPROB_DIFFERENCE and len(rows) == STEPS
    sync_s = fmean(row["weight_sync_s"] for row in rows)
    return {"holds": holds, "logprob_difference": difference, "weight_sync_s": sync_s}


def write_experts(folder: Path) -> Path:
    """Write a Qwen3 with random weights and four experts per layer, and a tokenizer."""
    write_tokenizer(folder)
    config = Qwen3MoeConfig(
        vocab_size=640, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=384, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, eos_token_id=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder
