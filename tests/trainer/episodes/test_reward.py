"""Tests of rewards. The check of the answer decides between 1 and 0. If the infrastructure failed, the reward is
None."""

from __future__ import annotations

import asyncio

import pytest

from tests.trainer.fakes import FakeVerifier
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.episodes.reward import score_episodes


def episode(answer: str | None, *, correct_answer: str = "7", stop_reason: StopReason = StopReason.FINISHED) -> Episode:
    return Episode(Problem("p", "What is it?", correct_answer), 0, stop_reason=stop_reason, answer=answer)


def rewards(*episodes: Episode, verifier: FakeVerifier | None = None) -> list[float | None]:
    return asyncio.run(score_episodes(episodes, (verifier or FakeVerifier()).verify))


def test_the_reward_of_an_answer_follows_from_its_check() -> None:
    episodes = [episode(answer) for answer in ("7", "8", "unparsable", "unavailable")]
    assert rewards(*episodes) == [1.0, 0.0, 0.0, None]


def test_an_episode_without_an_answer_has_reward_0_and_is_not_checked() -> None:
    verifier = FakeVerifier()
    assert rewards(episode(None), verifier=verifier) == [0.0]
    assert verifier.requests == []


@pytest.mark.parametrize("stop_reason", [StopReason.UNAVAILABLE, StopReason.DEADLINE])
@pytest.mark.parametrize("answer", [None, "7"])
def test_an_episode_without_an_end_of_its_own_has_no_reward(stop_reason: StopReason, answer: str | None) -> None:
    assert rewards(episode(answer, stop_reason=stop_reason)) == [None]


@pytest.mark.parametrize("stop_reason", [StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT])
def test_an_episode_that_reached_a_limit_has_a_reward(stop_reason: StopReason) -> None:
    assert rewards(episode(None, stop_reason=stop_reason), episode("7", stop_reason=stop_reason)) == [0.0, 1.0]


def test_equal_answers_are_checked_once_and_all_checks_are_one_request() -> None:
    verifier = FakeVerifier()
    episodes = [episode("7"), episode("8"), episode("7"), episode("7", correct_answer="8"), episode("8")]
    assert rewards(*episodes, verifier=verifier) == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert verifier.requests == [[("7", "7"), ("7", "8"), ("8", "7")]]
