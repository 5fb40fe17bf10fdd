r"""Finds the answer in a text, which may be a whole completion of a model.

The rule, in this order:

1. If there is a closed `\boxed{}` or `\fbox{}`: the content of the last one. If boxes are inside each other, the outer
   box counts.
2. If there is `####` or `<answer>`: the text behind the mark that comes last. Behind `####` the answer goes to the end
   of the line. Behind `<answer>` it goes to the closing tag, or to the end of the text if there is no closing tag.
3. Otherwise the text itself.

Each step takes linear time, because a text may be hostile.
"""

from __future__ import annotations

import re

from protocol import MAX_ANSWER_TEXT_CHARS

MAX_ANSWER_CHARS = 4096
"""Maximum characters of the answer that is found."""
MAX_NESTED_BOXES = 4
"""Maximum number of boxes that are removed from an answer that consists of a box only."""

_FIRST_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{")
_BOX_OR_BRACE = re.compile(r"\\{1,2}(?:boxed|fbox)\s{0,9}\{|\\.|[{}]", re.DOTALL)
_HASHES, _TAG, _TAG_END = "####", "<answer>", "</answer>"


class NoAnswer(Exception):
    """A text has no answer. The message completes a sentence that begins with "gold" or "answer"."""


def extract(text: str) -> str:
    """Return the answer in `text`. Raises `NoAnswer`."""
    if len(text) > MAX_ANSWER_TEXT_CHARS:
        raise NoAnswer(f"has more than {MAX_ANSWER_TEXT_CHARS} characters")
    for where, answer in (("in its last closed box", _boxed(text)), ("behind its last mark", _marked(text))):
        if answer is not None:
            return _checked(answer, where)
    return _checked(text, "and no \\boxed{}, #### or <answer>")


def _checked(answer: str, where: str) -> str:
    answer = answer.strip()
    if not answer:
        raise NoAnswer(f"has no text {where}")
    if len(answer) > MAX_ANSWER_CHARS:
        raise NoAnswer(f"has more than {MAX_ANSWER_CHARS} characters {where}")
    for _ in range(MAX_NESTED_BOXES):
        opening = _FIRST_BOX.match(answer)
        inner = _boxed(answer) if opening else None
        if opening is None or inner is None or opening.end() + len(inner) + 1 != len(answer):
            break
        answer = inner.strip()
    return answer


def _boxed(text: str) -> str | None:
    first = _FIRST_BOX.search(text)
    start = end = -1
    open_braces: list[int] = []  # where the content of each box starts, and -1 for other braces
    for match in _BOX_OR_BRACE.finditer(text, first.start()) if first else ():
        token = match.group()
        if token == "}":
            content_start = open_braces.pop() if open_braces else -1
            if content_start >= 0:
                start, end = content_start, match.start()
        elif token == "{":
            open_braces.append(-1)
        elif token[-1] == "{" and len(token) > 2:
            open_braces.append(match.end())
    return text[start:end] if start >= 0 else None


def _marked(text: str) -> str | None:
    hashes, tag = text.rfind(_HASHES), text.rfind(_TAG)
    if hashes < 0 and tag < 0:
        return None
    if hashes > tag:
        return text[hashes + len(_HASHES) :].strip().partition("\n")[0]
    return text[tag + len(_TAG) :].partition(_TAG_END)[0]
