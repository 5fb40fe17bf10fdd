"""The OpenAPI 3.1 document, made from the types' annotations and the table of routes, so that it cannot drift."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

from aiohttp.typedefs import Handler

from sandbox.fields import NumberRule
from sandbox.gateway.history import PERCENTILES
from sandbox.gateway.http.auth import PUBLIC_PATHS
from sandbox.gateway.http.codec import HEARTBEAT_S
from sandbox.gateway.http.errors import ERROR_TYPES
from sandbox.gateway.http.validation import BATCH_FIELDS, PAIR_FIELDS, VERIFY_FIELDS
from sandbox.gateway.metrics import VERSION
from sandbox.types import (
    CALL_ERROR_FIELDS,
    CALL_FIELDS,
    LIMIT_FIELDS,
    PRIORITY,
    RESULT_FIELDS,
    USAGE_FIELDS,
    VERDICT_FIELDS,
    Call,
    CallError,
    Limits,
    Outcome,
    Profile,
    Result,
    Status,
    Usage,
    Verdict,
)

Schema = dict[str, Any]

MAX_SAFE_INTEGER = 2**53 - 1
"""The largest whole number in a query; JSON's clients have no larger ones."""


@dataclass(frozen=True, slots=True)
class Route:
    """One operation: what does it, what it takes, and what it gives."""

    method: str
    path: str
    handler: Handler
    summary: str
    response_schemas: Mapping[str, str | None]
    """Content type to the name of a schema; None for text that has none."""
    request_schema: str | None = None
    """Name of the body's schema."""
    body_types: tuple[str, ...] = ()
    error_statuses: tuple[int, ...] = ()
    query: Mapping[str, str] = field(default_factory=dict)
    """Whole numbers that may follow the path, and what they are."""
    invalid_schemas: Mapping[str, str] = field(default_factory=dict)
    """The same for status 400 where every item of a batch is malformed."""


MEANINGS: Mapping[type[StrEnum], Mapping[StrEnum, str]] = {
    Status: {
        Status.OK: "the code ran to its end with exit code 0",
        Status.ERROR: "the code raised, did not compile, or left with another exit code",
        Status.TIMEOUT: "the code used up timeout_s on its own clock, in which waiting for a core does not count",
        Status.MEMORY_LIMIT: "the code ran out of memory_mb",
        Status.OUTPUT_LIMIT: "the code wrote more than output_kb; what fitted is returned",
        Status.KILLED: "the code died of a signal that the service did not send",
        Status.UNAVAILABLE: "no verdict, and the service's doing; never to be scored as 0",
        Status.INVALID: "no verdict, and the caller's doing: the call is malformed and never ran",
    },
    Outcome: {
        Outcome.EQUIVALENT: "both can be read, and they mean the same",
        Outcome.NOT_EQUIVALENT: "both can be read, and they do not mean the same",
        Outcome.UNPARSABLE: "one of them cannot be read, or comparing them used up a limit; status says which",
        Outcome.UNAVAILABLE: "no verdict, and the service's doing; never to be scored as 0",
        Outcome.INVALID: "no verdict, and the caller's doing: the pair is malformed",
    },
    Profile: {
        Profile.AUTO: "chosen from the imports in the code",
        Profile.BARE: "the standard library that code for mathematics uses",
        Profile.NUMERIC: "bare and numpy",
        Profile.SYMBOLIC: "numeric and sympy, mpmath",
        Profile.SCIENTIFIC: "symbolic and scipy, networkx, pandas",
        Profile.VERIFY: "symbolic and math-verify, for checks of answers",
    },
}
ABOUT: Mapping[type, str] = {
    Status: "How a call ended.",
    Outcome: "What came of comparing an answer with the right one.",
    Profile: "Which warm interpreter a call is forked from. A wrong choice is slower, never wrong.",
    Limits: "What one call may use. Values above the operator's ceilings are lowered, and the result says so.",
    Call: "One piece of Python to run.",
    CallError: "Why a call did not end as ok.",
    Usage: "What a call cost.",
    Result: "The answer to one call.",
    Verdict: "The answer to one pair of answers.",
}
REFUSALS: Mapping[int, str] = {
    400: "The request is malformed; the message names the field, what was expected and what came",
    401: "The token is missing or wrong",
    403: "The request came from a web page of another site, or asks for a name that is not served",
    408: "The body did not arrive in time",
    413: "The body, or the batch, is larger than this server ever takes; send smaller ones",
    415: "The body has a type or an encoding that is not taken",
    429: "The server is full; send the request again after the seconds in Retry-After",
    500: "A fault of the service; its log has the details",
    503: "The service is starting or stopping; send the request again later, or to another one",
}
_RETRY_AFTER = {"Retry-After": {"description": "seconds to wait", "schema": {"type": "integer"}}}
HEADERS: Mapping[int, Schema] = {
    401: {"WWW-Authenticate": {"description": "the scheme, Bearer", "schema": {"type": "string"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}


def _example_result(**fields: Any) -> Schema:
    usage = Usage(queue_ms=0.3, run_ms=2.1, cpu_ms=1.9, peak_memory_mb=0.4)
    return Result(**{"id": "0", "status": Status.OK, "exit_code": 0, "usage": usage, **fields}).encode()


_FAILED = _example_result(
    id="endless", status=Status.TIMEOUT, error=CallError("Timeout", "used up its 4 s"), exit_code=None, signal=9
)
_VERDICT = Verdict(Outcome.EQUIVALENT, usage=Usage(queue_ms=0.3, run_ms=12.5, cpu_ms=12.1, peak_memory_mb=1.5)).encode()
EXAMPLES: Mapping[str, Any] = {
    "Execute": {"code": "print(input())\n1 + 1", "stdin": "hi", "limits": {"timeout_s": 4}},
    "Result": _example_result(stdout="hi\n", value="2"),
    "Batch": {
        "defaults": {"limits": {"timeout_s": 4}},
        "calls": [{"code": "2**10"}, {"code": "while True: pass", "id": "endless"}],
    },
    "Results": {"results": [_example_result(value="1024"), _FAILED]},
    "Line": {"index": 1, **_FAILED},
    "Verify": {"pairs": [{"gold": "\\frac{1}{2}", "answer": "0.5"}], "limits": {"timeout_s": 5}},
    "Verdicts": {"results": [_VERDICT]},
    "State": {"status": "ok"},
    "Ready": {"status": "ready", "isolation": "namespaces", "isolation_reason": ""},
    "Refusal": {"error": {"type": "InvalidRequest", "message": "call.code: expected text, got 5"}},
}
"""By the name of the schema that they fit."""


def document(routes: Iterable[Route], needs_token: bool) -> Schema:
    """The whole document."""
    paths: dict[str, Schema] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    token = {"type": "http", "scheme": "bearer", "description": "the token that the server was started with, if any"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rstar-sandbox",
            "version": VERSION,
            "description": _overview(needs_token),
        },
        "paths": paths,
        "components": {"schemas": schemas(), "securitySchemes": {"token": token}},
        "security": [{"token": []}] if needs_token else [],
    }


def _overview(needs_token: bool) -> str:
    """Return the document's description in Markdown, with the table of statuses."""
    rows = "\n".join(f"| `{status}` | {meaning} |" for status, meaning in MEANINGS[Status].items())
    return (
        "Runs untrusted Python code, each call in its own isolated process. The `status` of a result is what the code "
        "did. A failure of the service is an HTTP error or the status `unavailable`. "
        f"{'Requests need the token.' if needs_token else 'This server was started without a token.'}\n\n"
        f"| status | meaning |\n|---|---|\n{rows}\n"
    )


def schemas() -> dict[str, Schema]:
    """Every named schema."""
    timeout = {"type": "number", "exclusiveMinimum": 0, "description": BATCH_FIELDS["queue_timeout_s"]}
    call = _schema_of_dataclass(Call, CALL_FIELDS)
    call["properties"]["priority"] |= _range(PRIORITY)
    defaults = {name: schema for name, schema in call["properties"].items() if name not in ("code", "id")}
    index = {"type": "integer", "description": "which of the batch's calls this answers"}
    result = _schema_of_dataclass(Result, RESULT_FIELDS)
    result["additionalProperties"] = True
    result["required"] = [f.name for f in fields(Result)]
    return {
        "Limits": _limits(),
        "Call": call,
        "Execute": {**call, "properties": {**call["properties"], "queue_timeout_s": timeout}},
        "Defaults": {
            "type": "object",
            "description": "Fields for calls that leave them out.",
            "properties": defaults,
            "additionalProperties": False,
        },
        "Batch": {
            "type": "object",
            "description": "Calls that are sent together. Each has a result of its own.",
            "required": ["calls"],
            "additionalProperties": False,
            "properties": {
                "calls": {"type": "array", "minItems": 1, "items": _ref("Call"), "description": BATCH_FIELDS["calls"]},
                "defaults": {**_ref("Defaults"), "description": BATCH_FIELDS["defaults"]},
                "queue_timeout_s": timeout,
            },
        },
        "Status": _schema_of_enum(Status),
        "Profile": _schema_of_enum(Profile),
        "CallError": _schema_of_dataclass(CallError, CALL_ERROR_FIELDS),
        "Usage": _schema_of_dataclass(Usage, USAGE_FIELDS),
        "Result": result,
        "Results": _list_of("Result", "one result for each call, in the order of the calls"),
        "Line": {
            **result,
            "description": "A result. Empty lines between them, in msgpack nil, are to be skipped: signs of life, one "
            f"for each {HEARTBEAT_S:g} s in which there is no result.",
            "properties": {"index": index, **result["properties"]},
            "required": ["index", *result["required"]],
        },
        **_checks(call["properties"], timeout),
        **_stats(),
        "State": {
            "type": "object",
            "description": "How the service is.",
            "required": ["status"],
            "properties": {"status": {"type": "string", "description": "ok; anything else is an HTTP error"}},
        },
        "Ready": {
            "type": "object",
            "description": "Whether the service takes calls, and how it isolates them.",
            "required": ["status", "isolation", "isolation_reason"],
            "properties": {
                "status": {"type": "string", "description": "ready; anything else is an HTTP error"},
                "isolation": {"type": "string", "description": "the isolation level of all calls"},
                "isolation_reason": {
                    "type": "string",
                    "description": "why `auto` took no stronger level; empty if it took the strongest",
                },
            },
        },
        "Refusal": {
            "type": "object",
            "description": "A request that gets no result.",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "description": "why",
                    "required": ["type", "message"],
                    "properties": {
                        "type": {"type": "string", "description": "a name for the HTTP status, such as InvalidRequest"},
                        "message": {"type": "string", "description": "what was expected, what came, and what to do"},
                    },
                }
            },
        },
    }


def _checks(call: Schema, timeout: Schema) -> dict[str, Schema]:
    """The schemas of `/v1/verify`."""
    verdict = _schema_of_dataclass(Verdict, VERDICT_FIELDS)
    verdict["additionalProperties"] = True
    verdict["required"] = [f.name for f in fields(Verdict)]
    pairs = {"type": "array", "minItems": 1, "items": _ref("Pair"), "description": VERIFY_FIELDS["pairs"]}
    shared = {name: call[name] for name in VERIFY_FIELDS if name in call}
    return {
        "Pair": {
            "type": "object",
            "description": "The right answer and the one to check.",
            "required": list(PAIR_FIELDS),
            "additionalProperties": False,
            "properties": {name: {"type": "string", "description": doc} for name, doc in PAIR_FIELDS.items()},
        },
        "Verify": {
            "type": "object",
            "description": "Pairs that are checked, each in a call of its own, and what those calls may use.",
            "required": ["pairs"],
            "additionalProperties": False,
            "properties": {"pairs": pairs, **shared, "queue_timeout_s": timeout},
        },
        "Outcome": _schema_of_enum(Outcome),
        "Verdict": verdict,
        "Verdicts": _list_of("Verdict", "one verdict for each pair, in the order of the pairs"),
    }


def _list_of(name: str, doc: str) -> Schema:
    results = {"type": "array", "items": _ref(name), "description": doc}
    about = f"The answer to a batch: {doc}."
    return {"type": "object", "description": about, "required": ["results"], "properties": {"results": results}}


def _stats() -> dict[str, Schema]:
    """The schemas of `/v1/stats`, which has every number in the unit of its name."""
    counts = {"type": "object", "additionalProperties": {"type": "integer"}}
    latency: Schema = {"anyOf": [{"type": "null"}, _ref("Percentiles")]}
    span = {
        "at_s": {"type": "number", "description": "its end, in seconds since the service began"},
        "seconds": {"type": "number", "description": "its length"},
        "statuses": {**counts, "description": "calls answered in it, by status"},
        "events": {**counts, "description": "whatever else was counted in it"},
        "queue_ms": {**latency, "description": "what the calls that were answered had waited for a slot"},
        "run_ms": {**latency, "description": "how long they had run"},
        "answer_ms": {**latency, "description": "how long they had taken from admission to answer"},
    }
    gauge = {"type": "number", "description": "what there was at its end"}
    step: Schema = {"type": "object", "required": list(span), "properties": span, "additionalProperties": gauge}
    number = {"type": "integer", "description": "steps are numbered from 1"}
    return {
        "Percentiles": {
            "type": "object",
            "description": "milliseconds, at most 7 % from the truth",
            "required": [f"p{percent}" for percent in PERCENTILES],
            "properties": {
                f"p{percent}": {"type": "number", "description": f"{percent} % of the calls took no longer"}
                for percent in PERCENTILES
            },
        },
        "Span": {**step, "description": "about ten seconds, up to now"},
        "Step": {**step, "description": "about a second", "properties": {"number": number, **span}},
        "Stats": {
            "type": "object",
            "description": "What the dashboard shows.",
            "required": ["service", "now", "totals", "executors", "missed_imports", "steps"],
            "properties": {
                "service": {"type": "object", "description": "which one this is, and what it may hold"},
                "now": {**_ref("Span"), "description": "the last ten seconds"},
                "totals": {
                    "type": "object",
                    "description": "since the service began",
                    "properties": {
                        "statuses": {**counts, "description": "calls answered, by status"},
                        "events": {**counts, "description": "whatever else was counted"},
                    },
                },
                "executors": {"type": "array", "items": {"type": "object"}, "description": "one row for each executor"},
                "missed_imports": {**counts, "description": "imports of the calls that no warm interpreter had"},
                "steps": {"type": "array", "description": "the last ten minutes", "items": _ref("Step")},
            },
        },
    }


def _operation(route: Route) -> Schema:
    responses: dict[str, Schema] = {
        "200": {"description": "done", "content": {kind: _media(name) for kind, name in route.response_schemas.items()}}
    }
    for code in (*route.error_statuses, 500):
        about, content = f"{ERROR_TYPES[code]}: {REFUSALS[code]}.", {"application/json": _media("Refusal")}
        if code == 400 and route.invalid_schemas:
            about += " Where every item of a batch is malformed: the results, which say what is wrong with each."
            either = {"anyOf": [_ref("Refusal"), _ref(route.invalid_schemas["application/json"])]}
            content |= {kind: _media(name) for kind, name in route.invalid_schemas.items()}
            content["application/json"] = {**_media("Refusal"), "schema": either}
        headers = {"headers": HEADERS[code]} if code in HEADERS else {}
        responses[str(code)] = {"description": about, "content": content, **headers}
    operation: Schema = {"summary": route.summary, "responses": responses}
    if route.request_schema is not None:
        content = {kind: _media(route.request_schema) for kind in route.body_types}
        operation["requestBody"] = {"required": True, "content": content}
    if route.query:
        whole = {"type": "integer", "minimum": 0, "maximum": MAX_SAFE_INTEGER}
        operation["parameters"] = [
            {"name": name, "in": "query", "description": doc, "schema": whole} for name, doc in route.query.items()
        ]
    if route.path in PUBLIC_PATHS:
        operation["security"] = []
    return operation


def _media(name: str | None) -> Schema:
    if name is None:
        return {}
    return {"schema": _ref(name), **({"example": EXAMPLES[name]} if name in EXAMPLES else {})}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _limits() -> Schema:
    properties = {
        name: {
            "type": "integer" if rule.whole else "number",
            **_range(rule),
            "default": rule.default,
            "description": rule.doc,
        }
        for name, rule in LIMIT_FIELDS.items()
    }
    return {"type": "object", "description": ABOUT[Limits], "properties": properties, "additionalProperties": False}


def _range(rule: NumberRule) -> Schema:
    kind = int if rule.whole else float
    return {"minimum": kind(rule.low), "maximum": kind(rule.high)}


def _schema_of_enum(enum: type[StrEnum]) -> Schema:
    meanings = "; ".join(f"{member}: {meaning}" for member, meaning in MEANINGS[enum].items())
    return {"type": "string", "enum": [member.value for member in enum], "description": f"{ABOUT[enum]} {meanings}."}


def _schema_of_dataclass(kind: type, docs: Mapping[str, str]) -> Schema:
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    properties: dict[str, Schema] = {}
    for one in fields(kind):
        schema = _schema_of_hint(hints[one.name])
        if one.name in docs:
            schema["description"] = docs[one.name]
        if isinstance(one.default, (str, int, float, bool)):
            schema["default"] = one.default
        properties[one.name] = schema
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    schema = {
        "type": "object", "description": ABOUT[kind], "properties": properties, "additionalProperties": False,
    }  # fmt: skip
    return schema | ({"required": required} if required else {})


def _schema_of_hint(hint: Any) -> Schema:
    """The schema of an annotation, of the kinds that `sandbox.types` uses."""
    plain = {str: "string", bool: "boolean", int: "integer", float: "number"}
    if hint in plain:
        return {"type": plain[hint]}
    if hint is bytes:
        return {"type": "string", "contentEncoding": "base64"}
    if isinstance(hint, type):
        return _ref(hint.__name__)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if a is type(None) else _schema_of_hint(a) for a in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _schema_of_hint(arguments[0])}
    assert issubclass(origin, Mapping), hint
    return {"type": "object", "additionalProperties": _schema_of_hint(arguments[1])}
