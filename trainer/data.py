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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer import tasks
from trainer.chat import ANSWER, ANSWER_END, parse
from trainer.trajectory import Problem

GENERATED = "generated:"
EXAMPLES = 20
"""So many of what was left out are named in a report; all are counted."""
NGRAM = 8
"""Words that a training problem may not share with an evaluation problem (the paper's section 4)."""
SUFFIXES = (".jsonl", ".json", ".parquet")
TAUGHT = 1 << 20
"""What lies between the seed of generated problems and that of conversations, which are about others."""
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?::([\w.-]+))?")
_TEXT_KEYS = ("problem", "question", "prompt", "text")
_ANSWER_KEYS = ("answer", "label", "ground_truth", "expected_answer")
_OURS = {"id", "text", "answer", "source"}
_WORD = re.compile(r"[^\W_]+")
_INTEGER = re.compile(r"\$?([+-]?)(\d+|\d{1,3}(?:,\d{3})+)\$?")
# What DAPO-Math-17k wraps around each problem: the trainer's own chat says how to answer.
_DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
)
_DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


class DataError(ValueError):
    """A source or a row that cannot be read; says which, what was expected and what came."""


@dataclass(slots=True)
class Report:
    """What became of the rows: counts by source, and examples of what was left out, each with the reason."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """source -> {"rows", "kept", and "bad" | "duplicate" | "not integer" | "contaminated"}."""
    examples: list[dict[str, str]] = field(default_factory=list)

    def count(self, source: str, what: str) -> None:
        self.counts.setdefault(source, Counter())[what] += 1

    def leave_out(self, source: str, where: str, what: str, why: str) -> None:
        """Count a row as `what`, and name it if it is among the first."""
        self.count(source, what)
        if self.counts[source][what] <= EXAMPLES:
            self.examples.append({"source": source, "row": where, "what": what, "why": why})

    def to_dict(self) -> dict[str, Any]:
        return {"counts": {name: dict(counts) for name, counts in self.counts.items()}, "examples": self.examples}


@dataclass(frozen=True, slots=True)
class Overlap:
    """A problem, the evaluation problem that it shares words with, and the words."""

    problem: Problem
    other: Problem
    gram: str


def prepare(
    sources: Sequence[str],
    *,
    against: Sequence[str] = (),
    is_integer_only: bool = True,
    seed: int = 0,
    fresh: bool = False,
) -> tuple[list[Problem], Report]:
    """All of `sources`, without duplicates, what has no integer as its answer, and what overlaps with `against`."""
    report = Report()
    rows = (problem for source in sources for problem in _read(source, seed, fresh, report))
    problems = _different(rows, report)
    if is_integer_only:
        problems = _integer_only(problems, report)
    if against:
        held_out = [problem for source in against for problem in read(source, seed=seed, fresh=True)]
        problems, overlaps = decontaminate(problems, held_out)
        for overlap in overlaps:
            why = f"shares {overlap.gram!r} with {overlap.other.id} of {overlap.other.source}"
            report.leave_out(overlap.problem.source, overlap.problem.id, "contaminated", why)
    for problem in problems:
        report.count(problem.source, "kept")
    return problems, report


def read(source: str, *, seed: int = 0, fresh: bool = False) -> list[Problem]:
    """The problems of `source`, in its order. Raises `DataError`, for a single bad row too; `prepare` counts those.

    `seed` and `fresh` are for generated ones: fresh ones never occur among those for training.
    """
    return list(_read(source, seed, fresh, None))


def read_conversations(source: str, *, seed: int = 0) -> list[tasks.Messages]:
    """The conversations of `source`: `{"messages": [{"role", "content"}, ...]}` a row. Raises `DataError`."""
    if source.startswith(GENERATED):
        return tasks.traces(_count(source), seed + TAUGHT, faults=seed)
    conversations = []
    for number, row in enumerate(_rows(source)):
        messages = row.get("messages") if isinstance(row, Mapping) else None
        if not messages or not all(
            isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in messages
        ):
            raise DataError(f"{source}: row {number}: expected messages of a role and a content, got {row!r:.200}")
        conversations.append([{key: message[key] for key in ("role", "content")} for message in messages])
    return conversations


def write(problems: Iterable[Problem], file: Path) -> None:
    """Write `problems` as JSONL, whole or not at all."""
    part = file.with_name(f"{file.name}.part")
    with part.open("w", encoding="utf-8") as out:
        out.writelines(f"{json.dumps(asdict(problem))}\n" for problem in problems)
    part.replace(file)


def decontaminate(
    problems: Sequence[Problem], against: Iterable[Problem], n: int = NGRAM
) -> tuple[list[Problem], list[Overlap]]:
    """`problems` that share no `n` words in a row with one of `against`, and the others with what they share.

    Words are runs of letters and digits, without regard to case; of a text shorter than `n` words, all of them are one
    gram, so that it is met only by itself.
    """
    held_out: dict[tuple[str, ...], Problem] = {}
    for problem in against:
        for gram in _grams(problem.text, n):
            held_out.setdefault(gram, problem)
    kept, overlaps = [], []
    for problem in problems:
        shared = next((gram for gram in _grams(problem.text, n) if gram in held_out), None)
        if shared is None:
            kept.append(problem)
        else:
            overlaps.append(Overlap(problem, held_out[shared], " ".join(shared)))
    return kept, overlaps


def integer(answer: str) -> str | None:
    """`answer` as a plain integer, "1,234" as "1234" and "073" as "73"; None if it is none."""
    found = _INTEGER.fullmatch(answer.strip())
    return str(int(found[1] + found[2].replace(",", ""))) if found else None


def _read(source: str, seed: int, fresh: bool, report: Report | None) -> Iterator[Problem]:
    rows: Iterable[Any]
    if source.startswith(GENERATED):
        rows, name = tasks.generate(_count(source), seed, fresh=fresh), tasks.SOURCE
    else:
        rows, name = _rows(source), Path(source).stem if source.endswith(SUFFIXES) else source
    for number, row in enumerate(rows):
        try:
            problem = row if isinstance(row, Problem) else _problem(row, name, number)
        except DataError as why:
            if report is None:
                raise DataError(f"{source}: row {number}: {why}") from None
            report.count(name, "rows")
            report.leave_out(name, f"row {number}", "bad", str(why))
            continue
        if report is not None:
            report.count(problem.source, "rows")
        yield problem


def _different(problems: Iterable[Problem], report: Report) -> list[Problem]:
    """The first of each text, each with an id of its own. DAPO's hub version holds every problem a hundred times."""
    first: dict[str, Problem] = {}
    ids: Counter[str] = Counter()
    for problem in problems:
        if known := first.get(problem.text):
            answers = "" if known.answer == problem.answer else f": {known.answer!r} there, {problem.answer!r} here"
            report.leave_out(problem.source, problem.id, "duplicate", f"of {known.id} of {known.source}{answers}")
            continue
        ids[problem.id] += 1
        again = ids[problem.id] > 1
        first[problem.text] = replace(problem, id=f"{problem.id}~{ids[problem.id]}") if again else problem
    return list(first.values())


def _integer_only(problems: Iterable[Problem], report: Report) -> list[Problem]:
    kept = []
    for problem in problems:
        if (answer := integer(problem.answer)) is not None:
            kept.append(replace(problem, answer=answer))
        else:
            report.leave_out(problem.source, problem.id, "not integer", problem.answer[:100])
    return kept


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _grams(text: str, n: int) -> Iterator[tuple[str, ...]]:
    words = _words(text)
    yield from (tuple(words[at : at + n]) for at in range(max(1, len(words) - n + 1)))


def _count(source: str) -> int:
    number = source.removeprefix(GENERATED)
    if not number.isdecimal():
        raise DataError(f"{source}: expected {GENERATED}N with a whole number")
    return int(number)


def _rows(source: str) -> Iterator[Any]:
    """The rows of a file or a hub name, decoded; a line that is no JSON is a row too, as text."""
    if source.endswith(SUFFIXES):
        file = Path(source)
        if not file.is_file():
            raise DataError(f"{source}: no such file")
        match file.suffix:
            case ".jsonl":
                yield from _lines(file)
            case ".json":
                yield from _array(file)
            case _:
                yield from _parquet(file)
    elif hub := _HUB.fullmatch(source):
        yield from _hub(*hub.groups())
    else:
        raise DataError(
            f"{source}: expected {GENERATED}N, a {' | '.join(SUFFIXES)} file, or owner/name[@config][:split]"
        )


def _lines(file: Path) -> Iterator[Any]:
    with file.open("rb") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                if line.strip():
                    yield line


def _array(file: Path) -> list[Any]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as why:
        raise DataError(f"{file}: expected JSON ({why}); one row a line is .jsonl") from None
    if not isinstance(rows, list):
        raise DataError(f"{file}: expected an array of rows, got {type(rows).__name__}")
    return rows


def _parquet(file: Path) -> Iterator[Any]:
    from pyarrow import parquet

    for batch in parquet.ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


def _hub(name: str, config: str | None, split: str | None) -> Iterator[Any]:
    import datasets

    try:
        yield from datasets.load_dataset(name, config, split=split or "train")
    except (OSError, ValueError, RuntimeError) as why:
        raise DataError(f"{name}: cannot be had from the hub ({why})") from None


def _problem(row: Any, source: str, number: int) -> Problem:
    """The problem that `row` holds. Raises `DataError`."""
    if isinstance(row, Mapping) and row.keys() == _OURS and all(isinstance(value, str) for value in row.values()):
        return Problem(**row)
    text, answer = _text(row), _answer(row)
    if not text:
        raise DataError(f"expected a problem as {' | '.join(_TEXT_KEYS)}, got {row!r:.200}")
    if not answer:
        raise DataError(f"expected an answer as {' | '.join(_ANSWER_KEYS)}, got {row!r:.200}")
    match row:
        case {"id": known} | {"ID": known} | {"extra_info": {"index": known}}:
            return Problem(str(known), text, answer, source)
    return Problem(f"{source}-{number}", text, answer, source)


def _text(row: Any) -> str:
    match row:
        case [{"value": text}, _] | {"0": {"value": text}}:  # ORZ: its file, its hub version
            pass
        case {"prompt": [*_, {"role": "user", "content": text}]}:  # DAPO and verl
            pass
        case _:
            text = _first(row, _TEXT_KEYS)
    if not isinstance(text, str):
        return ""
    if text.startswith(_DAPO_HEAD):
        text = text.partition("\n\n")[2].removesuffix(_DAPO_TAIL)
    return text.strip()


def _answer(row: Any) -> str:
    match row:
        case [_, {"ground_truth": {"value": answer}}] | {"1": {"ground_truth": {"value": answer}}}:
            pass
        case {"reward_model": {"ground_truth": answer}}:
            pass
        case _:
            answer = _first(row, _ANSWER_KEYS)
            if answer is None:
                answer = _concluded(_first(row, ["solution"]))
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
        return parse(f"{ANSWER}{solution}{ANSWER_END}").answer
    return None if len(solution.split()) > 1 else solution


def _first(row: Any, keys: Iterable[str]) -> Any:
    """What stands under the first of `keys` that there is, in whatever case."""
    low = {str(key).lower(): value for key, value in row.items()} if isinstance(row, Mapping) else {}
    return next((low[key] for key in keys if low.get(key) is not None), None)
