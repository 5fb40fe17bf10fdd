"""Runs calls in forks of jailed, preloaded interpreters, under Trio.

`python -m sandbox.executor --fd N` is the process that a gateway starts; `run_once` runs one call without a gateway.

    connection, run_once -> executor -> zygote_pool -> slots, call_state, zygote_frames, unix_stream
                            executor -> monitor -> virtual_clock, process_tree
                            executor -> result
"""

from sandbox.executor.run_once import run_once

__all__ = ["run_once"]
