r"""The environment `multiple_choice`: the Python tool, and an answer that is the letter of a choice.

The content of the answer's `\boxed{}` names a choice in one of three forms:

| form                  | examples             | condition                                           |
|-----------------------|----------------------|-----------------------------------------------------|
| a letter              | B, b, B., (B), $B$   |                                                     |
| a marked letter, text | B: neutron, (B) 1 eV | the text has no other letter and is no other choice |
| a letter, text        | B neutron            | the text is that of the choice                      |

Anything else names no choice: two letters, a text without a letter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.environments.python_environment import PythonEnvironment
from trainer.episodes.episode import Episode
from trainer.episodes.exact_match import plain_answer
from trainer.episodes.reward import compared_reward

_CHOICE = re.compile(r"^\(([A-Z])\) (.*?)(?=^\([A-Z]\) |\Z)", re.MULTILINE | re.DOTALL)
"""A choice in the text of a problem, as `trainer.data.multiple_choice` writes it."""
_ANSWER = re.compile(
    r"(?P<marked>\([A-Za-z]\)|\{[A-Za-z]\}|\[[A-Za-z]\]|\$[A-Za-z]\$|[A-Za-z](?=[.:)]|\s*[-–—]\s))"
    r"[.:)]?(?:\s*[-–—]\s)?(?P<marked_text>.*)|(?P<letter>[A-Za-z])(?:\s+(?P<text>.*))?",
    re.DOTALL,
)
_LETTER = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z])|(?<=\()[a-z](?=\))")
"""A letter in a text. Other lower-case letters may be words or symbols."""


class MultipleChoiceEnvironment(PythonEnvironment):
    instructions = r"The answer is the letter of the right choice, without its text, inside \boxed{}."

    async def score(self, episode: Episode) -> float | None:
        choices = {letter: _without_spaces(text) for letter, text in _CHOICE.findall(episode.problem.text)}
        return compared_reward(episode, lambda answer, letter: chosen_letter(answer, choices) == letter)


def chosen_letter(answer: str, choices: Mapping[str, str]) -> str | None:
    """Return the letter of the choice that `answer` names; None if it names none. `choices` are texts without spaces by
    their letters."""
    if not (match := _ANSWER.fullmatch(answer.strip())):
        return None
    letter = (match["letter"] or match["marked"].strip("(){}[]$")).upper()
    text = match["text"] or match["marked_text"] or ""
    if not text or choices.get(letter) == _without_spaces(text):
        return letter
    if match["letter"] or _without_spaces(text) in choices.values():
        return None
    return None if {found.upper() for found in _LETTER.findall(text)} - {letter} else letter


def _without_spaces(text: str) -> str:
    return "".join(plain_answer(text).split())
