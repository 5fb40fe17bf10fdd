"""Tests of log lines: one JSON object per line, with the request that a line belongs to."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from sandbox import logs

PROGRAM = """
import logging
from sandbox import logs
logs.configure("json")
log = logging.getLogger("a.b")
log.info("two\\nlines %s", "\\udcff")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed", extra={"fields": {"calls": 3}})
"""


def _record(message: str) -> logging.LogRecord:
    return logging.LogRecord("a.b", logging.INFO, "file.py", 1, message, (), None)


def test_every_json_record_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    first, second = map(json.loads, done.stderr.splitlines())
    assert (first["message"], first["level"], first["logger"]) == ("two\nlines \udcff", "INFO", "a.b")
    assert set(first) == {"time", "level", "logger", "message"} and first["time"].endswith("Z")
    assert second["calls"] == 3 and "ZeroDivisionError" in second["exception"]


def test_a_text_line_has_the_fields_of_the_log_call_without_line_breaks() -> None:
    record = _record("request")
    record.fields = {"tenant": "a\nb", "calls": 3}
    assert logs.TextFormatter(logs.TEXT_FORMAT).format(record).endswith(r"a.b: request tenant='a\nb' calls=3")


@pytest.mark.parametrize("formatter", [logs.TextFormatter(logs.TEXT_FORMAT), logs.JsonFormatter()])
def test_a_line_has_the_request_id_only_inside_a_request(formatter: logging.Formatter) -> None:
    outside = formatter.format(_record("text"))
    token = logs.request_id.set("id-1")
    try:
        inside = formatter.format(_record("text"))
    finally:
        logs.request_id.reset(token)
    assert "id-1" in inside and "request" not in outside
