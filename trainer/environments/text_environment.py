"""The environment `text`: a game that needs no sandbox (`trainer.environments.games`). The reward is 1 for a win."""

from __future__ import annotations

import json

from trainer.environments.environment import Environment, InitialState
from trainer.environments.games import GameOptions, IllegalMove, create_game
from trainer.episodes.episode import Episode, Problem, ToolCall, ToolCallStatus
from trainer.episodes.reward import INFRASTRUCTURE_STOPS
from trainer.episodes.turn_parser import ToolCallRequest


class TextEnvironment(Environment):
    is_stateful = True
    options_type = GameOptions

    async def reset(self, problem: Problem) -> InitialState:
        self._game = create_game(problem, self.options)
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
