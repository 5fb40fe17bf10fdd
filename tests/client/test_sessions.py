"""Tests of sessions over HTTP, by the clients and a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sandbox import jail
from sandbox.client import AsyncClient, AsyncSession, Client, RequestRefused, Session, SessionGone
from sandbox.errors import Overloaded
from sandbox.gateway.http.sessions import EXAMPLES
from sandbox.local import local_service
from sandbox.types import Limits, Status
from tests.jail.jails import tree_pids
from trainer.rollout.loop_thread import LoopThread

PLACES = 6


@pytest.fixture(scope="module")
def needs_sessions(guest_python: object, needs_isolation: None) -> None:
    if jail.choose_level("auto").level not in (jail.Level.NAMESPACES, jail.Level.NSJAIL):
        pytest.skip("sessions need level namespaces or nsjail")


@pytest.fixture(scope="module")
def server_url(needs_sessions: None) -> Iterator[str]:
    arguments = ["--profiles", "bare", "--zygote-pools", "1", "--slots", "4", "--sessions", str(PLACES)]
    with LoopThread() as loop_thread:
        yield loop_thread.enter(local_service(arguments))


@pytest.fixture
def client(server_url: str) -> Iterator[Client]:
    with Client(server_url, retries=0) as client:
        yield client


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.session(keep_states=3, limits=Limits(memory_mb=1024)) as session:
        yield session


@pytest.mark.runtime
def test_a_cell_that_fails_changes_nothing(session: Session) -> None:
    session.run("x = 1", files={"f": "text"})
    failed = session.run("x = 2\nwhile True: pass", limits={"timeout_s": 0.2})
    assert (failed.status, failed.session.committed, session.head) == (Status.TIMEOUT, False, 1)
    result = session.run("x, open('f').read()", return_files=["f"])
    assert (result.value, result.files, session.states) == ("(1, 'text')", {"f": b"text"}, (0, 1, 2))


@pytest.mark.runtime
def test_a_figure_belongs_to_one_cell(session: Session) -> None:
    code = "from matplotlib import pyplot\npyplot.plot([1, 2]);"
    limits = {"timeout_s": 60}
    assert list(session.run(code, figures=True, limits=limits).files) == ["figure-1.png"]
    assert list(session.run("1", figures=True, limits=limits).files) == []


@pytest.mark.runtime
def test_rollback_and_branches(session: Session) -> None:
    session.run("x = [0]")
    assert session.run("x.append(1)\nx").value == "[0, 1]"
    session.rollback(1)
    assert session.head == 1 and session.run("x").value == "[0]"
    assert session.run("x.append(2)\nx", state=1).value == "[0, 2]"


@pytest.mark.runtime
@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"if_state": 5}, 409, "if_state is 5, but the head is state 0"),
        ({"state": 7}, 410, "state 7 is no longer kept, only 0"),
        ({"limits": {"memory_mb": 64}}, 400, "is a limit of the session"),
        ({"state": -1}, 400, "cell.state: expected a whole number"),
        ({"tenant": "a"}, 400, "tenant"),
    ],
)
def test_a_cell_that_cannot_run_is_refused(fields: dict[str, Any], status: int, message: str, session: Session) -> None:
    with pytest.raises(RequestRefused, match=message) as raised:
        session.run("1", **fields)
    assert f"answered {status}" in str(raised.value)
    assert session.run("1").session.head == 1, "the session goes on"


@pytest.mark.runtime
def test_the_end_of_a_session_is_named(client: Client) -> None:
    with client.session() as session:
        other = client.session()
        other._session.id = session.id
        other.close()
        other._session.id = session.id
        with pytest.raises(SessionGone, match="it was closed"):
            session.run("1")
        other.close()  # closing again is no error
    other._session.id = "unknown"
    with pytest.raises(RequestRefused, match="there is no session 'unknown'"):
        other.run("1")


@pytest.mark.runtime
def test_a_session_without_cells_ends_after_idle_s(client: Client, server_url: str) -> None:
    with client.session(idle_s=1) as session:
        session.run("x = 1")
        deadline = time.monotonic() + 30
        while session.id in _open_sessions(server_url) and time.monotonic() < deadline:
            time.sleep(0.1)
        with pytest.raises(SessionGone, match="it had no cell for idle_s, 1 s"):
            session.run("x")


def _open_sessions(server_url: str) -> set[str]:
    with urllib.request.urlopen(f"{server_url}/v1/sessions", timeout=30) as response:
        return {session["session"] for session in json.load(response)["sessions"]}


@pytest.mark.runtime
def test_places_for_sessions_are_limited(client: Client) -> None:
    sessions = [client.session().open() for _ in range(PLACES)]
    try:
        with pytest.raises(Overloaded, match="all places for sessions are in use"):
            client.session().open()
    finally:
        for session in sessions:
            session.close()


async def _until_a_cell_runs(server_url: str, session: AsyncSession) -> None:
    async with aiohttp.ClientSession(server_url) as http, asyncio.timeout(30):
        is_running = False
        while not is_running:
            async with http.get(f"/v1/sessions/{session.id}") as response:
                is_running = (await response.json())["is_running"]


@pytest.mark.runtime
def test_a_second_cell_at_the_same_time_is_refused(server_url: str) -> None:
    async def main() -> None:
        async with AsyncClient(server_url) as client, client.session() as session:
            first = asyncio.create_task(session.run("import time\ntime.sleep(1)\nx = 1", limits={"timeout_s": 20}))
            await _until_a_cell_runs(server_url, session)
            with pytest.raises(RequestRefused, match="runs a cell already"):
                await session.run("2")
            assert (await first).session.committed
            assert (await session.run("x")).value == "1"

    asyncio.run(main())


@pytest.mark.runtime
def test_a_cell_whose_client_leaves_is_not_committed(server_url: str) -> None:
    async def main() -> None:
        async with AsyncClient(server_url) as client, client.session() as session:
            await session.run("x = 1")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await session.run("x = 2\nwhile True: pass", limits={"timeout_s": 60})
            for _ in range(100):  # until the server has noticed the end of the connection
                try:
                    assert (await session.run("x")).value == "1"
                    break
                except RequestRefused:
                    await asyncio.sleep(0.05)
            else:
                pytest.fail("the cell goes on")

    asyncio.run(main())


@pytest.mark.runtime
def test_cells_of_several_sessions_in_one_request(server_url: str) -> None:
    async def main() -> None:
        async with AsyncClient(server_url) as client, client.session() as one, client.session() as two:
            cells = [{"session": one.id, "code": "1"}, {"session": two.id, "code": "2"}, {"session": two.id}]
            async with aiohttp.ClientSession(server_url) as http:
                async with http.post("/v1/sessions/cells", json={"cells": cells}) as response:
                    results = (await response.json())["results"]
                assert [result["value"] for result in results] == ["1", "2", None]
                assert results[2]["status"] == "invalid" and results[0]["session"]["head"] == 1
                async with http.post("/v1/sessions/cells", json={"cells": [cells[0], cells[0]]}) as response:
                    assert response.status == 409
                async with http.get("/v1/sessions") as response:
                    shown = {session["session"]: session for session in (await response.json())["sessions"]}
            assert shown[one.id]["cells"] == 1 and shown[two.id]["states"] == [0, 1]

    asyncio.run(main())


TENANTS = """
[tenants.a]
token = "a-token-of-the-tenant-a"
[tenants.b]
token = "b-token-of-the-tenant-b"
"""


@pytest.mark.runtime
def test_a_tenant_reaches_its_own_sessions_only(needs_sessions: None, tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(TENANTS)

    async def main() -> None:
        arguments = ["--profiles", "bare", "--zygote-pools", "1", "--slots", "4", "--tenants", str(file)]
        async with (
            local_service(arguments) as url,
            AsyncClient(url, token="a-token-of-the-tenant-a") as owner,
            AsyncClient(url, token="b-token-of-the-tenant-b") as other,
            owner.session() as session,
        ):
            await session.run("x = 1")
            stolen = other.session()
            stolen.id = session.id
            for attempt in (stolen.run("x"), stolen.rollback(0), stolen.close()):
                with pytest.raises(RequestRefused, match="there is no session"):
                    await attempt
            headers = {"Authorization": "Bearer b-token-of-the-tenant-b"}
            async with aiohttp.ClientSession(url, headers=headers) as http, http.get("/v1/sessions") as response:
                assert await response.json() == {"sessions": []}
            assert (await session.run("x")).value == "1"

    asyncio.run(main())


@pytest.mark.runtime
def test_the_end_of_an_executor_is_the_end_of_its_sessions(needs_sessions: None) -> None:
    async def main() -> None:
        arguments = ["--profiles", "bare", "--zygote-pools", "1", "--slots", "4", "--executors", "1"]
        async with local_service(arguments) as url, AsyncClient(url) as client:
            session = await client.session().open()
            running = asyncio.create_task(session.run("import time\ntime.sleep(100)", limits={"timeout_s": 200}))
            await _until_a_cell_runs(url, session)
            (executor,) = (pid for pid in tree_pids(os.getpid()) if _is_executor(pid))
            os.kill(executor, signal.SIGKILL)
            with pytest.raises(SessionGone, match="its executor died"):
                await running
            with pytest.raises(SessionGone, match="has ended: its executor died"):
                await session.run("1")

    asyncio.run(main())


def _is_executor(pid: int) -> bool:
    return b"sandbox.executor" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


@pytest.mark.runtime
def test_the_examples_of_the_routes_are_accepted(server_url: str) -> None:
    async def main() -> None:
        async with (
            AsyncClient(server_url) as client,
            client.session() as session,
            aiohttp.ClientSession(server_url) as http,
        ):
            for path, example in (
                ("/v1/sessions", "OpenSession"),
                (f"/v1/sessions/{session.id}/cells", "Cell"),
                (f"/v1/sessions/{session.id}/rollback", "Rollback"),
            ):
                async with http.post(path, json=EXAMPLES[example]) as response:
                    assert response.status == 200, (path, await response.text())

    asyncio.run(main())
