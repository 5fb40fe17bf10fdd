"""The whole recipe on real vLLM servers, in minutes. Runs where RSTAR_VLLM_PYTHON names a Python that has vLLM."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

from sandbox.errors import NodeError
from sandbox.runtime import default_python
from trainer.config import RunConfig
from trainer.config_loading import load_config
from trainer.data import tiny_model
from trainer.engines.vllm_servers import VllmServers
from trainer.json_files import read_json
from trainer.recipe.runner import run_recipe

VLLM = os.environ.get("RSTAR_VLLM_PYTHON", "")
ENGINES = 2
SLOTS, MAX_LENGTH = 16, 192
SMALL = f"""
[model]
path = "tiny"
dtype = "float32"
system_prompt = "Use Python."
[engines]
kind = "vllm"
vllm_python = "{VLLM}"
count = {ENGINES}
max_num_seqs = {SLOTS}
max_model_len = {MAX_LENGTH}
[data]
train = ["generated:32"]
[sft]
data = ["generated:1600"]
epochs = 1
batch_size = 16
micro_batch_size = 16
learning_rate = 4e-3
max_conversation_tokens = 640
[rl]
problems_per_step = 4
samples_per_problem = 4
kept_per_problem = 2
micro_batch_size = 8
learning_rate = 5e-4
warmup_steps = 0
max_response_tokens = 96
max_turns = 3
[stages.rl1]
steps = 2
[eval]
data = ["generated:16"]
max_response_tokens = 96
max_turns = 3
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not VLLM, reason="RSTAR_VLLM_PYTHON names no Python that has vLLM"),
]


def _config(folder: Path, *sets: str) -> RunConfig:
    try:
        default_python()
    except NodeError as why:
        pytest.skip(f"needs the guest runtime: {why}")
    file = folder / "run.toml"
    file.write_text(SMALL, encoding="utf-8")
    return load_config(file, {}, [f"run_dir={folder / 'run'}", *sets])


def _check(config: RunConfig, names: Sequence[str]) -> None:
    """Everything ran: every engine sampled, the weights went out, and what both sides say of them agrees."""
    run = run_recipe(config)
    assert [row["name"] for row in run.summary()["stages"]] == names
    rows = [row for row in run.run_folder.read_metrics() if row["stage"] == "rl1"]
    assert [row["weight_version"] for row in rows] == [row["step"] - 1 for row in rows]
    assert all(row["unavailable_episodes"] == 0 and row["sampled_tokens"] > 0 for row in rows)
    assert all(row["logprob_diff_mean"] < 1e-3 for row in rows if row["episodes_in_loss"])
    turns = [turn for row in rows for episode in run.run_folder.read_episodes(row["step"]) for turn in episode["turns"]]
    assert len({turn["engine"] for turn in turns}) == ENGINES
    assert len({turn["weight_version"] for turn in turns}) == len(rows)
    evaluation = read_json(run.stage_dir("rl1") / "eval.json")
    assert evaluation is not None
    assert not math.isnan(evaluation["scores"]["accuracy"])
    assert list((run.dir / "weights").iterdir()) == []


def test_servers_that_a_recipe_starts(tmp_path: Path) -> None:
    _check(_config(tmp_path, "sft.data=[]"), ["rl1"])
    logs = list((tmp_path / "run" / "engines").glob("*.log"))
    assert len(logs) == ENGINES


def test_servers_that_are_there(tmp_path: Path) -> None:
    """They were started with other weights than the run's."""

    @asynccontextmanager
    async def serving() -> AsyncIterator[list[str]]:
        tiny_model.write_tiny_model(tmp_path / "other", seed=1)
        servers = VllmServers(VLLM, tmp_path / "other", max_model_len=MAX_LENGTH, max_num_seqs=SLOTS, dtype="float32")
        async with servers.serve(ENGINES, tmp_path / "logs") as urls:
            yield urls

    async def run() -> None:
        async with serving() as urls:
            config = _config(tmp_path, f"engines.endpoints={urls}".replace("'", '"'))
            await asyncio.to_thread(_check, config, ["sft", "rl1"])

    asyncio.run(run())
