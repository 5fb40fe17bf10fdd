"""Tests of an RL stage that trains on the episodes of a store instead of sampling episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("trl", reason="needs trl")

from tests.trainer.sampling import QUIET_LIBRARIES, Sampler, problems  # noqa: E402
from tests.trainer.training.stage_run import SEED, StageRun, are_equal, load_weights  # noqa: E402
from trainer.collection.store import EpisodeStore, StoreReader  # noqa: E402
from trainer.collection.stored_collector import NoEngines, StoredCollector, stored_problems  # noqa: E402
from trainer.config import ConfigError  # noqa: E402
from trainer.episodes.episode import Episode  # noqa: E402
from trainer.rollout.loop_thread import LoopThread  # noqa: E402
from trainer.rollout.runtime import RolloutRuntime  # noqa: E402
from trainer.training.context import TrainingContext  # noqa: E402
from trainer.training.grpo import train_stage  # noqa: E402

pytestmark = QUIET_LIBRARIES

NUM_PROBLEMS = 4
"""The problems of two steps, so that no problem occurs twice."""


class RecordingSampler(Sampler):
    """Keeps the episodes that it has sampled."""

    episodes: tuple[Episode, ...] = ()

    async def collect(self, *args: Any, **options: Any) -> list[list[Episode]]:
        collected = await super().collect(*args, **options)
        self.episodes += tuple(episode for group in collected for episode in group)
        return collected


def test_stored_episodes_train_like_the_same_episodes_online(
    tmp_path: Path, model: Path, loop_thread: LoopThread
) -> None:
    online, sampler = StageRun(tmp_path / "online", model, loop_thread), RecordingSampler(model)
    expected = online.run(sampler, num_problems=NUM_PROBLEMS)
    with EpisodeStore(tmp_path / "store", {}) as store:
        store.write(sampler.episodes)
    stage = online.stage
    with StoreReader(tmp_path / "store") as reader:
        assert len(list(reader.query("sample"))) == len(sampler.episodes)
        assert {p.id for p in stored_problems(reader.path, stage.samples_per_problem)} == {
            p.id for p in problems(NUM_PROBLEMS)
        }
        assert stored_problems(reader.path, stage.samples_per_problem + 1) == []
        stored = StageRun(tmp_path / "stored", model, loop_thread)
        trained = train_stage(
            stage,
            TrainingContext(model, tmp_path / "stored/stages/rl1", stored.run_folder, seed=SEED),
            problems=problems(NUM_PROBLEMS),
            rollouts=RolloutRuntime(loop_thread, StoredCollector(reader), NoEngines()),
        )
    assert are_equal(load_weights(trained.model), load_weights(expected.model))
    for row, online_row in zip(stored.run_folder.read_metrics(), online.run_folder.read_metrics(), strict=True):
        assert row["reward"] == online_row["reward"]
        assert row["loss"] == online_row["loss"]


def test_an_episode_without_logprobs_is_never_trained(tmp_path: Path, model: Path, loop_thread: LoopThread) -> None:
    class SamplerWithoutLogprobs(Sampler):
        async def collect(self, *args: Any, **options: Any) -> list[list[Episode]]:
            collected = await super().collect(*args, **options)
            for episode in (episode for group in collected for episode in group):
                episode.logprobs = [None if bit else 0.0 for bit in episode.loss_mask]
            return collected

    stage_run = StageRun(tmp_path, model, loop_thread)
    with pytest.raises(ConfigError, match=r"sample \d+ of problem .* has tokens without log-probabilities: .* by SFT"):
        stage_run.run(SamplerWithoutLogprobs(model), num_problems=NUM_PROBLEMS)
