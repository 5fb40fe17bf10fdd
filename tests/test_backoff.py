"""Tests of the exponential back-off."""

from __future__ import annotations

import pytest

from sandbox.backoff import backoff_s


@pytest.mark.parametrize(("failures", "expected"), [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.4), (7, 5.0), (100_000, 5.0)])
def test_the_wait_doubles_with_each_failure_up_to_the_maximum(failures: int, expected: float) -> None:
    assert backoff_s(failures, 0.1, 5.0) == pytest.approx(expected)
