"""Tests of the phase `eval` and of `rollout`: what they sample, and what they find again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

from tests.trainer.recipe.small_runs import OWN_REWARD, STEP_TIMEOUT_S, copy_run, write_lines
from tests.trainer.sampling import QUIET_LIBRARIES
from trainer import cli
from trainer.data.problems import write_problems
from trainer.data.sources import read_problems
from trainer.recipe import eval_phase
from trainer.recipe.evaluation import ALL
from trainer.recipe.phases import Phase, RecipeRun
from trainer.runs.run_folder import RunFolder

pytestmark = QUIET_LIBRARIES


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_a_finished_evaluation_or_rollout_samples_nothing_again_and_show_reads_it(
    tuned_run: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_run(tuned_run, tmp_path / "run")
    run.result_path(Phase("eval", "sft")).unlink()
    assert cli.main(["eval", str(run.dir), "--run-dir", str(run.dir), "--stage", "sft", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out.splitlines()[-1])
    report = reports["all"]
    assert (report["problems"], report["unavailable"]) == (2, 0)
    (scores,) = run.summary()["stages"]
    assert (scores["name"], scores["accuracy"]) == ("sft", report["measures"]["accuracy"]["value"])
    assert scores["accuracy_by_source"] == {"fresh": reports["fresh"]["measures"]["accuracy"]}
    assert len(list(RunFolder(run.stage_dir("sft") / "eval").read_episodes(0))) == 2
    with monkeypatch.context() as without_engines:
        without_engines.setattr(eval_phase, "open_rollout", None)
        for has_result_file in (True, False):  # a kill may lose the result file only, which is written last
            if not has_result_file:
                (run.stage_dir("sft") / "eval.json").unlink()
            assert cli.main(["eval", str(run.dir), "--run-dir", str(run.dir), "--stage", "sft", "--json"]) == 0
            assert json.loads(capsys.readouterr().out.splitlines()[-1]) == reports

    out = tmp_path / "out"
    options = ["--stage", "sft", "--num-problems", "2", "--samples-per-problem", "3", "--out", str(out)]
    for _ in range(2):  # the second command finds all episodes
        assert cli.main(["rollout", str(run.dir), "--run-dir", str(run.dir), *options]) == 0
    episodes = sorted(RunFolder(out).read_episodes(0), key=lambda row: (row["problem"]["id"], row["sample"]))
    assert [(row["problem"]["id"], row["sample"]) for row in episodes] == [
        (f"Number {number}?", sample) for number in range(2) for sample in range(3)
    ]
    assert {row["reward"] for row in episodes} <= {0.0, 1.0}
    assert cli.main(["show", str(out), "--html", str(tmp_path / "page.html")]) == 0
    assert "6 episodes" in capsys.readouterr().out


@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_a_reward_function_scores_an_evaluation(tuned_run: RecipeRun, tmp_path: Path) -> None:
    run = copy_run(tuned_run, tmp_path / "run", "reward.correct_above=5")
    problems = read_problems(str(run.eval_problems_path()))
    own = [problem.with_default_reward(OWN_REWARD) for problem in problems]
    write_problems(own, run.eval_problems_path())
    run.result_path(Phase("eval", "sft")).unlink()
    measures = eval_phase.evaluate(run, Phase("eval", "sft"))[ALL].measures
    episodes = list(RunFolder(run.stage_dir("sft") / "eval").read_episodes(0))
    lengths = [len("\n".join(turn["text"] for turn in episode["turns"])) for episode in episodes]
    assert [episode["reward"] for episode in episodes] == lengths
    assert measures["reward"].value == sum(lengths) / len(lengths)
    assert measures["accuracy"].value == sum(length > 5 for length in lengths) / len(lengths)
    (scores,) = run.summary()["stages"]
    assert scores["reward"] == measures["reward"].value


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_eval_of_a_model_has_one_folder_per_model_and_refuses_other_weights_in_it(
    tuned_run: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second problem is too long.
    rows = [{"problem": f"Which one?{' No, which?' * times}", "answer": "1"} for times in (0, 90)]
    write_lines(tmp_path / "some.jsonl", rows)
    run = copy_run(tuned_run, tmp_path / "run")
    models = [tmp_path / name / "model" for name in ("first", "second")]
    for model in models:
        shutil.copytree(tuned_run.stage_dir("sft") / "model", model)

    def run_eval(model: Path, *more: str) -> int:
        source = f'eval.data=["{tmp_path / "some.jsonl"}"]'
        options = ["--run-dir", str(run.dir), "--set", source, "--model", str(model), "--json", *more]
        return cli.main(["eval", str(run.dir), *options])

    for model in models:
        assert run_eval(model) == 0
        out, err = capsys.readouterr()
        assert json.loads(out.splitlines()[-1])["all"]["problems"] == 1
        assert "eval: some: 2 rows, 1 too_long, 1 kept" in err
    assert len(list((run.dir / "eval").iterdir())) == 2
    for unneeded in ("open_rollout", "prepare_problems"):
        monkeypatch.setattr(eval_phase, unneeded, None)
    for setting in ("model.system_prompt=Go.", "model.dtype=bfloat16"):
        assert run_eval(models[0], "--set", setting) == 2
        name = setting.partition("=")[0].removeprefix("model.")
        assert f"other settings ({name})" in capsys.readouterr().err
    monkeypatch.chdir(models[0].parent)
    assert run_eval(Path("model")) == 0, "a relative path of the first model finds the outcomes of that model"
    os.utime(models[0] / "model.safetensors", (0, 0))
    assert run_eval(models[0]) == 2
    assert "other settings (weights)" in capsys.readouterr().err
    os.utime(tmp_path / "some.jsonl", (0, 0))
    assert run_eval(models[1]) == 2
    assert "other settings (data)" in capsys.readouterr().err
