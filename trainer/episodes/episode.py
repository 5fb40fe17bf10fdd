"""What an episode is: a problem, the tokens that were made for it, and how it went. Pure data.

Invariants:
- Ids, log-probabilities and mask are append-only and of one length. They are recorded as they were sampled; nothing is
  ever decoded and tokenised again. Versions of weights never fall along them.
- `mask` is 1 for what the model sampled and 0 for what was put before it (tool responses, whose log-probability is 0).
- `reward` is None when there is no verdict: our failure is never a reward of 0.

Letters: T tokens after the prompt, P tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class CallStatus(StrEnum):
    """How a tool call ended: the sandbox's statuses, and one for what never became a call."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"
    UNAVAILABLE = "unavailable"
    """No verdict: ours, never the model's. It ends the episode without a reward."""
    MALFORMED = "malformed"
    """JSON that does not parse, an unknown tool, wrong arguments. The model reads what was wrong."""


class StopReason(StrEnum):
    """Why an episode ended."""

    FINISHED = "finished"
    """A turn without a tool call."""
    TURN_LIMIT = "turn_limit"
    """`max_turns` turns, and the last one asked for another tool call."""
    TOKEN_LIMIT = "token_limit"
    """The response, tool tokens included, has `max_tokens`."""
    UNAVAILABLE = "unavailable"
    """The sandbox or every engine failed. The reward is None."""
    CANCELLED = "cancelled"
    """Stopped by us, as its group had what is kept without it. The reward is None."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A task with a checkable answer. `source` names the data set it is from."""

    id: str
    text: str
    answer: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model asked for it, and what it read in return: nothing for `UNAVAILABLE`."""

    name: str
    code: str
    stdin: str
    status: CallStatus
    response: str
    seconds: float = 0.0
    is_cut: bool = False
    """Whether `response` is shorter than what the tool said."""
    error: str = ""
    """What of ours failed, for `UNAVAILABLE`."""

    @property
    def has_failed(self) -> bool:
        """Whether it counts as failed in p_err: it did not parse, raised, timed out or crashed. Ours never counts."""
        return self.status not in (CallStatus.OK, CallStatus.UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said at once, `ids[start:end]` of the episode, and the tool calls in it."""

    start: int
    end: int
    text: str
    calls: tuple[ToolCall, ...] = ()
    engine: str = ""
    version: int = 0
    """Of the weights that sampled its end: how many steps of the run are in them."""
    generate_s: float = 0.0
    tools_s: float = 0.0


@dataclass(slots=True, eq=False)
class Episode:
    """A rollout: it grows until it has a `stop`, and may be carried on later from where it was interrupted.

    Once it is over it answers what `trainer.episodes.roc` asks of a rollout.
    """

    problem: Problem
    sample: int
    """Which of the problem's rollouts."""
    prompt_ids: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """`(start, version)`: from this token on the weights that sampled, until the next entry."""
    steps: list[Turn] = field(default_factory=list)
    turn_start: int = 0
    """Where the turn that is under way begins, and the seconds that engines took for it so far."""
    generate_s: float = 0.0
    stop: StopReason | None = None
    answer: str | None = None
    """The last boxed answer of the last turn, as text."""
    answer_tags: int = 0
    """`<answer>` blocks that were opened and closed, in all turns."""
    reward: float | None = None
    seconds: float = 0.0
    error: str = ""
    """What of ours failed, for `StopReason.UNAVAILABLE`."""
    age: int = 0
    """How often it was interrupted: the steps of training that it has outlived."""

    def sampled(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append what the model sampled with the weights `version`."""
        assert len(ids) == len(logprobs), f"{len(ids)} ids with {len(logprobs)} log-probabilities"
        if ids and (not self.versions or self.versions[-1][1] != version):
            self.versions.append((len(self.ids), version))
        self._append(ids, logprobs, 1)

    def shown(self, ids: Sequence[int]) -> None:
        """Append what the model was shown."""
        self._append(ids, [0.0] * len(ids), 0)

    def _append(self, ids: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.mask += [mask] * len(ids)

    @property
    def length(self) -> int:
        """T, what tools said included."""
        return len(self.ids)

    @property
    def turns(self) -> int:
        return len(self.steps)

    @property
    def calls(self) -> int:
        """Tool calls that have a verdict, malformed ones included."""
        return sum(call.status is not CallStatus.UNAVAILABLE for turn in self.steps for call in turn.calls)

    @property
    def failed_calls(self) -> int:
        return sum(call.has_failed for turn in self.steps for call in turn.calls)

    @property
    def sampled_tokens(self) -> int:
        return sum(self.mask)

    @property
    def tokens_by_version(self) -> dict[int, int]:
        """Sampled tokens, by the weights that sampled them."""
        ends = [*(start for start, _ in self.versions[1:]), len(self.ids)]
        return {version: sum(self.mask[start:end]) for (start, version), end in zip(self.versions, ends, strict=True)}
