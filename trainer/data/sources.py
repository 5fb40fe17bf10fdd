"""Reads problems and conversations from a source: generated ones, a file, or a hub name.

| source                                | rows                                                                      |
|---------------------------------------|---------------------------------------------------------------------------|
| `generated:N`                         | N problems, see `trainer.data.synthetic`                                  |
| `generated-programs:N`                | N programs to write, with tests, see `trainer.data.synthetic_programs`    |
| `.jsonl`, `.json`, `.csv`, `.parquet` | the rows of a file                                                        |
| `owner/name[@config][:split]`         | the rows of a data set on the hub                                         |

A row is read by its keys. The text of a problem is at the first of `TEXT_PATHS` that the row has, and its answer is at
the first of `ANSWER_PATHS`. These are the keys of DAPO, verl, ORZ, GSM8K, AIME, HMMT and MATH, among others.

A row of a file may name an environment, its options and, if it has all fields of a problem, a reward function. A row
from the hub may name no function and no environment but `python`, since the others can start programs on this machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.data import synthetic, synthetic_programs
from trainer.data.rows import FILE_SUFFIXES, DataError, file_rows
from trainer.episodes.episode import Problem
from trainer.episodes.turn_parser import boxed_answer

CONVERSATION_SEED_OFFSET = 1 << 20
"""Added to the seed for conversations, so that they are not about the problems of the training."""
_GENERATORS = {"generated": synthetic, "generated-programs": synthetic_programs}
"""The modules that generate problems and conversations, by the part of a source before the colon."""
# Paths of keys and indices. A row of ORZ is itself a list of messages (0 and 1); DAPO and verl have a list of messages
# under the key `prompt`.
TEXT_PATHS = ("0.value", "prompt.-1.content", "problem", "question", "prompt", "text")
ANSWER_PATHS = (
    "1.ground_truth.value",
    "reward_model.ground_truth",
    "answer",
    "label",
    "ground_truth",
    "expected_answer",
)
ID_PATHS = ("id", "extra_info.index", "unique_id", "record id")
CHOICE_FIELDS = frozenset({"choices", "correct answer"})
"""A row with one of these fields is no mathematical problem, whatever else it has."""
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?::([\w.-]+))?")
_PROBLEM_FIELDS = {"id", "text", "answer", "source"}
_OPTIONAL_PROBLEM_FIELDS = {"environment", "options", "reward"}
# DAPO-Math-17k puts this text around each problem; the chat format has its own instructions.
_DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
)
_DAPO_TAIL = 'Remember to put your answer on its own line after "Answer:".'


OnMalformed = Callable[[str, int, DataError], None]
"""Receives a malformed row: the source's name, the row's number, the error."""


def read_problems(source: str, *, seed: int = 0, held_out: bool = False) -> list[Problem]:
    """Return the problems of `source` in order. Raises `DataError`, for a single malformed row as well.

    `seed` and `held_out` apply only to generated problems. Held-out problems never occur in training.
    """

    def refuse(name: str, number: int, error: DataError) -> None:
        raise DataError(f"{source}: row {number}: {error}") from None

    return list(iter_problems(source, refuse, seed=seed, held_out=held_out))


def iter_problems(
    source: str, on_malformed: OnMalformed, *, seed: int = 0, held_out: bool = False
) -> Iterator[Problem]:
    """Yield the problems of `source` in order, and pass each malformed row to `on_malformed`."""
    if is_generated(source):
        generator, count = _generator(source)
        yield from generator.generate(count, seed, held_out=held_out)
        return
    name = Path(source).stem if source.endswith(FILE_SUFFIXES) else source
    for number, row in enumerate(iter_rows(source)):
        try:
            if isinstance(row, bytes):
                raise DataError(f"expected a row in JSON without unpaired surrogates, got {row!r:.200}")
            problem = _problem(row, name, number)
            if _match_hub_name(source) and problem.environment != "python":
                raise DataError(f"a row of the hub cannot choose the environment {problem.environment!r:.80}")
            if _match_hub_name(source) and problem.reward:
                raise DataError(f"a row of the hub cannot choose the reward {problem.reward!r:.80}")
        except DataError as error:
            on_malformed(name, number, error)
        else:
            yield problem


def read_conversations(source: str, *, seed: int = 0) -> list[synthetic.Messages]:
    """Return the conversations of `source`, rows of `{"messages": [{"role", "content"}, ...]}`. Raises `DataError`."""
    if is_generated(source):
        generator, count = _generator(source)
        # The second seed chooses the faults that the conversations contain on purpose.
        generated: list[synthetic.Messages] = generator.conversations(
            count, seed + CONVERSATION_SEED_OFFSET, fault_seed=seed
        )
        return generated
    return [_conversation(source, number, row) for number, row in enumerate(iter_rows(source))]


def check_source(source: str, *, has_conversations: bool = False) -> None:
    """Raise `DataError` if `source` does not exist or has no rows.

    With `has_conversations`, raise it also if the first row of a file is not a conversation. For a data set on the hub,
    only its description is read, not its rows.
    """
    if is_generated(source):
        _generator(source)
        return
    if match := _match_hub_name(source):
        import datasets

        name, config, _ = match.groups()
        try:
            datasets.load_dataset_builder(name, config)
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"{name}: cannot be loaded from the hub ({error})") from None
        return
    if (row := next(iter_rows(source), None)) is None:
        raise DataError(f"{source}: expected rows, got none")
    if has_conversations:
        _conversation(source, 0, row)


def _conversation(source: str, number: int, row: Any) -> synthetic.Messages:
    messages = row.get("messages") if isinstance(row, Mapping) else None
    if not messages or not all(
        isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    ):
        raise DataError(f"{source}: row {number}: expected messages with a role and a content, got {row!r:.200}")
    return [{key: message[key] for key in ("role", "content")} for message in messages]


def is_generated(source: str) -> bool:
    """Return whether the rows of a source are generated."""
    return source.partition(":")[0] in _GENERATORS and ":" in source


def _generator(source: str) -> tuple[ModuleType, int]:
    """Return the module and the number of rows of a source that is generated. Raises `DataError`."""
    name, _, count = source.partition(":")
    if not (count.isdecimal() and count.isascii()):
        raise DataError(f"{source}: expected {name}:N with a whole number")
    return _GENERATORS[name], int(count)


def tokenizer_conversations(sources: Iterable[str], count: int, seed: int) -> list[synthetic.Messages]:
    """Return at most `count` conversations from which a generated model's tokenizer learns its merges. They are of the
    first of `sources` that is generated or a file, and those of `trainer.data.synthetic` if there is none."""
    source = next((source for source in sources if not is_on_hub(source)), "generated:0")
    if not is_generated(source):
        return read_conversations(source)[:count]
    conversations: list[synthetic.Messages] = _generator(source)[0].conversations(count, seed, fault_seed=seed)
    return conversations


def is_on_hub(source: str) -> bool:
    """Return whether a source names a data set on the hub."""
    return _match_hub_name(source) is not None


def _match_hub_name(source: str) -> re.Match[str] | None:
    return None if source.endswith(FILE_SUFFIXES) else _HUB_NAME.fullmatch(source)


def iter_rows(source: str) -> Iterator[Any]:
    """Yield the decoded rows of a file or a data set.

    A line that is not JSON is yielded as bytes, so that the caller reports it as a malformed row with its number.
    """
    return file_rows(Path(source)) if source.endswith(FILE_SUFFIXES) else _hub_rows(source)


def _hub_rows(source: str) -> Iterator[Any]:
    if not (match := _match_hub_name(source)):
        suffixes = " | ".join(FILE_SUFFIXES)
        generated = ", ".join(f"{name}:N" for name in _GENERATORS)
        raise DataError(f"{source}: expected {generated}, a {suffixes} file, or owner/name[@config][:split]")
    import datasets

    name, config, split = match.groups()
    try:
        yield from datasets.load_dataset(name, config, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{name}: cannot be loaded from the hub ({error})") from None


def _problem(row: Any, source: str, number: int) -> Problem:
    """Return the problem in `row`. Raises `DataError`."""
    environment, options, is_own = "", {}, False
    if isinstance(row, Mapping):
        row = {name: value for name, value in row.items() if value is not None}
        is_own = _PROBLEM_FIELDS <= row.keys() <= _PROBLEM_FIELDS | _OPTIONAL_PROBLEM_FIELDS
        environment, options = row.get("environment", ""), row.get("options", {})
    if (is_own or environment) and not (isinstance(environment, str) and isinstance(options, Mapping)):
        raise DataError(f"expected environment as text and options as an object, got {row!r:.200}")
    if is_own and all(isinstance(row.get(name, ""), str) for name in (*_PROBLEM_FIELDS, "reward")):
        return Problem(**row)
    if isinstance(row, Mapping) and None in row:
        raise DataError(f"expected at most {len(row) - 1} cells, as in the first line, got more: {row[None]!r:.200}")
    id = _first_present(row, ID_PATHS)
    id = f"{source}-{number}" if id in (None, "") else str(id)
    if not environment and isinstance(row, Mapping) and CHOICE_FIELDS & {str(name).lower() for name in row}:
        raise DataError("a row with choices: convert its file by `python -m examples.multiple_choice`")
    text, answer = _first_present(row, TEXT_PATHS), _first_present(row, ANSWER_PATHS)
    if not isinstance(text, str) or not (text := text.strip()):
        raise DataError(f"expected a problem as {_fields(TEXT_PATHS)}, got {row!r:.200}")
    if text.startswith(_DAPO_HEAD):
        text = text.partition("\n\n")[2].removesuffix(_DAPO_TAIL).strip()
    if answer is None:
        answer = _answer_from_solution(_first_present(row, ["solution"]))
    if not (answer := _answer_text(answer)):
        raise DataError(f"expected an answer as {_fields(ANSWER_PATHS)}, got {row!r:.200}")
    problem = Problem(id, text, answer, source)
    return replace(problem, environment=environment, options=options) if environment else problem


def _fields(paths: Iterable[str]) -> str:
    """Return the names of the paths that are a single field, for a message."""
    return " | ".join(path for path in paths if "." not in path)


def _first_present(row: Any, paths: Iterable[str]) -> Any:
    """Return the value at the first of `paths` that exists."""
    return next((value for path in paths if (value := _get_path(row, path.split("."))) is not None), None)


def _get_path(row: Any, path: Iterable[str]) -> Any:
    """Return the value at a path of keys and indices. None if the row has no value there. The case of keys is
    ignored."""
    for name in path:
        if isinstance(row, Mapping):
            row = next((row[key] for key in row if str(key).lower() == name), None)
        else:
            try:
                row = row[int(name)] if isinstance(row, list) else None
            except (IndexError, ValueError):
                return None
    return row


def _answer_text(answer: Any) -> str:
    """Return an answer as text. Empty if the answer is neither text nor a number."""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return ""
    if answer != answer:  # NaN, which data sets use for a missing value
        return ""
    # GSM8K's answers end with the number, after their derivation.
    return str(answer).rpartition("####")[2].strip()


def _answer_from_solution(solution: object) -> str | None:
    """Return the answer in the field `solution`. In a worked solution (MATH) it is the content of the last box. Without
    a box, a field that is a single word is the answer itself (DAPO-Math-17k-Processed)."""
    if not isinstance(solution, str):
        return None
    if "\\boxed" in solution or "\\fbox" in solution:
        return boxed_answer(solution)
    return None if len(solution.split()) > 1 else solution
