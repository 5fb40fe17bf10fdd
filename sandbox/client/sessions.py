"""Sessions of a client: an interpreter on the server that keeps its variables and files from cell to cell.

    async with client.session() as session:
        await session.run("x = 6")
        result = await session.run("x * 7")

No request of a session is sent again by itself: a cell that was sent may have run. If a request fails, `if_state` tells
a cell that ran from one that did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any

import aiohttp
import msgpack

from sandbox.client.endpoints import Endpoint, failure_of, short_reason
from sandbox.errors import ServiceError, Unreachable
from sandbox.fields import with_encoded_texts
from sandbox.types import CellResult, Limits

_HEADERS = {"Content-Type": "application/msgpack"}


class AsyncSession:
    """A session, used as `async with client.session() as session`, or between `open` and `close`.

    `head` is the number of the state from which the next cell runs, and `states` are the numbers of all states that the
    server keeps.
    """

    def __init__(self, http: aiohttp.ClientSession, endpoint: Endpoint, fields: Mapping[str, Any]) -> None:
        self.id = ""
        """Empty before the session is open."""
        self.head = 0
        self.states: tuple[int, ...] = ()
        self._http = http
        self._url = f"{endpoint.url}/v1/sessions"
        self._fields = fields

    async def open(self) -> AsyncSession:
        """Open the session. Raises `ServiceError`."""
        self._update(await self._request("POST", "", _encoded(self._fields)))
        return self

    async def close(self) -> None:
        """Close the session. Does nothing if it is not open."""
        if self.id:
            await self._request("DELETE", f"/{self.id}")
            self.id = ""

    async def __aenter__(self) -> AsyncSession:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(self, code: str, **fields: Any) -> CellResult:
        """Run a cell and return its result. `fields` are fields of a cell in POST /v1/sessions/ID/cells, such as
        `stdin`, `files`, `limits`, `state` and `if_state`.

        Raises `SessionGone` if the session has ended or the state is no longer kept, and other `ServiceError`s.
        """
        raw = await self._request("POST", f"/{self.id}/cells", _encoded({"code": code, **fields}))
        result = CellResult.decode(raw)
        self.head, self.states = result.session.head, result.session.states
        return result

    async def rollback(self, state: int) -> None:
        """Make an earlier state the head. Raises `SessionGone` if it is no longer kept."""
        self._update(await self._request("POST", f"/{self.id}/rollback", {"state": state}))

    def _update(self, description: Mapping[str, Any]) -> None:
        self.id, self.head = description["session"], description["head"]
        self.states = tuple(description["states"])

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if path and not self.id:
            raise ServiceError("this session is not open: use it as `async with client.session() as session`")
        data = None if body is None else msgpack.packb(body, unicode_errors="surrogatepass")
        try:
            async with self._http.request(method, self._url + path, data=data, headers=_HEADERS) as response:
                if response.status != 200:
                    raise await failure_of(self._url, response)
                if response.content_type == "application/json":
                    return await response.json()
                return msgpack.unpackb(await response.read(), unicode_errors="surrogatepass")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{self._url}: {short_reason(error)}") from None


def _encoded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a cell or a session as plain data."""
    encoded = dict(fields)
    if isinstance(fields.get("limits"), Limits):
        encoded["limits"] = asdict(fields["limits"])
    if "files" in fields:
        encoded["files"] = with_encoded_texts(fields["files"])
    return encoded
