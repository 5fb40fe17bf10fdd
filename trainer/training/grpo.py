"""GRPO-RoC on TRL's `GRPOTrainer`: one RL stage, from a model folder to a model folder.

    TRL: for each step
      1  vllm_generation.sync_weights()   TrlAdapter gives the engines the step's weights
      2  rollout_func(prompts)            TrlAdapter collects 2G episodes per problem, selects G, records all
      3  loss, backward, optimizer        TRL
      4  on_log, on_save                  MetricsCallback writes the row, marks the checkpoint

TRL owns the loss, the optimizer and the checkpoints. This module uses `rollout_func` and three attributes of the
trainer (`vllm_generation`, `use_vllm`, `_last_loaded_step`), and no other internals.

Invariants:
- Engines sample a step with the weights that the step starts from; with `one_step_off_policy`, with those that the
  step before it started from.
- TRL asks for as many rows as a step trains on. Each problem gets G rows: those that `trainer.episodes.roc` selects.
  `TrlAdapter` chooses the problems; TRL's prompts are empty placeholders.
- A row is in the loss, and in its denominator, only if it has a reward and its group's selected rewards differ. Any
  other row has a loss mask of zeros; without a reward its advantage is 0 as well.
- What a step samples follows from (weights, seed, step), and the order of problems from the seed. So a resumed run
  repeats the steps that a kill has undone. Pending groups are part of each checkpoint. With `one_step_off_policy`, the
  first step after a kill samples with newer weights than it would have without the kill.
- Only the first rank uses engines and tools; the other ranks receive their rows from it.

Loss (rStar2-Agent, arXiv 2508.20722, 2.2): token mean over the batch, ratios clipped to [1 - epsilon_low,
1 + epsilon_high], no KL and no entropy term, advantages from the group's selected rewards. Importance sampling corrects
differences between engine and trainer; each token's ratio is capped (`trainer.training.token_budget`).
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from math import nan
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from pydantic import TypeAdapter
from transformers import AutoTokenizer, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from trainer.config import ConfigError, SamplingConfig, StageConfig, suggestion
from trainer.episodes import metrics, roc
from trainer.episodes.episode import WITHOUT_LOGPROBS_ADVICE, Episode, Problem, StopReason
from trainer.rollout.loop_thread import LoopThread
from trainer.training.callback import MetricsCallback
from trainer.training.context import (
    SingleGpuArguments,
    TrainedModel,
    TrainingContext,
    checkpoint_step,
    model_errors_as_config_errors,
    wait_for_ranks,
    waiting_group,
)
from trainer.training.token_budget import RowEntropies, TokenBudgetTrainer

if TYPE_CHECKING:
    from trainer.collection.cluster_collector import WeightSync

logger = logging.getLogger(__name__)

TRL_METRICS = {
    "logprob_diff_mean": "sampling/sampling_logp_difference/mean",
    "importance_ratio_mean": "sampling/importance_sampling_ratio/mean",
    "computed_per_loss_token": "computed_per_loss_token",
}
"""Names of the trainer's metrics over the tokens in the loss, by the name in the run folder."""
PENDING_GROUPS = "pending_groups.json"
"""Name of the file in a checkpoint with the groups that the next step continues."""
OWN_ARGUMENTS = frozenset({
    "output_dir", "seed", "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "learning_rate",
    "use_cpu", "model_init_kwargs", "bf16", "gradient_checkpointing", "ddp_find_unused_parameters", "fsdp",
    "accelerator_config", "save_strategy", "save_steps", "save_total_limit", "logging_steps", "dataloader_pin_memory",
    "report_to", "disable_tqdm", "max_steps", "num_generations", "max_completion_length", "shuffle_dataset", "beta",
    "epsilon", "epsilon_high", "loss_type", "scale_rewards", "temperature", "vllm_importance_sampling_correction",
    "lr_scheduler_type", "warmup_steps", "max_grad_norm",
})  # fmt: skip
"""Arguments of GRPOConfig that `train_stage` sets."""
EPISODE_GROUPS = TypeAdapter(list[list[Episode]])
"""Reads and writes `PENDING_GROUPS`."""


class NoRewardsError(Exception):
    """No episode of a step has a reward. Further steps would be counted although the model does not change."""


class GroupCollector(Protocol):
    """The part of `trainer.rollout.collector.EpisodeCollector` that training and evaluation use."""

    overhead_cpu_s: float
    overhead_s: float
    nan_turns: int

    async def collect_groups(
        self,
        groups: Sequence[Sequence[Episode]],
        *,
        limits: SamplingConfig,
        seed: int,
        min_complete: int | None = None,
        must_complete: int = 0,
        is_decided: Callable[[Sequence[float | None], int], bool] | None = None,
    ) -> list[list[Episode] | None]: ...

    async def collect(
        self, problems: Sequence[Problem], samples_per_problem: int, *, limits: SamplingConfig, seed: int
    ) -> list[list[Episode]]: ...


@dataclass(frozen=True, slots=True)
class RolloutRuntime:
    """The objects that collect episodes. `collector` and `pool` live in the event loop of `loop_thread`."""

    loop_thread: LoopThread
    collector: GroupCollector
    pool: WeightSync


class _Collected(NamedTuple):
    """The groups of a step: as they were started, as they were sampled (None if unfinished), and their metrics."""

    started: list[list[Episode]]
    results: list[list[Episode] | None]
    measured: dict[str, float]


class TrainingRow(NamedTuple):
    """One completion; the fields are named as TRL expects them. `roc_reward` is None for an unscored episode."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    roc_reward: float | None


def train_stage(
    stage: StageConfig,
    context: TrainingContext,
    *,
    problems: Sequence[Problem],
    rollouts: RolloutRuntime | None,
    optimizer_checkpoint: Path | None = None,
) -> TrainedModel:
    """Train for `stage.steps` steps, from the newest complete checkpoint if there is one.

    `rollouts` is None on every rank but the first. `optimizer_checkpoint` is a checkpoint of the previous stage, whose
    optimizer states are continued; its warm-up is over.

    Raises `ConfigError` for settings that do not fit together, `NoRewardsError`, and errors of engines and tools.
    """
    checkpoint = context.latest_checkpoint() or optimizer_checkpoint
    earlier_steps = checkpoint_step(optimizer_checkpoint) if optimizer_checkpoint else 0
    steps_done = checkpoint_step(checkpoint) - earlier_steps if checkpoint else 0
    adapter = TrlAdapter(stage, context, problems, rollouts, earlier_steps)
    if checkpoint and steps_done and (checkpoint / PENDING_GROUPS).exists():
        adapter.pending_groups = EPISODE_GROUPS.validate_json((checkpoint / PENDING_GROUPS).read_bytes())
    own_arguments = dict(
        **context.trl_arguments(stage, rows=stage.problems_per_step * stage.kept_per_problem),
        max_steps=earlier_steps + stage.steps,
        # The batch: TRL repeats each prompt `num_generations` times. `TokenBudgetTrainer` splits a step into passes.
        num_generations=stage.kept_per_problem,
        max_completion_length=stage.max_response_tokens,
        shuffle_dataset=False,
        # The loss.
        beta=0.0,
        epsilon=stage.epsilon_low,
        epsilon_high=stage.epsilon_high,
        loss_type="dapo",
        scale_rewards="group",
        temperature=stage.temperature,
        vllm_importance_sampling_correction=False,  # `TokenBudgetTrainer` corrects
        # The optimizer.
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=stage.warmup_steps,
        max_grad_norm=stage.max_grad_norm,
    )
    check_grpo_options(stage, own_arguments)
    arguments = _GrpoArguments(**own_arguments, **stage.grpo)
    context.truncate_run(steps_done)
    with model_errors_as_config_errors(context.model):
        trainer = TokenBudgetTrainer(
            micro_batch_tokens=stage.micro_batch_tokens,
            on_entropies=adapter.write_entropies if context.run_folder.save_entropies else None,
            model=str(context.model),
            reward_funcs=_roc_reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [""] * stage.problems_per_step * arguments.max_steps}),
            processing_class=AutoTokenizer.from_pretrained(context.model),
            callbacks=[adapter],
            rollout_func=adapter.rollout,
        )
    # TRL now calls the adapter as it would call its own vLLM: `sync_weights` once before the rollouts of each step.
    trainer.vllm_generation, trainer.use_vllm = adapter, True
    trainer._last_loaded_step = -1  # no step has been synced yet
    adapter.trainer = trainer
    return context.train(trainer, checkpoint)


def check_grpo_options(stage: StageConfig, own_arguments: Collection[str] = OWN_ARGUMENTS) -> None:
    """Raise `ConfigError` for an argument in `[stages.NAME.grpo]` that GRPOConfig lacks or that the trainer sets."""
    where = f"stages.{stage.name}.grpo"
    for name in stage.grpo:
        if name in own_arguments:
            raise ConfigError(f"{where}: {name}: expected another argument, since the trainer sets this one itself")
        if name not in (known := {argument.name for argument in fields(GRPOConfig)}):
            raise ConfigError(f"{where}: {name}: unknown argument of TRL's GRPOConfig; {suggestion(name, known)}")


def problem_schedule(problems: Sequence[Problem], per_step: int, steps: int, seed: int) -> list[Problem]:
    """Return `per_step` problems for each of `steps` steps; each epoch has a new order.

    No step has a problem twice: problems at the end of an epoch that do not fill a step are left out of that epoch.
    Raises `ConfigError` for too few problems or for equal ids.
    """
    epoch_problems = list(problems)
    num_ids = len({problem.id for problem in epoch_problems})
    if num_ids < max(len(epoch_problems), per_step):
        raise ConfigError(
            f"expected at least problems_per_step={per_step} problems with different ids, got {len(epoch_problems)} "
            f"with {num_ids} ids; lower problems_per_step, or give more problems"
        )
    order: list[Problem] = []
    epoch = 0
    while len(order) < per_step * steps:
        random.Random(f"{seed}/{epoch}").shuffle(epoch_problems)
        order += epoch_problems[: len(epoch_problems) // per_step * per_step]
        epoch += 1
    return order[: per_step * steps]


class _GrpoArguments(SingleGpuArguments, GRPOConfig):  # type: ignore[misc]
    """TRL's arguments, for one GPU per process."""


class TrlAdapter(MetricsCallback):
    """Receives TRL's calls: gives weights to the engines, returns rows, and writes metrics and pending groups."""

    trainer: GRPOTrainer

    def __init__(
        self,
        stage: StageConfig,
        context: TrainingContext,
        problems: Sequence[Problem],
        rollouts: RolloutRuntime | None,
        earlier_steps: int,
    ) -> None:
        """`earlier_steps` is the trainer's step count at which this stage begins."""
        super().__init__(context, step_offset=context.first_step - earlier_steps)
        self.pending_groups: list[list[Episode]] = []
        """Groups that are unfinished or not yet trained on, the oldest first."""
        self._stage, self._rollouts, self._seed, self._earlier_steps = stage, rollouts, context.seed, earlier_steps
        self._schedule = problem_schedule(problems, stage.problems_per_step, stage.steps, context.seed)
        # With roc_mode=off all samples are kept, so all rules select the same.
        self._mode: roc.Mode = "paper" if stage.roc_mode == "off" else stage.roc_mode
        self._weight_version = 0
        self._trained: list[Episode] = []
        """The episodes in the loss of the current step."""
        self._context = context
        self._next_groups: Future[_Collected] | None = None
        """The groups of the next step, which are sampled beside this one."""
        self._step_metrics: dict[str, float] = {}
        self._missing_trl_metrics: set[str] = set()
        self._step_started_at = self._rollout_ended_at = perf_counter()

    def sync_weights(self) -> None:
        """Give the engines the current weights. TRL calls this on every rank, once per step and before `rollout`."""
        waiting_since = perf_counter()
        if self._stage.one_step_off_policy:
            if self._rollouts and self._next_groups:
                self._rollouts.loop_thread.result(self._next_groups)  # engines that sample load no weights
            wait_for_ranks(self._context.hardware)
        started_at = perf_counter()
        weights = self.trainer.accelerator.get_state_dict(self.trainer.model_wrapped)  # gathered if sharded
        if self._rollouts:
            self._weight_version = self.step_offset + self.trainer.state.global_step
            self._rollouts.loop_thread.run(self._rollouts.pool.sync_weights, weights, self._weight_version)
        self._step_metrics = {
            "rollout_wait_s": started_at - waiting_since,
            "weight_sync_s": perf_counter() - started_at,
        }

    def rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Return this rank's rows, as many as `prompts` (TRL's `rollout_func`)."""
        rows = _scatter(self._collect_step(self._rollouts) if self._rollouts else [], len(prompts))
        self._rollout_ended_at = perf_counter()
        return {name: [getattr(row, name) for row in rows] for name in TrainingRow._fields}

    def write_entropies(self, rows: list[RowEntropies]) -> None:
        """Write the entropies of all ranks' rows. TRL shuffles the rows, so they are found by their tokens."""
        gathered = gather_object(rows)
        if self._rollouts:
            step = self.step_offset + self.trainer.state.global_step + 1
            entropies = {(tuple(prompt), tuple(ids)): values for prompt, ids, values in gathered}
            keys = [(tuple(episode.prompt_ids), tuple(episode.response_ids)) for episode in self._trained]
            self.run_folder.write_entropies(
                step,
                (
                    {"step": step, "problem": episode.problem.id, "sample": episode.sample}
                    | {"response_ids": episode.response_ids, "entropies": entropies[key]}
                    for episode, key in zip(self._trained, keys, strict=True)
                    if key in entropies
                ),
            )

    def metrics_from_logs(self, logs: Mapping[str, float]) -> dict[str, float]:
        now = perf_counter()
        step_s, optimize_s = now - self._step_started_at, now - self._rollout_ended_at
        metrics = self._step_metrics
        rest_s = step_s - metrics["weight_sync_s"] - metrics["rollout_wait_s"] - optimize_s
        self._step_started_at = now
        # For a step without a token in the loss TRL logs 0, which would look like perfect agreement.
        has_loss = metrics["episodes_in_loss"] > 0
        return {
            **super().metrics_from_logs(logs),
            **metrics,
            **{name: self._logged(key, logs) if has_loss else nan for name, key in TRL_METRICS.items()},
            "weight_version": self._weight_version,
            "step_s": step_s,
            "optimize_s": optimize_s,
            "overhead_cpu_s": rest_s + metrics["overhead_cpu_s"],
            "overhead_s": rest_s + metrics["overhead_s"],
        }

    def _logged(self, key: str, logs: Mapping[str, float]) -> float:
        """Return TRL's metric `key`; NaN, and one warning, if the installed version does not log it."""
        if key not in logs and key not in self._missing_trl_metrics:
            self._missing_trl_metrics.add(key)
            logger.warning("TRL does not log %s (it logs %s); the metric that uses it is NaN", key, ", ".join(logs))
        return logs.get(key, nan)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A checkpoint of the previous stage restores that stage's settings into the trainer's state.
        state.save_steps = args.save_steps
        kwargs["lr_scheduler"].base_lrs = [args.learning_rate for _ in kwargs["lr_scheduler"].base_lrs]
        self._step_started_at = perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.pending_groups:
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", PENDING_GROUPS)
            path.write_bytes(EPISODE_GROUPS.dump_json(self.pending_groups))
        super().on_save(args, state, control, **kwargs)

    def _collect_step(self, rollouts: RolloutRuntime) -> list[TrainingRow]:
        """Collect a step's groups, select episodes, write all of them down, and return the selected rows."""
        step = self.step_offset + self.trainer.state.global_step + 1
        groups = self._collect_groups(rollouts, step)
        selected = [self._select(group, step) for group in groups]
        reasons = [roc.selection_reasons(group, indices) for group, indices in zip(groups, selected, strict=True)]
        self.run_folder.write_episodes(step, self._stage.name, groups, selected, reasons)
        if all(episode.reward is None for group in groups for episode in group):
            raise NoRewardsError(
                f"step {step}: none of {sum(map(len, groups))} episodes has a reward (error of the first: "
                f"{groups[0][0].error}); repair that and run the same command to continue"
            )
        in_loss = [_in_loss(group, indices) for group, indices in zip(groups, selected, strict=True)]
        self._step_metrics |= metrics.step_metrics(groups, in_loss) | self._async_metrics(groups)
        self._trained = [group[index] for group, used in zip(groups, in_loss, strict=True) for index in used]
        placeholder_id = self.trainer.processing_class.eos_token_id
        return [
            _training_row(group[index], is_in_loss=index in used, placeholder_id=placeholder_id)
            for group, indices, used in zip(groups, selected, in_loss, strict=True)
            for index in indices
        ]

    def _collect_groups(self, rollouts: RolloutRuntime, step: int) -> list[list[Episode]]:
        """Return `problems_per_step` complete groups; the other started groups become pending. Start to sample the next
        step's groups, if they are sampled beside this step."""
        stage, waiting_since = self._stage, perf_counter()
        started, results, measured = rollouts.loop_thread.result(self._next_groups or self._start(rollouts, step))
        self._step_metrics |= measured
        self._step_metrics["rollout_wait_s"] += perf_counter() - waiting_since
        is_last = step == self.step_offset + self._earlier_steps + stage.steps
        self._next_groups = self._start(rollouts, step + 1) if stage.one_step_off_policy and not is_last else None
        complete = ((number, group) for number, group in enumerate(results) if group)
        taken = dict(islice(complete, stage.problems_per_step))
        self.pending_groups = [group for number, group in enumerate(started) if number not in taken]
        for group in self.pending_groups:
            for episode in group:
                episode.steps_carried += 1
        return list(taken.values())

    def _start(self, rollouts: RolloutRuntime, step: int) -> Future[_Collected]:
        """Start to sample the groups of `step`."""
        stage, collector = self._stage, rollouts.collector
        started = self.pending_groups + self._new_groups(step - 1 - self.step_offset - self._earlier_steps)
        must_complete = sum(group[0].steps_carried >= stage.max_staleness_steps for group in self.pending_groups)
        is_decided = partial(roc.is_group_decided, num_kept=stage.kept_per_problem, mode=self._mode)

        async def collect() -> _Collected:
            started_at = perf_counter()
            results = await collector.collect_groups(
                started,
                limits=stage,
                seed=random.Random(f"{self._seed}/{step}").getrandbits(63),
                min_complete=stage.problems_per_step,
                must_complete=must_complete,
                is_decided=is_decided if stage.cancel_stragglers else None,
            )
            measured = {name: getattr(collector, name) for name in ("nan_turns", "overhead_cpu_s", "overhead_s")}
            return _Collected(started, results, measured | {"rollout_s": perf_counter() - started_at})

        return rollouts.loop_thread.start(collect)

    def _new_groups(self, steps_done: int) -> list[list[Episode]]:
        """Return the groups to start after `steps_done` steps. The last steps start no more than they need.

        If a problem has an earlier group in the same step, the later one continues its sample numbers, so that no two
        episodes are sampled alike.
        """
        stage, per_step = self._stage, self._stage.problems_per_step
        in_flight = min(per_step + round(per_step * stage.partial_rollouts), per_step * (stage.steps - steps_done))
        next_sample = {group[0].problem: group[-1].sample + 1 for group in self.pending_groups}
        groups = []
        first = per_step * steps_done
        for problem in self._schedule[first + len(self.pending_groups) : first + in_flight]:
            start = next_sample.get(problem, 0)
            next_sample[problem] = start + stage.samples_per_problem
            groups.append([Episode(problem, sample) for sample in range(start, next_sample[problem])])
        return groups

    def _async_metrics(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """Return the metrics of cancelled stragglers and of episodes from earlier weights, if there may be any."""
        episodes = [episode for group in groups for episode in group]
        values: dict[str, float] = {}
        if self._stage.cancel_stragglers:
            cancelled = [episode for episode in episodes if episode.stop_reason is StopReason.CANCELLED]
            values = {
                "cancelled_share": len(cancelled) / len(episodes),
                "cancelled_response_length": fmean(e.response_length for e in cancelled) if cancelled else nan,
                "cancelled_tokens": sum(episode.sampled_tokens for episode in cancelled),
            }
        if self._stage.partial_rollouts:
            values["pending_groups"] = len(self.pending_groups)
        if self._stage.partial_rollouts or self._stage.one_step_off_policy:
            tokens = sum((Counter(episode.sampled_tokens_by_version) for episode in episodes), Counter[int]())
            by_staleness = {self._weight_version - version: count for version, count in tokens.items()}
            values |= {
                "stale_token_share": 1 - by_staleness.get(0, 0) / tokens.total(),
                "staleness_mean_steps": sum(steps * count for steps, count in by_staleness.items()) / tokens.total(),
            }
        return values

    def _select(self, group: Sequence[Episode], step: int) -> list[int]:
        """Return the indices that RoC selects from the episodes that were not cancelled."""
        finished = [i for i, episode in enumerate(group) if episode.stop_reason is not StopReason.CANCELLED]
        rng = random.Random(f"{self._seed}/{step}/{group[0].problem.id}")
        candidates = [group[i] for i in finished]
        selected = roc.resample_on_correct(candidates, self._stage.kept_per_problem, mode=self._mode, rng=rng)
        return [finished[index] for index in selected]


def _in_loss(group: Sequence[Episode], selected: Sequence[int]) -> list[int]:
    """Return the selected indices that are in the loss."""
    return [i for i in selected if group[i].reward is not None] if roc.has_signal(group, selected) else []


def _training_row(episode: Episode, *, is_in_loss: bool, placeholder_id: int) -> TrainingRow:
    """Return an episode's row. TRL accepts no empty completion, so an episode without tokens gets a masked one."""
    ids = list(episode.response_ids) or [placeholder_id]
    logprobs = episode.known_logprobs
    if logprobs is None:
        raise ConfigError(
            f"sample {episode.sample} of problem {episode.problem.id} has tokens without log-probabilities: "
            f"{WITHOUT_LOGPROBS_ADVICE}"
        )
    mask = list(episode.loss_mask) if is_in_loss and episode.response_ids else [0] * len(ids)
    return TrainingRow(list(episode.prompt_ids), ids, logprobs or [0.0], mask, episode.reward)


def _roc_reward(roc_reward: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function. The rewards came with the rows."""
    return roc_reward


def _scatter(rows: Sequence[TrainingRow], count: int) -> Sequence[TrainingRow]:
    """Give each rank `count` of the first rank's rows. The other ranks wait here while it samples."""
    if (group := waiting_group()) is None:
        return rows
    shares = [rows[start : start + count] for start in range(0, len(rows), count)]
    own: list[Sequence[TrainingRow]] = [()]
    torch.distributed.scatter_object_list(own, shares or None, src=0, group=group)
    return own[0]
