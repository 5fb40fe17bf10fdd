"""An environment of games for one player, which needs no sandbox. The reward is 1 for a win.

    {"id": "h1", "text": "Play.", "answer": "", "source": "games", "environment": "examples.games:GameEnvironment",
     "options": {"game": "tower_of_hanoi", "disks": 3}}

Each game has one tool, whose arguments are whole numbers.

Invariants:
- The state depends on the problem and on the moves only.
- A move that the rules forbid raises `IllegalMove`, and changes nothing except the number of moves left.
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from trainer.config import STRICT
from trainer.environments.environment import Environment, InitialState
from trainer.episodes.chat_format import ToolSchema
from trainer.episodes.episode import Episode, Problem, ToolCall, ToolCallStatus
from trainer.episodes.reward import INFRASTRUCTURE_STOPS
from trainer.episodes.turn_parser import ToolCallRequest


class IllegalMove(ValueError):
    """A move that the rules forbid. The model reads the message."""


@dataclass(frozen=True, config=STRICT)
class NumberGuessingOptions:
    game: Literal["number_guessing"]
    low: int = 1
    high: int = 100
    max_moves: Annotated[int, Field(ge=1)] = 10

    @model_validator(mode="after")
    def _check_range(self) -> NumberGuessingOptions:
        if self.low > self.high:
            raise ValueError(f"expected low <= high, got low={self.low} and high={self.high}")
        return self


@dataclass(frozen=True, config=STRICT)
class TowerOfHanoiOptions:
    game: Literal["tower_of_hanoi"]
    disks: Annotated[int, Field(ge=1, le=12)] = 3
    max_moves: Annotated[int, Field(ge=1)] = 20


class Game(ABC):
    tool: ClassVar[str]
    tool_description: ClassVar[str]
    parameters: ClassVar[dict[str, str]]
    """The description of each argument of the tool."""
    rules: str
    """The text that the model reads after the problem."""

    def __init__(self, problem: Problem, options: Any) -> None:
        self.moves_left, self.is_won = options.max_moves, False

    @property
    def is_over(self) -> bool:
        return self.is_won or not self.moves_left

    @property
    def schema(self) -> ToolSchema:
        properties = {name: {"type": "integer", "description": text} for name, text in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.tool, "description": self.tool_description, "parameters": parameters}
        return {"type": "function", "function": function}

    def move(self, **arguments: int) -> str:
        """Make one move. Return the text that the model reads. Raises `IllegalMove`."""
        self.moves_left -= 1
        return self._move(**arguments)

    @abstractmethod
    def _move(self, **arguments: int) -> str: ...


class NumberGuessing(Game):
    tool, tool_description = "guess", "Guess the number. The answer says whether it is higher, lower or right."
    parameters: ClassVar = {"number": "your guess"}

    def __init__(self, problem: Problem, options: NumberGuessingOptions) -> None:
        super().__init__(problem, options)
        self._number = random.Random(problem.id).randint(options.low, options.high)
        self.rules = (
            f"There is a secret whole number from {options.low} to {options.high}. Find it with the tool guess, in at "
            f"most {options.max_moves} guesses."
        )

    def _move(self, **arguments: int) -> str:
        guess = arguments["number"]
        self.is_won = guess == self._number
        if self.is_won:
            return f"{guess} is right."
        return f"The number is {'higher' if self._number > guess else 'lower'} than {guess}."


class TowerOfHanoi(Game):
    tool, tool_description = "move", "Move the top disk of one peg to another peg."
    parameters: ClassVar = {"source": "the peg to take the disk from: 1, 2 or 3", "target": "the peg to put it on"}

    def __init__(self, problem: Problem, options: TowerOfHanoiOptions) -> None:
        super().__init__(problem, options)
        self._pegs: list[list[int]] = [list(range(options.disks, 0, -1)), [], []]
        self.rules = (
            f"Peg 1 holds {options.disks} disks, the smallest (1) on top; pegs 2 and 3 are empty. Move all disks to "
            "peg 3 with the tool move, one disk at a time, never onto a smaller disk, in at most "
            f"{options.max_moves} moves."
        )

    def _move(self, **arguments: int) -> str:
        for name, peg in arguments.items():
            if peg not in (1, 2, 3):
                raise IllegalMove(f"{name}={peg}: there are the pegs 1, 2 and 3")
        source, target = (self._pegs[arguments[name] - 1] for name in ("source", "target"))
        if not source:
            raise IllegalMove(f"peg {arguments['source']} is empty")
        if target and target[-1] < source[-1]:
            raise IllegalMove(f"disk {source[-1]} cannot lie on the smaller disk {target[-1]}")
        target.append(source.pop())
        self.is_won = not self._pegs[0] and not self._pegs[1]
        pegs = "; ".join(
            f"peg {number}: {', '.join(map(str, peg)) or 'empty'}" for number, peg in enumerate(self._pegs, 1)
        )
        return f"From bottom to top: {pegs}.{' All disks are on peg 3.' if self.is_won else ''}"


GameOptions = Annotated[NumberGuessingOptions | TowerOfHanoiOptions, Field(discriminator="game")]
GAMES: dict[type, type[Game]] = {NumberGuessingOptions: NumberGuessing, TowerOfHanoiOptions: TowerOfHanoi}


class GameEnvironment(Environment):
    is_stateful = True
    options_type = GameOptions

    async def reset(self, problem: Problem) -> InitialState:
        self._game = GAMES[type(self.options)](problem, self.options)
        return InitialState(f"{problem.text}\n\n{self._game.rules}".strip(), (self._game.schema,))

    async def step(self, action: ToolCallRequest) -> ToolCall:
        game = self._game
        if game.is_over:
            return self._response(action, ToolCallStatus.ERROR, "The game is over.")
        if action.name != game.tool:
            message = f"NameError: there is no tool {action.name!r:.80}; there is {game.tool}"
            return self._response(action, ToolCallStatus.MALFORMED, message)
        try:
            arguments = json.loads(action.arguments) if isinstance(action.arguments, str) else action.arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict) or {name: type(value) for name, value in arguments.items()} != dict.fromkeys(
            game.parameters, int
        ):
            message = f"TypeError: expected whole numbers for {', '.join(game.parameters)}"
            return self._response(action, ToolCallStatus.MALFORMED, message)
        try:
            response = game.move(**arguments)
        except IllegalMove as error:
            return self._response(action, ToolCallStatus.ERROR, f"IllegalMove: {error}")
        return self._response(action, ToolCallStatus.OK, response)

    async def score(self, episode: Episode) -> float | None:
        return None if episode.stop_reason in INFRASTRUCTURE_STOPS else float(self._game.is_won)

    def _response(self, action: ToolCallRequest, status: ToolCallStatus, text: str) -> ToolCall:
        game = self._game
        if game.is_over and not game.is_won:
            text += " There are no moves left."
        return ToolCall(action.name, action.arguments, status, text, ends_episode=game.is_over)
