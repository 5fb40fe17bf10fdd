"""Tests of `EpisodeHost`, which runs in the process of the tests here. An interrupted episode continues after its last
finished turn, and each failure has the right kind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.trainer.collection.hosts import NUM_TURNS, CountingEnvironment, count_to_answer, make_host
from tests.trainer.fakes import END, ScriptedPool, call_text
from trainer.collection.store import Growth
from trainer.engines.engine import EngineError
from trainer.environments.environment import EnvironmentFailure, InitialState
from trainer.episodes.episode import Episode, FailureKind, Problem, StopReason, ToolCall, ToolCallStatus
from trainer.rollout.episode_runner import EpisodeError

pytest.importorskip("transformers")
pytestmark = pytest.mark.asyncio

PROBLEM = Problem("p", "Count.", str(NUM_TURNS - 1))


def merged(growth: list[Growth]) -> Episode:
    """The episode that a driver has after these growths."""
    episode = growth[0].tail
    for item in growth[1:]:
        assert item.start_token == episode.response_length
        episode = episode.with_tail(item.tail)
    return episode


async def run(host, episode: Episode) -> tuple[float | None, list[Growth]]:
    growth: list[Growth] = []
    return await host.run(episode, growth.append), growth


async def test_an_episode_is_sampled_scored_and_reported_turn_by_turn() -> None:
    environments = [CountingEnvironment()]
    episode = Episode(PROBLEM, 0)
    reward, growth = await run(make_host(lambda _: environments[0]), episode)
    assert reward == 1.0
    assert episode.stop_reason is StopReason.FINISHED
    assert [len(item.tail.turns) for item in growth] == [1] * NUM_TURNS
    assert merged(growth).response_ids == episode.response_ids
    assert merged(growth).stop_reason is StopReason.FINISHED
    assert environments[0].num_closed == 1


@pytest.mark.parametrize("num_turns", range(NUM_TURNS + 1))
async def test_an_interrupted_episode_goes_on_after_its_last_turn_with_the_same_tokens(num_turns: int) -> None:
    whole = Episode(PROBLEM, 0)
    _, growth = await run(make_host(), whole)
    interrupted = merged(growth[:num_turns]) if num_turns else Episode(PROBLEM, 0)
    environment, pool = CountingEnvironment(), ScriptedPool(count_to_answer)
    reward, _ = await run(make_host(lambda _: environment, pool=pool), interrupted)
    assert (reward, interrupted.response_ids, interrupted.loss_mask) == (1.0, whole.response_ids, whole.loss_mask)
    assert len(pool.requests) == NUM_TURNS - num_turns  # no finished turn is sampled again
    assert environment.num_actions == NUM_TURNS - 1  # the recorded actions were repeated


async def test_a_stateless_environment_repeats_no_action() -> None:
    whole = Episode(PROBLEM, 0)
    _, growth = await run(make_host(), whole)
    environment = CountingEnvironment(is_stateful=False)
    await run(make_host(lambda _: environment), merged(growth[:2]))
    assert environment.num_actions == NUM_TURNS - 1 - 2


async def test_a_response_that_differs_on_replay_fails_the_try() -> None:
    _, growth = await run(make_host(), Episode(PROBLEM, 0))
    environment = CountingEnvironment(num_actions=5)
    with pytest.raises(EpisodeError, match="expected the recorded response '1', got '6'") as error:
        await run(make_host(lambda _: environment), merged(growth[:2]))
    assert error.value.kind is FailureKind.ENVIRONMENT
    assert environment.num_closed == 1


def fail(error: Exception):
    def before_step(count: int) -> None:
        if count == 1:
            raise error

    return CountingEnvironment(before_step=before_step)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EnvironmentFailure("the server ended"), "^environment: the server ended$"),
        (TimeoutError("slow"), "^environment: TimeoutError: slow$"),
    ],
)
async def test_an_exception_of_the_environment_is_a_failure_of_the_environment(error, message) -> None:
    environment = fail(error)
    with pytest.raises(EpisodeError, match=message) as raised:
        await run(make_host(lambda _: environment), Episode(PROBLEM, 0))
    assert raised.value.kind is FailureKind.ENVIRONMENT
    assert environment.num_closed == 1


async def test_a_score_that_is_not_finite_is_a_failure_of_the_environment() -> None:
    environment = CountingEnvironment(scores=lambda _: float("nan"))
    with pytest.raises(
        EpisodeError, match=f"^environment: {PROBLEM.environment}: expected a finite score or None, got nan$"
    ) as raised:
        await run(make_host(lambda _: environment), Episode(PROBLEM, 0))
    assert raised.value.kind is FailureKind.ENVIRONMENT


async def test_calls_of_one_turn_reach_a_stateful_environment_one_after_the_other() -> None:
    async def later(count: int) -> None:
        await asyncio.sleep(
            0.01 * (3 - count)
        )  # if the calls ran at the same time, the first call would be answered last

    def script(context: str, sampling: object) -> str:
        return END if "<tool_response>" in context else "".join(call_text(str(number)) for number in range(3)) + END

    environment = CountingEnvironment(before_step=later)
    await run(make_host(lambda _: environment, pool=ScriptedPool(script)), Episode(PROBLEM, 0))
    assert [action.arguments["code"] for action in environment.actions] == ["0", "1", "2"]


async def test_an_unavailable_tool_engine_or_score_is_an_infrastructure_failure() -> None:
    async def unavailable(action) -> ToolCall:
        return ToolCall(action.name, action.arguments, ToolCallStatus.UNAVAILABLE, "", error="sandbox is down")

    def no_engine(context: str, sampling: object) -> str:
        raise EngineError("all engines are down")

    broken = CountingEnvironment()
    broken.step = unavailable  # type: ignore[method-assign]
    hosts = {
        "tool: sandbox is down": make_host(lambda _: broken),
        "engine: all engines are down": make_host(pool=ScriptedPool(no_engine)),
        "the answer could not be checked": make_host(lambda _: CountingEnvironment(scores=lambda _: None)),
    }
    for message, host in hosts.items():
        with pytest.raises(EpisodeError) as error:
            await run(host, Episode(PROBLEM, 0))
        assert (error.value.kind, str(error.value)) == (FailureKind.INFRASTRUCTURE, message)


async def test_an_episode_with_a_poisonous_call_ends_without_a_reward_and_is_not_tried_again() -> None:
    async def poisonous(action) -> ToolCall:
        error = "Poison: killed its zygote"
        return ToolCall(action.name, action.arguments, ToolCallStatus.UNAVAILABLE, "", error=error, ends_episode=True)

    environment = CountingEnvironment()
    environment.step = poisonous  # type: ignore[method-assign]
    episode = Episode(PROBLEM, 0)
    reward, growth = await run(make_host(lambda _: environment), episode)
    assert (reward, episode.stop_reason) == (None, StopReason.UNAVAILABLE)
    assert merged(growth).stop_reason is StopReason.UNAVAILABLE
    assert "Poison" in episode.error


async def test_an_episode_that_exceeds_its_deadline_ends_without_a_reward() -> None:
    environment = CountingEnvironment(before_step=lambda count: asyncio.sleep(3600) if count == 1 else None)
    episode = Episode(PROBLEM, 0)
    reward, growth = await run(make_host(lambda _: environment, deadline_s=0.3), episode)
    assert (reward, episode.stop_reason) == (None, StopReason.DEADLINE)
    assert merged(growth).stop_reason is StopReason.DEADLINE
    assert environment.num_closed == 1


async def test_earlier_tries_count_towards_the_deadline() -> None:
    _, growth = await run(make_host(), Episode(PROBLEM, 0))
    late = replace(merged(growth[:1]), duration_s=61.0)
    reward, _ = await run(make_host(deadline_s=60.0), late)
    assert (reward, late.stop_reason) == (None, StopReason.DEADLINE)


async def test_an_environment_that_ends_the_episode_is_obeyed() -> None:
    async def last(action) -> ToolCall:
        return ToolCall(action.name, action.arguments, ToolCallStatus.OK, "the game is over", ends_episode=True)

    environment = CountingEnvironment(scores=lambda _: 0.5)
    environment.step = last  # type: ignore[method-assign]
    episode = Episode(PROBLEM, 0)
    reward, _ = await run(make_host(lambda _: environment), episode)
    assert (reward, episode.stop_reason, len(episode.turns)) == (0.5, StopReason.FINISHED, 1)


@pytest.mark.parametrize("is_stateful", [True, False])
async def test_the_environment_of_a_finished_episode_without_a_score_is_reset_and_scores_the_episode(
    is_stateful: bool,
) -> None:
    class Answered(CountingEnvironment):
        async def reset(self, problem: Problem) -> InitialState:
            self.expected = problem.answer
            return await super().reset(problem)

        async def score(self, episode: Episode) -> float | None:
            return float(episode.answer == self.expected)

    finished = Episode(PROBLEM, 0)
    with pytest.raises(EpisodeError, match="the answer could not be checked"):
        await run(make_host(lambda _: CountingEnvironment(scores=lambda _: None)), finished)
    host = make_host(lambda _: Answered(is_stateful=is_stateful), pool=ScriptedPool(no_turn), deadline_s=60)
    reward, growth = await run(host, replace(finished, duration_s=59.9999))
    assert (reward, growth) == (1.0, [])


def no_turn(context: str, sampling: object) -> str:
    raise AssertionError("a finished episode has no further turn")


async def test_unpaired_surrogates_of_an_environment_are_replaced() -> None:
    async def step(action) -> ToolCall:
        return ToolCall(action.name, action.arguments, ToolCallStatus.OK, b"a\xff".decode(errors="surrogateescape"))

    def fail(count: int) -> None:
        raise OSError(b"no file \xff".decode(errors="surrogateescape"))

    environment = CountingEnvironment(scores=lambda _: 0.5)
    environment.step = step  # type: ignore[method-assign]
    episode = Episode(PROBLEM, 0)
    await run(make_host(lambda _: environment), episode)
    assert episode.turns[0].tool_calls[0].response == "a?"
    with pytest.raises(EpisodeError, match=r"OSError: no file \?$"):
        await run(make_host(lambda _: CountingEnvironment(before_step=fail)), Episode(PROBLEM, 0))
