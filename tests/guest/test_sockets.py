"""Tests of the sockets that a call may use: socket pairs, named sockets in its own namespace, and on request a loopback
network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sandbox.types import Network
from tests.executor.calling import OWN_PYTHON, Caller, call, executor

STREAMS = """
import asyncio, socket
async def main():
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    reader, _ = await asyncio.open_connection(sock=theirs)
    writer.write(b"x" * (1 << 20))
    writer.writelines([b"y" * 1000] * 3)
    writer.write_eof()
    return len(await reader.read())
asyncio.run(main())
"""


@pytest.fixture(scope="module", params=["own", "runtime"])
def each_python(request: pytest.FixtureRequest) -> Iterator[Caller]:
    """Start an executor: first with the Python of the tests, and then with that of the guest runtime. Two versions are
    needed because asyncio uses sendmsg only since Python 3.12."""
    python: str | Path = OWN_PYTHON if request.param == "own" else request.getfixturevalue("guest_python")
    with executor(python) as caller:
        yield caller


def test_asyncio_streams_work(each_python: Caller) -> None:
    assert each_python.run(STREAMS).value == str((1 << 20) + 3000)


SENDING = """
import socket
def send_and_receive(timeout, flags):
    ours, theirs = socket.socketpair()
    ours.settimeout(timeout)
    return ours.sendmsg([b"x", bytearray(b"yz")], (), flags), theirs.recvmsg(9)[0]
[send_and_receive(timeout, flags) for timeout in (None, 0, 1) for flags in (0, socket.MSG_DONTWAIT)]
"""


def test_sendmsg_sends_data_but_no_descriptors(each_python: Caller) -> None:
    assert each_python.run(SENDING).value == repr([(3, b"xyz")] * 6)
    error = each_python.run("import socket\nsocket.send_fds(socket.socketpair()[0], [b'x'], [1])").error
    assert error is not None
    assert (error.type, error.message[:9]) == ("PermissionError", "[Errno 1]")


NAMED = {
    "Manager": """
import multiprocessing
with multiprocessing.Manager() as manager:
    shared = manager.dict(a=1)
    process = multiprocessing.Process(target=shared.update, args=({"b": 2},))
    process.start(); process.join()
    print(shared.copy())
""",
    "Manager, spawn": """
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Manager() as manager:
        print(dict(manager.dict(a=1, b=2)))
""",
    "fork server": """
import multiprocessing, concurrent.futures
def shown(pair):
    return dict([pair])
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        first, second = pool.map(shown, [("a", 1), ("b", 2)])
    print({**first, **second})
""",
    "asyncio server": """
import asyncio
async def answer(reader, writer):
    writer.write(await reader.readline()); await writer.drain(); writer.close()
async def ask(n):
    reader, writer = await asyncio.open_unix_connection("s")
    writer.write(b"%d\\n" % n)
    return int(await reader.readline())
async def main():
    async with await asyncio.start_unix_server(answer, "s"):
        print(dict(zip("ab", await asyncio.gather(ask(1), ask(2)))))
asyncio.run(main())
""",
    "datagrams, abstract name": """
import socket
server, client = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
server.bind("\\0name")
client.connect("\\0name")
client.send(b"{'a': 1, 'b': 2}")
print(eval(server.recv(99)))
""",
    "Listener and Client": """
import threading
from multiprocessing.connection import Client, Listener
with Listener(family="AF_UNIX", authkey=b"k") as listener:
    threading.Thread(target=lambda: Client(listener.address, authkey=b"k").send({"a": 1, "b": 2})).start()
    print(listener.accept().recv())
""",
    "a long queue": """
import socket
with socket.socket(socket.AF_UNIX) as server:
    server.bind("s")
    server.listen(1 << 20)
    print({"a": 1, "b": 2})
""",
}


@pytest.mark.parametrize("name", NAMED)
def test_processes_of_a_call_reach_each_other_by_named_sockets(name: str, each_python: Caller) -> None:
    result = each_python.run(NAMED[name])
    assert result.stdout == "{'a': 1, 'b': 2}\n", result


HTTP = """
import http.server, threading, urllib.request, socket
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"hi")
    def log_message(self, *args): pass
with http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for host in ("127.0.0.1", "localhost"):
        print(urllib.request.urlopen(f"http://{host}:{server.server_port}/").read().decode())
    server.shutdown()
""".replace("PORT", "8000")
UDP = """
import socket
server, client = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
server.bind(("127.0.0.1", 0))
client.sendto(b"hi", server.getsockname())
print(server.recv(9).decode())
"""
ASYNCIO = """
import asyncio
async def answer(reader, writer):
    writer.writelines([b"h", b"i"]); await writer.drain(); writer.close()
async def main():
    async with await asyncio.start_server(answer, "localhost", 8000):
        reader, _ = await asyncio.open_connection("localhost", 8000)
        print((await reader.read()).decode())
asyncio.run(main())
"""


@pytest.mark.parametrize(("code", "stdout"), [(HTTP, "hi\nhi\n"), (UDP, "hi\n"), (ASYNCIO, "hi\n")])
def test_a_call_with_loopback_reaches_itself_by_tcp_and_udp(code: str, stdout: str, each_python: Caller) -> None:
    # The second call binds the same port. This shows that the first call has left nothing behind.
    for _ in range(2):
        result = each_python.run(code, network=Network.LOOPBACK)
        assert result.stdout == stdout, result


@pytest.mark.parametrize("code", [HTTP, UDP])
def test_a_call_without_loopback_has_no_internet_sockets(code: str, each_python: Caller) -> None:
    error = each_python.run(code).error
    assert error is not None and error.type == "PermissionError"


def test_few_slots_keep_their_network_namespaces() -> None:
    with executor(slots=70) as caller:
        calls = [call(f"import time; time.sleep(0.5); {n}") for n in range(70)]
        assert [result.value for result in caller.run_all(calls)] == [str(n) for n in range(70)]
        links: list[str] = []
        for pid in caller.processes():
            try:
                fds = os.listdir(f"/proc/{pid}/fd")
            except PermissionError as error:
                pytest.skip(f"needs to see the descriptors of the zygote: {error}")
            for fd in fds:
                with suppress(FileNotFoundError):  # the descriptor was closed meanwhile
                    links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        kept = sum(link.startswith("net:") for link in links) / 2  # the zygote and its template have the same
        assert 1 <= kept <= 64
