"""Tests of the collection of groups. A group is the episodes of one problem in one training step.

The order in which episodes end has no effect. A failure of the infrastructure is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
import time

import pytest

from examples.multiple_choice import ENVIRONMENT, MultipleChoiceEnvironment
from tests.trainer.fake_vllm import MarkovEngine
from tests.trainer.fakes import (
    END,
    FakeVerifier,
    ScriptedPool,
    ScriptedTools,
    answer_text,
    call_text,
    finished_call,
    qwen_tokenizer,
)
from tests.trainer.rollout.scripted_rollout import (
    CALL_THEN_ANSWER,
    LIMITS,
    PROBLEM,
    collect,
    make_collector,
    text_by_seed,
    token_ids,
    turns,
)
from trainer.config import SamplingConfig
from trainer.engines.engine import EngineError, Generation
from trainer.engines.pool import EnginePool
from trainer.environments.environment import Environment, InitialState
from trainer.environments.python_environment import PythonEnvironment
from trainer.episodes.episode import Problem, StopReason, ToolCallStatus
from trainer.scheduling.scheduler import Scheduler


def results(groups):
    """Return all that must not depend on timing."""
    return [
        [
            (
                episode.problem.id,
                episode.sample,
                tuple(episode.response_ids),
                episode.logprobs,
                episode.loss_mask,
                episode.stop_reason,
                episode.answer,
                episode.reward,
            )
            for episode in group
        ]
        for group in groups
    ]


@pytest.mark.asyncio
async def test_timing_does_not_change_episodes(chat_format):
    problems = [Problem(f"p{i}", f"What is {i} + 40?", "42") for i in range(4)]

    def random_pause(seed):
        rng = random.Random(seed)

        async def pause():
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(0)

        return pause

    async def results_of(pool, tools, problems, **options):
        return results(await collect(pool, chat_format, tools, problems, 6, **options))

    expected = await results_of(ScriptedPool(text_by_seed), ScriptedTools(), problems)
    different_responses = {response_ids for group in expected for _, _, response_ids, *_ in group}
    assert len(different_responses) > 12, "most of the 24 episodes must differ, or the test would show little"
    for seed in range(3):
        pool, tools = ScriptedPool(text_by_seed, random_pause(seed)), ScriptedTools(pause=random_pause(-seed))
        assert await results_of(pool, tools, problems) == expected
    for problem, group in zip(problems, expected, strict=True):
        assert await results_of(ScriptedPool(text_by_seed), ScriptedTools(), [problem]) == [group]
    assert await results_of(ScriptedPool(text_by_seed), ScriptedTools(), problems, seed=8) != expected


@pytest.mark.asyncio
async def test_groups_are_returned_scored_in_order_and_their_handles_are_closed(chat_format):
    pool, tools = ScriptedPool(text_by_seed), ScriptedTools()
    problems = [PROBLEM, Problem("p1", "What is 40 + 1?", "41")]
    groups = await collect(pool, chat_format, tools, problems, 8)
    assert [[(episode.problem.id, episode.sample) for episode in group] for group in groups] == [
        [(problem.id, sample) for sample in range(8)] for problem in problems
    ]
    for episode in (episode for group in groups for episode in group):
        assert episode.reward == float(episode.answer == episode.problem.answer)
    assert pool.open_groups == []


@pytest.mark.asyncio
async def test_a_group_is_scored_while_others_still_run(chat_format):
    is_fast_group_scored = asyncio.Event()

    async def pause():
        if pool.requests[-1][0] == chat_format.encode_prompt("slow"):
            await is_fast_group_scored.wait()

    class Verifier(FakeVerifier):
        async def verify(self, pairs):
            is_fast_group_scored.set()
            return await super().verify(pairs)

    pool = ScriptedPool(lambda context, sampling: answer_text("42") + END, pause)
    problems = [Problem("s", "slow", "42"), Problem("f", "fast", "42")]
    groups = await collect(pool, chat_format, ScriptedTools(verifier=Verifier()), problems, 2)
    assert [[episode.reward for episode in group] for group in groups] == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.asyncio
async def test_an_infrastructure_failure_is_never_a_reward_of_zero(chat_format):
    """The engine, the tool or the check of the answer fails, depending on the problem."""

    def script(context, sampling):
        if "engine" in context:
            raise EngineError("gone")
        if "tool" in context:
            return call_text("1") + END
        return answer_text("unavailable" if "check" in context else "7") + END

    tools = ScriptedTools(lambda code: finished_call(ToolCallStatus.UNAVAILABLE, "", code, error="down"))
    problems = [Problem(text, text, "42") for text in ("engine", "tool", "check", "wrong")]
    groups = await collect(ScriptedPool(script), chat_format, tools, problems, 2)
    rewards = {group[0].problem.id: [episode.reward for episode in group] for group in groups}
    assert rewards == {"engine": [None] * 2, "tool": [None] * 2, "check": [None] * 2, "wrong": [0.0] * 2}


@pytest.mark.asyncio
async def test_unavailable_episodes_do_not_shorten_the_expected_length(chat_format):
    """Only episodes that ended by themselves determine the expected length of later episodes."""
    call_ids, answer_ids = map(token_ids, CALL_THEN_ANSWER)
    recorded_lengths = []

    class CallingEngine(MarkovEngine):
        """Calls the tool until the context contains a response with the text `fine`."""

        async def generate(self, ids, sampling):
            sampled = tuple(answer_ids if "fine" in chat_format.decode(ids) else call_ids)
            return Generation(sampled, (-1.0,) * len(sampled), True, self.name, self.weight_version)

    async with EnginePool([CallingEngine()], scheduler=Scheduler(2000)) as pool:
        complete = pool.scheduler.complete

        def record_and_complete(key, now, length=None):
            recorded_lengths.append(length)
            complete(key, now, length)

        pool.scheduler.complete = record_and_complete
        unavailable = finished_call(ToolCallStatus.UNAVAILABLE, "", "1", error="down")
        ((lost,),) = await collect(pool, chat_format, ScriptedTools(lambda code: unavailable), [PROBLEM], 1)
        ((finished,),) = await collect(pool, chat_format, ScriptedTools(lambda code: "fine"), [PROBLEM], 1)
    assert (lost.stop_reason, finished.stop_reason) == (StopReason.UNAVAILABLE, StopReason.FINISHED)
    assert recorded_lengths == [None, len(finished.prompt_ids) + finished.response_length]


@pytest.mark.asyncio
async def test_episodes_have_no_reward_if_all_engines_are_down(chat_format):
    def script(context, sampling):
        raise EngineError("no engine is left")

    ((episode,),) = await collect(ScriptedPool(script), chat_format, ScriptedTools(), [PROBLEM], 1)
    assert (episode.stop_reason, episode.error) == (StopReason.UNAVAILABLE, "engine: no engine is left")
    assert episode.reward is None
    assert episode.response_ids == []


@pytest.mark.asyncio
async def test_cancelling_a_collection_cancels_all_turns_and_tool_calls(chat_format):
    all_calls_running = asyncio.Event()

    async def pause_forever():
        if len(tools.running) == 6:  # 3 episodes with 2 calls each
            all_calls_running.set()
        await asyncio.Event().wait()

    pool = ScriptedPool(lambda context, sampling: call_text("1") + call_text("2") + END)
    tools = ScriptedTools(pause=pause_forever)
    tasks_before = asyncio.all_tasks()
    collection = asyncio.create_task(collect(pool, chat_format, tools, [PROBLEM], 3))
    await all_calls_running.wait()
    assert len(asyncio.all_tasks()) > len(tasks_before) + 1
    collection.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collection
    assert asyncio.all_tasks() == tasks_before
    assert (tools.running, pool.open_groups) == ([], [])


@pytest.mark.asyncio
async def test_an_unexpected_exception_of_an_engine_is_raised(chat_format):
    def script(context, sampling):
        raise ZeroDivisionError

    pool = ScriptedPool(script)
    with pytest.raises(ZeroDivisionError):
        await collect(pool, chat_format, ScriptedTools(), [PROBLEM], 2)
    assert pool.open_groups == []


@pytest.mark.asyncio
async def test_a_prompt_that_is_too_long_costs_only_its_episodes_and_is_named_once(chat_format, caplog):
    answer_ids = tuple(token_ids(answer_text("42") + END))

    class ShortEngine(MarkovEngine):
        async def generate(self, ids, sampling):
            if len(ids) + sampling.max_tokens > self.max_model_len:
                raise ValueError(f"expected at most {self.max_model_len} tokens")
            return Generation(answer_ids, (-1.0,) * len(answer_ids), True, self.name, self.weight_version)

    long = Problem("long", "1 + " * 1000, "42")
    max_tokens = LIMITS.max_response_tokens + len(chat_format.encode_prompt(PROBLEM.text))
    async with EnginePool([ShortEngine(max_model_len=max_tokens)], scheduler=Scheduler(9000)) as pool:
        groups = await collect(pool, chat_format, ScriptedTools(), [PROBLEM, long], 3)
    error = f"engine: expected at most {max_tokens} tokens"
    assert [[(episode.reward, episode.stop_reason, episode.error) for episode in group] for group in groups] == [
        [(1.0, StopReason.FINISHED, "")] * 3,
        [(None, StopReason.UNAVAILABLE, error)] * 3,
    ]
    assert [record.getMessage() for record in caplog.records] == [f"problem long, sample 0, 1, 2: no reward: {error}"]


CHOICE = Problem("c0", "Which?\n\n(A) one\n(B) two", "B", "test", ENVIRONMENT)


class Failing(Environment):
    """An environment whose methods fail: those that the options of the problem name."""

    options_type = dict[str, str]

    async def reset(self, problem):
        self._fail("reset")
        return InitialState("Go.")

    async def step(self, action):
        self._fail("step")
        return finished_call(ToolCallStatus.OK, "done")

    async def score(self, episode):
        self._fail("score")
        return 1.0

    async def close(self):
        self._fail("close")

    def _fail(self, method):
        if method in self.options:
            raise ZeroDivisionError(method)


class OwnRule(PythonEnvironment):
    async def score(self, episode):
        return 0.5


def problem_of(kind, *failing):
    return Problem("p0", "Go.", "42", "test", f"{__name__}:{kind.__name__}", {name: "" for name in failing})


@pytest.mark.asyncio
async def test_a_multiple_choice_problem_asks_for_a_letter_and_scores_the_letter(chat_format):
    tools, answers = ScriptedTools(), ("B)", "two", "(b)", "A")
    pool = ScriptedPool(turns(*(answer_text(answer) + END for answer in answers)))
    ((*episodes,),) = await collect(pool, chat_format, tools, [CHOICE], 4)
    assert [episode.reward for episode in episodes] == [1.0, 0.0, 1.0, 0.0]
    assert MultipleChoiceEnvironment.instructions in chat_format.decode(episodes[0].prompt_ids)
    assert tools.verifier.requests == [], "math-verify is not asked"


@pytest.mark.asyncio
async def test_a_subclass_of_the_python_environment_has_its_own_rule(chat_format):
    pool = ScriptedPool(turns(answer_text("42") + END))
    ((episode,),) = await collect(pool, chat_format, ScriptedTools(), [problem_of(OwnRule)], 1)
    assert episode.reward == 0.5


@pytest.mark.parametrize(
    ("method", "stop_reason", "error", "reward"),
    [
        ("reset", StopReason.UNAVAILABLE, "environment: ZeroDivisionError: reset", None),
        ("step", StopReason.UNAVAILABLE, "environment: ZeroDivisionError: step", None),
        ("score", StopReason.FINISHED, "environment: ZeroDivisionError: score", None),
        ("close", StopReason.FINISHED, "", 1.0),
    ],
)
@pytest.mark.asyncio
async def test_an_environment_that_fails_gives_no_reward_of_0(chat_format, method, stop_reason, error, reward):
    pool = ScriptedPool(turns(*CALL_THEN_ANSWER))
    ((episode,),) = await collect(pool, chat_format, ScriptedTools(), [problem_of(Failing, method)], 1)
    assert (episode.stop_reason, episode.error, episode.reward) == (stop_reason, error, reward)
    assert pool.open_groups == []


class ScoresNan(Environment):
    """The scores of the samples 0, 1 and 2 are NaN, infinity and 1."""

    async def reset(self, problem):
        return InitialState("Go.")

    async def step(self, action):
        raise NotImplementedError

    async def score(self, episode):
        return (math.nan, math.inf, 1.0)[episode.sample]


@pytest.mark.asyncio
async def test_a_score_that_is_not_finite_is_a_failure_of_the_environment_by_name(chat_format):
    pool = ScriptedPool(turns(END, END, END))
    (episodes,) = await collect(pool, chat_format, ScriptedTools(), [problem_of(ScoresNan)], 3)
    assert [episode.reward for episode in episodes] == [None, None, 1.0]
    name = problem_of(ScoresNan).environment
    assert [episode.error for episode in episodes] == [
        f"environment: {name}: expected a finite score or None, got {score}" for score in ("nan", "inf")
    ] + [""]


@pytest.mark.asyncio
async def test_the_cpu_time_of_a_call_is_measured(chat_format):
    collector = make_collector(ScriptedPool(turns(*CALL_THEN_ANSWER)), chat_format, ScriptedTools())
    ((episode,),) = await collector.collect([PROBLEM], 1, limits=LIMITS, seed=0)
    assert (episode.reward, collector.overhead_cpu_s > 0) == (1.0, True)


@pytest.mark.asyncio
async def test_overhead_is_the_time_without_generation_and_tool_calls(chat_format):
    """The scripted engine sleeps outside the busy timer; the tool sleeps inside it."""

    async def pause():
        await asyncio.sleep(0.03)

    pool = ScriptedPool(turns(*CALL_THEN_ANSWER * 2), pause)
    collector = make_collector(pool, chat_format, ScriptedTools(pause=pause))
    for _ in range(2):  # the second call must not include the times of the first
        busy_before, started_at = pool.busy_timer.seconds, time.perf_counter()
        await collector.collect([PROBLEM], 1, limits=LIMITS, seed=0)
        busy_s, wall_s = pool.busy_timer.seconds - busy_before, time.perf_counter() - started_at
        assert busy_s > 0.02  # one tool call of 0.03 s
        assert 0.05 < collector.overhead_s <= wall_s - busy_s  # two turns of 0.03 s


@pytest.mark.asyncio
async def test_an_engines_logprobs_of_an_episode_equal_the_trainers(chat_format):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from trainer.engines.local import LocalEngine

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    config = transformers.Qwen3Config(vocab_size=len(qwen_tokenizer()), tie_word_embeddings=True, **sizes, **heads)
    model = transformers.Qwen3ForCausalLM(config)
    call_ids, response = token_ids(call_text("1") + END), "it printed 1"

    class CallingEngine(LocalEngine):
        """Calls the tool in the first turn, since a random model would not. Samples the second turn."""

        async def generate(self, ids, sampling):
            if response in chat_format.decode(ids):
                return await super().generate(ids, sampling)
            logprobs = await self.logprobs([*ids, *call_ids])
            return Generation(tuple(call_ids), tuple(logprobs[-len(call_ids) :]), True, self.name, self.weight_version)

    second_turn_tokens = 12
    response_tokens = len(call_ids) + len(chat_format.encode_tool_responses([response])) + second_turn_tokens
    engine = CallingEngine(copy.deepcopy(model), max_num_seqs=4, max_model_len=400)
    async with EnginePool([engine], scheduler=Scheduler(400)) as pool:
        problems = [PROBLEM, Problem("p1", "What is it?", "1")]
        limits = SamplingConfig(response_tokens, max_turns=9)
        groups = await collect(pool, chat_format, ScriptedTools(lambda code: response), problems, 2, limits)
    episodes = [episode for group in groups for episode in group]
    for episode in episodes:
        assert (episode.num_turns, episode.num_tool_calls, episode.reward) == (2, 1, 0.0)
        ids, length = torch.tensor([*episode.prompt_ids, *episode.response_ids]), episode.response_length
        with torch.no_grad():
            logprobs_TV = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        expected_T = logprobs_TV.gather(-1, ids[1:, None])[-length:, 0] * torch.tensor(episode.loss_mask)
        assert episode.logprobs == pytest.approx(expected_T.tolist(), abs=1e-3)
        assert all(logprob == 0.0 for logprob, bit in zip(episode.logprobs, episode.loss_mask, strict=True) if not bit)
    assert len({tuple(episode.response_ids) for episode in episodes}) > 1
