r"""The environment `multiple_choice`: the Python tool, and an answer that is the letter of a choice.

The letter is the whole content of the last `\boxed{}`: B, b, B) or (B).
"""

from __future__ import annotations

from dataclasses import replace

from trainer.environments.environment import InitialState
from trainer.environments.python_environment import PythonEnvironment
from trainer.episodes.episode import Episode, Problem
from trainer.episodes.reward import compared_reward

INSTRUCTIONS = r"The answer is the letter of the right choice, without its text, inside \boxed{}."


class MultipleChoiceEnvironment(PythonEnvironment):
    async def reset(self, problem: Problem) -> InitialState:
        state = await super().reset(problem)
        return replace(state, text=f"{state.text}\n\n{INSTRUCTIONS}")

    async def score(self, episode: Episode) -> float | None:
        return compared_reward(episode, lambda answer, letter: answer.upper() in (letter, f"{letter})", f"({letter})"))
