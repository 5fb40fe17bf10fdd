"""Our failures, as exceptions. Code failing is data (`Result.status`) and never appears here.

SandboxError
├── InvalidCall            the caller wrote a call that means nothing (a ValueError, too): fix it, do not retry
├── ConfigError            the operator asked for something that cannot be: fix the setting
│   └── IsolationError     a layer that was asked for is missing on this machine
├── ProtocolError          a peer sent bytes that are no frame: drop the peer
├── NodeError              an executor or zygote is gone: its calls are retried elsewhere
└── ServiceError           the service gave no answer (client side); `retry_after_s` where it said when
    ├── Overloaded         429 or 503: come back later
    ├── RequestRefused     another 4xx: the request is wrong, do not retry
    └── Unreachable        no endpoint answered within the retries
"""

from __future__ import annotations


class SandboxError(Exception):
    """Anything that went wrong on our side of the boundary."""


class InvalidCall(SandboxError, ValueError):
    """A malformed call. The message names the field, what was expected and what came."""


class ConfigError(SandboxError):
    """A setting that cannot hold; the message says which and what would."""


class IsolationError(ConfigError):
    """An isolation layer that was asked for is not to be had; the start ends here."""


class ProtocolError(SandboxError):
    """Bytes that are no valid frame, or a frame out of place."""


class NodeError(SandboxError):
    """An executor or one of its zygotes failed or went away."""


class ServiceError(SandboxError):
    """The client got no result. Never a verdict on the code."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(ServiceError):
    """The service is full (429) or not ready (503)."""


class RequestRefused(ServiceError):
    """The request was malformed or not allowed (4xx)."""


class Unreachable(ServiceError):
    """No endpoint answered within the retries."""


def first_error(errors: BaseException) -> BaseException:
    """Return the first exception of a possibly nested exception group."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors
