"""What an episode earns: 1 for an answer that is equivalent to the problem's, else 0, and None where nobody knows.

The reward is the answer's correctness alone (rStar2-Agent, arXiv 2508.20722, 2.2): neither format nor tool use earns
or costs anything here, they weigh in the resampling (`trainer.episodes.roc`).

Invariants:
- Our failure is None, never 0: an episode that we ended, or a check that the sandbox could not make.
- The model's failure is 0, never None: no answer, or one that the checker cannot read or does not come to an end with.
  Right answers that it cannot read never come here: they are left out when data is prepared
  (`trainer.recipe.phase_work`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

from trainer.episodes.episode import Episode, StopReason


class Verdict(StrEnum):
    """What came of checking an answer. The names are those of the sandbox's `Outcome`."""

    EQUIVALENT = "equivalent"
    NOT_EQUIVALENT = "not_equivalent"
    UNPARSABLE = "unparsable"
    UNAVAILABLE = "unavailable"
    """No verdict: ours."""


Verify = Callable[[Sequence[tuple[str, str]]], Awaitable[list[Verdict]]]
"""Compares pairs of the right answer and the model's, in order, and does not raise for a service that is down
(`trainer.environments.python_tool.Tools.verify`)."""
REWARDS: dict[Verdict, float | None] = {
    Verdict.EQUIVALENT: 1.0,
    Verdict.NOT_EQUIVALENT: 0.0,
    Verdict.UNPARSABLE: 0.0,
    Verdict.UNAVAILABLE: None,
}
OURS = (StopReason.UNAVAILABLE, StopReason.CANCELLED)
"""How we, and not the model, end an episode."""


async def score(episodes: Sequence[Episode], verify: Verify) -> list[float | None]:
    """The rewards of episodes that are over, in order. Answers that several of them share are checked once."""
    theirs = [one for one in episodes if one.stop not in OURS]
    pairs = list(dict.fromkeys((one.problem.answer, one.answer) for one in theirs if one.answer is not None))
    verdicts = dict(zip(pairs, await verify(pairs), strict=True)) if pairs else {}

    def reward(one: Episode) -> float | None:
        if one.stop in OURS:
            return None
        return 0.0 if one.answer is None else REWARDS[verdicts[one.problem.answer, one.answer]]

    return [reward(one) for one in episodes]
