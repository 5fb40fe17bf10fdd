"""Episodes: a problem is put to the model, its tool calls are run and answered, until it stops or a limit is met.

Invariants:
- Token in, token out. What was sampled is kept as sampled; what the model reads in between is appended, never inserted.
- The model's failures are data: a malformed call is answered with what was wrong. Ours (no engine, no verdict of the
  sandbox) end the episode as `unavailable`, are never shown to the model, and leave its reward None.
- An episode has at most `max_tokens` tokens after its prompt, tool tokens included. A tool response that leaves no room
  to go on is not appended.
- A call counts once it is run. Those in a turn that `max_tokens` cut off, or in the last turn of `max_turns`, are not
  run, since nobody would read the response.
- What is sampled follows from (weights, problem, sample, turn, seed), never from the order in which things happen.
- Nothing is left running: every task belongs to a TaskGroup, and cancelling `collect` cancels them all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

from trainer.chat import Asked, Chat, Malformed
from trainer.engine import EngineFailed, Generation, Sampling
from trainer.reward import Verifier, score
from trainer.tools import ToolReply
from trainer.trajectory import CallStatus, Episode, Problem, StopReason, ToolCall, Trajectory, Turn

CUT_NOTE_CHARS = 100
"""What a tool may add to `tool_chars` by saying itself that it has cut. Without this room its note would be cut out."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Where an episode ends whatever the model wants: tokens after the prompt, turns, characters of a tool response."""

    max_tokens: int
    max_turns: int
    tool_chars: int = 4096


class Seat(Protocol):
    """An episode's place at an engine."""

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `ids`. Raises `EngineFailed` when no engine is left."""
        ...


class Pool(Protocol):
    def seat(self, *, group: str, most_tokens: int) -> AbstractAsyncContextManager[Seat]: ...


class Tool(Protocol):
    async def run(self, name: str, arguments: str | Mapping[str, Any]) -> ToolReply: ...


class Tools(Protocol):
    """What is needed of the sandbox."""

    @property
    def python(self) -> Tool: ...
    @property
    def verifier(self) -> Verifier: ...


async def run_episode(
    problem: Problem,
    sample: int,
    *,
    chat: Chat,
    seat: Seat,
    tools: Tools,
    limits: EpisodeLimits,
    sampling: Sampling,
    seed: int,
    prompt: list[int] | None = None,
    clock: Clock = time.perf_counter,
) -> Episode:
    """One rollout of `problem`, not yet scored. `sampling` gives temperature and top-p; each turn sets the rest of it.
    `prompt` are the ids that `chat` makes of the problem, where they are at hand.

    It is `unavailable` when an engine or the sandbox failed. Without a single token only if no engine gave any.
    """
    started = clock()
    prompt = chat.prompt(problem.text) if prompt is None else prompt
    track = Trajectory()
    turns: list[Turn] = []
    answer_tags, answer, error = 0, None, ""
    stop: StopReason | None = None
    while stop is None:
        asked_at, start = clock(), len(track)
        sampling = replace(
            sampling,
            max_tokens=limits.max_tokens - start,
            stop_ids=chat.stop_ids,
            seed=turn_seed(seed, problem.id, sample, len(turns)),
        )
        try:
            made = await seat.generate(prompt + track.ids, sampling)
        except EngineFailed as why:
            stop, error = StopReason.UNAVAILABLE, f"engine: {why}"
            break
        generated_at = clock()
        track.sampled(made.ids, made.logprobs)
        text = chat.decode(made.ids[:-1] if made.is_stopped else made.ids)
        said = chat.parse(text)
        answer_tags, answer = answer_tags + said.answer_tags, said.answer

        calls: list[ToolCall] = []
        if not made.is_stopped:
            stop = StopReason.TOKEN_LIMIT
        elif not said.calls:
            stop = StopReason.FINISHED
        elif len(turns) + 1 >= limits.max_turns:
            stop = StopReason.TURN_LIMIT
        else:
            replies = await _run(said.calls, tools.python, limits.tool_chars)
            calls = [call for call, _ in replies]
            error = next((why for _, why in replies if why), "")
            if any(call.status is CallStatus.UNAVAILABLE for call in calls):
                stop, error = StopReason.UNAVAILABLE, f"tool: {error}"
        spent = {"generate_s": generated_at - asked_at, "tools_s": clock() - generated_at if calls else 0.0}
        turns.append(Turn(start, len(track), text, tuple(calls), made.engine, made.version, **spent))
        if stop is None:
            shown = chat.responses([call.response for call in calls])
            if len(track) + len(shown) < limits.max_tokens:
                track.shown(shown)
            else:
                stop = StopReason.TOKEN_LIMIT
    return Episode(
        problem,
        sample,
        prompt_ids=tuple(prompt),
        ids=tuple(track.ids),
        logprobs=tuple(track.logprobs),
        mask=tuple(track.mask),
        steps=tuple(turns),
        stop=stop,
        answer=answer,
        answer_tags=answer_tags,
        seconds=clock() - started,
        error=error,
    )


class Collector:
    """Runs many episodes at once and scores them. Owns nothing: engines, tools and chat are its maker's."""

    def __init__(self, pool: Pool, chat: Chat, tools: Tools, *, clock: Clock = time.perf_counter) -> None:
        self._pool, self._chat, self._tools, self._clock = pool, chat, tools, clock
        self.own_s = 0.0
        """CPU seconds that the event loop's thread took in the last `collect`: waiting for others is not in it."""

    async def collect(
        self,
        problems: Sequence[Problem],
        samples: int,
        *,
        limits: EpisodeLimits,
        temperature: float,
        top_p: float,
        seed: int,
    ) -> list[list[Episode]]:
        """`samples` scored episodes of each problem, in order. A group is scored as soon as it is complete.

        Engines and tools that are down make episodes `unavailable`. Anything else that one of them raises ends all the
        episodes and is raised here, such as `ValueError` for a prompt that leaves no engine room for `max_tokens`.
        """
        began = time.thread_time()
        sampling = Sampling(limits.max_tokens, temperature, top_p)

        async def group(problem: Problem) -> list[Episode]:
            prompt = self._chat.prompt(problem.text)
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(episode(problem, i, prompt)) for i in range(samples)]
            return await score([task.result() for task in running], self._tools.verifier)

        async def episode(problem: Problem, sample: int, prompt: list[int]) -> Episode:
            run = partial(run_episode, problem, sample, chat=self._chat, tools=self._tools, limits=limits)
            run = partial(run, sampling=sampling, seed=seed, prompt=prompt, clock=self._clock)
            async with self._pool.seat(group=problem.id, most_tokens=len(prompt) + limits.max_tokens) as seat:
                return await run(seat=seat)

        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(group(problem)) for problem in problems]
        except ExceptionGroup as several:
            raise _first(several) from None
        self.own_s = time.thread_time() - began
        return [task.result() for task in groups]


def turn_seed(seed: int, problem: str, sample: int, turn: int) -> int:
    """The seed of one stretch of sampling, of 63 bits: a hash of all that it may depend on."""
    return int.from_bytes(blake2b(f"{seed}/{sample}/{turn}/{problem}".encode(), digest_size=8).digest()) >> 1


def _first(several: ExceptionGroup[Exception]) -> Exception:
    """The exception that ended the others."""
    first = several.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first


async def _run(calls: Sequence[Asked | Malformed], tool: Tool, chars: int) -> list[tuple[ToolCall, str]]:
    """The calls of a turn, all at once, in order; with each what of ours failed."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_call(call, tool, chars)) for call in calls]
    return [task.result() for task in running]


async def _call(call: Asked | Malformed, tool: Tool, chars: int) -> tuple[ToolCall, str]:
    if isinstance(call, Malformed):
        response, is_cut = _cut(call.response, chars)
        return ToolCall("", call.text, "", CallStatus.MALFORMED, response, is_cut=is_cut), ""
    reply = await tool.run(call.name, call.arguments)
    response, is_cut = _cut(reply.response, chars)
    is_cut = is_cut or reply.is_cut
    return ToolCall(call.name, reply.code, reply.stdin, reply.status, response, reply.seconds, is_cut), reply.error


def _cut(text: str, chars: int) -> tuple[str, bool]:
    """At most `chars` of `text` from both ends, since a traceback says what happened in its last line; and whether."""
    if len(text) <= chars + CUT_NOTE_CHARS:
        return text, False
    tail = chars // 2
    head = chars - tail
    return f"{text[:head]}\n... {len(text) - chars} characters cut ...\n{text[len(text) - tail :]}", True
