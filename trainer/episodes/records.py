"""Exact rows of JSON for episodes: a finished episode in one row, or a growing one in a row per turn.

    header_row(episode)                      the task, the sample and the prompt
    growth_row(episode, start_token, start_turn)   everything since that token and that turn
    extend_episode(episode, row)             appends what `growth_row` returned

Invariant: an episode that is rebuilt from its header and its growth rows is equal to the original, floats included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trainer.episodes.episode import Episode, Problem, StopReason, ToolCall, ToolCallStatus, Turn

_STATE_FIELDS = (
    "turn_start", "turn_generate_s", "stop_reason", "answer", "answer_blocks", "reward", "duration_s", "error",
    "steps_carried",
)  # fmt: skip
"""Fields of `Episode` of which a row replaces the earlier value."""


def header_row(episode: Episode) -> dict[str, Any]:
    """Return what never changes after the episode has started."""
    problem = {field.name: getattr(episode.problem, field.name) for field in fields(episode.problem)}
    return {"problem": problem, "sample": episode.sample, "prompt_ids": episode.prompt_ids}


def growth_row(episode: Episode, start_token: int = 0, start_turn: int = 0) -> dict[str, Any]:
    """Return the tokens from `start_token` and the turns from `start_turn` on, and the episode's present state."""
    mask = bytes(episode.loss_mask[start_token:])
    return {
        "start": start_token,
        "response_ids": episode.response_ids[start_token:],
        "logprobs": episode.logprobs[start_token:],
        # Runs of equal value as [length, value].
        "loss_mask": [[len(run[0]), run[0][0]] for run in re.finditer(rb"\x00+|\x01+", mask)],
        "weight_versions": [entry for entry in episode.weight_versions if entry[0] >= start_token],
        "turns": [_turn_row(turn) for turn in episode.turns[start_turn:]],
        **{name: getattr(episode, name) for name in _STATE_FIELDS},
    }


def new_episode(row: Mapping[str, Any]) -> Episode:
    """Return the episode of a `header_row`, before its first turn."""
    return Episode(Problem(**row["problem"]), row["sample"], tuple(row["prompt_ids"]))


def extend_episode(episode: Episode, row: Mapping[str, Any]) -> None:
    """Append a `growth_row`. Raises `ValueError` if its tokens do not follow those of the episode."""
    if row["start"] != len(episode.response_ids):
        raise ValueError(f"expected tokens from {len(episode.response_ids)}, got tokens from {row['start']}")
    episode.response_ids += row["response_ids"]
    episode.logprobs += row["logprobs"]
    for length, value in row["loss_mask"]:
        episode.loss_mask += [value] * length
    episode.weight_versions += [(start, version) for start, version in row["weight_versions"]]
    episode.turns += [_turn(turn) for turn in row["turns"]]
    for name in _STATE_FIELDS:
        setattr(episode, name, row[name])
    episode.stop_reason = StopReason(row["stop_reason"]) if row["stop_reason"] else None


def _turn_row(turn: Turn) -> dict[str, Any]:
    row = {field.name: getattr(turn, field.name) for field in fields(turn)}
    calls = [{field.name: getattr(call, field.name) for field in fields(call)} for call in turn.tool_calls]
    return {**row, "tool_calls": calls}


def _turn(row: Mapping[str, Any]) -> Turn:
    calls = (ToolCall(**{**call, "status": ToolCallStatus(call["status"])}) for call in row["tool_calls"])
    return Turn(**{**row, "tool_calls": tuple(calls)})
