"""Tests of bench.rollouts at small sizes: on simulated engines, on fake servers, and through the engine pool."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from operator import mul
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bench import rollouts
from bench.simulator import profiles
from bench.simulator.measures import EngineCounters, cache_uses, measured, simulated, validation
from bench.simulator.placement import POLICIES
from bench.simulator.scripts import EpisodeScript, Workload
from bench.simulator.simulation import TurnTrace
from tests.bench.conftest import RefusedArguments, RunBenchmark
from tests.trainer.fake_vllm import MarkovEngine

SMALL_SIMULATION = ("--simulate", "--engines", "2", "--groups", "6", "--samples", "4")


def test_a_simulation_has_the_same_result_each_time(run_benchmark: RunBenchmark) -> None:
    _, first = run_benchmark(rollouts.main, *SMALL_SIMULATION, "--seeds", "2")
    assert set(first["policies"]) == set(POLICIES)
    assert first["is_simulated"]
    assert [row["bound"] for row in first["requirements"]] == ["≤ 0.75", "≤ 0.85", *["≤ 0.95", "≤ 0.5"] * 2]
    for row in first["policies"].values():
        assert row["makespan_s"] > 0
        assert 0 < row["kv_use"] <= 1
        assert 0 <= row["idle_share"] < 1
        assert row["service_s"]["p50"] <= row["latency_s"]["p99"] <= row["makespan_s"] + 0.01
    _, second = run_benchmark(rollouts.main, *SMALL_SIMULATION, "--seeds", "2")
    assert {**first, "machine": {}} == {**second, "machine": {}}  # "machine" has the date and the load


def test_the_measures_of_a_rollout_come_from_its_turns_and_counters() -> None:
    """The fields of a `TurnTrace` are: episode, engine, start, end, context tokens, sampled tokens, is_migration."""
    turns = [
        TurnTrace(0, "a", 0.0, 4.0, 100, 100, False),
        TurnTrace(0, "b", 5.0, 8.0, 200, 100, True),
        TurnTrace(1, "a", 2.0, 6.0, 300, 100, False),
    ]
    counters = EngineCounters(preemptions=3, recomputed=50, prefix_queries=600, prefix_hits=150)
    measures = measured(turns, ["a", "b"], 400, counters)
    expected = {"makespan_s": 8.0, "preemptions": 3, "prefix_hit_rate": 0.25}
    assert measures.items() >= expected.items()
    assert measures["idle_share"] == pytest.approx(
        1 - (6 + 3) / 16, abs=1e-4
    )  # engine a works for 6 s of 8 s, engine b for 3 s of 8 s
    assert (measures["service_s"]["p50"], measures["latency_s"]["p99"]) == (8.0, 8.0)
    line = cache_uses(turns, ["a", "b"], 400, bins=8)  # each bin has 1 s
    # After 3.5 s, two turns run on a. They sample 25 tokens/s, since 0 and 2 s.
    assert line["a"][3] == pytest.approx((100 + 25 * 3.5 + 300 + 25 * 1.5) / 400)
    assert line["b"][:5] == [0.0] * 5


class FakeTestbed:
    """Servers whose rollouts always take the same turns."""

    batches: ClassVar[Mapping[Any, float]] = {}

    @asynccontextmanager
    @staticmethod
    async def started(python: str, count: int, directory: Path, kv_capacity: int) -> AsyncIterator[FakeTestbed]:
        yield FakeTestbed()

    async def play(self, policy: str, workload: Workload, seed: int) -> tuple[list[TurnTrace], EngineCounters]:
        turns = [TurnTrace(0, "e0", 0.0, 4.0, 100, 100, False), TurnTrace(1, "e1", 0.0, 30.0, 60, 80, False)]
        return turns, EngineCounters(preemptions=9, recomputed=500, prefix_queries=400, prefix_hits=100)

    async def time_batches(self, bar: object) -> Mapping[Any, float]:
        return self.batches


@pytest.fixture
def fake_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `--engines` use `FakeTestbed` in place of real servers."""
    testbed = pytest.importorskip("bench.simulator.testbed", reason="the fit needs numpy")
    monkeypatch.setattr(testbed, "VllmTestbed", FakeTestbed)
    monkeypatch.setenv(rollouts.VLLM_PYTHON, sys.executable)


REAL = ("--engines", "2", "--rounds", "1", "--policies", "static,kv", "--groups", "1", "--samples", "2")


@pytest.mark.usefixtures("fake_servers")
def test_real_rollouts_are_compared_with_simulated_ones(run_benchmark: RunBenchmark) -> None:
    _, result = run_benchmark(rollouts.main, *REAL)
    assert not result["is_simulated"]
    assert result["policies"]["kv"]["makespan_s"] == 30.0
    assert result["policies"]["kv"]["recomputed_tokens"] == 500
    args = rollouts._parser().parse_args(["--simulate", "--profile", "cpu-tiny", *REAL])
    simulated_s = simulated(profiles.profile_of(args), "kv", 0)["makespan_s"]
    assert result["validation"]["kv"]["makespan"] == pytest.approx(simulated_s / 30 - 1, abs=1e-3)
    assert result["validation"]["kv"]["preemptions"] == pytest.approx(0.1, abs=0.05)
    requirements = {row["name"]: (row["bound"], row["measured"], row["holds"]) for row in result["requirements"]}
    assert requirements["makespan / static's"] == ("≤ 1", 1.0, True)
    assert requirements["preemptions / static's"] == ("≤ 0.05", 1.0, False)
    assert requirements["prefix hit rate - static's"] == ("≥ 0.2", 0.0, False)
    assert not any("reserve_worst_case" in name for name in requirements)
    assert "--policies static,kv --rounds 1" in result["command"]


def test_errors_of_opposite_sign_cancel_in_the_makespan_but_not_in_the_worst_round() -> None:
    real, simulated = (
        [{"makespan_s": makespan_s, "preemptions": 0, "prefix_hit_rate": 0.5} for makespan_s in makespans]
        for makespans in ((10.0, 10.0), (13.0, 7.0))
    )
    errors = validation({"kv": real}, {"kv": simulated})["kv"]
    assert errors["makespan"] == 0.0
    assert abs(errors["worst_round"]) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--simulate", "--policies", "kv,best"],
        ["--engines", "2", "--policies", "oracle"],
    ],
)
def test_wrong_arguments_are_refused(args: list[str], refused_arguments: RefusedArguments) -> None:
    assert "expected" in refused_arguments(rollouts.main, *args)


def test_real_engines_need_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(rollouts.VLLM_PYTHON, raising=False)
    assert rollouts.main(["--engines", "2", "--fit"]) == 1
    assert "expected an environment with vLLM" in capsys.readouterr().err


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", POLICIES)
async def test_the_pool_runs_every_scripted_episode_to_its_end(policy: str) -> None:
    testbed = pytest.importorskip("bench.simulator.testbed", reason="the fit needs numpy")
    engines = [MarkovEngine("e0"), MarkovEngine("e1")]
    scripts = [EpisodeScript(number // 3, 20 + number // 3, ((10, 5, 0.0), (8, 0, 0.0))) for number in range(9)]
    turns = await testbed.played(engines, policy, Workload(scripts, 30, scripts[:3]), seed=1, vocab_size=50)
    assert sorted((turn.episode, turn.context, turn.sampled) for turn in turns) == sorted(
        (number, *turn)
        for number, script in enumerate(scripts)
        for turn in ((script.prompt, 10), (script.prompt + 15, 8))
    )
    prompts = {ids for engine in engines for ids, _ in engine.requests if len(ids) < 23}
    assert len(prompts) == 3  # the prompts of first turns have 20 to 22 tokens, and are equal within a group


def test_required_tokens_are_those_that_were_not_computed_before() -> None:
    """A script is (group, prompt tokens, turns). A turn is (sampled tokens, observed tokens, tool seconds)."""
    testbed = pytest.importorskip("bench.simulator.testbed", reason="the fit needs numpy")
    scripts = [EpisodeScript(7, 70, ((10, 20, 0.0), (5, 0, 0.0))), EpisodeScript(7, 70, ((4, 0, 0.0),))]
    turns = [
        TurnTrace(0, "a", 0.0, 1.0, 70, 10, False),  # nothing is cached
        TurnTrace(1, "a", 0.5, 1.0, 70, 4, False),  # two whole blocks of the prompt are cached, 64 tokens
        # The episode has computed 79 tokens on another engine. Two whole blocks of them count as computed before.
        TurnTrace(0, "b", 2.0, 3.0, 100, 5, True),
    ]
    assert testbed.required_tokens(scripts, turns) == (70 + 9) + (70 - 64 + 3) + (100 - 64 + 4)


def test_computed_tokens_are_read_from_the_end_of_a_servers_log(tmp_path: Path) -> None:
    testbed = pytest.importorskip("bench.simulator.testbed", reason="the fit needs numpy")
    log = tmp_path / "engine0.log"
    line = (
        "Iteration(7): 1 context requests, {} context tokens, 2 generation requests, {} generation tokens, iteration\n"
    )
    log.write_text(line.format(9, 9))
    offset = log.stat().st_size
    log.write_text(line.format(9, 9) + "other\n" + line.format(100, 2) + line.format(0, 33))
    assert testbed.tokens_computed(log, offset) == 100 + 2 + 33


def test_fit_finds_the_constants_of_a_simulated_engine() -> None:
    fit = pytest.importorskip("bench.simulator.fit", reason="the fit needs numpy")
    # In seconds, close to those of a vLLM server on the CPU.
    costs = {"base_s": 4e-3, "per_sequence_s": 2e-4, "per_context_s": 0.0, "prefill_s": 3e-5, "turn_s": 2e-3}
    mean_s = {batch: sum(map(mul, batch.features, costs.values())) for batch in fit.BATCHES}
    passes = [{batch: factor * seconds for batch, seconds in mean_s.items()} for factor in (0.75, 1.25)]
    result = fit.fit_profile(passes, 2)
    assert result["residual"] < 1e-6
    assert {name: result["profile"][name] for name in costs} == pytest.approx(costs, abs=1e-9)


@pytest.mark.usefixtures("fake_servers")
def test_the_profile_is_fitted_to_the_batches_of_all_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_benchmark: RunBenchmark
) -> None:
    fit = pytest.importorskip("bench.simulator.fit", reason="the fit needs numpy")
    monkeypatch.setattr(profiles, "FITTED", tmp_path / "fitted.json")
    seconds = {batch: 0.01 * batch.features[0] + 0.002 * batch.features[1] for batch in fit.BATCHES}
    monkeypatch.setattr(FakeTestbed, "batches", seconds)
    run_benchmark(rollouts.main, *REAL, "--fit")
    assert profiles.fitted().base_s == pytest.approx(0.01)
    assert profiles.fitted().per_sequence_s == pytest.approx(0.002)


def test_the_features_of_a_batch_are_sums_over_its_sequences_and_turns() -> None:
    """The features are: decode steps; sequences, summed over steps; contexts, summed over steps; prefilled tokens;
    turns."""
    fit = pytest.importorskip("bench.simulator.fit", reason="the fit needs numpy")
    assert fit.Batch(3, 40, 12).features == [12, 36, 3 * (12 * 40 + 72), 120, 3]
    two_turns = fit.Batch(2, 40, 10, turns=2)  # the two sequences sample 11 and 16 tokens
    assert two_turns.lengths == [[1, 10], [6, 10]]
    assert two_turns.features == [16, 27, 27 * 40 + 0.5 + 50 + 18 + 50, 160, 4]
