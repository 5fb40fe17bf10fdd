"""Episodes: how they are run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Where an episode ends. `max_tokens` is of the response, tool responses included."""

    max_tokens: int
    max_turns: int
    tool_chars: int = 4096
    """Of a tool response before it is cut."""
