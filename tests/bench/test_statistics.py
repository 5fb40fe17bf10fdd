"""Growth is found in series that have a leak, and not in series of noise."""

from __future__ import annotations

import math
import random

import pytest

from bench.harness import statistics
from bench.harness.statistics import sign_flip_p

SEEDS = range(50)


def _noise(seed: int, n: int = 60, sigma: float = 5.0, correlation: float = 0.0) -> list[float]:
    """`n` values around 500 with normal noise; `correlation` is that of neighbours."""
    rng = random.Random(seed)
    value, values = 0.0, []
    for _ in range(n):
        value = correlation * value + rng.gauss(0, sigma)
        values.append(500 + value)
    return values


def _grows(values: list[float], tolerance: float = 1.0) -> bool:
    return statistics.estimate_growth(values).is_over(tolerance)


def test_a_constant_series_has_neither_growth_nor_noise() -> None:
    assert statistics.estimate_growth([7.0] * 20) == statistics.Growth(0.0, 0.0)


def test_the_growth_of_a_straight_line_is_its_difference_in_height() -> None:
    assert statistics.estimate_growth([10.0 + 2 * x for x in range(21)]) == statistics.Growth(40.0, 0.0)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_noise_is_no_leak_even_if_it_is_autocorrelated(correlation: float) -> None:
    assert sum(_grows(_noise(seed, correlation=correlation)) for seed in SEEDS) <= 1


def test_a_leak_of_four_standard_deviations_of_the_noise_is_found() -> None:
    """The leak is 20 over 60 values, and the noise has a standard deviation of 5."""
    assert all(_grows([value + x * 20 / 59 for x, value in enumerate(_noise(seed))]) for seed in SEEDS)


def test_a_leak_is_found_under_wild_values() -> None:
    rng = random.Random(1)
    leak = [x / 2 + (rng.uniform(-400, 400) if x % 5 == 0 else rng.gauss(0, 1)) for x in range(60)]
    assert _grows(leak)


def test_wild_values_are_no_leak() -> None:
    assert not _grows([500.0 + (x * 40 if x % 5 == 0 else 0) for x in range(60)])


@pytest.mark.parametrize(("correlation", "max_lines"), [(0.0, 1), (0.5, 1), (0.8, 3), (0.9, 4)])
def test_noise_without_a_tolerance_is_hardly_ever_a_line(correlation: float, max_lines: int) -> None:
    growths = [statistics.estimate_growth(_noise(seed, n=100, correlation=correlation)) for seed in range(200)]
    assert sum(growth.is_line for growth in growths) <= max_lines


@pytest.mark.parametrize("height", [1e-6, 0.1, 20.0])
def test_any_slope_is_detected_without_noise(height: float) -> None:
    assert statistics.estimate_growth([height * x for x in range(40)]).is_line


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slope_below_the_noise_is_detected_in_enough_values(seed: int) -> None:
    """The series rises by 4, less than the standard deviation of the noise, 5."""
    assert statistics.estimate_growth([value + x * 4 / 1199 for x, value in enumerate(_noise(seed, n=1200))]).is_line


@pytest.mark.parametrize("step_at", [20, 30, 50, 70, 80])
def test_a_single_step_is_no_line(step_at: int) -> None:
    assert not statistics.estimate_growth(
        [value + 30 * (x >= step_at) for x, value in enumerate(_noise(2, n=100))]
    ).is_line


def test_a_falling_series_does_not_grow() -> None:
    assert not _grows([value - x for x, value in enumerate(_noise(1))])


def test_one_period_of_a_sine_wave_is_no_leak() -> None:
    assert not _grows([500 + 20 * math.sin(x / 60 * 2 * math.pi + 1.5 * math.pi) for x in range(60)])


def test_growth_within_the_tolerance_is_allowed() -> None:
    line = [x / 10 for x in range(41)]
    assert not _grows(line, 4.0) and _grows(line, 3.9)


def test_growth_of_thousands_of_values_is_estimated_from_medians() -> None:
    values = [value + x / 200 for x, value in enumerate(_noise(1, n=4000))]
    growth = statistics.estimate_growth(values)
    assert growth.rise == pytest.approx(20, abs=3) and growth.is_over(4)  # 4,000 values rise by 1/200 each


def test_the_sign_flip_test_counts_the_signs_with_which_the_sum_is_as_large() -> None:
    assert sign_flip_p([1.0] * 8) == 2 / 2**8
    assert sign_flip_p([-0.3, -0.1, -0.2]) == 2 / 2**3
    assert sign_flip_p([3.0, -1.0]) == 1.0, "4, 2, 2 and 4: all are at least 2"
    assert sign_flip_p([3.0, 2.0, -1.0]) == 4 / 8, "the sums are 6, 4, 2 and 0, each twice"
