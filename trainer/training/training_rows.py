"""The order of a stage's problems, and the rows that a step trains on: one for each selected episode."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from trl.trainer.utils import pad

from trainer.config import ConfigError
from trainer.episodes import roc
from trainer.episodes.episode import WITHOUT_LOGPROBS_ADVICE, Episode, Problem
from trainer.training.context import waiting_group

EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards, as TRL does."""


class TrainingRow(NamedTuple):
    """An episode: prompt and completion, one log-probability and one bit of the loss mask per id of the completion, and
    the advantage."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    advantage: float


def problem_schedule(problems: Sequence[Problem], per_step: int, steps: int, seed: int) -> list[Problem]:
    """Return `per_step` problems for each of `steps` steps. Each epoch has a new order.

    No step has a problem twice. The problems at the end of an epoch may not fill a step; this epoch leaves them out.
    """
    epoch_problems = list(problems)
    assert len(epoch_problems) >= per_step, "expected a check by `StageConfig.require_problems`"
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


def group_rows(group: Sequence[Episode], selected: Sequence[int], in_loss: Sequence[int]) -> list[TrainingRow]:
    """Return the rows of the selected episodes. The advantage of a row is its reward minus the mean reward of the
    group's rows in the loss, divided by the standard deviation of these rewards."""
    rewards = [reward for index in in_loss if (reward := group[index].reward) is not None]
    baseline, scale = (mean(rewards), stdev(rewards) + EPSILON) if rewards else (0.0, 1.0)
    rows = []
    for index in selected:
        episode, is_in_loss = group[index], index in in_loss
        if (logprobs := episode.known_logprobs) is None:
            raise ConfigError(
                f"sample {episode.sample} of problem {episode.problem.id} has tokens without log-probabilities: "
                f"{WITHOUT_LOGPROBS_ADVICE}"
            )
        mask = list(episode.loss_mask) if is_in_loss else [0] * len(episode.response_ids)
        advantage = (episode.reward - baseline) / scale if is_in_loss and episode.reward is not None else 0.0
        rows.append(TrainingRow(list(episode.prompt_ids), list(episode.response_ids), logprobs, mask, advantage))
    return rows


def to_batch(rows: Sequence[TrainingRow], placeholder_id: int, device: Any) -> dict[str, torch.Tensor]:
    """Return rows as tensors with the names that TRL's loss has for them. Prompts are padded on the left, completions
    on the right. `placeholder_id` replaces an empty prompt or completion, which no model accepts."""
    prompts = [torch.tensor(row.prompt_ids or [placeholder_id]) for row in rows]
    completions = [torch.tensor(row.completion_ids or [placeholder_id]) for row in rows]
    masks = [torch.tensor(row.env_mask or [0]) for row in rows]
    logprobs = [torch.tensor(row.logprobs or [0.0]) for row in rows]
    batch = {
        "prompt_ids": pad(prompts, padding_value=placeholder_id, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left"),
        "completion_ids": pad(completions, padding_value=placeholder_id),
        "completion_mask": pad([torch.ones_like(ids) for ids in completions], padding_value=0),
        "tool_mask": pad(masks, padding_value=0),
        "sampling_per_token_logps": pad(logprobs, padding_value=0.0),
        "advantages": torch.tensor([row.advantage for row in rows]),
    }
    return {name: value.to(device) for name, value in batch.items()}


def scatter(rows: Sequence[TrainingRow], num_ranks: int) -> Sequence[TrainingRow]:
    """Give each rank a share of the first rank's rows. The other ranks wait here while the first rank samples."""
    if (group := waiting_group()) is None:
        return rows
    shares = balanced_shares(rows, num_ranks) if rows else None
    own: list[Sequence[TrainingRow]] = [()]
    torch.distributed.scatter_object_list(own, shares, src=0, group=group)
    return own[0]


def balanced_shares(rows: Sequence[TrainingRow], num_shares: int) -> list[Sequence[TrainingRow]]:
    """Divide rows into shares of equally many rows, each with about as many tokens to compute as the others: the row
    with the most tokens goes to the share with the fewest that is not full."""
    size = len(rows) // num_shares
    shares: list[list[TrainingRow]] = [[] for _ in range(num_shares)]
    tokens = [0] * num_shares
    for row in sorted(rows, key=_tokens_to_compute, reverse=True):
        share = min((i for i in range(num_shares) if len(shares[i]) < size), key=tokens.__getitem__)
        shares[share].append(row)
        tokens[share] += _tokens_to_compute(row)
    return [*shares]


def _tokens_to_compute(row: TrainingRow) -> int:
    """Return the tokens of a row that is in the loss. No other row is computed."""
    return len(row.prompt_ids) + len(row.completion_ids) if any(row.env_mask) else 0
