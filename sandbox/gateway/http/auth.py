"""Who may talk to the gateway.

- With a token: whoever sends it. `/health` and `/ready` are open, for probes, and so are the pages, the dashboard and
  `/docs`, since a browser sends no token for a page: they hold no data, ask for the token, and fetch `/v1/stats` and
  `/openapi.json` with it.
- Without one we are on loopback, and what is to be kept out are web pages in a browser on the same machine: a foreign
  `Origin` (cross-site requests) or a foreign `Host` (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from sandbox.config import ServeConfig
from sandbox.gateway.http.errors import Refusal

DOCS_ASSETS = frozenset({"/docs/assets/swagger-ui.css", "/docs/assets/swagger-ui-bundle.js"})
OPEN_PATHS = frozenset({"/", "/docs", "/health", "/ready"}) | DOCS_ASSETS


def guard(config: ServeConfig) -> Middleware:
    """The middleware for `config`."""
    token = config.token

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is None:
            check_is_local(request.headers.get("Host", ""), request.headers.get("Origin"), config.host)
        elif request.path not in OPEN_PATHS:
            check_token(request.headers.get("Authorization", ""), token)
        return await handler(request)

    return middleware


def check_token(authorization: str, token: str) -> None:
    """Raises `Refusal` 401 unless the header carries the token; takes as long for a near miss as for a far one."""
    scheme, _, sent = authorization.partition(" ")
    matches = hmac.compare_digest(sent.strip().encode("utf-8", "replace"), token.encode())
    if scheme.lower() != "bearer" or not matches:
        what = "a wrong one came" if sent else "none came"
        raise Refusal(
            401, f"expected the token as 'Authorization: Bearer TOKEN', but {what}", {"WWW-Authenticate": "Bearer"}
        )


def check_is_local(host: str, origin: str | None, own_host: str) -> None:
    """Raises `Refusal` 403 for what a browser sends on behalf of a web page that is not ours."""
    if host and not _is_local(_name_of(host), own_host):
        raise Refusal(403, f"the Host header is {host!r:.200}, but without a token only loopback names are served")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        raise Refusal(403, f"the Origin header is {origin!r:.200}: web pages of other sites are not served")


def _name_of(host: str) -> str:
    """`host` without its port and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _is_local(name: str, own_host: str) -> bool:
    if name.lower() in ("localhost", own_host.lower()):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
