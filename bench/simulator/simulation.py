"""Engines that exist as numbers, for the rollout scheduler to be tried against without any GPU. Seeded, and without
a clock but in `decision_cost`.

An `Engine` is vLLM as far as it matters for scheduling: it takes any request, runs as many as its cache holds; a step
makes one token for each that runs; when the cache is full, the one that came last is preempted, loses its place and is
computed anew; contexts that nobody uses stay until their room is needed, least recently used first. Time passes in
stretches in which nothing begins or ends, which is exact for a step time that is linear in batch and context:

    step_s = base_s + max(weights_s, per_sequence_s * running) + per_context_s * (tokens of all contexts),

the roofline of a decoding step: weights are read once for all that run, unless computing with them takes longer. A
token that is new to the cache takes `prefill_s` of the engine's time.

Letters: n requests that run, C tokens of their contexts.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.simulator.placement import POLICIES
from trainer.scheduling.scheduler import EngineStats, Placement, Scheduler


@dataclass(frozen=True, slots=True)
class Hardware:
    """One engine's constants, and where they come from."""

    name: str
    capacity: int
    """Tokens that the cache holds."""
    most_running: int
    base_s: float
    """Of a step, whatever runs."""
    per_sequence_s: float
    per_context_s: float
    prefill_s: float
    turn_s: float = 0.0
    """That a turn takes of it besides its tokens, as it comes in and goes out."""
    block: int = 1
    """Tokens that are kept together: half of one is empty in each context, and what a turn left in one is forgotten."""
    weights_s: float = 0.0
    """To read the weights, in which time some sequences are computed at no further cost."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an episode will turn out to be: of each turn, the tokens it samples, those its tool shows, and the seconds
    the tool takes. The last turn has no tool."""

    group: int
    prompt: int
    turns: tuple[tuple[int, int, float], ...]

    @property
    def length(self) -> int:
        return self.prompt + sum(sampled + shown for sampled, shown, _ in self.turns)


@dataclass(slots=True)
class _Request:
    episode: int
    group: int
    prompt: int
    context: int
    """Tokens when it began to run."""
    left: int
    """Tokens to sample from then on."""
    fresh: int
    """Tokens of the context that were never computed before."""
    is_resumed: bool = False
    """After a preemption: of these vLLM's counters of hits say nothing."""
    began: float = 0.0
    """The engine's step at which it began to run."""


class Engine:
    """One simulated engine. `advance` brings it to a time; `due` says when something happens by itself."""

    def __init__(self, name: str, hardware: Hardware) -> None:
        self.name = name
        self.hardware = hardware
        self.clock = self.steps = self.debt = 0.0
        self.waiting: deque[_Request] = deque()
        self.running: OrderedDict[int, _Request] = OrderedDict()
        self.cached: OrderedDict[tuple[str, int], float] = OrderedDict()
        self.preemptions = self.recomputed = self.asked = self.hits = 0
        self.sampled = 0
        self.busy_s = self.used_s = 0.0
        self._ends: list[tuple[float, int, _Request]] = []
        self._numbers = itertools.count()
        self._cached_tokens = 0.0
        self._own = 0.0  # tokens beyond the prompts, of all that run
        self._shared: dict[int, list[int]] = {}  # of prompts in use: [users, tokens]
        self._shared_tokens = 0
        self._contexts = 0.0

    @property
    def used(self) -> float:
        return self._own + self._shared_tokens + self.hardware.block // 2 * len(self.running)

    def take(self, request: _Request) -> None:
        self.debt += self.hardware.turn_s
        self.waiting.append(request)
        self._admit()

    def due(self) -> float:
        """When the next request ends, or the cache is full."""
        if not self.running:
            return math.inf
        return self.clock + self.debt + self._seconds(self._stretch())

    def advance(self, now: float) -> list[_Request]:
        """Bring it to `now`, which is not beyond `due`; the requests that end there."""
        passed = now - self.clock
        self.clock = now
        if not self.running:
            return []
        self.busy_s += passed
        self.used_s += passed * self.used
        paid = min(self.debt, passed)
        self.debt -= paid
        steps = min(self._steps(passed - paid), self._stretch())
        if self._stretch() - steps < 1e-6:
            steps = self._stretch()
        self.steps += steps
        grown = steps * len(self.running)
        self._own += grown
        self._contexts += grown
        ended = []
        while self._ends and self._ends[0][0] <= self.steps + 1e-6:
            _, _, request = heapq.heappop(self._ends)
            if self.running.get(request.episode) is request:
                ended.append(request)
                self._stop(request, request.context + request.left)
                self.sampled += request.left
        self._preempt()
        self._admit()
        return ended

    def _stretch(self) -> float:
        """Steps until something happens."""
        while self._ends and self.running.get(self._ends[0][2].episode) is not self._ends[0][2]:
            heapq.heappop(self._ends)
        n = len(self.running)
        room = (self.hardware.capacity - self.used) / n if n > 1 else math.inf
        return max(0.0, min(self._ends[0][0] - self.steps, room))

    def _seconds(self, steps: float) -> float:
        first, slope = self._step()
        return steps * first + slope * steps * steps / 2

    def _steps(self, seconds: float) -> float:
        first, slope = self._step()
        if slope <= 0:
            return seconds / first
        return (math.sqrt(first * first + 2 * slope * seconds) - first) / slope

    def _step(self) -> tuple[float, float]:
        """Seconds of the next step, and by how much each one after it is longer."""
        n, h = len(self.running), self.hardware
        slope = h.per_context_s * n
        return h.base_s + max(h.weights_s, h.per_sequence_s * n) + h.per_context_s * self._contexts, slope

    def _preempt(self) -> None:
        while len(self.running) > 1 and self.used + len(self.running) > self.hardware.capacity:
            request = next(reversed(self.running.values()))
            made = int(self.steps - request.began)
            self._stop(request, request.context + made)
            self.preemptions += 1
            self.sampled += made
            left = max(1, request.left - made)
            again = _Request(request.episode, request.group, request.prompt, request.context + made, left, 0, True)
            self.waiting.appendleft(again)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.hardware.most_running:
            request = self.waiting[0]
            shared = 0 if request.group in self._shared else request.prompt
            need = request.context - request.prompt + shared + self.hardware.block // 2 + 1  # a token more in each
            if self.running and self.used + need + len(self.running) > self.hardware.capacity:
                return
            self.waiting.popleft()
            self._start(request)

    def _start(self, request: _Request) -> None:
        own = self.cached.pop(("episode", request.episode), 0.0)
        self._cached_tokens -= own
        users = self._shared.get(request.group)
        held = float(request.prompt)
        if users is None:
            held = self.cached.pop(("prompt", request.group), 0.0)
            self._cached_tokens -= held
            users = self._shared[request.group] = [0, request.prompt]
            self._shared_tokens += request.prompt
        users[0] += 1
        hit = min(held + (own if held >= request.prompt else 0.0), request.context - 1)
        self.recomputed += max(0, int(request.context - hit) - request.fresh)
        hit = hit // self.hardware.block * self.hardware.block
        if not request.is_resumed:
            self.asked += request.context
            self.hits += int(hit)
        self.debt += (request.context - hit) * self.hardware.prefill_s
        request.began = self.steps
        self.running[request.episode] = request
        self._own += request.context - request.prompt
        self._contexts += request.context
        heapq.heappush(self._ends, (self.steps + request.left, next(self._numbers), request))
        self._evict()

    def _stop(self, request: _Request, context: float) -> None:
        del self.running[request.episode]
        own = context - request.prompt
        self._own -= own
        self._contexts -= context
        users = self._shared[request.group]
        users[0] -= 1
        self._keep(("episode", request.episode), own)
        if not users[0]:
            del self._shared[request.group]
            self._shared_tokens -= users[1]
            self._keep(("prompt", request.group), users[1])
        if not self.running:
            self._own = self._contexts = 0.0

    def _keep(self, name: tuple[str, int], tokens: float) -> None:
        self.cached[name] = tokens
        self._cached_tokens += tokens
        self._evict()

    def _evict(self) -> None:
        over = self.used + self._cached_tokens - self.hardware.capacity
        while over > 0 and self.cached:
            name, tokens = next(iter(self.cached.items()))
            if tokens > over:
                self.cached[name] = tokens - over
                self._cached_tokens -= over
                return
            del self.cached[name]
            self._cached_tokens -= tokens
            over -= tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as who asked for it sees it: from when an engine got it to its last token."""

    episode: int
    engine: str
    began: float
    ended: float
    context: int
    """Tokens that it began with."""
    sampled: int
    has_moved: bool


@dataclass(slots=True)
class Run:
    """What a policy made of a workload."""

    makespan_s: float
    engines: list[Engine]
    turns: list[Turn]
    """In the order in which they ended."""
    service_s: list[float]
    """Of each episode, from its first placement to its end."""
    moves: int


OBSERVE_S = 1.0
"""Between two scrapes of an engine."""
ORACLE = "oracle"
"""A policy that is told all lengths (`bench.simulator.oracle`): there is none such for engines that are real."""


def simulate(
    plans: Sequence[Plan], hardware: Hardware, engines: int, policy: str, most_new: int, before: Sequence[Plan] = ()
) -> Run:
    """Run all `plans`, handed in at time 0, to their ends. `policy`: one of `bench.simulator.placement`, or `ORACLE`.
    `most_new`: the longest response that is allowed.

    `before`: the episodes of the training step before this one, of other prompts, whose lengths are known."""
    return _Simulation(plans, hardware, engines, policy, most_new, before).run()


def tell(scheduler: Scheduler, before: Sequence[Plan]) -> None:
    """What the training step before this one was like."""
    for plan in before:
        scheduler.lengths.on_start(plan.prompt)
        scheduler.lengths.on_finish(plan.prompt, plan.length)
    scheduler.start_training_step()


class _Simulation:
    def __init__(
        self,
        plans: Sequence[Plan],
        hardware: Hardware,
        engines: int,
        policy: str,
        most_new: int,
        before: Sequence[Plan] = (),
    ) -> None:
        self.plans = plans
        self.engines = {f"e{n}": Engine(f"e{n}", hardware) for n in range(engines)}
        most_tokens = max(plan.prompt for plan in plans) + most_new
        if policy == ORACLE:
            from bench.simulator.oracle import Oracle

            self.scheduler: Scheduler = Oracle(most_tokens, plans)
        else:
            self.scheduler = Scheduler(most_tokens, POLICIES[policy]())
        tell(self.scheduler, before)
        for name in self.engines:
            self.scheduler.add_engine(name, hardware.capacity, hardware.most_running, block_size=hardware.block)
        self.most_new = most_new
        self.turn = [0] * len(plans)
        self.context = [plan.prompt for plan in plans]
        self.fresh = [plan.prompt for plan in plans]
        self.began: dict[int, float] = {}
        self.service: list[float] = []
        self.placed: dict[int, tuple[Placement, float]] = {}
        self.turns: list[Turn] = []
        self.now = 0.0
        self.moves = 0
        self._events: list[tuple[float, int, str, object]] = []
        self._order = itertools.count()
        self._dues: dict[str, float] = {}

    def run(self) -> Run:
        for key, plan in enumerate(self.plans):
            self.scheduler.submit(key, plan.group, plan.prompt, plan.prompt + self.most_new)
        self._at(OBSERVE_S, "observe", None)
        self._place(self.engines.values())
        while len(self.service) < len(self.plans):
            self.now, _, kind, what = heapq.heappop(self._events)
            if kind == "tool":
                assert isinstance(what, int)
                self._wake(what)
            elif kind == "observe":
                self._observe()
            else:
                assert isinstance(what, Engine)
                if self._dues.get(what.name) == self.now:
                    self._go_on(what, what.advance(self.now))
        return Run(self.now, list(self.engines.values()), self.turns, self.service, self.moves)

    def _at(self, time: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (time, next(self._order), kind, what))

    def _go_on(self, engine: Engine, ended: Sequence[_Request]) -> None:
        for request in ended:
            self._over(request)
        if ended:
            self._place([engine])
        else:
            self._set_due(engine)

    def _over(self, request: _Request) -> None:
        key = request.episode
        plan, turn = self.plans[key], self.turn[key]
        sampled, shown, tool_s = plan.turns[turn]
        placed, began = self.placed.pop(key)
        context = self.context[key]
        self.turns.append(Turn(key, placed.engine, began, self.now, context, sampled, placed.is_migration))
        self.context[key] += sampled
        self.turn[key] += 1
        if self.turn[key] == len(plan.turns):
            self.scheduler.complete(key, self.now, self.context[key])
            self.service.append(self.now - self.began[key])
            return
        self.scheduler.park(key, self.context[key], self.now)
        self.fresh[key] = shown
        self.context[key] += shown
        self._at(self.now + tool_s, "tool", key)

    def _wake(self, key: int) -> None:
        self.scheduler.resume(key, self.context[key], self.now)
        self._place([])

    def _observe(self) -> None:
        for engine in self.engines.values():
            stats = EngineStats(engine.preemptions, len(engine.waiting), engine.used / engine.hardware.capacity)
            self.scheduler.observe(engine.name, stats, self.now)
        self._at(self.now + OBSERVE_S, "observe", None)
        self._place([])

    def _place(self, changed: Iterable[Engine]) -> None:
        touched = {engine.name: engine for engine in changed}
        for placement in self.scheduler.place(self.now):
            key, engine = placement.episode, self.engines[placement.engine]
            assert isinstance(key, int)
            self.moves += placement.is_migration
            self.began.setdefault(key, self.now)
            self.placed[key] = placement, self.now
            plan = self.plans[key]
            sampled = plan.turns[self.turn[key]][0]
            request = _Request(key, plan.group, plan.prompt, self.context[key], sampled, self.fresh[key])
            if engine.name not in touched:
                for one in engine.advance(self.now):
                    self._over(one)
                touched[engine.name] = engine
            engine.take(request)
        for engine in touched.values():
            self._set_due(engine)

    def _set_due(self, engine: Engine) -> None:
        due = max(engine.due(), self.now)
        self._dues[engine.name] = due
        if due < math.inf:
            self._at(due, "engine", engine)


class _Timed:
    """A scheduler, and what each call of its methods takes of the processor; `place`, of each turn that it places."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.seconds: dict[str, list[float]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        act = getattr(self._scheduler, name)
        taken = self.seconds.setdefault(name, [])

        def timed(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            made = act(*args, **named)
            passed = time.thread_time() - began
            taken.append(passed / max(1, len(made)) if name == "place" else passed)
            return made

        return timed


def decision_cost(
    plans: Sequence[Plan], hardware: Hardware, engines: int, most_new: int, before: Sequence[Plan] = ()
) -> dict[str, list[float]]:
    """Microseconds of processor time that each call of the scheduler takes while `plans` run, by the kind of call."""
    simulation = _Simulation(plans, hardware, engines, "kv", most_new, before)
    timed = _Timed(simulation.scheduler)
    simulation.scheduler = timed  # type: ignore[assignment]
    simulation.run()
    return {kind: [1e6 * taken for taken in calls] for kind, calls in timed.seconds.items()}


def workload(groups: int, samples: int, most_new: int, mean: float, seed: int) -> list[Plan]:
    """Multi-turn episodes as in the paper's stages: 3.7 turns on average, hard prompts long in all of their samples."""
    rng = random.Random(seed)
    plans = []
    for group in range(groups):
        prompt = rng.randint(150, 450)
        level = rng.lognormvariate(0.0, 0.55)
        for _ in range(samples):
            turns = 1 + min(9, int(rng.expovariate(1 / 2.7) + 0.5))
            length = int(min(most_new, max(16 * turns, mean * 0.77 * level * rng.lognormvariate(0.0, 0.45))))
            plans.append(Plan(group, prompt, _turns(turns, length, rng)))
    return plans


def _turns(turns: int, length: int, rng: random.Random) -> tuple[tuple[int, int, float], ...]:
    shares = [rng.uniform(0.5, 1.5) for _ in range(turns)]
    made = []
    left = length
    for number, share in enumerate(shares):
        is_last = number == turns - 1
        part = left if is_last else max(2, int(length * share / sum(shares)))
        part = min(part, left - 2 * (turns - 1 - number))
        shown = 0 if is_last else min(part // 2, rng.randint(8, 200))
        left -= part
        made.append((max(1, part - shown), shown, 0.0 if is_last else rng.lognormvariate(-1.2, 0.8)))
    return tuple(made)


GRID = 200
"""Of a cache, where a bound integrates over how full it is."""


def lower_bound_s(plans: Sequence[Plan], hardware: Hardware, engines: int) -> float:
    """No schedule is faster, whatever it knows, moves or preempts: the largest of three bounds.

    Of each turn an engine prefills what its tool showed, and of what it holds the block that is not whole and the last
    token at least; a turn takes `turn_s` besides. Somebody prefills each group's prompt.

    **The longest episode**: its own steps at batch 1, its own prefill and turns, its tools' time.

    **Work and haste.** Let T be the makespan and E the engines. A step that runs the set S of n sequences with contexts
    c takes base + max(weights, a n) + sum of b c. For any x in [0, 1] that is at least B + W(S), with
    B = base + (1 - x) weights and W(S) the sum over S of w = x a + b c: a maximum is no less than a mean. An engine's
    steps and prefills take T at most, and so do an episode's, with its tools. Let any m(i) >= 0 weigh the time of
    episode i, M(S) be their sum over S, and 1 weigh an engine's time. Then

        E T + sum of m T  >=  sum over steps of (B + W)(1 + M)  +  all prefill  +  sum of m (own prefill and tools).

    A step's product is W + B M + (B + W M), and what is in brackets is at least 2 sqrt(B) sqrt(W M) (means), which is
    at least the sum over S of 2 sqrt(B w m) (Cauchy and Schwarz). With R(i) the sum of sqrt(w) over the tokens that i
    samples, and own(i) their number times B, its prefill and its tools,

        E T  >=  all W and prefill  +  sum over i of  m (own(i) - T) + 2 sqrt(B m) R(i)

    for any m; the best is sqrt(m) = sqrt(B) R(i) / (T - own(i)), with which the last sum is that of
    B R(i)^2 / (T - own(i)): small batches waste steps, and large ones keep the long waiting. Or, with m = 0, a step's B
    is charged to what fills caches or batches: B >= B C / capacity and B >= B n / most_running, with C the contexts
    less their prompts, which siblings share, and with what is empty in their blocks. No T is possible for which the
    right side is larger, for whatever x.

    **Caches begin empty.** Take all B for what fills caches. What else is in a step is waste: B (1 - C / K) and
    max(weights, a n) - (1 - x) weights - x a n, with the capacity K. Let an engine get G tokens besides prompts in all,
    be it that it samples them, that it must prefill them, or that it computes them again. Its C is never more than what
    it got so far. A token that it samples at C wastes the n-th part of a step's waste, so r(C) at least, with the best
    n; one that it computes again takes `prefill_s`, all waste, and let r be no more than that. r falls; with R(g), its
    sum up to C = g, an engine wastes R(min(G, K)) - R(F): at worst, the F that it must prefill come first.

    Where C <= g K, the same can be told from time. A step without the z = x a n of its sequences takes q = B + b C at
    least, and of that no more than the share s(g) = (b K + B) g / (B + b K g) is no waste; all z together are x a g K
    at most, as no more tokens are sampled there. So of an engine whose G is g K, with f of its time for what it must
    prefill and for reading prompts, the share 1 - s(g) of T - f - x a g K is waste or idle. That falls with g, and R
    grows: whatever each engine's g is, and for any g* to compare it with, it wastes, or is idle for, at least

        min(R(g* K), (1 - s(g*)) (T - f - x a g* K)) - R(F),

    which with T' = T - x a g* K is no less than

        min(R(g* K), (1 - s(g*)) T') (1 - f / T') - R(F).

    Over all engines the sum of f is known, and that of R(F) is largest where all must prefill as much, since r falls.
    """
    loads = [_load(plan, hardware.block) for plan in plans]
    prompts = sum(
        {plan.group: plan.prompt - _unshared(plan.prompt, plan.prompt, hardware.block) for plan in plans}.values()
    )
    prefill_s = hardware.prefill_s * (sum(load.prefill for load in loads) + prompts)
    prefill_s += hardware.turn_s * sum(len(load.spans) for load in loads)
    step_s = hardware.base_s + max(hardware.weights_s, hardware.per_sequence_s)
    alone = max(load.own_s(hardware, step_s) + load.read * hardware.per_context_s for load in loads)
    bounds = (_work_and_haste_s, _empty_caches_s)
    return max(alone, *(bound(loads, prefill_s, hardware, engines, x / 4) for x in range(5) for bound in bounds))


@dataclass(frozen=True, slots=True)
class _Load:
    """What an episode takes, however it is scheduled."""

    sampled: int
    prefill: int
    """Tokens, with a prompt that a sibling has left there."""
    tools_s: float
    read: float
    """Tokens of context, summed over the tokens that it samples."""
    held: float
    """The same without the prompt."""
    spans: tuple[tuple[int, int], ...]
    """The contexts between which it samples, turn by turn."""

    def own_s(self, hardware: Hardware, step_s: float) -> float:
        turns_s = len(self.spans) * hardware.turn_s
        return self.sampled * step_s + self.prefill * hardware.prefill_s + turns_s + self.tools_s


def _load(plan: Plan, block: int = 1) -> _Load:
    spans = []
    known = context = plan.prompt
    prefill = 0
    for sampled, shown, _ in plan.turns:
        prefill += _unshared(context, known, block)
        known = context + sampled
        spans.append((context, known))
        context = known + shown
    tokens = sum(end - begin for begin, end in spans)
    read = sum(end * end - begin * begin for begin, end in spans) / 2
    tools_s = sum(tool_s for _, _, tool_s in plan.turns)
    return _Load(tokens, prefill, tools_s, read, read - plan.prompt * tokens, tuple(spans))


def _unshared(context: int, known: int, block: int) -> int:
    """Tokens to prefill of a context of which an engine has seen the first `known`."""
    return context - min(known, context - 1) // block * block


def _work_and_haste_s(loads: Sequence[_Load], prefill_s: float, hardware: Hardware, engines: int, x: float) -> float:
    step_s = hardware.base_s + (1 - x) * hardware.weights_s
    a, b = x * hardware.per_sequence_s, hardware.per_context_s
    tokens = sum(load.sampled for load in loads)
    work = prefill_s + a * tokens + b * sum(load.read for load in loads)
    room = sum(load.held for load in loads) + hardware.block // 2 * tokens
    full = step_s * max(room / _most_held(loads, hardware), tokens / hardware.most_running)
    own = [load.own_s(hardware, step_s) for load in loads]
    haste = [step_s * sum(_roots(a, b, *span) for span in load.spans) ** 2 for load in loads]
    low = max(own) * 1.001
    high = (work + step_s * tokens) / engines + 2 * low
    best = 0.0
    while high - low > 1e-3 * high:
        time = (low + high) / 2
        hasty = sum(part / (time - alone) for part, alone in zip(haste, own, strict=True))
        if work + max(full, hasty) > engines * time:
            best = low = time
        else:
            high = time
    return best


def _empty_caches_s(loads: Sequence[_Load], prefill_s: float, hardware: Hardware, engines: int, x: float) -> float:
    base, weights, a, b = hardware.base_s, hardware.weights_s, hardware.per_sequence_s, hardware.per_context_s
    step_s, most = base + (1 - x) * weights, hardware.most_running
    batches = (min(most, max(1.0, weights / a)) if a else most, most)  # one of them wastes least
    capacity = _most_held(loads, hardware)
    tokens, held = sum(load.sampled for load in loads), sum(load.held for load in loads)
    fixed = prefill_s + b * (sum(load.read for load in loads) - held)
    least = time = (fixed + x * a * tokens + (b + step_s / capacity) * held) / engines

    def wasted(share: float) -> float:
        lost = step_s * share
        return min(hardware.prefill_s, *((base + max(weights, a * n) - x * a * n - lost) / n for n in batches))

    first = wasted(0) * sum(load.prefill for load in loads) / engines
    for _ in range(3):  # a bound that is higher makes the next one higher
        waste = total = 0.0
        for part in range(1, GRID + 1):
            share = part / GRID
            total += wasted(share) * capacity / GRID
            idle = 1 - (b * capacity + step_s) * share / (step_s + b * capacity * share)
            rest = time - x * a * share * capacity
            if rest > fixed / engines:
                waste = max(waste, min(total, idle * rest) * (1 - fixed / engines / rest))
        time = max(time, least + waste - first)
    return time


def _most_held(loads: Sequence[_Load], hardware: Hardware) -> int:
    """Tokens in an engine's cache at most: one alone may have more than it holds."""
    return max(hardware.capacity, max(load.spans[-1][1] for load in loads) + hardware.block // 2)


def _roots(a: float, b: float, begin: float, end: float) -> float:
    """The sum of sqrt(a + b c) over contexts c from `begin` to `end`."""
    if not b:
        return (end - begin) * math.sqrt(a)
    return (math.pow(a + b * end, 1.5) - math.pow(a + b * begin, 1.5)) / (1.5 * b)
