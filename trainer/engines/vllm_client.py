"""Engines: token ids in, token ids and their log-probabilities out. What one is asked and answers, and vLLM over HTTP.

Invariants:
- Log-probabilities are of the distribution that was sampled from: after temperature and top-p (vLLM: processed ones).
- An engine that is lost, hangs or answers nonsense raises `EngineFailed`, and nothing it said is repaired: the ids are
  all there is, so another engine can continue. A request that no engine could serve is a `ValueError`.
- `version` is that of the weights of the last sync, and 0 of those that an engine was started with.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from trainer.scheduling.scheduler import EngineStats

CONNECTIONS = 1024
"""Turns that one server is asked for at a time; others wait here, in order."""
CONNECT_S = 30.0
ASK_AGAIN_S = 0.2
"""To interrupt a request that the server had not yet when it was asked to."""
COMPLETIONS = "/v1/completions"
NOT_IN_JSON = "not JSON compliant"
"""What Python's JSON encoder says of NaN, and so a server whose answer has one."""
ROUNDING = 1e-3  # how far above 0 a log-probability may come by rounding
METRICS = (
    "cache_config_info",
    "generation_tokens",
    "kv_cache_usage_perc",
    "num_preemptions",
    "num_requests_waiting",
    "prompt_tokens",
)
METRIC = re.compile(rf"^vllm:({'|'.join(METRICS)})(?:_total)?\{{(.*)\}} (\S+)$", re.MULTILINE)
"""Name, labels and value in /metrics. A server that has several engines says each of them."""
NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to continue."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Any of these ends the stretch, and is its last id."""
    seed: int | None = None
    """Of 63 bits; None leaves it to the engine."""
    request: str = ""
    """A name for `interrupt`, no other's at this engine."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled: `ids` and their log-probabilities, of one length, at most `max_tokens`, and none only if it was
    interrupted before the first."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_stopped: bool
    """Ended with a stop id; otherwise it has `max_tokens`, or was interrupted."""
    engine: str
    version: int
    is_interrupted: bool = False
    """By `interrupt`: what there was by then."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine has room for: `tokens` of contexts, and `running` turns at once."""

    tokens: int
    running: int
    block: int = 1
    """Tokens that are kept together."""


class EngineFailed(Exception):
    """Ours, never the model's: the engine was lost, hung, or answered nonsense. Another may continue."""


class TurnFailed(EngineFailed):
    """A log-probability of one turn is no finite number. The engine may serve others, and this one at another time."""


Logprob = Annotated[float, Field(lt=ROUNDING, allow_inf_nan=False)]


class _Logprobs(BaseModel, strict=True):
    token_logprobs: list[Logprob]


class _Ranked(BaseModel, strict=True):
    logprob: Logprob


class _Choice(BaseModel, strict=True):
    """As vLLM says it, with those log-probabilities that it was asked for."""

    token_ids: list[NonNegativeInt]
    finish_reason: str
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[str, _Ranked] | None] | None = None
    """Nothing of the first id."""


class _Completion(BaseModel, strict=True):
    choices: tuple[_Choice]


class VllmEngine:
    """One vLLM server, started as `trainer.engines.vllm_servers` does: `--logprobs-mode processed_logprobs`,
    development routes.

    It belongs to the event loop that first uses it. Cancelling a request closes its connection, and vLLM drops it then.
    `slots`: sequences that it runs at once (`--max-num-seqs`). `timeout_s` bounds all but `generate`, which takes as
    long as its caller waits.
    """

    def __init__(
        self,
        url: str,
        *,
        vocabulary: int,
        max_length: int,
        slots: int = CONNECTIONS,
        name: str = "",
        timeout_s: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name or self.url
        self.version = 0
        self._vocabulary, self._max_length, self._slots = vocabulary, max_length, slots
        self._timeout_s = timeout_s
        self._connections = asyncio.Semaphore(CONNECTIONS)
        self._session: aiohttp.ClientSession | None = None
        self._asked: dict[str, bool] = {}
        """By name, what is asked now, and whether that is interrupted."""

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `ids`. Raises `EngineFailed`; `ValueError` for what this engine says is a wrong request."""
        name, version = sampling.request, self.version
        options = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_ids),
            "logprobs": 0,
            **({"request_id": name} if name else {}),
        }
        self._asked[name] = False
        try:
            async with self._connections:
                if self._asked.get(name):
                    return Generation((), (), False, self.name, version, is_interrupted=True)
                choice = await self._complete(ids, options, None)
            is_interrupted = bool(self._asked.get(name)) and choice.finish_reason == "abort"
        finally:
            self._asked.pop(name, None)
        made, reason = choice.token_ids, choice.finish_reason
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
        is_stopped = bool(made) and made[-1] in sampling.stop_ids
        is_whole = (reason, is_stopped) == ("stop", True) or (reason, len(made)) == ("length", sampling.max_tokens)
        if not is_whole and not is_interrupted:
            raise self._failed(f"a stop id or {sampling.max_tokens} tokens", f"{len(made)} tokens, {reason!r}")
        if len(made) > sampling.max_tokens or len(made) != len(logprobs) or max(made, default=0) >= self._vocabulary:
            raise self._failed(f"ids below {self._vocabulary}, as many log-probabilities", f"{made}, {logprobs}")
        return Generation(tuple(made), tuple(logprobs), is_stopped, self.name, version, is_interrupted)

    async def interrupt(self, requests: Collection[str]) -> None:
        """Have these requests answered with what there is. Raises `EngineFailed`."""
        while names := [name for name in requests if name in self._asked]:
            self._asked |= dict.fromkeys(names, True)
            await self.post("/abort_requests", {"request_ids": [f"cmpl-{name}-0" for name in names]})
            await asyncio.sleep(ASK_AGAIN_S)

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Of `ids[1:]`, each given what stands before it, at temperature 1."""
        options = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        said = (await self._complete(ids, options, self._timeout_s)).prompt_logprobs or []
        if len(said) != len(ids) or any(str(id) not in (of or {}) for id, of in zip(ids[1:], said[1:], strict=True)):
            raise self._failed(f"prompt_logprobs of {len(ids)} ids", said)
        return [of[str(id)].logprob for id, of in zip(ids[1:], said[1:], strict=True) if of]

    async def load(self, folder: Path, version: int) -> None:
        """Take over a saved model, by a path that the server sees as well. Nothing may be generating."""
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        await self.renew(version)

    async def renew(self, version: int) -> None:
        """Forget what was computed with other weights: those that are there now are `version`."""
        answer = await self.post("/reset_prefix_cache", {})
        if answer is not None and not (isinstance(answer, dict) and answer.get("success") is True):
            raise self._failed("an empty prefix cache", answer)
        self.version = version

    async def capacity(self) -> Capacity:
        """Of its key-value cache. Raises `EngineFailed`."""
        about = (await self._metrics())["cache_config_info"]
        tokens, block = 0, 1
        for labels, _ in about:
            sizes = dict(re.findall(r'(\w+)="(\d+)"', labels))
            block = int(sizes.get("block_size", 0))
            tokens += int(sizes.get("num_gpu_blocks", 0)) * block
        if not tokens:
            raise self._failed("vllm:cache_config_info in /metrics (start it without --disable-log-stats)", about)
        return Capacity(tokens, self._slots, block)

    async def gauge(self) -> EngineStats:
        """What it says of itself now. Raises `EngineFailed`."""
        values = {name: [value for _, value in said] for name, said in (await self._metrics()).items()}
        return EngineStats(
            preemptions=int(sum(values["num_preemptions"])),
            num_waiting=int(sum(values["num_requests_waiting"])),
            kv_usage=max(values["kv_cache_usage_perc"], default=0.0),
            computed_tokens=int(sum(values["prompt_tokens"] + values["generation_tokens"])),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, route: str, body: dict[str, Any]) -> Any:
        """The decoded answer, None for an empty one. Raises `EngineFailed`."""
        text = await self._ask("POST", route, body, self._timeout_s)
        try:
            return json.loads(text or "null")
        except ValueError as why:
            raise self._failed("JSON", text) from why

    async def _metrics(self) -> dict[str, list[tuple[str, float]]]:
        """Of each metric its series: labels and value."""
        text = await self._ask("GET", "/metrics", None, self._timeout_s)
        made: dict[str, list[tuple[str, float]]] = {name: [] for name in METRICS}
        for name, labels, value in METRIC.findall(text):
            if not NUMBER.fullmatch(value):
                raise self._failed(f"vllm:{name} as a number in /metrics", value)
            made[name].append((labels, float(value)))
        return made

    async def _complete(self, ids: Sequence[int], options: Mapping[str, Any], timeout_s: float | None) -> _Choice:
        """The one choice of an answer. All that a model's generation_config.json might set is said."""
        tokens = options["max_tokens"]
        if tokens < 1 or not 0 < len(ids) <= self._max_length - tokens:  # vLLM would silently give fewer
            raise ValueError(f"expected 1 to {self._max_length} tokens in all, got {len(ids)} ids and {tokens} to come")
        fixed = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "return_token_ids": True}
        text = await self._ask("POST", COMPLETIONS, {"prompt": list(ids), **fixed, **options}, timeout_s)
        try:
            return _Completion.model_validate_json(text).choices[0]
        except ValidationError as why:
            kind = TurnFailed if all(map(_is_no_number, why.errors())) else EngineFailed
            raise self._failed("one choice with ids and finite log-probabilities of at most 0", why, kind) from why

    async def _ask(self, method: str, route: str, body: Any, timeout_s: float | None) -> str:
        if self._session is None:
            # One that was kept may be closed there just as it is used here, which looks like an engine that is lost.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(method, self.url + route, json=body, timeout=timeout) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as why:
            if isinstance(why, aiohttp.ClientConnectorError) and why.os_error.errno == errno.ECONNREFUSED:
                self.version = 0  # nobody listens there: what is started anew has the weights that it had at first
            raise self._failed(f"an answer of {route}", f"{type(why).__name__}: {why}") from why
        if status != 200 and NOT_IN_JSON in text:
            raise self._failed("finite log-probabilities", f"{status}: {text}", TurnFailed)
        if status in (400, 422) and route == COMPLETIONS:
            raise ValueError(f"engine {self.name} refused {str(body)[:200]}: {text[:500]}")
        if status != 200:
            raise self._failed(f"status 200 of {route}", f"{status}: {text}")
        return text

    def _failed(self, expected: str, got: Any, kind: type[EngineFailed] = EngineFailed) -> EngineFailed:
        return kind(f"engine {self.name}: expected {expected}, got {str(got)[:500]}")


def _is_no_number(error: Mapping[str, Any]) -> bool:
    """Whether it is a log-probability that is NaN, infinite, or null, which some JSON encoders write for NaN."""
    is_logprob = bool({"token_logprobs", "logprob"} & set(error["loc"]))
    return is_logprob and (error["type"] == "finite_number" or error["input"] is None)
