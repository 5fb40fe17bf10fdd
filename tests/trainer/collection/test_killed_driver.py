"""Tests of a driver that is killed at any moment. No episode is lost: the same command continues the collection, and
also the unfinished episodes."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainer.collection.store import StoreReader

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
NUM_PROBLEMS = 40
NUM_KILLS = 3


def start(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.trainer.collection.collect_slowly", str(directory), str(NUM_PROBLEMS)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def rows(directory: Path, pattern: str) -> list[dict[str, Any]]:
    """Return the complete rows of the store's files."""
    lines: list[bytes] = []
    for file in sorted((directory / "store").glob(pattern), key=lambda file: int(file.stem)):
        with contextlib.suppress(FileNotFoundError):  # the driver deletes files of the journal
            lines += file.read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def key_of(episode: dict[str, Any]) -> str:
    return f"{episode['problem']['id']}/{episode['sample']}"


def turns_on_disk(directory: Path) -> Counter[str]:
    """Return the number of turns in the journal, by episode."""
    turns: Counter[str] = Counter()
    for row in rows(directory, "turns/*.jsonl"):
        key, gained = key_of(row["tail"]), len(row["tail"]["turns"])
        turns[key] = gained if row["start_token"] == 0 else turns[key] + gained
    return turns


def stored_keys(directory: Path) -> set[str]:
    return {key_of(row) for row in rows(directory, "episodes/*.jsonl")}


def tries(directory: Path) -> list[tuple[str, int]]:
    """Return the episode of each try so far, and the number of turns that it began with."""
    lines = [line.split() for line in (directory / "started").read_text().splitlines()]
    return [(key, int(turns)) for key, turns, _ in lines]


@pytest.mark.timeout(120)
def test_a_killed_driver_repeats_no_stored_episode_and_no_finished_turn(tmp_path: Path) -> None:
    rng = random.Random(7)
    kills = []
    for _ in range(NUM_KILLS):
        with start(tmp_path) as process:
            goal = len(stored_keys(tmp_path)) + rng.randint(0, 20)
            # The kill comes when an episode has one turn on disk. The last turn of this episode would follow 60 ms
            # later.
            while len(stored_keys(tmp_path)) < goal or 1 not in turns_on_disk(tmp_path).values():
                assert process.poll() is None, "the collection ended before it was killed"
            process.send_signal(signal.SIGKILL)
        kills.append((len(tries(tmp_path)), stored_keys(tmp_path), turns_on_disk(tmp_path)))
    with start(tmp_path) as process:
        output, _ = process.communicate()
    assert (process.returncode, output) == (0, f"{2 * NUM_PROBLEMS}\n")
    with StoreReader(tmp_path / "store") as reader:
        assert Counter(reader.query("problem, sample")) == Counter(
            {(f"p{index}", sample): 1 for index in range(NUM_PROBLEMS) for sample in range(2)}
        )
        assert {episode.reward for episode in reader.episodes()} == {1.0}
    assert any(turns > 0 for _, turns in tries(tmp_path))
    for num_tries, stored, turns in kills:
        for key, first_turn in tries(tmp_path)[num_tries:]:
            assert key not in stored
            assert first_turn >= turns[key]
