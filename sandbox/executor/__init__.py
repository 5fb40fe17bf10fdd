"""One per node: runs calls in forks of warm, jailed interpreters, under Trio.

`run_once` is one call without a service; `python -m sandbox.executor --fd N` is the process that a gateway starts.
"""

from sandbox.executor.run_once import run_once

__all__ = ["run_once"]
