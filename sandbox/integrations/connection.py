"""The client that all integrations of this package use: one client per server in each process.

A process may have thousands of environments and sandboxes. They share this client, and so they share its connections.
Without arguments the client uses the URL in `RSTAR_SANDBOX_URL` and the token in `RSTAR_SANDBOX_TOKEN`.
"""

from __future__ import annotations

import atexit
import os
import threading
from functools import cache

from sandbox.client import Client
from sandbox.client.clients import DEFAULT_ENDPOINT
from sandbox.errors import ServiceError
from sandbox.types import Result, Status

_lock = threading.Lock()


def shared_client(url: str | None = None, token: str | None = None) -> Client:
    """Return the open client of this process for the server at `url`. Raises `ValueError` for a malformed URL."""
    url = url or os.environ.get("RSTAR_SANDBOX_URL") or DEFAULT_ENDPOINT
    with _lock:  # two threads must not open two clients
        return _open_client(url, token or os.environ.get("RSTAR_SANDBOX_TOKEN") or None, os.getpid())


@cache
def _open_client(url: str, token: str | None, pid: int) -> Client:
    """Open a client. `pid` is an argument so that a forked process opens its own client: the thread of its parent's
    client does not exist in the forked process."""
    client = Client(url, token=token).open()
    atexit.register(client.close)
    return client


def checked(result: Result) -> Result:
    """Return the result if its call ran. Raises `ServiceError` for `unavailable` and `invalid`."""
    if result.status in (Status.UNAVAILABLE, Status.INVALID):
        raise ServiceError(f"the sandbox did not run the code: {result.error or 'the call has no result'}")
    return result
