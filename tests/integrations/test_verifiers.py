"""Tests of a rollout by the package verifiers with a fake model. The tool call runs in the sandbox. An outage of the
sandbox gives no reward."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.http_server import HttpServer

pytest.importorskip("verifiers", reason="needs the package verifiers")

from tests.integrations.examples import load_example
from trainer.rollout.loop_thread import LoopThread

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # warnings of the package verifiers itself
    pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv, with which verifiers starts its harness"),
]


@pytest.fixture
def model_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a model that calls the tool once and answers with the response."""
    monkeypatch.setenv("OPENAI_API_KEY", "-")
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _respond)
    with LoopThread() as loop_thread:
        yield str(loop_thread.enter(HttpServer(app)).make_url("/v1"))


async def _respond(request: web.Request) -> web.Response:
    body = await request.json()
    responses = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    function = {"name": "run_python", "arguments": json.dumps({"code": "print(12**3 + 30)"})}
    call = {"index": 0, "id": "call-0", "type": "function", "function": function}
    message: dict[str, Any] = {"role": "assistant", "content": f"It is {responses[0]}."} if responses else {}
    message = message or {"role": "assistant", "content": None, "tool_calls": [call]}
    reason = "stop" if responses else "tool_calls"
    head = {"id": "x", "created": 1, "model": "fake"}
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice]})
    chunks = [
        {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in ((message, None), ({}, reason))
    ]
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return web.Response(text=text, content_type="text/event-stream")


@pytest.mark.runtime
async def test_the_example_gets_its_reward_from_a_call_that_ran(server_url: str, model_url: str) -> None:
    trace = await load_example("verifiers_agent").main("fake", model_url)
    assert trace.errors == []
    assert (trace.ok, trace.reward) == (True, 1.0)


async def test_an_outage_is_an_error_of_the_rollout_and_no_reward(
    outage_url: str, model_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RSTAR_SANDBOX_URL", outage_url)
    trace = await load_example("verifiers_agent").main("fake", model_url)
    assert (trace.ok, trace.rewards) == (False, {})
    assert "QueueTimeout: no slot was free" in trace.errors[0].message
