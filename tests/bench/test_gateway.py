"""The gateway alone, over executors that run nothing."""

from __future__ import annotations

import json

import pytest

from bench import gateway
from bench.servers.stub_executor import _answer
from sandbox.types import Call, Result


def test_a_stub_answers_as_an_executor_does() -> None:
    result = Result.decode({**_answer(Call("1").encode(binary=True)), "id": "x"})
    assert (result.status, result.stdout, result.usage.run_ms > 0) == ("ok", "1", True)


def test_a_small_run_has_all_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    code = gateway.main(["--calls", "200", "--batch", "64", "--rounds", "1", "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    figures = json.loads(captured.out.splitlines()[-1])
    assert figures["calls_per_s"] > 0 and figures["cpu_us"] > 0
    assert figures["bytes_in"] > 8 and figures["bytes_out"] > figures["bytes_in"]
    assert figures["holds"] == (figures["calls_per_s"] >= figures["at_least"])
    assert code == (0 if figures["holds"] else 1)


def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    args = gateway._parser().parse_args(["--calls", "1"])
    with pytest.raises(gateway.output.BenchFailed, match="Cannot connect"):
        gateway._drive("http://127.0.0.1:9", args, print)
