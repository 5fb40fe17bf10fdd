"""Runs the turns of an episode: generates a turn, runs its tool calls, appends their responses, and repeats this until
the episode has a stop reason.

Invariants:
- Sampled ids are never changed or re-tokenized; observations are appended after them.
- A failure of the model is data: a malformed call gets a response that says what is wrong. An infrastructure failure
  (no engine, no sandbox) ends the episode as `unavailable` and is never shown to the model.
- The response has at most `max_response_tokens` tokens, tool responses included. A tool response that leaves no room
  for another turn is not appended.
- Tool calls in a truncated turn or in the last turn of `max_turns` are not run, because no turn would read them.
- The sampled tokens depend only on (weights, problem, sample, turn, seed), never on timing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from trainer.config import SamplingConfig
from trainer.engines.busy_timer import BusyTimer
from trainer.engines.engine import EngineError, Generation, SamplingParams
from trainer.engines.pool import EpisodeHandle
from trainer.episodes.chat_format import ChatFormat
from trainer.episodes.episode import Episode, StopReason, ToolCall, ToolCallStatus, Turn
from trainer.episodes.turn_parser import MalformedCall, ToolCallRequest, parse_turn, without_thoughts

T = TypeVar("T")


class Tool(Protocol):
    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> ToolCall:
        """Run one tool call. Raises nothing but cancellation."""


@dataclass(frozen=True, slots=True)
class TurnLoop:
    """Runs the turns of episodes with one chat format, tool and set of limits.

    `busy_timer`: runs during tool calls.
    `clock`: measures durations in seconds.
    `on_turn`: called with the episode after each turn except the last, when the tool responses are appended.
    """

    chat_format: ChatFormat
    tool: Tool
    limits: SamplingConfig
    seed: int
    busy_timer: BusyTimer
    clock: Callable[[], float] = time.perf_counter
    on_turn: Callable[[Episode], None] = lambda _episode: None

    async def run(self, episode: Episode, handle: EpisodeHandle) -> None:
        """Continue an episode until it has a stop reason."""
        while episode.stop_reason is None:
            requested_at = self.clock()
            sampling = SamplingParams(
                max_tokens=self.limits.max_response_tokens - len(episode.response_ids),
                temperature=self.limits.temperature,
                top_p=self.limits.top_p,
                stop_ids=self.chat_format.stop_ids,
                seed=turn_seed(self.seed, episode.problem.id, episode.sample, len(episode.turns)),
            )
            try:
                generation = await handle.generate([*episode.prompt_ids, *episode.response_ids], sampling)
            except EngineError as error:
                episode.stop_reason, episode.error = StopReason.UNAVAILABLE, f"engine: {error}"
                episode.duration_s += self.clock() - requested_at
                break
            await self._finish_turn(episode, generation, self.clock() - requested_at - generation.wait_s)
            episode.duration_s += self.clock() - requested_at
            if episode.stop_reason is None:
                self.on_turn(episode)

    async def _finish_turn(self, episode: Episode, generation: Generation, generate_s: float) -> None:
        """Append the turn and parse it. Run its tool calls and append their responses, or end the episode."""
        generated_at, start = self.clock(), len(episode.response_ids)
        episode.append_sampled(generation.ids, generation.logprobs, generation.weight_version)
        end = len(episode.response_ids)
        text = self.chat_format.decode(episode.response_ids[start : end - generation.has_stop_token])
        parsed = parse_turn(text)
        if parsed.answer_blocks:
            episode.answer_blocks += parsed.answer_blocks
            episode.answer = parsed.answer
        tool_calls: list[ToolCall] = []
        if not generation.has_stop_token:
            episode.stop_reason = StopReason.TOKEN_LIMIT
        elif not parsed.tool_calls:
            episode.stop_reason = StopReason.FINISHED
            if not self.chat_format.needs_answer_tags:  # the answer check finds the answer in the text
                episode.answer = episode.answer or without_thoughts(text).strip() or None
        elif len(episode.turns) + 1 >= self.limits.max_turns:
            episode.stop_reason = StopReason.TURN_LIMIT
        else:
            with self.busy_timer:
                tool_calls = await run_all(map(self._run_tool_call, parsed.tool_calls))
            if errors := [call.error for call in tool_calls if call.status is ToolCallStatus.UNAVAILABLE]:
                episode.stop_reason, episode.error = StopReason.UNAVAILABLE, f"tool: {errors[0]}"
        turn = Turn(
            start=start,
            end=end,
            text=text,
            tool_calls=tuple(tool_calls),
            engine=generation.engine,
            weight_version=generation.weight_version,
            wait_s=generation.wait_s,
            generate_s=generate_s,
            tool_s=self.clock() - generated_at if tool_calls else 0.0,
        )
        episode.turns.append(turn)
        if any(call.ends_episode for call in tool_calls):
            episode.stop_reason = episode.stop_reason or StopReason.FINISHED
        if episode.stop_reason is None:
            observation = self.chat_format.encode_tool_responses([call.response for call in tool_calls])
            if end + len(observation) < self.limits.max_response_tokens:
                episode.append_observation(observation)
            else:
                episode.stop_reason = StopReason.TOKEN_LIMIT

    async def _run_tool_call(self, request: ToolCallRequest | MalformedCall) -> ToolCall:
        if isinstance(request, MalformedCall):
            call = ToolCall("", request.text, ToolCallStatus.MALFORMED, request.response)
        else:
            call = await self.tool.call(request.name, request.arguments)
        return truncate_response(call, self.limits.max_tool_response_chars)


async def run_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time, and return their results in order. The first exception of one of them cancels
    the others and is raised."""
    first, *others = coroutines
    if not others:  # the usual case, without a task: creating one takes as long as parsing a tool call
        return [await first]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in (first, *others)]
    except ExceptionGroup as group:
        raise root_cause(group) from None
    return [task.result() for task in running]


def root_cause(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first exception of the group. It has caused the cancellation of the other tasks."""
    first = group.exceptions[0]
    return root_cause(first) if isinstance(first, ExceptionGroup) else first


def turn_seed(seed: int, problem: str, sample: int, turn: int) -> int:
    """Return the 63-bit seed of one turn: a hash of everything that its samples may depend on."""
    return int.from_bytes(blake2b(f"{seed}/{sample}/{turn}/{problem}".encode(), digest_size=8).digest()) >> 1


def truncate_response(call: ToolCall, max_chars: int) -> ToolCall:
    """Shorten a response to `max_chars` characters: half from its start, and half from its end. The end is kept because
    the last line of a traceback names the error. Unpaired surrogates become "?", since a file of episodes cannot hold
    them."""
    text, tail = call.response.encode("utf-8", "replace").decode(), max_chars // 2
    if len(text) <= max_chars:
        return call if text == call.response else replace(call, response=text)
    shortened = (
        f"{text[: max_chars - tail]}\n... {len(text) - max_chars} characters cut ...\n{text[len(text) - tail :]}"
    )
    return replace(call, response=shortened, is_truncated=True)
