"""The endpoints (URLs) of a client. This module chooses the endpoint of the next request, and the time for which an
endpoint is avoided after a failed request. It also turns a failed response into an error.

- A request goes to the endpoint with the fewest calls. Endpoints that are backing off are left out.
- The back-off of an endpoint grows with its failures in a row. After the back-off, the endpoint is on trial until it
  returns a result: it gets one request at a time while there is an endpoint without failures.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence

import aiohttp

from sandbox.backoff import backoff_s
from sandbox.errors import Overloaded, RequestRefused, ServiceError, SessionGone, TooLarge, Unreachable

MIN_RETRY_DELAY_S = 0.1
MAX_RETRY_DELAY_S = 5.0


class Endpoint:
    """One URL, its current load, and the time until which no request is sent to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_calls = 0
        """Number of calls in requests that are not finished."""
        self.num_requests = 0
        """Number of requests so far. If several endpoints have the fewest calls, the fewest requests decide."""
        self.failures = 0
        """Number of failures since the last result. Requests that failed together count once."""
        self.failed_at = 0.0
        """Time at which the last failure was counted."""
        self.backoff_until = 0.0


class Endpoints:
    """All endpoints of a client. Belongs to one event loop, whose clock it uses."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Endpoint(url) for url in urls]
        self._rng = random.Random()

    def random_backoff_s(self, failures: int, at_least_s: float = 0.0) -> float:
        """Return the back-off in seconds after this number of failures in a row, or `at_least_s` if that is longer. A
        random part of up to 50 % is added, so that many clients do not send again at the same time."""
        return max(_backoff_s(failures), at_least_s) * self._rng.uniform(1.0, 1.5)

    def next(self) -> Endpoint:
        """Return the endpoint for the next request. If all are backing off, return the endpoint whose back-off ends
        first."""
        now = _now()

        def order(endpoint: Endpoint) -> tuple[float, bool, int, int]:
            is_on_trial = endpoint.failures > 0 and endpoint.num_calls > 0
            return (max(now, endpoint.backoff_until), is_on_trial, endpoint.num_calls, endpoint.num_requests)

        return min(self.all, key=order)

    def count_failure(
        self, endpoint: Endpoint, sent_at: float, retry_after_s: float | None = None, waited_s: float = 0.0
    ) -> None:
        """Count the failure of a request that was sent at `sent_at`, and avoid its endpoint for a while.

        The endpoint is avoided for at least `retry_after_s`, and for at least `waited_s` up to `MAX_RETRY_DELAY_S`.
        A request that was in flight when the last failure was counted does not count: it has probably failed for the
        same reason.
        """
        if sent_at >= endpoint.failed_at or not endpoint.failures:
            endpoint.failures += 1
            endpoint.failed_at = _now()
        at_least_s = max(retry_after_s or 0.0, min(MAX_RETRY_DELAY_S, waited_s))
        backoff_until = _now() + self.random_backoff_s(endpoint.failures, at_least_s)
        endpoint.backoff_until = max(endpoint.backoff_until, backoff_until)

    def retry_delay_s(self, failures: int, retry_after_s: float | None = None) -> float:
        """Return the seconds until calls with this number of failures in a row are sent again: 0 if an endpoint is not
        backing off. `retry_after_s`, from the header Retry-After, is obeyed only until another endpoint is free."""
        first_free_s = min(endpoint.backoff_until for endpoint in self.all) - _now()
        if first_free_s <= 0:
            return 0.0
        return min(self.random_backoff_s(failures, retry_after_s or 0.0), max(_backoff_s(failures), first_free_s))


def _backoff_s(failures: int) -> float:
    """Return the seconds of the exponential back-off after this number of failures in a row."""
    return backoff_s(failures, MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def failure_of(url: str, response: aiohttp.ClientResponse) -> ServiceError:
    """Return the error for a response with a status other than 200."""
    text = (await response.content.read(4096)).decode("utf-8", "replace")
    message = f"{url} answered {response.status}: {text}"
    if response.status in (429, 503):
        return Overloaded(message, retry_after_s=_seconds(response.headers.get("Retry-After")))
    if response.status == 410:
        return SessionGone(message)
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
