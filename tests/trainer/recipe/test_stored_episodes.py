"""Tests of what can be done with stored episodes: an exact replay of each token, new scores, and exports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.trainer.collection.hosts import LIMITS, NUM_TURNS, make_host
from tests.trainer.fakes import qwen_tokenizer
from trainer.cli import main
from trainer.collection.driver import Collection
from trainer.collection.local import LocalExecutor
from trainer.collection.store import EpisodeStore, Key, StoreReader
from trainer.config import CollectConfig, ConfigError
from trainer.environments.connection import SandboxConnection
from trainer.episodes.chat_format import rstar2_format
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.episodes.reward import VerifyOutcome
from trainer.json_files import RecordError
from trainer.recipe.collect_work import SAMPLING_FIELDS
from trainer.recipe.stored_episodes import ReplayError, export, replay, rescore

pytest.importorskip("transformers")

COUNTING = "tests.trainer.collection.hosts:CountingEnvironment"
NUM_PROBLEMS = 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    model = tmp_path_factory.mktemp("model")
    qwen_tokenizer().save_pretrained(model)
    limits = {name: asdict(LIMITS)[name] for name in SAMPLING_FIELDS}
    return {
        "model": str(model),
        "chat_format": "rstar2",
        "chat_template": "",
        "system_prompt": "Count.",
        "seed": 1,
        **limits,
    }


@pytest.fixture
def reader(settings: dict[str, object], tmp_path: Path) -> Iterator[StoreReader]:
    """A store with two episodes of each problem."""
    problems = [
        Problem(f"p{index}", "Count.", str(NUM_TURNS - 1), environment=COUNTING) for index in range(NUM_PROBLEMS)
    ]
    host = make_host(system_prompt="Count.")

    async def collect() -> None:
        with EpisodeStore(tmp_path / "store", settings) as store:
            async with LocalExecutor(host.run, 4) as executor:
                await Collection(store, executor, problems, CollectConfig(samples_per_problem=2)).run()

    asyncio.run(collect())
    with StoreReader(tmp_path / "store") as reader:
        yield reader


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_replay_computes_every_token_again(reader: StoreReader) -> None:
    episode = replay(reader, Key("p1", 1))
    assert (episode.problem.id, episode.sample, len(episode.turns)) == ("p1", 1, NUM_TURNS)


def test_a_replay_finds_a_token_and_a_response_that_differ(settings: dict[str, object], reader: StoreReader) -> None:
    episode = next(reader.episodes())
    observation = episode.turns[0].end
    changed = list(episode.response_ids)
    changed[observation] += 1
    with EpisodeStore(reader.path.parent / "changed", settings) as store:
        store.write([replace(episode, response_ids=changed)])
    with StoreReader(reader.path.parent / "changed") as other:
        with pytest.raises(ReplayError, match=r"tokens before index .* differ"):
            replay(other, Key.of(episode))
        with pytest.raises(ConfigError, match="has no episode of problem 'nothing', sample 0"):
            replay(other, Key("nothing", 0))


def test_episodes_are_scored_again_after_their_actions_are_repeated(reader: StoreReader, tmp_path: Path) -> None:
    assert rescore(reader, "", tmp_path / "scores") == {"1 -> 1": 2 * NUM_PROBLEMS}
    assert rescore(reader, "qa", tmp_path / "scores", where="problem = 'p0'", sandbox="") == {"1 -> 1": 2}
    assert [(row["problem"], row["sample"]) for row in rows(tmp_path / "scores")] == [("p0", 0), ("p0", 1)]


def test_a_reward_function_scores_stored_episodes(
    reader: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stored_rewards.py").write_text("def score(episode):\n    return 3 / episode.sample\n")
    monkeypatch.syspath_prepend(tmp_path)
    command = ["rescore", str(reader.path), "--out", str(tmp_path / "scores"), "--reward"]
    assert main([*command, "stored_rewards:score"]) in (0, None)
    assert capsys.readouterr().out == f"1 -> 3: {NUM_PROBLEMS}\n1 -> none: {NUM_PROBLEMS}\n"
    errors = {row["error"] for row in rows(tmp_path / "scores") if row["sample"] == 0}
    assert errors == {"EnvironmentFailure: reward stored_rewards:score: ZeroDivisionError: division by zero"}
    assert main([*command, "stored_rewards:no_such_name"]) == 2


def test_an_export_of_tokens_has_them_as_they_were_generated(reader: StoreReader, tmp_path: Path) -> None:
    assert export(reader, "tokens", tmp_path / "tokens", where="sample = 1") == NUM_PROBLEMS
    for row, episode in zip(rows(tmp_path / "tokens"), reader.episodes("sample = 1"), strict=True):
        for name in ("response_ids", "logprobs", "loss_mask"):
            assert row[name] == getattr(episode, name)
        assert row["prompt_ids"] == list(episode.prompt_ids)


def test_an_export_of_messages_encodes_to_the_same_tokens(
    settings: dict[str, object], reader: StoreReader, tmp_path: Path
) -> None:
    with EpisodeStore(reader.path, settings) as store:
        store.write([Episode(Problem("p3", "Count.", ""), 0, stop_reason=StopReason.DEADLINE)])  # in its first turn
    assert export(reader, "chat", tmp_path / "chat") == 2 * NUM_PROBLEMS
    chat_format = rstar2_format(qwen_tokenizer(), tools=[], system_prompt="Count.")
    for row, episode in zip(rows(tmp_path / "chat"), reader.episodes("turns > 0"), strict=True):
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system", "user"] + ["assistant", "tool"] * (NUM_TURNS - 1) + ["assistant"]
        ids, mask = chat_format.encode_conversation(row["messages"])
        assert ids == [*episode.prompt_ids, *episode.response_ids]
        assert mask == [0] * len(episode.prompt_ids) + episode.loss_mask


def test_an_export_takes_the_rewards_of_a_rescore(reader: StoreReader, tmp_path: Path) -> None:
    (tmp_path / "scores").write_text(json.dumps({"problem": "p0", "sample": 1, "reward": 0.25}) + "\n")
    export(reader, "tokens", tmp_path / "tokens", where="problem = 'p0'", rewards=tmp_path / "scores")
    assert [row["reward"] for row in rows(tmp_path / "tokens")] == [1.0, 0.25]


def test_another_environment_scores_problems_that_have_options_of_their_own(
    settings: dict[str, object], tmp_path: Path
) -> None:
    problem = Problem("p", "Count.", "3", environment="qa", options={"level": 1, "texts": {"a": ""}})
    episode = Episode(problem, 0, stop_reason=StopReason.FINISHED, answer="3", reward=0.0)
    with EpisodeStore(tmp_path / "store", settings) as store:
        store.write([episode])
    with StoreReader(tmp_path / "store") as reader:
        assert rescore(reader, COUNTING, tmp_path / "scores") == {"0 -> 1": 1}


def test_a_rescore_by_other_rules_shows_which_rewards_change(
    settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked_by: list[tuple[str, bool]] = []

    @asynccontextmanager
    async def fake_sandbox(endpoint: str, *, answer_check: str, answer_rounding: bool) -> AsyncIterator[object]:
        async def verify(pairs: Sequence[tuple[str, str]]) -> list[VerifyOutcome]:
            checked_by.append((answer_check, answer_rounding))
            equal = [gold == answer or answer_check == "math-verify" or answer_rounding for gold, answer in pairs]
            return [VerifyOutcome.EQUIVALENT if is_equal else VerifyOutcome.NOT_EQUIVALENT for is_equal in equal]

        yield SandboxConnection((), cast(Any, None), cast(Any, SimpleNamespace(verify=verify)), cast(Any, None))

    monkeypatch.setattr("trainer.recipe.stored_episodes.open_sandbox", fake_sandbox)
    problem = Problem("p", "Which root?", r"\sqrt{2}")
    answers = (r"\sqrt{2}", "1.41421356", "1.41421356")
    episodes = [
        Episode(problem, n, stop_reason=StopReason.FINISHED, answer=answer, reward=1.0)
        for n, answer in enumerate(answers)
    ]
    with EpisodeStore(tmp_path / "store", settings) as store:
        store.write(episodes)
    command = ["rescore", str(tmp_path / "store"), "--out", str(tmp_path / "scores")]
    for options, changes in (
        ([], "1 -> 0: 2\n1 -> 1: 1\n"),
        (["--answer-check", "math-verify"], "1 -> 1: 3\n"),
        (["--answer-rounding"], "1 -> 1: 3\n"),
    ):
        assert main([*command, *options]) in (0, None)
        printed = capsys.readouterr()
        assert printed.out == changes
        assert f"{2 if not options else 0} of 3 rewards change" in printed.err
    assert set(checked_by) == {("strict", False), ("math-verify", False), ("strict", True)}


def test_a_wrong_condition_names_the_columns(reader: StoreReader, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="expected a SQL condition on problem, sample"):
        export(reader, "tokens", tmp_path / "tokens", where="price > 1")
