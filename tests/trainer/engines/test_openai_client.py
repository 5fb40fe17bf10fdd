"""Tests of `OpenAIEngine`: what it sends, how it reads answers, and its errors for invalid answers."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from aiohttp import web

pytest.importorskip("transformers")

from tests.trainer.fake_openai import API_KEY, FakeOpenAI
from tests.trainer.fakes import END, qwen_tokenizer, scripted_logprob
from trainer.config import EnginesConfig
from trainer.engines import openai_client
from trainer.engines.engine import EngineCapacity, EngineError, SamplingParams, TurnError
from trainer.engines.openai_answer import retry_after_s
from trainer.engines.openai_client import OpenAIEngine
from trainer.engines.pool import EnginePool
from trainer.scheduling.scheduler import Scheduler

pytestmark = pytest.mark.asyncio

TOKENIZER = qwen_tokenizer()
TEXT = "<reason>Python prints 42.</reason>"


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


(END_ID,) = encode(END)
(OTHER_END_ID,) = encode("<|endoftext|>")
PROMPT = encode("<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n")
SAMPLING = SamplingParams(64, stop_ids=(END_ID, OTHER_END_ID), seed=(1 << 40) + 5)
ANSWER_IDS = (*encode(TEXT), END_ID)


@asynccontextmanager
async def client_of(server, *, api_key="", **settings):
    async with server.serve() as url:
        config = EnginesConfig(
            kind="openai", endpoints=(url,), model_name="m", **{"max_model_len": 256, "max_num_seqs": 8, **settings}
        )
        engine = OpenAIEngine(url + "/v1", TOKENIZER, config, api_key=api_key)
        try:
            yield engine
        finally:
            await engine.close()


def answers(written=TEXT + END, **changes):
    """Return a server whose turns are `written`, and whose choices have these changes."""

    def change_answer(answer):
        answer["choices"][0] |= changes
        return answer

    return FakeOpenAI(lambda prompt, sampling: written, change_answer)


# --- requests ---


async def test_a_turn_is_sent_as_text_and_its_answer_encoded_with_an_end_token():
    server = answers()
    async with client_of(server) as engine:
        generation = await engine.generate(PROMPT, SAMPLING)
    assert generation.ids == ANSWER_IDS
    assert (generation.logprobs, generation.has_stop_token) == (None, True)
    assert generation.engine == engine.name == engine.url
    assert server.bodies == [
        {
            "model": "m",
            "prompt": TOKENIZER.decode(PROMPT),
            "max_tokens": 64,
            "temperature": 1.0,
            "top_p": 1.0,
            "stop": [END, "<|endoftext|>"],
            "seed": 5,
        }
    ]


async def test_the_settings_change_the_request():
    server = answers(TEXT + "###")
    settings = {
        "prompt_format": "ids", "send_seed": False, "request_logprobs": True, "stop_strings": ("###",),
        "extra_body": {"top_k": 0},
    }  # fmt: skip
    async with client_of(server, **settings) as engine:
        assert (await engine.generate(PROMPT, SAMPLING)).ids == ANSWER_IDS
    (body,) = server.bodies
    assert (body["prompt"], body["top_k"], body["logprobs"]) == (PROMPT, 0, 1)
    assert body["stop"] == [END, "<|endoftext|>", "###"]
    assert "seed" not in body


async def test_text_that_spells_a_special_token_is_not_sent():
    spelled = [id for part in ("<|im_", "end|>") for id in encode(part)]
    assert END_ID not in spelled
    server = answers()
    async with client_of(server) as engine:
        with pytest.raises(TurnError, match=r"does not spell special tokens .*, got \['<\|im_end\|>'\]"):
            await engine.generate([*PROMPT, *spelled], SAMPLING)
        assert not server.bodies
    async with client_of(server, prompt_format="ids") as engine:
        await engine.generate([*PROMPT, *spelled], SAMPLING)


@pytest.mark.parametrize(
    ("ids", "sampling"),
    [
        ([], SAMPLING),
        ([1] * 250, SAMPLING),
        ([1], SamplingParams(0, stop_ids=(END_ID,))),
        ([1], SamplingParams(4)),
    ],
)
async def test_a_request_that_no_server_could_serve_is_a_value_error(ids, sampling):
    async with client_of(answers()) as engine:
        with pytest.raises(ValueError, match="expected stop ids and 1 to 256 tokens in all"):
            await engine.generate(ids, sampling)


# --- answers ---


@pytest.mark.parametrize(
    ("server", "ids", "has_stop_token"),
    [
        (answers(text=TEXT, finish_reason="stop"), ANSWER_IDS, True),
        (answers(text=TEXT + END, finish_reason="stop"), ANSWER_IDS, True),
        (answers(text="", finish_reason="stop"), (END_ID,), True),
        (answers(text=TEXT, finish_reason="length"), ANSWER_IDS[:-1], False),
        (answers(text="42 " * 500, finish_reason="stop"), tuple(encode("42 " * 500)[:64]), False),
        (answers(text="e\u0301te\u0301", finish_reason="stop"), (*encode("été"), END_ID), True),
    ],
    ids=["stop", "the stop string is returned", "empty", "length", "more tokens than the server counts", "not NFC"],
)
async def test_an_answer_becomes_at_most_max_tokens_ids(server, ids, has_stop_token):
    async with client_of(server) as engine:
        generation = await engine.generate(PROMPT, SAMPLING)
    assert (generation.ids, generation.has_stop_token) == (ids, has_stop_token)


class LossyTokenizer:
    """A tokenizer that loses upper case."""

    def encode(self, text, **options):
        return TOKENIZER.encode(text.lower(), **options)

    def decode(self, ids, **options):
        return TOKENIZER.decode(ids, **options)

    def get_added_vocab(self):
        return TOKENIZER.get_added_vocab()


async def test_text_that_the_tokenizer_does_not_return_is_an_error_of_the_turn():
    async with client_of(answers()) as engine:
        engine._tokenizer = LossyTokenizer()
        with pytest.raises(TurnError, match="expected text that the tokenizer can represent, got <reason>Python"):
            await engine.generate(encode("what"), SAMPLING)


async def test_a_turn_that_a_content_filter_removed_is_an_error_of_the_turn():
    def reject(answer):
        raise web.HTTPBadRequest(text='{"error": {"code": "content_filter"}}')

    removed = answers(finish_reason="content_filter"), answers(text=None, finish_reason="content_filter")
    for server in (*removed, FakeOpenAI(lambda *_: TEXT, reject)):
        async with client_of(server) as engine:
            with pytest.raises(TurnError, match="expected a turn"):
                await engine.generate(PROMPT, SAMPLING)


def sends(content, **options):
    return FakeOpenAI(lambda *_: TEXT, lambda answer: web.Response(text=content, **options))


INVALID_ANSWERS = {
    "not JSON": sends("<html>"),
    "nothing": sends(""),
    "another object": sends('{"error": "busy"}'),
    "no choices": sends('{"choices": []}'),
    "two choices": sends('{"choices": [' + 2 * '{"text": "a", "finish_reason": "stop"},' + "]}"),
    "no text": sends('{"choices": [{"finish_reason": "stop"}]}'),
    "text of null": answers(text=None),
    "text that is a number": answers(text=4),
    "half a character": sends(r'{"choices": [{"text": "\ud800", "finish_reason": "stop"}]}'),
    "no finish_reason": answers(finish_reason=None),
    "an unknown finish_reason": answers(finish_reason="abort"),
    "tool calls": answers(finish_reason="tool_calls"),
    "a stop string inside": answers(text=f"a{END}\n<|im_start|>user\nb", finish_reason="stop"),
    "a stop string inside, cut": answers(text=f"a{END}\n<|im_start|>user\nb", finish_reason="length"),
    "a limit without text": answers(text="", finish_reason="length"),
    "bytes that are not UTF-8": FakeOpenAI(lambda *_: TEXT, lambda answer: web.Response(body=b'{"choices": "\xff"}')),
    "status 500": sends("it crashed", status=500),
    "status 404": sends("no such route", status=404),
    "status 503 without Retry-After": sends("loading", status=503),
    "a redirect": sends("", status=307, headers={"Location": "http://127.0.0.1:9/v1/completions"}),
    "deep JSON": sends("[" * 100_000),
}


@pytest.mark.parametrize("server", INVALID_ANSWERS.values(), ids=INVALID_ANSWERS.keys())
async def test_an_invalid_answer_is_an_engine_error(server):
    async with client_of(server) as engine:
        with pytest.raises(EngineError, match=r"engine http://127.0.0.1:\d+: expected .*, got ") as caught:
            await engine.generate(PROMPT, SAMPLING)
    assert not isinstance(caught.value, TurnError)
    assert len(str(caught.value)) < 800


async def test_an_answer_without_end_is_an_engine_error(monkeypatch):
    monkeypatch.setattr(openai_client, "MAX_ANSWER_BYTES", 1000)
    async with client_of(sends("x" * 2000)) as engine:
        with pytest.raises(EngineError, match="expected an answer of at most 1000 bytes"):
            await engine.generate(PROMPT, SAMPLING)


async def test_a_rejected_request_is_a_value_error():
    async with client_of(sends('{"error": "unknown field seed"}', status=400)) as engine:
        with pytest.raises(ValueError, match=r"rejected the request: .*unknown field seed"):
            await engine.check_alive()


# --- log-probabilities ---

LOGPROBS = tuple(map(scripted_logprob, ANSWER_IDS))
TOKENS = [TOKENIZER.decode([id]) for id in ANSWER_IDS]


async def logprobs_of(server, **settings):
    async with client_of(server, request_logprobs=True, **settings) as engine:
        generation = await engine.generate(PROMPT, SAMPLING)
        assert generation.ids[: len(ANSWER_IDS) - 1] == ANSWER_IDS[:-1]
        return generation.logprobs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logprobs": {"content": [{"token": t, "logprob": p} for t, p in zip(TOKENS, LOGPROBS, strict=True)]}},
        {
            "logprobs": {
                "content": [{"id": i, "token": "?", "logprob": p} for i, p in zip(ANSWER_IDS, LOGPROBS, strict=True)]
            }
        },
        {"token_ids": list(ANSWER_IDS), "logprobs": {"token_logprobs": list(LOGPROBS)}},
    ],
    ids=["texts", "content with texts", "content with ids", "ids"],
)
async def test_logprobs_of_exactly_the_same_tokens_are_used(changes):
    assert await logprobs_of(answers(**changes)) == LOGPROBS


async def test_logprobs_show_which_end_token_was_sampled():
    ids = [*ANSWER_IDS[:-1], OTHER_END_ID]
    server = answers(token_ids=ids, logprobs={"token_logprobs": list(LOGPROBS)})
    async with client_of(server, request_logprobs=True) as engine:
        assert (await engine.generate(PROMPT, SAMPLING)).ids == tuple(ids)


async def test_logprobs_are_cut_with_the_ids():
    async with client_of(answers(), request_logprobs=True) as engine:
        generation = await engine.generate(PROMPT, SamplingParams(3, stop_ids=(END_ID,)))
    assert (generation.ids, generation.logprobs, generation.has_stop_token) == (ANSWER_IDS[:3], LOGPROBS[:3], False)


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        "none",
        {},
        {"tokens": TOKENS[:-1], "token_logprobs": list(LOGPROBS[:-1])},
        {"tokens": TOKENS, "token_logprobs": list(LOGPROBS[:-1])},
        {"tokens": ["<", "reason", *TOKENS[1:-1]], "token_logprobs": list(LOGPROBS)},
        {"tokens": TOKENS, "token_logprobs": [None, *LOGPROBS[1:]]},
        {"tokens": TOKENS, "token_logprobs": [0.5, *LOGPROBS[1:]]},
        {"tokens": TOKENS, "token_logprobs": [float("nan"), *LOGPROBS[1:]]},
        {"tokens": TOKENS, "token_logprobs": [float("-inf"), *LOGPROBS[1:]]},
        {"content": [{"id": i + 1, "token": t, "logprob": -1.0} for i, t in zip(ANSWER_IDS, TOKENS, strict=True)]},
    ],
    ids=[
        "null", "text", "nothing", "no end token", "too few", "other tokens", "one of null", "above 0", "NaN",
        "infinite", "other ids",
    ],
)  # fmt: skip
async def test_other_logprobs_are_unknown(logprobs):
    assert await logprobs_of(answers(logprobs=logprobs)) is None


async def test_a_token_that_is_part_of_a_character_is_not_identified_by_its_text():
    text = "数"
    ids = [*encode(text), END_ID]
    tokens = [TOKENIZER.decode([id]) for id in ids]
    assert "\ufffd" in "".join(tokens)
    server = answers(text, finish_reason="stop", logprobs={"tokens": tokens, "token_logprobs": [-1.0] * len(ids)})
    async with client_of(server, request_logprobs=True) as engine:
        generation = await engine.generate(PROMPT, SAMPLING)
    assert (generation.ids, generation.logprobs) == (tuple(ids), None)


async def test_logprobs_that_were_not_requested_are_not_used():
    server = answers(token_ids=list(ANSWER_IDS), logprobs={"token_logprobs": list(LOGPROBS)})
    async with client_of(server) as engine:
        assert (await engine.generate(PROMPT, SAMPLING)).logprobs is None


# --- refusals, failures ---


def refusing(statuses, **headers):
    """Return a server that refuses one request per status, and then answers."""
    statuses = iter(statuses)

    def change_answer(answer):
        if status := next(statuses, None):
            return web.Response(status=status, text="later", headers=headers)
        return answer

    return FakeOpenAI(lambda *_: TEXT + END, change_answer)


async def test_a_request_that_is_refused_for_some_time_is_sent_again():
    server = refusing([429, 503], **{"Retry-After": "0.2"})
    async with client_of(server) as engine:
        started_at = asyncio.get_running_loop().time()
        assert (await engine.generate(PROMPT, SAMPLING)).ids == ANSWER_IDS
        assert asyncio.get_running_loop().time() - started_at >= 0.4
    assert len(server.bodies) == 3


async def test_no_other_request_is_sent_while_the_server_refuses():
    server = refusing([429], **{"Retry-After": "0.5"})
    async with client_of(server) as engine:
        first = asyncio.create_task(engine.generate(PROMPT, SAMPLING))
        await server.started.acquire()
        await asyncio.sleep(0.1)
        await asyncio.gather(first, engine.check_alive())
    assert [body["max_tokens"] for body in server.bodies[:1]] == [64]
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    "retry_after", ["3600", format_datetime(datetime.now(UTC) + timedelta(hours=1))], ids=["seconds", "date"]
)
async def test_a_long_refusal_is_an_engine_error_and_keeps_further_requests_back(retry_after):
    server = refusing([429] * 99, **{"Retry-After": retry_after})
    async with client_of(server) as engine:
        with pytest.raises(EngineError, match="expected status 200 of /v1/completions, got 429: later"):
            await engine.generate(PROMPT, SAMPLING)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await engine.check_alive()
    assert len(server.bodies) == 1


async def test_a_request_is_refused_a_limited_number_of_times():
    server = refusing([429] * 99, **{"Retry-After": "0"})
    async with client_of(server) as engine:
        with pytest.raises(EngineError, match="got 429"):
            await engine.generate(PROMPT, SAMPLING)
    assert len(server.bodies) == openai_client.MAX_REFUSALS


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("", None), ("-1", None), ("nan", None),
     ("soon", None), ("9" * 99, None), ("Wed, 21 Oct 2015 07:28:00", None)],
)  # fmt: skip
async def test_retry_after_is_seconds_or_a_date(value, seconds):
    assert retry_after_s(value) == seconds


async def test_the_key_is_sent_and_removed_from_answers_that_repeat_it():
    server = FakeOpenAI(lambda *_: TEXT + END, api_key=API_KEY)
    async with client_of(server, api_key=API_KEY) as engine:
        await engine.generate(PROMPT, SAMPLING)
    async with client_of(server, api_key="sk-wrong") as engine:
        with pytest.raises(EngineError, match=r"got 401: wrong key: Bearer \*\*\*$"):
            await engine.generate(PROMPT, SAMPLING)
    echo = sends(json.dumps({"choices": "x" * 450 + API_KEY}))  # the key crosses the end of the shown part
    async with client_of(echo, api_key=API_KEY) as engine:
        with pytest.raises(EngineError) as caught:
            await engine.generate(PROMPT, SAMPLING)
    assert not {API_KEY[:6], API_KEY[-6:]} & {str(caught.value)[i : i + 6] for i in range(len(str(caught.value)))}
    async with client_of(answers(text=f"The key is {API_KEY}."), api_key=API_KEY) as engine:
        assert TOKENIZER.decode((await engine.generate(PROMPT, SAMPLING)).ids) == "The key is ***.<|im_end|>"


async def test_a_server_that_hangs_is_an_engine_error_of_the_check(monkeypatch):
    monkeypatch.setattr(openai_client, "CHECK_TIMEOUT_S", 0.2)
    async with client_of(FakeOpenAI(lambda *_: TEXT, before_answer=asyncio.Event().wait)) as engine:
        for request in (engine.check_alive(), engine.capacity()):
            with pytest.raises(EngineError, match=r"got none in 0\.2 s"):
                await request


async def test_a_server_that_has_ended_is_an_engine_error():
    async with client_of(answers()) as engine:
        pass
    engine = OpenAIEngine(engine.url, TOKENIZER, EnginesConfig(model_name="m"))
    with pytest.raises(EngineError, match="expected an answer of /v1/completions, got ClientConnectorError"):
        await engine.generate(PROMPT, SAMPLING)
    await engine.close()


async def test_a_cancelled_request_is_dropped_in_the_server():
    server = FakeOpenAI(lambda *_: TEXT, before_answer=asyncio.Event().wait)
    async with client_of(server) as engine:
        cancelled = asyncio.create_task(engine.generate(PROMPT, SamplingParams(8, stop_ids=(END_ID,))))
        await server.started.acquire()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        for _ in range(100):
            if server.num_dropped == 1:
                break
            await asyncio.sleep(0.02)
        assert server.num_dropped == 1


async def test_the_capacity_is_max_num_seqs_and_there_are_no_stats_and_no_scores():
    async with client_of(answers()) as engine:
        assert await engine.capacity() == EngineCapacity(2 * 8 * 256, 8)
        assert await engine.stats() is None
        with pytest.raises(ValueError, match="does not score given tokens"):
            await engine.logprobs([1, 2])


async def test_the_pool_runs_a_turn_again_after_its_engine_failed():
    server = refusing([500])
    async with client_of(server, max_num_seqs=4) as engine:
        server.change_answer, fail = lambda answer: answer, server.change_answer
        async with EnginePool([engine], scheduler=Scheduler(256), scrape_interval_s=0.05, retry_after_s=0.1) as pool:
            async with pool.open_episode(group="p", max_context_tokens=200) as handle:
                assert (await handle.generate(PROMPT, SAMPLING)).ids == ANSWER_IDS
                server.change_answer = fail
                context = [*PROMPT, *ANSWER_IDS]
                assert (await handle.generate(context, SAMPLING)).ids == ANSWER_IDS
            assert pool.engine_states[engine.name].is_up
            assert "got 500: later" in pool.engine_states[engine.name].down_reason
