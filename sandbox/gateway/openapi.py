"""The OpenAPI 3.1 document, made from the types' annotations and the table of routes, so that it cannot drift."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

from aiohttp.typedefs import Handler

from sandbox.gateway.codec import QUIET_S
from sandbox.gateway.guard import OPEN_PATHS
from sandbox.gateway.history import PERCENTILES
from sandbox.gateway.intake import BATCH_FIELDS, PAIR_FIELDS, VERIFY_FIELDS
from sandbox.gateway.metrics import VERSION
from sandbox.gateway.refusal import KINDS
from sandbox.types import (
    CALL_FIELDS,
    LIMIT_FIELDS,
    PRIORITY,
    Call,
    CallError,
    Limits,
    Number,
    Outcome,
    Profile,
    Result,
    Status,
    Usage,
    Verdict,
)

Schema = dict[str, Any]

MOST = 2**53 - 1
"""The largest whole number in a query; JSON's clients have no larger ones."""


@dataclass(frozen=True, slots=True)
class Route:
    """One operation: what does it, what it takes, and what it gives."""

    method: str
    path: str
    act: Handler
    summary: str
    gives: Mapping[str, str | None]
    """Content type to the name of a schema; None for text that has none."""
    takes: str | None = None
    """Name of the body's schema."""
    body_types: tuple[str, ...] = ()
    refuses: tuple[int, ...] = ()
    query: Mapping[str, str] = field(default_factory=dict)
    """Whole numbers that may follow the path, and what they are."""


def document(routes: Iterable[Route], needs_token: bool) -> Schema:
    """The whole document."""
    paths: dict[str, Schema] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    whole: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "rstar-sandbox",
            "version": VERSION,
            "description": "Runs Python that nobody vouches for, each call in a fresh, isolated process. "
            "What the code did is the result's status; what went wrong on our side is an HTTP error or `unavailable`.",
        },
        "paths": paths,
        "components": {"schemas": schemas()},
    }
    if needs_token:
        whole["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"token": []}]
    return whole


def schemas() -> dict[str, Schema]:
    """Every named schema."""
    timeout = {"type": "number", "exclusiveMinimum": 0, "description": BATCH_FIELDS["queue_timeout_s"]}
    call = _of_dataclass(Call, CALL_FIELDS)
    call["properties"]["priority"] |= _range(PRIORITY)
    defaults = {name: schema for name, schema in call["properties"].items() if name not in ("code", "id")}
    index = {"type": "integer", "description": "which of the batch's calls this answers"}
    result = _of_dataclass(Result, {})
    result["additionalProperties"] = True
    result["required"] = [f.name for f in fields(Result)]
    return {
        "Limits": _limits(),
        "Call": call,
        "Execute": {**call, "properties": {**call["properties"], "queue_timeout_s": timeout}},
        "Defaults": {"type": "object", "properties": defaults, "additionalProperties": False},
        "Batch": {
            "type": "object",
            "required": ["calls"],
            "additionalProperties": False,
            "properties": {
                "calls": {"type": "array", "minItems": 1, "items": _ref("Call"), "description": BATCH_FIELDS["calls"]},
                "defaults": {**_ref("Defaults"), "description": BATCH_FIELDS["defaults"]},
                "queue_timeout_s": timeout,
            },
        },
        "Status": _of_enum(Status),
        "Profile": _of_enum(Profile),
        "CallError": _of_dataclass(CallError, {}),
        "Usage": _of_dataclass(Usage, {}),
        "Result": result,
        "Results": {
            "type": "object",
            "required": ["results"],
            "properties": {"results": {"type": "array", "items": _ref("Result")}},
        },
        "Line": {
            **result,
            "description": "A result. Empty lines between them, in msgpack nil, are to be skipped: signs of life, one "
            f"for each {QUIET_S:g} s in which there is no result.",
            "properties": {"index": index, **result["properties"]},
            "required": ["index", *result["required"]],
        },
        **_checks(call["properties"], timeout),
        **_stats(),
        "State": {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}},
        "Ready": {
            "type": "object",
            "required": ["status", "isolation", "isolation_reason"],
            "properties": {
                "status": {"type": "string"},
                "isolation": {"type": "string", "description": "the isolation level of all calls"},
                "isolation_reason": {
                    "type": "string",
                    "description": "why `auto` took no stronger level; empty if it took the strongest",
                },
            },
        },
        "Refusal": {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["type", "message"],
                    "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
                }
            },
        },
    }


def _checks(call: Schema, timeout: Schema) -> dict[str, Schema]:
    """The schemas of `/v1/verify`."""
    verdict = _of_dataclass(Verdict, {})
    verdict["additionalProperties"] = True
    verdict["required"] = [f.name for f in fields(Verdict)]
    pairs = {"type": "array", "minItems": 1, "items": _ref("Pair"), "description": VERIFY_FIELDS["pairs"]}
    shared = {name: call[name] for name in VERIFY_FIELDS if name in call}
    return {
        "Pair": {
            "type": "object",
            "required": list(PAIR_FIELDS),
            "additionalProperties": False,
            "properties": {name: {"type": "string", "description": doc} for name, doc in PAIR_FIELDS.items()},
        },
        "Verify": {
            "type": "object",
            "required": ["pairs"],
            "additionalProperties": False,
            "properties": {"pairs": pairs, **shared, "queue_timeout_s": timeout},
        },
        "Outcome": _of_enum(Outcome),
        "Verdict": verdict,
        "Verdicts": {
            "type": "object",
            "required": ["results"],
            "properties": {"results": {"type": "array", "items": _ref("Verdict")}},
        },
    }


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
            "properties": {f"p{percent}": {"type": "number"} for percent in PERCENTILES},
        },
        "Span": {**step, "description": "about ten seconds, up to now"},
        "Step": {**step, "description": "about a second", "properties": {"number": number, **span}},
        "Stats": {
            "type": "object",
            "required": ["service", "now", "totals", "executors", "missed_imports", "steps"],
            "properties": {
                "service": {"type": "object", "description": "which one this is, and what it may hold"},
                "now": _ref("Span"),
                "totals": {
                    "type": "object",
                    "description": "since the service began",
                    "properties": {"statuses": counts, "events": counts},
                },
                "executors": {"type": "array", "items": {"type": "object"}},
                "missed_imports": {**counts, "description": "imports of the calls that no warm interpreter had"},
                "steps": {"type": "array", "description": "the last ten minutes", "items": _ref("Step")},
            },
        },
    }


def _operation(route: Route) -> Schema:
    responses: dict[str, Schema] = {
        "200": {"description": "done", "content": {kind: _media(name) for kind, name in route.gives.items()}}
    }
    for code in route.refuses:
        responses[str(code)] = {"description": KINDS[code], "content": {"application/json": _media("Refusal")}}
    operation: Schema = {"summary": route.summary, "responses": responses}
    if route.takes is not None:
        content = {kind: _media(route.takes) for kind in route.body_types}
        operation["requestBody"] = {"required": True, "content": content}
    if route.query:
        whole = {"type": "integer", "minimum": 0, "maximum": MOST}
        operation["parameters"] = [
            {"name": name, "in": "query", "description": doc, "schema": whole} for name, doc in route.query.items()
        ]
    if route.path in OPEN_PATHS:
        operation["security"] = []
    return operation


def _media(name: str | None) -> Schema:
    return {} if name is None else {"schema": _ref(name)}


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
    return {"type": "object", "description": Limits.__doc__, "properties": properties, "additionalProperties": False}


def _range(rule: Number) -> Schema:
    kind = int if rule.whole else float
    return {"minimum": kind(rule.low), "maximum": kind(rule.high)}


def _of_enum(enum: type[StrEnum]) -> Schema:
    return {"type": "string", "enum": [member.value for member in enum], "description": enum.__doc__}


def _of_dataclass(kind: type, docs: Mapping[str, str]) -> Schema:
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    properties: dict[str, Schema] = {}
    for one in fields(kind):
        schema = _of_hint(hints[one.name])
        if one.name in docs:
            schema["description"] = docs[one.name]
        if isinstance(one.default, (str, int, float, bool)):
            schema["default"] = one.default
        properties[one.name] = schema
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if kind.__doc__:
        schema["description"] = kind.__doc__
    return schema | ({"required": required} if required else {})


def _of_hint(hint: Any) -> Schema:
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
        return {"anyOf": [{"type": "null"} if a is type(None) else _of_hint(a) for a in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _of_hint(arguments[0])}
    assert issubclass(origin, Mapping), hint
    return {"type": "object", "additionalProperties": _of_hint(arguments[1])}
