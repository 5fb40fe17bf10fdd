"""Tests of simulated rollouts: their tokens, their times by the formula, and the order of the placement policies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.simulator.engine import EngineProfile
from bench.simulator.oracle import ORACLE
from bench.simulator.placement import POLICIES
from bench.simulator.scripts import EpisodeScript, Workload, generated_scripts
from bench.simulator.simulation import Simulation

LARGE_CACHE = EngineProfile(
    "large cache",
    kv_capacity=10**6,
    max_running=512,
    base_s=0.01,
    per_sequence_s=0.0,
    per_context_s=0.0,
    prefill_s=0.0,
)
SMALL_CACHE = EngineProfile(
    "small cache",
    kv_capacity=12_000,
    max_running=512,
    base_s=0.01,
    per_sequence_s=5e-5,
    per_context_s=5e-7,
    prefill_s=5e-5,
)
MAX_TOKENS = 2000
"""Maximum response tokens of the generated episodes."""


def scripts_of(groups: int, seed: int, mean: float = 700.0) -> list[EpisodeScript]:
    """Return eight episodes for each group, with `mean` response tokens on average."""
    return generated_scripts(groups, 8, MAX_TOKENS, mean, seed)


def simulate(
    scripts: list[EpisodeScript], profile: EngineProfile, num_engines: int, policy: str, max_response_tokens: int
) -> Simulation:
    """A finished rollout."""
    return Simulation(Workload(scripts, max_response_tokens), profile, num_engines, policy).run()


def makespan_of(run: Simulation) -> float:
    return max(turn.ended_at for turn in run.turns)


def num_episodes(run: Simulation) -> int:
    return len({turn.episode for turn in run.turns})


def test_an_episode_alone_takes_one_step_per_token_and_its_tool_times() -> None:
    script = EpisodeScript(0, 100, ((50, 10, 2.0), (30, 0, 0.0)))
    run = simulate([script], LARGE_CACHE, 1, "kv", 200)
    assert makespan_of(run) == pytest.approx(80 * 0.01 + 2.0)
    assert [(turn.context, turn.sampled) for turn in run.turns] == [(100, 50), (160, 30)]
    assert [turn.ended_at - turn.started_at for turn in run.turns] == [pytest.approx(0.5), pytest.approx(0.3)]
    (engine,) = run.engines.values()
    assert (engine.sampled, engine.preemptions, engine.recomputed) == (80, 0, 0)
    assert engine.busy_s == pytest.approx(0.8)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_tokens_are_sampled_once(policy: str) -> None:
    scripts = scripts_of(12, seed=1)
    run = simulate(scripts, SMALL_CACHE, 2, policy, MAX_TOKENS)
    assert num_episodes(run) == len(scripts)
    scripted = sum(sampled for script in scripts for sampled, _, _ in script.turns)
    preemptions = sum(engine.preemptions for engine in run.engines.values())
    # A preemption rounds the sampled tokens of a request.
    assert sum(engine.sampled for engine in run.engines.values()) == pytest.approx(scripted, abs=2 * preemptions)
    assert makespan_of(simulate(scripts, SMALL_CACHE, 2, policy, MAX_TOKENS)) == makespan_of(run)


def test_admission_by_expected_length_preempts_less_and_ends_sooner_than_a_static_split() -> None:
    scripts = scripts_of(16, seed=2)
    runs = {policy: simulate(scripts, SMALL_CACHE, 2, policy, MAX_TOKENS) for policy in POLICIES}
    preempted = {policy: sum(engine.preemptions for engine in run.engines.values()) for policy, run in runs.items()}
    assert preempted["kv"] < preempted["static"] / 4
    assert preempted["reserve_worst_case"] == 0
    assert makespan_of(runs["kv"]) < makespan_of(runs["static"])
    assert makespan_of(runs["kv"]) < makespan_of(runs["reserve_worst_case"])


@pytest.mark.parametrize("policy", POLICIES)
def test_partly_filled_blocks_use_space_and_are_not_cached(policy: str) -> None:
    scripts = scripts_of(12, seed=1)
    by_token, by_block = (
        simulate(scripts, replace(SMALL_CACHE, block_size=block_size), 2, policy, MAX_TOKENS) for block_size in (1, 32)
    )
    assert num_episodes(by_block) == len(scripts)
    hits = sum(engine.prefix_hits for engine in by_block.engines.values())
    assert 0 < hits < sum(engine.prefix_queries for engine in by_block.engines.values())
    assert hits < sum(engine.prefix_hits for engine in by_token.engines.values())


def test_a_turn_has_a_fixed_cost_besides_its_tokens() -> None:
    scripts = [EpisodeScript(number, 100, ((50, 0, 0.0),)) for number in range(3)]
    run = simulate(scripts, replace(LARGE_CACHE, turn_s=0.1), 1, "kv", 200)
    assert [turn.ended_at for turn in run.turns] == [pytest.approx(3 * 0.1 + 0.5)] * 3
    assert run.engines["e0"].busy_s == pytest.approx(0.8)


def test_a_schedule_that_knows_all_lengths_is_faster() -> None:
    scripts = scripts_of(64, seed=1)
    runs = {policy: simulate(scripts, SMALL_CACHE, 2, policy, MAX_TOKENS) for policy in ("kv", ORACLE)}
    assert num_episodes(runs[ORACLE]) == len(scripts)
    assert makespan_of(runs[ORACLE]) < 0.95 * makespan_of(runs["kv"])
