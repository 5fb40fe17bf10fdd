"""What an episode earns: 1 for an answer that is equivalent to the problem's, else 0, and None where nobody knows.

The reward is the answer's correctness alone (rStar2-Agent, arXiv 2508.20722, 2.2): neither format nor tool use earns
or costs anything here, they weigh in the resampling (`trainer.roc`).

Invariants:
- Our failure is None, never 0: an episode that we ended, or a check that the sandbox could not make.
- The model's failure is 0, never None: no answer, or one that the checker cannot read or does not come to an end with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Protocol

from trainer.trajectory import Episode, StopReason


class Verdict(StrEnum):
    """What came of checking an answer. The names are those of the sandbox's `Outcome`."""

    EQUIVALENT = "equivalent"
    NOT_EQUIVALENT = "not_equivalent"
    UNPARSABLE = "unparsable"
    UNAVAILABLE = "unavailable"
    """No verdict: ours."""


class Verifier(Protocol):
    """Who compares answers (`trainer.tools.Verifier`)."""

    async def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """For each pair of the right answer and the model's, in order. Does not raise for a service that is down."""
        ...


REWARDS: dict[Verdict, float | None] = {
    Verdict.EQUIVALENT: 1.0,
    Verdict.NOT_EQUIVALENT: 0.0,
    Verdict.UNPARSABLE: 0.0,
    Verdict.UNAVAILABLE: None,
}


async def score(episodes: Sequence[Episode], verifier: Verifier) -> list[Episode]:
    """`episodes`, in order, with their rewards. Answers that several of them share are checked once."""
    pairs = dict.fromkeys(_pair(episode) for episode in episodes if _has_answer(episode))
    verdicts = dict(zip(pairs, await verifier.verify(list(pairs)), strict=True)) if pairs else {}
    return [replace(episode, reward=_reward(episode, verdicts)) for episode in episodes]


def _has_answer(episode: Episode) -> bool:
    return _is_ended_by_itself(episode) and episode.answer is not None


def _is_ended_by_itself(episode: Episode) -> bool:
    return episode.stop not in (StopReason.UNAVAILABLE, StopReason.CANCELLED)


def _pair(episode: Episode) -> tuple[str, str]:
    return episode.problem.answer, episode.answer or ""


def _reward(episode: Episode, verdicts: dict[tuple[str, str], Verdict]) -> float | None:
    if not _is_ended_by_itself(episode):
        return None
    return REWARDS[verdicts[_pair(episode)]] if episode.answer is not None else 0.0
