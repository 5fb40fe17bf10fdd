"""Tests of `bench.fits`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench import fits
from bench.harness.tables import Table
from trainer.config import ModelShape
from trainer.recipe.resource_plan import GB, training_memory


def test_the_committed_table_is_that_of_the_resource_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert fits.main(["--json"]) == 0
    computed = json.loads(capsys.readouterr().out.splitlines()[-1])
    committed = json.loads(Path(fits.__file__).with_name("results").joinpath("fits.json").read_text())
    assert (computed["tokens"], computed["rows"]) == (committed["tokens"], committed["rows"])


def test_a_training_that_is_refused_or_too_large_has_no_size() -> None:
    shape = fits.SHAPES["Qwen2.5-7B"]
    assert fits.needed_gb(shape, 80, 1, 16_384) is None, "16 bytes for each of 7.6 billion parameters"
    assert fits.needed_gb(shape, 80, 8, 16_384, optim="paged_adamw_8bit") is None, "bitsandbytes with sharding"
    rows = [{"model": "m", "training": "full", "gb": [None] * len(fits.GPUS)}]
    table = fits.tables({"tokens": 1, "rows": rows, "counted": []})[0]
    assert isinstance(table, Table) and table.rows == [("m", "full", *["–"] * len(fits.GPUS))]


def test_the_plan_is_within_15_percent_of_the_counted_peaks() -> None:
    committed = json.loads(Path(fits.__file__).with_name("results").joinpath("fits.json").read_text())["counted"]
    shapes = {"0.1B": fits.SMALL_SHAPE, **fits.SHAPES}
    assert {row["model"] for row in committed} == shapes.keys() - {"Qwen2.5-1.5B"}
    for row in committed:
        planned = training_memory(
            shapes[row["model"]],
            row["tokens"],
            "bfloat16",
            gradient_checkpointing=row["gradient_checkpointing"],
            lora_rank=fits.LORA_RANK if row["training"] == "LoRA" else 0,
            shards=row["gpus"],
        )
        assert row["planned_gb"] == round(planned.peak / GB, 2), "the plan has changed; count again"
        assert row["planned_gb"] == pytest.approx(row["counted_gb"], rel=0.15)


@pytest.mark.filterwarnings("ignore::FutureWarning:(peft|torch|transformers|trl)", "ignore::UserWarning:peft")
@pytest.mark.parametrize("lora_rank", [0, fits.LORA_RANK])
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_the_counted_peak_of_a_small_model_is_near_the_plan(
    lora_rank: int, gpus: int, gradient_checkpointing: bool
) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    shape = ModelShape(4, 512, 1536, 8, 2, 32_768, 64)
    row = fits.compared("small", shape, 8192, lora_rank, gpus, gradient_checkpointing=gradient_checkpointing)
    assert row["planned_gb"] == pytest.approx(row["counted_gb"], rel=0.15)
