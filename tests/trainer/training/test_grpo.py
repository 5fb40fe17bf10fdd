"""What TRL must do with what it is given: a contract, held against the installed version on a random tiny model."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments  # noqa: E402

from tests.trainer.sampling import QUIET_LIBRARIES, Sampler, model_folder, problems  # noqa: E402
from trainer.config import ConfigError, HardwareConfig, StageConfig  # noqa: E402
from trainer.episodes.episode import Episode, Problem, StopReason  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.runs.run_folder import RunFolder  # noqa: E402
from trainer.training import context, grpo, sft  # noqa: E402
from trainer.training.context import TrainedModel, TrainingContext  # noqa: E402
from trainer.training.grpo import NoRewardsError, RolloutRuntime, problem_schedule, train_stage  # noqa: E402

STAGE = StageConfig(
    name="rl1", steps=2, max_response_tokens=16, max_turns=2, problems_per_step=2, samples_per_problem=8,
    kept_per_problem=4, micro_batch_size=2, learning_rate=1e-3, warmup_steps=0, save_steps=2, max_grad_norm=1e6,
)  # fmt: skip


pytestmark = QUIET_LIBRARIES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loop_thread() -> Iterator[LoopThread]:
    with LoopThread() as loop_thread:
        yield loop_thread


@pytest.fixture(autouse=True)
def _on_one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where sums have one order, whatever the machine has, and threads do not wait for each other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Stage:
    """One stage in a folder, run as often as a test asks."""

    def __init__(self, folder: Path, model: Path, loop_thread: LoopThread, **changes: Any) -> None:
        self.folder, self.model, self.loop_thread = folder, model, loop_thread
        self.stage = replace(STAGE, **changes)
        self.run_folder = RunFolder(folder)

    def run(self, sampler: Sampler, count: int = 6, **more: Any) -> TrainedModel:
        rollouts = RolloutRuntime(self.loop_thread, sampler, sampler)
        out = self.folder / "stages" / self.stage.name
        keep = more.pop("optimizer_checkpoint", None)
        training = TrainingContext(self.model, out, self.run_folder, seed=3, **more)
        return train_stage(self.stage, training, problems=problems(count), rollouts=rollouts, optimizer_checkpoint=keep)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_two_steps_keep_the_contract(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    losses: list[dict[str, Any]] = []
    rollout, compute_loss = grpo.TrlAdapter.rollout, grpo.GRPOTrainer.compute_loss
    monkeypatch.setattr(
        grpo.TrlAdapter,
        "rollout",
        lambda self, prompts, trainer: seen.append(prompts) or rollout(self, prompts, trainer),
    )
    monkeypatch.setattr(
        grpo.GRPOTrainer,
        "compute_loss",
        lambda self, model, inputs, **kw: losses.append(inputs) or compute_loss(self, model, inputs, **kw),
    )
    sampler = Sampler(model)
    trained = Stage(tmp_path, model, loop_thread).run(sampler)

    # TRL asks for as many rows as a step has.
    assert [len(prompts) for prompts in seen] == [8, 8]
    # One sync before each step's rollouts, with the weights that the step starts from.
    assert ["sync" if entry == "sync" else "collect" for entry in sampler.log] == ["sync", "collect"] * 2
    assert same(sampler.weights[0], weights(model))
    assert not same(sampler.weights[1], sampler.weights[0])
    assert not same(weights(trained.model), sampler.weights[1])
    # What was asked for: 2G of each problem, under the stage's limits, with a seed for each step.
    (ids, samples, asked), (_, _, later) = (entry for entry in sampler.log if entry != "sync")
    assert len({*ids}) == 2 and samples == 8 and asked["seed"] != later["seed"]
    assert asked["limits"].max_response_tokens == 16 and asked["limits"].temperature == 1.0
    # The loss has the correction and leaves out what was shown.
    assert len(losses) == 2 * 4
    for inputs in losses:
        assert (inputs["importance_sampling_ratio"] - 1).abs().max() < 1e-3
        assert set(inputs["tool_mask"][:, [3, 4]].flatten().tolist()) == {0}
    # The run's folder.
    first, second = RunFolder(tmp_path).read_metrics()
    assert (first["step"], second["step"], first["stage"]) == (1, 2, "rl1")
    assert (
        first["logprob_diff_mean"] < 1e-4
        and first["grad_norm"] > 0
        and (first["weight_version"], second["weight_version"]) == (0, 1)
    )
    assert first["episodes_in_loss"] + first["episodes_not_in_loss"] == 16
    assert first["episodes_in_loss"] == 4 * (2 - first["zero_variance_groups"])
    assert first["step_s"] >= first["rollout_s"] + first["weight_sync_s"] + first["optimize_s"]
    rows = list(RunFolder(tmp_path).read_episodes(1))
    assert (
        len(rows) == 16
        and sum(row["is_selected"] for row in rows) == 8
        and all(row["selection_reason"] for row in rows)
    )


def test_only_rows_with_a_verdict_in_groups_that_differ_are_in_the_loss(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    """One step on four problems, against the same gradient worked out by hand."""

    def score(problem: Problem, sample: int, ids: Any) -> float | None:
        one_of = {"p0": 1.0, "p1": float(sample == 0), "p2": None if sample < 2 else float(sample == 2), "p3": None}
        return one_of[problem.id]

    class Failing(Sampler):
        def episode(self, problem: Problem, sample: int, *rest: Any) -> Episode:
            episode = super().episode(problem, sample, *rest)
            if problem.id == "p2" and sample == 0:  # failed before its first token
                return replace(
                    episode, response_ids=[], logprobs=[], loss_mask=[], turns=[], stop_reason=StopReason.UNAVAILABLE
                )
            return episode

    sampler = Failing(model, score=score)
    stage = Stage(
        tmp_path,
        model,
        loop_thread,
        steps=1,
        problems_per_step=4,
        samples_per_problem=4,
        kept_per_problem=4,
        roc_mode="off",
        micro_batch_size=4,
    )
    stage.run(sampler, count=4)
    (row,) = stage.run_folder.read_metrics()

    policy = AutoModelForCausalLM.from_pretrained(model)
    _, _, asked = sampler.log[1]
    loss, tokens = torch.tensor(0.0), 0
    for problem in problems(4)[1:3]:
        group = [sampler.episode(problem, sample, asked["seed"]) for sample in range(4)]
        rewards = torch.tensor([episode.reward for episode in group if episode.reward is not None])
        for episode in group:
            if episode.reward is None:
                continue
            advantage = (episode.reward - rewards.mean()) / (rewards.std() + 1e-4)
            policy_T = policy(torch.tensor([[*episode.prompt_ids, *episode.response_ids]])).logits[0].log_softmax(-1)
            start = len(episode.prompt_ids)
            for t, (token, is_sampled) in enumerate(zip(episode.response_ids, episode.loss_mask, strict=True)):
                loss = loss - advantage * policy_T[start + t - 1, token] * is_sampled
                tokens += is_sampled
    (loss / tokens).backward()
    norm = torch.nn.utils.get_total_norm(p.grad for p in policy.parameters() if p.grad is not None)
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert (row["zero_variance_groups"], row["unavailable_episodes"]) == (2, 6)


def test_partial_rollouts_train_on_every_problem_once_with_each_token_under_its_weights(
    tmp_path: Path, model: Path, loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three groups in flight the last two are complete in each step, so the first waits until it is due."""
    losses: list[dict[str, Any]] = []
    compute_loss = grpo.GRPOTrainer.compute_loss
    monkeypatch.setattr(
        grpo.GRPOTrainer,
        "compute_loss",
        lambda self, model, inputs, **kw: losses.append(inputs) or compute_loss(self, model, inputs, **kw),
    )
    sampler = Sampler(model)
    stage = Stage(
        tmp_path, model, loop_thread, steps=5, partial_rollouts=0.5, max_staleness_steps=2, learning_rate=1e-2
    )
    stage.run(sampler)
    metrics = list(stage.run_folder.read_metrics())
    assert [row["pending_groups"] for row in metrics] == [1, 1, 1, 1, 0]
    order = [problem.id for problem in grpo.problem_schedule(problems(6), 2, 5, 3)]
    by_step = [list(stage.run_folder.read_episodes(step)) for step in range(1, 6)]
    groups = [{(row["group"], row["problem"]["id"]) for row in rows} for rows in by_step]
    assert all(len(rows) == 16 and len(some) == 2 for rows, some in zip(by_step, groups, strict=True))
    assert sorted(id for some in groups for _, id in some) == sorted(order)
    assert [id for _, id in sorted(groups[0])] == order[1:3] and (0, order[0]) in groups[2]

    for step, row in enumerate(metrics):
        behind = [step - version for each in by_step[step] for version in versions_of(each)]
        assert {0} <= {*behind} <= {0, 1, 2}
        assert row["stale_token_share"] == pytest.approx(sum(map(bool, behind)) / len(behind))
        assert row["staleness_mean_steps"] == pytest.approx(sum(behind) / len(behind))
    assert [row["stale_token_share"] > 0 for row in metrics] == [False, False, True, False, True]

    # The ratio of the weights that a step starts from to those that sampled, for each token, cut at 2.
    ratios: list[float] = []
    for inputs in losses[8:12]:
        policy = AutoModelForCausalLM.from_pretrained(model)
        policy.load_state_dict(sampler.weights[2])
        mask_BT = inputs["completion_mask"] * inputs["tool_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        with torch.no_grad():
            logp_BTV = policy(ids).logits.log_softmax(-1)[:, inputs["prompt_ids"].shape[1] - 1 : -1]
        logp_BT = logp_BTV.gather(-1, inputs["completion_ids"][..., None])[..., 0]
        ratio_BT = ((logp_BT - inputs["sampling_per_token_logps"]) * mask_BT).exp()
        torch.testing.assert_close(inputs["importance_sampling_ratio"], ratio_BT.clamp(max=2.0), rtol=1e-3, atol=1e-4)
        ratios += ratio_BT[mask_BT == 1].clamp(max=2.0).tolist()
    assert metrics[2]["importance_ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-3)
    assert metrics[0]["importance_ratio_mean"] == pytest.approx(1, abs=1e-3) != metrics[2]["importance_ratio_mean"]
    assert metrics[2]["logprob_diff_mean"] > 1e-3 > metrics[0]["logprob_diff_mean"]


def test_cancelling_stragglers_is_optional_is_reported_and_keeps_the_shares_of_roc(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    """Six of eight are over, three of them right: two of each are kept, as of six."""

    class Stopping(Sampler):
        def episode(self, problem: Problem, sample: int, *rest: Any) -> Episode:
            episode = super().episode(problem, sample, *rest)
            if sample in (2, 5):
                return replace(
                    episode,
                    stop_reason=StopReason.CANCELLED,
                    reward=None,
                    response_ids=episode.response_ids[:4],
                    turns=(),
                )
            return replace(episode, reward=float(sample % 2))

    sampler = Stopping(model)
    stage = Stage(tmp_path, model, loop_thread, steps=1, cancel_stragglers=True)
    stage.run(sampler)
    is_decided = sampler.log[1][-1]["is_decided"]
    assert is_decided([0.0] * 3 + [1.0] * 3, 2) and not is_decided([1.0] * 6, 2)
    (row,) = stage.run_folder.read_metrics()
    lengths = (row["cancelled_response_length"], row["response_length"])
    assert (row["cancelled_share"], lengths, row["unavailable_episodes"]) == (0.25, (4, 8), 0)
    assert row["cancelled_tokens"] == 2 * 2 * 6 and row["episodes_in_loss"] == 8
    kept = [episode for episode in stage.run_folder.read_episodes(1) if episode["is_selected"]]
    assert sorted(episode["reward"] for episode in kept) == [0.0] * 4 + [1.0] * 4


def test_both_with_an_engine_that_is_interrupted(tmp_path: Path, model: Path, loop_thread: LoopThread) -> None:
    from tests.trainer.fakes import ScriptedTools
    from trainer.engines.local import LocalEngine
    from trainer.engines.pool import EnginePool
    from trainer.engines.weight_sync import SyncProbe, load_by_engine
    from trainer.episodes.chat_format import rstar2_format
    from trainer.rollout.collector import EpisodeCollector
    from trainer.scheduling.scheduler import Scheduler

    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(model), max_num_seqs=8, max_model_len=160)
    pool = loop_thread.enter(
        EnginePool([engine], scheduler=Scheduler(160), transfer=load_by_engine, probe=SyncProbe(model))
    )
    tools = ScriptedTools()
    chat_format = rstar2_format(AutoTokenizer.from_pretrained(model), tools=[], system_prompt="Go.")
    collector = EpisodeCollector(pool, chat_format, tools, tools.verify)
    changes = {
        "steps": 3,
        "samples_per_problem": 4,
        "kept_per_problem": 2,
        "partial_rollouts": 1.0,
        "cancel_stragglers": True,
        "max_response_tokens": 40,
    }
    stage = Stage(tmp_path, model, loop_thread, **changes)
    out = tmp_path / "stages/rl1"
    train_stage(
        stage.stage, TrainingContext(model, out, stage.run_folder, seed=3), problems=problems(6),
        rollouts=RolloutRuntime(loop_thread, collector, pool),
    )  # fmt: skip
    rows = [list(stage.run_folder.read_episodes(step)) for step in (1, 2, 3)]
    assert [len(some) for some in rows] == [8, 8, 8]
    of_all = [row["problem"]["id"] for some in rows for row in some[::4]]
    assert sorted(of_all) == sorted(problem.id for problem in grpo.problem_schedule(problems(6), 2, 3, 3))
    assert all(version <= step for step, some in enumerate(rows) for row in some for version in versions_of(row))
    assert [row["pending_groups"] for row in stage.run_folder.read_metrics()] == [2, 2, 0]


def versions_of(row: dict[str, Any]) -> list[int]:
    """Of each sampled token of a recorded episode."""
    starts = [*(start for start, _ in row["weight_versions"]), len(row["response_ids"])]
    of_all = [version for (_, version), start, end in zip(row["weight_versions"], starts, starts[1:], strict=False)
              for _ in range(start, end)]  # fmt: skip
    return [of_all[place] for start, end, mask in row["loss_mask"] for place in range(start, end) if mask]


def test_an_engine_that_disagrees_is_corrected_and_measured(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    agreeing, off = (
        Stage(tmp_path / "a", model, loop_thread, steps=1),
        Stage(tmp_path / "b", model, loop_thread, steps=1),
    )
    agreeing.run(Sampler(model))
    off.run(Sampler(model, shift=-1.0))  # e^1 is cut at 2: every token counts twice
    (one,), (other,) = agreeing.run_folder.read_metrics(), off.run_folder.read_metrics()
    assert other["logprob_diff_mean"] == pytest.approx(1.0, abs=1e-3)
    assert other["grad_norm"] == pytest.approx(2 * one["grad_norm"], rel=1e-3)


def test_a_metric_that_trl_has_renamed_is_nan_with_one_warning_and_broken_turns_are_counted(
    tmp_path: Path,
    model: Path,
    loop_thread: LoopThread,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(grpo.TRL_METRICS, "logprob_diff_mean", "sampling/an_older_name")
    stage = Stage(tmp_path, model, loop_thread)
    stage.run(Sampler(model, nan_turns=3))
    rows = list(stage.run_folder.read_metrics())
    found = [(row["logprob_diff_mean"], row["importance_ratio_mean"] > 0, row["nan_turns"]) for row in rows]
    assert found == [(None, True, 3)] * 2
    (warning,) = [record.getMessage() for record in caplog.records if "an_older_name" in record.getMessage()]
    assert warning.startswith("TRL does not log sampling/an_older_name (it logs loss, ")
    assert "sampling/importance_sampling_ratio/mean" in warning


def test_a_step_without_any_signal_has_no_gradient(tmp_path: Path, model: Path, loop_thread: LoopThread) -> None:
    stage = Stage(tmp_path, model, loop_thread, steps=1)
    trained = stage.run(Sampler(model, score=lambda *_: 1.0))
    (row,) = stage.run_folder.read_metrics()
    assert (row["loss"], row["grad_norm"], row["episodes_in_loss"], row["zero_variance_groups"]) == (0, 0, 0, 2)
    assert same(weights(trained.model), weights(model))


def test_a_step_without_any_verdict_ends_the_stage(tmp_path: Path, model: Path, loop_thread: LoopThread) -> None:
    stage = Stage(tmp_path, model, loop_thread)
    with pytest.raises(
        NoRewardsError, match=r"step 1: none of 16 episodes has a reward \(error of the first: sandbox: gone\)"
    ):
        stage.run(Sampler(model, score=lambda *_: None, error="sandbox: gone"))
    assert list(stage.run_folder.read_metrics()) == []


@pytest.mark.parametrize("changes", [{}, {"partial_rollouts": 0.5}])
def test_a_run_resumed_after_a_failure_ends_like_an_uninterrupted_one(
    tmp_path: Path, model: Path, loop_thread: LoopThread, changes: dict[str, Any]
) -> None:
    whole = Stage(tmp_path / "whole", model, loop_thread, steps=5, **changes)
    straight = Sampler(model)
    expected = whole.run(straight, first_step=7)

    class StopTraining(Exception):
        pass

    def fail(number: int) -> None:
        if number == 3:
            raise StopTraining("the third step's")

    broken = Stage(tmp_path / "broken", model, loop_thread, steps=5, **changes)
    with pytest.raises(StopTraining) as caught:
        broken.run(Sampler(model, before=fail), first_step=7)
    assert caught.traceback[-1].name == "fail"
    assert [row["step"] for row in broken.run_folder.read_metrics()] == [8, 9, 10]
    torn = tmp_path / "broken/stages/rl1/checkpoints/checkpoint-3"  # as a kill leaves one
    torn.mkdir()
    resumed = Sampler(model)
    actual = broken.run(resumed, first_step=7)

    assert resumed.log == straight.log[2 * 2 :]  # the third step again, from the second's checkpoint
    assert same(weights(actual.model), weights(expected.model))
    timed = ("step_s", "rollout_s", "weight_sync_s", "optimize_s", "overhead_cpu_s", "overhead_s")
    lasting = [
        [{name: value for name, value in row.items() if name not in timed} for row in stage.run_folder.read_metrics()]
        for stage in (whole, broken)
    ]
    # As text, in which what is not a number is equal to itself.
    assert str(lasting[0]) == str(lasting[1]) and [row["weight_version"] for row in lasting[0]] == [7, 8, 9, 10, 11]
    for step in range(8, 13):
        rows = [[row | {"duration_s": 0} for row in stage.run_folder.read_episodes(step)] for stage in (whole, broken)]
        assert rows[0] == rows[1]
    # A stage that was over and lost only what came after runs no step again.
    again = Sampler(model)
    assert same(weights(broken.run(again, first_step=7).model), weights(expected.model))
    assert again.log == []


def test_the_optimizer_states_are_continued_or_reset_as_configured(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    first = Stage(tmp_path, model, loop_thread).run(Sampler(model))
    steps = {}
    for name, checkpoint in {"kept": first.checkpoint, "fresh": None}.items():
        stage = Stage(tmp_path, first.model, loop_thread, name=name, steps=1, learning_rate=5e-4, save_steps=1)
        sampler = Sampler(first.model)
        trained = stage.run(sampler, first_step=2, optimizer_checkpoint=checkpoint)
        assert same(sampler.weights[0], weights(first.model))
        optimizer = torch.load(trained.checkpoint / "optimizer.pt", weights_only=True)
        steps[name] = {int(state["step"]) for state in optimizer["state"].values()}
        assert {group["lr"] for group in optimizer["param_groups"]} == {5e-4}
        rows = [row["step"] for row in stage.run_folder.read_metrics() if row["stage"] == name]
        assert rows == [3]
    assert steps == {"kept": {3}, "fresh": {1}}


def test_settings_that_do_not_fit_together_are_refused(tmp_path: Path, model: Path, loop_thread: LoopThread) -> None:
    with pytest.raises(
        ConfigError, match=r"gpus_per_node=0: expected 2 training processes, got 1; set hardware\.launcher"
    ):
        Stage(tmp_path, model, loop_thread).run(Sampler(model), hardware=HardwareConfig(nodes=2))
    with pytest.raises(ConfigError, match=r"nodes=1, gpus_per_node=1: expected GPUs, but torch can use none"):
        Stage(tmp_path, model, loop_thread).run(Sampler(model), hardware=HardwareConfig(gpus_per_node=1))
    with pytest.raises(ConfigError, match=r"expected at least problems_per_step=2 problems .* got 1"):
        Stage(tmp_path, model, loop_thread).run(Sampler(model), count=1)


@pytest.mark.parametrize(
    ("module", "names"), [(grpo, {"_last_loaded_step"}), (context, {"_keys_to_ignore_on_save"}), (sft, set())]
)
def test_only_listed_private_names_of_libraries_are_used(module: Any, names: set[str]) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    used = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    theirs = {
        node.attr
        for node in used
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "TrainingRow"))
    }
    assert {name for name in theirs if name.startswith("_") and not name.endswith("__")} == names


def test_visible_gpus_train_only_if_they_are_configured(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = TrainingContext(model, tmp_path, RunFolder(tmp_path), seed=3).trl_arguments(STAGE, rows=8)
    assert arguments["use_cpu"] and not arguments["dataloader_pin_memory"]


@pytest.mark.parametrize("arguments", [grpo._GrpoArguments, sft._SftArguments])
def test_a_single_process_trains_on_one_of_its_visible_gpus(
    arguments: type[TrainingArguments], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    theirs, ours = (kind(str(tmp_path), bf16=False) for kind in (arguments.__mro__[2], arguments))
    assert (theirs.n_gpu, ours.n_gpu) == (8, 1), "which TRL refuses, and transformers would share its passes out to"
    assert ours.train_batch_size == ours.per_device_train_batch_size


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9), st.integers(0, 3))
def test_order_has_no_problem_twice_in_a_step_and_uses_all(count: int, per_step: int, steps: int, seed: int) -> None:
    if count < per_step:
        return
    order = problem_schedule(problems(count), per_step, steps, seed)
    assert len(order) == per_step * steps and order == problem_schedule(problems(count), per_step, steps, seed)
    assert all(len({*order[at : at + per_step]}) == per_step for at in range(0, len(order), per_step))
    through = count // per_step * per_step
    assert len({*order[:through]}) == min(through, len(order))


@pytest.fixture(scope="module", params=["none", "full"])
def two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> tuple[Path, str, list[dict[str, Any]]]:
    """The folder of a stage that two processes trained together, how it was sharded, and what each rank noted."""
    root, folder = Path(__file__).parents[3], tmp_path_factory.mktemp(request.param)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, "tests/trainer/two_ranks.py", model, folder, request.param]
    subprocess.run(command, cwd=root, env=environment, timeout=380, check=True)
    return folder, request.param, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_two_ranks_share_a_step_and_end_with_the_same_weights(
    two_ranks: tuple[Path, str, list[dict[str, Any]]],
) -> None:
    folder, _, (one, other) = two_ranks
    assert one["weights"] == other["weights"]
    # Two steps of two passes each: every row was in one rank's, once.
    for step in (1, 2):
        passes = [rank["passes"][2 * step - 2 : 2 * step] for rank in (one, other)]
        trained = [ids for of_rank in passes for rows in of_rank for ids in rows]
        assert sorted(trained) == sorted(row["response_ids"] for row in RunFolder(folder).read_episodes(step))


def test_ranks_wait_for_rollouts_on_a_gloo_group_that_outlasts_the_default_group(
    two_ranks: tuple[Path, str, list[dict[str, Any]]],
) -> None:
    for rank in two_ranks[2]:
        assert [on for on, _ in rank["waits"]] == [*["scatter_object_list: own, gloo"] * 2, "barrier: own, gloo"]
    other = two_ranks[2][1]
    assert other["waits"][1][1] > other["limit_s"], "its wait was longer than the default group allows"


def test_sharded_gradients_are_reduced_after_every_micro_batch(
    two_ranks: tuple[Path, str, list[dict[str, Any]]], model: Path
) -> None:
    folder, sharding, noted = two_ranks
    for rank in noted:
        # Two steps of two micro-batches; embeddings with the head, and each of the two layers, are sharded apart.
        assert rank["reduced"] == ([True] * 12 if sharding == "full" else [])
    saved = weights(folder / "stages/rl1/model")
    assert saved.keys() == weights(model).keys(), "the first rank gathered all of it"
    assert not same(saved, weights(model))
