"""Tests of the contract that every engine keeps, and of the errors of `VllmEngine` for invalid answers.

The tests of the contract run on a fake vLLM, on `LocalEngine`, and on a real vLLM if RSTAR_VLLM_PYTHON names an
interpreter that has it.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio
from aiohttp import web

from tests.trainer.fake_vllm import BLOCK_SIZE, FakeVllm, MarkovEngine
from trainer.engines.engine import EngineCapacity, EngineError, SamplingParams
from trainer.engines.vllm_client import VllmEngine
from trainer.scheduling.scheduler import EngineStats

KINDS = ["fake", "local", "vllm"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def engine(request, tmp_path_factory):
    async with AsyncExitStack() as stack:
        match request.param:
            case "fake":
                url = await stack.enter_async_context(FakeVllm(MarkovEngine()).serve())
                engine = VllmEngine(url, vocab_size=50, max_model_len=256)
            case "local":
                pytest.importorskip("torch")
                pytest.importorskip("transformers")
                from tests.trainer.engines.qwen_model import make_model
                from trainer.engines.local import LocalEngine

                engine = LocalEngine(make_model(), max_num_seqs=8, max_model_len=256)
            case "vllm":
                pytest.importorskip("torch")
                from tests.trainer.real_vllm import real_vllm_engine

                engine = await stack.enter_async_context(real_vllm_engine(tmp_path_factory.mktemp("vllm")))
        stack.push_async_callback(engine.close)
        yield engine


shares_engine = pytest.mark.asyncio(loop_scope="module")
"""Marks the tests of the contract. They use the engines in one event loop, because an engine belongs to its loop."""
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@shares_engine
async def test_a_generation_has_max_tokens_ids_and_a_logprob_for_each(engine):
    generation = await engine.generate(PROMPT, SamplingParams(20, seed=1))
    assert (len(generation.ids), len(generation.logprobs), generation.has_stop_token) == (20, 20, False)
    assert all(-100 < logprob <= 1e-3 for logprob in generation.logprobs)
    assert (generation.engine, generation.weight_version) == (engine.name, engine.weight_version)


@shares_engine
async def test_the_seed_determines_the_samples(engine):
    first, again, other = await asyncio.gather(
        *(
            engine.generate(PROMPT, SamplingParams(20, seed=seed)) for seed in (1, 1, 2**63 - 2)
        )  # the last one has 63 bits
    )
    assert first.ids == again.ids != other.ids


@shares_engine
async def test_a_stop_id_ends_the_generation_and_is_its_last_id(engine):
    whole = await engine.generate(PROMPT, SamplingParams(12, seed=6))
    stop_id, unused_id = whole.ids[3], 49
    stopped = await engine.generate(PROMPT, SamplingParams(12, seed=6, stop_ids=(stop_id, unused_id)))
    assert stopped.has_stop_token
    assert stopped.ids == whole.ids[: whole.ids.index(stop_id) + 1]
    stopped_at_limit = await engine.generate(PROMPT, SamplingParams(len(stopped.ids), seed=6, stop_ids=(stop_id,)))
    assert stopped_at_limit.has_stop_token


@shares_engine
async def test_sampled_logprobs_equal_the_scored_ones(engine):
    generation = await engine.generate(PROMPT, SamplingParams(20, seed=5))
    scores = await engine.logprobs([*PROMPT, *generation.ids])
    assert len(scores) == len(PROMPT) + 19
    assert scores[len(PROMPT) - 1 :] == pytest.approx(generation.logprobs, abs=1e-3)


@shares_engine
@pytest.mark.parametrize(("ids", "max_tokens"), [([], 4), ([1] * 250, 20), ([1], 0), ([100_000], 4)])
async def test_a_request_that_no_engine_could_serve_is_a_value_error(engine, ids, max_tokens):
    with pytest.raises(ValueError, match=r"expected|rejected"):
        await engine.generate(ids, SamplingParams(max_tokens, seed=0))


@shares_engine
async def test_an_engine_works_after_a_cancelled_request(engine):
    tasks = [asyncio.create_task(engine.generate(PROMPT, SamplingParams(200, seed=seed))) for seed in range(4)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert len((await engine.generate(PROMPT, SamplingParams(4, seed=0))).ids) == 4


@shares_engine
async def test_many_concurrent_requests_are_all_answered(engine):
    rng = random.Random(0)
    prompts = [[rng.randrange(50) for _ in range(rng.randint(1, 30))] for _ in range(20)]
    generations = await asyncio.gather(*(engine.generate(ids, SamplingParams(8, seed=7)) for ids in prompts))
    assert [len(generation.ids) for generation in generations] == [8] * 20


@asynccontextmanager
async def client_of(server, **options):
    async with server.serve() as url:
        engine = VllmEngine(url, vocab_size=50, max_model_len=256, **options)
        try:
            yield engine
        finally:
            await engine.close()


def change_choice(**changes):
    """Return a `change_answer` that replaces fields of a completion's only choice."""

    def change_answer(route, answer):
        answer["choices"][0] |= changes
        return answer

    return change_answer


INVALID_ANSWERS = {
    "no ids": change_choice(token_ids=None),
    "no log-probabilities": change_choice(logprobs=None),
    "too few log-probabilities": change_choice(logprobs={"token_logprobs": [-1.0] * 3}),
    "log-probabilities that are text": change_choice(logprobs={"token_logprobs": ["-1"] * 4}),
    "log-probabilities above 0": change_choice(logprobs={"token_logprobs": [0.5] * 4}),
    "an id outside the vocabulary": change_choice(token_ids=[1, 2, 3, 50]),
    "ids that are text": change_choice(token_ids=["1", "2", "3", "4"]),
    "fewer ids than requested without a stop": change_choice(token_ids=[1], logprobs={"token_logprobs": [-1.0]}),
    "more ids than requested": change_choice(token_ids=[1] * 5, logprobs={"token_logprobs": [-1.0] * 5}),
    "an abort": change_choice(finish_reason="abort"),
    "a stop without a stop id": change_choice(finish_reason="stop"),
    "no choices": lambda route, answer: {"choices": []},
    "a list instead of an object": lambda route, answer: [1],
}


@pytest.mark.asyncio
@pytest.mark.parametrize("change_answer", INVALID_ANSWERS.values(), ids=INVALID_ANSWERS.keys())
async def test_an_invalid_answer_is_an_engine_error(change_answer):
    async with client_of(FakeVllm(MarkovEngine(), change_answer)) as engine:
        with pytest.raises(EngineError, match=r"engine http://127.0.0.1:\d+: expected .*, got "):
            await engine.generate([1], SamplingParams(4, seed=0))


def fail_to_encode(error):
    """Return a `change_answer` of a server that cannot write an answer with log-probabilities."""

    def change_answer(route, answer):
        if answer["choices"][0]["logprobs"]:
            raise error(text="ValueError: Out of range float values are not JSON compliant: nan")
        return answer

    return change_answer


ONE_NAN, ALL_NAN = [False, True, False, False], [True] * 4
NON_FINITE_ANSWERS = {
    "NaN": (change_choice(logprobs={"token_logprobs": [-1.0, math.nan, -1.0, -1.0]}), ONE_NAN),
    "minus infinity": (change_choice(logprobs={"token_logprobs": [-1.0, -math.inf, -1.0, -1.0]}), ONE_NAN),
    "null": (change_choice(logprobs={"token_logprobs": [-1.0, None, -1.0, -1.0]}), ONE_NAN),
    "NaN of all": (change_choice(logprobs={"token_logprobs": [math.nan] * 4}), ALL_NAN),
    "status 500, since NaN has no JSON": (fail_to_encode(web.HTTPInternalServerError), ALL_NAN),
    "status 400, since NaN has no JSON": (fail_to_encode(web.HTTPBadRequest), ALL_NAN),
}


@pytest.mark.asyncio
@pytest.mark.parametrize(("change_answer", "is_nan"), NON_FINITE_ANSWERS.values(), ids=NON_FINITE_ANSWERS.keys())
async def test_a_logprob_that_is_not_finite_is_nan_and_costs_no_token(change_answer, is_nan):
    async with client_of(FakeVllm(MarkovEngine())) as engine:
        expected = await engine.generate([1], SamplingParams(4, seed=0))
    async with client_of(FakeVllm(MarkovEngine(), change_answer)) as engine:
        generation = await engine.generate([1], SamplingParams(4, seed=0))
    assert generation.ids == expected.ids
    assert [math.isnan(logprob) for logprob in generation.logprobs] == is_nan


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "change_answer",
    [change_choice(logprobs={"token_logprobs": [math.nan] * 4}, token_ids=None), change_choice(token_ids=[None])],
)
async def test_a_logprob_that_is_not_finite_with_another_fault_is_an_engine_error(change_answer):
    async with client_of(FakeVllm(MarkovEngine(), change_answer)) as engine:
        with pytest.raises(EngineError):
            await engine.generate([1], SamplingParams(4, seed=0))


@pytest.mark.asyncio
async def test_prompt_logprobs_of_another_sequence_are_an_engine_error():
    async with client_of(
        FakeVllm(MarkovEngine(), change_choice(prompt_logprobs=[None, {"7": {"logprob": -1.0}}]))
    ) as engine:
        with pytest.raises(EngineError, match="prompt_logprobs of 2 ids"):
            await engine.logprobs([1, 2])


@pytest.mark.asyncio
async def test_a_server_that_fails_or_has_ended_is_an_engine_error():
    def fail(route, answer):
        raise web.HTTPInternalServerError(text="EngineDeadError")

    async with client_of(FakeVllm(MarkovEngine(), fail)) as engine:
        with pytest.raises(EngineError, match="EngineDeadError"):
            await engine.generate([1], SamplingParams(4, seed=0))
    client_of_ended_server = VllmEngine(engine.url, vocab_size=50, max_model_len=256)
    with pytest.raises(EngineError, match="expected an answer of /v1/completions"):
        await client_of_ended_server.generate([1], SamplingParams(4, seed=0))
    await client_of_ended_server.close()


@pytest.mark.asyncio
async def test_a_server_that_hangs_is_an_engine_error():
    async with client_of(FakeVllm(MarkovEngine(before_scrape=asyncio.Event().wait)), timeout_s=0.3) as engine:
        for request in (engine.logprobs([1, 2]), engine.stats(), engine.capacity()):
            with pytest.raises(EngineError, match="got TimeoutError"):
                await request


@pytest.mark.asyncio
async def test_capacity_and_stats_are_read_from_the_metrics():
    table_engine = MarkovEngine(reported_capacity=EngineCapacity(4096, 7), preemptions=3, computed_tokens=99)
    async with client_of(FakeVllm(table_engine), max_num_seqs=7) as engine:
        assert await engine.capacity() == EngineCapacity(4096, 7, BLOCK_SIZE)
        assert await engine.stats() == EngineStats(3, computed_tokens=99 + 1)  # the fake reports one prompt token
    async with client_of(FakeVllm(MarkovEngine(), lambda route, answer: "nothing")) as engine:
        with pytest.raises(EngineError, match="start it without --disable-log-stats"):
            await engine.capacity()


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["NaN", "+Inf", "many"])
async def test_metrics_that_are_not_numbers_are_an_engine_error(value):
    change_answer = lambda route, answer: re.sub(r"(?m)^(vllm:num_preemptions_total.*) .*$", rf"\1 {value}", answer)  # noqa: E731
    async with client_of(FakeVllm(MarkovEngine(), change_answer)) as engine:
        with pytest.raises(EngineError, match="vllm:num_preemptions as a number in /metrics, got"):
            await engine.stats()


@pytest.mark.asyncio
async def test_a_refused_connection_resets_the_weight_version(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    async with FakeVllm(MarkovEngine()).serve() as url:
        engine = VllmEngine(url, vocab_size=50, max_model_len=256)
        await engine.load_weights(tmp_path, 4)
        await engine.stats()
        assert engine.weight_version == 4
    with pytest.raises(EngineError):
        await engine.stats()
    assert engine.weight_version == 0
    await engine.close()


@pytest.mark.asyncio
async def test_cancelling_a_request_drops_it_in_the_server():
    fake_server = FakeVllm(MarkovEngine(before_generate=asyncio.Event().wait))
    async with client_of(fake_server) as engine:
        task = asyncio.create_task(engine.generate([1], SamplingParams(4, seed=0)))
        async with fake_server.counts_changed:
            await fake_server.counts_changed.wait_for(lambda: fake_server.num_running == 1)
            task.cancel()
            await fake_server.counts_changed.wait_for(
                lambda: (fake_server.num_running, fake_server.num_dropped) == (0, 1)
            )
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.asyncio
async def test_loading_weights_reloads_the_model_and_empties_the_prefix_cache(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    fake_server = FakeVllm(MarkovEngine())
    async with client_of(fake_server) as engine:
        before = await engine.logprobs([1, 2, 3])
        await engine.load_weights(tmp_path, 4)
        assert await engine.logprobs([1, 2, 3]) != before
        assert (await engine.generate([1], SamplingParams(2, seed=0))).weight_version == 4
    assert [route for route, _ in fake_server.requests][1:3] == ["/collective_rpc", "/reset_prefix_cache"]
    assert [body["cache_salt"] for _, body in fake_server.requests if "prompt" in body][-2:] == ["version 4"] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("reset_answer", [{"success": False}, {}, [True], "yes"])
async def test_a_prefix_cache_that_is_not_emptied_is_an_engine_error(tmp_path, reset_answer):
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    change_answer = lambda route, answer: reset_answer if route == "/reset_prefix_cache" else answer  # noqa: E731
    async with client_of(FakeVllm(MarkovEngine(), change_answer)) as engine:
        with pytest.raises(EngineError, match="an empty prefix cache"):
            await engine.load_weights(tmp_path, 4)
        assert engine.weight_version == 0


@pytest.mark.asyncio
async def test_the_models_generation_config_has_no_effect():
    fake_server = FakeVllm(MarkovEngine())
    async with client_of(fake_server) as engine:
        await engine.generate([1], SamplingParams(4, temperature=0.7, top_p=0.9, stop_ids=(8,), seed=3))
    ((_, body),) = fake_server.requests
    fixed = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "return_token_ids": True}
    fixed |= {"cache_salt": "version 0"}
    requested = {"max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "seed": 3, "stop_token_ids": [8], "logprobs": 0}
    assert body == {"prompt": [1], **fixed, **requested}
