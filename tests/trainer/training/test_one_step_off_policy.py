"""Tests of sampling beside training: while a step trains, the episodes of the next step are sampled. So they are
sampled with the weights before the update of this step."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from transformers import AutoModelForCausalLM  # noqa: E402

from tests.trainer.sampling import QUIET_LIBRARIES, Collection, Sampler, problems  # noqa: E402
from tests.trainer.training.stage_run import SEED, StageRun, are_equal, load_weights, record_loss_inputs  # noqa: E402
from trainer.episodes.episode import Episode  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.training.token_budget import TokenBudgetTrainer  # noqa: E402
from trainer.training.training_rows import problem_schedule  # noqa: E402

pytestmark = QUIET_LIBRARIES
STEPS = 4


class SlowSampler(Sampler):
    """Engines that take `delay_s` for a step and use no core, as engines with GPUs of their own do."""

    delay_s = 0.0

    async def collect(self, *args: Any, **options: Any) -> list[list[Episode]]:
        await asyncio.sleep(self.delay_s)
        return await super().collect(*args, **options)


def run_stage(path: Path, sampler: Sampler, loop_thread: LoopThread, **changes: Any) -> StageRun:
    options = {"steps": STEPS, "one_step_off_policy": True, "learning_rate": 1e-2}
    stage_run = StageRun(path, sampler.folder, loop_thread, **options | changes)
    stage_run.run(sampler)
    return stage_run


def test_each_step_but_the_first_is_sampled_with_the_weights_of_the_step_before(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    sampler = Sampler(model)
    stage_run = run_stage(tmp_path, sampler, loop_thread)
    kinds = [entry if isinstance(entry, str) else "sample" for entry in sampler.log]
    assert kinds == ["sync", "sample", "sample", "sync", "sample", "sync", "sample", "sync"]
    schedule = [problem.id for problem in problem_schedule(problems(6), 2, STEPS, SEED)]
    assert [id for entry in sampler.log if isinstance(entry, Collection) for id in entry.problem_ids] == schedule
    rows = list(stage_run.run_folder.read_metrics())
    assert [row["weight_version"] for row in rows] == [0, 1, 2, 3]
    assert [row["staleness_mean_steps"] for row in rows] == [0, 1, 1, 1]
    for step in range(1, STEPS + 1):
        versions = {tuple(map(tuple, row["weight_versions"])) for row in stage_run.run_folder.read_episodes(step)}
        assert versions == {((0, max(0, step - 2)),)}


def test_the_loss_corrects_each_token_by_the_weights_that_sampled_it(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_inputs = record_loss_inputs(monkeypatch)
    sampler = Sampler(model)
    stage_run = run_stage(tmp_path, sampler, loop_thread, steps=2)
    inputs, row = loss_inputs[1], list(stage_run.run_folder.read_metrics())[1]
    mask_BT = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    ids_BL = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)

    def logps(weights: dict[str, Any]) -> Any:
        policy = AutoModelForCausalLM.from_pretrained(model)
        policy.load_state_dict(weights)
        with torch.no_grad():
            mask_BL = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            logits_BLV = policy(ids_BL, attention_mask=mask_BL).logits
        logps_BL = logits_BLV[:, :-1].log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]
        return logps_BL[:, -mask_BT.size(1) :][mask_BT]

    old, new = logps(sampler.syncs[0]), logps(sampler.syncs[1])
    torch.testing.assert_close(inputs["sampling_per_token_logps"][mask_BT], old, atol=1e-4, rtol=1e-4)
    assert row["importance_ratio_mean"] == pytest.approx(float((new - old).exp().clamp(max=2).mean()), abs=1e-3)
    assert row["logprob_diff_mean"] == pytest.approx(float((new - old).abs().mean()), abs=1e-3)
    assert row["logprob_diff_mean"] > 0.01, "the update changed the policy"


def test_a_step_takes_as_long_as_the_longer_of_sampling_and_optimizing(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay_s = 0.4
    compute_loss = TokenBudgetTrainer._compute_loss

    def compute_slowly(self: Any, *args: Any) -> Any:
        time.sleep(delay_s)
        return compute_loss(self, *args)

    monkeypatch.setattr(TokenBudgetTrainer, "_compute_loss", compute_slowly)
    step_s, wait_s = {}, {}
    for is_on in (False, True):
        sampler = SlowSampler(model)
        sampler.delay_s = delay_s
        stage_run = run_stage(tmp_path / str(is_on), sampler, loop_thread, one_step_off_policy=is_on)
        rows = list(stage_run.run_folder.read_metrics())[1:]
        assert all(row["rollout_s"] >= delay_s and row["optimize_s"] >= delay_s for row in rows)
        step_s[is_on] = median(row["step_s"] for row in rows)
        wait_s[is_on] = median(row["rollout_wait_s"] for row in rows)
    assert step_s[False] >= 2 * delay_s
    assert step_s[True] < step_s[False] - delay_s / 2
    assert wait_s[True] < wait_s[False] - delay_s / 2


def test_a_failed_sampling_ends_the_run_before_the_engines_get_weights(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    def fail(index: int) -> None:
        if index == 2:
            raise LookupError("the tool is gone")

    sampler = Sampler(model, on_collect=fail)
    with pytest.raises(LookupError, match="the tool is gone"):
        run_stage(tmp_path, sampler, loop_thread)
    assert sampler.log.count("sync") == 2
    rows = list(StageRun(tmp_path, model, loop_thread).run_folder.read_metrics())
    assert [row["step"] for row in rows] == [1, 2], "the steps before it are complete"


def test_a_resumed_stage_samples_what_was_lost_and_trains_on_each_problem_once(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    def fail(index: int) -> None:
        if index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(tmp_path, Sampler(model, on_collect=fail), loop_thread, save_steps=1)
    sampler = Sampler(model)
    stage_run = run_stage(tmp_path, sampler, loop_thread, save_steps=1)
    assert [row["step"] for row in stage_run.run_folder.read_metrics()] == [1, 2, 3, 4]
    schedule = [problem.id for problem in problem_schedule(problems(6), 2, STEPS, SEED)]
    assert [id for entry in sampler.collections for id in entry.problem_ids] == schedule[6:]
    assert are_equal(sampler.syncs[0], load_weights(stage_run.run_folder.path / "stages/rl1/checkpoints/checkpoint-3"))
