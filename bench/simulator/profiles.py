"""What a comparison runs on: engine profiles, and the episodes of a seed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from bench.harness.command import BenchFailed
from bench.simulator.engine import EngineProfile
from bench.simulator.placement import POLICIES
from bench.simulator.scripts import (
    TINY_MAX_TOKENS,
    EpisodeScript,
    recorded_scripts,
    shuffled,
    tiny_scripts,
    workload,
)
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
    engines: int
    max_response_tokens: int
    scripts: Callable[[int], list[EpisodeScript]]
    """The episodes of a seed."""
    is_simulated: bool
    command: str
    """The command that repeats the comparison, with its sizes."""
    has_no_history: bool
    """True if the scheduler does not know the lengths of a preceding training step."""

    def previous_step(self, seed: int) -> list[EpisodeScript]:
        """The episodes of the training step that precedes that of `seed`."""
        return [] if self.has_no_history else self.scripts(seed + PREVIOUS_STEP_SEED_OFFSET)


def mi300x(cache_share: float | None = None) -> EngineProfile:
    """An engine of configs/qwen3-14b-mi300x.toml by its roofline; nothing here was measured on a GPU.

    AMD's data sheet gives 5.3 TB/s and 1,307 dense bfloat16 TFLOP/s. Assumed are 65 % of the one, 40 % of the other,
    and 2 ms per decode step for everything else. The KV cache has the memory that the config leaves to it, or
    `cache_share` of the GPU's memory.
    """
    config = load_config(CONFIG, {})
    assert config.model.shape is not None
    plan = resource_plan(config, config.model.shape)
    bandwidth, flops = 0.65 * 5.3e12, 0.40 * 1307e12
    weights = 2.0 * plan.parameters  # bytes, and operations per token
    cache = cache_share and cache_share * config.hardware.gpu_memory_gb * 1e9 / plan.kv_bytes_per_token
    return EngineProfile(
        name="mi300x-14b",
        kv_capacity=int(cache or plan.kv_tokens),
        max_running=config.engines.max_num_seqs,
        base_s=0.002,
        weights_s=weights / bandwidth,
        per_sequence_s=weights / flops,
        per_context_s=plan.kv_bytes_per_token / bandwidth,
        prefill_s=weights / flops,
        source="roofline: 65 % of 5.3 TB/s, 40 % of 1,307 TFLOP/s, 2 ms a step; simulated",
    )


def fitted(path: Path | None = None) -> EngineProfile:
    """The profile whose constants `--fit` measured."""
    path = path or FITTED
    if not path.exists():
        raise BenchFailed(f"{path} does not exist: run `python -m bench.rollouts --engines 2 --fit` first")
    known = {field.name for field in fields(EngineProfile)}
    constants = json.loads(path.read_bytes())["profile"]
    return EngineProfile(**{name: value for name, value in constants.items() if name in known})


def profile_of(args: argparse.Namespace) -> Profile:
    """The engines and the workload for the options of `bench.rollouts`."""
    if args.profile == "cpu-tiny":
        groups, samples, engines = args.groups or 12, args.samples or 16, args.engines or 2
        engine, max_response_tokens = fitted(), TINY_MAX_TOKENS
        scripts = lambda seed: tiny_scripts(groups, samples, seed)  # noqa: E731
    else:
        groups, samples, engines = args.groups or 512, args.samples or 32, args.engines or 64
        engine, (max_response_tokens, mean) = mi300x(args.cache_share), STAGES[args.stage]
        scripts = lambda seed: workload(groups, samples, max_response_tokens, mean, seed)  # noqa: E731
    if args.episodes:
        recorded = list(recorded_scripts(args.episodes))
        max_response_tokens = max(script.length - script.prompt for script in recorded)
        scripts = lambda seed: shuffled(recorded, seed)  # noqa: E731
    has_no_history = args.no_history or bool(args.episodes)  # the recorded episodes are those to be predicted
    command = _command(args, groups, samples, engines)
    return Profile(args.profile, engine, engines, max_response_tokens, scripts, args.simulate, command, has_no_history)


def _command(args: argparse.Namespace, groups: int, samples: int, engines: int) -> str:
    parts = ["python -m bench.rollouts"]
    if args.simulate:
        parts.append(f"--simulate --profile {args.profile} --stage {args.stage}")
    if args.cache_share:
        parts.append(f"--cache-share {args.cache_share}")
    parts.append(f"--engines {engines} --groups {groups} --samples {samples}")
    parts.append(f"--seeds {args.seeds}" if args.simulate else f"--rounds {args.rounds}")
    parts += ["--fit"] * args.fit + ["--no-history"] * args.no_history
    if args.episodes:
        parts.append(f"--episodes {' '.join(map(str, args.episodes))}")
    if args.policies != tuple(POLICIES):
        parts.append(f"--policies {','.join(args.policies)}")
    return " ".join(parts)
