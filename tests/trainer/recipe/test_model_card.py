"""Tests of `rstar-train export-model`: a folder for transformers with a card that says where the model comes from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from trainer import cli
from trainer.config_loading import load_config
from trainer.json_files import write_json
from trainer.recipe.evaluation import ALL, EpisodeOutcome, summarize, summary_scores
from trainer.recipe.phases import EvalResult, Phase, RecipeRun, TrainResult

CONFIG = """
[model]
path = "Some/Model-1B"
[data]
train = ["openai/gsm8k@main"]
[sft]
data = ["chats.jsonl"]
[stages.rl1]
steps = 7
learning_rate = 2e-6
[eval]
data = ["aime.jsonl"]
[reward]
function = "rewards:score"
"""
CORRECT = EpisodeOutcome(1.0, 1, 0, answer_blocks=1, stop_reason="finished", num_turns=1, response_length=9)


@pytest.fixture
def run(tmp_path: Path) -> RecipeRun:
    """A finished run whose models are one file each. The first three of four problems are solved after rl1."""
    (tmp_path / "run.toml").write_text(CONFIG, encoding="utf-8")
    run = RecipeRun(load_config(tmp_path / "run.toml", {}, [f"run_dir={tmp_path / 'run'}"]))
    run.run_folder.bind_config(asdict(run.config))
    write_json(run.dir / "data/report.json", {"train": {"counts": {"gsm8k": {"rows": 9, "malformed": 1, "kept": 8}}}})
    for step, stage in enumerate(("sft", "rl1"), 1):
        (run.stage_dir(stage) / "model").mkdir(parents=True)
        (run.stage_dir(stage) / "model/model.safetensors").write_text(stage)
        run.write_result(Phase("sft" if stage == "sft" else "grpo", stage), TrainResult(f"stages/{stage}/model", step))
        groups = [[CORRECT]] * (2 * step - 1) + [[CORRECT._replace(reward=0.0)]] * (5 - 2 * step)
        reports = {ALL: summarize(groups, 1)}
        content = {source: asdict(report) for source, report in reports.items()}
        run.write_result(Phase("eval", stage), EvalResult(summary_scores(reports), content))
    return run


def export(run: RecipeRun, out: Path, *options: str) -> int:
    return cli.main(["export-model", str(run.dir), "--out", str(out), *options])


def test_the_card_states_base_model_data_settings_accuracy_and_commands(run: RecipeRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(run, out) == 0
    assert (out / "model.safetensors").read_text() == "rl1"
    card = (out / "README.md").read_text(encoding="utf-8")
    front_matter = dict(line.split(": ", 1) for line in card.split("---")[1].strip().splitlines())
    assert json.loads(front_matter["base_model"]) == "Some/Model-1B"
    assert json.loads(front_matter["datasets"]) == ["openai/gsm8k"]
    for part in (
        "`Some/Model-1B` after 2 steps of supervised fine-tuning and reinforcement learning by GRPO-RoC",
        "| sft | 4 × 1 | 0.250 [",
        "| rl1 | 4 × 1 | 0.750 [",
        "- train: `gsm8k`, 9 rows, 1 malformed, 8 kept",
        "- sft: `chats.jsonl`",
        "- rl1: 7 steps of 512 problems, 32 samples, of which 16 are kept (`paper`), learning rate 2e-06",
        "- reward: `rewards:score`",
        "    rstar-train recipe training_config.json --run-dir NEW",
    ):
        assert part in card, part
    assert load_config(out / "training_config.json", {}) == run.config, "the documented command reads the settings"


def test_the_model_of_an_earlier_stage_has_a_card_without_the_later_ones(run: RecipeRun, tmp_path: Path) -> None:
    assert export(run, tmp_path / "out", "--stage", "sft") == 0
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert (tmp_path / "out/model.safetensors").read_text() == "sft"
    assert "after sft" in card and "rl1" not in card


def test_an_export_that_would_be_wrong_is_one_line(
    run: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").touch()
    assert export(run, out) == 2
    assert f"{out}: expected a new or an empty folder; nothing was written" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["file"]
    assert export(run, tmp_path / "new", "--stage", "rl2") == 2
    assert "stage 'rl2': did you mean rl1?" in capsys.readouterr().err
    for stage in ("sft", "rl1"):
        run.result_path(Phase("grpo", stage)).unlink()
    assert export(run, tmp_path / "new") == 2
    assert f"run `rstar-train recipe {run.dir}` first" in capsys.readouterr().err
    assert cli.main(["export-model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "new")]) == 2
    assert not (tmp_path / "new").exists()
