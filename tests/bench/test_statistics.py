"""Tests of the sign-flip test, a permutation test, with known p-values."""

from __future__ import annotations

from bench.harness.statistics import sign_flip_p


def test_the_p_value_is_the_share_of_sign_choices_whose_absolute_sum_is_at_least_the_observed_sum() -> None:
    assert sign_flip_p([1.0] * 8) == 2 / 2**8
    assert sign_flip_p([-0.3, -0.1, -0.2]) == 2 / 2**3
    assert sign_flip_p([3.0, -1.0]) == 1.0, "4, 2, 2 and 4: all are at least 2"
    assert sign_flip_p([3.0, 2.0, -1.0]) == 4 / 8, "the sums are 6, 4, 2 and 0, each twice"
