"""Tests of the choice of nodes from Ray's list. Ray is loaded in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.cluster.serving import needs_ray

USABLE = """
import json, sys
from sandbox.cluster.ray_nodes import _usable_nodes
print(json.dumps([[node["NodeID"] for node in _usable_nodes(nodes)] for nodes in json.loads(sys.argv[1])]))
"""


def usable(*lists: list[dict[str, Any]]) -> Any:
    """Return the ids of the usable nodes of each list."""
    command = [sys.executable, "-W", "ignore", "-c", USABLE, json.dumps(lists)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)


def node(name: str, *, is_alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": is_alive, "Resources": resources}


@needs_ray
def test_a_node_without_cpus_is_never_used() -> None:
    head, gateway, worker, lost = node("head"), node("gateway"), node("worker", CPU=16), node("lost", is_alive=False)
    marked = node("marked", CPU=16, rstar_sandbox=1)
    assert usable([head], [head, lost], [head, gateway], []) == [[], [], [], []]
    assert usable([head, gateway, worker], [head, worker, marked]) == [["worker"], ["marked"]]
