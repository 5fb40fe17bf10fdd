"""The episodes of each training step, on the first rank: which problems, their rollout, RoC's selection, the record.

Invariants:
- The tokens that a step samples follow from (weights, seed, step). The order of problems follows from the seed. So a
  resumed run repeats the steps that a kill has undone. There is one exception: with `one_step_off_policy`, the first
  step after a kill samples with newer weights than without the kill.
- A row is in the loss, and in the loss's denominator, only if it has a reward and the selected rewards of its group
  differ. Any other row has a loss mask of zeros.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any, NamedTuple

from trainer.config import ConfigError, StageConfig
from trainer.episodes import metrics, roc
from trainer.episodes.episode import Episode, Problem
from trainer.episodes.reward import check_unavailable
from trainer.rollout.runtime import RolloutRuntime
from trainer.training import training_rows
from trainer.training.context import TrainingContext

logger = logging.getLogger(__name__)

Groups = list[list[Episode]]
"""The episodes of a step, by problem."""
Selection = list[list[int]]
"""The indices of the episodes to train on, by group."""


class _Collected(NamedTuple):
    """The groups of a rollout, and the metrics of their sampling."""

    groups: Groups
    measured: dict[str, float]


class StepSampler:
    """Steps are counted over the whole run, from 1; the first step of the stage is `context.first_step` + 1."""

    def __init__(
        self, stage: StageConfig, context: TrainingContext, problems: Sequence[Problem], rollouts: RolloutRuntime
    ) -> None:
        self._stage, self._context, self._problems, self._rollouts = stage, context, problems, rollouts
        num_ids = len({problem.id for problem in problems})
        if num_ids < len(problems):
            raise ConfigError(
                f"stages.{stage.name}: expected problems with different ids, got {len(problems)} with {num_ids} ids"
            )
        stage.require_problems(num_ids, "the stage has no others")
        self._schedule = training_rows.problem_schedule(problems, stage.problems_per_step, stage.steps, context.seed)
        # With roc_mode=off all samples are kept, so every rule gives the same selection.
        mode = "paper" if stage.roc_mode == "off" else stage.roc_mode
        self._rule: dict[str, Any] = {"mode": mode, "correct_above": context.correct_above}
        self._next: Future[_Collected] | None = None
        """The groups of the next step, which are sampled while this step is optimized. None without
        `one_step_off_policy`."""
        self.metrics: dict[str, float] = {}
        """The metrics of the step so far."""
        self.trained: list[Episode] = []
        """The episodes in the loss of the step."""

    def sync_weights(self, weights: Any, version: int) -> None:
        """Give the engines the weights. Their version is the number of training steps in them."""
        self._rollouts.loop_thread.run(self._rollouts.pool.sync_weights, weights, version)

    def wait(self) -> None:
        """Wait until the engines sample nothing."""
        if self._next:
            self._rollouts.loop_thread.result(self._next)

    def rollout(self, step: int) -> Groups:
        """Return the groups of the step. With `one_step_off_policy`, also start to sample those of the next step."""
        self.metrics = {}
        groups = self._collected(self._next or self._start(step, self._problems_of(step)))
        is_last = step == self._context.first_step + self._stage.steps
        if self._stage.one_step_off_policy:
            self._next = None if is_last else self._start(step + 1, self._problems_of(step + 1))
        return groups

    def select(self, groups: Groups, step: int) -> Selection:
        """Select the episodes to train on by RoC, and train on `problems_per_step` groups.

        With `dynamic_sampling_rounds`, groups without a signal are replaced: more groups are appended to `groups`. If
        the groups with a signal are too few, the first ones without a signal are added.
        """
        selected = [self._select_from(group, step) for group in groups]
        for _ in range(self._stage.dynamic_sampling_rounds):
            missing = self._stage.problems_per_step - sum(map(roc.has_signal, groups, selected))
            more = self._sample_replacements(groups, missing, step)
            groups += more
            selected += [self._select_from(group, step) for group in more]
        if self._rollouts.sleep:
            self._rollouts.loop_thread.run(self._rollouts.sleep)
        ranked = sorted(range(len(groups)), key=lambda i: not roc.has_signal(groups[i], selected[i]))
        for number in ranked[self._stage.problems_per_step :]:
            selected[number] = []
        return selected

    def record(self, groups: Groups, selected: Selection, step: int) -> list[training_rows.TrainingRow]:
        """Write all episodes to the run folder, and return the rows of the selected ones. Raises `NoRewardsError`."""
        above = self._context.correct_above
        reasons = [roc.selection_reasons(*pair, correct_above=above) for pair in zip(groups, selected, strict=True)]
        self._context.run_folder.write_episodes(step, self._stage.name, groups, selected, reasons)
        episodes = [episode for group in groups for episode in group]
        unavailable = [episode for episode in episodes if metrics.is_unavailable(episode)]
        cause = next((episode.error for episode in unavailable if episode.error), "an answer could not be checked")
        check_unavailable(
            len(unavailable), len(episodes), self._stage.max_unavailable_share, f"step {step}", first_failure=cause
        )
        in_loss = list(map(training_rows.in_loss_indices, groups, selected))
        self.metrics |= metrics.step_metrics(groups, in_loss, above)
        if self._stage.one_step_off_policy:
            self.metrics |= metrics.staleness_metrics(episodes, step - 1)
        if self._stage.dynamic_sampling_rounds:
            self.metrics["replacement_groups"] = len(groups) - self._stage.problems_per_step
        for warning in metrics.warnings(self.metrics):
            logger.warning("step %d: %s", step, warning)
        self.trained = [group[index] for group, used in zip(groups, in_loss, strict=True) for index in used]
        return [
            row for parts in zip(groups, selected, in_loss, strict=True) for row in training_rows.group_rows(*parts)
        ]

    def _problems_of(self, step: int) -> Sequence[Problem]:
        first = self._stage.problems_per_step * (step - 1 - self._context.first_step)
        return self._schedule[first : first + self._stage.problems_per_step]

    def _start(self, step: int, problems: Sequence[Problem]) -> Future[_Collected]:
        """Start to sample episodes of `problems` for the step."""
        stage, collector = self._stage, self._rollouts.collector
        seed = random.Random(f"{self._context.seed}/{step}").getrandbits(63)

        async def collect() -> _Collected:
            started_at = perf_counter()
            groups = await collector.collect(problems, stage.samples_per_problem, limits=stage, seed=seed)
            measured = {name: getattr(collector, name) for name in ("overhead_cpu_s", "overhead_s")}
            return _Collected(groups, measured | {"rollout_s": perf_counter() - started_at})

        return self._rollouts.loop_thread.start(collect)

    def _collected(self, job: Future[_Collected]) -> Groups:
        """Wait for sampled groups. Add their times, and the time of this wait, to the step's metrics."""
        waiting_since = perf_counter()
        groups, measured = self._rollouts.loop_thread.result(job)
        for name, value in (measured | {"rollout_wait_s": perf_counter() - waiting_since}).items():
            self.metrics[name] = self.metrics.get(name, 0) + value
        return groups

    def _sample_replacements(self, groups: Groups, count: int, step: int) -> Groups:
        """Return the groups of `count` further problems, or of all unused problems if they are fewer (DAPO's dynamic
        sampling, arXiv 2503.14476, 3.2).

        Which problems these are follows from the seed, the step and the rewards. No problem is sampled twice in a step.
        """
        used = {group[0].problem.id for group in groups}
        unused = [problem for problem in self._problems if problem.id not in used]
        rng = random.Random(f"{self._context.seed}/{step}/{len(groups)}")
        chosen = rng.sample(unused, min(count, len(unused)))
        return self._collected(self._start(step, chosen)) if chosen else []

    def _select_from(self, group: Sequence[Episode], step: int) -> list[int]:
        rng = random.Random(f"{self._context.seed}/{step}/{group[0].problem.id}")
        return roc.resample_on_correct(group, self._stage.kept_per_problem, rng=rng, **self._rule)
