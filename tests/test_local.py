"""Tests of `local_service`: the server is ready when its URL is yielded, and ends with its parent."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import local
from sandbox.client import AsyncClient
from sandbox.errors import ServiceError
from sandbox.local import local_service

pytestmark = pytest.mark.usefixtures("guest_python", "needs_isolation")

SMALL_SERVER = ("--profiles", "bare", "--zygote-pools", "1", "--slots", "4")
DEADLINE_S = 120

PARENT = """
import asyncio, sys
from sandbox.local import local_service

async def main():
    async with local_service(sys.argv[1:]) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_server_ends_with_its_block_even_after_an_exception() -> None:
    async def main() -> str:
        async with local_service(SMALL_SERVER) as url, AsyncClient(url) as client:
            assert (await client.execute("1 + 1")).value == "2"
            raise KeyError(url)

    with pytest.raises(KeyError) as raised:
        asyncio.run(main())
    assert not asyncio.run(is_ready(raised.value.args[0]))


def test_the_server_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, *SMALL_SERVER], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        (server_pid,) = child_pids(parent.pid)
        assert asyncio.run(is_ready(url))
        pidfd = os.pidfd_open(server_pid)
        parent.send_signal(signal.SIGKILL)
    try:
        ready, _, _ = select.select([pidfd], [], [], DEADLINE_S)
        assert ready, "the server still runs"
    finally:
        os.close(pidfd)


@pytest.mark.parametrize(
    ("arguments", "message"), [(("--no-such-flag",), "ended (2)"), (("--python", "/nowhere"), "/nowhere")]
)
def test_a_server_that_does_not_start_raises_the_reason(arguments: tuple[str, ...], message: str) -> None:
    async def main() -> None:
        async with local_service(arguments):
            pytest.fail("the server is ready")

    with pytest.raises(ServiceError) as raised:
        asyncio.run(main())
    assert message in str(raised.value)


LONG_LOG = "for n in range(20_000): print(f'line {n} of a long log')\n"


def test_the_error_contains_the_end_of_a_long_log(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with local_service():
            pytest.fail("the server is ready")

    monkeypatch.setattr(local, "_CHILD_CODE", LONG_LOG + "raise SystemExit('this is why')")
    with pytest.raises(
        ServiceError, match=r"(?s)ended \(1\); the end of its log:\n.*line 19999 of a long log\nthis is why$"
    ):
        asyncio.run(main())


def test_the_address_is_read_from_the_end_of_a_long_log(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> str:
        async with local_service() as url:
            return url

    start_line = "print('rstar-sandbox 0.1.0 on http://127.0.0.1:1  isolation=none', flush=True)\n"
    monkeypatch.setattr(local, "_CHILD_CODE", LONG_LOG + start_line + "import signal\nsignal.pause()")
    assert asyncio.run(main()) == "http://127.0.0.1:1"


async def is_ready(url: str) -> bool:
    async with AsyncClient(url, retries=0) as client:
        return await client.ready()


def child_pids(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
