"""Tests of the evaluation sets that the documents describe. Their rows are read, their answers are scored, and each set
has values of avg@k and pass@k."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from examples import multiple_choice
from sandbox.errors import ConfigError as SandboxConfigError
from sandbox.errors import IsolationError
from sandbox.jail import choose_level
from tests.trainer.environments.episodes import opened_environment
from tests.trainer.environments.test_python_tool import SMALL_SERVICE
from trainer.data.sources import read_problems
from trainer.environments.connection import open_sandbox
from trainer.environments.services import Services
from trainer.episodes.episode import Episode, Problem, StopReason
from trainer.episodes.reward import VerifyOutcome
from trainer.recipe.evaluation import ALL, EvalReport, evaluate_problems, read_eval_reports
from trainer.recipe.pass_at_k import Attempt, pass_reports
from trainer.runs.run_folder import RunFolder

DOCUMENT = Path(__file__).parents[3] / "docs/evaluation.md"
SHARED = Path(__file__).parents[3].parent / "shared/data"
SETS = ("aime2024", "math500", "hmmt", "choices", "gpqa")
SAMPLES = 4
EQUIVALENT = {"168": "168.0", r"5\sqrt{2}": r"\sqrt{50}", r"-\frac{1}{4}, 1": r"1, -0.25"}
"""Other forms of the answers in the document, which math-verify accepts."""


@pytest.fixture(scope="module", autouse=True)
def _isolation(guest_python: Path) -> None:
    try:
        choose_level("auto")
    except (SandboxConfigError, IsolationError) as error:
        pytest.skip(f"needs a level of isolation: {error}")


def documented_sets(folder: Path) -> list[Problem]:
    """Write each documented row to a file of its own, named as in `SETS`, and return the problems."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (rows,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (table,) = re.findall(r"```csv\n(.*?)```", text, re.DOTALL)
    files = [folder / f"{name}.jsonl" for name in SETS[:-1]] + [folder / "gpqa.csv"]
    for file, content in zip(files, [*rows.splitlines(), table], strict=True):
        file.write_text(content, encoding="utf-8")
    return [
        *(problem for file in files[:3] for problem in read_problems(str(file))),
        *(problem for file in files[3:] for problem in multiple_choice.read_problems(str(file))),
    ]


def answers(problem: Problem) -> list[str | None]:
    """Return the answers of four episodes, of which the first and the third are right."""
    if problem.environment == "python":
        return [problem.answer, "12345", EQUIVALENT[problem.answer], None]
    wrong = next(letter for letter in "ABCD" if letter != problem.answer)
    return [problem.answer, wrong, rf"\text{{({problem.answer.lower()})}}", None]


def evaluate(problems: Sequence[Problem], eval_dir: Path) -> tuple[dict[str, EvalReport], list[Episode]]:
    """Evaluate a model that gives `answers`, and return the reports and the episodes."""
    episodes: list[Episode] = []

    async def main() -> None:
        async with open_sandbox("local", timeout_s=20, arguments=SMALL_SERVICE) as sandbox:

            async def collect(problems: Sequence[Problem], samples: int) -> list[list[Episode]]:
                (problem,) = problems
                group = [
                    Episode(problem, sample, stop_reason=StopReason.FINISHED, answer=answer)
                    for sample, answer in enumerate(answers(problem))
                ]
                for episode in group:
                    async with opened_environment(problem, Services(sandbox)) as (environment, _):
                        episode.reward = await environment.score(episode)
                episodes.extend(group)
                return [group]

            await evaluate_problems(
                dict(enumerate(problems)), SAMPLES, collect, run_folder=RunFolder(eval_dir), outcomes_only=True
            )

    asyncio.run(main())
    return read_eval_reports(problems, SAMPLES, eval_dir), episodes


def test_the_documented_rows_are_read_and_each_set_has_avg_at_k_and_pass_at_k(tmp_path: Path) -> None:
    problems = documented_sets(tmp_path)
    assert [problem.source for problem in problems] == list(SETS)
    assert [problem.id for problem in problems] == ["aime24-60", "test/algebra/0.json", "hmmt-0", "c1", "rec1"]
    assert [problem.environment for problem in problems] == ["python"] * 3 + [multiple_choice.ENVIRONMENT] * 2
    reports, episodes = evaluate(problems, tmp_path / "eval")
    assert list(reports) == [*SETS, ALL]
    for report in reports.values():
        assert report.unavailable == 0
        shares = {name: report.measures[name].value for name in ("accuracy", "pass@1", "pass@2", "pass@4")}
        assert shares == pytest.approx({"accuracy": 1 / 2, "pass@1": 1 / 2, "pass@2": 5 / 6, "pass@4": 1})
        assert all(0 <= report.measures[name].low < report.measures[name].high <= 1 for name in shares)
    by_set = pass_reports(map(Attempt.of, episodes))
    assert by_set.keys() == {*SETS, ALL}
    for by_attempts in by_set.values():
        assert by_attempts.measures["pass@2"].value == pytest.approx(5 / 6)
        assert by_attempts.measures["pass^2"].value == pytest.approx(1 / 6)


@pytest.mark.parametrize(("name", "size"), [("aime2024", 30), ("aime2025", 30), ("math500", 500)])
def test_the_checker_accepts_the_right_answer_to_each_problem_of_a_real_set(name: str, size: int) -> None:
    if not (file := SHARED / f"{name}.jsonl").is_file():
        pytest.skip(f"needs the data set {file}")
    problems = read_problems(str(file))
    pairs = [(problem.answer, problem.answer) for problem in problems]

    async def main() -> list[VerifyOutcome]:
        async with open_sandbox("local", timeout_s=20, arguments=SMALL_SERVICE) as sandbox:
            return await sandbox.answer_checker.verify(pairs)

    outcomes = asyncio.run(main())
    assert len(problems) == len({problem.id for problem in problems}) == size
    assert [pair for pair, outcome in zip(pairs, outcomes, strict=True) if outcome != VerifyOutcome.EQUIVALENT] == []
