"""A fake engine pool and collector in one, which sample from a model without turns or tools."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from trainer.data import tiny_model
from trainer.episodes.episode import Episode, Problem, StopReason, Turn

Score = Callable[[Problem, int, Sequence[int]], float | None]

# What the libraries say of each other changes with their versions; what they say of us is an error, as everywhere.
QUIET_LIBRARIES = pytest.mark.filterwarnings(
    "ignore::FutureWarning:(accelerate|datasets|torch|transformers|trl)",
    "ignore::DeprecationWarning:(accelerate|datasets|torch|transformers|trl)",
)


def by_parity(problem: Problem, sample: int, ids: Sequence[int]) -> float | None:
    """Return a reward that depends on the samples and differs within a group."""
    return float(sum(ids) % 2)


def problems(count: int) -> list[Problem]:
    return [Problem(f"p{number}", f"{number} + 1", str(number + 1)) for number in range(count)]


@dataclass
class Sampler:
    """Pool and collector. `before` is called with the index of each collection when it starts."""

    folder: Path
    score: Score = by_parity
    tokens: int = 8
    shift: float = 0.0
    """Added to the reported log-probabilities, so that engine and trainer disagree."""
    before: Callable[[int], None] = lambda number: None
    error: str = ""
    overhead_cpu_s: float = 0.0
    nan_turns: int = 0
    overhead_s: float = 0.0
    version: int = 0
    log: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.folder).eval()
        self.weights: list[dict[str, torch.Tensor]] = []

    async def sync_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> int:
        self.weights.append(copy.deepcopy(dict(weights)))
        self.model.load_state_dict(weights)
        self.log.append("sync")
        self.version = version
        return version

    async def collect_groups(
        self, groups: Sequence[Sequence[Episode]], *, min_complete: int, must_complete: int, **asked: Any
    ) -> list[list[Episode] | None]:
        """Complete the first `must_complete` groups, and then the last ones of the others."""
        self.before(sum(entry != "sync" for entry in self.log))
        self.log.append(([group[0].problem.id for group in groups], len(groups[0]), asked))
        complete = {*range(must_complete), *range(len(groups) - min_complete + must_complete, len(groups))}
        over: list[list[Episode] | None] = []
        for number, group in enumerate(groups):
            episodes = []
            for draft in group:
                whole = self.episode(draft.problem, draft.sample, asked["seed"], draft)
                if number in complete:
                    episodes.append(whole)
                else:  # as far as it is by then
                    draft.prompt_ids, end = whole.prompt_ids, min(len(draft.response_ids) + 3, self.tokens - 1)
                    draft.response_ids, draft.logprobs, draft.loss_mask = (
                        list(each[:end]) for each in (whole.response_ids, whole.logprobs, whole.loss_mask)
                    )
                    draft.weight_versions = list(whole.weight_versions)
            over.append(episodes or None)
        return over

    def episode(self, problem: Problem, sample: int, seed: int, draft: Episode | None = None) -> Episode:
        """Return an episode of sampled tokens with two observation tokens among them. `draft` has its first tokens."""
        prompt = [20 + ord(letter) for letter in problem.id]
        draw = torch.Generator().manual_seed(hash((seed, int(problem.id[1:]), sample)) % 2**62)
        begun = draft or Episode(problem, sample)
        ids, logprobs, mask, versions = (
            list(begun.response_ids),
            list(begun.logprobs),
            list(begun.loss_mask),
            list(begun.weight_versions),
        )
        if not versions or versions[-1][1] != self.version:
            versions.append((len(ids), self.version))
        for position in range(len(ids), self.tokens):
            if position in (3, 4):
                ids, logprobs, mask = [*ids, 30 + position], [*logprobs, 0.0], [*mask, 0]
                continue
            with torch.no_grad():
                logp_V = self.model(torch.tensor([prompt + ids])).logits[0, -1].float().log_softmax(-1)
            token = int(torch.multinomial(logp_V.exp(), 1, generator=draw))
            ids, logprobs, mask = [*ids, token], [*logprobs, float(logp_V[token]) + self.shift], [*mask, 1]
        return Episode(
            problem=problem,
            sample=sample,
            prompt_ids=tuple(prompt),
            response_ids=ids,
            logprobs=logprobs,
            loss_mask=mask,
            turns=[Turn(0, len(ids), "text", generate_s=0.01)],
            stop_reason=StopReason.FINISHED,
            answer_blocks=1,
            reward=self.score(problem, sample, ids),
            error=self.error,
            weight_versions=versions,
        )


def model_folder(folder: Path) -> Path:
    tiny_model.write_tiny_model(folder, seed=0)
    return folder
