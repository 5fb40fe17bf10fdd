"""bench.rollouts at small size, on simulated engines and through the engine pool."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from bench import rollouts
from bench.simulator import profiles
from bench.simulator.measures import EngineCounters, measured, validation
from bench.simulator.placement import POLICIES
from bench.simulator.scripts import EpisodeScript, Workload, recorded_scripts
from bench.simulator.simulation import TurnTrace
from bench.simulator.timeline import timeline
from tests.trainer.fake_vllm import TableEngine

SMALL = ("--simulate", "--engines", "2", "--groups", "6", "--samples", "4")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert rollouts.main([*args, "--json"]) in (0, 1)  # small runs may miss the requirements
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_a_simulation_has_the_same_result_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    first = run(capsys, *SMALL, "--seeds", "2")
    assert set(first["policies"]) == set(POLICIES)
    assert first["is_simulated"]
    assert [row["bound"] for row in first["requirements"]] == ["≤ 0.75", "≤ 0.85", "≤ 1.15"]
    for row in first["policies"].values():
        assert row["makespan_s"] >= first["lower_bound_s"] > 0
        assert 0 < row["kv_use"] <= 1
        assert 0 <= row["idle_share"] < 1
        assert row["service_s"]["p50"] <= row["latency_s"]["p99"] <= row["makespan_s"] + 0.01
    again = run(capsys, *SMALL, "--seeds", "2")
    assert {**first, "machine": 0} == {**again, "machine": 0}


def test_the_plot_and_the_gantt_chart_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    files = [tmp_path / "plot.png", tmp_path / "gantt.png"]
    run(capsys, *SMALL, "--seeds", "1", "--policies", "static,kv", "--plot", str(files[0]), "--gantt", str(files[1]))
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_the_lengths_of_a_recorded_run_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"start": 0, "end": 14, "tool_s": 0.5}, {"start": 37, "end": 51, "tool_s": 0.0}]
    row = {"step": 1, "group": 0, "prompt_tokens": 21, "turns": turns}
    file = tmp_path / "step_000001.jsonl"
    file.write_text("\n".join(json.dumps(row | {"group": group}) for group in (0, 0, 1)))
    scripts = list(recorded_scripts([file]))
    assert {script.turns for script in scripts} == {((14, 23, 0.5), (14, 0, 0.0))}
    assert [script.group == scripts[0].group for script in scripts] == [True, True, False]
    assert run(capsys, *SMALL, "--seeds", "1", "--episodes", str(file))["episodes"] == 3


def test_the_measures_of_turns() -> None:
    turns = [
        TurnTrace(0, "a", 0.0, 4.0, 100, 100, False),
        TurnTrace(0, "b", 5.0, 8.0, 200, 100, True),
        TurnTrace(1, "a", 2.0, 6.0, 300, 100, False),
    ]
    found = measured(turns, ["a", "b"], timeline(turns, ["a", "b"], 400), EngineCounters(3, 50, 600, 150))
    assert (found["makespan_s"], found["preemptions"], found["prefix_hit_rate"], found["migrations"]) == (
        8.0,
        3,
        0.25,
        1,
    )
    assert found["idle_share"] == pytest.approx(1 - (6 + 3) / 16, abs=1e-4)
    assert (found["service_s"]["p50"], found["latency_s"]["p99"]) == (8.0, 8.0)
    line = timeline(turns, ["a", "b"], 400, bins=8)
    assert line["a"][3] == pytest.approx((100 + 25 * 3.5 + 300 + 25 * 1.5) / 400)
    assert line["b"][:5] == [0.0] * 5


def test_logged_rounds_are_not_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "played.jsonl"
    turns = [[0, "e0", 0.0, 4.0, 100, 100, False], [1, "e1", 0.0, 30.0, 60, 80, False]]
    rows = [
        {"round": 0, "policy": policy, "counters": [9, 500, 400, 100], "turns": turns} for policy in ("static", "kv")
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ("--engines", "2", "--rounds", "1", "--policies", "static,kv", "--log", str(log))
    found = run(capsys, *args, "--groups", "1", "--samples", "2")
    assert not found["is_simulated"]
    assert found["policies"]["kv"]["makespan_s"] == 30.0
    assert found["policies"]["kv"]["recomputed_tokens"] == 500
    simulated_s = found["simulated"]["kv"]["makespan_s"]
    assert found["validation"]["kv"]["makespan"] == pytest.approx(simulated_s / 30 - 1, abs=1e-3)
    assert found["validation"]["kv"]["preemptions"] == pytest.approx(0.1, abs=0.05)
    assert [row["makespan_s"] for row in found["simulated_rounds"]["kv"]] == [simulated_s]
    requirements = {row["name"]: (row["bound"], row["measured"], row["holds"]) for row in found["requirements"]}
    assert requirements["makespan / static's"] == ("≤ 1", 1.0, True)
    assert requirements["preemptions / static's"] == ("≤ 0.05", 1.0, False)
    assert requirements["prefix hit rate - static's"] == ("≥ 0.2", 0.0, False)
    assert not any("reserve_worst_case" in name for name in requirements)
    assert "--policies static,kv --rounds 1" in found["command"]


def test_errors_of_opposite_sign_do_not_cancel_in_the_worst_round() -> None:
    """One round too long and one too short cancel in the sum, but each round is wrong."""
    real, simulated = (
        [{"makespan_s": span, "preemptions": 0, "prefix_hit_rate": 0.5} for span in spans]
        for spans in ((10.0, 10.0), (13.0, 7.0))
    )
    off = validation({"kv": real}, {"kv": simulated})["kv"]
    assert off["makespan"] == 0.0
    assert abs(off["worst_round"]) == pytest.approx(0.3)


def test_the_scheduler_knows_no_lengths_of_a_recorded_run(tmp_path: Path) -> None:
    """The recorded episodes are played again, so their lengths would be the answer."""
    row = {"step": 1, "group": 0, "prompt_tokens": 21, "turns": [{"start": 0, "end": 14, "tool_s": 0.0}]}
    file = tmp_path / "step_000001.jsonl"
    file.write_text(json.dumps(row))
    parser = rollouts._parser()
    recorded, drawn = (parser.parse_args([*SMALL, *more]) for more in (("--episodes", str(file)), ()))
    assert profiles.profile_of(recorded).workload(0).previous_step == []
    assert len(profiles.profile_of(drawn).workload(0).previous_step) == 24


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--simulate", "--policies", "kv,best"],
        ["--engines", "2", "--policies", "oracle"],
        ["--simulate", "--episodes", "nowhere.jsonl"],
        ["--simulate", "--gantt", "nowhere/gantt.png"],
    ],
)
def test_misuse_is_reported(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        rollouts.main(args)
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_real_engines_need_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(rollouts.VLLM_PYTHON, raising=False)
    assert rollouts.main(["--engines", "2", "--fit"]) == 1
    assert "expected an environment with vLLM" in capsys.readouterr().err


def test_a_file_without_episodes_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    assert rollouts.main([*SMALL, "--episodes", str(file)]) == 1
    assert f"{file}:1: expected an episode" in capsys.readouterr().err


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", POLICIES)
async def test_the_pool_runs_every_scripted_episode_to_its_end(policy: str) -> None:
    live = pytest.importorskip("bench.simulator.testbed", reason="the fit needs numpy")
    engines = [TableEngine("e0"), TableEngine("e1")]
    scripts = [EpisodeScript(number // 3, 20 + number // 3, ((10, 5, 0.0), (8, 0, 0.0))) for number in range(9)]
    turns = await live.played(engines, policy, Workload(scripts, 30, scripts[:3]), seed=1, vocab_size=50)
    assert sorted((turn.episode, turn.context, turn.sampled) for turn in turns) == sorted(
        (number, *turn)
        for number, script in enumerate(scripts)
        for turn in ((script.prompt, 10), (script.prompt + 15, 8))
    )
    prompts = {ids for engine in engines for ids, _ in engine.requests if len(ids) < 23}
    assert len(prompts) == 3


def test_required_tokens_are_those_that_were_not_computed_before() -> None:
    live = pytest.importorskip("bench.simulator.testbed", reason="the fit needs numpy")
    scripts = [EpisodeScript(7, 70, ((10, 20, 0.0), (5, 0, 0.0))), EpisodeScript(7, 70, ((4, 0, 0.0),))]
    turns = [
        TurnTrace(0, "a", 0.0, 1.0, 70, 10, False),  # all: nothing is cached
        TurnTrace(1, "a", 0.5, 1.0, 70, 4, False),  # the prompt's two whole blocks are cached
        TurnTrace(
            0, "b", 2.0, 3.0, 100, 5, True
        ),  # 79 were computed, two whole blocks; a migration does not change that
    ]
    assert live.required_tokens(scripts, turns) == (70 + 9) + (70 - 64 + 3) + (100 - 64 + 4)


def test_steps_are_read_from_a_servers_log(tmp_path: Path) -> None:
    live = pytest.importorskip("bench.simulator.testbed", reason="the fit needs numpy")
    log = tmp_path / "engine0.log"
    line = (
        "Iteration(7): 1 context requests, {} context tokens, 2 generation requests, {} generation tokens, iteration\n"
    )
    log.write_text(line.format(9, 9))
    mark = log.stat().st_size
    log.write_text(line.format(9, 9) + "other\n" + line.format(100, 2) + line.format(0, 33))
    assert live.tokens_computed(log, mark) == 135


def test_fit_finds_the_constants_of_a_simulated_engine() -> None:
    fit = pytest.importorskip("bench.simulator.fit", reason="the fit needs numpy")
    costs = {"base_s": 4e-3, "per_sequence_s": 2e-4, "per_context_s": 0.0, "prefill_s": 3e-5, "turn_s": 2e-3}
    seconds = {one: sum(a * b for a, b in zip(one.features, costs.values(), strict=True)) for one in fit.BATCHES}
    apart = [{one: share * mean for one, mean in seconds.items()} for share in (0.75, 1.25)]
    found = fit.fit_profile(apart, 2)
    assert found["residual"] < 1e-6
    assert {name: found["profile"][name] for name in costs} == pytest.approx(costs, abs=1e-9)


def test_a_log_has_the_played_turns_and_the_timed_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = pytest.importorskip("bench.simulator.fit", reason="the fit needs numpy")
    monkeypatch.setattr(profiles, "FITTED", tmp_path / "fitted.json")
    log = tmp_path / "log.jsonl"
    turns = [[number, "e0", 0.0, 1.0 + number, 40, 8, False] for number in range(4)]
    played: list[object] = [
        {"round": 0, "policy": policy, "counters": [0, 0, 160, 80], "turns": turns} for policy in ("static", "kv")
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in played))
    sizes = ("--engines", "2", "--groups", "2", "--samples", "2", "--rounds", "1")
    command = [*sizes, "--fit", "--policies", "static,kv", "--log", str(log)]
    assert rollouts.main(command) == 1
    assert "expected rounds that were played with --fit" in capsys.readouterr().err
    batches = [[*astuple(one), 0.01 * one.features[0] + 0.002 * one.features[1]] for one in fit.BATCHES]
    log.write_text(log.read_text() + json.dumps({"round": 0, "batches": batches}) + "\n")
    found = run(capsys, *command)
    assert found["policies"]["kv"]["makespan_s"] == 4.0
    assert found["policies"]["kv"]["prefix_hit_rate"] == 0.5
    assert profiles.fitted().base_s == pytest.approx(0.01)
    assert profiles.fitted().per_sequence_s == pytest.approx(0.002)


def test_the_features_of_a_batch() -> None:
    fit = pytest.importorskip("bench.simulator.fit", reason="the fit needs numpy")
    assert fit.Batch(3, 40, 12).features == [12, 36, 3 * (12 * 40 + 72), 120, 3]
    rolling = fit.Batch(2, 40, 10, turns=2)
    assert rolling.lengths == [[1, 10], [6, 10]]
    assert rolling.features == [16, 27, 27 * 40 + 0.5 + 50 + 18 + 50, 160, 4]
