"""Reads the bodies of all requests. One body has a maximum length, and all bodies of a tenant have a budget of bytes.

- The budget of a tenant covers its bodies from the first byte until their calls are admitted or rejected. The length in
  the request's head is reserved before the first byte is read; a body without a length is reserved as it grows. So a
  body with a length that does not fit is refused at once, and not after most of the body has been sent.
- The bodies of a tenant count only against the budget of this tenant. With a tenants file, the budget of a tenant is
  its share of `queue_mb`. If this share is less than `body_mb` (one body of the largest size), the budget is `body_mb`.
  So the bodies of N tenants have at most `queue_mb` + N * `body_mb` MiB together.
- Without a tenants file, all bodies share one budget of `queue_mb`: the tenant of a call is in the body, and so unknown
  until the body is decoded.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from types import TracebackType
from typing import Self

from aiohttp import web

from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.http.auth import TENANT, tenant_name
from sandbox.gateway.http.codec import CHUNK_BYTES
from sandbox.gateway.http.errors import HttpError
from sandbox.settings.tenants import Tenant


class ByteBudget:
    """Bytes that each tenant holds, and its maximum.

    A request with the server's token has no tenant. On a server without a tenants file, no request has a tenant. The
    bytes of all requests without a tenant are counted under the name "".
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._held: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Bytes that all tenants hold."""
        return self._held.total()

    def maximum(self, tenant: Tenant | None) -> int:
        """Return the bytes that a tenant may hold."""
        config, tenants = self._dispatcher.config, self._dispatcher.tenants
        if tenants is None:
            return config.queue_mb << 20
        share = config.tenant_share if tenant is None or tenant.queue_share is None else tenant.queue_share
        server_token_share = config.tenant_share
        all_shares = tenants.total_share(config.tenant_share) + server_token_share
        # If all shares have a sum of at most 1, each is a fraction of the queue. A larger sum is scaled down to 1.
        return max(config.body_mb << 20, int((config.queue_mb << 20) * share / max(1.0, all_shares)))

    def reserve(self, tenant: Tenant | None, size: int, what: str) -> None:
        """Add `size` to the bytes that a tenant holds. Raises `HttpError` 429 if they do not fit. The error message
        begins with `what`, which says what the bytes are for."""
        name = tenant_name(tenant)
        maximum = self.maximum(tenant)
        if self._held[name] + size > maximum:
            raise HttpError(
                429,
                f"{what} of {self._held[name]} bytes, and {size} more do not fit in {maximum}; try again in 1 s",
                {"Retry-After": "1"},
            )
        self._held[name] += size

    def release(self, tenant: Tenant | None, size: int) -> None:
        """Subtract `size` from the bytes that a tenant holds."""
        name = tenant_name(tenant)
        self._held[name] -= size
        if not self._held[name]:
            del self._held[name]


class Reservation:
    """Bytes of a budget that one request holds until the end of its `with` block."""

    def __init__(self, budget: ByteBudget, tenant: Tenant | None, what: str) -> None:
        self.size = 0
        self._budget = budget
        self._tenant = tenant
        self._what = what

    def grow(self, size: int) -> None:
        """Hold at least `size` bytes. Raises `HttpError` 429 if they do not fit."""
        if size > self.size:
            self._budget.reserve(self._tenant, size - self.size, self._what)
            self.size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._budget.release(self._tenant, self.size)
        self.size = 0


class BodyReader:
    """Reads bodies of at most `max_body_bytes`."""

    def __init__(self, budget: ByteBudget, max_body_bytes: int, stall_s: float = 30.0) -> None:
        self.budget = budget
        self.max_body_bytes = max_body_bytes
        self.stall_s = stall_s

    def reservation(self, request: web.Request) -> Reservation:
        """Return a reservation for the body of a request."""
        return Reservation(self.budget, request[TENANT], "bodies are being received")

    async def read(self, request: web.Request, reservation: Reservation, max_bytes: int | None = None) -> bytes:
        """Return the body, of at most `max_bytes` (default: `max_body_bytes`), and reserve its bytes.

        Raises `HttpError`: 413 if the body is too long, 429 if it does not fit in the budget, and 408 if the client
        needs more than `stall_s` for `CHUNK_BYTES` or for the last part.
        """
        max_bytes = min(self.max_body_bytes, max_bytes or self.max_body_bytes)
        if (length := request.content_length or 0) > max_bytes:
            raise self._too_long(length, max_bytes)
        reservation.grow(length)
        content = request.content
        first = content.read_nowait() if content.is_eof() else b""  # `is_eof`: all of the body has arrived
        if content.at_eof():  # all of the body has been read too: a small body comes together with its head
            if len(first) > max_bytes:
                raise self._too_long(len(first), max_bytes)
            reservation.grow(len(first))
            return first
        body = io.BytesIO()  # it grows without copies, and many small chunks take no more memory than one
        body.write(first)
        size = len(first)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.stall_s) as timeout:
                async for chunk in content.iter_any():
                    if (size + len(chunk)) // CHUNK_BYTES > size // CHUNK_BYTES:
                        timeout.reschedule(loop.time() + self.stall_s)
                    size += len(chunk)
                    if size > max_bytes:
                        raise self._too_long(size, max_bytes)
                    reservation.grow(size)
                    body.write(chunk)
        except TimeoutError:
            raise HttpError(
                408,
                f"the body stopped after {size} bytes: expected the rest, or {CHUNK_BYTES} bytes more, within "
                f"{self.stall_s:g} s; send it faster, or start the server with a larger --stall-s",
            ) from None
        return body.getvalue()

    def _too_long(self, size: int, max_bytes: int) -> HttpError:
        advice = "send smaller batches, or start the server with a larger --body-mb"
        if max_bytes < self.max_body_bytes:
            advice = "send less"
        return HttpError(413, f"a body of {size} bytes or more, expected at most {max_bytes}; {advice}")
