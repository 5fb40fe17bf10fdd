"""Tests of the tool loop of examples/openai_tool_loop.py, with a fake OpenAI server and the real sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from sandbox.errors import ServiceError
from sandbox.tool import TOOL_NAMES
from tests.http_server import HttpServer
from tests.integrations.examples import load_example
from trainer.rollout.loop_thread import LoopThread

ARGUMENTS = ('{"code": "print(2**100 % 97)"}', '{"code": 5}', '{"code": "1/0"}')


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The requests to a model that sends each of `ARGUMENTS` in a turn and then answers with the first response."""
    bodies: list[dict[str, Any]] = []

    async def respond(request: web.Request) -> web.Response:
        body = await request.json()
        bodies.append(body)
        responses = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        message: dict[str, Any] = {"role": "assistant", "content": f"It is {responses[0] if responses else None}."}
        if len(responses) < len(ARGUMENTS):
            function = {"name": TOOL_NAMES[0], "arguments": ARGUMENTS[len(responses)]}
            call = {"id": f"call-{len(responses)}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return web.json_response({"choices": [{"message": message}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", respond)
    with LoopThread() as loop_thread:
        server = loop_thread.enter(HttpServer(app))
        monkeypatch.setenv("OPENAI_BASE_URL", str(server.make_url("/v1")))
        yield bodies


@pytest.mark.runtime
def test_the_model_reads_results_mistakes_and_tracebacks(
    requests: list[dict[str, Any]], server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load_example("openai_tool_loop").main("fake", "What is 2**100 % 97?")
    assert capsys.readouterr().out == f"It is {2**100 % 97}.\n"
    assert all(body["tools"][0]["function"]["name"] == TOOL_NAMES[0] for body in requests)
    responses = [message for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert [response["tool_call_id"] for response in responses] == ["call-0", "call-1", "call-2"]
    assert responses[0]["content"] == str(2**100 % 97)
    assert responses[1]["content"] == "TypeError: argument 'code' must be a string, not int"
    assert responses[2]["content"].endswith("ZeroDivisionError: division by zero")


def test_an_outage_of_the_service_ends_the_tool_loop_with_an_error(
    requests: list[dict[str, Any]], outage_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RSTAR_SANDBOX_URL", outage_url)
    with pytest.raises(ServiceError, match="QueueTimeout"):
        load_example("openai_tool_loop").main("fake", "What is 2**100 % 97?")
    assert json.dumps(requests[-1]).count('"tool"') == 0
