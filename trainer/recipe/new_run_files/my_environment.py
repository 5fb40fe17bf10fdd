"""An environment of your own: the tools of an episode, and its reward. Rows of the data name it as
`my_environment:Warehouse`.

The model looks up how many pieces of an item a warehouse has. Replace `TOOL`, `step` and `score` by yours.
docs/environments.md describes the interface, and environments with processes, files or a sandbox.
"""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from trainer.config import STRICT
from trainer.environments.environment import Environment, InitialState
from trainer.episodes.episode import Episode, Problem, ToolCall, ToolCallStatus
from trainer.episodes.reward import exact_match_reward
from trainer.episodes.turn_parser import ToolCallRequest

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Return how many pieces of an item are in stock.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
EXPECTED_CALL = 'expected look_up with {"item": TEXT}'
"""What the model reads after a call with another tool or other arguments."""


@dataclass(frozen=True, config=STRICT)
class WarehouseOptions:
    """The field `options` of a row. A row with other options is refused before the run starts."""

    stock: dict[str, int]
    """The number of pieces of each item."""


class Warehouse(Environment):
    options_type = WarehouseOptions
    instructions = "Put the number into \\boxed{}."

    async def reset(self, problem: Problem) -> InitialState:
        """Begin an episode. Return what the model reads, and its tools."""
        return InitialState(self.prompt(problem), (TOOL,))

    async def step(self, action: ToolCallRequest) -> ToolCall:
        """Run one tool call. What is wrong with a call is data: the model reads it."""
        match action.arguments:
            case {"item": str(item)} if action.name == "look_up":
                if item in self.options.stock:
                    response = str(self.options.stock[item])
                    return ToolCall(action.name, action.arguments, ToolCallStatus.OK, response)
                return ToolCall(action.name, action.arguments, ToolCallStatus.ERROR, f"no item {item!r:.80}")
        return ToolCall(action.name, action.arguments, ToolCallStatus.MALFORMED, EXPECTED_CALL)

    async def score(self, episode: Episode) -> float | None:
        """Return the reward of a finished episode; None if the infrastructure failed."""
        return exact_match_reward(episode)
