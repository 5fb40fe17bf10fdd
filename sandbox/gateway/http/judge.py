"""The route `/v1/judge`: parses programs, has them judged, and sends the results in order or as they come.

The tests stay in memory until the response is complete. Until then, the length of the request's body in bytes counts
against a budget of the tenant: the bytes of programs that are being judged (`JUDGED_BYTES`). The tenant's budget for
bodies that are being read is another budget (`body_reader`). So a program that takes long to judge does not cause
bodies of other requests to be refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from typing import ClassVar, NamedTuple, cast

from aiohttp import web

from sandbox.errors import InvalidCall, RequestRefused, first_error
from sandbox.gateway.calls.batch import Batch
from sandbox.gateway.http import codec, exchange
from sandbox.gateway.http.auth import TENANT, tenant_name
from sandbox.gateway.http.body_reader import ByteBudget, Reservation
from sandbox.gateway.http.codec import JSON, MSGPACK, MSGPACK_STREAM, NDJSON, Json
from sandbox.gateway.http.exchange import BATCH_TYPES, BODY_READER, BODY_TYPES, CALL_ERROR_STATUSES, DISPATCHER
from sandbox.gateway.http.openapi import (
    Route,
    Schema,
    call_schema,
    input_schema,
    list_of,
    reference,
    response_schema,
    schema_of_enum,
)
from sandbox.gateway.http.validation import (
    BATCH_FIELDS,
    MalformedCall,
    check_fields,
    check_items,
    check_profile_and_tenant,
    check_queue_timeout,
    id_of,
)
from sandbox.gateway.judging import Judge, JudgeRequest
from sandbox.judging.comparison import TextComparison, Tolerance
from sandbox.judging.programs import (
    PRELUDES,
    PROGRAM_FIELDS,
    TEST_FIELDS,
    TOLERANCE,
    JudgedProgram,
    JudgedTest,
    JudgeOutcome,
    Program,
    ProgramTest,
)
from sandbox.settings.server import ServeConfig
from sandbox.settings.tenants import Tenant
from sandbox.types import CALL_FIELDS, EncodedCall, EncodedResult, Status, UnavailableReason, Usage

PROGRAMS_FIELDS: dict[str, str] = {
    "programs": "the programs; results are in the same order",
    "defaults": "values for fields that a program omits, for example the tests that all programs share",
    "queue_timeout_s": BATCH_FIELDS["queue_timeout_s"],
}
MAX_DECODED_CALLS = 1 << 20
"""Limit on the objects in a body, as a number of calls: `codec.decode` allows the number of objects that a batch of so
many calls may have. The number is so high because the arguments of tests may have many objects."""
MAX_KEYS = 1 << 20
"""Maximum number of keys of one object in a body. It is so high because an argument of a test may be a large object."""
TESTS_PER_ITEM = 64
"""Number of tests that the body worker sends together."""
TEST_BYTES_PER_ITEM = 256 << 10
"""Bytes of tests after which the body worker sends them, also if they are fewer than `TESTS_PER_ITEM`."""
JUDGE = web.AppKey("judge", Judge)
JUDGED_BYTES = web.AppKey("judged_bytes", ByteBudget)


class ParsedPrograms(NamedTuple):
    """The valid programs of a request with their indexes. `results` is a batch without calls, for the results of the
    programs. The results of malformed programs are already set."""

    programs: list[tuple[int, Program]]
    results: Batch
    queue_timeout_s: float
    is_single: bool
    """Whether the body is one program."""


class ProgramsHead(NamedTuple):
    """The fields of a request besides its programs. This is the first item of a body."""

    size: int
    queue_timeout_s: float
    is_single: bool
    defaults: Program


class CheckedProgram(NamedTuple):
    """A valid program."""

    program_index: int
    program: Program


Item = ProgramsHead | CheckedProgram | MalformedCall


class ProgramsForm:
    """A body with `programs`, or with one program. It has the methods of `validation.Form`.

    `owner` is the tenant of the request's token. A program that names another tenant is malformed.
    """

    max_keys: ClassVar[int] = MAX_KEYS

    def __init__(self, config: ServeConfig, owner: Tenant | None) -> None:
        self.config = config
        self.owner = owner
        self.parsed: ParsedPrograms
        self._defaults: Program
        self._tests: list[ProgramTest] = []
        """Tests that have been received from the body worker before their program."""

    @staticmethod
    def max_calls(config: ServeConfig) -> int:
        return MAX_DECODED_CALLS

    def check(self, raw: Json) -> Iterator[Item]:
        """Yield the items of a decoded body. Raises `InvalidCall` or `RequestRefused`."""
        if isinstance(raw, dict) and "programs" in raw:
            return self._check_programs(raw)
        return self._check_single(raw)

    def _check_single(self, raw: Json) -> Iterator[Item]:
        timeout_s = self.config.queue_timeout_s
        if isinstance(raw, dict) and "queue_timeout_s" in raw:
            timeout_s = check_queue_timeout(raw.pop("queue_timeout_s"), "program", timeout_s)
        self._check_count(_num_tests(raw))
        program = Program.decode(raw)
        check_profile_and_tenant(program.call, "program", self.config, self.owner)
        yield ProgramsHead(1, timeout_s, True, Program.decode_defaults(None))
        yield CheckedProgram(0, program)

    def _check_programs(self, raw: dict[str, Json]) -> Iterator[Item]:
        config = self.config
        check_fields(raw, PROGRAMS_FIELDS, "judge", "programs")
        items = check_items(raw["programs"], "judge.programs", "program", config.batch_calls)
        self._check_count(_num_tests(raw.get("defaults")))
        defaults = Program.decode_defaults(raw.get("defaults"))
        timeout_s = check_queue_timeout(raw.get("queue_timeout_s"), "judge", config.queue_timeout_s)
        yield ProgramsHead(len(items), timeout_s, False, defaults)
        tests = 0
        for index, item in enumerate(items):
            own_tests = _num_tests(item)
            tests += own_tests
            self._check_count(tests)  # before the tests are decoded, which takes 3 us for each test
            program_id = id_of(item, index)
            try:
                program = Program.decode(item, defaults, f"programs[{index}]")
                check_profile_and_tenant(program.call, f"programs[{index}]", self.config, self.owner)
            except InvalidCall as error:
                yield MalformedCall(index, program_id, str(error))
                continue
            if not own_tests:  # the program uses the tests of the defaults, which are decoded already
                tests += len(program.tests)
                self._check_count(tests)
            yield CheckedProgram(index, program)

    def _check_count(self, tests: int) -> None:
        if tests > self.config.batch_calls:
            raise RequestRefused(
                f"expected at most {self.config.batch_calls} tests in one request, got {tests} or more; "
                "send several requests, or start the server with a larger --batch-calls"
            )

    def encode(self, item: Item) -> Iterator[list[Json]]:
        """Yield an item as lists of plain data. The tests of a program are sent before the program, in lists of at most
        `TESTS_PER_ITEM` tests."""
        match item:
            case ProgramsHead():
                self._defaults = Program.decode_defaults(None)
                yield from self._encode_tests(item.defaults)
                yield ["head", *item[:3], *self._encode_program(item.defaults)]
                self._defaults = item.defaults
            case CheckedProgram():
                yield from self._encode_tests(item.program)
                yield ["program", item.program_index, *self._encode_program(item.program)]
            case MalformedCall():
                yield ["malformed", *item]

    def _encode_tests(self, program: Program) -> Iterator[list[Json]]:
        part: list[Json] = []
        size = 0
        # A program that omits `tests` has the very tuple of the defaults. Its tests are not sent: the gateway has them.
        for test in () if program.tests is self._defaults.tests else program.tests:
            part.append([test.stdin, test.function_call, test.expected])
            size += test.size
            if len(part) == TESTS_PER_ITEM or size > TEST_BYTES_PER_ITEM:
                yield ["tests", part]
                part, size = [], 0
        if part:
            yield ["tests", part]

    def _encode_program(self, program: Program) -> list[Json]:
        comparison = program.comparison
        encoded = asdict(comparison) if isinstance(comparison, Tolerance) else comparison.value
        return [program.call, encoded, program.checker, program.stop_at_first_failure, program.prelude]

    def receive(self, encoded: list[Json]) -> None:
        """Add an encoded item."""
        kind, *values = encoded
        match kind:
            case "tests":
                self._tests += [ProgramTest(*test) for test in values[0]]
            case "head":
                self._defaults = Program.decode_defaults(None)
                size, queue_timeout_s, is_single, *program = values
                self.add(ProgramsHead(size, queue_timeout_s, is_single, self._decode_program(*program)))
            case "program":
                self.add(CheckedProgram(values[0], self._decode_program(*values[1:])))
            case _:
                self.add(MalformedCall(*values))

    def _decode_program(self, call: EncodedCall, comparison: Json, checker: str, stop: bool, prelude: str) -> Program:
        # No test has been received if the program uses the tests of the defaults: a list of own tests is never empty.
        tests, self._tests = tuple(self._tests) or self._defaults.tests, []
        compared = Tolerance(**comparison) if isinstance(comparison, dict) else TextComparison(comparison)
        return Program(call, tests, compared, checker, stop, prelude)

    def add(self, item: Item) -> None:
        """Add an item to the programs."""
        match item:
            case ProgramsHead():
                self._defaults = item.defaults
                results = Batch(item.size, item.queue_timeout_s)
                self.parsed = ParsedPrograms([], results, item.queue_timeout_s, item.is_single)
            case CheckedProgram():
                program = item.program if self.owner is None else item.program.with_tenant(self.owner.name)
                self.parsed.programs.append((item.program_index, program))
            case MalformedCall():
                judged = JudgedProgram(item.call_id, JudgeOutcome.INVALID, message=item.message)
                _set_result(self.parsed.results, item.call_index, judged)


def _num_tests(raw: Json) -> int:
    """Return the number of tests in a program that is not decoded yet. Tests of the defaults do not count."""
    tests = raw.get("tests") if isinstance(raw, dict) else None
    return len(tests) if isinstance(tests, list) else 0


def _set_result(results: Batch, index: int, judged: JudgedProgram) -> None:
    results.set_result(index, cast(EncodedResult, judged.encode()))  # a batch accepts any mapping that can be encoded


async def run_judge(request: web.Request) -> web.StreamResponse:
    async with _admitted_programs(request) as (parsed, body_type):
        content_type = codec.response_type(request, body_type, BATCH_TYPES)
        status = 200 if parsed.programs else 400
        with _first_error_of_group():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_judge(request, parsed))
                if content_type in (NDJSON, MSGPACK_STREAM):
                    return await exchange.stream(request, status, parsed.results, content_type)
                begun = await exchange.wait_with_heartbeats(request, parsed.results, status, content_type)
        if parsed.is_single:
            result = parsed.results.pop_result(0)
            body = await codec.encode_result(result, codec.encoded_bytes(result), content_type)
        else:
            results = parsed.results
            body = await codec.encode_results(exchange.pop_results(results), len(results.results), content_type)
        return await exchange.respond(request, status, body, content_type, begun)


async def _judge(request: web.Request, parsed: ParsedPrograms) -> None:
    def on_judged(index: int, judged: JudgedProgram) -> None:
        if not judged.id and not parsed.is_single:
            judged = judged.with_id(str(index))
        _set_result(parsed.results, index, judged)

    context = JudgeRequest(parsed.queue_timeout_s, request[TENANT], partial(exchange.admit, request))
    await request.app[JUDGE].judge_all(parsed.programs, context, on_judged)


@asynccontextmanager
async def _admitted_programs(request: web.Request) -> AsyncIterator[tuple[ParsedPrograms, str]]:
    """Read and parse the programs of a request, and check that the queue has room for their tests. Yields them with the
    body's content type."""
    dispatcher, owner = request.app[DISPATCHER], request[TENANT]
    form = ProgramsForm(dispatcher.config, owner)
    with Reservation(request.app[JUDGED_BYTES], owner, "programs are being judged") as judged:
        with request.app[BODY_READER].reservation(request) as reservation:
            content_type = await exchange.parse_body(request, reservation, form)
            judged.grow(reservation.size)
        parsed = form.parsed
        await request.app[JUDGE].check_room([program for _, program in parsed.programs], owner)
        if malformed := len(parsed.results.results) - len(parsed.programs):
            dispatcher.counters.count_calls(Status.INVALID.value, tenant_name(owner), malformed)
        if not parsed.programs:
            dispatcher.counters.refused[400] += 1
        yield parsed, content_type


@contextmanager
def _first_error_of_group() -> Iterator[None]:
    """Raise the first exception of a task group alone, so that the middleware knows its type."""
    try:
        yield
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def on_startup(app: web.Application) -> None:
    """Create the judge of an application."""
    app[JUDGE] = Judge(app[DISPATCHER])
    app[JUDGED_BYTES] = ByteBudget(app[DISPATCHER])


def _schemas() -> dict[str, Schema]:
    call_properties = call_schema()["properties"]
    test = {
        "stdin": {"type": "string", "description": TEST_FIELDS["stdin"]},
        "expected": {"type": "string", "description": TEST_FIELDS["expected"]},
    }
    pattern = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?$"
    function_test = {
        "call": {"type": "string", "pattern": pattern, "description": TEST_FIELDS["call"]},
        "args": {"type": "array", "items": {}, "description": TEST_FIELDS["args"]},
        "expected": {"description": TEST_FIELDS["expected"]},
    }
    number = {"type": "number", "minimum": TOLERANCE.low, "maximum": TOLERANCE.high}
    comparison = {"anyOf": [reference("Comparison"), reference("Tolerance")], "description": PROGRAM_FIELDS["compare"]}
    tolerance = {
        "abs": {**number, "description": "largest difference"},
        "rel": {**number, "description": "largest difference, as a multiple of the expected number"},
    }
    program = {
        "code": call_properties["code"],
        "tests": _array_of("Test", PROGRAM_FIELDS["tests"]),
        "compare": comparison,
        "checker": {"type": "string", "minLength": 1, "description": PROGRAM_FIELDS["checker"]},
        "stop_at_first_failure": {"type": "boolean", "description": PROGRAM_FIELDS["stop_at_first_failure"]},
        "prelude": {"enum": list(PRELUDES), "description": PROGRAM_FIELDS["prelude"]},
        **{name: call_properties[name] for name in PROGRAM_FIELDS if name in CALL_FIELDS and name != "code"},
    }
    timeout = {"type": "number", "exclusiveMinimum": 0, "description": PROGRAMS_FIELDS["queue_timeout_s"]}
    shared = {name: schema for name, schema in program.items() if name not in ("code", "id")}
    programs = {
        "programs": _array_of("Program", PROGRAMS_FIELDS["programs"]),
        "defaults": {**reference("ProgramDefaults"), "description": PROGRAMS_FIELDS["defaults"]},
        "queue_timeout_s": timeout,
    }
    judged = response_schema(JudgedProgram)
    judged_test = response_schema(JudgedTest)
    judged_test["required"].remove("reason")
    index = {"type": "integer", "description": "index of the program that this result belongs to"}
    return {
        "StdinTest": input_schema("A test that gives the program standard input.", test),
        "FunctionTest": input_schema("A test that calls a function of the program.", function_test, "call"),
        "Test": {"anyOf": [reference("StdinTest"), reference("FunctionTest")], "description": "One test of a program."},
        "Comparison": schema_of_enum(TextComparison),
        "Tolerance": {**input_schema("Numbers are equal within a tolerance.", tolerance), "minProperties": 1},
        "Program": input_schema("A program and its tests.", program, "code"),
        "SingleProgram": input_schema("A single program.", {**program, "queue_timeout_s": timeout}, "code", "tests"),
        "ProgramDefaults": input_schema("Values for fields that a program omits.", shared),
        "Programs": input_schema("Programs that are judged together.", programs, "programs"),
        "Judge": {
            "anyOf": [reference("SingleProgram"), reference("Programs")],
            "description": "One program, or several.",
        },
        "JudgeOutcome": schema_of_enum(JudgeOutcome),
        "JudgedTest": judged_test,
        "UnavailableReason": schema_of_enum(UnavailableReason),
        "JudgedProgram": judged,
        "JudgedPrograms": list_of("JudgedProgram", "one result for each program, in the order of the programs"),
        "Judged": {
            "anyOf": [reference("JudgedProgram"), reference("JudgedPrograms")],
            "description": "The result of a single program, or the results of several.",
        },
        "JudgedLine": {**judged, "properties": {"index": index, **judged["properties"]}, "required": ["index"]},
    }


def _array_of(name: str, description: str) -> Schema:
    return {"type": "array", "minItems": 1, "items": reference(name), "description": description}


_JUDGED_TESTS = tuple(
    JudgedTest(JudgeOutcome.PASSED, Status.OK, stdout=stdout, usage=Usage(0.3, 2.1, 1.9, 0.4))
    for stdout in ("3\n", "0\n")
)
_JUDGED = JudgedProgram("0", JudgeOutcome.PASSED, 2, 2, True, tests=_JUDGED_TESTS).encode()
_TYPES = {JSON: "Judged", MSGPACK: "Judged", NDJSON: "JudgedLine", MSGPACK_STREAM: "JudgedLine"}

ROUTES = (
    Route(
        "POST",
        "/v1/judge",
        run_judge,
        "Run programs against tests: results in order, or streamed as programs finish",
        _TYPES,
        "Judge",
        BODY_TYPES,
        CALL_ERROR_STATUSES,
        invalid_schemas=_TYPES,
        schemas=_schemas(),
        examples={
            "Judge": {
                "code": "print(sum(map(int, input().split())))",
                "tests": [{"stdin": "1 2\n", "expected": "3\n"}, {"stdin": "5 -5\n", "expected": "0\n"}],
            },
            "Judged": _JUDGED,
            "JudgedLine": {"index": 0, **_JUDGED},
        },
    ),
)
