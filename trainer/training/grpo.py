"""GRPO-RoC on TRL's `GRPOTrainer`: one stage of reinforcement learning, a model's folder in, a model's folder out.

TRL owns the loss, the optimiser and the checkpoints. What it trains on comes from here, through `rollout_func` and
three attributes (`vllm_generation`, `use_vllm`, `_last_loaded_step`): nothing else of TRL's insides, and of those of
transformers one name in `trainer.training.context`.

Invariants:
- Engines sample a step with the weights that the step starts from: TRL asks for one sync before each rollout.
- TRL asks for as many rows as a step trains on, and gets G in line for each problem: those that
`trainer.episodes.roc` keeps of
  the 2G sampled. Which problems is said here: each of the stage's order is trained on in one step, as a whole
  group.
- A row is in the loss, and in its denominator, only if it has a reward and its group's kept rewards differ. Any other
  row has a mask of zeros; without a reward its advantage is 0 as well.
- What a step samples follows from (weights, seed, step), and the order of problems from the seed: a resumed run repeats
  what a kill has undone. What goes on from step to step is in each checkpoint.
- Only the first rank meets engines and tools; every rank gets its own rows from it.

The loss (rStar2-Agent, arXiv 2508.20722, 2.2): token mean over the batch, ratios clipped to [1 - epsilon_low,
1 + epsilon_high], no KL and no entropy term, advantages from the group's kept rewards. What engine and trainer disagree
on is corrected by importance sampling, each token's ratio cut at 2.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import nan
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from pydantic import TypeAdapter
from transformers import AutoTokenizer, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from trainer.config import ConfigError, StageConfig
from trainer.engines.pool import EnginePool
from trainer.episodes import metrics, roc
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.rollout.collector import EpisodeCollector
from trainer.rollout.loop_thread import LoopThread
from trainer.training.context import OneGpu, Progress, Trained, Training, latest, ranks, steps_of, usable, waiting_group

logger = logging.getLogger(__name__)

RATIO_CUT = 2.0
"""TRL's default masks whole sequences, which zeroes most trajectories of 8K to 12K tokens."""

OF_SAMPLER = {
    "logprob_diff_mean": "sampling/sampling_logp_difference/mean",
    "importance_ratio_mean": "sampling/importance_sampling_ratio/mean",
}
"""What TRL logs of the tokens in the loss: engine against trainer."""

UNDER_WAY = "under_way.json"
"""In a checkpoint: the groups that go on in the next step."""
GROUPS = TypeAdapter(list[list[Episode]])


class Outage(Exception):
    """Not one episode has a verdict. Going on would count steps in which nothing can be learnt."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What samples: objects that live in `loop_thread`'s loop."""

    loop_thread: LoopThread
    collector: EpisodeCollector
    pool: EnginePool


class Row(NamedTuple):
    """One completion, as TRL names its parts. `roc_reward` None is a row without a verdict."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    roc_reward: float | None


def train_stage(
    stage: StageConfig,
    training: Training,
    *,
    problems: Sequence[Problem],
    rollouts: Rollouts | None,
    keep_optimizer: Path | None = None,
) -> Trained:
    """Train for `stage.steps` steps, from the newest whole checkpoint if there is any.

    `rollouts` is None on every rank but the first. `keep_optimizer` is the checkpoint of the stage before, whose
    optimiser goes on, its warm-up over.

    Raises `ConfigError` for settings that do not fit together, `Outage`, and what engines and tools raise.
    """
    start = latest(training.out / "checkpoints") or keep_optimizer
    before = steps_of(keep_optimizer) if keep_optimizer else 0
    done = steps_of(start) - before if start else 0
    bridge = _Bridge(stage, training, problems, rollouts, before)
    if start and done and (start / UNDER_WAY).exists():
        bridge.under_way = GROUPS.validate_json((start / UNDER_WAY).read_bytes())
    args = _Arguments(
        **training.arguments(stage, rows=stage.prompts * stage.keep),
        max_steps=before + stage.steps,
        # The batch: TRL repeats each prompt `keep` times and splits the step's rows into micro-batches.
        num_generations=stage.keep,
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
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=stage.warmup_steps,
        max_grad_norm=stage.max_grad_norm,
    )
    if ranks(training.hardware).is_main_process:
        training.record.truncate_after(training.first_step + done)
    with usable(training.model):
        trainer = GRPOTrainer(
            model=str(training.model),
            reward_funcs=_roc_reward,
            args=args,
            # `bridge` has the problems.
            train_dataset=Dataset.from_dict({"prompt": [""] * stage.prompts * args.max_steps}),
            processing_class=AutoTokenizer.from_pretrained(training.model),
            callbacks=[bridge],
            rollout_func=bridge.rollout,
        )
    trainer.vllm_generation, trainer.use_vllm, trainer._last_loaded_step = bridge, True, -1
    bridge.trainer = trainer
    return training.run(trainer, start)


def in_order(problems: Sequence[Problem], per_step: int, steps: int, seed: int) -> list[Problem]:
    """`per_step` problems for each of `steps` steps: each time through, all in a new order.

    No step has a problem twice: what is left of a time through and does not fill a step is left out.
    """
    some = list(problems)
    if len({problem.id for problem in some}) < max(len(some), per_step):
        raise ConfigError(
            f"expected at least prompts={per_step} problems with an id each, got {len(some)} with "
            f"{len({problem.id for problem in some})}; lower prompts, or give more problems"
        )
    order: list[Problem] = []
    epoch = 0
    while len(order) < per_step * steps:
        random.Random(f"{seed}/{epoch}").shuffle(some)
        order += some[: len(some) // per_step * per_step]
        epoch += 1
    return order[: per_step * steps]


class _Arguments(OneGpu, GRPOConfig):  # type: ignore[misc]
    """TRL's own, for one GPU."""


class _Bridge(Progress):
    """Where TRL's calls arrive: weights out (`sync_weights`), rows in (`rollout`), and what `Progress` writes."""

    trainer: Any

    def __init__(
        self,
        stage: StageConfig,
        training: Training,
        problems: Sequence[Problem],
        rollouts: Rollouts | None,
        before: int,
    ) -> None:
        super().__init__(training, offset=training.first_step - before)
        self.under_way: list[list[Episode]] = []
        """Groups that are not over or not yet trained on, the oldest first."""
        self._stage, self._rollouts, self._seed, self._before = stage, rollouts, training.seed, before
        self._order = in_order(problems, stage.prompts, stage.steps, training.seed)
        self._version = 0
        self._sampled: dict[str, float] = {}
        self._missing: set[str] = set()
        self._own_s = self._idle_s = 0.0
        self._since = self._rolled_out = perf_counter()

    def sync_weights(self) -> None:
        """TRL calls it on every rank, once per step and before `rollout`."""
        began = perf_counter()
        weights = self.trainer.accelerator.get_state_dict(self.trainer.model_wrapped)  # gathered where it is sharded
        if self._rollouts:
            self._version = self.offset + self.trainer.state.global_step  # goes on where a killed process was
            self._rollouts.loop_thread.run(self._rollouts.pool.sync_weights, weights, self._version)
        self._sampled = {"weight_sync_s": perf_counter() - began}

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`: to as many prompts as this rank has, which say nothing, its rows."""
        mine = _scatter(self._step(self._rollouts) if self._rollouts else [], len(prompts))
        self._rolled_out = perf_counter()
        return {name: [getattr(row, name) for row in mine] for name in Row._fields}

    def numbers(self, logs: Mapping[str, float]) -> dict[str, float]:
        now = perf_counter()
        took, optimise = now - self._since, now - self._rolled_out
        waited = self._sampled["weight_sync_s"] + self._sampled["rollout_s"] + optimise
        self._since = now
        return {
            **super().numbers(logs),
            **self._sampled,
            # TRL's 0 for a step without a token in the loss would read as perfect agreement.
            **{
                name: self._logged(its, logs) if self._sampled["episodes_in_loss"] else nan
                for name, its in OF_SAMPLER.items()
            },
            "weight_version": self._version,
            "step_s": took,
            "optimize_s": optimise,
            "overhead_cpu_s": took - waited + self._own_s,
            "overhead_s": took - waited + self._idle_s,
        }

    def _logged(self, name: str, logs: Mapping[str, float]) -> float:
        """TRL's metric of that name; NaN, and one warning, where the installed version has none."""
        if name not in logs and name not in self._missing:
            self._missing.add(name)
            logger.warning("TRL logs no %s: expected it among %s; what follows from it is NaN", name, ", ".join(logs))
        return logs.get(name, nan)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A checkpoint of the stage before brings that stage's settings, which the trainer takes over.
        state.save_steps = args.save_steps
        kwargs["lr_scheduler"].base_lrs = [args.learning_rate for _ in kwargs["lr_scheduler"].base_lrs]
        self._since = perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.under_way:
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", UNDER_WAY)
            path.write_bytes(GROUPS.dump_json(self.under_way))
        super().on_save(args, state, control, **kwargs)

    def _step(self, rollouts: Rollouts) -> list[Row]:
        """Sample, select and write down one step."""
        stage, done = self._stage, self.trainer.state.global_step - self._before
        step = self.offset + self.trainer.state.global_step + 1
        began = perf_counter()
        asked = self.under_way + self._begun(done)
        over = rollouts.loop_thread.run(
            rollouts.collector.collect_groups,
            asked,
            limits=stage,
            seed=random.Random(f"{self._seed}/{step}").getrandbits(63),
            min_complete=stage.prompts,
            must_complete=sum(group[0].steps_carried >= stage.max_stale for group in self.under_way),
            is_decided=partial(roc.is_group_decided, num_kept=stage.keep, mode=self._mode)
            if stage.early_stop
            else None,
        )
        self._sampled["rollout_s"] = perf_counter() - began
        self._own_s, self._idle_s = rollouts.collector.overhead_cpu_s, rollouts.collector.overhead_s
        self._sampled["nan_turns"] = rollouts.collector.nan_turns
        taken = dict(islice(((place, group) for place, group in enumerate(over) if group), stage.prompts))
        self.under_way = [group for place, group in enumerate(asked) if place not in taken]
        for episode in (episode for group in self.under_way for episode in group):
            episode.steps_carried += 1

        groups = list(taken.values())
        kept = [self._select(group, step) for group in groups]
        used = [_used(group, some) for group, some in zip(groups, kept, strict=True)]
        why = [roc.selection_reasons(group, some) for group, some in zip(groups, kept, strict=True)]
        self.record.write_episodes(step, stage.name, groups, kept, why)
        if all(episode.reward is None for group in groups for episode in group):
            raise Outage(
                f"step {step}: none of {sum(map(len, groups))} episodes has a verdict ({groups[0][0].error} for the "
                "first); once that is mended, the same command goes on"
            )
        self._sampled |= metrics.step_metrics(groups, used) | self._lateness(groups)
        filler = self.trainer.processing_class.eos_token_id
        return [
            _row(group[index], is_used=index in use, filler=filler)
            for group, some, use in zip(groups, kept, used, strict=True)
            for index in some
        ]

    def _begun(self, done: int) -> list[list[Episode]]:
        """The groups that a step begins, after `done` of the stage. The last steps begin no more than they need.

        Of a problem's groups in one step the later one counts its samples on, so none samples what another does.
        """
        stage = self._stage
        most = min(stage.prompts + round(stage.prompts * stage.partial), stage.prompts * (stage.steps - done))
        samples = {group[0].problem: group[-1].sample + 1 for group in self.under_way}
        begun = []
        for problem in self._order[stage.prompts * done + len(self.under_way) : stage.prompts * done + most]:
            first = samples.get(problem, 0)
            samples[problem] = first + stage.samples
            begun.append([Episode(problem, sample) for sample in range(first, samples[problem])])
        return begun

    def _lateness(self, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """What early stop and partial rollouts did to a step."""
        episodes = [episode for group in groups for episode in group]
        numbers: dict[str, float] = {}
        if self._stage.early_stop:
            stopped = [episode for episode in episodes if episode.stop_reason is StopReason.CANCELLED]
            numbers = {
                "cancelled_share": len(stopped) / len(episodes),
                "cancelled_response_length": fmean(episode.response_length for episode in stopped) if stopped else nan,
                "cancelled_tokens": sum(episode.sampled_tokens for episode in stopped),
            }
        if self._stage.partial:
            tokens = sum((Counter(episode.sampled_tokens_by_version) for episode in episodes), Counter[int]())
            behind = {self._version - version: count for version, count in tokens.items()}
            numbers |= {
                "pending_groups": len(self.under_way),
                "stale_token_share": 1 - behind.get(0, 0) / tokens.total(),
                "staleness_mean_steps": sum(steps * count for steps, count in behind.items()) / tokens.total(),
            }
        return numbers

    @property
    def _mode(self) -> roc.Mode:
        return "released" if self._stage.select == "released" else "paper"

    def _select(self, group: Sequence[Episode], step: int) -> list[int]:
        """Of the episodes that were not stopped early: for shares of a group they are all that there are."""
        over = [index for index, episode in enumerate(group) if episode.stop_reason is not StopReason.CANCELLED]
        rng = random.Random(f"{self._seed}/{step}/{group[0].problem.id}")
        kept = roc.resample_on_correct([group[i] for i in over], self._stage.keep, mode=self._mode, rng=rng)
        return [over[index] for index in kept]


def _used(group: Sequence[Episode], kept: Sequence[int]) -> list[int]:
    """Which of the kept are in the loss."""
    return [index for index in kept if group[index].reward is not None] if roc.has_signal(group, kept) else []


def _row(episode: Episode, *, is_used: bool, filler: int) -> Row:
    """TRL takes no empty completion: an episode that failed before its first token is one `filler`, which is masked."""
    ids = list(episode.response_ids) or [filler]
    logprobs = list(episode.logprobs) or [0.0]
    mask = list(episode.loss_mask) if is_used and episode.response_ids else [0] * len(ids)
    return Row(list(episode.prompt_ids), ids, logprobs, mask, episode.reward)


def _roc_reward(roc_reward: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: the rewards came with the rows."""
    return roc_reward


def _scatter(rows: Sequence[Row], count: int) -> Sequence[Row]:
    """`count` rows for each rank, of those that the first rank has. The others wait here while it samples."""
    if (group := waiting_group()) is None:
        return rows
    shares = [rows[start : start + count] for start in range(0, len(rows), count)]
    mine: list[Sequence[Row]] = [()]
    torch.distributed.scatter_object_list(mine, shares or None, src=0, group=group)
    return mine[0]
