"""Tests of how the rows of a step are divided among ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch")

from trainer.training.training_rows import TrainingRow, balanced_shares


def rows_of(lengths: list[int], group_size: int) -> list[TrainingRow]:
    """Return groups of rows; each row of a group has the group's length. The prompt id is the number of the group."""
    rows = []
    for group, length in enumerate(lengths):
        rows += [TrainingRow([group], [1] * length, [0.0] * length, [int(length > 1)], 0.0)] * group_size
    return rows


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.data())
def test_each_group_is_whole_in_one_share(
    per_share: int, num_shares: int, group_size: int, data: st.DataObject
) -> None:
    num_groups = per_share * num_shares
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=num_groups, max_size=num_groups))
    rows = rows_of(lengths, group_size)
    shares = balanced_shares(rows, per_share * group_size, group_size)
    assert [len(share) for share in shares] == [per_share * group_size] * num_shares
    numbers = [row.prompt_ids[0] for share in shares for row in share]
    assert sorted(numbers) == [row.prompt_ids[0] for row in rows]
    groups = [numbers[start : start + group_size] for start in range(0, len(numbers), group_size)]
    assert all(len(set(group)) == 1 for group in groups), "TRL would compute advantages over rows of several groups"


def test_shares_have_about_equally_many_tokens_in_the_loss() -> None:
    lengths = [9, 8, 1, 7, 1, 2, 3, 1]
    shares = balanced_shares(rows_of(lengths, 2), 4, 2)
    loads = [sum(1 + len(row.completion_ids) for row in share if row.env_mask[0]) for share in shares]
    assert loads == [20, 18, 16, 8 + 6], "groups without a token in the loss have no tokens to compute"


def test_rows_stay_in_their_order_if_a_group_is_on_several_ranks() -> None:
    rows = rows_of([1, 9, 5], 2)
    assert balanced_shares(rows, 3, 2) == [rows[:3], rows[3:]]
