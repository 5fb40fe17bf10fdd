r"""The environment `multiple_choice`: the Python tool, and an answer that is the letter of a choice.

The letter is the whole content of the last `\boxed{}`: B, b, B) or (B).
"""

from __future__ import annotations

from trainer.environments.python_environment import PythonEnvironment
from trainer.episodes.episode import Episode
from trainer.episodes.reward import compared_reward


class MultipleChoiceEnvironment(PythonEnvironment):
    instructions = r"The answer is the letter of the right choice, without its text, inside \boxed{}."

    async def score(self, episode: Episode) -> float | None:
        return compared_reward(episode, lambda answer, letter: answer.upper() in (letter, f"{letter})", f"({letter})"))
