"""Failures of the service, as exceptions. A failure of a call's code is data (`Result.status`), never an exception.

SandboxError
├── InvalidCall            the caller built a malformed call (also a ValueError): correct it, do not retry
├── ConfigError            a setting is wrong or impossible: correct it
│   ├── ClusterError       the cluster of the settings cannot be used, or none of its nodes can
│   └── IsolationError     this machine lacks an isolation layer that the settings require
├── RuntimeBuildError      the guest runtime could not be built (in `sandbox.runtime.build`)
├── ProtocolError          a peer sent bytes that are no valid frame: close the connection
├── NodeError              an executor or zygote failed: its calls are retried elsewhere
└── ServiceError           a client got no result; `retry_after_s` is the Retry-After of the response, if any
    ├── Overloaded         HTTP 429 or 503: retry later
    ├── RequestRefused     another HTTP 4xx, except 408 and 425: the request is wrong, do not retry
    │   └── TooLarge       HTTP 413: a client sends the calls of the request in smaller ones
    └── Unreachable        no endpoint gave a complete response within the retries
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self


class SandboxError(Exception):
    """Base class of all errors of this package."""


class InvalidCall(SandboxError, ValueError):
    """A malformed call. The message names the field, the expected value and the received one."""


class ConfigError(SandboxError):
    """A wrong setting. The message names the setting, the expected value and the received one."""


class ClusterError(ConfigError):
    """No Ray answers at the address, it has another version, or all its nodes are refused. The start fails."""


class IsolationError(ConfigError):
    """This machine lacks an isolation layer that the settings require. The start fails."""


class ProtocolError(SandboxError):
    """Bytes that are no valid frame, or a frame that is not allowed at this point."""


class NodeError(SandboxError):
    """An executor or one of its zygotes failed or exited."""


class ServiceError(SandboxError):
    """The client got no result. This error says nothing about the code of the call.

    - `retry_after_s`: the seconds of the response's `Retry-After`, or None.
    - `results`: an entry for each item of the list that a method got. It is what the method would have returned for the
      item, or None if no result had arrived. For methods without a list, `results` is empty.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None, results: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.results = results

    def with_results(self, results: Sequence[Any]) -> Self:
        """Return a copy of this error with other results. A copy, because several calls may have failed with the same
        error object."""
        return type(self)(str(self), retry_after_s=self.retry_after_s, results=results)


class Overloaded(ServiceError):
    """The server's queue is full (429), or the server is not ready (503). Later it may accept the request."""


class RequestRefused(ServiceError):
    """The request is malformed or not allowed (4xx). Sending it again does not help."""


class SessionGone(RequestRefused):
    """The session has ended, or the state is no longer kept (410). The message has the reason."""


class TooLarge(RequestRefused):
    """The request has more calls or bytes than the server accepts (413)."""


class Unreachable(ServiceError):
    """No endpoint gave a complete response within the retries."""


def first_error(errors: BaseException) -> BaseException:
    """Return the first exception of an exception group, whose members may be groups too."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors
