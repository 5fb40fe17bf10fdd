"""Trackers: what is logged can be read back from each, and what is missing is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from trainer.runs.run_folder import RunFolder
from trainer.runs.trackers import _tracker_run_name, open_trackers

ROOT = Path(__file__).parents[3]
ROWS = [{"step": step, "stage": "rl1", "reward": step / 4, "loss": None} for step in (1, 2, 3)]
WRITE = """
import json, sys; from pathlib import Path; from trainer.runs.trackers import open_trackers
name, run, rows = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
for part in rows[:2], rows[2:]:
    with open_trackers([name], run, {"seed": 1}, project="rstar") as log:
        for row in part: log(row)
"""
"""A run that is resumed; in a process of its own, since these packages read the environment when imported."""

READ_TRACKIO = """
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_logs("rstar", (run / "tracker_run_name").read_text().strip())))
"""


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name} (pip install {name})")


def output_of(code: str, name: str, run: Path, **environment: str) -> str:
    """What code prints to stdout that is told of `name`, `run` and ROWS."""
    argv = [sys.executable, "-c", code, name, str(run), json.dumps(ROWS)]
    return subprocess.run(
        argv, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, check=True
    ).stdout.decode()


def test_no_tracker_takes_rows_and_does_nothing(tmp_path: Path) -> None:
    with open_trackers([], tmp_path, {}, project="rstar") as log:
        log(ROWS[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["trackio", "wandb", "tensorboard"])
def test_a_missing_package_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        open_trackers([name], tmp_path, {}, project="rstar").__enter__()
    assert caught.value.name == name


@needs("tensorboard")
@needs("torch")
@pytest.mark.filterwarnings("ignore")  # of what both import
def test_tensorboard_has_the_logged_metrics(tmp_path: Path) -> None:
    with open_trackers(["tensorboard"], tmp_path, {}, project="rstar") as log:
        for row in ROWS:
            log(row)
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (events,) = (tmp_path / "tensorboard").iterdir()
    got = [(e.step, v.tag, v.tensor.float_val[0]) for e in EventFileLoader(str(events)).Load() for v in e.summary.value]
    assert got == [(row["step"], "reward", row["reward"]) for row in ROWS]


@needs("trackio")
def test_trackio_has_the_logged_metrics_and_continues_a_resumed_run(tmp_path: Path) -> None:
    here = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    rows = json.loads(output_of(WRITE + READ_TRACKIO, "trackio", tmp_path / "run", **here))
    assert [(row["step"], row["reward"]) for row in rows] == [(row["step"], row["reward"]) for row in ROWS]


@needs("wandb")
def test_wandb_writes_a_run_while_it_is_offline(tmp_path: Path) -> None:
    assert output_of(WRITE, "wandb", tmp_path / "run", WANDB_MODE="offline") == ""
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-run-*.wandb"))


def test_a_run_is_tracked_under_one_name_and_another_under_another(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "run", tmp_path / "b" / "run"
    assert (
        _tracker_run_name(one) == _tracker_run_name(one)
        and _tracker_run_name(one).startswith("run-")
        and _tracker_run_name(one) != _tracker_run_name(other)
    )


def test_the_run_folder_tells_a_tracker_of_each_row(tmp_path: Path) -> None:
    received: list[object] = []
    folder = RunFolder(tmp_path, on_metrics=received.append)
    folder.append_metrics({"step": 1, "stage": "rl1", "reward": float("nan"), "turns": 2})
    assert received == list(folder.read_metrics()) == [{"step": 1, "stage": "rl1", "reward": None, "turns": 2}]
