"""Tests of the command bench.cluster: its arguments, its tables and sentences, and its networks. `tests/cluster` tests
the faults of nodes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from bench import cluster
from bench.cluster_parts import calls, faults
from bench.harness import requirements
from bench.servers import node_networks
from bench.servers.node_networks import NodeNetworks
from tests.bench.conftest import RefusedArguments

CALLS = {
    "local_per_s": 1200,
    "ray_per_s": 1100,
    "share": 0.917,
    "added_p50_ms": 0.6,
    "rounds": [{"local_p50_ms": 3.4, "ray_p50_ms": 4.0}],
}
FAULTS = {
    "calls": 30_000, "nodes": 4, "seconds": 180.2, "kills": 17, "cuts": 1, "cut_by": "network", "lost": 0, "doubled": 0,
    "mismatched": 0, "unavailable": 0, "retried": 300, "leftovers": [],
}  # fmt: skip


@pytest.mark.parametrize(("flag", "value"), [("--parts", "nodes"), ("--kill-every", "0"), ("--nodes", "0")])
def test_wrong_arguments_are_refused(flag: str, value: str, refused_arguments: RefusedArguments) -> None:
    assert flag in refused_arguments(cluster.main, flag, value)


def test_calls_are_shown_as_a_table_and_faults_as_a_sentence() -> None:
    table, sentence = cluster.tables({"calls": CALLS, "faults": FAULTS})
    assert table.rows == [
        ("executors of the gateway", "1,200", "3.40"),
        ("executors on one node of Ray", "1,100", "4.00"),
    ]
    assert sentence == (
        "30,000 calls over 4 nodes in 180 s, 17 nodes killed and 1 cut off (network): 0 lost, 0 doubled, 0 mixed up, "
        "0 `unavailable`, 300 retried."
    )


@pytest.mark.parametrize("changed", [{"share": 0.79}, {"added_p50_ms": 5.1}])
def test_a_slow_node_does_not_meet_the_requirements(changed: dict[str, float]) -> None:
    assert requirements.hold(calls.needed(CALLS))
    assert not requirements.hold(calls.needed(CALLS | changed))


@pytest.mark.parametrize("changed", [{"lost": 1}, {"doubled": 1}, {"mismatched": 1}, {"leftovers": ["a process"]}])
def test_a_call_that_is_lost_does_not_meet_the_requirements(changed: dict[str, object]) -> None:
    assert requirements.hold(faults.needed(FAULTS))
    assert not requirements.hold(faults.needed(FAULTS | changed))


@pytest.mark.skipif(not node_networks.are_available(), reason="needs root and ip(8) for network namespaces")
def test_a_network_can_be_cut_and_restored() -> None:
    with NodeNetworks() as networks:
        number, address = networks.add()
        assert _answers(address)
        networks.cut(number)
        assert not _answers(address)
        networks.restore(number)
        give_up_at = time.monotonic() + 20  # the link and the neighbour's entry need a moment
        while not _answers(address):
            assert time.monotonic() < give_up_at
        name = networks._name(number)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert name not in listed.split()


def _answers(address: str) -> bool:
    """Return whether packets come back. If they do, a port without a listener refuses the connection."""
    script = "import socket,sys; s=socket.socket(); s.settimeout(2); sys.exit(s.connect_ex((sys.argv[1], 9)) != 111)"
    return subprocess.run([sys.executable, "-c", script, address]).returncode == 0
