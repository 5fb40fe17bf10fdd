"""The driver process of Ray, and the actor that it keeps on each node. The only module that imports Ray.

Invariants:
- The actor reserves no CPU. Otherwise Ray could not place it on a node whose CPUs are all taken. Calls on such a node
  wait for a core, but this costs them nothing: their limits are in virtual time, which excludes the waiting.
- Actors belong to the driver: they die with it. If an actor dies earlier, Ray restarts it, as often as necessary. The
  names of the actors are in a namespace of this driver.
- An actor creates everything in its constructor, since a restart by Ray runs nothing else. If its agent has failed, the
  actor ends its process, so that Ray restarts it.
- The driver never waits for an actor or a node, so none of them can delay the list of the nodes.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sandbox import machine, wire
from sandbox.cluster.node_agent import NodeAgent, environment_without_ray
from sandbox.cluster.node_report import inspect_in_subprocess

POLL_INTERVAL_S = 2.0
"""Seconds between two lists of the nodes."""
ANSWER_TIMEOUT_S = 10.0
"""A node counts as lost if its actor has not answered for this many seconds."""
RETRY_S = 30.0
"""Seconds before an actor whose constructor failed is created again."""
NODE_RESOURCE = "rstar_sandbox"
"""Custom resource of Ray. If any node with CPUs has this resource, nodes without it are not used."""
OBJECT_STORE_BYTES = 100 << 20
"""Bytes of the object store of a Ray that is started here. It is small because actors return only reports of less than
a kilobyte."""
TOKEN_BY_DEFAULT = (2, 59)
"""The first version of Ray that uses token authentication in a local cluster without being asked to."""
AUTH_MODE_VARIABLE = "RAY_AUTH_MODE"
MAX_REASON_CHARS = 500


class NodeActor:
    """The actor of one node: its agent and its report."""

    def __init__(self, secret: bytes, isolation: str, python: str) -> None:
        logging.basicConfig(level=logging.INFO)
        report = inspect_in_subprocess(isolation, python, environment_without_ray(os.environ))
        self._agent = NodeAgent(secret, get_node_ip_address())
        host, port = self._agent.address
        self._report = {**report, "host": host, "port": port}

    def report(self) -> dict[str, object]:
        if not self._agent.is_alive:
            os._exit(1)
        return self._report


class _Node:
    """The actor of one node, and the actor's last answer."""

    def __init__(self, node_id: str, start: dict[str, Any], namespace: str) -> None:
        self._node_id, self._start, self._namespace = node_id, start, namespace
        self._report: dict[str, object] | None = None
        self._reason = ""
        self._failed_at: float | None = None
        """Time at which the actor died and Ray did not restart it."""
        self._create_actor()

    def _create_actor(self) -> None:
        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": 0,
            "name": f"rstar-sandbox-{self._node_id[:12]}-{secrets.token_hex(4)}",
            "namespace": self._namespace,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._node_id, soft=False),
        }
        actor_class = ray.remote(NodeActor).options(**options)
        self._actor = actor_class.remote(self._start["secret"], self._start["isolation"], self._start["python"])
        self._answer = self._actor.report.remote()
        self._answered_at = time.monotonic()

    def poll(self) -> dict[str, Any]:
        """Return state, reason and report."""
        now = time.monotonic()
        if self._failed_at is not None and now - self._failed_at > RETRY_S:
            self._failed_at = None
            self._create_actor()
        if self._failed_at is None and ray.wait([self._answer], timeout=0)[0]:
            try:
                self._report, self._reason, self._answered_at = ray.get(self._answer), "", now
            except ActorDiedError as error:
                self._report, self._reason, self._failed_at = None, _reason(error), now
            except RayError as error:  # Ray restarts the actor
                self._report, self._reason = None, _reason(error)
            if self._failed_at is None:
                self._answer = self._actor.report.remote()
        if self._failed_at is not None:
            return {"state": "refused", "reason": self._reason, "report": None}
        if self._report is None:
            return {"state": "starting", "reason": self._reason, "report": None}
        if now - self._answered_at > ANSWER_TIMEOUT_S:
            reason = f"its actor has not answered for {now - self._answered_at:.0f} s"
            return {"state": "lost", "reason": reason, "report": None}
        return {"state": "ready", "reason": "", "report": self._report}

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)


class RayNodes:
    """All usable nodes of the cluster."""

    def __init__(self, start: dict[str, Any]) -> None:
        self._start = start
        self._namespace = f"rstar-sandbox-{secrets.token_hex(8)}"
        self._nodes: dict[str, _Node] = {}

    def poll(self) -> list[dict[str, Any]]:
        """Return the nodes with their states, and create an actor on each new node."""
        usable = _usable_nodes(ray.nodes())
        for node_id in self._nodes.keys() - {info["NodeID"] for info in usable}:
            self._nodes.pop(node_id).kill()
        listed = []
        for info in usable:
            node_id = info["NodeID"]
            if node_id not in self._nodes:
                self._nodes[node_id] = _Node(node_id, self._start, self._namespace)
            about = {
                "id": node_id,
                "name": f"{_name(info)} ({node_id[:8]})",
                "address": info["NodeManagerAddress"],
                "cpus": float(info["Resources"]["CPU"]),
            }
            listed.append({**about, **self._nodes[node_id].poll()})
        return listed

    def kill_actors(self) -> None:
        for node in self._nodes.values():
            node.kill()


def _usable_nodes(infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the living nodes with CPUs. If any of them has `NODE_RESOURCE`, return only those that have it.

    A node without CPUs is never used, not even while it is the only living node: a head without CPUs must not run calls
    while the other nodes are lost or have not joined yet.
    """
    usable = [info for info in infos if info["Alive"] and info["Resources"].get("CPU", 0) > 0]
    return [info for info in usable if NODE_RESOURCE in info["Resources"]] or usable


def _name(info: dict[str, Any]) -> str:
    """Return the node's name, if the operator has given one, or its host name."""
    name, address = str(info.get("NodeName", "")), info["NodeManagerAddress"]
    return name if name and name != address else str(info["NodeManagerHostname"] or address)


def _reason(error: Exception) -> str:
    """Return the line of Ray's error that has the reason. It is the last line that is neither an indented detail nor
    the general remark "The actor never ran"."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line[0].isspace()]
    lines = [line for line in lines if not line.startswith("The actor never ran")]
    return (lines[-1] if lines else type(error).__name__)[:MAX_REASON_CHARS]


def drive(sock: socket.socket) -> int:
    """Connect to Ray and send the list of nodes until the gateway closes the socket. Return an exit code."""
    start = _receive_start(sock)
    try:
        _connect(start["address"])
    except Exception as error:  # whatever Ray raises, the operator gets one line
        sock.sendall(wire.pack(["failed", f"--cluster ray={start['address']}: {_summary(error)}"]))
        return 1
    nodes = RayNodes(start)
    try:
        while True:
            sock.sendall(wire.pack(["nodes", nodes.poll()]))
            if select.select([sock], [], [], POLL_INTERVAL_S)[0]:
                return 0
    except OSError:  # the gateway has been killed
        return 0
    finally:
        nodes.kill_actors()
        ray.shutdown()


def _receive_start(sock: socket.socket) -> dict[str, Any]:
    unpacker = wire.Unpacker()
    while data := sock.recv(1 << 16):
        unpacker.feed(data)
        for _, start in unpacker:
            return dict(start)
    raise SystemExit(1)


def _connect(address: str) -> None:
    """Connect to Ray at `address`. If that is "auto" and no Ray runs on this machine, start one."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=address, **options)
    except ConnectionError:
        if address != "auto":
            raise
        version = tuple(int(part) for part in ray.__version__.split(".")[:2])
        if version < TOKEN_BY_DEFAULT and AUTH_MODE_VARIABLE not in os.environ:
            raise RuntimeError(
                f"no Ray runs here, and Ray {ray.__version__} would start without token authentication; set "
                f"{AUTH_MODE_VARIABLE}=token, or install Ray {'.'.join(map(str, TOKEN_BY_DEFAULT))} or later"
            ) from None
        ray.init(
            address="local",
            num_cpus=machine.granted_cores(),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **options,
        )


def _summary(error: Exception) -> str:
    """Return the message of an error of Ray in one line."""
    return " ".join(str(error).split())[:MAX_REASON_CHARS]
