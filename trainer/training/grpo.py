"""GRPO-RoC on TRL's `GRPOTrainer`: one RL stage, from a model folder to a model folder.

RoC (Resample on Correct) samples 2G episodes per problem and selects G of them for training.

    TRL: for each step
      1  vllm_generation.sync_weights()   TrlAdapter gives the engines the step's weights
      2  rollout_func(prompts)            TrlAdapter collects 2G episodes per problem, selects G, records all
      3  loss, backward, optimizer        TRL
      4  on_log, on_save                  MetricsCallback writes the row, marks the checkpoint

TRL owns the loss, the optimizer and the checkpoints. This module uses `rollout_func` and three attributes of the
trainer (`vllm_generation`, `use_vllm`, `_last_loaded_step`), and no other internals.

Invariants:
- Engines sample a step with the weights that the step starts from. With `one_step_off_policy`, they sample it with the
  weights that the previous step started from.
- TRL asks for the rows that a step trains on. Each problem gives G rows: those that `trainer.episodes.roc` selects.
  `TrlAdapter` chooses the problems; TRL's prompts are empty placeholders.
- A row is in the loss, and in the loss's denominator, only if it has a reward and the selected rewards of its group
  differ. Any other row has a loss mask of zeros. If it has no reward, its advantage is 0 as well.
- A step without a token in the loss leaves the weights and the optimizer states as they are.
- The tokens that a step samples follow from (weights, seed, step). The order of problems follows from the seed. So a
  resumed run repeats the steps that a kill has undone. There is one exception: with `one_step_off_policy`, the first
  step after a kill samples with newer weights than without the kill.
- Pending groups, which continue in the next step, are part of each checkpoint.
- Only the first rank uses engines and tools; the other ranks receive their rows from it.

Loss (rStar2-Agent, arXiv 2508.20722, 2.2): token mean over the batch, no KL and no entropy term, advantages from the
group's selected rewards. A batch has one optimizer step, so the ratio to the weights before the step is 1, and the
paper's clip of this ratio would never act: there is none. Importance sampling corrects differences between engine and
trainer. The importance ratio of each token is capped (`trainer.training.token_budget`).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from itertools import islice
from math import nan
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from pydantic import TypeAdapter
from transformers import AutoTokenizer, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from trainer.config import StageConfig, check_options
from trainer.episodes import metrics, roc
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.rollout.runtime import RolloutRuntime
from trainer.training import training_rows
from trainer.training.adapters import plain_weights
from trainer.training.callback import MetricsCallback
from trainer.training.context import (
    RankArguments,
    TrainedModel,
    TrainingContext,
    checkpoint_step,
    model_errors_as_config_errors,
    wait_for_ranks,
)
from trainer.training.token_budget import RowEntropies, TokenBudgetTrainer

logger = logging.getLogger(__name__)

TRL_METRICS = {
    "logprob_diff_mean": "sampling/sampling_logp_difference/mean",
    "importance_ratio_mean": "sampling/importance_sampling_ratio/mean",
    "computed_per_loss_token": "computed_per_loss_token",
}
"""Names in the run folder, each with TRL's name for the same metric. They are means over the tokens in the loss."""
PENDING_GROUPS = "pending_groups.json"
"""Name of the file in a checkpoint with the groups that the next step continues."""
STAGE_OPTIONS = frozenset({
    "adam_beta1", "adam_beta2", "adam_epsilon", "cast_lm_head_to_fp32", "ddp_bucket_cap_mb", "disable_dropout",
    "full_determinism", "gradient_checkpointing_kwargs", "mask_truncated_completions", "tf32",
    "torch_empty_cache_steps", "weight_decay",
})  # fmt: skip
"""The arguments of GRPOConfig that `[stages.NAME.grpo]` may have. The trainer sets the others itself, or they have no
effect or a wrong one: they belong to TRL's sampling or evaluation, which is not used, to its loss, which
`TokenBudgetTrainer` replaces, or they wrap the model in a way (such as deepspeed) that steps after each pass."""
EPISODE_GROUPS = TypeAdapter(list[list[Episode]])
"""Reads and writes `PENDING_GROUPS`."""


class NoRewardsError(Exception):
    """Too few episodes have a reward, since the infrastructure failed. The episodes that an outage leaves are not a
    fair sample, since episodes with many tool calls are lost most often."""


class _Collected(NamedTuple):
    """The groups of a step."""

    started: list[list[Episode]]
    """The groups before sampling."""
    results: list[list[Episode] | None]
    """The groups after sampling, in the order of `started`. None for a group that is not complete."""
    measured: dict[str, float]
    """Metrics of the sampling."""


def train_stage(
    stage: StageConfig,
    context: TrainingContext,
    *,
    problems: Sequence[Problem],
    rollouts: RolloutRuntime | None,
    optimizer_checkpoint: Path | None = None,
    evaluate: Callable[[int], float] | None = None,
) -> TrainedModel:
    """Train for `stage.steps` steps, from the newest complete checkpoint if there is one.

    `rollouts`: None on every rank but the first.
    `optimizer_checkpoint`: a checkpoint of the previous stage. Training continues from its optimizer states and without
    a second warm-up. With `context.peft` it is not used, since each stage has a new adapter.
    `evaluate`: takes the number of steps that the stage has done, and returns the accuracy. It is called on the first
    rank, after every `context.eval_steps` steps and after the last step. The engines then have the weights after that
    step. Each evaluation is followed by a checkpoint, so a resumed stage does not repeat it.

    Raises `ConfigError` for settings that do not fit together, `NoRewardsError`, and errors of engines and tools.
    """
    if context.peft:
        optimizer_checkpoint = None
    checkpoint = context.latest_checkpoint() or optimizer_checkpoint
    earlier_steps = checkpoint_step(optimizer_checkpoint) if optimizer_checkpoint else 0
    steps_done = checkpoint_step(checkpoint) - earlier_steps if checkpoint else 0
    adapter = TrlAdapter(stage, context, problems, rollouts, earlier_steps, evaluate)
    if checkpoint and steps_done and (checkpoint / PENDING_GROUPS).exists():
        adapter.pending_groups = EPISODE_GROUPS.validate_json((checkpoint / PENDING_GROUPS).read_bytes())
    check_grpo_options(stage)
    arguments = _GrpoArguments(
        **context.trl_arguments(stage, rows=stage.problems_per_step * stage.kept_per_problem),
        max_steps=earlier_steps + stage.steps,
        # The batch: TRL repeats each prompt `num_generations` times. `TokenBudgetTrainer` splits a step into passes.
        num_generations=stage.kept_per_problem,
        max_completion_length=stage.max_response_tokens,
        shuffle_dataset=False,
        # The loss.
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        temperature=stage.temperature,
        vllm_importance_sampling_correction=False,  # `TokenBudgetTrainer` corrects
        # The optimizer.
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=stage.warmup_steps,
        max_grad_norm=stage.max_grad_norm,
        **stage.grpo,
    )
    context.truncate_run(steps_done)
    with model_errors_as_config_errors(context.model):
        trainer = TokenBudgetTrainer(
            micro_batch_tokens=stage.micro_batch_tokens,
            on_entropies=adapter.write_entropies if context.run_folder.save_entropies else None,
            model=context.load_model(),
            reward_funcs=training_rows.roc_reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [""] * stage.problems_per_step * arguments.max_steps}),
            processing_class=AutoTokenizer.from_pretrained(context.model),
            peft_config=context.peft_config(),
            callbacks=[adapter],
            rollout_func=adapter.rollout,
        )
    # TRL now calls the adapter as it would call its own vLLM: `sync_weights` once before the rollouts of each step.
    trainer.vllm_generation, trainer.use_vllm = adapter, True
    trainer._last_loaded_step = -1  # no step has been synced yet
    adapter.trainer = trainer
    return context.train(trainer, checkpoint)


def check_grpo_options(stage: StageConfig) -> None:
    """Check the arguments in `[stages.NAME.grpo]`. Raise `ConfigError` for an argument that GRPOConfig does not have,
    and for one that is not in `STAGE_OPTIONS`."""
    others = {argument.name for argument in fields(GRPOConfig)} - STAGE_OPTIONS
    check_options(f"stages.{stage.name}.grpo", stage.grpo, others, STAGE_OPTIONS, "argument of TRL's GRPOConfig")


class _GrpoArguments(RankArguments, GRPOConfig):  # type: ignore[misc]
    """The arguments of TRL, with the changes that `RankArguments` makes for each rank."""


class TrlAdapter(MetricsCallback):
    """Receives TRL's calls: gives weights to the engines, returns rows, and writes metrics and pending groups."""

    trainer: TokenBudgetTrainer

    def __init__(
        self,
        stage: StageConfig,
        context: TrainingContext,
        problems: Sequence[Problem],
        rollouts: RolloutRuntime | None,
        earlier_steps: int,
        evaluate: Callable[[int], float] | None = None,
    ) -> None:
        """`earlier_steps` is the trainer's step count at which this stage begins."""
        super().__init__(context, step_offset=context.first_step - earlier_steps)
        self.pending_groups: list[list[Episode]] = []
        """Groups that are unfinished or not yet trained on, the oldest first."""
        self._stage, self._rollouts, self._seed, self._earlier_steps = stage, rollouts, context.seed, earlier_steps
        self._context, self._problems, self._evaluate = context, problems, evaluate
        self._schedule = training_rows.problem_schedule(problems, stage.problems_per_step, stage.steps, context.seed)
        # With roc_mode=off all samples are kept, so every rule gives the same selection.
        mode = "paper" if stage.roc_mode == "off" else stage.roc_mode
        self._class_rule: dict[str, Any] = {"mode": mode, "correct_above": context.correct_above}
        self._weight_version = self._synced_step = -1
        self._trained: list[Episode] = []
        """The episodes in the loss of the current step."""
        self._next_groups: Future[_Collected] | None = None
        """The groups of the next step, which are sampled while this step is optimized. None without
        `one_step_off_policy`."""
        self._step_metrics: dict[str, float] = {}
        self._missing_trl_metrics: set[str] = set()
        self._step_started_at = self._rollout_ended_at = perf_counter()

    def sync_weights(self) -> None:
        """Give the engines the current weights. TRL calls this on every rank, once per step and before `rollout`."""
        waiting_since = perf_counter()
        if self._stage.one_step_off_policy:
            if self._rollouts and self._next_groups:
                self._rollouts.loop_thread.result(self._next_groups)  # wait: engines load no weights while they sample
            wait_for_ranks(self._context.hardware)
        started_at = perf_counter()
        if self._synced_step != self.trainer.state.global_step:  # equal if an evaluation has just synced these weights
            self._send_weights(plain_weights(self.trainer, getattr(torch, self._context.dtype)))
        self._step_metrics = {
            "weight_version": self._weight_version,
            "rollout_wait_s": started_at - waiting_since,
            "weight_sync_s": perf_counter() - started_at,
        }

    def _send_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the engines `weights`, the current ones of the model. All ranks call this together."""
        self._synced_step = self.trainer.state.global_step
        self._weight_version = self.step_offset + self._synced_step
        if self._context.engines_sleep:
            torch.cuda.empty_cache()  # an engine takes the memory that this rank does not use
            wait_for_ranks(self._context.hardware)
        if self._rollouts:
            self._rollouts.loop_thread.run(self._rollouts.pool.sync_weights, weights, self._weight_version)

    def rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Return the rows of this rank, one for each of `prompts` (TRL's `rollout_func`)."""
        step_rows = self._collect_step(self._rollouts) if self._rollouts else []
        rows = training_rows.scatter(step_rows, len(prompts), self._stage.kept_per_problem)
        self._rollout_ended_at = perf_counter()
        return {name: [getattr(row, name) for row in rows] for name in training_rows.TrainingRow._fields}

    def write_entropies(self, rows: list[RowEntropies]) -> None:
        """Write the entropies of all ranks' rows. TRL shuffles the rows, so the row of an episode is found by its
        tokens."""
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
        # For a step without a token in the loss TRL logs 0. This would look like perfect agreement, so it becomes NaN.
        has_loss = metrics["episodes_in_loss"] > 0
        return {
            **super().metrics_from_logs(logs),
            **metrics,
            **{name: self._logged(key, logs) if has_loss else nan for name, key in TRL_METRICS.items()},
            "step_s": step_s,
            "optimize_s": optimize_s,
            "overhead_cpu_s": rest_s + metrics["overhead_cpu_s"],
            "overhead_s": rest_s + metrics["overhead_s"],
        }

    def _logged(self, key: str, logs: Mapping[str, float]) -> float:
        """Return TRL's metric `key`. If the installed version of TRL does not log it, return NaN, and warn once."""
        if key not in logs and key not in self._missing_trl_metrics:
            self._missing_trl_metrics.add(key)
            logger.warning("TRL does not log %s (it logs %s); the metric that uses it is NaN", key, ", ".join(logs))
        return logs.get(key, nan)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A checkpoint of the previous stage has restored the settings of that stage. Set those of this stage again.
        state.save_steps = args.save_steps
        groups = kwargs["optimizer"].param_groups
        for group, weight_decay in zip(groups, (args.weight_decay, 0.0), strict=False):  # biases have no decay
            group["weight_decay"] = weight_decay
            group["betas"], group["eps"] = (args.adam_beta1, args.adam_beta2), args.adam_epsilon
        kwargs["lr_scheduler"].base_lrs = [args.learning_rate for _ in kwargs["lr_scheduler"].base_lrs]
        self._step_started_at = perf_counter()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Skip the update of a step without a token in the loss, by removing its gradients. An optimizer does not
        change weights that have no gradients. With gradients of 0, AdamW would move the weights by the momentum of
        earlier steps, and decay them."""
        is_skipped = not self.trainer.tokens_in_loss
        self._step_metrics["skipped_update"] = int(is_skipped)
        if is_skipped:
            kwargs["optimizer"].zero_grad(set_to_none=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Evaluate after every `eval_steps` steps, and keep the model if it is the best so far. The times of the step
        do not include this.

        If the next step is sampled at the same time, its episodes are finished first, since the event loop runs one job
        at a time.
        """
        steps, every = state.global_step - self._earlier_steps, self._context.eval_steps
        if not every or (steps % every and steps < self._stage.steps):
            return
        # The best model is saved with the weights as they are trained. So they are gathered without rounding.
        started_at, weights = perf_counter(), plain_weights(self.trainer)
        self._send_weights(weights)
        if self._evaluate:
            accuracy = self._step_metrics["eval_accuracy"] = self._evaluate(steps)
            self._context.keep_if_best(self.trainer, weights, self.step_offset + state.global_step, accuracy)
        wait_for_ranks(self._context.hardware)
        control.should_save = True
        eval_s = self._step_metrics["eval_s"] = perf_counter() - started_at
        self._step_started_at += eval_s
        self._rollout_ended_at += eval_s

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.pending_groups:
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", PENDING_GROUPS)
            path.write_bytes(EPISODE_GROUPS.dump_json(self.pending_groups))
        super().on_save(args, state, control, **kwargs)

    def _collect_step(self, rollouts: RolloutRuntime) -> list[training_rows.TrainingRow]:
        """Collect a step's groups, select episodes, write all of them down, and return the selected rows."""
        step = self.step_offset + self.trainer.state.global_step + 1
        groups = self._collect_groups(rollouts, step)
        selected = [self._select(group, step) for group in groups]
        for _ in range(self._stage.dynamic_sampling_rounds):
            missing = self._stage.problems_per_step - sum(map(roc.has_signal, groups, selected))
            groups += self._sample_replacements(rollouts, groups, missing, step)
            selected += [self._select(group, step) for group in groups[len(selected) :]]
        if rollouts.sleep:
            rollouts.loop_thread.run(rollouts.sleep)
        # Train on the groups with a signal. If they are too few, add the first ones of the groups without a signal.
        ranked = sorted(range(len(groups)), key=lambda i: not roc.has_signal(groups[i], selected[i]))
        for number in ranked[self._stage.problems_per_step :]:
            selected[number] = []
        above = self._context.correct_above
        reasons = [roc.selection_reasons(*pair, correct_above=above) for pair in zip(groups, selected, strict=True)]
        self.run_folder.write_episodes(step, self._stage.name, groups, selected, reasons)
        episodes = [episode for group in groups for episode in group]
        unavailable = [episode for episode in episodes if metrics.is_unavailable(episode)]
        if len(unavailable) > min(self._stage.max_unavailable_share * len(episodes), len(episodes) - 1):
            cause = next((episode.error for episode in unavailable if episode.error), "an answer could not be checked")
            raise NoRewardsError(
                f"step {step}: {len(unavailable)} of {len(episodes)} episodes have no reward, since infrastructure or "
                f"a reward failed; at most {self._stage.max_unavailable_share:.0%} may (max_unavailable_share). The "
                f"first failure: {cause}. Mend it and run the same command again: it continues"
            )
        in_loss = list(map(training_rows.in_loss_indices, groups, selected))
        self._step_metrics |= metrics.step_metrics(groups, in_loss, above) | self._optional_metrics(groups)
        for warning in metrics.warnings(self._step_metrics):
            logger.warning("step %d: %s", step, warning)
        self._trained = [group[index] for group, used in zip(groups, in_loss, strict=True) for index in used]
        placeholder_id = self.trainer.processing_class.eos_token_id
        return [
            training_rows.training_row(group[index], is_in_loss=index in used, placeholder_id=placeholder_id)
            for group, indices, used in zip(groups, selected, in_loss, strict=True)
            for index in indices
        ]

    def _optional_metrics(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """Return the metrics of the settings that the stage uses."""
        stage, values = self._stage, dict[str, float]()
        episodes = [episode for group in groups for episode in group]
        if stage.cancel_stragglers:
            values |= metrics.cancellation_metrics(episodes)
        if stage.partial_rollouts:
            values["pending_groups"] = len(self.pending_groups)
        if stage.partial_rollouts or stage.one_step_off_policy:
            values |= metrics.staleness_metrics(episodes, self._weight_version)
        if stage.dynamic_sampling_rounds:
            values["replacement_groups"] = len(groups) - stage.problems_per_step
        return values

    def _collect_groups(self, rollouts: RolloutRuntime, step: int) -> list[list[Episode]]:
        """Return `problems_per_step` complete groups. The other started groups become pending. With
        `one_step_off_policy`, also start to sample the groups of the next step."""
        stage = self._stage
        started, results, _ = self._wait(rollouts, self._next_groups or self._start(rollouts, step))
        is_last = step == self.step_offset + self._earlier_steps + stage.steps
        self._next_groups = self._start(rollouts, step + 1) if stage.one_step_off_policy and not is_last else None
        complete = ((number, group) for number, group in enumerate(results) if group)
        taken = dict(islice(complete, stage.problems_per_step))
        self.pending_groups = [group for number, group in enumerate(started) if number not in taken]
        for group in self.pending_groups:
            for episode in group:
                episode.steps_carried += 1
        return list(taken.values())

    def _start(
        self, rollouts: RolloutRuntime, step: int, replacements: list[list[Episode]] | None = None
    ) -> Future[_Collected]:
        """Start to sample the groups of `step` or, if given, `replacements`."""
        stage, collector = self._stage, rollouts.collector
        steps_done = step - 1 - self.step_offset - self._earlier_steps
        started = replacements or self.pending_groups + self._new_groups(steps_done)
        # The first groups are the oldest. Groups that were carried over often enough must become complete in this step.
        # Pending groups were carried over once at least, so the smallest useful limit is 1.
        must_complete = sum(group[0].steps_carried >= max(1, stage.max_staleness_steps) for group in started)
        is_decided = partial(roc.is_group_decided, num_kept=stage.kept_per_problem, **self._class_rule)

        async def collect() -> _Collected:
            started_at = perf_counter()
            results = await collector.collect_groups(
                started,
                limits=stage,
                seed=random.Random(f"{self._seed}/{step}").getrandbits(63),
                min_complete=min(stage.problems_per_step, len(started)),
                must_complete=must_complete,
                is_decided=is_decided if stage.cancel_stragglers else None,
            )
            measured = {name: getattr(collector, name) for name in ("overhead_cpu_s", "overhead_s")}
            return _Collected(started, results, measured | {"rollout_s": perf_counter() - started_at})

        return rollouts.loop_thread.start(collect)

    def _wait(self, rollouts: RolloutRuntime, collected: Future[_Collected]) -> _Collected:
        """Wait for sampled groups. Add their times, and the time of this wait, to the step's metrics."""
        waiting_since = perf_counter()
        groups = rollouts.loop_thread.result(collected)
        for name, value in (groups.measured | {"rollout_wait_s": perf_counter() - waiting_since}).items():
            self._step_metrics[name] = self._step_metrics.get(name, 0) + value
        return groups

    def _sample_replacements(
        self, rollouts: RolloutRuntime, groups: Sequence[Sequence[Episode]], count: int, step: int
    ) -> list[list[Episode]]:
        """Return the groups of `count` further problems, or of all unused problems if they are fewer (DAPO's dynamic
        sampling, arXiv 2503.14476, 3.2).

        Which problems these are follows from the seed, the step and the rewards. No problem is sampled twice in a step.
        """
        used = {group[0].problem.id for group in (*groups, *self.pending_groups)}
        unused = [problem for problem in self._problems if problem.id not in used]
        chosen = random.Random(f"{self._seed}/{step}/{len(groups)}").sample(unused, min(count, len(unused)))
        started = [[Episode(problem, i) for i in range(self._stage.samples_per_problem)] for problem in chosen]
        return list(filter(None, self._wait(rollouts, self._start(rollouts, step, started)).results)) if started else []

    def _new_groups(self, steps_done: int) -> list[list[Episode]]:
        """Return the groups to start after `steps_done` steps. The last steps start only the groups that they need.

        A problem may have an earlier group in the same step. The later group then continues the sample numbers of the
        earlier one, so that no two episodes are sampled with equal seeds.
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

    def _select(self, group: Sequence[Episode], step: int) -> list[int]:
        """Return the indices that RoC selects from the episodes that were not cancelled."""
        finished = [i for i, episode in enumerate(group) if episode.stop_reason is not StopReason.CANCELLED]
        rng = random.Random(f"{self._seed}/{step}/{group[0].problem.id}")
        candidates = [group[i] for i in finished]
        selected = roc.resample_on_correct(candidates, self._stage.kept_per_problem, rng=rng, **self._class_rule)
        return [finished[index] for index in selected]
