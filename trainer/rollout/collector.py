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
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from trainer.config import SamplingConfig
from trainer.engines.pool import Busy, Pool, Seat
from trainer.engines.vllm_client import EngineFailed, Generation, Sampling
from trainer.environments.python_tool import Tools
from trainer.episodes.chat_format import ChatFormat
from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus, Turn
from trainer.episodes.reward import score_episodes
from trainer.episodes.turn_parser import MalformedCall, ToolCallRequest, parse_turn

Clock = Callable[[], float]
IsEnough = Callable[[Sequence[float | None], int], bool]
"""Of the rewards of a problem's episodes so far, and how many more are to come: whether those can do without these."""
Run = Callable[..., Awaitable[None]]
"""`run_episode` but for its episode and seat."""


async def run_episode(
    episode: Episode,
    *,
    chat: ChatFormat,
    seat: Seat,
    tools: Tools,
    how: SamplingConfig,
    seed: int,
    busy: Busy,
    clock: Clock = time.perf_counter,
) -> None:
    """Carry on with an episode until it is over or interrupted: then its `stop` is still None.

    It ends as `unavailable` when an engine or the sandbox failed; without a single token only if no engine gave any.
    """
    began = clock()
    is_interrupted = False
    while episode.stop_reason is None and not is_interrupted:
        asked_at = clock()
        left = how.max_response_tokens - len(episode.response_ids)
        its_seed = turn_seed(seed, episode.problem.id, episode.sample, len(episode.turns))
        wanted = Sampling(left, how.temperature, how.top_p, chat.stop_ids, its_seed)
        try:
            made = await seat.generate([*episode.prompt_ids, *episode.response_ids], wanted)
        except EngineFailed as why:
            episode.stop_reason, episode.error = StopReason.UNAVAILABLE, f"engine: {why}"
            break
        episode.append_sampled(made.ids, made.logprobs, made.version)
        episode.turn_generate_s += clock() - asked_at
        if is_interrupted := made.is_interrupted:
            break
        await _end_turn(episode, made, chat=chat, tools=tools, how=how, clock=clock, busy=busy)
    episode.duration_s += clock() - began


async def _end_turn(
    episode: Episode,
    made: Generation,
    *,
    chat: ChatFormat,
    tools: Tools,
    how: SamplingConfig,
    clock: Clock,
    busy: Busy,
) -> None:
    """Read what the model said, run its calls and show it what came of them, or end the episode."""
    generated_at = clock()
    start, end = episode.turn_start, len(episode.response_ids)
    text = chat.decode(episode.response_ids[start : end - made.is_stopped])
    said = parse_turn(text)
    episode.answer_blocks, episode.answer = episode.answer_blocks + said.answer_blocks, said.answer
    calls: list[ToolCall] = []
    if not made.is_stopped:
        episode.stop_reason = StopReason.TOKEN_LIMIT
    elif not said.tool_calls:
        episode.stop_reason = StopReason.FINISHED
    elif len(episode.turns) + 1 >= how.max_turns:
        episode.stop_reason = StopReason.TURN_LIMIT
    else:
        with busy:
            calls = await _run(said.tool_calls, tools, how.max_tool_response_chars)
        if lost := [call.error for call in calls if call.status is ToolCallStatus.UNAVAILABLE]:
            episode.stop_reason, episode.error = StopReason.UNAVAILABLE, f"tool: {lost[0]}"
    tools_s = clock() - generated_at if calls else 0.0
    episode.turns.append(
        Turn(start, end, text, tuple(calls), made.engine, made.version, episode.turn_generate_s, tools_s)
    )
    if episode.stop_reason is None:
        shown = chat.encode_tool_responses([call.response for call in calls])
        if end + len(shown) < how.max_response_tokens:
            episode.append_observation(shown)
            episode.turn_start, episode.turn_generate_s = len(episode.response_ids), 0.0
        else:
            episode.stop_reason = StopReason.TOKEN_LIMIT


class Collector:
    """Runs many episodes at once and scores them. Owns nothing: engines, tools and chat are its maker's."""

    def __init__(self, pool: Pool, chat: ChatFormat, tools: Tools, *, clock: Clock = time.perf_counter) -> None:
        self._pool, self._chat, self._tools, self._clock = pool, chat, tools, clock
        self._seats: dict[Episode, Seat] = {}
        self._halted: set[Episode] = set()
        self.own_s = 0.0
        """CPU seconds that the event loop's thread took in the last call: waiting for others is not in it."""
        self.idle_s = 0.0
        """Seconds of the last call in which no engine worked at a turn, no tool ran and no answer was checked."""
        self.nan_turns = 0
        """Turns of the last call with a log-probability that was no number: each was asked for again, or given up."""

    async def collect(self, problems: Sequence[Problem], samples: int, **asked: Any) -> list[list[Episode]]:
        """`samples` scored episodes of each problem, in order; `asked` is what `advance` takes."""
        groups = [[Episode(problem, sample) for sample in range(samples)] for problem in problems]
        return [episodes for episodes in await self.advance(groups, **asked) if episodes]

    async def advance(
        self,
        groups: Sequence[Sequence[Episode]],
        *,
        how: SamplingConfig,
        seed: int,
        wanted: int | None = None,
        due: int = 0,
        is_enough: IsEnough | None = None,
    ) -> list[list[Episode] | None]:
        """Carry on with the episodes of each problem until `wanted` groups are complete, the first `due` among them.

        The others are interrupted, and None in what comes back: their episodes say how far they came. `wanted` None is
        all. A group is scored as soon as it is complete. `is_enough` is asked whenever an episode is over, and may
        complete its group: what still runs of that is `cancelled`.

        Engines and tools that are down make episodes `unavailable`. Anything else that one of them raises ends all the
        episodes and is raised here, such as `ValueError` for a prompt that leaves no engine room for `max_tokens`.
        """
        busy = self._pool.busy
        cpu_s, wall_s, busy_s = time.thread_time(), time.perf_counter(), busy.seconds
        nan_turns = self._pool.nan_turns
        run = partial(run_episode, chat=self._chat, tools=self._tools, how=how, seed=seed, clock=self._clock, busy=busy)
        wanted = len(groups) if wanted is None else wanted
        over: list[list[Episode] | None] = [None] * len(groups)
        self._halted.clear()

        async def group(number: int) -> None:
            over[number] = await self._group(groups[number], run, how.max_response_tokens, is_enough)
            if sum(map(bool, over)) >= wanted and all(over[:due]):
                await self._halt([episode for episodes in groups for episode in episodes])

        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(len(groups)):
                    tasks.create_task(group(number))
        except ExceptionGroup as several:
            raise _first(several) from None
        self.own_s = time.thread_time() - cpu_s
        self.idle_s = time.perf_counter() - wall_s - (busy.seconds - busy_s)
        self.nan_turns = self._pool.nan_turns - nan_turns
        return over

    async def _group(
        self, episodes: Sequence[Episode], run: Run, max_tokens: int, is_enough: IsEnough | None
    ) -> list[Episode] | None:
        """The episodes of a problem once they are over; None if they were interrupted."""
        prompt = tuple(self._chat.encode_prompt(episodes[0].problem.text))
        rewards: list[float | None] = []
        has_enough = False

        async def carry_on(episode: Episode) -> None:
            nonlocal has_enough
            episode.prompt_ids = prompt
            if not episode.stop_reason:
                await self._episode(episode, run, len(prompt) + max_tokens)
            if episode.stop_reason and is_enough:
                with self._pool.busy:
                    (episode.reward,) = await score_episodes([episode], self._tools.verify)
                rewards.append(episode.reward)
                if not has_enough and is_enough(rewards, len(episodes) - len(rewards)):
                    has_enough = True
                    await self._halt(episodes)

        async with asyncio.TaskGroup() as tasks:
            for episode in episodes:
                tasks.create_task(carry_on(episode))
        left = [episode for episode in episodes if not episode.stop_reason]
        if left and not has_enough:
            return None
        for episode in left:
            episode.stop_reason = StopReason.CANCELLED
        if not is_enough:
            with self._pool.busy:
                rewards = await score_episodes(episodes, self._tools.verify)
            for episode, reward in zip(episodes, rewards, strict=True):
                episode.reward = reward
        return list(episodes)

    async def _episode(self, episode: Episode, run: Run, most_tokens: int) -> None:
        async with self._pool.seat(group=episode.problem.id, most_tokens=most_tokens) as seat:
            self._seats[episode] = seat
            try:
                if episode not in self._halted:
                    await run(episode, seat=seat)
                if episode.stop_reason is StopReason.UNAVAILABLE:  # cut short is not short
                    seat.leave(None)
            finally:
                del self._seats[episode]

    async def _halt(self, episodes: Iterable[Episode]) -> None:
        """Interrupt those that are not over. Tools that run for them are awaited."""
        left = [episode for episode in episodes if not episode.stop_reason and episode not in self._halted]
        self._halted.update(left)
        if seats := [self._seats[episode] for episode in left if episode in self._seats]:
            await self._pool.interrupt(seats)


def turn_seed(seed: int, problem: str, sample: int, turn: int) -> int:
    """The seed of one stretch of sampling, of 63 bits: a hash of all that it may depend on."""
    return int.from_bytes(blake2b(f"{seed}/{sample}/{turn}/{problem}".encode(), digest_size=8).digest()) >> 1


def _first(several: ExceptionGroup[Exception]) -> Exception:
    """The exception that ended the others."""
    first = several.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first


async def _run(calls: Sequence[ToolCallRequest | MalformedCall], tools: Tools, chars: int) -> list[ToolCall]:
    """The calls of a turn, all at once, in order."""
    if len(calls) == 1:  # as nearly always, and a task costs as much as parsing the call
        return [await _call(calls[0], tools, chars)]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_call(call, tools, chars)) for call in calls]
    return [task.result() for task in running]


async def _call(call: ToolCallRequest | MalformedCall, tools: Tools, chars: int) -> ToolCall:
    if isinstance(call, MalformedCall):
        return _cut(ToolCall("", call.text, ToolCallStatus.MALFORMED, call.response), chars)
    return _cut(await tools.run(call.name, call.arguments), chars)


def _cut(call: ToolCall, chars: int) -> ToolCall:
    """With at most `chars` of its response from both ends, since a traceback says what happened in its last line."""
    text, tail = call.response, chars // 2
    if len(text) <= chars:
        return call
    ends = f"{text[: chars - tail]}\n... {len(text) - chars} characters cut ...\n{text[len(text) - tail :]}"
    return replace(call, response=ends, is_truncated=True)
