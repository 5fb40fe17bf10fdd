"""Tests of the preflight, which checks what a run needs before the run or one of its phases starts. It reports all that
is missing at once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from tests.http_server import close_runner
from tests.trainer.fakes import qwen_tokenizer, released_template
from trainer import cli
from trainer.config import HardwareConfig, ModelShape, RunConfig
from trainer.config_loading import load_config
from trainer.data import tiny_model
from trainer.data.sources import read_problems
from trainer.environments import connection
from trainer.recipe import preflight
from trainer.recipe.phases import Phase, RecipeRun, TrainResult
from trainer.recipe.preflight import missing

pytest.importorskip("torch")
pytest.importorskip("trl")

from transformers import Qwen2Config, Qwen3Config

from trainer.recipe import phase_work

CONFIGS = Path(__file__).parents[3] / "configs"
SHAPE = """
num_hidden_layers = 2
hidden_size = 128
intermediate_size = 384
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 32
vocab_size = 640
"""
SMALL_RUN = f"""
[model.shape]
{SHAPE}
[sft]
data = ["generated:8"]
[stages.rl1]
steps = 3
"""
NO_PREFLIGHT = "--no-preflight"
UNUSED_URL = "http://127.0.0.1:1"
"""An address where nothing listens."""


def _config(folder: Path, *sets: str, text: str = SMALL_RUN) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, {}, [f"run_dir={folder / 'run'}", *sets])


FAKE_VLLM = {
    "transformers.py": "class LlamaForCausalLM: ...",
    "vllm/__init__.py": """
class ModelRegistry:
    @staticmethod
    def get_supported_archs():
        return {"Qwen3ForCausalLM"}
""",
    "vllm/engine/arg_utils.py": """
class AsyncEngineArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--kv-cache-dtype")
        return parser
""",
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser",
}
"""The modules of a Python in which vLLM has one model and one option."""


def _missing(config: RunConfig, *commands: str) -> list[str]:
    """Return what is missing for the phases with these commands, or for all phases."""
    run = RecipeRun(config)
    return missing(run, [phase for phase in run.phases() if not commands or phase.command in commands])


def _without_progress(stderr: str) -> list[str]:
    """Return the lines that say what is missing."""
    return [line for line in stderr.splitlines() if not line.startswith("preflight: checks ")]


def _problems(file: Path, *rows: dict[str, Any]) -> Path:
    numbered = (
        {"id": f"p{n}", "text": f"problem {n}", "answer": "1", "source": "s"} | row for n, row in enumerate(rows)
    )
    file.write_text("".join(f"{json.dumps(row)}\n" for row in numbered), encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def _without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_RETRIES", 0)


@pytest.fixture
def vllm() -> Iterator[tuple[str, dict[str, Any]]]:
    """The URL of a fake vLLM server, and its state. The state has the `max_model_len` that the server reports,
    `has_rpc` (whether it has the route that reloads weights), and two of the options with which it was started."""
    server_state: dict[str, Any] = {
        "max_model_len": 1 << 20,
        "has_rpc": True,
        "model_config": {"enable_sleep_mode": False},
        "parallel_config": {"worker_extension_cls": ""},
    }
    loop, is_up, addresses = asyncio.new_event_loop(), threading.Event(), list[str]()
    runners: list[web.AppRunner] = []

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": server_state["max_model_len"]}]})

    async def rpc(request: web.Request) -> web.Response:
        return web.Response(status=405 if server_state["has_rpc"] else 404)

    async def info(request: web.Request) -> web.Response:
        assert request.query == {"config_format": "json"}
        return web.json_response({"vllm_config": server_state})

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.get("/collective_rpc", rpc), web.get("/server_info", info)])
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        addresses.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        is_up.set()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(serve()), loop.run_forever()))
    thread.start()
    assert is_up.wait(60)
    yield addresses[0], server_state
    asyncio.run_coroutine_threadsafe(close_runner(runners[0]), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_all_that_is_missing_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    sets = {
        "sft.data": "conversations.jsonl",
        "data.train": "problems.jsonl",
        "model.path": bare,
        "engines.kind": "vllm",
        "engines.vllm_python": "no-such-python",
        "hardware.launcher": "no-such-torchrun",
        "tracking.trackers": "trackio",
        "rl.optim": "adamw_8bit",
        "sandbox.endpoints": UNUSED_URL,
    }
    config = _config(tmp_path, *(f"{key}={value}" for key, value in sets.items()))
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    monkeypatch.setattr(preflight, "memory_available", lambda: 10**6)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    lines = _missing(config)
    beginnings = [
        "data.train: problems.jsonl: no such file; ",
        "sft.data: conversations.jsonl: no such file; ",
        f"model {bare}: has no config.json and no weights; ",
        f"model {bare}: Couldn't instantiate the backend tokenizer",
        f"disk: {tmp_path / 'run'}: models and checkpoints need 0.0 GB, but 0.0 GB are free; ",
        "memory: sft: needs ",
        "memory: stages.rl1: needs ",
        "tracking.trackers: trackio is not installed; ",
        "hardware.launcher: no-such-torchrun: no such command on PATH; ",
        "stages.rl1: optim=adamw_8bit: bitsandbytes is not installed; ",
        "engines: no-such-python has no vLLM; ",
        f"sandbox: no sandbox at {UNUSED_URL}: ",
    ]
    expected = [line for line in lines if any(line.startswith(beginning) for beginning in beginnings)]
    assert (len(lines), expected) == (len(beginnings), lines)
    assert all("; " in line and "\n" not in line for line in lines), "each line says after the semicolon what to do"
    assert beginnings[7] + "pip install trackio, or leave it out" in _missing(config, "eval")
    assert not (tmp_path / "run").exists()

    argv = ["preflight", str(tmp_path / "run.toml"), *(f"--set={key}={value}" for key, value in sets.items())]
    assert cli.main(argv) == 2
    error_lines = _without_progress(capsys.readouterr().err)
    assert error_lines[0] == f"rstar-train: {len(beginnings)} things are missing"
    # The command line above has no --run-dir.
    assert [line.strip() for line in error_lines[1:]] == [
        line.replace(str(tmp_path / "run"), "runs/run") for line in lines
    ]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"environment": "no_such_module:Own"}, "environment 'no_such_module:Own': cannot be imported"),
        ({"environment": "json:Decoder"}, "environment 'json:Decoder': cannot be imported"),
        ({"environment": "pyhton"}, "environment 'pyhton': did you mean python?"),
        ({"options": {"timeout": 3}}, "options.timeout: Unexpected keyword argument"),
        ({"reward": "no_such_module:score"}, "reward 'no_such_module:score': expected package.module:function; cannot"),
    ],
)
def test_an_environment_that_cannot_be_used_is_found_before_anything_starts(
    row: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    file = _problems(tmp_path / "problems.jsonl", {}, row, row)
    (line,) = _missing(_config(tmp_path, f"data.train={file}"), "prepare")
    assert line.startswith(f"data.train: {file}: problem p1: ") and expected in line
    (line,) = _missing(_config(tmp_path, f"eval.data={file}"), "prepare")
    assert line.startswith(f"eval.data: {file}: problem p1: ") and expected in line


def test_training_and_evaluation_may_have_stateful_environments(tmp_path: Path) -> None:
    row = {"environment": "examples.games:GameEnvironment", "options": {"game": "tower_of_hanoi"}}
    train, evaluation = (_problems(tmp_path / name, row | {"text": name}) for name in ("train.jsonl", "eval.jsonl"))
    assert _missing(_config(tmp_path, f"data.train={train}", f"eval.data={evaluation}"), "prepare") == []


def test_a_reward_function_that_cannot_be_imported_is_found_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path, "reward.function=no_such_module:score")
    (line,) = _missing(config, "prepare")
    assert line.startswith("reward 'no_such_module:score': expected package.module:function; cannot be imported (No ")
    options = ["--no-preflight", "--set=reward.function=no_such_module:score", f"--run-dir={tmp_path / 'run'}"]
    assert cli.main(["prepare", str(tmp_path / "run.toml"), *options]) == 2
    (line,) = _without_progress(capsys.readouterr().err)
    assert "reward 'no_such_module:score'" in line


FAILING_REWARDS = """
import math

def raises(response): raise KeyError("answer")
def none(response): return None
def nan(response): return math.nan
def text(response): return "1.0"
def several(response):
    import torch
    return torch.ones(2)
def too_few(responses): return [1.0]
async def blocks(response):
    import threading
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "KeyError: 'answer'"),
        ("none", "expected a finite number, got None"),
        ("nan", "expected a finite number, got nan"),
        ("text", "expected a finite number, got '1.0'"),
        ("several", "expected a finite number, got tensor([1., 1.])"),
        ("too_few", "expected a list of 2 numbers, got a list of 1"),
        ("blocks", "no value after 0.1 s (reward.timeout_s); an `async def` blocks the loop that all of them share"),
    ],
)
def test_a_reward_function_that_gives_no_number_is_found_before_anything_starts(
    function: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"rewards_of_{function}"
    (tmp_path / f"{module}.py").write_text(FAILING_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    limit = ["reward.timeout_s=0.1"] if function == "blocks" else []
    (line,) = _missing(_config(tmp_path, f"reward.function={module}:{function}", *limit), "prepare")
    assert line.startswith(f"reward {module}:{function}: {reason}"), line
    (problem,) = read_problems("generated:1")
    assert line.endswith(f" for problem {problem.id}; mend the function, or start anyway with --no-preflight")


@pytest.mark.parametrize("row", [{"input": "1 + 1?", "output": "2"}, {"prompt": "", "answer": "2"}, {"prompt": "1?"}])
def test_a_file_without_the_fields_of_a_problem_is_found_before_anything_starts(
    row: dict[str, str], tmp_path: Path
) -> None:
    train, good = tmp_path / "train.jsonl", _problems(tmp_path / "good.jsonl", *[{}] * 4)
    train.write_text(f"{json.dumps(row)}\n" * 3)
    (line,) = _missing(_config(tmp_path, f"data.train={train}"), "prepare")
    field = "an answer as answer" if row == {"prompt": "1?"} else "a problem as problem"
    assert line.startswith(f"data.train: {train}: no row is a problem: row 0: expected {field} | ")
    assert line.endswith(f", got {row}; mend or remove them")
    # Some of the rows of training data may be dropped, and none of an evaluation.
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(good.read_text() + train.read_text())
    assert _missing(_config(tmp_path, f"data.train={mixed}"), "prepare") == []
    (line,) = _missing(_config(tmp_path, f"eval.data={mixed}"), "prepare")
    assert line.startswith(f"eval.data: {mixed}: 3 rows are no problems: row 4: expected {field} | ")


def test_a_local_engine_takes_at_most_half_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of 64 sequences of 16,384 tokens would take 48 GB, and a training with passes of 2,048 tokens takes
    5 GB."""
    shape = ModelShape(30, 576, 1536, 9, 3, 49152, tie_word_embeddings=True)
    sets = ["engines.max_num_seqs=64", "engines.max_model_len=16384", "model.dtype=float32"]
    config, phases = (
        _config(tmp_path, *sets, "rl.micro_batch_tokens=2048", "rl.max_response_tokens=1024"),
        [Phase("grpo", "rl1")],
    )
    monkeypatch.setattr(preflight, "memory_available", lambda: 20 * 10**9)
    assert [*preflight._check_memory(config, phases, shape)] == []
    monkeypatch.setattr(preflight, "memory_available", lambda: 6 * 10**9)
    (line,) = preflight._check_memory(config, phases, shape)
    assert line.startswith("memory: stages.rl1: needs 8.") and "6.0 GB are available here" in line


def test_a_local_engine_on_the_cpu_must_fit_beside_a_training_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the engine take 2.9 GB in bfloat16."""
    config = _config(tmp_path, "hardware.gpus_per_node=1", "engines.device=cpu")
    shape = ModelShape(30, 2048, 8192, 9, 3, 49152, tie_word_embeddings=True)
    monkeypatch.setattr(preflight, "memory_available", lambda: 20 * 10**9)
    assert [*preflight._check_memory(config, [Phase("grpo", "rl1")], shape)] == []
    monkeypatch.setattr(preflight, "memory_available", lambda: 2 * 10**9)
    assert [*preflight._check_memory(config, [Phase("sft", "sft")], shape)] == []
    lines = preflight._check_memory(config, [Phase("grpo", "rl1")], shape)
    assert any("stages.rl1: needs " in line and "but 2.0 GB are available here" in line for line in lines)


@pytest.mark.parametrize("set", ["engines.device=cuda:16", "hardware.engine_gpus=1"])
def test_the_gpu_of_a_local_engine_must_exist(tmp_path: Path, set: str) -> None:
    config = _config(tmp_path, set, "hardware.gpus_per_node=16")
    (line,) = preflight._check_local_device(config)
    assert line.startswith("engines.device: expected the GPU cuda:16 here, got ") and "; set engines.device" in line
    assert [*preflight._check_local_device(_config(tmp_path, "engines.device=cpu"))] == []


def test_many_wrong_problems_are_a_few_lines(tmp_path: Path) -> None:
    file = _problems(tmp_path / "problems.jsonl", *({"options": {f"a{n}": 1}} for n in range(9)))
    lines = _missing(_config(tmp_path, f"data.train={file}"), "prepare")
    assert len(lines) == 6 and lines[-1] == f"data.train: {file}: 4 more like these"


def test_training_problems_that_are_those_of_the_evaluation_are_found(tmp_path: Path) -> None:
    first, copy = (_problems(tmp_path / name, {}, {}) for name in ("a.jsonl", "b.jsonl"))
    for train in (first, copy):
        (line,) = _missing(_config(tmp_path, f"data.train={train}", f"eval.data={first}"), "prepare")
        assert line.startswith(f"data.train: {train}: all its problems are also in eval.data; ")
    (line,) = _missing(_config(tmp_path, f"stages.rl1.data={copy}", f"eval.data={first}"), "prepare")
    assert line.startswith(f"stages.rl1.data: {copy}: all its problems are also in eval.data; ")
    more = _problems(tmp_path / "c.jsonl", {}, {}, {})  # the run drops the first two and keeps the third
    assert _missing(_config(tmp_path, f"data.train={more}", f"eval.data={first}"), "prepare") == []


def test_a_hub_that_does_not_answer_delays_the_preflight_by_its_limit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end = threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        end.wait()

    monkeypatch.setattr(preflight, "check_source", lambda source, **_: hang() if "/" in source else None)
    monkeypatch.setattr(preflight, "_check_model", hang)
    monkeypatch.setattr(preflight, "HUB_TIMEOUT_S", 0.05)
    try:
        lines = _missing(_config(tmp_path, "data.train=owner/problems", "model.path=owner/model"), "prepare")
    finally:
        end.set()
    late = "the hub gave no answer within 0.05 s; repair the network, or name a file or a folder here"
    assert lines == [f"data.train: owner/problems: {late}", f"model.path: owner/model: {late}"]
    shown = capsys.readouterr().err
    assert "preflight: checks data.train: owner/problems (at most 0.05 s)\n" in shown
    assert "preflight: checks model.path: owner/model (at most 0.05 s)\n" in shown


def test_the_preflight_of_a_phase_checks_only_what_that_phase_needs(tmp_path: Path) -> None:
    config = _config(tmp_path, f"sandbox.endpoints={UNUSED_URL}", "sft.data=gone.jsonl", "data.train=gone.jsonl")
    assert [line.split(":")[0] for line in _missing(config, "prepare")] == ["data.train"]
    assert [line.split(":")[0] for line in _missing(config, "sft")] == ["sft.data"]
    assert [line.split(":")[0] for line in _missing(config, "grpo")] == ["sandbox"]
    assert [line.split(":")[0] for line in _missing(config, "eval")] == ["sandbox"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("adam_beta3", "adam_beta3: unknown argument of TRL's GRPOConfig; did you mean adam_beta"),
        ("xyz", "xyz: unknown argument of TRL's GRPOConfig; expected one of adam_beta1, "),
        ("beta", "beta: expected another argument of TRL's GRPOConfig, since the trainer sets this one itself"),
    ],
)
def test_arguments_that_grpo_config_lacks_or_the_trainer_sets_are_named(
    tmp_path: Path, argument: str, message: str
) -> None:
    config = _config(tmp_path, f"stages.rl1.grpo.{argument}=1", f"sandbox.endpoints={UNUSED_URL}")
    (line,) = [line for line in _missing(config, "grpo") if "grpo" in line]
    assert line.startswith(f"stages.rl1.grpo: {message}")
    assert not any("grpo" in line for line in _missing(config, "eval"))


def test_an_adapter_that_does_not_fit_the_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs peft")
    tiny_model.write_tiny_model(tmp_path / "model", seed=0)
    sets = [f"model.path={tmp_path / 'model'}", f"sandbox.endpoints={UNUSED_URL}"]
    for option, message in (
        ("lora_alfa=8", "lora_alfa: unknown option of peft's LoraConfig; did you mean lora_alpha?"),
        ('target_modules=["c_attn"]', "Target modules {'c_attn'} not found in the base model"),
    ):
        config = _config(tmp_path, *sets, f"model.peft.{option}")
        (line,) = [line for line in _missing(config, "sft") if "peft" in line]
        assert line.startswith(f"model.peft: {message}")


def test_options_that_vllm_rejects_are_named(tmp_path: Path) -> None:
    sets = [f"engines.vllm_python={_python_with_fake_vllm(tmp_path)}", f"sandbox.endpoints={UNUSED_URL}"]
    good, bad = (
        [line for line in _missing(_config(tmp_path, "engines.kind=vllm", *sets, f"engines.args.{option}"), "eval")]
        for option in ("kv_cache_dtype=fp8", "kv_cash_dtype=fp8")
    )
    assert [line.split(":")[0] for line in good] == ["sandbox"]
    assert bad[0].startswith("engines.args: ")
    assert bad[0].endswith("error: unrecognized arguments: --kv-cash-dtype fp8")
    own = _missing(_config(tmp_path, "engines.kind=vllm", *sets, "engines.args.dtype=half"), "eval")[0]
    assert own == "engines.args: --dtype: expected other options, since the trainer sets these"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, ""),
        ({"architectures": ["LlamaForCausalLM"]}, ""),  # vLLM can run models of transformers
        ({"architectures": ["NewForCausalLM"]}, "model {}: vLLM does not know the architecture NewForCausalLM; name"),
        ({"num_attention_heads": 3}, "engines.tensor_parallel_size=2: expected a divisor of the 3 attention heads; "),
    ],
)
def test_a_model_that_vllm_cannot_run_is_named(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 4, **changes}))
    sets = [f"engines.vllm_python={_python_with_fake_vllm(tmp_path)}", f"model.path={folder}"]
    config = _config(
        tmp_path, "engines.kind=vllm", "engines.tensor_parallel_size=2", "engines.endpoints=http://a", *sets
    )
    config = replace(config, engines=replace(config.engines, endpoints=()), hardware=HardwareConfig(1, 2))
    lines = [line for line in preflight._check_own_engines(config) if not line.startswith("GPUs: ")]
    assert [line.startswith(expected.format(folder)) for line in lines] == [True] * bool(expected)


@pytest.mark.parametrize(("world_size", "num_lines"), [("", 1), ("1", 1), ("2", 0)])
def test_several_ranks_need_a_launcher_unless_one_has_started_the_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: str, num_lines: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    lines = list(preflight._check_packages(_config(tmp_path, "hardware.nodes=2")))
    assert len(lines) == num_lines
    assert all(line.startswith("hardware.launcher: expected a command for 2 processes, got none; ") for line in lines)


def _python_with_fake_vllm(folder: Path) -> Path:
    """Write a Python that has the modules of `FAKE_VLLM`."""
    for name, code in FAKE_VLLM.items():
        file = folder / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/site exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str | None, type[Qwen2Config]], Path]:
    """A function that writes a model folder with a chat template, without weights."""

    def write(template: str | None, config_class: type[Qwen2Config]) -> Path:
        folder = tmp_path / "model"
        qwen_tokenizer(template).save_pretrained(folder)
        config_class(vocab_size=640, hidden_size=128, intermediate_size=384).save_pretrained(folder)
        return folder

    return write


def test_the_chat_template_of_qwen2_5_is_accepted_as_it_is(tmp_path: Path, model: Any) -> None:
    folder = model(released_template("qwen2_5"), Qwen2Config)
    config = _config(tmp_path, f"model.path={folder}", "model.chat_format=tokenizer")
    assert list(preflight._check_model(config, needs_weights=False)) == []


def test_the_chat_template_of_qwen3_is_refused_and_a_file_replaces_it(tmp_path: Path, model: Any) -> None:
    folder, file = model(released_template("qwen3"), Qwen3Config), tmp_path / "template.jinja"
    sets = (f"model.path={folder}", "model.chat_format=tokenizer", f"model.chat_template={file}")
    (line,) = preflight._check_model(_config(tmp_path, *sets[:2]), needs_weights=False)
    assert line.startswith(f"model {folder}: the chat template removes the reasoning of earlier turns if a message ")
    assert "set model.chat_template to the file of another template" in line and "\n" not in line
    (line,) = preflight._check_model(_config(tmp_path, *sets), needs_weights=False)
    assert "No such file" in line and str(file) in line
    file.write_text(released_template("qwen3_training"), encoding="utf-8")
    assert list(preflight._check_model(_config(tmp_path, *sets), needs_weights=False)) == []


def test_the_configuration_of_qwen3_32b_names_a_template_that_its_tokenizer_needs(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = (
        model(released_template("qwen3"), Qwen3Config),
        Path(__file__).parents[3] / "configs/qwen3-32b-gaia.toml",
    )
    monkeypatch.chdir(tmp_path)
    Path("qwen3_training.jinja").write_text(released_template("qwen3_training"), encoding="utf-8")
    config = load_config(file, {}, [f"model.path={folder}"])
    assert list(preflight._check_model(config, needs_weights=False)) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [("", "the tokenizer has no chat template; "), ("gemma3", "the chat template fails for a message from 'tool': ")],
)
def test_a_model_without_a_usable_chat_template_is_named(tmp_path: Path, model: Any, name: str, reason: str) -> None:
    folder = model(released_template(name) if name else None, Qwen3Config)
    config = _config(tmp_path, f"model.path={folder}", "model.chat_format=tokenizer")
    (line,) = preflight._check_model(config, needs_weights=False)
    assert line.startswith(f"model {folder}: {reason}") and "\n" not in line


def test_a_phase_that_runs_alone_has_a_preflight_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _config(tmp_path, "sft.data=gone.jsonl")
    run = RecipeRun(config)
    run.write_result(Phase("prepare"), TrainResult("tiny", 0))
    argv = ["sft", str(tmp_path / "run.toml"), f"--run-dir={run.dir}", "--set=sft.data=gone.jsonl"]
    assert cli.main(argv) == 2
    (line,) = _without_progress(capsys.readouterr().err)
    assert line == "rstar-train: sft.data: gone.jsonl: no such file; name another source, or put the file there"


def test_the_first_row_of_sft_data_must_be_a_conversation(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    for row, reason in (("{}", "row 0: expected messages"), ("", "expected rows, got none")):
        file.write_text(row, encoding="utf-8")
        (line,) = _missing(_config(tmp_path, f"sft.data={file}"), "sft")
        assert reason in line


def test_phases_that_do_not_fit_the_gpu_are_named(tmp_path: Path) -> None:
    text = (CONFIGS / "qwen2.5-1.5b-single-gpu.toml").read_text(encoding="utf-8")
    sets = [
        "sft.micro_batch_size=8",
        "sft.gradient_checkpointing=false",
        "engines.gpu_memory_utilization=0.03",
        "hardware.engine_gpus=1",
    ]
    config = _config(tmp_path, *sets, text=text)
    shape = config.model.shape
    assert shape
    sft, *stages = preflight._check_memory(config, RecipeRun(config).phases(), shape)
    assert sft.startswith(
        "memory: sft: training and the engine on the same GPU take 186% of its 80 GB; lower micro_batch_tokens"
    )
    assert all(
        line.startswith("memory: stages.rl") and "an engine's KV cache holds 0 tokens" in line for line in stages
    )
    assert len(stages) == 3
    fits = _config(tmp_path, text=text)
    assert list(preflight._check_memory(fits, RecipeRun(fits).phases(), shape)) == []


def test_checkpoints_that_exist_reduce_the_disk_space_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path)
    run, shape = RecipeRun(config), config.model.shape
    assert shape
    needed = preflight.disk_bytes(config, shape, num_phases=2)  # sft and rl1
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1000))
    assert len(list(preflight._check_disk(run, run.phases(), shape))) == 1
    checkpoint = run.stage_dir("sft") / "checkpoints/checkpoint-1/optimizer.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(bytes(1000))
    assert list(preflight._check_disk(run, run.phases(), shape)) == []


def test_a_vllm_server_must_answer_accept_long_contexts_and_reload_weights(
    tmp_path: Path, vllm: tuple[str, dict[str, Any]]
) -> None:
    url, server_state = vllm
    checked = _config(tmp_path, "engines.kind=vllm", f"engines.endpoints={url}", f"sandbox.endpoints={UNUSED_URL}")
    config = replace(checked, engines=replace(checked.engines, sync_check="probe"))

    def engines(config: RunConfig = config) -> list[str]:
        return [line for line in asyncio.run(preflight._check_servers(config)) if line.startswith("engines")]

    assert engines() == []
    sleeping = replace(config, engines=replace(config.engines, sleep_mode=True), hardware=HardwareConfig(1, 1))
    no_sleep_mode = f"engines: {url}: has no sleep mode; start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    assert engines(sleeping) == [no_sleep_mode]
    server_state["model_config"] = {"enable_sleep_mode": True}
    assert engines(sleeping) == []
    broadcasting = replace(config, engines=replace(config.engines, weight_sync="gloo"))
    for needs_extension in (broadcasting, checked):
        (line,) = engines(needs_extension)
        assert line.startswith(f"engines: {url}: cannot check weights by checksums or receive them by gloo or nccl; ")
        assert "start it with --worker-ext" in line
    server_state["parallel_config"] = {"worker_extension_cls": "vllm_worker.Worker"}
    assert engines(broadcasting) == engines(checked) == []
    server_state["has_rpc"] = False
    assert engines() == [f"engines: {url}: has no route to reload weights; start it with VLLM_SERVER_DEV_MODE=1"]
    server_state["max_model_len"] = 512
    expected = f"engines: {url}: takes 512 tokens, fewer than engines.max_model_len=16384; start it with a larger "
    expected += "--max-model-len"
    assert engines() == [expected]
    endpoints = f"engines.endpoints={UNUSED_URL}", f"sandbox.endpoints={UNUSED_URL}"
    (line,) = engines(_config(tmp_path, "engines.kind=vllm", *endpoints))
    assert line.startswith(f"engines: {UNUSED_URL}: expected a vLLM server's answer, got ClientConnectorError")


def test_a_local_sandbox_is_started_and_used(tmp_path: Path, guest_python: Path) -> None:
    assert _missing(_config(tmp_path), "eval") == []


def test_a_directory_without_a_guest_runtime_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "without-runtime"
    directory.mkdir()
    (directory / "notes.txt").touch()  # a runtime is made in an empty directory only
    monkeypatch.setenv("RSTAR_RUNTIME", str(directory))
    (line,) = _missing(_config(tmp_path), "eval")
    assert line.startswith("sandbox: `rstar-sandbox serve` ended")
    assert str(directory) in line


@pytest.mark.parametrize(
    ("rank", "flags", "is_checked"), [("0", [], True), ("1", [], False), ("0", [NO_PREFLIGHT], False)]
)
def test_only_the_first_rank_runs_the_preflight_and_a_flag_skips_it(
    rank: str, flags: list[str], is_checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, checked_phases = _config(tmp_path), list[str]()
    RecipeRun(config).write_result(Phase("prepare"), TrainResult("tiny", 0))
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(preflight, "require", lambda run, phases: checked_phases.extend(map(str, phases)))
    monkeypatch.setitem(phase_work.PHASE_FUNCTIONS, "sft", lambda run, phase: None)
    assert cli.main(["sft", str(tmp_path / "run.toml"), f"--run-dir={config.run_dir}", *flags]) == 0
    assert checked_phases == (["sft"] if is_checked else [])


def test_a_recipe_whose_preflight_fails_starts_no_phase(tmp_path: Path) -> None:
    config = _config(tmp_path, f"sandbox.endpoints={UNUSED_URL}", "sft.data=gone.jsonl")
    command = [sys.executable, "-m", "trainer", "recipe", str(tmp_path / "run.toml"), f"--run-dir={config.run_dir}"]
    sets = [f"--set=sandbox.endpoints={UNUSED_URL}", "--set=sft.data=gone.jsonl"]
    done = subprocess.run([*command, *sets], capture_output=True, text=True, timeout=300)
    error_lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert error_lines[0] == "preflight: checking what the run needs"
    assert "rstar-train: 2 things are missing" in error_lines
    assert any(line.startswith("  sft.data: gone.jsonl: no such file") for line in error_lines)
    assert any(line.startswith(f"  sandbox: no sandbox at {UNUSED_URL}") for line in error_lines)
    assert error_lines[-1].startswith("rstar-train: nothing was started; repair what is listed above")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lock"]
