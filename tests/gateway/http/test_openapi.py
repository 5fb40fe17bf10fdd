"""Tests that the OpenAPI document agrees with the routes, the types and real responses."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest

from sandbox.gateway.http.auth import DOCS_ASSETS, PUBLIC_PATHS
from sandbox.gateway.http.openapi import EXAMPLES, document
from sandbox.gateway.routes import ROUTES, build_app
from sandbox.types import CALL_FIELDS, LIMIT_FIELDS, Call, DocumentedEnum, Limits, Outcome, Profile, Result, Status
from tests.gateway.serving import serving

DOCUMENT = document(ROUTES, needs_token=False)
SCHEMAS = DOCUMENT["components"]["schemas"]


def assert_fits(value: Any, schema: dict[str, Any], where: str = "$") -> None:
    """Assert that `value` fits `schema`. Only the part of JSON Schema that the document uses is supported. `where` is
    the path to the value, for the message."""
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].removeprefix("#/components/schemas/")]
    if "anyOf" in schema:
        assert any(fits(value, option) for option in schema["anyOf"]), where
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
        "boolean": bool, "null": type(None),
    }  # fmt: skip
    assert isinstance(value, kinds.get(schema.get("type", ""), object)), f"{where}: {value!r} does not fit {schema}"
    assert value in schema.get("enum", [value]), where
    for index, item in enumerate(value if isinstance(value, list) else ()):
        assert_fits(item, schema.get("items", {}), f"{where}[{index}]")
    if isinstance(value, dict):
        assert_object_fits(value, schema, where)


def assert_object_fits(value: dict[str, Any], schema: dict[str, Any], where: str) -> None:
    assert set(schema.get("required", ())) <= set(value), where
    other_properties = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in schema.get("properties", {}):
            assert_fits(item, schema["properties"][name], f"{where}.{name}")
        elif isinstance(other_properties, dict):
            assert_fits(item, other_properties, f"{where}.{name}")
        else:
            assert other_properties, f"{where}: unknown {name}"


def fits(value: Any, schema: dict[str, Any]) -> bool:
    try:
        assert_fits(value, schema)
    except AssertionError:
        return False
    return True


def test_every_route_is_described() -> None:
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}


@pytest.mark.asyncio
async def test_the_application_serves_no_other_route() -> None:
    async with serving() as served:
        app = build_app(served.dispatcher)
        served_routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    described = {(route.method, route.path) for route in ROUTES}
    assert {(method, path) for method, path in served_routes if method != "HEAD"} == described | {
        ("GET", path) for path in DOCS_ASSETS
    }


def test_schemas_have_every_field_of_the_types() -> None:
    assert set(SCHEMAS["Call"]["properties"]) == {f.name for f in fields(Call)} | {"stdin_base64"} == set(CALL_FIELDS)
    assert set(SCHEMAS["Limits"]["properties"]) == {f.name for f in fields(Limits)} == set(LIMIT_FIELDS)
    assert set(SCHEMAS["Result"]["properties"]) == {f.name for f in fields(Result)}
    assert SCHEMAS["Status"]["enum"] == list(Status)
    assert SCHEMAS["Profile"]["enum"] == list(Profile)


def test_every_reference_has_its_schema() -> None:
    text = json.dumps(DOCUMENT)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(SCHEMAS)


@pytest.mark.asyncio
async def test_real_responses_fit_their_schemas() -> None:
    call = {"code": "1", "stdin": "x", "files": {"a": "YQ=="}, "return_files": ["a"], "limits": {"timeout_s": 1}}
    batch = {"calls": [call, {"code": 1}], "defaults": {"tenant": "t"}, "queue_timeout_s": 5}
    assert_fits(call, SCHEMAS["Execute"])
    assert not fits(batch, SCHEMAS["Batch"])  # its second call is malformed
    async with serving() as served:
        assert_fits((await served.post("/v1/execute", call))[1], SCHEMAS["Result"])
        assert_fits((await served.post("/v1/batch", batch))[1], SCHEMAS["Results"])
        assert_fits((await served.post("/v1/batch", {}))[1], SCHEMAS["Refusal"])
        headers = {"Accept": "application/x-ndjson"}
        async with served.http.post(served.url + "/v1/batch", json=batch, headers=headers) as response:
            async for line in response.content:
                assert_fits(json.loads(line), SCHEMAS["Line"])
        assert_fits(json.loads((await served.get("/v1/stats"))[1]), SCHEMAS["Stats"])
        for path in ("/health", "/ready"):
            assert_fits(json.loads((await served.get(path))[1]), SCHEMAS["State"])
        assert json.loads((await served.get("/openapi.json"))[1]) == DOCUMENT


def test_the_document_requires_a_token_if_the_server_does() -> None:
    assert document(ROUTES, needs_token=True)["security"] == [{"token": []}]
    paths = document(ROUTES, needs_token=True)["paths"]
    assert {path for path in paths if paths[path].get("get", {}).get("security") == []} == PUBLIC_PATHS - DOCS_ASSETS


def test_every_field_is_described() -> None:
    undescribed = [
        f"{name}.{field}"
        for name, schema in SCHEMAS.items()
        for field, property_schema in schema.get("properties", {}).items()
        if not property_schema.get("description")
    ]
    assert (undescribed, [name for name, schema in SCHEMAS.items() if not schema.get("description")]) == ([], [])


@pytest.mark.parametrize("enum", [Status, Profile, Outcome])
def test_every_value_of_an_enum_is_described(enum: type[DocumentedEnum]) -> None:
    assert all(value.description for value in enum)
    assert all(f"{value}: {value.description}" in SCHEMAS[enum.__name__]["description"] for value in enum)


def test_the_document_contains_no_name_of_a_constant() -> None:
    """Names of constants and of enum members mean nothing to users of the API."""
    assert re.findall(r"\b[A-Z]+_[A-Z_]+\b|`[A-Z]{4,}`", json.dumps(DOCUMENT)) == []


@pytest.mark.parametrize("needs_token", [False, True])
def test_the_document_describes_the_token(needs_token: bool) -> None:
    token = document(ROUTES, needs_token)["components"]["securitySchemes"]["token"]
    assert (token["type"], token["scheme"], bool(token["description"])) == ("http", "bearer", True)


def test_every_body_but_the_html_pages_has_an_example_that_fits_its_schema() -> None:
    without_example = []
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            bodies = {**operation["responses"]["200"]["content"], **operation.get("requestBody", {}).get("content", {})}
            for content_type, media in bodies.items():
                if "example" in media:
                    assert_fits(media["example"], media.get("schema", {}), path)
                elif content_type != "text/html":
                    without_example.append((path, content_type))
    assert without_example == []
    for name, example in EXAMPLES.items():
        assert_fits(example, SCHEMAS[name])


@pytest.mark.asyncio
async def test_the_requests_of_the_examples_are_accepted() -> None:
    async with serving() as served:
        for path, methods in DOCUMENT["paths"].items():
            if path.startswith("/v1/sessions"):
                continue  # tests/client/test_sessions.py sends these to a real server
            if body := methods.get("post", {}).get("requestBody"):
                example = body["content"]["application/json"]["example"]
                accept = ", ".join(methods["post"]["responses"]["200"]["content"]) if path == "/mcp" else "*/*"
                headers = {"Accept": accept}
                async with served.http.post(served.url + path, json=example, headers=headers) as response:
                    assert response.status == 200, (path, await response.text())


@pytest.mark.asyncio
async def test_responses_without_a_schema_are_like_their_examples() -> None:
    def example(path: str, content_type: str = "application/json") -> Any:
        return DOCUMENT["paths"][path]["get"]["responses"]["200"]["content"][content_type]["example"]

    async with serving() as served:
        for path in ("/ping", "/v1/ping"):
            assert json.loads((await served.get(path))[1]) == example(path)
        metrics = (await served.get("/metrics"))[1]
    assert example("/metrics", "text/plain") in metrics
    document_example = example("/openapi.json")
    assert document_example["openapi"] == DOCUMENT["openapi"]
    summary = document_example["paths"]["/health"]["get"]["summary"]
    assert summary == DOCUMENT["paths"]["/health"]["get"]["summary"]


@pytest.mark.asyncio
async def test_the_response_to_a_batch_of_malformed_calls_is_as_described() -> None:
    described = DOCUMENT["paths"]["/v1/batch"]["post"]["responses"]["400"]["content"]
    async with serving() as served:
        for accept, media in described.items():
            headers = {"Accept": accept}
            async with served.http.post(served.url + "/v1/batch", json={"calls": [{}]}, headers=headers) as response:
                assert (response.status, response.content_type) == (400, accept)
                if accept == "application/json":
                    assert_fits(await response.json(), media["schema"])


def test_results_encode_to_their_schema() -> None:
    assert_fits(Result("", Status.OK).encode(), SCHEMAS["Result"])
