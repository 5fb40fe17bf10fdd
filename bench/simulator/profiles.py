"""The engines and episodes of a comparison: engine profiles, and the workload of a seed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from bench.harness.command import BenchFailed
from bench.simulator.engine import WATERMARK, EngineProfile
from bench.simulator.scripts import TINY_MAX_TOKENS, EpisodeScript, Workload, generated_scripts, tiny_scripts
from trainer.config_loading import load_config
from trainer.recipe.resource_plan import resource_plan

FITTED = Path(__file__).parent / "profiles" / "cpu-tiny.json"
CONFIG = Path(__file__).parents[2] / "configs" / "qwen3-14b-mi300x.toml"
STAGES = {1: (8 * 1024, 2500.0), 2: (12 * 1024, 5000.0), 3: (12 * 1024, 7000.0)}
"""Maximum and mean response tokens of the stages of the paper's recipe (arXiv 2508.20722, section 5.1)."""
PREVIOUS_STEP_SEED_OFFSET = 1000
"""Added to a seed to generate the workload of the preceding training step."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Engines and their workload."""

    name: str
    engine: EngineProfile
    num_engines: int
    max_response_tokens: int
    scripts: Callable[[int], list[EpisodeScript]]
    """The episodes of a seed."""

    def workload(self, seed: int) -> Workload:
        """The episodes of a seed, and those of the training step before."""
        previous_step = self.scripts(seed + PREVIOUS_STEP_SEED_OFFSET)
        return Workload(self.scripts(seed), self.max_response_tokens, previous_step)


def mi300x() -> EngineProfile:
    """An engine of configs/qwen3-14b-mi300x.toml by its roofline; nothing here was measured on a GPU.

    AMD's data sheet gives 5.3 TB/s and 1,307 dense bfloat16 TFLOP/s. The profile assumes 65 % of this bandwidth, 40 %
    of this rate, and 2 ms per decode step for everything else. The KV cache has the memory that the config leaves to
    it.
    """
    config = load_config(CONFIG, {})
    assert config.model.shape is not None
    plan = resource_plan(config, config.model.shape)
    bandwidth, flops = 0.65 * 5.3e12, 0.40 * 1307e12
    weights = 2.0 * plan.parameters  # bytes, and operations per token
    return EngineProfile(
        name="mi300x-14b",
        kv_capacity=plan.kv_tokens,
        max_running=config.engines.max_num_seqs,
        base_s=0.002,
        weights_s=weights / bandwidth,
        per_sequence_s=weights / flops,
        per_context_s=plan.kv_bytes_per_token / bandwidth,
        prefill_s=weights / flops,
        watermark=WATERMARK,
        source="roofline: 65 % of 5.3 TB/s, 40 % of 1,307 TFLOP/s, 2 ms a step; simulated",
    )


def fitted(path: Path | None = None) -> EngineProfile:
    """The profile whose constants `--fit` measured."""
    path = path or FITTED
    if not path.exists():
        raise BenchFailed(f"{path} does not exist: run `python -m bench.rollouts --engines 2 --fit` first")
    known = {field.name for field in fields(EngineProfile)}
    constants = json.loads(path.read_bytes())["profile"]
    return EngineProfile(
        **{name: value for name, value in constants.items() if name in known} | {"watermark": WATERMARK}
    )


def profile_of(args: argparse.Namespace) -> Profile:
    """The engines and the workload for the options of `bench.rollouts`. Sets the sizes that have no value yet."""
    default_sizes = (12, 16, 2) if args.profile == "cpu-tiny" else (512, 32, 64)  # groups, samples, engines
    args.groups, args.samples, args.engines = (
        getattr(args, name) or size for name, size in zip(("groups", "samples", "engines"), default_sizes, strict=True)
    )
    if args.profile == "cpu-tiny":
        engine, max_response_tokens = fitted(), TINY_MAX_TOKENS
        engine = replace(engine, kv_capacity=args.cache_tokens or engine.kv_capacity)
        scripts = lambda seed: tiny_scripts(args.groups, args.samples, seed)  # noqa: E731
    else:
        engine, (max_response_tokens, mean) = mi300x(), STAGES[args.stage]
        scripts = lambda seed: generated_scripts(  # noqa: E731
            args.groups, args.samples, max_response_tokens, mean, seed
        )
    return Profile(args.profile, engine, args.engines, max_response_tokens, scripts)
