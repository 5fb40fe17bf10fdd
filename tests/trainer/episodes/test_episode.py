"""An episode that is stored in parts is the same when its parts are put together."""

from __future__ import annotations

import copy
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from trainer.episodes.episode import Episode, Problem, Turn

growth = st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans())
"""Tokens that are sampled, by how much newer their weights are, and whether an observation follows."""


def grow(episode: Episode, num_tokens: int, newer: int, has_observation: bool) -> None:
    version = newer + (episode.weight_versions[-1][1] if episode.weight_versions else 0)
    start = len(episode.response_ids)
    episode.append_sampled([7] * num_tokens, [-1.0] * num_tokens, version)
    if has_observation:
        episode.append_observation([8, 9])
        episode.turns.append(Turn(start, start + num_tokens, "", weight_version=version))


@given(st.lists(growth, max_size=6), st.lists(growth, max_size=6))
def test_the_first_part_of_an_episode_with_the_rest_appended_equals_the_whole_episode(
    before: list[tuple[int, int, bool]], after: list[tuple[int, int, bool]]
) -> None:
    """The tail keeps the indices of the whole episode, so none is shifted when it is appended."""
    whole = Episode(Problem("p", "", ""), 0)
    for step in before:
        grow(whole, *step)
    head = copy.deepcopy(whole)
    for step in after:
        grow(whole, *step)
    joined = head.with_tail(whole.tail(len(head.response_ids), len(head.turns)))
    assert [getattr(joined, field.name) for field in fields(Episode)] == [
        getattr(whole, field.name) for field in fields(Episode)
    ]
    assert joined.sampled_tokens_by_version == whole.sampled_tokens_by_version
