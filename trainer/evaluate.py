"""How good a model is at a set of problems: avg@k and pass@k, its use of the tool, with intervals; resumable.

Invariants:
- An episode without a verdict (ours to answer for) counts in nothing but `unavailable`. It is never a 0.
- Whatever was measured is on disk once its problem is done, and is not run again by the same command.
- Intervals say what other problems would have given: 95 %, by a seeded bootstrap over problems. Where all problems
  agree an interval has no width.

Letters: P problems, R resamples of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from trainer.metrics import METRICS
from trainer.record import RunFolder, append_rows, read_rows
from trainer.show import table
from trainer.trajectory import Episode, Problem

ALL = "all"
"""The report over all sources."""
RESAMPLES = 1000
CONFIDENCE = 0.95
OUTCOMES = "outcomes.jsonl"
"""A row an episode, by which an evaluation goes on and reports."""
AT_ONCE = 1 << 14
"""Episodes under way, about."""


Collect = Callable[[Sequence[Problem], int], Awaitable[list[list[Episode]]]]
"""Runs so many episodes of each problem."""


class Outcome(NamedTuple):
    """What is measured of one episode, named as there."""

    reward: float | None
    calls: int
    failed_calls: int
    answer_tags: int
    stop: str
    turns: int
    length: int
    error: str = ""


MEASURES = {
    "accuracy": METRICS["reward"],
    **{name: METRICS[name] for name in ("tool_error_ratio", "tool_error_ratio_correct", "tool_use", "one_answer")},
    **{"calls": METRICS["calls"], "turns": METRICS["turns"], "tokens": METRICS["length"]},
}
"""What is summed over episodes, and by what sum it is divided. `accuracy` is avg@k; `tokens` has the tools' too."""
SCORES = ("accuracy", "tool_error_ratio", "one_answer")
"""The numbers of a recipe's table."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, and the interval that other problems of this kind would give it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class Report:
    """What came out for one set of problems. A measure is missing where there is nothing to take it from."""

    problems: int
    samples: int
    """Episodes per problem, the k of avg@k."""
    episodes: int
    """With a verdict."""
    unavailable: int
    measures: dict[str, Estimate]
    """By the names in `MEASURES`, and pass@j: the chance that one of j samples is right."""
    stops: dict[str, int]

    def scores(self) -> dict[str, float | None]:
        """The numbers of a recipe's table."""
        return {name: self.measures[name].value if name in self.measures else None for name in SCORES}


async def evaluate(
    problems: Sequence[Problem],
    samples: int,
    collect: Collect,
    *,
    record: RunFolder,
    settings: Mapping[str, Any],
    is_brief: bool = False,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, Report]:
    """`samples` episodes of each problem, and a report by source and over `ALL`.

    Into `record` go the outcomes, the episodes unless `is_brief`, and what they follow from, `settings`; what is there
    is not run again, but for problems that an outage left unfinished. `advance` is told how many problems are done.
    Raises `RecordError` for the folder of an evaluation with other settings.
    """
    record.claim({"samples": samples, **settings})
    known = {key for key, outcome in outcomes_of(record.path).items() if outcome.reward is not None}
    window, done = asyncio.Semaphore(max(1, AT_ONCE // samples)), 0

    async def one(number: int, problem: Problem) -> None:
        nonlocal done
        if not known.issuperset((problem.id, sample) for sample in range(samples)):
            async with window:
                groups = await collect([problem], samples)
            if not is_brief:
                record.write_episodes(0, "eval", groups, [range(samples)], first_group=number)
            write_outcomes(record.path, groups[0])
        done += 1
        advance(done)

    async with asyncio.TaskGroup() as group:
        for number, problem in enumerate(problems):
            group.create_task(one(number, problem))
    found = outcomes_of(record.path)

    def of(some: Iterable[Problem]) -> Report:
        return report([[found[problem.id, sample] for sample in range(samples)] for problem in some], samples)

    sources = dict.fromkeys(problem.source for problem in problems)
    by_source = {source: of(problem for problem in problems if problem.source == source) for source in sources}
    return {**by_source, ALL: of(problems)}


def write_outcomes(folder: Path, episodes: Iterable[Episode]) -> None:
    """Add what is measured of episodes to an evaluation's folder."""
    append_rows(
        folder / OUTCOMES,
        (
            {"problem": episode.problem.id, "sample": episode.sample}
            | {name: getattr(episode, name) for name in Outcome._fields}
            for episode in episodes
        ),
    )


def outcomes_of(folder: Path) -> dict[tuple[str, int], Outcome]:
    """What an evaluation's folder holds, by problem and sample. The latest counts: it took the place of an outage."""
    rows = ((row.pop("problem"), row.pop("sample"), Outcome(**row)) for row in read_rows(folder / OUTCOMES))
    return {(problem, sample): outcome for problem, sample, outcome in rows}


def report(outcomes_P: Sequence[Sequence[Outcome]], samples: int) -> Report:
    """What the outcomes of P problems come to."""
    scored_P = [[outcome for outcome in some if outcome.reward is not None] for some in outcomes_P]
    counts_P = [(len(some), sum((outcome.reward or 0) > 0 for outcome in some)) for some in scored_P]
    powers = sorted({1 << n for n in range(samples.bit_length())} | {samples})
    measures = {name: _ratio([metric.sums(some) for some in scored_P]) for name, metric in MEASURES.items()}
    for j in powers:
        measures[f"pass@{j}"] = _ratio([(pass_at(j, n, right), 1) for n, right in counts_P if n >= j])
    episodes = sum(map(len, scored_P))
    return Report(
        problems=len(outcomes_P),
        samples=samples,
        episodes=episodes,
        unavailable=sum(map(len, outcomes_P)) - episodes,
        measures={name: estimate for name, estimate in measures.items() if estimate},
        stops=dict(Counter(outcome.stop for some in scored_P for outcome in some)),
    )


def pass_at(j: int, samples: int, right: int) -> float:
    """The chance that `j` of `samples` episodes, drawn without replacement, hold one of the `right` ones.

    Over problems it is unbiased (Chen et al., arXiv 2107.03374, eq. 1).
    """
    return 1 - comb(samples - right, j) / comb(samples, j)


def summary(reports: Mapping[str, Report]) -> Table:
    """For people: a row a source. The rest is in the reports."""
    k = reports[ALL].samples
    made = table(
        "source", "n>", f"avg@{k} [95 %]>", f"pass@{k}>", "tool errors>", "one answer>", "tokens>", "no verdict>"
    )
    for name, one in reports.items():
        if name != ALL or len(reports) > 2:
            accuracy, *estimates = map(one.measures.get, ("accuracy", f"pass@{k}", *SCORES[1:], "tokens"))
            cells = [f"{estimate.value:.3g}" if estimate else "-" for estimate in estimates]
            made.add_row(name, str(one.problems), str(accuracy or "-"), *cells, str(one.unavailable))
    return made


def _ratio(parts_P: Sequence[tuple[float, float]]) -> Estimate | None:
    """The sum of the first numbers over that of the second, and its interval."""
    some = [(part, whole) for part, whole in parts_P if whole]
    if not some:
        return None
    part_P, whole_P = np.asarray(some, dtype=float).T
    times_RP = _resamples(len(some))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile((times_RP @ part_P) / (times_RP @ whole_P), [tail, 1 - tail])
    return Estimate(float(part_P.sum() / whole_P.sum()), float(low), float(high))


@cache
def _resamples(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """How often each problem is in each of R draws of P with replacement."""
    draws_RP = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    times_RP: np.ndarray[tuple[int, int], np.dtype[np.float64]] = draws_RP.astype(float)
    return times_RP
