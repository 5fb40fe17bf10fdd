"""The steps of a GRPO stage with the installed version of TRL: rollouts, weight syncs, the loss and the metrics."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from transformers import AutoModelForCausalLM  # noqa: E402

from tests.trainer.sampling import (  # noqa: E402
    OBSERVATION_POSITIONS,
    QUIET_LIBRARIES,
    RESPONSE_LENGTH,
    Sampler,
    parity_reward,
    problems,
)
from tests.trainer.training.stage_run import (  # noqa: E402
    ROWS_PER_STEP,
    STAGE,
    StageRun,
    are_equal,
    load_weights,
    record_loss_inputs,
)
from trainer.config import ConfigError, HardwareConfig  # noqa: E402
from trainer.episodes.episode import Episode, Problem, StopReason  # noqa: E402
from trainer.episodes.reward import NoRewardsError  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.runs.run_folder import RunFolder  # noqa: E402
from trainer.training import grpo  # noqa: E402
from trainer.training.callback import TrainingDiverged  # noqa: E402
from trainer.training.token_budget import TokenBudgetTrainer  # noqa: E402

pytestmark = QUIET_LIBRARIES


def test_each_step_syncs_the_weights_collects_episodes_and_trains_on_the_selected_rows(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_inputs = record_loss_inputs(monkeypatch)
    sampler = Sampler(model)
    trained = StageRun(tmp_path, model, loop_thread).run(sampler)

    # Each step's rollouts follow one sync of the weights that the step starts from.
    first, second = sampler.collections
    assert sampler.log == ["sync", first, "sync", second]
    assert are_equal(sampler.syncs[0], load_weights(model))
    assert not are_equal(sampler.syncs[1], sampler.syncs[0])
    assert not are_equal(load_weights(trained.model), sampler.syncs[1])
    # Each step collects 2G episodes of each problem, within the stage's limits and with a seed of its own.
    assert len(set(first.problem_ids)) == 2 and first.samples == 8
    assert first.options["seed"] != second.options["seed"]
    assert first.options["limits"].max_response_tokens == 16 and first.options["limits"].temperature == 1.0
    # The loss has no observation tokens.
    assert [len(inputs["advantages"]) for inputs in loss_inputs] == [ROWS_PER_STEP] * 2
    for inputs in loss_inputs:
        assert set(inputs["tool_mask"][:, list(OBSERVATION_POSITIONS)].flatten().tolist()) == {0}
    # The run folder has a row of metrics per step, and all episodes.
    row, second_row = RunFolder(tmp_path).read_metrics()
    assert (row["step"], second_row["step"], row["stage"]) == (1, 2, "rl1")
    assert (row["weight_version"], second_row["weight_version"]) == (0, 1)
    assert row["logprob_diff_mean"] < 1e-4 and row["grad_norm"] > 0
    assert row["importance_ratio_mean"] == pytest.approx(1, abs=1e-3), "nothing is stale"
    assert row["episodes_in_loss"] + row["episodes_not_in_loss"] == 2 * 8
    assert row["episodes_in_loss"] == 4 * (2 - row["zero_variance_groups"])
    assert row["step_s"] >= row["rollout_s"] + row["weight_sync_s"] + row["optimize_s"]
    episodes = list(RunFolder(tmp_path).read_episodes(1))
    assert len(episodes) == 2 * 8
    assert sum(episode["is_selected"] for episode in episodes) == ROWS_PER_STEP
    assert all(episode["selection_reason"] for episode in episodes)


def test_engines_sleep_from_the_end_of_each_collection_to_the_next_sync(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampler(model)

    async def sleep() -> None:
        sampler.log.append("sleep")

    monkeypatch.setattr(grpo.torch.cuda, "empty_cache", lambda: sampler.log.append("free"))
    monkeypatch.setattr(grpo, "wait_for_ranks", lambda hardware: sampler.log.append("wait"))
    compute_loss = TokenBudgetTrainer.compute_loss

    def record_loss(self: Any, *args: Any, **options: Any) -> Any:
        if sampler.log[-1] != "optimize":
            sampler.log.append("optimize")
        return compute_loss(self, *args, **options)

    monkeypatch.setattr(TokenBudgetTrainer, "compute_loss", record_loss)
    StageRun(tmp_path, model, loop_thread).run(sampler, sleep=sleep, engines_sleep=True)
    first, second = sampler.collections
    # All ranks free their cached memory before the first rank wakes the engines.
    before, after = ["free", "wait", "sync"], ["sleep", "optimize"]
    assert sampler.log == [*before, first, *after, *before, second, *after]


def test_engines_that_sleep_are_awake_for_replacements_and_for_evaluations(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    sampler = Sampler(model, score=lambda *_: 1.0)  # no group has a signal, so all are replaced

    async def sleep() -> None:
        sampler.log.append("sleep")

    def evaluate(steps: int) -> float:
        sampler.log.append("evaluate")
        return 0.5

    stage_run = StageRun(tmp_path, model, loop_thread, dynamic_sampling_rounds=1)
    stage_run.run(sampler, sleep=sleep, evaluate=evaluate, eval_steps=1, engines_sleep=True)
    kinds = [entry if isinstance(entry, str) else "sample" for entry in sampler.log]
    step = ["sample", "sample", "sleep", "sync", "evaluate"]
    assert kinds == ["sync", *step, *step], "the weights of an evaluation are those of the next step"


def test_only_scored_rows_of_groups_with_different_rewards_are_in_the_loss(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    """Compare the gradient norm of one step on four problems with a plain computation of the loss.

    p0 is always solved, p1 and p2 have different rewards, p2 has two unscored episodes, and p3 is never scored.
    """

    def score(problem: Problem, sample: int, ids: Any) -> float | None:
        rewards = {"p0": 1.0, "p1": float(sample == 0), "p2": None if sample < 2 else float(sample == 2), "p3": None}
        return rewards[problem.id]

    class FailingSampler(Sampler):
        def episode(self, problem: Problem, sample: int, *rest: Any) -> Episode:
            episode = super().episode(problem, sample, *rest)
            if problem.id == "p2" and sample == 0:  # it failed before its first token
                return replace(
                    episode, response_ids=[], logprobs=[], loss_mask=[], turns=[], stop_reason=StopReason.UNAVAILABLE
                )
            return episode

    sampler = FailingSampler(model, score=score)
    stage_run = StageRun(
        tmp_path,
        model,
        loop_thread,
        steps=1,
        problems_per_step=4,
        samples_per_problem=4,
        kept_per_problem=4,
        roc_mode="off",
        max_unavailable_share=0.5,
    )
    stage_run.run(sampler, num_problems=4)
    (row,) = stage_run.run_folder.read_metrics()

    policy = AutoModelForCausalLM.from_pretrained(model)
    (collection,) = sampler.collections
    loss, num_tokens = torch.tensor(0.0), 0
    for problem in problems(4)[1:3]:  # p1 and p2
        group = [sampler.episode(problem, sample, collection.options["seed"]) for sample in range(4)]
        rewards = torch.tensor([episode.reward for episode in group if episode.reward is not None])
        for episode in group:
            if episode.reward is None:
                continue
            advantage = (episode.reward - rewards.mean()) / (rewards.std() + 1e-4)  # TRL's epsilon
            logp_TV = policy(torch.tensor([[*episode.prompt_ids, *episode.response_ids]])).logits[0].log_softmax(-1)
            start = len(episode.prompt_ids)
            for t, (token, is_sampled) in enumerate(zip(episode.response_ids, episode.loss_mask, strict=True)):
                loss = loss - advantage * logp_TV[start + t - 1, token] * is_sampled
                num_tokens += is_sampled
    (loss / num_tokens).backward()
    norm = torch.nn.utils.get_total_norm(p.grad for p in policy.parameters() if p.grad is not None)
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert row["zero_variance_groups"] == 2, "p0 and p3"
    assert row["unavailable_episodes"] == 2 + 4, "two of p2 and all of p3"


def test_an_engine_that_disagrees_with_the_trainer_is_corrected_and_measured(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    rows = []
    for name, shift in (("agreeing", 0.0), ("disagreeing", -1.0)):
        stage_run = StageRun(tmp_path / name, model, loop_thread, steps=1)
        stage_run.run(Sampler(model, logprob_shift=shift))
        rows += stage_run.run_folder.read_metrics()
    agreeing, disagreeing = rows
    assert disagreeing["logprob_diff_mean"] == pytest.approx(1.0, abs=1e-3)
    # The ratio of e^1 is capped at 2, so every token counts twice.
    assert disagreeing["grad_norm"] == pytest.approx(2 * agreeing["grad_norm"], rel=1e-3)


def test_the_entropies_of_the_episodes_in_the_loss_are_those_of_the_policy(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    stage_run = StageRun(tmp_path, model, loop_thread, steps=1)
    stage_run.run_folder.save_entropies = True
    stage_run.run(Sampler(model))
    policy = AutoModelForCausalLM.from_pretrained(model)
    rows = list(stage_run.run_folder.read_entropies(1))
    (metrics,) = stage_run.run_folder.read_metrics()
    assert len(rows) == metrics["episodes_in_loss"] > 0
    episodes = {(row["problem"]["id"], row["sample"]): row for row in stage_run.run_folder.read_episodes(1)}
    for row in rows:
        episode = episodes[row["problem"], row["sample"]]
        assert episode["is_selected"] and row["response_ids"] == episode["response_ids"]
        logp_TV = policy(torch.tensor([[*episode["prompt_ids"], *row["response_ids"]]])).logits[0].log_softmax(-1)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)[len(episode["prompt_ids"]) - 1 : -1]
        for position, (measured, expected) in enumerate(zip(row["entropies"], entropy_T.tolist(), strict=True)):
            is_observation = position in OBSERVATION_POSITIONS
            assert measured is None if is_observation else measured == pytest.approx(expected, abs=2e-3)


def test_a_token_with_a_log_probability_of_nan_has_a_ratio_of_1_and_is_counted(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    shift, nan_positions = -0.3, (0, 5)
    stage_run = StageRun(tmp_path, model, loop_thread, steps=1)
    stage_run.run(Sampler(model, logprob_shift=shift, nan_positions=nan_positions))
    (row,) = stage_run.run_folder.read_metrics()
    num_sampled = RESPONSE_LENGTH - len(OBSERVATION_POSITIONS)
    assert row["nan_logprobs"] == len(nan_positions) * STAGE.problems_per_step * STAGE.samples_per_problem
    assert row["importance_ratio_mean"] == pytest.approx(
        (len(nan_positions) + (num_sampled - len(nan_positions)) * math.exp(-shift)) / num_sampled, abs=1e-4
    )
    assert math.isfinite(row["entropy"]) and math.isfinite(row["loss"])


def test_a_step_whose_episodes_are_truncated_is_warned_of_in_the_log(
    tmp_path: Path, model: Path, loop_thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    StageRun(tmp_path, model, loop_thread, steps=1).run(Sampler(model, stop_reason=StopReason.TOKEN_LIMIT))
    (record,) = [record for record in caplog.records if record.name == "trainer.training.step_sampler"]
    assert record.getMessage().startswith("step 1: truncated_share is 100%: ")


def test_a_step_with_equal_rewards_leaves_weights_and_optimizer_states_as_they_are(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    """The second of three steps has no signal. In this step, momentum and weight decay must not move the weights."""
    sampler = Sampler(model)
    sampler.score = lambda *episode: parity_reward(*episode) if len(sampler.collections) != 2 else 1.0
    stage_run = StageRun(
        tmp_path, model, loop_thread, steps=3, save_steps=1, warmup_steps=2, grpo={"weight_decay": 0.1}
    )
    trained = stage_run.run(sampler)
    rows = list(stage_run.run_folder.read_metrics())
    assert [row["skipped_update"] for row in rows] == [0, 1, 0]
    row = rows[1]
    assert (row["loss"], row["grad_norm"], row["episodes_in_loss"], row["zero_variance_groups"]) == (0, 0, 0, 2)
    first, second, third = sampler.syncs
    assert not are_equal(first, second) and are_equal(second, third)
    assert not are_equal(third, load_weights(trained.model))
    states = [torch.load(trained.checkpoint.with_name(f"checkpoint-{step}") / "optimizer.pt") for step in (2, 3)]
    assert {int(state["step"]) for state in states[0]["state"].values()} == {1}
    assert {int(state["step"]) for state in states[1]["state"].values()} == {2}


def test_a_step_without_any_reward_ends_the_stage(tmp_path: Path, model: Path, loop_thread: LoopThread) -> None:
    stage_run = StageRun(tmp_path, model, loop_thread)
    with pytest.raises(NoRewardsError, match=r"step 1: 16 of 16 episodes have no reward.*failure: sandbox: gone\."):
        stage_run.run(Sampler(model, score=lambda *_: None, error="sandbox: gone"))
    assert list(stage_run.run_folder.read_metrics()) == []


def test_the_selection_of_a_stage_counts_rewards_above_correct_above_as_correct(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    """Rewards of 0.25 and 0.75 with the bound 0.5 give the selection, the reasons and the metrics of 0 and 1."""
    selections, ratios = [], []
    for name, scale, offset, correct_above in (("a", 1.0, 0.0, 0.0), ("b", 0.5, 0.25, 0.5)):
        stage_run = StageRun(tmp_path / name, model, loop_thread, steps=1)
        sampler = Sampler(model, score=lambda *args, scale=scale, offset=offset: offset + scale * parity_reward(*args))
        stage_run.run(sampler, correct_above=correct_above)
        rows = list(stage_run.run_folder.read_episodes(1))
        selections.append([(row["is_selected"], row["selection_reason"]) for row in rows])
        ratios += [row["tool_error_ratio_correct"] for row in stage_run.run_folder.read_metrics()]
    assert selections[0] == selections[1] and ratios[0] == ratios[1]
    assert {reason.split()[1] for is_selected, reason in selections[0] if is_selected} == {"correct,", "wrong,"}


@pytest.mark.parametrize("num_lost", [3, 4])
def test_a_step_may_lose_at_most_the_set_share_of_its_episodes(
    tmp_path: Path, model: Path, loop_thread: LoopThread, num_lost: int
) -> None:
    """A fifth of 16 episodes is 3.2 episodes: a loss of 3 is allowed, and a loss of 4 is not."""
    numbers = itertools.count()

    def score(problem: Problem, sample: int, ids: Sequence[int]) -> float | None:
        return None if next(numbers) < num_lost else parity_reward(problem, sample, ids)

    stage_run = StageRun(tmp_path, model, loop_thread, steps=1)
    if num_lost == 4:
        with pytest.raises(NoRewardsError, match="step 1: 4 of 16 episodes have no reward"):
            stage_run.run(Sampler(model, score=score))
    else:
        stage_run.run(Sampler(model, score=score))
        (row,) = stage_run.run_folder.read_metrics()
        assert (row["unavailable_episodes"], row["episodes_in_loss"]) == (3, 8)


def test_more_arguments_and_the_optimizer_reach_trl(tmp_path: Path, model: Path, loop_thread: LoopThread) -> None:
    options = {"weight_decay": 0.125, "full_determinism": False, "gradient_checkpointing_kwargs": {}}
    stage_run = StageRun(tmp_path, model, loop_thread, steps=1, optim="adamw_torch_fused", grpo=options)
    trained = stage_run.run(Sampler(model), keep_checkpoints=5)
    saved = torch.load(trained.checkpoint / "training_args.bin", weights_only=False)
    assert (saved.weight_decay, saved.optim, saved.save_total_limit) == (0.125, "adamw_torch_fused", 5)
    (group, _) = torch.load(trained.checkpoint / "optimizer.pt", weights_only=True)["param_groups"]
    assert group["fused"]
    with pytest.raises(ConfigError, match=r"stages\.rl1\.grpo: beta: expected another argument"):
        StageRun(tmp_path, model, loop_thread, steps=2, grpo={"beta": 0.1}).run(Sampler(model))


@pytest.mark.parametrize("name", [
    "deepspeed", "fsdp_config", "fsdp", "torch_compile", "gradient_accumulation_steps", "neftune_noise_alpha",
    "average_tokens_across_devices", "eval_strategy", "load_best_model_at_end", "auto_find_batch_size", "optim",
    "label_smoothing_factor", "use_liger_kernel", "lr_scheduler_kwargs", "save_only_model", "entropy_coef",
    "num_iterations", "delta", "importance_sampling_level", "top_k", "vllm_mode", "mask_truncated_completions",
    "torch_empty_cache_steps",
])  # fmt: skip
def test_an_argument_that_the_loss_or_the_loop_does_not_honour_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^stages\.rl1\.grpo: {name}: expected another argument of TRL's"):
        grpo.check_grpo_options(replace(STAGE, grpo={"weight_decay": 0.1, name: 1}))


def test_the_accepted_arguments_are_fields_of_grpo_config() -> None:
    assert {field.name for field in fields(grpo.GRPOConfig)} >= grpo.STAGE_OPTIONS
    grpo.check_grpo_options(replace(STAGE, grpo=dict.fromkeys(grpo.STAGE_OPTIONS, 1)))


def test_a_version_of_transformers_that_would_not_call_the_loop_is_refused(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("transformers.Trainer._run_epoch")
    with pytest.raises(ConfigError, match=r"^transformers \S+: expected a version whose Trainer has the method `_run"):
        StageRun(tmp_path, model, loop_thread).run(Sampler(model))


def test_an_optimizer_without_its_package_is_refused(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="optim=paged_adamw_8bit: bitsandbytes is not installed"):
        StageRun(tmp_path, model, loop_thread, optim="paged_adamw_8bit").run(Sampler(model))


def test_a_stage_that_continues_the_optimizer_has_its_own_arguments_of_adamw(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    first = StageRun(tmp_path / "first", model, loop_thread, steps=1).run(Sampler(model))
    arguments = {"weight_decay": 0.125, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    second = StageRun(tmp_path / "second", first.model, loop_thread, steps=1, grpo=arguments)
    trained = second.run(Sampler(first.model), optimizer_checkpoint=first.checkpoint)
    groups = torch.load(trained.checkpoint / "optimizer.pt", weights_only=True)["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.125, 0.0]
    assert all((group["betas"], group["eps"]) == ((0.8, 0.95), 1e-6) for group in groups)


def test_a_loss_of_nan_ends_the_stage_before_its_checkpoint(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_loss, losses = TokenBudgetTrainer._compute_loss, itertools.count(1)

    def second_is_nan(self: Any, *arguments: Any) -> Any:
        loss = compute_loss(self, *arguments)
        return loss * float("nan") if next(losses) == 2 else loss

    monkeypatch.setattr(TokenBudgetTrainer, "_compute_loss", second_is_nan)
    stage_run = StageRun(tmp_path, model, loop_thread, steps=3, save_steps=1)
    with pytest.raises(
        TrainingDiverged, match=r"^rl1, step 2: loss is nan: expected a finite number; lower the learning"
    ):
        stage_run.run(Sampler(model))
    assert [row["step"] for row in stage_run.run_folder.read_metrics()] == [1]
    assert [path.parent.name for path in tmp_path.glob("stages/rl1/checkpoints/*/complete")] == ["checkpoint-1"]


@pytest.mark.parametrize("setting", [{}, {"one_step_off_policy": True}])
def test_episodes_without_any_token_break_no_step(
    tmp_path: Path, model: Path, loop_thread: LoopThread, setting: dict[str, Any]
) -> None:
    class Losing(Sampler):
        """The first episode of each collection was lost before its prompt was known."""

        async def collect(self, *args: Any, **options: Any) -> Any:
            results = await super().collect(*args, **options)
            group = results[0]
            group[0] = Episode(group[0].problem, 0, stop_reason=StopReason.UNAVAILABLE, error="gone")
            return results

    stage_run = StageRun(tmp_path, model, loop_thread, roc_mode="off", kept_per_problem=8, **setting)
    stage_run.run(Losing(model))
    assert [row["unavailable_episodes"] for row in stage_run.run_folder.read_metrics()] == [1, 1]


def test_settings_that_contradict_the_machine_or_the_data_are_refused(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    stage_run, sampler = StageRun(tmp_path, model, loop_thread), Sampler(model)
    with pytest.raises(
        ConfigError, match=r"gpus_per_node=0: expected 2 training processes, got 1; set hardware\.launcher"
    ):
        stage_run.run(sampler, hardware=HardwareConfig(nodes=2))
    with pytest.raises(ConfigError, match=r"nodes=1, gpus_per_node=1: expected GPUs, but torch can use none"):
        stage_run.run(sampler, hardware=HardwareConfig(gpus_per_node=1))
    with pytest.raises(ConfigError, match=r"expected at least problems_per_step=2 problems, got 1: "):
        stage_run.run(sampler, num_problems=1)
