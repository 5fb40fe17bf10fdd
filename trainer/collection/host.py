"""Runs an episode for an executor, and reports its turns as they finish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.collection.store import Growth
from trainer.episodes.episode import Episode
from trainer.rollout.episode_runner import EpisodeRunner


@dataclass(frozen=True, slots=True)
class EpisodeHost:
    """Runs episodes, any number at once. `run` has the type `trainer.collection.work.RunEpisode`."""

    runner: EpisodeRunner

    async def run(self, episode: Episode, on_growth: Callable[[Growth], None]) -> float | None:
        """Complete an episode in place and return its reward. Raises `EpisodeError`."""
        failures = await self.runner.run([episode], _Journal(episode, on_growth).write)
        if episode in failures:
            raise failures[episode]
        return episode.reward


class _Journal:
    """Calls `on_growth` with the tokens and turns that an episode has gained since the last call."""

    def __init__(self, episode: Episode, on_growth: Callable[[Growth], None]) -> None:
        self._on_growth = on_growth
        self._tokens, self._turns = len(episode.response_ids), len(episode.turns)

    def write(self, episode: Episode) -> None:
        self._on_growth(Growth(self._tokens, episode.tail(self._tokens, self._turns)))
        self._tokens, self._turns = len(episode.response_ids), len(episode.turns)
