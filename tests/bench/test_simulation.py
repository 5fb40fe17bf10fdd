"""Simulated rollouts: tokens, times by the formula, the order of the policies, and the lower bound of the makespan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.engine import EngineProfile
from bench.simulator.lower_bound import _cache_fill_bound_s, _work_bound_s, load_of, lower_bound_s
from bench.simulator.oracle import ORACLE
from bench.simulator.placement import POLICIES
from bench.simulator.scripts import EpisodeScript, Workload, generated_scripts
from bench.simulator.simulation import Simulation, decision_cost

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
    """Eight episodes for each group, of `mean` response tokens on average."""
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
def test_all_tokens_are_sampled_once_and_no_faster_than_the_bound(policy: str) -> None:
    scripts = scripts_of(12, seed=1)
    run = simulate(scripts, SMALL_CACHE, 2, policy, MAX_TOKENS)
    assert num_episodes(run) == len(scripts)
    scripted = sum(sampled for script in scripts for sampled, _, _ in script.turns)
    preemptions = sum(engine.preemptions for engine in run.engines.values())
    # A preemption rounds the sampled tokens of a request.
    assert sum(engine.sampled for engine in run.engines.values()) == pytest.approx(scripted, abs=2 * preemptions)
    assert makespan_of(run) >= lower_bound_s(scripts, SMALL_CACHE, 2)
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


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from([ORACLE, *sorted(POLICIES)]),
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 8),
    mean=st.sampled_from([100.0, 700.0, 1800.0]),
    kv_capacity=st.sampled_from([3_000, 12_000, 100_000]),
    engines=st.integers(1, 3),
    weights_s=st.sampled_from([0.0, 0.02]),
    per_sequence_s=st.sampled_from([0.0, 2e-4, 2e-3]),
    prefill_s=st.sampled_from([0.0, 5e-5, 1e-3]),
    max_running=st.sampled_from([4, 64, 512]),
    block_size=st.sampled_from([1, 32]),
    turn_s=st.sampled_from([0.0, 0.01]),
    per_context_s=st.sampled_from([0.0, 5e-7]),
)
def test_no_policy_is_faster_than_the_lower_bound(
    policy: str, seed: int, groups: int, mean: float, kv_capacity: int, engines: int, **constants: Any
) -> None:
    scripts = scripts_of(groups, seed, mean)
    profile = replace(SMALL_CACHE, kv_capacity=kv_capacity, base_s=0.002, **constants)
    makespan = makespan_of(simulate(scripts, profile, engines, policy, MAX_TOKENS))
    assert makespan * (1 + 1e-9) >= lower_bound_s(scripts, profile, engines)


def test_the_lower_bound_holds_if_the_time_of_a_decode_step_is_mostly_that_of_its_sequences() -> None:
    """The time of the sequences themselves is not wasted, however empty the cache is."""
    scripts = [EpisodeScript(0, 10, ((1000, 0, 0.0),))] * 512
    profile = EngineProfile("unlimited cache", 10**9, 512, 0.01, per_sequence_s=1e-3, per_context_s=0.0, prefill_s=1e-3)
    makespan = makespan_of(simulate(scripts, profile, 1, "least_inflight", 1000))
    loads = [load_of(script) for script in scripts]
    bounds = [_cache_fill_bound_s(loads, 0.01, profile, 1, x / 4) for x in range(5)]
    assert 0.9 * makespan < lower_bound_s(scripts, profile, 1) <= makespan
    assert max(bounds) <= makespan


def test_the_lower_bound_counts_turns_and_blocks() -> None:
    """With one episode at a time, partly filled blocks are prefilled again, and each turn has its fixed cost."""
    scripts = [EpisodeScript(0, 100, ((50, 10, 0.0), (30, 0, 0.0)))] * 20
    profile = replace(SMALL_CACHE, max_running=1, turn_s=0.05, block_size=32, prefill_s=1e-3, per_context_s=0.0)
    makespan = makespan_of(simulate(scripts, profile, 1, "least_inflight", 200))
    assert lower_bound_s(scripts, profile, 1) == pytest.approx(makespan, rel=2e-3)
    # Each episode has 80 decode steps, two turns, and prefills 4 tokens of its prompt and 32 before its second turn.
    # The other 96 tokens of the prompt, three whole blocks, are prefilled once.
    assert makespan == pytest.approx(20 * (80 * 0.01005 + 2 * 0.05 + (4 + 32) * 1e-3) + 96e-3)


def test_the_lower_bound_counts_that_caches_start_empty() -> None:
    """Short episodes fill the cache ten times, in batches that take long to fill it once."""
    scripts = [EpisodeScript(0, 10, ((400, 0, 0.0),)) for _ in range(300)]
    profile = replace(SMALL_CACHE, weights_s=0.02, per_sequence_s=0.0, prefill_s=0.01, max_running=64)
    loads = [load_of(script) for script in scripts]
    full_bound, empty_bound = (bound(loads, 0.1, profile, 1, 0.0) for bound in (_work_bound_s, _cache_fill_bound_s))
    assert 1.03 * full_bound < empty_bound <= lower_bound_s(scripts, profile, 1)
    assert lower_bound_s(scripts, profile, 1) <= makespan_of(simulate(scripts, profile, 1, ORACLE, 400))


def test_a_schedule_that_knows_all_lengths_is_nearer_to_the_bound() -> None:
    scripts = scripts_of(64, seed=1)
    runs = {policy: simulate(scripts, SMALL_CACHE, 2, policy, MAX_TOKENS) for policy in ("kv", ORACLE)}
    assert num_episodes(runs[ORACLE]) == len(scripts)
    assert makespan_of(runs[ORACLE]) < 0.95 * makespan_of(runs["kv"])


def test_the_lower_bound_of_one_episode_is_its_duration() -> None:
    script = EpisodeScript(0, 100, ((50, 10, 2.0), (30, 0, 0.0)))
    profile = replace(SMALL_CACHE, weights_s=0.01, prefill_s=0.0)
    assert lower_bound_s([script], profile, 1) == pytest.approx(makespan_of(simulate([script], profile, 1, "kv", 200)))


def test_the_lower_bound_counts_that_large_batches_delay_long_episodes() -> None:
    """Short episodes in the batch of a long one slow it down; each part alone takes less time."""
    long, short = EpisodeScript(0, 10, ((4000, 0, 0.0),)), [EpisodeScript(1, 10, ((400, 0, 0.0),)) for _ in range(300)]
    bounds = [lower_bound_s(scripts, SMALL_CACHE, 1) for scripts in ([long], short, [long, *short])]
    assert bounds[2] > 1.02 * max(bounds[0], bounds[1])


def test_the_cost_of_decisions_is_measured_for_each_call() -> None:
    scripts = scripts_of(4, seed=1)
    cost = decision_cost(Workload(scripts, MAX_TOKENS), SMALL_CACHE, 2)
    assert {kind: len(cost[kind]) for kind in ("submit", "complete")} == {"submit": 32, "complete": 32}
    assert len(cost["park"]) == len(cost["resume"]) == sum(len(script.turns) - 1 for script in scripts)
    assert {"place", "update_stats"} <= set(cost)
    assert all(microseconds >= 0 for calls in cost.values() for microseconds in calls)
