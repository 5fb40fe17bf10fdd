"""Tests of the command line of the trainer: fast help, exit codes, the results of recipe and eval, and the dry run."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from trainer import cli, progress_bar
from trainer.config import EvalConfig
from trainer.config_loading import load_config
from trainer.json_files import write_json
from trainer.recipe.evaluation import ALL, EpisodeOutcome, sampling_settings, summarize, summary_scores
from trainer.recipe.phases import EvalResult, RecipeRun, TrainResult
from trainer.runs.run_folder import RunFolder

MAX_HELP_CPU_S = 0.5
"""CPU seconds that any `--help` may use."""
COMMANDS = (
    "",
    "init",
    "preflight",
    "recipe",
    "prepare",
    "sft",
    "filter",
    "grpo",
    "eval",
    "compare",
    "rollout",
    "try-env",
    "export-model",
    "data",
    "show",
)
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def _restored_signal_handler() -> Iterator[None]:
    """`main` sets a handler of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_fast_and_imports_no_framework(command: str) -> None:
    code = (
        "import sys; from trainer.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "slow = {'aiohttp', 'datasets', 'numpy', 'pydantic', 'rich', 'torch', 'trl'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    argv = [sys.executable, "-c", code, *filter(None, [command]), "--help"]
    assert min(_cpu_seconds(argv) for _ in range(3)) < MAX_HELP_CPU_S


def _cpu_seconds(command: list[str]) -> float:
    """Run a command and return its CPU time, which does not depend on the load of the machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_version_is_the_installed_one() -> None:
    done = subprocess.run([sys.executable, "-m", "trainer", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("rstar-train 0.")


@pytest.mark.parametrize("argv", [[], ["fly"], ["recipe"], ["grpo", "x.toml"], ["recipe", "x.toml", "--sett", "a=b"]])
def test_a_wrong_command_line_exits_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["recipe", "nowhere.toml"], "nowhere.toml: cannot be read (No such file or directory)"),
        (["recipe", str(CONFIGS / "tiny.toml"), "--set", "rl.step=3"], "--set rl.step: unknown setting; did you mean"),
        (["show", "nowhere"], "nowhere: expected a run folder"),
        (["data", "nowhere.jsonl", "--out", "x"], "nowhere.jsonl"),
    ],
)
def test_a_wrong_setting_or_path_exits_with_2_and_an_error_message(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("rstar-train")
    assert message in error


def test_an_unknown_stage_or_a_stage_out_of_order_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    tiny = [str(CONFIGS / "tiny.toml"), "--run-dir", str(tmp_path)]
    assert cli.main(["grpo", *tiny, "--stage", "rl9"]) == 2
    assert "stage 'rl9': did you mean rl" in capsys.readouterr().err
    assert cli.main(["grpo", *tiny, "--stage", "rl1"]) == 2
    assert "run `rstar-train sft` first" in capsys.readouterr().err


def test_a_finished_phase_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    tiny = [str(CONFIGS / "tiny.toml"), "--run-dir", str(tmp_path)]
    result = tmp_path / "stages/rl1/train.json"
    write_json(result, {"model": "stages/rl1/model", "step": 1})
    assert cli.main(["grpo", *tiny, "--stage", "rl1"]) == 0
    assert f"grpo rl1 is done; delete {result.parent} to run it again" in capsys.readouterr().err


def _write_evaluated_run(folder: Path, *sources: str) -> list[str]:
    """Write a finished run with an evaluation of 20 problems of each source, half of them correct. Return the arguments
    of commands for this run."""
    (folder / "run.toml").write_text('[sft]\ndata = "generated:8"\n', encoding="utf-8")
    run = RecipeRun(load_config(folder / "run.toml", {}, [f"run_dir={folder / 'run'}"]))
    correct = EpisodeOutcome(1.0, 1, 0, answer_blocks=1, stop_reason="finished", num_turns=1, response_length=9)
    groups_by_source = {source: [[correct]] * 10 + [[correct._replace(reward=0.0)]] * 10 for source in sources}
    groups_by_source[ALL] = [group for groups in groups_by_source.values() for group in groups]
    reports = {source: summarize(groups, 1) for source, groups in groups_by_source.items()}
    eval_result = EvalResult(summary_scores(reports), {source: asdict(report) for source, report in reports.items()})
    for phase in run.phases():
        run.write_result(phase, eval_result if phase.command == "eval" else TrainResult("model", 1))
    return [str(folder / "run.toml"), "--run-dir", str(run.dir)]


@pytest.mark.parametrize("sources", [("aime24", "math500"), ("aime24",)])
def test_the_recipe_prints_the_accuracy_of_each_source_with_its_interval(
    sources: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = _write_evaluated_run(tmp_path, *sources)
    assert cli.main(["recipe", *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == f"{tmp_path / 'run'}, evaluation after each stage:"
    rows = [line.split()[:2] for line in shown.splitlines() if "accuracy" in line]
    if len(sources) > 1:
        assert rows == [["accuracy", "0.5"], *(["accuracy,", source] for source in sources)]
    else:
        assert rows == [["accuracy", "0.500"]]
    assert shown.count("0.500 [0.30–0.70]") == len(sources), "Wilson's interval of 10 in 20"
    assert cli.main(["recipe", *arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["stages"]
    written = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))["stages"]
    assert written == [row]
    assert list(row["accuracy_by_source"]) == list(sources)
    assert row["accuracy_by_source"]["aime24"]["low"] == pytest.approx(0.299, abs=0.001)


def test_a_finished_evaluation_is_shown_without_torch(tmp_path: Path) -> None:
    arguments = _write_evaluated_run(tmp_path, "aime24", "math500")
    code = "import sys; sys.modules['torch'] = None; from trainer.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, "eval", *arguments, "--stage", "sft"]
    shown = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    assert shown.startswith("evaluation after sft")
    # avg@1 and pass@1 of two sources.
    assert [shown.count(text) for text in ("0.500 [0.30–0.70]", "tool use", "pass@1")] == [2 * 2, 1, 1]


def test_a_finished_evaluation_of_a_stage_is_not_shown_for_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = _write_evaluated_run(tmp_path, "aime24")
    settings = sampling_settings(EvalConfig(), 1)
    RunFolder(tmp_path / "run/stages/sft/eval").bind_config(settings | {"seed": 1})
    assert cli.main(["eval", *arguments, "--stage", "sft"]) == 0
    assert cli.main(["eval", *arguments, "--stage", "sft", "--set", "eval.samples_per_problem=8"]) == 2
    assert "stages/sft/eval was written with other settings (samples)" in capsys.readouterr().err
    assert cli.main(["eval", *arguments, "--stage", "sft", "--out", str(tmp_path / "out")]) == 2
    assert "--out: expected --model" in capsys.readouterr().err


def test_a_phase_keeps_the_settings_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny, run_dir = str(CONFIGS / "tiny.toml"), tmp_path / "run"
    RunFolder(run_dir).bind_config(asdict(load_config(Path(tiny), {}, [f"run_dir={run_dir}"])))
    write_json(run_dir / "stages/rl1/train.json", {"model": "stages/rl1/model", "step": 1})
    phase = ["grpo", tiny, "--run-dir", str(run_dir), "--stage", "rl1"]
    assert cli.main([*phase, "--set", "engines.turn_timeout_s=9", "--set", "collect.ray_address=node7:6379"]) == 0
    assert cli.main([*phase, "--set", "stages.rl1.learning_rate=0.5"]) == 2
    assert "was written with other settings (stages.rl1.learning_rate)" in capsys.readouterr().err


def test_a_damaged_configuration_of_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"layout_version": 2, "conf', encoding="utf-8")
    assert cli.main(["show", str(tmp_path)]) == 2
    assert f"{tmp_path / 'config.json'}: expected an object in JSON: " in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_a_dry_run_shows_what_a_run_needs_and_writes_nothing(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["recipe", str(file), "--run-dir", str(tmp_path / "run"), "--dry-run"]
    assert cli.main([*argv, "--json"]) == 0
    content = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all((stage["gpu_share"] or 0) < 1 for stage in content["plan"]["stages"].values())
    assert content["config"]["run_dir"] == str(tmp_path / "run")
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.startswith("a run needs") and f"{content['plan']['parameters']:,}" in shown
    assert shown.splitlines()[-1] == "fits: yes" and content["misfits"] == []
    assert "{" not in shown, "JSON only with --json"
    assert not (tmp_path / "run").exists()


def test_a_dry_run_names_the_phases_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["recipe", str(CONFIGS / "qwen3-14b-mi300x.toml"), "--dry-run", "--set", "hardware.sharding=none"]
    assert cli.main([*argv, "--json"]) == 0
    misfits = json.loads(capsys.readouterr().out)["misfits"]
    assert [line.partition(": training")[0] for line in misfits] == [
        f"memory: {phase}" for phase in ("sft", "stages.rl1", "stages.rl2", "stages.rl3")
    ]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.splitlines()[-5:] == ["fits: no", *misfits]


def test_a_dry_run_of_an_unknown_model_asks_for_its_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "some/model"\n', encoding="utf-8")
    assert cli.main(["recipe", str(file), "--dry-run"]) == 2
    assert "set the model's sizes in [model.shape]" in capsys.readouterr().err


def test_a_missing_extra_is_an_error_with_the_command_that_installs_it(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from trainer.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, "prepare", str(CONFIGS / "tiny.toml"), "--run-dir", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 1
    expected = "rstar-train: needs torch from the extra `train`: run pip install '.[train]' in the checkout"
    assert done.stderr.splitlines()[-1] == expected


def test_a_module_outside_of_the_extra_is_installed_by_its_name() -> None:
    assert cli._install_advice("transformers.models.auto").endswith("pip install '.[train]' in the checkout")
    assert cli._install_advice("trackio") == "needs trackio: pip install trackio"


def test_data_writes_problems_and_counts_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "generated:5", "--out", str(tmp_path / "five.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"tiny": {"rows": 5, "kept": 5}}
    assert len((tmp_path / "five.jsonl").read_text(encoding="utf-8").splitlines()) == 5


def test_data_prints_a_line_of_progress_for_every_items_per_line_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "ITEMS_PER_LINE", 2000)
    assert cli.main(["data", "generated:5000", "--out", str(tmp_path / "many.jsonl")]) == 0
    assert capsys.readouterr().err.splitlines() == ["rows: 2000", "rows: 4000"]


@pytest.mark.parametrize(("of_the_phase", "expected"), [(1, 1), (2, 2), (143, 143), (-9, 137)])
def test_a_recipe_ends_with_the_exit_code_of_the_phase_that_failed(
    of_the_phase: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("trainer.recipe.runner.run_child", lambda *_: of_the_phase)
    arguments = ["recipe", str(CONFIGS / "tiny.toml"), "--run-dir", str(tmp_path)]
    assert cli.main([*arguments, "--no-preflight"]) == expected
    assert f"prepare failed with exit code {of_the_phase}" in capsys.readouterr().err
