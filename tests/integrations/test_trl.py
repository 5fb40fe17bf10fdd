"""Tests of `PythonEnvironment` in the GRPOTrainer of TRL. The tool calls of the model run in the sandbox, and an
outage of the sandbox ends the training."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import InvalidCall
from sandbox.integrations.connection import shared_client
from sandbox.integrations.trl import PythonEnvironment, SandboxOutage
from sandbox.tool import tool_schema
from sandbox.types import Limits, Status
from tests.integrations.examples import load_example

pytest.importorskip("trl", reason="needs the package trl")
import torch
from datasets import Dataset
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from tests.integrations.tool_calling_model import write_tool_calling_model
from tests.trainer.sampling import QUIET_LIBRARIES

pytestmark = QUIET_LIBRARIES

CODE = "print(12**3 + 30)"


@pytest.fixture(scope="module", autouse=True)
def _on_one_cpu_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that answers the problem of the example: first with a tool call, and then with the
    result."""
    call = {"type": "function", "function": {"name": "run_python", "arguments": {"code": CODE}}}
    messages = [
        *load_example("trl_grpo").PROBLEM["prompt"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "run_python", "content": "1758"},
        {"role": "assistant", "content": "It is 1758."},
    ]
    folder = tmp_path_factory.mktemp("model")
    write_tool_calling_model(folder, messages, [PythonEnvironment.run_python])
    return folder


@pytest.mark.runtime
@pytest.mark.slow
def test_the_example_trains_on_tool_calls_that_ran(
    model: Path, server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load_example("trl_grpo").main(str(model))
    printed = capsys.readouterr().out.splitlines()
    rows = [ast.literal_eval(line) for line in printed if line.startswith("{'reward'")]
    assert len(rows) == 2
    assert all(row["reward"] > 0.5 and row["tools/call_frequency"] > 0.5 for row in rows)
    assert all(row["tools/failure_frequency"] == 0 for row in rows)


def test_trl_gives_no_advantage_to_a_completion_whose_reward_is_none(model: Path, tmp_path: Path) -> None:
    scored: list[Any] = []

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            scored.append(output["advantages"].tolist())
            return output

    def reward(completions: list[Any], **_: Any) -> list[float | None]:
        return [1.0, None, None, 0.0]

    config = GRPOConfig(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=2,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    rows = Dataset.from_list([load_example("trl_grpo").PROBLEM] * 2)
    Trainer(str(model), reward, config, rows).train()
    advantage = 0.5 / 0.5**0.5  # 0.5 is the mean of 1 and 0, and 0.5**0.5 their standard deviation
    assert scored == [[pytest.approx(advantage, abs=1e-3), 0.0, 0.0, pytest.approx(-advantage, abs=1e-3)]]


def test_the_schema_that_trl_shows_the_model_is_that_of_the_tool() -> None:
    expected = tool_schema("run_python")["function"]
    schema = get_json_schema(PythonEnvironment("http://127.0.0.1:9").run_python)["function"]
    shown = schema["parameters"]["properties"]
    assert (schema["name"], schema["description"]) == (expected["name"], expected["description"])
    assert schema["parameters"]["required"] == ["code"]
    for name, rule in expected["parameters"]["properties"].items():
        assert (shown[name]["type"], shown[name]["description"]) == (rule["type"], rule["description"])


@pytest.mark.runtime
def test_each_call_starts_afresh_and_its_result_is_kept_until_the_reset(server_url: str) -> None:
    environment = PythonEnvironment(limits=Limits(timeout_s=5), max_chars=100)
    assert environment.run_python("x = 1\nprint(input())", input="hello") == "hello"
    assert "NameError" in environment.run_python("x")
    assert [result.status for result in environment.results] == [Status.OK, Status.ERROR]
    environment.reset(prompt="the row of the data set")
    assert environment.results == []


def test_instances_share_the_client_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RSTAR_SANDBOX_URL", "http://127.0.0.1:9")
    make = partial(PythonEnvironment, "http://127.0.0.1:9")
    assert PythonEnvironment()._client is make()._client is shared_client("http://127.0.0.1:9")
    assert partial(PythonEnvironment, token="other")()._client is not make()._client


def test_a_malformed_argument_is_the_models_mistake() -> None:
    with pytest.raises(InvalidCall, match="'code' must be a string, not int"):
        PythonEnvironment("http://127.0.0.1:9").run_python(5)  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_outage_ends_the_training_and_never_becomes_a_reward(model: Path, outage_url: str, tmp_path: Path) -> None:
    rewards: list[Any] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        rewards.extend(completions)
        return [0.0] * len(completions)

    config = GRPOConfig(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=256,
        temperature=0.1,
        report_to="none",
        use_cpu=True,
    )
    rows = Dataset.from_list([load_example("trl_grpo").PROBLEM] * 2)
    factory = partial(PythonEnvironment, outage_url)
    trainer = GRPOTrainer(str(model), reward, config, rows, environment_factory=factory)
    with pytest.raises(SandboxOutage, match="QueueTimeout: no slot was free"):
        trainer.train()
    assert rewards == []
