"""GAIA: a converter of data sets in its file format, generated problems in this format, and its leaderboard's file.

    python -m examples.gaia convert data/gaia:validation --out data/gaia.jsonl
    python -m examples.gaia generate 100 --out data/orders.jsonl
    python -m examples.gaia submission runs/gaia/collection --out submission.jsonl

The first two write problems that `[eval] data` and `[collect] data` can name. The third reads a store of episodes.
GAIA's files are:

    2023/validation/metadata.parquet (or .jsonl)   task_id, Question, Level, Final answer, file_name, file_path
    2023/validation/FILE_NAME                      the attached file of a row

The data set itself is gated (huggingface.co/datasets/gaia-benchmark/GAIA) and must not be shared, so this
repository has no copy.

Invariants:
- A problem's environment is `qa`. Its options have the level and the absolute path of the attached file.
- An attached file is beside the metadata. No other file is read, whatever a row names.
- A hidden answer ("?", in the test split) is marked by the option `answer_is_hidden`, so that no report counts it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from examples import generated_gaia
from trainer.collection.store import StoreReader
from trainer.data.problems import write_problems
from trainer.data.rows import DataError, file_rows
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.episodes.exact_match import is_exact_match, plain_answer
from trainer.json_files import RecordError, write_rows

SPLITS = ("validation", "test")
METADATA = ("metadata.parquet", "metadata.jsonl")
CANARY_ID = "0-0-0-0-0"
"""The task_id of a row that has no question. The data set contains this row so that copies of the data can be found."""
HIDDEN_ANSWER = "?"


def find_metadata(path: str) -> Path:
    """Return the metadata file of `PATH[:SPLIT]`. Raises `DataError`.

    PATH is one of three: a metadata file, the directory of a metadata file, or the directory of the whole data set. In
    the last case the split is `validation`, unless SPLIT is given.
    """
    directory, _, split = path.rpartition(":")
    if split not in SPLITS:
        directory, split = path, ""
    root = Path(directory)
    if root.is_file() and not split:
        return root
    folders = [root / year / (split or SPLITS[0]) for year in ("2023", "")] + ([] if split else [root])
    for file in (folder / name for folder in folders for name in METADATA):
        if file.is_file():
            return file
    raise DataError(
        f"{path}: expected a metadata file, or a directory with {' or '.join(METADATA)} in it or in "
        f"2023/{split or SPLITS[0]}"
    )


def read_problems(path: str) -> list[Problem]:
    """Return the problems of `PATH[:SPLIT]`. Raises `DataError` for a malformed row, and without a metadata file."""
    metadata, problems = find_metadata(path), dict[str, Problem]()
    for number, row in enumerate(file_rows(metadata)):
        try:
            if not isinstance(row, Mapping):
                raise DataError(f"expected a JSON object, got {row!r:.200}")
            if row.get("task_id") == CANARY_ID:
                continue
            problem = _problem(row, metadata.parent)
            if problem.id in problems:
                raise DataError(f"task_id {problem.id!r} occurs a second time")
        except DataError as error:
            raise DataError(f"{metadata}: row {number}: {error}") from None
        problems[problem.id] = problem
    return list(problems.values())


def write_submission(file: Path, episodes: Iterable[Episode]) -> int:
    """Write the submission for the leaderboard: one row per task, from its first episode. Return the number of rows.

    A task has no row if none of its episodes has ended. `model_answer` is empty if the episode has no answer or has
    exceeded its deadline.
    """
    first: dict[str, tuple[int, dict[str, str]]] = {}
    for episode in episodes:
        task = episode.problem.id
        is_overdue = episode.stop_reason is StopReason.DEADLINE
        has_ended = is_overdue or episode.reward is not None
        if has_ended and (task not in first or episode.sample < first[task][0]):
            row = {
                "task_id": task,
                "model_answer": "" if is_overdue else plain_answer(episode.answer or ""),
                "reasoning_trace": "\n\n".join(turn.text for turn in episode.turns),
            }
            first[task] = (episode.sample, row)
    write_rows(file, (row for _, row in first.values()))
    return len(first)


def _problem(row: Mapping[str, Any], folder: Path) -> Problem:
    """Return the problem in a row. Raises `DataError`."""
    texts = {name: row.get(name) for name in ("task_id", "Question", "Final answer")}
    answer = texts["Final answer"]
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        texts["Final answer"] = str(answer)
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{name}: expected text, got {text!r:.80}")
    if texts["Final answer"] != HIDDEN_ANSWER and not _has_answers(str(texts["Final answer"])):
        raise DataError(f"Final answer: every text would equal {texts['Final answer']!r:.80} by GAIA's rule, or none")
    level = row.get("Level")
    if str(level) not in ("1", "2", "3"):
        raise DataError(f"Level: expected 1, 2 or 3, got {level!r:.80}")
    options: dict[str, Any] = {"level": int(str(level))}
    if file := _attached_file(row, folder):
        options["files"] = [str(file)]
    if texts["Final answer"] == HIDDEN_ANSWER:
        options["answer_is_hidden"] = True
    source = generated_gaia.SOURCE.format(options["level"])
    return Problem(str(texts["task_id"]), str(texts["Question"]), str(texts["Final answer"]), source, "qa", options)


def _attached_file(row: Mapping[str, Any], folder: Path) -> Path | None:
    name = row.get("file_name") or Path(str(row.get("file_path") or "")).name
    if not name:
        return None
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise DataError(f"file_name: expected the name of a file beside the metadata, got {name!r:.80}")
    file = (folder / name).absolute()
    if not file.is_file():
        raise DataError(f"file_name: there is no file {file}")
    return file


def _has_answers(truth: str) -> bool:
    """Return whether some texts match `truth` and others do not. Three kinds of right answers cannot be used: "inf"
    matches every text that is no number, "nan" matches nothing, and punctuation matches any punctuation."""
    others = ("", "\0")
    return is_exact_match(truth, truth) and not any(is_exact_match(other, truth) for other in others)


def main() -> None:
    parser = argparse.ArgumentParser(description="Problems and submissions in GAIA's formats.")
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="convert a data set in GAIA's file format")
    convert.add_argument(
        "source", metavar="PATH[:SPLIT]", help="a metadata file, its directory, or that of the data set"
    )
    generate = commands.add_parser("generate", help="generate problems of the same shape")
    generate.add_argument("count", type=int, metavar="N", help="the number of problems")
    generate.add_argument("--seed", type=int, default=0, help="seed of the problems (default: 0)")
    generate.add_argument("--held-out", action="store_true", help="problems that are never among those for training")
    submission = commands.add_parser("submission", help="write the first attempt at each task for the leaderboard")
    submission.add_argument("store", type=Path, metavar="STORE", help="the directory of a store of episodes")
    submission.add_argument("--where", default="1", metavar="SQL", help="a condition on the columns of the store")
    for command in (convert, generate, submission):
        command.add_argument("--out", required=True, type=Path, metavar="FILE", help="the JSONL file to write")
    args = parser.parse_args()
    try:
        if args.command == "submission":
            with StoreReader(args.store) as reader:
                count = write_submission(args.out, reader.episodes(args.where))
        else:
            is_generated = args.command == "generate"
            problems = (
                generated_gaia.generate(args.count, args.seed, held_out=args.held_out)
                if is_generated
                else read_problems(args.source)
            )
            write_problems(problems, args.out)
            count = len(problems)
    except (DataError, RecordError) as error:
        sys.exit(str(error))
    print(f"{args.out}: {count} rows")


if __name__ == "__main__":
    main()
