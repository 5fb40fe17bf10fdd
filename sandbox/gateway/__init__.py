"""HTTP in, calls out: routes, admission, dispatch, metrics.

    routes -> codec, intake -> dispatch -> admission -> queue
                                  |-> node -> (wire) -> executor

asyncio on uvloop throughout. Only `dispatch` and `node` have a clock or a socket; `admission` and `queue` are pure.
"""

from sandbox.gateway.http.routes import build_app
from sandbox.gateway.server import serve

__all__ = ["build_app", "serve"]
