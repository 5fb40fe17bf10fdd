"""Tests of the server's maximum limits, end to end."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import pytest

from tests.executor.calling import OWN_PYTHON

DEADLINE_S = 60


@pytest.mark.usefixtures("needs_isolation")
def test_a_limit_above_the_maximum_is_lowered_enforced_and_reported() -> None:
    flags = ("--port", "0", "--python", OWN_PYTHON, "--profiles", "bare", "--zygote-pools", "1", "--slots", "1")
    argv = [sys.executable, "-m", "sandbox", "serve", *flags, "--max-memory-mb", "64", "--max-disk-mb", "32"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if " on http://" in line)
            url = line.split(" on ")[1].split()[0]
            code = (
                "x = bytearray(100 << 20)"  # 100 MiB are less than the call's limit and more than the server's maximum
            )
            limits = {"memory_mb": 1000, "disk_mb": 16, "timeout_s": 30}
            body = json.dumps({"code": code, "limits": limits}).encode()
            request = urllib.request.Request(f"{url}/v1/execute", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                result = json.load(response)
            process.terminate()
            process.stderr.read()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
    assert result["status"] == "memory_limit"
    assert result["clamped"] == {"memory_mb": 64}
