"""The reward of an episode: 1 if its answer is equivalent to the problem's answer, else 0. None if that is unknown.

Only the correctness of the answer counts (rStar2-Agent, arXiv 2508.20722, 2.2). Format and tool use have no reward, but
they count in the resampling (`trainer.episodes.roc`).

Invariants:
- An infrastructure failure gives None, never 0: the episode was cancelled or unavailable, or the sandbox could not
  check the answer.
- A failure of the model gives 0, never None: the model gave no answer, or an answer that the checker cannot parse, or
  on which the checker does not finish.
- Problems whose own answer the checker cannot parse are dropped when data is prepared (`trainer.recipe.prepare_phase`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum

from trainer.episodes.episode import Episode, StopReason
from trainer.episodes.exact_match import is_exact_match, plain_answer


class VerifyOutcome(StrEnum):
    """The result of checking an answer. The values are those of the sandbox's `Outcome`."""

    EQUIVALENT = "equivalent"
    """The answer is equal to the right one."""
    NOT_EQUIVALENT = "not_equivalent"
    """The answer is not shown to be equal to the right one."""
    UNPARSABLE = "unparsable"
    """One of the two answers could not be read, or the comparison exceeded its limits."""
    UNAVAILABLE = "unavailable"
    """The sandbox failed, so the answer was not checked."""


VerifyPairs = Callable[[Sequence[tuple[str, str]]], Awaitable[list[VerifyOutcome]]]
"""Compares pairs (the problem's answer, the model's answer) and returns their outcomes in order. If the sandbox is
down, the outcome says so; no exception is raised."""


class NoRewardsError(Exception):
    """Too few episodes have a reward, since the infrastructure or a reward function failed. The episodes that an outage
    leaves are not a fair sample, since episodes with many tool calls are lost most often."""


def check_unavailable(unavailable: int, episodes: int, max_share: float, where: str, first_failure: str) -> None:
    """Raise `NoRewardsError` if more than `max_share` of `episodes` episodes, or all of them, are unavailable."""
    if unavailable > min(max_share * episodes, episodes - 1):
        raise NoRewardsError(
            f"{where}: {unavailable} of {episodes} episodes have no reward, since infrastructure or a reward failed; "
            f"at most {max_share:.0%} may (max_unavailable_share). The first failure: {first_failure}. Mend it and run "
            "the same command again: it continues"
        )


INFRASTRUCTURE_STOPS = (StopReason.UNAVAILABLE, StopReason.DEADLINE)
"""Stop reasons that the model may not have caused. An episode with one of them has no reward."""


def is_correct(reward: float | None, correct_above: float) -> bool:
    """Return whether a reward is that of a correct episode. `correct_above` is the setting of this name."""
    return reward is not None and reward > correct_above


async def score_episodes(episodes: Sequence[Episode], verify: VerifyPairs) -> list[float | None]:
    """Return the rewards of finished episodes, in order. Equal answers to one problem are checked once."""
    answered = [e for e in episodes if e.stop_reason not in INFRASTRUCTURE_STOPS and e.answer is not None]
    pairs = list(dict.fromkeys((episode.problem.answer, episode.answer or "") for episode in answered))
    outcomes = dict(zip(pairs, await verify(pairs), strict=True)) if pairs else {}

    def reward(episode: Episode) -> float | None:
        if episode.stop_reason in INFRASTRUCTURE_STOPS:
            return None
        outcome = outcomes[episode.problem.answer, episode.answer] if episode.answer is not None else None
        return None if outcome is VerifyOutcome.UNAVAILABLE else float(outcome is VerifyOutcome.EQUIVALENT)

    return [reward(episode) for episode in episodes]


def exact_match_reward(episode: Episode) -> float | None:
    """Return the reward of a finished episode by GAIA's public rule (`trainer.episodes.exact_match`)."""
    return compared_reward(episode, is_exact_match)


def compared_reward(episode: Episode, is_right: Callable[[str, str], bool]) -> float | None:
    """Return the reward of a finished episode. `is_right` compares its answer, as plain text, with the problem's."""
    if episode.stop_reason in INFRASTRUCTURE_STOPS:
        return None
    if episode.answer is None:
        return 0.0
    return float(is_right(plain_answer(episode.answer), episode.problem.answer))
