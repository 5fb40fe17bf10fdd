"""The simulation of bench.roc: what each arm does to errors that cost nothing, and to errors that cost reward."""

from __future__ import annotations

import json

import pytest

from bench import roc_simulation
from bench.harness.tables import markdown

STEPS, LEARNING_RATE, SEEDS = 20, 0.2, 4


def errors_after(arm: str, max_turns: int) -> list[float]:
    """The share of failing calls in correct episodes after training, for each seed."""
    return [roc_simulation.simulate(arm, max_turns, seed, STEPS, LEARNING_RATE)[1] for seed in range(SEEDS)]


def test_half_of_the_first_attempts_fail_before_training() -> None:
    before, after, accuracy = roc_simulation.simulate("roc", 8, 0, 0, LEARNING_RATE)
    assert before == after == pytest.approx(1 / 3)  # one failed attempt for every two calls that work
    assert accuracy == pytest.approx(0.5)


def test_only_roc_removes_errors_that_cost_nothing() -> None:
    assert max(errors_after("roc", 8)) < 0.08
    assert min(errors_after("grpo-g", 8)) > 0.16
    assert min(errors_after("uniform", 8)) > 0.16


def test_every_arm_removes_errors_that_cost_reward() -> None:
    for arm in roc_simulation.TRAINED:
        assert max(errors_after(arm, 3)) < 0.06


def test_a_seed_gives_the_same_result_again() -> None:
    first, again = (roc_simulation.simulate("uniform", 4, 7, 3, LEARNING_RATE) for _ in range(2))
    assert first == again != roc_simulation.simulate("uniform", 4, 8, 3, LEARNING_RATE)


def test_the_command_prints_a_row_for_each_arm_and_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert roc_simulation.main(["--seeds", "1", "--steps", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert markdown(roc_simulation.tables(result)).count("RoC, 2G to G") == len(roc_simulation.TRAINING_TURNS)
