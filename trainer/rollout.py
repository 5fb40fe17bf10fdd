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
- An interrupted episode has lost nothing but time: what was sampled is kept, a call that runs is awaited, and it goes
  on from there, once.
- Nothing is left running: every task belongs to a TaskGroup, and cancelling `collect` cancels them all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from trainer.chat import Asked, Chat, Malformed, parse
from trainer.config import SamplingConfig
from trainer.engine import EngineFailed, Generation, Sampling
from trainer.pool import Pool, Seat
from trainer.reward import score
from trainer.tools import PythonTool, Tools
from trainer.trajectory import CallStatus, Draft, Episode, Problem, StopReason, ToolCall, Turn

Clock = Callable[[], float]
IsEnough = Callable[[Sequence[float | None], int], bool]
"""Of the rewards of a problem's episodes so far, and how many more are to come: whether those can do without these."""
Run = Callable[..., Awaitable[None]]
"""`run_episode` but for its draft and seat."""


async def run_episode(
    draft: Draft,
    *,
    chat: Chat,
    seat: Seat,
    tools: Tools,
    how: SamplingConfig,
    seed: int,
    clock: Clock = time.perf_counter,
) -> None:
    """Carry on with an episode until it is over or interrupted: then its `stop` is still None.

    It ends as `unavailable` when an engine or the sandbox failed; without a single token only if no engine gave any.
    """
    began = clock()
    is_interrupted = False
    while draft.stop is None and not is_interrupted:
        asked_at = clock()
        left = how.max_tokens - len(draft.ids)
        its_seed = turn_seed(seed, draft.problem.id, draft.sample, len(draft.steps))
        wanted = Sampling(left, how.temperature, how.top_p, chat.stop_ids, its_seed)
        try:
            made = await seat.generate([*draft.prompt_ids, *draft.ids], wanted)
        except EngineFailed as why:
            draft.stop, draft.error = StopReason.UNAVAILABLE, f"engine: {why}"
            break
        draft.sampled(made.ids, made.logprobs, made.version)
        draft.generate_s += clock() - asked_at
        if is_interrupted := made.is_interrupted:
            break
        await _end_turn(draft, made, chat=chat, tools=tools, how=how, clock=clock)
    draft.seconds += clock() - began


async def _end_turn(
    draft: Draft, made: Generation, *, chat: Chat, tools: Tools, how: SamplingConfig, clock: Clock
) -> None:
    """Read what the model said, run its calls and show it what came of them, or end the episode."""
    generated_at = clock()
    start, end = draft.turn_start, len(draft.ids)
    text = chat.decode(draft.ids[start : end - made.is_stopped])
    said = parse(text)
    draft.answer_tags, draft.answer = draft.answer_tags + said.answer_tags, said.answer
    calls: list[ToolCall] = []
    if not made.is_stopped:
        draft.stop = StopReason.TOKEN_LIMIT
    elif not said.calls:
        draft.stop = StopReason.FINISHED
    elif len(draft.steps) + 1 >= how.max_turns:
        draft.stop = StopReason.TURN_LIMIT
    else:
        replies = await _run(said.calls, tools.python, how.tool_chars)
        calls = [call for call, _ in replies]
        error = next((why for _, why in replies if why), "")
        if any(call.status is CallStatus.UNAVAILABLE for call in calls):
            draft.stop, draft.error = StopReason.UNAVAILABLE, f"tool: {error}"
    tools_s = clock() - generated_at if calls else 0.0
    draft.steps.append(Turn(start, end, text, tuple(calls), made.engine, made.version, draft.generate_s, tools_s))
    if draft.stop is None:
        shown = chat.responses([call.response for call in calls])
        if end + len(shown) < how.max_tokens:
            draft.shown(shown)
            draft.turn_start, draft.generate_s = len(draft.ids), 0.0
        else:
            draft.stop = StopReason.TOKEN_LIMIT


class Collector:
    """Runs many episodes at once and scores them. Owns nothing: engines, tools and chat are its maker's."""

    def __init__(self, pool: Pool, chat: Chat, tools: Tools, *, clock: Clock = time.perf_counter) -> None:
        self._pool, self._chat, self._tools, self._clock = pool, chat, tools, clock
        self._seats: dict[Draft, Seat] = {}
        self._halted: set[Draft] = set()
        self.own_s = 0.0
        """CPU seconds that the event loop's thread took in the last call: waiting for others is not in it."""

    async def collect(self, problems: Sequence[Problem], samples: int, **asked: Any) -> list[list[Episode]]:
        """`samples` scored episodes of each problem, in order; `asked` is what `advance` takes."""
        groups = [[Draft(problem, sample) for sample in range(samples)] for problem in problems]
        return [episodes for episodes in await self.advance(groups, **asked) if episodes]

    async def advance(
        self,
        groups: Sequence[Sequence[Draft]],
        *,
        how: SamplingConfig,
        seed: int,
        wanted: int | None = None,
        due: int = 0,
        is_enough: IsEnough | None = None,
    ) -> list[list[Episode] | None]:
        """Carry on with the episodes of each problem until `wanted` groups are complete, the first `due` among them.

        The others are interrupted, and None in what comes back: their drafts say how far they came. `wanted` None is
        all. A group is scored as soon as it is complete. `is_enough` is asked whenever an episode is over, and may
        complete its group: what still runs of that is `cancelled`.

        Engines and tools that are down make episodes `unavailable`. Anything else that one of them raises ends all the
        episodes and is raised here, such as `ValueError` for a prompt that leaves no engine room for `max_tokens`.
        """
        began = time.thread_time()
        run = partial(run_episode, chat=self._chat, tools=self._tools, how=how, seed=seed, clock=self._clock)
        wanted = len(groups) if wanted is None else wanted
        over: list[list[Episode] | None] = [None] * len(groups)
        self._halted.clear()

        async def group(number: int) -> None:
            over[number] = await self._group(groups[number], run, how.max_tokens, is_enough)
            if sum(map(bool, over)) >= wanted and all(over[:due]):
                await self._halt([draft for drafts in groups for draft in drafts])

        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(len(groups)):
                    tasks.create_task(group(number))
        except ExceptionGroup as several:
            raise _first(several) from None
        self.own_s = time.thread_time() - began
        return over

    async def _group(
        self, drafts: Sequence[Draft], run: Run, max_tokens: int, is_enough: IsEnough | None
    ) -> list[Episode] | None:
        """The episodes of a problem once they are over; None if they were interrupted."""
        prompt = tuple(self._chat.prompt(drafts[0].problem.text))
        rewards: dict[Draft, float | None] = {}
        has_enough = False

        async def episode(draft: Draft) -> None:
            nonlocal has_enough
            draft.prompt_ids = prompt
            if not draft.stop:
                await self._episode(draft, run, len(prompt) + max_tokens)
            if draft.stop and is_enough:
                (rewards[draft],) = await score([draft], self._tools.verifier)
                if not has_enough and is_enough(list(rewards.values()), len(drafts) - len(rewards)):
                    has_enough = True
                    await self._halt(drafts)

        async with asyncio.TaskGroup() as tasks:
            for draft in drafts:
                tasks.create_task(episode(draft))
        for draft in drafts:
            if not draft.stop and has_enough:
                draft.stop = StopReason.CANCELLED
        if not all(draft.stop for draft in drafts):
            return None
        if not is_enough:
            rewards = dict(zip(drafts, await score(drafts, self._tools.verifier), strict=True))
        return [draft.episode(rewards.get(draft)) for draft in drafts]

    async def _episode(self, draft: Draft, run: Run, most_tokens: int) -> None:
        async with self._pool.seat(group=draft.problem.id, most_tokens=most_tokens) as seat:
            self._seats[draft] = seat
            try:
                if draft not in self._halted:
                    await run(draft, seat=seat)
            finally:
                del self._seats[draft]

    async def _halt(self, drafts: Iterable[Draft]) -> None:
        """Interrupt those that are not over. Tools that run for them are awaited."""
        left = [draft for draft in drafts if not draft.stop and draft not in self._halted]
        self._halted.update(left)
        if seats := [self._seats[draft] for draft in left if draft in self._seats]:
            await self._pool.interrupt(seats)


def turn_seed(seed: int, problem: str, sample: int, turn: int) -> int:
    """The seed of one stretch of sampling, of 63 bits: a hash of all that it may depend on."""
    return int.from_bytes(blake2b(f"{seed}/{sample}/{turn}/{problem}".encode(), digest_size=8).digest()) >> 1


def _first(several: ExceptionGroup[Exception]) -> Exception:
    """The exception that ended the others."""
    first = several.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first


async def _run(calls: Sequence[Asked | Malformed], tool: PythonTool, chars: int) -> list[tuple[ToolCall, str]]:
    """The calls of a turn, all at once, in order; with each what of ours failed."""
    if len(calls) == 1:  # as nearly always, and a task costs as much as parsing the call
        return [await _call(calls[0], tool, chars)]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_call(call, tool, chars)) for call in calls]
    return [task.result() for task in running]


async def _call(call: Asked | Malformed, tool: PythonTool, chars: int) -> tuple[ToolCall, str]:
    if isinstance(call, Malformed):
        response, is_cut = _cut(call.response, chars)
        return ToolCall("", call.text, "", CallStatus.MALFORMED, response, is_cut=is_cut), ""
    reply = await tool.run(call.name, call.arguments)
    response, is_cut = _cut(reply.response, chars)
    is_cut = is_cut or reply.is_cut
    return ToolCall(call.name, reply.code, reply.stdin, reply.status, response, reply.seconds, is_cut), reply.error


def _cut(text: str, chars: int) -> tuple[str, bool]:
    """At most `chars` of `text` from both ends, since a traceback says what happened in its last line; and whether."""
    if len(text) <= chars:
        return text, False
    tail = chars // 2
    head = chars - tail
    return f"{text[:head]}\n... {len(text) - chars} characters cut ...\n{text[len(text) - tail :]}", True
