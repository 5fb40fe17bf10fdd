"""Tests of reward functions of the user. A call that fails leaves its episodes unscored, with the reason; it is never a
reward of 0 and never an exception."""

from __future__ import annotations

import asyncio
import math
import re
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.trainer.environments.episodes import ended_episode, opened_environment, problem
from tests.trainer.fakes import ScriptedPool, ScriptedTools
from tests.trainer.rollout.conftest import chat_format  # noqa: F401  a fixture
from tests.trainer.rollout.scripted_rollout import PROBLEM, collect, text_by_seed
from trainer.config import ConfigError, EnginesConfig, RewardConfig, RunConfig, StageConfig
from trainer.environments import reward_loop
from trainer.environments.environment import EnvironmentFailure
from trainer.environments.own_reward import RewardCalls, check_reward, load_reward
from trainer.environments.registry import check_problem
from trainer.episodes.episode import Episode, StopReason, Turn

BLOCKED = threading.Event()
"""The calls of `block` and `swallow` end when a test sets it."""
RUNNING: list[int] = []
"""The samples of the episodes whose calls of `overlap` have begun."""
GAME = {"game": "number_guessing"}


@pytest.fixture(autouse=True)
def end_of_blocked_calls() -> Iterator[None]:
    BLOCKED.clear()
    RUNNING.clear()
    yield
    BLOCKED.set()


def length(response: str) -> int:
    return len(response)


async def length_async(response: str) -> int:
    await asyncio.sleep(0)
    return len(response)


def returns_coroutine(response: str) -> Any:
    return length_async(response)


def by_answer(problem: Any, response: str, *, bonus: float = 0.25) -> float:
    return (response == problem.answer) + bonus


def takes_any(**arguments: Any) -> float:
    assert sorted(arguments) == ["episode", "problem", "response"]
    return -3.5


def ranks(responses: list[str], episodes: list[Episode]) -> list[int]:
    return [
        sorted(responses, key=len).index(response) + episode.sample
        for response, episode in zip(responses, episodes, strict=True)
    ]


async def array(responses: list[str]) -> Any:
    return numpy.array([len(response) / 2 for response in responses])


def too_few(responses: list[str]) -> list[float]:
    return [1.0] * (len(responses) - 1)


def text_for_a_group(responses: list[str]) -> str:
    return "1" * len(responses)


def one_is_nan(responses: list[str]) -> list[float]:
    return [math.nan, *[1.0] * (len(responses) - 1)]


def by_sample(episode: Episode) -> Any:
    """Return a value by the number of the sample, or raise an exception."""
    match VALUES[episode.sample]:
        case BaseException() as error:
            raise error
        case value:
            return value


async def by_sample_async(episode: Episode) -> Any:
    return by_sample(episode)


def overlap(episode: Episode) -> float:
    """Return once two calls have begun."""
    RUNNING.append(episode.sample)
    while len(RUNNING) < 2:
        assert not BLOCKED.wait(0.001)
    return 1.0


async def overlap_async(episode: Episode) -> float:
    RUNNING.append(episode.sample)
    while len(RUNNING) < 2:  # noqa: ASYNC110  the other call is in this loop
        await asyncio.sleep(0)
    return 1.0


def block(response: str) -> float:
    BLOCKED.wait()
    return 1.0


async def swallow(response: str) -> float:
    """Ignore each cancellation until the test ends."""
    while not BLOCKED.is_set():
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            continue
    return 1.0


async def block_its_loop(response: str) -> float:
    """Block the event loop in which it runs, except for the response "fast"."""
    if response != "fast":
        BLOCKED.wait()
    return 1.0


def positional(response: str, /) -> float:
    return 1.0


def other_arguments(completion: str, truth: str) -> float:
    return 1.0


VALUES = [
    1, True, -2.5, numpy.float32(0.5), numpy.array([3.0]),
    None, "1", math.nan, -math.inf, 10**400, [1.0], numpy.array([1.0, 2.0]), object,
    ValueError("no"), KeyError("k"), SystemExit(3), StopIteration(), KeyboardInterrupt(), asyncio.CancelledError(),
]  # fmt: skip
REWARDS = [1.0, 1.0, -2.5, 0.5, 3.0]
REASONS = [
    "expected a finite number, got None", "expected a finite number, got '1'", "expected a finite number, got nan",
    "expected a finite number, got -inf", "OverflowError: ", "expected a finite number, got [1.0]",
    "expected a finite number, got array([1., 2.])",
    "expected a finite number, got <class 'object'>", "ValueError: no", "KeyError: 'k'", "SystemExit: 3",
    "StopIteration: ", "KeyboardInterrupt: ", "CancelledError",
]  # fmt: skip


def episodes_with(*responses: str, **fields: Any) -> list[Episode]:
    return [
        Episode(replace(PROBLEM, **fields), sample, turns=[Turn(0, 1, text)], stop_reason=StopReason.FINISHED)
        for sample, text in enumerate(responses)
    ]


async def rewards_of(function: Any, episodes: list[Episode], **settings: Any) -> list[float | None]:
    return await RewardCalls(RewardConfig(**settings)).score(load_reward(f"{__name__}:{function.__name__}"), episodes)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("function", "rewards"),
    [
        (length, [1, 2, 4]),
        (length_async, [1, 2, 4]),
        (returns_coroutine, [1, 2, 4]),
        (by_answer, [0.25, 1.25, 0.25]),
        (takes_any, [-3.5] * 3),
        (ranks, [0, 2, 4]),
        (array, [0.5, 1, 2]),
    ],
)
async def test_a_function_gets_the_arguments_that_it_names(function: Any, rewards: list[float]) -> None:
    assert await rewards_of(function, episodes_with("a", "42", "abcd")) == rewards


@pytest.mark.asyncio
async def test_a_response_is_the_text_of_all_turns() -> None:
    (episode,) = episodes_with("a")
    episode.turns.append(Turn(1, 2, "bcd"))
    assert await rewards_of(length, [episode]) == [len("a\nbcd")]


@pytest.mark.asyncio
@pytest.mark.parametrize("function", [by_sample, by_sample_async])
async def test_a_value_that_is_no_finite_number_leaves_its_episode_unscored_with_the_reason(function: Any) -> None:
    left_out = (StopIteration,) if function is by_sample_async else ()  # a coroutine cannot raise it
    episodes = [one for one in episodes_with(*["x"] * len(VALUES)) if not isinstance(VALUES[one.sample], left_out)]
    rewards = await rewards_of(function, episodes)
    assert rewards[: len(REWARDS)] == REWARDS
    assert rewards[len(REWARDS) :] == [None] * (len(episodes) - len(REWARDS))
    for episode in episodes[len(REWARDS) :]:
        reason = f"reward {__name__}:{function.__name__}: {REASONS[episode.sample - len(REWARDS)]}"
        assert episode.error.startswith(reason), episode.error
    assert not any(episode.error for episode in episodes[: len(REWARDS)])


@pytest.mark.asyncio
async def test_a_tensor_of_one_element_is_a_number() -> None:
    torch = pytest.importorskip("torch")
    VALUES.append(torch.tensor([0.25], requires_grad=True))
    try:
        assert await rewards_of(by_sample, [replace(episodes_with("x")[0], sample=len(VALUES) - 1)]) == [0.25]
    finally:
        VALUES.pop()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("function", "reason"),
    [(too_few, "expected a list of 3 numbers, got a list of 2"), (text_for_a_group, "list of 3 numbers, got a str")],
)
async def test_a_wrong_number_of_values_leaves_the_group_unscored(function: Any, reason: str) -> None:
    episodes = episodes_with("a", "b", "c")
    assert await rewards_of(function, episodes) == [None] * 3
    assert all(reason in episode.error for episode in episodes)


@pytest.mark.asyncio
async def test_one_wrong_value_of_a_group_leaves_only_its_episode_unscored() -> None:
    episodes = episodes_with("a", "b", "c")
    assert await rewards_of(one_is_nan, episodes) == [None, 1.0, 1.0]
    assert [bool(episode.error) for episode in episodes] == [True, False, False]


@pytest.mark.asyncio
async def test_episodes_that_the_infrastructure_ended_are_not_scored() -> None:
    episodes = episodes_with("a", "b", "c")
    episodes[1].stop_reason = StopReason.UNAVAILABLE
    assert await rewards_of(ranks, episodes) == [0, None, 3]
    assert await rewards_of(ranks, episodes[1:2]) == [None]


@pytest.mark.asyncio
@pytest.mark.parametrize("function", [overlap, overlap_async])
async def test_calls_run_at_the_same_time(function: Any) -> None:
    assert await rewards_of(function, episodes_with("a", "b")) == [1.0, 1.0]


@pytest.mark.asyncio
@pytest.mark.parametrize("function", [block, swallow])
async def test_a_call_that_never_returns_is_abandoned_after_its_time_limit(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_loop, "BLOCKED_S", 60)  # its loop answers, however slow this machine is
    (episode,) = episodes_with("a")
    assert await rewards_of(function, [episode], timeout_s=0.01) == [None]
    assert episode.error.endswith("no value after 0.01 s (reward.timeout_s)")
    BLOCKED.set()  # before the event loop ends, which awaits its tasks


@pytest.mark.asyncio
async def test_an_async_function_that_blocks_stops_no_other_task_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_loop, "BLOCKED_S", 0.05)
    calls = RewardCalls(RewardConfig(timeout_s=0.05, max_concurrent=1))
    function, threads_before = load_reward(f"{__name__}:block_its_loop"), threading.active_count()
    ticks, has_ended = 0, asyncio.Event()

    async def tick() -> None:
        nonlocal ticks
        while not has_ended.is_set():
            ticks += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tick())
        (blocked,) = episodes_with("slow")
        assert await calls.score(function, [blocked]) == [None]
        has_ended.set()
    assert ticks > 10, "the collection's loop stood still"
    assert "(reward.timeout_s); an `async def` blocks the loop that all of them share: await instead" in blocked.error
    short_limit = calls._config
    calls._config = RewardConfig(max_concurrent=1)  # the next call is in time, however slow this machine is
    assert await calls.score(function, episodes_with("fast")) == [1.0], "no new loop has replaced the blocked one"
    assert threading.active_count() - threads_before == 2
    calls._config = short_limit
    blocked_again, refused = episodes_with("slow", "slow")
    assert await calls.score(function, [blocked_again]) == [None]
    assert await calls.score(function, [refused]) == [None]
    assert refused.error.endswith("2 earlier calls have not returned; mend the function, which blocks")
    BLOCKED.set()
    while calls._num_threads:  # noqa: ASYNC110  threads end here, without an event
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_abandoned_threads_are_bounded_until_they_end() -> None:
    calls, function = RewardCalls(RewardConfig(timeout_s=0.01, max_concurrent=2)), load_reward(f"{__name__}:block")
    threads_before = threading.active_count()
    episodes = episodes_with(*["a"] * 9)
    assert await calls.score(function, episodes) == [None] * 9
    assert threading.active_count() - threads_before == 4, "2 calls at once, and as many abandoned ones"
    reasons = [re.sub(".*: ", "", episode.error) for episode in episodes]
    assert reasons[:4] == ["no value after 0.01 s (reward.timeout_s)"] * 4
    assert reasons[4:] == ["4 earlier calls have not returned; mend the function, which blocks"] * 5
    BLOCKED.set()
    while calls._num_threads:  # noqa: ASYNC110  threads end here, without an event
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:score", "expected package.module:function; cannot be imported (No module named"),
        ("math:no_such_name", "cannot be imported (module 'math' has no attribute 'no_such_name')"),
        ("math", "expected package.module:function; cannot be imported"),
        ("math:pi", "is not a callable object"),
        (f"{__name__}:positional", "expected arguments named problem, response, episode, or problem, responses, "),
        (f"{__name__}:other_arguments", "episodes, got completion, truth"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_in_one_line_before_anything_starts(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as of_problem:
        check_problem(replace(problem("examples.games:GameEnvironment", GAME), reward=name))
    with pytest.raises(ConfigError) as of_setting:
        check_reward(RunConfig(reward=RewardConfig(function=name)))
    for raised in (of_problem, of_setting):
        assert reason in str(raised.value) and f"reward {name!r}" in str(raised.value)
        assert "\n" not in str(raised.value)


def test_a_function_for_groups_is_refused_where_each_episode_is_scored_alone() -> None:
    def config(function: Any, **stage: Any) -> RunConfig:
        return RunConfig(
            reward=RewardConfig(function=f"{__name__}:{function.__name__}"),
            engines=EnginesConfig(kind="vllm", endpoints=("http://localhost:8000",)),
            stages={"a": StageConfig(**stage)},
        )

    check_reward(config(ranks))
    check_reward(config(length, episodes="cluster"))
    with pytest.raises(ConfigError, match=r"together, but stages\.a scores each one alone: expected a function of"):
        check_reward(config(ranks, episodes="cluster"))
    with pytest.raises(ConfigError, match="together, but collect scores each one alone"):
        check_reward(config(ranks), is_collection=True)


@pytest.mark.asyncio
async def test_a_reward_function_replaces_the_score_of_an_environment() -> None:
    own = replace(problem("examples.games:GameEnvironment", GAME), reward=f"{__name__}:length")
    async with opened_environment(own) as (environment, initial):
        assert environment.is_stateful and type(environment).is_stateful
        assert initial.tools[0]["function"]["name"] == "guess"
        episode = replace(ended_episode(own), turns=[Turn(0, 1, "abc")])
        assert await environment.score(episode) == 3
        assert await environment.score(ended_episode(own, stop_reason=StopReason.UNAVAILABLE)) is None
        assert await environment.score_group([]) == []
    broken = replace(own, reward=f"{__name__}:too_few")
    async with opened_environment(broken) as (environment, _):
        with pytest.raises(EnvironmentFailure, match="expected a list of 1 numbers, got a list of 0"):
            await environment.score(ended_episode(broken))


@pytest.mark.asyncio
async def test_the_collector_keeps_the_reason_of_each_unscored_episode(chat_format: Any) -> None:  # noqa: F811
    own = replace(PROBLEM, reward=f"{__name__}:one_is_nan")
    (group,) = await collect(ScriptedPool(text_by_seed), chat_format, ScriptedTools(), [own], 3)
    assert [episode.reward for episode in group] == [None, 1.0, 1.0]
    assert [episode.stop_reason for episode in group] == [StopReason.FINISHED] * 3
    assert group[0].error == f"reward {__name__}:one_is_nan: expected a finite number, got nan"


@pytest.mark.asyncio
async def test_the_documented_functions_work_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = (Path(__file__).parents[3] / "docs/environments.md").read_text()
    section = document.partition("## A reward of your own")[2].partition("\n## ")[0]
    (tmp_path / "my_rewards.py").write_text(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0])
    monkeypatch.syspath_prepend(tmp_path)
    episodes = episodes_with("It is 42.", "41", "42" + "." * 9998)
    for episode, size in zip(episodes, (30, 20, 40), strict=True):
        episode.append_sampled(range(size), None, 0)
    (toml,) = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    assert RewardConfig(**tomllib.loads(toml)["reward"]) == RewardConfig("my_rewards:score", correct_above=0.5)
    calls = RewardCalls()
    assert await calls.score(load_reward("my_rewards:score"), episodes) == pytest.approx([0.9991, -0.0002, 0.5])
    assert await calls.score(load_reward("my_rewards:rank"), episodes) == [0.5, 1, 0]
