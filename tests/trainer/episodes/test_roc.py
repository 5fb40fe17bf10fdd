"""RoC: the paper's penalties, what is always true of a selection, and the law by which it draws."""

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
class Roll:
    reward: float | None = 1.0
    num_tool_calls: int = 1
    num_failed_tool_calls: int = 0
    answer_blocks: int = 1
    num_turns: int = 2


CLEAN, WRONG, LOST = Roll(), Roll(reward=0.0), Roll(reward=None)

rolls = st.builds(
    lambda reward, calls, failed, tags, turns: Roll(reward, calls, min(failed, calls), tags, turns),
    st.sampled_from([None, 0.0, 1.0]),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 4),
    st.integers(0, 5),
)
groups = st.lists(rolls, min_size=1, max_size=24)
modes = st.sampled_from(["paper", "released"])


@pytest.mark.parametrize(
    ("roll", "err", "form"),
    [
        (Roll(num_tool_calls=0), 0.5, 0.0),
        (Roll(num_tool_calls=4, num_failed_tool_calls=1), 0.25, 0.0),
        (Roll(num_tool_calls=3, num_failed_tool_calls=3), 1.0, 0.0),
        (Roll(answer_blocks=0), 0.0, 1.0),
        (Roll(answer_blocks=2, num_turns=4), 0.0, 0.25),
        (Roll(answer_blocks=9, num_turns=4), 0.0, 1.0),
        (Roll(num_tool_calls=0, answer_blocks=0, num_turns=0), 0.5, 1.0),
        (Roll(answer_blocks=2, num_turns=0), 0.0, 1.0),
    ],
)
def test_penalties_are_the_papers(roll, err, form):
    assert (p_err(roll), p_format(roll), p_total(roll)) == (err, form, err + form)


def test_an_episode_is_a_rollout():
    calls = tuple(ToolCall("python", {}, status, "") for status in (ToolCallStatus.OK, ToolCallStatus.TIMEOUT))
    turns = [Turn(0, 1, "", (*calls, ToolCall("?", {}, ToolCallStatus.MALFORMED, ""))), Turn(1, 2, "")]
    stop = StopReason.FINISHED
    episode = Episode(Problem("p", "?", "1"), 0, (1,), turns=turns, stop_reason=stop, answer_blocks=2, reward=1.0)
    assert p_err(episode) == pytest.approx(2 / 3)
    assert p_format(episode) == 0.5
    assert resample_on_correct([episode], 1, mode="paper", rng=random.Random(0)) == [0]


@given(groups, st.data(), modes, st.integers(0, 2**32))
def test_a_selection_is_keep_ascending_indices(group, data, mode, seed):
    keep = data.draw(st.integers(1, len(group)))
    kept = resample_on_correct(group, keep, mode=mode, rng=random.Random(seed))
    assert len(kept) == keep
    assert kept == sorted(set(kept))
    assert set(kept) <= set(range(len(group)))
    assert kept == resample_on_correct(group, keep, mode=mode, rng=random.Random(seed))


@given(groups, st.data(), modes, st.integers(0, 2**32))
def test_no_verdict_is_chosen_only_when_the_others_cannot_fill(group, data, mode, seed):
    keep = data.draw(st.integers(1, len(group)))
    kept = resample_on_correct(group, keep, mode=mode, rng=random.Random(seed))
    scored = sum(roll.reward is not None for roll in group)
    assert sum(group[i].reward is None for i in kept) == max(0, keep - scored)


@given(groups, st.data(), st.integers(0, 2**32))
def test_the_paper_keeps_its_share_of_negatives_and_fills_with_positives(group, data, seed):
    keep = data.draw(st.integers(1, len(group)))
    kept = resample_on_correct(group, keep, mode="paper", rng=random.Random(seed))
    positives = sum(roll.reward == 1 for roll in group)
    negatives = sum(roll.reward == 0 for roll in group)
    share = negatives * keep // len(group)
    n_positives = min(positives, keep - share)
    assert sum(group[i].reward == 1 for i in kept) == n_positives
    assert sum(group[i].reward == 0 for i in kept) == min(negatives, keep - n_positives)


@given(groups, st.data())
def test_released_prefers_clean_positives_and_first_negatives(group, data):
    keep = data.draw(st.integers(1, len(group)))
    kept = set(resample_on_correct(group, keep, mode="released", rng=random.Random(0)))
    for chosen, other in itertools.product(kept, set(range(len(group))) - kept):
        if group[chosen].reward == group[other].reward == 1:
            assert p_total(group[chosen]) <= p_total(group[other])
        if group[chosen].reward == group[other].reward == 0:
            assert chosen < other


def released_by_the_letter(rewards, penalties, keep, least=2):
    """The public code's rule, transcribed slowly; None where its own assertion fails or it keeps the whole group."""
    count = len(rewards)
    if count == keep:
        return list(range(count))
    zero = [i for i in range(count) if rewards[i] <= 0]
    other = sorted((i for i in range(count) if rewards[i] > 0), key=lambda i: penalties[i])
    n_zero, n_other = round(len(zero) * keep / count), round(len(other) * keep / count)
    if n_zero < least and n_other < least:
        return None
    if n_zero <= min(least, len(zero)):
        n_zero = min(least, len(zero))
        n_other = keep - n_zero
    if n_other <= min(least, len(other)):
        n_other = min(least, len(other))
        n_zero = keep - n_other
    chosen = other[:n_other] + zero[:n_zero]
    return sorted(chosen) if len(chosen) == keep else None


@given(st.lists(rolls.map(lambda roll: replace(roll, reward=roll.reward or 0.0)), min_size=4, max_size=32), st.data())
def test_released_is_the_public_codes_rule(group, data):
    keep = data.draw(st.integers(4, len(group)))
    expected = released_by_the_letter([roll.reward for roll in group], [p_total(roll) for roll in group], keep)
    kept = resample_on_correct(group, keep, mode="released", rng=random.Random(0))
    assert expected is None or kept == expected


def test_released_keeps_at_least_two_of_each():
    one_sided = [WRONG] * 29 + [CLEAN] * 3
    kept = resample_on_correct(one_sided, 16, mode="released", rng=random.Random(0))
    assert kept == [*range(14), 29, 30]
    kept = resample_on_correct([CLEAN] * 29 + [WRONG] * 3, 16, mode="released", rng=random.Random(0))
    assert kept == [*range(14), 29, 30]


@given(groups, st.integers(0, 6), st.data(), modes)
def test_stragglers_are_needless_where_no_outcome_of_theirs_could_be_kept_more_than_there_is(group, left, data, mode):
    """Against every outcome, and what would be selected then."""
    keep = data.draw(st.integers(1, len(group) + left))

    def needs_more(wrong):
        whole = group + [WRONG] * wrong + [CLEAN] * (left - wrong)
        kept = resample_on_correct(whole, keep, mode=mode, rng=random.Random(0))
        return any(
            sum(whole[i].reward == reward for i in kept) > sum(roll.reward == reward for roll in group)
            for reward in (0.0, 1.0)
        )

    expected = not any(needs_more(wrong) for wrong in range(left + 1))
    assert is_group_decided([roll.reward for roll in group], left, num_kept=keep, mode=mode) == expected


def test_stragglers_are_waited_for_as_long_as_they_may_differ():
    """16 of 32: with as many of both, two thirds suffice; of one kind alone, nearly all."""

    def at(negatives, positives):
        rewards = [0.0] * negatives + [1.0] * positives
        return is_group_decided(rewards, 32 - len(rewards), num_kept=16, mode="paper")

    assert at(10, 11) and not at(10, 10) and not at(11, 10)
    assert at(0, 31) and not at(0, 30)
    assert at(32, 0) and not at(31, 0)


def test_released_draws_nothing():
    rng = random.Random(5)
    before = rng.getstate()
    resample_on_correct([CLEAN, WRONG] * 8, 8, mode="released", rng=rng)
    assert rng.getstate() == before


def test_the_paper_may_leave_a_group_without_signal():
    group = [WRONG] + [CLEAN] * 31  # floor(1 × 16 / 32) = 0 negatives
    kept = resample_on_correct(group, 16, mode="paper", rng=random.Random(0))
    assert not has_signal(group, kept)
    assert has_signal(group, resample_on_correct(group, 16, mode="released", rng=random.Random(0)))


def test_nobody_has_a_verdict():
    assert resample_on_correct([LOST] * 4, 2, mode="paper", rng=random.Random(0)) == [0, 1]
    assert not has_signal([LOST] * 4, [0, 1])


def test_no_verdict_is_no_signal():
    assert not has_signal([CLEAN, LOST, CLEAN], [0, 1, 2])
    assert has_signal([CLEAN, LOST, WRONG], [0, 1, 2])


def test_a_reward_above_zero_is_positive():
    group = [Roll(reward=0.25), Roll(reward=-1.0), Roll(reward=0.0), Roll(reward=2.0)]
    kept = resample_on_correct(group, 3, mode="paper", rng=random.Random(0))
    assert {0, 3} <= set(kept) and len(kept) == 3  # floor(2 × 3 / 4) = 1 negative


@pytest.mark.parametrize("mode", ["paper", "released"])
@pytest.mark.parametrize("keep", [0, -1, 5])
def test_keep_outside_the_group_is_refused(mode, keep):
    with pytest.raises(ValueError, match=f"num_kept={keep} of a group of 4"):
        resample_on_correct([CLEAN] * 4, keep, mode=mode, rng=random.Random(0))


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="expected 'paper' or 'released'"):
        resample_on_correct([CLEAN], 1, mode="best", rng=random.Random(0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epsilon=0: expected more than 0"):
        resample_on_correct([CLEAN], 1, mode="paper", rng=random.Random(0), epsilon=0)


def chi_square(counts, law):
    total = sum(counts.values())
    assert set(counts) <= set(law)
    return sum((counts[key] - total * p) ** 2 / (total * p) for key, p in law.items())


def successive(weights, count):
    """P of each set of `count` drawn one after another in proportion to the weights left, by full enumeration."""
    law = Counter()
    for order in itertools.permutations(range(len(weights)), count):
        p, left = 1.0, sum(weights)
        for i in order:
            p *= weights[i] / left
            left -= weights[i]
        law[tuple(sorted(order))] += p
    return law


def test_positives_follow_the_law_of_successive_draws():
    group = [Roll(num_tool_calls=10, num_failed_tool_calls=failed, answer_blocks=1) for failed in (1, 2, 5, 8, 10)] + [
        Roll(num_tool_calls=0)
    ]
    law = successive([1 / (p_total(roll) + EPSILON) for roll in group], 3)
    rng = random.Random(20)
    counts = Counter(tuple(resample_on_correct(group, 3, mode="paper", rng=rng)) for _ in range(8_000))
    assert sum(law.values()) == pytest.approx(1)
    assert len(law) == comb(6, 3)
    # 19 degrees of freedom: 43.8 is passed once in a thousand. The seed is fixed, so this never is by chance.
    assert chi_square(counts, law) < 43.8
    # The test can tell: simultaneous weights, as in the mean of the weights of a set, are far off.
    wrong = Counter({key: sum(1 / p_total(group[i]) for i in key) for key in law})
    scale = sum(wrong.values())
    assert chi_square(counts, {key: p / scale for key, p in wrong.items()}) > 400


def test_negatives_are_uniform_whatever_their_penalty():
    group = [
        Roll(reward=0.0, num_tool_calls=10, num_failed_tool_calls=failed, answer_blocks=failed % 3)
        for failed in range(6)
    ]
    rng = random.Random(21)
    counts = Counter(tuple(resample_on_correct(group, 3, mode="paper", rng=rng)) for _ in range(6_000))
    assert chi_square(counts, dict.fromkeys(itertools.combinations(range(6), 3), 1 / 20)) < 43.8


def test_clean_positives_go_first():
    group = [Roll(num_tool_calls=10, num_failed_tool_calls=1)] * 8 + [CLEAN] * 8
    kept = resample_on_correct(group, 8, mode="paper", rng=random.Random(0))
    assert kept == list(range(8, 16))


@given(groups, st.data(), modes)
def test_every_rollout_is_told_why(group, data, mode):
    keep = data.draw(st.integers(1, len(group)))
    kept = resample_on_correct(group, keep, mode=mode, rng=random.Random(0))
    words = selection_reasons(group, kept)
    assert len(words) == len(group)
    assert [i for i, why in enumerate(words) if why.startswith("selected: ")] == kept
    assert all("unscored" in words[i] for i, roll in enumerate(group) if roll.reward is None)


def test_why_says_what_it_was_chosen_by():
    careless = Roll(num_tool_calls=4, num_failed_tool_calls=1, answer_blocks=3, num_turns=4)
    words = selection_reasons([careless, CLEAN, WRONG, WRONG, LOST], [1, 2])
    right = "correct, 1 of 2 selected, more likely with a low penalty"
    assert words == [
        f"not selected: {right}; penalty 0.75 = 0.25 (1 of 4 tool calls failed) + 0.50 (3 answers)",
        f"selected: {right}; penalty 0.00 = 0.00 (0 of 1 tool calls failed) + 0.00 (one answer)",
        "selected: wrong, 1 of 2 selected, whatever the penalty",
        "not selected: wrong, 1 of 2 selected, whatever the penalty",
        "not selected: unscored, 0 of 1 selected, "
        "only if scored episodes cannot fill the group: cancelled, or infrastructure failed",
    ]
    assert selection_reasons([CLEAN], [0])[0].endswith("; not in the loss, since all selected rewards are equal")
