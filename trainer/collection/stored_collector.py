"""Stored episodes in place of sampled ones: what a training step needs, read from a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.collection.store import StoreReader
from trainer.config import ConfigError
from trainer.episodes.episode import WITHOUT_LOGPROBS_ADVICE, Episode, Problem


class StoredCollector:
    """Returns the stored episodes of each problem, as `EpisodeCollector` returns sampled ones.

    The tokens keep the log-probabilities with which they were sampled. So the importance sampling of the loss can
    correct the difference between the weights that sampled and the weights that are trained. A problem has the same
    episodes in each epoch.
    """

    overhead_cpu_s = overhead_s = 0.0

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader

    async def collect(self, problems: Sequence[Problem], samples_per_problem: int, **_: object) -> list[list[Episode]]:
        """Return at most `samples_per_problem` stored episodes of each problem."""
        stored = (self._reader.episodes("problem = ?", (problem.id,)) for problem in problems)
        return [list(islice(episodes, samples_per_problem)) for episodes in stored]


class NoEngines:
    """The engines of a training that samples nothing."""

    async def sync_weights(self, weights: Mapping[str, Any], version: int) -> int:
        return version


def stored_problems(path: Path, min_episodes: int) -> list[Problem]:
    """Return the problems that have at least `min_episodes` episodes in the store at `path`, ordered by id.

    Raises `ConfigError` if an episode has no log-probabilities, since GRPO cannot train on it.
    """
    first_samples = "SELECT problem, min(sample) FROM episodes GROUP BY problem HAVING count(*) >= ?"
    with StoreReader(path) as reader:
        without = reader.query("problem, sample", "NOT has_logprobs")
        if without:
            problem, sample = without[0]
            raise ConfigError(
                f"{path}: {len(without)} episodes have tokens without log-probabilities, the first is sample {sample} "
                f"of problem {problem}: {WITHOUT_LOGPROBS_ADVICE}"
            )
        return [
            episode.problem for episode in reader.episodes(f"(problem, sample) IN ({first_samples})", (min_episodes,))
        ]
