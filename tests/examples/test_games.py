"""Tests of the environment of games. A game can be won, refuses illegal moves, and ends after its last move."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.environments.episodes import ended_episode, opened_environment, problem, tool_call_request
from trainer.config import ConfigError
from trainer.data.sources import read_problems
from trainer.environments.registry import check_problem
from trainer.episodes.episode import Problem, StopReason, ToolCallStatus
from trainer.episodes.turn_parser import ToolCallRequest

GAMES = "examples.games:GameEnvironment"
HANOI = problem(GAMES, {"game": "tower_of_hanoi", "disks": 2, "max_moves": 4}, text="Play.")
GUESSING = problem(GAMES, {"game": "number_guessing", "low": 1, "high": 8, "max_moves": 4})


@pytest.mark.asyncio
async def test_the_tower_of_hanoi_is_won_by_moving_all_disks() -> None:
    async with opened_environment(HANOI) as (environment, initial):
        assert environment.is_stateful
        assert initial.text.startswith("Play.\n\nPeg 1 holds 2 disks")
        assert initial.tools[0]["function"]["parameters"]["required"] == ["source", "target"]
        responses = [
            await environment.step(tool_call_request("move", source=source, target=target))
            for source, target in [(1, 2), (1, 3), (2, 3)]
        ]
        assert await environment.score(ended_episode(HANOI)) == 1
        late = await environment.step(tool_call_request("move", source=3, target=1))
    assert [call.ends_episode for call in responses] == [False, False, True]
    assert responses[1].response == "From bottom to top: peg 1: empty; peg 2: 1; peg 3: 2."
    assert (late.status, late.ends_episode) == (ToolCallStatus.ERROR, True)


@pytest.mark.asyncio
async def test_an_illegal_move_is_an_error_that_costs_a_move() -> None:
    async with opened_environment(HANOI) as (environment, _):
        responses = [
            await environment.step(tool_call_request("move", source=source, target=target))
            for source, target in [(2, 1), (1, 4), (1, 2), (1, 2)]
        ]
        assert await environment.score(ended_episode(HANOI)) == 0
    assert [call.status.value for call in responses] == ["error", "error", "ok", "error"]
    assert responses[0].response == "IllegalMove: peg 2 is empty"
    assert responses[1].response == "IllegalMove: target=4: there are the pegs 1, 2 and 3"
    assert responses[3].response == "IllegalMove: disk 2 cannot lie on the smaller disk 1 There are no moves left."
    assert responses[3].ends_episode


@pytest.mark.asyncio
async def test_a_secret_number_is_found_by_bisection_and_is_the_same_in_each_episode() -> None:
    secrets = []
    for _ in range(2):
        async with opened_environment(GUESSING) as (environment, _):
            low, high = 1, 8
            while True:
                guess = (low + high) // 2
                call = await environment.step(tool_call_request("guess", number=guess))
                low, high = (guess + 1, high) if "higher" in call.response else (low, guess - 1)
                if call.ends_episode:
                    break
            assert await environment.score(ended_episode(GUESSING)) == 1
            secrets.append(guess)
    assert secrets[0] == secrets[1]
    others = {Problem(f"p{number}", "", "", "", GAMES, GUESSING.options) for number in range(20)}
    assert len({await secret(other) for other in others}) > 1


async def secret(problem: Problem) -> int:
    async with opened_environment(problem) as (environment, _):
        for number in range(1, 9):
            if "right" in (await environment.step(tool_call_request("guess", number=number))).response:
                return number
    return 0


@pytest.mark.asyncio
async def test_an_episode_that_infrastructure_ended_has_no_score() -> None:
    async with opened_environment(HANOI) as (environment, _):
        assert await environment.score(ended_episode(HANOI, stop_reason=StopReason.UNAVAILABLE)) is None


@pytest.mark.parametrize(
    "request_",
    [
        ToolCallRequest("push", {"number": 3}),
        *(
            ToolCallRequest("guess", arguments)
            for arguments in ("", "[]", "{", {}, {"number": "3"}, {"number": True}, {"number": 3, "x": 1}, "9" * 9999)
        ),
    ],
)
@pytest.mark.asyncio
async def test_a_malformed_move_is_answered_and_costs_no_move(request_: Any) -> None:
    async with opened_environment(GUESSING) as (environment, _):
        for _ in range(9):
            call = await environment.step(request_)
            assert (call.status, call.ends_episode) == (ToolCallStatus.MALFORMED, False)
            assert len(call.response) < 200
        call = await environment.step(ToolCallRequest("guess", json.dumps({"number": 3})))
        assert call.status is ToolCallStatus.OK


@pytest.mark.parametrize(
    ("options", "expected_text"),
    [
        ({}, "options: Unable to extract tag using discriminator 'game'"),
        ({"game": "chess"}, "'chess' found using 'game' does not match"),
        ({"game": "tower_of_hanoi", "disks": 0}, "options.tower_of_hanoi.disks: Input should be greater"),
        ({"game": "number_guessing", "low": 3, "high": 2}, "expected low <= high, got low=3 and high=2"),
    ],
)
def test_a_wrong_option_of_a_game_is_an_error_that_names_it(options: dict[str, object], expected_text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected_text)):
        check_problem(problem(GAMES, options))


def test_the_problem_in_the_readme_is_valid(tmp_path: Path) -> None:
    readme = Path(__file__).parents[2] / "docs/examples.md"
    (row,) = re.findall(r"^{.*GameEnvironment.*}$", readme.read_text(encoding="utf-8"), re.MULTILINE)
    (tmp_path / "games.jsonl").write_text(row, encoding="utf-8")
    (game,) = read_problems(str(tmp_path / "games.jsonl"))
    check_problem(game)
