"""Reads multiple-choice problems with four choices, from a row in one of two forms:

| fields                                                                    | the right choice            |
|---------------------------------------------------------------------------|-----------------------------|
| `Question`, `Correct Answer`, `Incorrect Answer 1` to `Incorrect Answer 3` | `Correct Answer`            |
| `question`, `choices` (a list of four texts), `answer`                    | the index from 0, or A to D |

The first form is that of GPQA's CSV files. The case of field names is ignored.

Invariants:
- The order of the choices depends on the problem's id and on nothing else, so it is the same in every run.
- `Problem.text` lists the choices as (A) to (D), and `Problem.answer` is the letter of the right one.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from trainer.data.rows import DataError
from trainer.episodes.episode import Problem

LETTERS = "ABCD"
SINGLE_CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
"""The fields of GPQA's files, each with one choice."""


def read_multiple_choice(row: Any, id: str, source: str) -> Problem | None:
    """Return the problem in `row`. None if the row has no field with choices. Raises `DataError` with the name of an
    invalid field."""
    fields = {str(name).lower(): value for name, value in row.items()} if isinstance(row, Mapping) else {}
    if (listed := fields.get("choices")) is not None:
        if not isinstance(listed, list) or len(listed) != len(LETTERS):
            raise DataError(f"choices: expected a list of {len(LETTERS)} texts, got {listed!r:.200}")
        choices = [_text(choice, f"choices.{index}") for index, choice in enumerate(listed)]
        right = _right_index(fields.get("answer"))
    elif any(name.lower() in fields for name in SINGLE_CHOICES):
        choices, right = [_text(fields.get(name.lower()), name) for name in SINGLE_CHOICES], 0
    else:
        return None
    if choices.count(choices[right]) > 1:
        raise DataError(f"expected four choices of which one is right, but {choices[right]!r:.80} occurs twice")
    order = sorted(range(len(LETTERS)), key=lambda index: sha256(f"{id!a} {index}".encode()).digest())
    lines = [_text(fields.get("question"), "question"), ""]
    lines += [f"({letter}) {choices[index]}" for letter, index in zip(LETTERS, order, strict=True)]
    return Problem(id, "\n".join(lines), LETTERS[order.index(right)], source, "multiple_choice")


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
