"""Tests of `--cluster` without a cluster: wrong settings, wrong addresses, and a machine without Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import subprocess
import sys
import threading
import time

import pytest

from sandbox.cluster import ray_driver
from sandbox.cluster.ray_driver import RayDriver
from sandbox.commands import main as cli
from sandbox.errors import ConfigError, NodeError
from sandbox.executor.pool_plan import GUEST_ENV
from sandbox.settings.server import ServeConfig
from tests.cluster.serving import needs_ray


@pytest.mark.parametrize("text", ["ray=", "k8s", "rays", "ray=host", "ray=host:port", "ray=ray://host:1 2"])
def test_a_malformed_cluster_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected ray, ray=auto or ray=HOST:PORT"):
        ServeConfig(cluster=text)


@pytest.mark.parametrize(
    ("text", "address"),
    [("ray", "auto"), ("ray=auto", "auto"), ("ray=head:6379", "head:6379"), ("ray=[::1]:6379", "[::1]:6379")],
)
def test_a_cluster_has_an_address(text: str, address: str) -> None:
    assert ServeConfig(cluster=text).ray_address == address


@needs_ray
def test_an_address_where_nothing_listens_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = time.monotonic()
    command = [sys.executable, "-m", "sandbox", "serve", "--cluster", f"ray=127.0.0.1:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and time.monotonic() - start < 10
    expected = f"rstar-sandbox: --cluster ray=127.0.0.1:{port}: no Ray answers there ([Errno 111] Connection refused)\n"
    assert done.stderr == expected


@needs_ray
def test_an_address_where_another_server_answers_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(64)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert cli.main(["serve", "--cluster", f"ray=127.0.0.1:{server.getsockname()[1]}"]) == 2
        thread.join()
    assert "no Ray answers there, but another server: b'HTTP/1.1 '" in capsys.readouterr().err


def test_without_ray_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["serve", "--cluster", "ray"]) == 2
    expected = "rstar-sandbox: --cluster needs Ray; install it with pip install 'rstar-sandbox[cluster]'\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("", "it printed nothing"),
        ("Traceback (most recent call last):\n  ...\nValueError: x[0] is wrong\n\n", "ValueError: x[0] is wrong"),
        (
            "[2026-11-25 14:54:45,857 W 19847 19847] a warning\n"
            "[2026-11-25 14:54:58,842 C 20215 20215] raylet_ipc_client.cc:85: Failed at /tmp/ray/s/sockets/raylet\n"
            "*** StackTrace Information ***\n/lib/python3.11.so(_Py) [0x7f92] _Py\n",
            "raylet_ipc_client.cc:85: Failed at /tmp/ray/s/sockets/raylet; this machine is no node of the cluster: "
            "start one with `ray start --address=HOST:PORT --num-cpus=0`",
        ),
    ],
)
def test_the_reason_why_a_driver_has_ended_is_one_line(stderr: str, reason: str) -> None:
    driver = RayDriver({})
    driver._stderr.write(stderr.encode())
    driver._stderr.flush()
    assert driver._last_error() == reason
    driver._stderr.close()


@pytest.mark.asyncio
async def test_a_driver_that_closes_its_socket_and_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Running:
        async def wait(self) -> int:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(ray_driver, "STOP_TIMEOUT_S", 0.01)
    driver = RayDriver({})
    driver._process = Running()  # type: ignore[assignment]
    driver._reader = asyncio.StreamReader()
    driver._reader.feed_eof()
    with pytest.raises(NodeError, match="the Ray driver has closed its socket: it printed nothing"):
        await anext(driver.snapshots())
    driver._stderr.close()


def test_the_environment_of_calls_has_no_variable_of_ray() -> None:
    assert not [name for name in GUEST_ENV if name.startswith("RAY")]
