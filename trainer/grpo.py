"""GRPO-RoC on TRL's `GRPOTrainer`: one stage of reinforcement learning, a model's folder in, a model's folder out.

TRL owns the loss, the optimiser and the checkpoints. What it trains on comes from here, through `rollout_func` and
three attributes (`vllm_generation`, `use_vllm`, `_last_loaded_step`) and nothing else of its insides.

Invariants:
- Engines sample a step with the weights that the step starts from: TRL asks for one sync before each rollout.
- TRL passes G contiguous copies of a prompt and gets as many rows: the G that `trainer.roc` keeps of the 2G sampled.
- A row is in the loss, and in its denominator, only if it has a reward and its group's kept rewards differ. Any other
  row has a mask of zeros; without a reward its advantage is 0 as well.
- What a step samples follows from (weights, seed, step), and the order of problems from the seed: a resumed run repeats
  what a kill has undone.
- Only the first rank meets engines and tools; every rank gets its own rows from it.

The loss (rStar2-Agent, arXiv 2508.20722, 2.2): token mean over the batch, ratios clipped to [1 - epsilon_low,
1 + epsilon_high], no KL and no entropy term, advantages from the group's kept rewards. What engine and trainer disagree
on is corrected by importance sampling, each token's ratio cut at 2.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import AutoTokenizer, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from trainer import metrics, roc
from trainer.background import Background
from trainer.config import ConfigError, StageConfig
from trainer.pool import Pool
from trainer.progress import Progress, Trained, arguments, finish, latest, quiet, ranks, steps_of
from trainer.record import RunFolder
from trainer.rollout import Collector, EpisodeLimits
from trainer.trajectory import Episode, Problem

RATIO_CUT = 2.0
"""TRL's default masks whole sequences, which zeroes most trajectories of 8K to 12K tokens."""


class Outage(Exception):
    """Not one episode of a step has a verdict. Going on would count steps in which nothing can be learnt."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What samples: objects that live in `background`'s loop."""

    background: Background
    collector: Collector
    pool: Pool


class Row(NamedTuple):
    """One completion, as TRL names its parts. `roc_reward` None is a row without a verdict."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    roc_reward: float | None


@quiet()
def train_stage(
    stage: StageConfig,
    *,
    model: Path,
    problems: Sequence[Problem],
    out: Path,
    record: RunFolder,
    rollouts: Rollouts | None,
    seed: int,
    first_step: int = 0,
    keep_optimizer: Path | None = None,
    dtype: str = "float32",
    is_sharded: bool = False,
) -> Trained:
    """Train `model`'s folder for `stage.steps` steps into `out`/model, from `out`'s newest whole checkpoint if any.

    `rollouts` is None on every rank but the first. `first_step` steps of the run came before; `keep_optimizer` is the
    checkpoint of the stage before, whose optimiser goes on, its warm-up over. `dtype` is what the passes compute in.

    Raises `ConfigError` for settings that do not fit together, `Outage`, and what engines and tools raise.
    """
    world = ranks().num_processes
    passes, rest = divmod(stage.prompts * stage.keep, stage.micro_batch * world)
    if rest:
        raise ConfigError(
            f"stages.{stage.name}: prompts={stage.prompts} x keep={stage.keep} rows on {world} ranks: expected a "
            f"multiple of ranks x micro_batch={stage.micro_batch}; change one of them"
        )
    start = latest(out / "checkpoints") or keep_optimizer
    before = steps_of(keep_optimizer) if keep_optimizer else 0
    done = steps_of(start) - before if start else 0
    if ranks().is_main_process:
        record.rewind(first_step + done)
    bridge = _Bridge(stage, problems, rollouts, seed, record=record, offset=first_step - before)
    args = GRPOConfig(
        **arguments(
            out,
            seed=seed,
            dtype=dtype,
            save_steps=stage.save_steps,
            is_sharded=is_sharded,
            is_checkpointing=stage.is_checkpointing,
        ),
        max_steps=before + stage.steps,
        # The batch: TRL repeats each prompt `keep` times and splits the step's rows into micro-batches.
        num_generations=stage.keep,
        per_device_train_batch_size=stage.micro_batch,
        gradient_accumulation_steps=passes,
        max_completion_length=stage.max_tokens,
        shuffle_dataset=False,
        # The loss.
        beta=0.0,
        epsilon=stage.epsilon_low,
        epsilon_high=stage.epsilon_high,
        loss_type="dapo",
        scale_rewards="group",
        temperature=stage.temperature,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=RATIO_CUT,
        # The optimiser.
        learning_rate=stage.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=stage.warmup_steps,
        max_grad_norm=stage.max_grad_norm,
    )
    # Rows for steps that an earlier stage took are never reached: a resumed trainer skips as many.
    order = ["" for _ in range(before * stage.prompts)] + prompts_in_order(problems, stage.prompts, stage.steps, seed)
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=_roc_reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": order}),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[bridge],
        rollout_func=bridge.rollout,
    )
    trainer.vllm_generation, trainer.use_vllm, trainer._last_loaded_step = bridge, True, -1
    bridge.trainer = trainer
    return finish(trainer, out, start)


def prompts_in_order(problems: Sequence[Problem], per_step: int, steps: int, seed: int) -> list[str]:
    """The ids of `per_step` problems for each of `steps` steps: each time through, all in a new order.

    No step has a problem twice: what is left of a time through and does not fill a step is left out.
    """
    ids = [problem.id for problem in problems]
    if len(set(ids)) != len(ids) or len(ids) < per_step:
        raise ConfigError(
            f"expected at least prompts={per_step} problems with an id each, got {len(ids)} with {len(set(ids))}; "
            "lower prompts, or give more problems"
        )
    order: list[str] = []
    epoch = 0
    while len(order) < per_step * steps:
        random.Random(f"{seed}/{epoch}").shuffle(ids)
        order += ids[: len(ids) // per_step * per_step]
        epoch += 1
    return order[: per_step * steps]


class _Bridge(Progress):
    """Where TRL's calls arrive: weights out (`sync_weights`), rows in (`rollout`), and what `Progress` writes."""

    trainer: Any

    def __init__(
        self, stage: StageConfig, problems: Sequence[Problem], rollouts: Rollouts | None, seed: int, **of_progress: Any
    ) -> None:
        super().__init__(stage.name, **of_progress)
        self._stage, self._rollouts, self._seed = stage, rollouts, seed
        self._problems = {problem.id: problem for problem in problems}
        self._version = 0
        self._sampled: dict[str, float] = {}
        self._own_s = 0.0
        self._since = self._rolled_out = perf_counter()

    def sync_weights(self) -> None:
        """TRL calls it on every rank, once per step and before `rollout`."""
        began = perf_counter()
        weights = self.trainer.accelerator.get_state_dict(self.trainer.model_wrapped)  # gathered where it is sharded
        if self._rollouts:
            self._version = self.offset + self.trainer.state.global_step  # goes on where a killed process was
            self._rollouts.background.run(self._rollouts.pool.sync, weights, self._version)
        self._sampled = {"seconds_sync": perf_counter() - began}

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: this rank's prompts, problem ids with G copies in line over the ranks, to its rows."""
        ids = gather_object(list(prompts))[:: self._stage.keep]
        rows = self._step(ids, self._rollouts) if self._rollouts else []
        mine = _scatter(rows, len(prompts))
        self._rolled_out = perf_counter()
        return {name: [getattr(row, name) for row in mine] for name in Row._fields}

    def numbers(self, logs: Mapping[str, float]) -> dict[str, float]:
        now = perf_counter()
        took, optimise = now - self._since, now - self._rolled_out
        waited = self._sampled["seconds_sync"] + self._sampled["seconds_rollout"] + optimise
        self._since = now
        return {
            **super().numbers(logs),
            **self._sampled,
            # TRL's 0 for a step without a token in the loss would read as perfect agreement.
            "kl_sampler": logs["sampling/sampling_logp_difference/mean"] if self._sampled["kept"] else float("nan"),
            "weight_version": self._version,
            "seconds_step": took,
            "seconds_optimise": optimise,
            "seconds_own": took - waited + self._own_s,
        }

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A checkpoint of the stage before brings that stage's settings, which the trainer takes over.
        state.save_steps = args.save_steps
        optimizer, schedule = kwargs["optimizer"], kwargs["lr_scheduler"]
        schedule.base_lrs = [args.learning_rate for _ in schedule.base_lrs]
        for group, factor in zip(optimizer.param_groups, schedule.lr_lambdas, strict=True):
            group["initial_lr"] = args.learning_rate
            group["lr"] = args.learning_rate * factor(schedule.last_epoch)
        self._since = perf_counter()

    def _step(self, ids: Sequence[str], rollouts: Rollouts) -> list[Row]:
        """Sample, select and write down one step."""
        stage = self._stage
        step = self.offset + self.trainer.state.global_step + 1
        began = perf_counter()
        groups = rollouts.background.run(
            rollouts.collector.collect,
            [self._problems[id] for id in ids],
            stage.samples,
            limits=EpisodeLimits(stage.max_tokens, stage.max_turns, stage.tool_chars),
            temperature=stage.temperature,
            top_p=stage.top_p,
            seed=random.Random(f"{self._seed}/{step}").getrandbits(63),
        )
        self._sampled["seconds_rollout"] = perf_counter() - began
        self._own_s = rollouts.collector.own_s
        kept = [self._select(group, step) for group in groups]
        used = [_used(group, some) for group, some in zip(groups, kept, strict=True)]
        why = [roc.explain(group, some) for group, some in zip(groups, kept, strict=True)]
        self.record.write_episodes(step, stage.name, groups, kept, why)
        if all(episode.reward is None for group in groups for episode in group):
            raise Outage(
                f"step {step}: none of {sum(map(len, groups))} episodes has a verdict ({groups[0][0].error} for the "
                "first); once that is mended, the same command goes on"
            )
        self._sampled |= metrics.of_step(groups, used)
        filler = self.trainer.processing_class.eos_token_id
        return [
            _row(group[index], is_used=index in use, filler=filler)
            for group, some, use in zip(groups, kept, used, strict=True)
            for index in some
        ]

    def _select(self, group: Sequence[Episode], step: int) -> list[int]:
        if self._stage.select == "all":
            return list(range(len(group)))
        mode: roc.Mode = "released" if self._stage.select == "released" else "paper"
        rng = random.Random(f"{self._seed}/{step}/{group[0].problem.id}")
        return roc.resample_on_correct(group, self._stage.keep, mode=mode, rng=rng)


def _used(group: Sequence[Episode], kept: Sequence[int]) -> list[int]:
    """Which of the kept are in the loss."""
    return [index for index in kept if group[index].reward is not None] if roc.has_signal(group, kept) else []


def _row(episode: Episode, *, is_used: bool, filler: int) -> Row:
    """TRL takes no empty completion: an episode that failed before its first token is one `filler`, which is masked."""
    ids = list(episode.ids) or [filler]
    logprobs = list(episode.logprobs) or [0.0]
    mask = list(episode.mask) if is_used and episode.ids else [0] * len(ids)
    return Row(list(episode.prompt_ids), ids, logprobs, mask, episode.reward)


def _roc_reward(roc_reward: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: the rewards came with the rows."""
    return roc_reward


def _scatter(rows: Sequence[Row], count: int) -> Sequence[Row]:
    """`count` rows for each rank, of those that the first rank has."""
    if ranks().num_processes == 1:
        return rows
    shares = [rows[start : start + count] for start in range(0, len(rows), count)]
    mine: list[Sequence[Row]] = [()]
    torch.distributed.scatter_object_list(mine, shares or None, src=0)
    return mine[0]
