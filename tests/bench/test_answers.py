"""Tests of bench.answers: how verdicts on labelled pairs of answers are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import answers
from bench.workloads import answer_pairs
from bench.workloads.answer_pairs import LabelledPair
from sandbox.types import Outcome, Usage, Verdict

EQUAL, DIFFERENT = LabelledPair("1", "1.0", True, "decimals"), LabelledPair("1", "2", False, "integers")
FOUND = {
    outcome: Verdict(outcome, usage=Usage(cpu_ms=cpu_ms))
    for outcome, cpu_ms in ((Outcome.EQUIVALENT, 1.0), (Outcome.NOT_EQUIVALENT, 3.0), (Outcome.UNPARSABLE, 8.0))
}


def test_a_false_equivalent_and_a_refused_pair_are_wrong() -> None:
    verdicts = [FOUND[Outcome.UNPARSABLE], FOUND[Outcome.EQUIVALENT], FOUND[Outcome.NOT_EQUIVALENT]]
    row = answers.summarize([EQUAL, DIFFERENT, DIFFERENT], [verdicts])
    assert (row["wrong"], row["false_equivalent"]) == (2, 1)
    assert (row["mean_cpu_ms"], row["median_cpu_ms"]) == (4.0, 3.0)


def test_a_line_that_is_no_pair_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pairs.txt"
    monkeypatch.setattr(answer_pairs, "PAIRS_FILE", file)
    file.write_text("[text]\n# a comment\na == b\\nc\n", encoding="utf-8")
    assert answer_pairs.labelled_pairs() == [LabelledPair("a", "b\\nc", True, "text")]
    file.write_text("a = b\n", encoding="utf-8")
    with pytest.raises(ValueError, match="expected GOLD == ANSWER"):
        answer_pairs.labelled_pairs()
