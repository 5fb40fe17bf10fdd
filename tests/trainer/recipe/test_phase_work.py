"""The recipe's units at work: apart from what is evaluated, resumed as if never killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
load_file = pytest.importorskip("safetensors.torch").load_file

# These need torch, too.
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from sandbox.errors import NodeError  # noqa: E402
from sandbox.runtime import default_python  # noqa: E402
from tests.trainer.fake_vllm import FakeVllm  # noqa: E402
from tests.trainer.sampling import QUIET_LIBRARIES, model_folder  # noqa: E402
from trainer import cli  # noqa: E402
from trainer.config import ConfigError, RunConfig  # noqa: E402
from trainer.config_loading import load_config  # noqa: E402
from trainer.data.sources import read_problems  # noqa: E402
from trainer.engines.local import LocalEngine  # noqa: E402
from trainer.environments.connection import open_sandbox  # noqa: E402
from trainer.json_files import read_rows  # noqa: E402
from trainer.recipe import phase_work, rollout_session  # noqa: E402
from trainer.recipe.phases import EvalResult, Phase, RecipeRun, TrainResult  # noqa: E402
from trainer.recipe.runner import RunPhase, run_recipe  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.runs.run_folder import RunFolder  # noqa: E402

pytestmark = QUIET_LIBRARIES

SMALL = """
[model]
dtype = "float32"
system_prompt = "Use Python."
[engines]
max_num_seqs = 8
max_model_len = 96
[sft]
batch_size = 16
micro_batch_size = 16
epochs = 1
learning_rate = 1e-2
max_conversation_tokens = 96
[eval]
max_response_tokens = 24
max_turns = 2
[rl]
problems_per_step = 2
samples_per_problem = 8
kept_per_problem = 4
micro_batch_size = 8
learning_rate = 1e-4
warmup_steps = 0
max_response_tokens = 24
max_turns = 2
save_steps = 1
[stages.rl1]
steps = 6
[stages.rl2]
steps = 1
difficulty_filter_samples = 3
"""
GUESSES = ("1", "2")
"""What the model learns to answer to everything, one as often as the other."""
PATIENCE_S = 600
"""For a machine that is swamped."""


def _config(folder: Path, *sets: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(SMALL, encoding="utf-8")
    return load_config(file, {}, [f"run_dir={folder / 'run'}", *sets])


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecipeRun]:
    """A run after SFT, with a sandbox of its own. Torch has one thread, as the children have: sums depend on it."""
    try:
        default_python()
    except NodeError as reason:
        pytest.skip(f"needs the guest runtime: {reason}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with LoopThread() as loop_thread:
        sandbox = loop_thread.enter(open_sandbox("local", arguments=["--slots", "8", "--zygote-pools", "1"]))
        run = RecipeRun(_guessing(tmp_path_factory.mktemp("taught"), sandbox.endpoints))
        run_recipe(run.config, run_phase=_until("sft"))
        run.write_result(Phase("eval", "sft"), EvalResult())
        yield run
    torch.set_num_threads(threads)


def _guessing(folder: Path, endpoints: Sequence[str]) -> RunConfig:
    """A run in which answers are right about every other time, so that groups differ and weights move."""
    answers = [f"\n</reason>\n<answer>\n\\boxed{{{guess}}}\n</answer>" for guess in GUESSES]
    problem_texts = [f"Number {number}?" for number in range(6)]
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"<reason>{answer}"}]}
        for text in problem_texts * 40
        for answer in answers
    ]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats), encoding="utf-8")
    for name, some in (("train", problem_texts), ("fresh", ["Which one?", "What is it?"])):
        rows = [{"id": text, "text": text, "answer": GUESSES[0], "source": name} for text in some]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    sources = {"sft.data": "chats", "data.train": "train", "eval.data": "fresh"}
    sets = [f'{key}=["{folder / name}.jsonl"]' for key, name in sources.items()]
    return _config(folder, *sets, f"sandbox.endpoints={json.dumps(list(endpoints))}")


def _until(last: str) -> RunPhase:
    """Runs units in this process, training ones alone; those of later stages are left for another time."""

    def start(unit: Phase, command: Sequence[str], lock: int) -> int:
        run = RecipeRun(load_config(Path(command[command.index(unit.command) + 1]), {}))
        if unit.command in ("prepare", "sft") or (unit.command == "grpo" and unit.stage <= last != "sft"):
            phase_work.PHASE_FUNCTIONS[unit.command](run, unit)
        return 0

    return start


def test_prepare_brings_problems_apart_from_those_that_are_evaluated(tmp_path: Path) -> None:
    run = RecipeRun(_config(tmp_path, 'data.train=["generated:30"]', 'eval.data=["generated:20"]'))
    phase_work.prepare(run, Phase("prepare"))
    training = read_problems(str(run.dir / "data/train.jsonl"))
    fresh = read_problems(str(run.dir / "data/eval.jsonl"))
    assert (len(training), len(fresh)) == (30, 20)
    assert not {problem.text for problem in training} & {problem.text for problem in fresh}
    result = run.trained_model("initial")
    assert (result.model, result.step) == ("stages/initial/model", 0)
    assert (run.dir / result.model / "config.json").exists()


def test_problems_whose_prompt_leaves_no_tokens_for_an_answer_are_dropped_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": "What is " + "1 + " * times + "1?", "answer": "3"} for times in (2, 200)]
    (tmp_path / "some.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    run = RecipeRun(_config(tmp_path, "data.train=generated:3", f"eval.data={tmp_path / 'some.jsonl'}"))
    phase_work.prepare(run, Phase("prepare"))
    assert [len(read_problems(str(run.dir / f"data/{name}.jsonl"))) for name in ("train", "eval")] == [3, 1]
    assert "eval: some: 2 rows, 1 too_long, 1 kept" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_problems_with_an_answer_that_the_checker_cannot_parse_are_dropped_and_reported(
    taught: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": f"What is {answer}?", "answer": answer} for answer in ("7", "x^2 + 1", "\\text{}", "$$")]
    (tmp_path / "some.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    sets = [f"eval.data={tmp_path / 'some.jsonl'}", "data.train=generated:3"]
    endpoints = json.dumps(list(taught.config.sandbox.endpoints))
    run = RecipeRun(_config(tmp_path, *sets, f"sandbox.endpoints={endpoints}"))
    phase_work.prepare(run, Phase("prepare"))
    kept = read_problems(str(run.dir / "data/eval.jsonl"))
    assert [problem.answer for problem in kept] == ["7", "x^2 + 1"]
    assert "eval: some: 4 rows, 2 kept, 2 unparsable_answer" in capsys.readouterr().err


def test_all_ranks_wait_for_the_engines_before_a_stage_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, order = _config(tmp_path), list[str]()
    run = RecipeRun(config)
    for unit in (Phase("prepare"), Phase("sft", "sft")):
        run.write_result(unit, TrainResult("model", 0))
    run.problems_path(config.stage_config("rl1")).parent.mkdir()
    run.problems_path(config.stage_config("rl1")).touch()

    @contextlib.contextmanager
    def engines(run: RecipeRun, model: Path) -> Iterator[None]:
        order.append("engines")
        yield

    def train(*args: Any, **more: Any) -> None:
        order.append("train")
        raise KeyboardInterrupt

    monkeypatch.setattr(phase_work, "open_rollout", engines)
    monkeypatch.setattr(phase_work, "wait_for_ranks", lambda hardware: order.append("wait"))
    monkeypatch.setattr(phase_work, "train_stage", train)
    with pytest.raises(KeyboardInterrupt):
        phase_work.grpo(run, Phase("grpo", "rl1"))
    assert order == ["engines", "wait", "train"]


def _unchatty(folder: Path) -> Path:
    """A tokenizer without Qwen's chat tokens, and without a template."""
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder)
    return folder


@pytest.mark.asyncio
async def test_servers_that_run_elsewhere_get_absolute_paths_and_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = model_folder(tmp_path / "model")
    behind, paths = LocalEngine(AutoModelForCausalLM.from_pretrained(model), max_num_seqs=16, max_model_len=96), []

    async def load_saved(engine: LocalEngine, path: Path) -> None:
        paths.append(path)
        weights = load_file(path / "model.safetensors")
        await engine.load_weights({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, 0)  # one tensor

    async with FakeVllm(behind, load=load_saved).serve() as url:
        sets = ["run_dir=run", "engines.kind=vllm", f"engines.endpoints={url}", "engines.max_down_s=77"]
        async with rollout_session.open_engine_pool(_config(tmp_path, *sets), model, tmp_path) as pool:
            assert paths == [tmp_path / "run/weights/v000000"]
            assert paths[0].exists(), "one that is started anew gets them again"
            assert pool._all_down_timeout_s == 77
    assert not paths[0].exists()
    await behind.close()


@pytest.mark.parametrize("chat", ["rstar2", "tokenizer"])
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda folder: folder / "no" / "model", "no/model"),
        (_unchatty, "<.im_start.>|chat template"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_line(
    model: Any, reason: str, chat: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _config(tmp_path)
    sets = ["--set", f"model.path={model(tmp_path / 'bad')}", "--set", f"model.chat_format={chat}"]
    assert cli.main(["prepare", str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "run"), *sets]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"rstar-train: model {tmp_path}/bad.*({reason})", line)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_model_that_the_local_engine_cannot_run_is_one_line(
    taught: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = _copy(taught, tmp_path / "run"), tmp_path / "sliding"
    shutil.copytree(taught.stage_dir("sft") / "model", model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config | {"use_sliding_window": True, "sliding_window": 8}))
    capsys.readouterr()
    assert cli.main(["eval", str(run.dir), "--run-dir", str(run.dir), "--model", str(model)]) == 2
    assert re.match(rf"rstar-train: model {model}: .*use vLLM$", capsys.readouterr().err.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_a_stage_that_is_killed_ends_as_one_that_is_not(taught: RecipeRun, tmp_path: Path) -> None:
    whole, killed = _copy(taught, tmp_path / "whole"), _copy(taught, tmp_path / "killed")
    run_recipe(whole.config, run_phase=_until("rl1"))
    if not _kill_after(killed, step=taught.trained_model("sft").step + 2):
        pytest.skip("the stage was over before it could be killed: the machine looked away")
    left = len(_rows(killed))
    assert killed.result(Phase("grpo", "rl1")) is None
    run_recipe(killed.config, run_phase=_until("rl1"))

    rewards = {row["reward"] for row in whole.run_folder.read_metrics() if row["stage"] == "rl1"}
    assert len(rewards) > 1, "weights that never move prove nothing"
    assert left < len(_rows(whole))
    assert _rows(killed) == _rows(whole)
    ours, theirs = (load_file(run.stage_dir("rl1") / "model" / "model.safetensors") for run in (whole, killed))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_what_is_always_solved_is_taken_out_once(taught: RecipeRun, tmp_path: Path) -> None:
    run = _copy(taught, tmp_path / "run")
    run.write_result(Phase("grpo", "rl1"), run.trained_model("sft"))  # as if a stage had left it as it was
    with pytest.raises(ConfigError, match="run `rstar-train filter rl2` first"):
        phase_work.grpo(run, Phase("grpo", "rl2"))
    phase_work.filter_problems(run, Phase("filter", "rl2"))
    file = run.stage_dir("rl2") / "filter/outcomes.jsonl"
    rows = list(read_rows(file))
    solved = Counter(row["problem"] for row in rows if row["reward"] == 1)
    assert len(rows) == 6 * 3
    assert list(RunFolder(file.parent).episode_steps()) == [], "a filter of 42K problems would write their every token"
    kept = stage_problems(run, "rl2")
    assert kept == [f"Number {number}?" for number in range(6) if solved[f"Number {number}?"] < 3]
    assert run.require_result(Phase("filter", "rl2")).kept == len(kept)

    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])  # as a kill leaves it, within a line
    left = file.read_bytes().count(b"\n")
    phase_work.filter_problems(run, Phase("filter", "rl2"))
    assert list(read_rows(file))[:left] == rows[:left], "what was written is not sampled again"
    assert stage_problems(run, "rl2") == kept


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_evaluation_and_rollout_write_what_show_reads(
    taught: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _copy(taught, tmp_path / "run")
    run.result_path(Phase("eval", "sft")).unlink()
    assert cli.main(["eval", str(run.dir), "--run-dir", str(run.dir), "--stage", "sft", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out.splitlines()[-1])
    report = reports["all"]
    assert (report["problems"], report["unavailable"]) == (2, 0)
    (scores,) = run.summary()["stages"]
    assert (scores["name"], scores["accuracy"]) == ("sft", report["measures"]["accuracy"]["value"])
    assert scores["accuracy_by_source"] == {"fresh": reports["fresh"]["measures"]["accuracy"]}
    assert len(list(RunFolder(run.stage_dir("sft") / "eval").read_episodes(0))) == 2
    with monkeypatch.context() as nothing:  # of it starts again for what is over, nor where only its last word is lost
        nothing.setattr(phase_work, "open_rollout", None)
        for lost in ("nothing", "eval.json"):
            (run.stage_dir("sft") / lost).unlink(missing_ok=lost == "nothing")
            assert cli.main(["eval", str(run.dir), "--run-dir", str(run.dir), "--stage", "sft", "--json"]) == 0
            assert json.loads(capsys.readouterr().out.splitlines()[-1]) == reports

    out = tmp_path / "out"
    sampled = ["--stage", "sft", "--num-problems", "2", "--samples-per-problem", "3", "--out", str(out)]
    for _ in range(2):  # the second time nothing is left to do
        assert cli.main(["rollout", str(run.dir), "--run-dir", str(run.dir), *sampled]) == 0
    episodes = sorted(RunFolder(out).read_episodes(0), key=lambda row: (row["problem"]["id"], row["sample"]))
    assert [(row["problem"]["id"], row["sample"]) for row in episodes] == [
        (f"Number {number}?", sample) for number in range(2) for sample in range(3)
    ]
    assert {row["reward"] for row in episodes} <= {0.0, 1.0}
    assert cli.main(["show", str(out), "--html", str(tmp_path / "page.html")]) == 0
    assert "6 episodes" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_an_evaluation_is_repeated_for_other_weights_and_skips_problems_that_are_too_long(
    taught: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"problem": f"Which one?{' No, which?' * times}", "answer": "1"} for times in (0, 90)]
    (tmp_path / "some.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    run = _copy(taught, tmp_path / "run")
    models = [tmp_path / name / "model" for name in ("one", "other")]
    for model in models:
        shutil.copytree(taught.stage_dir("sft") / "model", model)

    def run_eval(model: Path) -> int:
        source = f'eval.data=["{tmp_path / "some.jsonl"}"]'
        given = ["--run-dir", str(run.dir), "--set", source, "--model", str(model), "--json"]
        return cli.main(["eval", str(run.dir), *given])

    for model in models:
        assert run_eval(model) == 0
        out, err = capsys.readouterr()
        assert json.loads(out.splitlines()[-1])["all"]["problems"] == 1
        assert "eval: some: 2 rows, 1 too_long, 1 kept" in err
    assert len(list((run.dir / "eval").iterdir())) == 2
    for nothing in ("open_rollout", "_prepare_problems"):
        monkeypatch.setattr(phase_work, nothing, None)
    monkeypatch.chdir(models[0].parent)
    assert run_eval(Path("model")) == 0, "the same folder, whose outcomes are there"
    os.utime(models[0] / "model.safetensors", (0, 0))
    assert run_eval(models[0]) == 2
    assert "other settings (weights)" in capsys.readouterr().err


def stage_problems(run: RecipeRun, stage: str) -> list[str]:
    """Return the ids of the problems that a stage trains on."""
    return [problem.id for problem in read_problems(str(run.problems_path(run.config.stage_config(stage))))]


def _copy(taught: RecipeRun, folder: Path) -> RecipeRun:
    shutil.copytree(taught.dir, folder)
    return RecipeRun(load_config(folder, {}, [f"run_dir={folder}"]))


def _kill_after(run: RecipeRun, *, step: int) -> bool:
    """Go on with a run in processes of its own, and kill -9 all of them once a step is written; whether in time."""
    command = [sys.executable, "-m", "trainer", "recipe", str(run.dir), "--run-dir", str(run.dir)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environ, start_new_session=True, stderr=subprocess.PIPE, text=True) as parent:
        deadline = time.monotonic() + PATIENCE_S
        while parent.poll() is None and max((row["step"] for row in run.run_folder.read_metrics()), default=0) < step:
            assert time.monotonic() < deadline, f"no step in {PATIENCE_S} s"
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
    return run.result(Phase("grpo", "rl1")) is None


def _rows(run: RecipeRun) -> list[dict[str, Any]]:
    rows = [row for row in run.run_folder.read_metrics() if row["stage"] == "rl1"]
    return [{name: value for name, value in row.items() if not name.endswith(("_s", "_s_sum"))} for row in rows]
