"""The routes of SandboxFusion (commit 469de08), so that its clients run unchanged: verl's `sandbox_fusion` reward and
tool, and the Python SDK `sandbox-fusion`.

- `/run_code` runs Python. `/run_jupyter` runs all its cells in one call (`guest/notebook.py`), since there are no
  sessions.
- If the program fails, the `status` of the response is `Failed`.
- If the service fails, the response is never `Failed`. If the client should send the request again, the response is
  HTTP 504, because verl retries no other HTTP status. In the other cases the `status` is `SandboxError`.
- Unknown fields are ignored, as SandboxFusion does.
"""

from __future__ import annotations

import glob
import json
import posixpath
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from sandbox.errors import InvalidCall, Overloaded
from sandbox.fields import check_paths, decode_bytes, shown
from sandbox.gateway.compat.fastapi_bodies import ping_route, route, validate
from sandbox.gateway.http import codec, exchange
from sandbox.gateway.http.auth import TENANT
from sandbox.gateway.http.codec import JSON, Json
from sandbox.gateway.http.errors import BodyError, HttpError
from sandbox.gateway.http.exchange import DISPATCHER
from sandbox.gateway.http.validation import BatchHead, CallsForm, CheckedCall, Item
from sandbox.guest.protocol import NOTEBOOK_MODULE
from sandbox.types import (
    DEFAULT_LIMITS,
    LIMIT_FIELDS,
    MAX_CODE_CHARS,
    Call,
    EncodedResult,
    Limits,
    Status,
    UnavailableReason,
)

if TYPE_CHECKING:
    from sandbox.gateway.compat.models import SandboxFusionCells, SandboxFusionCode

KERNEL_START_S = 10.0
"""Seconds that SandboxFusion adds to `total_timeout` for the start of its kernel."""
RUN_CODE_OUTPUT_KB = 1024
"""Maximum KiB of stdout, and of stderr, as in SandboxFusion."""
NOTEBOOK_OUTPUT_KB = 8192
"""Maximum KiB of the encoded results of all cells together."""
MAX_CELL_VALUES = 50_000
"""Maximum number of JSON values in the results of all cells. They are counted as the characters `[`, `{` and `,`.
Hostile code can write millions of values, which would take a second to decode."""
ERRORS_WITH_504 = frozenset({UnavailableReason.STOPPED, UnavailableReason.NODE_ERROR, UnavailableReason.QUEUE_TIMEOUT})
"""Reasons of `unavailable` for which the response is 504, so that the client sends the request again."""

_ESCAPES = str.maketrans({"\\": r"\\", "'": r"\'", "\r": r"\r", "\0": r"\0"})
"""Escapes for a text between triple quotes. Line breaks stay."""

Response = dict[str, Any]


class UnsupportedLanguage(BodyError):
    """A request for a language that only SandboxFusion itself runs."""


class RunCodeForm(CallsForm):
    """The body of /run_code. `BatchHead.extra` is the result of `_paths_to_fetch`."""

    def check(self, raw: Json) -> Iterator[Item]:
        """Check a decoded body and yield its items. Raises `MalformedBody`, `InvalidCall` or `UnsupportedLanguage`."""
        from sandbox.gateway.compat.models import SandboxFusionCode  # here, because importing pydantic takes 0.2 s

        body = validate(SandboxFusionCode, raw)
        fetch_paths = _paths_to_fetch(body)
        # Before the check of the language: a malformed field is HTTP 422, whatever the language is.
        call = _build_call(body, fetch_paths, body.code, body.stdin or "", body.run_timeout, RUN_CODE_OUTPUT_KB)
        if body.language != "python":
            raise UnsupportedLanguage(f"language {body.language!r} is not supported: this server runs python only")
        yield BatchHead(1, self.config.queue_timeout_s, extra=fetch_paths)
        yield CheckedCall(0, call.encode(binary=True), "")  # the only call: it has the index 0 and no id

    def build_response(self, result: EncodedResult) -> Response:
        """Return the response for the result of the call."""
        is_ok, files = result["status"] == Status.OK.value, _returned_files(result, self.head.extra)
        run_result = _process_result(result, result["stdout"], result["stderr"])
        return _response("Success" if is_ok else "Failed", files=files, compile_result=None, run_result=run_result)


class RunJupyterForm(CallsForm):
    """The body of /run_jupyter. `BatchHead.extra` has two items: the result of `_paths_to_fetch`, and the number of
    cells."""

    def check(self, raw: Json) -> Iterator[Item]:
        """Check a decoded body and yield its items. Raises `MalformedBody` or `InvalidCall`."""
        from sandbox.gateway.compat.models import SandboxFusionCells  # here, because importing pydantic takes 0.2 s

        body = validate(SandboxFusionCells, raw)
        if (total_chars := sum(map(len, body.cells))) > MAX_CODE_CHARS:
            raise InvalidCall(f"cells: expected at most {MAX_CODE_CHARS} characters together, got {total_chars}")
        fetch_paths = _paths_to_fetch(body)
        code = f"__import__('{NOTEBOOK_MODULE}').run({','.join(map(_literal, body.cells))})"
        call = _build_call(body, fetch_paths, code, "", body.total_timeout + KERNEL_START_S, NOTEBOOK_OUTPUT_KB)
        yield BatchHead(1, self.config.queue_timeout_s, extra=[fetch_paths, len(body.cells)])
        yield CheckedCall(0, call.encode(binary=True), "")  # the only call: it has the index 0 and no id

    def build_response(self, result: EncodedResult) -> Response:
        """Return the response for the result of the call."""
        fetch_paths, num_cells = self.head.extra
        cells, files = decode_cells(result["stdout"], num_cells), _returned_files(result, fetch_paths)
        is_complete = result["status"] == Status.OK.value and len(cells) == num_cells
        status = "Success" if is_complete else "Failed"
        return _response(status, files=files, driver=_process_result(result, "", ""), cells=cells)


async def _run(request: web.Request, make_form: type[RunCodeForm | RunJupyterForm]) -> web.StreamResponse:
    """Run the call of a request. Raises `HttpError` 504 if the service failed and the client should try again."""
    form = make_form(request.app[DISPATCHER].config, request[TENANT])
    try:
        async with exchange.AdmittedBatch(request, form) as (batch, _, _):
            await exchange.wait_for_results(batch)
            result = batch.pop_result(0)
            response = _unavailable(result) or form.build_response(result)
            return await exchange.respond(request, 200, await codec.encode_in_steps(response, JSON), JSON)
    except UnsupportedLanguage as error:
        return await exchange.respond(request, 200, [codec.encode(_sandbox_error(str(error)), JSON)], JSON)
    except Overloaded as error:
        raise HttpError(504, str(error), {"Retry-After": "1"}) from None
    except HttpError as error:
        if error.status != 429:
            raise
        raise HttpError(504, str(error), error.headers) from None


def _literal(text: str) -> str:
    """Return a Python literal whose value is the text followed by a line break. Each line of the
    text is a line of the literal, because the executor finds imports only at the start of a line."""
    if not text.isascii():  # a literal cannot contain lone surrogates
        text = text.encode("utf-8", "replace").decode()
    return f"'''\\\n{text.translate(_ESCAPES)}\n'''"


def _build_call(
    body: SandboxFusionCode | SandboxFusionCells,
    fetch_paths: Mapping[str, str],
    code: str,
    stdin: str,
    timeout_s: float,
    output_kb: int,
) -> Call:
    """Return the call of a request. Raises `InvalidCall`."""
    memory_mb = body.memory_limit_MB if body.memory_limit_MB > 0 else DEFAULT_LIMITS.memory_mb
    limits = Limits(
        timeout_s=min(timeout_s, LIMIT_FIELDS["timeout_s"].high),
        memory_mb=max(memory_mb, int(LIMIT_FIELDS["memory_mb"].low)),
        output_kb=output_kb,
    )
    return_files = tuple(map(glob.escape, dict.fromkeys(fetch_paths.values())))
    # Without `echo`, since no field of the response has the value of the last expression.
    return Call(code, stdin, _files(body.files), return_files, limits, echo=False)


def _files(files: Mapping[str, str | None]) -> dict[str, bytes]:
    """Return the files to create. A file whose content is None is skipped, as in SandboxFusion. Base64 text may have
    line breaks."""
    return {
        _normal(path): decode_bytes(content.replace("\r", "").replace("\n", ""), f"files[{shown(path)}]")
        for path, content in files.items()
        if content is not None
    }


def _paths_to_fetch(body: SandboxFusionCode | SandboxFusionCells) -> dict[str, str]:
    """Return the path of the file for each name in `fetch_files`. SandboxFusion takes a name as it is. Without
    `glob.escape`, a name with `*`, `?` or `[` would be a pattern here."""
    fetch_paths = {name: _normal(name) for name in body.fetch_files}
    check_paths([glob.escape(path) for path in fetch_paths.values()], "fetch_files")
    return fetch_paths


def _normal(path: str) -> str:
    """Return a path without '.' parts and double slashes, and with 'a/..' removed. If the result is absolute or begins
    with '..', `Call` refuses it."""
    return posixpath.normpath(path) if path else path


def _unavailable(result: EncodedResult) -> Response | None:
    """Return the response if the service failed, else None. Raises `HttpError` 504 for `ERRORS_WITH_504`."""
    if result["status"] != Status.UNAVAILABLE.value:
        return None
    error = result["error"]
    assert error is not None
    message = f"{error['type']}: {error['message']}"
    if error["type"] in ERRORS_WITH_504:
        raise HttpError(504, message, {"Retry-After": "1"})
    return _sandbox_error(message)


def _sandbox_error(message: str) -> Response:
    """Return the response of a request without a result. It fits both routes."""
    return _response("SandboxError", message, compile_result=None, run_result=None, driver=None, cells=[])


def _response(status: str, message: str = "", files: Mapping[str, bytes] | None = None, **results: Any) -> Response:
    return {"status": status, "message": message, **results, "executor_pod_name": None, "files": files or {}}


def _process_result(result: EncodedResult, stdout: str, stderr: str) -> Response:
    """Return how the process of a call ended, in the fields of SandboxFusion."""
    is_timeout = result["status"] == Status.TIMEOUT.value
    return {
        "status": "TimeLimitExceeded" if is_timeout else "Finished",
        "execution_time": round(result["usage"]["run_ms"] / 1000, 6),
        "return_code": None if is_timeout else _return_code(result),
        "stdout": stdout,
        "stderr": stderr,
    }


def _return_code(result: EncodedResult) -> int:
    """Return the exit code, or the negative number of the signal that ended the process. The result is 0 only for a
    call with the status `ok`."""
    if result["signal"] is not None:
        return -result["signal"]
    is_ok = result["status"] == Status.OK.value
    return result["exit_code"] or (0 if is_ok else 1)


def _returned_files(result: EncodedResult, fetch_paths: Mapping[str, str]) -> dict[str, bytes]:
    files = result["files"]
    return {name: files[path] for name, path in fetch_paths.items() if path in files}


def decode_cells(stdout: str, num_cells: int) -> list[Response]:
    """Return the results of the cells that have ended. `guest/notebook.py` writes one line of `stdout` for each cell.
    Hostile code can write other lines. So a malformed line and all lines after it are ignored. The same holds for a
    line that brings the number of values above `MAX_CELL_VALUES`."""
    from sandbox.gateway.compat.models import SandboxFusionCell  # here, because importing pydantic takes 0.2 s

    cells: list[Response] = []
    values_left = MAX_CELL_VALUES
    for line in stdout.split("\n", num_cells)[:num_cells]:
        values_left -= sum(map(line.count, "[{,"))
        if values_left < 0:
            break
        try:
            cells.append(SandboxFusionCell.model_validate(json.loads(line)).model_dump())
        except (ValueError, RecursionError):
            break
    return cells


_FINISHED = {"status": "Finished", "execution_time": 0.0021, "return_code": 0}
EXAMPLES: Mapping[str, Any] = {
    "SandboxFusionCode": {"code": "print(input())", "language": "python", "stdin": "hi", "run_timeout": 5},
    "SandboxFusionRun": _response(
        "Success", compile_result=None, run_result={**_FINISHED, "stdout": "hi\n", "stderr": ""}
    ),
    "SandboxFusionCells": {"cells": ["x = 20", "x + 1"]},
    "SandboxFusionNotebook": _response(
        "Success",
        driver={**_FINISHED, "stdout": "", "stderr": ""},
        cells=[
            {"stdout": "", "stderr": "", "display": [], "error": []},
            {"stdout": "", "stderr": "", "display": [{"text/plain": "21"}], "error": []},
        ],
    ),
}
"""Examples by the name of their schema."""


ROUTES = (
    route(
        "/run_code",
        partial(_run, make_form=RunCodeForm),
        "Run Python, with the interface of SandboxFusion",
        "SandboxFusionCode",
        "SandboxFusionRun",
        (504,),
        EXAMPLES,
    ),
    route(
        "/run_jupyter",
        partial(_run, make_form=RunJupyterForm),
        "Run the cells of a notebook in one call, with the interface of SandboxFusion",
        "SandboxFusionCells",
        "SandboxFusionNotebook",
        (504,),
        EXAMPLES,
    ),
    ping_route("/v1/ping", "Liveness, as SandboxFusion answers it"),
)
