"""Resample on Correct: which of a problem's rollouts are trained on (rStar2-Agent, arXiv 2508.20722, 2.2).

Failures are kept as they come, so that the model still meets every way of failing; among the correct rollouts those
with broken tool calls and careless format give way to clean ones. The reward itself stays the outcome alone.

Invariants:
- Pure: no clock and no global random. The same group, mode and state of `rng` give the same indices.
- Exactly `keep` indices come back, ascending, none twice.
- A rollout without a verdict (reward None) is chosen only when those with one cannot fill the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Literal, Protocol

Mode = Literal["paper", "released"]

EPSILON = 1e-6
"""Keeps 1 / p_total finite. So small that a clean rollout goes before any other, as in the paper's limit."""
RELEASED_MINIMUM = 2
"""Of each class, in the released code's configuration (min_zero_reward_trace_num, min_non_zero_reward_trace_num)."""


class Rollout(Protocol):
    """What is asked of a rollout. A reward above 0 is a correct answer; `trainer.episodes.episode.Episode` is one."""

    @property
    def reward(self) -> float | None: ...
    @property
    def calls(self) -> int: ...
    @property
    def failed_calls(self) -> int: ...
    @property
    def answer_tags(self) -> int: ...
    @property
    def turns(self) -> int: ...


def p_err(rollout: Rollout) -> float:
    """The share of tool calls that failed, in [0, 1]; 0.5 without any."""
    return rollout.failed_calls / rollout.calls if rollout.calls else 0.5


def p_format(rollout: Rollout) -> float:
    """1 without an answer, else the surplus answers per turn, at most 1."""
    if not rollout.answer_tags:
        return 1.0
    return min(1.0, (rollout.answer_tags - 1) / max(1, rollout.turns))


def p_total(rollout: Rollout) -> float:
    """The penalty that a correct rollout is resampled by, in [0, 2]."""
    return p_err(rollout) + p_format(rollout)


def resample_on_correct(
    group: Sequence[Rollout], keep: int, *, mode: Mode, rng: Random, epsilon: float = EPSILON
) -> list[int]:
    """The indices of the `keep` rollouts of `group` to train on, ascending.

    `mode="paper"` keeps floor(negatives × keep / len(group)) negatives, drawn uniformly, and fills up with positives
    drawn one after another without replacement, each with probability proportional to 1 / (p_total + epsilon) among
    those left. `mode="released"` keeps each class by its rounded share, at least two of each where there are two: the
    positives of lowest penalty and the first negatives. It draws nothing from `rng`.

    In both, what one class lacks the other fills, and rollouts with reward None (in order) only what neither can.
    Raises `ValueError` for a `keep` outside 1..len(group), an unknown mode, or an epsilon that is not positive.
    """
    if not 1 <= keep <= len(group):
        raise ValueError(f"keep={keep} of a group of {len(group)}; keep at least 1 and at most the whole group")
    if mode not in ("paper", "released"):
        raise ValueError(f"mode={mode!r} is unknown; there are 'paper' and 'released'")
    if not epsilon > 0:
        raise ValueError(f"epsilon={epsilon} must be above 0, since a clean rollout has a penalty of 0")
    positives = [i for i, rollout in enumerate(group) if rollout.reward is not None and rollout.reward > 0]
    negatives = [i for i, rollout in enumerate(group) if rollout.reward is not None and not rollout.reward > 0]
    unscored = [i for i, rollout in enumerate(group) if rollout.reward is None]

    n_negatives, n_positives = _shares(len(negatives), len(positives), len(group), keep, mode)
    penalties = {i: p_total(group[i]) for i in positives}
    if mode == "paper":
        kept = rng.sample(negatives, n_negatives)
        kept += _draw(positives, [1 / (penalties[i] + epsilon) for i in positives], n_positives, rng)
    else:
        kept = negatives[:n_negatives] + sorted(positives, key=penalties.__getitem__)[:n_positives]
    return sorted(kept + unscored[: keep - len(kept)])


def is_enough(rewards: Sequence[float | None], left: int, *, keep: int, mode: Mode) -> bool:
    """Whether a group with these `rewards` can do without the `left` rollouts that are not over yet.

    It can if none of the numbers of wrong and right ones that they might make is such that more of either would be kept
    than there are by now. So a group whose rollouts might still differ goes on, however many of them agree.
    """
    positives = sum(reward is not None and reward > 0 for reward in rewards)
    negatives = sum(reward is not None and not reward > 0 for reward in rewards)
    size = len(rewards) + left
    ends = [_shares(negatives + wrong, positives + left - wrong, size, keep, mode) for wrong in range(left + 1)]
    return all(wrong <= negatives and right <= positives for wrong, right in ends)


def has_signal(group: Sequence[Rollout], kept: Sequence[int]) -> bool:
    """Whether the kept rollouts differ in reward. A group in which they do not has no advantage: it leaves the loss."""
    return len({group[i].reward for i in kept if group[i].reward is not None}) > 1


def explain(group: Sequence[Rollout], kept: Sequence[int]) -> list[str]:
    """In words, for each rollout of `group`, why it was kept or dropped."""
    everyone = Counter(_kind(rollout) for rollout in group)
    chosen = Counter(_kind(group[i]) for i in kept)
    flat = "" if has_signal(group, kept) else "; not in the loss, since all that were kept have the same reward"
    reasons = []
    for i, rollout in enumerate(group):
        kind = _kind(rollout)
        why = f"{kind}, {chosen[kind]} of {everyone[kind]} of them kept, {_how(rollout)}"
        reasons.append(f"kept: {why}{flat}" if i in kept else f"dropped: {why}")
    return reasons


def _shares(negatives: int, positives: int, size: int, keep: int, mode: Mode) -> tuple[int, int]:
    """How many of the wrong and of the right ones are kept; what one class lacks the other fills."""
    wanted = negatives * keep // size if mode == "paper" else _released_negatives(negatives, positives, keep, size)
    n_positives = min(keep - wanted, positives)
    return min(keep - n_positives, negatives), n_positives


def _released_negatives(negatives: int, positives: int, keep: int, size: int) -> int:
    """How many negatives the released code keeps. Where its two rounded shares miss `keep`, positives make it up."""
    n_negatives, n_positives = round(negatives * keep / size), round(positives * keep / size)
    if n_negatives <= (least := min(RELEASED_MINIMUM, negatives)):
        n_negatives, n_positives = least, keep - least
    if n_positives <= (least := min(RELEASED_MINIMUM, positives)):
        n_negatives = keep - least
    return min(max(0, n_negatives), keep)


def _draw(pool: Sequence[int], weights: Sequence[float], count: int, rng: Random) -> list[int]:
    """`count` of `pool` without replacement, one after another in proportion to the weights of those left."""
    left = dict(zip(pool, weights, strict=True))
    drawn = []
    for _ in range(count):
        (chosen,) = rng.choices(list(left), list(left.values()))
        del left[chosen]
        drawn.append(chosen)
    return drawn


def _kind(rollout: Rollout) -> str:
    if rollout.reward is None:
        return "no verdict"
    return "correct" if rollout.reward > 0 else "wrong"


def _how(rollout: Rollout) -> str:
    """What a rollout of this kind is chosen by."""
    if rollout.reward is None:
        return "only where no others fill the group: it was us who ended it"
    if not rollout.reward > 0:
        return "whatever their penalty"
    calls = f"{rollout.failed_calls} of {rollout.calls} calls failed" if rollout.calls else "no tool call"
    answers = {0: "no answer", 1: "one answer"}.get(rollout.answer_tags, f"{rollout.answer_tags} answers")
    penalty = f"penalty {p_total(rollout):.2f} = {p_err(rollout):.2f} ({calls}) + {p_format(rollout):.2f} ({answers})"
    return f"the cleaner the likelier; {penalty}"
