r"""GAIA's public scoring rule: an answer as a number, a list or a string, by the form of the right answer.

The rule is that of `scorer.py` in huggingface.co/spaces/gaia-benchmark/leaderboard:

| the right answer       | comparison                                                                         |
|------------------------|------------------------------------------------------------------------------------|
| `float` accepts it     | `float` of the answer without `$`, `%` and `,`; infinity if that fails; exact      |
| contains `,` or `;`    | both are split at these; equal numbers of elements; each pair of elements matches  |
|                        | as a number, or as text without white space and in lower case                      |
| anything else          | text without white space and ASCII punctuation, in lower case                      |

Two consequences: the right answer "1,000" is a list of two numbers, and "inf" equals every text that is no number.
"""

from __future__ import annotations

import re
import string

from trainer.episodes.turn_parser import boxed_answer

_SEPARATOR = re.compile("[,;]")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER_SIGNS = str.maketrans("", "", "$%,")
_LATEX_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|math(?:rm|bf|sf|it|tt|bb|cal)|mbox|boldsymbol|bm|emph)\s*\{([^{}]*)\}"
)
MAX_LATEX_DEPTH = 4
"""Maximum number of nested LaTeX commands (`_LATEX_TEXT`) that are removed."""
_LATEX_ESCAPE = re.compile(r"\\([$%&#_])")
_LATEX_SPACE = re.compile(r"\\[ ,;:]")


def is_exact_match(answer: str | None, truth: str) -> bool:
    """Return whether `answer` is right. None is compared as the text "None", as in the public rule."""
    answer = "None" if answer is None else answer
    if _is_number(truth):
        return _number(answer) == float(truth)
    if _SEPARATOR.search(truth):
        elements, true_elements = _SEPARATOR.split(answer), _SEPARATOR.split(truth)
        return len(elements) == len(true_elements) and all(map(_elements_match, elements, true_elements))
    return _text(answer).translate(_PUNCTUATION) == _text(truth).translate(_PUNCTUATION)


def plain_answer(boxed: str) -> str:
    r"""Return the content of a box without LaTeX that has no meaning in the answer: `\textbf{\text{Paris}}` becomes
    Paris, `5\%` becomes 5%, and `17{,}000` becomes 17,000. If the text has a box itself, its last box is meant."""
    boxed = boxed_answer(boxed) or boxed
    for _ in range(MAX_LATEX_DEPTH):
        boxed = _LATEX_TEXT.sub(r"\1", boxed)
    return _LATEX_ESCAPE.sub(r"\1", _LATEX_SPACE.sub(" ", boxed.replace("{,}", ","))).strip()


def _elements_match(element: str, truth: str) -> bool:
    return _number(element) == float(truth) if _is_number(truth) else _text(element) == _text(truth)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _number(text: str) -> float:
    try:
        return float(text.translate(_NUMBER_SIGNS))
    except ValueError:
        return float("inf")


def _text(text: str) -> str:
    return re.sub(r"\s", "", text).lower()
