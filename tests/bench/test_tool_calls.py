"""Tests of the sample of tool calls. It has the documented shares of kinds and depends only on its seed. Its calls end
as they should."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from bench.workloads.tool_calls import (
    ENDLESS_TIMEOUT_S,
    SHARES,
    CallTemplate,
    labelled_calls,
    load_calls,
    sample_calls,
    templates,
)
from sandbox.types import Call


def test_the_same_seed_gives_the_same_calls() -> None:
    assert sample_calls(50, seed=3) == sample_calls(50, seed=3) != sample_calls(50, seed=4)


def test_the_shares_are_those_of_real_traffic() -> None:
    labelled = list(labelled_calls(5000))
    families = Counter(template.family for template, _ in labelled)
    statuses = Counter(template.status for template, _ in labelled)
    for counts, shares in (
        (families, {"sympy": 0.61, "numpy": 0.03, "scipy": 0.03, "math": 0.003}),
        (statuses, {"ok": 0.75, "error": 0.245, "timeout": 0.005}),
    ):
        for name, share in shares.items():
            assert counts[name] / 5000 == pytest.approx(share, abs=0.02), name
    assert sum(SHARES.values()) == pytest.approx(1)


def test_the_number_of_lines_of_sampled_calls_is_near_that_of_real_calls() -> None:
    lines = [len(call["code"].splitlines()) for call in sample_calls(5000)]
    assert 15 <= statistics.median(lines) <= 19
    assert 28 <= statistics.quantiles(lines, n=10)[-1] <= 40


def test_there_are_many_different_templates_and_calls() -> None:
    names = [template.name for template in templates()]
    assert len(names) == len(set(names)) >= 40
    assert {(template.family, template.status) for template in templates()} == set(SHARES)
    assert len({call["code"] for call in sample_calls(1000)}) > 700


def test_many_templates_leave_their_answer_to_the_value_of_the_last_expression() -> None:
    without_print = sum("print(" not in template.code for template in templates() if template.status == "ok")
    assert without_print >= 15


def test_every_call_can_be_decoded() -> None:
    for call in sample_calls(500):
        Call.decode(json.loads(json.dumps(call)))


def _end_of(python: Path, call: dict[str, str]) -> str:
    """Run a call in a fresh interpreter. Returns `ok`, `timeout` or the type of the error."""
    command = [str(python), "-I", "-c", call["code"]]
    try:
        process = subprocess.run(command, input=call.get("stdin", ""), capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "timeout"
    if process.returncode == 0:
        return "ok"
    error_types = [line.split(":")[0] for line in process.stderr.splitlines() if line[:1].isalpha()]
    return next(error_type for error_type in reversed(error_types) if "Error" in error_type)


@pytest.mark.parametrize(
    "template", [t for t in templates() if t.end != "timeout"][::3], ids=lambda template: template.name
)
def test_the_call_of_a_template_ends_with_the_status_that_the_template_states(
    template: CallTemplate, guest_python: Path
) -> None:
    call = template.fill(random.Random(1))
    assert _end_of(guest_python, call) == template.end, call["code"]


def test_endless_calls_have_a_short_time_out() -> None:
    endless = [template for template in templates() if template.end == "timeout"]
    assert endless
    for template in endless:
        assert template.fill(random.Random(0))["limits"] == {"timeout_s": ENDLESS_TIMEOUT_S}


def test_calls_from_a_file_keep_the_fields_of_a_call(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    file.write_text('{"code": "1", "model": "m", "stdin": "x"}\n\n{"code": "2", "id": "b"}\n', encoding="utf-8")
    assert load_calls(file) == [{"code": "1", "stdin": "x"}, {"code": "2", "id": "b"}]


def test_a_row_without_code_is_named(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    file.write_text('{"code": "1"}\n{"text": "2"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"calls\.jsonl:2: expected an object with a 'code'"):
        load_calls(file)
