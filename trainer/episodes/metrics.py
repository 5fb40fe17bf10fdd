"""The numbers of a run, in one table: what each is, how it follows from episodes, which chart of the page has it.

Who adds a metric adds a row here, and gives its number with a step's others: the run's folder, the terminal, the page
and the trackers take whatever the table has, and evaluation takes its measures from it.

Means and ratios are over episodes that have a verdict: what of ours failed is counted in `unavailable` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Literal

from trainer.episodes.episode import Episode, StopReason

Axis = Literal["count", "free", "log", "positive", "ratio", "share", "stacked", "unit"]
"""How a chart is drawn: of numbers from 0 (`count`: up to 1 at least; `stacked`: upon each other), from 0 to 1
(`share` says percent, and so does `ratio`, whose top is where the numbers end), or wherever they are (`free`)."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table."""

    about: str
    chart: str = ""
    """The page's; the first metric of a chart says its axis."""
    label: str = ""
    """What its line is called there."""
    axis: Axis = "count"
    part: Callable[[Any], float] | None = None
    """What each episode adds to a sum; None where the number does not follow from single episodes."""
    whole: Callable[[Any], float] | None = None
    """What it adds to the sum that the first is divided by; None where there is none."""

    def sums(self, episodes: Iterable[Any]) -> tuple[float, float]:
        """Both sums over episodes with a verdict: of `Episode`, or of anything with the attributes that are used."""
        assert self.part and self.whole
        scored = [episode for episode in episodes if episode.reward is not None]
        return sum(map(self.part, scored)), sum(map(self.whole, scored))

    def of(self, episodes: Sequence[Any]) -> float:
        """The number that episodes come to; NaN where there is nothing to take it from."""
        if self.part and not self.whole:
            return sum(map(self.part, episodes))
        part, whole = self.sums(episodes)
        return part / whole if whole else nan


def _each(episode: Any) -> int:
    return 1


_FAILED, _SHARES, _LEFT_OUT = "Tool calls that failed", "Share of episodes", "Left out of the loss"
_SECONDS, _KEPT, _SIZE = "Seconds of a step, logarithmic", "Episodes kept and dropped", "Turns and tool calls, mean"
_EARLY = "Stopped early, of older weights"

METRICS = {
    "reward": Metric("mean reward of those sampled", "Reward, mean", "sampled", "unit", lambda it: it.reward, _each),
    "reward_kept": Metric("mean reward of those kept for the loss", "Reward, mean", "kept"),
    "tool_error_ratio": Metric(
        "tool calls that failed, of all", _FAILED, "in all", "ratio", lambda it: it.failed_calls, lambda it: it.calls
    ),
    "tool_error_ratio_correct": Metric(
        "the same over episodes with reward 1", _FAILED, "in correct episodes", "ratio",
        lambda it: it.failed_calls * (it.reward > 0), lambda it: it.calls * (it.reward > 0),
    ),
    "one_answer": Metric(
        "share of episodes with exactly one answer tag", _SHARES, "exactly one answer", "share",
        lambda it: it.answer_tags == 1, _each,
    ),
    "tool_use": Metric(
        "share of episodes with a tool call", _SHARES, "some tool call", "share", lambda it: it.calls > 0, _each
    ),
    "length": Metric(
        "mean tokens of a response, tool tokens included", "Response length, mean", "tokens", "count",
        lambda it: it.length, _each,
    ),
    "kept": Metric("episodes kept for the loss; of a group of equal rewards none", _KEPT, "kept", "stacked"),
    "dropped": Metric("episodes sampled and not kept", _KEPT, "dropped", "stacked"),
    "groups_dropped": Metric(
        "groups left out of the loss, as all their rewards are equal", _LEFT_OUT, "groups of equal rewards"
    ),
    "unavailable": Metric(
        "episodes without a reward, since something of ours failed", _LEFT_OUT, "episodes without reward", "count",
        lambda it: it.reward is None and it.stop != StopReason.CANCELLED,
    ),
    "nan_turns": Metric("turns sampled again, or given up, as an engine gave a log-probability that was no number"),
    "stopped": Metric("share of episodes that were stopped early", _EARLY, "stopped early", "share"),
    "length_stopped": Metric(
        "mean tokens that those stopped early had; with `length` it says how much this favours short ones",
        "Response length, mean", "of those stopped early",
    ),
    "tokens_stopped": Metric("tokens sampled for them, in vain", "Tokens sampled in a step", "for those stopped early"),
    "carried": Metric("groups that go on in the next step", "Groups that go on in the next step", "groups"),
    "stale": Metric("share of tokens sampled with weights of earlier steps", _EARLY, "of earlier weights", "share"),
    "staleness": Metric("mean steps by which a token's weights are behind", "Staleness, mean", "steps"),
    "turns": Metric("mean turns of an episode", _SIZE, "turns", "count", lambda it: it.turns, _each),
    "calls": Metric("mean tool calls of an episode", _SIZE, "calls", "count", lambda it: it.calls, _each),
    "seconds_step": Metric("the whole step", _SECONDS, "step", "log"),
    "seconds_rollout": Metric("from the first episode to the last", _SECONDS, "rollout"),
    "seconds_optimise": Metric("forward, backward and the optimiser", _SECONDS, "optimise"),
    "seconds_sync": Metric("giving the engines new weights", _SECONDS, "sync"),
    "seconds_own": Metric("the trainer's own: not waiting for engines or tools, not optimising", _SECONDS, "own work"),
    "seconds_alone": Metric("in which no engine generated, no tool ran, and nothing was optimised or synchronised"),
    "seconds_generate": Metric(
        "waiting for engines, summed over episodes", part=lambda it: sum(turn.generate_s for turn in it.steps)
    ),
    "seconds_tools": Metric(
        "waiting for tools, summed over episodes", part=lambda it: sum(turn.tools_s for turn in it.steps)
    ),
    "loss": Metric("the optimised loss", "Loss", "loss", "free"),
    "grad_norm": Metric("norm of the gradient, before it is clipped", "Gradient norm", "norm", "positive"),
    "entropy": Metric(
        "mean -log-probability of a sampled token: what the policy's entropy is estimated by, in nats",
        "Entropy of a token, mean", "nats", "count", lambda it: -sum(it.logprobs), lambda it: it.sampled_tokens,
    ),
    "kl_sampler": Metric(
        "mean |log-probability when sampled - when trained|", "Log-probability, sampled against trained",
        "mean difference", "log",
    ),
    "ratio_mean": Metric(
        "mean ratio of trained to sampled probability, each cut at 2: what is missing to 1 was cut",
        "Ratio of probability, trained to sampled", "mean ratio", "free",
    ),
    "lr": Metric("learning rate"),
    "tokens": Metric("tokens sampled", "Tokens sampled in a step", "tokens", "count", lambda it: it.sampled_tokens),
    "weight_version": Metric("of the weights that sampled: the steps of the run that are in them"),
}  # fmt: skip
"""All that a row of metrics may have. One that does not apply to a step, as a reward to SFT, is not in its row."""


def of_step(groups: Sequence[Sequence[Episode]], used: Sequence[Sequence[int]]) -> dict[str, float]:
    """What a step's episodes come to; `used` are the indices in each group that are in the loss."""
    episodes = [episode for group in groups for episode in group]
    in_loss = [group[index] for group, some in zip(groups, used, strict=True) for index in some]
    return {name: metric.of(episodes) for name, metric in METRICS.items() if metric.part} | {
        "reward_kept": METRICS["reward"].of(in_loss),
        "kept": len(in_loss),
        "dropped": len(episodes) - len(in_loss),
        "groups_dropped": sum(not some for some in used),
    }
