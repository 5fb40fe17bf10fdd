"""A driver that is killed at any moment loses nothing: the same command continues, inside its episodes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.trainer.collection.hosts import journal_rows
from trainer.collection.store import StoreReader

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
NUM_PROBLEMS = 40
NUM_KILLS = 3


def start(directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.trainer.collection.collect_slowly", str(directory), str(NUM_PROBLEMS)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def stored_and_turns(directory: Path) -> int:
    """Return a number that grows with each turn on disk."""
    shards = (directory / "store").glob("episodes/*.jsonl")
    return journal_rows(directory / "store") + 10 * sum(len(shard.read_bytes().splitlines()) for shard in shards)


@pytest.mark.timeout(120)
def test_a_killed_driver_repeats_no_stored_episode_and_no_finished_turn(tmp_path: Path) -> None:
    rng = random.Random(7)
    for _ in range(NUM_KILLS):
        with start(tmp_path) as process:
            goal = stored_and_turns(tmp_path) + rng.randint(20, 200)
            while stored_and_turns(tmp_path) < goal:
                assert process.poll() is None, "the collection ended before it was killed"
            process.send_signal(signal.SIGKILL)
    with start(tmp_path) as process:
        output, _ = process.communicate()
    assert (process.returncode, output) == (0, f"{2 * NUM_PROBLEMS}\n")
    with StoreReader(tmp_path / "store") as reader:
        assert Counter(reader.query("problem, sample")) == Counter(
            {(f"p{index}", sample): 1 for index in range(NUM_PROBLEMS) for sample in range(2)}
        )
        assert {episode.reward for episode in reader.episodes()} == {1.0}
    tries = [line.split() for line in (tmp_path / "started").read_text().splitlines()]
    assert any(int(turns) > 0 for _, turns, _ in tries)
    last_try_of = {key: (int(turns), pid) for key, turns, pid in tries}
    first_try_of = {key: pid for key, _, pid in reversed(tries)}
    finished_at_once = [key for key, (_, pid) in last_try_of.items() if first_try_of[key] == pid]
    assert len(tries) - len(finished_at_once) <= 2 * 8 * NUM_KILLS, "only episodes that were running are tried again"
