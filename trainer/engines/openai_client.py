"""A client of one server with OpenAI's completions API: SGLang, llama.cpp, TGI, vLLM, or a hosted service.

    ids -> text -> POST /v1/completions -> text -> ids      both conversions by this process's tokenizer

Invariants:
- Every answer is validated before it is used. A turn has at most `max_tokens` ids of this process's tokenizer.
- Log-probabilities are returned only if the server's tokens are exactly the ids of the turn. Otherwise they are None.
- Text that merely spells a special token, for example in a tool response, must not become this token at the server. So
  a context that is sent as text is encoded again first. If the new ids have other special tokens, it is not sent.
- A server may refuse requests for some time. In this time it gets no new request. Requests that it has accepted go on.
- The API key is sent in a header, and is removed from answers that repeat it. So the key is never logged or stored.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from unicodedata import normalize

import aiohttp
from pydantic import ValidationError

from trainer.config import EnginesConfig
from trainer.engines.engine import EngineCapacity, EngineError, Generation, SamplingParams, TurnError
from trainer.engines.openai_answer import Choice, Completion, aligned_logprobs, retry_after_s

COMPLETIONS = "/v1/completions"
CONNECT_TIMEOUT_S = 30.0
CHECK_TIMEOUT_S = 60.0
CHECK_TEXT = "1 + 1 ="
MAX_ANSWER_BYTES = 64 << 20
MAX_SHOWN_CHARS = 500
"""Characters of an answer in an error message."""
MAX_REFUSALS = 6
"""A request fails after the server has refused it this number of times."""
MAX_PAUSE_S = 60.0
"""A request fails if the server refuses it for longer than this."""
KV_TOKENS_FACTOR = 2
"""The size of the server's KV cache is unknown. The scheduler assumes that the cache holds this multiple of the
tokens of all running turns at their maximum length. So only the number of running turns limits the scheduler."""
SEED_LIMIT = 1 << 31
"""Seeds are sent modulo this, since some servers accept no larger ones."""
CONTENT_FILTER = "content_filter"


class TextTokenizer(Protocol):
    """The part of a `transformers` tokenizer that this module uses."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...
    def get_added_vocab(self) -> dict[str, int]: ...


class OpenAIEngine:
    """One server. The weights are the server's own: they cannot be synced, and their version is always 0.

    The client belongs to the event loop that first uses it. Cancelling a request closes its connection.
    `share` is the part of `settings.max_num_seqs` that this process may use. The caller has to limit the time of
    `generate`.
    """

    def __init__(
        self, url: str, tokenizer: TextTokenizer, settings: EnginesConfig, *, api_key: str = "", share: float = 1.0
    ) -> None:
        self.name = self.url = url.rstrip("/").removesuffix("/v1")
        self.weight_version = 0
        self._tokenizer, self._settings, self._api_key, self._share = tokenizer, settings, api_key, share
        self._added_ids = frozenset(tokenizer.get_added_vocab().values())
        self._session: aiohttp.ClientSession | None = None
        self._refuses_until = 0.0
        """Time of the event loop before which no new request is sent, because the server has refused one."""

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Continue `ids`. Raises `EngineError`, and `ValueError` for a request that the server rejects as wrong."""
        max_len = self._settings.max_model_len
        if not sampling.stop_ids or sampling.max_tokens < 1 or not 0 < len(ids) <= max_len - sampling.max_tokens:
            raise ValueError(
                f"expected stop ids and 1 to {max_len} tokens in all, got stop_ids={sampling.stop_ids}, {len(ids)} ids "
                f"and max_tokens={sampling.max_tokens}"
            )
        return await self._sample(ids, sampling)

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        raise ValueError(f"engine {self.name}: OpenAI's API does not score given tokens")

    async def check_alive(self) -> None:
        """Sample one token. Raises `EngineError`, and `ValueError` if the server rejects the settings."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await self._complete(self._encode(CHECK_TEXT), SamplingParams(1))
        except TimeoutError as error:
            raise self._error(f"an answer of {COMPLETIONS}", f"none in {CHECK_TIMEOUT_S:g} s") from error

    async def capacity(self) -> EngineCapacity:
        """Check the server. Raises `EngineError`."""
        await self.check_alive()
        max_running = max(1, int(self._settings.max_num_seqs * self._share))
        return EngineCapacity(KV_TOKENS_FACTOR * max_running * self._settings.max_model_len, max_running)

    async def stats(self) -> None:
        return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # --- answers ---

    async def _sample(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        choice = await self._complete(ids, sampling)
        text, reason = choice.text, choice.finish_reason
        if reason == CONTENT_FILTER:
            raise self._error("a turn", "a turn that the server's content filter has removed", TurnError)
        if text is None:
            raise self._error("text", f"null, and finish_reason {reason!r}")
        stops = self._stop_strings(sampling)
        ending = next((stop for stop in stops if text.endswith(stop)), "")  # some servers return the stop string
        text, is_stopped = text.removesuffix(ending), reason == "stop" or bool(ending)
        if reason not in ("stop", "length") or any(stop in text for stop in stops):
            raise self._error(f"text without any of {stops}, and finish_reason stop or length", f"{reason!r}: {text}")
        sampled = self._encode(text)
        if normalize("NFC", self._decode(sampled)) != normalize("NFC", text):
            raise self._error("text that the tokenizer can represent", text, TurnError)
        if not sampled and not is_stopped:
            raise self._error("a token", f"no text and finish_reason {reason!r}")
        # A server does not say which stop string ended the turn. So each stop id is tried as the last token: the first
        # one with which the ids are those of the server's log-probabilities, or else the first of all.
        candidates = [[*sampled, stop] for stop in sampling.stop_ids] if is_stopped else [sampled]
        sampled, logprobs = candidates[0], None
        if self._settings.request_logprobs:
            scored = [(candidate, aligned_logprobs(choice, candidate, self._decode)) for candidate in candidates]
            sampled, logprobs = next((pair for pair in scored if pair[1] is not None), scored[0])
        limit = sampling.max_tokens  # the server has counted tokens of its own tokenizer
        return Generation(
            tuple(sampled[:limit]),
            None if logprobs is None else tuple(logprobs[:limit]),
            is_stopped and len(sampled) <= limit,
            self.name,
            self.weight_version,
        )

    # --- requests ---

    async def _complete(self, ids: Sequence[int], sampling: SamplingParams) -> Choice:
        """Request a completion and return its only choice."""
        settings, stops = self._settings, self._stop_strings(sampling)
        body: dict[str, Any] = {
            **settings.extra_body,
            "model": settings.model_name,
            "prompt": list(ids) if settings.prompt_format == "ids" else self._prompt_text(ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if stops:
            body["stop"] = stops
        if settings.send_seed and sampling.seed is not None:
            body["seed"] = sampling.seed % SEED_LIMIT
        if settings.request_logprobs:
            body["logprobs"] = 1
        answer = await self._post_until_accepted(body)
        try:
            return Completion.model_validate_json(answer).choices[0]
        except ValidationError as error:
            raise self._error("one choice with text and finish_reason", error) from error

    def _stop_strings(self, sampling: SamplingParams) -> list[str]:
        ends = [self._decode([id]) for id in sampling.stop_ids]
        return list(dict.fromkeys([*ends, *self._settings.stop_strings]))

    def _prompt_text(self, ids: Sequence[int]) -> str:
        text = self._decode(ids)
        special = [id for id in ids if id in self._added_ids]
        special_in_text = [id for id in self._encode(text) if id in self._added_ids]
        if special_in_text != special:
            raise self._error(
                "a context whose text does not spell special tokens (or set engines.prompt_format to ids)",
                [self._decode([id]) for id in Counter(special_in_text) - Counter(special)],
                TurnError,
            )
        return text

    async def _post_until_accepted(self, body: Mapping[str, Any]) -> bytes:
        """Send a request until the server does not refuse it. A refusal is status 429, or 503 with Retry-After. After
        each refusal, the request is sent again later."""
        now = asyncio.get_running_loop().time
        for refusals in range(MAX_REFUSALS):
            await self._wait_while_refused(max_extra_s=1.0 * refusals)  # 1 s more after each refusal
            status, requested_pause_s, answer = await self._post(body)
            if status != 429 and (status != 503 or requested_pause_s is None):
                break
            pause_s = 2.0**refusals if requested_pause_s is None else requested_pause_s
            self._refuses_until = max(self._refuses_until, now() + pause_s)
            if pause_s > MAX_PAUSE_S:
                break
        if status == 200:
            return answer
        text = answer.decode(errors="replace")
        if status in (400, 413, 422):
            if CONTENT_FILTER in text:
                raise self._error("a turn", f"status {status}: {text}", TurnError)
            raise ValueError(f"engine {self.name} rejected the request: {text[:MAX_SHOWN_CHARS]}")
        raise self._error(f"status 200 of {COMPLETIONS}", f"{status}: {text}")

    async def _wait_while_refused(self, max_extra_s: float) -> None:
        """Wait until the server may accept requests again. Then wait for up to `max_extra_s` more, a random time that
        spreads the requests."""
        now = asyncio.get_running_loop().time
        while (wait_s := self._refuses_until - now()) > 0:  # noqa: ASYNC110  # other requests may prolong it
            await asyncio.sleep(wait_s + random.uniform(0, max_extra_s))

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, float | None, bytes]:
        """Return status, seconds of Retry-After, and content."""
        if self._session is None:
            # A kept-alive connection may be closed by the server just as it is reused, which looks like a dead engine.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
            self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        content, key = bytearray(), self._api_key.encode()
        try:
            async with self._session.post(
                self.url + COMPLETIONS, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        raise self._error(f"an answer of at most {MAX_ANSWER_BYTES} bytes", "a longer one")
                pause_s = retry_after_s(response.headers.get("Retry-After", ""))
                return response.status, pause_s, bytes(content.replace(key, b"***") if key else content)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._error(f"an answer of {COMPLETIONS}", f"{type(error).__name__}: {error}") from error

    # --- helpers ---

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _error(self, expected: str, got: object, kind: type[EngineError] = EngineError) -> EngineError:
        return kind(f"engine {self.name}: expected {expected}, got {str(got)[:MAX_SHOWN_CHARS]}")
