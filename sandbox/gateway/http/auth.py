"""Decides which requests are served.

- With a token or tenants, a request must carry the server's token or that of a tenant, as a bearer token or as the
  password in its URL. `PUBLIC_PATHS` are exceptions: `/health` and `/ready` for probes, and the pages, since a browser
  sends no token with a page. The pages contain no data; they ask for the token and fetch their data with it.
- Without a token the server listens on loopback only. Then web pages in a browser on the same machine are kept out:
  requests with a foreign `Origin` (cross-site requests) or a foreign `Host` (DNS rebinding) are rejected.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
from functools import lru_cache

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sandbox.gateway.calls.dispatcher import Dispatcher
from sandbox.gateway.http.errors import HttpError
from sandbox.settings.tenants import Tenant, Tenants

DOCS_ASSETS = frozenset({"/docs/assets/swagger-ui.css", "/docs/assets/swagger-ui-bundle.js"})
TENANT = web.RequestKey("tenant", Tenant)
"""The tenant of a request's token. Missing for the server's token, and on a server without tenants."""
PUBLIC_PATHS = frozenset({"/", "/docs", "/health", "/ready"}) | DOCS_ASSETS


def auth_middleware(dispatcher: Dispatcher) -> Middleware:
    """Return the middleware that checks each request, and stores the tenant of its token as `TENANT`."""
    config = dispatcher.config

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not config.needs_token:
            check_local_request(request.headers.get("Host", ""), request.headers.get("Origin"), config.host)
        elif request.path not in PUBLIC_PATHS:
            token = sent_token(request.headers.get("Authorization", ""), request.headers.get("Origin"))
            tenant = check_token(token, config.token, dispatcher.tenants)
            if tenant is not None:
                request[TENANT] = tenant
        return await handler(request)

    return middleware


def sent_token(authorization: str, origin: str | None = None) -> str:
    """Return the token in a header, or "". With basic authentication the token is the password; it is for clients that
    accept only a URL. A request of a web page (with an `Origin`) cannot use it, because a browser sends a password
    again by itself, also for a page of another site."""
    scheme, _, sent = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return sent.strip()
    if scheme.lower() != "basic" or origin is not None:
        return ""
    try:
        return base64.b64decode(sent).decode().partition(":")[2]
    except ValueError:
        return ""


def check_token(token: str, server_token: str | None, tenants: Tenants | None = None) -> Tenant | None:
    """Return the tenant of a token; None for the server's token. Raises `HttpError` 401 for another token. The time of
    the comparison says nothing about the characters of a token."""
    if token and tenants is not None and (tenant := tenants.find(token)) is not None:
        return tenant
    if server_token is not None and hmac.compare_digest(token.encode("utf-8", "replace"), server_token.encode()):
        return None
    received = "a wrong token" if token else "no token"
    raise HttpError(
        401,
        f"expected the token as 'Authorization: Bearer TOKEN', got {received}",
        {"WWW-Authenticate": "Bearer"},
    )


def check_local_request(host: str, origin: str | None, own_host: str) -> None:
    """Raises `HttpError` 403 for a request that a browser sends for a web page of another site."""
    if host and not _is_local(_name_of(host), own_host):  # browsers always send a Host header
        raise HttpError(403, f"the Host header is {host!r:.200}, but without a token only loopback names are served")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        raise HttpError(403, f"the Origin header is {origin!r:.200}: web pages of other sites are not served")


def _name_of(host: str) -> str:
    """Return a Host header without its port, and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


@lru_cache(maxsize=64)
def _is_local(name: str, own_host: str) -> bool:
    if name.lower() in ("localhost", own_host.lower()):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
