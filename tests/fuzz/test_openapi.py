"""Schemathesis asks what `/openapi.json` says may be asked, and what it says may not, of a server in its own process.

It checks each answer against the description: the status is one that is listed, body and content type fit, what
breaks the schema is refused, and nothing is a fault of the server. Two of its rules are not ours as they stand: a
malformed call does not fail its batch, and what names, paths and base64 must be like, no JSON Schema says.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from sandbox.gateway.http.openapi import Route, document
from sandbox.gateway.http.routes import ROUTES
from tests.gateway.test_server import address_of, server

SCHEMA = schemathesis.openapi.from_dict(document(ROUTES, needs_token=False))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with server() as process:
        yield address_of(process)


UNSAID = (
    "expected a relative path",
    "expected printable text",
    "expected base64 text",
    "expected each path to be a file or a directory",
)
POSTED = [(route, mode) for route in ROUTES if route.request_schema for mode in GenerationMode]
FETCHED = [(route, GenerationMode.POSITIVE) for route in ROUTES if not route.request_schema]


@pytest.mark.parametrize(
    ("route", "mode"), [*POSTED, *FETCHED], ids=lambda one: one.path if isinstance(one, Route) else one.value
)
def test_the_service_does_as_it_says(route: Route, mode: GenerationMode, address: str) -> None:
    operation = SCHEMA[route.path][route.method]

    not_ours = [
        positive_data_acceptance,
        *([negative_data_rejection] if route.path in ("/v1/batch", "/v1/verify") else []),
    ]

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        response = case.call_and_validate(base_url=address, excluded_checks=not_ours)
        if mode is GenerationMode.POSITIVE and response.status_code != 200:
            assert any(rule in response.text for rule in UNSAID), response.text

    ask()
