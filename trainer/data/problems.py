"""Problems from files and hub names, in one format: read, filtered, decontaminated, written as JSONL.

A source is `generated:N`, a file (.jsonl, .json, .parquet), or a hub name, `owner/name[@config][:split]`. Rows are
known by their shape: DAPO's and verl's, ORZ's, GSM8K's, AIME's, MATH's, and any with a problem and its answer.

Invariants:
- No row vanishes: each is kept, or counted under what became of it, and the first `EXAMPLES` of those are named.
- What `write` writes, `read` reads back equal.
- Problems keep the order in which they came. Nothing is shuffled here.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.data import synthetic
from trainer.episodes.episode import Problem
from trainer.episodes.turn_parser import boxed_answer

GENERATED = "generated:"
EXAMPLES = 20
"""So many of what was left out are named in a report; all are counted."""
TOLD = 1000
"""Rows between two words on how many are done."""
NGRAM = 8
"""Words that a training problem may not share with an evaluation problem (the paper's section 4)."""
Gram = tuple[str, ...]
SUFFIXES = (".jsonl", ".json", ".parquet")
TAUGHT = 1 << 20
"""What lies between the seed of generated problems and that of conversations, which are about others."""
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?::([\w.-]+))?")
# Where a row has what. Lists of messages are ORZ's (0 and 1, names in its hub version), and DAPO's and verl's (prompt).
TEXTS = ("0.value", "prompt.-1.content", "problem", "question", "prompt", "text")
ANSWERS = ("1.ground_truth.value", "reward_model.ground_truth", "answer", "label", "ground_truth", "expected_answer")
IDS = ("id", "extra_info.index")
_OURS = {"id", "text", "answer", "source"}
_WORD = re.compile(r"[^\W_]+")
_INTEGER = re.compile(r"\$?([+-]?)(\d+|\d{1,3}(?:,\d{3})+)\$?")
# What DAPO-Math-17k wraps around each problem: the trainer's own chat says how to answer.
_DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
)
_DAPO_TAIL = 'Remember to put your answer on its own line after "Answer:".'


class DataError(ValueError):
    """A source or a row that cannot be read; says which, what was expected and what came."""


@dataclass(slots=True)
class Report:
    """What became of the rows: counts by source, and examples of what was left out, each with the reason."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """source -> {"rows", "kept", and "bad" | "duplicate" | "not integer" | "contaminated" | "too long" | "unreadable",
    which is an answer that the checker cannot read}."""
    examples: list[dict[str, str]] = field(default_factory=list)

    def count(self, source: str, what: str) -> None:
        counts = self.counts.setdefault(source, {})
        counts[what] = counts.get(what, 0) + 1

    def leave_out(self, source: str, where: str, what: str, why: str) -> None:
        """Count a row as `what`, and name it if it is among the first."""
        self.count(source, what)
        if self.counts[source][what] <= EXAMPLES:
            self.examples.append({"source": source, "row": where, "what": what, "why": why})


def prepare(
    sources: Sequence[str],
    *,
    against: Sequence[str] = (),
    is_integer_only: bool = True,
    seed: int = 0,
    fresh: bool = False,
    length: Callable[[str], int] | None = None,
    room: int = 0,
    unreadable: Callable[[Sequence[str]], Collection[str]] = lambda answers: (),
    advance: Callable[[int], None] = lambda done: None,
) -> tuple[list[Problem], Report]:
    """All of `sources`, each text once and each id, and what became of the rows.

    Left out is what has no integer as its answer, what shares `NGRAM` words in a row with a problem of `against`, and
    what is longer than `room` by `length`, such as tokens of the prompt. So is what has one of the answers that are
    `unreadable`, which is asked once, for all that are no integers. `advance` is told how many rows are done.
    """
    report, kept = Report(), []
    held_out = grams_of(problem for source in against for problem in read(source, seed=seed, fresh=True))
    first: dict[str, Problem] = {}
    ids: Counter[str] = Counter()
    for number, problem in enumerate(row for source in sources for row in _read(source, seed, fresh, report)):
        if not number % TOLD:
            advance(number)
        if known := first.get(problem.text):
            answers = "" if known.answer == problem.answer else f": {known.answer!r} there, {problem.answer!r} here"
            report.leave_out(problem.source, problem.id, "duplicate", f"of {known.id} of {known.source}{answers}")
            continue
        ids[problem.id] += 1
        if ids[problem.id] > 1:
            problem = replace(problem, id=f"{problem.id}~{ids[problem.id]}")
        first[problem.text] = problem
        answer = integer(problem.answer) if is_integer_only else problem.answer
        if answer is None:
            report.leave_out(problem.source, problem.id, "not integer", problem.answer[:100])
        elif gram := shared(problem.text, held_out):
            why = f"shares {' '.join(gram)!r} with {held_out[gram].id} of {held_out[gram].source}"
            report.leave_out(problem.source, problem.id, "contaminated", why)
        elif length and (size := length(problem.text)) > room:
            report.leave_out(problem.source, problem.id, "too long", f"{size}, and there is room for {room}")
        else:
            kept.append(replace(problem, answer=answer))
            report.count(problem.source, "kept")
    doubtful = dict.fromkeys(problem.answer for problem in kept if problem.answer != integer(problem.answer))
    refused = unreadable(list(doubtful)) if doubtful else ()
    for problem in kept:
        if problem.answer in refused:
            report.counts[problem.source]["kept"] -= 1
            report.leave_out(problem.source, problem.id, "unreadable", problem.answer[:100])
    return [problem for problem in kept if problem.answer not in refused], report


def read(source: str, *, seed: int = 0, fresh: bool = False) -> list[Problem]:
    """The problems of `source`, in its order. Raises `DataError`, for a single bad row too; `prepare` counts those.

    `seed` and `fresh` are for generated ones: fresh ones never occur among those for training.
    """
    return list(_read(source, seed, fresh, Report(), is_strict=True))


def read_conversations(source: str, *, seed: int = 0) -> list[synthetic.Messages]:
    """The conversations of `source`: `{"messages": [{"role", "content"}, ...]}` a row. Raises `DataError`."""
    if source.startswith(GENERATED):
        return synthetic.traces(_count(source), seed + TAUGHT, faults=seed)
    return [_conversation(source, number, row) for number, row in enumerate(_rows(source))]


def check(source: str, *, of_conversations: bool = False) -> None:
    """Raises `DataError` where `source` cannot be had, has no rows, or its first row should be a conversation and is
    none. Of a hub name only what it is made of is read, not its rows."""
    if source.startswith(GENERATED):
        _count(source)
        return
    if Path(source).suffix not in SUFFIXES and (hub := _HUB.fullmatch(source)):
        import datasets

        name, config, _ = hub.groups()
        try:
            datasets.load_dataset_builder(name, config)
        except (OSError, ValueError, RuntimeError) as why:
            raise DataError(f"{name}: cannot be had from the hub ({why})") from None
        return
    if (row := next(_rows(source), None)) is None:
        raise DataError(f"{source}: expected rows, got none")
    if of_conversations:
        _conversation(source, 0, row)


def _conversation(source: str, number: int, row: Any) -> synthetic.Messages:
    """The messages of a row. Raises `DataError`."""
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not messages or not all(
        isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    ):
        raise DataError(f"{source}: row {number}: expected messages of a role and a content, got {row!r:.200}")
    return [{key: message[key] for key in ("role", "content")} for message in messages]


def write(problems: Iterable[Problem], file: Path) -> None:
    """Write `problems` as JSONL, whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    with part.open("w", encoding="utf-8") as out:
        out.writelines(f"{json.dumps(asdict(problem))}\n" for problem in problems)
    part.replace(file)


def grams_of(problems: Iterable[Problem], n: int = NGRAM) -> dict[Gram, Problem]:
    """Every `n` words in a row that occur in one of `problems`, and the first in which they do.

    Words are runs of letters and digits, without regard to case; of a text shorter than `n` words, all of them are one
    gram, so that it is met only by itself.
    """
    grams: dict[Gram, Problem] = {}
    for problem in problems:
        for gram in _grams(problem.text, n):
            grams.setdefault(gram, problem)
    return grams


def shared(text: str, held_out: Mapping[Gram, Problem], n: int = NGRAM) -> Gram | None:
    """The first gram of `text` that is in `held_out`."""
    return next((gram for gram in _grams(text, n) if gram in held_out), None)


def integer(answer: str) -> str | None:
    """`answer` as a plain integer, "1,234" as "1234" and "073" as "73"; None if it is none."""
    found = _INTEGER.fullmatch(answer.strip())
    return str(int(found[1] + found[2].replace(",", ""))) if found else None


def _read(source: str, seed: int, fresh: bool, report: Report, *, is_strict: bool = False) -> Iterator[Problem]:
    if source.startswith(GENERATED):
        for problem in synthetic.generate(_count(source), seed, fresh=fresh):
            report.count(problem.source, "rows")
            yield problem
        return
    name = Path(source).stem if source.endswith(SUFFIXES) else source
    for number, row in enumerate(_rows(source)):
        try:
            problem = _problem(row, name, number)
        except DataError as why:
            if is_strict:
                raise DataError(f"{source}: row {number}: {why}") from None
            report.count(name, "rows")
            report.leave_out(name, f"row {number}", "bad", str(why))
        else:
            report.count(problem.source, "rows")
            yield problem


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _grams(text: str, n: int) -> Iterator[Gram]:
    words = _words(text)
    yield from (tuple(words[at : at + n]) for at in range(max(1, len(words) - n + 1)))


def _count(source: str) -> int:
    number = source.removeprefix(GENERATED)
    if not number.isdecimal():
        raise DataError(f"{source}: expected {GENERATED}N with a whole number")
    return int(number)


def _rows(source: str) -> Iterator[Any]:
    """The rows of a file or a hub name, decoded; a line that is no JSON is a row too, as text."""
    file = Path(source)
    if file.suffix in SUFFIXES and not file.is_file():
        raise DataError(f"{source}: no such file")
    match file.suffix:
        case ".jsonl":
            with file.open("rb") as lines:
                yield from (_decoded(line) for line in lines if line.strip())
        case ".json":
            rows = _decoded(file.read_bytes())
            if not isinstance(rows, list):
                raise DataError(
                    f"{source}: expected an array of rows, got {type(rows).__name__}; rows in lines are .jsonl"
                )
            yield from rows
        case ".parquet":
            from pyarrow import parquet

            for batch in parquet.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
        case _:
            if not (hub := _HUB.fullmatch(source)):
                kinds = " | ".join(SUFFIXES)
                raise DataError(f"{source}: expected {GENERATED}N, a {kinds} file, or owner/name[@config][:split]")
            import datasets

            name, config, split = hub.groups()
            try:
                yield from datasets.load_dataset(name, config, split=split or "train")
            except (OSError, ValueError, RuntimeError) as why:
                raise DataError(f"{name}: cannot be had from the hub ({why})") from None


def _decoded(text: bytes) -> Any:
    """What JSON says; text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _problem(row: Any, source: str, number: int) -> Problem:
    """The problem that `row` holds. Raises `DataError`."""
    if isinstance(row, Mapping) and row.keys() == _OURS and all(isinstance(value, str) for value in row.values()):
        return Problem(**row)
    text, answer, known = _first(row, TEXTS), _first(row, ANSWERS), _first(row, IDS)
    if not isinstance(text, str) or not (text := text.strip()):
        raise DataError(f"expected a problem as {' | '.join(TEXTS)}, got {row!r:.200}")
    if text.startswith(_DAPO_HEAD):
        text = text.partition("\n\n")[2].removesuffix(_DAPO_TAIL).strip()
    if not (answer := _plain(_concluded(_first(row, ["solution"])) if answer is None else answer)):
        raise DataError(f"expected an answer as {' | '.join(ANSWERS)}, got {row!r:.200}")
    return Problem(f"{source}-{number}" if known is None else str(known), text, answer, source)


def _first(row: Any, paths: Iterable[str]) -> Any:
    """What stands at the first of `paths` where anything does."""
    return next((found for path in paths if (found := _at(row, path.split("."))) is not None), None)


def _at(row: Any, path: Iterable[str]) -> Any:
    """What stands at a path of names, in whatever case, and of indices."""
    for name in path:
        if isinstance(row, Mapping):
            row = next((row[key] for key in row if str(key).lower() == name), None)
        else:
            try:
                row = row[int(name)] if isinstance(row, list) else None
            except (IndexError, ValueError):
                return None
    return row


def _plain(answer: Any) -> str:
    """An answer as text; nothing where it is none."""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer != answer:
        return ""
    # GSM8K's answers end with the number, after their derivation.
    return str(answer).rpartition("####")[2].strip()


def _concluded(solution: object) -> str | None:
    """What a worked solution comes to: MATH's last box; DAPO-Math-17k-Processed has the answer itself there."""
    if not isinstance(solution, str):
        return None
    if "\\boxed{" in solution:
        return boxed_answer(solution)
    return None if len(solution.split()) > 1 else solution
