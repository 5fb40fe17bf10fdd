"""Fixtures that run a benchmark as a command does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

Main = Callable[[Sequence[str]], int]
RunBenchmark = Callable[..., tuple[int, dict[str, Any]]]
"""Takes a benchmark's `main` and its arguments. Returns the exit code and the printed result."""
RefusedArguments = Callable[..., str]
"""Takes a benchmark's `main` and wrong arguments. Returns the error message."""


@pytest.fixture
def run_benchmark(capsys: pytest.CaptureFixture[str]) -> RunBenchmark:
    def run(main: Main, *args: str) -> tuple[int, dict[str, Any]]:
        exit_code = main([*args, "--json"])
        captured = capsys.readouterr()
        print(captured.err, file=sys.stderr)  # pytest shows it if the test fails
        return exit_code, json.loads(captured.out.splitlines()[-1])

    return run


@pytest.fixture
def refused_arguments(capsys: pytest.CaptureFixture[str]) -> RefusedArguments:
    def run(main: Main, *args: str) -> str:
        with pytest.raises(SystemExit) as exit_info:
            main(args)
        assert exit_info.value.code == 2
        return capsys.readouterr().err

    return run
