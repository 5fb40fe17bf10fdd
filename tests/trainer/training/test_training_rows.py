"""Tests of how the rows of a step are divided among ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch")

from trainer.training.training_rows import TrainingRow, balanced_shares


def rows_of(lengths: list[int]) -> list[TrainingRow]:
    """Return a row of each length. Its prompt id is its number. A row of one token is not in the loss."""
    return [
        TrainingRow([number], [1] * length, [0.0] * length, [int(length > 1)], 0.0)
        for number, length in enumerate(lengths)
    ]


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_each_row_is_in_one_share_and_shares_have_equally_many_rows(
    per_share: int, num_shares: int, data: st.DataObject
) -> None:
    num_rows = per_share * num_shares
    rows = rows_of(data.draw(st.lists(st.integers(1, 50), min_size=num_rows, max_size=num_rows)))
    shares = balanced_shares(rows, num_shares)
    assert [len(share) for share in shares] == [per_share] * num_shares
    assert sorted(row.prompt_ids[0] for share in shares for row in share) == list(range(num_rows))


def test_shares_have_about_equally_many_tokens_in_the_loss() -> None:
    shares = balanced_shares(rows_of([9, 8, 1, 7, 1, 2, 3, 1]), 4)
    loads = [sum(1 + len(row.completion_ids) for row in share if row.env_mask[0]) for share in shares]
    assert loads == [10, 9, 8, 4 + 3], "rows without a token in the loss have no tokens to compute"
