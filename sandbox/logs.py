"""Log lines of the server's processes: plain text, or one JSON object per line.

A JSON line has `time` (UTC), `level`, `logger` and `message`; within a request `request_id`; after an exception
`exception` with the traceback; and the fields that the log call passes as `extra={"fields": {...}}`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request that the current task answers; empty outside requests."""


def configure(log_format: str = "text", level: int = logging.INFO) -> None:
    """Send the log lines of this process to stderr, in one of `settings.server.LOG_FORMATS`. A later call
    replaces the format."""
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(TEXT_FORMAT))
    logging.basicConfig(level=level, handlers=[stderr], force=True)


class TextFormatter(logging.Formatter):
    """Adds the fields of the log call and the id of the request to the line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, "fields", {})
        line = super().formatMessage(record) + "".join(f" {name}={value!r}" for name, value in fields.items())
        current = request_id.get()
        return f"{line} [request {current}]" if current else line


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            line["request_id"] = current
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}), default=str)
