"""The routes of SandboxFusion (commit 469de08), so that its clients run unchanged: verl's `sandbox_fusion` reward and
tool, and the Python SDK `sandbox-fusion`.

- `/run_code` runs Python. `/run_jupyter` runs all its cells in one call (`guest/notebook.py`), since there are no
  sessions.
- A program that fails is `Failed`. A failure of the service is never `Failed`. It is HTTP 504 if the client should send
  the request again, because verl retries no other status; else it is the status `SandboxError`.
- Unknown fields are ignored, as SandboxFusion does.
"""

from __future__ import annotations

import glob
import json
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web

from sandbox.errors import InvalidCall, Overloaded
from sandbox.fields import (
    NumberRule,
    check_mapping,
    check_number,
    check_paths,
    check_text,
    decode_bytes,
    shown,
)
from sandbox.gateway.compat.sandbox_fusion_schemas import EXAMPLES, LANGUAGES, MAX_CELLS, MEMORY_MB, SCHEMAS, SECONDS
from sandbox.gateway.http import codec, exchange
from sandbox.gateway.http.auth import TENANT
from sandbox.gateway.http.codec import JSON, Json
from sandbox.gateway.http.errors import BodyError, HttpError
from sandbox.gateway.http.exchange import DISPATCHER
from sandbox.gateway.http.openapi import Route
from sandbox.gateway.http.validation import BatchHead, CallsForm, CheckedCall, Item
from sandbox.guest.protocol import MAX_FILES, MAX_PATH_BYTES, NOTEBOOK_MODULE
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

KERNEL_START_S = 10.0
"""Seconds that SandboxFusion adds to `total_timeout` for the start of its kernel."""
RUN_CODE_OUTPUT_KB = 1024
"""KiB of stdout and of stderr that SandboxFusion reads."""
NOTEBOOK_OUTPUT_KB = 8192
"""KiB of the results of all cells, encoded."""
MAX_CELL_VALUES = 50_000
"""Maximum of JSON values in the results of all cells, counted as `[`, `{` and `,`. Hostile code can write millions,
which would take a second to decode."""
ERRORS_WITH_504 = frozenset({UnavailableReason.STOPPED, UnavailableReason.NODE_ERROR, UnavailableReason.QUEUE_TIMEOUT})
"""Reasons of `unavailable` for which the response is 504, so that the client sends the request again."""

_LITERAL = str.maketrans({"\\": r"\\", "'": r"\'", "\r": r"\r", "\0": r"\0"})
"""Escapes for a text between triple quotes. Line breaks stay."""

Response = dict[str, Any]


class UnsupportedLanguage(BodyError):
    """A request for a language that only SandboxFusion itself runs."""


class RunCodeForm(CallsForm):
    """The body of /run_code. The `extra` of the head is the paths of the files to return."""

    def check(self, raw: Json) -> Iterator[Item]:
        """Yield the items of a decoded body. Raises `InvalidCall` or `UnsupportedLanguage`."""
        raw = check_mapping(raw, "request")
        if "code" not in raw:
            raise InvalidCall("code: expected Python source as text, but the field is missing")
        language = raw.get("language", "python")
        if language not in LANGUAGES:
            raise InvalidCall(f"language: expected one of {', '.join(LANGUAGES)}, got {shown(language)}")
        check_number(raw.get("compile_timeout", 10), "compile_timeout", SECONDS)
        limits = _limits(raw, "run_timeout", 10.0, RUN_CODE_OUTPUT_KB)
        fetched = _fetched(raw)
        stdin = raw.get("stdin")
        call = Call(
            code=raw["code"],
            stdin="" if stdin is None else stdin,
            files=_files(raw),
            return_files=_return_files(fetched),
            limits=limits,
            echo=False,
        )
        if language != "python":
            raise UnsupportedLanguage(f"language {language!r} is not supported: this server runs python only")
        yield BatchHead(1, self.config.queue_timeout_s, extra=fetched)
        yield CheckedCall(0, call, "")

    def build_response(self, result: EncodedResult) -> Response:
        """Return the response for the result of the call."""
        return {
            "status": "Success" if result["status"] == Status.OK.value else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": _command(result, result["stdout"], result["stderr"]),
            "executor_pod_name": None,
            "files": _returned_files(result, self.head.extra),
        }


class RunJupyterForm(CallsForm):
    """The body of /run_jupyter. The `extra` of the head is the paths of the files to return, and the number of
    cells."""

    def check(self, raw: Json) -> Iterator[Item]:
        """Yield the items of a decoded body. Raises `InvalidCall`."""
        raw = check_mapping(raw, "request")
        cells = raw.get("cells")
        if not isinstance(cells, list) or len(cells) > MAX_CELLS:
            raise InvalidCall(f"cells: expected a list of at most {MAX_CELLS} Python sources, got {shown(cells)}")
        for index, cell in enumerate(cells):
            check_text(cell, f"cells[{index}]", MAX_CODE_CHARS)
        if (total_chars := sum(map(len, cells))) > MAX_CODE_CHARS:
            raise InvalidCall(f"cells: expected at most {MAX_CODE_CHARS} characters together, got {total_chars}")
        if raw.get("kernel", "python3") != "python3":
            raise InvalidCall(f"kernel: expected 'python3', got {shown(raw['kernel'])}")
        check_number(raw.get("cell_timeout", 0), "cell_timeout", NumberRule(0, SECONDS.high, whole=False))
        limits = _limits(raw, "total_timeout", 45.0, NOTEBOOK_OUTPUT_KB, extra_s=KERNEL_START_S)
        fetched = _fetched(raw)
        call = Call(
            code=f"__import__('{NOTEBOOK_MODULE}').run({','.join(map(_literal, cells))})",
            files=_files(raw),
            return_files=_return_files(fetched),
            limits=limits,
            echo=False,
        )
        yield BatchHead(1, self.config.queue_timeout_s, extra=[fetched, len(cells)])
        yield CheckedCall(0, call, "")

    def build_response(self, result: EncodedResult) -> Response:
        """Return the response for the result of the call."""
        fetched, num_cells = self.head.extra
        cells = decode_cells(result["stdout"], num_cells)
        is_complete = result["status"] == Status.OK.value and len(cells) == num_cells
        return {
            "status": "Success" if is_complete else "Failed",
            "message": "",
            "driver": _command(result, "", ""),
            "cells": cells,
            "executor_pod_name": None,
            "files": _returned_files(result, fetched),
        }


async def run_code(request: web.Request) -> web.StreamResponse:
    return await _run(request, RunCodeForm(request.app[DISPATCHER].config, request.get(TENANT)))


async def run_jupyter(request: web.Request) -> web.StreamResponse:
    return await _run(request, RunJupyterForm(request.app[DISPATCHER].config, request.get(TENANT)))


async def ping(request: web.Request) -> web.Response:
    return web.json_response("pong")


async def _run(request: web.Request, form: RunCodeForm | RunJupyterForm) -> web.StreamResponse:
    """Run the call of a request. Raises `HttpError` 504 if the service failed and the client should try again."""
    try:
        async with exchange.admitted_batch(request, form) as (batch, _, _):
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
    """Return a Python literal for a text plus a line break. Each line of the text stays a line of its own, because the
    executor looks for imports line by line."""
    if not text.isascii():  # a literal cannot contain lone surrogates
        text = text.encode("utf-8", "replace").decode()
    return f"'''\\\n{text.translate(_LITERAL)}\n'''"


def _limits(
    raw: Mapping[str, Json], timeout_field: str, default_s: float, output_kb: int, extra_s: float = 0.0
) -> Limits:
    timeout_s = check_number(raw.get(timeout_field, default_s), timeout_field, SECONDS) + extra_s
    memory_mb = int(check_number(raw.get("memory_limit_MB", -1), "memory_limit_MB", MEMORY_MB))
    if memory_mb <= 0:
        memory_mb = DEFAULT_LIMITS.memory_mb
    memory_mb = max(memory_mb, int(LIMIT_FIELDS["memory_mb"].low))
    return Limits(timeout_s=min(timeout_s, SECONDS.high), memory_mb=memory_mb, output_kb=output_kb)


def _files(raw: Mapping[str, Json]) -> dict[str, bytes]:
    """Return the files to create. Like SandboxFusion, skip a file without content."""
    files = check_mapping(raw.get("files", {}), "files")
    if len(files) > MAX_FILES:
        raise InvalidCall(f"files: expected at most {MAX_FILES} files, got {len(files)}")
    return {_normal(path): _decode_base64(content, path) for path, content in files.items() if content is not None}


def _decode_base64(content: Json, path: str) -> bytes:
    """Decode base64 text, which may contain line breaks."""
    if isinstance(content, str) and "\n" in content:
        content = content.replace("\r", "").replace("\n", "")
    return decode_bytes(content, f"files[{shown(path)}]")


def _fetched(raw: Mapping[str, Json]) -> dict[str, str]:
    """Return the path of the file for each name in `fetch_files`. Names are not patterns in SandboxFusion."""
    names = raw.get("fetch_files", [])
    if not isinstance(names, list) or len(names) > MAX_FILES:
        raise InvalidCall(f"fetch_files: expected a list of at most {MAX_FILES} relative paths, got {shown(names)}")
    paths = [_normal(name) for name in names]
    check_paths([_escaped(path) for path in paths], "fetch_files")
    return dict(zip(names, paths, strict=True))


def _return_files(fetched: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(map(_escaped, dict.fromkeys(fetched.values())))


def _escaped(path: Json) -> Json:
    """Return a pattern that matches this path only."""
    return glob.escape(path) if _is_short(path) else path


def _normal(path: Json) -> Json:
    """Return a path without '.' parts and double slashes. `Call` refuses all other paths that are not relative and
    clean."""
    return posixpath.normpath(path) if path and _is_short(path) else path


def _is_short(path: Json) -> bool:
    """Return whether a path is text of a length that may be allowed. The check of the call refuses all others."""
    return isinstance(path, str) and len(path) <= MAX_PATH_BYTES


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
    return {
        "status": "SandboxError",
        "message": message,
        "compile_result": None,
        "run_result": None,
        "driver": None,
        "cells": [],
        "executor_pod_name": None,
        "files": {},
    }


def _command(result: EncodedResult, stdout: str, stderr: str) -> Response:
    """Return how a process ended, in the fields of SandboxFusion."""
    is_timeout = result["status"] == Status.TIMEOUT.value
    return {
        "status": "TimeLimitExceeded" if is_timeout else "Finished",
        "execution_time": round(result["usage"]["run_ms"] / 1000, 6),
        "return_code": None if is_timeout else _return_code(result),
        "stdout": stdout,
        "stderr": stderr,
    }


def _return_code(result: EncodedResult) -> int:
    """Return the exit code, or the negative number of the signal. Only a call with the status `ok` has 0."""
    if result["signal"] is not None:
        return -result["signal"]
    is_ok = result["status"] == Status.OK.value
    return result["exit_code"] or (0 if is_ok else 1)


def _returned_files(result: EncodedResult, fetched: Mapping[str, str]) -> dict[str, bytes]:
    files = result["files"]
    return {name: files[path] for name, path in fetched.items() if path in files}


def decode_cells(stdout: str, num_cells: int) -> list[Response]:
    """Return the results of the cells that have ended, from the lines that `guest/notebook.py` writes. Hostile code can
    write any line; the results end before the first line that is malformed, or that exceeds `MAX_CELL_VALUES`."""
    cells: list[Response] = []
    values_left = MAX_CELL_VALUES
    for line in stdout.split("\n", num_cells)[:num_cells]:
        values_left -= sum(map(line.count, "[{,"))
        if values_left < 0:
            break
        try:
            cell = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not _is_cell(cell):
            break
        cells.append({name: cell[name] for name in ("stdout", "stderr", "display", "error")})
    return cells


def _is_cell(cell: Json) -> bool:
    if not isinstance(cell, dict) or not cell.keys() >= {"stdout", "stderr", "display", "error"}:
        return False
    bundles, errors = cell["display"], cell["error"]
    return (
        _are_texts([cell["stdout"], cell["stderr"]])
        and isinstance(bundles, list)
        and all(isinstance(bundle, dict) and _are_texts(bundle.values()) for bundle in bundles)
        and isinstance(errors, list)
        and all(isinstance(error, dict) and error.keys() == {"ename", "evalue", "traceback"} for error in errors)
        and all(_are_texts([error["ename"], error["evalue"]]) for error in errors)
        and all(isinstance(error["traceback"], list) and _are_texts(error["traceback"]) for error in errors)
    )


def _are_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


_ERROR_STATUSES = (400, 401, 403, 408, 413, 415, 504)

ROUTES = (
    Route(
        "POST",
        "/run_code",
        run_code,
        "Run Python, with the interface of SandboxFusion",
        {JSON: "SandboxFusionRun"},
        "SandboxFusionCode",
        (JSON,),
        _ERROR_STATUSES,
        schemas=SCHEMAS,
        examples=EXAMPLES,
    ),
    Route(
        "POST",
        "/run_jupyter",
        run_jupyter,
        "Run the cells of a notebook in one call, with the interface of SandboxFusion",
        {JSON: "SandboxFusionNotebook"},
        "SandboxFusionCells",
        (JSON,),
        _ERROR_STATUSES,
        examples=EXAMPLES,
    ),
    Route("GET", "/v1/ping", ping, "Liveness, as SandboxFusion answers it", {JSON: None}, error_statuses=(401, 403)),
)
