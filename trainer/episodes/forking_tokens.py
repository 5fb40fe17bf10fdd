"""Finds the sampled tokens with the highest entropy: forking tokens and reflection tokens.

rStar2-Agent (arXiv 2508.20722, section 5.4) studies these tokens. Reflection tokens come right after a tool response:
with them the model reacts to the response. Forking tokens are in the rest of the model's text. Entropies are in nats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

TOP_SHARE = 0.2
"""The share of all tokens that have high entropy."""
LEAST_ENTROPY = 1e-4
"""The smallest positive entropy in nats that is recorded, since entropies are recorded with four decimals."""
REFLECTION_TOKENS = 10
"""The first sampled tokens after a tool response, in this number, are reflection tokens."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that the model sampled, its entropy, and whether it is a reflection token."""

    id: int
    entropy: float
    is_reflection: bool

    def kind(self, threshold: float) -> str:
        """Return "forking" or "reflection" for an entropy of at least `threshold`, else "sampled"."""
        high = "reflection" if self.is_reflection else "forking"
        return high if self.entropy >= threshold else "sampled"


@dataclass(frozen=True, slots=True)
class TokenKind:
    """A token id with the number and mean entropy of its tokens that have high entropy."""

    id: int
    count: int
    mean_entropy: float


@dataclass(frozen=True, slots=True)
class EntropyTable:
    """The tokens of the model's own text, or those right after tool responses."""

    tokens: int
    mean_entropy: float
    high_share: float
    """Fraction of the tokens with high entropy."""
    frequent: list[TokenKind]
    """The most frequent token ids with high entropy."""


def sampled_tokens(ids: Sequence[int], entropies: Sequence[float | None]) -> Iterator[SampledToken]:
    """Yield the sampled tokens of a response. A token without an entropy is an observation."""
    since_observation = REFLECTION_TOKENS
    for token, entropy in zip(ids, entropies, strict=True):
        if entropy is None:
            since_observation = 0
            continue
        yield SampledToken(token, entropy, since_observation < REFLECTION_TOKENS)
        since_observation += 1


def high_entropy_threshold(tokens: Iterable[SampledToken]) -> float:
    """Return the lowest entropy among the fifth of the tokens that has the highest entropies. Infinity without tokens.

    The result is always positive. So if a model is sure of most tokens, fewer than a fifth of them have high entropy.
    """
    ordered = sorted(token.entropy for token in tokens)
    least = ordered[min(len(ordered) - 1, round(len(ordered) * (1 - TOP_SHARE)))] if ordered else float("inf")
    return max(least, LEAST_ENTROPY)


def entropy_table(tokens: Sequence[SampledToken], threshold: float, max_kinds: int) -> EntropyTable:
    """Return the table of some tokens. A token has high entropy if its entropy is at least `threshold`."""
    by_id: defaultdict[int, list[float]] = defaultdict(list)
    for token in tokens:
        if token.entropy >= threshold:
            by_id[token.id].append(token.entropy)
    kinds = [TokenKind(id, len(entropies), fmean(entropies)) for id, entropies in by_id.items()]
    kinds.sort(key=lambda kind: (-kind.count, -kind.mean_entropy))
    num_high = sum(kind.count for kind in kinds)
    mean = fmean(token.entropy for token in tokens) if tokens else 0.0
    return EntropyTable(len(tokens), mean, num_high / max(1, len(tokens)), kinds[:max_kinds])
