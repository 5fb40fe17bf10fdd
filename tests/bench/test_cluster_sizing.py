"""The sizing in docs/cluster.md follows from the measured figures in docs/scaling.md."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
NODES, CORES = 64, 16


def measured(pattern: str) -> float:
    """Return the number that `pattern` captures in docs/scaling.md."""
    match = re.search(pattern, (DOCS / "scaling.md").read_text(encoding="utf-8"))
    assert match, f"docs/scaling.md no longer has {pattern!r}"
    return float(match[1].replace(",", ""))


def test_64_nodes_are_computed_from_the_measured_figures() -> None:
    call_ms = measured(r"real traffic: ([\d.]+) ms of CPU per call")
    burst_ms = measured(r"\| all at once \| 4,500 \|.*\| ([\d.]+) \|")
    idle_mib = measured(r"Memory: ([\d,]+) MiB without calls")
    slot_mib = round(measured(r"in total \(([\d,]+) of it for running calls\)\. A gateway") / (2 * 16))  # of two cores
    gateway_calls_per_s = measured(r"A gateway's core handles ([\d,]+) calls/s")
    call_bytes = measured(r"a call of the mix is ([\d,]+) bytes")
    cores = NODES * CORES
    calls_per_s = cores / (call_ms / 1000)
    rounded = f"{round(calls_per_s, -2):,.0f}"
    node_gib = (CORES / 2 * idle_mib + CORES * 16 * slot_mib) / 1024
    rows = (
        f"| {cores:,} |",
        f"at {call_ms:g} ms each | {rounded} |",
        f"| slots | {cores * 16:,} |",
        f"{CORES // 2} x {idle_mib:g} MiB, and {CORES * 16} slots of {slot_mib} MiB | {node_gib:.0f} GiB |",
        f"at the {burst_ms:.1f} ms each of a burst | {45_000 * burst_ms / 1000 / cores:.1f} s |",
        f"| share of a gateway's core at {rounded} calls/s | {100 * calls_per_s / gateway_calls_per_s:.0f} % |",
        f"at {call_bytes:g} bytes per call | {calls_per_s * call_bytes / 1e6:.0f} MB/s |",
        f"1 per {gateway_calls_per_s:,.0f} calls/s",
    )
    text = (DOCS / "cluster.md").read_text(encoding="utf-8")
    assert [row for row in rows if row not in text] == []
