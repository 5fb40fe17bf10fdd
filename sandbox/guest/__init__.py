"""The code inside a jail: zygotes, and the runner of a call's code. Standard library only; run by path, so flat.

`fork_batch`, `fork_memory`, `fork_refcounts` and `fork_warmup` are optimisations of the fork: without them calls are
slower, and nothing else changes. `wiped_memory` is not an optimisation: it keeps one call's data out of the next call.
"""
