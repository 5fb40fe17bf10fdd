"""The routes of sessions: open a session, run cells in it, show it, roll it back, close it.

A session is an interpreter that keeps its variables and files from cell to cell. A cell has some of the fields of a
call, and `state` and `if_state`. The routes turn cells into the calls that `executor/session.py` describes. From then
on, a cell is handled as a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import monotonic
from typing import Any

from aiohttp import web

from sandbox.errors import InvalidCall, NodeError
from sandbox.fields import NumberRule, check_label, check_number
from sandbox.gateway.calls.batch import Batch
from sandbox.gateway.calls.sessions import Session
from sandbox.gateway.http import codec, exchange
from sandbox.gateway.http.auth import TENANT
from sandbox.gateway.http.codec import JSON, MSGPACK_STREAM, NDJSON, Json
from sandbox.gateway.http.errors import HttpError
from sandbox.gateway.http.exchange import BATCH_TYPES, BODY_TYPES, CALL_ERROR_STATUSES, DISPATCHER
from sandbox.gateway.http.openapi import (
    Route,
    Schema,
    call_schema,
    field_schema,
    input_schema,
    list_of,
    number_schema,
    object_schema,
    reference,
    response_schema,
)
from sandbox.gateway.http.validation import (
    BatchHead,
    CallsForm,
    CheckedCall,
    Item,
    check_fields,
    check_items,
    check_profile_and_tenant,
)
from sandbox.types import (
    CALL_FIELDS,
    LIMIT_FIELDS,
    CellResult,
    EncodedCall,
    Profile,
    SessionState,
    Status,
    UnavailableReason,
    check_call,
)

KEEP_STATES_RULE = NumberRule(1, 64, doc="number of states that are kept, the head included", default=2)
IDLE_RULE = NumberRule(1, 86_400, doc="seconds without a cell after which the session ends", default=600, whole=False)
MAX_RULE = NumberRule(1, 604_800, doc="seconds after which the session ends", default=86_400, whole=False)
STATE_RULE = NumberRule(0, 2**53 - 1, doc="number of the state from which the cell runs; without it, the head")
SESSION_FIELDS: dict[str, str] = {
    "limits": "limits of the session: memory_mb and processes for all its states and its cell together, disk_mb for "
    "its files",
    "env": CALL_FIELDS["env"],
    "profile": "profile of the zygote that the session is forked from; without it, the server's largest",
    "tenant": CALL_FIELDS["tenant"],
    "keep_states": KEEP_STATES_RULE.doc,
    "idle_s": IDLE_RULE.doc,
    "max_s": MAX_RULE.doc,
}
CELL_CALL_FIELDS = ("code", "stdin", "stdin_base64", "files", "return_files", "figures", "echo", "limits", "id")
"""Fields of a call that a cell has too."""
CELL_LIMITS = ("timeout_s", "output_kb")
"""Limits that a cell may have. The others are limits of its session."""
CELL_FIELDS: dict[str, str] = {
    **{name: CALL_FIELDS[name] for name in CELL_CALL_FIELDS},
    "deadline_s": CALL_FIELDS["deadline_s"],
    "state": STATE_RULE.doc,
    "if_state": "the number that the head must have; otherwise the cell does not run (HTTP status 409)",
}
ROLLBACK_FIELDS = {"state": "number of a state that is kept; the next cell runs from it"}
CELLS_FIELDS = {"cells": "cells, each with `session`, of different sessions; results are in the same order"}


class SessionForm(CallsForm):
    """The body of POST /v1/sessions, as a call that opens the session."""

    def check(self, raw: Json) -> Iterator[Item]:
        check_fields(raw, SESSION_FIELDS, "session", "limits and other fields, all optional")
        keep_states = _check_number(raw, "keep_states", KEEP_STATES_RULE)
        times = {name: _check_number(raw, name, rule) for name, rule in (("idle_s", IDLE_RULE), ("max_s", MAX_RULE))}
        fields = {name: raw[name] for name in ("limits", "env", "profile", "tenant") if name in raw}
        call = check_call({**fields, "code": ""}, "session")
        check_profile_and_tenant(call, "session", self.config, self.owner)
        if call.get("profile", Profile.AUTO) == Profile.AUTO:
            call["profile"] = [*self.config.profiles, *(own.name for own in self.config.own_profiles)][-1]
        yield BatchHead(1, self.config.queue_timeout_s, extra=times)
        yield CheckedCall(0, {**call, "session": {"op": "open", "keep_states": int(keep_states)}}, "")


class RollbackForm(CallsForm):
    """The body of POST /v1/sessions/ID/rollback. It has no calls."""

    def check(self, raw: Json) -> Iterator[Item]:
        check_fields(raw, ROLLBACK_FIELDS, "rollback", "state")
        state = check_number(raw.get("state"), "rollback.state", STATE_RULE)
        yield BatchHead(0, self.config.queue_timeout_s, extra=int(state))


class CellForm(CallsForm):
    """The body of POST /v1/sessions/ID/cells."""

    def check(self, raw: Json) -> Iterator[Item]:
        call = _check_cell(raw, "cell")
        yield BatchHead(1, self.config.queue_timeout_s)
        yield CheckedCall(0, call, call.get("id", ""))


class CellsForm(CallsForm):
    """The body of POST /v1/sessions/cells. A malformed cell gets the result `invalid`."""

    def check(self, raw: Json) -> Iterator[Item]:
        check_fields(raw, CELLS_FIELDS, "batch", "cells")
        cells = check_items(raw.get("cells"), "batch.cells", "cell", self.config.batch_calls)
        yield BatchHead(len(cells), self.config.queue_timeout_s)
        yield from self._check_all(cells, lambda item, index: _check_cell(item, f"cells[{index}]", ("session",)))


def _check_number(raw: Mapping[str, Any], name: str, rule: NumberRule, where: str = "session") -> float:
    return check_number(raw[name], f"{where}.{name}", rule) if name in raw else rule.default


def _check_cell(raw: Json, where: str, more: tuple[str, ...] = ()) -> EncodedCall:
    """Check a cell and return it as a call. Raises `InvalidCall`."""
    check_fields(raw, {**CELL_FIELDS, **dict.fromkeys(more, "")}, where, "code")
    session: dict[str, Any] = {"op": "cell"}
    for name in ("state", "if_state"):
        if raw.get(name) is not None:
            session[name] = int(check_number(raw[name], f"{where}.{name}", STATE_RULE))
    if "session" in more:
        session["id"] = check_label(raw.get("session"), f"{where}.session")
    own = {name: value for name, value in raw.items() if name not in ("session", "state", "if_state")}
    call = check_call(own, where)
    if others := [name for name in call.get("limits", {}) if name not in CELL_LIMITS]:
        raise InvalidCall(f"{where}.limits.{others[0]}: is a limit of the session; give it to POST /v1/sessions")
    return {**call, "session": session}


def _find(request: web.Request, session_id: str) -> Session:
    """Return an open session of the request's tenant. Raises `HttpError` 404 or 410."""
    sessions, owner = request.app[DISPATCHER].sessions, request[TENANT]
    session, ended = sessions.get(session_id), sessions.ended(session_id)
    tenant = session.tenant if session is not None else ended[0] if ended is not None else ""
    if owner is not None and tenant != owner.name:
        session = ended = None
    if session is not None:
        return session
    if ended is not None:
        raise HttpError(410, f"session {session_id} has ended: {ended[1]}; open another session")
    raise HttpError(404, f"there is no session {session_id!r:.80}; POST /v1/sessions opens one")


def _check_state(session: Session, wanted: Mapping[str, Any]) -> None:
    """Raises `HttpError` 409 or 410 if a cell with these `state` and `if_state` cannot run now."""
    if session.is_running:
        raise HttpError(409, f"session {session.id} runs a cell already; wait for its result, or open another session")
    if wanted.get("if_state", session.head) != session.head:
        raise HttpError(409, f"if_state is {wanted['if_state']}, but the head is state {session.head}; no code has run")
    if wanted.get("state", session.head) not in session.states:
        kept = ", ".join(map(str, session.states))
        raise HttpError(410, f"state {wanted['state']} is no longer kept, only {kept}; open with a larger keep_states")


def _bind(batch: Batch, index: int, session: Session) -> None:
    """Make a call of a batch run in a session."""
    pending = batch.calls[index]
    assert pending.call is not None
    wanted = pending.call["session"]
    pending.call = {**pending.call, "session": {"state": session.head, **wanted, "id": session.id}}
    pending.session, batch.has_sessions = session, True
    pending.tenant = session.tenant or pending.tenant


async def open_session(request: web.Request) -> web.StreamResponse:
    dispatcher = request.app[DISPATCHER]
    if dispatcher.config.workers > 1:
        raise HttpError(404, "this server has no sessions, which belong to one worker; start it with --workers 1")
    form = SessionForm(dispatcher.config, request[TENANT])
    with request.app[exchange.BODY_READER].reservation(request) as reservation:
        body_type = await exchange.parse_body(request, reservation, form)
        batch, _ = form.parsed
        try:
            executor = dispatcher.place_session()
        except NodeError as error:
            raise HttpError(404, str(error)) from None
        now, times = monotonic(), form.head.extra
        session = Session(executor.number, times["idle_s"], now + times["max_s"], now)
        _bind(batch, 0, session)
        dispatcher.sessions.add(session)
        is_open = False
        try:
            await exchange.submit(request, batch)
            session.tenant = batch.calls[0].tenant if batch.calls else ""
            await exchange.wait_for_results(batch)
            result = batch.pop_result(0)
            is_open = result["status"] == Status.OK
            if not is_open:
                assert result["error"] is not None
                raise HttpError(503, f"the session was not opened: {result['error']['message']}", {"Retry-After": "1"})
        finally:
            if not is_open:
                dispatcher.close_session(session, "it was not opened")
                dispatcher.cancel(batch)
    content_type = codec.response_type(request, body_type, BODY_TYPES)
    return await exchange.respond(request, 200, [codec.encode(_describe(session), content_type)], content_type)


async def run_cell(request: web.Request) -> web.StreamResponse:
    session = _find(request, request.match_info["session"])
    form = CellForm(request.app[DISPATCHER].config, request[TENANT])

    def bind(batch: Batch) -> None:
        call = batch.calls[0].call
        assert call is not None
        _check_state(session, call["session"])
        _bind(batch, 0, session)

    async with exchange.AdmittedBatch(request, form, bind) as (batch, body_type, _):
        content_type = codec.response_type(request, body_type, BODY_TYPES)
        begun = await exchange.wait_with_heartbeats(request, batch, 200, content_type)
        result = batch.pop_result(0)
        if begun is None and result["error"] and result["error"]["type"] == UnavailableReason.SESSION_GONE:
            raise HttpError(410, result["error"]["message"])
        body = await codec.encode_result(result, batch.unread_bytes, content_type)
        return await exchange.respond(request, 200, body, content_type, begun)


async def run_cells(request: web.Request) -> web.StreamResponse:
    form = CellsForm(request.app[DISPATCHER].config, request[TENANT])

    def bind(batch: Batch) -> None:
        bound: set[str] = set()
        for index, pending in enumerate(batch.calls):
            assert pending.call is not None
            session = _find(request, pending.call["session"]["id"])
            if session.id in bound:
                raise HttpError(409, f"session {session.id} has two cells in this batch; send one after the other")
            bound.add(session.id)
            _check_state(session, pending.call["session"])
            _bind(batch, index, session)

    async with exchange.AdmittedBatch(request, form, bind) as (batch, body_type, status):
        content_type = codec.response_type(request, body_type, BATCH_TYPES)
        return await exchange.respond_with_results(request, batch, status, content_type)


async def show_session(request: web.Request) -> web.Response:
    return web.json_response(_describe(_find(request, request.match_info["session"])))


async def list_sessions(request: web.Request) -> web.Response:
    owner = request[TENANT]
    shown = (s for s in request.app[DISPATCHER].sessions if owner is None or s.tenant == owner.name)
    return web.json_response({"sessions": [_describe(session) for session in shown]})


async def roll_back(request: web.Request) -> web.Response:
    session = _find(request, request.match_info["session"])
    form = RollbackForm(request.app[DISPATCHER].config, request[TENANT])
    with request.app[exchange.BODY_READER].reservation(request) as reservation:
        await exchange.parse_body(request, reservation, form)
    _check_state(session, {"state": form.head.extra})
    session.head = form.head.extra
    return web.json_response(_describe(session))


async def close_session(request: web.Request) -> web.Response:
    try:
        session = _find(request, request.match_info["session"])
    except HttpError as error:
        if error.status != 410:
            raise
    else:
        request.app[DISPATCHER].close_session(session, "it was closed")
    return web.json_response({"status": "closed"})


def _describe(session: Session) -> dict[str, Any]:
    return {
        "session": session.id,
        "head": session.head,
        "states": session.states,
        "cells": session.cells,
        "is_running": session.is_running,
        "expires_in_s": round(max(0.0, session.expires_at() - monotonic()), 1),
    }


_SESSION: dict[str, Schema] = {
    "session": field_schema("string", "id of the session"),
    "head": field_schema("integer", "number of the state from which the next cell runs"),
    "states": field_schema("array", "numbers of the states that are kept", items={"type": "integer"}),
    "cells": field_schema("integer", "number of cells that have ended"),
    "is_running": field_schema("boolean", "whether a cell runs now"),
    "expires_in_s": field_schema("number", "seconds until the session ends if it gets no further cell"),
}
_EXAMPLE_SESSION = {
    "session": "5f0e2c9d8a7b46318e0d5c4b3a291807",
    "head": 1,
    "states": [0, 1],
    "cells": 1,
    "is_running": False,
    "expires_in_s": 600.0,
}
_EXAMPLE_RESULT = CellResult(
    "", Status.OK, value="42", exit_code=0, session=SessionState(head=2, states=(1, 2))
).encode()


def _schemas() -> dict[str, Schema]:
    call = call_schema()["properties"]
    limits = {name: number_schema(LIMIT_FIELDS[name], default=LIMIT_FIELDS[name].default) for name in CELL_LIMITS}
    cell = {name: call[name] for name in (*CELL_CALL_FIELDS, "deadline_s")}
    cell["limits"] = input_schema("limits of the cell; the others are limits of the session", limits)
    state = number_schema(STATE_RULE)
    cell |= {name: {**state, "description": CELL_FIELDS[name]} for name in ("state", "if_state")}
    rules = {"keep_states": KEEP_STATES_RULE, "idle_s": IDLE_RULE, "max_s": MAX_RULE}
    opened = {name: {**call[name], "description": doc} for name, doc in SESSION_FIELDS.items() if name in call}
    opened |= {name: number_schema(rule, default=rule.default) for name, rule in rules.items()}
    member = input_schema("A cell and its session.", {**cell, "session": _SESSION["session"]}, "code", "session")
    result = response_schema(CellResult)
    result["required"].remove("session")  # a cell that is malformed or unavailable has none
    return {
        "SessionState": response_schema(SessionState),
        "OpenSession": input_schema("A session to open.", opened),
        "Session": object_schema("An open session.", _SESSION),
        "Sessions": object_schema(
            "The open sessions.",
            {"sessions": field_schema("array", "those that the token reaches", items=reference("Session"))},
        ),
        "Cell": input_schema("Code to run in a session.", cell, "code"),
        "Cells": input_schema(
            "Cells of several sessions.",
            {"cells": field_schema("array", CELLS_FIELDS["cells"], minItems=1, items=member)},
            "cells",
        ),
        "Rollback": input_schema(
            "The state to return to.", {"state": {**state, "description": ROLLBACK_FIELDS["state"]}}, "state"
        ),
        "CellResult": result,
        "CellResults": list_of("CellResult", "one result for each cell, in the order of the cells"),
        "Closed": object_schema("The session is closed.", {"status": field_schema("string", "closed")}),
    }


_ERRORS = (*CALL_ERROR_STATUSES, 404, 409, 410)
_PATH = {"session": {**_SESSION["session"], "minLength": 1}}
_CELL_RESULT = dict.fromkeys(BODY_TYPES, "CellResult")
_CELL_RESULTS = {**dict.fromkeys(BODY_TYPES, "CellResults"), NDJSON: "Line", MSGPACK_STREAM: "Line"}

EXAMPLES: dict[str, Any] = {
    "OpenSession": {"limits": {"memory_mb": 512}, "keep_states": 4},
    "Session": _EXAMPLE_SESSION,
    "Sessions": {"sessions": [_EXAMPLE_SESSION]},
    "Cell": {"code": "x = 6\nx * 7", "limits": {"timeout_s": 4}},
    "Cells": {"cells": [{"session": _EXAMPLE_SESSION["session"], "code": "x + 1"}]},
    "Rollback": {"state": 1},
    "CellResult": _EXAMPLE_RESULT,
    "CellResults": {"results": [_EXAMPLE_RESULT]},
    "Closed": {"status": "closed"},
}

ROUTES = (
    Route(
        "POST",
        "/v1/sessions",
        open_session,
        "Open a session",
        dict.fromkeys(BODY_TYPES, "Session"),
        "OpenSession",
        BODY_TYPES,
        (*CALL_ERROR_STATUSES, 404),
        build_schemas=_schemas,
        examples=EXAMPLES,
    ),
    Route(
        "GET",
        "/v1/sessions",
        list_sessions,
        "List the open sessions",
        {JSON: "Sessions"},
        error_statuses=(401, 403),
        examples=EXAMPLES,
    ),
    Route(
        "POST",
        "/v1/sessions/cells",
        run_cells,
        "Run cells of several sessions: results in order, or streamed as they finish",
        _CELL_RESULTS,
        "Cells",
        BODY_TYPES,
        _ERRORS,
        invalid_schemas=_CELL_RESULTS,
        examples=EXAMPLES,
    ),
    Route(
        "POST",
        "/v1/sessions/{session}/cells",
        run_cell,
        "Run a cell in a session",
        _CELL_RESULT,
        "Cell",
        BODY_TYPES,
        _ERRORS,
        path_parameters=_PATH,
        examples=EXAMPLES,
    ),
    Route(
        "POST",
        "/v1/sessions/{session}/rollback",
        roll_back,
        "Return to an earlier state",
        {JSON: "Session"},
        "Rollback",
        BODY_TYPES,
        _ERRORS,
        path_parameters=_PATH,
        examples=EXAMPLES,
    ),
    Route(
        "GET",
        "/v1/sessions/{session}",
        show_session,
        "Show a session",
        {JSON: "Session"},
        error_statuses=(401, 403, 404, 410),
        path_parameters=_PATH,
        examples=EXAMPLES,
    ),
    Route(
        "DELETE",
        "/v1/sessions/{session}",
        close_session,
        "Close a session; also ok if it has ended",
        {JSON: "Closed"},
        error_statuses=(401, 403, 404),
        path_parameters=_PATH,
        examples=EXAMPLES,
    ),
)
