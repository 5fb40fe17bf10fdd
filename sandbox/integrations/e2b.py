"""`Sandbox` and `AsyncSandbox` with the interface of `e2b_code_interpreter`, E2B's package. The sandbox runs the code.

    from sandbox.integrations.e2b import Sandbox  # instead of: from e2b_code_interpreter import Sandbox

They have `run_code`, `files.write`, `files.read`, `files.list`, `kill` and the context manager, for Python only. This
module needs no part of E2B. A failure of the service raises `ServiceError` and is never an `Execution`.
"""

from __future__ import annotations

import asyncio
import glob
import json
import posixpath
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self, TypeVar

from sandbox.integrations.connection import checked, shared_client
from sandbox.integrations.e2b_results import Execution, ExecutionError, Logs, Result
from sandbox.integrations.replayed_session import ReplayedSession
from sandbox.types import DEFAULT_LIMITS, Limits, Status
from sandbox.types import Result as CallResult

__all__ = ["AsyncSandbox", "Execution", "ExecutionError", "Logs", "Result", "Sandbox"]

T = TypeVar("T")

_LISTING = ".listing.json"
"""File in the session's directory into which `_LIST_CODE` writes its result."""
_LIST_CODE = f"""
import json, os
with os.scandir({{path!r}}) as entries:
    listing = [(entry.name, os.path.isdir(entry), entry.stat(follow_symlinks=False).st_size) for entry in entries]
with open({_LISTING!r}, "w") as file:
    json.dump(listing, file)
"""
"""Code that lists a directory. The f-string inserts the name of the listing and leaves `{path!r}` for `_list`, which
inserts the path by `format`."""


class AsyncSandbox:
    """One session. E2B keeps a process for each session. Here, each call runs the earlier code of the session again.
    The module `replayed_session` lists the effects of this."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        envs: Mapping[str, str] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """Without `url` and `token`, `RSTAR_SANDBOX_URL` and `RSTAR_SANDBOX_TOKEN` are used."""
        self._client = shared_client(url, token)
        self._session: ReplayedSession | None = ReplayedSession({"limits": limits, "env": envs or {}})
        self._limits = limits
        self._num_executions = 0
        self.files: Any = SimpleNamespace(read=self._read, write=self._write, list=self._list)

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a session, with the arguments of the constructor."""
        return cls(*args, **kwargs)

    async def run_code(self, code: str, *, timeout: float | None = None) -> Execution:
        """Run the earlier code of the session and then `code`. `timeout` is the time limit of both together, in seconds
        of virtual time (wall time without the time spent waiting for a core). Raises `InvalidCall` and `ServiceError`.
        """
        session = self._opened()
        limits = self._limits if timeout is None else replace(self._limits, timeout_s=timeout)
        # `record` adds the code to the session if the result is ok.
        result = session.record(code, await self._run(code, figures=True, limits=limits))
        self._num_executions += 1
        return Execution.of(result, self._num_executions)

    async def kill(self) -> bool:
        """End the session. Returns whether it was alive."""
        is_alive, self._session = self._session is not None, None
        return is_alive

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def _write(self, path: str, data: str | bytes) -> None:
        """Write a file at a relative path. Raises `InvalidCall` for another path."""
        self._opened().write_file(posixpath.normpath(path), data.encode() if isinstance(data, str) else data)

    async def _read(self, path: str, format: str = "text") -> str | bytes:
        """Return a file as text in UTF-8, or with `format="bytes"` as bytes. Raises `InvalidCall` for a path that is
        not relative, `FileNotFoundError`, and `OSError` if the session cannot run again or the file is too large."""
        name = posixpath.normpath(path)
        data = await self._returned_file(path, "", name)
        return data if format == "bytes" else data.decode(errors="replace")

    async def _list(self, path: str = ".") -> list[Any]:
        """Return `name`, `path`, `type` ("file" or "dir") and `size` of each entry. Raises `FileNotFoundError`, and
        `OSError` if the session cannot run again or the path cannot be listed."""
        directory = posixpath.normpath(path)
        data = await self._returned_file(path, _LIST_CODE.format(path=directory), _LISTING)
        try:
            entries = sorted((str(name), bool(is_dir), int(size)) for name, is_dir, size in json.loads(data))
        except (ValueError, TypeError, OverflowError, RecursionError):  # the code of the session can write anything
            raise OSError(f"{path}: the session returned no list of files") from None
        return [
            SimpleNamespace(
                name=name,
                path=posixpath.normpath(f"{directory}/{name}"),
                type="dir" if is_dir else "file",
                size=size,
            )
            for name, is_dir, size in entries
        ]

    async def _returned_file(self, path: str, code: str, name: str) -> bytes:
        """Run `code` after the earlier code, and return the content of the file `name`. `code` does not become part of
        the session. `path` is the user's name of the file, for error messages."""
        result = await self._run(code, in_session=False, return_files=[glob.escape(name)])
        result = self._opened().result_of(code, result)  # unlike `record`, it adds nothing to the session
        if result.status is not Status.OK:
            # An exception of the sandbox arrives as a `CallError`, which has only the name of its type.
            is_absent = result.error is not None and result.error.type == "FileNotFoundError"
            raise (FileNotFoundError if is_absent else OSError)(f"{path}: {result.error or result.status.description}")
        if name in result.files:
            return result.files[name]
        if "files" in result.truncated:
            raise OSError(f"{path}: it is too large to be returned")
        raise FileNotFoundError(f"{path}: the session has no such file")

    def _opened(self) -> ReplayedSession:
        if self._session is None:
            raise RuntimeError("the sandbox was killed; create another one")
        return self._session

    async def _run(self, code: str, **fields: Any) -> CallResult:
        """Run the earlier code and then `code`. Raises `ServiceError` if the service has not run them."""
        call = self._opened().call(code, **fields)
        return checked(await self._wait(self._client.submit(call)))

    async def _wait(self, future: Future[CallResult]) -> CallResult:
        return await asyncio.wrap_future(future)


class _BlockingSandbox(AsyncSandbox):
    """An `AsyncSandbox` whose methods wait in the calling thread, so that their coroutines never suspend."""

    async def _wait(self, future: Future[CallResult]) -> CallResult:
        return future.result()


class Sandbox:
    """`AsyncSandbox` without `await`. Its session behaves in the same way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._sandbox = sandbox = _BlockingSandbox(*args, **kwargs)
        self.files: Any = SimpleNamespace(
            read=lambda *args, **kwargs: _run_blocking(sandbox._read(*args, **kwargs)),
            write=lambda *args, **kwargs: _run_blocking(sandbox._write(*args, **kwargs)),
            list=lambda *args, **kwargs: _run_blocking(sandbox._list(*args, **kwargs)),
        )

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Self:
        return cls(*args, **kwargs)

    def run_code(self, code: str, *, timeout: float | None = None) -> Execution:
        return _run_blocking(self._sandbox.run_code(code, timeout=timeout))

    def kill(self) -> bool:
        return _run_blocking(self._sandbox.kill())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends. Unlike `asyncio.run` this works inside a running event loop, as in a
    notebook."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("the coroutine has suspended")
