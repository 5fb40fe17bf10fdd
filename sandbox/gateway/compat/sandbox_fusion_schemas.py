"""The OpenAPI schemas of SandboxFusion's routes, and the rules of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandbox.fields import NumberRule
from sandbox.gateway.http.openapi import Schema
from sandbox.types import DEFAULT_LIMITS, LIMIT_FIELDS

LANGUAGES = (
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda",
    "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog",
    "python_gpu", "lean", "swift", "racket", "python2", "gtest", "react", "javascript",
)  # fmt: skip
"""Languages of SandboxFusion, its SDK 0.3.7 and ScaleBox. Only `python` runs here; others get `SandboxError`."""
MAX_CELLS = 4096
"""Cells of a notebook. The results of 8,333 cells reach `sandbox_fusion.MAX_CELL_VALUES` whatever the cells do."""
SECONDS = LIMIT_FIELDS["timeout_s"]
MEMORY_MB = NumberRule(-1e9, 1e9, default=-1)


def _field(json_type: str, description: str, **rules: Any) -> Schema:
    return {"type": json_type, "description": description, **rules}


def _object(description: str, required: str, properties: Schema) -> Schema:
    return _field("object", description, required=required.split(), properties=properties)


def _seconds(description: str, default: float, minimum: float = SECONDS.low) -> Schema:
    return _field("number", description, minimum=minimum, maximum=SECONDS.high, default=default)


def _response(description: str, properties: Schema) -> Schema:
    status = _field(
        "string",
        "Failed: a time-out, or an exit code other than 0. SandboxError: the service did not run the code",
        enum=["Success", "Failed", "SandboxError"],
    )
    properties = {
        "status": status,
        "message": _field("string", "the reason of SandboxError; else empty"),
        **properties,
        "executor_pod_name": _field("null", "always null"),
        "files": _field("object", "returned files by name, in base64", additionalProperties={"type": "string"}),
    }
    return _object(description, " ".join(properties), properties)


_TEXT = {"type": "string"}
_NULL: Schema = {"type": "null"}
_COMMAND = {"anyOf": [_NULL, {"$ref": "#/components/schemas/SandboxFusionCommand"}]}
_COMMON_REQUEST = {
    "memory_limit_MB": _field(
        "integer",
        f"MiB beyond the interpreter's own memory; 0 or less: {DEFAULT_LIMITS.memory_mb}",
        minimum=int(MEMORY_MB.low),
        maximum=int(MEMORY_MB.high),
        default=-1,
    ),
    "files": _field(
        "object",
        "files to create: relative path to base64 text; null: no file",
        additionalProperties={"anyOf": [_NULL, _TEXT]},
        default={},
    ),
    "fetch_files": _field("array", "relative paths of files to return after the run", items=_TEXT, default=[]),
}
_CODE = {
    "code": _field("string", "Python source, run as a script"),
    "language": _field("string", "only python runs", enum=list(LANGUAGES), default="python"),
    "run_timeout": _seconds("seconds of virtual time", 10.0),
    "compile_timeout": _seconds("ignored: Python is not compiled", 10.0),
    "stdin": {"anyOf": [_NULL, _TEXT], "description": "text on standard input", "default": None},
    **_COMMON_REQUEST,
}
_CELLS = {
    "cells": _field("array", "Python sources, run in one namespace", items=_TEXT, maxItems=MAX_CELLS),
    "cell_timeout": _seconds("ignored, as in SandboxFusion", 0, minimum=0),
    "total_timeout": _seconds("seconds of virtual time for all cells; SandboxFusion and this server add 10", 45.0),
    "kernel": _field("string", "the only kernel", enum=["python3"], default="python3"),
    **_COMMON_REQUEST,
}
_COMMAND_FIELDS = {
    "status": _field("string", "how the process ended", enum=["Finished", "TimeLimitExceeded"]),
    "execution_time": _field("number", "seconds of wall time"),
    "return_code": {
        "anyOf": [_NULL, {"type": "integer"}],
        "description": "the exit code, or the negative number of the signal; null after a time-out",
    },
    "stdout": _field("string", "text written to standard output"),
    "stderr": _field("string", "text written to standard error"),
}
_ERROR_FIELDS = {
    "ename": _field("string", "name of the exception's type"),
    "evalue": _field("string", "text of the exception"),
    "traceback": _field("array", "the traceback as Python prints it", items=_TEXT),
}
_BUNDLE = _field("object", "one displayed value: text by MIME type; images in base64", additionalProperties=_TEXT)
_CELL_FIELDS = {
    "stdout": _field("string", "text written to standard output"),
    "stderr": _field("string", "text written to standard error"),
    "display": _field("array", "what the cell displayed", items=_BUNDLE),
    "error": _field(
        "array", "the exception that ended the cell", items=_object("", " ".join(_ERROR_FIELDS), _ERROR_FIELDS)
    ),
}
SCHEMAS: Mapping[str, Schema] = {
    "SandboxFusionCode": _object("A program for SandboxFusion. Other fields are ignored.", "code", _CODE),
    "SandboxFusionCells": _object("A notebook for SandboxFusion. Other fields are ignored.", "cells", _CELLS),
    "SandboxFusionCommand": _object("How a process ended.", " ".join(_COMMAND_FIELDS), _COMMAND_FIELDS),
    "SandboxFusionCell": _object("The result of a cell.", " ".join(_CELL_FIELDS), _CELL_FIELDS),
    "SandboxFusionRun": _response(
        "The result of a program.",
        {
            "compile_result": _field("null", "always null: Python is not compiled"),
            "run_result": {**_COMMAND, "description": "the end of the program; null with SandboxError"},
        },
    ),
    "SandboxFusionNotebook": _response(
        "The results of a notebook.",
        {
            "driver": {**_COMMAND, "description": "the end of the process of all cells; null with SandboxError"},
            "cells": _field(
                "array",
                "the results of the cells that ended, in their order",
                items={"$ref": "#/components/schemas/SandboxFusionCell"},
            ),
        },
    ),
}

_FINISHED = {"status": "Finished", "execution_time": 0.0021, "return_code": 0}
_END: Schema = {"executor_pod_name": None, "files": {}}
EXAMPLES: Mapping[str, Any] = {
    "SandboxFusionCode": {"code": "print(input())", "language": "python", "stdin": "hi", "run_timeout": 5},
    "SandboxFusionRun": {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {**_FINISHED, "stdout": "hi\n", "stderr": ""},
        **_END,
    },
    "SandboxFusionCells": {"cells": ["x = 20", "x + 1"]},
    "SandboxFusionNotebook": {
        "status": "Success",
        "message": "",
        "driver": {**_FINISHED, "stdout": "", "stderr": ""},
        "cells": [
            {"stdout": "", "stderr": "", "display": [], "error": []},
            {"stdout": "", "stderr": "", "display": [{"text/plain": "21"}], "error": []},
        ],
        **_END,
    },
}
"""Examples by the name of their schema."""
