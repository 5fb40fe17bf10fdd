"""The gateway alone, with stub executors."""

from __future__ import annotations

import json

import pytest

from bench import gateway
from bench.harness.command import BenchFailed
from bench.servers.stub_executor import result_of
from sandbox.types import Call, Result


def test_a_stub_answers_like_an_executor() -> None:
    result = Result.decode({**result_of(Call("1").encode(binary=True)), "id": "x"})
    assert (result.status, result.stdout, result.usage.run_ms > 0) == ("ok", "1", True)


def test_a_small_run_has_a_complete_result(capsys: pytest.CaptureFixture[str]) -> None:
    code = gateway.main(["--calls", "200", "--batch", "64", "--rounds", "1", "--json"])
    captured = capsys.readouterr()
    assert captured.out, captured.err
    result = json.loads(captured.out.splitlines()[-1])
    assert result["calls_per_s"] > 0 and result["cpu_us"] > 0
    assert result["bytes_in"] > 8 and result["bytes_out"] > result["bytes_in"]
    assert result["holds"] == (result["calls_per_s"] >= gateway.MIN_CALLS_PER_S)
    assert code == (0 if result["holds"] else 1)


def test_an_unreachable_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    args = gateway._parser().parse_args(["--calls", "1"])
    with pytest.raises(BenchFailed, match="Cannot connect"):
        gateway.run_client("http://127.0.0.1:9", args, print)
