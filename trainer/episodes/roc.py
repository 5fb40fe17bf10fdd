"""Resample on Correct (RoC): selects the episodes of a problem for training (rStar2-Agent, arXiv 2508.20722, 2.2).

    group of 2G episodes ── wrong ────► a proportional share, whatever their penalty ──┐
                         ── correct ──► the rest of G, by low p_total = p_err + p_format ─┴─► G episodes

So the model still sees every way to fail, and correct episodes with failed tool calls or a bad format are selected less
often. The reward stays the correctness of the answer.

Invariants:
- Pure: no clock and no global random state. The same group, mode and state of `rng` give the same indices.
- The result has exactly `num_kept` different indices in ascending order.
- An episode is correct if its reward is above `correct_above`, the setting `reward.correct_above`.
- The shares are computed over the scored episodes. An unscored episode (reward None) is selected only if the scored
  ones cannot fill the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Literal, get_args

from trainer.episodes.episode import Episode
from trainer.episodes.reward import is_correct

Mode = Literal["paper", "released", "uniform"]

EPSILON = 1e-6
"""Added to p_total, so that 1 / p_total is finite. It is so small that an episode without penalty is drawn before any
episode with a penalty, as in the limit of the paper's rule."""
MIN_SIGNAL = 1e-6
"""Rewards of a group that differ by no more than this are equal: 0.1 * 3 and 0.3 differ by rounding only."""
RELEASED_MIN_PER_CLASS = 2
"""The least number of correct and of wrong episodes that the released code keeps
(its settings min_zero_reward_trace_num and min_non_zero_reward_trace_num)."""


def p_err(episode: Episode) -> float:
    """The share of tool calls that failed, in [0, 1]; 0.5 without tool calls."""
    return episode.num_failed_tool_calls / episode.num_tool_calls if episode.num_tool_calls else 0.5


def p_format(episode: Episode) -> float:
    """The number of answer blocks beyond the first, divided by the number of turns, at most 1. Without an answer block
    the result is 1."""
    if not episode.answer_blocks:
        return 1.0
    return min(1.0, (episode.answer_blocks - 1) / max(1, episode.num_turns))


def p_total(episode: Episode) -> float:
    """The penalty of a correct episode, in [0, 2]."""
    return p_err(episode) + p_format(episode)


def resample_on_correct(
    group: Sequence[Episode],
    num_kept: int,
    *,
    mode: Mode,
    rng: Random,
    epsilon: float = EPSILON,
    correct_above: float = 0.0,
) -> list[int]:
    """Return the indices of the `num_kept` episodes of `group` to train on, ascending.

    | mode       | wrong episodes                            | correct episodes                                        |
    |------------|-------------------------------------------|---------------------------------------------------------|
    | `paper`    | floor(wrong × num_kept / scored), uniform | the rest, drawn one by one ∝ 1 / (p_total + epsilon)    |
    | `released` | the rounded share, the first ones         | the rounded share, lowest p_total; at least 2 per class |
    | `uniform`  | as with `paper`                           | the rest, uniform: resampling without penalties         |

    `released` draws nothing from `rng`. If one class has too few episodes, the other class fills the gap. If both have
    too few, unscored episodes fill the rest, in order.

    Raises `ValueError` for a `num_kept` outside 1..len(group), an unknown mode, or an epsilon that is not positive.
    """
    if not 1 <= num_kept <= len(group):
        raise ValueError(f"num_kept={num_kept} of a group of {len(group)}; expected 1 to {len(group)}")
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} is unknown; expected {', '.join(get_args(Mode))}")
    if not epsilon > 0:
        raise ValueError(f"epsilon={epsilon}: expected more than 0, since p_total can be 0")
    positives, negatives, unscored = (
        [i for i, episode in enumerate(group) if _class_name(episode, correct_above) == name]
        for name in ("correct", "wrong", "unscored")
    )

    num_negatives, num_positives = _class_quotas(len(negatives), len(positives), num_kept, mode)
    penalties = {i: p_total(group[i]) for i in positives}
    if mode == "released":
        selected = negatives[:num_negatives] + sorted(positives, key=penalties.__getitem__)[:num_positives]
    else:
        selected = rng.sample(negatives, num_negatives)
        weights = [1 / (penalties[i] + epsilon) if mode == "paper" else 1.0 for i in positives]
        selected += _weighted_sample(positives, weights, num_positives, rng)
    return sorted(selected + unscored[: num_kept - len(selected)])


def has_signal(group: Sequence[Episode], selected: Sequence[int]) -> bool:
    """Whether the selected rewards differ by more than `MIN_SIGNAL`. If they do not, every advantage is 0 except for
    rounding, so the group is left out of the loss."""
    rewards = [reward for i in selected if (reward := group[i].reward) is not None]
    return bool(rewards) and max(rewards) - min(rewards) > MIN_SIGNAL


def selection_reasons(group: Sequence[Episode], selected: Sequence[int], correct_above: float = 0.0) -> list[str]:
    """Return a sentence for each episode of `group`: why it was selected or not."""
    names = [_class_name(episode, correct_above) for episode in group]
    total, chosen = Counter(names), Counter(names[i] for i in selected)
    note = "" if has_signal(group, selected) else "; not in the loss, since all selected rewards are equal"
    reasons = []
    for i, (episode, name) in enumerate(zip(group, names, strict=True)):
        reason = f"{name}, {chosen[name]} of {total[name]} selected, {_selection_rule(episode, name)}"
        reasons.append(f"selected: {reason}{note}" if i in selected else f"not selected: {reason}")
    return reasons


def _class_quotas(negatives: int, positives: int, num_kept: int, mode: Mode) -> tuple[int, int]:
    """Return how many wrong and how many correct episodes to select. If one class has too few, more of the other class
    are selected."""
    size = max(1, negatives + positives)
    if mode == "released":
        quota = _released_negatives(negatives, positives, num_kept, size)
    else:
        quota = negatives * num_kept // size
    num_positives = min(num_kept - quota, positives)
    return min(num_kept - num_positives, negatives), num_positives


def _released_negatives(negatives: int, positives: int, num_kept: int, size: int) -> int:
    """Return how many wrong episodes the released code keeps. If its two rounded shares do not add up to `num_kept`,
    correct episodes make up the difference."""
    num_negatives, num_positives = round(negatives * num_kept / size), round(positives * num_kept / size)
    if num_negatives <= (minimum := min(RELEASED_MIN_PER_CLASS, negatives)):
        num_negatives, num_positives = minimum, num_kept - minimum
    if num_positives <= (minimum := min(RELEASED_MIN_PER_CLASS, positives)):
        num_negatives = num_kept - minimum
    return min(max(0, num_negatives), num_kept)


def _weighted_sample(items: Sequence[int], weights: Sequence[float], count: int, rng: Random) -> list[int]:
    """Draw `count` items without replacement, each in proportion to the weights of the remaining ones."""
    remaining = dict(zip(items, weights, strict=True))
    drawn = []
    for _ in range(count):
        (item,) = rng.choices(list(remaining), list(remaining.values()))
        del remaining[item]
        drawn.append(item)
    return drawn


def _class_name(episode: Episode, correct_above: float) -> str:
    if episode.reward is None:
        return "unscored"
    return "correct" if is_correct(episode.reward, correct_above) else "wrong"


def _selection_rule(episode: Episode, class_name: str) -> str:
    if class_name == "unscored":
        return "only if scored episodes cannot fill the group: infrastructure failed"
    if class_name == "wrong":
        return "whatever the penalty"
    failed, total, blocks = episode.num_failed_tool_calls, episode.num_tool_calls, episode.answer_blocks
    calls = f"{failed} of {total} tool calls failed" if total else "no tool call"
    answers = {0: "no answer", 1: "one answer"}.get(blocks, f"{blocks} answers")
    penalty = f"penalty {p_total(episode):.2f} = {p_err(episode):.2f} ({calls}) + {p_format(episode):.2f} ({answers})"
    return f"more likely with a low penalty; {penalty}"
