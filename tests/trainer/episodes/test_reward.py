from __future__ import annotations

import asyncio

import pytest

from tests.trainer.fakes import FakeVerifier
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.episodes.reward import score_episodes


def episode(answer: str | None, *, gold: str = "7", stop: StopReason = StopReason.FINISHED) -> Episode:
    return Episode(Problem("p", "What is it?", gold), 0, stop_reason=stop, answer=answer)


def rewards(*episodes: Episode, verifier: FakeVerifier | None = None) -> list[float | None]:
    return asyncio.run(score_episodes(episodes, (verifier or FakeVerifier()).verify))


def test_the_reward_of_an_answer_follows_from_its_check() -> None:
    asked = [episode(answer) for answer in ("7", "8", "unparsable", "unavailable")]
    assert rewards(*asked) == [1.0, 0.0, 0.0, None]


def test_an_episode_without_an_answer_has_reward_0_and_is_not_checked() -> None:
    verifier = FakeVerifier()
    assert rewards(episode(None), verifier=verifier) == [0.0]
    assert verifier.requests == []


@pytest.mark.parametrize("stop", [StopReason.UNAVAILABLE, StopReason.CANCELLED])
@pytest.mark.parametrize("answer", [None, "7"])
def test_an_episode_that_we_ended_has_no_reward(stop: StopReason, answer: str | None) -> None:
    assert rewards(episode(answer, stop=stop)) == [None]


@pytest.mark.parametrize("stop", [StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT])
def test_limits_are_the_models_own_doing(stop: StopReason) -> None:
    assert rewards(episode(None, stop=stop), episode("7", stop=stop)) == [0.0, 1.0]


def test_answers_that_episodes_share_are_checked_once_and_all_at_once() -> None:
    verifier = FakeVerifier()
    asked = [episode("7"), episode("8"), episode("7"), episode("7", gold="8"), episode("8")]
    assert rewards(*asked, verifier=verifier) == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert verifier.requests == [[("7", "7"), ("7", "8"), ("8", "7")]]
