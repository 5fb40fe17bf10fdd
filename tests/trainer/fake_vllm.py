"""A fake vLLM server that forwards to any engine, and an engine without torch."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.http_server import close_runner
from trainer.engines.engine import LIVENESS_IDS, EngineCapacity, EngineError, Generation, SamplingParams
from trainer.scheduling.scheduler import EngineStats


@dataclass
class MarkovEngine:
    """An engine without a model, whose ids are a Markov chain. The distribution of the next id depends only on the last
    id and on `salt`, which stands for the weights."""

    name: str = "markov"
    salt: Any = 0
    vocab_size: int = 50
    max_model_len: int = 256
    weight_version: int = 0
    before_generate: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    """Awaited in each `generate`. It may raise or never return."""
    before_scrape: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    """Awaited in each `stats`, `capacity` and `logprobs`. It may raise or never return."""
    reported_capacity: EngineCapacity = field(default_factory=lambda: EngineCapacity(10_000, 1000))
    preemptions: int = 0
    computed_tokens: int = 0
    requests: list[tuple[tuple[int, ...], SamplingParams]] = field(default_factory=list)
    """The ids and the sampling parameters of every request so far."""
    num_running: int = 0
    is_closed: bool = False

    def distribution(self, last: int, temperature: float = 1.0) -> list[float]:
        """Return the probability of each id after the id `last`."""
        return _distribution(f"{self.salt}/{last}", temperature, self.vocab_size)

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        if not 0 < len(ids) <= self.max_model_len - sampling.max_tokens or max(ids) >= self.vocab_size:
            raise ValueError(
                f"expected at most {self.max_model_len} ids below {self.vocab_size}, "
                f"got {len(ids)} ids and max_tokens {sampling.max_tokens}"
            )
        self.requests.append((tuple(ids), sampling))
        self.num_running += 1
        try:
            await self.before_generate()
        finally:
            self.num_running -= 1
        sampled: list[int] = []
        logprobs: list[float] = []
        while len(sampled) < sampling.max_tokens and not (sampled and sampled[-1] in sampling.stop_ids):
            probabilities = self.distribution([*ids, *sampled][-1], sampling.temperature)
            position = len(ids) + len(sampled)
            (token,) = random.Random(f"{sampling.seed}/{position}").choices(range(self.vocab_size), probabilities)
            sampled.append(token)
            logprobs.append(math.log(probabilities[token]))
        self.computed_tokens += len(sampled)
        has_stop_token = sampled[-1] in sampling.stop_ids
        return Generation(tuple(sampled), tuple(logprobs), has_stop_token, self.name, self.weight_version)

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        await self.before_scrape()
        return [math.log(self.distribution(last)[id]) for last, id in pairwise(ids)]

    async def check_alive(self) -> None:
        await self.logprobs(LIVENESS_IDS)

    check_weights = check_alive

    async def load_weights(self, weights: Any, version: int) -> None:
        """Take the new salt from the file in a directory, or from `weights["salt"]`."""
        is_directory = isinstance(weights, Path)
        self.salt = (weights / "model.safetensors").read_bytes() if is_directory else weights["salt"]
        self.weight_version = version

    async def capacity(self) -> EngineCapacity:
        await self.before_scrape()
        return self.reported_capacity

    async def stats(self) -> EngineStats:
        await self.before_scrape()
        return EngineStats(self.preemptions, computed_tokens=self.computed_tokens)

    async def close(self) -> None:
        self.is_closed = True


def _checksums(directory: Path) -> dict[str, int]:
    from safetensors.torch import load_file

    from trainer.sync.weight_group import checksum

    tensors = [pair for file in directory.glob("*.safetensors") for pair in load_file(file).items()]
    return {name: checksum(tensor) for name, tensor in tensors}


@cache
def _distribution(seed: str, temperature: float, vocab_size: int) -> list[float]:
    rng = random.Random(seed)
    weights = [math.exp(rng.gauss(0, 1.5) / temperature) for _ in range(vocab_size)]
    total = sum(weights)
    return [weight / total for weight in weights]


BLOCK_SIZE = 16
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
"""The answer of /metrics, to be formatted with an `EngineStats` and the number of blocks. It contains lines whose names
only begin with the name of a scraped metric. These lines must be ignored."""


@dataclass
class FakeVllm:
    """A server on loopback with the routes that `VllmEngine` uses."""

    engine: Any
    change_answer: Callable[[str, Any], Any] = lambda route, answer: answer
    """Takes the route and the answer of each request. Returns the answer to send, or raises a `web.HTTPException`."""
    load: Callable[[Any, Path], Awaitable[None]] | None = None
    """Loads a directory into `engine`. None calls `engine.load_weights`."""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    """The route and the body of every request so far."""
    load_report: dict[str, Any] = field(default_factory=lambda: {"checksums": {}, "missing": [], "differing": []})
    """The report of the last load of weights with checksums."""
    num_running: int = 0
    num_dropped: int = 0
    """Number of requests whose client has disconnected."""
    counts_changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified when `num_running` or `num_dropped` changes, or when the server wakes up."""
    sleeping_tags: set[str] = field(default_factory=set)
    """The parts that have no memory while the server sleeps: "weights", "kv_cache" or both. Completions wait until the
    set is empty."""

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Run the server until the block ends. Yields its URL."""
        app = web.Application()
        routes = {
            "/v1/completions": self._completions,
            "/collective_rpc": self._rpc,
            "/reset_prefix_cache": self._reset,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
        }
        app.add_routes([web.post(route, self._answer(route, handler)) for route, handler in routes.items()])
        app.add_routes([web.get("/health", self._health), web.get("/metrics", self._metrics)])
        app.add_routes([web.get("/is_sleeping", self._is_sleeping)])
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await close_runner(runner)

    def _answer(self, route: str, handler: Callable[[Any], Awaitable[Any]]) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.Response:
            body = dict(request.query) or await request.json()
            self.requests.append((request.path_qs, body))
            await self._count(running=1)
            try:
                return web.json_response(self.change_answer(request.path_qs, await handler(body)))
            except ValueError as error:
                return web.json_response({"error": {"message": str(error), "code": 400}}, status=400)
            except EngineError as error:
                return web.json_response({"error": {"message": str(error), "code": 500}}, status=500)
            except asyncio.CancelledError:
                await self._count(dropped=1)
                raise
            finally:
                await self._count(running=-1)

        return answer

    async def _count(self, running: int = 0, dropped: int = 0) -> None:
        async with self.counts_changed:
            self.num_running += running
            self.num_dropped += dropped
            self.counts_changed.notify_all()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        stats, capacity = await self.engine.stats() or EngineStats(0), await self.engine.capacity()
        num_blocks = capacity.kv_tokens // BLOCK_SIZE
        return web.Response(text=self.change_answer("/metrics", METRICS.format(stats, num_blocks)))

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response(self.change_answer("/is_sleeping", {"is_sleeping": bool(self.sleeping_tags)}))

    async def _sleep(self, query: Mapping[str, str]) -> Any:
        assert query == {"level": "2"}
        self.sleeping_tags = {"weights", "kv_cache"}
        self.engine.salt = b"freed"  # the weights of a `MarkovEngine`
        return {"status": "sleeping", "level": 2}

    async def _wake_up(self, query: Mapping[str, str]) -> Any:
        async with self.counts_changed:
            self.sleeping_tags.discard(query["tags"])
            self.counts_changed.notify_all()
        return {"status": "sleeping" if self.sleeping_tags else "awake", "tags": [query["tags"]]}

    async def _completions(self, body: Mapping[str, Any]) -> Any:
        async with self.counts_changed:
            await self.counts_changed.wait_for(lambda: not self.sleeping_tags)
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
        generation = await self.engine.generate(ids, sampling)
        reason = "stop" if generation.has_stop_token else "length"
        choice |= {"token_ids": list(generation.ids), "finish_reason": reason}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": list(generation.logprobs)}
        return {"object": "text_completion", "choices": [choice]}

    async def _rpc(self, body: Mapping[str, Any]) -> Any:
        if body["method"] == "last_load_report":
            return {"results": [self.load_report]}
        assert body["method"] in ("reload_weights", "load_saved_weights")
        assert "weights" not in self.sleeping_tags, "weights without memory cannot be loaded"
        (path,) = body["kwargs"].values()
        if self.load:
            await self.load(self.engine, Path(path))
        else:
            await self.engine.load_weights(Path(path), self.engine.weight_version + 1)
        if body["method"] == "reload_weights":
            return {"results": [None]}
        self.load_report = {**self.load_report, "checksums": _checksums(Path(path))}
        return {"results": [self.load_report]}

    async def _reset(self, body: Mapping[str, Any]) -> Any:
        return {"success": self.num_running == 1}  # only this request itself runs
