from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from examples.entropy import (
    REFLECTION_TOKENS,
    TokenKind,
    entropy_table,
    high_entropy_threshold,
    sampled_tokens,
)


def test_sampled_tokens_right_after_an_observation_are_reflection_tokens() -> None:
    entropies = [0.5, 0.5, None, None, *[1.0] * (REFLECTION_TOKENS + 1)]
    tokens = list(sampled_tokens(range(len(entropies)), entropies))
    assert [token.id for token in tokens] == [0, 1, *range(4, len(entropies))]
    assert [token.is_reflection for token in tokens] == [False, False, *[True] * REFLECTION_TOKENS, False]


@given(st.lists(st.floats(0, 10), min_size=5, max_size=200, unique=True))
def test_a_fifth_of_the_tokens_has_high_entropy(entropies: list[float]) -> None:
    tokens = list(sampled_tokens(range(len(entropies)), entropies))
    threshold = high_entropy_threshold(tokens)
    high = sum(token.entropy >= threshold for token in tokens)
    assert abs(high - len(tokens) / 5) <= 1


def test_the_table_counts_only_tokens_with_high_entropy() -> None:
    tokens = list(sampled_tokens([7, 7, 8, 9, 7], [2.0, 4.0, 3.0, 0.1, 0.2]))
    table = entropy_table(tokens, 2.0, max_kinds=1)
    assert (table.tokens, table.high_share) == (5, 3 / 5)
    assert table.frequent == [TokenKind(7, 2, 3.0)]
    assert entropy_table([], 1.0, 3).frequent == []
    assert high_entropy_threshold([]) == float("inf")
