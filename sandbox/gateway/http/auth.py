"""Decides which requests are served.

- If the server has a token or tenants (owners of calls, each with its own token), a request must carry one of these
  tokens: as a bearer token, or as the password in its URL. `PUBLIC_PATHS` need no token: `/health` and `/ready` are for
  probes, and a browser sends no token when it loads a page. The pages contain no data. They ask for the token and fetch
  their data with it.
- A server without a token listens on loopback only. It still protects itself against web pages that a browser on the
  same machine shows: it rejects requests with a foreign `Origin` (cross-site requests) or a foreign `Host` (DNS
  rebinding).
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
TENANT: web.RequestKey[Tenant | None] = web.RequestKey("tenant")
"""The tenant whose token the request has; None if the request has the server's token, and on a server without
tenants."""
PUBLIC_PATHS = frozenset({"/", "/docs", "/health", "/ready"}) | DOCS_ASSETS


def tenant_name(owner: Tenant | None) -> str:
    """Return the name of the tenant of a request's token. It is empty for the server's token, and on a server without
    tenants."""
    return "" if owner is None else owner.name


def auth_middleware(dispatcher: Dispatcher) -> Middleware:
    """Return the middleware that checks each request and stores the tenant of its token under the key `TENANT`."""
    config = dispatcher.config

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[TENANT] = None
        if not config.needs_token:
            check_local_request(request.headers.get("Host", ""), request.headers.get("Origin"), config.host)
        elif request.path not in PUBLIC_PATHS:
            token = sent_token(request.headers.get("Authorization", ""), request.headers.get("Origin"))
            request[TENANT] = check_token(token, config.token, dispatcher.tenants)
        return await handler(request)

    return middleware


def sent_token(authorization: str, origin: str | None = None) -> str:
    """Return the token in an `Authorization` header, or "" if there is none.

    With basic authentication, the token is the password. Basic authentication is for clients that can be configured
    only by a URL (`http://user:TOKEN@host`). It is refused for a request with an `Origin`, which comes from a web page:
    a browser remembers a password and adds it to each request to this server, also to a request of another site's page.
    """
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
    """Return the tenant of a token, or None for the server's token. Raises `HttpError` 401 for any other token. The
    check is safe against timing attacks: `tenants` looks up a digest, and `compare_digest` takes constant time."""
    if token and tenants is not None and (tenant := tenants.find(token)) is not None:
        return tenant
    # "replace": aiohttp decodes a header with "surrogateescape", and such a text cannot be encoded strictly.
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


@lru_cache(maxsize=64)  # saves the parsing of an address in each request; bounded, since clients choose the names
def _is_local(name: str, own_host: str) -> bool:
    if name.lower() in ("localhost", own_host.lower()):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
