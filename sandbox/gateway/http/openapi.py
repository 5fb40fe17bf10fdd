"""The OpenAPI 3.1 document. It is generated from the annotations of `sandbox.types`, the descriptions of their fields
and the table of routes."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from aiohttp.typedefs import Handler

from sandbox.dataclass_codec import codec_of
from sandbox.fields import VARIABLE_NAME, NumberRule
from sandbox.gateway.http.auth import PUBLIC_PATHS
from sandbox.gateway.http.codec import HEARTBEAT_S
from sandbox.gateway.http.errors import ERROR_TYPES
from sandbox.gateway.http.validation import BATCH_FIELDS, PAIR_FIELDS, VERIFY_FIELDS
from sandbox.gateway.metrics import VERSION
from sandbox.gateway.observe.history import PERCENTILES
from sandbox.judging.answers import OPTION_FIELDS
from sandbox.types import (
    CALL_FIELDS,
    DEADLINE_RULE,
    LIMIT_FIELDS,
    PRIORITY_RULE,
    Call,
    CallError,
    DocumentedEnum,
    Limits,
    Network,
    Outcome,
    Profile,
    Result,
    Status,
    Strictness,
    Usage,
    Verdict,
)

Schema = dict[str, Any]

MAX_SAFE_INTEGER = 2**53 - 1
"""The largest whole number accepted in a query. JavaScript cannot represent larger ones exactly."""


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of the API."""

    method: str
    path: str
    handler: Handler
    summary: str
    response_schemas: Mapping[str, str | None]
    """Schema name by content type; None for text without a schema."""
    request_schema: str | None = None
    """Schema name of the request body."""
    body_types: tuple[str, ...] = ()
    error_statuses: tuple[int, ...] = ()
    query: Mapping[str, str] = field(default_factory=dict)
    """Descriptions of the query parameters, all whole numbers, by name."""
    path_parameters: Mapping[str, Schema] = field(default_factory=dict)
    """Schemas of the parts of the path that are in braces, by name."""
    invalid_schemas: Mapping[str, str] = field(default_factory=dict)
    """`response_schemas` for status 400 if every item of a batch is malformed."""
    unavailable_schemas: Mapping[str, str] = field(default_factory=dict)
    """`response_schemas` for status 503 if the result is `unavailable`."""
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    """Named schemas that only this route uses, in addition to those of `schemas()`."""
    build_schemas: Callable[[], Mapping[str, Schema]] = dict
    """Returns further named schemas. It is called for a document only, since it may import pydantic."""
    examples: Mapping[str, Any] = field(default_factory=dict)
    """Examples by the name of their schema, in addition to `EXAMPLES`."""
    request_example: Any = None
    """Example of a request body without a schema."""
    response_examples: Mapping[str, Any] = field(default_factory=dict)
    """Examples of responses without a schema, by content type."""
    error_schemas: Mapping[int, str] = field(default_factory=dict)
    """By status: the schema name of the body of an error. Without an entry, it is `Refusal`."""
    group: str = "rstar-sandbox"
    """Heading of the route on the API page."""


ERROR_DESCRIPTIONS: Mapping[int, str] = {
    400: "The request is malformed; the message names the field, what was expected and what came",
    401: "The token is missing or wrong",
    403: "The request comes from a web page of another site, or its Host header is not a name of this server",
    404: "There is nothing with this name",
    408: "The body did not arrive in time",
    409: "The session runs a cell already, or its head is another state; no code has run",
    410: "The session has ended, or the state is no longer kept; no code has run",
    413: "The body or the batch is larger than this server accepts; send smaller ones",
    415: "The body has a content type or an encoding that is not supported",
    422: "The request is malformed; each error names the field and what was expected",
    429: "The queue is full; send the request again after the seconds in Retry-After",
    500: "An internal error of the server; its log has the details",
    501: "This server lacks an optional package that the route needs",
    503: "The server is starting or stopping; send the request again later, or to another server",
    504: "The service did not run the code; send the request again after the seconds in Retry-After",
}
RESULT_DESCRIPTIONS: Mapping[int, str] = {
    400: " If every item of a batch is malformed: the results, each with its own message.",
    503: " If the call is unavailable: its result, which says why.",
}
"""Descriptions of responses whose bodies are results instead of an error."""
_RETRY_AFTER = {"Retry-After": {"description": "seconds to wait", "schema": {"type": "integer"}}}
HEADERS: Mapping[int, Schema] = {
    401: {"WWW-Authenticate": {"description": "the scheme, Bearer", "schema": {"type": "string"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
    504: _RETRY_AFTER,
}


def _example_result(**fields: Any) -> Schema:
    usage = Usage(queue_ms=0.3, run_ms=2.1, cpu_ms=1.9, peak_memory_mb=0.4)
    return Result(**{"id": "0", "status": Status.OK, "exit_code": 0, "usage": usage, **fields}).encode()


_TIMED_OUT = _example_result(
    id="endless", status=Status.TIMEOUT, error=CallError("Timeout", "used up its 4 s"), exit_code=None, signal=9
)
_VERDICT = Verdict(
    Outcome.EQUIVALENT,
    usage=Usage(queue_ms=0.3, run_ms=3.5, cpu_ms=3.1, peak_memory_mb=1.5),
    extracted={"gold": "\\frac{1}{2}", "answer": "0.5"},
).encode()
_INTERVAL = {
    "statuses": {"ok": 2},
    "events": {},
    "queue_ms": {"p50": 0.15, "p90": 0.18, "p99": 0.18},
    "run_ms": {"p50": 6.7, "p90": 8.5, "p99": 8.5},
    "answer_ms": {"p50": 8.5, "p90": 9.5, "p99": 9.5},
}
"""Example of the statistics of an interval in which two calls finished."""
EXAMPLES: Mapping[str, Any] = {
    "Execute": {"code": "print(input())\n1 + 1", "stdin": "hi", "limits": {"timeout_s": 4}},
    "Result": _example_result(stdout="hi\n", value="2"),
    "Batch": {
        "defaults": {"limits": {"timeout_s": 4}},
        "calls": [{"code": "2**10"}, {"code": "while True: pass", "id": "endless"}],
    },
    "Results": {"results": [_example_result(value="1024"), _TIMED_OUT]},
    "Line": {"index": 1, **_TIMED_OUT},
    "Verify": {"pairs": [{"gold": "\\frac{1}{2}", "answer": "It is \\boxed{0.5}."}], "limits": {"timeout_s": 5}},
    "Verdicts": {"results": [_VERDICT]},
    "State": {"status": "ok"},
    "Ready": {
        "status": "ready",
        "executors_ready": 4,
        "executors": 4,
        "isolation": "namespaces",
        "isolation_reason": "",
    },
    "Stats": {
        "service": {"state": "ready", "version": VERSION, "isolation": "namespaces", "cores": 2},
        "now": {"at_s": 61.3, "seconds": 9.5, **_INTERVAL, "waiting": 0, "running": 0},
        "totals": {"statuses": {"ok": 2}, "events": {}},
        "executors": [{"number": 0, "ready": True, "restarts": 0, "running": 0, "slots": 32}],
        "missed_imports": {"sklearn": 1},
        "tenants": [],
        "steps": [{"number": 61, "at_s": 61.3, "seconds": 1.0, **_INTERVAL, "waiting": 0}],
    },
    "Refusal": {"error": {"type": "InvalidRequest", "message": "call.code: expected text, got 5"}},
}
"""Examples by the name of their schema."""


def document(routes: Iterable[Route], needs_token: bool, own_profiles: Iterable[str] = ()) -> Schema:
    """Return the whole document. `own_profiles` are the names of the profiles that the operator has defined."""
    paths: dict[str, Schema] = {}
    named_schemas = schemas()
    named_schemas["Profile"]["enum"] += own_profiles
    for route in routes:
        named_schemas |= {**route.schemas, **route.build_schemas()}
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    token = {"type": "http", "scheme": "bearer", "description": "the token that the server was started with"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "rstar-sandbox", "version": VERSION, "description": _overview(needs_token)},
        "paths": paths,
        "components": {"schemas": named_schemas, "securitySchemes": {"token": token}},
        "security": [{"token": []}] if needs_token else [],
    }


def _overview(needs_token: bool) -> str:
    """Return the document's description in Markdown, with the table of statuses."""
    rows = "\n".join(f"| `{status}` | {status.description} |" for status in Status)
    return (
        "Runs untrusted Python code, each call in its own isolated process. The `status` of a result is what the code "
        "did. A failure of the server is an HTTP error or the status `unavailable`. "
        f"{'Requests need the token.' if needs_token else 'This server was started without a token.'}\n\n"
        f"| status | meaning |\n|---|---|\n{rows}\n"
    )


def schemas() -> dict[str, Schema]:
    """Return every named schema."""
    timeout = field_schema("number", BATCH_FIELDS["queue_timeout_s"], exclusiveMinimum=0)
    call = call_schema()
    defaults = {name: schema for name, schema in call["properties"].items() if name not in ("code", "id")}
    result = response_schema(Result)
    index = field_schema("integer", "index in the batch of the call that this result belongs to")
    line = object_schema(
        f"A result. Skip empty lines (nil in msgpack): they are heartbeats, sent after each {HEARTBEAT_S:g} s without "
        "a result.",
        {"index": index, **result["properties"]},
        additionalProperties=True,
    )
    batch = {
        "calls": field_schema("array", BATCH_FIELDS["calls"], minItems=1, items=reference("Call")),
        "defaults": {**reference("Defaults"), "description": BATCH_FIELDS["defaults"]},
        "queue_timeout_s": timeout,
        "deadline_s": field_schema("number", BATCH_FIELDS["deadline_s"], **_range(DEADLINE_RULE)),
    }
    ready = {
        "status": field_schema("string", "ready; anything else is an HTTP error"),
        "executors_ready": field_schema("integer", "executors that accept calls; more may still be starting"),
        "executors": field_schema("integer", "all executors, those that start or restart included"),
        "isolation": field_schema("string", "the isolation level of all calls"),
        "isolation_reason": field_schema(
            "string", "why `auto` did not choose a stronger level; empty if it chose the strongest"
        ),
    }
    error = {
        "type": field_schema("string", "name of the HTTP status, such as InvalidRequest"),
        "message": field_schema("string", "expected, received, and what to do"),
    }
    return {
        "Limits": _limits_schema(),
        "Call": call,
        "Execute": {**call, "properties": {**call["properties"], "queue_timeout_s": timeout}},
        "Defaults": input_schema("Values for fields that a call omits.", defaults),
        "Batch": input_schema("Calls that are sent together. Each has its own result.", batch, "calls"),
        "Status": schema_of_enum(Status),
        "Profile": schema_of_enum(Profile),
        "Network": schema_of_enum(Network),
        "CallError": _schema_of_dataclass(CallError),
        "Usage": _schema_of_dataclass(Usage),
        "Result": result,
        "Results": list_of("Result", "one result for each call, in the order of the calls"),
        "Line": line,
        **_verify_schemas(call["properties"], timeout),
        **_stats_schemas(),
        "State": object_schema(
            "The state of the server.", {"status": field_schema("string", "ok; anything else is an HTTP error")}
        ),
        "Ready": object_schema("Whether the server accepts calls, and how it isolates them.", ready),
        "Refusal": object_schema("A request that is rejected.", {"error": object_schema("the reason", error)}),
    }


def call_schema() -> Schema:
    """Return the schema of a call."""
    schema = _schema_of_dataclass(Call, CALL_FIELDS)
    properties = schema["properties"]
    properties["priority"] |= _range(PRIORITY_RULE)
    properties["deadline_s"] = number_schema(DEADLINE_RULE)
    properties["env"]["propertyNames"] = {"pattern": f"^{VARIABLE_NAME.pattern}$"}
    text = input_schema(
        "a file that is text", {"text": field_schema("string", "the text, as UTF-8 in the file")}, "text"
    )
    properties["files"]["additionalProperties"] = {"anyOf": [_schema_of_hint(bytes), text]}
    properties["stdin_base64"] = {**_schema_of_hint(bytes), "description": CALL_FIELDS["stdin_base64"]}
    schema["properties"] = {name: properties[name] for name in CALL_FIELDS}
    return schema


def _verify_schemas(call_properties: Schema, timeout: Schema) -> dict[str, Schema]:
    """Return the schemas of `/v1/verify`."""
    pair = {name: field_schema("string", doc) for name, doc in PAIR_FIELDS.items()}
    pairs = field_schema("array", VERIFY_FIELDS["pairs"], minItems=1, items=reference("Pair"))
    options = {
        "strictness": {
            **reference("Strictness"),
            "description": OPTION_FIELDS["strictness"],
            "default": Strictness.STRICT.value,
        },
        "rounding": field_schema("boolean", OPTION_FIELDS["rounding"], default=False),
    }
    shared = options | {name: call_properties[name] for name in VERIFY_FIELDS if name in call_properties}
    description = "Pairs to check, each in its own call, how they are compared, and the limits of these calls."
    return {
        "Pair": input_schema("The right answer and the answer to check.", pair, *pair),
        "Verify": input_schema(description, {"pairs": pairs, **shared, "queue_timeout_s": timeout}, "pairs"),
        "Strictness": schema_of_enum(Strictness),
        "Outcome": schema_of_enum(Outcome),
        "Verdict": response_schema(Verdict),
        "Verdicts": list_of("Verdict", "one verdict for each pair, in the order of the pairs"),
    }


def _stats_schemas() -> dict[str, Schema]:
    """Return the schemas of `/v1/stats`. Each number has the unit in its name."""
    latency: Schema = {"anyOf": [{"type": "null"}, reference("Percentiles")]}
    interval = {
        "at_s": field_schema("number", "end of the interval, in seconds since the server started"),
        "seconds": field_schema("number", "length of the interval"),
        "statuses": _counts("calls finished in the interval, by status"),
        "events": _counts("all other counters, their growth in the interval"),
        "queue_ms": {**latency, "description": "waiting time for a slot, of the finished calls"},
        "run_ms": {**latency, "description": "run time of the finished calls"},
        "answer_ms": {**latency, "description": "time from admission to result, of the finished calls"},
    }
    gauge = field_schema("number", "value at the end of the interval")
    step = {"number": field_schema("integer", "number of the step, from 1"), **interval}
    percentiles = {f"p{n}": field_schema("number", f"{n} % of the calls took no longer") for n in PERCENTILES}
    totals = {
        "statuses": _counts("finished calls, by status"),
        "events": _counts("all other counters"),
    }
    stats = {
        "service": field_schema("object", "version, state and capacity of the server"),
        "now": {**reference("Span"), "description": "the last ten seconds"},
        "totals": object_schema("since the server started", totals),
        "executors": field_schema("array", "one row for each executor", items={"type": "object"}),
        "nodes": field_schema("array", "one row for each node, only with --cluster", items={"type": "object"}),
        "missed_imports": _counts("imports by calls of modules that no zygote had preloaded, by module"),
        "tenants": field_schema(
            "array", "the tenants of the tenants file that have had calls", items=reference("TenantUsage")
        ),
        "steps": field_schema("array", "the last ten minutes", items=reference("Step")),
    }
    own_stats = {
        "service": stats["service"],
        "at_s": field_schema("number", "seconds since the server started"),
        "tenants": field_schema("array", "the tenant of the token", items=reference("TenantUsage")),
    }
    usage = {
        "name": field_schema("string", "name of the tenant"),
        "statuses": _counts("finished calls since the server started, by status"),
        "waiting": field_schema("integer", "calls that wait for a slot now"),
        "dispatched": field_schema("integer", "calls that executors have now"),
        "bytes": field_schema("integer", "bytes of code, stdin and files of the unfinished calls"),
        "run_s": field_schema("number", "seconds that the finished calls ran"),
        "cpu_s": field_schema("number", "CPU seconds that the finished calls used"),
    }
    return {
        "Percentiles": object_schema("milliseconds, at most 7 % from the true value", percentiles),
        "Span": object_schema("An interval of about ten seconds up to now.", interval, additionalProperties=gauge),
        "Step": object_schema("An interval of about a second.", step, additionalProperties=gauge),
        "TenantUsage": object_schema("The calls of one tenant.", usage),
        "ServerStats": {
            **object_schema("The data of the dashboard.", stats),
            "required": [name for name in stats if name != "nodes"],
        },
        "OwnStats": object_schema("What the token of a tenant gets: its own calls.", own_stats),
        "Stats": {
            "description": "The data of the dashboard, or for the token of a tenant its own calls.",
            "anyOf": [reference("ServerStats"), reference("OwnStats")],
        },
    }


def field_schema(json_type: str, description: str, **rules: object) -> Schema:
    return {"type": json_type, "description": description, **rules}


def _counts(description: str) -> Schema:
    return field_schema("object", description, additionalProperties={"type": "integer"})


def object_schema(description: str, properties: Schema, **rules: object) -> Schema:
    """Return the schema of an object in a response: every property is always present."""
    return field_schema("object", description, properties=properties, required=list(properties), **rules)


def input_schema(description: str, properties: Schema, *required: str) -> Schema:
    """Return the schema of an object in a request: other properties are errors."""
    schema = field_schema("object", description, properties=properties, additionalProperties=False)
    return schema | ({"required": list(required)} if required else {})


def response_schema(cls: type) -> Schema:
    """Return the schema of a dataclass in a response, to which later versions may add fields."""
    schema = _schema_of_dataclass(cls)
    return schema | {"additionalProperties": True, "required": list(schema["properties"])}


def list_of(name: str, doc: str) -> Schema:
    """Return the schema of the response to a batch, a list of results with this schema."""
    return object_schema(
        f"The response to a batch: {doc}.", {"results": field_schema("array", doc, items=reference(name))}
    )


def _operation(route: Route) -> Schema:
    content = {
        content_type: _media(name, route.examples, route.response_examples.get(content_type))
        for content_type, name in route.response_schemas.items()
    }
    responses: dict[str, Schema] = {"200": {"description": "Success.", "content": content}}
    for status in (*route.error_statuses, 500):
        description = f"{ERROR_TYPES[status]}: {ERROR_DESCRIPTIONS[status]}."
        content = {"application/json": _media(route.error_schemas.get(status, "Refusal"), route.examples)}
        results = {400: route.invalid_schemas, 503: route.unavailable_schemas}.get(status)
        if results:
            description += RESULT_DESCRIPTIONS[status]
            refusal_or_results = {"anyOf": [reference("Refusal"), reference(results["application/json"])]}
            content |= {content_type: _media(name, route.examples) for content_type, name in results.items()}
            content["application/json"] = {**_media("Refusal"), "schema": refusal_or_results}
        headers = {"headers": HEADERS[status]} if status in HEADERS else {}
        responses[str(status)] = {"description": description, "content": content, **headers}
    operation: Schema = {"summary": route.summary, "tags": [route.group], "responses": responses}
    if route.body_types:
        media = _media(route.request_schema, route.examples, route.request_example)
        operation["requestBody"] = {"required": True, "content": dict.fromkeys(route.body_types, media)}
    integer = {"type": "integer", "minimum": 0, "maximum": MAX_SAFE_INTEGER}
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "description": schema["description"], "schema": schema}
        for name, schema in route.path_parameters.items()
    ] + [{"name": name, "in": "query", "description": doc, "schema": integer} for name, doc in route.query.items()]
    if parameters:
        operation["parameters"] = parameters
    if route.path in PUBLIC_PATHS:
        operation["security"] = []
    return operation


def _media(name: str | None, examples: Mapping[str, Any] = EXAMPLES, example: Any = None) -> Schema:
    """Return the media type object of a body. `example` is that of a body without a schema."""
    if name is not None:
        example = examples.get(name, EXAMPLES.get(name))
    schema = {} if name is None else {"schema": reference(name)}
    return schema | ({} if example is None else {"example": example})


def reference(name: str) -> Schema:
    """Return a reference to a named schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def number_schema(rule: NumberRule, **rules: object) -> Schema:
    """Return the schema of a number with this rule."""
    return field_schema("integer" if rule.whole else "number", rule.doc, **rules, **_range(rule))


def _limits_schema() -> Schema:
    properties = {name: number_schema(rule, default=rule.default) for name, rule in LIMIT_FIELDS.items()}
    return input_schema(_first_sentence(Limits), properties)


def _range(rule: NumberRule) -> Schema:
    return {"minimum": rule.convert(rule.low), "maximum": rule.convert(rule.high)}


def schema_of_enum(enum: type[DocumentedEnum]) -> Schema:
    """Return the schema of an enum, with the description of each value."""
    description = " ".join((enum.__doc__ or "").split())
    values = " ".join(f"{member}: {member.description}" for member in enum)
    return {"type": "string", "enum": [member.value for member in enum], "description": f"{description} {values}"}


def _first_sentence(cls: type) -> str:
    """Return the first sentence of a class docstring."""
    return " ".join((cls.__doc__ or "").split()).partition(". ")[0].rstrip(".") + "."


def _schema_of_dataclass(cls: type, docs: Mapping[str, str] | None = None) -> Schema:
    """Return the schema of a dataclass. Without `docs`, the annotations of its fields describe them."""
    assert is_dataclass(cls)
    if docs is None:
        docs = codec_of(cls).descriptions
    hints = get_type_hints(cls)
    properties: dict[str, Schema] = {}
    for item in fields(cls):
        schema = _schema_of_hint(hints[item.name])
        if item.name in docs:
            schema["description"] = docs[item.name]
        if isinstance(item.default, (str, int, float, bool)):
            schema["default"] = item.default
        properties[item.name] = schema
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    return input_schema(_first_sentence(cls), properties, *required)


def _schema_of_hint(hint: Any) -> Schema:
    """Return the schema of an annotation. Only the annotations that `sandbox.types` uses are supported."""
    if hint == str | bytes:  # as text, since JSON has no bytes
        hint = str
    if hint == Profile | str:  # `document` adds the other names to the schema of `Profile`
        hint = Profile
    plain = {str: "string", bool: "boolean", int: "integer", float: "number"}
    if hint in plain:
        return {"type": plain[hint]}
    if hint is bytes:
        return {"type": "string", "contentEncoding": "base64"}
    if isinstance(hint, type):
        return reference(hint.__name__)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if a is type(None) else _schema_of_hint(a) for a in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _schema_of_hint(arguments[0])}
    assert issubclass(origin, Mapping), hint
    return {"type": "object", "additionalProperties": _schema_of_hint(arguments[1])}
