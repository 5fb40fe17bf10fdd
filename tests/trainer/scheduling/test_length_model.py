"""Tests of the length model, which predicts the lengths of episodes. It has no bias while episodes still run, and stays
valid over many training steps."""

from __future__ import annotations

import pytest

from tests.trainer.scheduling.random_episodes import MAX_CONTEXT
from trainer.scheduling.scheduler import LengthModel, Scheduler


def test_the_length_model_is_not_biased_to_episodes_that_finish_first() -> None:
    """Of 100 episodes, half end at 50 tokens and half at 350 tokens. At a time when only the short episodes have ended,
    the predicted mean must not be 50."""
    lengths = LengthModel(MAX_CONTEXT)
    for _ in range(100):
        lengths.on_start(0)
    for _ in range(50):
        lengths.on_finish(0, 50)
    for _ in range(50):
        lengths.on_growth(0, 200)
    assert lengths.mean_length_above(0) > 150
    assert lengths.mean_length_above(100) > 200
    for _ in range(50):
        lengths.on_finish(200, 350)
    assert lengths.mean_length_above(0) == pytest.approx(200, rel=0.1)
    assert lengths.mean_length_above(100) == pytest.approx(350, rel=0.1)


def test_a_cancelled_episode_counts_as_longer_than_it_is() -> None:
    """If a cancelled episode counted with its own length, cancellations would bias the lengths to short
    episodes."""

    def mean_length(cancelled_at: float) -> float:
        scheduler = Scheduler(MAX_CONTEXT)
        scheduler.add_engine("e0", 100 * MAX_CONTEXT)
        for key in range(60):
            scheduler.submit(key, key, 10, MAX_CONTEXT)
        assert len(scheduler.place(0.0)) == 60
        for key in range(30):
            scheduler.complete(key, 10.0, 50)
        for key in range(30, 60):
            scheduler.complete(key, cancelled_at)
        return scheduler.lengths.mean_length_above(0)

    assert mean_length(cancelled_at=70.0) > 1.5 * mean_length(cancelled_at=10.0)


def test_a_groups_own_episodes_weigh_more_than_the_stage() -> None:
    lengths = LengthModel(MAX_CONTEXT)
    for group, length in (("hard", 300), ("easy", 20)):
        for _ in range(8):
            lengths.on_start(0)
            lengths.update_group(group, None, lengths.mean_length_above(0))
        for _ in range(4):
            lengths.on_finish(0, length)
            lengths.update_group(group, lengths.mean_length_above(0), length)
    assert lengths.group_mean("hard") > lengths.mean_length_above(0) > lengths.group_mean("easy")
    assert max(lengths.growth_quantiles("hard", 0, MAX_CONTEXT)) > max(lengths.growth_quantiles("easy", 0, MAX_CONTEXT))
    assert max(lengths.growth_quantiles("hard", MAX_CONTEXT - 10, MAX_CONTEXT)) <= 10


def test_the_length_model_stays_valid_over_thousands_of_training_steps() -> None:
    """The decay reduces the counts of episodes, but not those of the prior. The length of an unfinished episode is
    extrapolated, and may be corrected one training step later."""
    lengths = LengthModel(MAX_CONTEXT)
    for _ in range(2000):
        lengths.on_start(10)
        lengths.on_growth(10, MAX_CONTEXT)
        lengths.decay()
        lengths.on_finish(MAX_CONTEXT, 20)
        assert 0 < lengths.mean_length_above(0) <= lengths.mean_length_above(MAX_CONTEXT // 2) <= MAX_CONTEXT
