"""A fake engine pool and a fake collector in one object. It samples episodes from a model, without engines or tools."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from trainer.data import tiny_model
from trainer.episodes.episode import Episode, Problem, StopReason, Turn

RESPONSE_LENGTH = 8
"""Tokens of every complete response."""
OBSERVATION_POSITIONS = (3, 4)
"""Positions in the response of tokens that were not sampled, as in a tool response."""

Score = Callable[[Problem, int, Sequence[int]], float | None]
"""Returns the reward of a problem's sample with the given response ids."""

# Warnings of one library about another change with their versions. Warnings about this project stay errors.
QUIET_LIBRARIES = pytest.mark.filterwarnings(
    "ignore::FutureWarning:(accelerate|datasets|torch|transformers|trl)",
    "ignore::DeprecationWarning:(accelerate|datasets|torch|transformers|trl)",
)


def parity_reward(problem: Problem, sample: int, ids: Sequence[int]) -> float | None:
    """Return a reward that follows from the sampled tokens and differs within most groups."""
    return float(sum(ids) % 2)


def problems(count: int) -> list[Problem]:
    return [Problem(f"p{number}", f"{number} + 1", str(number + 1)) for number in range(count)]


class Collection(NamedTuple):
    """One call of `collect`."""

    problem_ids: list[str]
    samples: int
    """Episodes per problem."""
    options: dict[str, Any]
    """The other arguments of the call: limits and seed."""


@dataclass
class Sampler:
    """The fake pool and collector."""

    folder: Path
    """The folder of the model with which it samples before the first sync."""
    score: Score = parity_reward
    logprob_shift: float = 0.0
    """Added to the reported log-probabilities, so that engine and trainer disagree."""
    nan_positions: Sequence[int] = ()
    """Positions of tokens in the response. The log-probability of these tokens is reported as NaN."""
    on_collect: Callable[[int], None] = lambda index: None
    """Called with the index of each collection when it starts."""
    error: str = ""
    """The error of every episode."""
    stop_reason: StopReason = StopReason.FINISHED
    """The stop reason of every episode."""
    overhead_cpu_s: float = 0.0
    overhead_s: float = 0.0
    weight_version: int = 0
    syncs: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """A copy of the weights of each sync."""
    log: list[Collection | str] = field(default_factory=list)
    """Collections, and "sync" for each sync, in order."""

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.folder).eval()

    @property
    def collections(self) -> list[Collection]:
        return [entry for entry in self.log if isinstance(entry, Collection)]

    async def sync_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> int:
        self.syncs.append(copy.deepcopy(dict(weights)))
        self.model.load_state_dict(weights)
        self.log.append("sync")
        self.weight_version = version
        return version

    async def collect(
        self, problems: Sequence[Problem], samples_per_problem: int, *, seed: int, **options: Any
    ) -> list[list[Episode]]:
        self.on_collect(len(self.collections))
        call = Collection([problem.id for problem in problems], samples_per_problem, {"seed": seed, **options})
        self.log.append(call)
        return [[self.episode(problem, sample, seed) for sample in range(samples_per_problem)] for problem in problems]

    def episode(self, problem: Problem, sample: int, seed: int) -> Episode:
        """Return a complete episode."""
        prompt = [20 + ord(letter) for letter in problem.id]
        generator = torch.Generator().manual_seed(hash((seed, int(problem.id[1:]), sample)) % 2**62)
        ids, logprobs, mask = list[int](), list[float](), list[int]()
        for position in range(RESPONSE_LENGTH):
            if position in OBSERVATION_POSITIONS:
                token, logprob = 30 + position, 0.0
            else:
                with torch.no_grad():
                    logp_V = self.model(torch.tensor([prompt + ids])).logits[0, -1].float().log_softmax(-1)
                token = int(torch.multinomial(logp_V.exp(), 1, generator=generator))
                logprob = nan if position in self.nan_positions else float(logp_V[token]) + self.logprob_shift
            ids.append(token)
            logprobs.append(logprob)
            mask.append(int(position not in OBSERVATION_POSITIONS))
        return Episode(
            problem=problem,
            sample=sample,
            prompt_ids=tuple(prompt),
            response_ids=ids,
            logprobs=logprobs,
            loss_mask=mask,
            turns=[Turn(0, len(ids), "text", generate_s=0.01)],
            stop_reason=self.stop_reason,
            answer_blocks=1,
            reward=self.score(problem, sample, ids),
            error=self.error,
            weight_versions=[(0, self.weight_version)],
        )


def model_folder(folder: Path) -> Path:
    """Write the tiny model into `folder` and return it."""
    tiny_model.write_tiny_model(folder, seed=0)
    return folder
