"""A client of one vLLM server's HTTP API.

Invariants:
- Every answer is validated before it is used: ids within the vocabulary, one log-probability per id, and the finish
  reason that the request implies.
- A log-probability that is not finite is NaN in the turn. If the server cannot write such a number as JSON, all
  log-probabilities of the turn are NaN.
- Requests with different weight versions share no cached prefix (`cache_salt`), even if a cache could not be reset.
- All sampling settings are sent, so a model's generation_config.json has no effect.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
from collections.abc import Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, NonNegativeInt, ValidationError

from trainer.engines.engine import (
    LIVENESS_IDS,
    EngineCapacity,
    EngineError,
    Generation,
    SamplingParams,
)
from trainer.scheduling.scheduler import EngineStats

MAX_CONNECTIONS = 1024
"""Maximum number of turns requested from one server at a time. Further turns wait in the client, in order."""
CONNECT_TIMEOUT_S = 30.0
COMPLETIONS = "/v1/completions"
NOT_IN_JSON = "not JSON compliant"
"""Part of the message of Python's JSON encoder for NaN. A server returns this message if its answer contains NaN."""
LOGPROB_TOLERANCE = 1e-3
"""Log-probabilities below this are accepted, because rounding may raise them slightly above 0."""
CHECKSUMS_FILE = "checksums.json"
"""The file with the checksum of each tensor, in a directory of saved weights."""
SCRAPED_METRICS = (
    "cache_config_info",
    "generation_tokens",
    "kv_cache_usage_perc",
    "num_preemptions",
    "num_requests_waiting",
    "prompt_tokens",
)
METRIC_LINE = re.compile(rf"^vllm:({'|'.join(SCRAPED_METRICS)})(?:_total)?\{{(.*)\}} (\S+)$", re.MULTILINE)
"""Name, labels and value of a line of /metrics. A server with several engines has one line for each."""
METRIC_VALUE = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")

Logprob = Annotated[float, Field(lt=LOGPROB_TOLERANCE, allow_inf_nan=False)]


def _nan_unless_finite(value: Any) -> Any:
    """Return NaN for a number that is not finite, and for null, which some JSON encoders write instead of NaN."""
    return nan if value is None or (isinstance(value, float) and not isfinite(value)) else value


def _checked_logprob(value: float) -> float:
    if value >= LOGPROB_TOLERANCE:
        raise ValueError("expected at most 0")
    return value


class _Logprobs(BaseModel, strict=True):
    token_logprobs: list[Annotated[float, BeforeValidator(_nan_unless_finite), AfterValidator(_checked_logprob)]]


class _TokenLogprob(BaseModel, strict=True):
    logprob: Logprob


class _Choice(BaseModel, strict=True):
    token_ids: list[NonNegativeInt]
    finish_reason: str
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[str, _TokenLogprob] | None] | None = None
    """One entry per prompt id: log-probabilities by id, where the id is a decimal text. The first entry is None."""


class _Completion(BaseModel, strict=True):
    choices: tuple[_Choice]


class _LoadReport(BaseModel, strict=True):
    """The answer of a worker that has loaded weights (`trainer.sync.weight_group.checked_load`)."""

    checksums: dict[str, int]
    missing: list[str]
    differing: list[str]


class _LoadReports(BaseModel, strict=True):
    results: list[_LoadReport]


class _NotInJsonError(EngineError):
    """The server cannot write its answer as JSON, since a number in the answer is not finite."""


class VllmEngine:
    """One vLLM server, started as `trainer.engines.vllm_servers` does: with `--logprobs-mode processed_logprobs` and
    the development routes.

    The client belongs to the event loop that first uses it. A request that is cancelled closes its connection, so that
    vLLM drops the request.

    `max_num_seqs`: the server's `--max-num-seqs`.
    `timeout_s`: the timeout of each request except `generate`. The caller has to limit the time of `generate`.
    `share`: the part of the server's capacity that this process may use. It is less than 1 if several processes use
    the server, each with a scheduler of its own.
    """

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int = MAX_CONNECTIONS,
        name: str = "",
        timeout_s: float = 600.0,
        share: float = 1.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name or self.url
        self.weight_version = 0
        self._vocab_size, self._max_model_len, self._max_num_seqs = vocab_size, max_model_len, max_num_seqs
        self._timeout_s, self._share = timeout_s, share
        self._checksums: Mapping[str, int] = {}
        """Those of the last weights that the server has loaded and reported."""
        self._connections = asyncio.Semaphore(MAX_CONNECTIONS)
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue `ids`. Raises `EngineError`, and `ValueError` if the server rejects the request."""
        version = self.weight_version
        options = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_ids),
            "logprobs": 0,
        }
        async with self._connections:
            try:
                choice = await self._complete(ids, options, None)
            except _NotInJsonError:  # sample the same ids again (by the seed), without their log-probabilities
                choice = await self._complete(ids, {**options, "logprobs": None}, None)
                choice.logprobs = _Logprobs(token_logprobs=[nan] * len(choice.token_ids))
        sampled, reason = choice.token_ids, choice.finish_reason
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
        has_stop_token = bool(sampled) and sampled[-1] in sampling.stop_ids
        is_complete = (reason, has_stop_token) == ("stop", True) or (
            (reason, len(sampled)) == ("length", sampling.max_tokens)
        )
        if not is_complete:
            raise self._error(f"a stop id or {sampling.max_tokens} tokens", f"{len(sampled)} tokens, {reason!r}")
        if len(sampled) > sampling.max_tokens or len(sampled) != len(logprobs):
            raise self._error(
                f"at most {sampling.max_tokens} ids, each with a log-probability", f"{sampled}, {logprobs}"
            )
        if max(sampled, default=0) >= self._vocab_size:
            raise self._error(f"ids below {self._vocab_size}", sampled)
        return Generation(tuple(sampled), tuple(logprobs), has_stop_token, self.name, version)

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each of `ids[1:]` given the ids before it, at temperature 1."""
        options = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        scores = (await self._complete(ids, options, self._timeout_s)).prompt_logprobs or []
        if len(scores) != len(ids) or any(
            str(id) not in (by_id or {}) for id, by_id in zip(ids[1:], scores[1:], strict=True)
        ):
            raise self._error(f"prompt_logprobs of {len(ids)} ids", scores)
        return [by_id[str(id)].logprob for id, by_id in zip(ids[1:], scores[1:], strict=True) if by_id]

    async def check_alive(self) -> None:
        """Run the model, unless the server sleeps: it then counts as alive, although it answers no completion. Raises
        `EngineError`."""
        if not await self.is_sleeping():
            await self.logprobs(LIVENESS_IDS)

    async def is_sleeping(self) -> bool:
        """Return whether the weights or the KV cache have no memory. Completions then wait. Raises `EngineError`."""
        return "true" in await self._request("GET", "/is_sleeping", None, self._timeout_s)

    async def sleep(self) -> None:
        """Free the memory of the weights and the KV cache and drop their content (level 2 of vLLM's sleep mode). vLLM
        aborts running requests. Raises `EngineError`."""
        await self.post("/sleep?level=2", {})

    async def wake_up(self, tag: Literal["weights", "kv_cache"]) -> None:
        """Allocate memory for the weights or for the KV cache. The content of this memory is undefined. A server that
        is awake does nothing. Raises `EngineError`."""
        await self.post(f"/wake_up?tags={tag}", {})

    async def load_weights(self, directory: Path, version: int) -> None:
        """Load saved weights from a path that the server sees as well. No request may be in flight.

        If the directory has checksums, they are compared with those of the tensors that the server has read. This needs
        the trainer's worker extension in the server.
        """
        checksums = directory / CHECKSUMS_FILE
        if checksums.exists():
            arguments = {"method": "load_saved_weights", "kwargs": {"directory": str(directory)}}
            answer = await self.post("/collective_rpc", arguments)
            self.check_loaded(answer, json.loads(checksums.read_bytes()))
        else:
            await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
        await self.reset_prefix_cache(version)

    def check_loaded(self, answer: Any, checksums: Mapping[str, int]) -> None:
        """Check the reports of the server's workers about their last load of weights. `checksums` are those of the
        tensors that were sent.

        Raises `EngineError` if a worker has received other tensors, or has not loaded all of them.
        """
        try:
            reports = _LoadReports.model_validate(answer).results
        except ValidationError as error:
            raise self._error("a report of loaded weights", error) from error
        for report in reports:
            if report.missing:
                raise self._error("weights for all parameters", f"none for {', '.join(report.missing)}")
            if report.checksums != checksums:
                names = checksums.keys() | report.checksums.keys()
                others = sorted(name for name in names if checksums.get(name) != report.checksums.get(name))
                raise self._error("the tensors that were sent", f"others for {', '.join(others)}")
            if report.differing:
                raise self._error("parameters equal to the tensors", f"others in {', '.join(report.differing)}")
        self._checksums = checksums

    async def check_weights(self) -> None:
        """Run the model, and check that the server has not restarted with other weights. Raises `EngineError`."""
        await self.check_alive()
        if self._checksums:
            self.check_loaded(await self.post("/collective_rpc", {"method": "last_load_report"}), self._checksums)

    async def reset_prefix_cache(self, version: int) -> None:
        """Drop the KV cache, which belongs to the old weights. From now on, the weights of the server count as
        `version`."""
        answer = await self.post("/reset_prefix_cache", {})
        if answer is not None and not (isinstance(answer, dict) and answer.get("success") is True):
            raise self._error("an empty prefix cache", answer)
        self.weight_version = version

    async def capacity(self) -> EngineCapacity:
        """Return the size of the KV cache. Raises `EngineError`."""
        series = (await self._scrape())["cache_config_info"]
        kv_tokens, block_size = 0, 1
        for labels, _ in series:
            sizes = dict(re.findall(r'(\w+)="(\d+)"', labels))
            block_size = int(sizes.get("block_size", 0))
            kv_tokens += int(sizes.get("num_gpu_blocks", 0)) * block_size
        if not kv_tokens:
            raise self._error("vllm:cache_config_info in /metrics (start it without --disable-log-stats)", series)
        max_running = max(1, int(self._max_num_seqs * self._share))
        return EngineCapacity(int(kv_tokens * self._share), max_running, block_size)

    async def stats(self) -> EngineStats:
        """Return the server's counters. Raises `EngineError`."""
        values = {name: [value for _, value in series] for name, series in (await self._scrape()).items()}
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
        """Return the decoded JSON answer, or None if the answer is empty. Raises `EngineError`."""
        text = await self._request("POST", route, body, self._timeout_s)
        try:
            return json.loads(text or "null")
        except ValueError as error:
            raise self._error("JSON", text) from error

    async def _scrape(self) -> dict[str, list[tuple[str, float]]]:
        """Return the series of each scraped metric: labels and value."""
        text = await self._request("GET", "/metrics", None, self._timeout_s)
        series: dict[str, list[tuple[str, float]]] = {name: [] for name in SCRAPED_METRICS}
        for name, labels, value in METRIC_LINE.findall(text):
            if not METRIC_VALUE.fullmatch(value):
                raise self._error(f"vllm:{name} as a number in /metrics", value)
            series[name].append((labels, float(value)))
        return series

    async def _complete(self, ids: Sequence[int], options: Mapping[str, Any], timeout_s: float | None) -> _Choice:
        """Request a completion and return its only choice."""
        max_tokens = options["max_tokens"]
        if max_tokens < 1 or not 0 < len(ids) <= self._max_model_len - max_tokens:  # vLLM would silently sample fewer
            raise ValueError(
                f"expected 1 to {self._max_model_len} tokens in all, got {len(ids)} ids and max_tokens={max_tokens}"
            )
        fixed = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "return_token_ids": True}
        body = {"prompt": list(ids), "cache_salt": f"version {self.weight_version}", **fixed, **options}
        text = await self._request("POST", COMPLETIONS, body, timeout_s)
        try:
            return _Completion.model_validate_json(text).choices[0]
        except ValidationError as error:
            raise self._error("one choice with ids and log-probabilities of at most 0", error) from error

    async def _request(self, method: str, route: str, body: Any, timeout_s: float | None) -> str:
        if self._session is None:
            # A kept-alive connection may be closed by the server just as it is reused, which looks like a dead engine.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(method, self.url + route, json=body, timeout=timeout) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED:
                self.weight_version = 0  # the server has ended; after a restart it has its initial weights
            raise self._error(f"an answer of {route}", f"{type(error).__name__}: {error}") from error
        if status != 200 and NOT_IN_JSON in text:
            raise self._error("finite log-probabilities", f"{status}: {text}", _NotInJsonError)
        if status in (400, 422) and route == COMPLETIONS:
            raise ValueError(f"engine {self.name} rejected {str(body)[:200]}: {text[:500]}")
        if status != 200:
            raise self._error(f"status 200 of {route}", f"{status}: {text}")
        return text

    def _error(self, expected: str, got: object, kind: type[EngineError] = EngineError) -> EngineError:
        return kind(f"engine {self.name}: expected {expected}, got {str(got)[:500]}")
