"""What the recipe's units do, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from trainer import data, stages
from trainer.config import load
from trainer.recipe import Run, Unit


def test_prepare_brings_problems_apart_from_those_that_are_evaluated(tmp_path: Path) -> None:
    sets = [f"run_dir={tmp_path / 'run'}", 'data.train=["generated:30"]', 'evaluate.data=["generated:20"]']
    run = Run(load(None, {}, sets))
    stages.prepare(run)
    training = data.read(str(run.folder / "data/train.jsonl"))
    fresh = data.read(str(run.folder / "data/evaluate.jsonl"))
    assert (len(training), len(fresh)) == (30, 20)
    assert not {problem.text for problem in training} & {problem.text for problem in fresh}
    found = run.needed(Unit("prepare"))
    assert (found["model"], found["step"]) == ("stages/start/model", 0)
    assert (run.folder / found["model"] / "config.json").exists()
