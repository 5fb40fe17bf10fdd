"""The order of a stage's problems, and the rows that TRL trains on: one for each selected episode."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trainer.config import ConfigError
from trainer.episodes import roc
from trainer.episodes.episode import WITHOUT_LOGPROBS_ADVICE, Episode, Problem
from trainer.training.context import waiting_group


class TrainingRow(NamedTuple):
    """One completion; the fields are named as TRL expects them. `roc_reward` is None for an unscored episode."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    roc_reward: float | None


def problem_schedule(problems: Sequence[Problem], per_step: int, steps: int, seed: int) -> list[Problem]:
    """Return `per_step` problems for each of `steps` steps. Each epoch has a new order.

    No step has a problem twice. The problems at the end of an epoch may not fill a step; this epoch leaves them out.
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


def in_loss_indices(group: Sequence[Episode], selected: Sequence[int]) -> list[int]:
    """Return the selected indices that are in the loss."""
    return [i for i in selected if group[i].reward is not None] if roc.has_signal(group, selected) else []


def training_row(episode: Episode, *, is_in_loss: bool, placeholder_id: int) -> TrainingRow:
    """Return an episode's row. TRL accepts no empty prompt and no empty completion, so `placeholder_id` replaces an
    empty one."""
    prompt_ids = list(episode.prompt_ids) or [placeholder_id]
    ids = list(episode.response_ids) or [placeholder_id]
    logprobs = episode.known_logprobs
    if logprobs is None:
        raise ConfigError(
            f"sample {episode.sample} of problem {episode.problem.id} has tokens without log-probabilities: "
            f"{WITHOUT_LOGPROBS_ADVICE}"
        )
    mask = list(episode.loss_mask) if is_in_loss and episode.response_ids else [0] * len(ids)
    return TrainingRow(prompt_ids, ids, logprobs or [0.0], mask, episode.reward)


def roc_reward(roc_reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the rewards that the rows already have. TRL calls this function as the reward function."""
    return roc_reward


def scatter(rows: Sequence[TrainingRow], count: int, group_size: int) -> Sequence[TrainingRow]:
    """Give each rank `count` of the first rank's rows. The other ranks wait here while the first rank samples.

    Each `group_size` rows are a group. TRL computes advantages from the rows of all ranks, in the order of ranks, and
    needs the rows of a group beside each other.
    """
    if (group := waiting_group()) is None:
        return rows
    shares = balanced_shares(rows, count, group_size)
    own: list[Sequence[TrainingRow]] = [()]
    torch.distributed.scatter_object_list(own, shares or None, src=0, group=group)
    return own[0]


def balanced_shares(rows: Sequence[TrainingRow], count: int, group_size: int) -> list[Sequence[TrainingRow]]:
    """Divide rows into shares of `count` rows, each with about as many tokens to compute as the others.

    Whole groups are moved: the group with the most tokens goes to the share with the fewest that is not full. If a
    share is not a number of whole groups, the rows stay in their order.
    """
    if count % group_size:
        return [rows[start : start + count] for start in range(0, len(rows), count)]
    groups = [rows[start : start + group_size] for start in range(0, len(rows), group_size)]
    shares: list[list[TrainingRow]] = [[] for _ in range(len(rows) // count)]
    tokens = [0] * len(shares)
    for group in sorted(groups, key=_tokens_to_compute, reverse=True):
        share = min((i for i in range(len(shares)) if len(shares[i]) < count), key=tokens.__getitem__)
        shares[share] += group
        tokens[share] += _tokens_to_compute(group)
    return [*shares]


def _tokens_to_compute(rows: Sequence[TrainingRow]) -> int:
    """Return the tokens of the rows that are in the loss. No other row is computed."""
    return sum(len(row.prompt_ids) + len(row.completion_ids) for row in rows if any(row.env_mask))
