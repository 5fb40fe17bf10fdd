"""How good a model is at a set of problems: avg@k and pass@k, its use of the tool, with intervals; resumable.

Invariants:
- An episode without a verdict (ours to answer for) counts in nothing but `unavailable`. It is never a 0.
- Whatever was measured is on disk once its problem is done, and is not run again by the same command.
- Of an episode that was measured there is one row, however often the command was killed.
- Intervals say what other problems would have given: 95 %, by how far problems differ.

Letters: P problems.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from rich.table import Table

from trainer.episodes.episode import Episode, Problem
from trainer.episodes.metrics import METRICS
from trainer.json_files import append_rows, read_rows
from trainer.runs.run_folder import RunFolder
from trainer.runs.show import table

ALL = "all"
"""The report over all sources."""
Z = NormalDist().inv_cdf(0.975)
"""Deviations on either side of a number within which 95 % lie."""
ROUNDING = 1e-12
"""A variance that is none."""
OUTCOMES = "outcomes.jsonl"
"""A row an episode, by which an evaluation goes on and reports."""
AT_ONCE = 1 << 14
"""Episodes under way, about."""


Collect = Callable[[Sequence[Problem], int], Awaitable[list[list[Episode]]]]
"""Runs so many episodes of each problem."""


class Outcome(NamedTuple):
    """What is measured of one episode, named as there."""

    reward: float | None
    num_tool_calls: int
    num_failed_tool_calls: int
    answer_blocks: int
    stop_reason: str
    num_turns: int
    response_length: int
    error: str = ""


SHARES = {
    "accuracy": METRICS["reward"],
    **{name: METRICS[name] for name in ("tool_error_ratio", "tool_error_ratio_correct", "tool_use", "one_answer")},
}
"""Measures between 0 and 1, each by what is summed over episodes and divided. `accuracy` is avg@k."""
MEASURES = {
    **SHARES,
    "tool_calls": METRICS["tool_calls"],
    "turns": METRICS["turns"],
    "response_length": METRICS["response_length"],
}
"""All of them. `response_length` counts observations, too."""
SCORES = ("accuracy", "tool_error_ratio", "one_answer")
"""The numbers of a recipe's table."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, and the interval that other problems of this kind would give it."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.high >= 100:
            return f"{self.value:,.0f} [{self.low:,.0f}–{self.high:,.0f}]"
        return f"{self.value:.3f} [{self.low:.2f}–{self.high:.2f}]"


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
    stop_reasons: dict[str, int]


def unfinished(problems: Sequence[Problem], samples: int, folder: Path) -> dict[int, Problem]:
    """The problems, by their number, of which `folder` lacks an episode with a verdict."""
    known = {key for key, outcome in outcomes_of(folder).items() if outcome.reward is not None}
    return {
        number: problem
        for number, problem in enumerate(problems)
        if not known.issuperset((problem.id, sample) for sample in range(samples))
    }


async def sample(
    problems: Mapping[int, Problem],
    samples: int,
    collect: Collect,
    *,
    record: RunFolder,
    is_brief: bool = False,
    advance: Callable[[int], None] = lambda done: None,
) -> None:
    """`samples` episodes of each of the problems that `unfinished` names.

    Into `record` go the outcomes, and the episodes unless `is_brief`; those of these problems that a kill or an outage
    left there give way. `advance` is told how many problems are done.
    """
    ids = {problem.id for problem in problems.values()}
    record.filter_episodes(0, lambda row: row["problem"]["id"] not in ids)
    window, done = asyncio.Semaphore(max(1, AT_ONCE // samples)), 0

    async def one(number: int, problem: Problem) -> None:
        nonlocal done
        async with window:
            groups = await collect([problem], samples)
        if not is_brief:
            record.write_episodes(0, "eval", groups, [range(samples)], first_group=number)
        write_outcomes(record.path, groups[0])  # by which they count, and so comes last
        done += 1
        advance(done)

    async with asyncio.TaskGroup() as group:
        for number, problem in problems.items():
            group.create_task(one(number, problem))


def reports_of(problems: Iterable[Problem], samples: int, folder: Path) -> dict[str, Report]:
    """What `folder` holds of the problems, by source and over `ALL`."""
    found, by_source = outcomes_of(folder), dict[str, list[list[Outcome]]]()
    for problem in problems:
        group = [found[problem.id, sample] for sample in range(samples)]
        by_source.setdefault(problem.source, []).append(group)
    by_source[ALL] = [group for groups in by_source.values() for group in groups]
    return {source: report(groups, samples) for source, groups in by_source.items()}


def read_reports(written: Mapping[str, Any]) -> dict[str, Report]:
    """Reports from their fields, as `asdict` has them."""
    return {
        source: Report(**{**fields, "measures": {name: Estimate(**of) for name, of in fields["measures"].items()}})
        for source, fields in written.items()
    }


def scores(reports: Mapping[str, Report]) -> dict[str, Any]:
    """The numbers of a recipe's table, over all sources, and of each its accuracy with the interval."""
    measures = reports[ALL].measures
    of_all = {name: measures[name].value if name in measures else None for name in SCORES}
    accuracies = {name: one.measures.get("accuracy") for name, one in reports.items() if name != ALL}
    return {**of_all, "accuracy_by_source": {name: asdict(one) if one else None for name, one in accuracies.items()}}


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
    measures = {
        name: _ratio([metric.sums(some) for some in scored_P], is_share=name in SHARES)
        for name, metric in MEASURES.items()
    }
    for j in powers:
        measures[f"pass@{j}"] = _ratio([(pass_at(j, n, right), 1) for n, right in counts_P if n >= j], is_share=True)
    episodes = sum(map(len, scored_P))
    return Report(
        problems=len(outcomes_P),
        samples=samples,
        episodes=episodes,
        unavailable=sum(map(len, outcomes_P)) - episodes,
        measures={name: estimate for name, estimate in measures.items() if estimate},
        stop_reasons=dict(Counter(outcome.stop_reason for some in scored_P for outcome in some)),
    )


def pass_at(j: int, samples: int, right: int) -> float:
    """The chance that `j` of `samples` episodes, drawn without replacement, hold one of the `right` ones.

    Over problems it is unbiased (Chen et al., arXiv 2107.03374, eq. 1).
    """
    return 1 - comb(samples - right, j) / comb(samples, j)


def summary(reports: Mapping[str, Report]) -> Table:
    """For people: a column a source, each number with its interval. The rest is in the reports."""
    shown = {name: one for name, one in reports.items() if name != ALL or len(reports) > 2}
    k = reports[ALL].samples
    made = table("[95 %]", *(f"{name}…" for name in shown))
    made.add_row("problems", *(str(one.problems) for one in shown.values()))
    for name in dict.fromkeys(("accuracy", f"pass@{k}", *MEASURES)):
        cells = (str(one.measures.get(name, "-")) for one in shown.values())
        made.add_row(f"avg@{k}" if name == "accuracy" else name.replace("_", " "), *cells)
    made.add_row("without verdict", *(str(one.unavailable) for one in shown.values()))
    return made


def _ratio(parts_P: Sequence[tuple[float, float]], *, is_share: bool) -> Estimate | None:
    """The sum of the first numbers over that of the second, and its interval.

    The variance is that of a ratio over problems, by its residuals. A share has Wilson's interval (Brown, Cai and
    DasGupta, Statistical Science 16, 2001) for as many independent trials as have that variance (Korn and Graubard,
    Survey Methodology 24, 1998). Problems that all agree say nothing of it: each counts as one trial.
    """
    some = [(part, whole) for part, whole in parts_P if whole]
    if not some:
        return None
    count, total = len(some), sum(whole for _, whole in some)
    value = sum(part for part, _ in some) / total
    squares = sum((part - value * whole) ** 2 for part, whole in some)
    variance = squares / total**2
    if not is_share:
        return Estimate(value, max(0.0, value - Z * variance**0.5), value + Z * variance**0.5)
    trials = value * (1 - value) / variance if variance > ROUNDING else count
    middle = (value + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = Z / (1 + Z**2 / trials) * (value * (1 - value) / trials + Z**2 / (4 * trials**2)) ** 0.5
    return Estimate(value, max(0.0, middle - half), min(1.0, middle + half))
