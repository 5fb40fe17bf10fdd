"""The gateway: one asyncio process (on uvloop) that serves HTTP and owns every unfinished call.

An arrow means "uses":

server -> routes -> compat -> http -> judging -> calls -> (sandbox.wire) -> executors
                              http -> observe -> calls -> metrics, heap
pages: the HTML of the dashboard and of the API's description
"""

from sandbox.gateway.routes import build_app
from sandbox.gateway.server import serve

__all__ = ["build_app", "serve"]
