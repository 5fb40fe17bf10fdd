"""The run folder: what is written is read back, what a kill tears is dropped and repaired."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import asdict, fields, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.run_folders import episode, write_run, write_step
from trainer.episodes.episode import Episode, Problem, ToolCall, Turn
from trainer.episodes.metrics import METRICS
from trainer.episodes.roc import p_err, p_format
from trainer.json_files import RecordError, write_json
from trainer.runs.run_folder import RunFolder

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def metrics(folder: RunFolder) -> list[int]:
    return [row["step"] for row in folder.read_metrics()]


def add(folder: RunFolder, *steps: int) -> None:
    for step in steps:
        folder.append_metrics({"step": step, "stage": "rl1", "reward": step / 10})


def test_an_empty_folder_reads_as_nothing(folder: RunFolder) -> None:
    assert folder.read_config() is None and folder.read_summary() is None
    assert [*folder.read_metrics(), *folder.episode_steps(), *folder.read_episodes(1)] == []
    folder.truncate_after(0)
    assert not folder.path.exists()


def test_an_episode_is_written_so_that_it_could_be_replayed(folder: RunFolder) -> None:
    folder.save_logprobs = True
    rng = random.Random(7)
    groups = [[episode(rng, f"p{g}", sample, skill=0.5) for sample in range(4)] for g in range(3)]
    folder.write_episodes(2, "rl1", groups, [[0, 1], [2, 3], []], [[f"{g}{i}" for i in range(4)] for g in range(3)])
    rows = list(folder.read_episodes(2))
    assert [(row["group"], row["sample"]) for row in rows] == [(g, i) for g in range(3) for i in range(4)]
    assert [row["is_selected"] for row in rows] == [True, True, False, False, False, False, True, True] + [False] * 4
    assert [row["selection_reason"] for row in rows] == [f"{g}{i}" for g in range(3) for i in range(4)]
    for row, one in zip(rows, (one for group in groups for one in group), strict=True):
        assert (row["step"], row["stage"]) == (2, "rl1")
        assert_holds(row, one)


def assert_holds(row: dict, one: Episode) -> None:
    assert row["response_ids"] == one.response_ids and tuple(row["prompt_ids"]) == one.prompt_ids
    assert row["logprobs"] == pytest.approx(one.logprobs, abs=1e-6)
    assert [value for start, end, value in row["loss_mask"] for _ in range(start, end)] == one.loss_mask
    assert row["problem"] == asdict(one.problem)
    turns = [
        own(Turn, turn) | {"tool_calls": tuple(ToolCall(**own(ToolCall, call)) for call in turn["tool_calls"])}
        for turn in row["turns"]
    ]
    assert [Turn(**turn) for turn in turns] == one.turns
    for name in ("sample", "reward", "answer", "answer_blocks", "num_tool_calls", "num_failed_tool_calls", "error"):
        assert row[name] == getattr(one, name), name
    assert (row["p_err"], row["p_format"]) == (p_err(one), p_format(one))
    assert row["stop_reason"] == one.stop_reason and row["sampled_tokens"] == one.sampled_tokens


def own(of: type, row: dict) -> dict:
    """What a dataclass has of a row that has more."""
    return {field.name: row[field.name] for field in fields(of)}


def test_ids_are_always_kept_and_log_probabilities_on_demand(folder: RunFolder) -> None:
    write_step(folder, 1, "rl1", [[episode(random.Random(1), "p", sample, skill=1.0) for sample in range(4)]])
    (row, *_) = folder.read_episodes(1)
    assert row["response_ids"] and "logprobs" not in row


@given(st.lists(st.integers(0, 1), min_size=1))
def test_spans_are_the_mask(mask: list[int]) -> None:
    one = replace(episode(random.Random(1), "p", 0, skill=1.0), response_ids=[7] * len(mask), loss_mask=mask)
    with TemporaryDirectory() as path:
        RunFolder(Path(path)).write_episodes(1, "rl1", [[one]], [[0]])
        (row,) = RunFolder(Path(path)).read_episodes(1)
    assert [value for start, end, value in row["loss_mask"] for _ in range(start, end)] == mask
    assert len(row["loss_mask"]) == sum(1 for _ in groupby(mask))


def test_metrics_have_only_names_from_the_list(folder: RunFolder) -> None:
    with pytest.raises(AssertionError, match="rewrad"):
        folder.append_metrics({"step": 1, "stage": "rl1", "rewrad": 1.0})
    with pytest.raises(AssertionError, match=r"got \['reward'\]"):
        folder.append_metrics({"reward": 1.0})
    folder.append_metrics({"step": 1, "stage": "rl1"} | dict.fromkeys(METRICS, 0.5))
    assert next(folder.read_metrics()).keys() == METRICS.keys() | {"step", "stage"}


def test_what_is_not_finite_is_null(folder: RunFolder) -> None:
    numbers = {"loss": float("nan"), "grad_norm": float("inf"), "sampled_tokens": 3}
    folder.append_metrics({"step": 1, "stage": "sft", **numbers})
    (row,) = folder.read_metrics()
    assert (row["loss"], row["grad_norm"], row["sampled_tokens"]) == (None, None, 3)


@pytest.mark.parametrize("torn", [b'{"step":4,"st', b"x" * 200_000, b"{"])
def test_a_torn_last_line_is_dropped_and_repaired(folder: RunFolder, torn: bytes) -> None:
    add(folder, 1, 2)
    path = folder.path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(torn)
    assert metrics(folder) == [1, 2]
    add(folder, 3)
    assert metrics(folder) == [1, 2, 3]
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2, 3]


def test_a_file_that_is_one_torn_line_is_empty(folder: RunFolder) -> None:
    folder.path.mkdir()
    (folder.path / "metrics.jsonl").write_bytes(b"{" * 100_000)
    assert metrics(folder) == []
    add(folder, 1)
    assert metrics(folder) == [1]


def test_a_writer_killed_at_any_moment_leaves_rows_that_can_be_read(folder: RunFolder) -> None:
    code = (
        "import random, sys; from pathlib import Path; from tests.trainer.run_folders import episode\n"
        "from trainer.runs.run_folder import RunFolder\n"
        "folder, rng = RunFolder(Path(sys.argv[1])), random.Random(1)\n"
        "group = [episode(rng, 'p', sample, skill=.5) for sample in range(8)]\n"
        "for step in range(1, 10**9):\n"
        "    folder.write_episodes(1, 'rl1', [group], [[0]])\n"
        "    folder.append_metrics({'step': step, 'stage': 'rl1'})\n"
        "    print(step, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(folder.path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    try:
        for _ in range(20):
            assert writer.stdout.readline()
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        said = writer.communicate()[0].split()
    promised = int(said[-1]) if said else 20
    steps = metrics(folder)
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= promised
    assert sum(1 for _ in folder.read_episodes(1)) >= 8 * promised
    add(folder, len(steps) + 1)
    assert len(metrics(folder)) == len(steps) + 1


def test_truncation_deletes_the_rows_after_a_checkpoint(folder: RunFolder) -> None:
    write_run(folder.path, problems=1)
    assert folder.episode_steps() == list(range(7, 19)) and metrics(folder) == list(range(1, 19))
    before = list(folder.read_episodes(11))
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":20,')
    folder.truncate_after(11)
    assert folder.episode_steps() == list(range(7, 12)) and metrics(folder) == list(range(1, 12))
    assert list(folder.read_episodes(11)) == before
    add(folder, 12)
    assert metrics(folder) == list(range(1, 13))


def test_a_run_that_went_on_without_rewinding_can_still_be_rewound(folder: RunFolder) -> None:
    add(folder, 1, 2, 3, 4, 3, 4, 5)
    folder.truncate_after(3)
    assert metrics(folder) == [1, 2, 3]


def test_a_row_that_cannot_be_ours_is_named(folder: RunFolder) -> None:
    add(folder, 1)
    path = folder.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b"nonsense\n")
    with pytest.raises(RecordError, match=r"metrics\.jsonl, line 2: expected a row of JSON, got b'nonsense"):
        metrics(folder)


def test_another_version_is_refused(folder: RunFolder) -> None:
    write_json(folder.path / "config.json", {"layout_version": 99, "config": {}})
    with pytest.raises(RecordError, match="expected layout_version 2, got 99"):
        folder.read_config()
    write_json(folder.path / "config.json", {"version": 1, "config": {}})
    with pytest.raises(RecordError, match="expected layout_version 2, got 1; read this folder with the version"):
        folder.read_config()


def test_config_and_summary_come_back(folder: RunFolder) -> None:
    folder.bind_config({"model": "tiny", "stages": [{"steps": 3}], "data": ("a", "b")})
    folder.write_summary({"stages": []})
    assert folder.read_config() == {"model": "tiny", "stages": [{"steps": 3}], "data": ["a", "b"]}
    assert folder.read_summary() == {"layout_version": 2, "stages": []}
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.json", "summary.json"]


def test_a_run_folder_accepts_other_values_of_changeable_settings_only(folder: RunFolder) -> None:
    mine = {"model": {"path": "tiny", "dtype": "float32"}, "data": ("a",), "run_dir": "x"}
    folder.bind_config(mine)
    folder.bind_config(mine | {"data": ["a"]})
    with pytest.raises(RecordError, match=r"has a run with other settings \(data, model.path\); use the same settings"):
        folder.bind_config({"model": {"path": "big", "dtype": "float32"}, "run_dir": "x"})
    folder.bind_config(mine | {"run_dir": "y"}, changeable=("run_dir",))
    assert folder.read_config() == {"model": mine["model"], "data": ["a"], "run_dir": "y"}


def test_a_reader_holds_one_row_at_a_time(folder: RunFolder) -> None:
    group = [episode(random.Random(1), "p", sample, skill=0.5) for sample in range(8)]
    for _ in range(50):
        folder.write_episodes(1, "rl1", [group], [[]])
    size = (folder.path / "episodes/step_000001.jsonl").stat().st_size
    tracemalloc.start()
    assert sum(1 for _ in folder.read_episodes(1)) == 400
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 4, f"{peak} bytes for a file of {size}"


def test_text_that_is_no_text_survives(folder: RunFolder) -> None:
    hostile = "\ud800 \u2028 \x1b[31m </script> \0 🐍"
    one = replace(episode(random.Random(1), "p", 0, skill=1.0), problem=Problem(hostile, hostile, ""))
    folder.write_episodes(1, "rl1", [[one]], [[0]])
    (row,) = folder.read_episodes(1)
    assert row["problem"]["id"] == hostile


def test_the_document_has_every_key(folder: RunFolder) -> None:
    folder.save_logprobs = True
    write_step(folder, 1, "rl1", [[episode(random.Random(1), "p", sample, skill=1.0) for sample in range(4)]])
    (row, *_) = folder.read_episodes(1)
    text = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    assert [key for key in row if f"`{key}`" not in text] == []
