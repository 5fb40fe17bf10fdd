"""Tests of the work of the phases, the commands of a recipe (prepare, sft, filter, grpo, eval).

They test prepared problems, engines, resumption after a kill, the filter of problems, and evaluation.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
load_file = pytest.importorskip("safetensors.torch").load_file

from tokenizers import Tokenizer, models  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

from sandbox.errors import NodeError  # noqa: E402
from sandbox.runtime.build import default_python  # noqa: E402
from tests.trainer.fake_vllm import FakeVllm  # noqa: E402
from tests.trainer.sampling import QUIET_LIBRARIES, model_folder  # noqa: E402
from trainer import cli  # noqa: E402
from trainer.config import ConfigError, RunConfig  # noqa: E402
from trainer.config_loading import load_config  # noqa: E402
from trainer.data.problems import write_problems  # noqa: E402
from trainer.data.rows import DataError  # noqa: E402
from trainer.data.sources import read_problems  # noqa: E402
from trainer.engines.local import LocalEngine  # noqa: E402
from trainer.environments.connection import open_sandbox  # noqa: E402
from trainer.environments.python_tool import TOOL_SCHEMA  # noqa: E402
from trainer.episodes.episode import Episode, Problem, StopReason  # noqa: E402
from trainer.json_files import read_json, read_rows, write_json  # noqa: E402
from trainer.recipe import phase_work, rollout_session  # noqa: E402
from trainer.recipe.evaluation import ALL, EpisodeOutcome, summarize, write_outcomes  # noqa: E402
from trainer.recipe.phases import EvalResult, Phase, RecipeRun, TrainResult  # noqa: E402
from trainer.recipe.runner import NO_PREFLIGHT, RunPhase, run_recipe  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.runs.run_folder import RunFolder  # noqa: E402
from trainer.sync.transfers import WakingTransfer  # noqa: E402
from trainer.training.context import COMPLETE_MARK  # noqa: E402
from trainer.training.grpo import NoRewardsError  # noqa: E402

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
micro_batch_tokens = 4096
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
GAMES = "examples.games:GameEnvironment"
GUESSES = ("1", "2")
"""The answers that the model learns to give to every problem, equally often. The first is the correct one."""
OWN_REWARD = "tests.trainer.environments.test_own_reward:length"
"""The function returns the number of characters of a response."""
STEP_TIMEOUT_S = 600
"""Seconds for one training step on a machine that runs other tests, too."""


def _config(folder: Path, *sets: str) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(SMALL, encoding="utf-8")
    return load_config(file, {}, [f"run_dir={folder / 'run'}", *sets])


@pytest.fixture(scope="module")
def tuned_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecipeRun]:
    """A run whose SFT has ended, with a sandbox. Torch has one thread, as in child processes, since floating-point sums
    depend on the number of threads."""
    try:
        default_python()
    except NodeError as error:
        pytest.skip(f"needs the guest runtime: {error}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with LoopThread() as loop_thread:
        sandbox = loop_thread.enter(open_sandbox("local", arguments=["--slots", "8", "--zygote-pools", "1"]))
        run = RecipeRun(_guessing_config(tmp_path_factory.mktemp("tuned_run"), sandbox.endpoints))
        run_recipe(run.config, run_phase=_in_this_process("sft"))
        run.write_result(Phase("eval", "sft"), EvalResult())
        yield run
    torch.set_num_threads(threads)


def _guessing_config(folder: Path, endpoints: Sequence[str]) -> RunConfig:
    """Configure a run whose model guesses one of `GUESSES`, so that about half of each group is correct."""
    answers = [f"\n</reason>\n<answer>\n\\boxed{{{guess}}}\n</answer>" for guess in GUESSES]
    train_texts = [f"Number {number}?" for number in range(6)]
    conversations = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"<reason>{answer}"}]}
        for text in train_texts * 40
        for answer in answers
    ]
    _write_rows(folder / "chats.jsonl", conversations)
    for source, texts in (("train", train_texts), ("fresh", ["Which one?", "What is it?"])):
        rows = [{"id": text, "text": text, "answer": GUESSES[0], "source": source} for text in texts]
        _write_rows(folder / f"{source}.jsonl", rows)
    sources = {"sft.data": "chats", "data.train": "train", "eval.data": "fresh"}
    sets = [f'{key}=["{folder / name}.jsonl"]' for key, name in sources.items()]
    return _config(folder, *sets, f"sandbox.endpoints={json.dumps(list(endpoints))}")


def _write_rows(file: Path, rows: Sequence[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _in_this_process(last_stage: str) -> RunPhase:
    """Return a function that runs `prepare`, `sft` and the training of `last_stage` in this process, and skips the
    other phases."""

    def run_phase(phase: Phase, command: Sequence[str], lock_fd: int) -> int:
        run = RecipeRun(load_config(Path(command[command.index(phase.command) + 1]), {}))
        if phase.command in ("prepare", "sft") or phase == Phase("grpo", last_stage):
            phase_work.PHASE_FUNCTIONS[phase.command](run, phase)
        return 0

    return run_phase


def test_prepare_writes_training_problems_that_differ_from_those_of_the_evaluation(tmp_path: Path) -> None:
    run = RecipeRun(_config(tmp_path, 'data.train=["generated:30"]', 'eval.data=["generated:20"]'))
    phase_work.prepare(run, Phase("prepare"))
    training = read_problems(str(run.dir / "data/train.jsonl"))
    held_out = read_problems(str(run.dir / "data/eval.jsonl"))
    assert (len(training), len(held_out)) == (30, 20)
    assert not {problem.text for problem in training} & {problem.text for problem in held_out}
    result = run.trained_model("initial")
    assert (result.model, result.step) == ("stages/initial/model", 0)
    assert (run.dir / result.model / "config.json").exists()


def test_problems_whose_prompt_leaves_no_tokens_for_an_answer_are_dropped_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": "What is " + "1 + " * times + "1?", "answer": "3"} for times in (2, 200)]
    _write_rows(tmp_path / "some.jsonl", rows)
    run = RecipeRun(_config(tmp_path, "data.train=generated:3", f"eval.data={tmp_path / 'some.jsonl'}"))
    phase_work.prepare(run, Phase("prepare"))
    assert [len(read_problems(str(run.dir / f"data/{name}.jsonl"))) for name in ("train", "eval")] == [3, 1]
    printed = capsys.readouterr().err
    assert "eval: some: 2 rows, 1 too_long, 1 kept" in printed
    assert re.search(r"^eval: some: some-1: too_long: \d+, the limit is 72$", printed, re.MULTILINE)


def test_a_stage_with_too_few_problems_ends_the_preparation_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "same.jsonl"
    _write_rows(file, [{"problem": f"What is {number} + {number}?", "answer": "3"} for number in range(8)])
    run = RecipeRun(_config(tmp_path, f"data.train={file}", f"eval.data={file}"))
    message = "stages.rl1: expected at least problems_per_step=2 problems, got 0: its data has 8 rows, 8 contaminated; "
    with pytest.raises(ConfigError, match=f"^{message}{run.dir}/data/report.json names dropped rows"):
        phase_work.prepare(run, Phase("prepare"))
    assert read_json(run.dir / "data/report.json")
    assert not run.result(Phase("prepare"))


def test_a_checkpoint_of_another_model_is_refused_before_a_training_loads_it(tmp_path: Path) -> None:
    model, run = model_folder(tmp_path / "model"), RecipeRun(_config(tmp_path, "sft.data=generated:4"))
    run.write_result(Phase("prepare"), TrainResult(str(model), 0))
    checkpoint = run.stage_dir("sft") / "checkpoints/checkpoint-1"
    content = read_json(model / "config.json") or {}
    size, heads = content["intermediate_size"], content["num_key_value_heads"]
    write_json(checkpoint / "config.json", {**content, "intermediate_size": size + 1, "num_key_value_heads": 1})
    (checkpoint / COMPLETE_MARK).touch()
    message = f"intermediate_size is {size + 1} and not {size}, num_key_value_heads is 1 and not {heads}"
    with pytest.raises(ConfigError, match=rf"^{checkpoint}: expected a checkpoint of {model}, got .* \({message}\)"):
        phase_work.sft(run, Phase("sft", "sft"))


@pytest.mark.slow
def test_ranks_with_different_settings_end_with_a_line_that_names_them(tmp_path: Path) -> None:
    _config(tmp_path)
    program = "import os, sys; os.environ['RSTAR_TRAIN_SEED'] = os.environ['RANK']; from trainer.cli import main; "
    (tmp_path / "rank.py").write_text(f"{program} sys.exit(main(sys.argv[1:]))\n", encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["sft", tmp_path / "run.toml", "--run-dir", tmp_path / "run", "--set=hardware.nodes=2", NO_PREFLIGHT]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, tmp_path / "rank.py", *arguments]
    ranks = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, timeout=300)
    assert ranks.returncode
    for rank in (0, 1):
        assert f"rstar-train: rank {rank}: the ranks have different settings (seed); start all of them" in ranks.stderr


def test_a_malformed_row_of_the_evaluation_is_named_and_ends_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe must read all rows of the evaluation, because it compares the training problems with each of them."""
    file, message = (
        tmp_path / "some.jsonl",
        "expected a problem as problem | question | prompt | text, got {'answer': '3'}",
    )
    _write_rows(file, [{"problem": "What is 1 + 2?", "answer": "3"}, {"answer": "3"}])
    run = RecipeRun(_config(tmp_path, "data.train=generated:3", f"eval.data={file}"))
    with pytest.raises(DataError, match=re.escape(f"{file}: row 1: {message}")):
        phase_work.prepare(run, Phase("prepare"))
    chat_format = rollout_session.load_chat_format(run.config, run.stage_dir("initial") / "model")
    kept, _ = phase_work._prepare_problems(run.config, "eval", [str(file)], chat_format, 24)
    assert [problem.id for problem in kept] == ["some-0"]
    assert f"eval: some: row 1: malformed: {message}\n" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_problems_with_an_answer_that_the_checker_cannot_parse_are_dropped_and_reported(
    tuned_run: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": f"What is {answer}?", "answer": answer} for answer in ("7", "x^2 + 1", "\\text{}", "$$")]
    _write_rows(tmp_path / "some.jsonl", rows)
    sets = [f"eval.data={tmp_path / 'some.jsonl'}", "data.train=generated:3"]
    endpoints = json.dumps(list(tuned_run.config.sandbox.endpoints))
    run = RecipeRun(_config(tmp_path, *sets, f"sandbox.endpoints={endpoints}"))
    phase_work.prepare(run, Phase("prepare"))
    kept = read_problems(str(run.dir / "data/eval.jsonl"))
    assert [problem.answer for problem in kept] == ["7", "x^2 + 1"]
    assert "eval: some: 4 rows, 2 kept, 2 unparsable_answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ("pyhton", {}, "environment 'pyhton': did you mean python?"),
        ("qa", {"file": "a.csv"}, "options.file: "),
    ],
)
@pytest.mark.parametrize("setting", ["data.train", "eval.data"])
def test_an_environment_that_cannot_run_here_is_refused_before_anything_starts(
    setting: str, environment: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    row = {"id": "h1", "text": "Go.", "answer": "1", "source": "s", "environment": environment, "options": options}
    _write_rows(tmp_path / "some.jsonl", [row])
    run = RecipeRun(_config(tmp_path, f"{setting}={tmp_path / 'some.jsonl'}"))
    with pytest.raises(ConfigError, match=rf"^problem h1: {re.escape(message)}"):
        phase_work.prepare(run, Phase("prepare"))


def test_a_rollout_has_the_prompt_with_which_data_are_prepared_and_sft_trains(tmp_path: Path) -> None:
    config, model = _config(tmp_path, "model.system_prompt="), model_folder(tmp_path / "model")
    prompt = rollout_session.load_chat_format(config, model).encode_prompt("1 + 1?")
    assert rollout_session.chat_formats(config, model)((TOOL_SCHEMA,)).encode_prompt("1 + 1?") == prompt


@pytest.mark.parametrize(
    ("file", "eos", "more"),
    [
        ("generation_config.json", [9, 7], (9, 7)),
        ("generation_config.json", 9, (9,)),
        ("config.json", [9, 7], (9, 7)),
        ("", None, ()),
    ],
)
def test_every_end_token_of_the_model_ends_a_turn(tmp_path: Path, file: str, eos: Any, more: tuple[int, ...]) -> None:
    """The end tokens of a model may be others than those of its tokenizer."""
    config, model = _config(tmp_path), model_folder(tmp_path / "model")
    end = AutoTokenizer.from_pretrained(model).eos_token_id
    assert rollout_session.load_chat_format(config, model).stop_ids == (end,)
    (model / "generation_config.json").unlink()
    content = read_json(model / "config.json") if file == "config.json" else {}
    (model / "config.json").unlink()
    if file:
        write_json(model / file, {**(content or {}), "eos_token_id": eos})
    assert rollout_session.load_chat_format(config, model).stop_ids == (end, *more)


def test_an_environment_with_a_state_is_accepted_for_stages_that_do_not_sample_here(tmp_path: Path) -> None:
    options = {"game": "tower_of_hanoi", "disks": 2}
    row = {"text": "Go.", "answer": "", "source": "s", "environment": GAMES, "options": options}
    _write_rows(
        tmp_path / "some.jsonl",
        [{"id": f"h{disks}", **row, "options": {**options, "disks": disks}} for disks in (2, 3)],
    )
    collected = [f"stages.{name}.episodes=collected" for name in ("rl1", "rl2")]
    run = RecipeRun(_config(tmp_path, f"data.train={tmp_path / 'some.jsonl'}", *collected))
    phase_work.prepare(run, Phase("prepare"))
    assert [problem.environment for problem in read_problems(str(run.dir / "data/train.jsonl"))] == [GAMES] * 2


def test_all_ranks_wait_for_the_engines_before_a_stage_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, order = _config(tmp_path), list[str]()
    run = RecipeRun(config)
    for phase in (Phase("prepare"), Phase("sft", "sft")):
        run.write_result(phase, TrainResult("model", 0))
    run.problems_path(config.stage_config("rl1")).parent.mkdir()
    run.problems_path(config.stage_config("rl1")).touch()

    @contextlib.contextmanager
    def fake_open_rollout(run: RecipeRun, model: Path) -> Iterator[None]:
        order.append("engines")
        yield

    def fake_train_stage(*args: Any, **options: Any) -> None:
        order.append("train")
        raise KeyboardInterrupt  # there is no result to write

    monkeypatch.setattr(phase_work, "open_rollout", fake_open_rollout)
    monkeypatch.setattr(phase_work, "wait_for_ranks", lambda hardware: order.append("wait"))
    monkeypatch.setattr(phase_work, "train_stage", fake_train_stage)
    with pytest.raises(KeyboardInterrupt):
        phase_work.grpo(run, Phase("grpo", "rl1"))
    assert order == ["engines", "wait", "train"]


def _without_chat_tokens(folder: Path) -> Path:
    """Write a tokenizer without Qwen's chat tokens and without a chat template."""
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder)
    return folder


@pytest.mark.asyncio
async def test_vllm_servers_load_weights_from_absolute_paths_that_stay_while_the_pool_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = model_folder(tmp_path / "model")
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(model), max_num_seqs=16, max_model_len=96)
    paths: list[Path] = []

    async def load_saved(engine: LocalEngine, path: Path) -> None:
        paths.append(path)
        weights = load_file(path / "model-00001.safetensors")
        # The file has a tied weight once, under its first name.
        await engine.load_weights({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, 0)

    async with FakeVllm(engine, load=load_saved).serve() as url:
        sets = ["run_dir=run", "engines.kind=vllm", f"engines.endpoints={url}", "engines.max_down_s=77"]
        async with rollout_session.open_engine_pool(_config(tmp_path, *sets), model, Path("run")) as pool:
            assert paths == [tmp_path / "run/weights/v000000"]
            assert paths[0].exists(), "a server that restarts loads them again"
            assert pool._all_down_timeout_s == 77, "episodes wait for a restart (engines.max_down_s)"
    assert not paths[0].exists()
    await engine.close()


@pytest.mark.parametrize(
    ("sync_check", "probes", "has_checksums"),
    [("checksum", "once", True), ("probe", "at each sync", False), ("off", "never", False)],
)
@pytest.mark.asyncio
async def test_sync_check_chooses_between_checksums_and_the_probe(
    tmp_path: Path, sync_check: str, probes: str, has_checksums: bool
) -> None:
    model = model_folder(tmp_path / "model")
    config = _config(tmp_path, f"engines.sync_check={sync_check}", "engines.probe_tolerance=3")
    async with rollout_session.open_engine_pool(config, model, tmp_path) as pool:
        assert probes == ("never" if not pool.probe else "once" if pool._probes_once else "at each sync")
        assert pool.probe is None or pool.probe._tolerance == 3
    servers = replace(config, engines=replace(config.engines, kind="vllm"))
    assert rollout_session._weight_transfer(servers, tmp_path, None)["store"]._has_checksums == has_checksums


@pytest.mark.parametrize(("weight_sync", "transfer"), [("file", "function"), ("gloo", "BroadcastTransfer")])
def test_engines_are_woken_before_their_weights_are_sent_only_with_sleep_mode(
    tmp_path: Path, weight_sync: str, transfer: str
) -> None:
    sets = ["engines.kind=vllm", f"engines.weight_sync={weight_sync}", "hardware.gpus_per_node=1"]
    plain = rollout_session._weight_transfer(_config(tmp_path, *sets), tmp_path, None)
    waking = rollout_session._weight_transfer(_config(tmp_path, *sets, "engines.sleep_mode=true"), tmp_path, None)
    assert type(plain["transfer"]).__name__ == type(waking["transfer"]._transfer).__name__ == transfer
    assert isinstance(waking["transfer"], WakingTransfer)
    assert [options["store"] is not None for options in (plain, waking)] == [weight_sync == "file"] * 2


@pytest.mark.parametrize("sleep_mode", [False, True])
def test_a_stage_puts_its_engines_to_sleep_only_with_sleep_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep_mode: bool
) -> None:
    pool = SimpleNamespace(sleep=lambda: None)
    sandbox = SimpleNamespace(python_tool=None, answer_checker=SimpleNamespace(verify=None))

    @contextlib.asynccontextmanager
    async def yield_value(value: Any) -> AsyncIterator[Any]:
        yield value

    monkeypatch.setattr(rollout_session, "connect_sandbox", lambda config: yield_value(sandbox))
    monkeypatch.setattr(rollout_session, "open_engine_pool", lambda *arguments: yield_value(pool))
    monkeypatch.setattr(rollout_session, "load_chat_format", lambda *arguments: None)
    sets = ["engines.kind=vllm", "hardware.gpus_per_node=1", f"engines.sleep_mode={str(sleep_mode).lower()}"]
    with rollout_session.open_rollout(RecipeRun(_config(tmp_path, *sets)), tmp_path) as rollouts:
        assert rollouts.sleep is (pool.sleep if sleep_mode else None)


@pytest.mark.parametrize("chat", ["rstar2", "tokenizer"])
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda folder: folder / "no" / "model", "no/model"),
        (_without_chat_tokens, "<.im_start.>|chat template"),
    ],
)
def test_an_unusable_model_is_an_error_of_one_line(
    model: Any, reason: str, chat: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _config(tmp_path)
    sets = ["--set", f"model.path={model(tmp_path / 'bad')}", "--set", f"model.chat_format={chat}"]
    assert cli.main(["prepare", str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "run"), *sets]) == 2
    *progress, line = capsys.readouterr().err.splitlines()
    assert all(text.startswith("preflight: checks ") for text in progress)
    assert re.match(f"rstar-train: model {tmp_path}/bad.*({reason})", line)


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_a_model_that_the_local_engine_cannot_run_is_an_error_that_names_vllm(
    tuned_run: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = _copy(tuned_run, tmp_path / "run"), tmp_path / "sliding"
    shutil.copytree(tuned_run.stage_dir("sft") / "model", model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config | {"use_sliding_window": True, "sliding_window": 8}))
    capsys.readouterr()
    assert cli.main(["eval", str(run.dir), "--run-dir", str(run.dir), "--model", str(model)]) == 2
    assert re.match(rf"rstar-train: model {model}: .*use vLLM$", capsys.readouterr().err.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_a_killed_stage_ends_like_an_uninterrupted_one(tuned_run: RecipeRun, tmp_path: Path) -> None:
    uninterrupted, killed = _copy(tuned_run, tmp_path / "uninterrupted"), _copy(tuned_run, tmp_path / "killed")
    run_recipe(uninterrupted.config, run_phase=_in_this_process("rl1"))
    if not _kill_after(killed, step=tuned_run.trained_model("sft").step + 2):
        pytest.skip("the stage ended before the kill, since this machine did not run the test in time")
    num_steps_before_kill = len(_untimed_metrics(killed))
    assert killed.result(Phase("grpo", "rl1")) is None
    run_recipe(killed.config, run_phase=_in_this_process("rl1"))

    metrics = _untimed_metrics(uninterrupted)
    assert len({row["reward"] for row in metrics}) > 1, "equal weights prove nothing if training does not change them"
    assert num_steps_before_kill < len(metrics)
    assert _untimed_metrics(killed) == metrics
    expected, actual = (
        load_file(run.stage_dir("rl1") / "model" / "model.safetensors") for run in (uninterrupted, killed)
    )
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_the_filter_drops_problems_that_are_always_solved_and_continues_after_a_kill(
    tuned_run: RecipeRun, tmp_path: Path
) -> None:
    run = _copy(tuned_run, tmp_path / "run")
    run.write_result(Phase("grpo", "rl1"), run.trained_model("sft"))  # rl1 is skipped
    with pytest.raises(ConfigError, match="run `rstar-train filter rl2` first"):
        phase_work.grpo(run, Phase("grpo", "rl2"))
    phase_work.filter_problems(run, Phase("filter", "rl2"))
    file = run.stage_dir("rl2") / "filter/outcomes.jsonl"
    rows = list(read_rows(file))
    solved = Counter(row["problem"] for row in rows if row["reward"] == 1)
    assert len(rows) == 6 * 3, "six problems, three samples of each"
    assert list(RunFolder(file.parent).episode_steps()) == [], (
        "a filter writes outcomes only: the episodes of 42K problems would fill the disk"
    )
    kept = stage_problems(run, "rl2")
    assert kept == [f"Number {number}?" for number in range(6) if solved[f"Number {number}?"] < 3]
    assert run.require_result(Phase("filter", "rl2")).kept == len(kept)

    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])  # a kill may leave a torn line
    num_complete = file.read_bytes().count(b"\n")
    phase_work.filter_problems(run, Phase("filter", "rl2"))
    assert list(read_rows(file))[:num_complete] == rows[:num_complete], "these are not sampled again"
    assert stage_problems(run, "rl2") == kept


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_a_finished_evaluation_or_rollout_samples_nothing_again_and_show_reads_it(
    tuned_run: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _copy(tuned_run, tmp_path / "run")
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
        without_engines.setattr(phase_work, "open_rollout", None)
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


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_the_last_evaluation_inside_a_stage_is_the_one_that_the_phase_eval_finds(
    tuned_run: RecipeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(phase_work, "open_trackers", lambda *_, **__: contextlib.nullcontext(sent.append))
    run = _copy(tuned_run, tmp_path / "run", "eval.every_steps=2", "stages.rl1.steps=3")
    stage_dir, phase = run.stage_dir("rl1"), Phase("eval", "rl1")
    left_by_a_kill = stage_dir / "eval_steps/step_000002/outcomes.jsonl"
    _write_rows(left_by_a_kill, ["of other weights"])
    phase_work.grpo(run, Phase("grpo", "rl1"))
    assert len(list(read_rows(left_by_a_kill))) == 2, "one row for each problem, of these weights"
    row = list(run.run_folder.read_metrics())[-1]
    with monkeypatch.context() as without_engines:
        without_engines.setattr(phase_work, "open_rollout", None)
        reports = phase_work.evaluate(run, phase)
    assert reports["all"].measures["accuracy"].value == row["eval_accuracy"]
    evaluations = [(each["step"], each["eval/accuracy"]) for each in sent if "eval/accuracy" in each]
    # The phase sends the last evaluation once more, since the training may have been killed before it sent it.
    assert evaluations[1:] == [(row["step"], row["eval_accuracy"])] * 2
    assert evaluations[0][0] == row["step"] - 1
    assert [each["step"] for each in sent if "stage" in each] == [row["step"] - 2, row["step"] - 1, row["step"]]
    trained = run.trained_model("rl1")
    assert trained.best["step"] in (row["step"] - 1, row["step"])
    assert trained.best["accuracy"] >= row["eval_accuracy"]
    assert run.model_path("stages/rl1/best").is_dir()
    # Engines that load the saved model sample the same episodes.
    in_stage = list(read_rows(stage_dir / "eval/outcomes.jsonl"))
    shutil.rmtree(stage_dir / "eval")
    phase_work.evaluate(run, phase)
    by_problem = operator.itemgetter("problem")
    assert sorted(read_rows(stage_dir / "eval/outcomes.jsonl"), key=by_problem) == sorted(in_stage, key=by_problem)


@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_a_reward_function_scores_an_evaluation(tuned_run: RecipeRun, tmp_path: Path) -> None:
    run = _copy(tuned_run, tmp_path / "run", "reward.correct_above=5")
    problems = read_problems(str(run.eval_problems_path()))
    own = [problem.with_default_reward(OWN_REWARD) for problem in problems]
    write_problems(own, run.eval_problems_path())
    run.result_path(Phase("eval", "sft")).unlink()
    measures = phase_work.evaluate(run, Phase("eval", "sft"))[ALL].measures
    episodes = list(RunFolder(run.stage_dir("sft") / "eval").read_episodes(0))
    lengths = [len("\n".join(turn["text"] for turn in episode["turns"])) for episode in episodes]
    assert [episode["reward"] for episode in episodes] == lengths
    assert measures["reward"].value == sum(lengths) / len(lengths)
    assert measures["accuracy"].value == sum(length > 5 for length in lengths) / len(lengths)
    (scores,) = run.summary()["stages"]
    assert scores["reward"] == measures["reward"].value


def test_prepared_problems_have_the_reward_function_of_the_run(tmp_path: Path) -> None:
    run = RecipeRun(
        _config(tmp_path, f"reward.function={OWN_REWARD}", "data.train=generated:8", "eval.data=generated:4")
    )
    phase_work.prepare(run, Phase("prepare"))
    for file, count in (("train", 8), ("eval", 4)):
        rewards = [problem.reward for problem in read_problems(str(run.dir / f"data/{file}.jsonl"))]
        assert rewards == [OWN_REWARD] * count


def test_the_difficulty_filter_drops_problems_of_which_all_samples_are_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecipeRun(_config(tmp_path, "reward.correct_above=0.5"))
    rewards = {"a": [0.9, 0.6, 2.0], "b": [0.9, 0.5, 1.0], "c": [1.0, None, 1.0], "d": [1.0, 1.0, 1.0]}
    problems = [Problem(name, name, "1") for name in rewards]
    write_problems(problems, run.unfiltered_path(run.config.stages["rl2"]))
    for phase in (Phase("prepare"), Phase("sft", "sft"), Phase("grpo", "rl1")):
        run.write_result(phase, TrainResult("model", 0))
    monkeypatch.setattr(phase_work, "run_evaluation", lambda *_, **__: {})
    write_outcomes(
        run.stage_dir("rl2") / "filter",
        (
            Episode(problem, sample, stop_reason=StopReason.FINISHED, reward=reward)
            for problem in problems
            for sample, reward in enumerate(rewards[problem.id])
        ),
    )
    phase_work.filter_problems(run, Phase("filter", "rl2"))
    assert stage_problems(run, "rl2") == ["b", "c"]


def test_a_training_on_stored_episodes_refuses_evaluations_inside_it(tmp_path: Path) -> None:
    run = RecipeRun(_config(tmp_path, "eval.every_steps=2"))
    for phase in (Phase("prepare"), Phase("sft", "sft")):
        run.write_result(phase, TrainResult("model", 0))
    with pytest.raises(ConfigError, match=r"^eval: every_steps: expected 0 for a training on stored episodes"):
        phase_work.grpo(run, Phase("grpo", "rl1"), tmp_path / "store")
    run = RecipeRun(_config(tmp_path, "stages.rl1.partial_rollouts=0.5"))
    with pytest.raises(
        ConfigError, match=r"^stages\.rl1: partial_rollouts: expected none of these with stored episodes"
    ):
        phase_work.grpo(run, Phase("grpo", "rl1"), tmp_path / "store")


def test_an_outage_during_an_evaluation_inside_a_stage_marks_no_best_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecipeRun(_config(tmp_path, "eval.every_steps=2"))
    stage, outcome = run.config.stage_config("rl1"), EpisodeOutcome(1.0, 0, 0, 1, "finished", 1, 1)
    lost = outcome._replace(reward=None)
    monkeypatch.setattr(phase_work, "read_problems", lambda _: [])
    for num_lost in (2, 3):
        reports = {ALL: summarize([[outcome]] * (10 - num_lost) + [[lost]] * num_lost, 1)}
        monkeypatch.setattr(phase_work, "run_evaluation", lambda *_, reports=reports, **__: reports)
        if num_lost == 2:
            assert phase_work._evaluate_step(run, stage, None, 2) is reports
        else:
            with pytest.raises(
                NoRewardsError, match="3 episodes have no reward, since the infrastructure failed; at most 20%"
            ):
                phase_work._evaluate_step(run, stage, None, 2)


@pytest.mark.slow
@pytest.mark.timeout(2 * STEP_TIMEOUT_S)
def test_eval_of_a_model_has_one_folder_per_model_and_refuses_other_weights_in_it(
    tuned_run: RecipeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second problem is too long.
    rows = [{"problem": f"Which one?{' No, which?' * times}", "answer": "1"} for times in (0, 90)]
    _write_rows(tmp_path / "some.jsonl", rows)
    run = _copy(tuned_run, tmp_path / "run")
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
    for unneeded in ("open_rollout", "_prepare_problems"):
        monkeypatch.setattr(phase_work, unneeded, None)
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


def stage_problems(run: RecipeRun, stage: str) -> list[str]:
    """Return the ids of the problems that a stage trains on."""
    return [problem.id for problem in read_problems(str(run.problems_path(run.config.stage_config(stage))))]


def _copy(tuned_run: RecipeRun, folder: Path, *sets: str) -> RecipeRun:
    shutil.copytree(tuned_run.dir, folder)
    return RecipeRun(load_config(folder, {}, [f"run_dir={folder}", *sets]))


def _kill_after(run: RecipeRun, *, step: int) -> bool:
    """Continue a run in child processes. Kill all of them once `step` is written. Return whether rl1 was unfinished at
    this time."""
    command = [sys.executable, "-m", "trainer", "recipe", str(run.dir), "--run-dir", str(run.dir)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environ, start_new_session=True, stderr=subprocess.PIPE, text=True) as parent:
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while parent.poll() is None and max((row["step"] for row in run.run_folder.read_metrics()), default=0) < step:
            assert time.monotonic() < deadline, f"no step in {STEP_TIMEOUT_S} s"
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
    return run.result(Phase("grpo", "rl1")) is None


def _untimed_metrics(run: RecipeRun) -> list[dict[str, Any]]:
    """Return the rows of rl1 without durations."""
    rows = [row for row in run.run_folder.read_metrics() if row["stage"] == "rl1"]
    return [{name: value for name, value in row.items() if not name.endswith(("_s", "_s_sum"))} for row in rows]
