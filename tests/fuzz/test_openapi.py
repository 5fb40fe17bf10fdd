"""Schemathesis sends requests that `/openapi.json` allows, and others that it forbids, to a server in its own process.

It checks that each response is documented (status, content type and body), that requests that violate the schema are
rejected, and that there is no 5xx. Two of its checks are excluded: a malformed call does not fail its batch, and the
JSON schemas do not express the rules for names, paths, base64 text and fields that exclude each other
(`RULES_WITHOUT_SCHEMA`).
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from sandbox.gateway.http.openapi import Route, document
from sandbox.gateway.routes import ROUTES
from tests.gateway.test_server import read_url, serving_process

SCHEMA = schemathesis.openapi.from_dict(document(ROUTES, needs_token=False))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving_process() as process:
        url = read_url(process)
        threading.Thread(target=_show_log, args=(process,), daemon=True).start()
        yield url


def _show_log(process: subprocess.Popen[str]) -> None:
    """Copy the server's log to the captured stderr of the running test, so that a failure shows its traceback. It also
    keeps the pipe from filling, which would block the server."""
    assert process.stderr is not None
    for line in process.stderr:
        sys.stderr.write(line)


RULES_WITHOUT_SCHEMA = (
    "expected a relative path",
    "expected a pattern",
    "expected printable text",
    "expected base64 text",
    "expected one of stdin and stdin_base64",
    "expected text without NUL",
    "no unfinished call or program has the id",
    "there is no session",
    "this server has no sessions",
    "expected each path to be a file or a directory",
    "expected a value, or a checker",
    "tests: expected a list of at least one test, but the field is missing",
    "expected compare or checker, got both",
    "expected false with strictness=",
)
WITH_BODY = [(route, mode) for route in ROUTES if route.request_schema for mode in GenerationMode]
WITHOUT_BODY = [(r, GenerationMode.POSITIVE) for r in ROUTES if not r.request_schema and r.path != "/mcp"]
"""Without `/mcp`, whose requests and errors are those of the MCP protocol."""


@pytest.mark.parametrize(
    ("route", "mode"),
    [*WITH_BODY, *WITHOUT_BODY],
    ids=lambda value: value.path if isinstance(value, Route) else value.value,
)
def test_the_server_behaves_as_documented(route: Route, mode: GenerationMode, address: str) -> None:
    operation = SCHEMA[route.path][route.method]

    excluded = [positive_data_acceptance]
    if route.path in ("/v1/batch", "/v1/verify", "/v1/judge"):
        excluded.append(negative_data_rejection)

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        response = case.call_and_validate(base_url=address, excluded_checks=excluded)
        if mode is GenerationMode.POSITIVE and response.status_code != 200:
            assert any(rule in response.text for rule in RULES_WITHOUT_SCHEMA), response.text

    send()
