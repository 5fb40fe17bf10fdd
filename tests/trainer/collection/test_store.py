"""Tests of the store of episodes.

Each key (problem and sample) is stored once. Nothing that was written is lost, whatever process is killed and whatever
file is incomplete (torn).
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.run_folders import episode
from trainer.collection import store as store_module
from trainer.collection.store import EpisodeStore, Failure, Growth, Key, StoreReader, remove_episodes
from trainer.episodes.episode import Episode, FailureKind, Problem, StopReason
from trainer.json_files import RecordError

ROOT = Path(__file__).parents[3]
SETTINGS = {"model": "tiny", "seed": 3}


def sample_episode(problem: str = "a", sample: int = 0, seed: int = 1) -> Episode:
    return episode(random.Random(f"{problem}/{sample}/{seed}"), problem, sample, skill=0.5)


def assert_equal(left: Episode, right: Episode) -> None:
    for name in Episode.__slots__:
        assert getattr(left, name) == getattr(right, name), name


def prefix(whole: Episode, num_turns: int) -> Episode:
    """The episode as it was after its first turns, with the observation that follows them."""
    end = whole.turns[num_turns].start if num_turns < len(whole.turns) else len(whole.response_ids)
    return replace(
        whole,
        response_ids=whole.response_ids[:end],
        logprobs=whole.logprobs[:end],
        loss_mask=whole.loss_mask[:end],
        weight_versions=[entry for entry in whole.weight_versions if entry[0] < end],
        turns=whole.turns[:num_turns],
        stop_reason=None,
        reward=None,
    )


def long_episode(problem: str = "a", sample: int = 0) -> Episode:
    """An episode of at least three turns."""
    return next(
        item for item in (sample_episode(problem, sample, seed) for seed in range(1000)) if len(item.turns) >= 3
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_store(path: Path) -> EpisodeStore:
    return EpisodeStore(path, SETTINGS)


def stored_keys(path: Path) -> list[tuple[str, int]]:
    with StoreReader(path) as reader:
        return list(reader.query("problem, sample"))


def stored_episodes(path: Path) -> list[Episode]:
    with StoreReader(path) as reader:
        return list(reader.episodes())


def test_an_episode_is_read_back_as_it_was_written(path: Path) -> None:
    written = [sample_episode(problem, sample) for problem in "ab" for sample in range(3)]
    with open_store(path) as store:
        store.write(written)
    for left, right in zip(written, stored_episodes(path), strict=True):
        assert_equal(left, right)


def test_an_episode_is_stored_only_once_under_its_key(path: Path) -> None:
    first, second = sample_episode(seed=1), sample_episode(seed=2)
    with open_store(path) as store:
        store.write([first, second])
        store.write([second])
    with open_store(path) as store:
        store.write([second])
    (kept,) = stored_episodes(path)
    assert_equal(kept, first)


def test_an_unfinished_episode_is_continued_from_its_last_turn_in_the_journal(path: Path) -> None:
    whole = long_episode()
    one_turn, two_turns = prefix(whole, 1), prefix(whole, 2)
    start = one_turn.response_length
    with open_store(path) as store:
        store.write(growth=[Growth(0, one_turn)])
        store.write(growth=[Growth(start, two_turns.tail(start, 1))])
    with open_store(path) as store:
        continued = store.take_unfinished(Key("a", 0))
        assert continued is not None
        assert_equal(continued, two_turns)
        assert store.take_unfinished(Key("a", 0)) is None
        store.write([continued.with_tail(whole.tail(two_turns.response_length, 2))])
    (kept,) = stored_episodes(path)
    assert_equal(kept, whole)


def test_a_turn_that_does_not_follow_the_rows_before_it_is_an_error(path: Path) -> None:
    whole = long_episode()
    with open_store(path) as store:
        store.write(growth=[Growth(0, prefix(whole, 1)), Growth(1, whole.tail(1, 1))])
    with pytest.raises(RecordError, match=r"turns/000001\.jsonl, byte \d+: token 1 of Key\(problem='a', sample=0\)"):
        open_store(path)


def test_an_episode_that_begins_anew_replaces_its_turns_in_the_journal(path: Path) -> None:
    first, second = prefix(long_episode(), 2), prefix(long_episode(), 1)
    with open_store(path) as store:
        store.write(growth=[Growth(0, first), Growth(0, second)])
    with open_store(path) as store:
        continued = store.take_unfinished(Key("a", 0))
        assert continued is not None
        assert_equal(continued, second)


def test_journal_files_without_unfinished_episodes_are_deleted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "JOURNAL_BYTES", 1)  # a file per row
    items = [long_episode("a", sample) for sample in range(4)]
    with open_store(path) as store:
        store.write(growth=[Growth(0, prefix(item, 1)) for item in items])
        assert len(list(path.glob("turns/*"))) == 4
        store.write(items[:3])
        assert len(list(path.glob("turns/*"))) == 1
        store.write(items[3:])
    with open_store(path):
        assert sum(file.stat().st_size for file in path.glob("turns/*")) == 0


def test_failures_are_counted_by_kind_until_the_episode_is_stored(path: Path) -> None:
    key = Key("a", 0)
    with open_store(path) as store:
        store.write(
            failures=[Failure(key, FailureKind.ENVIRONMENT, "x"), Failure(key, FailureKind.INFRASTRUCTURE, "y")]
        )
        store.write(failures=[Failure(key, FailureKind.INFRASTRUCTURE, "z")])
    with open_store(path) as store:
        assert store.failures == {(key, FailureKind.ENVIRONMENT): 1, (key, FailureKind.INFRASTRUCTURE): 2}
        store.write([sample_episode()])
        assert not store.failures
    with open_store(path) as store:
        assert not store.failures


@pytest.mark.parametrize("torn_bytes", [1, 10, 200])
@pytest.mark.parametrize("file", ["episodes/000001.jsonl", "turns/000001.jsonl", "failures.jsonl"])
def test_a_torn_last_row_is_removed_and_the_others_are_kept(path: Path, file: str, torn_bytes: int) -> None:
    whole = long_episode("b")
    with open_store(path) as store:
        store.write([sample_episode("a", sample) for sample in range(2)])
        store.write(growth=[Growth(0, prefix(whole, 1))])
        store.write(failures=[Failure(Key("b", 0), FailureKind.ENVIRONMENT, "x" * 300)])
    content = (path / file).read_bytes()
    last_row = content.splitlines(keepends=True)[-1]
    (path / file).write_bytes(content + last_row[:torn_bytes])
    with open_store(path) as store:
        assert (path / file).read_bytes() == content
        assert store.failures == {(Key("b", 0), FailureKind.ENVIRONMENT): 1}
        assert store.take_unfinished(Key("b", 0)) is not None
    assert stored_keys(path) == [("a", 0), ("a", 1)]


def test_a_damaged_row_before_others_is_an_error_that_names_its_place(path: Path) -> None:
    with open_store(path) as store:
        store.write([sample_episode("a", sample) for sample in range(2)])
    shard = path / "episodes/000001.jsonl"
    shard.write_bytes(b"?" + shard.read_bytes()[1:])
    (path / "index.sqlite3").unlink()
    with pytest.raises(RecordError, match=r"000001\.jsonl, byte 0: expected a row of JSON"):
        open_store(path)


@pytest.mark.parametrize("damage", ["missing", "garbage", "behind", "ahead"])
def test_the_index_is_rebuilt_from_the_shards(path: Path, damage: str) -> None:
    with open_store(path) as store:
        store.write([sample_episode("a", 0)])
        behind = (path / "index.sqlite3").read_bytes()
        store.write([sample_episode("a", 1), sample_episode("b", 0)])
    index, shard = path / "index.sqlite3", path / "episodes/000001.jsonl"
    match damage:
        case "missing":
            index.unlink()
        case "garbage":
            index.write_bytes(b"no database" * 1000)
        case "behind":
            index.write_bytes(behind)
        case "ahead":
            shard.write_bytes(b"".join(shard.read_bytes().splitlines(keepends=True)[:1]))
    with open_store(path) as store:
        stored = [key in store for key in (Key("a", 0), Key("a", 1), Key("b", 0))]
    assert stored == ([True, False, False] if damage == "ahead" else [True] * 3)


def test_a_full_shard_is_followed_by_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SHARD_BYTES", 1)
    written = [sample_episode("a", sample) for sample in range(3)]
    with open_store(path) as store:
        store.write(written[:2])
    with open_store(path) as store:
        store.write(written[2:])
    assert len(list(path.glob("episodes/*"))) == 3
    for left, right in zip(written, stored_episodes(path), strict=True):
        assert_equal(left, right)


def test_a_query_selects_by_the_columns_of_the_index(path: Path) -> None:
    written = [sample_episode(problem, sample) for problem in "ab" for sample in range(20)]
    with open_store(path) as store:
        store.write(written)
    expected = [Key.of(item) for item in written if item.reward == 1 and item.num_failed_tool_calls > 0]
    assert expected
    with StoreReader(path) as reader:
        assert reader.settings == SETTINGS
        assert list(reader.query("problem, sample", "reward = ? AND failed_tool_calls > 0", (1,))) == expected
        assert [Key.of(item) for item in reader.episodes("reward = 1 AND failed_tool_calls > 0")] == expected
        with pytest.raises(RecordError, match="'rewards = 1': no such column: rewards; expected a SQL condition on"):
            list(reader.query("problem", "rewards = 1"))


def test_a_store_that_is_open_for_writing_cannot_be_opened_a_second_time(path: Path) -> None:
    with open_store(path), pytest.raises(RecordError, match="another process writes this store"):
        open_store(path)
    open_store(path).close()


def test_other_settings_and_other_layouts_are_refused(path: Path, tmp_path: Path) -> None:
    open_store(path).close()
    with pytest.raises(RecordError, match=r"other settings \(seed\)"):
        EpisodeStore(path, SETTINGS | {"seed": 4})
    (path / "manifest.json").write_text(json.dumps({"layout_version": 0, "settings": SETTINGS}))
    with pytest.raises(RecordError, match="expected layout_version 1, got 0"):
        open_store(path)
    with pytest.raises(RecordError, match="expected a store of episodes"):
        StoreReader(tmp_path / "other")


def test_nothing_is_written_after_a_failed_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError("disk full")

    with open_store(path) as store:
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", fail)
            with pytest.raises(OSError, match="disk full"):
                store.write([sample_episode()])
        with pytest.raises(OSError, match="an earlier write failed"):
            store.write([sample_episode()])
    with open_store(path) as store:
        store.write([sample_episode()])
        assert Key("a", 0) in store
    assert stored_keys(path) == [("a", 0)]


WRITER = """
import sys
from pathlib import Path
from tests.trainer.collection.test_store import open_store, sample_episode, prefix, long_episode
from trainer.collection.store import Growth, Key

with open_store(Path(sys.argv[1])) as store:
    for sample in range(10_000):
        if Key("a", sample) not in store:
            store.write(growth=[Growth(0, prefix(long_episode("a", sample), 1))])
            store.write([sample_episode("a", sample)])
            print(sample, flush=True)
"""


def test_a_killed_writer_loses_no_episode_that_it_has_reported(path: Path) -> None:
    rng, reported = random.Random(5), set()
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout
        for _ in range(rng.randrange(1, 40)):
            reported.add(int(process.stdout.readline()))
        time.sleep(rng.random() / 200)
        process.send_signal(signal.SIGKILL)
        reported |= {int(line) for line in process.stdout if line.endswith(b"\n")}
        process.wait()
        process.stdout.close()
    open_store(path).close()
    stored = [sample for _, sample in stored_keys(path)]
    assert stored == list(range(len(stored)))
    assert reported <= set(stored) and len(stored) <= len(reported) + 8


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_stored_episodes(path: Path, traced: None) -> None:
    def write(start: int, count: int) -> None:
        for batch in range(start, start + count, 100):
            episodes = [Episode(Problem(f"t{number}", "text", "1"), 0) for number in range(batch, batch + 100)]
            store.write(episodes, [Growth(0, item) for item in episodes])

    with open_store(path) as store:
        write(0, 1_000)
        before, _ = tracemalloc.get_traced_memory()
        write(1_000, 5_000)
        after, _ = tracemalloc.get_traced_memory()
    assert after - before < 100_000  # 5,000 keys alone would take twice as much


def test_a_reader_in_the_middle_of_a_store_does_not_stop_the_writer(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PAGE_ROWS", 2)
    monkeypatch.setattr(store_module, "LOCK_TIMEOUT_S", 0.1)
    with open_store(path) as store:
        store.write([sample_episode(f"p{index}", 0, index) for index in range(5)])
        with StoreReader(path) as reader:
            read = reader.episodes("reward IS NULL OR sample = 0")
            keys = [Key.of(next(read))]
            store.write([sample_episode("p9", 0, 9)])
            keys += map(Key.of, read)
    assert keys == [Key(f"p{index}", 0) for index in (0, 1, 2, 3, 4, 9)]


def test_a_missing_index_and_a_condition_that_is_two_statements_are_named(path: Path) -> None:
    with open_store(path) as store:
        store.write([sample_episode("a", 0, 0)])
    with StoreReader(path) as reader, pytest.raises(RecordError, match=r"'1; x': .*expected a SQL condition on"):
        list(reader.episodes("1; x"))
    (path / "index.sqlite3").unlink()
    with pytest.raises(RecordError, match="`rstar-train collect` builds it from the episodes"):
        StoreReader(path)


def test_removed_episodes_are_neither_stored_nor_continued(path: Path) -> None:
    kept, removed = sample_episode("a", 0, 0), replace(long_episode("a", 1), stop_reason=StopReason.DEADLINE)
    with open_store(path) as store:
        store.write([kept, removed], [Growth(0, removed)])
    remove_episodes(path, StopReason.DEADLINE)
    with open_store(path) as store:
        assert store.take_unfinished(Key.of(removed)) is None
        assert Key.of(removed) not in store
    [stored] = stored_episodes(path)
    assert_equal(stored, kept)
