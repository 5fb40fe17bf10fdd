"""The gateway: one asyncio process (on uvloop) that serves HTTP and owns every unfinished call.

server -> http -> calls -> (sandbox.wire) -> executors
          http -> stats -> history -> metrics
"""

from sandbox.gateway.http.routes import build_app
from sandbox.gateway.server import serve

__all__ = ["build_app", "serve"]
