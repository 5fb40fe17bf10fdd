r"""Multiple-choice problems with four choices: a converter of their files, and an environment that scores the letter.

    python -m examples.multiple_choice data/gpqa_diamond.csv --out data/gpqa_diamond.jsonl

writes problems that `[eval] data` can name. A row of the file has one of two forms:

| fields                                                                    | the right choice            |
|---------------------------------------------------------------------------|-----------------------------|
| `Question`, `Correct Answer`, `Incorrect Answer 1` to `Incorrect Answer 3` | `Correct Answer`            |
| `question`, `choices` (a list of four texts), `answer`                    | the index from 0, or A to D |

The first form is that of GPQA's CSV files. The case of field names is ignored.

Invariants:
- The order of the choices depends on the problem's id and on nothing else, so it is the same in every run.
- `Problem.text` lists the choices as (A) to (D), and `Problem.answer` is the letter of the right one.

The content of the answer's `\boxed{}` names a choice in one of three forms. Anything else names no choice: two letters,
a text without a letter.

| form                  | examples             | condition                                           |
|-----------------------|----------------------|-----------------------------------------------------|
| a letter              | B, b, B., (B), $B$   |                                                     |
| a marked letter, text | B: neutron, (B) 1 eV | the text has no other letter and is no other choice |
| a letter, text        | B neutron            | the text is that of the choice                      |
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from trainer.data.problems import write_problems
from trainer.data.rows import DataError
from trainer.data.sources import iter_rows
from trainer.environments.python_environment import PythonEnvironment
from trainer.episodes.episode import Episode, Problem
from trainer.episodes.exact_match import plain_answer
from trainer.episodes.reward import compared_reward

ENVIRONMENT = "examples.multiple_choice:MultipleChoiceEnvironment"
ID_FIELDS = ("id", "unique_id", "record id")

LETTERS = "ABCD"
SINGLE_CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
"""The fields of GPQA's files, each with one choice."""
_CHOICE = re.compile(r"^\(([A-Z])\) (.*?)(?=^\([A-Z]\) |\Z)", re.MULTILINE | re.DOTALL)
"""A choice in the text of a problem, as `_problem` writes it."""
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


def read_problems(source: str) -> list[Problem]:
    """Return the problems of a file, or of a data set on the hub. Raises `DataError` for a row that is no problem."""
    name, problems = Path(source).stem, []
    for number, row in enumerate(iter_rows(source)):
        try:
            problems.append(_problem(row, name, number))
        except DataError as error:
            raise DataError(f"{source}: row {number}: {error}") from None
    return problems


def _problem(row: Any, source: str, number: int) -> Problem:
    """Return the problem in a row. Raises `DataError` with the name of an invalid field."""
    if not isinstance(row, Mapping) or None in row:
        raise DataError(f"expected an object, or as many cells as in the first line, got {row!r:.200}")
    fields = {str(name).lower(): value for name, value in row.items()}
    if (listed := fields.get("choices")) is not None:
        if not isinstance(listed, list) or len(listed) != len(LETTERS):
            raise DataError(f"choices: expected a list of {len(LETTERS)} texts, got {listed!r:.200}")
        choices = [_text(choice, f"choices.{index}") for index, choice in enumerate(listed)]
        right = _right_index(fields.get("answer"))
    else:
        choices, right = [_text(fields.get(name.lower()), name) for name in SINGLE_CHOICES], 0
    if choices.count(choices[right]) > 1:
        raise DataError(f"expected four choices of which one is right, but {choices[right]!r:.80} occurs twice")
    id = next((str(fields[name]) for name in ID_FIELDS if fields.get(name) not in (None, "")), f"{source}-{number}")
    order = sorted(range(len(LETTERS)), key=lambda index: sha256(f"{id!a} {index}".encode()).digest())
    lines = [_text(fields.get("question"), "question"), ""]
    lines += [f"({letter}) {choices[index]}" for letter, index in zip(LETTERS, order, strict=True)]
    return Problem(id, "\n".join(lines), LETTERS[order.index(right)], source, ENVIRONMENT)


def _right_index(answer: Any) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(LETTERS):
        return answer
    if isinstance(answer, str) and (letter := answer.strip().upper()) in [*LETTERS]:
        return LETTERS.index(letter)
    raise DataError(f"answer: expected an index from 0 to 3 or a letter from A to D, got {answer!r:.80}")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not (text := value.strip()):
        raise DataError(f"{name}: expected text, got {value!r:.80}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert multiple-choice problems for rstar-train.")
    parser.add_argument("source", help="a .csv, .json, .jsonl or .parquet file, or owner/name[@config][:split]")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the JSONL file to write")
    args = parser.parse_args()
    try:
        problems = read_problems(args.source)
    except DataError as error:
        sys.exit(str(error))
    write_problems(problems, args.out)
    print(f"{args.out}: {len(problems)} problems")


if __name__ == "__main__":
    main()
