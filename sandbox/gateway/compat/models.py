"""The bodies and responses of code-judge and SandboxFusion as pydantic models. `fastapi_bodies` checks bodies with
them, and the OpenAPI document has their schemas. Import this module only inside functions for these two purposes:
importing pydantic and building the models take 0.2 s of CPU time and 8 MiB.

- The fields of a request are in the same order as in the other service, because errors are listed in this order.
- Unknown fields are ignored, as in the other service.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, SkipValidation
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from pydantic_core import PydanticKnownError

from sandbox.gateway.compat.code_judge import MAX_TEXT_CHARS
from sandbox.gateway.compat.fastapi_bodies import MAX_ERRORS
from sandbox.gateway.http.openapi import Schema
from sandbox.guest.protocol import MAX_FILES, MAX_PATH_BYTES
from sandbox.types import DEFAULT_LIMITS, LIMIT_FIELDS, MAX_CODE_CHARS, MAX_STDIN_CHARS

MAX_SUB_ID_CHARS = 1024
MAX_CELLS = 4096
"""Maximum number of cells of a notebook. With 8,333 cells, even results without any content would have
`sandbox_fusion.MAX_CELL_VALUES` values."""
SECONDS = LIMIT_FIELDS["timeout_s"]
Language = Literal[
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda",
    "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog",
    "python_gpu", "lean", "swift", "racket", "python2", "gtest", "react", "javascript",
]  # fmt: skip
"""Languages of SandboxFusion, its SDK 0.3.7 and ScaleBox. Only `python` runs here; others get `SandboxError`."""


def _max_chars(maximum: int) -> AfterValidator:
    """Return a check of the length of a text. The `max_length` of pydantic would also refuse lone surrogates. They are
    accepted here, because they are an error of the code and not of the request."""

    def check(text: str) -> str:
        if len(text) > maximum:
            raise PydanticKnownError("string_too_long", {"max_length": maximum})
        return text

    return AfterValidator(check)


def _number(value: Any) -> Any:
    """Refuse what is no number in JSON. Pydantic then refuses a number that is not whole, and accepts 5.0."""
    if isinstance(value, (bool, str, bytes)):
        raise PydanticKnownError("int_type")
    return value


SubId = Annotated[str, _max_chars(MAX_SUB_ID_CHARS), Field(json_schema_extra={"maxLength": MAX_SUB_ID_CHARS})]
Stdin = Annotated[str, _max_chars(MAX_STDIN_CHARS)]
Excerpt = Annotated[
    str | None,
    Field(
        description=f"the first {MAX_TEXT_CHARS} characters that the program wrote; null if it has no result",
        json_schema_extra={"maxLength": MAX_TEXT_CHARS},
    ),
]
Seconds = Annotated[float, Field(ge=SECONDS.low, le=SECONDS.high, allow_inf_nan=False)]
Path = Annotated[str, _max_chars(MAX_PATH_BYTES)]
Files = Annotated[
    dict[Path, str | None],
    Field(max_length=MAX_FILES, description="files to create: relative path to base64 text; null: no file"),
]
FetchFiles = Annotated[
    list[Path], Field(max_length=MAX_FILES, description="relative paths of files to return after the run")
]
MemoryMb = Annotated[
    int,
    Field(
        strict=False,
        ge=-(10**9),
        le=10**9,
        description=f"MiB beyond the interpreter's own memory; 0 or less: {DEFAULT_LIMITS.memory_mb}",
    ),
    BeforeValidator(_number),  # after `Field`: before it, the schema would lack the bounds
]


class Model(BaseModel, strict=True):
    """The base of the models whose schemas are part of the OpenAPI document. Other than in FastAPI, the types of JSON
    are not converted: the text "10" is no number."""


class MalformedError(Model):
    """An error in a body, described as FastAPI does."""

    type: str = Field(description="kind of the error")
    loc: list[str | int] = Field(description="path to the wrong value: body, then names and indexes")
    msg: str = Field(description="what was expected")
    input: Any = Field(description="the wrong value; a short description if it is large")
    ctx: dict[str, Any] = Field({}, description="what the message names, such as a maximum")


class Malformed(Model):
    """A malformed body, described as FastAPI does."""

    detail: list[MalformedError] = Field(description=f"the first {MAX_ERRORS} errors")


class CodeJudgeSubmission(Model):
    """A program of code-judge. Other fields are ignored."""

    sub_id: SubId | None = Field(None, description="returned with the result; a UUID if it is missing")
    type: Literal["python"] = Field(description="the language")
    options: dict[str, str] | None = Field(None, description="ignored")
    solution: Annotated[str, _max_chars(MAX_CODE_CHARS)] = Field(description="Python source, run as a script")
    input: Stdin | None = Field(None, description="text on standard input")
    expected_output: Stdin | None = Field(
        None, description="what stdout must be for success, without white space at both ends"
    )


class CodeJudgeBatch(Model):
    """Programs. Other fields are ignored."""

    sub_id: SubId | None = Field(None, description="the id of the batch")
    type: Literal["batch"] = Field("batch", description="always batch")
    submissions: list[SkipValidation[CodeJudgeSubmission]] = Field(
        min_length=1, description="the programs; results are in the same order"
    )


class CodeJudgeVerdict(Model):
    """How a program of code-judge ended. Check reason first: with queue_timeout and internal_error the program has no
    result, and success says nothing about it."""

    sub_id: str = Field(description="the id of the submission")
    success: bool = Field(description="run_success, and stdout is the expected output if there is one")
    run_success: bool = Field(description="whether the program ended with exit code 0")
    cost: float = Field(description="seconds of wall time")
    reason: Literal["", "worker_timeout", "queue_timeout", "internal_error"] = Field(
        description="empty: the program ended; worker_timeout: it reached the time limit; queue_timeout: it waited too "
        "long and did not run; internal_error: the service failed to run it"
    )


class CodeJudgeResult(CodeJudgeVerdict):
    """How a program of code-judge ended, with its output. Check reason first, as in a verdict."""

    stdout: Excerpt
    stderr: Excerpt


class CodeJudgeResults(Model):
    """The response to a batch."""

    sub_id: str = Field(description="the id of the batch")
    results: list[CodeJudgeResult] = Field(description="one for each submission, in their order")


class CodeJudgeVerdicts(Model):
    """The response to a batch."""

    sub_id: str = Field(description="the id of the batch")
    results: list[CodeJudgeVerdict] = Field(description="one for each submission, in their order")


class CodeJudgeStatus(Model):
    """The load of the server."""

    queue: int = Field(description="calls that wait for a slot")
    num_workers: int = Field(description="calls that can run at once")


class SandboxFusionCode(Model):
    """A program for SandboxFusion. Other fields are ignored."""

    compile_timeout: Seconds = Field(10.0, description="ignored: Python is not compiled")
    run_timeout: Seconds = Field(10.0, description="seconds of virtual time")
    memory_limit_MB: MemoryMb = -1
    code: str = Field(description="Python source, run as a script")
    stdin: str | None = Field(None, description="text on standard input")
    language: Language = Field("python", description="only python runs")
    files: Files = {}
    fetch_files: FetchFiles = []


class SandboxFusionCells(Model):
    """A notebook for SandboxFusion. Other fields are ignored."""

    cells: list[str] = Field(max_length=MAX_CELLS, description="Python sources, run in one namespace")
    cell_timeout: float = Field(
        0.0, ge=0, le=SECONDS.high, allow_inf_nan=False, description="ignored, as in SandboxFusion"
    )
    total_timeout: Seconds = Field(
        45.0, description="seconds of virtual time for all cells; SandboxFusion and this server add 10"
    )
    kernel: Literal["python3"] = Field("python3", description="the only kernel")
    memory_limit_MB: MemoryMb = -1
    files: Files = {}
    fetch_files: FetchFiles = []


class SandboxFusionCommand(Model):
    """How a process ended."""

    status: Literal["Finished", "TimeLimitExceeded"] = Field(description="how the process ended")
    execution_time: float = Field(description="seconds of wall time")
    return_code: int | None = Field(
        description="the exit code, or the negative number of the signal; null after a time-out"
    )
    stdout: str = Field(description="text written to standard output")
    stderr: str = Field(description="text written to standard error")


class SandboxFusionError(Model, extra="forbid"):
    """The exception that ended a cell."""

    ename: str = Field(description="name of the exception's type")
    evalue: str = Field(description="text of the exception")
    traceback: list[str] = Field(description="the traceback as Python prints it")


class SandboxFusionCell(Model):
    """The result of a cell."""

    stdout: str = Field(description="text written to standard output")
    stderr: str = Field(description="text written to standard error")
    display: list[dict[str, str]] = Field(
        description="what the cell displayed: each value as text by MIME type, images in base64"
    )
    error: list[SandboxFusionError] = Field(description="the exception that ended the cell")


class SandboxFusionResponse(BaseModel):
    """The fields of both responses."""

    status: Literal["Success", "Failed", "SandboxError"] = Field(
        description="Failed: a time-out, or an exit code other than 0. SandboxError: the service did not run the code"
    )
    message: str = Field(description="the reason of SandboxError; else empty")
    executor_pod_name: None = Field(description="always null")
    files: dict[str, str] = Field(description="returned files by name, in base64")


class SandboxFusionRun(SandboxFusionResponse, Model):
    """The result of a program."""

    compile_result: None = Field(description="always null: Python is not compiled")
    run_result: SandboxFusionCommand | None = Field(description="the end of the program; null with SandboxError")


class SandboxFusionNotebook(SandboxFusionResponse, Model):
    """The results of a notebook."""

    driver: SandboxFusionCommand | None = Field(
        description="the end of the process of all cells; null with SandboxError"
    )
    cells: list[SandboxFusionCell] = Field(description="the results of the cells that ended, in their order")


def schemas() -> dict[str, Schema]:
    """Return the schemas of all models by their name, for the OpenAPI document."""
    requested: list[tuple[type[BaseModel], JsonSchemaMode]] = [(each, "validation") for each in Model.__subclasses__()]
    _, document = models_json_schema(requested, ref_template="#/components/schemas/{model}")
    named: dict[str, Schema] = document["$defs"]
    return named
