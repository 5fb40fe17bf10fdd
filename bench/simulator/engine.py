"""A simulation of the parts of a vLLM engine that matter for scheduling. It reads no clock and uses no random numbers.

- The engine accepts any request, and runs the requests that its KV cache can hold. One decode step samples a token for
  each running request.
- When the cache is full, the request that started last is preempted, and its context is recomputed later.
- Unused contexts stay cached until their space is needed. The least recently used context is evicted first.
- Time advances from event to event. This is exact, because the time of a decode step is linear in batch and context:

    step_s = base_s + max(weights_s, per_sequence_s * running) + per_context_s * (tokens of all contexts)

This is the roofline of a decode step: the weights are read once for all sequences, or computing with them takes longer
than reading them. In addition, each token of a context that is not cached takes `prefill_s`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

WATERMARK = 0.01
"""Share of the cache that vLLM keeps free when it starts a request beside running ones (`--watermark`, 0 by
default)."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The constants of one engine, and their source."""

    name: str
    kv_capacity: int
    """Tokens that the KV cache holds."""
    max_running: int
    base_s: float
    """Seconds of every decode step, besides the times below."""
    per_sequence_s: float
    per_context_s: float
    prefill_s: float
    turn_s: float = 0.0
    """Seconds that a turn costs besides its tokens, for its start and its end."""
    block_size: int = 1
    """Tokens of a KV block. On average half a block is empty per context, and a partly filled block is not cached."""
    weights_s: float = 0.0
    """Seconds to read the weights in a decode step. While the weights are read, some sequences can be computed at no
    further cost."""
    source: str = ""
    watermark: float = 0.0
    """Share of the cache that stays free when a waiting or preempted request starts beside running ones."""


@dataclass(slots=True)
class EngineRequest:
    """A turn of an episode. The episodes of a group have the same prompt."""

    episode: int
    group: int
    prompt: int
    context: int
    """Tokens at the start of the request."""
    tokens_left: int
    """Tokens to sample after the start."""
    new_tokens: int
    """Tokens of the context that were never computed before."""
    is_resumed: bool = False
    """True after a preemption. vLLM's counters of prefix hits leave such requests out."""
    started_at_step: float = 0.0


class SimulatedEngine:
    """One engine. Its owner calls `advance` at each event: when a request ends, and when the cache is full."""

    def __init__(self, name: str, profile: EngineProfile) -> None:
        self.name = name
        self.profile = profile
        self.clock = self.steps = self.prefill_backlog_s = 0.0
        self.waiting: deque[EngineRequest] = deque()
        self.running: OrderedDict[int, EngineRequest] = OrderedDict()
        self.cached: OrderedDict[tuple[str, int], float] = OrderedDict()
        self.preemptions = self.recomputed = self.prefix_queries = self.prefix_hits = 0
        self.sampled = 0
        self.busy_s = 0.0
        self._ends: list[tuple[float, int, EngineRequest]] = []
        self._numbers = itertools.count()
        self._cached_tokens = 0.0
        self._private_tokens = 0.0  # tokens beyond the prompts, over all running requests
        self._shared_prompts: dict[int, list[int]] = {}  # prompts in use by group: [users, tokens]
        self._shared_tokens = 0
        self._contexts = 0.0

    @property
    def used(self) -> float:
        return self._private_tokens + self._shared_tokens + self.profile.block_size // 2 * len(self.running)

    def submit(self, request: EngineRequest) -> None:
        self.prefill_backlog_s += self.profile.turn_s
        self.waiting.append(request)
        self._admit()

    def next_event_at(self) -> float:
        """The time at which the next request ends, or the cache is full."""
        if not self.running:
            return math.inf
        return self.clock + self.prefill_backlog_s + self._seconds(self._steps_to_next_event())

    def advance(self, now: float) -> list[EngineRequest]:
        """Move to `now`, which is not after `next_event_at`. Returns the requests that end then."""
        passed = now - self.clock
        self.clock = now
        if not self.running:
            return []
        self.busy_s += passed
        backlog_s = min(self.prefill_backlog_s, passed)
        self.prefill_backlog_s -= backlog_s
        steps = min(self._steps(passed - backlog_s), self._steps_to_next_event())
        if self._steps_to_next_event() - steps < 1e-6:  # a rounding error
            steps = self._steps_to_next_event()
        self.steps += steps
        grown = steps * len(self.running)
        self._private_tokens += grown
        self._contexts += grown
        ended = []
        while self._ends and self._ends[0][0] <= self.steps + 1e-6:
            _, _, request = heapq.heappop(self._ends)
            if self.running.get(request.episode) is request:
                ended.append(request)
                self._stop(request, request.context + request.tokens_left)
                self.sampled += request.tokens_left
        self._preempt()
        self._admit()
        return ended

    def _steps_to_next_event(self) -> float:
        while self._ends and self.running.get(self._ends[0][2].episode) is not self._ends[0][2]:
            heapq.heappop(self._ends)
        n = len(self.running)
        free_per_request = (self.profile.kv_capacity - self.used) / n if n > 1 else math.inf
        return max(0.0, min(self._ends[0][0] - self.steps, free_per_request))

    def _seconds(self, steps: float) -> float:
        first, slope = self._step()
        return steps * first + slope * steps * steps / 2

    def _steps(self, seconds: float) -> float:
        first, slope = self._step()
        if slope <= 0:
            return seconds / first
        return (math.sqrt(first * first + 2 * slope * seconds) - first) / slope

    def _step(self) -> tuple[float, float]:
        """Seconds of the next decode step, and the increase per further step."""
        n, costs = len(self.running), self.profile
        weights_s = max(costs.weights_s, costs.per_sequence_s * n)
        return costs.base_s + weights_s + costs.per_context_s * self._contexts, costs.per_context_s * n

    def _preempt(self) -> None:
        while len(self.running) > 1 and self.used + len(self.running) > self.profile.kv_capacity:
            request = next(reversed(self.running.values()))
            sampled = int(self.steps - request.started_at_step)
            self._stop(request, request.context + sampled)
            self.preemptions += 1
            self.sampled += sampled
            tokens_left, context = max(1, request.tokens_left - sampled), request.context + sampled
            resumed = EngineRequest(
                request.episode, request.group, request.prompt, context, tokens_left, new_tokens=0, is_resumed=True
            )
            self.waiting.appendleft(resumed)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.profile.max_running:
            request = self.waiting[0]
            prompt = 0 if request.group in self._shared_prompts else request.prompt
            # The next decode step adds a token to this request and to each running one.
            needed = request.context - request.prompt + prompt + self.profile.block_size // 2 + 1
            usable = (1 - self.profile.watermark) * self.profile.kv_capacity
            if self.running and self.used + needed + len(self.running) > usable:
                return
            self.waiting.popleft()
            self._start(request)

    def _start(self, request: EngineRequest) -> None:
        cached_own = self.cached.pop(("episode", request.episode), 0.0)
        self._cached_tokens -= cached_own
        users = self._shared_prompts.get(request.group)
        cached_prompt = float(request.prompt)
        if users is None:
            cached_prompt = self.cached.pop(("prompt", request.group), 0.0)
            self._cached_tokens -= cached_prompt
            users = self._shared_prompts[request.group] = [0, request.prompt]
            self._shared_tokens += request.prompt
        users[0] += 1
        cached = min(cached_prompt + (cached_own if cached_prompt >= request.prompt else 0.0), request.context - 1)
        self.recomputed += max(0, int(request.context - cached) - request.new_tokens)
        cached = cached // self.profile.block_size * self.profile.block_size
        if not request.is_resumed:
            self.prefix_queries += request.context
            self.prefix_hits += int(cached)
        self.prefill_backlog_s += (request.context - cached) * self.profile.prefill_s
        request.started_at_step = self.steps
        self.running[request.episode] = request
        self._private_tokens += request.context - request.prompt
        self._contexts += request.context
        heapq.heappush(self._ends, (self.steps + request.tokens_left, next(self._numbers), request))
        self._evict()

    def _stop(self, request: EngineRequest, context: float) -> None:
        del self.running[request.episode]
        private_tokens = context - request.prompt
        self._private_tokens -= private_tokens
        self._contexts -= context
        users = self._shared_prompts[request.group]
        users[0] -= 1
        self._cache(("episode", request.episode), private_tokens)
        if not users[0]:
            del self._shared_prompts[request.group]
            self._shared_tokens -= users[1]
            self._cache(("prompt", request.group), users[1])
        if not self.running:
            self._private_tokens = self._contexts = 0.0

    def _cache(self, name: tuple[str, int], tokens: float) -> None:
        self.cached[name] = tokens
        self._cached_tokens += tokens
        self._evict()

    def _evict(self) -> None:
        excess = self.used + self._cached_tokens - self.profile.kv_capacity
        while excess > 0 and self.cached:
            name, tokens = next(iter(self.cached.items()))
            if tokens > excess:
                self.cached[name] = tokens - excess
                self._cached_tokens -= excess
                return
            del self.cached[name]
            self._cached_tokens -= tokens
            excess -= tokens
