"""Commands that read a store of episodes.

- `replay` runs one episode again and compares its tokens.
- `rescore` scores the episodes again.
- `export` writes the episodes as JSONL.

In each of them `where` is an SQL condition on the columns of the store's index (`trainer.collection.store.COLUMNS`).
The default "1" is true for every episode.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from trainer.collection.store import Key, StoreReader
from trainer.config import ConfigError, ModelConfig, RunConfig, SamplingConfig
from trainer.engines.busy_timer import BusyTimer
from trainer.engines.engine import Generation, SamplingParams
from trainer.engines.pool import EpisodeHandle
from trainer.environments.connection import SandboxConnection, open_sandbox
from trainer.environments.registry import check_problem, needs_sandbox, open_environment
from trainer.environments.services import Services, open_services
from trainer.episodes.chat_format import ChatFormat
from trainer.episodes.episode import Episode, ToolCall
from trainer.episodes.reward import INFRASTRUCTURE_STOPS
from trainer.json_files import read_rows, write_rows
from trainer.progress_bar import progress_bar
from trainer.recipe.collect_work import SAMPLING_FIELDS
from trainer.recipe.rollout_session import PROMPT_SETTINGS, load_chat_format
from trainer.rollout.episode_runner import EpisodeError, replay_actions
from trainer.rollout.turn_loop import TurnLoop

SCORES_AT_ONCE = 64
REPLAYED_FIELDS = ("response_ids", "logprobs", "loss_mask", "weight_versions", "stop_reason", "answer", "answer_blocks")
"""The fields of an episode that a replay computes again."""


class ReplayError(ValueError):
    """A replayed episode differs from the stored one. The message says where."""


def replay(reader: StoreReader, key: Key) -> Episode:
    """Run a stored episode again from its sampled turns and its recorded tool responses, and compare every token.

    Return the stored episode. Raises `ConfigError` if the store does not have it, and `ReplayError` if the replay
    differs.
    """
    stored = next(reader.episodes("problem = ? AND sample = ?", key), None)
    if stored is None:
        raise ConfigError(f"{reader.path}: has no episode of problem {key.problem!r}, sample {key.sample}")
    if stored.stop_reason in INFRASTRUCTURE_STOPS:
        raise ConfigError(f"the episode ended as {stored.stop_reason}, which a replay cannot repeat")
    settings = reader.settings
    limits = SamplingConfig(**{name: settings[name] for name in SAMPLING_FIELDS})
    again = Episode(stored.problem, stored.sample, prompt_ids=stored.prompt_ids)
    turns = TurnLoop(_chat_format(reader), _RecordedTool(stored), limits, settings["seed"], BusyTimer())
    asyncio.run(turns.run(again, cast(EpisodeHandle, _RecordedHandle(stored))))
    for name in REPLAYED_FIELDS:
        if getattr(again, name) != getattr(stored, name):
            raise ReplayError(
                f"{key}: {name}: expected {getattr(stored, name)!r:.200}, got {getattr(again, name)!r:.200}"
            )
    return stored


class _RecordedHandle:
    """An engine that repeats the sampled turns of an episode."""

    def __init__(self, episode: Episode) -> None:
        self._episode, self._turns = episode, iter(episode.turns)

    async def generate(self, ids: list[int], sampling: SamplingParams) -> Generation:
        episode, turn = self._episode, next(self._turns, None)
        if turn is None:
            raise ReplayError(f"{Key.of(episode)}: expected {len(episode.turns)} turns, got another one")
        if ids != [*episode.prompt_ids, *episode.response_ids[: turn.start]]:
            raise ReplayError(f"{Key.of(episode)}: the tokens before index {turn.start} differ from the stored ones")
        sampled = tuple(episode.response_ids[turn.start : turn.end])
        known = [logprob for logprob in episode.logprobs[turn.start : turn.end] if logprob is not None]
        return Generation(
            sampled,
            tuple(known) if len(known) == len(sampled) else None,
            has_stop_token=sampled[-1] in sampling.stop_ids,
            engine=turn.engine,
            weight_version=turn.weight_version,
        )


class _RecordedTool:
    """A tool that repeats the recorded responses of an episode."""

    def __init__(self, episode: Episode) -> None:
        # Malformed calls have no name. The runner answers them itself and does not pass them to a tool.
        self._calls = iter([call for turn in episode.turns for call in turn.tool_calls if call.name])

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolCall:
        return next(self._calls)  # the runner starts the calls of a turn in the recorded order


@dataclass(frozen=True, slots=True)
class Score:
    """The new score of one episode: a row of the file that `rescore` writes."""

    problem: str
    sample: int
    stored_reward: float | None
    reward: float | None
    error: str = ""


def rescore(
    reader: StoreReader,
    environment: str,
    out: Path,
    *,
    where: str = "1",
    sandbox: str = "",
    answer_check: str = "strict",
    answer_rounding: bool = False,
    reward: str = "",
) -> Counter[str]:
    """Score stored episodes again, and write the scores to `out`. Nothing is sampled.

    `environment` names the environment that scores the episodes. If it is empty, the environment of each problem is
    used. The options of a problem are written for the problem's environment, so any other environment gets no options,
    and no reward function of the problem. A stateful environment repeats the recorded actions before it scores.

    `reward` names a reward function that scores the episodes instead.

    `sandbox` is the URL of a sandbox service. If it is empty, a local service runs until all scores are known.

    `answer_check` and `answer_rounding` are the rules by which an answer is right. They replace the rules of the
    collection.

    Episodes that the infrastructure ended are left out. Returns the number of episodes for each change of the reward,
    such as "0 -> 1". A reward that did not change is counted as well, such as "1 -> 1".
    """
    # This also counts the episodes that are left out, so the progress bar may stop below its total.
    [(total,)] = reader.query("count(*)", where)

    def episodes() -> Iterator[Episode]:
        for episode in reader.episodes(where):
            if episode.stop_reason not in INFRASTRUCTURE_STOPS:
                if environment not in ("", episode.problem.environment):
                    problem = replace(episode.problem, environment=environment, options={}, reward="")
                    episode = replace(episode, problem=problem)
                yield replace(episode, problem=replace(episode.problem, reward=reward or episode.problem.reward))

    for episode in episodes():
        check_problem(episode.problem)
    any_needs_sandbox = any(needs_sandbox(episode.problem) for episode in episodes())
    max_response_chars = int(reader.settings["max_tool_response_chars"])
    sandbox_context = open_sandbox(sandbox or "local", answer_check=answer_check, answer_rounding=answer_rounding)
    with progress_bar("episodes", total) as advance:
        scores = asyncio.run(
            _score_all(episodes(), max_response_chars, sandbox_context if any_needs_sandbox else nullcontext(), advance)
        )
    write_rows(out, scores)
    return Counter(f"{_text(score.stored_reward)} -> {_text(score.reward)}" for score in scores)


async def _score_all(
    episodes: Iterator[Episode],
    max_response_chars: int,
    sandbox_context: AbstractAsyncContextManager[SandboxConnection | None],
    advance: Callable[..., None],
) -> list[Score]:
    scores: list[Score] = []
    async with sandbox_context as connection, open_services(connection) as services:

        async def score_next() -> None:
            for episode in episodes:  # the tasks share the iterator
                scores.append(await _score(episode, services, max_response_chars))
                advance(len(scores))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(SCORES_AT_ONCE):
                tasks.create_task(score_next())
    return sorted(scores, key=lambda score: (score.problem, score.sample))


async def _score(episode: Episode, services: Services, max_response_chars: int) -> Score:
    key, stored_reward = Key.of(episode), episode.reward
    environment = open_environment(episode.problem, services)
    try:
        await environment.reset(episode.problem)
        if environment.is_stateful:
            await replay_actions(episode, environment, max_response_chars)
        return Score(*key, stored_reward, await environment.score(episode))
    except Exception as error:  # a failure of one environment does not stop the scoring of other episodes
        # An `EpisodeError` is a failure of the replay, which says so.
        text = str(error) if isinstance(error, EpisodeError) else f"{type(error).__name__}: {error}"
        return Score(*key, stored_reward, None, text)
    finally:
        await environment.close()


def export(reader: StoreReader, form: str, out: Path, *, where: str = "1", rewards: Path | None = None) -> int:
    """Write episodes as JSONL, and return their number. `rewards` is a file that `rescore` has written.

    | `form`   | a row has                                                                                  |
    |----------|--------------------------------------------------------------------------------------------|
    | "tokens" | token ids, log-probabilities and loss mask as they were generated                          |
    | "chat"   | messages with the roles system, user, assistant and tool; only for episodes that have a turn |
    """
    rescored = {(row["problem"], row["sample"]): row["reward"] for row in read_rows(rewards)} if rewards else {}
    to_row = partial(_chat_row, _chat_format(reader)) if form == "chat" else _token_row
    count = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal count
        for episode in reader.episodes(f"({where}) AND turns > 0" if form == "chat" else where):
            count += 1
            key = Key.of(episode)
            reward = rescored.get(key, episode.reward)
            yield {"problem": key.problem, "sample": key.sample, "reward": reward, **to_row(episode)}

    write_rows(out, rows())
    return count


def _token_row(episode: Episode) -> dict[str, Any]:
    names = ("prompt_ids", "response_ids", "logprobs", "loss_mask", "weight_versions")
    return {"stop_reason": episode.stop_reason, **{name: getattr(episode, name) for name in names}}


def _chat_row(chat_format: ChatFormat, episode: Episode) -> dict[str, Any]:
    turns = [(turn.text, [call.response for call in turn.tool_calls]) for turn in episode.turns]
    return {"messages": chat_format.messages(episode.prompt_ids, turns)}


def _chat_format(reader: StoreReader) -> ChatFormat:
    settings = reader.settings
    model = ModelConfig(**{name: settings[name] for name in PROMPT_SETTINGS})
    # The store has the path of its run's model relative to the store. Any other model is stored as it was configured.
    path = reader.path / settings["model"]
    return load_chat_format(RunConfig(model=model), path if path.is_dir() else Path(settings["model"]))


def _text(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
