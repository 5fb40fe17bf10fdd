"""RoC: the penalties of the paper, invariants of every selection, and the probabilities with which it selects."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus, Turn
from trainer.episodes.roc import (
    EPSILON,
    has_signal,
    is_group_decided,
    p_err,
    p_format,
    p_total,
    resample_on_correct,
    selection_reasons,
)


@dataclass(frozen=True)
class FakeEpisode:
    """The attributes of an `Episode` that RoC reads."""

    reward: float | None = 1.0
    num_tool_calls: int = 1
    num_failed_tool_calls: int = 0
    answer_blocks: int = 1
    num_turns: int = 2


CORRECT, WRONG, UNSCORED = FakeEpisode(), FakeEpisode(reward=0.0), FakeEpisode(reward=None)

fake_episodes = st.builds(
    lambda reward, calls, failed, tags, turns: FakeEpisode(reward, calls, min(failed, calls), tags, turns),
    st.sampled_from([None, 0.0, 1.0]),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 4),
    st.integers(0, 5),
)
groups = st.lists(fake_episodes, min_size=1, max_size=24)
modes = st.sampled_from(["paper", "released"])


@pytest.mark.parametrize(
    ("episode", "expected_p_err", "expected_p_format"),
    [
        (FakeEpisode(num_tool_calls=0), 0.5, 0.0),
        (FakeEpisode(num_tool_calls=4, num_failed_tool_calls=1), 0.25, 0.0),
        (FakeEpisode(num_tool_calls=3, num_failed_tool_calls=3), 1.0, 0.0),
        (FakeEpisode(answer_blocks=0), 0.0, 1.0),
        (FakeEpisode(answer_blocks=2, num_turns=4), 0.0, 0.25),
        (FakeEpisode(answer_blocks=9, num_turns=4), 0.0, 1.0),
        (FakeEpisode(num_tool_calls=0, answer_blocks=0, num_turns=0), 0.5, 1.0),
        (FakeEpisode(answer_blocks=2, num_turns=0), 0.0, 1.0),
    ],
)
def test_penalties_are_the_papers(episode, expected_p_err, expected_p_format):
    assert (p_err(episode), p_format(episode)) == (expected_p_err, expected_p_format)
    assert p_total(episode) == expected_p_err + expected_p_format


def test_a_real_episode_has_the_attributes_that_roc_reads():
    calls = tuple(ToolCall("python", {}, status, "") for status in (ToolCallStatus.OK, ToolCallStatus.TIMEOUT))
    turns = [Turn(0, 1, "", (*calls, ToolCall("?", {}, ToolCallStatus.MALFORMED, ""))), Turn(1, 2, "")]
    stop = StopReason.FINISHED
    episode = Episode(Problem("p", "?", "1"), 0, (1,), turns=turns, stop_reason=stop, answer_blocks=2, reward=1.0)
    assert p_err(episode) == pytest.approx(2 / 3)
    assert p_format(episode) == 0.5
    assert resample_on_correct([episode], 1, mode="paper", rng=random.Random(0)) == [0]


@given(groups, st.data(), modes, st.integers(0, 2**32))
def test_a_selection_has_num_kept_distinct_indices_in_ascending_order(group, data, mode, seed):
    keep = data.draw(st.integers(1, len(group)))
    kept = resample_on_correct(group, keep, mode=mode, rng=random.Random(seed))
    assert len(kept) == keep
    assert kept == sorted(set(kept))
    assert set(kept) <= set(range(len(group)))
    assert kept == resample_on_correct(group, keep, mode=mode, rng=random.Random(seed))


@given(groups, st.data(), modes, st.integers(0, 2**32))
def test_unscored_episodes_are_selected_only_if_there_are_too_few_scored_ones(group, data, mode, seed):
    keep = data.draw(st.integers(1, len(group)))
    kept = resample_on_correct(group, keep, mode=mode, rng=random.Random(seed))
    scored = sum(episode.reward is not None for episode in group)
    assert sum(group[i].reward is None for i in kept) == max(0, keep - scored)


@given(groups, st.data(), st.integers(0, 2**32))
def test_the_papers_rule_keeps_the_share_of_negatives_and_fills_up_with_positives(group, data, seed):
    keep = data.draw(st.integers(1, len(group)))
    kept = resample_on_correct(group, keep, mode="paper", rng=random.Random(seed))
    positives = sum(episode.reward == 1 for episode in group)
    negatives = sum(episode.reward == 0 for episode in group)
    share = negatives * keep // len(group)
    n_positives = min(positives, keep - share)
    assert sum(group[i].reward == 1 for i in kept) == n_positives
    assert sum(group[i].reward == 0 for i in kept) == min(negatives, keep - n_positives)


@given(groups, st.data())
def test_the_released_rule_prefers_positives_with_low_penalties_and_the_first_negatives(group, data):
    keep = data.draw(st.integers(1, len(group)))
    kept = set(resample_on_correct(group, keep, mode="released", rng=random.Random(0)))
    for chosen, other in itertools.product(kept, set(range(len(group))) - kept):
        if group[chosen].reward == group[other].reward == 1:
            assert p_total(group[chosen]) <= p_total(group[other])
        if group[chosen].reward == group[other].reward == 0:
            assert chosen < other


def public_code_selection(rewards, penalties, keep, least=2):
    """Transcribe the rule of rStar2-Agent's public code. Return None if an assertion of that code would fail."""
    count = len(rewards)
    if count == keep:
        return list(range(count))
    negative = [i for i in range(count) if rewards[i] <= 0]
    positive = sorted((i for i in range(count) if rewards[i] > 0), key=lambda i: penalties[i])
    num_negative, num_positive = round(len(negative) * keep / count), round(len(positive) * keep / count)
    if num_negative < least and num_positive < least:
        return None
    if num_negative <= min(least, len(negative)):
        num_negative = min(least, len(negative))
        num_positive = keep - num_negative
    if num_positive <= min(least, len(positive)):
        num_positive = min(least, len(positive))
        num_negative = keep - num_positive
    selected = positive[:num_positive] + negative[:num_negative]
    return sorted(selected) if len(selected) == keep else None


@given(
    st.lists(
        fake_episodes.map(lambda episode: replace(episode, reward=episode.reward or 0.0)), min_size=4, max_size=32
    ),
    st.data(),
)
def test_the_released_rule_selects_as_the_public_code_does(group, data):
    keep = data.draw(st.integers(4, len(group)))
    expected = public_code_selection(
        [episode.reward for episode in group], [p_total(episode) for episode in group], keep
    )
    kept = resample_on_correct(group, keep, mode="released", rng=random.Random(0))
    assert expected is None or kept == expected


def test_the_released_rule_keeps_at_least_two_positives_and_two_negatives():
    one_sided = [WRONG] * 29 + [CORRECT] * 3
    kept = resample_on_correct(one_sided, 16, mode="released", rng=random.Random(0))
    assert kept == [*range(14), 29, 30]
    kept = resample_on_correct([CORRECT] * 29 + [WRONG] * 3, 16, mode="released", rng=random.Random(0))
    assert kept == [*range(14), 29, 30]


@given(groups, st.integers(0, 6), st.data(), modes)
def test_a_group_is_decided_if_no_outcome_of_its_unfinished_episodes_changes_the_selection(
    group, num_unfinished, data, mode
):
    """Compare with the selections for every possible outcome of the unfinished episodes."""
    keep = data.draw(st.integers(1, len(group) + num_unfinished))

    def needs_unfinished(num_wrong):
        whole = group + [WRONG] * num_wrong + [CORRECT] * (num_unfinished - num_wrong)
        kept = resample_on_correct(whole, keep, mode=mode, rng=random.Random(0))
        return any(
            sum(whole[i].reward == reward for i in kept) > sum(episode.reward == reward for episode in group)
            for reward in (0.0, 1.0)
        )

    expected = not any(needs_unfinished(num_wrong) for num_wrong in range(num_unfinished + 1))
    assert is_group_decided([episode.reward for episode in group], num_unfinished, num_kept=keep, mode=mode) == expected


def test_a_group_with_both_rewards_is_decided_earlier_than_a_group_with_one():
    """RoC keeps 16 of 32. With both rewards, 21 finished episodes decide the group; with one reward, 31 or 32 do."""

    def is_decided(negatives, positives):
        rewards = [0.0] * negatives + [1.0] * positives
        return is_group_decided(rewards, 32 - len(rewards), num_kept=16, mode="paper")

    assert is_decided(10, 11) and not is_decided(10, 10) and not is_decided(11, 10)
    assert is_decided(0, 31) and not is_decided(0, 30)
    assert is_decided(32, 0) and not is_decided(31, 0)


def test_the_released_rule_uses_no_random_numbers():
    rng = random.Random(5)
    before = rng.getstate()
    resample_on_correct([CORRECT, WRONG] * 8, 8, mode="released", rng=rng)
    assert rng.getstate() == before


def test_the_papers_rule_may_select_episodes_of_equal_reward():
    group = [WRONG] + [CORRECT] * 31  # floor(1 × 16 / 32) = 0 negatives
    kept = resample_on_correct(group, 16, mode="paper", rng=random.Random(0))
    assert not has_signal(group, kept)
    assert has_signal(group, resample_on_correct(group, 16, mode="released", rng=random.Random(0)))


def test_a_group_without_scored_episodes_keeps_its_first_ones():
    assert resample_on_correct([UNSCORED] * 4, 2, mode="paper", rng=random.Random(0)) == [0, 1]
    assert not has_signal([UNSCORED] * 4, [0, 1])


def test_an_unscored_episode_gives_no_signal():
    assert not has_signal([CORRECT, UNSCORED, CORRECT], [0, 1, 2])
    assert has_signal([CORRECT, UNSCORED, WRONG], [0, 1, 2])


def test_a_reward_above_zero_is_positive():
    group = [FakeEpisode(reward=0.25), FakeEpisode(reward=-1.0), FakeEpisode(reward=0.0), FakeEpisode(reward=2.0)]
    kept = resample_on_correct(group, 3, mode="paper", rng=random.Random(0))
    assert {0, 3} <= set(kept) and len(kept) == 3  # floor(2 × 3 / 4) = 1 negative


@pytest.mark.parametrize("mode", ["paper", "released"])
@pytest.mark.parametrize("keep", [0, -1, 5])
def test_num_kept_outside_1_to_the_group_size_is_refused(mode, keep):
    with pytest.raises(ValueError, match=f"num_kept={keep} of a group of 4"):
        resample_on_correct([CORRECT] * 4, keep, mode=mode, rng=random.Random(0))


def test_an_unknown_mode_and_an_epsilon_of_0_are_refused():
    with pytest.raises(ValueError, match="expected 'paper' or 'released'"):
        resample_on_correct([CORRECT], 1, mode="best", rng=random.Random(0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epsilon=0: expected more than 0"):
        resample_on_correct([CORRECT], 1, mode="paper", rng=random.Random(0), epsilon=0)


def chi_square(counts, probabilities):
    """Pearson's statistic of observed `counts` against `probabilities` by outcome."""
    total = sum(counts.values())
    assert set(counts) <= set(probabilities)
    return sum((counts[key] - total * p) ** 2 / (total * p) for key, p in probabilities.items())


def successive_draws(weights, count):
    """Return the probability of each set of `count` indices that are drawn one after another without replacement.

    Each draw has probabilities proportional to the weights that are left. All orders are enumerated.
    """
    probabilities = Counter()
    for order in itertools.permutations(range(len(weights)), count):
        p, left = 1.0, sum(weights)
        for i in order:
            p *= weights[i] / left
            left -= weights[i]
        probabilities[tuple(sorted(order))] += p
    return probabilities


def test_positives_are_selected_with_the_probabilities_of_successive_draws():
    group = [
        FakeEpisode(num_tool_calls=10, num_failed_tool_calls=failed, answer_blocks=1) for failed in (1, 2, 5, 8, 10)
    ] + [FakeEpisode(num_tool_calls=0)]
    probabilities = successive_draws([1 / (p_total(episode) + EPSILON) for episode in group], 3)
    rng = random.Random(20)
    counts = Counter(tuple(resample_on_correct(group, 3, mode="paper", rng=rng)) for _ in range(8_000))
    assert sum(probabilities.values()) == pytest.approx(1)
    assert len(probabilities) == comb(6, 3)
    # With 19 degrees of freedom, chance exceeds 43.8 once in a thousand seeds. This seed is fixed and does not.
    assert chi_square(counts, probabilities) < 43.8
    # The test would detect another rule: selection in proportion to the sum of a set's weights gives over 400.
    wrong = Counter({key: sum(1 / p_total(group[i]) for i in key) for key in probabilities})
    scale = sum(wrong.values())
    assert chi_square(counts, {key: p / scale for key, p in wrong.items()}) > 400


def test_negatives_are_selected_uniformly_whatever_their_penalty():
    group = [
        FakeEpisode(reward=0.0, num_tool_calls=10, num_failed_tool_calls=failed, answer_blocks=failed % 3)
        for failed in range(6)
    ]
    rng = random.Random(21)
    counts = Counter(tuple(resample_on_correct(group, 3, mode="paper", rng=rng)) for _ in range(6_000))
    assert chi_square(counts, dict.fromkeys(itertools.combinations(range(6), 3), 1 / 20)) < 43.8


def test_positives_without_penalty_are_selected_first():
    group = [FakeEpisode(num_tool_calls=10, num_failed_tool_calls=1)] * 8 + [CORRECT] * 8
    kept = resample_on_correct(group, 8, mode="paper", rng=random.Random(0))
    assert kept == list(range(8, 16))


@given(groups, st.data(), modes)
def test_every_episode_has_a_selection_reason(group, data, mode):
    keep = data.draw(st.integers(1, len(group)))
    kept = resample_on_correct(group, keep, mode=mode, rng=random.Random(0))
    reasons = selection_reasons(group, kept)
    assert len(reasons) == len(group)
    assert [i for i, reason in enumerate(reasons) if reason.startswith("selected: ")] == kept
    assert all("unscored" in reasons[i] for i, episode in enumerate(group) if episode.reward is None)


def test_a_selection_reason_states_reward_counts_and_penalty():
    penalised = FakeEpisode(num_tool_calls=4, num_failed_tool_calls=1, answer_blocks=3, num_turns=4)
    reasons = selection_reasons([penalised, CORRECT, WRONG, WRONG, UNSCORED], [1, 2])
    correct = "correct, 1 of 2 selected, more likely with a low penalty"
    assert reasons == [
        f"not selected: {correct}; penalty 0.75 = 0.25 (1 of 4 tool calls failed) + 0.50 (3 answers)",
        f"selected: {correct}; penalty 0.00 = 0.00 (0 of 1 tool calls failed) + 0.00 (one answer)",
        "selected: wrong, 1 of 2 selected, whatever the penalty",
        "not selected: wrong, 1 of 2 selected, whatever the penalty",
        "not selected: unscored, 0 of 1 selected, "
        "only if scored episodes cannot fill the group: cancelled, or infrastructure failed",
    ]
    assert selection_reasons([CORRECT], [0])[0].endswith("; not in the loss, since all selected rewards are equal")
