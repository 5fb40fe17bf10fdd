"""What every engine keeps, fake, in this process or real, and what `VllmEngine` makes of answers that are wrong.

The real one runs where RSTAR_VLLM_PYTHON names a Python that has vLLM.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio
from aiohttp import web

from tests.trainer.fake_vllm import FakeVllm, TableEngine
from trainer.engines.engine import EngineCapacity, EngineError, NonFiniteLogprobError, SamplingParams
from trainer.engines.vllm_client import VllmEngine
from trainer.scheduling.scheduler import EngineStats

VLLM = os.environ.get("RSTAR_VLLM_PYTHON", "")
KINDS = ["fake", "local", "vllm"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def engine(request, tmp_path_factory):
    async with AsyncExitStack() as stack:
        match request.param:
            case "fake":
                url = await stack.enter_async_context(FakeVllm(TableEngine()).serve())
                opened = VllmEngine(url, vocab_size=50, max_model_len=256)
            case "local":
                pytest.importorskip("torch")
                pytest.importorskip("transformers")
                from tests.trainer.engines.test_local import model
                from trainer.engines.local import LocalEngine

                opened = LocalEngine(model(), max_num_seqs=8, max_model_len=256)
            case "vllm":
                if not VLLM:
                    pytest.skip("RSTAR_VLLM_PYTHON names no Python that has vLLM")
                pytest.importorskip("torch")
                from tests.trainer.real_vllm import real

                opened = await stack.enter_async_context(real(VLLM, tmp_path_factory.mktemp("vllm")))
        stack.push_async_callback(opened.close)
        yield opened


contract = pytest.mark.asyncio(loop_scope="module")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@contract
async def test_a_generation_has_max_tokens_ids_and_a_logprob_for_each(engine):
    generation = await engine.generate(PROMPT, SamplingParams(20, seed=1))
    assert (len(generation.ids), len(generation.logprobs), generation.has_stop_token) == (20, 20, False)
    assert all(-100 < logprob <= 1e-3 for logprob in generation.logprobs)
    assert (generation.engine, generation.weight_version) == (engine.name, engine.weight_version)


@contract
async def test_the_seed_determines_the_samples(engine):
    first, again, other = await asyncio.gather(
        *(engine.generate(PROMPT, SamplingParams(20, seed=seed)) for seed in (1, 1, 2**63 - 2))
    )
    assert first.ids == again.ids != other.ids


@contract
async def test_a_stop_id_ends_the_generation_and_is_its_last_id(engine):
    free = await engine.generate(PROMPT, SamplingParams(12, seed=6))
    stop = free.ids[3]
    generation = await engine.generate(PROMPT, SamplingParams(12, seed=6, stop_ids=(stop, 49)))
    assert generation.has_stop_token
    assert generation.ids == free.ids[: free.ids.index(stop) + 1]
    at_the_limit = await engine.generate(PROMPT, SamplingParams(len(generation.ids), seed=6, stop_ids=(stop,)))
    assert at_the_limit.has_stop_token


@contract
async def test_sampled_logprobs_equal_the_scored_ones(engine):
    generation = await engine.generate(PROMPT, SamplingParams(20, seed=5))
    scores = await engine.logprobs([*PROMPT, *generation.ids])
    assert len(scores) == len(PROMPT) + 19
    assert scores[len(PROMPT) - 1 :] == pytest.approx(generation.logprobs, abs=1e-3)


@contract
@pytest.mark.parametrize(("ids", "tokens"), [([], 4), ([1] * 250, 20), ([1], 0), ([100_000], 4)])
async def test_a_request_that_no_engine_could_serve_is_a_value_error(engine, ids, tokens):
    with pytest.raises(ValueError, match=r"expected|refused"):
        await engine.generate(ids, SamplingParams(tokens, seed=0))


@contract
async def test_an_engine_works_after_a_cancelled_request(engine):
    tasks = [asyncio.create_task(engine.generate(PROMPT, SamplingParams(200, seed=seed))) for seed in range(4)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))
    assert len((await engine.generate(PROMPT, SamplingParams(4, seed=0))).ids) == 4


@contract
async def test_an_aborted_generation_is_marked_and_can_be_continued(engine):
    ids, logprobs, names = list(PROMPT), [], iter("abcde")
    while left := len(PROMPT) + 200 - len(ids):
        name = next(names)
        asked = asyncio.create_task(engine.generate(ids, SamplingParams(left, seed=1, request_id=name)))
        await asyncio.sleep(0)
        if name != "e":
            await engine.abort([name, "somebody else's"])
        generation = await asked
        assert generation.is_aborted == (len(generation.ids) < left) and not generation.has_stop_token
        ids, logprobs = [*ids, *generation.ids], [*logprobs, *generation.logprobs]
    assert (await engine.logprobs(ids))[len(PROMPT) - 1 :] == pytest.approx(logprobs, abs=1e-3)


@contract
async def test_many_concurrent_requests_are_all_answered(engine):
    draw = random.Random(0)
    prompts = [[draw.randrange(50) for _ in range(draw.randint(1, 30))] for _ in range(20)]
    generation = await asyncio.gather(*(engine.generate(ids, SamplingParams(8, seed=7)) for ids in prompts))
    assert [len(each.ids) for each in generation] == [8] * 20


@asynccontextmanager
async def vllm(fake, **options):
    async with fake.serve() as url:
        engine = VllmEngine(url, vocab_size=50, max_model_len=256, **options)
        try:
            yield engine
        finally:
            await engine.close()


def choice_with(**changes):
    def twist(route, answer):
        answer["choices"][0] |= changes
        return answer

    return twist


WRONG = {
    "no ids": choice_with(token_ids=None),
    "no log-probabilities": choice_with(logprobs=None),
    "too few log-probabilities": choice_with(logprobs={"token_logprobs": [-1.0] * 3}),
    "log-probabilities that are no numbers": choice_with(logprobs={"token_logprobs": [None] * 4}),
    "log-probabilities above 0": choice_with(logprobs={"token_logprobs": [0.5] * 4}),
    "a log-probability of NaN": choice_with(logprobs={"token_logprobs": [math.nan] * 4}),
    "ids out of the vocabulary": choice_with(token_ids=[1, 2, 3, 50]),
    "ids that are text": choice_with(token_ids=["1", "2", "3", "4"]),
    "fewer ids than asked without a stop": choice_with(token_ids=[1], logprobs={"token_logprobs": [-1.0]}),
    "more ids than asked": choice_with(token_ids=[1] * 5, logprobs={"token_logprobs": [-1.0] * 5}),
    "an abort": choice_with(finish_reason="abort"),
    "a stop at no stop id": choice_with(finish_reason="stop"),
    "no choice": lambda route, answer: {"choices": []},
    "no object": lambda route, answer: [1],
}


@pytest.mark.asyncio
@pytest.mark.parametrize("twist", WRONG.values(), ids=WRONG.keys())
async def test_an_invalid_answer_is_an_engine_error(twist):
    async with vllm(FakeVllm(TableEngine(), twist)) as engine:
        with pytest.raises(EngineError, match=r"engine http://127.0.0.1:\d+: expected .*, got "):
            await engine.generate([1], SamplingParams(4, seed=0))


def unencodable(route, answer):
    raise web.HTTPInternalServerError(text="ValueError: Out of range float values are not JSON compliant: nan")


def refused(route, answer):
    raise web.HTTPBadRequest(text='{"error": {"message": "Out of range float values are not JSON compliant"}}')


NO_NUMBERS = {
    "NaN": choice_with(logprobs={"token_logprobs": [-1.0, math.nan, -1.0, -1.0]}),
    "minus infinity": choice_with(logprobs={"token_logprobs": [-1.0, -math.inf, -1.0, -1.0]}),
    "null": choice_with(logprobs={"token_logprobs": [-1.0, None, -1.0, -1.0]}),
    "an answer that cannot be written": unencodable,
    "a refusal to write it": refused,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("twist", NO_NUMBERS.values(), ids=NO_NUMBERS.keys())
async def test_a_non_finite_logprob_is_a_non_finite_logprob_error(twist):
    async with vllm(FakeVllm(TableEngine(), twist)) as engine:
        with pytest.raises(NonFiniteLogprobError, match="finite log-probabilities"):
            await engine.generate([1], SamplingParams(4, seed=0))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "twist", [choice_with(logprobs={"token_logprobs": [math.nan] * 4}, token_ids=None), choice_with(token_ids=[None])]
)
async def test_a_non_finite_logprob_with_another_fault_is_an_engine_error(twist):
    async with vllm(FakeVllm(TableEngine(), twist)) as engine:
        with pytest.raises(EngineError) as raised:
            await engine.generate([1], SamplingParams(4, seed=0))
        assert not isinstance(raised.value, NonFiniteLogprobError)


@pytest.mark.asyncio
async def test_scores_of_another_sequence_are_an_engine_error():
    async with vllm(FakeVllm(TableEngine(), choice_with(prompt_logprobs=[None, {"7": {"logprob": -1.0}}]))) as engine:
        with pytest.raises(EngineError, match="prompt_logprobs of 2 ids"):
            await engine.logprobs([1, 2])


@pytest.mark.asyncio
async def test_a_server_that_fails_or_has_ended_is_an_engine_error():
    def broken(route, answer):
        raise web.HTTPInternalServerError(text="EngineDeadError")

    async with vllm(FakeVllm(TableEngine(), broken)) as engine:
        with pytest.raises(EngineError, match="EngineDeadError"):
            await engine.generate([1], SamplingParams(4, seed=0))
    gone = VllmEngine(engine.url, vocab_size=50, max_model_len=256)
    with pytest.raises(EngineError, match="expected an answer of /v1/completions"):
        await gone.generate([1], SamplingParams(4, seed=0))
    await gone.close()


@pytest.mark.asyncio
async def test_a_server_that_hangs_is_an_engine_error():
    async with vllm(FakeVllm(TableEngine(scraped=asyncio.Event().wait)), timeout_s=0.3) as engine:
        for ask in (engine.logprobs([1, 2]), engine.stats(), engine.capacity()):
            with pytest.raises(EngineError, match="got TimeoutError"):
                await ask


@pytest.mark.asyncio
async def test_capacity_and_stats_are_read_from_the_metrics():
    fake = FakeVllm(TableEngine(room=EngineCapacity(4096, 7), preemptions=3, computed=99))
    async with vllm(fake, max_num_seqs=7) as engine:
        assert await engine.capacity() == EngineCapacity(4096, 7, 16)
        assert await engine.stats() == EngineStats(3, computed_tokens=100)
    async with vllm(FakeVllm(TableEngine(), lambda route, answer: "nothing")) as engine:
        with pytest.raises(EngineError, match="start it without --disable-log-stats"):
            await engine.capacity()


@pytest.mark.asyncio
@pytest.mark.parametrize("value", ["NaN", "+Inf", "many"])
async def test_metrics_that_are_not_numbers_are_an_engine_error(value):
    twist = lambda route, answer: re.sub(r"(?m)^(vllm:num_preemptions_total.*) .*$", rf"\1 {value}", answer)  # noqa: E731
    async with vllm(FakeVllm(TableEngine(), twist)) as engine:
        with pytest.raises(EngineError, match="vllm:num_preemptions as a number in /metrics, got"):
            await engine.stats()


@pytest.mark.asyncio
async def test_a_refused_connection_resets_the_weight_version(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    async with FakeVllm(TableEngine()).serve() as url:
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
    fake = FakeVllm(TableEngine(before=asyncio.Event().wait))
    async with vllm(fake) as engine:
        task = asyncio.create_task(engine.generate([1], SamplingParams(4, seed=0)))
        async with fake.changed:
            await fake.changed.wait_for(lambda: fake.running == 1)
            task.cancel()
            await fake.changed.wait_for(lambda: (fake.running, fake.dropped) == (0, 1))
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.asyncio
async def test_loading_weights_reloads_the_model_and_empties_the_prefix_cache(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    fake = FakeVllm(TableEngine())
    async with vllm(fake) as engine:
        before = await engine.logprobs([1, 2, 3])
        await engine.load_weights(tmp_path, 4)
        assert await engine.logprobs([1, 2, 3]) != before
        assert (await engine.generate([1], SamplingParams(2, seed=0))).weight_version == 4
    assert [route for route, _ in fake.requests][1:3] == ["/collective_rpc", "/reset_prefix_cache"]


@pytest.mark.asyncio
@pytest.mark.parametrize("reset_answer", [{"success": False}, {}, [True], "yes"])
async def test_a_prefix_cache_that_is_not_emptied_is_an_engine_error(tmp_path, reset_answer):
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    twist = lambda route, answer: reset_answer if route == "/reset_prefix_cache" else answer  # noqa: E731
    async with vllm(FakeVllm(TableEngine(), twist)) as engine:
        with pytest.raises(EngineError, match="an empty prefix cache"):
            await engine.load_weights(tmp_path, 4)
        assert engine.weight_version == 0


@pytest.mark.asyncio
async def test_the_models_generation_config_has_no_effect():
    fake = FakeVllm(TableEngine())
    async with vllm(fake) as engine:
        await engine.generate([1], SamplingParams(4, temperature=0.7, top_p=0.9, stop_ids=(8,), seed=3))
    ((_, body),) = fake.requests
    fixed = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "return_token_ids": True}
    answer = {"max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "seed": 3, "stop_token_ids": [8], "logprobs": 0}
    assert body == {"prompt": [1], **fixed, **answer}


@pytest.mark.asyncio
async def test_an_abort_is_sent_again_until_the_server_knows_the_request():
    class Late(TableEngine):
        """Has the requests only when it is asked for the third time."""

        async def abort(self, requests):
            nonlocal times
            times += 1
            if times == 3:
                await super().abort(requests)

    times, table = 0, Late()
    table.before = table.until_aborted
    async with vllm(FakeVllm(table)) as engine:
        mine = asyncio.create_task(engine.generate(PROMPT, SamplingParams(20, seed=1, request_id="mine")))
        other = asyncio.create_task(engine.generate(PROMPT, SamplingParams(20, seed=1, request_id="other")))
        await table.begun.acquire()
        await table.begun.acquire()
        await engine.abort(["mine"])
        generation, whole = await mine, await other
    assert (generation.is_aborted, whole.is_aborted) == (True, False)
    assert generation.ids == whole.ids[: table.reached]
    assert times == 3


@pytest.mark.asyncio
async def test_a_request_that_waits_for_a_connection_is_aborted_in_the_client(monkeypatch):
    monkeypatch.setattr("trainer.engines.vllm_client.MAX_CONNECTIONS", 1)
    table = TableEngine()
    table.before = table.until_aborted
    async with vllm(FakeVllm(table)) as engine:
        tasks = [
            asyncio.create_task(engine.generate(PROMPT, SamplingParams(9, seed=1, request_id=name))) for name in "ab"
        ]
        await table.begun.acquire()
        await engine.abort("ab")
        first, second = await asyncio.gather(*tasks)
    assert (len(first.ids), second.ids, second.is_aborted, len(table.requests)) == (table.reached, (), True, 1)
