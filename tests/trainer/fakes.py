"""Fakes of the engine pool, the tokenizer and the sandbox for tests of episodes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trainer.engines.busy_timer import BusyTimer
from trainer.engines.engine import Generation, SamplingParams
from trainer.episodes.episode import ToolCall, ToolCallStatus
from trainer.episodes.reward import VerifyOutcome

TAGS = [f"<{slash}{name}>" for name in ("tool_call", "tool_response", "think") for slash in ("", "/")]
"""Tags that Qwen's tokenizers have as tokens, though not as special ones."""
CORPUS = [
    "system user assistant tool Solve the following problem. What is the sum of 12 and 30, then times 7?\n",
    '<reason>I let Python do it.</reason>\n{"name": "execute_python_code_with_standard_io", "arguments": {"code": ',
    "print(12 + 30)\nimport math\nfor i in range(10):\n    total += i ** 2\nTraceback (most recent call last):\n",
    "The reasoning process is enclosed within <reason> </reason> and answer is enclosed within <answer> </answer> tags",
    "<answer>\n\\boxed{42}\n</answer> Größe, été, Ελληνικά, 数学, 🙂",
]
"""The texts on which the tokenizer is trained: words of the prompts, Python, and characters of several bytes."""


@cache
def qwen_tokenizer(template: str | None = None) -> Any:
    """Return a byte-level BPE of a few hundred tokens with Qwen's special chat tokens and its plain tags."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.normalizer = tokenizers.normalizers.NFC()
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(CORPUS * 3, trainer)
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    bpe.add_tokens(TAGS)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )


def released_template(name: str) -> str:
    """Return a chat template as a model was released with it, or as TRL changes it for training. TRL ships both."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.origin:
        pytest.skip("trl is not installed; it has the chat templates of released models")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


class FakePythonTool:
    """A Python tool without a sandbox.

    If `code` is a value of `ToolCallStatus`, such as `timeout`, the call ends with that status. Otherwise the response
    is `replies[code]`, or the code itself if it is not in `replies`.
    """

    def __init__(self, replies: Mapping[str, str] | None = None) -> None:
        self.replies = dict(replies or {})
        self.requests: list[tuple[str, str | Mapping[str, Any]]] = []

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolCall:
        self.requests.append((name, arguments))
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
            code = parsed["code"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return finished_call(ToolCallStatus.MALFORMED, f"{type(error).__name__}: {error}", arguments, name=name)
        if code == ToolCallStatus.UNAVAILABLE:
            return finished_call(ToolCallStatus.UNAVAILABLE, "", parsed, name=name, error="the fake sandbox is down")
        if code in set(ToolCallStatus):
            return finished_call(ToolCallStatus(code), f"it ended with {code}", parsed, name=name)
        return finished_call(ToolCallStatus.OK, self.replies.get(code, code), parsed, name=name)


class FakeVerifier:
    """A verifier for which equal texts are equivalent. An answer that is the name of an outcome gets this outcome."""

    def __init__(self) -> None:
        self.requests: list[list[tuple[str, str]]] = []

    async def verify(self, pairs: Sequence[tuple[str, str]]) -> list[VerifyOutcome]:
        self.requests.append(list(pairs))
        return [self._outcome(expected, answer) for expected, answer in pairs]

    @staticmethod
    def _outcome(expected: str, answer: str) -> VerifyOutcome:
        if answer in set(VerifyOutcome):
            return VerifyOutcome(answer)
        return VerifyOutcome.EQUIVALENT if expected == answer else VerifyOutcome.NOT_EQUIVALENT


END = "<|im_end|>"
Script = Callable[[str, SamplingParams], str]
"""Takes the context as text and returns the turn's text. Without `END`, `max_tokens` truncates it."""
Pause = Callable[[], Awaitable[None]]
"""Awaited in the middle of each turn or tool call, to control the order of events."""


@dataclass
class ScriptedPool:
    """A pool whose turns come from a script."""

    script: Script
    pause: Pause = lambda: asyncio.sleep(0)
    weight_version: int = 3
    requests: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    """The context and the sampling parameters of every turn."""
    open_groups: list[str] = field(default_factory=list)
    """The group of each open handle."""
    busy_timer: BusyTimer = field(default_factory=BusyTimer)

    @asynccontextmanager
    async def open_episode(self, *, group: str, max_context_tokens: int) -> AsyncIterator[ScriptedHandle]:
        assert max_context_tokens > 0
        self.open_groups.append(group)
        try:
            yield ScriptedHandle(self)
        finally:
            self.open_groups.remove(group)

    def set_weight_version(self, version: int) -> None:
        self.weight_version = version

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Generate a turn, so that a test of one episode can use the pool as its handle."""
        return await ScriptedHandle(self).generate(ids, sampling)


@dataclass
class ScriptedHandle:
    pool: ScriptedPool

    def close(self, length: int | None) -> None: ...

    async def generate(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        pool, tokenizer = self.pool, qwen_tokenizer()
        pool.requests.append((list(ids), sampling))
        await pool.pause()
        text = pool.script(tokenizer.decode(ids), sampling)
        sampled = tokenizer.encode(text, add_special_tokens=False)[: sampling.max_tokens]
        turn_ends = [index for index, token_id in enumerate(sampled, 1) if token_id in sampling.stop_ids]
        sampled = sampled[: turn_ends[0]] if turn_ends else sampled
        has_stop_token = sampled[-1] in sampling.stop_ids
        logprobs = tuple(map(scripted_logprob, sampled))
        return Generation(tuple(sampled), logprobs, has_stop_token, "scripted", pool.weight_version)


def scripted_logprob(token_id: int) -> float:
    """Return the log-probability that a `ScriptedPool` reports for a token: a multiple of 1/8, which floats represent
    exactly."""
    return -(1 + token_id % 7) / 8


@dataclass
class ScriptedTools:
    """A tool whose response is `replies(code)` after a pause, and a `FakeVerifier`."""

    replies: Callable[[str], ToolCall | str] = lambda code: code
    pause: Pause = lambda: asyncio.sleep(0)
    verifier: FakeVerifier = field(default_factory=FakeVerifier)
    running: list[str] = field(default_factory=list)
    """The code of each running call."""
    max_running: int = 0
    """The largest number of calls that ran at once."""

    async def verify(self, pairs: Sequence[tuple[str, str]]) -> list[VerifyOutcome]:
        return await self.verifier.verify(pairs)

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolCall:
        assert name == "python" and isinstance(arguments, Mapping)
        code = arguments["code"]
        self.running.append(code)
        self.max_running = max(self.max_running, len(self.running))
        try:
            await self.pause()
            reply = self.replies(code)
            return reply if isinstance(reply, ToolCall) else finished_call(ToolCallStatus.OK, reply, {"code": code})
        finally:
            self.running.remove(code)


def finished_call(
    status: ToolCallStatus,
    response: str,
    arguments: str | Mapping[str, Any] = "",
    *,
    name: str = "python",
    **fields: Any,
) -> ToolCall:
    return ToolCall(name, arguments, status, response, **fields)


def call_text(code: str = "print(1)", **arguments: str) -> str:
    """Return a tool call as a model writes it."""
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code, **arguments}})}\n</tool_call>"


def answer_text(value: str) -> str:
    """Return an answer as a model writes it."""
    return f"<answer>\\boxed{{{value}}}</answer>"
