"""Evaluation of a model on a set of problems: avg@k, pass@k, tool use and format, with 95 % intervals; resumable.

Invariants:
- An episode without a reward counts in `unavailable` only. It is never a 0.
- A problem's outcomes are on disk once its episodes are finished, and the same command does not sample them again.
- An episode has one row, even if the command was killed and repeated.
- An interval says what to expect for other problems of the same kind. So it follows from the variance over problems.

An episode is correct if its reward is above `correct_above`, the setting `reward.correct_above`. avg@k is the mean
accuracy of k samples per problem. pass@k is the probability that at least one of k samples is correct. A name with the
suffix _P has one item per problem.
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

from pydantic import TypeAdapter
from rich.table import Table

from trainer.config import SamplingConfig
from trainer.episodes.episode import Episode, Problem
from trainer.episodes.metrics import METRICS
from trainer.episodes.reward import is_correct
from trainer.json_files import append_rows, read_rows
from trainer.runs.run_folder import RunFolder
from trainer.runs.text_tables import table

ALL = "all"
"""The key of the report over all sources."""
Z = NormalDist().inv_cdf(0.975)
"""95 % of a normal distribution lie within this number of standard deviations on either side of the mean."""
ZERO_VARIANCE = 1e-12
"""A variance below this is rounding error."""
OUTCOMES = "outcomes.jsonl"
"""Name of the file with one row per episode, from which an evaluation resumes and reports."""
MAX_IN_FLIGHT = 1 << 14
"""Approximate limit of the number of episodes in flight. It is exact only if the samples per problem divide it."""

Collect = Callable[[Sequence[Problem], int], Awaitable[list[list[Episode]]]]
"""Collects the given number of episodes of each problem."""


class EpisodeOutcome(NamedTuple):
    """The attributes of an `Episode` from which an evaluation computes its measures."""

    reward: float | None
    num_tool_calls: int
    num_failed_tool_calls: int
    answer_blocks: int
    stop_reason: str
    num_turns: int
    response_length: int
    error: str = ""


SHARES = ("tool_error_ratio", "tool_error_ratio_correct", "tool_use", "one_answer")
"""Metrics between 0 and 1."""
EVAL_METRICS = {name: METRICS[name] for name in (*SHARES, "tool_calls", "turns", "response_length")}
SMALL_T_QUANTILES = {1: 12.706, 2: 4.303}
"""The 97.5 % quantiles of Student's t distribution with 1 and 2 degrees of freedom. An expansion would be too small."""
SUMMARY_METRICS = ("accuracy", "tool_error_ratio", "one_answer")
"""The numbers in a recipe's table."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval. The bounds are None if no interval can be computed."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f} [–]"
        if self.high >= 100:
            return f"{self.value:,.0f} [{self.low:,.0f}–{self.high:,.0f}]"
        return f"{self.value:.3f} [{self.low:.2f}–{self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The measures over one set of problems. A measure without data is missing."""

    problems: int
    samples: int
    """Episodes per problem, the k of avg@k."""
    episodes: int
    """The number of episodes with a reward."""
    unavailable: int
    measures: dict[str, Estimate]
    """`accuracy` (avg@k), `reward` (the mean reward), those of `EVAL_METRICS`, and pass@j: the probability that at
    least one of j samples is correct."""
    stop_reasons: dict[str, int]


def unfinished_problems(problems: Sequence[Problem], samples: int, eval_dir: Path) -> dict[int, Problem]:
    """Return, by index, the problems of which `eval_dir` lacks an episode with a reward."""
    scored = {key for key, outcome in read_outcomes(eval_dir).items() if outcome.reward is not None}
    return {
        number: problem
        for number, problem in enumerate(problems)
        if not scored.issuperset((problem.id, sample) for sample in range(samples))
    }


async def evaluate_problems(
    problems: Mapping[int, Problem],
    samples: int,
    collect: Collect,
    *,
    run_folder: RunFolder,
    outcomes_only: bool = False,
    on_progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Collect `samples` episodes of each problem that `unfinished_problems` has returned.

    The outcomes are written to `run_folder`. The episodes are written there too, unless `outcomes_only` is true. They
    replace the episodes of these problems that a kill or an outage has left there. `on_progress` receives the number of
    finished problems.
    """
    ids = {problem.id for problem in problems.values()}
    run_folder.filter_episodes(0, lambda row: row["problem"]["id"] not in ids)
    problem_limit, done = asyncio.Semaphore(max(1, MAX_IN_FLIGHT // samples)), 0

    async def evaluate(number: int, problem: Problem) -> None:
        nonlocal done
        async with problem_limit:
            groups = await collect([problem], samples)
        if not outcomes_only:
            run_folder.write_episodes(0, "eval", groups, [range(samples)], first_group=number)
        write_outcomes(run_folder.path, groups[0])  # last, since the outcomes mark the problem as finished
        done += 1
        on_progress(done)

    async with asyncio.TaskGroup() as tasks:
        for number, problem in problems.items():
            tasks.create_task(evaluate(number, problem))


def read_eval_reports(
    problems: Iterable[Problem], samples: int, eval_dir: Path, correct_above: float = 0.0
) -> dict[str, EvalReport]:
    """Return the reports on the outcomes in `eval_dir`, by source and over `ALL`."""
    outcomes, by_source = read_outcomes(eval_dir), dict[str, list[list[EpisodeOutcome]]]()
    for problem in problems:
        group = [outcomes[problem.id, sample] for sample in range(samples)]
        by_source.setdefault(problem.source, []).append(group)
    by_source[ALL] = [group for groups in by_source.values() for group in groups]
    return {source: summarize(groups, samples, correct_above) for source, groups in by_source.items()}


def reports_from_json(content: Mapping[str, Any]) -> dict[str, EvalReport]:
    """Return the reports that `asdict` has turned into dictionaries."""
    return TypeAdapter(dict[str, EvalReport]).validate_python(content)


def summary_scores(reports: Mapping[str, EvalReport]) -> dict[str, Any]:
    """Return the numbers of a recipe's table over all sources, and the accuracies with their 95 % intervals. The mean
    reward is among the numbers if it differs from the accuracy."""
    measures = reports[ALL].measures
    names = (*SUMMARY_METRICS, *(["reward"] if measures.get("reward") != measures.get("accuracy") else []))
    values = {name: measures[name].value if name in measures else None for name in names}
    accuracies = {name: report.measures.get("accuracy") for name, report in reports.items() if name != ALL}
    accuracy = measures.get("accuracy")
    return {
        **values,
        "accuracy_interval": [accuracy.low, accuracy.high] if accuracy else None,
        "accuracy_by_source": {name: asdict(value) if value else None for name, value in accuracies.items()},
    }


def tracker_row(reports: Mapping[str, EvalReport], step: int) -> dict[str, float]:
    """Return the row that trackers get of an evaluation after the run's training step `step`: the measures over all
    sources, and the accuracy of each source."""
    accuracies = {name: report.measures.get("accuracy") for name, report in reports.items() if name != ALL}
    by_source = {f"eval/{name}/accuracy": value.value for name, value in accuracies.items() if value}
    return {"step": step, **by_source, **{f"eval/{name}": one.value for name, one in reports[ALL].measures.items()}}


def write_outcomes(eval_dir: Path, episodes: Iterable[Episode]) -> None:
    """Append the outcomes of episodes to the file in an evaluation's folder."""
    append_rows(
        eval_dir / OUTCOMES,
        (
            {"problem": episode.problem.id, "sample": episode.sample}
            | {name: getattr(episode, name) for name in EpisodeOutcome._fields}
            for episode in episodes
        ),
    )


def read_outcomes(eval_dir: Path) -> dict[tuple[str, int], EpisodeOutcome]:
    """Return the outcomes in an evaluation's folder by (problem id, sample). A later row replaces an earlier one."""
    rows = ((row.pop("problem"), row.pop("sample"), EpisodeOutcome(**row)) for row in read_rows(eval_dir / OUTCOMES))
    return {(problem, sample): outcome for problem, sample, outcome in rows}


def summarize(outcomes_P: Sequence[Sequence[EpisodeOutcome]], samples: int, correct_above: float = 0.0) -> EvalReport:
    """Return the report on the outcomes of P problems."""
    scored_P = [[outcome for outcome in group if outcome.reward is not None] for group in outcomes_P]
    counts_P = [(len(group), sum(is_correct(one.reward, correct_above) for one in group)) for group in scored_P]
    is_binary = all(outcome.reward in (0, 1) for group in scored_P for outcome in group)
    measures = {
        "accuracy": ratio_estimate([(correct, n) for n, correct in counts_P], is_share=True),
        "reward": reward_estimate([METRICS["reward"].sums(group) for group in scored_P], is_share=is_binary),
    }
    for name, metric in EVAL_METRICS.items():
        sums_P = [metric.sums(group, correct_above) for group in scored_P]
        measures[name] = ratio_estimate(sums_P, is_share=name in SHARES)
    for j in sorted({1 << n for n in range(samples.bit_length())} | {samples}):
        counted_P = [(n, correct) for n, correct in counts_P if n >= j]
        chances_P = [(pass_at(j, n, correct), 1.0) for n, correct in counted_P]
        episodes_at_j = sum(n for n, _ in counted_P)
        measures[f"pass@{j}"] = ratio_estimate(chances_P, is_share=True, max_trials=episodes_at_j)
    episodes = sum(map(len, scored_P))
    return EvalReport(
        problems=len(outcomes_P),
        samples=samples,
        episodes=episodes,
        unavailable=sum(map(len, outcomes_P)) - episodes,
        measures={name: estimate for name, estimate in measures.items() if estimate},
        stop_reasons=dict(Counter(outcome.stop_reason for group in scored_P for outcome in group)),
    )


def sampling_settings(limits: SamplingConfig, samples: int) -> dict[str, Any]:
    """Return the settings that all episodes of an evaluation share, as its folder stores them."""
    compared = ("max_response_tokens", "max_turns", "max_tool_response_chars")
    return {
        "limits": {name: getattr(limits, name) for name in compared},
        "samples": samples,
        "temperature": limits.temperature,
        "top_p": limits.top_p,
    }


def pass_at(j: int, samples: int, correct: int) -> float:
    """Return the probability that `j` of `samples` episodes, drawn without replacement, include a correct one.

    Over problems the estimate is unbiased (Chen et al., arXiv 2107.03374, eq. 1).
    """
    return 1 - comb(samples - correct, j) / comb(samples, j)


def ratio_estimate(
    sums_P: Sequence[tuple[float, float]], *, is_share: bool, max_trials: float | None = None
) -> Estimate | None:
    """Return the sum of the numerators divided by the sum of the denominators, with its 95 % interval. None without
    data.

    `sums_P` has (numerator, denominator) of each problem. The variance of the ratio is estimated from its residuals
    over problems.

    If `is_share`, the value lies between 0 and 1, and the interval is Wilson's (Brown, Cai and DasGupta, Statistical
    Science 16, 2001). Wilson's interval needs a number of independent trials. It is computed in three steps (Korn and
    Graubard, Survey Methodology 24, 1998):
    1. Take the number of independent trials whose ratio would have the estimated variance. If all problems agree, the
       variance is 0, and each problem counts as one trial.
    2. Correct this number for few problems.
    3. Limit it to `max_trials`, by default the sum of the denominators.
    """
    sums = [(numerator, denominator) for numerator, denominator in sums_P if denominator]
    if not sums:
        return None
    total = sum(denominator for _, denominator in sums)
    value, variance = _ratio(sums)
    t = t_quantile(max(1, len(sums) - 1))
    if not is_share:
        return Estimate(value, max(0.0, value - t * variance**0.5), value + t * variance**0.5)
    trials: float = len(sums)
    if variance > ZERO_VARIANCE:
        most = max_trials or total
        # The variance of independent trials is estimated as value * (1 - value) / (trials - 1).
        trials = min(most, (1 + value * (1 - value) / variance) * (t_quantile(max(1, most - 1)) / t) ** 2)
    center = (value + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half_width = Z / (1 + Z**2 / trials) * (value * (1 - value) / trials + Z**2 / (4 * trials**2)) ** 0.5
    return Estimate(value, max(0.0, center - half_width), min(1.0, center + half_width))


def reward_estimate(sums_P: Sequence[tuple[float, float]], *, is_share: bool = False) -> Estimate | None:
    """Return the mean of rewards with its 95 % interval. None without data. `sums_P` has the sum and the number of the
    rewards of each problem.

    Rewards that are all 0 or 1 (`is_share`) have the interval of `ratio_estimate`. Other rewards may be any real
    numbers. Their interval is Student's t interval over problems: the mean, plus and minus t times the standard error
    that follows from the residuals of the problems. One problem has no interval, since its residual is 0.
    """
    sums = [(total, count) for total, count in sums_P if count]
    if is_share or not sums:
        return ratio_estimate(sums, is_share=True)
    (value, variance), degrees = _ratio(sums), len(sums) - 1
    if not degrees:
        return Estimate(value)
    half_width = t_quantile(degrees) * variance**0.5
    return Estimate(value, value - half_width, value + half_width)


def _ratio(sums: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the sum of the numerators divided by the sum of the denominators, and the variance of this ratio."""
    total = sum(denominator for _, denominator in sums)
    value = sum(numerator for numerator, _ in sums) / total
    squares = sum((numerator - value * denominator) ** 2 for numerator, denominator in sums)
    return value, squares / total**2 * len(sums) / max(1, len(sums) - 1)


def t_quantile(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution. With 3 or more degrees of freedom this is the expansion
    of Cornish and Fisher, whose error is below 1 %."""
    if degrees in SMALL_T_QUANTILES:
        return SMALL_T_QUANTILES[int(degrees)]
    z3, z5, z7 = Z**3, Z**5, Z**7
    terms = (Z, (z3 + Z) / 4, (5 * z5 + 16 * z3 + 3 * Z) / 96, (3 * z7 + 19 * z5 + 17 * z3 - 15 * Z) / 384)
    return float(sum(term / degrees**power for power, term in enumerate(terms)))


def report_table(reports: Mapping[str, EvalReport], title: str = "") -> Table:
    """Return a table with one column per source. Each number has its interval. The mean reward is left out if it is
    equal to the accuracy."""
    shown = {name: report for name, report in reports.items() if name != ALL or len(reports) > 2}
    k = reports[ALL].samples
    rows = table("[95 %]", *(f"{name}…" for name in shown), title=title)
    rows.add_row("problems", *(str(report.problems) for report in shown.values()))
    has_reward = any(each.measures.get("reward") != each.measures.get("accuracy") for each in shown.values())
    for name in ("accuracy", f"pass@{k}", *(["reward"] if has_reward else []), *EVAL_METRICS):
        cells = (str(report.measures.get(name, "-")) for report in shown.values())
        rows.add_row(f"avg@{k}" if name == "accuracy" else name.replace("_", " "), *cells)
    rows.add_row("episodes without reward", *(str(report.unavailable) for report in shown.values()))
    return rows
