"""Tests of `bench.fits`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench import fits
from bench.harness.tables import Table


def test_the_committed_table_is_that_of_the_resource_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert fits.main(["--json"]) == 0
    computed = json.loads(capsys.readouterr().out.splitlines()[-1])
    committed = json.loads(Path(fits.__file__).with_name("results").joinpath("fits.json").read_text())
    assert (computed["tokens"], computed["rows"]) == (committed["tokens"], committed["rows"])


def test_a_training_that_is_refused_or_too_large_has_no_size() -> None:
    shape = fits.SHAPES["Qwen2.5-7B"]
    assert fits.needed_gb(shape, 80, 1, 16_384) is None, "16 bytes for each of 7.6 billion parameters"
    assert fits.needed_gb(shape, 80, 8, 16_384, optim="paged_adamw_8bit") is None, "bitsandbytes with sharding"
    table = fits.tables({"tokens": 1, "rows": [{"model": "m", "training": "full", "gb": [None] * len(fits.GPUS)}]})[0]
    assert isinstance(table, Table) and table.rows == [("m", "full", *["–"] * len(fits.GPUS))]
