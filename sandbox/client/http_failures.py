"""The errors of a client for responses that are not 200, and for requests without a response."""

from __future__ import annotations

import math

import aiohttp

from sandbox.errors import Overloaded, RequestRefused, ServiceError, TooLarge, Unreachable


async def failure_of(url: str, response: aiohttp.ClientResponse) -> ServiceError:
    """Return the error for a response with a status other than 200."""
    text = (await response.content.read(4096)).decode("utf-8", "replace")
    message = f"{url} answered {response.status}: {text}"
    if response.status in (429, 503):
        return Overloaded(message, retry_after_s=_seconds(response.headers.get("Retry-After")))
    if response.status == 413:
        return TooLarge(message)
    if 400 <= response.status < 500 and response.status not in (408, 425):  # these two mean: send it again
        return RequestRefused(message)
    return Unreachable(message)


def _seconds(header: str | None) -> float | None:
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def short_reason(error: Exception) -> str:
    """Return the reason why a request got no response."""
    if isinstance(error, aiohttp.ClientConnectorError):
        is_refused = isinstance(error.os_error, ConnectionRefusedError)
        return "connection refused" if is_refused else f"cannot connect ({error.os_error})"
    return str(error) or type(error).__name__
