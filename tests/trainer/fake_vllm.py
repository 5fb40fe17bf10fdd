"""A fake vLLM server in front of any engine, and an engine without torch."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from aiohttp import web

from trainer.engines.engine import EngineCapacity, EngineError, Generation, SamplingParams
from trainer.scheduling.scheduler import EngineStats


@dataclass
class TableEngine:
    """An engine whose next-id distribution depends on the last id and on `salt`, which stands for its weights."""

    name: str = "table"
    salt: Any = 0
    vocab_size: int = 50
    max_model_len: int = 256
    weight_version: int = 0
    before: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    """Awaited in each `generate`. It may raise or never return."""
    room: EngineCapacity = field(default_factory=lambda: EngineCapacity(10_000, 1000))
    scraped: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    """Awaited in each `stats`, `capacity` and `logprobs`."""
    preemptions: int = 0
    computed: int = 0
    requests: list[tuple[tuple[int, ...], SamplingParams]] = field(default_factory=list)
    running: int = 0
    reached: int = 2
    """Tokens that a request has when it is aborted."""
    aborted: set[str] = field(default_factory=set)
    abort_called: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first `abort`."""
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released by each request that reaches `until_aborted`."""
    is_closed: bool = False

    def distribution(self, last: int, temperature: float = 1.0) -> list[float]:
        return _distribution(f"{self.salt}/{last}", temperature, self.vocab_size)

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        if not 0 < len(ids) <= self.max_model_len - sampling.max_tokens or max(ids) >= self.vocab_size:
            raise ValueError(
                f"expected at most {self.max_model_len} known ids, got {len(ids)} and {sampling.max_tokens}"
            )
        self.requests.append((tuple(ids), sampling))
        self.running += 1
        try:
            await self.before()
        finally:
            self.running -= 1
        sampled: list[int] = []
        logprobs: list[float] = []
        while len(sampled) < sampling.max_tokens and not (sampled and sampled[-1] in sampling.stop_ids):
            chances = self.distribution([*ids, *sampled][-1], sampling.temperature)
            position = len(ids) + len(sampled)
            (token,) = random.Random(f"{sampling.seed}/{position}").choices(range(self.vocab_size), chances)
            sampled.append(token)
            logprobs.append(math.log(chances[token]))
            if sampling.request_id in self.aborted and len(sampled) >= self.reached:
                break
        self.computed += len(sampled)
        has_stop_token = sampled[-1] in sampling.stop_ids
        is_over = has_stop_token or len(sampled) == sampling.max_tokens
        return Generation(tuple(sampled), tuple(logprobs), has_stop_token, self.name, self.weight_version, not is_over)

    async def until_aborted(self) -> None:
        """For `before`: requests last until one is aborted."""
        self.begun.release()
        await self.abort_called.wait()

    async def abort(self, requests: Collection[str]) -> None:
        self.aborted.update(requests)
        self.abort_called.set()

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        await self.scraped()
        return [math.log(self.distribution(last)[id]) for last, id in pairwise(ids)]

    async def load_weights(self, weights: Any, version: int) -> None:
        """Take the new salt from a directory's file or from `weights["salt"]`."""
        is_here = isinstance(weights, Path)
        self.salt = (weights / "model.safetensors").read_bytes() if is_here else weights["salt"]
        self.weight_version = version

    async def capacity(self) -> EngineCapacity:
        await self.scraped()
        return self.room

    async def stats(self) -> EngineStats:
        await self.scraped()
        return EngineStats(self.preemptions, computed_tokens=self.computed)

    async def close(self) -> None:
        self.is_closed = True


@cache
def _distribution(seed: str, temperature: float, vocab_size: int) -> list[float]:
    draw = random.Random(seed)
    weights = [math.exp(draw.gauss(0, 1.5) / temperature) for _ in range(vocab_size)]
    total = sum(weights)
    return [weight / total for weight in weights]


METRICS = """# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="a{{b}} c"}} {0.preemptions}.0
vllm:num_preemptions_created{{engine="0",model_name="a{{b}} c"}} 1.7e+09
vllm:num_requests_waiting{{engine="0",model_name="a{{b}} c"}} {0.num_waiting}.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="a{{b}} c",reason="capacity"}} 7.0
vllm:kv_cache_usage_perc{{engine="0",model_name="a{{b}} c"}} {0.kv_usage}
vllm:prompt_tokens_total{{engine="0",model_name="a{{b}} c"}} 1.0
vllm:generation_tokens_total{{engine="0",model_name="a{{b}} c"}} {0.computed_tokens}.0
vllm:iteration_tokens_total_bucket{{engine="0",le="1.0",model_name="a{{b}} c"}} 5.0
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="{1}"}} 1.0
"""


@dataclass
class FakeVllm:
    """A server on loopback. `twist` gets each route's answer and may change it or raise a `web.HTTPException`."""

    engine: Any
    twist: Callable[[str, Any], Any] = lambda route, answer: answer
    load: Callable[[Any, Path], Awaitable[None]] | None = None
    """Loads a directory into `engine`. None calls `engine.load_weights`."""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    running: int = 0
    dropped: int = 0
    """Number of requests whose client has disconnected."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Run the server until the block ends. Yields its URL."""
        app = web.Application()
        routes = {
            "/v1/completions": self._completions,
            "/collective_rpc": self._rpc,
            "/reset_prefix_cache": self._reset,
            "/abort_requests": self._abort,
        }
        app.add_routes([web.post(route, self._answer(route, handler)) for route, handler in routes.items()])
        app.add_routes([web.get("/health", self._health), web.get("/metrics", self._metrics)])
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    def _answer(self, route: str, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.Response:
            body = await request.json()
            self.requests.append((route, body))
            await self._count(running=1)
            try:
                return web.json_response(self.twist(route, await handler(body)))
            except ValueError as why:
                return web.json_response({"error": {"message": str(why), "code": 400}}, status=400)
            except EngineError as why:
                return web.json_response({"error": {"message": str(why), "code": 500}}, status=500)
            except asyncio.CancelledError:
                await self._count(dropped=1)
                raise
            finally:
                await self._count(running=-1)

        return answer

    async def _count(self, running: int = 0, dropped: int = 0) -> None:
        async with self.changed:
            self.running += running
            self.dropped += dropped
            self.changed.notify_all()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        stats, room = await self.engine.stats() or EngineStats(0), await self.engine.capacity()
        return web.Response(text=self.twist("/metrics", METRICS.format(stats, room.kv_tokens // 16)))

    async def _completions(self, body: Mapping[str, Any]) -> Any:
        ids = body["prompt"]
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "prompt_logprobs": None}
        if "prompt_logprobs" in body:
            scores = await self.engine.logprobs(ids)
            choice["prompt_logprobs"] = [
                None, *({str(id): {"logprob": score}} for id, score in zip(ids[1:], scores, strict=True))
            ]  # fmt: skip
        stop = tuple(body.get("stop_token_ids", ()))
        sampling = SamplingParams(
            body["max_tokens"], body["temperature"], body.get("top_p", 1.0), stop, body.get("seed")
        )
        sampling = replace(sampling, request_id=body.get("request_id", ""))
        generation = await self.engine.generate(ids, sampling)
        reason = "abort" if generation.is_aborted else "stop" if generation.has_stop_token else "length"
        choice |= {"token_ids": list(generation.ids), "finish_reason": reason}
        if "logprobs" in body:
            choice["logprobs"] = {"token_logprobs": list(generation.logprobs)}
        return {"object": "text_completion", "choices": [choice]}

    async def _rpc(self, body: Mapping[str, Any]) -> Any:
        assert body["method"] == "reload_weights"
        folder = Path(body["kwargs"]["weights_path"])
        await (
            self.load(self.engine, folder)
            if self.load
            else self.engine.load_weights(folder, self.engine.weight_version + 1)
        )
        return {"results": [None]}

    async def _abort(self, body: Mapping[str, Any]) -> Any:
        await self.engine.abort([name.removeprefix("cmpl-").removesuffix("-0") for name in body["request_ids"]])
        return {"status": "aborted"}

    async def _reset(self, body: Mapping[str, Any]) -> Any:
        return {"success": self.running == 1}
