"""Tests of partial rollouts, in which unfinished groups continue in the next step, and of the cancellation of
stragglers: which episodes a step trains on, and how they are counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from tests.trainer.fakes import ScriptedTools  # noqa: E402
from tests.trainer.rollout.scripted_rollout import make_collector  # noqa: E402
from tests.trainer.sampling import QUIET_LIBRARIES, Sampler, problems  # noqa: E402
from tests.trainer.training.stage_run import SEED, StageRun, record_loss_inputs  # noqa: E402
from trainer.engines.local import LocalEngine  # noqa: E402
from trainer.engines.pool import EnginePool  # noqa: E402
from trainer.episodes.chat_format import rstar2_format  # noqa: E402
from trainer.episodes.episode import Episode, Problem, StopReason  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.rollout.runtime import RolloutRuntime  # noqa: E402
from trainer.scheduling.scheduler import Scheduler  # noqa: E402
from trainer.sync.probe import SyncProbe  # noqa: E402
from trainer.sync.transfers import load_by_engine  # noqa: E402
from trainer.training.context import TrainingContext  # noqa: E402
from trainer.training.grpo import train_stage  # noqa: E402
from trainer.training.training_rows import problem_schedule  # noqa: E402

pytestmark = QUIET_LIBRARIES


def sampled_versions(row: dict[str, Any]) -> list[int]:
    """Return the weight version of each sampled token of a recorded episode."""
    starts = [*(start for start, _ in row["weight_versions"]), len(row["response_ids"])]
    version_T = [
        version
        for (_, version), start, end in zip(row["weight_versions"], starts, starts[1:], strict=False)
        for _ in range(start, end)
    ]
    return [version_T[t] for start, end, mask in row["loss_mask"] for t in range(start, end) if mask]


def test_partial_rollouts_train_on_each_problem_once_and_correct_each_token_by_its_weights(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three groups are in flight. In each step the last two become complete. So the first group waits in steps 1 and 2,
    and must become complete in step 3 (`max_staleness_steps`)."""
    loss_inputs = record_loss_inputs(monkeypatch)
    sampler = Sampler(model)
    stage_run = StageRun(
        tmp_path, model, loop_thread, steps=5, partial_rollouts=0.5, max_staleness_steps=2, learning_rate=1e-2
    )
    stage_run.run(sampler)
    metrics = list(stage_run.run_folder.read_metrics())
    assert [row["pending_groups"] for row in metrics] == [1, 1, 1, 1, 0]
    schedule = [problem.id for problem in problem_schedule(problems(6), 2, 5, SEED)]
    rows_by_step = [list(stage_run.run_folder.read_episodes(step)) for step in range(1, 6)]
    groups_by_step = [{(row["group"], row["problem"]["id"]) for row in rows} for rows in rows_by_step]
    assert [len(rows) for rows in rows_by_step] == [16] * 5
    assert [len(groups) for groups in groups_by_step] == [2] * 5
    assert sorted(id for groups in groups_by_step for _, id in groups) == sorted(schedule)
    assert [id for _, id in sorted(groups_by_step[0])] == schedule[1:3]
    assert (0, schedule[0]) in groups_by_step[2]

    for step, (row, episodes) in enumerate(zip(metrics, rows_by_step, strict=True)):
        staleness = [step - version for episode in episodes for version in sampled_versions(episode)]
        assert {0} <= set(staleness) <= {0, 1, 2}
        assert row["stale_token_share"] == pytest.approx(sum(map(bool, staleness)) / len(staleness))
        assert row["staleness_mean_steps"] == pytest.approx(sum(staleness) / len(staleness))
    assert [row["stale_token_share"] > 0 for row in metrics] == [False, False, True, False, True]

    # In step 3, the ratio of each token is p(weights of the step) / p(weights that sampled it), capped at 2.
    ratios: list[float] = []
    for inputs in loss_inputs[2:3]:
        policy = AutoModelForCausalLM.from_pretrained(model)
        policy.load_state_dict(sampler.syncs[2])
        mask_BT = inputs["completion_mask"] * inputs["tool_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        with torch.no_grad():
            logp_BTV = policy(ids).logits.log_softmax(-1)[:, inputs["prompt_ids"].shape[1] - 1 : -1]
        logp_BT = logp_BTV.gather(-1, inputs["completion_ids"][..., None])[..., 0]
        ratio_BT = ((logp_BT - inputs["sampling_per_token_logps"]) * mask_BT).exp().clamp(max=2.0)
        ratios += ratio_BT[mask_BT == 1].tolist()
    assert metrics[2]["importance_ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-3)
    assert metrics[0]["importance_ratio_mean"] == pytest.approx(1, abs=1e-3) != metrics[2]["importance_ratio_mean"]
    assert metrics[2]["logprob_diff_mean"] > 1e-3 > metrics[0]["logprob_diff_mean"]


def test_cancelled_stragglers_are_counted_and_do_not_change_the_shares_that_roc_keeps(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    """Each group has eight episodes: two are cancelled, three are correct, and three are wrong. RoC keeps two correct
    and two wrong ones, as in a group of six."""

    class CancellingSampler(Sampler):
        def episode(self, problem: Problem, sample: int, *rest: Any) -> Episode:
            episode = super().episode(problem, sample, *rest)
            if sample in (2, 5):
                cancelled_ids = episode.response_ids[:4]
                return replace(
                    episode, stop_reason=StopReason.CANCELLED, reward=None, response_ids=cancelled_ids, turns=()
                )
            return replace(episode, reward=float(sample % 2))

    sampler = CancellingSampler(model)
    stage_run = StageRun(tmp_path, model, loop_thread, steps=1, cancel_stragglers=True)
    stage_run.run(sampler)
    (collection,) = sampler.collections
    is_decided = collection.options["is_decided"]
    assert is_decided([0.0] * 3 + [1.0] * 3, 2) and not is_decided([1.0] * 6, 2)
    (row,) = stage_run.run_folder.read_metrics()
    assert row["cancelled_share"] == 2 / 8
    assert (row["cancelled_response_length"], row["response_length"]) == (4, 8)
    assert row["cancelled_tokens"] == 2 * 2 * 6, "two groups, two episodes of each, six sampled tokens"
    assert (row["unavailable_episodes"], row["episodes_in_loss"]) == (0, 8)
    selected = [episode for episode in stage_run.run_folder.read_episodes(1) if episode["is_selected"]]
    assert sorted(episode["reward"] for episode in selected) == [0.0] * 4 + [1.0] * 4


def test_partial_rollouts_and_cancellation_work_together_on_a_real_engine(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(model), max_num_seqs=8, max_model_len=160)
    pool = loop_thread.enter(
        EnginePool([engine], scheduler=Scheduler(160), transfer=load_by_engine, probe=SyncProbe(model))
    )
    tools, requests_at_sleep = ScriptedTools(), []

    async def sleep() -> None:
        requests_at_sleep.extend(state.requests for state in pool.engine_states.values())

    chat_format = rstar2_format(AutoTokenizer.from_pretrained(model), tools=[], system_prompt="Go.")
    stage_run = StageRun(
        tmp_path,
        model,
        loop_thread,
        steps=3,
        samples_per_problem=4,
        kept_per_problem=2,
        partial_rollouts=1.0,
        cancel_stragglers=True,
        max_response_tokens=40,
    )
    train_stage(
        stage_run.stage,
        TrainingContext(model, tmp_path / "stages/rl1", stage_run.run_folder, seed=SEED),
        problems=problems(6),
        rollouts=RolloutRuntime(loop_thread, make_collector(pool, chat_format, tools), pool, sleep),
    )
    assert requests_at_sleep == [{}, {}, {}], "pending episodes have no request in flight, so engines may sleep"
    rows_by_step = [list(stage_run.run_folder.read_episodes(step)) for step in (1, 2, 3)]
    assert [len(rows) for rows in rows_by_step] == [2 * 4] * 3
    trained_problems = [row["problem"]["id"] for rows in rows_by_step for row in rows[::4]]  # one row per group
    assert sorted(trained_problems) == sorted(problem.id for problem in problem_schedule(problems(6), 2, 3, SEED))
    for step, rows in enumerate(rows_by_step):
        assert all(version <= step for row in rows for version in sampled_versions(row))
    assert [row["pending_groups"] for row in stage_run.run_folder.read_metrics()] == [2, 2, 0]
