"""A test of the whole recipe on real vLLM servers, which takes minutes. It runs only if RSTAR_VLLM_PYTHON names a
Python that has vLLM."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")

from sandbox.errors import NodeError
from sandbox.runtime.build import default_python
from trainer.config import RunConfig
from trainer.config_loading import load_config
from trainer.data import tiny_model
from trainer.engines.vllm_servers import VllmServers
from trainer.json_files import read_json
from trainer.recipe.runner import run_recipe

VLLM_PYTHON = os.environ.get("RSTAR_VLLM_PYTHON", "")
NUM_ENGINES = 2
MAX_NUM_SEQS, MAX_MODEL_LEN = 16, 192
SMALL_RUN = f"""
[model]
path = "tiny"
dtype = "float32"
system_prompt = "Use Python."
[engines]
kind = "vllm"
vllm_python = "{VLLM_PYTHON}"
count = {NUM_ENGINES}
max_num_seqs = {MAX_NUM_SEQS}
max_model_len = {MAX_MODEL_LEN}
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
micro_batch_tokens = 4096
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
    pytest.mark.skipif(not VLLM_PYTHON, reason="RSTAR_VLLM_PYTHON names no Python that has vLLM"),
]


def _config(folder: Path, *sets: str) -> RunConfig:
    try:
        default_python()
    except NodeError as error:
        pytest.skip(f"needs the guest runtime: {error}")
    file = folder / "run.toml"
    file.write_text(SMALL_RUN, encoding="utf-8")
    return load_config(file, {}, [f"run_dir={folder / 'run'}", *sets])


def _run_and_check(config: RunConfig, stages: Sequence[str]) -> None:
    """Run the recipe. Every engine must sample, each step must sync its weights, and the log-probabilities of engines
    and trainer must agree."""
    run = run_recipe(config)
    assert [row["name"] for row in run.summary()["stages"]] == stages
    rows = [row for row in run.run_folder.read_metrics() if row["stage"] == "rl1"]
    assert [row["weight_version"] for row in rows] == [row["step"] - 1 for row in rows]
    assert all(row["unavailable_episodes"] == 0 and row["sampled_tokens"] > 0 for row in rows)
    assert all(row["logprob_diff_mean"] < 1e-3 for row in rows if row["episodes_in_loss"])
    turns = [turn for row in rows for episode in run.run_folder.read_episodes(row["step"]) for turn in episode["turns"]]
    assert len({turn["engine"] for turn in turns}) == NUM_ENGINES
    assert len({turn["weight_version"] for turn in turns}) == len(rows)
    evaluation = read_json(run.stage_dir("rl1") / "eval.json")
    assert evaluation is not None
    assert not math.isnan(evaluation["scores"]["accuracy"])
    assert list((run.dir / "weights").iterdir()) == [], "synced weights are deleted at the end"


def test_a_recipe_starts_its_own_servers(tmp_path: Path) -> None:
    _run_and_check(_config(tmp_path, "sft.data=[]"), ["rl1"])
    logs = list((tmp_path / "run" / "engines").glob("*.log"))
    assert len(logs) == NUM_ENGINES


def test_a_recipe_uses_running_servers_that_have_other_weights(tmp_path: Path) -> None:
    async def run() -> None:
        tiny_model.write_tiny_model(tmp_path / "other", seed=1)
        servers = VllmServers(
            VLLM_PYTHON,
            tmp_path / "other",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            dtype="float32",
        )
        async with servers.serve(NUM_ENGINES, tmp_path / "logs") as urls:
            config = _config(tmp_path, f"engines.endpoints={json.dumps(urls)}")
            await asyncio.to_thread(_run_and_check, config, ["sft", "rl1"])

    asyncio.run(run())
