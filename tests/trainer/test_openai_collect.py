"""Tests of the commands that sample from an OpenAI-compatible server, and of the settings that they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from aiohttp import web

from sandbox.errors import ConfigError as SandboxConfigError
from sandbox.local import local_service
from sandbox.runtime.build import default_python
from tests.trainer.collection.hosts import NUM_TURNS, count_to_answer
from tests.trainer.fake_openai import API_KEY, FakeOpenAI
from tests.trainer.fakes import END, answer_text, qwen_tokenizer, scripted_logprob
from trainer.cli import main
from trainer.collection.store import StoreReader
from trainer.collection.stored_collector import stored_problems
from trainer.config import ConfigError
from trainer.config_loading import load_config
from trainer.episodes.chat_format import rstar2_format
from trainer.recipe.phases import Phase, RecipeRun
from trainer.recipe.preflight import missing
from trainer.rollout.loop_thread import LoopThread

COUNTING = "tests.trainer.collection.hosts:CountingEnvironment"
KEY_VARIABLE = "COUNTING_API_KEY"
NUM_PROBLEMS, NUM_SAMPLES = 3, 2


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeOpenAI:
    monkeypatch.setenv(KEY_VARIABLE, API_KEY)
    return FakeOpenAI(count_to_answer, api_key=API_KEY)


@pytest.fixture
def url(server: FakeOpenAI) -> Iterator[str]:
    with LoopThread() as loop_thread:
        yield loop_thread.enter(server.serve())


@pytest.fixture
def config(tmp_path: Path, url: str) -> str:
    """Write a configuration whose model is a tokenizer only, and return its path."""
    qwen_tokenizer().save_pretrained(tmp_path / "model")
    row = {"text": "Count.", "answer": str(NUM_TURNS - 1), "source": "", "environment": COUNTING, "options": {}}
    rows = [json.dumps({"id": f"p{index}", **row}) for index in range(NUM_PROBLEMS)]
    (tmp_path / "problems.jsonl").write_text("\n".join(rows) + "\n")
    content = {
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "model"), "system_prompt": "Count."},
        "engines": {"kind": "openai", "endpoints": [url], "model_name": "counter", "api_key_env": KEY_VARIABLE},
        "collect": {
            "data": [str(tmp_path / "problems.jsonl")],
            "samples_per_problem": NUM_SAMPLES,
            "store": str(tmp_path / "store"),
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    return str(tmp_path / "config.json")


@pytest.fixture(scope="module")
def sandbox_url() -> Iterator[str]:
    """A sandbox that the tests share, since each start takes seconds."""
    try:
        default_python()
    except SandboxConfigError as error:
        pytest.skip(f"needs the guest runtime: {error}")
    with LoopThread() as loop_thread:
        yield loop_thread.enter(local_service())


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_episodes_are_collected_shown_exported_for_sft_and_refused_by_grpo(
    tmp_path: Path, config: str, server: FakeOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect", config, "--json"]) == 0
    status = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status["done"], status["failed"]) == (NUM_PROBLEMS * NUM_SAMPLES, 0)
    store = tmp_path / "store"
    with StoreReader(store) as reader:
        assert list(reader.query("count(*)", f"reward = 1 AND turns = {NUM_TURNS} AND NOT has_logprobs")) == [(6,)]
        assert reader.settings["engines.model_name"] == "counter"
        episodes = list(reader.episodes())

    assert main(["replay", str(store), "p1", "1"]) == 0

    assert main(["export", str(store), "--format", "tokens", "--out", str(tmp_path / "tokens")]) == 0
    for row in rows_of(tmp_path / "tokens"):
        assert {value is None for value, bit in zip(row["logprobs"], row["loss_mask"], strict=True) if bit} == {True}

    assert main(["export", str(store), "--format", "chat", "--out", str(tmp_path / "chat")]) == 0
    chat_format = rstar2_format(qwen_tokenizer(), tools=[], system_prompt="Count.")
    for row, episode in zip(rows_of(tmp_path / "chat"), episodes, strict=True):
        ids, mask = chat_format.encode_conversation(row["messages"])
        assert ids == [*episode.prompt_ids, *episode.response_ids]
        assert mask == [0] * len(episode.prompt_ids) + episode.loss_mask

    with pytest.raises(ConfigError, match=r"6 episodes have tokens without log-probabilities.*train .* by SFT"):
        stored_problems(store, 1)
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert API_KEY.encode() not in file.read_bytes(), f"{file} must not contain the key"


@pytest.mark.slow
def test_the_nodes_of_a_ray_cluster_use_the_server(
    config: str, server: FakeOpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (the extra `cluster`)")
    assert main(["collect", config, "--json", "--set", "collect.executor=ray"]) == 0
    status = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status["done"], status["failed"]) == (NUM_PROBLEMS * NUM_SAMPLES, 0)


def test_episodes_with_aligned_logprobs_can_be_trained(tmp_path: Path, config: str) -> None:
    assert main(["collect", config, "--set", "engines.request_logprobs=true"]) == 0
    assert [problem.id for problem in stored_problems(tmp_path / "store", NUM_SAMPLES)] == ["p0", "p1", "p2"]
    with StoreReader(tmp_path / "store") as reader:
        for episode in reader.episodes():
            tokens = zip(episode.response_ids, episode.logprobs, episode.loss_mask, strict=True)
            assert all(logprob == (scripted_logprob(id) if bit else 0) for id, logprob, bit in tokens)


def test_a_server_that_is_overloaded_at_times_costs_no_episode(config: str, server: FakeOpenAI) -> None:
    def fail_at_times(answer: Any) -> Any:
        headers = {"Retry-After": "0.1"}
        return web.Response(status=429, headers=headers) if len(server.bodies) % 5 == 0 else answer

    server.change_answer = fail_at_times
    assert main(["collect", config, "--json"]) == 0
    assert len(server.bodies) > NUM_PROBLEMS * NUM_SAMPLES * NUM_TURNS


@pytest.mark.slow
def test_eval_and_rollout_sample_from_the_server(
    tmp_path: Path, config: str, server: FakeOpenAI, sandbox_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = lambda prompt, sampling: answer_text("42") + END
    sets = (f"sandbox.endpoints={sandbox_url}", "data.train=generated:4", "eval.data=generated:4")
    small = [argument for setting in sets for argument in ("--set", setting)]
    assert main(["eval", config, *small, "--model", str(tmp_path / "model"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])["all"]
    assert (report["episodes"], report["unavailable"], report["stop_reasons"]) == (4, 0, {"finished": 4})
    other = [*small, "--set", "engines.model_name=other"]
    assert "engines.model_name" in fails(capsys, 2, "eval", config, *other, "--model", str(tmp_path / "model"))

    assert main(["prepare", config, *small]) == 0
    assert main(["rollout", config, *small, "--stage", "initial", "--out", str(tmp_path / "rollout")]) == 0
    assert len(rows_of(tmp_path / "rollout" / "outcomes.jsonl")) == 16


@pytest.mark.slow
def test_preflight_names_a_server_that_does_not_answer(config: str, sandbox_url: str) -> None:
    sandbox = f"sandbox.endpoints={sandbox_url}"
    assert main(["preflight", config, "--set", sandbox]) == 0
    run = RecipeRun(load_config(Path(config), {}, [sandbox, "engines.endpoints=http://127.0.0.1:9"]))
    (line,) = missing(run, [Phase("rollout")])
    assert "expected an answer of /v1/completions, got ClientConnectorError" in line


def fails(capsys: pytest.CaptureFixture[str], exit_code: int, *arguments: str) -> str:
    """Run a command that must fail with one line, and return that line."""
    assert main(arguments) == exit_code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rstar-train: ")]
    return line


def test_another_model_is_refused_for_the_same_store(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", config]) == 0
    message = fails(capsys, 2, "collect", config, "--set", "engines.model_name=other")
    assert "other settings (engines.model_name)" in message


def test_a_wrong_key_and_a_missing_key_are_named(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sk-wrong")
    message = fails(capsys, 1, "collect", config)
    assert "got 401: wrong key: Bearer ***" in message
    monkeypatch.delenv(KEY_VARIABLE)
    assert f"expected an API key in the variable {KEY_VARIABLE}, got none" in fails(capsys, 2, "collect", config)


def test_a_rejected_setting_is_named(config: str, server: FakeOpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    server.change_answer = lambda answer: web.Response(status=400, text="unknown field: top_k")
    assert "rejected the request: unknown field: top_k" in fails(capsys, 2, "collect", config)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stages.rl1.steps=1", "stages.rl1: engines.kind=openai: expected a configuration without training"),
        ('sft.data=["a.jsonl"]', "sft.data: engines.kind=openai: expected a configuration without training"),
        ("engines.endpoints=[]", "engines.endpoints: kind=openai: expected URLs of servers, got none"),
        ("engines.endpoints=http://user:password@host", "expected URLs without user, password or query"),
        ("engines.endpoints=http://host?key=1", "expected URLs without user, password or query"),
        ("engines.model_name=", "engines.model_name: kind=openai: expected the model's name, got none"),
        ("engines.extra_body.stream=true", "engines.extra_body: stream: expected another field"),
    ],
)
def test_settings_that_contradict_each_other_are_a_config_error(tmp_path: Path, setting: str, message: str) -> None:
    engines = {"kind": "openai", "endpoints": ["http://host"], "model_name": "m"}
    stages = {"stages": {"rl1": {}}} if setting.startswith("stages") else {}
    (tmp_path / "config.json").write_text(json.dumps({"engines": engines, **stages}))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.json", {}, [setting])
    assert message in str(caught.value)
    assert "password@" not in str(caught.value)
