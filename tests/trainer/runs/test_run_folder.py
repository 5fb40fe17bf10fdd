"""Tests of the run folder, the directory that a training run writes.

It returns what was written to it, and a run can be resumed from it. If a kill interrupts the writing of a row, the last
line of the file is incomplete (torn). A reader ignores a torn line, and the next row replaces this line.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import asdict, fields, replace
from itertools import chain, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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


def metric_steps(folder: RunFolder) -> list[int]:
    """Return the step of each row of metrics."""
    return [row["step"] for row in folder.read_metrics()]


def append_steps(folder: RunFolder, *steps: int) -> None:
    for step in steps:
        folder.append_metrics({"step": step, "stage": "rl1", "reward": step / 10})


def test_an_empty_folder_reads_as_nothing(folder: RunFolder) -> None:
    assert folder.read_config() is None and folder.read_summary() is None
    assert [*folder.read_metrics(), *folder.episode_steps(), *folder.read_episodes(1)] == []
    folder.truncate_after(0)
    assert not folder.path.exists()


def test_the_row_of_an_episode_has_all_of_its_tokens_turns_and_calls(folder: RunFolder) -> None:
    folder.save_logprobs = True
    rng = random.Random(7)
    groups = [[episode(rng, f"p{g}", sample, skill=0.5) for sample in range(4)] for g in range(3)]
    selected, reasons = [[0, 1], [2, 3], []], [[f"{g}{i}" for i in range(4)] for g in range(3)]
    folder.write_episodes(2, "rl1", groups, selected, reasons)
    rows = list(folder.read_episodes(2))
    assert [(row["group"], row["sample"]) for row in rows] == [(g, i) for g in range(3) for i in range(4)]
    assert [row["is_selected"] for row in rows] == [True, True, False, False, False, False, True, True] + [False] * 4
    assert [row["selection_reason"] for row in rows] == [reason for group in reasons for reason in group]
    for row, written in zip(rows, chain(*groups), strict=True):
        assert (row["step"], row["stage"]) == (2, "rl1")
        assert_row_equals(row, written)


def assert_row_equals(row: dict[str, Any], written: Episode) -> None:
    assert row["response_ids"] == written.response_ids and tuple(row["prompt_ids"]) == written.prompt_ids
    assert row["logprobs"] == pytest.approx(written.logprobs, abs=1e-6)
    assert expanded_mask(row) == written.loss_mask
    assert row["problem"] == asdict(written.problem)
    for turn_row, turn in zip(row["turns"], written.turns, strict=True):
        calls = tuple(from_row(ToolCall, call) for call in turn_row["tool_calls"])
        assert from_row(Turn, turn_row | {"tool_calls": calls}) == turn
    for name in ("sample", "reward", "answer", "answer_blocks", "num_tool_calls", "num_failed_tool_calls", "error"):
        assert row[name] == getattr(written, name), name
    assert (row["p_err"], row["p_format"]) == (p_err(written), p_format(written))
    assert row["stop_reason"] == written.stop_reason and row["sampled_tokens"] == written.sampled_tokens


def expanded_mask(row: dict[str, Any]) -> list[int]:
    """Return the loss mask with one value for each token. In the row, (start, end, value) stands for consecutive tokens
    with the same value."""
    return [value for start, end, value in row["loss_mask"] for _ in range(start, end)]


def from_row(kind: Any, row: dict[str, Any]) -> Any:
    """Return the dataclass `kind` from a row that may have further keys."""
    return kind(**{field.name: row[field.name] for field in fields(kind)})


def test_token_ids_are_always_written_and_log_probabilities_only_on_request(folder: RunFolder) -> None:
    write_step(folder, 1, "rl1", [[episode(random.Random(1), "p", sample, skill=1.0) for sample in range(4)]])
    (row, *_) = folder.read_episodes(1)
    assert row["response_ids"] and "logprobs" not in row


@given(st.lists(st.integers(0, 1), min_size=1))
def test_the_loss_mask_is_written_with_one_entry_per_run_of_equal_values(mask: list[int]) -> None:
    masked = replace(episode(random.Random(1), "p", 0, skill=1.0), response_ids=[7] * len(mask), loss_mask=mask)
    with TemporaryDirectory() as path:
        RunFolder(Path(path)).write_episodes(1, "rl1", [[masked]], [[0]])
        (row,) = RunFolder(Path(path)).read_episodes(1)
    assert expanded_mask(row) == mask
    assert len(row["loss_mask"]) == sum(1 for _ in groupby(mask))


def test_a_row_of_metrics_has_a_step_a_stage_and_known_names_only(folder: RunFolder) -> None:
    with pytest.raises(AssertionError, match="rewrad"):
        folder.append_metrics({"step": 1, "stage": "rl1", "rewrad": 1.0})
    with pytest.raises(AssertionError, match=r"got \['reward'\]"):
        folder.append_metrics({"reward": 1.0})
    folder.append_metrics({"step": 1, "stage": "rl1"} | dict.fromkeys(METRICS, 0.5))
    assert next(folder.read_metrics()).keys() == METRICS.keys() | {"step", "stage"}


def test_nan_and_infinity_are_written_as_null(folder: RunFolder) -> None:
    numbers = {"loss": float("nan"), "grad_norm": float("inf"), "sampled_tokens": 3}
    folder.append_metrics({"step": 1, "stage": "sft", **numbers})
    (row,) = folder.read_metrics()
    assert (row["loss"], row["grad_norm"], row["sampled_tokens"]) == (None, None, 3)


# 200,000 bytes are far longer than the other rows.
@pytest.mark.parametrize("torn", [b'{"step":4,"st', b"x" * 200_000, b"{"])
def test_a_torn_last_line_is_ignored_and_then_overwritten(folder: RunFolder, torn: bytes) -> None:
    append_steps(folder, 1, 2)
    path = folder.path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(torn)
    assert metric_steps(folder) == [1, 2]
    append_steps(folder, 3)
    assert metric_steps(folder) == [1, 2, 3]
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2, 3]


def test_a_file_with_nothing_but_a_torn_line_has_no_rows(folder: RunFolder) -> None:
    folder.path.mkdir()
    (folder.path / "metrics.jsonl").write_bytes(b"{" * 100_000)
    assert metric_steps(folder) == []
    append_steps(folder, 1)
    assert metric_steps(folder) == [1]


def test_a_killed_writer_leaves_all_rows_that_it_has_reported(folder: RunFolder) -> None:
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
        rest_of_output = writer.communicate()[0].split()
    last_reported = int(rest_of_output[-1]) if rest_of_output else 20
    steps = metric_steps(folder)
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= last_reported
    assert sum(1 for _ in folder.read_episodes(1)) >= 8 * last_reported, "eight episodes per step"
    append_steps(folder, len(steps) + 1)
    assert len(metric_steps(folder)) == len(steps) + 1


def test_truncation_deletes_the_rows_after_a_checkpoint(folder: RunFolder) -> None:
    write_run(folder.path, problems_per_step=1)
    # Steps 1 to 6 are supervised fine-tuning (SFT), which has no episodes.
    assert folder.episode_steps() == list(range(7, 19)) and metric_steps(folder) == list(range(1, 19))
    before = list(folder.read_episodes(11))
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":20,')  # a torn line
    folder.truncate_after(11)
    assert folder.episode_steps() == list(range(7, 12)) and metric_steps(folder) == list(range(1, 12))
    assert list(folder.read_episodes(11)) == before
    append_steps(folder, 12)
    assert metric_steps(folder) == list(range(1, 13))


def test_truncation_deletes_repeated_steps_as_well(folder: RunFolder) -> None:
    append_steps(folder, 1, 2, 3, 4, 3, 4, 5)  # a resumed run repeated steps 3 and 4, and its folder was not truncated
    folder.truncate_after(3)
    assert metric_steps(folder) == [1, 2, 3]


def test_a_complete_line_that_is_not_json_is_an_error_with_its_number(folder: RunFolder) -> None:
    append_steps(folder, 1)
    path = folder.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b"nonsense\n")
    with pytest.raises(RecordError, match=r"metrics\.jsonl, line 2: expected a row of JSON, got b'nonsense"):
        metric_steps(folder)


def test_another_layout_version_is_refused(folder: RunFolder) -> None:
    write_json(folder.path / "config.json", {"layout_version": 99, "config": {}})
    with pytest.raises(RecordError, match="expected layout_version 2, got 99"):
        folder.read_config()
    write_json(folder.path / "config.json", {"config": {}})
    with pytest.raises(RecordError, match="expected layout_version 2, got None; read this folder with the version"):
        folder.read_config()


def test_config_and_summary_are_read_back(folder: RunFolder) -> None:
    folder.bind_config({"model": "tiny", "stages": [{"steps": 3}], "data": ("a", "b")})
    folder.write_summary({"stages": []})
    assert folder.read_config() == {"model": "tiny", "stages": [{"steps": 3}], "data": ["a", "b"]}
    assert folder.read_summary() == {"layout_version": 2, "stages": []}
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.json", "summary.json"]


def test_a_changed_setting_is_refused_if_it_is_not_changeable(folder: RunFolder) -> None:
    config = {"model": {"path": "tiny", "dtype": "float32"}, "data": ("a",), "run_dir": "x"}
    folder.bind_config(config)
    folder.bind_config(config | {"data": ["a"]})
    with pytest.raises(RecordError, match=r"was written with other settings \(data, model.path\); use the same"):
        folder.bind_config({"model": {"path": "big", "dtype": "float32"}, "run_dir": "x"})
    folder.bind_config(config | {"run_dir": "y"}, changeable=("run_dir",))
    assert folder.read_config() == {"model": config["model"], "data": ["a"], "run_dir": "y"}


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


def test_text_with_surrogates_and_control_characters_is_read_back(folder: RunFolder) -> None:
    hostile = "\ud800 \u2028 \x1b[31m </script> \0 🐍"
    written = replace(episode(random.Random(1), "p", 0, skill=1.0), problem=Problem(hostile, hostile, ""))
    folder.write_episodes(1, "rl1", [[written]], [[0]])
    (row,) = folder.read_episodes(1)
    assert row["problem"]["id"] == hostile


def test_docs_runs_md_describes_every_key_of_an_episode(folder: RunFolder) -> None:
    folder.save_logprobs = True
    write_step(folder, 1, "rl1", [[episode(random.Random(1), "p", sample, skill=1.0) for sample in range(4)]])
    (row, *_) = folder.read_episodes(1)
    text = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    assert [key for key in row if f"`{key}`" not in text] == []


def test_a_continued_run_forgets_the_entropies_after_its_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_entropies(4, [{"step": 4}])
    folder.truncate_after(4)
    assert list(folder.read_entropies(4)) == [{"step": 4}]
    folder.truncate_after(3)
    assert list(folder.read_entropies(4)) == []
