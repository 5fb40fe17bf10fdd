"""The demonstration: three kinds of calls beside fresh interpreters, and commands that work as they are printed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench import demo


@pytest.mark.runtime
@pytest.mark.slow
def test_each_kind_of_call_is_measured_on_the_server_and_in_fresh_interpreters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo.main(["--seconds", "0.05", "--json"]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(printed.splitlines()[-1])["kinds"]
    assert list(rows) == ["print", "numpy", "mix"]
    for row in rows.values():
        assert row["calls"] == sum(row["statuses"].values()) >= demo.REQUESTS and row["fresh_per_s"] > 0
        assert row["ratio"] == pytest.approx(row["calls_per_s"] / row["fresh_per_s"], abs=0.051)
    assert rows["print"]["statuses"] == {"ok": rows["print"]["calls"]}
    assert demo.EXPLANATION in printed


@pytest.mark.parametrize("is_on_path", [True, False])
@pytest.mark.parametrize("has_script", [True, False])
def test_the_printed_command_works_in_the_same_directory(
    is_on_path: bool, has_script: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    if has_script:
        script = tmp_path / "bin" / "rstar-sandbox"
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m sandbox "$@"\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin" if is_on_path else "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    command = next(line for line in demo._next_steps().splitlines() if " run -c " in line)
    name = command.partition(" run -c ")[0].strip()
    assert (name == "rstar-sandbox") == (is_on_path and has_script)
    done = subprocess.run(f"{name} run --help", shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "-c CODE" in done.stdout
