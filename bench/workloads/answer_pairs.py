"""Labelled pairs of answers (`tests/judging/answer_pairs.txt`): what a mathematician would grade."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAIRS_FILE = Path(__file__).parents[2] / "tests" / "judging" / "answer_pairs.txt"
_KIND = re.compile(r"\[([a-z][a-z -]+)\]")
_PAIR = re.compile(r"(.+?) (==|!=) (.+)")
_NEW_LINE = re.compile(r"\\n(?![a-z])")


@dataclass(frozen=True, slots=True)
class LabelledPair:
    """A gold, an answer, whether they are equivalent, and the kind of answer."""

    gold: str
    answer: str
    are_equivalent: bool
    kind: str


def labelled_pairs() -> list[LabelledPair]:
    """Return all pairs of the file. Raises `ValueError` for a line that is none."""
    pairs, kind = [], ""
    for line in PAIRS_FILE.read_text(encoding="utf-8").splitlines():
        if heading := _KIND.fullmatch(line):
            kind = heading.group(1)
        elif line and not line.startswith("# "):
            match = _PAIR.fullmatch(line)
            if match is None:
                raise ValueError(f"{PAIRS_FILE}: expected GOLD == ANSWER or GOLD != ANSWER, got {line!r}")
            gold, answer = (_NEW_LINE.sub("\n", side) for side in match.group(1, 3))
            pairs.append(LabelledPair(gold, answer, match.group(2) == "==", kind))
    return pairs
