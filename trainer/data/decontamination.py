"""Finds training problems that share n consecutive words with an evaluation problem (the paper's section 4).

Words are runs of letters and digits, compared without case.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping

from trainer.episodes.episode import Problem

NGRAM = 8
"""A training problem may not share this number of consecutive words with an evaluation problem."""
Ngram = tuple[str, ...]
_WORD = re.compile(r"[^\W_]+")


def ngram_index(problems: Iterable[Problem], n: int = NGRAM) -> dict[Ngram, Problem]:
    """Return every n-gram of the problems, with the first problem in which it occurs.

    A text with fewer than `n` words has a single n-gram, which consists of all its words. So only an equal text matches
    it.
    """
    index: dict[Ngram, Problem] = {}
    for problem in problems:
        for ngram in _ngrams(problem.text, n):
            index.setdefault(ngram, problem)
    return index


def shared_ngram(text: str, index: Mapping[Ngram, Problem], n: int = NGRAM) -> Ngram | None:
    """Return the first n-gram of `text` that is in `index`."""
    return next((ngram for ngram in _ngrams(text, n) if ngram in index), None)


def _ngrams(text: str, n: int) -> Iterator[Ngram]:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    yield from (tuple(words[start : start + n]) for start in range(max(1, len(words) - n + 1)))
