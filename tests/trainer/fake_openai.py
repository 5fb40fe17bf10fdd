"""A fake server with OpenAI's completions API, whose model is a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.http_server import close_runner
from tests.trainer.fakes import qwen_tokenizer, scripted_logprob
from trainer.engines.engine import SamplingParams

API_KEY = "sk-secret-0123456789"


@dataclass
class FakeOpenAI:
    """A server on loopback with one route."""

    script: Callable[[str, SamplingParams], str]
    """Takes the prompt's text and the sampling parameters. Returns the whole turn, with its end token."""
    change_answer: Callable[[Any], Any] = lambda answer: answer
    """Takes each answer. Returns the answer to send, or raises a `web.HTTPException`."""
    before_answer: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    api_key: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """The body of every request so far."""
    started: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released by each request."""
    num_dropped: int = 0
    """Number of requests whose client has disconnected."""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Run the server until the block ends. Yields its URL."""
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self._answer)])
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await close_runner(runner)

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.started.release()
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            raise web.HTTPUnauthorized(text=f"wrong key: {request.headers.get('Authorization')}")
        try:
            await self.before_answer()
        except asyncio.CancelledError:
            self.num_dropped += 1
            raise
        answer = self.change_answer({"object": "text_completion", "choices": [self._complete(body)]})
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        tokenizer, prompt = qwen_tokenizer(), body["prompt"]
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        written = self.script(text, SamplingParams(body["max_tokens"]))
        ids = tokenizer.encode(written, add_special_tokens=False)[: body["max_tokens"]]
        text = tokenizer.decode(ids)
        ends = [text.index(stop) for stop in body.get("stop", ()) if stop in text]
        choice = {"index": 0, "text": text[: min(ends)] if ends else text, "logprobs": None}
        choice["finish_reason"] = "stop" if ends else "length"
        if "logprobs" in body:
            choice["logprobs"] = {
                "tokens": [tokenizer.decode([id]) for id in ids],
                "token_logprobs": [scripted_logprob(id) for id in ids],
            }
        return choice
