"""The data of an episode: a problem, the sampled tokens, the turns and their tool calls, the reward.

Invariants:
- `response_ids`, `logprobs` and `loss_mask` have the same length and only grow. They hold the tokens as the engine
  returned them; no text is ever tokenised a second time.
- `loss_mask` is 1 for each sampled token and 0 for each observation token.
- An observation token has log-probability 0. A sampled token has the log-probability with which it was sampled. If its
  engine did not return this number, it is None. If the returned number was not finite, it is NaN.
- Weight versions never decrease along the tokens.
- `reward` is None if infrastructure failed. Such an episode never counts as a reward of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar

WITHOUT_LOGPROBS_ADVICE = (
    "no importance ratio can be computed for them; train on such episodes by SFT (`export --format chat`)"
)


class ToolCallStatus(StrEnum):
    """How a tool call ended. All values but `MALFORMED` are the sandbox's statuses."""

    OK = "ok"
    """The tool did what the model asked for."""
    ERROR = "error"
    """The model's code raised an exception, or the tool reported an error."""
    TIMEOUT = "timeout"
    """The call exceeded its time limit."""
    MEMORY_LIMIT = "memory_limit"
    """The call exceeded its memory limit."""
    OUTPUT_LIMIT = "output_limit"
    """The call printed too much."""
    KILLED = "killed"
    """A signal ended the process of the call, for example after a crash in C code."""
    UNAVAILABLE = "unavailable"
    """The sandbox failed, not the model's code. The episode ends without a reward."""
    MALFORMED = "malformed"
    """The JSON did not parse, the tool does not exist, or the arguments were wrong. The model reads the reason."""


class StopReason(StrEnum):
    """Why an episode ended."""

    FINISHED = "finished"
    """The last turn has no tool call."""
    TURN_LIMIT = "turn_limit"
    """The episode has `max_turns` turns, and the last one asks for another tool call."""
    TOKEN_LIMIT = "token_limit"
    """The response, observations included, reached `max_response_tokens`."""
    UNAVAILABLE = "unavailable"
    """The sandbox or every engine failed. The reward is None."""
    DEADLINE = "deadline"
    """The episode took longer than its deadline. The reward is None, since an overloaded engine or sandbox may be the
    cause; an evaluation counts it as not solved."""


class FailureKind(StrEnum):
    """What failed. In a collection, each kind of failure has a budget of its own."""

    INFRASTRUCTURE = "infrastructure"
    """A node, an actor, an engine or the sandbox."""
    ENVIRONMENT = "environment"
    """The problem's environment failed, or gave another response when its actions were replayed, or no engine can serve
    a context as long as the problem's."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A text with a checkable answer."""

    id: str
    """The problem's name. No other problem of the run has it."""
    text: str
    """What the model is asked."""
    answer: str
    """The right answer. It may be empty if a reward function scores the episodes."""
    source: str = ""
    """The name of the problem's data set."""
    environment: str = "python"
    """The name of the environment in which its episodes act (`trainer.environments.registry`)."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The environment's settings for this problem, as JSON values."""
    reward: str = ""
    """The function that scores the episodes, as package.module:function. If empty, the environment scores them."""

    def with_default_reward(self, name: str) -> Problem:
        """Return this problem with the reward function `name`, unless it has one of its own."""
        return replace(self, reward=name) if name and not self.reward else self


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call and its response. The response is empty for `UNAVAILABLE`, since the model never reads one."""

    name: str
    """The name of the tool."""
    arguments: str | Mapping[str, Any]
    """The parsed arguments. If the call did not parse, its raw text."""
    status: ToolCallStatus
    """How the call ended."""
    response: str
    """What the model reads."""
    duration_s: float = 0.0
    """Seconds that the tool took."""
    is_truncated: bool = False
    """Whether `response` is shorter than the tool's output."""
    error: str = ""
    """The infrastructure failure behind `UNAVAILABLE`."""
    ends_episode: bool = False
    """True if the environment accepts no further action. For a call that is `UNAVAILABLE`: true if no further try of
    the episode may run this call."""

    @property
    def has_failed(self) -> bool:
        """Whether the call counts as failed in RoC's penalty for tool errors. Infrastructure failures do not count."""
        return self.status not in (ToolCallStatus.OK, ToolCallStatus.UNAVAILABLE)

    def row_fields(self) -> dict[str, Any]:
        """Return the call as a row of the run folder: its fields and `has_failed`."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"has_failed": self.has_failed}


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation by the model, `response_ids[start:end]` of the episode, and the tool calls in it."""

    start: int
    """The index of the turn's first token in the response."""
    end: int
    """The index after the turn's last token in the response."""
    text: str
    """The text of the turn."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls of the turn, in order."""
    engine: str = ""
    """The name of the engine that generated the turn."""
    weight_version: int = 0
    """The version of the weights that sampled the last token of the turn."""
    wait_s: float = 0.0
    """Seconds in which the turn waited for an engine."""
    generate_s: float = 0.0
    """Seconds in which an engine generated the turn."""
    tool_s: float = 0.0
    """Seconds in which its tool calls ran."""


@dataclass(slots=True, eq=False)
class Episode:
    """One attempt at a problem. It grows until `stop_reason` is set. An unfinished episode can be continued later."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"ser_json_inf_nan": "constants"}
    """A file of episodes contains NaN as NaN, since null means that a log-probability is unknown."""

    problem: Problem
    """The problem that the model is to solve."""
    sample: int
    """The index of this episode among those of its problem."""
    prompt_ids: tuple[int, ...] = ()
    """The tokens before the first turn."""
    response_ids: list[int] = field(default_factory=list)
    """The tokens of all turns and observations."""
    logprobs: list[float | None] = field(default_factory=list)
    """The log-probability of each token of the response. It is 0 for the tokens of observations, None if it is unknown,
    and NaN if the engine returned a number that is not finite."""
    loss_mask: list[int] = field(default_factory=list)
    """For each token of the response: 1 if the model sampled it, 0 if it belongs to an observation."""
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    """Entries `(start, version)`: weights of this version sampled the tokens from index `start` up to the start of the
    next entry."""
    turns: list[Turn] = field(default_factory=list)
    """The turns of the model, in order."""
    stop_reason: StopReason | None = None
    """Why the episode ended. None while it runs."""
    answer: str | None = None
    """The content of the last closed box in the last `<answer>` block of the episode. The block may be in any turn. If
    there is none, and the chat format needs no tags, the text of the last turn without its thoughts."""
    answer_blocks: int = 0
    """The number of closed `<answer>` blocks in all turns. Blocks in thoughts do not count."""
    reward: float | None = None
    """The reward. None if the episode is not scored."""
    duration_s: float = 0.0
    """Seconds that the episode ran, summed over all its tries."""
    error: str = ""
    """The infrastructure failure behind `StopReason.UNAVAILABLE`, or why a finished episode has no reward."""
    seed: int | None = None
    """The seed from which the seeds of the turns are computed. With None, the process that runs the episode gives the
    seed."""
    weight_version: int | None = None
    """The version of the weights that another process has given to the engines. None if no other process does that."""

    def append_sampled(self, ids: Sequence[int], logprobs: Sequence[float] | None, weight_version: int) -> None:
        """Append tokens that weights of `weight_version` sampled. `logprobs` is None if they are unknown."""
        known_or_none: Sequence[float | None] = [None] * len(ids) if logprobs is None else logprobs
        assert len(ids) == len(known_or_none), f"{len(ids)} ids with {len(known_or_none)} log-probabilities"
        if ids and (not self.weight_versions or self.weight_versions[-1][1] != weight_version):
            self.weight_versions.append((len(self.response_ids), weight_version))
        self._append(ids, known_or_none, 1)

    def append_observation(self, ids: Sequence[int]) -> None:
        """Append tokens that the environment puts between two turns."""
        self._append(ids, [0.0] * len(ids), 0)

    def tail(self, start_token: int, start_turn: int) -> Episode:
        """Return a copy of this episode that has only the tokens and the turns from these indices on. The turns and the
        weight versions of the copy keep the indices of the whole episode, so only `with_tail` may use them."""
        return replace(
            self,
            response_ids=self.response_ids[start_token:],
            logprobs=self.logprobs[start_token:],
            loss_mask=self.loss_mask[start_token:],
            weight_versions=[entry for entry in self.weight_versions if entry[0] >= start_token],
            turns=self.turns[start_turn:],
        )

    def with_tail(self, tail: Episode) -> Episode:
        """Return a copy of `tail` to which the tokens and turns of this episode are prepended. `tail` begins where this
        episode ends."""
        return replace(
            tail,
            response_ids=self.response_ids + tail.response_ids,
            logprobs=self.logprobs + tail.logprobs,
            loss_mask=self.loss_mask + tail.loss_mask,
            weight_versions=self.weight_versions + tail.weight_versions,
            turns=self.turns + tail.turns,
        )

    def _append(self, ids: Sequence[int], logprobs: Sequence[float | None], mask_bit: int) -> None:
        self.response_ids += ids
        self.logprobs += logprobs
        self.loss_mask += [mask_bit] * len(ids)

    @property
    def known_logprobs(self) -> list[float] | None:
        """The log-probabilities. None if one of them is unknown, since the importance ratio of its token cannot be
        computed. NaN is allowed: the ratio of such a token counts as 1."""
        known = [logprob for logprob in self.logprobs if logprob is not None]
        return known if len(known) == len(self.logprobs) else None

    @property
    def response_length(self) -> int:
        """The number of tokens after the prompt, observations included."""
        return len(self.response_ids)

    @property
    def num_turns(self) -> int:
        """The number of turns."""
        return len(self.turns)

    @property
    def num_tool_calls(self) -> int:
        """The number of tool calls that have a result. Malformed calls count; unavailable ones do not."""
        return sum(call.status is not ToolCallStatus.UNAVAILABLE for turn in self.turns for call in turn.tool_calls)

    @property
    def num_failed_tool_calls(self) -> int:
        """The number of tool calls that count as failed (`ToolCall.has_failed`)."""
        return sum(call.has_failed for turn in self.turns for call in turn.tool_calls)

    @property
    def num_repeated_tool_calls(self) -> int:
        """The number of failed tool calls with the name and the arguments of an earlier failed call of the episode."""
        failed = [
            (call.name, str(call.arguments)) for turn in self.turns for call in turn.tool_calls if call.has_failed
        ]
        return len(failed) - len(set(failed))

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the model sampled."""
        return sum(self.loss_mask)

    @property
    def sampled_tokens_by_version(self) -> dict[int, int]:
        """The number of sampled tokens per weight version."""
        ends = [*(start for start, _ in self.weight_versions[1:]), len(self.response_ids)]
        return {  # without versions, nothing was sampled
            version: sum(self.loss_mask[start:end])
            for (start, version), end in zip(self.weight_versions, ends, strict=False)
        }
