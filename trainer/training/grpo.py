"""GRPO-RoC: one RL stage, from a model folder to a model folder. `RocTrainer._run_epoch` is the loop.

RoC (Resample on Correct) samples 2G episodes per problem and selects G of them for training.

TRL and transformers prepare the model, the optimizer and the checkpoints, for one process or for several, sharded or
not. The loop, the rollouts and the loss (`trainer.training.token_budget`) are this project's.

Invariants:
- Engines sample a step with the weights that the step starts from. With `one_step_off_policy`, they sample it with the
  weights that the previous step started from.
- A step without a token in the loss leaves the weights and the optimizer states as they are.
- Only the first rank uses engines and tools; the other ranks receive their rows from it.

Loss (rStar2-Agent, arXiv 2508.20722, 2.2): token mean over the batch, no KL and no entropy term, advantages from the
group's selected rewards. A batch has one optimizer step, so the ratio to the weights before the step is 1, and the
paper's clip of this ratio would never act: there is none. Importance sampling corrects differences between engine and
trainer. The importance ratio of each token is capped (`trainer.training.token_budget`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from math import nan
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig

from trainer.config import ConfigError, StageConfig, check_options
from trainer.episodes.episode import Problem
from trainer.rollout.runtime import RolloutRuntime
from trainer.training import training_rows
from trainer.training.adapters import plain_weights
from trainer.training.callback import mark_checkpoint, set_learning_rate, write_metrics
from trainer.training.context import (
    RankArguments,
    TrainedModel,
    TrainingContext,
    checkpoint_step,
    model_errors_as_config_errors,
    wait_for_ranks,
)
from trainer.training.step_sampler import StepSampler
from trainer.training.token_budget import RowEntropies, TokenBudgetTrainer

STAGE_OPTIONS = frozenset({
    "adam_beta1", "adam_beta2", "adam_epsilon", "cast_lm_head_to_fp32", "ddp_bucket_cap_mb", "disable_dropout",
    "full_determinism", "gradient_checkpointing_kwargs", "tf32", "weight_decay",
})  # fmt: skip
"""The arguments of GRPOConfig that `[stages.NAME.grpo]` may have. The trainer sets the others itself, or they have no
effect or a wrong one: they belong to TRL's loop, sampling, loss or evaluation, which are not used, or they wrap the
model in a way (such as deepspeed) that steps after each pass."""


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
    if not hasattr(TokenBudgetTrainer, "_run_epoch"):  # the loop of `RocTrainer` would never be called
        raise ConfigError(
            f"transformers {transformers.__version__}: expected a version whose Trainer has the method `_run_epoch`, "
            "such as 5.24; install one of them"
        )
    if context.peft:
        optimizer_checkpoint = None
    checkpoint = context.latest_checkpoint() or optimizer_checkpoint
    earlier_steps = checkpoint_step(optimizer_checkpoint) if optimizer_checkpoint else 0
    steps_done = checkpoint_step(checkpoint) - earlier_steps if checkpoint else 0
    sampler = StepSampler(stage, context, problems, rollouts) if rollouts else None
    check_grpo_options(stage)
    rows = stage.problems_per_step * stage.kept_per_problem
    arguments = _GrpoArguments(
        **context.trl_arguments(stage, rows=rows),
        max_steps=earlier_steps + stage.steps,
        num_generations=stage.kept_per_problem,
        max_completion_length=stage.max_response_tokens,
        temperature=stage.temperature,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=stage.warmup_steps,
        max_grad_norm=stage.max_grad_norm,
        **stage.grpo,
    )
    context.truncate_run(steps_done)
    with model_errors_as_config_errors(context.model):
        trainer = RocTrainer(
            stage,
            context,
            sampler,
            earlier_steps,
            evaluate,
            model=context.load_model(),
            args=arguments,
            processing_class=AutoTokenizer.from_pretrained(context.model),
            peft_config=context.peft_config(),
            # TRL asks for prompts and for a reward function. It uses the number of prompts only.
            train_dataset=Dataset.from_dict({"prompt": [""] * stage.problems_per_step * arguments.max_steps}),
            reward_funcs=lambda **_: [],
        )
    return context.train(trainer, checkpoint)


def check_grpo_options(stage: StageConfig) -> None:
    """Check the arguments in `[stages.NAME.grpo]`. Raise `ConfigError` for an argument that GRPOConfig does not have,
    and for one that is not in `STAGE_OPTIONS`."""
    others = {argument.name for argument in fields(GRPOConfig)} - STAGE_OPTIONS
    check_options(f"stages.{stage.name}.grpo", stage.grpo, others, STAGE_OPTIONS, "argument of TRL's GRPOConfig")


class _GrpoArguments(RankArguments, GRPOConfig):  # type: ignore[misc]
    """The arguments of TRL, with the changes that `RankArguments` makes for each rank."""


class RocTrainer(TokenBudgetTrainer):
    """Trains a stage. On ranks other than the first, `sampler` is None."""

    def __init__(
        self,
        stage: StageConfig,
        context: TrainingContext,
        sampler: StepSampler | None,
        earlier_steps: int,
        evaluate: Callable[[int], float] | None,
        **options: Any,
    ) -> None:
        """`earlier_steps`: the number of optimizer steps before the stage, in `state.global_step`."""
        on_entropies = self._write_entropies if context.run_folder.save_entropies else None
        super().__init__(micro_batch_tokens=stage.micro_batch_tokens, on_entropies=on_entropies, **options)
        self._stage, self._context, self._sampler, self._evaluate_model = stage, context, sampler, evaluate
        self._earlier_steps, self._synced_step = earlier_steps, -1
        self._placeholder_id = self.processing_class.eos_token_id

    # --- the loop ---

    def _run_epoch(self, model: Any, resume_from_checkpoint: str | None = None, **_: Any) -> None:
        """Train all steps that are left. transformers calls this method, after it has wrapped `model` for the ranks,
        has made the optimizer, and has loaded the checkpoint."""
        self._restore(resume_from_checkpoint)
        self._step_started_at = perf_counter()
        while self.state.global_step < self.state.max_steps:
            step, rows = self._trained_steps + 1, list[training_rows.TrainingRow]()
            times = self._sync_weights()  # the engines get the weights that the step starts from
            if self._sampler:  # on the first rank
                groups = self._sampler.rollout(step)  # all episodes of each problem
                selected = self._sampler.select(groups, step)  # those that RoC keeps
                rows = self._sampler.record(groups, selected, step)
            loss = self._backward(model, rows)
            update = self._update(model, loss)
            evaluation = self._evaluate_step()
            self._write_metrics({**update, **times, **evaluation})
            self._save_step(model, is_due=bool(evaluation))

    # --- its steps ---

    @property
    def _trained_steps(self) -> int:
        """The number of training steps of the run in the current weights. It is their version."""
        return int(self._context.first_step + self.state.global_step - self._earlier_steps)

    def _restore(self, checkpoint: str | None) -> None:
        """Set what a checkpoint of this stage or of the previous one has changed."""
        if checkpoint:
            self._load_rng_state(checkpoint)
        groups, args = self.optimizer.param_groups, self.args
        for group, weight_decay in zip(groups, (args.weight_decay, 0.0), strict=False):  # biases have no decay
            group["weight_decay"] = weight_decay
            group["betas"], group["eps"] = (args.adam_beta1, args.adam_beta2), args.adam_epsilon
        self.lr_scheduler.base_lrs = [args.learning_rate for _ in self.lr_scheduler.base_lrs]

    def _sync_weights(self) -> dict[str, float]:
        """Give the engines the current weights. Return the version and the seconds that this took."""
        waiting_since = perf_counter()
        if self._stage.one_step_off_policy:  # engines load no weights while they sample
            if self._sampler:
                self._sampler.wait()
            wait_for_ranks(self._context.hardware)
        started_at = perf_counter()
        if self._synced_step != self.state.global_step:  # equal if an evaluation has just synced these weights
            self._send_weights(plain_weights(self, getattr(torch, self._context.dtype)))
        return {
            "weight_version": self._trained_steps,
            "rollout_wait_s": started_at - waiting_since,
            "weight_sync_s": perf_counter() - started_at,
        }

    def _send_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the engines `weights`, the current ones of the model. All ranks call this together."""
        self._synced_step = self.state.global_step
        if self._context.engines_sleep:
            torch.cuda.empty_cache()  # an engine takes the memory that this rank does not use
            wait_for_ranks(self._context.hardware)
        if self._sampler:
            self._sampler.sync_weights(weights, self._trained_steps)

    def _backward(self, model: Any, rows: Sequence[training_rows.TrainingRow]) -> float:
        """Compute the gradients of the step. Return its loss, the mean over all ranks."""
        model.train()
        own_rows = training_rows.scatter(rows, self.accelerator.num_processes)
        self._rollout_ended_at = perf_counter()
        batch = training_rows.to_batch(own_rows, self._placeholder_id, self.accelerator.device)
        batch["num_items_in_batch"] = self.accelerator.gather(batch["tool_mask"].sum()).sum()
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, batch)
        self.accelerator.backward(loss)
        return float(self.accelerator.gather(loss.detach()).mean())

    def _update(self, model: Any, loss: float) -> dict[str, float]:
        """Change the weights by the gradients. Return the metrics of the update.

        A step without a token in the loss has no gradients, so the optimizer does not change its weights. With
        gradients of 0, AdamW would move the weights by the momentum of earlier steps, and decay them.
        """
        learning_rate = set_learning_rate(self.optimizer, self.lr_scheduler)
        norm = self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm).item()
        if not self.tokens_in_loss:
            self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.step()
        self.lr_scheduler.step()
        model.zero_grad()
        self.state.global_step += 1
        # Without a token in the loss, the means are 0. This would look like perfect agreement, so they become NaN.
        means = self.loss_means if self.tokens_in_loss else dict.fromkeys(self.loss_means, nan)
        update = {"learning_rate": learning_rate, "loss": loss, "grad_norm": norm}
        return {**update, **means, "skipped_update": float(not self.tokens_in_loss)}

    def _evaluate_step(self) -> dict[str, float]:
        """Evaluate after every `eval_steps` steps, and keep the model if it is the best so far. Return the metrics of
        the evaluation; empty if there was none. The times of the step do not include this.

        If the next step is sampled at the same time, its episodes are finished first, since the event loop runs one job
        at a time.
        """
        steps, every = self.state.global_step - self._earlier_steps, self._context.eval_steps
        if not every or (steps % every and steps < self._stage.steps):
            return {}
        # The best model is saved with the weights as they are trained. So they are gathered without rounding.
        started_at, weights, found = perf_counter(), plain_weights(self), dict[str, float]()
        self._send_weights(weights)
        if self._evaluate_model:
            found["eval_accuracy"] = self._evaluate_model(steps)
            self._context.keep_if_best(self, weights, self._trained_steps, found["eval_accuracy"])
        wait_for_ranks(self._context.hardware)
        found["eval_s"] = perf_counter() - started_at
        self._step_started_at += found["eval_s"]
        self._rollout_ended_at += found["eval_s"]
        return found

    def _write_metrics(self, row: dict[str, float]) -> None:
        """Add the metrics of the rollout and the times to the row, and write it."""
        now = perf_counter()
        step_s, optimize_s = now - self._step_started_at, now - self._rollout_ended_at
        self._step_started_at = now
        if self._sampler:
            found = self._sampler.metrics
            row["rollout_wait_s"] += found.pop("rollout_wait_s")
            rest_s = step_s - row["weight_sync_s"] - row["rollout_wait_s"] - optimize_s
            for name in ("overhead_cpu_s", "overhead_s"):
                found[name] += rest_s
            row |= found
        write_metrics(self._context, self._trained_steps, {**row, "step_s": step_s, "optimize_s": optimize_s})

    def _save_step(self, model: Any, is_due: bool) -> None:
        """Write a checkpoint every `save_steps` steps, after an evaluation and after the last step."""
        step = self.state.global_step
        if is_due or step % self.args.save_steps == 0 or step == self.state.max_steps:
            self._save_checkpoint(model, None)
            mark_checkpoint(self._context, step)

    def _write_entropies(self, rows: list[RowEntropies]) -> None:
        """Write the entropies of all ranks' rows. The rows are divided among the ranks, so the row of an episode is
        found by its tokens."""
        gathered = gather_object(rows)
        if self._sampler:
            step = self._trained_steps + 1
            entropies = {(tuple(prompt), tuple(ids)): values for prompt, ids, values in gathered}
            keys = [(tuple(episode.prompt_ids), tuple(episode.response_ids)) for episode in self._sampler.trained]
            self._context.run_folder.write_entropies(
                step,
                (
                    {"step": step, "problem": episode.problem.id, "sample": episode.sample}
                    | {"response_ids": episode.response_ids, "entropies": entropies[key]}
                    for episode, key in zip(self._sampler.trained, keys, strict=True)
                    if key in entropies
                ),
            )
