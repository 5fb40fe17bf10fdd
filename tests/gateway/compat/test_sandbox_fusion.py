"""Tests of the routes with which this server replaces SandboxFusion, another sandbox service.

The answers to the same requests equal those that SandboxFusion gave (a committed file has them), except for documented
differences. The tests also run the reward function of verl and the SDK of SandboxFusion, and cause failures.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import urllib.error
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args
from unittest.mock import ANY

import pytest
import pytest_asyncio

from sandbox.executor.profile_choice import ProfileTree, imported_modules
from sandbox.gateway.compat import sandbox_fusion
from sandbox.gateway.compat.models import Language
from sandbox.gateway.compat.sandbox_fusion import EXAMPLES, decode_cells
from sandbox.local import local_service
from sandbox.types import CallError, Profile, Result, Status, UnavailableReason, unavailable_result
from tests import fakes
from tests.gateway.compat.record_sandbox_fusion import ANSWERS, import_reward, post, scores
from tests.gateway.compat.sandbox_fusion_programs import REQUESTS, comparable, scored_programs
from tests.gateway.http.test_openapi import SCHEMAS, assert_fits
from tests.gateway.serving import serving, until

RECORD = json.loads(ANSWERS.read_text())
DIFFERENT = {
    "keyboard_interrupt", "two_megabytes", "not_utf_8", "numpy_with_limit", "cells_incomplete", "cells_exit",
    "cells_system_exit", "cells_timeout",
}  # fmt: skip
"""Names of the requests that the two services answer differently. docs/compatibility.md lists them."""
DIFFERENT_AS_FIRST_PROCESS = {"abort", "kills_itself", "alarm"}
"""Names of the requests whose answers differ from those of SandboxFusion if the process of a call is the first one of
its PID namespace: the kernel drops the signals by which this code ends itself. At the isolation levels without a PID
namespace for each call, the answers are equal."""
VERL = os.environ.get("RSTAR_VERL")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    async with local_service() as url:
        yield url


@pytest.mark.parametrize("name", [*REQUESTS])
def test_the_response_equals_the_recorded_response_of_sandbox_fusion(name: str, url: str) -> None:
    route, body = REQUESTS[name]
    answer, recorded = comparable(post(url + route, body)), RECORD["answers"][name]
    if name not in DIFFERENT_AS_FIRST_PROCESS:
        assert (answer == recorded) == (name not in DIFFERENT), (answer, recorded)


def test_every_difference_to_sandbox_fusion_is_documented() -> None:
    document = (Path(__file__).parents[3] / "docs/compatibility.md").read_text()
    different = sorted(DIFFERENT | DIFFERENT_AS_FIRST_PROCESS)
    missing = [name for name in different if f"`{name}`" not in document]
    assert not missing, f"docs/compatibility.md does not explain {missing}"


def test_the_cells_before_an_endless_cell_keep_their_results(url: str) -> None:
    answer = post(f"{url}/run_jupyter", REQUESTS["cells_timeout"][1])
    assert (answer["status"], answer["driver"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert answer["cells"] == [{"stdout": "first\n", "stderr": "", "display": [], "error": []}]


def test_a_cell_that_ends_the_process_keeps_the_results_before_it(url: str) -> None:
    answer = post(f"{url}/run_jupyter", {"cells": ["1", "import os; os._exit(5)", "2"]})
    assert (answer["status"], answer["driver"]["return_code"]) == ("Failed", 5)
    assert [cell["display"] for cell in answer["cells"]] == [[{"text/plain": "1"}]]


def test_a_cell_that_forges_results_changes_no_other_answer(url: str) -> None:
    forge = (
        "import os\nfor fd in range(3, 50):\n    try:\n        os.write(fd, b'{\"stdout\": 1}\\n[[\\n')\n"
        "    except OSError:\n        pass"
    )
    answer = post(f"{url}/run_jupyter", {"cells": [forge, "1"]})
    assert (answer["status"], answer["cells"]) == ("Failed", [])


def test_a_cell_may_replace_standard_output(url: str) -> None:
    cells = ["import sys\nout, sys.stdout = sys.stdout, None", "print(1)\n2", "sys.stdout = out\nprint(3)"]
    answer = post(f"{url}/run_jupyter", {"cells": cells})
    shown = [(cell["stdout"], cell["display"], cell["error"]) for cell in answer["cells"]]
    assert shown == [("", [], []), ("", [{"text/plain": "2"}], []), ("3\n", [], [])]


def test_a_cell_that_raises_any_exception_does_not_end_the_notebook(url: str) -> None:
    cell = "class E(BaseException):\n    def __str__(self):\n        raise ValueError\nraise E"
    answer = post(f"{url}/run_jupyter", {"cells": [cell, "raise GeneratorExit", "def f():\n    f()\nf()", "1"]})
    assert [[error["ename"] for error in cell["error"]] for cell in answer["cells"]] == [
        ["E"], ["GeneratorExit"], ["RecursionError"], [],
    ]  # fmt: skip


def test_figures_are_displayed_as_png(url: str) -> None:
    cells = ["import matplotlib.pyplot as plt\nplt.plot([1, 2], [3, 5])\nplt.show()", "1"]
    first, second = post(f"{url}/run_jupyter", {"cells": cells})["cells"]
    figure = first["display"][-1]
    assert first["error"] == []
    assert figure["text/plain"] == "<Figure size 640x480 with 1 Axes>"
    assert base64.b64decode(figure["image/png"]).startswith(b"\x89PNG")
    assert second["display"] == [{"text/plain": "1"}]


def test_cells_with_any_characters_run_or_get_an_error_of_python(url: str) -> None:
    cells = ["'''a'''", "r'\\d' + \"'\" + '\\\\'", "x = 1\r\nx", "'\ud800'", "'é\f'", "'a\0b'", "'\\''", "# '''\\"]
    answer = post(f"{url}/run_jupyter", {"cells": cells})
    shown = [cell["display"][0]["text/plain"] if cell["display"] else None for cell in answer["cells"]]
    assert shown == ["'a'", '"\\\\d\'\\\\"', "1", "'?'", "'é\\x0c'", None, '"\'"', None]
    assert answer["cells"][5]["error"][0]["ename"] in ("SyntaxError", "ValueError")  # ValueError before Python 3.11.4


@pytest.mark.asyncio
async def test_imports_in_cells_choose_the_profile() -> None:
    async with serving() as served:
        await served.post("/run_jupyter", {"cells": ["1", "x = '\\n'\nimport sympy"]})
        (call,) = served.fleet.executors[0].calls.values()
    assert ProfileTree().choose(Profile.AUTO, imported_modules(call["code"])) == Profile.SYMBOLIC


@pytest.mark.skipif(VERL is None, reason="RSTAR_VERL names no checkout of verl")
def test_verl_computes_the_scores_that_it_computes_with_sandbox_fusion(url: str) -> None:
    assert VERL is not None
    kinds = Counter(kind for kind, _, _ in scored_programs())
    assert kinds == {"right": 100, "wrong": 60, "crash": 20, "loop": 20}
    assert scores(Path(VERL), url, concurrency=8) == RECORD["scores"]


@pytest.mark.skipif(VERL is None, reason="RSTAR_VERL names no checkout of verl")
@pytest.mark.parametrize(
    ("code", "status", "run_status", "output"),
    [
        ("print('tool')", "success", "Finished", "tool\n"),
        ("import numpy\nprint(numpy.ones(2))", "success", "Finished", "[1. 1.]\n"),
        ("1 / 0", "runtime_error", "Finished", ""),
        ("while True: pass", "timeout", "TimeLimitExceeded", ""),
    ],
)
def test_the_tool_of_verl_gets_the_output_of_its_code(
    url: str, code: str, status: str, run_status: str, output: str
) -> None:
    assert VERL is not None
    process_single_case = import_reward(Path(VERL)).utils._process_single_case
    _, metadata = process_single_case(0, None, None, f"{url}/run_code", code, 2, 1024, "python")
    assert (metadata["status"], metadata["run_status"], metadata["stdout"]) == (status, run_status, output)


class TestSdk:
    """The package `sandbox-fusion` from PyPI."""

    def test_the_sdk_gets_the_status_and_the_output_of_its_code(self, url: str) -> None:
        sdk = pytest.importorskip("sandbox_fusion", reason="sandbox-fusion is not installed")
        request = sdk.RunCodeRequest(code="print(input())", language="python", stdin="hi", files={"a": None})
        response = sdk.run_code(request, endpoint=url)
        assert (response.status, response.run_result.stdout) == ("Success", "hi\n")
        mapping = sdk.SummaryMapping(Success="good", RunFailed="bad", RunTimeout="slow", Failed="other")
        requests = [
            sdk.RunCodeRequest(code=code, language="python", run_timeout=0.5) for code in ("1", "1/0", "while 1: pass")
        ]
        responses = [sdk.run_code(request, endpoint=url) for request in requests]
        assert [sdk.summary_run_code_result(response, mapping) for response in responses] == ["good", "bad", "slow"]

    def test_the_sdk_runs_one_hundred_requests_concurrently(self, url: str) -> None:
        sdk = pytest.importorskip("sandbox_fusion", reason="sandbox-fusion is not installed")
        sdk.set_endpoint(url)
        arguments = [[sdk.RunCodeRequest(code=f"print({n} ** 2)", language="python")] for n in range(100)]
        responses = sdk.run_concurrent(sdk.run_code, args=arguments)
        assert [response.run_result.stdout for response in responses] == [f"{n * n}\n" for n in range(100)]

    def test_the_sdk_gets_the_values_and_the_errors_of_notebook_cells(self, url: str) -> None:
        sdk = pytest.importorskip("sandbox_fusion", reason="sandbox-fusion is not installed")
        response = sdk.run_jupyter(sdk.RunJupyterRequest(cells=["a = 2", "a + 1", "1/0"]), endpoint=url)
        assert response.cells[1].display == [{"text/plain": "3"}]
        assert response.cells[2].error[0]["ename"] == "ZeroDivisionError"

    def test_another_language_is_an_exception_that_names_it(self, url: str) -> None:
        sdk = pytest.importorskip("sandbox_fusion", reason="sandbox-fusion is not installed")
        request = sdk.RunCodeRequest(code="int main() {}", language="cpp")
        with pytest.raises(Exception, match="language 'cpp' is not supported"):
            sdk.run_code(request, endpoint=url, max_attempts=1)

    def test_the_asynchronous_sdk_runs_twenty_requests_concurrently(self, url: str) -> None:
        sdk = pytest.importorskip("sandbox_fusion", reason="sandbox-fusion is not installed")

        async def run() -> Any:
            request = sdk.RunCodeRequest(code="print(5)", language="python")
            return await asyncio.gather(*(sdk.run_code_async(request, endpoint=url) for _ in range(20)))

        assert {response.run_result.stdout for response in asyncio.run(run())} == {"5\n"}


@pytest.mark.asyncio
async def test_each_response_fits_its_schema() -> None:
    async with serving() as served:
        _, run = await served.post("/run_code", {"code": "print(1)", "fetch_files": ["a"], "files": {"a": "aGk="}})
        _, notebook = await served.post("/run_jupyter", {"cells": []})
        _, refused = await served.post("/run_code", {"code": "", "language": "rust"})
        async with served.http.get(f"{served.url}/v1/ping") as response:
            assert await response.json() == "pong"
    assert run["files"] == {"a": "aGk="}
    for answer in (run, refused):
        assert_fits(answer, SCHEMAS["SandboxFusionRun"])
    assert_fits(notebook, SCHEMAS["SandboxFusionNotebook"])
    for name, example in EXAMPLES.items():
        assert_fits(example, SCHEMAS[name])


@pytest.mark.asyncio
@pytest.mark.parametrize("language", sorted({*get_args(Language)} - {"python"}))
async def test_code_in_another_language_is_answered_with_sandbox_error(language: str) -> None:
    async with serving() as served:
        status, answer = await served.post("/run_code", {"code": "x", "language": language})
        assert not served.fleet.executors[0].calls
    assert (status, answer["status"], answer["run_result"]) == (200, "SandboxError", None)
    assert repr(language) in answer["message"]


MALFORMED: list[tuple[str, Any, str, list[Any]]] = [  # route, body, type and place of the error
    ("/run_code", [], "model_attributes_type", []),
    ("/run_code", {}, "missing", ["code"]),
    ("/run_code", {"code": 5}, "string_type", ["code"]),
    ("/run_code", {"code": "", "language": "klingon"}, "literal_error", ["language"]),
    ("/run_code", {"code": "", "language": ["python"]}, "literal_error", ["language"]),
    ("/run_code", {"code": "", "stdin": 5}, "string_type", ["stdin"]),
    ("/run_code", {"code": "", "run_timeout": -1}, "greater_than_equal", ["run_timeout"]),
    ("/run_code", {"code": "", "run_timeout": "10"}, "float_type", ["run_timeout"]),
    ("/run_code", {"code": "", "run_timeout": math.nan}, "finite_number", ["run_timeout"]),
    ("/run_code", {"code": "", "compile_timeout": None}, "float_type", ["compile_timeout"]),
    ("/run_code", {"code": "", "memory_limit_MB": 1.5}, "int_from_float", ["memory_limit_MB"]),
    ("/run_code", {"code": "", "memory_limit_MB": True}, "int_type", ["memory_limit_MB"]),
    ("/run_code", {"code": "", "memory_limit_MB": 10**400}, "less_than_equal", ["memory_limit_MB"]),
    ("/run_code", {"code": "", "files": []}, "dict_type", ["files"]),
    ("/run_code", {"code": "", "files": {f"{n}": "!" for n in range(257)}}, "too_long", ["files"]),
    ("/run_code", {"code": "", "files": {"./" * 600 + "a": ""}}, "string_too_long", ["files", ANY, "[key]"]),
    ("/run_code", {"code": "", "files": {"\ud800": 1}}, "string_type", ["files", ANY]),
    ("/run_code", {"code": "", "fetch_files": "a"}, "list_type", ["fetch_files"]),
    ("/run_code", {"code": "", "fetch_files": [5]}, "string_type", ["fetch_files", 0]),
    ("/run_code", {"code": "", "fetch_files": ["a"] * 257}, "too_long", ["fetch_files"]),
    ("/run_code", {"code": "", "fetch_files": ["[" * 2000]}, "string_too_long", ["fetch_files", 0]),
    ("/run_code", {"code": "", "fetch_files": ["./" * 600 + "a"]}, "string_too_long", ["fetch_files", 0]),
    ("/run_jupyter", {}, "missing", ["cells"]),
    ("/run_jupyter", {"cells": "1"}, "list_type", ["cells"]),
    ("/run_jupyter", {"cells": [1]}, "string_type", ["cells", 0]),
    ("/run_jupyter", {"cells": [1] * 4097}, "too_long", ["cells"]),
    ("/run_jupyter", {"cells": [], "kernel": "julia"}, "literal_error", ["kernel"]),
    ("/run_jupyter", {"cells": [], "cell_timeout": -1}, "greater_than_equal", ["cell_timeout"]),
    ("/run_jupyter", {"cells": [], "total_timeout": 0}, "greater_than_equal", ["total_timeout"]),
]


@pytest.mark.asyncio
async def test_a_malformed_body_is_answered_with_422_and_the_place_of_the_error() -> None:
    async with serving() as served:
        for route, body, kind, place in MALFORMED:
            status, answer = await served.post(route, body)
            (error,) = answer["detail"]
            assert (status, error["type"], error["loc"]) == (422, kind, ["body", *place])
            assert_fits(answer, SCHEMAS["Malformed"])
        assert served.dispatcher.counters.refused == {422: len(MALFORMED)}
        assert not served.fleet.executors[0].calls


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("files", "fetch_files", "message"),
    [
        ({"a": "!"}, [], "files['a']: expected base64 text"),
        ({"../a": ""}, [], "call.files: expected a relative path"),
        ({"/etc/a": ""}, [], "call.files: expected a relative path"),
        ({}, ["/etc/passwd"], "fetch_files: expected a relative path"),
        ({}, ["\ud800"], "fetch_files: expected a relative path"),
    ],
)
async def test_a_file_with_a_wrong_path_or_content_is_answered_with_422_and_a_message(
    files: Any, fetch_files: list[str], message: str
) -> None:
    async with serving() as served:
        status, answer = await served.post("/run_code", {"code": "", "files": files, "fetch_files": fetch_files})
    (error,) = answer["detail"]
    assert (status, error["type"], error["loc"]) == (422, "value_error", ["body"])
    assert message in error["msg"]


@pytest.mark.asyncio
@pytest.mark.parametrize(("route", "field"), [("/run_code", "code"), ("/run_code", "stdin"), ("/run_jupyter", "cells")])
async def test_a_lone_surrogate_reaches_the_call(route: str, field: str) -> None:
    body = {"code": "", field: ["\ud800"] if field == "cells" else "\ud800"}
    async with serving() as served:
        status, answer = await served.post(route, body)
    assert (status, answer["message"]) == (200, "")


@pytest.mark.asyncio
async def test_a_whole_number_may_have_a_decimal_point() -> None:
    async with serving() as served:
        status, _ = await served.post("/run_code", {"code": "x", "memory_limit_MB": 1024.0})
        (call,) = served.fleet.executors[0].calls.values()
    assert (status, call["limits"]["memory_mb"]) == (200, 1024)


@pytest.mark.asyncio
async def test_cells_that_are_together_longer_than_a_program_are_answered_with_422() -> None:
    body = json.dumps({"cells": ["'" * (3 << 20)] * 2}).encode()
    async with serving() as served:
        status, answer = await served.post("/run_jupyter", body, Content_Type="application/json")
    assert status == 422
    (error,) = answer["detail"]
    assert error["msg"] == "Value error, cells: expected at most 4194304 characters together, got 6291456"


@pytest.mark.asyncio
@pytest.mark.parametrize(("memory_limit_mb", "memory_mb"), [(-1, 512), (0, 512), (1, 16), (1024, 1024)])
async def test_the_limits_reach_the_call(memory_limit_mb: int, memory_mb: int) -> None:
    body = {"code": "x", "run_timeout": 2.5, "memory_limit_MB": memory_limit_mb}
    async with serving() as served:
        await served.post("/run_code", body)
        (call,) = served.fleet.executors[0].calls.values()
    assert (call["limits"]["timeout_s"], call["echo"]) == (2.5, False)
    assert call["limits"].get("memory_mb", 512) == memory_mb


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("result", "status", "run_status", "return_code"),
    [
        (Result("", Status.OK, exit_code=0), "Success", "Finished", 0),
        (Result("", Status.ERROR, exit_code=3), "Failed", "Finished", 3),
        (Result("", Status.TIMEOUT, signal=9), "Failed", "TimeLimitExceeded", None),
        (Result("", Status.MEMORY_LIMIT, signal=9), "Failed", "Finished", -9),
        (Result("", Status.MEMORY_LIMIT, exit_code=1), "Failed", "Finished", 1),
        (Result("", Status.OUTPUT_LIMIT, exit_code=0), "Failed", "Finished", 1),
        (Result("", Status.KILLED, signal=11), "Failed", "Finished", -11),
    ],
    ids=lambda value: value.status.value if isinstance(value, Result) else None,
)
async def test_each_end_of_a_call_has_a_status_and_a_return_code_of_sandbox_fusion(
    result: Result, status: str, run_status: str, return_code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fakes, "ok_result", lambda call: result.encode(binary=True))
    async with serving() as served:
        _, answer = await served.post("/run_code", {"code": "x"})
    run = answer["run_result"]
    assert (answer["status"], run["status"], run["return_code"]) == (status, run_status, return_code)


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ["/run_code", "/run_jupyter"])
async def test_a_call_that_the_service_failed_to_run_is_answered_with_504(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"code": "x", "cells": []}
    async with serving(queue_calls=1) as served:
        for error_type in ("NodeError", "QueueTimeout", "Stopped"):
            failure = unavailable_result("", UnavailableReason(error_type), "the reason").encode(binary=True)
            monkeypatch.setattr(fakes, "ok_result", lambda call, failure=failure: failure)
            status, answer = await served.post(route, body)
            assert status == 504
            assert f"{error_type}: the reason" in answer["error"]["message"]
        hanging = asyncio.create_task(served.post("/v1/execute", {"code": "hang"}))
        await until(lambda: served.dispatcher.call_table.outstanding.calls == 1)
        status, answer = await served.post(route, body)
        assert (status, answer["error"]["type"]) == (504, "TryAgain")
        hanging.cancel()


@pytest.mark.asyncio
@pytest.mark.skipif(VERL is None, reason="RSTAR_VERL names no checkout of verl")
async def test_verl_sends_a_call_again_that_the_service_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VERL is not None
    ends = [
        unavailable_result("", UnavailableReason.NODE_ERROR, "no process"),
        Result("", Status.OK, stdout="ok", exit_code=0),
    ]
    monkeypatch.setattr(fakes, "ok_result", lambda call: ends.pop(0).encode(binary=True))
    process_single_case = import_reward(Path(VERL)).utils._process_single_case
    async with serving() as served:
        url = f"{served.url}/run_code"
        result, _ = await asyncio.to_thread(process_single_case, 0, None, "ok", url, "x", 2, 1024, "python")
    assert (result, ends) == (True, [])


@pytest.mark.asyncio
@pytest.mark.parametrize("error_type", ["ResultTooLarge", "Poison"])
async def test_a_failure_that_another_try_cannot_mend_is_answered_with_sandbox_error(
    error_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = CallError(error_type, "too large")
    failure = Result("", Status.UNAVAILABLE, error=error).encode(binary=True)
    monkeypatch.setattr(fakes, "ok_result", lambda call: failure)
    async with serving() as served:
        status, answer = await served.post("/run_code", {"code": "x"})
    assert (status, answer["status"], answer["run_result"]) == (200, "SandboxError", None)
    assert answer["message"] == f"{error_type}: too large"


CELL = '{"stdout": "", "stderr": "", "display": [], "error": []}'


@pytest.mark.parametrize(
    "line",
    [
        "", "1", "{", "[[[[", "[" * 100_000, "1" * 10_000, '{"stdout": ""}', CELL.replace('""', "1", 1),
        CELL.replace('"display": []', '"display": {}'), CELL.replace('"display": []', '"display": [1]'),
        CELL.replace('"display": []', '"display": [{"text/plain": [1]}]'),
        CELL.replace('"error": []', '"error": [[]]'), CELL.replace('"error": []', '"error": [{"ename": "x"}]'),
        CELL.replace('"error": []', '"error": [{"ename": "", "evalue": "", "traceback": "x"}]'),
        CELL.replace('"error": []', '"error": [{"ename": 1, "evalue": "", "traceback": []}]'),
    ],
)  # fmt: skip
def test_the_results_of_cells_after_a_malformed_line_are_dropped(line: str) -> None:
    assert decode_cells(f"{CELL}\n{line}\n{CELL}\n", 3) == [json.loads(CELL)]


def test_results_with_too_many_values_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    monkeypatch.setattr(sandbox_fusion.json, "loads", decoded.append)
    for value in ("[],", "{},", "1,", '"",', "["):
        assert decode_cells("[" + value * sandbox_fusion.MAX_CELL_VALUES + "1]", 1) == []
    assert not decoded, f"{len(decoded)} texts with too many values were decoded"


def test_the_results_of_cells_after_too_many_values_are_dropped() -> None:
    values = sum(map(CELL.count, "[{,"))
    cells = decode_cells(f"{CELL}\n" * sandbox_fusion.MAX_CELL_VALUES, sandbox_fusion.MAX_CELL_VALUES)
    assert len(cells) == sandbox_fusion.MAX_CELL_VALUES // values


def test_text_that_looks_like_json_with_many_values_is_returned_unchanged(url: str) -> None:
    code = "text = '[1, {2}]' * 60_000\nprint(text, end='')\ntext"
    answer = post(f"{url}/run_jupyter", {"cells": [code]})
    assert answer["status"] == "Success"
    assert answer["cells"][0]["stdout"] == "[1, {2}]" * 60_000
    assert len(answer["cells"][0]["display"][0]["text/plain"]) == 480_002


def test_results_beyond_the_number_of_cells_are_dropped() -> None:
    assert len(decode_cells(f"{CELL}\n" * 10, 2)) == 2


def test_the_password_in_a_url_is_accepted_as_the_token_except_from_web_pages() -> None:
    async def run() -> list[int]:
        import requests

        def status(url: str, **headers: str) -> int:
            return requests.post(f"{url}/run_code", json={"code": "1"}, headers=headers, timeout=30).status_code

        async with serving(token="s3cret") as served:
            address = served.url.removeprefix("http://")
            urls = [f"http://{user}@{address}" for user in ("any:s3cret", "any:wrong", "s3cret", "any:")]
            statuses = [await asyncio.to_thread(status, url) for url in urls]
            return [*statuses, await asyncio.to_thread(status, urls[0], Origin=served.url)]

    assert asyncio.run(run()) == [200, 401, 401, 401, 401]


def test_the_dataset_routes_of_sandbox_fusion_are_answered_with_404(url: str) -> None:
    for route in ("/submit", "/get_prompts", "/get_prompt_by_id", "/get_metrics", "/common_evaluate_batch"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            post(url + route, {})
