"""Tests of a training step that samples its episodes itself, on a real engine: one environment for each group or, if it
is stateful, for each episode."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from tests.trainer.fakes import ScriptedTools  # noqa: E402
from tests.trainer.rollout.scripted_rollout import make_collector  # noqa: E402
from tests.trainer.sampling import QUIET_LIBRARIES, problems  # noqa: E402
from tests.trainer.training.stage_run import SEED, StageRun  # noqa: E402
from trainer.engines.local import LocalEngine  # noqa: E402
from trainer.engines.pool import EnginePool  # noqa: E402
from trainer.episodes.chat_format import rstar2_format  # noqa: E402
from trainer.episodes.episode import Problem, StopReason  # noqa: E402
from trainer.episodes.reward import NoRewardsError  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.rollout.runtime import RolloutRuntime  # noqa: E402
from trainer.scheduling.scheduler import Scheduler  # noqa: E402
from trainer.sync.probe import SyncProbe  # noqa: E402
from trainer.sync.transfers import load_by_engine  # noqa: E402
from trainer.training.context import TrainingContext  # noqa: E402
from trainer.training.grpo import train_stage  # noqa: E402

pytestmark = QUIET_LIBRARIES

MAX_MODEL_LEN = 300
GAME = Problem(
    "game", "Play.", "", environment="examples.games:GameEnvironment", options={"game": "tower_of_hanoi", "disks": 1}
)
TOO_LONG = Problem("long", "1 + " * MAX_MODEL_LEN, "1")


def run_step(path: Path, model: Path, loop_thread: LoopThread, chosen: list[Problem], response_tokens: int) -> StageRun:
    """Train for one step on `chosen`, with two episodes of each problem."""
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(model), max_num_seqs=8, max_model_len=MAX_MODEL_LEN)
    pool = loop_thread.enter(
        EnginePool([engine], scheduler=Scheduler(4 * MAX_MODEL_LEN), transfer=load_by_engine, probe=SyncProbe(model))
    )
    stage_run = StageRun(
        path, model, loop_thread, steps=1, samples_per_problem=2, kept_per_problem=2, problems_per_step=len(chosen),
        max_response_tokens=response_tokens,
    )  # fmt: skip
    chat_format = rstar2_format(AutoTokenizer.from_pretrained(model), tools=[], system_prompt="Go.")
    train_stage(
        stage_run.stage,
        TrainingContext(model, path / "stages/rl1", stage_run.run_folder, seed=SEED),
        problems=chosen,
        rollouts=RolloutRuntime(loop_thread, make_collector(pool, chat_format, ScriptedTools()), pool),
    )
    return stage_run


def test_a_stateful_environment_trains_and_a_prompt_that_is_too_long_costs_only_its_episodes(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    stage_run = run_step(tmp_path, model, loop_thread, [*problems(5), GAME, TOO_LONG], response_tokens=40)
    (row,) = stage_run.run_folder.read_metrics()
    assert row["unavailable_episodes"] == 2
    episodes = {name: [] for name in ("game", "long")}
    for episode in stage_run.run_folder.read_episodes(1):
        episodes.setdefault(episode["problem"]["id"], []).append(episode)
    assert len(episodes) == 7
    assert all(episode["reward"] is not None for episode in episodes["game"])
    for episode in episodes["long"]:
        assert (episode["stop_reason"], episode["reward"]) == (StopReason.UNAVAILABLE, None)
        assert episode["error"].startswith(f"engine: expected 1 to {MAX_MODEL_LEN} tokens in all, got ")


def test_a_setting_with_which_no_prompt_fits_ends_the_stage_by_name(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    expected = (
        rf"4 of 4 episodes have no reward.*The first failure: engine: expected 1 to {MAX_MODEL_LEN} tokens in all"
    )
    with pytest.raises(NoRewardsError, match=expected):
        run_step(tmp_path, model, loop_thread, problems(2), response_tokens=MAX_MODEL_LEN)
