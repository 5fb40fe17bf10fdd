"""Scripted episodes: generated workloads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Episodes of the profile cpu-tiny:
TINY_MAX_TOKENS = 896
"""Maximum tokens of a response."""
TINY_MEAN_TOKENS = 220.0
"""Mean tokens of a response."""
TINY_PROMPT_DIVISOR = 4
"""The usual prompt lengths are divided by this."""


@dataclass(frozen=True, slots=True)
class EpisodeScript:
    """An episode that is known in advance.

    Each turn has the tokens that it samples, the tokens of its observation, and the seconds of its tool call. The last
    turn has no tool call.
    """

    group: int
    prompt: int
    turns: tuple[tuple[int, int, float], ...]

    @property
    def length(self) -> int:
        """Tokens at the end."""
        return self.prompt + sum(sampled + observed for sampled, observed, _ in self.turns)


@dataclass(frozen=True, slots=True)
class Workload:
    """The episodes of one rollout, all submitted at time 0."""

    scripts: Sequence[EpisodeScript]
    max_response_tokens: int
    previous_step: Sequence[EpisodeScript] = ()
    """Episodes of the preceding training step, whose lengths the scheduler knows."""

    @property
    def max_context_tokens(self) -> int:
        return max(script.prompt for script in self.scripts) + self.max_response_tokens


def generated_scripts(
    groups: int, samples: int, max_response_tokens: int, mean: float, seed: int
) -> list[EpisodeScript]:
    """Multi-turn episodes as in the paper's stages: 3.7 turns on average; hard problems are long in all samples."""
    rng = random.Random(seed)
    scripts = []
    for group in range(groups):
        prompt = rng.randint(150, 450)
        difficulty = rng.lognormvariate(0.0, 0.55)
        for _ in range(samples):
            turns = 1 + min(9, int(rng.expovariate(1 / 2.7) + 0.5))
            length = mean * 0.77 * difficulty * rng.lognormvariate(0.0, 0.45)  # the two factors have a mean of 1 / 0.77
            length = int(min(max_response_tokens, max(16 * turns, length)))
            scripts.append(EpisodeScript(group, prompt, _turns(turns, length, rng)))
    return scripts


def _turns(count: int, length: int, rng: random.Random) -> tuple[tuple[int, int, float], ...]:
    """Divide `length` tokens into turns. Each turn but the last has an observation and a tool time."""
    shares = [rng.uniform(0.5, 1.5) for _ in range(count)]
    turns = []
    tokens_left = length
    for number, share in enumerate(shares):
        is_last = number == count - 1
        part = tokens_left if is_last else max(2, int(length * share / sum(shares)))
        part = min(part, tokens_left - 2 * (count - 1 - number))
        observed = 0 if is_last else min(part // 2, rng.randint(8, 200))
        tokens_left -= part
        turns.append((max(1, part - observed), observed, 0.0 if is_last else rng.lognormvariate(-1.2, 0.8)))
    return tuple(turns)


def tiny_scripts(groups: int, samples: int, seed: int) -> list[EpisodeScript]:
    """Small episodes. A cache of 8,192 tokens holds three in ten of them. This is also the share that the caches of 64
    MI300X hold in stage 2."""
    scripts = generated_scripts(groups, samples, TINY_MAX_TOKENS, TINY_MEAN_TOKENS, seed)
    return [replace(script, prompt=script.prompt // TINY_PROMPT_DIVISOR) for script in scripts]
