"""Simulated engines: what goes in comes out, time is what the formula says, and policies differ as they should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulator.placement import POLICIES
from bench.simulator.simulation import (
    ORACLE,
    Hardware,
    Plan,
    _empty_caches_s,
    _load,
    _work_and_haste_s,
    decision_cost,
    lower_bound_s,
    simulate,
    workload,
)

ROOMY = Hardware("roomy", 10**6, 512, base_s=0.01, per_sequence_s=0.0, per_context_s=0.0, prefill_s=0.0)
TIGHT = Hardware("tight", 12_000, 512, base_s=0.01, per_sequence_s=5e-5, per_context_s=5e-7, prefill_s=5e-5)


def test_an_episode_alone_takes_a_step_a_token_and_its_tools_time() -> None:
    plan = Plan(0, 100, ((50, 10, 2.0), (30, 0, 0.0)))
    run = simulate([plan], ROOMY, 1, "kv", 200)
    assert run.makespan_s == pytest.approx(80 * 0.01 + 2.0)
    assert run.service_s == [pytest.approx(run.makespan_s)]
    assert [(turn.context, turn.sampled) for turn in run.turns] == [(100, 50), (160, 30)]
    assert [turn.ended - turn.began for turn in run.turns] == [pytest.approx(0.5), pytest.approx(0.3)]
    (engine,) = run.engines
    assert (engine.sampled, engine.preemptions, engine.recomputed) == (80, 0, 0)
    assert engine.busy_s == pytest.approx(0.8)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_is_sampled_once_and_no_faster_than_can_be(policy: str) -> None:
    plans = workload(12, 8, 2000, 700.0, seed=1)
    run = simulate(plans, TIGHT, 2, policy, 2000)
    assert len(run.service_s) == len(plans)
    wanted = sum(sampled for plan in plans for sampled, _, _ in plan.turns)
    preemptions = sum(engine.preemptions for engine in run.engines)
    assert sum(engine.sampled for engine in run.engines) == pytest.approx(wanted, abs=2 * preemptions)
    assert run.makespan_s >= lower_bound_s(plans, TIGHT, 2)
    assert simulate(plans, TIGHT, 2, policy, 2000).makespan_s == run.makespan_s


def test_admission_by_expected_length_evicts_less_and_ends_sooner_than_a_static_split() -> None:
    plans = workload(16, 8, 2000, 700.0, seed=2)
    runs = {policy: simulate(plans, TIGHT, 2, policy, 2000) for policy in POLICIES}
    evicted = {policy: sum(engine.preemptions for engine in run.engines) for policy, run in runs.items()}
    assert evicted["kv"] < evicted["static"] / 4
    assert evicted["reserve_worst_case"] == 0
    assert runs["kv"].makespan_s < runs["static"].makespan_s
    assert runs["kv"].makespan_s < runs["reserve_worst_case"].makespan_s


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_take_room_and_are_forgotten_half_full(policy: str) -> None:
    plans = workload(12, 8, 2000, 700.0, seed=1)
    whole, blocks = (simulate(plans, replace(TIGHT, block=block), 2, policy, 2000) for block in (1, 32))
    assert len(blocks.service_s) == len(plans)
    hits, asked = (sum(getattr(engine, name) for engine in blocks.engines) for name in ("hits", "asked"))
    assert 0 < hits < asked
    assert hits < sum(engine.hits for engine in whole.engines)


def test_a_turn_takes_of_its_engine_besides_its_tokens() -> None:
    plans = [Plan(number, 100, ((50, 0, 0.0),)) for number in range(3)]
    run = simulate(plans, replace(ROOMY, turn_s=0.1), 1, "kv", 200)
    assert [turn.ended for turn in run.turns] == [pytest.approx(3 * 0.1 + 0.5)] * 3
    assert run.engines[0].busy_s == pytest.approx(0.8)


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from([ORACLE, *sorted(POLICIES)]),
    seed=st.integers(0, 10**6),
    groups=st.integers(1, 8),
    mean=st.sampled_from([100.0, 700.0, 1800.0]),
    capacity=st.sampled_from([3_000, 12_000, 100_000]),
    engines=st.integers(1, 3),
    weights_s=st.sampled_from([0.0, 0.02]),
    per_sequence_s=st.sampled_from([0.0, 2e-4, 2e-3]),
    prefill_s=st.sampled_from([0.0, 5e-5, 1e-3]),
    most_running=st.sampled_from([4, 64, 512]),
    block=st.sampled_from([1, 32]),
    turn_s=st.sampled_from([0.0, 0.01]),
    per_context_s=st.sampled_from([0.0, 5e-7]),
)
def test_no_policy_is_faster_than_the_lower_bound(
    policy: str, seed: int, groups: int, mean: float, capacity: int, engines: int, **constants: Any
) -> None:
    plans = workload(groups, 8, 2000, mean, seed)
    hardware = replace(TIGHT, capacity=capacity, base_s=0.002, **constants)
    took = simulate(plans, hardware, engines, policy, 2000).makespan_s
    assert took * (1 + 1e-9) >= lower_bound_s(plans, hardware, engines)


def test_the_lower_bound_holds_where_every_sequence_costs_as_much_as_the_step() -> None:
    """What sequences take is no waste, however empty the cache is."""
    plans = [Plan(0, 10, ((1000, 0, 0.0),))] * 512
    costs = {"base_s": 0.01, "per_sequence_s": 1e-3, "per_context_s": 0.0, "prefill_s": 1e-3}
    hardware = Hardware("vast", capacity=10**9, most_running=512, **costs)
    took = simulate(plans, hardware, 1, "least_inflight", 1000).makespan_s
    loads = [_load(plan) for plan in plans]
    bounds = [_empty_caches_s(loads, 0.01, hardware, 1, x / 4) for x in range(5)]
    assert 0.9 * took < lower_bound_s(plans, hardware, 1) <= took
    assert max(bounds) <= took


def test_the_lower_bound_counts_turns_and_blocks() -> None:
    """One episode after the other: what is left of a block is prefilled again, and each turn takes its time."""
    plans = [Plan(0, 100, ((50, 10, 0.0), (30, 0, 0.0)))] * 20
    hardware = replace(TIGHT, most_running=1, turn_s=0.05, block=32, prefill_s=1e-3, per_context_s=0.0)
    took = simulate(plans, hardware, 1, "least_inflight", 200).makespan_s
    assert lower_bound_s(plans, hardware, 1) == pytest.approx(took, rel=2e-3)
    assert took == pytest.approx(20 * (80 * 0.01005 + 2 * 0.05 + (4 + 32) * 1e-3) + 96e-3)


def test_the_lower_bound_counts_that_caches_begin_empty() -> None:
    """Short ones that fill the cache ten times over, in batches that take long to fill it once."""
    plans = [Plan(0, 10, ((400, 0, 0.0),)) for _ in range(300)]
    hardware = replace(TIGHT, weights_s=0.02, per_sequence_s=0.0, prefill_s=0.01, most_running=64)
    loads = [_load(plan) for plan in plans]
    full, empty = (bound(loads, 0.1, hardware, 1, 0.0) for bound in (_work_and_haste_s, _empty_caches_s))
    assert 1.03 * full < empty <= lower_bound_s(plans, hardware, 1)
    assert lower_bound_s(plans, hardware, 1) <= simulate(plans, hardware, 1, ORACLE, 400).makespan_s


def test_who_knows_all_lengths_is_nearer_to_the_bound() -> None:
    plans = workload(64, 8, 2000, 700.0, seed=1)
    runs = {policy: simulate(plans, TIGHT, 2, policy, 2000) for policy in ("kv", ORACLE)}
    assert len(runs[ORACLE].service_s) == len(plans)
    assert runs[ORACLE].makespan_s < 0.95 * runs["kv"].makespan_s


def test_the_lower_bound_of_one_episode_is_what_it_takes() -> None:
    plan = Plan(0, 100, ((50, 10, 2.0), (30, 0, 0.0)))
    hardware = replace(TIGHT, weights_s=0.01, prefill_s=0.0)
    assert lower_bound_s([plan], hardware, 1) == pytest.approx(simulate([plan], hardware, 1, "kv", 200).makespan_s)


def test_the_lower_bound_counts_that_large_batches_keep_the_long_waiting() -> None:
    """Short ones that fill the batch of a long one slow it down; alone, or without it, neither takes as long."""
    long, short = Plan(0, 10, ((4000, 0, 0.0),)), [Plan(1, 10, ((400, 0, 0.0),)) for _ in range(300)]
    bounds = [lower_bound_s(plans, TIGHT, 1) for plans in ([long], short, [long, *short])]
    assert bounds[2] > 1.02 * max(bounds[0], bounds[1])


def test_what_decisions_cost_is_told_for_each_call() -> None:
    plans = workload(4, 8, 2000, 700.0, seed=1)
    cost = decision_cost(plans, TIGHT, 2, 2000)
    assert {kind: len(cost[kind]) for kind in ("submit", "complete")} == {"submit": 32, "complete": 32}
    assert len(cost["park"]) == len(cost["resume"]) == sum(len(plan.turns) - 1 for plan in plans)
    assert {"place", "observe"} <= set(cost)
    assert all(microseconds >= 0 for calls in cost.values() for microseconds in calls)
