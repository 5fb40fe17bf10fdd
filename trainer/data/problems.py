"""Prepares problems: reads sources, drops what cannot be used, and writes the rest as JSONL.

    rows -> malformed? -> duplicate? -> not_integer? -> contaminated? -> too_long? -> unparsable_answer? -> kept

Invariants:
- Every row is counted: as kept, or under the reason for which it was dropped. For each source and reason, the report
  names the first `MAX_EXAMPLES` dropped rows.
- `read_problems` reads back what `write_problems` writes.
- Problems keep the order of their sources.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from trainer.data.decontamination import ngram_index, shared_ngram
from trainer.data.rows import DataError
from trainer.data.sources import iter_problems, read_problems
from trainer.episodes.episode import Problem
from trainer.json_files import write_rows

MAX_EXAMPLES = 20
"""Dropped rows per source and reason that a report names."""
PROGRESS_INTERVAL = 1000
"""Rows between two progress reports."""
_INTEGER = re.compile(r"\$?([+-]?)(\d+|\d{1,3}(?:,\d{3})+)\$?")

Filter = Callable[[Problem], Problem | str]
"""Returns the problem, which the filter may have changed, or a text that explains why it is dropped."""


@dataclass(frozen=True, slots=True)
class MaxLength:
    """A limit on a problem's length. `measure` returns the length, for example in prompt tokens."""

    limit: int
    measure: Callable[[Problem], int]


@dataclass(slots=True)
class PrepareReport:
    """Counts of kept and dropped rows, and examples of dropped rows."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """source -> {"rows", "kept", "malformed", "duplicate", "not_integer", "contaminated", "too_long",
    "unparsable_answer"}; an absent count is 0."""
    examples: list[dict[str, str]] = field(default_factory=list)

    def count(self, source: str, label: str) -> None:
        counts = self.counts.setdefault(source, {})
        counts[label] = counts.get(label, 0) + 1

    def drop(self, source: str, row: str, label: str, details: str) -> None:
        """Count a dropped row. Name it in `examples` if it is among the first `MAX_EXAMPLES` of its source and
        reason."""
        self.count(source, label)
        if self.counts[source][label] <= MAX_EXAMPLES:
            self.examples.append({"source": source, "row": row, "reason": label, "details": details})


def prepare_problems(
    sources: Sequence[str],
    *,
    decontaminate_against: Sequence[str] = (),
    integer_answers_only: bool = True,
    seed: int = 0,
    held_out: bool = False,
    max_length: MaxLength | None = None,
    find_unparsable: Callable[[Sequence[str]], Collection[str]] = lambda answers: (),
    reward: str = "",
    on_progress: Callable[[int], None] = lambda done: None,
) -> tuple[list[Problem], PrepareReport]:
    """Return the usable problems of `sources`, each text and each id once, and a report on all rows.

    `find_unparsable`: called once with all answers that are not plain integers. It returns the answers among them that
    the answer checker cannot parse.
    `reward`: the reward function of the problems that name none.
    `on_progress`: receives the number of rows read so far.

    The rules on answers apply only to problems with the environment `python` and without a reward function, since no
    others compare answers as mathematics.
    """
    filters: dict[str, Filter] = {"duplicate": _unique()}
    if integer_answers_only:
        filters["not_integer"] = _integer_answer
    if decontaminate_against:
        filters["contaminated"] = _decontaminated(decontaminate_against, seed)
    if max_length:
        filters["too_long"] = _short_enough(max_length)
    report, kept = PrepareReport(), []
    for number, problem in enumerate(_read(sources, seed, held_out, report)):
        if not number % PROGRESS_INTERVAL:
            on_progress(number)
        if passed := _apply(filters, problem.with_default_reward(reward), report):
            kept.append(passed)
    answers = dict.fromkeys(
        problem.answer
        for problem in kept
        if _is_mathematical(problem) and problem.answer != parse_integer(problem.answer)
    )
    unparsable = find_unparsable(list(answers)) if answers else ()
    usable = []
    for problem in kept:
        if _is_mathematical(problem) and problem.answer in unparsable:
            report.drop(problem.source, problem.id, "unparsable_answer", problem.answer[:100])
        else:
            report.count(problem.source, "kept")
            usable.append(problem)
    return usable, report


def write_problems(problems: Iterable[Problem], file: Path) -> None:
    """Write `problems` as JSONL, as a whole or not at all."""
    write_rows(file, map(asdict, problems))


def parse_integer(answer: str) -> str | None:
    """Return `answer` as a plain integer: "1,234" becomes "1234", and "073" becomes "73". None if it is not an
    integer."""
    match = _INTEGER.fullmatch(answer.strip())
    return str(int(match[1] + match[2].replace(",", ""))) if match else None


def _read(sources: Iterable[str], seed: int, held_out: bool, report: PrepareReport) -> Iterator[Problem]:
    """Yield the problems of all sources, and count every row."""

    def on_malformed(name: str, number: int, error: DataError) -> None:
        report.count(name, "rows")
        report.drop(name, f"row {number}", "malformed", str(error))

    for source in sources:
        for problem in iter_problems(source, on_malformed, seed=seed, held_out=held_out):
            report.count(problem.source, "rows")
            yield problem


def _apply(filters: dict[str, Filter], problem: Problem, report: PrepareReport) -> Problem | None:
    """Return the problem after all filters. None if a filter drops it."""
    for label, apply in filters.items():
        passed = apply(problem)
        if isinstance(passed, str):
            report.drop(problem.source, problem.id, label, passed)
            return None
        problem = passed
    return problem


def _unique() -> Filter:
    """Drop a problem if an earlier one has equal text, environment, options (such as attached files) and reward. If
    only its id occurred before, give it a new id."""
    by_text: dict[tuple[str, ...], Problem] = {}
    ids, numbers = set[str](), Counter[str]()

    def check(problem: Problem) -> Problem | str:
        key = (problem.text, problem.environment, repr(problem.options), problem.reward)
        if first := by_text.get(key):
            same_text = f"same text as {first.id} of {first.source}"
            if first.answer == problem.answer:
                return same_text
            return f"{same_text}, but the answers are {first.answer!r} there and {problem.answer!r} here"
        new_id = problem.id
        while new_id in ids:
            numbers[problem.id] += 1
            new_id = f"{problem.id}~{numbers[problem.id] + 1}"
        ids.add(new_id)
        problem = replace(problem, id=new_id)
        by_text[key] = problem
        return problem

    return check


def _is_mathematical(problem: Problem) -> bool:
    return problem.environment == "python" and not problem.reward


def _integer_answer(problem: Problem) -> Problem | str:
    if not _is_mathematical(problem):
        return problem
    answer = parse_integer(problem.answer)
    return problem.answer[:100] if answer is None else replace(problem, answer=answer)


def _decontaminated(sources: Sequence[str], seed: int) -> Filter:
    index = ngram_index(problem for source in sources for problem in read_problems(source, seed=seed, held_out=True))

    def check(problem: Problem) -> Problem | str:
        if ngram := shared_ngram(problem.text, index):
            return f"shares {' '.join(ngram)!r} with {index[ngram].id} of {index[ngram].source}"
        return problem

    return check


def _short_enough(max_length: MaxLength) -> Filter:
    def check(problem: Problem) -> Problem | str:
        length = max_length.measure(problem)
        return problem if length <= max_length.limit else f"{length}, the limit is {max_length.limit}"

    return check
