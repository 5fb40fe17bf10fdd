"""Tests of episodes whose engine returned no log-probabilities. They are stored and exported as they are. GRPO refuses
them."""

from __future__ import annotations

import sqlite3
from math import isnan, nan
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from trainer.collection.store import EpisodeStore, StoreReader
from trainer.collection.stored_collector import StoredCollector, stored_problems
from trainer.config import ConfigError
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.episodes.metrics import METRICS

EPISODE_GROUPS = TypeAdapter(list[list[Episode]])
"""The type of the groups in a checkpoint that the next step continues."""


def make_episode(sample: int, logprobs: list[float] | None) -> Episode:
    episode = Episode(Problem("p", "Count.", "3"), sample, prompt_ids=(1,), reward=1.0)
    episode.append_sampled([5, 6], logprobs, 0)
    episode.append_observation([7])
    episode.stop_reason = StopReason.FINISHED
    return episode


def test_unknown_logprobs_are_none_and_observations_keep_zero() -> None:
    assert make_episode(0, None).logprobs == [None, None, 0.0]
    assert make_episode(0, None).known_logprobs is None
    assert make_episode(0, [-1.0, -2.0]).known_logprobs == [-1.0, -2.0, 0.0]
    assert Episode(Problem("p", "", ""), 0).known_logprobs == []


def test_an_episode_with_one_unknown_turn_has_unknown_logprobs() -> None:
    episode = make_episode(0, [-1.0, -2.0])
    episode.append_sampled([8], None, 0)
    assert episode.known_logprobs is None


def test_the_entropy_leaves_out_episodes_with_unknown_logprobs() -> None:
    entropy = METRICS["entropy"].value
    assert entropy([make_episode(0, [-1.0, -2.0]), make_episode(1, None)]) == 1.5
    assert isnan(entropy([make_episode(1, None)]))


def test_a_store_keeps_unknown_logprobs_and_grpo_refuses_them_by_name(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path, {}) as store:
        store.write([make_episode(0, [-1.0, -2.0])])
        assert [problem.id for problem in stored_problems(tmp_path, 1)] == ["p"]
        store.write([make_episode(1, None)])
    with StoreReader(tmp_path) as reader:
        assert [episode.logprobs for episode in reader.episodes("NOT has_logprobs")] == [[None, None, 0.0]]
    with pytest.raises(
        ConfigError, match=r"1 episodes have .* without log-probabilities, the first is sample 1 of .* p:"
    ):
        stored_problems(tmp_path, 1)


@pytest.mark.asyncio
async def test_a_stored_group_has_as_many_episodes_as_were_asked_for_it(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path, {}) as store:
        store.write([make_episode(sample, [-1.0, -2.0]) for sample in range(4)])
    problem = make_episode(0, None).problem
    with StoreReader(tmp_path) as reader:
        collected = [await StoredCollector(reader).collect([problem] * 2, size) for size in (1, 3)]
    assert [[len(group) for group in groups] for groups in collected] == [[1, 1], [3, 3]]


def test_logprobs_of_nan_are_kept_and_are_not_unknown(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path, {}) as store:
        store.write([make_episode(0, [nan, -2.0])])
    with StoreReader(tmp_path) as reader:
        (episode,) = reader.episodes("has_logprobs")
    assert isnan(episode.logprobs[0] or 0) and episode.logprobs[1:] == [-2.0, 0.0]
    assert stored_problems(tmp_path, 1)
    assert (METRICS["nan_logprobs"].value([episode]), METRICS["entropy"].value([episode])) == (1, 2.0)


def test_an_index_of_other_columns_is_built_anew(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path, {}) as store:
        store.write([make_episode(0, None)])
    with sqlite3.connect(tmp_path / "index.sqlite3") as index:
        index.execute("ALTER TABLE episodes DROP COLUMN has_logprobs")
    with EpisodeStore(tmp_path, {}), StoreReader(tmp_path) as reader:
        assert list(reader.query("sample, has_logprobs")) == [(0, 0)]
