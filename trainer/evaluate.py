"""How good a model is at a set of problems: avg@k and pass@k, its use of the tool, with intervals; resumable.

Invariants:
- An episode without a verdict (ours to answer for) counts in nothing but `unavailable`. It is never a 0.
- Whatever was measured is on disk once its problem is done, and is not run again by the same command.
- Numbers are means over problems, each of which counts alike, and intervals say what other problems would have given:
  95 %, by a seeded bootstrap over problems. Where all problems agree an interval has no width.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import comb
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainer.record import RunFolder
from trainer.trajectory import Episode, Problem

if TYPE_CHECKING:
    from rich.table import Table

    from trainer.rollout import EpisodeLimits

ALL = "all"
"""The report over all sources."""
RESAMPLES = 1000
CONFIDENCE = 0.95


class EvaluationError(ValueError):
    """The folder holds an evaluation with other settings."""


class Collector(Protocol):
    """What is used of `trainer.rollout.Collector`."""

    async def collect(
        self,
        problems: Sequence[Problem],
        samples: int,
        *,
        limits: EpisodeLimits,
        temperature: float,
        top_p: float,
        seed: int,
    ) -> list[list[Episode]]: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is measured of one episode."""

    reward: float | None
    calls: int
    failed_calls: int
    answer_tags: int
    turns: int
    tokens: int
    stop: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Outcome:
        """From a row of `RunFolder.episodes`."""
        same = {name: row[name] for name in ("reward", "calls", "failed_calls", "answer_tags", "stop")}
        return cls(**same, turns=len(row["turns"]), tokens=row["response_tokens"])


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, and the interval that other problems of this kind would give it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Report:
    """What came out for one set of problems. An estimate is None where there is nothing to take it from."""

    problems: int
    samples: int
    """Episodes per problem, the k of avg@k."""
    episodes: int
    """With a verdict."""
    unavailable: int
    accuracy: Estimate | None
    """avg@k: the mean reward."""
    pass_at: dict[int, Estimate]
    """j -> the chance that one of j samples is right; unbiased (Chen et al., arXiv 2107.03374, eq. 1)."""
    tool_error_ratio: Estimate | None
    tool_error_ratio_correct: Estimate | None
    """The same over episodes with reward 1."""
    tool_use: Estimate | None
    """Share of episodes with a call."""
    one_answer: Estimate | None
    """Share of episodes with exactly one answer tag."""
    calls: Estimate | None
    turns: Estimate | None
    tokens: Estimate | None
    """Of a response, tool tokens included."""
    stops: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return asdict(self) | {"pass_at": {str(j): asdict(chance) for j, chance in self.pass_at.items()}}

    def scores(self) -> dict[str, float | None]:
        """The numbers of a recipe's table."""
        some = {
            "accuracy": self.accuracy,
            "tool_error_ratio": self.tool_error_ratio,
            "one_answer": self.one_answer,
        }
        return {name: estimate.value if estimate else None for name, estimate in some.items()}


async def evaluate(
    problems: Sequence[Problem],
    samples: int,
    collector: Collector,
    *,
    limits: EpisodeLimits,
    temperature: float,
    top_p: float,
    seed: int,
    record: RunFolder | None = None,
    about: Mapping[str, Any] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Report]:
    """`samples` episodes of each problem, and a report by source and over `ALL`.

    Into `record` go the episodes and the settings, `about` (the model) among them; what is there is not run again, but
    for problems that an outage left unfinished. `advance` is called once a problem. Raises `EvaluationError`.
    """
    settings = {"samples": samples, "temperature": temperature, "top_p": top_p, "seed": seed, "limits": asdict(limits)}
    known = _known(record, {**settings, **(about or {})}) if record else {}

    async def one(number: int, problem: Problem) -> list[Outcome]:
        outcomes = [known.get((problem.id, sample)) for sample in range(samples)]
        if any(outcome is None or outcome.reward is None for outcome in outcomes):
            ((*episodes,),) = await collector.collect(
                [problem], samples, limits=limits, temperature=temperature, top_p=top_p, seed=seed
            )
            if record:
                record.write_episodes(0, "eval", [episodes], [range(samples)], first_group=number)
            outcomes = [_outcome(episode) for episode in episodes]
        advance()
        return [outcome for outcome in outcomes if outcome]

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(number, problem)) for number, problem in enumerate(problems)]
    results = [(problem.source, task.result()) for problem, task in zip(problems, running, strict=True)]
    sources = dict.fromkeys(source for source, _ in results)
    reports = {source: report([some for its, some in results if its == source], samples) for source in sources}
    return {**reports, ALL: report([some for _, some in results], samples)}


def report(outcomes_P: Sequence[Sequence[Outcome]], samples: int) -> Report:
    """What the outcomes of P problems come to."""
    scored_P = [[outcome for outcome in some if outcome.reward is not None] for some in outcomes_P]
    correct_P = [[outcome for outcome in some if _is_right(outcome)] for some in scored_P]
    powers = {1 << n for n in range(samples.bit_length())} | {samples}
    counts_P = [(len(some), len(right)) for some, right in zip(scored_P, correct_P, strict=True)]
    chances = {j: _mean([(pass_at(j, n, right), 1) for n, right in counts_P if n >= j]) for j in sorted(powers)}
    flat = [outcome for some in scored_P for outcome in some]

    def share(of: Callable[[Outcome], float]) -> Estimate | None:
        return _mean([(sum(map(of, some)) / len(some), 1) for some in scored_P if some])

    def failing(some_P: Sequence[Sequence[Outcome]]) -> Estimate | None:
        sums = [(sum(o.failed_calls for o in some), sum(o.calls for o in some)) for some in some_P]
        return _mean([(failed, calls) for failed, calls in sums if calls])

    return Report(
        problems=len(outcomes_P),
        samples=samples,
        episodes=len(flat),
        unavailable=sum(len(some) for some in outcomes_P) - len(flat),
        accuracy=share(lambda outcome: outcome.reward or 0.0),
        pass_at={j: chance for j, chance in chances.items() if chance},
        tool_error_ratio=failing(scored_P),
        tool_error_ratio_correct=failing(correct_P),
        tool_use=share(lambda outcome: outcome.calls > 0),
        one_answer=share(lambda outcome: outcome.answer_tags == 1),
        calls=share(lambda outcome: outcome.calls),
        turns=share(lambda outcome: outcome.turns),
        tokens=share(lambda outcome: outcome.tokens),
        stops=dict(Counter(outcome.stop for outcome in flat)),
    )


def pass_at(j: int, samples: int, right: int) -> float:
    """The chance that `j` of `samples` episodes, drawn without replacement, hold one of the `right` ones."""
    return 1 - comb(samples - right, j) / comb(samples, j)


def outcomes_of(record: RunFolder) -> dict[tuple[str, int], Outcome]:
    """What an evaluation's folder holds, by problem and sample. The latest counts: it took the place of an outage."""
    return {(row["problem"]["id"], row["sample"]): Outcome.of(row) for row in record.episodes(0)}


def table(reports: Mapping[str, Report]) -> Table:
    """For people: a row a source."""
    from rich.table import Table

    samples = next(iter(reports.values())).samples
    made = Table(box=None, pad_edge=False, header_style="bold")
    scores = ("problems", f"avg@{samples} [95 %]", f"pass@{samples}")
    for name in ("source", *scores, "tool errors", "of correct", "one answer", "tokens", "turns", "unavailable"):
        made.add_column(name, justify="left" if name == "source" else "right")
    some = {name: one for name, one in reports.items() if name != ALL or len(reports) > 2}
    for name, one in some.items():
        shares = (one.pass_at.get(samples), one.tool_error_ratio, one.tool_error_ratio_correct, one.one_answer)
        lengths = (one.tokens, one.turns)
        made.add_row(
            name,
            str(one.problems),
            str(one.accuracy or "-"),
            *(f"{share.value:.3f}" if share else "-" for share in shares),
            *(f"{length.value:.1f}" if length else "-" for length in lengths),
            str(one.unavailable),
        )
    return made


def _known(record: RunFolder, settings: Mapping[str, Any]) -> dict[tuple[str, int], Outcome]:
    """What the folder holds. It becomes one of `settings` if it is new."""
    theirs = record.config()
    if theirs is None:
        record.write_config(settings)
    elif theirs != settings:
        differing = sorted(name for name in theirs.keys() | settings.keys() if theirs.get(name) != settings.get(name))
        raise EvaluationError(
            f"{record.path}: holds an evaluation with another {', '.join(differing)}; expected the same settings to go "
            "on, or another folder"
        )
    return outcomes_of(record)


def _outcome(episode: Episode) -> Outcome:
    return Outcome(
        episode.reward,
        episode.calls,
        episode.failed_calls,
        episode.answer_tags,
        episode.turns,
        len(episode.ids),
        str(episode.stop),
    )


def _is_right(outcome: Outcome) -> bool:
    return outcome.reward is not None and outcome.reward > 0


def _mean(parts_P: Sequence[tuple[float, float]]) -> Estimate | None:
    """The sum of the first numbers over that of the second, and its interval. R resamples of P problems."""
    if not parts_P:
        return None
    total, weight = np.asarray(parts_P, dtype=float).T
    times_RP = _resamples(len(parts_P))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile((times_RP @ total) / (times_RP @ weight), [tail, 1 - tail])
    return Estimate(float(total.sum() / weight.sum()), float(low), float(high))


@cache
def _resamples(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """How often each of P problems is in each of R draws of P with replacement."""
    times_RP = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return times_RP.astype(float)
