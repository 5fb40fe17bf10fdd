"""How fast and how safe are calls and episodes on the nodes of a Ray cluster?

    python -m bench.cluster [--parts episodes,calls,faults] [--calls 30000] [--kill-every 10] [--cut 20] [--json]

- `episodes` measures the seconds to collect episodes: one at a time, many in one process, and on 1 to 8 nodes. It also
  collects episodes while processes are killed.
- `calls` measures calls/s and latency with executors on one node, and with executors that are processes of the gateway.
- `faults` sends calls to several nodes while nodes are killed and one node is cut off.

All nodes are on this machine (`bench.servers.ray_cluster`), so more nodes are not faster here. Needs the extra
`cluster`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.cluster_parts import calls, episodes, faults
from bench.harness import arguments, command
from bench.harness.tables import Block, Result

PARTS: dict[str, Any] = {"episodes": episodes, "calls": calls, "faults": faults}
"""Modules with `measure(args)`, whose result has its requirements, and with `tables(result)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts. Return exit code 1 if a requirement is not met."""
    return command.run_benchmark(_parser(), argv, _measure, tables)


def _parser() -> argparse.ArgumentParser:
    parser = arguments.parser("cluster", __doc__, "seed")
    count, seconds = arguments.count, arguments.seconds
    parser.add_argument("--parts", type=arguments.names_of(PARTS), default=tuple(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=count, default=2, help="rounds of the part calls (default: 2)")
    parser.add_argument("--calls-per-round", type=count, default=6400, help="calls of a round (default: 6400)")
    parser.add_argument("--calls", type=count, default=30_000, help="calls under faults (default: 30000)")
    parser.add_argument("--nodes", type=count, default=4, help="nodes under faults (default: 4)")
    parser.add_argument("--kill-every", type=seconds, default=10.0, metavar="S", help="mean seconds between two kills")
    parser.add_argument("--cut", type=seconds, default=20.0, metavar="S", help="seconds for which a node is cut off")
    episodes.add_options(parser)
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    result = {part: PARTS[part].measure(args) for part in args.parts}
    return {**result, "requirements": [row for part in result.values() for row in part.pop("requirements")]}


def tables(result: Result) -> list[Block]:
    """One table or sentence for each part."""
    return [block for part, module in PARTS.items() if part in result for block in module.tables(result[part])]


if __name__ == "__main__":
    raise SystemExit(main())
