"""The table of a run's metrics: description, chart on the run page, and how the number follows from episodes.

To add a metric, add a row here and return its number with a step's others. The run folder, the terminal, the run page,
the trackers and the evaluation all read this table.

Means and ratios are over scored episodes. Episodes without a reward count only in `unavailable_episodes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Any, Literal, Protocol, TypeAlias

from trainer.episodes.episode import Episode, StopReason
from trainer.episodes.reward import is_correct

Axis = Literal["count", "free", "log", "positive", "ratio", "share", "stacked", "unit"]
"""The axis of a chart.

    count, positive     from 0 up; `count` at least to 1
    stacked             as `count`, with the lines added up
    unit, share         from 0 to 1; `share` in percent
    ratio               from 0 up, in percent
    free                around the numbers
    log                 logarithmic
"""


class ScoredEpisode(Protocol):
    """The attributes that both an `Episode` and an evaluation's `EpisodeOutcome` have."""

    @property
    def reward(self) -> float | None: ...
    @property
    def num_tool_calls(self) -> int: ...
    @property
    def num_failed_tool_calls(self) -> int: ...
    @property
    def answer_blocks(self) -> int: ...
    @property
    def num_turns(self) -> int: ...
    @property
    def response_length(self) -> int: ...


Measure: TypeAlias = Callable[[Any], float]
"""Maps an `Episode`, or a `ScoredEpisode` for the metrics that an evaluation shares, to its part of a sum."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table."""

    description: str
    chart: str = ""
    """The title of its chart. The first metric of a chart sets the axis."""
    label: str = ""
    """The name of its line in the chart."""
    axis: Axis = "count"
    numerator: Measure | None = None
    """Its values are summed over episodes. None if the metric does not follow from single episodes."""
    denominator: Measure | None = None
    """Its values are summed over episodes too, and the metric is the numerator's sum divided by this sum. None if the
    metric is the numerator's sum."""
    is_of_correct: bool = False
    """Whether only correct episodes count."""

    def sums(self, episodes: Iterable[ScoredEpisode], correct_above: float = 0.0) -> tuple[float, float]:
        """Return numerator and denominator, summed over the episodes that have a reward."""
        assert self.numerator and self.denominator
        least = correct_above if self.is_of_correct else -inf
        scored = [episode for episode in episodes if is_correct(episode.reward, least)]
        return sum(map(self.numerator, scored)), sum(map(self.denominator, scored))

    def value(self, episodes: Sequence[Episode], correct_above: float = 0.0) -> float:
        """Return the metric over `episodes`; NaN if the denominator is 0."""
        if self.numerator and not self.denominator:
            return sum(map(self.numerator, episodes))
        numerator, denominator = self.sums(episodes, correct_above)
        return numerator / denominator if denominator else nan


def _per_episode(episode: ScoredEpisode) -> int:
    """The denominator of a mean over episodes: each episode counts as 1."""
    return 1


def is_unavailable(episode: Episode) -> bool:
    """Return whether an episode has no reward because the infrastructure failed."""
    return episode.reward is None


def _finite_logprobs(episode: Episode) -> list[float]:
    """The finite log-probabilities of sampled tokens."""
    pairs = zip(episode.logprobs, episode.loss_mask, strict=True)
    return [logprob for logprob, is_sampled in pairs if is_sampled and logprob is not None and isfinite(logprob)]


# The titles of the charts that show several metrics.
_REWARD, _FAILED, _SHARES = "Reward, mean", "Tool calls that failed", "Share of episodes"
_IN_LOSS, _LEFT_OUT = "Episodes sampled", "Left out of the loss"
_LENGTH, _TOKENS = "Response length, mean tokens", "Tokens sampled per step"
_SECONDS, _SIZE, _STALE = "Seconds per step, logarithmic", "Turns and tool calls, mean", "Stale tokens"
_IMPORTANCE = "Probability ratio, trained to sampled"

METRICS = {
    "reward": Metric(
        "mean reward of the sampled episodes", _REWARD, "sampled", "unit", lambda e: e.reward, _per_episode
    ),
    "reward_in_loss": Metric("mean reward of the episodes in the loss", _REWARD, "in the loss"),
    "tool_error_ratio": Metric(
        "failed tool calls divided by all tool calls", _FAILED, "all episodes", "ratio",
        lambda e: e.num_failed_tool_calls, lambda e: e.num_tool_calls,
    ),
    "tool_error_ratio_correct": Metric(
        "tool_error_ratio over correct episodes", _FAILED, "correct episodes", "ratio",
        lambda e: e.num_failed_tool_calls, lambda e: e.num_tool_calls, is_of_correct=True,
    ),
    "repeated_call_share": Metric(
        "share of tool calls that repeat a failed call of their episode and fail again", _FAILED, "repeated", "ratio",
        lambda e: e.num_repeated_tool_calls, lambda e: e.num_tool_calls,
    ),
    "truncated_share": Metric(
        "share of episodes that ended at max_response_tokens or max_turns", _SHARES, "truncated", "share",
        lambda e: e.stop_reason in (StopReason.TOKEN_LIMIT, StopReason.TURN_LIMIT), _per_episode,
    ),
    "one_answer": Metric(
        "share of episodes with exactly one answer block", _SHARES, "exactly one answer", "share",
        lambda e: e.answer_blocks == 1, _per_episode,
    ),
    "tool_use": Metric(
        "share of episodes with a tool call", _SHARES, "with a tool call", "share", lambda e: e.num_tool_calls > 0,
        _per_episode,
    ),
    "response_length": Metric(
        "mean number of tokens after the prompt, observations included", _LENGTH, "all episodes", "count",
        lambda e: e.response_length, _per_episode,
    ),
    "episodes_in_loss": Metric(
        "episodes selected and in the loss; 0 for a zero-variance group", _IN_LOSS, "in the loss", "stacked"
    ),
    "episodes_not_in_loss": Metric("episodes sampled but not in the loss", _IN_LOSS, "not in the loss", "stacked"),
    "zero_variance_groups": Metric(
        "groups left out of the loss, since all their selected rewards are equal", _LEFT_OUT, "zero-variance groups"
    ),
    "skipped_update": Metric(
        "1 if no episode is in the loss, so that the step leaves the weights as they are; else 0", _LEFT_OUT,
        "skipped update",
    ),
    "unavailable_episodes": Metric(
        "episodes without a reward, since infrastructure or their scoring failed", _LEFT_OUT, "unavailable episodes",
        "count", is_unavailable,
    ),
    "nan_logprobs": Metric(
        "sampled tokens with a log-probability that was not finite; their probability ratio counts as 1",
        "Log-probabilities of NaN", "tokens", "count",
        lambda e: sum(logprob is not None and not isfinite(logprob) for logprob in e.logprobs),
    ),
    "replacement_groups": Metric("groups sampled in place of groups without a signal", _LEFT_OUT, "replacement groups"),
    "eval_accuracy": Metric("accuracy of the evaluation after this step", "Evaluation", "accuracy", "unit"),
    "eval_s": Metric("seconds of the evaluation after this step, with its weight sync; not part of step_s"),
    "stale_token_share": Metric(
        "share of sampled tokens from weights of earlier training steps", _STALE, "from earlier weights", "share"
    ),
    "staleness_mean_steps": Metric(
        "mean training steps by which a token's weights are behind", "Staleness, mean", "training steps"
    ),
    "turns": Metric("mean turns per episode", _SIZE, "turns", "count", lambda e: e.num_turns, _per_episode),
    "tool_calls": Metric(
        "mean tool calls per episode", _SIZE, "tool calls", "count", lambda e: e.num_tool_calls, _per_episode
    ),
    "step_s": Metric("seconds of the whole training step", _SECONDS, "step", "log"),
    "rollout_s": Metric("seconds from the first episode's start to the last one's end", _SECONDS, "rollout"),
    "rollout_wait_s": Metric("seconds for which the training waited for episodes"),
    "optimize_s": Metric("seconds of forward and backward passes and the optimizer", _SECONDS, "optimize"),
    "weight_sync_s": Metric("seconds of the weight sync", _SECONDS, "weight sync"),
    "overhead_cpu_s": Metric(
        "CPU seconds of the trainer's own code: not waiting for engines or tools, not optimizing", _SECONDS,
        "overhead, CPU",
    ),
    "overhead_s": Metric("seconds in which no engine generated, no tool ran, and nothing was optimized or synced"),
    "generate_s_sum": Metric(
        "seconds of generation, summed over episodes", numerator=lambda e: sum(turn.generate_s for turn in e.turns)
    ),
    "wait_s_sum": Metric(
        "seconds in which turns waited for an engine, summed over episodes",
        numerator=lambda e: sum(turn.wait_s for turn in e.turns),
    ),
    "tool_s_sum": Metric(
        "seconds of tool calls, summed over episodes", numerator=lambda e: sum(turn.tool_s for turn in e.turns)
    ),
    "loss": Metric("the optimized loss", "Loss", "loss", "free"),
    "grad_norm": Metric("norm of the gradient before clipping", "Gradient norm", "norm", "positive"),
    "entropy": Metric(
        "mean negative log-probability of a sampled token in nats, an estimate of the policy's entropy",
        "Entropy of a token, mean", "nats", "count", lambda e: -sum(_finite_logprobs(e)),
        lambda e: len(_finite_logprobs(e)),
    ),
    "logprob_diff_mean": Metric(
        "mean absolute difference of a token's log-probability between engine and trainer",
        "Log-probability, engine against trainer", "mean difference", "log",
    ),
    "importance_ratio_mean": Metric(
        "mean ratio of trained to sampled probability, each capped at 2; a mean below 1 shows the capped part",
        _IMPORTANCE, "mean ratio", "free",
    ),
    "computed_per_loss_token": Metric(
        "positions computed per token in the loss; the rest are prompts, observations and padding",
        "Positions computed per token in the loss", "positions", "positive",
    ),
    "learning_rate": Metric("learning rate of the step"),
    "sampled_tokens": Metric("tokens sampled in the step", _TOKENS, "all", "count", lambda e: e.sampled_tokens),
    "weight_version": Metric("version of the weights from which the step starts: the training steps in them"),
}  # fmt: skip
"""Every metric that a row may have. A metric that does not apply to a step, such as the reward in SFT, is absent."""
WARNINGS = {
    "truncated_share": (0.9, "nearly all episodes end at max_response_tokens or max_turns; raise the limits, or train "
                        "on easier problems"),
    "repeated_call_share": (0.5, "most tool calls repeat a failed one; `rstar-train show` with --html shows episodes"),
}  # fmt: skip
"""For each metric that `warnings` checks: the value above which it warns, and the text of the warning."""


def warnings(row: Mapping[str, Any]) -> list[str]:
    """Return a line for each metric in the row of a step that is above its limit."""
    return [
        f"{name} is {row[name]:.0%}: {text}" for name, (limit, text) in WARNINGS.items() if (row.get(name) or 0) > limit
    ]


def step_metrics(
    groups: Sequence[Sequence[Episode]], in_loss: Sequence[Sequence[int]], correct_above: float = 0.0
) -> dict[str, float]:
    """Return the metrics that follow from a step's episodes; `in_loss` has the indices in the loss of each group."""
    episodes = [episode for group in groups for episode in group]
    episodes_in_loss = [group[index] for group, indices in zip(groups, in_loss, strict=True) for index in indices]
    return {name: metric.value(episodes, correct_above) for name, metric in METRICS.items() if metric.numerator} | {
        "reward_in_loss": METRICS["reward"].value(episodes_in_loss),
        "episodes_in_loss": len(episodes_in_loss),
        "episodes_not_in_loss": len(episodes) - len(episodes_in_loss),
        "zero_variance_groups": sum(not indices for indices in in_loss),
    }


def staleness_metrics(episodes: Sequence[Episode], weight_version: int) -> dict[str, float]:
    """Return the metrics of staleness. The staleness of a token is `weight_version` minus the version of the weights
    that sampled the token."""
    tokens = sum((Counter(episode.sampled_tokens_by_version) for episode in episodes), Counter[int]())
    by_staleness = {weight_version - version: count for version, count in tokens.items()}
    return {
        "stale_token_share": 1 - by_staleness.get(0, 0) / tokens.total(),
        "staleness_mean_steps": sum(steps * count for steps, count in by_staleness.items()) / tokens.total(),
    }
