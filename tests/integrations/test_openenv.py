"""Tests of the OpenEnv server with OpenEnv's own client. Sessions are isolated from each other. An outage of the
service is an error of the step."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

pytest.importorskip("openenv", reason="needs the package openenv-core")
import uvicorn
from openenv import GenericEnvClient
from openenv.core.env_server import create_app

from sandbox.integrations.openenv import CodeAction, CodeEnvironment, CodeObservation, build_app
from tests.integrations.examples import load_example

# The warnings of OpenEnv's server about its own dependencies change with their versions.
pytestmark = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore")]


@asynccontextmanager
async def serve(app: Any) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        running = asyncio.create_task(server.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await running


@pytest.mark.runtime
async def test_the_example_runs(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    await load_example("openenv_server").main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2"]
    assert all("'step_count': 2" in line for line in lines)


@pytest.mark.runtime
async def test_many_sessions_at_once_keep_their_own_variables_and_files(server_url: str) -> None:
    async def use(url: str, number: int) -> str:
        async with GenericEnvClient(url) as session:
            await session.reset()
            await session.step({"code": f"x = {number}\nopen('x', 'w').write(str(x))"})
            await session.step({"code": "x += 1\n"})
            result = await session.step({"code": "print(x, open('x').read())"})
            return str(result.observation["stdout"])

    async with serve(build_app()) as url:
        outputs = await asyncio.gather(*(use(url, number) for number in range(20)))
    assert outputs == [f"{number + 1} {number}\n" for number in range(20)]


@pytest.mark.runtime
async def test_a_failed_step_is_an_observation_and_a_reset_forgets_all(server_url: str) -> None:
    async with serve(build_app()) as url, GenericEnvClient(url) as session:
        await session.step({"code": "x = 1"})
        failed = (await session.step({"code": "x / 0"})).observation
        assert failed["exit_code"] == 1
        assert "ZeroDivisionError" in failed["stderr"]
        assert (await session.state())["last_exit_code"] == 1
        await session.reset(episode_id="second")
        assert "NameError" in (await session.step({"code": "x"})).observation["stderr"]
        assert (await session.state())["episode_id"] == "second"


async def test_an_outage_is_an_error_of_the_step(outage_url: str) -> None:
    app = create_app(partial(CodeEnvironment, outage_url), CodeAction, CodeObservation, max_concurrent_envs=2)
    async with serve(app) as url, GenericEnvClient(url) as session:
        with pytest.raises(RuntimeError, match="QueueTimeout: no slot was free"):
            await session.step({"code": "1"})


@pytest.mark.runtime
async def test_stderr_has_the_traceback_once_with_the_lines_of_the_code(server_url: str) -> None:
    environment = CodeEnvironment()
    await environment.step_async(CodeAction(code="x = 1"))
    failed = await environment.step_async(CodeAction(code="x = 2\nx / 0"))
    assert failed.stderr.count("Traceback") == 1
    assert 'File "main.py", line 2' in failed.stderr
    ended = await environment.step_async(CodeAction(code="import os\nos._exit(0)"))
    assert (ended.exit_code, ended.stderr.partition(":")[0]) == (1, "ProcessExit")
