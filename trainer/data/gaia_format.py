"""Reads data sets in GAIA's file format, and writes submissions to its leaderboard.

    2023/validation/metadata.parquet (or .jsonl)   task_id, Question, Level, Final answer, file_name, file_path
    2023/validation/FILE_NAME                      the attached file of a row

The data set itself is gated (huggingface.co/datasets/gaia-benchmark/GAIA) and must not be shared, so this
repository has no copy.

Invariants:
- A problem's environment is `qa`. Its options have the level and the attached file.
- An attached file is beside the metadata. No other file is read, whatever a row names.
- A hidden answer ("?", in the test split) is marked by the option `answer_is_hidden`, so that no report counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.data.rows import DataError, file_rows
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.episodes.exact_match import has_answers, plain_answer
from trainer.json_files import write_rows

SPLITS = ("validation", "test")
METADATA = ("metadata.parquet", "metadata.jsonl")
CANARY_ID = "0-0-0-0-0"
"""The task_id of a row that has no question. The data set contains this row so that copies of the data can be found."""
HIDDEN_ANSWER = "?"
SOURCE = "gaia-format-level-{}"
"""`Problem.source`, in which {} is the level. So a report by source is also a report by level."""


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


def iter_problems(path: str, on_malformed: Callable[[str, int, DataError], None]) -> Iterator[Problem]:
    """Yield the problems of `PATH[:SPLIT]`; pass the source, number and error of each malformed row to `on_malformed`.

    Raises `DataError` if there is no metadata file.
    """
    metadata, ids = find_metadata(path), set[str]()
    for number, row in enumerate(file_rows(metadata)):
        try:
            if not isinstance(row, Mapping):
                raise DataError(f"expected a JSON object, got {row!r:.200}")
            if row.get("task_id") == CANARY_ID:
                continue
            problem = _problem(row, metadata.parent)
            if problem.id in ids:
                raise DataError(f"task_id {problem.id!r} occurs a second time")
        except DataError as error:
            on_malformed(str(metadata), number, error)
        else:
            ids.add(problem.id)
            yield problem


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
    if texts["Final answer"] != HIDDEN_ANSWER and not has_answers(str(texts["Final answer"])):
        raise DataError(f"Final answer: every text would equal {texts['Final answer']!r:.80} by GAIA's rule, or none")
    level = row.get("Level")
    if str(level) not in ("1", "2", "3"):
        raise DataError(f"Level: expected 1, 2 or 3, got {level!r:.80}")
    options: dict[str, Any] = {"level": int(str(level))}
    if file := _attached_file(row, folder):
        options["files"] = [str(file)]
    if texts["Final answer"] == HIDDEN_ANSWER:
        options["answer_is_hidden"] = True
    source = SOURCE.format(options["level"])
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
