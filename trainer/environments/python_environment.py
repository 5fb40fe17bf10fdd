"""The environment `python`: the Python tool, and the answer check in the sandbox. Its calls share no state."""

from __future__ import annotations

from collections.abc import Sequence

from sandbox.tool import TOOL_SCHEMA
from trainer.environments.environment import Environment, InitialState, NoOptions
from trainer.environments.services import Services
from trainer.episodes.episode import Episode, Problem, ToolCall
from trainer.episodes.reward import score_episodes
from trainer.episodes.turn_parser import ToolCallRequest


class PythonEnvironment(Environment):
    needs_sandbox = True

    def __init__(self, services: Services, options: NoOptions) -> None:
        super().__init__(services, options)
        self._sandbox = services.required_sandbox

    async def reset(self, problem: Problem) -> InitialState:
        return InitialState(self.prompt(problem), (TOOL_SCHEMA,))

    async def step(self, action: ToolCallRequest) -> ToolCall:
        return await self._sandbox.python_tool.call(action.name, action.arguments)

    async def score(self, episode: Episode) -> float | None:
        (reward,) = await score_episodes([episode], self._sandbox.answer_checker.verify)
        return reward

    async def score_group(self, episodes: Sequence[Episode]) -> list[float | None]:
        if type(self).score is not PythonEnvironment.score:  # a subclass has a rule of its own
            return await super().score_group(episodes)
        return await score_episodes(episodes, self._sandbox.answer_checker.verify)
