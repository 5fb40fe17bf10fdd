r"""The environment `multiple_choice`: the Python tool, and an answer that is the letter of a choice.

The letter is the whole content of the last `\boxed{}`: B, b, B., B), (B), {B} or $B$.
"""

from __future__ import annotations

from trainer.environments.python_environment import PythonEnvironment
from trainer.episodes.episode import Episode
from trainer.episodes.reward import compared_reward


class MultipleChoiceEnvironment(PythonEnvironment):
    instructions = r"The answer is the letter of the right choice, without its text, inside \boxed{}."

    async def score(self, episode: Episode) -> float | None:
        return compared_reward(episode, _is_letter)


def _is_letter(answer: str, letter: str) -> bool:
    forms = (letter, f"{letter}.", f"{letter})", f"({letter})", f"{{{letter}}}", f"${letter}$")
    return answer.upper() in forms
