"""Tests of aborts. A group is decided if its unfinished episodes (stragglers) cannot change the selection.

The stragglers of a decided group are cancelled. All other aborted episodes continue in a later call.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.fakes import END, ScriptedPool, ScriptedTools, answer_text, call_text
from tests.trainer.rollout.scripted_rollout import (
    LIMITS,
    PROBLEM,
    SEED,
    assert_loss_mask_marks_the_turns,
    collect,
    make_collector,
    text_by_seed,
)
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.rollout.turn_loop import turn_seed


def decided_by(num_rewards):
    """Return an `is_decided` that is true once `num_rewards` episodes have finished."""
    return lambda rewards, num_unfinished: len(rewards) >= num_rewards


@pytest.mark.asyncio
async def test_stragglers_are_cancelled_once_their_group_is_decided(chat_format):
    """There are four episodes. Two finish. The third generates a turn and the fourth runs a tool call, until both are
    aborted."""
    is_calling = asyncio.Event()

    async def pause_turn():
        request_number = len(pool.requests)
        if request_number < 3:
            await is_calling.wait()
        elif request_number == 3:
            await pool.abort_called.wait()

    async def pause_tool():
        is_calling.set()
        await pool.abort_called.wait()

    def script(context, sampling):
        if sampling.seed == turn_seed(SEED, PROBLEM.id, 3, 0):
            return call_text("1") + END
        return answer_text("42") + "and so on" + END

    pool, tools = ScriptedPool(script, pause_turn), ScriptedTools(pause=pause_tool)
    (group,) = await collect(pool, chat_format, tools, [PROBLEM], 4, is_decided=decided_by(2))
    assert [episode.stop_reason for episode in group] == [StopReason.FINISHED] * 2 + [StopReason.CANCELLED] * 2
    assert [episode.reward for episode in group] == [1.0, 1.0, None, None]
    _, finished, generating, calling = group
    # `ScriptedPool` returns half of an aborted turn.
    assert generating.response_ids == finished.response_ids[: len(finished.response_ids) // 2]
    assert generating.turns == []
    # The running tool call was awaited and its response appended.
    assert (calling.num_turns, calling.num_tool_calls, calling.loss_mask[-1]) == (1, 1, 0)
    assert len(pool.requests) == 4
    assert pool.open_groups == []


@pytest.mark.asyncio
async def test_an_episode_that_ends_while_it_is_aborted_counts_as_finished(chat_format):
    pool = ScriptedPool(lambda context, sampling: answer_text("42") + END, tokens_at_abort=lambda tokens: tokens)
    (group,) = await collect(pool, chat_format, ScriptedTools(), [PROBLEM], 3, is_decided=decided_by(1))
    assert [(episode.stop_reason, episode.reward) for episode in group] == [(StopReason.FINISHED, 1.0)] * 3


@pytest.mark.asyncio
async def test_is_decided_gets_the_rewards_and_the_number_of_unfinished_episodes(chat_format):
    arguments = []

    def never_decided(rewards, num_unfinished):
        arguments.append((sorted(rewards), num_unfinished))
        return False

    def without_durations(group):
        return [asdict(replace(episode, duration_s=0, turn_generate_s=0, turns=[])) for episode in group]

    pool, tools = ScriptedPool(text_by_seed), ScriptedTools()
    (group,) = await collect(pool, chat_format, tools, [PROBLEM], 5, is_decided=never_decided)
    (expected,) = await collect(ScriptedPool(text_by_seed), chat_format, ScriptedTools(), [PROBLEM], 5)
    assert without_durations(group) == without_durations(expected)
    counts = [(len(rewards), num_unfinished) for rewards, num_unfinished in arguments]
    assert counts == [(1, 4), (2, 3), (3, 2), (4, 1), (5, 0)]
    assert arguments[-1][0] == sorted(episode.reward for episode in group)


def scripted_turns(problem_number):
    """Return the turns of an episode. They must not depend on aborts.

    Turn 0 calls the tool once, turn 1 twice, each with a code of three digits: problem, turn, call. Turn 2 answers.
    """
    calling_turns = [
        f"t{turn}" + "".join(call_text(f"{problem_number}{turn}{index}") for index in range(1 + turn)) + END
        for turn in range(2)
    ]
    return [*calling_turns, f"so {problem_number} " * 5 + answer_text("42") + END]


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), min_complete=st.integers(1, 4), max_pause=st.integers(0, 30))
def test_aborted_episodes_are_neither_lost_nor_repeated(chat_format, seed, min_complete, max_pause):
    """Collect five groups in several calls, each of which aborts some of them at random points."""
    rng = random.Random(seed)
    groups = [[Episode(Problem(f"p{i}", f"ask {i}", "42"), sample) for sample in range(2)] for i in range(5)]
    executed_codes, complete_groups, version = [], [], 0

    def script(context, sampling):
        problem_number = context[context.index("ask ") + len("ask ")]
        # The responses of one turn are adjacent, so this is the number of turns with a response.
        turn = context.count("<tool_response>\n") - context.count("</tool_response>\n<tool_response>")
        text = scripted_turns(problem_number)[turn]
        sampled_before = context[context.rindex("<reason>") + len("<reason>") :]
        assert text.startswith(sampled_before)
        return text[len(sampled_before) :]

    async def pause():
        for _ in range(rng.randrange(max_pause + 1)):
            await asyncio.sleep(0)

    tools = ScriptedTools(lambda code: executed_codes.append(code) or f"got {code}", pause)
    while groups:
        version += 1
        pool = ScriptedPool(script, pause, version, tokens_at_abort=lambda tokens: rng.randrange(tokens + 1))
        before = [(list(episode.response_ids), list(episode.weight_versions)) for group in groups for episode in group]
        must_complete = int(version > 3)  # ends the loop: from the fourth call on, the first group completes
        min_complete = min(min_complete, len(groups))
        collection = make_collector(pool, chat_format, tools).collect_groups(
            groups, limits=LIMITS, seed=version, min_complete=min_complete, must_complete=must_complete
        )
        collected = asyncio.run(collection)
        assert sum(map(bool, collected)) >= min_complete
        assert all(collected[:must_complete])
        assert pool.open_groups == tools.running == []
        episodes = [episode for group in groups for episode in group]
        for episode, (ids, versions) in zip(episodes, before, strict=True):
            assert episode.response_ids[: len(ids)] == ids
            assert episode.weight_versions[: len(versions)] == versions
        complete_groups += [group for group in collected if group]
        groups = [group for group, result in zip(groups, collected, strict=True) if not result]

    assert sorted(group[0].problem.id for group in complete_groups) == [f"p{i}" for i in range(5)]
    for episode in (episode for group in complete_groups for episode in group):
        number = episode.problem.text[-1]
        assert [turn.text + END for turn in episode.turns] == scripted_turns(number)
        codes = [tool_call.arguments["code"] for turn in episode.turns for tool_call in turn.tool_calls]
        assert codes == [f"{number}00", f"{number}10", f"{number}11"]
        assert (episode.reward, episode.answer_blocks, episode.stop_reason) == (1.0, 1, StopReason.FINISHED)
        assert_loss_mask_marks_the_turns(episode)
        starts, versions = zip(*episode.weight_versions, strict=True)
        assert starts[0] == 0
        assert list(starts) == sorted(set(starts))
        assert starts[-1] < len(episode.response_ids)
        assert list(versions) == sorted(set(versions))
        assert sum(episode.sampled_tokens_by_version.values()) == episode.sampled_tokens
    expected_codes = [f"{number}{turn_and_call}" for number in range(5) for turn_and_call in ("00", "10", "11")]
    assert sorted(executed_codes) == sorted(2 * expected_codes)
